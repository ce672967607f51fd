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

_DATA_TYPES = {FLOAT16: 6, BFLOAT16: 9}  # CUtensorMapDataType
_BYTE = 0
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle by the bytes of the innermost box axis
_NO_SWIZZLE = 0
_NO_INTERLEAVE, _PROMOTE_256_BYTES, _ZEROS_OUTSIDE = 0, 3, 0

MAX_EXTENT = 2**32
MAX_STRIDE_BYTES = 2**40
STRIDE_ALIGNMENT = 16


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
        _PROMOTE_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    if result != 0:
        raise PagedAttentionError(
            f"cuTensorMapEncodeTiled: {driver.error_text(result)} for extents {extents}, "
            f"strides {stride_bytes} bytes, box {box} of {dtype.name} at {address:#x}"
        )
    return ctypes.string_at(aligned, 128)
