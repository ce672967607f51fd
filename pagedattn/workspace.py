"""Scratch memory: one buffer a stream and thread, sized before any capture."""

from __future__ import annotations

import threading
from typing import Any

from pagedattn.errors import PagedAttentionError
from pagedattn.runtime import Runtime


class Arena:
    """Scratch buffers that live as long as their operator.

    Work on one stream runs in order, so its calls may share a buffer; work on two streams does not, so each stream has
    its own. So has each thread: the launches of two threads' calls on one stream come in any order. A captured graph
    keeps the address, and so do launches that are kept: a buffer that was outgrown stays alive for them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int, int], tuple[Any, int, int]] = {}  # with size and address
        self._outgrown: list[Any] = []

    def reserve(self, runtime: Runtime, stream: int, size: int) -> int:
        """Address of ``size`` bytes or more for this thread and ``stream``, the current one of ``runtime``; 0 for none.

        Raises
        ------
        PagedAttentionError
            The stream is capturing and the memory is not there yet.
        """
        if size == 0:
            return 0
        key = (id(runtime), stream, threading.get_ident())
        buffer, have, address = self._buffers.get(key, (None, 0, 0))
        if have < size:
            if runtime.is_capturing():
                raise PagedAttentionError(
                    f"workspace: {size} bytes are needed but {have} were reserved before the capture began; run the "
                    "same call once on this stream, in this thread, first."
                )
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = runtime.allocate(size)
            address = runtime.address(buffer)
            self._buffers[key] = (buffer, size, address)
        return address
