"""Run Python under AddressSanitizer and UndefinedBehaviorSanitizer, with kernels compiled for them.

::

    python -m tests.emulator.sanitize -m pytest tests/emulator

The arguments are those of the Python that is started. A report does not end the process: the launch that caused it
raises :class:`tests.emulator.executor.EmulatorError` with the report's text.
"""

from __future__ import annotations

import os
import subprocess
import sys

from . import toolchain

_ASAN = (
    "detect_leaks=0",  # Python never frees all
    "halt_on_error=0",
    "suppress_equal_pcs=0",  # each launch reports
    "allow_user_segv_handler=1",
    *(f"handle_{signal}=0" for signal in ("segv", "sigbus", "sigfpe", "sigill", "abort")),  # the emulator's own
)
_UBSAN = ("print_stacktrace=1",)


def environment() -> dict[str, str]:
    """Environment of a process under the sanitizers."""
    compiler = toolchain.find().compiler
    libraries = [_library(compiler, name) for name in ("libasan.so", "libubsan.so")]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": ":".join(_ASAN),
        "UBSAN_OPTIONS": ":".join(_UBSAN),
        "EMULATOR_MODE": "sanitize",
    }


def _library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise toolchain.ToolchainError(f"the sanitize mode needs {name}, which {compiler} does not have")
    return os.path.realpath(path)


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
