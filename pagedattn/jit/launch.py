"""Executors: load a kernel for a Spec, and launch it.

Everything above this module talks to the :class:`Executor` protocol alone; :class:`CudaExecutor` is the one that runs
on a GPU, and the tests have another that runs the same sources on the CPU.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pagedattn.errors import PagedAttentionError, UnsupportedError
from pagedattn.jit import cuda, driver
from pagedattn.jit.compiler import Compiler, arch_of, default_compiler
from pagedattn.jit.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagedattn.jit.kernel import Kernel, S

Function = TypeVar("Function", covariant=True)

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_PARAMS_BYTES = 4096


class Launch(NamedTuple):
    """One kernel launch, for `Executor.prepare`.

    Attributes
    ----------
    function : what `Executor.load` returned
    grid : three int
        CTAs along x, y and z. Nothing runs when one of them is 0.
    block : int
        Threads of a CTA, all along x: ``kernel.threads(spec)``.
    shared_bytes : int
        Bytes of dynamic shared memory: ``kernel.shared_bytes(spec)``.
    params : bytes
        What ``kernel.params.pack(...)`` returned.
    starts_early : bool
        Where the device can, it may start before what is ahead of the call has ended, whoever's that is: its kernel
        waits before it reads or writes anything, and before it lets the next one start.
    """

    function: Any
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    params: bytes
    starts_early: bool = False

    @property
    def stem(self) -> str:
        """Name of the kernel, without its Spec."""
        return str(self.function.name).partition("<")[0]


Compilation = tuple["Kernel[Any]", Spec]


class Executor(Protocol[Function]):
    """What runs kernels. ``Function`` is its own handle of a loaded kernel, opaque to callers."""

    @property
    def arch(self) -> str:
        """Architecture the kernels are compiled for, as ``sm_90a``."""
        ...

    @property
    def max_shared_bytes(self) -> int:
        """Dynamic shared memory that a CTA may have."""
        ...

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the device."""
        ...

    def load(self, kernel: Kernel[S], spec: S) -> Function:
        """Return the kernel for this Spec, compiled and loaded; quick from the second time on.

        Loading may allocate. So while the current stream records a graph, a kernel that is not loaded is an error.
        """
        ...

    def compile_many(self, items: Iterable[Compilation]) -> None:
        """Compile kernels that are going to be loaded, side by side where that is quicker."""
        ...

    def prepare(self, launches: Iterable[Launch], stream: int) -> Callable[[], None]:
        """Check launches and lay them out; what is returned issues them, one after the other, to a stream.

        It may be called any number of times and by several threads, while the device is current.
        """
        ...


class Recorder:
    """An executor that runs nothing: ``loaded`` has what a plan would load, in order and as often."""

    def __init__(self, arch: str, max_shared_bytes: int, multiprocessors: int) -> None:
        self.arch, self.max_shared_bytes, self.multiprocessors = arch, max_shared_bytes, multiprocessors
        self.loaded: list[Compilation] = []

    def load(self, kernel: Kernel[Any], spec: Spec) -> None:
        self.loaded.append((kernel, spec))

    def compile_many(self, items: Iterable[Compilation]) -> None:
        pass

    def prepare(self, launches: Iterable[Launch], stream: int) -> Callable[[], None]:
        raise AssertionError("planning launches nothing")


@dataclass(frozen=True, eq=False)
class CudaFunction:
    """A kernel loaded on one device: a ``CUfunction``, and the module that must outlive it.

    ``overlaps`` says that it may start before the kernel ahead of it in a call has ended, or what is ahead of the call
    where its launch starts early.
    """

    name: str
    pointer: int
    module: Any = field(repr=False)
    overlaps: bool = False


class CudaExecutor:
    """Runs kernels on one GPU through CuPy and the driver.

    Safe to share between threads. Use :func:`cuda_executor` for the one of a device, so kernels are loaded once.

    Parameters
    ----------
    device_id : int
        The CUDA device.
    compiler : Compiler, optional
        By default the process's.

    Attributes
    ----------
    arch : str
        Architecture its kernels are compiled for.
    max_shared_bytes, multiprocessors : int
        Dynamic shared memory that a CTA may have on this device, and its multiprocessors.
    """

    def __init__(self, device_id: int, compiler: Compiler | None = None) -> None:
        cuda.require_device()
        self.device_id = device_id
        self.compiler = compiler or default_compiler()
        self._api = cuda.Api()
        capability = self._api.capability(device_id)
        self.arch = arch_of(capability, cuda.nvrtc().archs)
        self._can_overlap = (
            capability >= driver.OVERLAP_CAPABILITY and self._api.driver_version() >= driver.OVERLAP_DRIVER
        )
        self.max_shared_bytes = self._api.max_shared_bytes(device_id)
        self.multiprocessors = self._api.multiprocessors(device_id)
        self._functions: dict[tuple[Kernel[Any], Spec], CudaFunction] = {}
        self._lock = threading.Lock()

    def load(self, kernel: Kernel[S], spec: S) -> CudaFunction:
        """Return the kernel for this Spec, compiled and loaded; see :meth:`Executor.load`."""
        function = self._functions.get((kernel, spec))
        if function is None:
            if self._api.current_stream().is_capturing():
                raise PagedAttentionError(
                    f"graph capture: {kernel.stem} was not loaded before the capture began, and these arrays need it; "
                    "run the same call once on this stream first, with arrays that are aligned alike."
                )
            binary = self.compiler.compile(kernel, spec, self.arch)
            with self._lock:  # one module a kernel, and no two threads in one function's attributes
                function = self._functions.get((kernel, spec))
                if function is None:
                    function = self._load(kernel, spec, binary.cubin, binary.entry)
                    self._functions[kernel, spec] = function
        return function

    def _load(self, kernel: Kernel[S], spec: S, cubin: bytes, entry: str) -> CudaFunction:
        shared_bytes = kernel.shared_bytes(spec)
        if shared_bytes > self.max_shared_bytes:
            raise UnsupportedError(
                f"{kernel.expression(spec)}: needs {shared_bytes} bytes of shared memory a CTA, "
                f"and device {self.device_id} has {self.max_shared_bytes}"
            )
        with self._api.device(self.device_id):
            module, pointer = self._api.load(cubin, entry, self.max_shared_bytes)
        return CudaFunction(kernel.expression(spec), pointer, module, kernel.waits_itself and self._can_overlap)

    def compile_many(self, items: Iterable[Compilation]) -> None:
        """Compile those that are not loaded, in threads; see :meth:`Executor.compile_many`."""
        missing = [item for item in dict.fromkeys(items) if item not in self._functions]
        if len(missing) > 1:
            self.compiler.compile_many(missing, self.arch, len(missing))

    def prepare(self, launches: Iterable[Launch], stream: int) -> Callable[[], None]:
        """Check launches and lay them out for the driver; see :meth:`Executor.prepare`."""
        # The modules are kept with what runs their code. What lies ahead of the first launch is not ours, so all of it
        # has to end before anything is read: most kernels read lengths and block tables before they wait. One that
        # starts early does not.
        ready: list[tuple[driver.ReadyLaunch, CudaFunction]] = []
        for launch in launches:
            if 0 not in launch.grid:
                overlaps = launch.function.overlaps and (launch.starts_early or bool(ready))
                ready.append((_ready(launch, stream, overlaps), launch.function))

        def issue() -> None:
            for launch, _ in ready:
                status = launch.issue()
                if status:
                    raise launch.refusal(status)

        return issue

    def launch(
        self, function: CudaFunction, grid: tuple[int, int, int], block: int, shared_bytes: int, params: bytes
    ) -> None:
        """Issue one launch to the device's current stream."""
        with self._api.device(self.device_id):
            self.prepare([Launch(function, grid, block, shared_bytes, params)], int(self._api.current_stream().ptr))()


def _ready(launch: Launch, stream: int, overlaps: bool) -> driver.ReadyLaunch:
    function, grid, block, shared_bytes, params, _ = launch
    if not all(0 < extent <= most for extent, most in zip(grid, MAX_GRID, strict=True)):
        raise UnsupportedError(
            f"{function.name}: the grid {grid} is beyond the limits {MAX_GRID}; split the call into smaller ones"
        )
    if len(params) > MAX_PARAMS_BYTES:
        raise ValueError(f"{function.name}: {len(params)} bytes of parameters, the limit is {MAX_PARAMS_BYTES}")
    return driver.ReadyLaunch(function.name, function.pointer, grid, block, shared_bytes, params, stream, overlaps)


@functools.cache
def cuda_executor(device_id: int) -> CudaExecutor:
    """Return the executor of a device."""
    return CudaExecutor(device_id)
