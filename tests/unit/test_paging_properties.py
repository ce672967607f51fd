"""What paging must not change: properties over random batches, bit for bit where nothing else is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedattn import paged_attention
from pagedattn.cache import BlockPool, BlockTable, assemble, window_blocks
from tests.support.build import STEPS, TYPES, Built, build, poison
from tests.support.cases import CACHES, Case
from tests.support.compare import assert_same_bits, bits, ulp

i32 = np.int32
OUTPUTS = ("output", "lse", "output_qk")
properties = settings(derandomize=True, max_examples=30, deadline=None)

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=4).map(tuple)


@st.composite
def cases(draw: Any, **fixed: Any) -> Case:
    """Any combination of features; ``fixed`` fields are not drawn."""
    mode = fixed.get("mode") or draw(st.sampled_from(["separate", "packed", "latent"]))
    latent = mode == "latent"
    cache, k_quant, v_quant = draw(st.sampled_from(CACHES))
    fields: dict[str, Any] = {
        "mode": mode,
        "io": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        "cache": cache,
        "k_quant": k_quant,
        "v_quant": "NONE" if latent else v_quant,
        "head_size": draw(st.sampled_from([16, 24, 64])),
        "kv_num_heads": 1 if latent else draw(st.integers(1, 3)),
        "group_size": draw(st.integers(1, 4)),
        "block_size": draw(st.sampled_from([16, 32])),
        "lengths": draw(lengths),
        "qk_norm": not latent and draw(st.booleans()),
        "rope": draw(st.sampled_from(["none", "full", "partial", "offset"])),
        "interleaved": draw(st.booleans()),
        "window": draw(st.sampled_from([-1, -1, 1, 7, 20])),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "sink": not latent and draw(st.booleans()),
        "bias": draw(st.sampled_from(["", "", "BH", "1H", "B1", "11"])),
        "positions": draw(st.sampled_from(["", "own", "tree"])),
        "is_causal": draw(st.booleans()),
        "qk_output": draw(st.sampled_from([0, 1, 2])),
        "seed": draw(st.integers(0, 99)),
    }
    case = Case(**{**fields, **fixed})
    assume(case.token_count > 0)
    return case


def assert_same(got: Any, want: Any, rows: Any = slice(None), other: Any = None) -> None:
    """Same output, lse and output_qk in ``rows`` of one and ``other`` (default the same) of the other."""
    other = rows if other is None else other
    assert_same_bits(got.output[rows], want.output[other])
    assert_same_bits(got.lse[rows], want.lse[other], "lse")
    if want.output_qk is not None:
        width = min(got.output_qk.shape[2], want.output_qk.shape[2])
        assert_same_bits(got.output_qk[:, rows, :width], want.output_qk[:, other, :width], "output_qk")


def assert_same_caches(one: Built, other: Built) -> None:
    for name in ("key_cache", "value_cache"):
        if name in one.parents:
            assert_same_bits(one[name], other[name], name)


def caches_of(built: Built) -> list[str]:
    return [name for name in ("key_cache", "value_cache") if name in built.parents]


# ---- slots and blocks --------------------------------------------------------------------------------------------


@properties
@given(case=cases(slots="explicit"))
def test_explicit_slots_are_the_derived_ones(case):
    explicit = build(case)
    derived = explicit.copy()
    del derived.parents["slot_mapping"]
    assert_same(explicit.run(paged_attention), derived.run(paged_attention))
    assert_same_caches(explicit, derived)


@properties
@given(case=cases(), data=st.data())
def test_renaming_blocks_changes_no_bit(case, data):
    built = build(case)
    renamed = built.copy()
    blocks = built["key_cache"].shape[0]
    new_name = np.array(data.draw(st.permutations(range(blocks))))
    table = renamed["block_table"]
    real = (table >= 0) & (table < blocks)
    table[real] = new_name[table[real]]
    for name in caches_of(built):
        renamed[name][new_name] = built[name]
    assert_same(renamed.run(paged_attention), built.run(paged_attention))
    for name in caches_of(built):
        assert_same_bits(renamed[name][new_name], built[name], name)


@properties
@given(case=cases(slots="holes"))
def test_slots_that_are_not_named_keep_their_bytes(case):
    built = build(case)
    before = built.copy()
    built.run(paged_attention)
    tokens = int(built["cumulative_sequence_length"][-1])
    named = built["slot_mapping"][:tokens]
    for name in caches_of(built):
        mine, old = (x[name].reshape(-1, *x[name].shape[2:]) for x in (built, before))
        kept = np.setdiff1d(np.arange(len(mine)), named)
        assert_same_bits(mine[kept], old[kept], name)


@properties
@given(case=cases())
def test_storing_nothing_attends_what_is_there(case):
    """A step whose keys are in the cache already needs no key: with every slot -1 it gives the same bits."""
    built = build(case)
    want = built.run(paged_attention)
    again = built.copy()
    for name in {"key", "value"} & again.parents.keys():
        again[name][...] = np.nan
    got = again.run(paged_attention, slot_mapping=np.full(case.token_count, -1, i32))
    assert_same(got, want)
    assert_same_caches(again, built)


@properties
@given(case=cases(lengths=((32, 3), (32, 1), (32, 5))), shared=st.integers(1, 2))
def test_a_shared_prefix_is_a_copied_prefix(case, shared):
    case = replace(case, block_size=16)
    copied = build(case)
    table = copied["block_table"]
    for name in caches_of(copied):
        for b in (1, 2):
            copied[name][table[b, :shared]] = copied[name][table[0, :shared]]
    pooled = copied.copy()
    pooled["block_table"][1:, :shared] = table[0, :shared]
    for name in caches_of(pooled):
        pooled[name][table[1:, :shared]] = poison(pooled[name].dtype)
    assert_same(pooled.run(paged_attention), copied.run(paged_attention))


# ---- batches -----------------------------------------------------------------------------------------------------


@properties
@given(case=cases(), garbage=st.sampled_from([0, 7, 2**31 - 1]))
def test_padded_rows_are_zero_and_change_nothing(case, garbage):
    padded = build(replace(case, padding=3, slots="explicit"))
    tokens = case.token_count
    for name in {"slot_mapping", "query_positions"} & padded.parents.keys():
        padded[name][tokens:] = garbage
    plain = padded.copy()
    for name in ("query", "key", "value", "slot_mapping", "query_positions"):
        if name in plain.parents:
            array, index = plain.parents[name]
            plain.parents[name] = (array, (slice(index[0].start, index[0].stop - 3), *index[1:]))
    got, want = padded.run(paged_attention), plain.run(paged_attention)
    assert_same(got, want, slice(0, tokens))
    assert not got.output[tokens:].any()
    assert (got.lse[tokens:] == -np.inf).all()
    assert got.output_qk is None or not got.output_qk[:, tokens:].any()
    assert_same_caches(padded, plain)


@properties
@given(case=cases(bias=""), where=st.integers(0, 4), past=st.integers(0, 200))
def test_an_idle_sequence_changes_nothing(case, where, past):
    busy = build(case)
    idle = busy.copy()
    where = min(where, case.batch_size)
    for name, row in (
        ("cumulative_sequence_length", busy["cumulative_sequence_length"][where]),
        ("past_seqlens", past),
        ("block_table", np.full(busy["block_table"].shape[1], 0)),
    ):
        idle.parents[name] = (np.insert(busy[name], where, row, axis=0).astype(i32), (slice(None),))
    got, want = idle.run(paged_attention), busy.run(paged_attention)
    assert_same(got, want)
    assert_same_caches(idle, busy)


@properties
@given(case=cases(bias=""))
def test_a_sequence_gets_the_same_bits_alone(case):
    built = build(case)
    want = built.copy().run(paged_attention)
    cumulative = built["cumulative_sequence_length"]
    for b in range(case.batch_size):
        alone = built.copy()
        rows = slice(cumulative[b], cumulative[b + 1])
        for name in ("query", "key", "value", "query_positions"):
            if name in alone.parents:
                alone.parents[name] = (alone[name][rows].copy(), (slice(None),))
        alone.parents["cumulative_sequence_length"] = (np.array([0, rows.stop - rows.start], i32), (slice(None),))
        for name in ("past_seqlens", "block_table"):
            alone.parents[name] = (alone[name][b : b + 1].copy(), (slice(None),))
        assert_same(alone.run(paged_attention), want, slice(None), rows)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "case", [Case(), Case(mode="packed"), Case(qk_output=1, sink=True, rope="full", bias="BH")], ids=str
)
def test_a_call_without_tokens(case, batch):
    built = build(replace(case, lengths=tuple((9 * b, 0) for b in range(batch))))
    before = built.copy()
    got = built.run(paged_attention, checks=True)
    assert got.output.shape == (0, 256)
    assert got.output.dtype == np.float16
    assert got.lse.shape == (0, 4)
    if case.qk_output:
        assert got.output_qk.shape == (4, 0, 9 * (batch - 1))
    assert_same_caches(built, before)


def test_a_batch_of_idle_slots_is_all_zero():
    """A decode batch of fixed size: unused slots hold a dummy token, no blocks and NaN."""
    built = build(Case(lengths=((20, 1), (0, 1), (0, 1), (7, 1)), slots="explicit", sink=True))
    idle = [1, 2]
    built["block_table"][idle] = -1
    built["slot_mapping"][idle] = -1
    for name in ("query", "key", "value"):
        built[name][idle] = np.nan
    before = built.copy()
    got = built.run(paged_attention, out=np.full((4, 256), np.nan, np.float16))
    assert not got.output[idle].any()
    assert np.isfinite(got.output.astype(np.float32)).all()
    others = np.setdiff1d(np.arange(built["key_cache"].shape[0] * 16), built["slot_mapping"])
    for name in ("key_cache", "value_cache"):
        mine, old = (x[name].reshape(-1, 2, 64)[others] for x in (built, before))
        assert_same_bits(mine, old, name)


# ---- softmax -----------------------------------------------------------------------------------------------------


@properties
@given(case=cases(window=-1, positions=""), more=st.sampled_from([0, 1, 1000, 2**31 - 1]))
def test_a_window_as_long_as_the_context_is_none(case, more):
    built, windowed = build(case), build(case)
    longest = max(past + new for past, new in case.lengths)
    assert_same(
        windowed.run(paged_attention, local_window_size=max(1, min(longest + more, 2**31 - 1))),
        built.run(paged_attention),
    )


@properties
@given(case=cases(mode="separate", sink=False))
def test_a_sink_of_minus_infinity_is_none(case):
    plain, sunk = build(case), build(case)
    sink = np.full(case.num_heads, -np.inf).astype(TYPES[case.io])
    assert_same(sunk.run(paged_attention, head_sink=sink), plain.run(paged_attention))


@properties
@given(case=cases(sink=False, qk_norm=False, mode="separate", cache="", k_quant="NONE", v_quant="NONE", bias=""))
def test_a_constant_value_is_returned(case):
    built = build(case)
    value = np.random.default_rng(case.seed).standard_normal((case.kv_num_heads, case.head_size)).astype(TYPES[case.io])
    built["value_cache"][...] = value
    built["value"][...] = value.reshape(1, -1)
    got = built.run(paged_attention).output.reshape(-1, case.kv_num_heads, case.group_size, case.head_size)
    want = np.broadcast_to(value[:, None], got.shape)
    if case.io == "float32":
        assert np.abs(got - want).max() <= 4 * ulp("float32", np.abs(want).max())
    else:
        assert_same_bits(got, np.ascontiguousarray(want))


@properties
@given(case=cases(lengths=((0, 30), (9, 25))), cut=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_a_prefill_in_chunks_stores_the_same_bits(case, cut):
    """And attends the same to within rounding: sums are split elsewhere."""
    case = replace(case, positions="", bias="", is_causal=True, qk_output=0)
    whole, chunked = build(case), build(case)
    want = whole.run(paged_attention)
    done = np.zeros(2, int)
    got = np.empty_like(want.output)
    new, past = np.array([30, 25]), np.array([0, 9])
    step = 0
    while (done < new).any():
        count = np.minimum(cut[step % len(cut)], new - done)
        rows = np.concatenate([np.arange(30 * b + done[b], 30 * b + done[b] + count[b]) for b in range(2)])
        result = chunked.run(
            paged_attention,
            **{name: chunked[name][rows].copy() for name in ("query", "key", "value") if name in chunked.parents},
            cumulative_sequence_length=np.cumsum([0, *count]).astype(i32),
            past_seqlens=(past + done).astype(i32),
        )
        got[rows] = result.output
        done += count
        step += 1
    assert_same_caches(chunked, whole)
    wide = [x.astype(np.float64) for x in (got, want.output)]
    unit = ulp(case.io, np.abs(wide[1]).max())
    assert np.abs(wide[0] - wide[1]).max() <= (16 if case.io == "float32" else 1) * unit


# ---- rolling windows ---------------------------------------------------------------------------------------------

ROLLING = [
    Case(head_size=16, io="float32"),
    Case(head_size=16, io="bfloat16", sink=True, softcap=3.0, rope="full"),
    Case(head_size=16, cache="int8", k_quant="PER_TENSOR", v_quant="PER_CHANNEL", qk_norm=True),
    Case(head_size=16, cache="float8e4m3fn", k_quant="PER_CHANNEL", v_quant="PER_TENSOR", sink=True),
    Case(head_size=16, cache="int4", k_quant="PER_CHANNEL", v_quant="PER_CHANNEL", mode="packed"),
    Case(head_size=24, mode="latent", kv_num_heads=1, group_size=4, rope="offset", cache="int8", k_quant="PER_TENSOR"),
]


class Run:
    """Sequences of random tokens, run step by step under one policy of block tables."""

    def __init__(self, case: Case, window: int, policy: str, chunk: int, total: list[int]) -> None:
        rng = np.random.default_rng(case.seed)
        self.case, self.window, self.policy = case, window, policy
        self.pool = BlockPool(64)
        options: dict[str, Any] = {
            "full": {},
            "ring": {"window": window, "ring_blocks": window_blocks(window, 16, chunk)},
            "free-list": {"window": window},
        }[policy]
        self.tables = [BlockTable(self.pool, 16, **options) for _ in total]
        width = case.head_size // 2 if case.cache == "int4" else case.head_size
        shape = (64, 16, case.kv_num_heads, width)
        stored = TYPES[case.cache_type]
        self.caches = [np.full(shape, poison(stored, case.cache), stored) for _ in range(1 if case.is_latent else 2)]
        widths = [case.num_heads * case.head_size] + 2 * [case.kv_num_heads * case.head_size]
        self.rows = [[rng.standard_normal((n, width)).astype(TYPES[case.io]) for width in widths] for n in total]
        self.call = build(case)  # scales, weights, rotation, sink
        step = STEPS.get(case.cache, 1)
        for name in {"k_scale", "v_scale"} & self.call.parents.keys():
            self.call[name][...] = rng.uniform(step, 1.5 * step, self.call[name].shape)
        if case.rope != "none":
            half = self.call["cos_cache"].shape[1]
            angle = np.arange(max(total))[:, None] / 30 ** (np.arange(half) / half)
            for name, f in (("cos_cache", np.cos), ("sin_cache", np.sin)):
                self.call.parents[name] = (f(angle).astype(TYPES[case.io]), (slice(None),))

    def step(self, counts: list[int], derived: bool) -> Any:
        for table, count in zip(self.tables, counts, strict=True):
            table.append(count)
        if self.policy == "free-list":  # what was given back is nobody's
            unowned = [block for block in range(64) if self.pool.references(block) == 0]
            for cache in self.caches:
                cache[unowned] = poison(cache.dtype, self.case.cache)
        new = [
            [x[table.length - count : table.length] for x in rows]
            for table, count, rows in zip(self.tables, counts, self.rows, strict=True)
        ]
        query, key, value = (np.concatenate(part) for part in zip(*new, strict=True))
        inputs = assemble(list(zip(self.tables, counts, strict=True))).inputs
        if derived:
            del inputs["slot_mapping"]
        if self.case.mode == "packed":
            inputs["query"] = np.concatenate([query, key, value], axis=1)
        else:
            inputs |= {"query": query, "key": key, "value": None if self.case.is_latent else value}
        inputs |= {"key_cache": self.caches[0], "value_cache": None if self.case.is_latent else self.caches[1]}
        return self.call.run(paged_attention, **inputs, local_window_size=self.window, checks=True)


@settings(derandomize=True, max_examples=8, deadline=None)
@given(
    window=st.sampled_from([1, 4, 15, 16, 17, 24]),
    chunk=st.integers(1, 9),
    derived=st.booleans(),
    data=st.data(),
)
@pytest.mark.parametrize("policy", ["ring", "free-list"])
@pytest.mark.parametrize("case", ROLLING, ids=str)
def test_a_rolling_cache_gives_the_bits_of_a_full_one(case, policy, window, chunk, derived, data):
    """At every step, past the window and before, beside sequences that are shorter than it."""
    total = [90, 40, 9]
    full, rolling = (Run(case, window, kind, chunk, total) for kind in ("full", policy))
    done = [0, 0, 0]
    while done != total:
        counts = [min(data.draw(st.integers(0, chunk)), n - d) for n, d in zip(total, done, strict=True)]
        if not sum(counts):
            counts = [min(chunk, n - d) for n, d in zip(total, done, strict=True)]
        done = [d + count for d, count in zip(done, counts, strict=True)]
        got, want = rolling.step(counts, derived), full.step(counts, derived)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.lse, want.lse, "lse")
        assert np.isfinite(got.output.astype(np.float32)).all()
    held = len(rolling.tables[0].blocks)
    assert held <= window_blocks(window, 16, chunk)
    assert len(full.tables[0].blocks) == 6


def test_a_ring_wraps_many_times():
    """Decoding 300 tokens in two blocks, one token at a time."""
    case = Case(head_size=16, cache="int8", k_quant="PER_TENSOR", v_quant="PER_TENSOR", sink=True, seed=1)
    full, ring = (Run(case, 16, kind, 1, [300, 20]) for kind in ("full", "ring"))
    for step in range(300):
        counts = [1, int(step >= 280)]
        assert_same_bits(ring.step(counts, False).output, full.step(counts, False).output)
    assert len(ring.tables[0].blocks) == 2
    assert not np.array_equal(bits(ring.caches[0]), bits(full.caches[0]))
