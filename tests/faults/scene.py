"""Calls of the operator, built so that whatever must not be read or written shows when it is.

A `Scene` holds the whole history of some sequences; `Scene.call` cuts it into a past, which lies in the cache, and new
tokens. Blocks are scattered, slots that hold no token are NaN (or a large code), and table entries that no token needs
are far out of range. `expected` says, plainly and in float64, what a call must give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedattn import contract
from pagedattn.dtypes import BFLOAT16, BY_NUMPY, FLOAT8E4M3FN, FLOAT16, FLOAT32, INT4, INT8, DType
from tests.support.compare import assert_same_bits

Array = np.ndarray[Any, np.dtype[Any]]
# A number, an array, or a function of (sequence, position (n, 1, 1), head (heads, 1)); None draws from a normal.
Fill = float | Array | Callable[[int, Array, Array], Any] | None

HUGE = 2**31 - 1
IO = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32)}
# What one rounding may cost, relative to the largest value of a row. float32 is only ever accumulated in float32.
ROUNDING = {FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7, FLOAT32: 4e-6}


@dataclass(frozen=True)
class CacheKind:
    """How the caches store values; ``dtype`` None means as the activations do."""

    name: str
    dtype: DType | None = None
    per_channel: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def quant_type(self) -> str:
        return "NONE" if self.dtype is None else "PER_CHANNEL" if self.per_channel else "PER_TENSOR"

    def scales(self, kv_num_heads: int, head_size: int, rng: np.random.Generator) -> dict[str, Array]:
        """``k_scale`` and ``v_scale`` as the operator takes them; those of channels differ by up to a factor of 2."""
        if self.dtype is None:
            return {}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if not self.per_channel:
            return {name: np.array([scale], np.float32) for name, scale in scales.items()}
        shape = (kv_num_heads, 1, head_size)
        return {name: (scale * rng.uniform(0.7, 1.4, shape)).astype(np.float32) for name, scale in scales.items()}

    def with_scales(self, k_scale: float, v_scale: float) -> CacheKind:
        return replace(self, k_scale=k_scale, v_scale=v_scale)


PLAIN = CacheKind("plain")
# Scales for values of a standard normal; those of keys and values always differ.
CACHES = {
    kind.name: kind
    for kind in (
        PLAIN,
        CacheKind("int8", INT8, False, 0.03, 0.04),
        CacheKind("int8-channel", INT8, True, 0.03, 0.04),
        CacheKind("fp8", FLOAT8E4M3FN, False, 0.02, 0.5),
        CacheKind("fp8-channel", FLOAT8E4M3FN, True, 0.02, 0.5),
        CacheKind("int4", INT4, False, 0.4, 0.5),
        CacheKind("int4-channel", INT4, True, 0.4, 0.5),
    )
}
# The same with scale 1 and no channels, for values that are chosen to be exact codes.
UNIT_CACHES = {name: kind.with_scales(1, 1) for name, kind in CACHES.items() if not kind.per_channel}


@dataclass(frozen=True)
class Call:
    """Inputs, in host memory, and attributes of one call; never changed in place."""

    arrays: dict[str, Array]
    attributes: dict[str, Any] = field(default_factory=dict)

    def change(self, **changes: Any) -> Call:
        """The call with inputs and attributes replaced by name; None takes one away."""
        arrays, attributes = dict(self.arrays), dict(self.attributes)
        for name, value in changes.items():
            place = arrays if name in contract.INPUT_BY_NAME else attributes
            if value is None:
                place.pop(name, None)
            else:
                place[name] = value
        return Call(arrays, attributes)

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name] if name in self.arrays else self.attributes[name]

    @property
    def io(self) -> DType:
        return BY_NUMPY[self.arrays["query"].dtype]

    @property
    def cache_dtype(self) -> DType:
        stored = self.arrays["key_cache"].dtype
        return INT4 if stored == np.uint8 else BY_NUMPY[stored]


def junk(dtype: DType, kind: str = "nan") -> Array:
    """What an unused element of a cache holds: "nan", "inf" or "zero", or the nearest thing that the type has."""
    if dtype.numpy.kind == "f" or dtype is BFLOAT16:
        return np.array({"nan": np.nan, "inf": np.inf, "zero": 0}[kind]).astype(dtype.numpy)
    zero = 0x88 if dtype is INT4 else 0
    return np.array({"nan": 0x7F, "inf": 0xFF if dtype is FLOAT8E4M3FN else 0x80, "zero": zero}[kind], np.uint8).view(
        dtype.numpy
    )


@np.errstate(all="ignore")
def encode(rows: Array, dtype: DType, scale: Array | None) -> Array:
    """Rows (n, kv_num_heads, head_size) as a cache stores them, by the rules of the operator."""
    x = rows.astype(np.float32)
    if scale is None:
        return x.astype(dtype.numpy)
    x = x / (scale[:, 0] if scale.ndim == 3 else scale)
    if dtype is FLOAT8E4M3FN:
        return np.clip(x, -448, 448).astype(dtype.numpy)
    low, high = (-128, 127) if dtype is INT8 else (-8, 7)
    codes = np.where(np.isnan(x), 0, np.clip(np.rint(x), low, high)).astype(np.int8)
    if dtype is INT8:
        return codes
    nibbles = (codes + 8).astype(np.uint8)
    return nibbles[..., ::2] + 16 * nibbles[..., 1::2]


@np.errstate(all="ignore")
def decode(pool: Array, dtype: DType, scale: Array | None) -> Array:
    """Values of a cache in float64."""
    if dtype is INT4:
        pool = np.stack([pool % 16, pool // 16], axis=-1).reshape(*pool.shape[:-1], -1).astype(np.int8) - 8
    values = pool.astype(np.float64)
    return values if scale is None else values * (scale[:, 0] if scale.ndim == 3 else scale)


class Scene:
    """Some sequences with all their tokens, and the blocks they live in.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each sequence, new ones included.
    v_head_size : int, optional
        Makes the LATENT layout: one head, whose first ``v_head_size`` channels are the values.
    query, key, value : Fill
        Rounded to ``io``.
    unused : str
        What slots without a token hold; see `junk`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_heads: int = 2,
        kv_num_heads: int = 1,
        head_size: int = 16,
        v_head_size: int | None = None,
        io: DType = FLOAT16,
        cache: CacheKind = PLAIN,
        block_size: int = 16,
        query: Fill = None,
        key: Fill = None,
        value: Fill = None,
        seed: int = 0,
        unused: str = "nan",
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = list(lengths)
        self.num_heads, self.kv_num_heads, self.head_size = num_heads, kv_num_heads, head_size
        self.v_head_size, self.io, self.kind, self.block_size = v_head_size, io, cache, block_size
        self.unused = unused
        self.cache_dtype = cache.dtype or io

        def rows(fill: Fill, heads: int) -> list[Array]:
            return [self._fill(fill, b, n, heads, rng) for b, n in enumerate(self.lengths)]

        self.query, self.key, self.value = rows(query, num_heads), rows(key, kv_num_heads), rows(value, kv_num_heads)
        self.scales = cache.scales(kv_num_heads, head_size, rng)
        blocks = [-(-n // block_size) for n in self.lengths]
        self.num_blocks = sum(blocks) + 2
        shuffled = rng.permutation(self.num_blocks).astype(np.int32)
        self.block_table = np.full((len(self.lengths), max(blocks, default=0) + 1), HUGE, np.int32)
        for b, used in enumerate(np.split(shuffled[: sum(blocks)], np.cumsum(blocks)[:-1])):
            self.block_table[b, : used.size] = used

    def _fill(self, fill: Fill, b: int, n: int, heads: int, rng: np.random.Generator) -> Array:
        shape = (n, heads, self.head_size)
        if fill is None:
            return rng.standard_normal(shape).astype(self.io.numpy)
        if callable(fill):
            fill = fill(b, np.arange(n)[:, None, None], np.arange(heads)[:, None])
        return np.broadcast_to(np.asarray(fill), shape).astype(self.io.numpy, order="C")

    def slots(self, b: int, positions: Array) -> Array:
        """Slots of positions of a sequence."""
        block = self.block_table[b, positions // self.block_size].astype(np.int64)
        return block * self.block_size + positions % self.block_size

    def empty_pool(self) -> Array:
        """Blocks that hold no token."""
        width = self.cache_dtype.storage_elements(self.head_size)
        shape = (self.num_blocks, self.block_size, self.kv_num_heads, width)
        return np.full(shape, junk(self.cache_dtype, self.unused), self.cache_dtype.numpy)

    def pool(self, history: list[Array], pasts: Sequence[int], scale: str) -> Array:
        """Blocks that hold the first ``pasts`` tokens of each sequence."""
        pool = self.empty_pool()
        flat = pool.reshape(-1, *pool.shape[2:])
        for b, past in enumerate(pasts):
            flat[self.slots(b, np.arange(past))] = self.encode(history[b][:past], scale)
        return pool

    def encode(self, rows: Array, scale: str) -> Array:
        """Rows (n, kv_num_heads, head_size) as the cache stores them."""
        return encode(rows, self.cache_dtype, self.scales.get(scale))

    def call(
        self,
        pasts: Sequence[int],
        q_lens: Sequence[int] | None = None,
        caches: tuple[Array, Array | None] | None = None,
        **changes: Any,
    ) -> Call:
        """The call whose new tokens are positions ``[past, past + q_len)`` of each sequence.

        Parameters
        ----------
        pasts : sequence of int
        q_lens : sequence of int, optional
            All the rest by default.
        caches : key and value cache, optional
            What an earlier call left; by default blocks that hold the past and nothing else.
        **changes
            Inputs and attributes, as in `Call.change`.
        """
        pasts = list(pasts)
        q_lens = [n - past for n, past in zip(self.lengths, pasts, strict=True)] if q_lens is None else list(q_lens)

        def new(history: list[Array]) -> Array:
            rows = np.concatenate([x[past : past + q] for x, past, q in zip(history, pasts, q_lens, strict=True)])
            return rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2])

        latent = self.v_head_size is not None
        arrays = {"query": new(self.query), "key": new(self.key)}
        attributes: dict[str, Any] = {"num_heads": self.num_heads, "kv_num_heads": self.kv_num_heads}
        if caches is None:
            caches = self.pool(self.key, pasts, "k_scale"), None if latent else self.pool(self.value, pasts, "v_scale")
        arrays["key_cache"] = caches[0]
        if latent:
            attributes.update(kv_cache_layout="LATENT", v_head_size=self.v_head_size, scale=self.head_size**-0.5)
        else:
            arrays["value"], arrays["value_cache"] = new(self.value), caches[1]
        arrays.update(
            cumulative_sequence_length=np.cumsum([0, *q_lens]).astype(np.int32),
            past_seqlens=np.array(pasts, np.int32),
            block_table=self.block_table.copy(),
        )
        for letter in "k" if latent else "kv":
            attributes[f"{letter}_quant_type"] = self.kind.quant_type
            if self.kind.dtype is not None:
                arrays[f"{letter}_scale"] = self.scales[f"{letter}_scale"]
            if self.cache_dtype is INT4:
                attributes[f"{letter}_cache_dtype"] = "int4"
        return Call(arrays, attributes).change(**changes)


@dataclass(frozen=True)
class Expected:
    """What a call must give; ``scores`` and ``probabilities`` are what output_qk shows, at the table's full width."""

    output: Array
    lse: Array
    scores: Array
    probabilities: Array
    key_cache: Array
    value_cache: Array | None


@np.errstate(invalid="ignore")
def expected(call: Call) -> Expected:
    """Do a call token by token in float64; everything but QK-norm and RoPE."""
    arrays, io = call.arrays, call.io
    attribute = {row.name: call.attributes.get(row.name, row.default) for row in contract.ATTRIBUTES}
    heads, kv_heads = attribute["num_heads"], attribute["kv_num_heads"]
    assert not attribute["do_rotary"], "rotation is not modelled here"
    assert "q_norm_weight" not in arrays, "normalisation is not modelled here"
    latent = attribute["kv_cache_layout"] == "LATENT"
    query = arrays["query"]
    if "key" in arrays:
        key, value = arrays["key"], arrays.get("value")
        head_size = query.shape[1] // heads
    else:
        head_size = query.shape[1] // (heads + 2 * kv_heads)
        query, key, value = np.split(query, [heads * head_size, (heads + kv_heads) * head_size], axis=1)
    token_count = query.shape[0]
    q = query.reshape(token_count, heads, head_size).astype(np.float64)
    out_size = attribute["v_head_size"] or head_size
    table, cu = arrays["block_table"].astype(np.int64), arrays["cumulative_sequence_length"].astype(np.int64)
    past = arrays["past_seqlens"].astype(np.int64)
    num_blocks, block_size = arrays["key_cache"].shape[:2]
    capacity = table.shape[1] * block_size

    def slot_of(b: int, position: int) -> int:
        if not 0 <= position < capacity or not 0 <= table[b, position // block_size] < num_blocks:
            return -1
        return int(table[b, position // block_size] * block_size + position % block_size)

    live = [(b, int(cu[b]), j) for b in range(past.size) if past[b] >= 0 for j in range(int(cu[b + 1] - cu[b]))]
    stored, read = {}, {}
    for name, rows in (("key", key), ("value", value)):
        if f"{name}_cache" not in arrays:
            continue
        scale = arrays.get(f"{name[0]}_scale")
        pool = arrays[f"{name}_cache"].copy()
        codes = encode(rows.reshape(token_count, kv_heads, head_size), call.cache_dtype, scale)
        for b, start, j in live:
            slot = arrays["slot_mapping"][start + j] if "slot_mapping" in arrays else slot_of(b, int(past[b]) + j)
            if 0 <= slot < num_blocks * block_size:
                pool[slot // block_size, slot % block_size] = codes[start + j]
        stored[name] = pool
        decoded = decode(pool, call.cache_dtype, scale)
        read[name] = np.repeat(decoded.reshape(-1, kv_heads, head_size), heads // kv_heads, axis=1)
    if latent:
        read["value"] = read["key"][..., :out_size]

    output = np.zeros((token_count, heads, out_size))
    lse = np.full((token_count, heads), -np.inf)
    scores, probabilities = np.zeros((2, heads, token_count, capacity))
    scale = attribute["scale"] or 1 / math.sqrt(head_size)
    window, bias = attribute["local_window_size"], arrays.get("attention_bias")
    for b, start, j in live:
        t = start + j
        own = int(arrays["query_positions"][t]) if "query_positions" in arrays else int(past[b]) + j
        positions = [
            k
            for k in range(min(int(past[b] + cu[b + 1] - cu[b]), capacity))
            if (k <= own or not attribute["is_causal"]) and (window <= 0 or k > own - window) and slot_of(b, k) >= 0
        ]
        slots = [slot_of(b, k) for k in positions]
        for h in range(heads):
            s = scale * (read["key"][slots, h] @ q[t, h])
            if attribute["softcap"]:
                s = attribute["softcap"] * np.tanh(s / attribute["softcap"])
            if bias is not None:
                s = s + bias[min(b, bias.shape[0] - 1), min(h, bias.shape[1] - 1), j, positions].astype(np.float64)
            scores[h, t, positions] = s
            attended = s > -np.inf
            if not attended.any():
                continue
            sink = float(arrays["head_sink"][h]) if "head_sink" in arrays else -np.inf
            top = max(s.max(), sink)
            weight = np.where(attended, np.exp(s - top), 0)
            total = weight.sum() + np.exp(sink - top)
            probabilities[h, t, positions] = weight / total
            rows = read["value"][slots, h][attended]
            output[t, h] = (weight[attended] / total) @ rows
            lse[t, h] = top + np.log(total)
    return Expected(
        output.astype(io.numpy).astype(np.float64), lse, scores, probabilities, stored["key"], stored.get("value")
    )


def assert_close(got: Array, want: Array, io: DType, roundings: float = 2) -> None:
    """Compare rows (..., channels): a row may be off by some roundings of its own largest value, a zero row by none."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert not np.isnan(got).any(), f"NaN at {np.argwhere(np.isnan(got))[0]}"
    limit = roundings * ROUNDING[io] * np.abs(want).max(axis=-1, keepdims=True, initial=0)
    off = np.abs(got - want)
    worst = np.unravel_index(np.argmax(off - limit), off.shape) if off.size else ()
    assert (off <= limit).all(), f"at {tuple(map(int, worst))}: got {got[worst]}, want {want[worst]}"


def assert_same_bytes(got: Array, want: Array) -> None:
    """Compare bit for bit; any NaN equals any other, since a conversion may change which one it is."""
    assert_same_bits(got, want, "array", any_nan=True)
