"""Tensor maps: how the copy engine of Hopper and later is told of an array, its boxes and their swizzle.

The driver encodes them into 128 opaque bytes; nothing is allocated and no device is touched.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from pagedattn.dtypes import BFLOAT16, FLOAT16, DType
from pagedattn.errors import PagedAttentionError
from pagedattn.jit import driver
from pagedattn.problem import TensorInfo

_DATA_TYPES = {FLOAT16: 6, BFLOAT16: 9}  # CUtensorMapDataType
_BYTE = 0
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle by the bytes of the innermost box axis
_NO_SWIZZLE = 0
_PROMOTIONS = {128: 2, 256: 3}  # CUtensorMapL2promotion by bytes
_NO_INTERLEAVE, _ZEROS_OUTSIDE = 0, 0

MAX_STRIDE_BYTES = 2**40
STRIDE_ALIGNMENT = 16


def why_not_rows(
    query: tuple[int, int], caches: tuple[TensorInfo, ...], head_bytes: int = STRIDE_ALIGNMENT
) -> str | None:
    """Reason why query rows cannot be read 16 bytes at a time, or caches not by maps in eights of tokens, or None.

    Parameters
    ----------
    query : tuple of int
        Address of the query rows, of 16-bit elements, and elements from one token to the next.
    caches : tuple of TensorInfo
        Caches of shape (num_blocks, block_size, kv_num_heads, head_size).
    head_bytes : int
        What bytes from one head to the next must be a multiple of.
    """
    address, stride = query
    if address % 16 or stride % 8:
        return "query rows do not start on multiples of 16 bytes"
    for cache in caches:
        block, token, head = (stride * cache.dtype.itemsize for stride in cache.strides[:3])
        if cache.shape[2] == 1:
            head = head_bytes  # nobody goes from one head to the next
        if any(x % STRIDE_ALIGNMENT for x in (cache.pointer, block, token)) or head % head_bytes:
            return f"cache rows do not start on multiples of {head_bytes} bytes within a token"
        if min(block, token, head) <= 0:
            return "the cache has a stride that is not positive"
        if max(block, 8 * token, head) >= MAX_STRIDE_BYTES:
            return "the cache has a stride that is too large"
    return None


@functools.cache
def _encode() -> Any:
    """The driver's ``cuTensorMapEncodeTiled``."""
    function = driver.function("cuTensorMapEncodeTiled")
    pointer = ctypes.c_void_p
    word = ctypes.c_uint
    function.argtypes = [pointer, word, word, pointer, pointer, pointer, pointer, pointer, word, word, word, word]
    return function


@functools.lru_cache(maxsize=256)
def encode(
    dtype: DType,
    address: int,
    extents: tuple[int, ...],
    stride_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = True,
    promoted_bytes: int = 256,
) -> bytes:
    """Encode the map of an array.

    Parameters
    ----------
    dtype : DType
        float16 or bfloat16, else its elements are bytes.
    address : int
        Of the first element; a multiple of 16.
    extents : tuple of int
        Elements along each axis, the innermost first; that one is contiguous.
    stride_bytes : tuple of int
        Bytes from one index to the next along every axis but the innermost; multiples of 16.
    box : tuple of int
        Elements along each axis that one copy brings, at most 256 each. The bytes of the innermost one, 64 or 128,
        are the width of the swizzle.
    swizzled : bool
        Without it the box lies densely in shared memory.
    promoted_bytes : int
        What L2 fetches from memory at a time, 128 or 256.

    Returns
    -------
    bytes
        For a ``tensor_map`` field of Params.
    """
    rank = len(extents)
    swizzle = _SWIZZLES[box[0] * (dtype.bits if dtype in _DATA_TYPES else 8) // 8] if swizzled else _NO_SWIZZLE
    space = ctypes.create_string_buffer(192)
    aligned = (ctypes.addressof(space) + 63) // 64 * 64  # the driver wants 64
    result = _encode()(
        aligned,
        _DATA_TYPES.get(dtype, _BYTE),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * max(1, rank - 1))(*stride_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        _NO_INTERLEAVE,
        swizzle,
        _PROMOTIONS[promoted_bytes],
        _ZEROS_OUTSIDE,
    )
    if result != 0:
        raise PagedAttentionError(
            f"cuTensorMapEncodeTiled: {driver.error_text(result)} for extents {extents}, "
            f"strides {stride_bytes} bytes, box {box} of {dtype.name} at {address:#x}"
        )
    return ctypes.string_at(aligned, 128)
