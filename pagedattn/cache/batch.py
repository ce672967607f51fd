"""From block tables to the arrays of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn.cache.block_pool import integer
from pagedattn.cache.block_table import UNMAPPED, Array, BlockTable
from pagedattn.errors import InvalidArgumentError
from pagedattn.layout import cumulative_lengths, slot_mapping


@dataclass(frozen=True)
class Batch:
    """Arrays of one call, by the operator's names; B sequences, N tokens, in the caller's array module.

    Attributes
    ----------
    cumulative_sequence_length : (B + 1,) int32
    past_seqlens : (B,) int32
    block_table : (B, max_blocks) int32
        -1 beyond a sequence's blocks and below its window.
    slot_mapping : (N,) int32
        -1 in padded rows.
    query_positions : (N,) int32
        Position of each token in its sequence; 0 in padded rows. The operator derives the same by itself.
    attention_metadata : (2,) int32, NumPy
        Bounds of query and key lengths, rounded up to powers of two so that consecutive steps look alike to a plan.
    """

    cumulative_sequence_length: Any
    past_seqlens: Any
    block_table: Any
    slot_mapping: Any
    query_positions: Any
    attention_metadata: Array

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `paged_attention`."""
        return {
            name: getattr(self, name)
            for name in (
                "cumulative_sequence_length",
                "past_seqlens",
                "block_table",
                "slot_mapping",
                "attention_metadata",
            )
        }


def assemble(
    step: Sequence[tuple[BlockTable, int]],
    *,
    max_blocks: int | None = None,
    batch_size: int | None = None,
    token_count: int | None = None,
    xp: Any = np,
) -> Batch:
    """Arrays for a call that runs the last ``count`` tokens of each table, which `BlockTable.append` made room for.

    Parameters
    ----------
    step : sequence of (BlockTable, count)
        In the order of the rows of query; a count may be 0.
    max_blocks, batch_size, token_count : int, optional
        Capacities to pad to, for shapes that stay the same from step to step (a captured graph). Default: what fits.
    xp : module
        NumPy, CuPy, or what has an ``asarray`` like theirs.

    Returns
    -------
    Batch
        ``paged_attention(..., **batch.inputs)`` takes it.

    Raises
    ------
    InvalidArgumentError
        The tables differ in block size, one is shorter than its count, or a capacity is too small.
    """
    step = [(table, integer("count", count)) for table, count in step]
    tables, counts = [table for table, _ in step], [count for _, count in step]
    if len({table.block_size for table in tables}) > 1:
        raise InvalidArgumentError("assemble: the tables of one call must have one block size.")
    for table, count in step:
        if not 0 <= count <= table.length:
            raise InvalidArgumentError(f"assemble: {count} new tokens in a table of {table.length}; append them first.")
    rows = [table.row(count) for table, count in step]
    batch_size = _capacity("batch_size", batch_size, len(step), least=1)
    token_count = _capacity("token_count", token_count, sum(counts))
    max_blocks = _capacity("max_blocks", max_blocks, max(map(len, rows), default=0), least=1)

    counts += [0] * (batch_size - len(step))  # sequences of padding have no tokens
    cumulative = cumulative_lengths(counts)
    past = np.zeros(batch_size, np.int32)
    past[: len(step)] = [table.length - count for table, count in step]
    block_table = np.full((batch_size, max_blocks), UNMAPPED, np.int32)
    for padded, row in zip(block_table, rows, strict=False):
        padded[: len(row)] = row
    block_size = tables[0].block_size if tables else 1
    slots = slot_mapping(cumulative, past, block_table, block_size, token_count)

    positions = np.zeros(token_count, np.int32)
    sequence = np.repeat(np.arange(batch_size), counts)
    positions[: len(sequence)] = np.arange(len(sequence)) - cumulative[sequence] + past[sequence]
    bounds = [_power_of_two(max(lengths, default=0)) for lengths in (counts, [table.length for table in tables])]
    return Batch(
        xp.asarray(cumulative),
        xp.asarray(past),
        xp.asarray(block_table),
        xp.asarray(slots),
        xp.asarray(positions),
        np.array(bounds, np.int32),
    )


def _capacity(name: str, capacity: int | None, needed: int, least: int = 0) -> int:
    if capacity is None:
        return max(needed, least)
    if integer(name, capacity) < needed:
        raise InvalidArgumentError(f"{name}: expected a capacity of at least {needed}, got {capacity}.")
    return capacity


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length() if value else 0
