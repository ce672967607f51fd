"""Corner cases on the GPU, few enough for compute-sanitizer: hostile values, odd sizes, poisoned surroundings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.faults.targets import Target
from tests.kernels.test_matrix import ON_HOPPER, TARGETS, check_backend, needs_hopper
from tests.support.cases import CORNER, EIGHT_HEADS, LATENT_SPLITS, SMOKE, Case

from .decoding import Decoder, Model

GPU_TARGETS = [target for target in TARGETS if target.on_gpu]
CASES = [case for case in [*CORNER, *SMOKE[::3]] if case.io != "float32"]


@pytest.mark.skipif(not GPU_TARGETS, reason="needs a GPU with CuPy")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", GPU_TARGETS, ids=str)
def test_corner(cupy, target: Target, case: Case) -> None:
    check_backend(target, case)


@needs_hopper
@pytest.mark.parametrize("case", EIGHT_HEADS, ids=str)
def test_all_heads_at_a_time(cupy, case: Case) -> None:
    check_backend(ON_HOPPER["decode"], case)


@needs_hopper
@pytest.mark.parametrize("case", LATENT_SPLITS, ids=str)
def test_two_latent_splits(cupy, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ON_HOPPER["latent"].options, "split_keys", 672)
    check_backend(ON_HOPPER["latent"], case)


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        Model(num_heads=16, kv_num_heads=8, head_size=128),
        *(Model(num_heads=n, kv_num_heads=1, head_size=576, v_head_size=512) for n in (16, 128)),
    ],
    ids=str,
)
def test_hostile_values_touch_nothing_they_must_not(cupy, model: Model) -> None:
    decoder = Decoder(cupy, model, (1, 32))
    big = 2**31 - 1
    for past in ([-5, big, big - 3], [510, 511, 512], [-(2**31), 100_000, 1]):
        decoder.prepare(past, 0)
        decoder.step()
    decoder.arrays["block_table"][...] = cupy.asarray(
        np.random.default_rng(0)
        .choice([-1, -7, big, 10**6, 0, 3], decoder.arrays["block_table"].shape)
        .astype(np.int32)
    )
    decoder.prepare([40, 3, 500], 1)
    decoder.step()
    for offsets in ([0, 5, 2, 3], [-3, big, 1, 2], [3, 2, 1, 0], [0, 0, 0, 0]):
        decoder.arrays["cumulative_sequence_length"].set(np.array(offsets, np.int32))
        decoder.step()
    cupy.cuda.Device().synchronize()
