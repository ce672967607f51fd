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
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FINDINGS_EXIT_CODE = 86


def run_tool(tool: str, timeout: float, share: int, shares: int) -> dict[str, Any]:
    """Run one tool over every ``shares``-th test; returns its findings, tests run, and what went wrong."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu/test_sanitizer_corners.py"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS_EXIT_CODE), "--show-backtrace", "no"]
    command += ["--print-limit", "200", sys.executable, *tests]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PAGEDATTN_SANITIZE": "1", "PAGEDATTN_SHARE": f"{share}/{shares}", "PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's child as well, which would go on
        output, _ = process.communicate()
        error = f"no end within {timeout:g} s"
        return {"tool": tool, "findings": None, "passed": 0, "failed": 0, "error": error, "tail": output[-3000:]}
    summary = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", output, re.MULTILINE)
    verdict = re.findall(r"^=* *((?:\d+ \w+,? )+in [\d.]+s)", output, re.MULTILINE)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", verdict[-1] if verdict else "")}
    record: dict[str, Any] = {
        "tool": tool,
        "findings": int(summary[0]) if summary else None,
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
    }
    if record["findings"] != 0 or record["failed"] or not record["passed"]:
        places = Counter(re.findall(r"^=+ +(?:and )?(.*? at .*?)(?: in .*)?$", output, re.MULTILINE))
        record["error"] = f"exit code {process.returncode}"
        record["places"] = dict(places.most_common(40))
        if not places:
            record["tail"] = output[-3000:]
    return record


def run_tools(tools: Sequence[str], timeout: float, shares: int | None = None) -> list[dict[str, Any]]:
    """Run several tools side by side, each in ``shares`` processes that divide the tests: one is bound by one core."""
    shares = shares or max(1, (os.cpu_count() or 1) // len(tools))
    work = [(tool, timeout, share, shares) for tool in tools for share in range(shares)]
    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        parts = list(pool.map(lambda arguments: run_tool(*arguments), work))
    return [together([part for part in parts if part["tool"] == tool]) for tool in tools]


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of a tool's shares; its findings are unknown when those of a share are."""
    findings = [part["findings"] for part in parts]
    record: dict[str, Any] = {
        "tool": parts[0]["tool"],
        "findings": None if None in findings else sum(findings),
        **{key: sum(part[key] for part in parts) for key in ("passed", "failed")},
    }
    wrong = [part for part in parts if "error" in part]
    if wrong:
        record["error"] = "; ".join(dict.fromkeys(part["error"] for part in wrong))
        places: Counter[str] = Counter()
        for part in wrong:
            places.update(part.get("places", {}))
        record["places"] = dict(places.most_common(40))
        record["tail"] = next((part["tail"] for part in wrong if "tail" in part), "")
    return record


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
