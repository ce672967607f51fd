"""Normalisation: empty parts, merged parts, the sink, the cap, the choice of splits."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import FLOAT16

from .scene import Scene, assert_close, assert_same_bytes


def splits_of(target, monkeypatch, keys):
    """Cut the work into pieces of ``keys`` keys, or leave it to the backend (None)."""
    if keys is not None:
        target.force_splits(monkeypatch, keys)


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 2], ids=["decode", "prefill"])
def test_splits_without_keys_do_not_poison_the_merge(target, io, q_len, monkeypatch):
    """A short sequence beside a long one, for whose sake there are many splits."""
    scene = Scene([3, 300, 2], num_heads=4, kv_num_heads=2, io=io)
    call = scene.call([3 - q_len, 300 - q_len, 2 - q_len])
    target.check(call, return_lse=True)
    target.force_splits(monkeypatch, 16)
    target.check(call, return_lse=True)


SEEN = {
    "first": [(0, 16)],
    "middle": [(70, 71)],
    "last": [(127, 128)],
    "two far apart": [(3, 5), (120, 122)],
    "every second part": [(i, i + 16) for i in range(0, 128, 32)],
    "none": [],
}


@pytest.mark.by_heads(hidden_by="blocks")
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("hidden_by", ["bias", "blocks"])
@pytest.mark.parametrize("where", SEEN)
def test_merging_empty_parts_with_one_that_is_not(target, where, hidden_by, sink, splits):
    """Weights are all equal and so are values: what is merged must come out as it went in, bit for bit."""
    scene = Scene([128], key=0, value=3)
    call = scene.call([127])
    seen = np.zeros(128, bool)
    for low, high in SEEN[where]:
        if hidden_by == "blocks":  # whole blocks
            low, high = low // 16 * 16, -(-high // 16) * 16
        seen[low:high] = True
    if hidden_by == "bias":
        call = call.change(attention_bias=np.where(seen, 0, -np.inf).astype(np.float16)[None, None, None])
    else:
        table = call["block_table"].copy()
        table[0, :8][~seen[::16]] = -1
        call = call.change(block_table=table)
    if sink:
        call = call.change(head_sink=np.zeros(2, np.float16))
    outcome = target.check(call, return_lse=True)
    count = seen.sum()
    if not count:
        assert not outcome.output.any()
        assert (outcome.lse == -np.inf).all()
    elif not sink:
        assert (outcome.output == 3).all()
        np.testing.assert_allclose(outcome.lse, np.log(count), atol=1e-6)


@pytest.mark.by_heads
@pytest.mark.parametrize(
    ("first", "second", "keys"), [(2, 6, None), (16, 48, 16), (32, 96, 32), (64, 192, 64)], ids=lambda x: str(x)
)
def test_parts_are_merged_with_the_logarithm_they_were_made_with(target, io, first, second, keys, monkeypatch):
    """Partial sums in base 2 merged as natural ones, or the reverse, give 3.727 or 4.320."""
    splits_of(target, monkeypatch, keys)
    total = first + second
    scene = Scene([total], io=io, key=0, value=lambda b, pos, h: np.where(pos < first, 1, 5))
    outcome = target.check(scene.call([total - 1]), return_lse=True)
    assert (outcome.output == 4).all()
    np.testing.assert_allclose(outcome.lse, np.log(total), atol=1e-5)


@pytest.mark.parametrize("scale", [0.125, 1.0, 3.0])
def test_log_sum_exp_is_natural(target, io, scale, splits):
    """Scores far from zero in both directions, where a wrong base shows most."""
    for top in (-20, 20):
        scene = Scene([70], io=io, head_size=64, query=lambda b, pos, h: np.eye(64)[0] * 4, key=None)
        scene.key[0][:, :, 0] = np.linspace(0, top, 70)[:, None].astype(io.numpy)
        target.check(scene.call([66]).change(scale=scale), return_lse=True)


@pytest.mark.by_heads
@pytest.mark.parametrize("split_keys", [None, 16, 32])
@pytest.mark.parametrize("context", ["seven keys", "window of a long context", "window that ends a block"])
def test_the_sink_counts_once(target, io, context, split_keys, monkeypatch):
    """7 / (7 + e^2) = 0.48648; 0.3214 if counted twice, 0.1915 four times, 0.8450 if scaled, 1 if dropped."""
    splits_of(target, monkeypatch, split_keys)
    length = {"seven keys": 7, "window of a long context": 260, "window that ends a block": 272}[context]
    scene = Scene([length], io=io, key=0, value=1)
    call = scene.call([length - 1]).change(head_sink=np.full(2, 2, io.numpy), scale=0.125)
    if length > 7:
        call = call.change(local_window_size=7)
    outcome = target.check(call, return_lse=True)
    assert_close(outcome.output, np.full((1, 2, 16), 0.48648), io)
    np.testing.assert_allclose(outcome.lse, np.log(7 + np.exp(2)), atol=1e-4)


@pytest.mark.by_heads
@pytest.mark.parametrize("length", [100, 257])
def test_the_sink_counts_once_in_every_split_layout(target, length, splits):
    scene = Scene([length, 5], num_heads=4, kv_num_heads=2, seed=length)
    target.check(scene.call([length - 1, 4]).change(head_sink=np.array([2, -1, 0, 4], np.float16)), return_lse=True)


@pytest.mark.by_heads(q_len=1, softcap=0.0)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("window", [-1, 4])
@pytest.mark.parametrize("q_len", [1, 3], ids=["decode", "prefill"])
def test_the_sink_is_honoured_on_every_path(target, io, unit_cache, q_len, window, softcap):
    """One head with the sink, one whose sink is minus infinity, one whose sink takes all the weight."""
    scene = Scene([7], num_heads=3, io=io, cache=unit_cache, key=0, value=1)
    call = scene.call([7 - q_len]).change(
        head_sink=np.array([2, -np.inf, 30], io.numpy), scale=0.125, local_window_size=window, softcap=softcap
    )
    outcome = target.check(call, return_lse=True)
    visible = np.minimum(np.arange(7 - q_len, 7) + 1, window if window > 0 else 7)
    assert_close(outcome.output[:, 0], np.repeat(visible / (visible + np.exp(2)), 16).reshape(-1, 16), io)
    assert (outcome.output[:, 1] == 1).all()
    assert (outcome.output[:, 2].astype(np.float64) < 1e-9).all()
    no_sink = target.run(call.change(head_sink=None), return_lse=True)
    assert_same_bytes(outcome.output[:, 1], no_sink.output[:, 1])


@pytest.mark.parametrize("window", [-1, 5, 40])
def test_the_sink_with_every_cache(target, cache, window, splits):
    scene = Scene([70, 9], num_heads=4, kv_num_heads=2, cache=cache)
    sink = np.array([1, -2, 3, 0.5], np.float16)
    target.check(scene.call([67, 8]).change(head_sink=sink, local_window_size=window, softcap=4.0), return_lse=True)


def test_a_sink_of_minus_infinity_is_none(target, splits):
    scene = Scene([40, 7], num_heads=2)
    call = scene.call([35, 6])
    sink = target.run(call.change(head_sink=np.full(2, -np.inf, np.float16)), return_lse=True)
    none = target.run(call, return_lse=True)
    assert_same_bytes(sink.output, none.output)
    assert_same_bytes(sink.lse, none.lse)


@pytest.mark.parametrize("hidden_by", ["causality", "window", "block", "bias"])
def test_the_cap_does_not_lift_the_mask(target, io, hidden_by, splits):
    """tanh maps minus infinity to minus the cap: a mask applied before it would leak, 12.97 instead of 1."""
    length, seen = {"causality": (18, 16), "block": (17, 16)}.get(hidden_by, (18, 17))
    scene = Scene([length], io=io, head_size=16, query=lambda b, pos, h: np.eye(16)[0], key=0, value=101)
    scene.key[0][seen, :, 0] = 3
    scene.value[0][seen] = 1
    call = scene.call([seen])
    if hidden_by in ("causality", "window"):
        call = call.change(local_window_size=1)
    elif hidden_by == "block":  # nothing else hides its keys: the other block holds the token itself alone
        table = call["block_table"].copy()
        table[0, 0] = -1
        call = call.change(block_table=table)
    else:
        call = call.change(attention_bias=hide_all_but(length, {seen}, io))
    outcome = target.check(call.change(softcap=1.0, scale=1.0), return_lse=True)
    assert (outcome.output[0] == 1).all()


def hide_all_but(length, seen, io):
    bias = np.full((1, 1, 1, length), -np.inf)
    bias[..., list(seen)] = 0
    return bias.astype(io.numpy)


@pytest.mark.parametrize("shape", ["decode", "prefill", "long"])
def test_the_cap_is_applied_to_natural_scores(target, io, unit_cache, shape, splits):
    """5 tanh(20 / 5) = 4.99665 against 0: 0.99328 of the weight; ignored it is all of it."""
    length = {"decode": 2, "prefill": 2, "long": 40}[shape]
    scene = Scene([length], io=io, cache=unit_cache, query=lambda b, pos, h: np.eye(16)[0] * 4, key=0, value=0)
    scene.key[0][-2, :, 0] = 5
    scene.value[0][-2] = 1
    call = scene.call([0 if shape == "prefill" else length - 1]).change(softcap=5.0, scale=1.0)
    if shape == "long":
        call = call.change(local_window_size=2)
    outcome = target.check(call, return_lse=True)
    assert_close(outcome.output[-1], np.full((2, 16), 0.99328), io)


def test_a_cap_of_zero_is_none_and_a_huge_one_nearly(target, io, cache):
    scene = Scene([40, 9], num_heads=4, kv_num_heads=2, io=io, cache=cache)
    call = scene.call([36, 8])
    without = target.check(call)
    assert_same_bytes(target.run(call.change(softcap=0.0)).output, without.output)
    assert_close(target.run(call.change(softcap=1e4)).output, without.output, io)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_the_cap_with_every_other_thing_that_touches_a_score(target, softcap, splits):
    scene = Scene([70, 9], num_heads=4, kv_num_heads=2)
    rng = np.random.default_rng(1)
    target.check(
        scene.call([66, 8]).change(
            softcap=softcap,
            scale=1.0,
            local_window_size=30,
            head_sink=np.array([1, 0, -1, 2], np.float16),
            attention_bias=rng.standard_normal((2, 4, 4, 80)).astype(np.float16),
        ),
        return_lse=True,
    )


@pytest.mark.by_heads
@pytest.mark.parametrize("batch", [1, 3])
def test_every_length_of_a_growing_sequence(target, batch, monkeypatch):
    """The automatic choice of splits, at each length, against one piece and against the plain computation."""
    longest = 2100
    scene = Scene([longest] * batch, seed=batch)
    if target.on_gpu and not target.by_heads:  # whose wide caches take their time to make
        lengths = range(1, longest + 1)
    else:
        edges = [length + d for length in (16, 32, 64, 128, 256, 512, 1024, 2048) for d in (-1, 0, 1)]
        lengths = sorted({*range(1, 20), *edges, *range(50, longest, 300 if target.is_emulated else 61)})
    caches = scene.pool(scene.key, scene.lengths, "k_scale"), scene.pool(scene.value, scene.lengths, "v_scale")
    whole = 16 * (longest // 16 + 1)
    for length in lengths:
        pasts = [length - 1 - b * (length // 3) for b in range(batch)]
        call = scene.call(pasts, [1] * batch, caches)
        outcome = target.run(call)
        assert not np.isnan(outcome.output).any(), length
        want = one_row_each(scene, pasts)
        assert_close(outcome.output, want, FLOAT16)
    if not target.is_emulated:
        target.force_splits(monkeypatch, whole)
        for length in list(lengths)[::7]:
            call = scene.call([length - 1] * batch, [1] * batch, caches)
            assert_close(target.run(call).output, one_row_each(scene, [length - 1] * batch), FLOAT16)


def one_row_each(scene, pasts):
    rows = []
    for b, past in enumerate(pasts):
        keys = scene.key[b][: past + 1, 0].astype(np.float64)
        scores = scene.query[b][past].astype(np.float64) @ keys.T / np.sqrt(scene.head_size)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append(weights / weights.sum(axis=1, keepdims=True) @ scene.value[b][: past + 1, 0].astype(np.float64))
    return np.array(rows)
