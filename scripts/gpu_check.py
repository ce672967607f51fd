"""Verify the kernels on a GPU and keep the record in validation/h200.json and validation/h200_outputs.npz.

    python scripts/gpu_check.py tests --out DIR       the GPU tests
    python scripts/gpu_check.py sanitizer --out DIR   corner cases under compute-sanitizer
    python scripts/gpu_check.py bench --out DIR       the benchmark
    python scripts/gpu_check.py outputs --out DIR     results of fixed calls, which tests/emulator compares with its own
    python scripts/gpu_check.py models --out DIR      models in bfloat16 against the unmodified ones; needs torch
    python scripts/gpu_check.py merge --out DIR       the parts into the record, if they are of the same sources
    python scripts/gpu_check.py all                   all of it, one after the other
    python scripts/gpu_check.py --check-digest        no GPU: is the record of these sources, and clean?

The record names its sources by a digest over the kernels and the Python that launches them, so a change to either
makes it stale and the test suite fails until the check has run again. After a merge, `python -m scripts.generate_docs`
brings the tables of docs/ up to it, and `python -m scripts.plot_bench` the figures.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "validation" / "h200.json"
OUTPUTS = ROOT / "validation" / "h200_outputs.npz"
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
# The parts of a record, and what stands for one that has not run.
NOTHING: dict[str, Any] = {
    "tests": {"passed": 0, "failed": 0, "skipped": 0},
    "sanitizer": [],
    "bench": [],
    "outputs": None,
    "models": None,
}
PARTS = tuple(NOTHING)


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
    found += [f"bench {row['workload']}: {row['error']}" for row in record["bench"] if "error" in row]
    if not OUTPUTS.exists() or _sha256(OUTPUTS) != record["outputs"]["sha256"]:
        found.append(f"outputs: {OUTPUTS.name} is not the file that was recorded with the rest")
    models = record["models"]
    if not models["absent"] and (models["failed"] or not models["passed"]):
        found.append(f"models: {models['passed']} passed, {models['failed']} failed")
    return found


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
    """Run the tests marked gpu; a kernel is compiled for the first test that needs it."""
    return run_pytest("-m", "gpu or big_gpu", *_workers(), "tests")


def _workers() -> list[str]:
    # Tests take from milliseconds to half a minute: who is done takes over from who is not.
    return ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"] if _has_module("xdist") else []


def run_pytest(*arguments: str) -> dict[str, Any]:
    """Run pytest; how many tests passed, failed and were skipped, and names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments],
            cwd=ROOT,
            env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")},  # a core a worker
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


def run_outputs(file: Path) -> dict[str, Any]:
    """Record the results of the fixed calls on the GPU in a file."""
    from tests.support import recorded

    before = digest()
    recording = {str(call): recorded.run(call, recorded.gpu_target(call.backend)) for call in recorded.CALLS}
    recorded.save(file, recording, before)
    return {"calls": len(recording), "sha256": _sha256(file)}


def run_models() -> dict[str, Any]:
    """Models on the GPU: the tests that run there, and each family's errors; without torch the reason why not."""
    absent = [name for name in ("torch", "transformers") if not _has_module(name)]
    if absent:
        reason = f"{' and '.join(absent)} not installed"
        return {"absent": reason, "passed": 0, "failed": 0, "skipped": 0, "failures": [], "families": {}}
    result = {"absent": None, **run_pytest("--gpu", "-k", "cuda", "tests/models")}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "tests.models.report", "--gpu", "--json", str(figures)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return {**result, "failed": result["failed"] + 1, "failures": [*result["failures"], " ".join(command[1:])]}
        return {**result, **json.loads(figures.read_text())}


def _has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def run_part(part: str, workloads: list[str], folder: Path, save: Callable[[Any], None]) -> Any:
    """One part's results, which ``save`` may get early; outputs are a file in the folder as well."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    if part == "tests":
        return run_tests()
    if part == "sanitizer":
        import sanitize

        run_pytest(*_workers(), "tests/gpu/test_sanitizer_corners.py")  # compiles; the tools would slow that down
        return sanitize.run_tools(sanitize.TOOLS, 240)
    if part == "outputs":
        return run_outputs(folder / OUTPUTS.name)
    if part == "models":
        return run_models()
    import bench

    rows = []
    for row in bench.results(workloads or list(bench.NAMES), None, None, quick=False):
        print(bench.line(row), flush=True)
        rows.append(row)
        save(rows)  # what is there when the time is up
    return rows


def merge(folder: Path, pending: str | None = None) -> dict[str, Any]:
    """One record of the parts; refuses parts of different sources, and a want of some unless ``pending`` says why."""
    files = {part: folder / f"{part}.json" for part in PARTS}
    parts = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    missing = [part for part in PARTS if part not in parts]
    if missing and not (parts and pending):
        raise SystemExit(f"not there yet: {', '.join(missing)}; --pending REASON makes a record of the others")
    digests = {part: content["digest"] for part, content in parts.items()}
    if len(set(digests.values())) != 1:
        raise SystemExit(f"the parts are of different sources: {digests}")
    some = next(iter(parts.values()))
    return {
        "digest": some["digest"],
        "environment": some["environment"],
        "pending": pending,
        **{part: parts[part]["result"] if part in parts else empty for part, empty in NOTHING.items()},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "merge", "all"))
    parser.add_argument("workloads", nargs="*", help="for bench: which ones")
    parser.add_argument("--out", type=Path, default=ROOT / "validation" / "parts", help="folder of the parts")
    parser.add_argument("--pending", metavar="REASON", help="for merge: why the record is not whole")
    parser.add_argument("--check-digest", action="store_true", help="check the record; needs no GPU")
    options = parser.parse_args()
    if options.check_digest:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else None
        found = [f"{RECORD} does not exist"] if record is None else problems(record)
        pending = record and record.get("pending")
        print("\n".join(found) or (f"pending: {pending}" if pending else "the record is of these sources and clean"))
        return int(bool(found))
    if options.part is None:
        parser.error("name a part, or --check-digest")
    options.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS if options.part == "all" else [options.part] if options.part != "merge" else []:
        head = {"digest": digest(), "environment": environment()}

        def save(result: Any, file: Path = options.out / f"{part}.json", head: dict[str, Any] = head) -> None:
            file.write_text(json.dumps({**head, "result": result}, indent=1))

        result = run_part(part, options.workloads, options.out, save)
        save(result)
        print(f"{part}: {json.dumps(result)[:1500]}")
    if options.part in ("merge", "all"):
        record = merge(options.out, options.pending)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        if record["outputs"]:
            shutil.copyfile(options.out / OUTPUTS.name, OUTPUTS)
        found = problems(record)
        print("\n".join(found) or f"{RECORD}: {'pending' if options.pending else 'clean'}")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
