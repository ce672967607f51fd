"""Compile every kernel's smoke Specs for every architecture, without a GPU, and keep the budget of their resources.

Usage, from the root of a checkout::

    python -m scripts.compile_all                     # all of it
    python -m scripts.compile_all --stem write_cache --arch sm_90a
    python -m scripts.compile_all --update-budget     # record registers, local and shared memory as the new budget
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pagedattn.kernels
from pagedattn.errors import CompileError
from pagedattn.jit import cuda
from pagedattn.jit.compiler import MAX_SHARED_BYTES, Compiler, default_compiler
from pagedattn.jit.cubin import Resources, read_resources
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
MAX_FAILURES_SHOWN = 3  # one mistake in a header fails every kernel in the same way
BUDGET = ROOT / "tests" / "compile" / "budget.json"


def kernel_modules() -> dict[str, Any]:
    """The modules of ``pagedattn.kernels`` that hold a kernel, by stem."""
    names = sorted(module.name for module in pkgutil.iter_modules(pagedattn.kernels.__path__))
    modules = {name: importlib.import_module(f"pagedattn.kernels.{name}") for name in names}
    return {module.KERNEL.stem: module for module in modules.values() if hasattr(module, "KERNEL")}


def jobs_of(stem: str, module: Any, arch: str) -> Iterator[tuple[Kernel[Any], Spec, str]]:
    """What to compile of one kernel for one architecture: the Specs that it could launch."""
    kernel: Kernel[Any] = module.KERNEL
    if kernel.archs is None or arch in kernel.archs:
        for spec in module.smoke_specs():
            if kernel.shared_bytes(spec) <= MAX_SHARED_BYTES[int(arch[3:].rstrip("a"))]:
                yield kernel, spec, arch


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: registers and local memory of a thread, shared memory of a CTA."""

    registers: int
    local_bytes: int
    shared_bytes: int

    @classmethod
    def of(cls, kernel: Kernel[Any], spec: Spec, resources: Resources) -> Usage:
        return cls(resources.registers, resources.local_bytes, resources.shared_bytes + kernel.shared_bytes(spec))


def measure(compiler: Compiler, kernel: Kernel[Any], spec: Spec, arch: str) -> Usage:
    """Compile one kernel and read what it takes."""
    binary = compiler.compile(kernel, spec, arch)
    return Usage.of(kernel, spec, read_resources(binary.cubin)[binary.entry])


class Budget:
    """Recorded usage by kernel and architecture; the file also names the NVRTC that it was measured with.

    Another NVRTC may allocate registers otherwise, so only local memory is compared then: a spill is a fault anywhere.
    """

    def __init__(self, nvrtc: str, rows: dict[str, dict[str, Usage]]) -> None:
        self.nvrtc = nvrtc
        self.rows = rows

    @classmethod
    def read(cls, path: Path = BUDGET) -> Budget:
        if not path.exists():
            return cls("", {})
        data = json.loads(path.read_text())
        rows = {name: {arch: Usage(*row) for arch, row in archs.items()} for name, archs in data["kernels"].items()}
        return cls(data["nvrtc"], rows)

    def write(self, path: Path = BUDGET) -> None:
        kernels = {
            name: {arch: list(dataclasses.astuple(self.rows[name][arch])) for arch in ARCHS if arch in self.rows[name]}
            for name in sorted(self.rows)
        }
        lines = [
            f"    {json.dumps(name)}: {{\n"
            + ",\n".join(f"      {json.dumps(arch)}: {json.dumps(row)}" for arch, row in archs.items())
            + "\n    }"
            for name, archs in kernels.items()
        ]
        columns = json.dumps([field.name for field in dataclasses.fields(Usage)])
        body = ",\n".join(lines)
        path.write_text(
            f'{{\n  "nvrtc": {json.dumps(self.nvrtc)},\n  "columns": {columns},\n  "kernels": {{\n{body}\n  }}\n}}\n'
        )

    def record(self, name: str, arch: str, usage: Usage) -> None:
        self.rows.setdefault(name, {})[arch] = usage

    def complaint(self, name: str, arch: str, usage: Usage, nvrtc: str) -> str | None:
        """Return what is over the budget, or None."""
        budget = self.rows.get(name, {}).get(arch)
        if budget is None:
            return f"{name} on {arch}: not in the budget; run python -m scripts.compile_all --update-budget"
        columns = ["local_bytes"] if nvrtc != self.nvrtc else [field.name for field in dataclasses.fields(Usage)]
        over = [
            f"{column} {getattr(usage, column)}, budget {getattr(budget, column)}"
            for column in columns
            if getattr(usage, column) > getattr(budget, column)
        ]
        return f"{name} on {arch}: {'; '.join(over)}" if over else None


def nvrtc_name() -> str:
    """Version of the NVRTC in use, as the budget names it."""
    return ".".join(str(part) for part in cuda.nvrtc().version)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stem", action="append", help="only this kernel; may be repeated")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="only this architecture; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    parser.add_argument("--update-budget", action="store_true", help=f"write {BUDGET.relative_to(ROOT)}")
    options = parser.parse_args(arguments)

    modules = kernel_modules()
    unknown = sorted(set(options.stem or ()) - set(modules))
    if unknown:
        parser.error(f"no such kernel: {', '.join(unknown)}; there are {', '.join(modules)}")
    work = [
        job
        for stem, module in modules.items()
        if not options.stem or stem in options.stem
        for arch in options.arch or ARCHS
        for job in jobs_of(stem, module, arch)
    ]
    compiler, budget, nvrtc = default_compiler(), Budget.read(), nvrtc_name()
    measured: dict[tuple[str, str], Usage] = {}
    failures: list[str] = []
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        futures = {pool.submit(measure, compiler, *job): job for job in work}
        for done, future in enumerate(as_completed(futures), start=1):
            kernel, spec, arch = futures[future]
            name = kernel.expression(spec)
            try:
                usage = measured[name, arch] = future.result()
            except CompileError as error:
                failures.append(str(error))
                outcome = "FAILED"
            else:
                outcome = f"{usage.registers} registers, {usage.local_bytes} local, {usage.shared_bytes} shared bytes"
                complaint = None if options.update_budget else budget.complaint(name, arch, usage, nvrtc)
                if complaint:
                    failures.append(complaint)
            print(f"[{done:4}/{len(work)}] {arch:7} {kernel.stem} {spec}: {outcome}", flush=True)
    print(f"{len(work)} kernels, {compiler.compilations} compiled, {time.perf_counter() - start:.1f} s, NVRTC {nvrtc}")

    if options.update_budget:
        if not options.stem and not options.arch:
            budget.rows.clear()  # a whole run also drops what no longer exists
        budget.nvrtc = nvrtc
        for (name, arch), usage in measured.items():
            budget.record(name, arch, usage)
        budget.write()
    for failure in failures[:MAX_FAILURES_SHOWN]:
        print(f"\n{failure.strip()}", file=sys.stderr)
    if failures:
        print(f"\n{len(failures)} failed, {min(len(failures), MAX_FAILURES_SHOWN)} shown", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
