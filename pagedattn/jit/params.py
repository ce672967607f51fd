"""Params: what a launch sees of a kernel, one struct passed by value.

::

    KV_ACCESSOR = params("KvAccessor", base=ptr, block_stride=i64, num_blocks=i32)
    PARAMS = params("DecodeParams", query=ptr, key_cache=KV_ACCESSOR, token_count=i32, scale_log2=f32)

    packed = PARAMS.pack(
        query=array.data.ptr,
        key_cache=KV_ACCESSOR.pack(base=cache.data.ptr, block_stride=stride, num_blocks=64),
        token_count=7,
        scale_log2=0.18,
    )
    issue = executor.prepare([Launch(function, grid, threads, shared_bytes, packed)], stream)

Fields are given in the C++ struct's order and laid out as C does. Every translation unit ends with
:meth:`Layout.static_asserts`, so a struct that differs from its Python side does not compile.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn


@dataclass(frozen=True)
class Scalar:
    """One C type: its name, its letter in :mod:`struct`, its size and its NumPy type.

    ``witness`` is a C++ condition on ``{0}``, the field's type, that tells a float from an integer.
    """

    name: str
    code: str
    size: int
    numpy: np.dtype[Any]
    witness: str = "true"

    @property
    def alignment(self) -> int:
        """Alignment in bytes; every C type here is aligned to its size."""
        return self.size


_INTEGER, _FLOAT = "static_cast<{0}>(0.5f) == 0", "static_cast<{0}>(0.5f) != 0"

ptr = Scalar("pointer", "Q", 8, np.dtype(np.uint64))
"""A device address as an int; None is the null pointer."""
i64 = Scalar("int64_t", "q", 8, np.dtype(np.int64), _INTEGER)
i32 = Scalar("int32_t", "i", 4, np.dtype(np.int32), _INTEGER)
u32 = Scalar("uint32_t", "I", 4, np.dtype(np.uint32), _INTEGER)
f32 = Scalar("float", "f", 4, np.dtype(np.float32), _FLOAT)
boolean = Scalar("bool", "?", 1, np.dtype(np.bool_))
"""A C++ bool, from the truth value."""


@dataclass(frozen=True)
class Opaque:
    """Bytes that only the driver understands, such as a tensor map; the value is a bytes object of just this size."""

    size: int
    alignment: int

    @property
    def code(self) -> str:
        return f"{self.size}s"

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype((np.void, self.size))


tensor_map = Opaque(128, 64)
"""A ``CUtensorMap``."""


class Layout:
    """A C struct: the offsets of its fields, how to pack values into it and the C++ text that checks it.

    Made by :func:`params`. A layout may be a field of another one; its value is then what its own ``pack`` returned.

    Attributes
    ----------
    name : str
        The C++ struct's name.
    size, alignment : int
        ``sizeof`` and ``alignof``, in bytes.
    offsets : dict
        Offset of each field, in bytes.
    numpy : numpy.dtype
        The structured type: ``numpy.frombuffer(packed, layout.numpy)[0]`` reads a packed struct.
    pack : callable
        ``pack(**values) -> bytes``, all fields by name. Integers, floats and bools may be Python's or NumPy's; a value
        that the C type cannot hold is an error.
    """

    def __init__(self, name: str, fields: Mapping[str, Field]) -> None:
        self.name = name
        self.fields = dict(fields)
        self.offsets: dict[str, int] = {}
        self.alignment: int = max((kind.alignment for kind in self.fields.values()), default=1)
        end = 0
        codes = ["<"]
        for field, kind in self.fields.items():
            offset = _round_up(end, kind.alignment)
            codes += [f"{offset - end}x", kind.code]
            self.offsets[field] = offset
            end = offset + kind.size
        self.size: int = _round_up(end, self.alignment)
        codes.append(f"{self.size - end}x")
        self._struct = struct.Struct("".join(codes))
        self.numpy: np.dtype[Any] = np.dtype(
            {
                "names": list(self.fields),
                "formats": [kind.numpy for kind in self.fields.values()],
                "offsets": list(self.offsets.values()),
                "itemsize": self.size,
            }
        )
        self.pack = self._packer()

    @property
    def code(self) -> str:
        """Letter in :mod:`struct` when this layout is a field: its bytes."""
        return f"{self.size}s"

    def __repr__(self) -> str:
        return f"<{self.name}: {self.size} bytes>"

    def _packer(self) -> Callable[..., bytes]:
        """Return the function ``pack``, written out for these fields.

        An operator call packs a few structs of up to forty fields, and a loop over them would be a large part of its
        time; so, as ``collections.namedtuple`` does, the call is spelled once and Python checks the names.
        """
        arguments = ", ".join(_argument(field, kind) for field, kind in self.fields.items())
        source = (
            f"def pack(*, {', '.join(self.fields)}):\n"
            f"    try:\n"
            f"        return _pack({arguments})\n"
            f"    except (_error, OverflowError, TypeError, ValueError):\n"
            f"        return _pack_carefully(locals())\n"
        )
        scope: dict[str, Any] = {
            "_pack": self._struct.pack,
            "_error": struct.error,
            "_pack_carefully": self._pack_carefully,
            "_sized": _sized,
            **{f"_size_of_{field}": kind.size for field, kind in self.fields.items()},
        }
        exec(compile(source, f"<{self.name}.pack>", "exec"), scope)
        pack: Callable[..., bytes] = scope["pack"]
        pack.__doc__ = f"Return {self.name} as {self.size} bytes."
        return pack

    def _pack_carefully(self, values: Mapping[str, Any]) -> bytes:
        """Pack one by one: convert what :mod:`struct` alone will not take, and name the field that cannot be."""
        converted = []
        for field, kind in self.fields.items():
            value = values[field]
            if value is None and kind is ptr:
                value = 0
            if isinstance(value, np.ndarray) and value.ndim == 0:
                value = value[()]
            if isinstance(value, np.bool_) and isinstance(kind, Scalar):
                value = bool(value)
            try:
                if isinstance(kind, (Layout, Opaque)):
                    _sized(value, kind.size)
                else:
                    struct.pack(f"<{kind.code}", value)
            except (struct.error, OverflowError, TypeError, ValueError) as error:
                self._refuse(field, kind, value, error)
            converted.append(value)
        return self._struct.pack(*converted)

    def _refuse(self, field: str, kind: Field, value: object, error: Exception) -> NoReturn:
        expected = f"a packed {kind.name}" if isinstance(kind, Layout) else getattr(kind, "name", "bytes")
        of_range = isinstance(value, (int, float, np.integer, np.floating)) and not (
            isinstance(value, (float, np.floating)) and kind is not f32
        )
        message = f"{self.name}.{field}: expected {expected}, got {value!r} ({error})"
        raise (OverflowError if of_range else TypeError)(message) from None

    def static_asserts(self) -> str:
        """C++ text: static assertions on the struct's size and on each field's offset, size and, for numbers, kind."""
        lines = [
            _OFFSET_OF,
            f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}: {self.size} bytes in Python");',
            *self._field_asserts(self.name, "", 0),
            "#undef PAGEDATTN_OFFSET_OF",
        ]
        return "\n".join(lines) + "\n"

    def _field_asserts(self, owner: str, path: str, base: int) -> list[str]:
        lines = []
        for field, kind in self.fields.items():
            member, offset = path + field, base + self.offsets[field]
            value = f"(({owner}*)0)->{member}"
            conditions = [f"PAGEDATTN_OFFSET_OF({owner}, {member}) == {offset}", f"sizeof({value}) == {kind.size}"]
            if isinstance(kind, Scalar) and kind.witness != "true":
                conditions.append(kind.witness.format(f"decltype({value})"))
            what = kind.name if isinstance(kind, (Scalar, Layout)) else "bytes"
            lines.append(
                f"static_assert({' && '.join(conditions)},\n"
                f'              "{owner}.{member}: {what} of {kind.size} bytes at offset {offset} in Python");'
            )
            if isinstance(kind, Layout):
                lines += kind._field_asserts(owner, f"{member}.", offset)
        return lines


Field = Scalar | Opaque | Layout

# NVRTC before 13.5 knows no __builtin_offsetof, and other compilers know no __INTADDR__.
_OFFSET_OF = """\
#if defined(__CUDACC_RTC__)
#define PAGEDATTN_OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)
#else
#define PAGEDATTN_OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif"""


def params(name: str, /, **fields: Field) -> Layout:
    """Describe the C++ struct ``name``: its fields by name, in order, each a scalar type or another layout.

    Examples
    --------
    >>> pair = params("Pair", data=ptr, count=i32)
    >>> pair.size, pair.offsets
    (16, {'data': 0, 'count': 8})
    """
    return Layout(name, fields)


def _argument(field: str, kind: Field) -> str:
    if kind is ptr:
        return f"0 if {field} is None else {field}"
    if isinstance(kind, (Layout, Opaque)):
        return f"_sized({field}, _size_of_{field})"
    return field


def _sized(value: object, size: int) -> bytes:
    """Return ``value``, bytes of just this size; :mod:`struct` would cut or fill any other in silence."""
    if not isinstance(value, bytes) or len(value) != size:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise TypeError(f"expected {size} bytes, got {got}")
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
