"""A `Case` as a call of group_query_attention: the same numbers in a padded batch and contiguous caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.build import Built, poison
from tests.support.cases import Case

Array = np.ndarray[Any, np.dtype[Any]]


def has_padded_form(case: Case) -> bool:
    """Whether GroupQueryAttention can say what a case asks for.

    Without query_seqlens, which goes with a causal mask only, a sequence of fewer rows than others has no past.
    """
    longest = max(new for _, new in case.lengths)
    return (
        not case.is_latent
        and case.rope != "offset"
        and not case.positions
        and case.slots in ("", "explicit")
        and not case.unmapped
        and (case.is_causal or case.window == -1)
        and (case.is_causal or all(new == longest or not past for past, new in case.lengths))
        and case.qk_dtype in ("float32", case.io)
        and sum(new for _, new in case.lengths) > 0
    )


@dataclass
class Padded:
    """Arguments of one call, and the way from its results back to the ragged ones.

    Attributes
    ----------
    inputs, attributes : dict
    sequence, row : (rows,)
        Place in the padded batch of each ragged row that belongs to a sequence.
    slots : list of (positions,) arrays
        Slot in the paged pool of each position of each sequence.
    """

    inputs: dict[str, Any]
    attributes: dict[str, Any]
    sequence: Array
    row: Array
    slots: list[Array]

    def ragged(self, x: Array) -> Array:
        """Rows (batch_size, sequence_length, ...) of the ragged batch."""
        return x[self.sequence, self.row]

    def paged(self, present: Array, pool: Array) -> Array:
        """A copy of the pool with every position taken from a contiguous cache."""
        result = pool.copy().reshape(-1, *pool.shape[2:])
        for b, slots in enumerate(self.slots):
            result[slots] = present[b, :, : slots.size].swapaxes(0, 1)
        return result.reshape(pool.shape)


def padded(built: Built, spare: int = 3) -> Padded:
    """The padded form of a built case; padding rows and cache rows beyond the tokens hold poison.

    Parameters
    ----------
    built : Built
    spare : int
        Rows of the cache beyond the longest context.
    """
    case = built.case
    past, new = (np.array(lengths, np.int64) for lengths in zip(*case.lengths, strict=True))
    live = past + new > 0  # a sequence without any token has no place in the padded form
    past, new = past[live], new[live]
    length, total = int(new.max()), int((past + new).max())
    sequence = np.repeat(np.arange(new.size), new)
    row = np.concatenate([np.arange(count) for count in new])

    def pad(x: Array) -> Array:
        result = np.full((new.size, length, x.shape[1]), poison(x.dtype), x.dtype)
        result[sequence, row] = x[: sequence.size]
        return result

    table = built["block_table"].astype(np.int64)[live]
    slots = []
    for b in range(new.size):
        position = np.arange(past[b] + new[b])
        slots.append(table[b, position // case.block_size] * case.block_size + position % case.block_size)

    def contiguous(pool: Array) -> Array:
        shape = (new.size, pool.shape[2], total + spare, pool.shape[3])
        result = np.full(shape, poison(pool.dtype, case.cache), pool.dtype)
        rows = pool.reshape(-1, *pool.shape[2:])
        for b in range(new.size):
            result[b, :, : slots[b].size] = rows[slots[b]].swapaxes(0, 1)
        return result

    names = ("cos_cache", "sin_cache", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight")
    inputs: dict[str, Any] = {name: built[name] for name in names if name in built.parents}
    inputs.update((name, pad(built[name])) for name in ("query", "key", "value") if name in built.parents)
    inputs.update(
        past_key=contiguous(built["key_cache"]),
        past_value=contiguous(built["value_cache"]),
        seqlens_k=(past + new - 1).astype(np.int32),
        total_sequence_length=np.array(max(total, length), np.int32),
    )
    if case.is_causal:
        inputs["query_seqlens"] = new.astype(np.int32)
    if case.bias:
        bias = built["attention_bias"]
        bias = bias[live] if bias.shape[0] > 1 else bias
        inputs["attention_bias"] = bias[:, :, :length, :total]
    shared = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved")
    attributes = {name: built.attributes[name] for name in (*shared, "k_quant_type", "v_quant_type", "qk_output")}
    attributes.update(qk_norm_epsilon=built.attributes["qk_norm_epsilon"], causal=built.attributes["is_causal"])
    if case.cache:
        attributes["kv_cache_bit_width"] = 4 if case.cache == "int4" else 8
    return Padded(inputs, attributes, sequence, row, slots)
