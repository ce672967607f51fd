"""Merging attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from pagedattn.errors import InvalidArgumentError

__all__ = ["merge_attention_states"]


def merge_attention_states(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Merge results over disjoint sets of keys, as of a shared prefix and a suffix, or of a split context.

    Each part is what `paged_attention` with ``return_lse=True`` gives for the same queries. A part in which a row
    attended nothing (lse = -inf) counts for nothing, whatever its output holds. A sink is in the denominator of every
    call that has one: give ``head_sink`` to one part only, and to one in which each row attends something, as the part
    with the row's own key, because a row that attends nothing has no sink either.

    Parameters
    ----------
    outputs : sequence of (N, H * DV) or (N, H, DV)
        NumPy, CuPy or torch.
    lses : sequence of (N, H), float32
        **Natural** logarithms of the softmax denominators. Of FlashInfer's base 2 logarithms give ``lse * ln 2``.

    Returns
    -------
    output : like one of outputs
        Summed in float32, rounded once.
    lse : (N, H), float32
        -inf for a row that attended nothing; its output is 0.

    Raises
    ------
    InvalidArgumentError
        No part is given, or the shapes do not agree.
    """
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise InvalidArgumentError(
            f"lses: expected one for each of outputs, one part or more; got {len(lses)} for {len(outputs)}."
        )
    first = outputs[0]
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape != first.shape or lse.shape != lses[0].shape:
            raise InvalidArgumentError(
                f"outputs, lses: expected the shapes of the first part, {tuple(first.shape)} and "
                f"{tuple(lses[0].shape)}, got {tuple(output.shape)} and {tuple(lse.shape)}."
            )
    rows_and_heads, shape = tuple(lses[0].shape), tuple(first.shape)
    fits = len(rows_and_heads) == 2 and len(shape) in (2, 3) and rows_and_heads[0] == shape[0]
    if not fits or (shape[1] % max(rows_and_heads[1], 1) if len(shape) == 2 else shape[1] != rows_and_heads[1]):
        raise InvalidArgumentError(
            f"lses: expected shape (rows, heads) of outputs, which are {shape}, got {rows_and_heads}."
        )
    xp = sys.modules[type(first).__module__.partition(".")[0]]
    rows, heads = rows_and_heads

    def per_head(output: Any) -> Any:
        return xp.asarray(output, dtype=xp.float32).reshape(rows, heads, math.prod(shape[1:]) // max(heads, 1))

    stacked = xp.stack([xp.asarray(lse, dtype=xp.float32) for lse in lses])
    largest = stacked[0]
    for lse in stacked[1:]:
        largest = xp.maximum(largest, lse)
    empty = largest == -xp.inf
    largest = xp.where(empty, xp.zeros_like(largest), largest)
    weights = xp.exp(stacked - largest)  # exp(-inf) = 0 for an empty part
    total = xp.where(empty, xp.ones_like(largest), weights.sum(0))
    merged: Any = 0
    for output, weight in zip(outputs, weights, strict=True):
        share = (weight / total)[..., None]
        merged = merged + share * xp.where(share > 0, per_head(output), xp.zeros_like(share))
    lse = xp.where(empty, xp.full_like(total, -xp.inf), largest + xp.log(total))
    return xp.asarray(merged.reshape(first.shape), dtype=first.dtype), lse
