"""Spec: what the compiler sees of a kernel, one frozen dataclass that mirrors a C++ struct.

::

    @dataclass(frozen=True)
    class DecodeSpec(Spec):          # struct DecodeSpec { DType io; int head_size; bool has_window; };
        io: DType
        head_size: int
        has_window: bool

    DecodeSpec(BFLOAT16, 128, True).cpp()   # DecodeSpec{.io = DType::bf16, .head_size = 128, .has_window = true}

Fields have the C++ struct's names and order. Designated initializers make another name or order a compile error, and
:meth:`Spec.field_check` a field that only C++ has, which would be zero in silence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pagedattn.dtypes import DType

if TYPE_CHECKING:
    from typing import Any


class Spec:
    """Base of the Specs: subclass it with ``@dataclass(frozen=True)`` and fields of type DType, int or bool."""

    def cpp(self) -> str:
        """Text of the C++ template argument: ``Name{.field = value, ...}``."""
        fields = ", ".join(f".{name} = {_cpp(name, value)}" for name, value in self._items())
        return f"{type(self).__name__}{{{fields}}}"

    @classmethod
    def field_check(cls) -> str:
        """C++ text that compiles only if the struct has as many fields as this class."""
        names = ", ".join(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        if not names:
            return f'static_assert(sizeof({cls.__name__}) == 1, "{cls.__name__}: no fields in Python");\n'
        return (
            f"constexpr bool pagedattn_has_the_fields_of_python({cls.__name__} spec) {{\n"
            f"  [[maybe_unused]] const auto [{names}] = spec;\n"
            f"  return true;\n"
            f"}}\n"
        )

    def __str__(self) -> str:
        """Short form for test ids and logs: ``io=bf16,head_size=128,has_window=1``."""
        return ",".join(
            f"{name}={value.cpp if isinstance(value, DType) else int(value)}" for name, value in self._items()
        )

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def _cpp(name: str, value: object) -> str:
    if isinstance(value, DType):
        return f"DType::{value.cpp}"
    if isinstance(value, bool):  # before int: True is an int too
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise OverflowError(f"{name}: {value} does not fit int")
        return str(value)
    raise TypeError(f"{name}: a Spec field is a DType, an int or a bool, got {type(value).__name__} {value!r}")
