"""Sizes: head ratios, head sizes and block sizes off the beaten path are right, or refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import FLOAT16

from .scene import CACHES, Scene, assert_close, assert_same_bytes, expected

BATCHES = {"decode": ([1, 1], [20, 3]), "prefill": ([4, 4], [20, 0]), "mixed": ([1, 4, 1], [20, 5, 3])}


@pytest.mark.by_heads(batch="decode", ratio=tuple(range(1, 9)))
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 20, 32])
def test_query_heads_find_their_key_head(target, unit_cache, ratio, batch):
    """Values and keys are the number of their head, so that head i gives floor(i / ratio), and its score shows too."""
    q_lens, pasts = BATCHES[batch]
    lengths = [q + past for q, past in zip(q_lens, pasts, strict=True)]
    kv_heads = 8 if target.by_heads else 4  # none of them a copy
    scene = Scene(
        lengths,
        num_heads=kv_heads * ratio,
        kv_num_heads=kv_heads,
        cache=unit_cache,
        seed=ratio,
        key=lambda b, pos, h: h + 1,
        value=lambda b, pos, h: h,
    )
    outcome = target.check(scene.call(pasts, q_lens), return_lse=True)
    assert (outcome.output == np.arange(kv_heads * ratio)[:, None] // ratio).all()


@pytest.mark.parametrize(
    ("num_heads", "kv_num_heads"), [(1, 1), (3, 3), (5, 1), (7, 7), (64, 1), (71, 1), (96, 8), (128, 2)]
)
def test_head_counts(target, num_heads, kv_num_heads):
    scene = Scene([20, 5], num_heads=num_heads, kv_num_heads=kv_num_heads, seed=num_heads)
    target.check(scene.call([18, 4]), return_lse=True)


@pytest.mark.parametrize("batch", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8-channel", "int4"])
@pytest.mark.parametrize("head_size", [8, 16, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256])
def test_head_sizes_with_their_own_default_scale(target, io, head_size, kind, batch):
    q_lens, pasts = BATCHES[batch]
    lengths = [q + past for q, past in zip(q_lens, pasts, strict=True)]
    scene = Scene(lengths, num_heads=4, kv_num_heads=2, head_size=head_size, io=io, cache=CACHES[kind], seed=head_size)
    target.check(scene.call(pasts, q_lens), return_lse=True)


@pytest.mark.parametrize("head_size", [264, 320, 512, 576, 1024])
def test_very_wide_heads(target, head_size):
    scene = Scene([20, 5], num_heads=4, kv_num_heads=2, head_size=head_size)
    target.check(scene.call([18, 4]), return_lse=True)


@pytest.mark.parametrize("beside", [1e4, np.nan, np.inf])
@pytest.mark.parametrize("head_size", [8, 40, 72, 80, 96, 112, 120, 192])
def test_nothing_of_the_next_head_or_token_is_read(target, head_size, beside):
    """The middle one of three heads is sane, and so is the middle one of three sequences."""
    scene = Scene([21, 21, 21], num_heads=6, kv_num_heads=3, head_size=head_size, seed=head_size)
    call = scene.call([19, 19, 19])
    sane = expected(call)
    for histories in (scene.query, scene.key, scene.value):
        for b, rows in enumerate(histories):
            per_head = rows.shape[1] // 3
            if b != 1:
                rows[:] = beside
            rows[:, :per_head] = rows[:, 2 * per_head :] = beside
    call = scene.call([19, 19, 19])
    outcome = target.run(call)
    assert_close(outcome.output[2:4, 2:4], sane.output[2:4, 2:4], FLOAT16)
    stored = expected(call)
    assert_same_bytes(outcome.key_cache, stored.key_cache)
    assert_same_bytes(outcome.value_cache, stored.value_cache)


@pytest.mark.parametrize("head_size", [1, 2, 4, 12, 20, 63, 65, 100])
def test_a_head_size_that_is_no_multiple_of_8_is_refused(target, head_size):
    target.refuses(Scene([4], head_size=head_size).call([3]), "^query: .*head_size.*multiple of 8")


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512, 1024])
def test_every_position_of_every_block_is_seen(target, unit_cache, block_size, q_len):
    """All of the context for each length from one token to three blocks and one."""
    lengths = {1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1, block_size // 2 + 3}
    if block_size == 16 and not target.is_emulated:
        lengths = set(range(1, 50))
    lengths = sorted(n for n in lengths if n >= q_len)
    scene = Scene(lengths, cache=unit_cache, block_size=block_size, key=0, value=lambda b, pos, h: pos % 16)
    outcome = target.run(scene.call([n - q_len for n in lengths]))
    stored = scene.pool(scene.value, lengths, "v_scale")
    assert_same_bytes(outcome.value_cache, stored)
    codes = np.minimum(np.arange(max(lengths)) % 16, 7 if unit_cache.name == "int4" else 15)
    want = [codes[: n - q_len + j + 1].mean() for n in lengths for j in range(q_len)]
    assert_close(outcome.output[:, 0], np.repeat(want, 16).reshape(-1, 16), FLOAT16)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 12, 15, 17, 24, 48, 96, 192, 784])
def test_a_block_size_that_is_no_power_of_two_from_16_is_refused(target, block_size):
    call = Scene([3 * block_size + 1], block_size=block_size).call([3 * block_size])
    target.refuses(call, "^key_cache: expected block_size .*power of two >= 16")


def test_block_tables_far_wider_than_needed(target):
    """A table for a context of 64 thousand, of which a few entries mean something."""
    scene = Scene([20, 5, 33])
    call = scene.call([19, 4, 30])
    table = np.full((3, 4096), 2**31 - 1, np.int32)
    table[:, : call["block_table"].shape[1]] = call["block_table"]
    target.check(call.change(block_table=table), return_lse=True)
