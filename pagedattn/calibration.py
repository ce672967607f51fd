"""Scales for quantized caches, from samples of what the cache will hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn import codec
from pagedattn.arrays import adapter_of
from pagedattn.dtypes import BFLOAT16, FLOAT8E4M3FN, FLOAT16, FLOAT32, INT4, INT8
from pagedattn.errors import InvalidArgumentError

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Calibration", "calibrate"]

_SAMPLES = (FLOAT16.numpy, BFLOAT16.numpy, FLOAT32.numpy, np.dtype(np.float64))
_DTYPES = {dtype.name: dtype for dtype in (INT8, FLOAT8E4M3FN, INT4)}


@dataclass(frozen=True, eq=False)
class Calibration:
    """A scale, and the error to expect with it.

    Attributes
    ----------
    scale : (1,) or (kv_num_heads, 1, head_size), float32
        The operator's ``k_scale`` or ``v_scale``.
    quant_type : str
        Its ``k_quant_type`` or ``v_quant_type``.
    max_error : float
        Largest difference between a sample and what the cache gives back for it.
    rms_error : float
        Root mean square of the difference.
    relative_error : float
        ``rms_error`` over the root mean square of the samples; 0 if they are all 0.
    clipped : float
        Share of samples beyond the largest code.
    """

    scale: Array
    quant_type: str
    max_error: float
    rms_error: float
    relative_error: float
    clipped: float

    def __str__(self) -> str:
        return (
            f"{self.quant_type}: relative rms error {self.relative_error:.2e}, largest error {self.max_error:.2e}, "
            f"clipped {self.clipped:.2%}"
        )


def calibrate(
    samples: Any,
    dtype: str,
    quant_type: str = "PER_TENSOR",
    *,
    method: str = "absmax",
    percentile: float = 99.9,
) -> Calibration:
    """Choose the scale of a quantized key or value cache, and measure what it costs on the samples.

    Parameters
    ----------
    samples : (tokens, kv_num_heads, head_size), float of any width
        Keys or values as they are stored: keys after QK-norm and RoPE. Rows of an unquantized cache are just that. In
        the LATENT layout the latent rows, (tokens, 1, head_size).
    dtype : str
        "int8", "float8e4m3fn" or "int4".
    quant_type : {"PER_TENSOR", "PER_CHANNEL"}
        One scale, or one for each channel of each head. Keys usually have a few large channels and gain most.
    method : {"absmax", "percentile"}
        Put the largest code on the largest magnitude, so that no sample is clipped; or on a percentile of the
        magnitudes, which clips outliers and resolves the rest better.
    percentile : float
        In (0, 100], for that method.

    Returns
    -------
    Calibration
        A channel without a sample other than 0 gets the scale of the whole tensor.

    Raises
    ------
    InvalidArgumentError
        An option is unknown, or the samples are not of that shape, none, or not finite.
    """
    if dtype not in _DTYPES:
        raise InvalidArgumentError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}.")
    if quant_type not in ("PER_TENSOR", "PER_CHANNEL"):
        raise InvalidArgumentError(f"quant_type: expected PER_TENSOR or PER_CHANNEL, got {quant_type!r}.")
    if method not in ("absmax", "percentile"):
        raise InvalidArgumentError(f"method: expected absmax or percentile, got {method!r}.")
    if not 0 < percentile <= 100:
        raise InvalidArgumentError(f"percentile: expected a value in (0, 100], got {percentile}.")
    values = adapter_of("samples", samples).to_numpy(samples)
    if values.dtype not in _SAMPLES:
        raise InvalidArgumentError(f"samples: expected a real floating type, got {values.dtype}.")
    with np.errstate(over="ignore"):  # beyond float32 is infinity, which is refused below
        values = values.astype(np.float32)
    if values.ndim != 3 or values.size == 0:
        raise InvalidArgumentError(
            f"samples: expected shape (tokens, kv_num_heads, head_size), one token or more, got {values.shape}."
        )
    if not np.isfinite(values).all():
        raise InvalidArgumentError(f"samples: expected finite values, got {np.sum(~np.isfinite(values))} others.")

    row = _DTYPES[dtype]
    assert row.code_range is not None
    largest_code = row.code_range[1]
    magnitudes = np.abs(values)
    share = 100.0 if method == "absmax" else percentile
    whole = np.percentile(magnitudes, share) or magnitudes.max() or largest_code
    if quant_type == "PER_TENSOR":
        reach = np.array([whole])
    else:
        reach = np.percentile(magnitudes, share, axis=0)[:, None, :]
        reach = np.where(reach == 0, whole, reach)
    # A scale below the smallest normal number would make x / scale overflow.
    scale = np.maximum(reach / largest_code, np.finfo(np.float32).tiny).astype(np.float32)

    per_row = scale if scale.ndim == 1 else scale[:, 0]
    restored = codec.decode(codec.encode(values, row, per_row), row, per_row, values.shape[-1])
    error = (restored - values).astype(np.float64)
    rms_error, rms = (float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) for x in (error, values))
    return Calibration(
        scale=scale,
        quant_type=quant_type,
        max_error=float(np.abs(error).max()),
        rms_error=rms_error,
        relative_error=rms_error / rms if rms else 0.0,
        clipped=float(np.mean(magnitudes > per_row * np.float32(largest_code) * np.float32(1 + 1e-6))),
    )
