"""What runs a call on one device: its architecture, its executor, its memory and its current stream."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

from pagedattn import env
from pagedattn.jit import cuda
from pagedattn.jit.launch import Executor, cuda_executor


class Runtime(Protocol):
    """One device.

    Attributes
    ----------
    arch : int
        Compute capability, 90 for 9.0; 0 for the CPU.
    executor : Executor or None
        What compiles and launches kernels; None on the CPU.
    """

    @property
    def arch(self) -> int: ...

    @property
    def executor(self) -> Executor[Any] | None: ...

    def stream(self) -> int:
        """Handle of the stream that work is issued to."""

    def is_capturing(self) -> bool:
        """Whether that stream records a graph, so that nothing may be allocated, read back or compiled."""

    def allocate(self, size: int) -> Any:
        """Uninitialised device memory of ``size`` bytes, aligned to 256."""

    def address(self, buffer: Any) -> int:
        """Address of what `allocate` returned."""

    def active(self, stream: int | None = None) -> AbstractContextManager[Any]:
        """Make the device current, and on it a stream, by its handle; those before are restored at exit."""


_NOTHING: AbstractContextManager[Any] = nullcontext()


class HostRuntime:
    """The CPU, where the NumPy backend runs."""

    arch = 0
    executor = None

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def allocate(self, size: int) -> Any:
        return None

    def address(self, buffer: Any) -> int:
        return 0

    def active(self, stream: int | None = None) -> AbstractContextManager[Any]:
        return _NOTHING


class _Thread(threading.local):
    """What a thread has done on a device."""

    has_context = False


class CudaRuntime:
    """One GPU through CuPy: its memory pool, and the calling thread's current stream."""

    def __init__(self, device_id: int) -> None:
        cuda.require_device()
        self._cupy = cuda.cupy()
        self._id = device_id
        self._device = self._cupy.cuda.Device(device_id)
        self._current_device = self._cupy.cuda.runtime.getDevice
        self._thread = _Thread()
        self._current_stream = self._cupy.cuda.get_current_stream
        self.arch = int(self._device.compute_capability)
        self.executor: Executor[Any] = cuda_executor(device_id)

    def stream(self) -> int:
        return int(self._current_stream().ptr)

    def is_capturing(self) -> bool:
        return bool(self._current_stream().is_capturing())

    def allocate(self, size: int) -> Any:
        return self._cupy.cuda.alloc(size)

    def address(self, buffer: Any) -> int:
        return int(buffer.ptr)

    def active(self, stream: int | None = None) -> AbstractContextManager[Any]:
        if (
            self._thread.has_context
            and self._current_device() == self._id
            and (stream is None or stream == self._current_stream().ptr)
        ):
            return _NOTHING
        return self._made_current(stream)

    @contextmanager
    def _made_current(self, stream: int | None) -> Iterator[None]:
        with self._device, _NOTHING if stream is None else self._cupy.cuda.ExternalStream(stream, self._id):
            # Binds the device's context to this thread, which the driver's calls need.
            self._cupy.cuda.runtime.setDevice(self._id)
            self._thread.has_context = True
            yield


HOST = HostRuntime()
# Set by `pagedattn.testing.emulate`: arrays in host memory then take the CUDA backends, run on the CPU.
_emulator: Runtime | None = None


@cache
def cuda_runtime(device_id: int) -> CudaRuntime:
    """Runtime of a GPU, made once."""
    return CudaRuntime(device_id)


def runtime_of(device: str) -> Runtime:
    """Runtime of a device by its name: "cpu", "cuda:N", or "emulated" for the one that `use_emulator` was given."""
    if device == "cpu":
        return HOST
    if device == "emulated" and _emulator is not None:
        return _emulator
    return cuda_runtime(int(device.removeprefix("cuda:")))


def use_emulator(runtime: Runtime | None) -> Runtime | None:
    """Run arrays in host memory on this runtime instead of the NumPy backend; returns the one before."""
    global _emulator
    before, _emulator = _emulator, runtime
    return before


def emulated() -> Runtime | None:
    """The runtime of `use_emulator` that is in force, be it through PAGEDATTN_EMULATE."""
    _emulator_of_environment()
    return _emulator


@cache
def _emulator_of_environment() -> None:
    if env.emulate():
        use_emulator(importlib.import_module("pagedattn.testing").emulator())
