"""Run the GPU tests' corner cases under compute-sanitizer.

    python scripts/sanitize.py                      all four tools
    python scripts/sanitize.py memcheck racecheck   some

CuPy's memory pool is switched off in the tests then, so that each array is an allocation that the tool can guard.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FINDINGS_EXIT_CODE = 86


def run_tool(tool: str, timeout: float) -> dict[str, object]:
    """Run one tool; returns its record: findings, tests run, and what went wrong if anything did."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_sanitizer_corners.py"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS_EXIT_CODE), "--show-backtrace", "no"]
    command += ["--print-limit", "200", sys.executable, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PAGEDATTN_SANITIZE": "1"},
            timeout=timeout,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return {"tool": tool, "findings": None, "passed": 0, "failed": 0, "error": f"no end within {timeout:.0f} s"}
    summary = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout, re.MULTILINE)
    verdict = re.findall(r"^(?!=)(.*\b(?:passed|failed|error)\b.* in [\d.]+s.*)$", done.stdout, re.MULTILINE)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", verdict[-1] if verdict else "")}
    record: dict[str, object] = {
        "tool": tool,
        "findings": int(summary[0]) if summary else None,
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
    }
    if record["findings"] != 0 or record["failed"] or not record["passed"]:
        places = Counter(re.findall(r"^=+ +(?:and )?(.*? at .*?)(?: in .*)?$", done.stdout, re.MULTILINE))
        record["error"] = f"exit code {done.returncode}"
        record["places"] = dict(places.most_common(12))
        if not places:
            record["tail"] = done.stdout[-3000:]
    return record


def run_tools(tools: Sequence[str], timeout: float) -> list[dict[str, object]]:
    """Run several tools side by side: each is bound by one core of the host."""
    with ThreadPoolExecutor(max_workers=len(tools)) as pool:
        return list(pool.map(lambda tool: run_tool(tool, timeout), tools))


def main() -> int:
    """Command line; the exit code is 1 when a tool found something or a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=[], help=f"among {', '.join(TOOLS)}; all by default")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one tool")
    options = parser.parse_args()
    records = run_tools(options.tools or TOOLS, options.timeout)
    print(json.dumps(records, indent=1))
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
