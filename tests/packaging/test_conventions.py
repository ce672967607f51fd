"""The import layers, the linter and the type checker, each as the project's configuration has it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("importlinter", (*PYTHON, "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])")),
        ("ruff", (sys.executable, "-m", "ruff", "check", "--no-cache", ".")),
        ("mypy", (sys.executable, "-m", "mypy")),
    ],
    ids=["layers", "lint", "types"],
)
def test_passes(module, command):
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_cupy_is_imported_in_one_module():
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "pagedattn").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip().startswith(("import cupy", "from cupy")) or 'import_module("cupy' in line
    }
    assert importers == {"pagedattn/jit/cuda.py"}
