"""Every environment variable that pagedattn reads: its name, its meaning and a typed reader.

Variables are read when they are asked for, so a change made after import is seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from pagedattn.errors import InvalidArgumentError

_FALSE = ("", "0", "false", "off", "no")
_TRUE = ("1", "true", "on", "yes")


@dataclass(frozen=True)
class Variable:
    """One row of the table: the name, and what it does in one or two sentences."""

    name: str
    doc: str

    def text(self) -> str | None:
        """Value with surrounding blanks removed, or None when unset or empty."""
        return os.environ.get(self.name, "").strip() or None

    def flag(self) -> bool:
        """Value as a switch: ``1 true on yes`` or ``0 false off no``, in any case; off when unset."""
        value = os.environ.get(self.name, "").strip().lower()
        if value in _FALSE:
            return False
        if value in _TRUE:
            return True
        raise InvalidArgumentError(f"{self.name}: expected one of {', '.join(_TRUE + _FALSE[1:])}, got {value!r}.")


CACHE_DIR = Variable(
    "PAGEDATTN_CACHE_DIR",
    "Folder for compiled kernels. Default: 'pagedattn' in the user's cache folder. Any number of processes "
    "may share it, and it may be deleted at any time.",
)
CHECKS = Variable(
    "PAGEDATTN_CHECKS",
    "1: read back lengths, block tables and slots, and check their values, as `checks=True` does. Costs a "
    "synchronization a call.",
)
DEBUG_INFO = Variable(
    "PAGEDATTN_DEBUG_INFO",
    "1: print one line a call that names the backend that serves it, and why each earlier one does not.",
)
ORT_DEBUG_INFO = Variable(
    "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO", "ONNX Runtime's own name of PAGEDATTN_DEBUG_INFO; either switches it on."
)
BACKEND = Variable(
    "PAGEDATTN_BACKEND",
    "Name of the backend to use, as the argument `backend=`. A call that it cannot serve is an error.",
)
EMULATE = Variable(
    "PAGEDATTN_EMULATE",
    "1: serve arrays in host memory with the CUDA backends, their sources run on the CPU thread by thread, unless the "
    "backend numpy is asked for. In a checkout's root, or anywhere with an editable install; slow; needs g++.",
)

TABLE = (CACHE_DIR, CHECKS, DEBUG_INFO, ORT_DEBUG_INFO, BACKEND, EMULATE)
_AS_STORED = getattr(os.environ, "encodekey", str)
_OF_CALLS = tuple(_AS_STORED(row.name) for row in (BACKEND, CHECKS, DEBUG_INFO, ORT_DEBUG_INFO))


def concerns_calls() -> bool:
    """Whether a variable is there that `backend`, `checks` or `debug_info` reads.

    One look for every call, which spares those three: ``os.environ.get`` raises and catches two errors where a variable
    is not set.
    """
    stored = getattr(os.environ, "_data", None)
    return stored is None or not stored.keys().isdisjoint(_OF_CALLS)


def cache_dir() -> str | None:
    """Folder for compiled kernels, or None for the platform's default."""
    return CACHE_DIR.text()


def checks() -> bool:
    """Whether values on the device are checked when a call does not say."""
    return CHECKS.flag()


def debug_info() -> bool:
    """Whether each call prints the backend that serves it."""
    return DEBUG_INFO.flag() or ORT_DEBUG_INFO.flag()


def backend() -> str | None:
    """Name of the forced backend, or None."""
    return BACKEND.text()


def emulate() -> bool:
    """Whether arrays in host memory are served by the CUDA backends in the CPU emulator."""
    return EMULATE.flag()
