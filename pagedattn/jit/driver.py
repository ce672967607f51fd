"""Driver calls that CuPy's binding lacks, through ctypes: launches with attributes, ready to be issued again and again.

The structs are those of ``cuda.h``; a 64-bit driver lays them out the same since CUDA 11.8.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from pagedattn.errors import MissingDependencyError, PagedAttentionError

# A launch that may start before the kernel ahead of it has ended. In a captured graph, drivers from 12.3 on make it an
# edge of that kind.
OVERLAP_CAPABILITY = (9, 0)
OVERLAP_DRIVER = 12030
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),  # of a union of 64 bytes
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_OVERLAP = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)


@functools.cache
def function(name: str) -> Any:
    """A function of the driver, by name; it returns an error code."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        found = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(f"the NVIDIA driver has no {name}: {error}") from error
    found.restype = ctypes.c_int
    return found


class ReadyLaunch:
    """A launch whose arguments are laid out for the driver; nothing of it changes, so threads may share it.

    Parameters
    ----------
    name : str
        Of the kernel, for messages.
    kernel : int
        Its ``CUfunction``.
    grid : three int
    block : int
        Threads of a CTA, all along x.
    shared_bytes : int
        Dynamic shared memory of a CTA.
    params : bytes
        The kernel's one parameter.
    stream : int
        Handle of the stream.
    overlaps : bool
        Start it before the kernel ahead has ended; the kernel waits by itself.

    Attributes
    ----------
    issue : callable
        Issues it and returns an error code, `refusal` of which says what it means; the kernel's device is current.
    """

    __slots__ = ("_config", "_name", "_params", "issue")

    def __init__(
        self,
        name: str,
        kernel: int,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        params: bytes,
        stream: int,
        overlaps: bool,
    ) -> None:
        self._name = name
        self._params = ctypes.create_string_buffer(params, len(params))
        attributes = ctypes.pointer(_OVERLAP) if overlaps else None
        self._config = _Config(grid, (block, 1, 1), shared_bytes, stream, attributes, 1 if overlaps else 0)
        # Arguments that ctypes need not convert at each call, which is one of C alone; the driver has copied the
        # parameters when it returns.
        self.issue: Callable[[], int] = functools.partial(
            function("cuLaunchKernelEx"),
            ctypes.byref(self._config),
            ctypes.c_void_p(kernel),
            (ctypes.c_void_p * 1)(ctypes.addressof(self._params)),
            None,
        )

    def refusal(self, status: int) -> PagedAttentionError:
        """What to raise for an error code."""
        config = self._config
        return PagedAttentionError(
            f"{self._name}: the driver refused to launch {tuple(config.grid)} CTAs of {config.block[0]} threads "
            f"with {config.shared_bytes} bytes of shared memory: {error_text(status)}"
        )


def error_text(status: int) -> str:
    """What the driver says of one of its error codes."""
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        if function(name)(status, ctypes.byref(text)) == 0 and text.value:
            texts.append(text.value.decode(errors="replace"))
    return ": ".join(texts) or f"error {status}"
