"""group_query_attention on the CUDA kernels, run on the CPU: the same bits as paged_attention on the same backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedattn import UnsupportedError, group_query_attention, paged_attention
from pagedattn.testing import emulate
from tests.support.build import build
from tests.support.cases import SMOKE, Case
from tests.support.compare import assert_same_bits
from tests.support.padded import has_padded_form, padded

from . import toolchain

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

CASES = [case for case in SMOKE if has_padded_form(case)]


@pytest.mark.parametrize("backend", ["decode", "flash", "dense"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_as_paged(case: Case, backend: str):
    built = build(case)
    call = padded(built)
    built.options.update(qk_dtype=case.io)
    with emulate():
        try:
            want = built.run(paged_attention, backend=backend)
        except UnsupportedError as error:
            with pytest.raises(UnsupportedError, match="backend"):
                group_query_attention(**call.inputs, **call.attributes, backend=backend)
            pytest.skip(str(error))
        got = group_query_attention(**call.inputs, **call.attributes, backend=backend)
    assert_same_bits(call.ragged(got.output), want.output[: call.sequence.size])
    assert_same_bits(call.paged(got.present_key, want.key_cache_out), want.key_cache_out, "present_key")
    assert_same_bits(call.paged(got.present_value, want.value_cache_out), want.value_cache_out, "present_value")
    if case.qk_output:
        width = min(want.output_qk.shape[2], got.output_qk.shape[3])
        scores = want.output_qk[:, : call.sequence.size, :width].swapaxes(0, 1)
        assert_same_bits(call.ragged(got.output_qk.swapaxes(1, 2)), scores)


H, KH, D = 4, 2, 64


def small(length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float16)

    angle = np.arange(64)[:, None] / 100 ** (np.arange(D // 2) / (D // 2))
    return {
        "query": normal(2, length, H * D),
        "key": normal(2, length, KH * D),
        "value": normal(2, length, KH * D),
        "cos_cache": np.cos(angle).astype(np.float16),
        "sin_cache": np.sin(angle).astype(np.float16),
        "do_rotary": 1,
        "num_heads": H,
        "kv_num_heads": KH,
        **more,
    }


def near(got: Any, want: Any) -> None:
    """float16 kernels and the NumPy backend differ by roundings of P and of sums."""
    step = np.finfo(np.float16).eps
    error = np.abs(got.astype(np.float32) - want.astype(np.float32)).max()
    assert error <= 4 * step * np.abs(want.astype(np.float32)).max()


@pytest.mark.parametrize("backend", ["decode", "flash", "dense"])
def test_position_ids_turn_and_do_not_mask(backend: str):
    rng = np.random.default_rng(3)
    past = {name: rng.standard_normal((2, KH, 13, D)).astype(np.float16) for name in ("past_key", "past_value")}
    call = small(3, seqlens_k=np.array([9, 12], np.int32), total_sequence_length=13)
    call["position_ids"] = np.array([[40, 9, 1], [5, 50, 7]])
    want = group_query_attention(**call, **{name: x.copy() for name, x in past.items()})
    with emulate():
        got = group_query_attention(**call, **past, backend=backend)
    near(got.output, want.output)
    assert np.abs(got.present_key.astype(np.float32) - want.present_key.astype(np.float32)).max() <= 2 * 2.0**-9


def test_sliding_cache():
    caches = [{name: np.zeros((2, KH, 6, D), np.float16) for name in ("past_key", "past_value")} for _ in range(2)]
    total = 0
    for step, length in enumerate((5, 1, 3, 1)):
        total += length
        call = small(length, step, seqlens_k=np.full(2, total - 1, np.int32), total_sequence_length=total)
        call.update(query_seqlens=np.full(2, length, np.int32), local_window_size=4, sliding_window_cache=1)
        want = group_query_attention(**call, **caches[0])
        with emulate():
            got = group_query_attention(**call, **caches[1])
        near(got.output, want.output)


def test_keys_of_length_zero_write_nothing():
    rng = np.random.default_rng(3)
    past = {name: rng.standard_normal((2, KH, 9, D)).astype(np.float16) for name in ("past_key", "past_value")}
    call = small(1, seqlens_k=np.array([6, 8], np.int32), total_sequence_length=9, **past)
    call.update({name: call[name][:, :0] for name in ("key", "value")})
    before = past["past_key"].copy()
    want = group_query_attention(**call)
    with emulate():
        got = group_query_attention(**call)
    near(got.output, want.output)
    assert_same_bits(past["past_key"], before)
