"""The sliding window: its width, the same on every path, and caches that hold no more than it."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, FLOAT16

from .scene import CACHES, Scene, assert_close, assert_same_bytes

LARGEST = 2**31 - 1
DECODE = ([1, 1], [0, 0]), ([1, 1, 0], [60, 30, 5])


@pytest.mark.by_heads
def test_the_window_counts_the_tokens_own_position(target, io, unit_cache):
    """Window 4 of positions 0..9 is 6..9, mean 7.5; 7.0 means five keys and 8.0 three."""
    cache = unit_cache.with_scales(1, {"int4": 2}.get(unit_cache.name, 1))
    scene = Scene([10], io=io, cache=cache, key=0, value=lambda b, pos, h: pos)
    if unit_cache.name == "int4":  # codes of even values only
        scene.value[0] = scene.value[0] // 2 * 2
    call = scene.call([9])
    full = target.check(call).output

    def windowed(size):
        return target.check(call.change(local_window_size=size)).output

    if unit_cache.name != "int4":
        assert (windowed(4) == 7.5).all()
        assert (windowed(1) == 9).all()
    assert_same_bytes(windowed(1)[0, 0], scene.value[0][9, 0])
    for size in (10, 11, LARGEST, -1):
        assert_same_bytes(windowed(size), full)
    assert (windowed(9) != full).all()


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 2, 16, 17])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 64, 99, 100, 101, LARGEST])
def test_windows_around_block_edges(target, window, q_len, splits):
    scene = Scene([100, 100 - window % 50], num_heads=4, kv_num_heads=2, seed=window % 1000)
    call = scene.call([n - q_len for n in scene.lengths]).change(local_window_size=window)
    target.check(call, return_lse=True)


@pytest.mark.by_heads(shape=DECODE)
@pytest.mark.parametrize("window", [1, 7, 40])
@pytest.mark.parametrize("shape", [*DECODE, ([1, 9], [60, 30]), ([20, 1, 0], [0, 70, 5])], ids=str)
def test_windows_with_every_cache(target, io, cache, shape, window):
    q_lens, pasts = shape
    lengths = [q + past for q, past in zip(q_lens, pasts, strict=True)]
    scene = Scene(lengths, num_heads=4, kv_num_heads=2, io=io, cache=cache)
    target.check(scene.call(pasts, q_lens).change(local_window_size=window))


@pytest.mark.by_heads
@pytest.mark.parametrize("window", [1, 5, 16, 17, 31, -1])
@pytest.mark.parametrize("kind", ["plain", "int8-channel"])
def test_prefill_chunks_and_decode_agree(target, window, kind):
    scene = Scene([40], num_heads=6, kv_num_heads=2, cache=CACHES[kind], seed=2)

    def grown(chunk):
        caches, rows = scene.pool(scene.key, [0], "k_scale"), []
        caches = caches, scene.pool(scene.value, [0], "v_scale")
        for past in range(0, 40, chunk):
            call = scene.call([past], [min(chunk, 40 - past)], caches, local_window_size=window)
            outcome = target.check(call)
            rows.append(outcome.output)
            caches = outcome.caches
        return np.concatenate(rows), caches

    whole, caches = grown(40)
    for chunk in (7, 1):
        rows, other = grown(chunk)
        assert_close(rows, whole, FLOAT16)
        assert_same_bytes(other[0], caches[0])
        assert_same_bytes(other[1], caches[1])


def rolling(scene, past, q_len, ring, caches, **changes):
    """A call over a cache of one ring of blocks: logical block i lives in ``ring[i % len(ring)]``."""
    call = scene.call([past], [q_len], caches, **changes)
    window, block_size = call["local_window_size"], scene.block_size
    entry = np.arange(call["block_table"].shape[1])
    table = np.asarray(ring, np.int32)[entry % len(ring)]
    table[entry < max(0, past - window + 1) // block_size] = -1
    table[entry * block_size >= past + q_len] = -1
    return call.change(block_table=table[None])


@pytest.mark.by_heads(chunk=1)
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 16, 17, 33])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8-channel", "int4"])
def test_a_rolling_cache_gives_the_bits_of_a_full_one(target, kind, window, chunk):
    """A ring that is just large enough for a chunk, round and round."""
    length = 70
    scene = Scene([length], num_heads=2, cache=CACHES[kind], seed=window)
    blocks = -(-(window + chunk - 1) // 16) + 1
    ring = scene.block_table[0, :blocks]
    sink = np.array([0.5, 2], np.float16)
    full = scene.pool(scene.key, [0], "k_scale"), scene.pool(scene.value, [0], "v_scale")
    rolled = full[0].copy(), full[1].copy()
    for past in range(0, length - chunk + 1, chunk):
        changes = {"local_window_size": window, "head_sink": sink}
        want = target.run(scene.call([past], [chunk], full, **changes))
        got = target.run(rolling(scene, past, chunk, ring, rolled, **changes))
        assert_same_bytes(got.output, want.output)
        full, rolled = want.caches, got.caches


@pytest.mark.parametrize(("past", "chunk"), [(32, 17), (48, 17), (16, 1), (64, 16)])
def test_a_ring_that_fits_exactly_loses_nothing(target, io, past, chunk):
    """Window 16 and 17 new tokens need 32 positions: both blocks of the ring, whole when the chunk ends a block."""
    window = 16
    scene = Scene([past + chunk], io=io, key=0, value=lambda b, pos, h: pos % 61)
    ring = scene.block_table[0, :2]
    caches = scene.empty_pool(), scene.empty_pool()
    live = np.arange(max(0, past - window + 1), past)
    for history, pool in ((scene.key, caches[0]), (scene.value, caches[1])):
        pool[ring[live // 16 % 2], live % 16] = history[0][live]
    call = rolling(scene, past, chunk, ring, caches, local_window_size=window)
    outcome = target.run(call)
    own = np.arange(past, past + chunk)
    want = [np.mean([k % 61 for k in range(max(0, p - window + 1), p + 1)]) for p in own]
    assert_close(outcome.output[..., 0], np.repeat(want, 2).reshape(-1, 2), io)


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
def test_blocks_below_the_window_are_never_read(target, io, splits):
    """Their table entries may name anything: here blocks that are NaN, and none at all."""
    scene = Scene([100], num_heads=2, io=io)
    call = scene.call([97]).change(local_window_size=20)
    target.check(call)
    want = target.run(call).output
    poisoned = {name: call[name].copy() for name in ("key_cache", "value_cache")}
    for pool in poisoned.values():
        pool[call["block_table"][0, :4]] = np.nan  # positions below 64; the window of 97 starts at 78
    assert_same_bytes(target.run(call.change(**poisoned)).output, want)
    table = call["block_table"].copy()
    for entries in ([-1] * 4, [scene.num_blocks, LARGEST, -5, -(2**31)]):
        table[0, :4] = entries
        assert_same_bytes(target.run(call.change(block_table=table)).output, want)


def test_a_window_of_absolute_positions_follows_query_positions(target):
    scene = Scene([40], num_heads=2)
    positions = np.array([20, 35, 36, 39, 10], np.int32)
    target.check(scene.call([35]).change(local_window_size=8, query_positions=positions), return_lse=True)
