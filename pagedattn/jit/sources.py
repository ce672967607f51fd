"""Sources: find ``kernels_cu``, follow the includes of a kernel and digest what it is made of.

A compiled kernel is cached under a digest of its text, which would miss a change in a header; so headers of this
package are included only as ``#include <pagedattn/...>``, and their text is digested with the kernel's.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

# The rule is enforced, not assumed: a quoted include would slip past the digest.
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<(?P<angled>[^>\n]+)>|"(?P<quoted>[^"\n]+)")', re.MULTILINE)
_OURS = "pagedattn/"


class Sources:
    """The CUDA sources below one root: ``kernels/<stem>.cu`` and ``include/pagedattn/**/*.cuh``.

    Files are read once and kept; make another object to see a change.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.include_dir = self.root / "include"
        self._texts: dict[Path, str] = {}
        self._digests: dict[str, str] = {}

    def kernel(self, stem: str) -> str:
        """Text of ``kernels/<stem>.cu``."""
        return self._read(self.root / "kernels" / f"{stem}.cu")

    def headers(self, stem: str) -> tuple[str, ...]:
        """Names, as in ``#include <pagedattn/...>``, of every header that a kernel reaches, sorted."""
        reached: set[str] = set()
        pending = self._includes(f"kernels/{stem}.cu", self.kernel(stem))
        while pending:
            name = pending.pop()
            if name not in reached:
                reached.add(name)
                pending += self._includes(f"include/{name}", self._read(self.include_dir / name))
        return tuple(sorted(reached))

    def digest(self, stem: str) -> str:
        """Digest of a kernel's text and of every header it reaches."""
        if stem not in self._digests:
            files = [(name, self._read(self.include_dir / name)) for name in self.headers(stem)]
            self._digests[stem] = _digest([(f"kernels/{stem}.cu", self.kernel(stem)), *files])
        return self._digests[stem]

    def files(self) -> tuple[Path, ...]:
        """Every source file, relative to the root, sorted."""
        return tuple(sorted(p.relative_to(self.root) for p in self.root.rglob("*") if p.suffix in (".cu", ".cuh")))

    def digest_all(self) -> str:
        """Digest of every source file, whether a kernel reaches it or not."""
        return _digest([(path.as_posix(), self._read(self.root / path)) for path in self.files()])

    def _read(self, path: Path) -> str:
        if path not in self._texts:
            self._texts[path] = path.read_text(encoding="utf-8")
        return self._texts[path]

    def _includes(self, file: str, text: str) -> list[str]:
        names = []
        for match in _INCLUDE.finditer(text):
            if match["quoted"]:
                raise ValueError(f'{file}: includes "{match["quoted"]}", which is not digested; write <pagedattn/...>')
            if match["angled"].startswith(_OURS):
                names.append(match["angled"])
        return names


def _digest(files: list[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, text in files:
        for part in (name.encode(), text.encode()):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()


@functools.cache
def default_sources() -> Sources:
    """Return the sources that belong to this package: inside it when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")
    for candidate in candidates:
        if candidate.is_dir():
            return Sources(candidate)
    raise FileNotFoundError(f"the CUDA sources are missing: neither {candidates[0]} nor {candidates[1]} exists")
