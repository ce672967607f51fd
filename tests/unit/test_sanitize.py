"""scripts/sanitize.py with a sanitizer that finds what the test says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import sanitize


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program in the sanitizer's place; it leaves a file for each share."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SHARES", str(tmp_path))
    return program


def write(program: Path, body: str) -> None:
    program.write_text(f'#!/bin/sh\ntouch "$SHARES/$(echo $2-$PAGEDATTN_SHARE | tr / -)"\n{body}\n')
    program.chmod(0o755)


def test_shares_of_a_tool_are_added_up(tool: Path, tmp_path: Path) -> None:
    write(tool, 'echo "===== 3 passed, 1 skipped in 0.10s ====="; echo "========= ERROR SUMMARY: 0 errors"')
    found = sanitize.run_tools(["memcheck", "initcheck"], 60, shares=2)
    assert found == [{"tool": name, "findings": 0, "passed": 6, "failed": 0} for name in ("memcheck", "initcheck")]
    shares = {f"{name}-{share}-2" for name in ("memcheck", "initcheck") for share in (0, 1)}
    assert {path.name for path in tmp_path.iterdir()} == shares | {"bin"}


def test_findings_come_with_their_places(tool: Path) -> None:
    write(
        tool,
        'echo "=========     Write Thread at unpack()+0x20 in kernel.cu:3"; echo "1 failed, 2 passed in 0.10s"; '
        'echo "========= RACECHECK SUMMARY: 2 hazards displayed"; exit 86',
    )
    (found,) = sanitize.run_tools(["racecheck"], 60, shares=2)
    assert (found["findings"], found["passed"], found["failed"]) == (4, 4, 2)
    assert found["error"] == "exit code 86"
    assert found["places"] == {"Write Thread at unpack()+0x20": 2}


def test_a_tool_that_does_not_end_is_stopped_with_its_child(tool: Path) -> None:
    write(tool, "sleep 600 & wait")
    (found,) = sanitize.run_tools(["memcheck"], 0.5, shares=1)
    assert found["findings"] is None
    assert found["error"] == "no end within 0.5 s"


def test_a_tool_that_says_nothing_is_no_success(tool: Path) -> None:
    write(tool, 'echo "Device not supported"; exit 1')
    (found,) = sanitize.run_tools(["synccheck"], 60, shares=1)
    assert (found["findings"], found["passed"], found["error"]) == (None, 0, "exit code 1")
    assert "Device not supported" in found["tail"]
