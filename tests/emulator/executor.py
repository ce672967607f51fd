"""EmulatorExecutor: the kernels' own sources, compiled by g++ and run on the CPU.

::

    executor = EmulatorExecutor()
    function = executor.load(KERNEL, spec)
    query = executor.upload(array)                     # between guard pages
    executor.launch(function, grid, threads, shared_bytes, PARAMS.pack(query=executor.pointer(query), ...))

A kernel's fault is an :class:`EmulatorError` that names the place in the source. Environment:

EMULATOR_SEED       order of threads and CTAs: 0 ascending, 1 descending, above that shuffled
EMULATOR_WORKERS    CTAs that run at once; default the number of cores
EMULATOR_SECONDS    time limit of a launch; default 120, in the debug mode 3600
EMULATOR_MODE       plain, debug (-O0, for gdb), races (in shared memory) or sanitize (see tests/emulator/sanitize.py)
EMULATOR_CACHE_DIR  where compiled kernels are kept
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedattn.errors import CompileError, UnsupportedError
from pagedattn.jit.sources import default_sources

from . import memory, toolchain

if TYPE_CHECKING:
    from pagedattn.jit.kernel import Kernel
    from pagedattn.jit.launch import Launch
    from pagedattn.jit.params import Layout
    from pagedattn.jit.sources import Sources
    from pagedattn.jit.spec import Spec


class EmulatorError(RuntimeError):
    """A kernel did what it must not; the message says what, which thread, and where in the source."""


@dataclass(frozen=True, eq=False)
class Function:
    """A loaded kernel."""

    name: str
    params: Layout
    library: ctypes.CDLL
    entry: int


class _Launch(ctypes.Structure):  # EmulatorLaunch in runtime.cpp
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_uint32),
        ("finds_races", ctypes.c_uint32),
        ("seconds", ctypes.c_double),
    ]


class EmulatorExecutor:
    """Executor (see :mod:`pagedattn.jit.launch`) that runs kernels on the CPU.

    Parameters
    ----------
    sources : Sources, optional
        Where the ``.cu`` files are; the package's own by default.
    mode : str, optional
        One of :data:`tests.emulator.toolchain.MODES`; by default EMULATOR_MODE, else plain.
    seed, workers, seconds : optional
        As the environment variables of the same names.
    """

    # What kernels may use here: all of sm_80, barriers and bulk copies of sm_90; no wgmma, tensor maps and clusters.
    arch = "sm_80"
    max_shared_bytes = 163 * 1024
    multiprocessors = 108

    def __init__(
        self,
        sources: Sources | None = None,
        mode: str | None = None,
        seed: int | None = None,
        workers: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self.sources = default_sources() if sources is None else sources
        self.mode = mode or os.environ.get("EMULATOR_MODE", "plain")
        self.seed = int(os.environ.get("EMULATOR_SEED", "0")) if seed is None else seed
        self.workers = int(os.environ.get("EMULATOR_WORKERS", os.cpu_count() or 1)) if workers is None else workers
        limit = "3600" if self.mode == "debug" else "120"  # someone may be looking
        self.seconds = float(os.environ.get("EMULATOR_SECONDS", limit)) if seconds is None else seconds
        if self.mode == "sanitize" and getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None) is None:
            raise EmulatorError("the sanitize mode needs a process with libasan: run python -m tests.emulator.sanitize")
        self._toolchain = toolchain.find(self.mode)
        self._functions: dict[tuple[Kernel[Any], Spec], Function] = {}
        self._runtime: ctypes.CDLL | None = None

    # ---- the Executor protocol

    def load(self, kernel: Kernel[Any], spec: Spec) -> Function:
        """Compile and load a kernel for a Spec, or find it loaded."""
        key = (kernel, spec)
        if key not in self._functions:
            path = self._compile(kernel, spec)
            self._load_runtime()
            library = ctypes.CDLL(str(path))
            entry = ctypes.cast(library.emulator_entry, ctypes.c_void_p).value or 0
            self._functions[key] = Function(kernel.expression(spec), kernel.params, library, entry)
        return self._functions[key]

    def compile_many(self, items: Iterable[tuple[Kernel[Any], Spec]]) -> None:
        """Compile those that are not loaded, in threads."""
        missing = [item for item in dict.fromkeys(items) if item not in self._functions]
        if len(missing) > 1:
            self._toolchain.prelude, self._toolchain.runtime  # noqa: B018  (built once, before the rest)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda item: self._compile(*item), missing))

    def prepare(self, launches: Iterable[Launch], stream: int) -> Callable[[], None]:
        """What runs kernels to their ends, one after the other."""
        launches = list(launches)

        def issue() -> None:
            for launch in launches:
                self.launch(launch.function, launch.grid, launch.block, launch.shared_bytes, launch.params)

        return issue

    def launch(
        self, function: Function, grid: tuple[int, int, int], block: int, shared_bytes: int, params: bytes
    ) -> None:
        """Run a kernel to its end."""
        if min(grid) == 0:
            return
        x, y, z = grid
        if max(y, z) > 65535 or x > 2**31 - 1 or x * y * z > 2**32 - 1:
            raise EmulatorError(f"{function.name}: grid {grid} is larger than a device's (2^31 - 1, 65535, 65535)")
        if not 0 < block <= 1024:
            raise EmulatorError(f"{function.name}: a CTA of {block} threads; a device has 1 to 1024")
        if len(params) != function.params.size:
            raise EmulatorError(f"{function.name}: {len(params)} bytes of params, expected {function.params.size}")
        request = _Launch(
            function.entry,
            params,
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(block, 1, 1),
            shared_bytes,
            self.seed,
            self.workers,
            self.mode == "races",
            self.seconds,
        )
        text = ctypes.create_string_buffer(1 << 16)
        address = ctypes.c_void_p()
        if self.mode == "sanitize":
            sys.stderr.write(_reports().take())  # what came before concerns no kernel
        failed = self._load_runtime().emulator_launch(
            ctypes.byref(request), text, ctypes.c_uint64(len(text)), ctypes.byref(address)
        )
        if self.mode == "sanitize" and (found := _reports().take()):
            first = found.lstrip("=\n").partition("\n=====")[0].partition("\nShadow bytes")[0]  # of as many as threads
            raise EmulatorError(f"{function.name}: {first.rstrip()}")
        if failed:
            raise EmulatorError(self._explain(function, text.value.decode(errors="replace"), address.value, params))
        if damage := memory.damage():
            raise EmulatorError(f"{function.name}: {damage}")

    # ---- memory of the device

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Array in guarded memory, every byte 0xFF: NaN, or -1."""
        return memory.empty(shape, dtype, self._at_start)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Array of zeros in guarded memory."""
        return memory.zeros(shape, dtype, self._at_start)

    def upload(self, array: np.ndarray) -> np.ndarray:
        """Copy an array into guarded memory, with its strides."""
        return memory.upload(array, self._at_start)

    @property
    def _at_start(self) -> bool:
        return self.seed % 2 == 1  # odd seeds guard the byte before a buffer, even ones the byte behind it

    download = staticmethod(memory.download)
    pointer = staticmethod(memory.pointer)

    # ---- ours

    def _compile(self, kernel: Kernel[Any], spec: Spec) -> Path:
        if any(name.endswith("wgmma.cuh") for name in self.sources.headers(kernel.stem)):
            raise UnsupportedError(f"{kernel.stem}: has warpgroup products, which the emulator does not have")
        expression = kernel.expression(spec)
        text = (
            f"{kernel.translation_unit(spec, self.sources)}"
            f'#line 1 "{kernel.stem}.entry"\n'
            f'extern "C" EMULATOR_API void emulator_entry(const void* params) {{\n'
            f"  {expression}(*static_cast<const {kernel.params.name}*>(params));\n"
            f"}}\n"
        )
        try:
            sources = self.sources
            headers = {name: sources._read(sources.include_dir / name) for name in sources.headers(kernel.stem)}
            return self._toolchain.kernel(kernel.stem, text, headers, sources.include_dir, sources.root)
        except toolchain.BuildError as error:
            raise CompileError(kernel.stem, str(spec), self.arch, str(error), str(self._toolchain.cache)) from None

    def _load_runtime(self) -> ctypes.CDLL:
        if self._runtime is None:
            self._runtime = ctypes.CDLL(str(self._toolchain.runtime))
        return self._runtime

    def _explain(self, function: Function, text: str, address: int | None, params: bytes) -> str:
        lines = text.splitlines()
        if address is not None:
            lines[0] += self._whose(function, address, params)
        explained: list[str] = []
        for is_stack, group in itertools.groupby(lines, lambda line: line.startswith("  frame ")):
            part = list(group)
            explained += self._source_lines(function, [line.split()[1:] for line in part]) if is_stack else part
        return f"{function.name}: " + "\n".join(explained)

    def _source_lines(self, function: Function, frames: list[list[str]]) -> list[str]:
        """Turn frames inside the kernel into "  function at file:line", inlined calls included."""
        offsets = [f"{int(offset, 16) - 1:#x}" for path, offset in frames if path == function.library._name]
        command = ["addr2line", "-Cfipe", function.library._name, *offsets]
        if not offsets or shutil.which(command[0]) is None:
            return [f"  {function.library._name} {offset}" for offset in offsets]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line for line in output.splitlines() if not re.search(f"emulator_entry|{toolchain.INCLUDE}", line)]
        return [f"  {re.sub('^ ?.inlined by. ', '', line).replace(f'{self.sources.root}/', '')}" for line in lines]

    def _whose(self, function: Function, address: int, params: bytes) -> str:
        near = memory.nearest(address)
        if near is None:
            return ""
        block, offset = near
        names = [
            name
            for name, value in _pointers(np.frombuffer(params, function.params.numpy)[0])
            if block.start <= value <= block.start + block.nbytes and value
        ]
        where = f"{-offset} bytes before" if offset < 0 else f"{offset - block.nbytes} bytes past the end of"
        if 0 <= offset < block.nbytes:
            where = f"{offset} bytes into"
        return f", {where} the {block.nbytes}-byte buffer of {' and '.join(names) or 'no parameter'}"


class _SanitizerReports:
    """What the sanitizers' runtimes report from now on, instead of to stderr."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._read: dict[Path, int] = {}
        for path in {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "san.so" in line}:
            prefix = f"{self._directory.name}/{Path(path).name}"
            redirect = ctypes.CDLL(path)["__sanitizer_set_report_path"]
            redirect(prefix.encode())

    def take(self) -> str:
        """Reports since the last call."""
        text = ""
        for path in sorted(Path(self._directory.name).iterdir()):
            new = path.read_bytes()[self._read.get(path, 0) :]
            self._read[path] = self._read.get(path, 0) + len(new)
            text += new.decode(errors="replace")
        return text


_reports = functools.cache(_SanitizerReports)


def _pointers(record: Any, prefix: str = "") -> list[tuple[str, int]]:
    """Names and values of the pointers in a packed Params."""
    found = []
    for name in record.dtype.names:
        value, kind = record[name], record.dtype[name]
        if kind.names:
            found += _pointers(value, f"{prefix}{name}.")
        elif kind == np.uint64:
            found.append((prefix + name, int(value)))
    return found
