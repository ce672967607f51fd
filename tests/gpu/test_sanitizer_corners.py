"""Corner cases on the GPU, few enough for compute-sanitizer: hostile values, odd sizes, poisoned surroundings.

Outputs are NaN before: initcheck does not follow what the copy engine writes, and takes a new array for uninitialized.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import PagedAttention
from pagedattn.backends import flash_prefill, latent_mla
from pagedattn.kernels import decode_heads_sm90
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
    check_backend(target, case, into_nan=True)


@needs_hopper
@pytest.mark.parametrize(("case", "merged_keys"), [(case, i % 2 << 20) for i, case in enumerate(EIGHT_HEADS)], ids=str)
def test_all_heads_at_a_time(cupy, case: Case, merged_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_heads_sm90, "MERGED_SPLIT_KEYS", merged_keys)
    check_backend(ON_HOPPER["decode"], case, into_nan=True)


@needs_hopper
@pytest.mark.parametrize("case", LATENT_SPLITS, ids=str)
def test_two_latent_splits(cupy, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ON_HOPPER["latent"].options, "split_keys", 672)
    check_backend(ON_HOPPER["latent"], case, into_nan=True)


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
    good = {name: decoder.arrays[name].copy() for name in ("block_table", "cumulative_sequence_length")}
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
    for offsets in ([0, 5, 2, 3], [-3, big, 1, 2], [3, 2, 1, 0], [0, 0, 0, 0], [0, 1, -(2**31), 3]):
        decoder.arrays["cumulative_sequence_length"].set(np.array(offsets, np.int32))
        decoder.step()
    for name, x in good.items():
        decoder.arrays[name][...] = x
    decoder.prepare([3, 20, 30], 2)
    output, lse = (x.astype(np.float32).get() for x in decoder.step())
    assert np.isfinite(output).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("forced", [False, True], ids=["", "sm80"])
@pytest.mark.parametrize(
    ("backend", "num_heads", "cache"),
    [
        ("flash", 16, ""),
        ("latent", 33, ""),
        ("latent", 16, ""),
        ("latent", 128, "int8"),
        ("decode", 16, ""),
        ("dense", 16, ""),
    ],
)
def test_offsets_that_fall_by_more_than_fits_write_no_row_that_is_not_there(
    cupy, backend: str, num_heads: int, cache: str, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[0, 3, -2**31]: the difference is 2**31 - 3 in 32 bits."""
    for module in (flash_prefill, latent_mla):
        monkeypatch.setattr(module, "FORCE_SM80", forced)
    tokens, block_size = 64, 64
    is_latent = backend == "latent"
    kv_num_heads, head_size, v_head_size = (1, 576, 512) if is_latent else (2, 128, 128)
    keys = cupy.ones((tokens, kv_num_heads * head_size), cupy.float16)
    pool = cupy.ones((8, block_size, kv_num_heads, head_size), cupy.int8 if cache else cupy.float16)
    arrays = {
        "query": cupy.ones((tokens, num_heads * head_size), cupy.float16),
        "key": keys,
        "key_cache": pool,
        "cumulative_sequence_length": cupy.array([0, 3, -(2**31)], cupy.int32),
        "past_seqlens": cupy.array([5, 9], cupy.int32),
        "block_table": cupy.arange(8, dtype=cupy.int32).reshape(2, 4),
    }
    options = {"kv_cache_layout": "LATENT", "v_head_size": v_head_size} if is_latent else {}
    if cache:
        arrays["k_scale"] = cupy.ones(1, cupy.float32)
        options["k_quant_type"] = "PER_TENSOR"
    if not is_latent:
        arrays |= {"value": keys.copy(), "value_cache": pool.copy()}
    operator = PagedAttention(num_heads=num_heads, kv_num_heads=kv_num_heads, scale=0.1, backend=backend, **options)
    output = cupy.full((tokens + 4096, num_heads * v_head_size), 7, cupy.float16)
    operator(**arrays, out=output[:tokens])
    assert (output[tokens:] == 7).all()
