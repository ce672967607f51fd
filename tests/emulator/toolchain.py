"""Find g++ and the CUDA headers, and build shared objects that are cached by digest."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = (HERE / "runtime.cpp", HERE / "collectives.cpp", HERE / "races.h")

# Signed char, type punning and contraction are what NVRTC does; visibility and no-gnu-unique keep each kernel's static
# shared memory its own.
_COMMON = (
    "-std=c++20",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
)
# For the places in messages: addr2line misreads #line in version 5, and equal code of two branches must not be merged.
_LINES = ("-g1", "-gdwarf-4", "-fno-crossjumping", "-fno-tree-tail-merge")
MODES = {
    "plain": ("-O2", *_LINES),
    "debug": ("-O0", "-g", "-gdwarf-4"),
    # Calls __tsan_read4 and the like, which are the runtime's own: libtsan takes no part.
    "races": ("-O2", *_LINES, "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
    # Guard pages find null and wild pointers, and checking for them would double the time to compile.
    "sanitize": (
        *("-O1", *_LINES, "-fsanitize=address,undefined", "-fsanitize-recover=all"),
        "-fno-sanitize=vptr,null,pointer-overflow",
    ),
}


class ToolchainError(Exception):
    """Something that building needs is absent; the message says what and where it was looked for."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler, the CUDA headers and a mode of :data:`MODES`.

    Attributes
    ----------
    compiler : str
        Path of g++.
    cuda_include : Path
        Directory of ``cuda_fp16.h``.
    mode : str
    cache : Path
        Where shared objects are kept.
    """

    compiler: str
    cuda_include: Path
    mode: str
    cache: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return (*_COMMON, *_machine_flags(), *MODES[self.mode])

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all that every build depends on but its flags: compiler, the emulator's files, the CUDA headers."""
        version = subprocess.run([self.compiler, "--version"], capture_output=True, text=True, check=True).stdout
        parts = [version, str(self.cuda_include)]
        files = [*RUNTIME, *(path for path in sorted(INCLUDE.rglob("*")) if path.is_file())]
        files += [self.cuda_include / name for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")]
        return _digest(*parts, *(path.read_text(encoding="utf-8", errors="replace") for path in files))

    @functools.cached_property
    def runtime(self) -> Path:
        """The runtime's shared object. Never sanitized itself: it calls the sanitizer's interface when there is one."""
        optimize = MODES["debug"] if self.mode == "debug" else (*MODES["plain"], "-O3")
        flags = (*_COMMON, *_machine_flags(), *optimize, "-Wall", "-Wextra", "-pthread")
        target = self.cache / f"runtime-{_digest(self.digest, *flags)[:16]}.so"
        sources = [str(path) for path in RUNTIME if path.suffix == ".cpp"]
        link = ("-shared", "-Wl,-Bsymbolic", f"-Wl,-soname,{target.name}")
        arguments = (*flags, *self._includes, *sources, *link)
        return self._build(target, arguments, HERE)

    @functools.cached_property
    def prelude(self) -> Path:
        """The CUDA vocabulary, precompiled: a header that g++ replaces by the ``.gch`` beside it."""
        directory = self.cache / f"prelude-{_digest(self.digest, *self.flags)[:16]}"
        header = directory / "cuda.h"
        directory.mkdir(parents=True, exist_ok=True)
        if not header.exists():
            _write(header, "#include <emulator/cuda.h>\n")
        arguments = (*self.flags, *self._includes, "-x", "c++-header", str(header))
        self._build(directory / "cuda.h.gch", arguments, directory)
        return header

    def kernel(self, name: str, text: str, headers: Mapping[str, str], include_dir: Path, directory: Path) -> Path:
        """Compile a kernel's translation unit, or find it compiled.

        Parameters
        ----------
        name : str
            Start of the file's name.
        text : str
            The translation unit. Its first line digests the headers it includes.
        headers : mapping of str to str
            Texts of those headers, by the name in the ``#include``: the files may be changing just now.
        include_dir : Path
            Where the headers came from, for messages and debuggers.
        directory : Path
            What relative names in ``#line`` are relative to, so that a debugger finds the source.
        """
        target = self.cache / f"{name}-{_digest(self.digest, *self.flags, text)[:16]}.so"
        if target.exists():
            os.utime(target)
            return target
        _forget_old(self.cache)
        source = target.with_suffix(".cpp")
        self.cache.mkdir(parents=True, exist_ok=True)
        _write(source, text)
        snapshot = self.cache / f"headers-{_digest(*headers, *headers.values())[:16]}"
        for header, content in headers.items():
            if not (snapshot / header).exists():
                (snapshot / header).parent.mkdir(parents=True, exist_ok=True)
                _write(snapshot / header, content)
        arguments = (
            *(*self.flags, f"-ffile-prefix-map={snapshot}={include_dir}", "-include", str(self.prelude)),
            *(*self._includes, "-I", str(snapshot), "-x", "c++", str(source)),
        )
        if self.mode == "races":
            compiled = self._build(target.with_suffix(".o"), (*arguments, "-c"), directory)
            self._build(target, (str(compiled), *self._link()), directory)  # without libtsan
            compiled.unlink(missing_ok=True)
        else:
            self._build(target, (*arguments, *self._link()), directory)
        source.unlink(missing_ok=True)  # stays for a look at what did not compile
        return target

    @property
    def _includes(self) -> tuple[str, ...]:
        return ("-I", str(INCLUDE), "-isystem", str(self.cuda_include))

    def _link(self) -> tuple[str, ...]:
        return ("-x", "none", "-shared", str(self.runtime), f"-Wl,-rpath,{self.cache}")

    def _build(self, target: Path, arguments: tuple[str, ...], directory: Path) -> Path:
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed into place, so that processes may share the cache.
        with tempfile.NamedTemporaryFile(dir=target.parent, suffix=target.suffix, delete=False) as aside:
            pass
        built = subprocess.run(
            [self.compiler, *arguments, "-o", aside.name], cwd=directory, capture_output=True, text=True, check=False
        )
        if built.returncode:
            os.unlink(aside.name)
            raise BuildError(built.stderr)
        os.replace(aside.name, target)
        return target


class BuildError(Exception):
    """The compiler refused; the message is its output."""


def find(mode: str = "plain") -> Toolchain:
    """Return the toolchain of this machine; ToolchainError when it has none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ToolchainError("the emulator needs g++ 12 or later: no g++ on PATH, and CXX names none")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ToolchainError(f"the emulator runs on x86-64 Linux, not on {platform.machine()} {platform.system()}")
    root = os.environ.get("EMULATOR_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Toolchain(compiler, find_cuda_headers(), mode, Path(root) if root else base / "pagedattn-emulator")


def find_cuda_headers() -> Path:
    """Directory of cuda_fp16.h: of the runtime-header wheels, else of a toolkit."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    toolkit = os.environ.get("CUDA_PATH", "/usr/local/cuda")
    candidates = [site / "cuda_runtime/include", site / "cu13/include", Path(toolkit) / "include"]
    for candidate in candidates:
        if (candidate / "cuda_fp16.h").exists():
            return candidate
    raise ToolchainError(
        "the emulator needs the CUDA headers: no cuda_fp16.h in "
        + ", ".join(map(str, candidates))
        + "; pip install nvidia-cuda-runtime-cu12"
    )


def missing() -> str | None:
    """Why kernels cannot be emulated on this machine, or None."""
    try:
        find()
    except ToolchainError as error:
        return str(error)
    return None


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """x86-64-v3 where the processor has it: vectors of 8 floats, and a fused multiply-add as the GPU's."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "f16c", "bmi2"} <= flags else ()


@functools.cache
def _forget_old(cache: Path) -> None:
    """Delete what no test run has used for a week: each change of a header leaves the kernels compiled before it."""
    for path in cache.glob("*"):
        try:
            if time.time() - path.stat().st_mtime > 7 * 24 * 3600 and not path.name.startswith(("prelude", "runtime")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:  # by another process
            pass


def _digest(*parts: str) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=path.suffix, delete=False, encoding="utf-8") as aside:
        aside.write(text)
    os.replace(aside.name, path)
