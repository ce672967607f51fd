"""The operator on NumPy: the embedded default for arrays in host memory, and the tests' oracle in float64.

Sequences are looped over; tokens, heads and keys are not. Each sequence reads the keys its tokens can see, O(window)
of them when there is one, and scores are formed in tiles of tokens so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn import codec
from pagedattn.dtypes import DType
from pagedattn.problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
# Scores held at a time, in elements: 64 MiB of float32.
TILE_ELEMENTS = 1 << 24


def plan(problem: Problem, executor: object = None, compute: type[np.floating[Any]] = np.float32) -> NumpyPlan:
    """Plan a problem.

    Parameters
    ----------
    problem : Problem
    executor : ignored
        There is nothing to compile.
    compute : type
        float32, as the kernels; float64 gives the tests' oracle, which also keeps the rotated query unrounded.
    """
    return NumpyPlan(problem, compute)


class PagedRows:
    """One cache seen as rows by position: stores at slots, reads ranges of a sequence.

    A cache of one contiguous run per sequence is the same thing with one block each.

    Parameters
    ----------
    stored : (num_blocks, block_size, kv_num_heads, width)
        Any strides; written in place.
    dtype : DType
    scale : (1,) or (kv_num_heads, 1, head_size), float32, or None
    head_size : int
    block_table : (batch_size, max_blocks_per_sequence), int32
    compute : type
        Floating type of what is read.
    """

    def __init__(
        self,
        stored: Array,
        dtype: DType,
        scale: Array | None,
        head_size: int,
        block_table: Array,
        compute: type[np.floating[Any]],
    ) -> None:
        self.stored, self.dtype, self.head_size, self.compute = stored, dtype, head_size, compute
        self.block_table = block_table.astype(np.int64)
        self.block_table[(block_table < 0) | (block_table >= stored.shape[0])] = -1
        self.block_size = stored.shape[1]
        # (kv_num_heads, 1, head_size) -> (kv_num_heads, head_size), which broadcasts over rows of heads.
        self.scale = None if scale is None else scale[:, 0] if scale.ndim == 3 else scale

    def slots(self, sequence: Array, position: Array) -> Array:
        """Slot of each (sequence, position), -1 where the table maps none."""
        entry = position // self.block_size
        known = (position >= 0) & (entry < self.block_table.shape[1])
        block = np.full(position.shape, -1, np.int64)
        block[known] = self.block_table[sequence[known], entry[known]]
        return np.asarray(np.where(block < 0, -1, block * self.block_size + position % self.block_size))

    def write(self, slots: Array, rows: Array) -> None:
        """Store rows (tokens, kv_num_heads, head_size) at slots (tokens,); slots outside the pool store nothing."""
        inside = (slots >= 0) & (slots < self.stored.shape[0] * self.block_size)
        block, offset = np.divmod(slots[inside], self.block_size)
        self.stored[block, offset] = codec.encode(rows[inside], self.dtype, self.scale)

    def read(self, sequence: int, low: int, high: int) -> tuple[Array, Array]:
        """Rows of positions [low, high): values (n, kv_num_heads, head_size), zero where unmapped, and mapped (n,)."""
        slots = self.slots(np.full(high - low, sequence), np.arange(low, high))
        mapped = slots >= 0
        block, offset = np.divmod(slots, self.block_size)
        if mapped.all():
            stored = self.stored[block, offset]
            return codec.decode(stored, self.dtype, self.scale, self.head_size, self.compute), mapped
        values = np.zeros((high - low, self.stored.shape[2], self.head_size), self.compute)
        values[mapped] = codec.decode(
            self.stored[block[mapped], offset[mapped]], self.dtype, self.scale, self.head_size, self.compute
        )
        return values, mapped


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """RMSNorm of each head: x (tokens, heads, head_size) float, weight (head_size,)."""
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(epsilon))
    return np.asarray(x * inverse * weight.astype(x.dtype))


def apply_rope(x: Array, cos: Array, sin: Array, offset: int, interleaved: bool) -> Array:
    """Rotate channels [offset, offset + 2 * half) of each head.

    Parameters
    ----------
    x : (tokens, heads, head_size), float
    cos, sin : (tokens, half)
    offset : int
    interleaved : bool
        Pairs are (2i, 2i+1) instead of (i, i + half).
    """
    half = cos.shape[1]
    if interleaved:
        first, second = slice(offset, offset + 2 * half, 2), slice(offset + 1, offset + 2 * half, 2)
    else:
        first, second = slice(offset, offset + half), slice(offset + half, offset + 2 * half)
    c, s = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    result = x.copy()
    result[..., first] = x[..., first] * c - x[..., second] * s
    result[..., second] = x[..., second] * c + x[..., first] * s
    return np.asarray(result)


@dataclass(frozen=True)
class Lengths:
    """Where each token belongs, read from arrays that may hold anything.

    Attributes
    ----------
    start, q_len, past : (batch_size,), int64
        First row, new tokens and tokens before of each sequence; a sequence with a negative past has no new tokens.
    sequence, position : (token_count,), int64
        Sequence of each token, -1 for padding, and its position by order.
    """

    start: Array
    q_len: Array
    past: Array
    sequence: Array
    position: Array


def read_lengths(token_count: int, cumulative_sequence_length: Array, past_seqlens: Array) -> Lengths:
    """Lengths of a batch; out-of-range entries are clipped to the rows that exist."""
    cu = np.clip(cumulative_sequence_length.astype(np.int64), 0, token_count)
    past = past_seqlens.astype(np.int64)
    start, end = cu[:-1], cu[1:]
    token = np.arange(token_count)
    sequence = np.searchsorted(end, token, side="right")  # sequences without tokens are stepped over
    sequence[sequence == past.size] = -1
    sequence[(token < start[sequence]) | (past[sequence] < 0)] = -1
    position = np.where(sequence < 0, 0, past[sequence] + token - start[sequence])
    q_len = np.where(past < 0, 0, np.maximum(end - start, 0))
    return Lengths(start, q_len, past, sequence, position)


@dataclass(frozen=True)
class NumpyPlan:
    """The plan of `plan`."""

    problem: Problem
    compute: type[np.floating[Any]]
    workspace_bytes: int = 0

    def run(self, tensors: Mapping[str, Array], workspace: object = None) -> None:
        """Do the call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        lengths = read_lengths(p.token_count, tensors["cumulative_sequence_length"], tensors["past_seqlens"])
        position = tensors["query_positions"].astype(np.int64) if p.has_query_positions else lengths.position
        with np.errstate(all="ignore"):  # rows that count for nothing may hold anything
            rotary_position = tensors["rotary_positions"].astype(np.int64) if p.has_rotary_positions else position
            query, key, value = self.prologue(tensors, rotary_position)
            key_rows, value_rows = self.caches(tensors)
            slots = (
                tensors["slot_mapping"].astype(np.int64)
                if p.has_slot_mapping
                else key_rows.slots(np.maximum(lengths.sequence, 0), lengths.position)
            )
            slots = np.where(lengths.sequence < 0, -1, slots)
            key_rows.write(slots, key)
            if value_rows is not None and value is not None:
                value_rows.write(slots, value)
            self.attend(tensors, query, position, lengths, key_rows, value_rows)

    def caches(self, tensors: Mapping[str, Array]) -> tuple[PagedRows, PagedRows | None]:
        """Accessors of the key and the value cache; no value cache in the LATENT layout."""
        p = self.problem
        table = np.arange(p.batch_size)[:, None] if p.is_contiguous else tensors["block_table"]

        def rows(cache: str, scale: str) -> PagedRows:
            return PagedRows(tensors[cache], p.cache_dtype, tensors.get(scale), p.head_size, table, self.compute)

        return rows("key_cache", "k_scale"), None if p.is_latent else rows("value_cache", "v_scale")

    def prologue(self, tensors: Mapping[str, Array], position: Array) -> tuple[Array, Array, Array | None]:
        """Split, normalise and rotate: query, key and value as (token_count, heads, head_size) of ``compute``."""
        p = self.problem
        value: Array | None
        if p.is_packed:
            heads = tensors["query"].reshape(p.token_count, -1, p.head_size).astype(self.compute)
            query, key, value = np.split(heads, [p.num_heads, p.num_heads + p.kv_num_heads], axis=1)
        else:

            def split(name: str) -> Array:
                return tensors[name].reshape(p.token_count, -1, p.head_size).astype(self.compute)

            query, key, value = split("query"), split("key"), None if p.is_latent else split("value")
        if p.has_qk_norm:
            query = rms_norm(query, tensors["q_norm_weight"], p.qk_norm_epsilon)
            key = rms_norm(key, tensors["k_norm_weight"], p.qk_norm_epsilon)
        if p.do_rotary:
            row = np.clip(position, 0, p.max_seq_len - 1)
            cos, sin = tensors["cos_cache"][row], tensors["sin_cache"][row]
            query = apply_rope(query, cos, sin, p.rotary_offset, p.rotary_interleaved)
            key = apply_rope(key, cos, sin, p.rotary_offset, p.rotary_interleaved)
        if self.compute is np.float32:  # one rounding, so that rotating outside the operator gives the same bits
            query = query.astype(p.io_dtype.numpy).astype(np.float32)
        return query, key, value

    def attend(
        self,
        tensors: Mapping[str, Array],
        query: Array,
        position: Array,
        lengths: Lengths,
        key_rows: PagedRows,
        value_rows: PagedRows | None,
    ) -> None:
        """Fill output, and lse and output_qk where present."""
        p = self.problem
        output = tensors["output"].reshape(p.token_count, p.num_heads, p.v_head_size)
        output[...] = 0
        lse, output_qk = tensors.get("lse"), tensors.get("output_qk")
        if lse is not None:
            lse[...] = -np.inf
        if output_qk is not None:
            output_qk[...] = 0
        for b in map(int, np.flatnonzero(lengths.q_len)):
            start, q_len = int(lengths.start[b]), int(lengths.q_len[b])
            kv_len = min(int(lengths.past[b]) + q_len, p.capacity)
            own = position[start : start + q_len]
            low, high = self.visible(own, kv_len)
            keys, mapped = key_rows.read(b, low, high)
            values = keys[..., : p.v_head_size] if value_rows is None else value_rows.read(b, low, high)[0]
            for tile in _tiles(q_len, TILE_ELEMENTS // max(1, p.num_heads * (high - low))):
                tile_low, tile_high = self.visible(own[tile], kv_len)
                columns = slice(tile_low - low, tile_high - low)
                k = np.arange(tile_low, tile_high)
                admitted = np.broadcast_to(mapped[columns], (own[tile].size, k.size))
                if p.is_causal:
                    admitted = admitted & (k <= own[tile, None])
                if p.has_window:
                    admitted = admitted & (k > own[tile, None] - p.local_window_size)
                rows = slice(start + tile.start, start + tile.stop)
                scores = self.scores(query[rows], keys[columns])
                if "attention_bias" in tensors:
                    scores, admitted = self.add_bias(scores, admitted, tensors["attention_bias"], b, tile, tile_low)
                scores = np.where(admitted, scores, -np.inf)
                weights, total, log_sum = self.softmax(scores, tensors.get("head_sink"))
                output[rows] = _weighted_sum(weights, values[columns], admitted) / total.T[..., None]
                if lse is not None:
                    lse[rows] = log_sum.T
                if output_qk is not None:
                    shown = np.where(admitted, scores, 0) if p.qk_output == 1 else weights / total[..., None]
                    width = max(0, min(tile_high, output_qk.shape[2]) - tile_low)
                    output_qk[:, rows, tile_low : tile_low + width] = shown[..., :width]

    def visible(self, own: Array, kv_len: int) -> tuple[int, int]:
        """Range of key positions that tokens at positions ``own`` may see."""
        p = self.problem
        low = max(0, int(own.min()) - p.local_window_size + 1) if p.has_window else 0
        high = min(kv_len, int(own.max()) + 1) if p.is_causal else kv_len
        return low, max(low, high)

    def scores(self, query: Array, keys: Array) -> Array:
        """Scaled and capped scores: query (m, num_heads, D), keys (n, kv_num_heads, D) to (num_heads, m, n)."""
        p = self.problem
        m, n = query.shape[0], keys.shape[0]
        grouped = query.transpose(1, 0, 2).reshape(p.kv_num_heads, p.group_size * m, p.head_size)
        scores = (grouped @ keys.transpose(1, 2, 0)).reshape(p.num_heads, m, n) * self.compute(p.scale)
        if p.softcap > 0:
            scores = self.compute(p.softcap) * np.tanh(scores / self.compute(p.softcap))
        return np.asarray(scores)

    def add_bias(
        self, scores: Array, admitted: Array, bias: Array, b: int, tile: slice, low: int
    ) -> tuple[Array, Array]:
        """Add the bias of a tile; tokens and keys beyond its capacities are not attended."""
        m, n = scores.shape[1:]
        part = bias[min(b, bias.shape[0] - 1), :, tile, low : low + n].astype(self.compute)
        rows, columns = part.shape[1:]
        if (rows, columns) != (m, n):
            part = np.pad(part, ((0, 0), (0, m - rows), (0, n - columns)))
            admitted = admitted & (np.arange(m)[:, None] < rows) & (np.arange(n) < columns)
        return scores + part, admitted

    def softmax(self, scores: Array, sink: Array | None) -> tuple[Array, Array, Array]:
        """Weights (num_heads, m, n), their total with the sink and its logarithm (num_heads, m).

        A row that sees nothing, all its scores -inf, has weights 0, total 1 and logarithm -inf, with or without a sink.
        """
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        empty = row_max[..., 0] == -np.inf
        if sink is not None:
            logit = sink.astype(self.compute)[:, None, None]
            row_max = np.maximum(row_max, logit)
        row_max = np.where(empty[..., None], 0, row_max)
        weights = np.exp(scores - row_max)
        total = weights.sum(axis=-1)
        if sink is not None:
            total = total + np.exp(logit - row_max)[..., 0]
        total = np.where(empty, 1, total)
        return weights, total, np.where(empty, -np.inf, row_max[..., 0] + np.log(total))


def _tiles(count: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))


def _weighted_sum(weights: Array, values: Array, admitted: Array) -> Array:
    """Sum of admitted values: weights (num_heads, m, n), values (n, kv_num_heads, DV) to (m, num_heads, DV)."""
    finite = np.isfinite(values)
    if finite.all():
        return _product(weights, values)
    result = _product(weights, np.where(finite, values, 0)).copy()
    # 0 x NaN is NaN: what a token does not see must not reach it. So values that are not finite are counted instead.
    columns = np.flatnonzero(~finite.all(axis=(1, 2)))
    strange, weighed = values[columns], weights[:, :, columns] > 0
    seen = np.broadcast_to(admitted[:, columns], weighed.shape)
    result[_any(seen & weighed, strange == np.inf)] += np.inf
    result[_any(seen & weighed, strange == -np.inf)] -= np.inf
    result[_any(seen, np.isnan(strange)) | _any(seen & ~weighed, np.isinf(strange))] = np.nan
    return np.asarray(result)


def _product(weights: Array, values: Array) -> Array:
    """Weights (num_heads, m, n) times values (n, kv_num_heads, DV), (m, num_heads, DV)."""
    heads, m, n = weights.shape
    kv_heads = values.shape[1]
    grouped = weights.reshape(kv_heads, heads // kv_heads * m, n) @ values.transpose(1, 0, 2)
    return np.asarray(grouped.reshape(heads, m, -1).transpose(1, 0, 2))


def _any(taken: Array, present: Array) -> Array:
    """Whether a token takes some value that is present: shapes as of `_product`."""
    return np.asarray(_product(taken.astype(np.float32), present.astype(np.float32)) > 0)
