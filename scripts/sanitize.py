"""Run the GPU tests' corner cases under compute-sanitizer.

    python scripts/sanitize.py                      all four tools
    python scripts/sanitize.py memcheck racecheck   some

CuPy's memory pool is switched off in the tests then, so that each array is an allocation that the tool can guard.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FINDINGS_EXIT_CODE = 86


def run_tool(tool: str, timeout: float) -> dict[str, object]:
    """Run one tool; returns its record: findings, tests run and whether both were clean."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        str(FINDINGS_EXIT_CODE),
        "--print-limit",
        "20",
        "--kernel-name-exclude",
        "kns=cupy",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_sanitizer_corners.py",
    ]
    environment = {**os.environ, "PAGEDATTN_SANITIZE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=timeout,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        return {
            "tool": tool,
            "findings": None,
            "passed": 0,
            "failed": 0,
            "error": f"no end within {timeout:.0f} s",
            "tail": _tail(error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""),
        }
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    record: dict[str, object] = {
        "tool": tool,
        "findings": int(summary[-1]) if summary else None,
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
    }
    if record["findings"] != 0 or record["failed"] or not record["passed"]:
        record["error"] = f"exit code {done.returncode}"
        record["tail"] = _tail(done.stdout)
    return record


def _tail(text: str) -> str:
    return text[-4000:]


def main() -> int:
    """Command line; the exit code is 1 when a tool found something or a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=[], help=f"among {', '.join(TOOLS)}; all by default")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one tool")
    options = parser.parse_args()
    bad = False
    for tool in options.tools or TOOLS:
        record = run_tool(tool, options.timeout)
        print(f"{tool:10} findings {record['findings']}  passed {record['passed']}  failed {record['failed']}")
        if "error" in record:
            bad = True
            print(record["error"], record["tail"], sep="\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
