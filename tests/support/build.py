"""Arrays of a `Case`: seeded, scattered over the pool, and surrounded by what must not be touched.

* Blocks are shuffled; table entries that no position needs are huge.
* Every cache row that no token may see (outside of all sequences, below every window), and every new row before it is
  written, is poison: NaN, or the largest code.
* Each input is a slice of a larger array full of poison, so that a step beyond its edge shows.

Everything is NumPy; `Built.convert` hands the same slices to another array library.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.cases import Case

Array = np.ndarray[Any, np.dtype[Any]]
Index = tuple[slice, ...]

TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int4": np.dtype(np.uint8),
}
# Step between two codes of a quantized cache whose values are about N(0, 1).
STEPS = {"int8": 1 / 40, "float8e4m3fn": 1 / 100, "int4": 1 / 3}
INT32_MAX = 2**31 - 1


@dataclass
class Built:
    """Arguments of one call.

    Attributes
    ----------
    case : Case
    parents : dict of input name to (array, index)
        The input is ``array[index]``; the rest of the array is poison.
    attributes, options : dict
        The operator's attributes, and this library's keyword arguments.
    """

    case: Case
    parents: dict[str, tuple[Array, Index]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Array]:
        """Inputs by name."""
        return {name: array[index] for name, (array, index) in self.parents.items()}

    def __getitem__(self, name: str) -> Array:
        array, index = self.parents[name]
        return array[index]

    def copy(self) -> Built:
        """The same call on arrays of its own."""
        return copy.deepcopy(self)

    def convert(self, take: Callable[[Array, Index], Any]) -> dict[str, Any]:
        """Inputs by name in another array library: ``take(parent, index)`` returns the slice of its copy of parent.

        attention_metadata stays in host memory.
        """
        return {
            name: array[index] if name == "attention_metadata" else take(array, index)
            for name, (array, index) in self.parents.items()
        }

    def surroundings(self) -> dict[str, bytes]:
        """Bytes around each input, for a comparison of before and after."""
        return {name: outside(array, index) for name, (array, index) in self.parents.items()}

    def run(self, operator: Callable[..., Any], **more: Any) -> Any:
        """Call ``operator`` with these inputs, attributes and options."""
        return operator(**{**self.inputs, **self.attributes, **self.options, **more})


def outside(array: Array, index: Index) -> bytes:
    """Bytes of an array but for a slice of it."""
    array = array.copy()
    array[index] = np.zeros((), array.dtype)
    return array.tobytes()


def build(case: Case, room: Case | None = None) -> Built:
    """Make the arrays of a case, as large as those of another one, ``room``, that needs no less of anything."""
    return _Builder(case, room or case).build()


def positions_of(case: Case) -> Array:
    """query_positions, or what the operator derives without it."""
    positions = np.zeros(case.token_count, np.int64)
    t = 0
    for past, new in case.lengths:
        order = np.arange(new)
        positions[t : t + new] = past + {"tree": (order + 1) // 2, "ahead": order + 3}.get(case.positions, order)
        t += new
    return positions


class _Builder:
    def __init__(self, case: Case, room: Case) -> None:
        self.case, self.room = case, room
        self.rng = np.random.default_rng([case.seed, zlib.crc32(str(case).encode())])
        self.io, self.stored = TYPES[case.io], TYPES[case.cache_type]
        self.built = Built(case)
        self.past = np.array([past for past, _ in case.lengths])
        self.new = np.array([new for _, new in case.lengths])
        self.kv_len = self.past + self.new
        self.blocks = -(-self.kv_len // case.block_size)
        new, kv_len = np.array([(new, past + new) for past, new in room.lengths]).T
        spare = -(-int(new.sum()) // case.block_size) + 2
        self.num_blocks = int((-(-kv_len // case.block_size)).sum()) + spare
        self.bounds = [int(lengths.max(initial=0)) for lengths in (new, kv_len)]
        self.ids = self.rng.permutation(self.num_blocks)

    def build(self) -> Built:
        case = self.case
        self.attributes()
        self.activations()
        table = self.table()
        self.caches(table)
        self.give("cumulative_sequence_length", np.cumsum([0, *self.new]).astype(np.int32))
        self.give("past_seqlens", self.past.astype(np.int32))
        self.give("block_table", table.astype(np.int32))
        positions = positions_of(self.case)
        if case.positions:
            self.give("query_positions", positions.astype(np.int32))
        if case.rope != "none":
            self.rotary(positions)
        if case.sink:
            self.give("head_sink", self.normal(case.num_heads, spread=2).astype(self.io))
        if case.qk_norm:
            for name in ("q_norm_weight", "k_norm_weight"):
                self.give(name, (1 + self.normal(case.head_size, spread=0.2)).astype(self.io))
        if case.bias:
            self.bias()
        if case.metadata:
            self.built.parents["attention_metadata"] = (np.array(self.bounds, np.int32), (slice(None),))
        return self.built

    def normal(self, *shape: int, spread: float = 1.0) -> Array:
        return self.rng.standard_normal(shape) * spread

    def give(self, name: str, values: Array, axes: int = 1) -> None:
        """Make an input a slice, along the first ``axes`` axes or a last one, of a larger poisoned array."""
        margins = [8 if axis < axes else 0 for axis in range(values.ndim)]
        if name.endswith("_cache") and values.ndim == 4:
            margins[0] = 1
        index = tuple(slice(m, m + extent) for m, extent in zip(margins, values.shape, strict=True))
        shape = tuple(extent + 2 * m for m, extent in zip(margins, values.shape, strict=True))
        parent = np.full(shape, poison(values.dtype), values.dtype)
        parent[index] = values
        self.built.parents[name] = (parent, index)

    def attributes(self) -> None:
        case = self.case
        self.built.attributes = {
            "num_heads": case.num_heads,
            "kv_num_heads": case.kv_num_heads,
            "scale": case.scale,
            "softcap": case.softcap,
            "local_window_size": case.window,
            "do_rotary": int(case.rope != "none"),
            "rotary_interleaved": int(case.interleaved),
            "rotary_offset": self.rotary_offset,
            "qk_norm_epsilon": 1e-5 if case.qk_norm else 1e-6,
            "k_quant_type": case.k_quant,
            "v_quant_type": case.v_quant,
            "k_cache_dtype": "int4" if case.cache == "int4" else "",
            "v_cache_dtype": "int4" if case.cache == "int4" and not case.is_latent else "",
            "v_head_size": case.v_head_size,
            "kv_cache_layout": "LATENT" if case.is_latent else "SEPARATE",
            "qk_output": case.qk_output,
            "is_causal": int(case.is_causal),
        }
        self.built.options = {"return_lse": case.lse, "qk_dtype": case.qk_dtype}

    def activations(self) -> None:
        case = self.case
        n = case.token_count
        query = self.normal(n, case.num_heads * case.head_size)
        key, value = (self.normal(n, case.kv_num_heads * case.head_size) for _ in range(2))
        if case.is_quantized:  # some values beyond the largest code
            for x in (key, value):
                x[self.rng.random(x.shape) < 0.02] *= 8
        if self.case.padding:
            for x in (query, key, value):
                x[-case.padding :] = np.nan
        axes = 2 if case.strided else 1
        if case.mode == "packed":
            self.give("query", np.concatenate([query, key, value], axis=1).astype(self.io), axes)
            return
        self.give("query", query.astype(self.io), axes)
        self.give("key", key.astype(self.io), axes)
        if not case.is_latent:
            self.give("value", value.astype(self.io), axes)

    def table(self) -> Array:
        """Block table; entries that no position needs are no blocks at all."""
        case = self.case
        table = self.rng.choice(
            [INT32_MAX, -(2**31), self.num_blocks, self.num_blocks + 999, -2], (case.batch_size, self.room.table_width)
        )
        first = 0
        for b, count in enumerate(self.blocks):
            table[b, :count] = self.ids[first : first + count]
            first += count
            if case.unmapped:
                gone = (np.arange(count) + b) % 3 == 2
                table[b, :count][gone] = self.rng.choice([-1, INT32_MAX, self.num_blocks], int(gone.sum()))
        return table

    def caches(self, table: Array) -> None:
        case = self.case
        width = case.head_size // 2 if case.cache == "int4" else case.head_size
        shape = (self.num_blocks, case.block_size, case.kv_num_heads, width)
        seen, written, slots = self.slots(table)
        for cache, scale, kind in (("key_cache", "k_scale", case.k_quant), ("value_cache", "v_scale", case.v_quant)):
            if cache == "value_cache" and case.is_latent:
                continue
            stored = np.full(shape, poison(self.stored, case.cache), self.stored)
            rows = stored.reshape(-1, *shape[2:])
            filled = np.setdiff1d(seen, written)
            rows[filled] = self.codes((filled.size, *shape[2:]))
            self.give(cache, stored, 3 if case.strided else 1)
            if kind != "NONE":
                step = STEPS[case.cache] * (0.5 if cache == "value_cache" else 1)
                size = (1,) if kind == "PER_TENSOR" else (case.kv_num_heads, 1, case.head_size)
                self.give(scale, (step * self.rng.uniform(0.7, 1.4, size)).astype(np.float32))
        if case.slots:
            self.give("slot_mapping", slots.astype(np.int32))

    def slots(self, table: Array) -> tuple[Array, Array, Array]:
        """Slots in reach of any token, slots that this call writes, and slot_mapping."""
        case, positions = self.case, positions_of(self.case)
        seen: list[int] = []
        slots = np.full(case.token_count, -1)
        t = 0
        for b, (past, new) in enumerate(case.lengths):
            own = []
            for p in range(past + new):
                block = int(table[b, p // case.block_size])
                inside = 0 <= block < self.num_blocks
                own.append(block * case.block_size + p % case.block_size if inside else -1)
            first = max(0, int(positions[t : t + new].min(initial=past)) - case.window + 1) if case.window > 0 else 0
            seen += [slot for slot in own[first:] if slot >= 0]
            slots[t : t + new] = own[past:]
            t += new
        if case.slots == "holes":
            slots[::3] = -1
            slots[4::7] = self.num_blocks * case.block_size + 5
        if case.slots == "elsewhere":
            spare = self.ids[int(self.blocks.sum()) :]
            free = (spare[:, None] * case.block_size + np.arange(case.block_size)).ravel()
            slots[:t] = self.rng.permutation(free)[:t]
        if case.padding and case.slots:
            slots[t:] = self.rng.integers(0, self.num_blocks * case.block_size, case.padding)
        return np.array(seen, np.int64), slots[:t], slots

    def codes(self, shape: tuple[int, ...]) -> Array:
        """Stored elements of plausible values, by no codec."""
        cache = self.case.cache
        if cache == "int4":
            return self.rng.integers(0, 256, shape).astype(np.uint8)
        if cache == "int8":
            return np.clip(np.rint(self.normal(*shape, spread=40)), -128, 127).astype(np.int8)
        return (np.clip(self.normal(*shape), -4, 4) * (100 if cache else 1)).astype(self.stored)

    @property
    def rotary_offset(self) -> int:
        case = self.case
        if case.rope != "offset":
            return 0
        return case.v_head_size // 8 * 8 if 0 < case.v_head_size // 8 * 8 < case.head_size else 8

    def rotary(self, positions: Array) -> None:
        case = self.case
        channels = {
            "full": case.head_size,
            "partial": case.head_size // 2,
            "offset": case.head_size - self.rotary_offset,
        }
        half = channels[case.rope] // 2
        longest = max(positions.max(initial=0), positions_of(self.room).max(initial=0))
        angle = np.arange(int(longest) + 1)[:, None] / 100 ** (np.arange(half) / half)
        self.give("cos_cache", np.cos(angle).astype(self.io))
        self.give("sin_cache", np.sin(angle).astype(self.io))

    def bias(self) -> None:
        case = self.case
        batch = case.batch_size if case.bias[0] == "B" else 1
        heads = case.num_heads if case.bias[1] == "H" else 1
        q_cap, k_cap = self.bounds[0] + 1, self.bounds[1] + 3
        bias = self.normal(batch, heads, q_cap, k_cap, spread=1.5)
        bias[self.rng.random(bias.shape) < 0.1] = -np.inf
        for b in range(batch):  # what no token of the sequence, or of any sequence, indexes
            rows, columns = (self.new[b], self.kv_len[b]) if batch > 1 else (q_cap - 1, k_cap - 3)
            bias[b, :, rows:] = np.nan
            bias[b, :, :, columns:] = np.nan
        self.give("attention_bias", bias.astype(self.io), 4 if case.strided else 1)


def poison(dtype: np.dtype[Any], cache: str = "") -> Any:
    """The value of an element type that does most harm where it is not expected."""
    if dtype == np.uint8 or cache == "int4":
        return 0xFF
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.array(np.nan).astype(dtype)
