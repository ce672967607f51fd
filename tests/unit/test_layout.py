"""Conversions between descriptions of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import (
    InvalidArgumentError,
    block_table_from_indices,
    block_table_to_indices,
    cumulative_lengths,
    slot_mapping,
)

BLOCK = 4


def table_of(lengths, seed=0, spare=1):
    """A shuffled block table with room for these lengths."""
    blocks = [-(-length // BLOCK) for length in lengths]
    table = np.full((len(lengths), max(blocks) + spare), -1, np.int32)
    ids = iter(np.random.default_rng(seed).permutation(sum(blocks)))
    for row, count in zip(table, blocks, strict=True):
        row[:count] = [next(ids) for _ in range(count)]
    return table


def test_cumulative_lengths():
    got = cumulative_lengths([3, 0, 5])
    assert got.dtype == np.int32
    assert got.tolist() == [0, 3, 3, 8]
    assert cumulative_lengths(np.empty(0, np.int64)).tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 3))
def test_slots_are_those_of_a_loop_over_tokens(lengths, padding):
    past, new = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    table = table_of(past + new)
    expected = [
        table[b, p // BLOCK] * BLOCK + p % BLOCK for b in range(len(past)) for p in range(past[b], past[b] + new[b])
    ] + [-1] * padding
    got = slot_mapping(cumulative_lengths(new), past, table, BLOCK, len(expected))
    assert got.dtype == np.int32
    assert got.tolist() == expected
    if not padding:
        assert slot_mapping(cumulative_lengths(new), past, table, BLOCK).tolist() == expected


def test_what_has_no_slot_is_minus_one():
    table = np.array([[0, -1], [2, 1], [3, 4]], np.int32)
    got = slot_mapping([0, 2, 4, 5], [3, 7, -1], table, BLOCK)
    assert got.tolist() == [3, -1, 7, -1, -1]  # unmapped block; beyond the table; negative past


@given(st.lists(st.integers(0, 17), min_size=1, max_size=6))
def test_page_lists_there_and_back(lengths):
    table = table_of(lengths)
    indptr, indices, last = block_table_to_indices(table, np.array(lengths), BLOCK)
    assert indptr.dtype == indices.dtype == last.dtype == np.int32
    assert indptr[-1] == indices.size
    assert all((last[b] == 0) == (length == 0) and last[b] <= BLOCK for b, length in enumerate(lengths))
    again, kv_lens = block_table_from_indices(indptr, indices, last, BLOCK, table.shape[1])
    assert kv_lens.tolist() == list(lengths)
    assert again.dtype == np.int32
    assert (again == table).all()


def test_page_lists_by_hand():
    table = np.array([[5, 2, -1], [7, -1, -1]], np.int32)
    indptr, indices, last = block_table_to_indices(table, [6, 4], BLOCK)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 3], [5, 2, 7], [2, 4])
    assert block_table_from_indices(indptr, indices, last, BLOCK)[0].tolist() == [[5, 2], [7, -1]]


def test_blocks_past_a_sequence_are_left_out():
    indptr, indices, _ = block_table_to_indices(np.array([[5, 2, 9]]), [4], BLOCK)
    assert (indptr.tolist(), indices.tolist()) == ([0, 1], [5])


def test_impossible_conversions_are_refused():
    table = np.array([[5, -1]], np.int32)
    with pytest.raises(InvalidArgumentError, match=r"kv_lens: expected at most 2 blocks of 4 tokens.*length of 9"):
        block_table_to_indices(table, [9], BLOCK)
    with pytest.raises(InvalidArgumentError, match="block_table: expected every block within kv_lens to be mapped"):
        block_table_to_indices(table, [5], BLOCK)
    with pytest.raises(InvalidArgumentError, match="max_blocks: expected at least 3, the longest list, got 2"):
        block_table_from_indices([0, 3], [0, 1, 2], [1], BLOCK, 2)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2**31 - 1, 1], "lengths: expected a sum that int32 holds, got 2147483648"),
        ([3, -1], "lengths: expected values >= 0, got -1"),
        ([[1, 2]], r"lengths: expected rank 1, \(batch_size,\), got shape \(1, 2\)"),
        ([1.5], "lengths and tables: expected integers, got elements of float64"),
    ],
)
def test_lengths_that_int32_would_bend_are_refused(lengths, message):
    with pytest.raises(InvalidArgumentError, match=message):
        cumulative_lengths(lengths)
