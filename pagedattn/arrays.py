"""Arrays of every kind in, the same kind out, never a copy.

An adapter knows one kind of array: it describes it (`TensorInfo`), makes new ones like it, and gives the NumPy backend
a view of it. The CUDA backends need no array library, only the pointers and strides of the description.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from pagedattn.dtypes import BY_NAME, FLOAT8E4M3FN, DType, name_of
from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import cuda
from pagedattn.problem import TensorInfo

Array = np.ndarray[Any, np.dtype[Any]]


_NOTHING: AbstractContextManager[Any] = nullcontext()


class Adapter(Protocol):
    """One kind of array."""

    def describe(self, x: Any) -> TensorInfo:
        """Shape, type, place and address of an array."""

    def to_numpy(self, x: Any) -> Array:
        """View of an array in host memory."""

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        """A new array on the device of ``like``."""

    def stream(self, x: Any) -> AbstractContextManager[Any]:
        """Make the library's current stream of the array's device CuPy's, for the time of a call."""

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        """Memory for one call from the library's own allocator, and its address; None: take this package's arena."""


class CurrentStream:
    """Libraries whose current stream is CuPy's, or that have none."""

    def stream(self, x: Any) -> AbstractContextManager[Any]:
        return _NOTHING

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        return None


def _elements(x: Any, pointer: int, writeable: bool) -> tuple[tuple[int, ...], int, bool, bool]:
    """The last fields of a TensorInfo, for an array whose strides are in bytes."""
    size, strides = x.dtype.itemsize or 1, x.strides
    whole = tuple([stride // size for stride in strides])
    exact = tuple([stride * size for stride in whole]) == strides
    return whole, pointer, writeable, exact


class NumpyAdapter(CurrentStream):
    """numpy.ndarray; bfloat16 and float8 through ml_dtypes."""

    def describe(self, x: Array) -> TensorInfo:
        return TensorInfo(x.shape, x.dtype, "cpu", *_elements(x, x.ctypes.data, x.flags.writeable))

    def to_numpy(self, x: Array) -> Array:
        return x if type(x) is np.ndarray else x.view(np.ndarray)  # a subclass may index in a way of its own

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Array) -> Array:
        return np.empty(shape, dtype.numpy)


class Float8View:
    """A uint8 array read as float8e4m3fn, for array libraries without that type.

    Parameters
    ----------
    array : uint8 array of any supported library
        Its bytes are the codes; it is used in place.
    """

    def __init__(self, array: Any) -> None:
        info = adapter_of("array", array).describe(array)
        if info.dtype != np.uint8:
            raise InvalidArgumentError(f"array: expected element type uint8, got {info.dtype}.")
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    def __repr__(self) -> str:
        return f"Float8View({self.array!r})"


class Float8Adapter:
    """`Float8View`: everything of the array inside, but for the type."""

    def describe(self, x: Float8View) -> TensorInfo:
        return adapter_of("array", x.array).describe(x.array)._replace(dtype=FLOAT8E4M3FN.numpy)

    def to_numpy(self, x: Float8View) -> Array:
        return adapter_of("array", x.array).to_numpy(x.array).view(FLOAT8E4M3FN.numpy)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Float8View) -> Any:
        return adapter_of("array", like.array).empty(shape, dtype, like.array)

    def stream(self, x: Float8View) -> AbstractContextManager[Any]:
        return adapter_of("array", x.array).stream(x.array)

    def scratch(self, size: int, like: Float8View) -> tuple[Any, int] | None:
        return adapter_of("array", like.array).scratch(size, like.array)


class CupyAdapter(CurrentStream):
    """cupy.ndarray."""

    def describe(self, x: Any) -> TensorInfo:
        return TensorInfo(x.shape, x.dtype, f"cuda:{x.device.id}", *_elements(x, x.data.ptr, writeable=True))

    def to_numpy(self, x: Any) -> Array:
        return x.get()  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        with like.device:
            return cuda.cupy().empty(shape, dtype.numpy)


class TorchAdapter:
    """torch.Tensor on the CPU or a CUDA device; torch is never imported, only met."""

    NUMPY_TYPES = {  # noqa: RUF012  a constant table
        "torch.float16": np.dtype(np.float16),
        "torch.float32": np.dtype(np.float32),
        "torch.bfloat16": np.dtype(ml_dtypes.bfloat16),
        "torch.float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
        "torch.int8": np.dtype(np.int8),
        "torch.uint8": np.dtype(np.uint8),
        "torch.int32": np.dtype(np.int32),
        "torch.int64": np.dtype(np.int64),
        "torch.float64": np.dtype(np.float64),
    }
    TORCH_NAMES = {"float16": "float16", "float32": "float32", "bfloat16": "bfloat16"}  # noqa: RUF012

    def describe(self, x: Any) -> TensorInfo:
        dtype = self.NUMPY_TYPES.get(str(x.dtype))
        if dtype is None:
            raise InvalidArgumentError(f"torch tensor: expected one of {', '.join(self.NUMPY_TYPES)}, got {x.dtype}.")
        if x.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(f"torch tensor: expected one on cpu or cuda, got one on {x.device}.")
        device = "cpu" if x.device.type == "cpu" else f"cuda:{x.device.index}"
        return TensorInfo(tuple(x.shape), dtype, device, tuple(x.stride()), x.data_ptr(), True)

    def to_numpy(self, x: Any) -> Array:
        import torch

        x = x.detach()
        if x.device.type != "cpu":
            x = x.cpu()
        dtype = self.NUMPY_TYPES[str(x.dtype)]
        if dtype.kind != "V":  # a type that NumPy has itself
            return x.numpy()  # type: ignore[no-any-return]
        bits = x.view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
        return bits.numpy().view(dtype)  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        import torch

        return torch.empty(shape, dtype=getattr(torch, self.TORCH_NAMES[dtype.name]), device=like.device)

    def stream(self, x: Any) -> AbstractContextManager[Any]:
        if x.device.type == "cpu":
            return _NOTHING
        import torch

        stream: AbstractContextManager[Any] = cuda.cupy().cuda.ExternalStream(
            torch.cuda.current_stream(x.device).cuda_stream, x.device.index
        )
        return stream

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        # torch captures a graph on a stream of its own and keeps what is allocated meanwhile for that graph alone.
        import torch

        buffer = torch.empty(size, dtype=torch.uint8, device=like.device)
        return buffer, buffer.data_ptr()


NUMPY = NumpyAdapter()
_ADAPTERS: dict[type, Adapter] = {np.ndarray: NUMPY, Float8View: Float8Adapter()}
_BY_MODULE: dict[tuple[str, str], Callable[[], Adapter]] = {
    ("cupy", "ndarray"): CupyAdapter,
    ("torch", "Tensor"): TorchAdapter,
}


def adapter_of(name: str, x: Any) -> Adapter:
    """Adapter of an array, by its type.

    Raises
    ------
    InvalidArgumentError
        ``x`` is no array of a known library.
    """
    adapter = _ADAPTERS.get(type(x))
    if adapter is None:
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgumentError(f"{name}: expected an array without a mask, which would count for nothing.")
        for base in type(x).__mro__:
            if base in _ADAPTERS:
                adapter = _ADAPTERS[base]
                break
            make = _BY_MODULE.get((base.__module__.partition(".")[0], base.__name__))
            if make is not None:
                adapter = make()
                break
        else:
            raise InvalidArgumentError(
                f"{name}: expected a NumPy or CuPy array, a torch tensor, or an object with "
                f"__dlpack__ or __cuda_array_interface__, got {type(x).__name__}."
            )
        _ADAPTERS[type(x)] = adapter
    return adapter


def import_foreign(name: str, x: Any) -> Any:
    """Wrap an object of an unknown library that speaks DLPack or the CUDA array interface, without a copy.

    DLPack orders the producer's work before this stream's; NumPy takes what is in host memory, CuPy the rest.
    """
    if type(x) in _ADAPTERS:
        return x
    try:
        adapter_of(name, x)
        return x
    except InvalidArgumentError:
        if isinstance(x, type | np.ma.MaskedArray):  # a class has the methods of its arrays
            raise
        if hasattr(x, "__cuda_array_interface__"):
            return cuda.cupy().asarray(x)
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            if x.__dlpack_device__()[0] == 1:
                try:
                    return np.from_dlpack(x)
                except (BufferError, RuntimeError) as error:  # bfloat16, say
                    raise InvalidArgumentError(f"{name}: NumPy cannot take it through DLPack: {error}") from error
            return cuda.cupy().from_dlpack(x)
        raise


def dtype_named(name: Any) -> DType:
    """Row of an element type given by name, NumPy or ml_dtypes type."""
    if isinstance(name, DType):
        return name
    try:
        text = name if isinstance(name, str) else name_of(np.dtype(name)) if name is not None else ""
    except (TypeError, ValueError):  # no type at all
        text = ""
    if text not in BY_NAME:
        raise InvalidArgumentError(f"dtype: expected one of {', '.join(BY_NAME)}, got {name!r}.")
    return BY_NAME[text]
