"""group_query_attention: the same answers as paged_attention, whatever the padding; its own rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import Float8View, InvalidArgumentError, UnsupportedError, gqa, group_query_attention, paged_attention
from tests.support.build import build
from tests.support.cases import CORNER, SMOKE, Case, grid, tiny
from tests.support.compare import assert_same_bits, bits
from tests.support.padded import has_padded_form, padded

BOTH_WAYS = [
    Case(is_causal=False, lengths=((0, 5), (0, 3), (0, 5)), sink=True, rope="full"),
    Case(is_causal=False, lengths=((4, 3), (9, 3)), bias="1H", softcap=2.0),
]
CASES = [case for case in SMOKE + tiny() + CORNER + grid() + BOTH_WAYS if has_padded_form(case)]
IDLE_BATCH = Case(lengths=((9, 0), (3, 1), (0, 5), (5, 3), (2, 0)), sink=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_paged_attention_bit_for_bit(case: Case):
    built = build(case)
    call = padded(built)
    before = {name: np.array(x, copy=True) for name, x in call.inputs.items()}
    got = group_query_attention(**call.inputs, **call.attributes)
    built.options.update(qk_dtype=case.io)  # the type of output_qk here
    want = built.run(paged_attention)
    rows = call.sequence.size
    assert_same_bits(call.ragged(got.output), want.output[:rows])
    assert got.present_key is call.inputs["past_key"]
    assert got.present_value is call.inputs["past_value"]
    assert_same_bits(call.paged(got.present_key, want.key_cache_out), want.key_cache_out, "present_key")
    assert_same_bits(call.paged(got.present_value, want.value_cache_out), want.value_cache_out, "present_value")
    if case.qk_output:
        width = min(want.output_qk.shape[2], got.output_qk.shape[3])
        assert_same_bits(call.ragged(got.output_qk.swapaxes(1, 2)), want.output_qk[:, :rows, :width].swapaxes(0, 1))
    padding = np.ones(got.output.shape[:2], bool)
    padding[call.sequence, call.row] = False
    assert not bits(got.output)[padding].any()
    for name, x in call.inputs.items():
        written = name in ("past_key", "past_value")
        kept = [
            (x[b, :, slots.size :] if written else x, before[name][b, :, slots.size :] if written else before[name])
            for b, slots in enumerate(call.slots)
        ]
        assert all(np.array_equal(bits(now), bits(then)) for now, then in kept), f"{name} was written"


@pytest.mark.parametrize("case", [c for c in CASES if c.cache == "float8e4m3fn"], ids=str)
def test_float8_caches_may_be_views_of_bytes(case: Case):
    call = padded(build(case))
    bare = padded(build(case)).inputs
    for name in ("past_key", "past_value"):
        bare[name] = Float8View(bare[name].view(np.uint8))
    want = group_query_attention(**call.inputs, **call.attributes)
    got = group_query_attention(**bare, **call.attributes)
    assert_same_bits(got.output, want.output)
    assert_same_bits(got.present_key.array, want.present_key.view(np.uint8), "present_key")
    assert_same_bits(got.present_value.array, want.present_value.view(np.uint8), "present_value")


def test_the_cases_reach_every_feature():
    """What has_padded_form leaves out is only what GroupQueryAttention cannot say."""
    for needed in ("qk_norm", "sink", "softcap", "bias", "qk_output", "cache", "padding", "strided"):
        assert any(getattr(case, needed) for case in CASES), needed
    assert {case.mode for case in CASES} == {"separate", "packed"}
    assert {case.cache for case in CASES} == {"", "int8", "float8e4m3fn", "int4"}
    assert any(not case.is_causal for case in CASES)


# ---- a small call to vary ----------------------------------------------------------------------------------------

H, KH, D = 4, 2, 16


def simple(
    lengths: Any = ((3, 2), (0, 4), (7, 1)), capacity: int = 12, dtype: Any = np.float32, **attributes: Any
) -> Any:
    """Arguments of a call with random numbers."""
    rng = np.random.default_rng(7)
    past, new = np.array(lengths).T
    batch, length, total = new.size, int(new.max()), int((past + new).max())

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "query": normal(batch, length, H * D),
        "key": normal(batch, length, KH * D),
        "value": normal(batch, length, KH * D),
        "past_key": normal(batch, KH, capacity, D),
        "past_value": normal(batch, KH, capacity, D),
        "seqlens_k": (past + new - 1).astype(np.int32),
        "total_sequence_length": total,
        "query_seqlens": new.astype(np.int32),
        "num_heads": H,
        "kv_num_heads": KH,
        **attributes,
    }


def fresh(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in call.items()}


def rope_tables(rows: int = 32, half: int = 8) -> dict[str, Any]:
    angle = np.arange(rows)[:, None] / 100 ** (np.arange(half) / half)
    return {
        "cos_cache": np.cos(angle).astype(np.float32),
        "sin_cache": np.sin(angle).astype(np.float32),
        "do_rotary": 1,
    }


# ---- caches ------------------------------------------------------------------------------------------------------


def test_cache_without_room_is_copied_into_a_larger_one():
    call = simple(capacity=12)
    small = fresh(call)
    for name in ("past_key", "past_value"):
        small[name] = call[name][:, :, :7].copy()
    before = small["past_key"].copy()
    got, want = group_query_attention(**small), group_query_attention(**call)
    assert got.present_key.shape == (3, KH, 8, D)
    assert_same_bits(got.output, want.output)
    for b, total in enumerate((5, 4, 8)):
        assert_same_bits(got.present_key[b, :, :total], want.present_key[b, :, :total])
        assert_same_bits(got.present_value[b, :, :total], want.present_value[b, :, :total])
    assert_same_bits(small["past_key"], before)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_prompt_without_a_cache_makes_one(dtype: Any):
    call = simple(((0, 3), (0, 3)), dtype=dtype)
    for name in ("past_key", "past_value", "query_seqlens"):
        del call[name]
    got = group_query_attention(**call)
    assert got.present_key.shape == (2, KH, 3, D)
    assert got.present_key.dtype == dtype
    assert_same_bits(got.present_key, call["key"].reshape(2, 3, KH, D).swapaxes(1, 2))
    assert_same_bits(got.present_value, call["value"].reshape(2, 3, KH, D).swapaxes(1, 2))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_quantized_caches_grow(dtype: Any):
    call = simple(((3, 2),), 5)
    width = D // 2 if dtype == np.uint8 else D
    codes = np.random.default_rng(0).integers(0, 100, (1, KH, 8, width)).astype(np.uint8).view(dtype)
    call.update(
        past_key=codes, past_value=codes[:, :, ::-1].copy(), k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR"
    )
    call.update(dict.fromkeys(("k_scale", "v_scale"), np.array([0.05], np.float32)))
    call["kv_cache_bit_width"] = 4 if dtype == np.uint8 else 8
    small = fresh(call)
    for name in ("past_key", "past_value"):
        small[name] = call[name][:, :, :3].copy()
    got, want = group_query_attention(**small), group_query_attention(**call)
    assert got.present_key.dtype == dtype
    assert_same_bits(got.output, want.output)
    assert_same_bits(got.present_key, want.present_key[:, :, :5])


def test_cache_may_be_a_strided_view():
    call = simple()
    both = np.stack([call["past_key"], call["past_value"]], axis=3)
    strided = {**fresh(call), "past_key": both[:, :, :, 0], "past_value": both[:, :, :, 1]}
    assert_same_bits(group_query_attention(**strided).output, group_query_attention(**call).output)
    assert_same_bits(np.ascontiguousarray(strided["past_key"]), call["past_key"])


def test_keys_of_length_zero_read_the_cache_only():
    """The last tokens of the cache are those of the queries."""
    call = simple(((3, 2), (5, 2)))
    del call["query_seqlens"]
    whole = group_query_attention(**call)
    again = {**call, "key": call["key"][:, :0], "value": call["value"][:, :0]}
    before = call["past_key"].copy()
    assert_same_bits(group_query_attention(**again).output, whole.output)
    assert_same_bits(call["past_key"], before)


def test_scales_may_have_four_axes():
    call = simple()
    scale = np.random.default_rng(1).uniform(0.01, 0.05, (KH, 1, D)).astype(np.float32)
    call.update(k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL", k_scale=scale, v_scale=scale)
    call.update({name: (call[name] * 30).astype(np.int8) for name in ("past_key", "past_value")})
    more = {**fresh(call), "k_scale": scale[None], "v_scale": scale[None]}
    assert_same_bits(group_query_attention(**more).output, group_query_attention(**call).output)


# ---- rows --------------------------------------------------------------------------------------------------------


def test_out_is_written_and_returned():
    call = simple()
    want = group_query_attention(**fresh(call)).output
    out = np.full((3, 4, H * D), np.nan, np.float32)
    assert group_query_attention(**fresh(call), out=out).output is out
    assert_same_bits(out, want)
    wide = np.full((3, 4, 2 * H * D), np.nan, np.float32)
    group_query_attention(**fresh(call), out=wide[..., ::2])
    assert_same_bits(np.ascontiguousarray(wide[..., ::2]), want)
    assert np.isnan(wide[..., 1::2]).all()


def test_query_may_be_a_column_slice():
    call = simple()
    fused = np.concatenate([call["query"], call["key"], call["value"]], axis=2)
    sliced = {
        **fresh(call),
        "query": fused[..., : H * D],
        "key": fused[..., H * D : (H + KH) * D],
        "value": fused[..., (H + KH) * D :],
    }
    assert_same_bits(group_query_attention(**sliced).output, group_query_attention(**call).output)


def test_prompt_of_several_lengths_needs_no_query_seqlens():
    """A sequence of fewer tokens than rows has no past."""
    call = simple(((0, 4), (0, 2), (0, 3)))
    del call["query_seqlens"]
    without = {**fresh(call), "query_seqlens": np.array([4, 2, 3], np.int32)}
    assert_same_bits(group_query_attention(**call).output, group_query_attention(**without).output)


def test_causal_0_sees_no_padding():
    call = simple(((0, 4), (0, 2)), causal=0)
    del call["query_seqlens"]
    call["key"][1, 2:] = np.nan
    call["value"][1, 2:] = np.nan
    one = {name: x[1:, :2] if name in ("query", "key", "value") else x for name, x in fresh(call).items()}
    one.update(
        past_key=call["past_key"][1:].copy(),
        past_value=call["past_value"][1:].copy(),
        seqlens_k=np.array([1], np.int32),
        total_sequence_length=2,
    )
    np.testing.assert_allclose(
        group_query_attention(**call).output[1:, :2], group_query_attention(**one).output, rtol=0, atol=1e-6
    )


def test_idle_sequences_are_left_alone():
    built = build(IDLE_BATCH)
    call = padded(built)
    idle = [b for b, slots in enumerate(call.slots) if not (call.sequence == b).any()]
    before = call.inputs["past_key"].copy()
    got = group_query_attention(**call.inputs, **call.attributes)
    for b in idle:
        assert not bits(got.output)[b].any()
        assert_same_bits(got.present_key[b], before[b])
    assert len(idle) == 2


def test_no_rows_at_all():
    call = simple(((3, 1),))
    for name in ("query", "key", "value"):
        call[name] = call[name][:, :0]
    call["query_seqlens"] = np.zeros(1, np.int32)
    assert group_query_attention(**call).output.shape == (1, 0, H * D)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)).filter(any), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_padding_rows_do_not_matter(lengths: list[tuple[int, int]], more: int):
    """A longer padded chunk gives the same rows."""
    call = simple([(past, max(new, 1)) for past, new in lengths], capacity=24)
    call["total_sequence_length"] = 20
    new = np.array([new for _, new in lengths])
    call["seqlens_k"] = (np.array([past for past, _ in lengths]) + new - 1).astype(np.int32)
    call["query_seqlens"] = new.astype(np.int32)
    longer = fresh(call)
    for name in ("query", "key", "value"):
        longer[name] = np.pad(longer[name], ((0, 0), (0, more), (0, 0)), constant_values=np.nan)
    got, want = group_query_attention(**longer), group_query_attention(**call)
    assert_same_bits(got.output[:, : want.output.shape[1]], want.output)
    assert_same_bits(got.present_key, want.present_key)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=2, max_size=6), st.integers(1, 5))
def test_packing_where_rows_cannot_be_counted(lengths: list[tuple[int, int]], width: int):
    """As on a GPU: as many packed rows as padded ones, those that count in front."""
    past, new = np.array(lengths).T
    new = np.minimum(new, width)
    elsewhere = SimpleNamespace(**vars(np))  # not NumPy itself, so nothing is counted
    device, host = (gqa._Rows(xp, width, past + new, new, all_full=False) for xp in (elsewhere, np))
    x = np.random.default_rng(0).standard_normal((new.size * width, 3)).astype(np.float32)
    packed, counted = device.pack(x), host.pack(x)
    assert packed.shape == x.shape
    assert counted.shape == (new.sum(), 3)
    assert_same_bits(packed[: new.sum()], counted)
    live = (np.arange(width) < new[:, None]).reshape(-1, 1)
    want = np.where(live, x, np.float32(0))
    assert_same_bits(device.unpack(packed), want)
    assert_same_bits(host.unpack(counted), want)
    assert_same_bits(device.cumulative_sequence_length, np.cumsum([0, *new]).astype(np.int32))


def test_a_call_whose_rows_cannot_be_counted(monkeypatch: pytest.MonkeyPatch):
    call = simple(((3, 2), (0, 4), (5, 0), (7, 1)), qk_output=2)
    want = group_query_attention(**fresh(call))
    rows = gqa._Rows

    class Device(rows):
        def __init__(self, xp: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(SimpleNamespace(**vars(np)), *arguments, **options)

    monkeypatch.setattr(gqa, "_Rows", Device)
    got = group_query_attention(**fresh(call))
    for mine, right in zip(got, want, strict=True):
        assert_same_bits(mine, right)


# ---- positions ---------------------------------------------------------------------------------------------------


def test_position_ids_turn_and_do_not_mask():
    call = simple(((3, 2), (0, 2)), **rope_tables())
    plain = group_query_attention(**fresh(call))
    own = {**fresh(call), "position_ids": np.array([[3, 4], [0, 1]])}
    assert_same_bits(group_query_attention(**own).output, plain.output)
    moved = {**fresh(call), "position_ids": np.array([[20, 9], [0, 1]], np.int32)}
    got = group_query_attention(**moved)
    assert_same_bits(got.output[1], plain.output[1])
    assert not np.array_equal(got.output[0], plain.output[0])
    # Sequence 0 still attends five positions: what lies behind them does not show.
    moved["past_key"][0, :, 5:] = np.nan
    moved["past_value"][0, :, 5:] = np.nan
    assert np.isfinite(group_query_attention(**moved).output[0]).all()


def test_prompt_reads_the_first_position_only():
    call = simple(((0, 3), (0, 3)), **rope_tables())
    del call["query_seqlens"]
    got = group_query_attention(**fresh(call), position_ids=np.array([[5, 9, 1], [7, 8, 2]]))
    call["query_seqlens"] = np.array([3, 3], np.int32)
    want = group_query_attention(**fresh(call), position_ids=np.array([[5, 6, 7], [5, 6, 7]]))
    assert_same_bits(got.present_key, want.present_key)


# ---- sinks -------------------------------------------------------------------------------------------------------


def test_smooth_softmax_is_a_sink_of_zeros():
    call = simple()
    zeros = group_query_attention(**fresh(call), head_sink=np.zeros(H, np.float32)).output
    assert_same_bits(group_query_attention(**fresh(call), smooth_softmax=1).output, zeros)
    ones = group_query_attention(**fresh(call), head_sink=np.ones(H, np.float32)).output
    both = group_query_attention(**fresh(call), head_sink=np.ones(H, np.float32), smooth_softmax=1).output
    assert_same_bits(both, ones)
    assert not np.array_equal(ones, zeros)


# ---- a cache that slides -----------------------------------------------------------------------------------------


def kept(total: int, capacity: int, window: int) -> int:
    """Positions that a sliding cache holds, by dropping them as tokens come one at a time."""
    count = 0
    for _ in range(total):
        count += 1
        if count > capacity:
            count -= capacity - window + 1
    return count


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("capacity", "window"), [(4, 4), (6, 4), (9, 4), (5, 1)])
def test_sliding_cache_equals_a_full_one(capacity: int, window: int, dtype: Any):
    rng = np.random.default_rng(capacity)
    batch, steps = 3, [5, 1, 3, 1, 7, 1, 2, 1, 4]
    slid = {name: np.zeros((batch, KH, capacity, D), dtype) for name in ("past_key", "past_value")}
    full = {name: np.zeros((batch, KH, 64, D), dtype) for name in ("past_key", "past_value")}
    attributes = {"num_heads": H, "kv_num_heads": KH, "local_window_size": window, "softcap": 3.0}
    tables = {name: x.astype(dtype) if name != "do_rotary" else x for name, x in rope_tables(64).items()}
    total = np.zeros(batch, np.int64)
    for step, length in enumerate(steps):
        new = rng.integers(0 if step else 1, length + 1, batch)
        total += new
        bound = max(int(total.max()), length)
        call = {
            "query": rng.standard_normal((batch, length, H * D)).astype(dtype),
            "key": rng.standard_normal((batch, length, KH * D)).astype(dtype),
            "value": rng.standard_normal((batch, length, KH * D)).astype(dtype),
            "seqlens_k": (total - 1).astype(np.int32),
            "total_sequence_length": bound,
            "query_seqlens": new.astype(np.int32),
            "attention_bias": rng.standard_normal((1, H, length, bound)).astype(dtype),
            "head_sink": rng.standard_normal(H).astype(dtype),
            **tables,
            **attributes,
        }
        got = group_query_attention(**call, **slid, sliding_window_cache=1)
        want = group_query_attention(**call, **full)
        assert_same_bits(got.output, want.output)
        assert got.present_key is slid["past_key"]
        for b in range(batch):
            count = kept(int(total[b]), capacity, window)
            for name in slid:
                newest = full[name][b, :, total[b] - count : total[b]]
                assert_same_bits(np.ascontiguousarray(slid[name][b, :, :count]), np.ascontiguousarray(newest))


# ---- other libraries ---------------------------------------------------------------------------------------------


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is absent")
    call = simple(dtype=np.float32)
    want = group_query_attention(**fresh(call))
    given = {name: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    got = group_query_attention(**given)
    assert isinstance(got.output, torch.Tensor)
    assert got.present_key is given["past_key"]
    assert_same_bits(got.output.numpy(), want.output)
    small = {**given, "past_key": given["past_key"][:, :, :7], "past_value": given["past_value"][:, :, :7]}
    assert group_query_attention(**small).present_key.shape == (3, KH, 8, D)


# ---- errors ------------------------------------------------------------------------------------------------------

INT4 = {
    "past_key": np.zeros((3, KH, 12, D // 2), np.uint8),
    "past_value": np.zeros((3, KH, 12, D // 2), np.uint8),
    "k_scale": np.ones(1, np.float32),
    "v_scale": np.ones(1, np.float32),
    "k_quant_type": "PER_TENSOR",
    "v_quant_type": "PER_TENSOR",
}
I32 = np.int32
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no query": ({"query": None}, "query: required input, got none"),
    "no lengths": ({"seqlens_k": None}, "seqlens_k: required input, got none"),
    "no total": ({"total_sequence_length": None}, "total_sequence_length: required input, got none"),
    "value without key": ({"key": None}, "key: required together with value, got none"),
    "key cache alone": ({"past_value": None}, "past_value: required together with past_key, got none"),
    "sine alone": ({"sin_cache": np.ones((32, 8), np.float32)}, "cos_cache: required together with sin_cache"),
    "rotary alone": ({"do_rotary": 1}, "cos_cache: required by do_rotary = 1, got none"),
    "query rank": ({"query": np.zeros((3, 64), np.float32)}, r"query: expected rank 3, .* got shape \(3, 64\)"),
    "query type": ({"query": np.zeros((3, 4, 64))}, "query: expected element type float16 or .* got float64"),
    "key type": ({"key": np.zeros((3, 4, 32), np.float16)}, "key: expected element type float32, that of query"),
    "key batch": ({"key": np.zeros((2, 4, 32), np.float32)}, "key: expected dimension 0 to be batch_size = 3"),
    "key length": (
        {"key": np.zeros((3, 2, 32), np.float32), "value": np.zeros((3, 2, 32), np.float32)},
        "key: expected dimension 1 to be sequence_length = 4, or 0, got 2",
    ),
    "key width": (
        {"key": np.zeros((3, 4, 48), np.float32), "value": np.zeros((3, 4, 48), np.float32)},
        "key: expected dimension 1 to be kv_width = 32",
    ),
    "cache heads": ({"past_key": np.zeros((3, 1, 12, 16), np.float32)}, "past_key: expected dimension 1 to be kv_num"),
    "cache width": (
        {name: np.zeros((3, 2, 12, 8), np.float32) for name in ("past_key", "past_value")},
        "past_key: expected dimension 3 to be cache_width = 16",
    ),
    "cache type": ({"past_value": np.zeros((3, 2, 12, 16), np.float16)}, "past_value: expected element type float32"),
    "unequal caches": ({"past_value": np.zeros((3, 2, 13, 16), np.float32)}, "past_value: expected dimension 2"),
    "read-only": ({"past_key": np.broadcast_to(np.float32(0), (3, 2, 12, 16))}, "past_key: expected a writeable array"),
    "lengths type": ({"seqlens_k": np.zeros(3, np.int64)}, "seqlens_k: expected element type int32, got int64"),
    "lengths": ({"seqlens_k": np.zeros(2, I32)}, "seqlens_k: expected dimension 0 to be batch_size = 3"),
    "negative": ({"seqlens_k": np.array([4, -1, 7], I32)}, r"seqlens_k\[1\]: expected a value >= 0, got -1"),
    "beyond total": ({"seqlens_k": np.array([4, 3, 8], I32)}, r"seqlens_k\[2\]: .* < total_sequence_length = 8, got 8"),
    "many new": ({"query_seqlens": np.array([2, 5, 1], I32)}, r"query_seqlens\[1\]: expected a value in \[0, min\("),
    "more than all": ({"query_seqlens": np.array([2, 4, -1], I32)}, r"query_seqlens\[2\]: .* got -1"),
    "total": ({"total_sequence_length": 3}, "total_sequence_length: expected a value >= sequence_length = 4"),
    "total in words": ({"total_sequence_length": "8"}, "total_sequence_length: expected an integer, got '8'"),
    "half a total": ({"total_sequence_length": 8.5}, "total_sequence_length: expected an integer, got 8.5"),
    "totals": ({"total_sequence_length": np.array([8, 8], I32)}, "total_sequence_length: expected one integer"),
    "positions": ({"position_ids": np.zeros((3, 3), np.int64)}, "position_ids: expected dimension 1 to be sequence_"),
    "position type": ({"position_ids": np.zeros((3, 4), np.float32)}, "position_ids: expected element type int64 or"),
    "bias columns": (
        {"attention_bias": np.zeros((1, 1, 4, 9), np.float32)},
        "attention_bias: expected dimension 3 to be total_sequence_length = 8",
    ),
    "bias rows": ({"attention_bias": np.zeros((1, 1, 1, 8), np.float32)}, "attention_bias: expected dimension 2"),
    "sink": ({"head_sink": np.zeros((1, 4), np.float32)}, "head_sink: expected rank 1"),
    "norm alone": ({"q_norm_weight": np.zeros(16, np.float32)}, "k_norm_weight: required together with q_norm_weight"),
    "norms": (
        {name: np.zeros(8, np.float32) for name in ("q_norm_weight", "k_norm_weight")},
        "q_norm_weight: expected dimension 0 to be head_size = 16",
    ),
    "heads": ({"num_heads": 3}, "num_heads: expected a multiple of kv_num_heads = 2, got 3"),
    "no window": ({"local_window_size": 0}, "local_window_size: expected -1 or a value >= 1, got 0"),
    "window both ways": (
        {"local_window_size": 2, "causal": 0, "query_seqlens": None},
        "local_window_size: expected -1 with causal = 0, got 2",
    ),
    "ragged both ways": ({"causal": 0}, "causal: expected 1 with query_seqlens, got 0"),
    "ragged without a cache": (
        {"past_key": None, "past_value": None},
        "past_key: required by query_seqlens, got none",
    ),
    "unquantized codes": (
        {name: np.zeros((3, 2, 12, 16), np.int8) for name in ("past_key", "past_value")},
        "k_quant_type: expected PER_TENSOR or PER_CHANNEL, because past_key is int8",
    ),
    "quantized what": (
        {"past_key": None, "past_value": None, "query_seqlens": None, "k_quant_type": "PER_TENSOR"},
        "past_key: required with a quantized cache",
    ),
    "no scale": ({**INT4, "kv_cache_bit_width": 4, "k_scale": None}, "k_scale: required by k_quant_type = PER_TENSOR"),
    "scale": (
        {**INT4, "kv_cache_bit_width": 4, "k_scale": np.ones((2, 2, 1, 16), np.float32)},
        "k_scale: expected dim",
    ),
    "scale value": ({**INT4, "kv_cache_bit_width": 4, "k_scale": np.zeros(1, np.float32)}, r"k_scale\[0\]: .* > 0"),
    "width": (INT4, "kv_cache_bit_width: expected 4, because past_key is uint8, got 0"),
    "wide": ({"kv_cache_bit_width": 8}, "kv_cache_bit_width: expected 0, because past_key is float32, got 8"),
    "sliding without window": ({"sliding_window_cache": 1}, "local_window_size: expected a value >= 1 with sliding_"),
    "sliding too small": (
        {"sliding_window_cache": 1, "local_window_size": 13},
        "past_key: expected dimension 2 >= local_window_size = 13, got 12",
    ),
    "out": ({"out": np.zeros((3, 4, 32), np.float32)}, "out: expected dimension 2 to be output_width = 64"),
    "out type": ({"out": np.zeros((3, 4, 64))}, "out: expected element type float32, that of query, got float64"),
    "out of objects": ({"out": np.zeros((3, 4, 64), object)}, "out: expected element type float32"),
    "objects": ({"key": np.zeros((3, 4, 32), object)}, "key: expected element type float16 or .* got object"),
    "complex cache to enlarge": (
        {name: np.zeros((3, 2, 4, 16), complex) for name in ("past_key", "past_value")},
        "past_key: expected element type float16 or .* got complex128",
    ),
    "sliding read-only": (
        {
            "past_value": np.broadcast_to(np.float32(0), (3, 2, 12, 16)),
            "sliding_window_cache": 1,
            "local_window_size": 4,
        },
        "past_value: expected a writeable array",
    ),
    "rows that are nowhere": (
        {name: np.zeros((3, 2, 3, 16), np.float32) for name in ("past_key", "past_value")},
        "total_sequence_length: expected a value <= 7, the rows of past_key and the new ones, got 8",
    ),
    "a past that is nowhere": (
        {name: np.zeros((3, 2, 6, 16), np.float32) for name in ("past_key", "past_value")},
        r"seqlens_k\[2\]: expected a value with at most 6 tokens before the new ones, the rows of past_key, got 7",
    ),
    "a prompt after nothing": (
        {"past_key": None, "past_value": None, "query_seqlens": None},
        "total_sequence_length: expected a value <= 4, the rows of past_key and the new ones, got 8",
    ),
    "nothing new and no room": (
        {
            **{name: np.zeros((3, 0, 32), np.float32) for name in ("key", "value")},
            **{name: np.zeros((3, 2, 7, 16), np.float32) for name in ("past_key", "past_value")},
        },
        "total_sequence_length: expected a value <= 7, the rows of past_key",
    ),
    "huge total": ({"total_sequence_length": 2**31}, "total_sequence_length: expected a value that int32 holds"),
    "limit": ({"max_output_qk_bytes": None}, "max_output_qk_bytes: expected a number, got None"),
    "backends": ({"backend": ["numpy"]}, r"backend: expected a name or None, got \['numpy'\]"),
    "scores": ({"qk_output": 1, "max_output_qk_bytes": 100}, "output_qk: expected at most 100 bytes"),
    "backend": ({"backend": "fastest"}, "backend: expected one of"),
    "smooth": ({"smooth_softmax": 2}, "smooth_softmax: expected one of"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_names_what_is_wrong(name: str):
    changes, message = ERRORS[name]
    call = {**simple(), **changes}
    before = {key: call[key].copy() for key in ("past_key", "past_value") if isinstance(call[key], np.ndarray)}
    with pytest.raises(InvalidArgumentError, match=message):
        group_query_attention(**call)
    for key, x in before.items():
        assert np.array_equal(call[key], x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_cache": 1, "local_window_size": 4, "qk_output": 1}, "qk_output: expected 0 with sliding_"),
        (
            {
                **{name: np.ones(D, np.float32) for name in ("q_norm_weight", "k_norm_weight")},
                "q_norm_epsilon": 1e-5,
            },
            "k_norm_epsilon: expected that of queries",
        ),
    ],
)
def test_unsupported(changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        group_query_attention(**{**simple(), **changes})


@pytest.mark.parametrize("sliding", [False, True])
def test_written_memory_may_not_be_another_arrays_too(sliding: bool):
    call = simple(**({"sliding_window_cache": 1, "local_window_size": 4} if sliding else {}))
    query, cache = call["query"], call["past_key"]
    inside = cache.reshape(-1)[: query.size].reshape(query.shape)
    before = cache.copy()
    for changes, message in (
        ({"past_value": cache}, "past_value: expected memory of its own, got the buffer of past_key"),
        ({"out": inside}, "out: expected memory of its own, got the buffer of past_key"),
        ({"out": query}, "out: expected memory of its own, got the buffer of query"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            group_query_attention(**{**call, **changes})
        assert np.array_equal(cache, before)


def test_checks_name_a_position_beyond_the_tables():
    call = simple(((3, 2), (0, 2)), **rope_tables(6), position_ids=np.array([[3, 4], [9, 1]]))
    with pytest.raises(InvalidArgumentError, match=r"position_ids\[2\]: expected positions < 6"):
        group_query_attention(**call, checks=True)


def test_debug_line_names_the_operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PAGEDATTN_DEBUG_INFO", "1")
    group_query_attention(**simple())
    assert "Operator=GroupQueryAttention DataType=float32" in capsys.readouterr().err
