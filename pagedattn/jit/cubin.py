"""Read what a kernel uses from its cubin: registers, local memory and shared memory.

A cubin is an ELF file. Each kernel is a function symbol with its own section ``.text.<name>``; its static shared memory
is the size of ``.nv.shared.<name>``, and the section ``.nv.info`` lists attributes, of which two are read here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB = 2  # section type
_FUNCTION = 2  # symbol type

# .nv.info: (format, attribute, 16-bit value or size) and, in the sized format, that many bytes.
_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # each: symbol index, value

# From sm_90 on the system takes the first KiB of a CTA's shared memory, and the kernel's section counts it.
_RESERVED_SECTION, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024


@dataclass(frozen=True)
class Resources:
    """What one kernel uses.

    Attributes
    ----------
    registers : int
        Registers of a thread.
    local_bytes : int
        Stack frame of a thread, in local memory: spilled registers and arrays that are indexed at run time.
    shared_bytes : int
        Static shared memory of a CTA, without what the system reserves.
    code_bytes : int
        Size of the instructions.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    code_bytes: int


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Return what each kernel of a cubin uses, by mangled name."""
    sections = list(_sections(cubin))
    by_name = {name: (offset, size) for name, _, offset, size, _ in sections}
    symbols = next(_symbols(cubin, section, sections) for section in sections if section[1] == _SYMTAB)
    functions = {index: name for index, (name, kind) in enumerate(symbols) if kind == _FUNCTION}
    reserved = _RESERVED_BYTES if _RESERVED_SECTION in by_name else 0
    attributes: dict[tuple[str, int], int] = {}
    for name, _, offset, size, _ in sections:
        if name == ".nv.info":
            for attribute, payload in _sized_attributes(cubin[offset : offset + size]):
                if attribute in (_FRAME_SIZE, _REGISTERS):
                    index, value = struct.unpack("<II", payload)
                    if index in functions:
                        attributes[functions[index], attribute] = value
    return {
        name: Resources(
            registers=attributes[name, _REGISTERS],
            local_bytes=attributes.get((name, _FRAME_SIZE), 0),
            shared_bytes=max(by_name.get(f".nv.shared.{name}", (0, 0))[1] - reserved, 0),
            code_bytes=by_name[f".text.{name}"][1],
        )
        for name in functions.values()
        if f".nv.info.{name}" in by_name and (name, _REGISTERS) in attributes
    }


_Section = tuple[str, int, int, int, int]  # name, type, offset, size, link


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not a cubin: it does not start as an ELF file does")
    *_, table, _flags, _size, _phsize, _phcount, entry_size, count, names_index = _HEADER.unpack_from(cubin)
    rows = [_SECTION.unpack_from(cubin, table + i * entry_size) for i in range(count)]
    names = rows[names_index][4]
    for name, kind, _flags, _address, offset, size, link, *_ in rows:
        yield _text(cubin, names + name), kind, offset, size, link


def _symbols(cubin: bytes, section: _Section, sections: list[_Section]) -> list[tuple[str, int]]:
    _, _, offset, size, link = section
    names = sections[link][2]
    rows = (_SYMBOL.unpack_from(cubin, at) for at in range(offset, offset + size, _SYMBOL.size))
    return [(_text(cubin, names + name), info & 0xF) for name, info, *_ in rows]


def _sized_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
