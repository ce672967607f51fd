"""attention_bias and output_qk: which row and column is whose, and what lies beside them."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, BY_NAME, FLOAT16

from .scene import Scene, assert_close, assert_same_bytes, expected


def ramp(batch, heads, tokens, context, io):
    """A bias whose every element says where it is."""
    b, h, t, c = np.ogrid[:batch, :heads, :tokens, :context]
    return (0.5 * b + h / 4 - t / 8 + c / 16).astype(io.numpy)


@pytest.mark.parametrize("kv_num_heads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
def test_a_broadcast_bias_equals_its_copy(target, io, shape, kv_num_heads, splits):
    scene = Scene([20, 9], num_heads=3, kv_num_heads=kv_num_heads, io=io)
    call = scene.call([19, 5])
    small = ramp(*shape, 4, 32, io)
    full = np.broadcast_to(small, (2, 3, 4, 32)).copy()
    outcome = target.check(call.change(attention_bias=small), return_lse=True)
    assert_same_bytes(outcome.output, target.run(call.change(attention_bias=full)).output)


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (2, 4), (1, 6), (0, 1)], ids=str)
def test_a_bias_for_other_heads_or_sequences_is_refused(target, shape):
    """Of 3 heads and 2 sequences; as many heads as kv_num_heads is no broadcast either."""
    scene = Scene([20, 9], num_heads=3, kv_num_heads=1)
    call = scene.call([19, 5])
    target.refuses(call.change(attention_bias=np.zeros((*shape, 4, 32), np.float16)), "^attention_bias: ")
    call = Scene([20, 9], num_heads=6, kv_num_heads=2).call([19, 5])
    for other in ((1, 2, 4, 32), (6, 4, 32), (4, 32)):
        target.refuses(call.change(attention_bias=np.zeros(other, np.float16)), "^attention_bias: ")


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
@pytest.mark.parametrize(("context", "q_len"), [(1, 1), *((n, q) for n in (3, 7, 13, 43, 257) for q in (1, 3))])
def test_a_bias_of_any_width_and_a_slice_of_a_wider_one(target, io, context, q_len, splits):
    """Rows that do not start on 16 bytes; what was cut off is NaN."""
    scene = Scene([context, min(context, 9)], num_heads=3, io=io)
    call = scene.call([n - q_len for n in scene.lengths])
    bias = np.random.default_rng(context).standard_normal((2, 3, q_len, context)).astype(io.numpy)
    call = call.change(attention_bias=bias)
    contiguous = target.check(call, return_lse=True)

    def sliced(x):
        raw = np.full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 5), np.nan).astype(x.dtype)
        raw[..., :-1, 3 : 3 + context] = x
        return target.typed(target.upload(raw)[..., :-1, 3 : 3 + context], x.dtype)

    outcome = target.run(call, place={"attention_bias": sliced})
    assert_same_bytes(outcome.output, contiguous.output)


def test_a_bias_is_indexed_by_offset_in_the_sequence_and_by_position(target, cache, splits):
    scene = Scene([70, 40, 5], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([66, 39, 0], [4, 1, 5])
    call = call.change(attention_bias=np.random.default_rng(3).standard_normal((3, 4, 5, 80)).astype(np.float16))
    target.check(call, return_lse=True)
    target.check(call.change(local_window_size=9, softcap=3.0), return_lse=True)


# ---- trees of drafts: siblings do not see each other, a token sees itself and its ancestors


def tree_bias(past, parents, context, io):
    """0 for the past, for ancestors and for the token itself; minus infinity elsewhere."""
    count = len(parents)
    bias = np.full((1, 1, count, context), -np.inf)
    bias[..., :past] = 0
    for token in range(count):
        ancestor = token
        while ancestor >= 0:
            bias[0, 0, token, past + ancestor] = 0
            ancestor = parents[ancestor]
    return bias.astype(io.numpy)


@pytest.mark.parametrize("with_positions", [False, True], ids=["derived positions", "depth as position"])
def test_siblings_of_a_draft_tree_do_not_see_each_other(target, io, with_positions):
    """Plain causality gives 7.40 and 7.50 for the last two. Positions that say depth cannot mask: is_causal is 0."""
    values = np.array([10, 20, 1, 2, 4, 8])
    scene = Scene([6], io=io, key=0, value=values[:, None, None])
    call = scene.call([2]).change(attention_bias=tree_bias(2, [-1, 0, 0, 1], 6, io))
    if with_positions:
        call = call.change(query_positions=np.array([2, 3, 3, 4], np.int32), is_causal=0)
    outcome = target.check(call, return_lse=True)
    want = np.array([31 / 3, 8.25, 8.75, 8.2])
    assert_close(outcome.output, np.broadcast_to(want[:, None, None], outcome.output.shape), io)


@pytest.mark.parametrize("is_causal", [0, 1])
def test_a_draft_tree_wider_than_a_tile(target, is_causal):
    """64 drafts over a past of 300: whole tiles lie below the diagonal and are still hidden in part."""
    parents = [-1] + [(i - 1) // 2 for i in range(1, 64)]
    scene = Scene([364, 9], num_heads=4, kv_num_heads=2)
    bias = np.zeros((2, 1, 64, 368), np.float16)
    bias[:1, :, :, :364] = tree_bias(300, parents, 364, FLOAT16)
    bias[:1, :, :, 364:] = -np.inf
    target.check(scene.call([300, 8]).change(attention_bias=bias, is_causal=is_causal), return_lse=True)


def test_siblings_are_rotated_alike(target):
    """The same key at the same depth is stored as the same bits, wherever its slot is."""
    scene = Scene([6], head_size=16, key=np.arange(16) / 8)
    angles = np.arange(8)[:, None] * 0.5 ** np.arange(8)
    call = scene.call([2]).change(
        do_rotary=1,
        cos_cache=np.cos(angles).astype(np.float16),
        sin_cache=np.sin(angles).astype(np.float16),
        query_positions=np.array([2, 3, 3, 4], np.int32),
        is_causal=0,
        attention_bias=tree_bias(2, [-1, 0, 0, 1], 6, FLOAT16),
    )
    keys = target.run(call).key_cache.reshape(-1, 16)[scene.slots(0, np.arange(2, 6))]
    assert_same_bytes(keys[1], keys[2])
    assert (keys[1] != keys[0]).any()
    assert (keys[2] != keys[3]).any()


# ---- output_qk


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("window", [-1, 2, 20])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("qk_output", [1, 2], ids=["scores", "probabilities"])
def test_scores_of_ragged_contexts(target, io, qk_output, softcap, window, sink):
    scene = Scene([3, 30, 17], num_heads=6, kv_num_heads=2, io=io)
    call = scene.call([2, 26, 0]).change(softcap=softcap, local_window_size=window)
    if sink:
        call = call.change(head_sink=np.array([0, 1, -1, 0, 2, -np.inf], io.numpy))
    want = expected(call)
    asked = target.check(call.change(qk_output=qk_output), return_lse=True)
    plain = target.run(call)
    assert_close(asked.output, plain.output, io)
    assert asked.output_qk.shape == (6, 22, 30)
    assert not np.isnan(asked.output_qk).any()
    shown = want.scores if qk_output == 1 else want.probabilities
    np.testing.assert_allclose(asked.output_qk, shown[..., :30], rtol=2e-3, atol=2e-3)
    assert not asked.output_qk[shown[..., :30] == 0].any()
    if qk_output == 2:
        sums = asked.output_qk.sum(axis=-1)
        share = np.exp(call["head_sink"].astype(np.float64)[:, None] - want.lse.T) if sink else 0
        np.testing.assert_allclose(sums, 1 - share + 0 * sums, atol=2e-5)


@pytest.mark.parametrize("qk_dtype", ["float32", "float16", "bfloat16"])
def test_scores_of_each_type(target, qk_dtype):
    scene = Scene([3, 30], num_heads=4, kv_num_heads=2)
    call = scene.call([2, 26]).change(qk_output=1)
    dtype = BY_NAME[qk_dtype]
    outcome = target.run(call, qk_dtype=dtype.numpy)
    assert outcome.output_qk.dtype == dtype.numpy
    unit = {"float32": 2.0**-14, "float16": 2.0**-10, "bfloat16": 2.0**-7}[qk_dtype]
    np.testing.assert_allclose(
        outcome.output_qk.astype(np.float64), expected(call).scores[..., :30], rtol=unit, atol=2 * unit
    )


@pytest.mark.parametrize("bound", [30, 31, 40, 48])
def test_the_width_of_scores_is_the_bound(target, bound):
    scene = Scene([3, 30], num_heads=2)
    call = scene.call([2, 26]).change(qk_output=2, attention_metadata=np.array([4, bound], np.int32))
    outcome = target.check(call)
    assert outcome.output_qk.shape == (2, 5, bound)
    np.testing.assert_allclose(outcome.output_qk, expected(call).probabilities[..., :bound], atol=2e-3)


def test_scores_with_every_cache_and_bias(target, cache):
    scene = Scene([20, 40], num_heads=4, kv_num_heads=2, cache=cache)
    bias = np.random.default_rng(1).standard_normal((2, 1, 5, 48)).astype(np.float16)
    call = scene.call([16, 35]).change(attention_bias=bias, qk_output=1)
    outcome = target.check(call)
    np.testing.assert_allclose(outcome.output_qk, expected(call).scores[..., :40], rtol=2e-3, atol=4e-3)


def test_scores_of_hidden_rows_are_zero(target):
    scene = Scene([8, 5])
    call = scene.call([7, 3]).change(qk_output=2)
    table = call["block_table"].copy()
    table[0] = -1
    outcome = target.check(call.change(block_table=table))
    assert not outcome.output_qk[:, 0].any()
    assert not np.isnan(outcome.output_qk).any()


def test_scores_that_would_take_too_much_memory_are_refused(target):
    scene = Scene([30])
    call = scene.call([10]).change(qk_output=1)
    target.require(call)
    target.refuses(call, "^output_qk: expected at most 1000 bytes", max_output_qk_bytes=1000)
    exact = 2 * 20 * 30 * 4
    assert target.run(call, max_output_qk_bytes=exact).output_qk.nbytes == exact
