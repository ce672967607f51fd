"""Element types: one row each, with every name a layer knows it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : str
        The ONNX spelling, which the attributes ``k_cache_dtype`` and ``v_cache_dtype`` use.
    numpy : numpy.dtype
        The type of the array that stores it.
    cpp : str
        Its enumerator in the kernels' ``enum class DType``.
    bits : int
        Width of one element; 4 for packed types, whose storage element is a byte.
    code_range : tuple of float, or None
        Smallest and largest code of a quantized type.
    """

    name: str
    numpy: np.dtype[Any]
    cpp: str
    bits: int
    code_range: tuple[float, float] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether values of this type need a scale."""
        return self.code_range is not None

    def storage_elements(self, count: int) -> int:
        """Length, in storage elements, of a row of ``count`` logical elements."""
        return (count * self.bits + 7) // 8 // self.numpy.itemsize if self.bits < 8 else count

    def __str__(self) -> str:
        return self.name


FLOAT16 = DType("float16", np.dtype(np.float16), "f16", 16)
BFLOAT16 = DType("bfloat16", np.dtype(ml_dtypes.bfloat16), "bf16", 16)
FLOAT32 = DType("float32", np.dtype(np.float32), "f32", 32)
INT8 = DType("int8", np.dtype(np.int8), "i8", 8, (-128, 127))
FLOAT8E4M3FN = DType("float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "f8e4m3", 8, (-448, 448))
# Two codes a byte, element 2i in the low nibble, stored as code + 8. No array library has it, so the tensor is uint8.
INT4 = DType("int4", np.dtype(np.uint8), "i4", 4, (-8, 7))

INT32 = DType("int32", np.dtype(np.int32), "i32", 32)

ALL = (FLOAT16, BFLOAT16, FLOAT32, INT8, FLOAT8E4M3FN, INT4, INT32)
BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_NUMPY = {dtype.numpy: dtype for dtype in ALL}


def name_of(dtype: np.dtype[Any]) -> str:
    """Spelling of a NumPy dtype in messages: the contract's name where it has one."""
    if dtype == INT4.numpy:
        return "uint8"
    known = BY_NUMPY.get(dtype)
    return known.name if known else str(dtype)
