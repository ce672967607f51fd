"""Compiler: the one place that compiles, and the caches before it.

No driver and no GPU is needed, so every kernel can be compiled for every architecture anywhere.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedattn.errors import CompileError, MissingDependencyError, UnsupportedError
from pagedattn.jit import cuda
from pagedattn.jit.disk_cache import Binary, DiskCache, write_whole
from pagedattn.jit.sources import Sources, default_sources
from pagedattn.jit.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagedattn.jit.kernel import Kernel, S

logger = logging.getLogger(__name__)

OPTIONS = (
    "-std=c++20",  # Specs are template arguments of class type
    "-default-device",  # a function without a mark is a device function
    # Floating point stays as IEEE 754 says: the kernels rely on infinities and NaN (-inf is a masked score), and a
    # subnormal that a test puts into a cache must come out again. Where the fast instruction is wanted, as for exp2,
    # the source says so. So neither --use_fast_math nor -ftz=true.
)

# Dynamic shared memory that a CTA may have, by compute capability.
MAX_SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}

# wgmma and setmaxnreg exist only in the variant for one chip; its code runs on no other.
_VARIANTS = {90: "sm_90a"}
MIN_CAPABILITY = 80


def arch_of(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Return the architecture to compile for on a device.

    Parameters
    ----------
    capability : tuple of int
        The device's compute capability.
    supported : sequence of int
        What NVRTC can compile for, as 80 or 120.
    """
    major, minor = capability
    wanted = 10 * major + minor
    if wanted < MIN_CAPABILITY:
        raise UnsupportedError(
            f"device: expected compute capability {MIN_CAPABILITY / 10} or higher, whose instructions the kernels use, "
            f"got {major}.{minor}"
        )
    # Code for 8.6 runs on 8.9: within one major version an older minor will do.
    usable = [arch for arch in supported if arch // 10 == major and arch <= wanted]
    if not usable:
        raise MissingDependencyError(
            f"NVRTC compiles for none of compute capability {major}.x, which this device ({major}.{minor}) needs; "
            'a newer one does: pip install -U "pagedattn[cuda13]"'
        )
    best = max(usable)
    return _VARIANTS.get(best, f"sm_{best}")


class Compiler:
    """Compiles kernels, each once: kept in memory, and on disk for the next process.

    Parameters
    ----------
    sources : Sources, optional
        Where the kernels are; by default those of this package.
    cache : DiskCache, optional
        By default the user's.
    options : sequence of str, optional
        Options of NVRTC after :data:`OPTIONS`, as ``("-lineinfo",)``.

    Attributes
    ----------
    compilations : int
        How often NVRTC ran; a warm process leaves it as it is.
    """

    def __init__(
        self, sources: Sources | None = None, cache: DiskCache | None = None, options: Sequence[str] = ()
    ) -> None:
        self.sources = sources or default_sources()
        self.cache = cache or DiskCache()
        self.options = (*OPTIONS, *options)
        self.compilations = 0
        self._lock = threading.Lock()
        self._binaries: dict[tuple[Kernel[Any], Spec, str], Binary] = {}
        self._building: dict[tuple[Kernel[Any], Spec, str], threading.Lock] = {}

    def compile(self, kernel: Kernel[S], spec: S, arch: str) -> Binary:
        """Return the kernel for this Spec and architecture, from memory, from disk or from NVRTC."""
        key = (kernel, spec, arch)
        binary = self._binaries.get(key)
        if binary is None:
            with self._lock:
                building = self._building.setdefault(key, threading.Lock())
            with building:  # a second thread that wants the same kernel waits for the first
                binary = self._binaries.get(key)
                if binary is None:
                    binary = self._binaries[key] = self._from_disk_or_build(kernel, spec, arch)
        return binary

    def compile_many(self, items: Iterable[tuple[Kernel[Any], Spec]], arch: str, jobs: int = 2) -> list[Binary]:
        """Compile several kernels, ``jobs`` at a time in threads."""
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            return list(pool.map(lambda item: self.compile(item[0], item[1], arch), items))

    def entry_name(self, kernel: Kernel[S], spec: S, arch: str) -> str:
        """Name of the entry on disk: it changes with anything that could change the binary."""
        return self._entry_name(kernel, kernel.translation_unit(spec, self.sources), arch)

    def _entry_name(self, kernel: Kernel[Any], unit: str, arch: str) -> str:
        nvrtc = cuda.nvrtc()
        parts = (unit, *self.options, arch, repr(nvrtc.version), repr(nvrtc.header_version))
        return f"{kernel.stem}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}.kernel"

    def _from_disk_or_build(self, kernel: Kernel[S], spec: S, arch: str) -> Binary:
        unit = kernel.translation_unit(spec, self.sources)
        name = self._entry_name(kernel, unit, arch)
        binary = self.cache.get(name)
        if binary is None:
            binary = self._build(kernel, spec, arch, unit, name)
            self.cache.put(name, binary)
        return binary

    def _build(self, kernel: Kernel[S], spec: S, arch: str, unit: str, name: str) -> Binary:
        expression = kernel.expression(spec)
        logger.info("compiling %s for %s", expression, arch)
        start = time.perf_counter()
        options = (*self.options, f"-arch={arch}", f"-I{self.sources.include_dir}")
        try:
            cubin, entry = cuda.nvrtc().compile(unit, f"{kernel.stem}.cu", expression, options)
        except cuda.CompilationFailed as error:
            path = self._dump(f"{name}.cu", unit)
            raise CompileError(kernel.stem, str(spec), arch, str(error), str(path)) from None
        with self._lock:
            self.compilations += 1
        logger.debug("compiled %s for %s in %.2f s", expression, arch, time.perf_counter() - start)
        return Binary(cubin, entry)

    def _dump(self, name: str, unit: str) -> Path:
        """Write a source that did not compile for the user to read: in the cache, else in the temporary folder."""
        folders = (self.cache.directory, Path(tempfile.gettempdir()) / "pagedattn")
        for folder in folders:
            if folder is not None:
                path = folder / "failed" / name
                try:
                    write_whole(path, unit.encode())
                except OSError:
                    continue
                return path
        return Path("(not written)")


@functools.cache
def default_compiler() -> Compiler:
    """Return the process's compiler, which all executors share."""
    return Compiler()
