"""Element types and tensor types, between the contract's tables and ONNX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, TypeProto, helper

from pagedattn.dtypes import ALL, DType

_ELEMENT_TYPES = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
    "int8": TensorProto.INT8,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.UINT8,  # two codes a byte; ONNX has an INT4 too, but runtimes take uint8 here
    "int32": TensorProto.INT32,
}
_NUMPY_TYPES = {_ELEMENT_TYPES[row.name]: row.numpy for row in ALL}


class PartialTensor(NamedTuple):
    """What a graph says of a tensor: None stands for a dimension, a shape or a type that it leaves open."""

    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any] | None


def element_type(dtype: DType) -> int:
    """ONNX element type (``TensorProto.DataType``) of a row of `pagedattn.dtypes`."""
    return int(_ELEMENT_TYPES[dtype.name])


def type_string(dtype: DType) -> str:
    """Its spelling in a schema, such as "tensor(float16)"."""
    return f"tensor({ {'float32': 'float', 'int4': 'uint8'}.get(dtype.name, dtype.name) })"


def dtype_of_element(element: int) -> DType | None:
    """Row of an ONNX element type; None for one that no input or output of the operators has."""
    return next((row for row in ALL if _ELEMENT_TYPES[row.name] == element), None)


def numpy_type(element: int) -> np.dtype[Any] | None:
    """NumPy or ml_dtypes type of an ONNX element type; None for UNDEFINED."""
    if element == TensorProto.UNDEFINED:
        return None
    return _NUMPY_TYPES.get(element) or np.dtype(helper.tensor_dtype_to_np_dtype(element))


def partial_tensor(proto: Any) -> PartialTensor:
    """Read a TypeProto, or None."""
    if proto is None or not proto.HasField("tensor_type"):
        return PartialTensor(None, None)
    tensor = proto.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(int(dim.dim_value) if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    return PartialTensor(shape, numpy_type(tensor.elem_type))


def tensor_type(element: int, dims: tuple[Any, ...] | None) -> Any:
    """A TypeProto.

    Parameters
    ----------
    element : int
        ONNX element type.
    dims : tuple of int, str, Dimension or None, or None
        A None inside is an unknown dimension; None itself leaves the rank open.
    """
    proto = TypeProto()
    proto.tensor_type.elem_type = element
    if dims is None:
        return proto
    proto.tensor_type.shape.SetInParent()
    for dim in dims:
        added = proto.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        elif isinstance(dim, str):
            added.dim_param = dim
        elif dim is not None:
            added.CopyFrom(dim)
    return proto
