"""What is stored where: order of store and load, tokens that are stored nowhere, values that lead out of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import FLOAT16

from .scene import HUGE, Scene, assert_close, assert_same_bytes, expected

SMALLEST = -(2**31)


@pytest.mark.parametrize("past", [0, 1000])
def test_new_keys_are_stored_before_anyone_reads_them(target, past):
    """The cache is NaN where they go, so that an early read shows; storing in a call of its own first is the same."""
    tokens, heads, repeats = (2048, 32, 500) if target.on_gpu else (64 if target.is_emulated else 200, 4, 2)
    past = past if target.on_gpu else past // 10
    scene = Scene([past + tokens], num_heads=heads, head_size=64)
    call = scene.call([past])
    first = target.run(call)
    assert not np.isnan(first.output).any()
    read_only = call.change(
        key_cache=first.key_cache, value_cache=first.value_cache, slot_mapping=np.full(tokens, -1, np.int32)
    )
    assert_same_bytes(target.run(read_only).output, first.output)
    arrays = {name: target.place(x) for name, x in call.arrays.items()}
    for _ in range(repeats):
        for name in ("key_cache", "value_cache"):
            arrays[name] = target.place(call[name])
        again = target.fetch(target.invoke(call, arrays).output, FLOAT16.numpy)
        assert_same_bytes(again.reshape(first.output.shape), first.output)


def with_blocks_from_zero(scene):
    """Give a scene's first sequence the blocks 0, 1, ..., which padding values point to."""
    for i, old in enumerate(scene.block_table[0][scene.block_table[0] < scene.num_blocks]):
        taken = scene.block_table == i
        scene.block_table[scene.block_table == old] = i
        scene.block_table[taken] = old
    return scene


@pytest.mark.parametrize("pad_table", [-1, 0], ids=["pad sequences unmapped", "pad sequences point to block 0"])
def test_padding_tokens_are_not_stored_in_slot_zero(target, io, cache, pad_table):
    scene = with_blocks_from_zero(Scene([5, *[1] * 5], num_heads=4, kv_num_heads=2, io=io, cache=cache, key=0))
    call = scene.call([4, *[0] * 5])
    slots = np.array([4, *[-1] * 5], np.int32)
    table = call["block_table"].copy()
    table[1:] = pad_table
    new = {name: call[name].copy() for name in ("key", "value")}
    for x in new.values():
        x[1:] = np.nan
    call = call.change(slot_mapping=slots, block_table=table, **new)
    outcome = target.run(call)
    want = expected(call)
    assert_same_bytes(outcome.key_cache, want.key_cache)
    assert_same_bytes(outcome.value_cache, want.value_cache)
    assert_close(outcome.output[:1], want.output[:1], io)


def test_a_read_only_step_attends_and_stores_nothing(target, cache):
    scene = Scene([40, 9], num_heads=4, kv_num_heads=2, cache=cache)
    wrote = target.run(scene.call([36, 7]))
    call = scene.call([36, 7], caches=wrote.caches, slot_mapping=np.full(6, -1, np.int32))
    call = call.change(key=np.full_like(call["key"], np.nan), value=np.full_like(call["value"], np.nan))
    outcome = target.check(call)
    assert_same_bytes(outcome.output, wrote.output)
    assert_same_bytes(outcome.key_cache, wrote.key_cache)
    assert_same_bytes(outcome.value_cache, wrote.value_cache)


def test_a_token_that_is_not_stored_is_attended_as_what_its_slot_holds(target, splits):
    scene = Scene([40, 9], num_heads=2)
    call = scene.call([36, 7])
    caches = scene.pool(scene.value, [40, 9], "k_scale"), scene.pool(scene.key, [40, 9], "v_scale")
    slots = np.concatenate([scene.slots(0, np.arange(36, 40)), scene.slots(1, np.arange(7, 9))]).astype(np.int32)
    slots[[1, 4]] = -1
    target.check(call.change(key_cache=caches[0], value_cache=caches[1], slot_mapping=slots), return_lse=True)


def test_slots_of_one_sequences_tokens_in_any_order(target, cache):
    """Explicit slots that equal the derived ones give the same bits; the rows of the batch may be stored crosswise."""
    scene = Scene([40, 9], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([36, 7])
    slots = np.concatenate([scene.slots(0, np.arange(36, 40)), scene.slots(1, np.arange(7, 9))]).astype(np.int32)
    derived, explicit = target.run(call), target.run(call.change(slot_mapping=slots))
    assert_same_bytes(explicit.output, derived.output)
    assert_same_bytes(explicit.key_cache, derived.key_cache)
    assert_same_bytes(explicit.value_cache, derived.value_cache)
    target.check(call.change(slot_mapping=slots[::-1].copy()))


@pytest.mark.parametrize("tokens", [3, 5, 0])
def test_a_slot_mapping_of_another_length_is_refused(target, tokens):
    call = Scene([8]).call([4])
    target.refuses(call.change(slot_mapping=np.zeros(tokens, np.int32)), "^slot_mapping: .*token_count")


def bad_slots(num_slots):
    return [num_slots, num_slots + 10**6, 2**31 - 1, -2, SMALLEST, num_slots - 1, -1]


def test_slots_outside_the_cache_are_not_written(target, cache):
    """Nothing around the caches changes (their guards are compared after every run), and other tokens are right."""
    scene = Scene([12, 9], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([4, 8])
    slots = np.concatenate([scene.slots(0, np.arange(4, 12)), scene.slots(1, np.array([8]))]).astype(np.int32)
    slots[1:8] = bad_slots(scene.num_blocks * 16)
    filled = scene.pool(scene.key, [12, 9], "k_scale"), scene.pool(scene.value, [12, 9], "v_scale")
    call = call.change(slot_mapping=slots, key_cache=filled[0], value_cache=filled[1])
    target.check(call)
    for index, slot in enumerate(bad_slots(scene.num_blocks * 16)[:5], start=1):
        only = call["slot_mapping"].copy()
        only[1:8] = -1
        only[index] = slot
        target.refuses(call.change(slot_mapping=only), rf"^slot_mapping\[{index}\]: .*got {slot}", checks=True)


def test_block_ids_outside_the_cache_are_neither_read_nor_written(target, cache, splits):
    scene = Scene([100, 9], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([94, 8])
    table = call["block_table"].copy()
    table[0, :7] = [scene.num_blocks, -2, HUGE, table[0, 3], SMALLEST, table[0, 5], scene.num_blocks + 1000]
    outcome = target.check(call.change(block_table=table), return_lse=True)
    assert_same_bytes(outcome.key_cache, expected(call.change(block_table=table)).key_cache)
    target.refuses(call.change(block_table=table), rf"^block_table\[0, 0\]: .*got {scene.num_blocks}", checks=True)


@pytest.mark.parametrize("past", [-1, -5, SMALLEST])
def test_a_negative_past_gives_zero_and_stores_nothing(target, cache, past):
    scene = Scene([12, 9, 4], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([9, 8, 2])
    pasts = call["past_seqlens"].copy()
    pasts[0] = past
    outcome = target.check(call.change(past_seqlens=pasts), return_lse=True)
    assert not outcome.output[:3].any()
    target.refuses(call.change(past_seqlens=pasts), r"^past_seqlens\[0\]: ", checks=True)


@pytest.mark.parametrize("beyond", [1, 3, 17, 1000])
def test_a_context_beyond_the_table_stays_inside_it(target, beyond, splits):
    """The sequence's last tokens have no place: they are not stored, and the others are attended."""
    scene = Scene([32, 9], num_heads=2)
    call = scene.call([28, 8])
    table = call["block_table"][:, :2]
    pasts = call["past_seqlens"].copy()
    pasts[0] += beyond
    filled = scene.pool(scene.key, [32, 9], "k_scale"), scene.pool(scene.value, [32, 9], "v_scale")
    call = call.change(block_table=table.copy(), past_seqlens=pasts, key_cache=filled[0], value_cache=filled[1])
    target.check(call, return_lse=True)
    target.refuses(call, r"^past_seqlens\[0\]: .*capacity", checks=True)


@pytest.mark.parametrize("past", [2**31 - 1, 2**31 - 4, 2**31 - 40])
@pytest.mark.parametrize("window", [-1, 8, 2**31 - 1])
def test_lengths_that_overflow_32_bits_harm_nobody_else(target, past, window):
    scene = Scene([12, 9, 4], num_heads=2)
    call = scene.call([9, 8, 2]).change(local_window_size=window)
    want = expected(call)
    pasts = call["past_seqlens"].copy()
    pasts[0] = past
    outcome = target.run(call.change(past_seqlens=pasts))
    assert_close(outcome.output[3:], want.output[3:], FLOAT16)
    mine = scene.block_table[0, :1]
    for name in ("key_cache", "value_cache"):
        got, right = (np.delete(x, mine, axis=0) for x in (getattr(outcome, name), getattr(want, name)))
        assert_same_bytes(got, right)


HOSTILE_OFFSETS = {
    "decreasing": [0, 3, 1, 6],
    "beyond the rows": [0, 3, 2**31 - 1, 2**31 - 1],
    "negative": [0, 3, -7, SMALLEST],
    "so far below that a difference would not fit": [0, 3, SMALLEST, 6],
    "far beyond at the end": [0, 3, 4, 2**31 - 1],
}


@pytest.mark.parametrize("how", HOSTILE_OFFSETS)
def test_offsets_that_make_no_sense_stay_in_memory(target, how):
    """If they do not decrease, sequences inside the batch are served; else only memory safety is asked."""
    scene = Scene([12, 9, 4], num_heads=2)
    call = scene.call([9, 8, 2])
    want = expected(call)
    changed = call.change(cumulative_sequence_length=np.array(HOSTILE_OFFSETS[how], np.int32))
    outcome = target.run(changed)
    if how in ("beyond the rows", "far beyond at the end"):
        assert_close(outcome.output[:3], want.output[:3], FLOAT16)
    untouched = np.setdiff1d(np.arange(scene.num_blocks), scene.block_table[scene.block_table < scene.num_blocks])
    assert_same_bytes(outcome.key_cache[untouched], call["key_cache"][untouched])
    target.refuses(changed, r"^cumulative_sequence_length\[", checks=True)


def test_query_positions_below_zero_are_refused_where_the_host_sees_them(target):
    call = Scene([12]).call([9]).change(query_positions=np.array([9, -1, 11], np.int32))
    if target.on_gpu:
        outcome = target.run(call)
        assert_close(outcome.output[[0, 2]], expected(call).output[[0, 2]], FLOAT16)
        target.refuses(call, r"^query_positions\[1\]: ", checks=True)
    else:
        target.refuses(call, r"^query_positions\[1\]: ")


@pytest.mark.parametrize("positions", [[100, 2**31 - 1, 3], [0, 0, 0], [11, 10, 9]], ids=str)
@pytest.mark.parametrize("window", [-1, 8])
def test_query_positions_of_any_size(target, positions, window):
    call = Scene([12], num_heads=2).call([9]).change(local_window_size=window)
    target.check(call.change(query_positions=np.array(positions, np.int32)), return_lse=True)


@pytest.mark.parametrize("bounds", [[1, 0], [0, 8], [1, 1], [1, 8, 1], [2**31 - 1, 2**31 - 1]], ids=str)
def test_bounds_that_are_too_small_stay_in_memory(target, bounds):
    """They may omit work, so only the sequence that respects them is compared."""
    scene = Scene([5, 40], num_heads=2)
    call = scene.call([4, 36]).change(attention_metadata=np.array(bounds, np.int32))
    outcome = target.run(call)
    if bounds[1] == 0 or bounds[1] >= 5:
        assert_close(outcome.output[:1], expected(call).output[:1], FLOAT16)


@pytest.mark.parametrize("capacity", [(1, 48), (4, 20), (1, 1)], ids=str)
def test_a_bias_that_is_too_small_stays_in_memory(target, capacity):
    """Tokens and keys beyond it may be left out; the first token of the first sequence is inside."""
    scene = Scene([5, 40], num_heads=2)
    call = scene.call([0, 36], [1, 4])
    bias = np.random.default_rng(0).standard_normal((2, 2, *capacity)).astype(np.float16)
    outcome = target.run(call.change(attention_bias=bias))
    full = np.zeros((2, 2, 4, 48), np.float16)
    full[:, :, : capacity[0], : capacity[1]] = bias
    want = expected(call.change(attention_bias=full))
    assert_close(outcome.output[:1], want.output[:1], FLOAT16)
    assert not np.isnan(outcome.output).any()
