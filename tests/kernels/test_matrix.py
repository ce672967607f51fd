"""Every cell of the support table: each CUDA backend on each case against the float64 oracle, on a GPU and emulated.

What a backend serves has to be right, in poisoned surroundings; what it does not has to be refused for its own reason.
"""

from __future__ import annotations

import os
import re
from types import ModuleType
from typing import Any

import pytest

import pagedattn
from pagedattn import support
from pagedattn.arrays import NUMPY
from pagedattn.backends import decode_split_kv, flash_prefill, latent_mla
from pagedattn.dtypes import BY_NAME
from pagedattn.validate import validate
from tests.faults.targets import Target, all_targets
from tests.support.build import Built, build, outside
from tests.support.cases import CORNER, EIGHT_HEADS, LATENT_SPLITS, SMOKE, Case, grid, sizes
from tests.support.compare import verify

# Every CUDA backend: on a GPU where there is one, and emulated where the sources can be built for the CPU.
TARGETS = [target for target in all_targets() if target.row.min_arch]
# Hopper has kernels of its own beside those of all others.
ON_HOPPER = {target.backend: target for target in TARGETS if target.on_gpu and target.arch == 90}
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU, which has two kernels")
# The emulator is some thousand times slower than a GPU; the whole grid runs there on request.
WIDE = os.environ.get("PAGEDATTN_GRID") == "1"


def cases_of(target: Target) -> list[Case]:
    cases = SMOKE + CORNER + grid() + sizes() if target.on_gpu or WIDE else SMOKE
    return [case for case in cases if case.io != "float32"]


def parameters() -> list[Any]:
    return [
        pytest.param(target, case, id=f"{target}-{case}", marks=[pytest.mark.gpu] if target.on_gpu else [])
        for target in TARGETS
        for case in cases_of(target)
    ]


def reason_against(target: Target, built: Built) -> str | None:
    """Why the support table says that the backend does not serve a case."""
    infos = {
        name: NUMPY.describe(x)._replace(device="cpu" if name == "attention_metadata" else target.device)
        for name, x in built.inputs.items()
    }
    metadata = built.inputs.get("attention_metadata")
    problem = validate(
        infos,
        built.attributes,
        return_lse=built.options.get("return_lse", False),
        qk_dtype=BY_NAME[built.options.get("qk_dtype", "float32")],
        metadata=None if metadata is None else tuple(metadata.tolist()),
    )
    return support.why_not(target.row, problem, target.arch)


@pytest.mark.skipif(not TARGETS, reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize(("target", "case"), parameters())
def test_backend_is_right_or_refuses(target: Target, case: Case) -> None:
    check_backend(target, case)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("backend", "module"), [("flash", flash_prefill), ("latent", latent_mla)])
@pytest.mark.parametrize("case", [case for case in SMOKE + CORNER + grid() + sizes() if case.io != "float32"], ids=str)
def test_it_is_right_without_hopper_too(
    case: Case, backend: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORCE_SM80", True)
    check_backend(ON_HOPPER[backend], case)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("case", EIGHT_HEADS, ids=str)
def test_all_heads_at_a_time(case: Case, by_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_split_kv, "FORCE_HEADS", by_heads)
    check_backend(ON_HOPPER["decode"], case)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("keys", [672, 336])
@pytest.mark.parametrize("case", LATENT_SPLITS, ids=str)
def test_two_latent_splits_or_more(case: Case, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ON_HOPPER["latent"].options, "split_keys", keys)
    check_backend(ON_HOPPER["latent"], case)


def check_backend(target: Target, case: Case) -> None:
    """Run a case on a backend and compare everything with the oracle, or see that it is refused as the table says."""
    built = build(case)
    reason = reason_against(target, built)
    if reason is not None:
        with pytest.raises(pagedattn.UnsupportedError, match=re.escape(reason)):
            target.run_built(built)
        return
    result, after = target.run_built(built)
    for name, (array, index) in built.parents.items():
        assert outside(after[name], index) == outside(array, index), f"{name}: something beside it was written"
        if name not in ("key_cache", "value_cache"):
            assert after[name].tobytes() == array.tobytes(), f"{name} was written"
    verify(built, result)
