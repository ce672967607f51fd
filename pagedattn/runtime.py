"""What runs a call on one device: its architecture, its executor, its memory and its current stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from pagedattn.errors import UnsupportedError


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
    def executor(self) -> Any: ...

    def stream(self) -> int:
        """Identity of the stream that work is issued to."""

    def is_capturing(self) -> bool:
        """Whether that stream records a graph, so that nothing may be allocated, read back or compiled."""

    def allocate(self, size: int) -> Any:
        """Uninitialised device memory of ``size`` bytes."""

    def address(self, buffer: Any) -> int:
        """Address of what `allocate` returned."""

    def active(self) -> AbstractContextManager[Any]:
        """Make the device current; the one before is restored at exit."""


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

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()


HOST = HostRuntime()
# Set by the test suite to run the CUDA kernels' source on the CPU; arrays in host memory then take the CUDA backends.
emulator: Runtime | None = None


def runtime_of(device: str) -> Runtime:
    """Runtime of a device by its name, "cpu", "cuda:N", or "emulated" for the one the tests installed."""
    if device == "cpu":
        return HOST
    if device == "emulated":
        assert emulator is not None
        return emulator
    raise UnsupportedError(
        f"device: expected arrays in host memory, got arrays on {device}; no CUDA backend is installed."
    )
