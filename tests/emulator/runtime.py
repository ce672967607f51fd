"""The library's runtime on the emulator: workspaces between guard pages, and no stream but one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from tests.emulator import memory
from tests.emulator.executor import EmulatorExecutor


class EmulatorRuntime:
    """A device of compute capability 8.0 that is the CPU; see `pagedattn.runtime.Runtime`."""

    arch = 80

    def __init__(self, executor: EmulatorExecutor | None = None) -> None:
        self.executor = executor or EmulatorExecutor()

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def allocate(self, size: int) -> Any:
        return self.executor.empty((size,), np.uint8)

    def address(self, buffer: Any) -> int:
        return memory.pointer(buffer)

    def active(self, stream: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()


class HopperExecutor(EmulatorExecutor):
    """Plans as for a Hopper GPU, of whose own kernels those run that keep to barriers and bulk copies."""

    arch = "sm_90a"
    max_shared_bytes = 227 << 10
    multiprocessors = 132


class HopperRuntime(EmulatorRuntime):
    """A device of compute capability 9.0 that is the CPU."""

    arch = 90


@cache
def runtime() -> EmulatorRuntime:
    """The process's emulated device."""
    return EmulatorRuntime()


@cache
def hopper() -> HopperRuntime:
    """The process's emulated Hopper GPU."""
    return HopperRuntime(HopperExecutor(workers=1))
