"""Every cell of the support table: each CUDA backend on each case against the float64 oracle, on a GPU and emulated.

What a backend serves has to be right, in poisoned surroundings; what it does not has to be refused for its own reason.
"""

from __future__ import annotations

import os
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pagedattn
from pagedattn.backends import decode_split_kv, flash_prefill, latent_mla
from pagedattn.kernels import combine_splits, decode_heads_sm90
from tests.faults.targets import Target, all_targets
from tests.support.build import Array, Built, build, outside
from tests.support.cases import CORNER, EIGHT_HEADS, LATENT_SPLITS, SMOKE, Case, grid, latents, sizes
from tests.support.compare import verify

# Every CUDA backend: on a GPU where there is one, and emulated where the sources can be built for the CPU.
TARGETS = [target for target in all_targets() if target.row.min_arch]
EMULATED = {target.backend: target for target in TARGETS if target.is_emulated}
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
@pytest.mark.parametrize(("by_heads", "merged_keys"), [(True, 0), (True, 1 << 20), (False, 0)])
@pytest.mark.parametrize("case", EIGHT_HEADS, ids=str)
def test_all_heads_at_a_time(case: Case, by_heads: bool, merged_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_split_kv, "FORCE_HEADS", by_heads)
    monkeypatch.setattr(decode_heads_sm90, "MERGED_SPLIT_KEYS", merged_keys)
    check_backend(ON_HOPPER["decode"], case)


@pytest.mark.parametrize("parts", [33, 70, 150])
@pytest.mark.parametrize("head_size", [40, 96, 128, 256])
@pytest.mark.parametrize(
    "target",
    [pytest.param(t, id=str(t), marks=[pytest.mark.gpu] * t.on_gpu) for t in TARGETS if t.backend == "decode"],
)
def test_many_parts(target: Target, head_size: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits of a row than four warps merge at once, beside rows with fewer of them, one and none."""
    monkeypatch.setitem(target.options, "split_keys", 16)
    lengths = (*((16 * n - 3, 1) for n in (parts, 33, 32, 9, 8, 1)), (5, 0), (0, 1))
    check_backend(target, Case(group_size=2, head_size=head_size, lengths=lengths, sink=True))


@pytest.mark.skipif("decode" not in EMULATED, reason="needs g++ and the CUDA headers")
@pytest.mark.parametrize("head_size", [40, 96])
def test_who_merges_makes_no_difference(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight or sixteen warps with a run each and 64 channels, or one with a whole row: the bits are the same."""
    monkeypatch.setitem(EMULATED["decode"].options, "split_keys", 16)
    built = build(Case(group_size=2, head_size=head_size, lengths=((16 * 60 - 3, 1), (16 * 20, 1)), sink=True))
    table, results = built["block_table"], []
    for width, shared_from in ((64, 4096), (150, 4096), (151, 1)):  # a block is a split
        monkeypatch.setattr(combine_splits, "CTAS_WORTH_SHARING", shared_from)
        wide = np.full((2, width), -1, np.int32)
        wide[:, : table.shape[1]] = table
        built.parents["block_table"] = wide, ...
        result, _ = EMULATED["decode"].run_built(built)
        results.append([np.asarray(x).tobytes() for x in (result.output, result.lse)])
    assert results[0] == results[1] == results[2]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("keys", [672, 336])
@pytest.mark.parametrize("case", LATENT_SPLITS, ids=str)
def test_two_latent_splits_or_more(case: Case, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ON_HOPPER["latent"].options, "split_keys", keys)
    check_backend(ON_HOPPER["latent"], case)


def latent_parameters() -> list[Any]:
    """All of `latents()` on Hopper's kernels, whole and split; some on that of all others, on a GPU and emulated."""
    found = []
    for i, case in enumerate(latents()):
        gpu, emulated = ON_HOPPER.get("latent"), EMULATED.get("latent")
        chosen = [(gpu, 0, False), (gpu, 2 + i % 2, False)]
        if i % 2 == 0:
            chosen.append((gpu, 2, True))
        if WIDE or (i % 4 == 0 and case.io == "float16" and case.batch_size < 100):
            chosen.append((emulated, 2, True))
        found += [
            pytest.param(
                target,
                splits,
                aside,
                case,
                id=f"{target}{'-sm80' * aside}-{splits}-{case}",
                marks=[pytest.mark.gpu] * target.on_gpu,
            )
            for target, splits, aside in chosen
            if target is not None
        ]
    return found


@pytest.mark.skipif(not TARGETS, reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize(("target", "splits", "force_sm80", "case"), latent_parameters())
def test_latent_sizes_of_hoppers_kernels(
    target: Target, splits: int, force_sm80: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_mla, "FORCE_SM80", force_sm80)
    if splits:
        monkeypatch.setitem(target.options, "split_keys", case.split_keys(splits))
    check_backend(target, case)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("force_sm80", [False, True], ids=["", "sm80"])
@pytest.mark.parametrize("case", [case for case in latents() if case.k_quant == "PER_CHANNEL"][::4], ids=str)
def test_scales_of_either_sign(case: Case, force_sm80: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host does not see them."""
    monkeypatch.setattr(latent_mla, "FORCE_SM80", force_sm80)
    built = build(case)
    built["k_scale"][..., ::3] *= -1
    check_built(ON_HOPPER["latent"], built)


def check_backend(target: Target, case: Case, into_nan: bool = False) -> None:
    """Run a case on a backend and compare everything with the oracle, or see that it is refused as the table says.

    The output may be memory that holds NaN before.
    """
    check_built(target, build(case), into_nan)


def check_built(target: Target, built: Built, into_nan: bool = False) -> None:
    """The same for arrays that a case has made."""
    reason = target.why_not(built.inputs, built.attributes, **built.options)
    if reason is not None:
        with pytest.raises(pagedattn.UnsupportedError, match=re.escape(reason)):
            target.run_built(built)
        return
    result, after = target.run_built(built, into_nan)
    check_untouched(built, after)
    verify(built, result)


def check_untouched(built: Built, after: dict[str, Array]) -> None:
    """See that a call has written to its caches and to nothing else; ``after`` is as `Placed.fetch` returns it."""
    for name, (array, index) in built.parents.items():
        assert outside(after[name], index) == outside(array, index), f"{name}: something beside it was written"
        if name not in ("key_cache", "value_cache"):
            assert after[name].tobytes() == array.tobytes(), f"{name} was written"
