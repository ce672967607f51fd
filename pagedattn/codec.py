"""Cache codec: how values become stored codes and back.

A quantized value is ``code * scale`` with zero point 0. Codes are

* int8: ``clamp(rint(x / scale), -128, 127)``, ties to even;
* float8e4m3fn: ``x / scale`` clamped to +-448, then rounded to nearest even; NaN stays NaN;
* int4: ``clamp(rint(x / scale), -8, 7)``, two codes a byte, element ``2i`` in the low nibble, stored as ``code + 8``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedattn.dtypes import INT4, DType

Array = np.ndarray[Any, np.dtype[Any]]


def encode(x: Array, dtype: DType, scale: Array | None = None) -> Array:
    """Round or quantize values to their stored form.

    Parameters
    ----------
    x : (..., channels), float32 or float64
    dtype : DType
        Type of the cache.
    scale : broadcastable to ``x``, float32, or None
        Required for quantized types.

    Returns
    -------
    ndarray
        (..., channels) of ``dtype.numpy``; for int4 (..., ceil(channels / 2)) uint8.
    """
    if dtype.code_range is None:
        with np.errstate(over="ignore"):  # beyond float16's range is infinity, as on the GPU
            return _narrow(x, dtype)
    assert scale is not None
    low, high = dtype.code_range
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        codes = x / scale.astype(x.dtype)
        if dtype.bits == 8 and dtype.numpy.kind == "V":
            return _narrow(np.clip(codes, low, high), dtype)
        # An integer has no NaN. 0 is what the GPU's conversion gives, and the least harmful value.
        codes = np.clip(np.rint(np.nan_to_num(codes, nan=0.0, posinf=high, neginf=low)), low, high).astype(np.int8)
    return pack_int4(codes) if dtype is INT4 else codes


def decode(
    stored: Array,
    dtype: DType,
    scale: Array | None = None,
    channels: int | None = None,
    compute: type[np.floating[Any]] = np.float32,
) -> Array:
    """Values of stored codes.

    Parameters
    ----------
    stored : (..., channels) of ``dtype.numpy``; for int4 (..., ceil(channels / 2)) uint8
    dtype : DType
    scale : broadcastable to the result, float32, or None
    channels : int, optional
        Logical width of a row; needed only for int4 rows of odd width.
    compute : type
        Floating type of the result.

    Returns
    -------
    ndarray
        (..., channels) of ``compute``.
    """
    codes = unpack_int4(stored, channels) if dtype is INT4 else stored
    values = codes.astype(compute)
    return np.asarray(values if scale is None else values * scale.astype(compute))


def _narrow(x: Array, dtype: DType) -> Array:
    """Round to the nearest, ties to even, once."""
    if x.dtype == np.float64 and dtype.numpy.kind == "V":
        # ml_dtypes rounds float64 to float32 first. Making that an odd number keeps it off the ties of the second step.
        near = x.astype(np.float32)
        toward = np.nextafter(near, np.where(x > near, np.inf, -np.inf).astype(np.float32))
        x = np.where((near != x) & (near.view(np.uint32) % 2 == 0) & np.isfinite(near), toward, near)
    return np.asarray(x.astype(dtype.numpy))


def pack_int4(codes: Array) -> Array:
    """Pack int8 codes in [-8, 7], (..., channels), into (..., ceil(channels / 2)) bytes."""
    nibbles = (codes + 8).astype(np.uint8)
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.full_like(nibbles[..., :1], 8)], axis=-1)  # the spare nibble is code 0
    return np.asarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)


def unpack_int4(packed: Array, channels: int | None = None) -> Array:
    """Inverse of `pack_int4`: (..., bytes) uint8 to (..., channels) int8; ``channels`` defaults to twice the bytes."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.int8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    codes -= 8
    return codes[..., :channels]
