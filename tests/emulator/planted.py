"""The planted faults of kernels/faults.cu: run one and return what the emulator said.

Run as a module, it runs those named on the command line and prints their messages as JSON; the sanitizers' tests start
it in a process of its own.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, params, ptr
from pagedattn.jit.sources import Sources, default_sources
from pagedattn.jit.spec import Spec

from .executor import EmulatorError, EmulatorExecutor

HERE = Path(__file__).resolve().parent
TEXT = (HERE / "kernels" / "faults.cu").read_text()
FAULTS = re.findall(r"\bk[A-Z]\w+", TEXT.partition("enum Fault {")[2].partition("}")[0])
THREADS = 128
SHARED_BYTES = 4 * THREADS


@dataclass(frozen=True)
class FaultsSpec(Spec):
    """Nothing to choose: which fault it is comes with the launch, so that all are compiled once."""


PARAMS = params("FaultsParams", source=ptr, target=ptr, count=i32, offset=i32, fault=i32)
KERNEL = Kernel("faults", FaultsSpec, PARAMS, lambda spec: THREADS, lambda spec: SHARED_BYTES)


def sources() -> Sources:
    """The kernels of these tests, with the package's headers."""
    own = Sources(HERE)
    own.include_dir = default_sources().include_dir
    return own


def line_of(fault: str) -> str:
    """``faults.cu:<line>`` of the line that is marked as the fault's place."""
    (line,) = (n for n, text in enumerate(TEXT.splitlines(), 1) if text.endswith(f"// <- {fault}"))
    return f"faults.cu:{line}"


def run(executor: EmulatorExecutor, fault: str, offset: int = 0, ctas: int = 2) -> np.ndarray:
    """Launch a fault; the output, poison where nothing was written."""
    function = executor.load(KERNEL, FaultsSpec())
    count = ctas * THREADS
    source = executor.upload(np.arange(1, count + 1, dtype=np.float32))
    target = executor.empty(count, np.float32)
    packed = PARAMS.pack(
        source=executor.pointer(source),
        target=executor.pointer(target),
        count=count,
        offset=offset,
        fault=FAULTS.index(fault),
    )
    executor.launch(function, (ctas, 1, 1), THREADS, SHARED_BYTES, packed)
    return np.array(target)


def message(executor: EmulatorExecutor, fault: str, offset: int = 0) -> str:
    """What the emulator says of a fault; empty when it says nothing."""
    try:
        run(executor, fault, offset)
    except EmulatorError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    shared_executor = EmulatorExecutor(sources())
    named = [argument.partition("=") for argument in sys.argv[1:]]
    print(json.dumps({fault: message(shared_executor, fault, int(offset or 0)) for fault, _, offset in named}))
