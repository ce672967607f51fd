"""Memory that kernels see: NumPy arrays between pages that nobody may touch.

A buffer ends where its last page ends, so that the first byte past it faults; or, on request, it starts where its first
page does, so that the byte before it faults. What is left between the buffer and its guards holds a pattern that is
compared after each launch, and is poisoned for AddressSanitizer when that runs.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_PATTERN = 0xA5
_POISON = 0xFF  # NaN in every float type, -1 in every integer type
_process = ctypes.CDLL(None)
_process.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Block(mmap.mmap):
    """Pages around one buffer. The arrays on it keep it alive."""

    start: int
    nbytes: int
    gaps: tuple[slice, slice]  # between the guard pages and the buffer, in bytes of the pages

    @classmethod
    def allocate(cls, nbytes: int, at_start: bool = False) -> Block:
        body = max(_PAGE, _round_up(nbytes, _PAGE))
        block = cls(-1, body + 2 * _PAGE)
        pages = np.frombuffer(block, np.uint8)
        first = pages.ctypes.data
        alignment = 256
        while alignment > 16 and nbytes % alignment:
            alignment //= 2
        offset = _PAGE if at_start else _PAGE + body - _round_up(nbytes, alignment)
        block.start, block.nbytes = first + offset, nbytes
        block.gaps = (slice(_PAGE, offset), slice(offset + nbytes, _PAGE + body))
        _sanitizer("unpoison", first, len(block))
        for gap in block.gaps:
            pages[gap] = _PATTERN
            _sanitizer("poison", first + gap.start, gap.stop - gap.start)
        for guard in (first, first + _PAGE + body):
            if _process.mprotect(guard, _PAGE, 0):
                raise MemoryError("mprotect failed")
        _blocks[block.start] = block
        return block

    def __del__(self) -> None:
        # Whoever is given these addresses next may use them all. At the interpreter's end this module may be gone.
        if _sanitizer is not None:
            _sanitizer("unpoison", self.start - self.gaps[0].stop, len(self))

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        offset = self.gaps[1].start - self.nbytes
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, self, offset)
        return array

    def damage(self) -> str | None:
        """What a kernel wrote around the buffer, or None."""
        pages = np.frombuffer(self, np.uint8)
        for gap, side in zip(self.gaps, ("before", "past the end of"), strict=True):
            wrong = np.flatnonzero(pages[gap] != _PATTERN)
            if wrong.size:
                distance = gap.stop - gap.start - int(wrong[-1]) if side == "before" else int(wrong[0])
                pages[gap] = _PATTERN
                return f"write {distance} bytes {side} the {self.nbytes}-byte buffer at {self.start:#x}"
        return None


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


def empty(shape: int | tuple[int, ...], dtype: Any, at_start: bool = False) -> np.ndarray[Any, Any]:
    """Array in guarded memory, every byte 0xFF."""
    array = zeros(shape, dtype, at_start)
    ctypes.memset(pointer(array), _POISON, array.nbytes)
    return array


def zeros(shape: int | tuple[int, ...], dtype: Any, at_start: bool = False) -> np.ndarray[Any, Any]:
    """Array of zeros in guarded memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    return Block.allocate(math.prod(shape) * dtype.itemsize, at_start).array(shape, dtype)


def upload(array: np.ndarray[Any, Any], at_start: bool = False) -> np.ndarray[Any, Any]:
    """Copy an array into guarded memory, with the same strides; bytes between its elements come along."""
    first, end = _extent(array)
    block = Block.allocate(end - first, at_start)
    ctypes.memmove(block.start, pointer(array) + first, end - first)
    whole = block.array((end - first,), np.dtype(np.uint8))
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, whole, -first, array.strides)
    return copy


def download(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy what :func:`upload` made of ``target`` back over it, the bytes between its elements included."""
    first, end = _extent(source)
    ctypes.memmove(pointer(target) + first, pointer(source) + first, end - first)


def pointer(array: np.ndarray[Any, Any] | None) -> int:
    """Address of an array's first element; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def is_guarded(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array lies in memory of this module."""
    address = pointer(array)
    return any(block.start <= address < block.start + max(block.nbytes, 1) for block in list(_blocks.values()))


def nearest(address: int) -> tuple[Block, int] | None:
    """The buffer nearest to an address and the bytes from its start, if they are close."""

    def distance(block: Block) -> int:
        return max(block.start - address, address - block.start - block.nbytes, 0)

    best = min(list(_blocks.values()), key=distance, default=None)
    return None if best is None or distance(best) > 1 << 20 else (best, address - best.start)


def damage() -> str | None:
    """What the last launch wrote around some buffer, or None."""
    return next(filter(None, (block.damage() for block in list(_blocks.values()))), None)


def _extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Bytes that an array spans, relative to its first element; (0, 0) when it has none."""
    if not array.size:
        return 0, 0
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + array.itemsize


def _sanitizer(action: str, address: int, nbytes: int) -> None:
    function = getattr(_process, f"__asan_{action}_memory_region", None)
    if function is not None and nbytes:
        function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
