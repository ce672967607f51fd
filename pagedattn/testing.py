"""Running the CUDA kernels' own sources on the CPU, in a checkout of the repository.

The emulator is test infrastructure and no part of an installed package; see docs/debugging-kernels.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from pagedattn import runtime
from pagedattn.errors import MissingDependencyError


@contextmanager
def emulate() -> Iterator[None]:
    """Serve calls on arrays in host memory with the CUDA backends, run on the CPU thread by thread.

    ``backend=`` still chooses among all; "numpy" runs as ever. Setting PAGEDATTN_EMULATE=1 has the same effect for a
    whole process.

    Raises
    ------
    MissingDependencyError
        The repository's ``tests`` are not importable, or there is no g++.
    """
    before = runtime.use_emulator(emulator())
    try:
        yield
    finally:
        runtime.use_emulator(before)


def emulator() -> runtime.Runtime:
    """The emulated device, made at first use."""
    try:
        module = importlib.import_module("tests.emulator.runtime")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "the kernel emulator lives in the repository's tests/emulator: run from the root of a checkout, "
            "or install it with pip install -e"
        ) from error
    device: runtime.Runtime = module.runtime()
    return device
