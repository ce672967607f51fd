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


@cache
def runtime() -> EmulatorRuntime:
    """The process's emulated device."""
    return EmulatorRuntime()
