"""Arrays of every kind in, the same kind out, never a copy.

An adapter knows one kind of array: it describes it (`TensorInfo`), makes new ones like it, and gives the NumPy backend
a view of it. The CUDA backends need no array library, only the pointers and strides of the description.

A description is made in two steps. `Adapter.identify` only collects what the library has at hand, and `Adapter.info`
makes a `TensorInfo` of that and of nothing else; so arrays with equal signatures differ in their addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from pagedattn import contract
from pagedattn.dtypes import BY_NAME, FLOAT8E4M3FN, DType, name_of
from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import cuda
from pagedattn.problem import TensorInfo, dense_strides

Array = np.ndarray[Any, np.dtype[Any]]
# What tells arrays apart but for their addresses: adapter, shape, type, strides and device, as the library has them.
Signature = tuple[Any, ...]
# Instead of strides in a signature: those of an array in C order without gaps.
DENSE = None


class Adapter(Protocol):
    """One kind of array."""

    def identify(self, x: Any, pointers: list[int]) -> Signature:
        """Signature of an array, which starts with this adapter; its address is added to ``pointers``.

        Done for each array of every call, so it has to be quick, and makes no pair of the two.
        """

    def info(self, signature: Signature, pointer: int) -> TensorInfo:
        """Shape, type, place and address of an array with this signature."""

    def describe(self, x: Any) -> TensorInfo:
        """Both in one."""

    def to_numpy(self, x: Any) -> Array:
        """View of an array in host memory."""

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        """A new array on the device of ``like``."""

    def stream(self, x: Any) -> int | None:
        """Handle of the library's current stream of the array's device; None: it is CuPy's, or there is none."""

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        """Memory for one call from the library's own allocator, and its address; None: take this package's arena."""


class _Described:
    """`describe` of every adapter."""

    def describe(self: Adapter, x: Any) -> TensorInfo:
        pointers: list[int] = []
        return self.info(self.identify(x, pointers), *pointers)


class _CupyLike(_Described):
    """Libraries that count strides in bytes, and whose current stream is CuPy's or that have none."""

    def info(self, signature: Signature, pointer: int) -> TensorInfo:
        _, shape, dtype, strides, device, writeable = signature
        size = dtype.itemsize or 1
        if strides is DENSE:
            elements, exact = dense_strides(shape), True
        else:
            elements = tuple([stride // size for stride in strides])
            exact = all(stride % size == 0 for stride in strides)
        name = "cpu" if device is None else f"cuda:{device}"
        return TensorInfo(shape, dtype, name, elements, pointer, writeable, exact)

    def stream(self, x: Any) -> int | None:
        return None

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        return None


class NumpyAdapter(_CupyLike):
    """numpy.ndarray; bfloat16 and float8 through ml_dtypes."""

    def identify(self, x: Array, pointers: list[int]) -> Signature:
        pointers.append(x.ctypes.data)
        return self, x.shape, x.dtype, x.strides, None, x.flags.writeable

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


class Float8Adapter(_Described):
    """`Float8View`: everything of the array inside, but for the type."""

    def identify(self, x: Float8View, pointers: list[int]) -> Signature:
        return self, adapter_of("array", x.array).identify(x.array, pointers)

    def info(self, signature: Signature, pointer: int) -> TensorInfo:
        inner = signature[1]
        info: TensorInfo = inner[0].info(inner, pointer)
        return info._replace(dtype=FLOAT8E4M3FN.numpy)

    def to_numpy(self, x: Float8View) -> Array:
        return adapter_of("array", x.array).to_numpy(x.array).view(FLOAT8E4M3FN.numpy)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Float8View) -> Any:
        return adapter_of("array", like.array).empty(shape, dtype, like.array)

    def stream(self, x: Float8View) -> int | None:
        return adapter_of("array", x.array).stream(x.array)

    def scratch(self, size: int, like: Float8View) -> tuple[Any, int] | None:
        return adapter_of("array", like.array).scratch(size, like.array)


class CupyAdapter(_CupyLike):
    """cupy.ndarray."""

    def identify(self, x: Any, pointers: list[int]) -> Signature:
        data = x.data
        pointers.append(data.ptr)
        # CuPy makes a new tuple of the strides each time, and knows already whether they are those of the shape.
        strides = DENSE if getattr(x, "_c_contiguous", False) else x.strides
        return self, x.shape, x.dtype, strides, data.device_id, True

    def to_numpy(self, x: Any) -> Array:
        return x.get()  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        with like.device:
            return cuda.cupy().empty(shape, dtype.numpy)


class TorchAdapter(_Described):
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

    def identify(self, x: Any, pointers: list[int]) -> Signature:
        pointers.append(x.data_ptr())
        device = x.get_device() if x.is_cuda else x.device  # a number is quicker to compare
        return self, x.shape, x.dtype, x.stride(), device

    def info(self, signature: Signature, pointer: int) -> TensorInfo:
        _, shape, torch_dtype, strides, device = signature
        dtype = self.NUMPY_TYPES.get(str(torch_dtype))
        if dtype is None:
            raise InvalidArgumentError(
                f"torch tensor: expected one of {', '.join(self.NUMPY_TYPES)}, got {torch_dtype}."
            )
        if not isinstance(device, int) and device.type != "cpu":
            raise InvalidArgumentError(f"torch tensor: expected one on cpu or cuda, got one on {device}.")
        name = f"cuda:{device}" if isinstance(device, int) else "cpu"
        return TensorInfo(tuple(shape), dtype, name, tuple(strides), pointer, True)

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

    def stream(self, x: Any) -> int | None:
        return _torch_stream()(x.get_device()) if x.is_cuda else None

    def scratch(self, size: int, like: Any) -> tuple[Any, int] | None:
        # torch captures a graph on a stream of its own and keeps what is allocated meanwhile for that graph alone.
        import torch

        buffer = torch.empty(size, dtype=torch.uint8, device=like.device)
        return buffer, buffer.data_ptr()


@cache
def _torch_stream() -> Callable[[int], int]:
    """Handle of torch's current stream of a device."""
    import torch

    # What torch's own compiler calls before each launch; the public way makes an object of a stream.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


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
            raise InvalidArgumentError(
                f"{contract.argument(name)}: expected an array without a mask, which would count for nothing."
            )
        for base in type(x).__mro__:
            if base in _ADAPTERS:
                adapter = _ADAPTERS[base]
                break
            make = _BY_MODULE.get((base.__module__.partition(".")[0], base.__name__))
            if make is not None:
                adapter = _ADAPTERS[base] = make()
                break
        else:
            raise InvalidArgumentError(
                f"{contract.argument(name)}: expected a NumPy or CuPy array, a torch tensor, or an object with "
                f"__dlpack__ or __cuda_array_interface__, got {type(x).__name__}."
            )
        _ADAPTERS[type(x)] = adapter
    return adapter


def identify(arrays: dict[str, Any]) -> tuple[list[Signature], list[int]]:
    """Signatures and addresses of arrays by name, in order.

    A foreign array is replaced by a view of a library that is known.
    """
    signatures: list[Signature] = []
    pointers: list[int] = []
    for name, x in arrays.items():
        adapter = _ADAPTERS.get(type(x))
        if adapter is None:
            arrays[name] = x = import_foreign(name, x)
            adapter = adapter_of(name, x)
        signatures.append(adapter.identify(x, pointers))
    return signatures, pointers


def import_foreign(name: str, x: Any) -> Any:
    """Wrap an object of an unknown library that speaks DLPack or the CUDA array interface, without a copy.

    DLPack orders the producer's work before this stream's; NumPy takes what is in host memory, CuPy the rest.

    Raises
    ------
    InvalidArgumentError
        It speaks neither, or its type is one that NumPy cannot take.
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
                    raise InvalidArgumentError(
                        f"{contract.argument(name)}: NumPy cannot take it through DLPack: {error}"
                    ) from error
            return cuda.cupy().from_dlpack(x)
        raise


def dtype_named(name: Any, argument: str = "dtype") -> DType:
    """Row of an element type given by name, NumPy or ml_dtypes type; any other is an `InvalidArgumentError`."""
    if isinstance(name, DType):
        return name
    try:
        text = name if isinstance(name, str) else name_of(np.dtype(name)) if name is not None else ""
    except (TypeError, ValueError):  # no type at all
        text = ""
    if text not in BY_NAME:
        raise InvalidArgumentError(f"{argument}: expected one of {', '.join(BY_NAME)}, got {name!r}.")
    return BY_NAME[text]
