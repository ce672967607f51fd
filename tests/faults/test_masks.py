"""Who sees whom: empty sequences, hidden rows, junk in the cache, the diagonal of a chunk, big batches."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, FLOAT16

from .scene import Scene, assert_close, assert_same_bytes, expected

PLACES = {
    "leading": ([0, 0, 1, 1], [9, 3, 0, 5]),
    "between": ([0, 1, 1, 4], [0, 9, 5, 2]),
    "trailing": ([1, 4, 0, 0], [3, 5, 9, 0]),
    "all over": ([0, 1, 0, 3, 0], [9, 3, 0, 5, 0]),
}


def steps(pasts, q_lens):
    return [past + q for past, q in zip(pasts, q_lens, strict=True)]


def test_sequences_without_new_tokens_shift_nobody(target, io):
    q_lens, pasts = [0, 1, 0, 3, 0], [9, 3, 0, 5, 0]
    scene = Scene(steps(pasts, q_lens), io=io, key=0, value=lambda b, pos, h: pos + 100 * b)
    outcome = target.check(scene.call(pasts, q_lens), return_lse=True)
    want = np.array([101.5, 302.5, 303.0, 303.5])
    assert_close(outcome.output, np.broadcast_to(want[:, None, None], outcome.output.shape), io, roundings=1)


@pytest.mark.parametrize("where", PLACES)
def test_sequences_without_new_tokens_with_every_cache(target, cache, where):
    q_lens, pasts = PLACES[where]
    scene = Scene(steps(pasts, q_lens), num_heads=4, kv_num_heads=2, cache=cache)
    target.check(scene.call(pasts, q_lens), return_lse=True)


@pytest.mark.parametrize("pasts", [[3, 20, 7], [5], [0], [0, 0, 0]], ids=str)
def test_a_call_without_tokens_returns_at_once(target, cache, io, pasts):
    scene = Scene([past + 1 for past in pasts], num_heads=4, kv_num_heads=2, head_size=24, io=io, cache=cache)
    call = scene.call(pasts, [0] * len(pasts))
    outcome = target.run(call, return_lse=True)
    assert outcome.output.shape == (0, 4, 24)
    assert outcome.output.dtype == io.numpy
    assert outcome.lse.shape == (0, 4)
    assert_same_bytes(outcome.key_cache, call["key_cache"])
    assert_same_bytes(outcome.value_cache, call["value_cache"])


def test_a_call_without_tokens_has_scores_of_no_rows(target):
    call = Scene([4], num_heads=3).call([3], [0], qk_output=1)
    assert target.run(call).output_qk.shape[:2] == (3, 0)


def hide(call, how):
    """Hide everything from the first sequence's tokens."""
    capacity = call["block_table"].shape[1] * call["key_cache"].shape[1]
    batch, tokens = call["past_seqlens"].size, call["query"].shape[0]
    bias = np.zeros((batch, 1, tokens, capacity), call["query"].dtype)
    if how == "bias of minus infinity":
        bias[0] = -np.inf
        return call.change(attention_bias=bias)
    if how == "very negative bias":  # finite, so the row is the mean of what it would not see otherwise
        bias[0] = -65504
        return call.change(attention_bias=bias)
    if how == "unmapped blocks":
        table = call["block_table"].copy()
        table[0] = -1
        return call.change(block_table=table)
    assert how == "window beyond the context"
    cu = call["cumulative_sequence_length"]
    spans = zip(call["past_seqlens"], np.diff(cu), strict=True)
    positions = np.concatenate([np.arange(past, past + q_len) for past, q_len in spans])
    positions[: cu[1]] += 1000
    return call.change(query_positions=positions.astype(np.int32), local_window_size=100)


@pytest.mark.parametrize("sink", [None, 0.0], ids=["no sink", "sink"])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2]], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "how", ["bias of minus infinity", "very negative bias", "unmapped blocks", "window beyond the context"]
)
def test_a_row_that_sees_nothing_is_zero(target, io, how, q_lens, sink, splits):
    lengths = [8, 21]
    pasts = [n - q for n, q in zip(lengths, q_lens, strict=True)]
    scene = Scene(lengths, io=io, key=0, value=lambda b, pos, h: pos + 1)
    call = hide(scene.call(pasts, q_lens), how)
    if sink is not None:
        call = call.change(head_sink=np.full(2, sink, io.numpy))
    outcome = target.check(call, return_lse=True)
    hidden = outcome.output[: q_lens[0]].astype(np.float64)
    if how != "very negative bias":
        assert not hidden.any()
        assert (outcome.lse[: q_lens[0]] == -np.inf).all()
    elif sink is None:
        visible = np.arange(pasts[0], lengths[0])[:, None, None] / 2 + 1
        assert_close(hidden, np.broadcast_to(visible, hidden.shape), io)
    else:
        assert not hidden.any()  # all the weight is the sink's


def test_hidden_rows_between_seen_ones(target, splits):
    """A tile of rows of which some see nothing, some one key and some all."""
    scene = Scene([40], num_heads=2)
    call = scene.call([34])
    bias = np.full((1, 1, 6, 48), -np.inf, np.float16)
    bias[0, 0, 1, 0] = bias[0, 0, 3, 33] = bias[0, 0, 5] = 0
    outcome = target.check(call.change(attention_bias=bias), return_lse=True)
    assert (outcome.lse[[0, 2, 4]] == -np.inf).all()


def test_unmapped_blocks_in_the_middle_are_skipped(target, cache, splits):
    scene = Scene([100, 70], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([95, 69])
    table = call["block_table"].copy()
    table[0, [0, 2, 3]] = -1, scene.num_blocks, -(2**31)
    table[1, 1] = 2**31 - 1
    target.check(call.change(block_table=table), return_lse=True)


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("unused", ["nan", "inf"])
@pytest.mark.parametrize("length", [5, 15, 16, 17, 33, 129, 257])
@pytest.mark.parametrize("q_len", [1, 5], ids=["decode", "prefill"])
def test_junk_behind_a_sequence_does_not_leak(target, cache, q_len, length, unused, splits):
    def scene(unused):
        return Scene([length, 3], num_heads=2, cache=cache, unused=unused, seed=length)

    q_lens = [q_len, 1]
    pasts = [length - q_len, 2]
    outcome = target.check(scene(unused).call(pasts, q_lens))
    clean = target.run(scene("zero").call(pasts, q_lens))
    assert_same_bytes(outcome.output, clean.output)


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
@pytest.mark.parametrize("unused", ["nan", "inf"])
def test_junk_in_half_precision_does_not_leak(target, io, unused, splits):
    for length in (1, 16, 31, 65):
        call = Scene([length], io=io, unused=unused, seed=length).call([length - 1])
        target.check(call)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hidden_by", ["window", "causality", "positions"])
def test_junk_in_hidden_keys_and_values_does_not_leak(target, what, hidden_by, splits):
    """0 x NaN is NaN: a weight of zero is not enough to hide a value."""
    scene = Scene([40], num_heads=2)
    call = scene.call([35])
    if hidden_by == "window":
        bad, changes = np.arange(8), {"local_window_size": 20}
    elif hidden_by == "causality":
        bad, changes = np.array([38, 39]), {}
    else:
        bad, changes = np.array([39]), {"query_positions": np.array([35, 36, 37, 38, 38], np.int32)}
    clean = expected(call.change(**changes)).output
    arrays = {name: call[name].copy() for name in ("key", "value", "key_cache", "value_cache")}
    for name in ("key", "value"):
        arrays[name][bad[bad >= 35] - 35] = what
        arrays[f"{name}_cache"].reshape(-1, 1, 16)[scene.slots(0, bad[bad < 35])] = what
    outcome = target.run(call.change(**arrays, **changes))
    rows = slice(0, 3 if hidden_by == "causality" else 5)  # the last two rows see themselves
    assert_close(outcome.output[rows], clean[rows], FLOAT16)


def test_junk_of_one_new_token_does_not_reach_those_before_it(target):
    """With a head size that the kernels for Hopper take."""
    scene = Scene([40], num_heads=2, head_size=64)
    call = scene.call([35])
    clean = expected(call).output
    arrays = {name: call[name].copy() for name in ("key", "value")}
    for x in arrays.values():
        x[3:] = np.nan
    outcome = target.run(call.change(**arrays))
    assert_close(outcome.output[:3], clean[:3], FLOAT16)


def padded_batch(io, cache, style):
    """Eight rows of a fixed-size step of which three are live; their order says which."""
    live = [1, 4, 6]
    pasts = [0, 17, 0, 0, 3, 0, 31, 0]
    if style == "idle slots":  # a dummy token each, which is stored nowhere and sees nothing
        q_lens = [1] * 8
    elif style == "empty sequences":
        q_lens = [int(b in live) for b in range(8)]
    else:  # the sequences are level, and the rows left over belong to nobody
        live, pasts, q_lens = [0, 1, 2], [17, 3, 31, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]
    scene = Scene(steps(pasts, q_lens), num_heads=4, kv_num_heads=2, io=io, cache=cache)
    call = scene.call(pasts, q_lens)
    if style == "idle slots":
        table, slots = call["block_table"].copy(), np.full(8, -1, np.int32)
        for b in range(8):
            if b in live:
                slots[b] = scene.slots(b, np.array([pasts[b]]))[0]
            else:
                table[b] = -1
        call = call.change(block_table=table, slot_mapping=slots)
        rows = live
    elif style == "empty sequences":
        return call, [0, 1, 2]
    else:
        rows = live
        call = call.change(
            **{
                name: np.concatenate([call[name], np.zeros_like(call[name], shape=(5, call[name].shape[1]))])
                for name in ("query", "key", "value")
            }
        )
    idle = np.setdiff1d(np.arange(8), rows)
    new = {name: call[name].copy() for name in ("query", "key", "value")}
    for x in new.values():
        x[idle] = np.nan
    return call.change(**new), rows


@pytest.mark.by_heads
@pytest.mark.parametrize("style", ["idle slots", "padding rows", "empty sequences"])
def test_idle_rows_of_a_padded_batch_are_zero(target, io, cache, style):
    call, live = padded_batch(io, cache, style)
    outcome = target.check(call, return_lse=True)
    idle = np.setdiff1d(np.arange(call["query"].shape[0]), live)
    assert not outcome.output[idle].astype(np.float64).any()
    assert (outcome.lse[idle] == -np.inf).all()
    assert outcome.output[live].astype(np.float64).all()


def test_causality_is_counted_from_the_end_of_the_context(target, unit_cache):
    scene = Scene([8], cache=unit_cache, key=0, value=lambda b, pos, h: pos)
    outcome = target.check(scene.call([5]))
    assert outcome.output[:, 0, 0].tolist() == [2.5, 3.0, 3.5]
    first = target.run(scene.call([0], [5]))
    second = target.run(scene.call([5], [3], first.caches))
    at_once = target.run(scene.call([0], [8]))
    assert_same_bytes(np.concatenate([first.output, second.output]), at_once.output)
    assert_same_bytes(second.key_cache, at_once.key_cache)
    assert_same_bytes(second.value_cache, at_once.value_cache)


@pytest.mark.parametrize("q_len", [1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize("past", [0, 1, 15, 16, 17, 63, 130])
def test_new_tokens_see_their_past_and_each_other(target, past, q_len, splits):
    scene = Scene([past + q_len, 5, past + q_len], num_heads=6, kv_num_heads=2, seed=past)
    target.check(scene.call([past, 4, 0]), return_lse=True)


@pytest.mark.parametrize("past", [0, 5, 33])
def test_without_causality_new_tokens_see_later_ones(target, cache, past):
    scene = Scene([past + 20, 7], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([past, 4], is_causal=0)
    target.check(call, return_lse=True)
    target.check(call.change(local_window_size=6), return_lse=True)


@pytest.mark.by_heads
@pytest.mark.parametrize("batch", [255, 256, 257, 288, 289, 511, 513, 1024, 1025, 4097])
def test_batches_beyond_one_scan_block(target, batch):
    if target.is_emulated and batch > 513:
        pytest.skip("slow when emulated")
    index = np.arange(batch)
    q_lens, pasts = index % (2 if target.by_heads else 3), index % 7
    scene = Scene(list(q_lens + pasts), key=0, value=lambda b, pos, h: b % 11)
    outcome = target.run(scene.call(pasts, q_lens))
    want = np.repeat(index % 11, q_lens)[:, None, None]
    assert (outcome.output == want).all()
    want_cache = scene.pool(scene.value, scene.lengths, "v_scale")
    assert_same_bytes(outcome.value_cache, want_cache)
