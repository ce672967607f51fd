"""Every kernel compiles for every architecture, within its budget of registers, local and shared memory."""

from __future__ import annotations

import pytest

from pagedattn.errors import MissingDependencyError
from pagedattn.jit import cuda
from pagedattn.jit.compiler import default_compiler
from scripts import compile_all

MODULES = compile_all.kernel_modules()
PAIRS = [
    (stem, arch)
    for stem, module in MODULES.items()
    for arch in compile_all.ARCHS
    if module.KERNEL.archs is None or arch in module.KERNEL.archs
]


@pytest.mark.parametrize(("stem", "arch"), PAIRS)
def test_compiles_within_budget(stem, arch):
    try:
        cuda.nvrtc()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    budget, nvrtc = compile_all.Budget.read(), compile_all.nvrtc_name()
    complaints = []
    for kernel, spec, _ in compile_all.jobs_of(stem, MODULES[stem], arch):
        usage = compile_all.measure(default_compiler(), kernel, spec, arch)
        complaints.append(budget.complaint(kernel.expression(spec), arch, usage, nvrtc))
    assert not [complaint for complaint in complaints if complaint]


def test_budget_holds_no_kernel_that_is_gone():
    wanted = {
        kernel.expression(spec)
        for stem, module in MODULES.items()
        for arch in compile_all.ARCHS
        for kernel, spec, _ in compile_all.jobs_of(stem, module, arch)
    }
    assert set(compile_all.Budget.read().rows) <= wanted


@pytest.mark.parametrize("arch", compile_all.ARCHS)
def test_each_kernel_has_a_spec_that_fits(arch):
    for stem, module in MODULES.items():
        if module.KERNEL.archs is None or arch in module.KERNEL.archs:
            assert list(compile_all.jobs_of(stem, module, arch)), f"{stem} has no Spec for {arch}"


def test_each_cu_file_has_a_module_of_its_stem():
    stems = {path.stem for path in default_compiler().sources.files() if path.suffix == ".cu"}
    assert stems == set(MODULES)
    for stem, module in MODULES.items():
        assert module.__name__ == f"pagedattn.kernels.{stem}"
        assert module.smoke_specs()


class TestBudget:
    USAGE = compile_all.Usage(40, 0, 1024)

    def test_round_trip(self, tmp_path):
        budget = compile_all.Budget("12.9", {})
        budget.record("k<S{}>", "sm_80", self.USAGE)
        budget.record("k<S{}>", "sm_90a", self.USAGE)
        budget.write(tmp_path / "budget.json")
        read = compile_all.Budget.read(tmp_path / "budget.json")
        assert (read.nvrtc, read.rows) == (budget.nvrtc, budget.rows)

    @pytest.mark.parametrize(
        ("usage", "nvrtc", "expected"),
        [
            ((40, 0, 1024), "12.9", None),
            ((30, 0, 0), "12.9", None),
            ((41, 0, 1024), "12.9", "registers 41, budget 40"),
            ((40, 8, 1024), "12.9", "local_bytes 8, budget 0"),
            ((41, 0, 1024), "13.0", None),
            ((41, 8, 1024), "13.0", "local_bytes 8, budget 0"),
        ],
    )
    def test_complaint(self, usage, nvrtc, expected):
        budget = compile_all.Budget("12.9", {"k": {"sm_80": self.USAGE}})
        complaint = budget.complaint("k", "sm_80", compile_all.Usage(*usage), nvrtc)
        assert complaint == (expected and f"k on sm_80: {expected}")

    def test_a_kernel_without_a_budget_is_a_complaint(self):
        assert "--update-budget" in compile_all.Budget("", {}).complaint("k", "sm_80", self.USAGE, "12.9")
