"""Verify the kernels on a GPU and keep the record in validation/h200.json.

    python scripts/gpu_check.py tests --out DIR       the GPU tests
    python scripts/gpu_check.py sanitizer --out DIR   corner cases under compute-sanitizer
    python scripts/gpu_check.py bench --out DIR       the benchmark
    python scripts/gpu_check.py merge --out DIR       the three parts into the record, if they are of the same sources
    python scripts/gpu_check.py all                   all of it, one after the other
    python scripts/gpu_check.py --check-digest        no GPU: is the record of these sources, and clean?

The record names its sources by a digest over the kernels and the Python that launches them, so a change to either
makes it stale and the test suite fails until the check has run again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "validation" / "h200.json"
# What decides the bits that a GPU computes. NumPy's backend does not.
SOURCES = (
    "kernels_cu",
    "pagedattn/kernels",
    "pagedattn/jit",
    "pagedattn/backends",
    "pagedattn/runtime.py",
    "pagedattn/workspace.py",
    "pagedattn/graph.py",
)
NOT_SOURCES = ("pagedattn/backends/numpy_reference.py",)
PARTS = ("tests", "sanitizer", "bench")


def digest() -> str:
    """SHA-256 over names and contents of the sources."""
    total = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        files = sorted(p for p in path.rglob("*") if p.suffix in (".py", ".cu", ".cuh")) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            if name not in NOT_SOURCES:
                total.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()


def problems(record: dict[str, Any]) -> list[str]:
    """Everything that keeps a record from standing for these sources; empty when it does, or says why it is pending."""
    if record.get("pending"):
        reason = record["pending"]
        return [] if isinstance(reason, str) else [f"pending: expected a reason, got {reason!r}"]
    found = []
    if record["digest"] != digest():
        found.append("the sources have changed since the record was made; run scripts/gpu_check.py on a GPU again")
    tests = record["tests"]
    if tests["failed"] or not tests["passed"]:
        found.append(f"tests: {tests['passed']} passed, {tests['failed']} failed")
    if not record["sanitizer"]:
        found.append("sanitizer: no tool ran")
    for entry in record["sanitizer"]:
        if entry["findings"] != 0 or entry["failed"] or not entry["passed"]:
            found.append(f"sanitizer {entry['tool']}: {entry['findings']} findings, {entry['failed']} tests failed")
    if not record["bench"]:
        found.append("bench: nothing was measured")
    return found + [f"bench {row['workload']}: {row['error']}" for row in record["bench"] if "error" in row]


def environment() -> dict[str, Any]:
    """GPU, driver and versions."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def run_tests() -> dict[str, Any]:
    """Run the tests marked gpu; the kernels they need are compiled in parallel by the first one."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = ["-n", str(min(12, os.cpu_count() or 1))] if _has_module("xdist") else []
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu or big_gpu", *workers, f"--junitxml={report}", "tests"],
            cwd=ROOT,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout[-8000:])
        suite = next(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else None
        if suite is None:
            return {"passed": 0, "failed": 1, "skipped": 0, "failures": [done.stdout[-2000:]]}
        count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failures = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        failed = count["failures"] + count["errors"]
        return {
            "passed": count["tests"] - failed - count["skipped"],
            "failed": failed,
            "skipped": count["skipped"],
            "failures": failures[:50],
        }


def _has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def run_part(part: str, workloads: list[str]) -> Any:
    """One part's results."""
    sys.path.insert(0, str(Path(__file__).parent))
    if part == "tests":
        return run_tests()
    if part == "sanitizer":
        import sanitize

        return sanitize.run_tools(sanitize.TOOLS, 240)
    import bench

    rows = []
    for row in bench.results(workloads or list(bench.WORKLOADS), None, None, quick=False):
        print(bench.line(row), flush=True)
        rows.append(row)
    return rows


def merge(folder: Path) -> dict[str, Any]:
    """One record of the parts; refuses parts of different sources."""
    parts = {part: json.loads((folder / f"{part}.json").read_text()) for part in PARTS}
    digests = {part: content["digest"] for part, content in parts.items()}
    if len(set(digests.values())) != 1:
        raise SystemExit(f"the parts are of different sources: {digests}")
    return {
        "digest": digests["tests"],
        "environment": parts["tests"]["environment"],
        "pending": None,
        **{part: content["result"] for part, content in parts.items()},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "merge", "all"))
    parser.add_argument("workloads", nargs="*", help="for bench: which ones")
    parser.add_argument("--out", type=Path, default=ROOT / "validation" / "parts", help="folder of the parts")
    parser.add_argument("--check-digest", action="store_true", help="check the record; needs no GPU")
    options = parser.parse_args()
    if options.check_digest:
        found = problems(json.loads(RECORD.read_text())) if RECORD.exists() else [f"{RECORD} does not exist"]
        print("\n".join(found) or "the record is of these sources and clean")
        return int(bool(found))
    if options.part is None:
        parser.error("name a part, or --check-digest")
    options.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS if options.part == "all" else [options.part] if options.part != "merge" else []:
        before = digest()
        result = run_part(part, options.workloads)
        content = {"digest": before, "environment": environment(), "result": result}
        (options.out / f"{part}.json").write_text(json.dumps(content, indent=1))
        print(f"{part}: {json.dumps(result)[:1500]}")
    if options.part in ("merge", "all"):
        record = merge(options.out)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        found = problems(record)
        print("\n".join(found) or f"{RECORD}: clean")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
