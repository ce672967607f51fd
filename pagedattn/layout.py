"""Between the operator's description of a batch and those of other libraries.

Plain integer arrays, NumPy's or CuPy's. `pagedattn.cache` builds the same arrays for sequences that it manages.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pagedattn.errors import InvalidArgumentError

__all__ = ["block_table_from_indices", "block_table_to_indices", "cumulative_lengths", "slot_mapping"]


def cumulative_lengths(lengths: Any) -> Any:
    """cumulative_sequence_length of sequences with these numbers of new tokens.

    Parameters
    ----------
    lengths : (B,), integers, or a sequence of int

    Returns
    -------
    (B + 1,), int32
        ``[0, l0, l0 + l1, ...]``; ``diff`` of it is the inverse.

    Raises
    ------
    InvalidArgumentError
        The lengths are no integers of rank 1, or, in host memory, one is negative or their sum does not fit int32.
    """
    xp, (lengths,) = _arrays(lengths)
    if lengths.ndim != 1:
        raise InvalidArgumentError(f"lengths: expected rank 1, (batch_size,), got shape {lengths.shape}.")
    if xp is np and (lengths < 0).any():
        raise InvalidArgumentError(f"lengths: expected values >= 0, got {lengths.min()}.")
    ends = xp.cumsum(lengths)
    if xp is np and lengths.size and ends[-1] > np.iinfo(np.int32).max:
        raise InvalidArgumentError(f"lengths: expected a sum that int32 holds, got {ends[-1]}.")
    result = xp.zeros(lengths.size + 1, xp.int32)
    result[1:] = ends
    return result


def slot_mapping(
    cumulative_sequence_length: Any,
    past_seqlens: Any,
    block_table: Any,
    block_size: int,
    token_count: int | None = None,
) -> Any:
    """Slots that the operator derives by itself: where each new token's key and value are stored.

    Parameters
    ----------
    cumulative_sequence_length : (B + 1,), int32
    past_seqlens : (B,), int32
    block_table : (B, max_blocks_per_sequence), int32
    block_size : int
    token_count : int, optional
        Rows of query; by default the last cumulative length, which reads the device.

    Returns
    -------
    (token_count,), int32
        ``block * block_size + offset``; -1 for padding, unmapped blocks and positions beyond the table.

    Raises
    ------
    InvalidArgumentError
        An array holds no integers.
    """
    xp, (cumulative, past, table) = _arrays(cumulative_sequence_length, past_seqlens, block_table)
    token = xp.arange(int(cumulative[-1]) if token_count is None else token_count)
    sequence = xp.searchsorted(cumulative[1:], token, side="right")  # sequences without tokens are stepped over
    padding = sequence >= past.size
    sequence = xp.minimum(sequence, past.size - 1)
    position = past[sequence] + token - cumulative[sequence]
    entry = position // block_size
    outside = padding | (past[sequence] < 0) | (entry >= table.shape[1])
    block = table[sequence, xp.where(outside, 0, entry)]
    slots = xp.where(outside | (block < 0), -1, block * block_size + position % block_size)
    return slots.astype(xp.int32)


def block_table_to_indices(block_table: Any, kv_lens: Any, block_size: int) -> tuple[Any, Any, Any]:
    """Page lists in FlashInfer's form from a block table.

    Parameters
    ----------
    block_table : (B, max_blocks_per_sequence), int32
    kv_lens : (B,), integers
        Tokens of each sequence in the cache, new ones included: past_seqlens + new tokens.
    block_size : int

    Returns
    -------
    indptr : (B + 1,), int32
        Entries ``[indptr[b], indptr[b + 1])`` of indices are the blocks of sequence b.
    indices : (indptr[B],), int32
    last_page_len : (B,), int32
        Tokens in each sequence's last block, in [1, block_size]; 0 for an empty sequence.

    Raises
    ------
    InvalidArgumentError
        A sequence is longer than its row, or has an unmapped block.
    """
    xp, (table, lengths) = _arrays(block_table, kv_lens)
    blocks = -(-lengths // block_size)
    used = xp.arange(table.shape[1]) < blocks[:, None]
    if bool((blocks > table.shape[1]).any()):
        raise InvalidArgumentError(
            f"kv_lens: expected at most {table.shape[1]} blocks of {block_size} tokens, the width of block_table, "
            f"got a length of {int(lengths.max())}."
        )
    if bool((table[used] < 0).any()):
        raise InvalidArgumentError(
            "block_table: expected every block within kv_lens to be mapped, because a page list has no gaps; got -1."
        )
    last = xp.where(lengths > 0, lengths - (blocks - 1) * block_size, 0)
    return cumulative_lengths(blocks), table[used].astype(xp.int32), last.astype(xp.int32)


def block_table_from_indices(
    indptr: Any, indices: Any, last_page_len: Any, block_size: int, max_blocks: int | None = None
) -> tuple[Any, Any]:
    """Block table from page lists in FlashInfer's form.

    Parameters
    ----------
    indptr : (B + 1,), int32
    indices : (indptr[B],), int32
    last_page_len : (B,), int32
    block_size : int
    max_blocks : int, optional
        Width of the table; by default that of the longest list.

    Returns
    -------
    block_table : (B, max_blocks), int32
        -1 beyond each list.
    kv_lens : (B,), int32
        Tokens of each sequence, new ones included: past_seqlens is this minus the new tokens.

    Raises
    ------
    InvalidArgumentError
        A list is longer than max_blocks.
    """
    xp, (indptr, indices, last) = _arrays(indptr, indices, last_page_len)
    blocks = indptr[1:] - indptr[:-1]
    longest = int(blocks.max()) if blocks.size else 0
    width = max(longest, 1) if max_blocks is None else max_blocks
    if width < longest:
        raise InvalidArgumentError(f"max_blocks: expected at least {longest}, the longest list, got {max_blocks}.")
    entry = xp.arange(width)
    where = xp.where(entry < blocks[:, None], indptr[:-1, None] + entry, indices.size)
    table = xp.append(indices, xp.asarray([-1]))[where].astype(xp.int32)  # the entry after the last says: none
    lengths = xp.where(blocks > 0, (blocks - 1) * block_size + last, 0)
    return table, lengths.astype(xp.int32)


def _arrays(*given: Any) -> tuple[Any, tuple[Any, ...]]:
    """The array module of the arguments, and the arguments as arrays of 64-bit integers."""
    names = {type(x).__module__.partition(".")[0] for x in given}
    xp = sys.modules["cupy"] if "cupy" in names else np
    arrays = tuple(map(xp.asarray, given))
    for array in arrays:
        if array.dtype.kind not in "iu" and array.size:
            raise InvalidArgumentError(f"lengths and tables: expected integers, got elements of {array.dtype}.")
    return xp, tuple(array.astype(xp.int64) for array in arrays)
