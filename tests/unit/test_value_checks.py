"""Values that only the device knows: reported with checks on, survived with checks off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import InvalidArgumentError, PagedAttention, paged_attention
from pagedattn.backends.numpy_reference import NumpyPlan
from tests.support.build import Built, build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits
from tests.support.oracle import problem_of

i32 = np.int32
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)

# Sequences of rows [0, 3), [3, 7), [7, 8) with 5, 0 and 17 tokens before; 7 blocks of 16; a table of 3 columns.
PLAIN = Case()
ROPE = Case(rope="full")
POSITIONS = Case(rope="full", positions="own")
SLOTS = Case(slots="explicit")
WINDOW = Case(window=4)
BIAS = Case(bias="BH")
ROWS = {0: slice(0, 3), 1: slice(3, 7), 2: slice(7, 8)}


@dataclass(frozen=True)
class Violation:
    """A good call, one bad value in it, and what is said of it.

    ``victims`` are the sequences whose results it may change; ``same_as`` makes a legal call with the same results.
    """

    name: str
    case: Case
    change: Callable[[Built], None]
    message: str
    victims: tuple[int, ...]
    same_as: Callable[[Built], None] | None = None

    def __str__(self) -> str:
        return self.name


def put(name: str, index: Any, value: Any) -> Callable[[Built], None]:
    """Overwrite elements of an input."""

    def change(built: Built) -> None:
        built[name][index] = value

    return change


def shortened(name: str, axis: int, extent: int) -> Callable[[Built], None]:
    """Make an input shorter along an axis."""

    def change(built: Built) -> None:
        array, index = built.parents[name]
        first = index[axis].start
        built.parents[name] = (array, (*index[:axis], slice(first, first + extent), *index[axis + 1 :]))

    return change


def both(*changes: Callable[[Built], None]) -> Callable[[Built], None]:
    def change(built: Built) -> None:
        for one in changes:
            one(built)

    return change


def bounds(*values: int) -> Callable[[Built], None]:
    def change(built: Built) -> None:
        built.parents["attention_metadata"] = (np.array(values, i32), (slice(None),))

    return change


CU = "cumulative_sequence_length"
CAPACITY = "past_seqlens[{}]: expected past + new tokens <= the block table's capacity 48, got {}."
BLOCK = "block_table[{}, {}]: expected -1 or a block id in [0, num_blocks = 7), got {}."
SLOT = "slot_mapping[{}]: expected -1 or a slot in [0, num_blocks * block_size = 112), got {}."

VIOLATIONS = [
    Violation("cu starts late", PLAIN, put(CU, 0, 2), f"{CU}[0]: expected 0 as the first entry, got 2.", (0,)),
    Violation("cu starts below 0", PLAIN, put(CU, 0, -4), f"{CU}[0]: expected 0 as the first entry, got -4.", ()),
    Violation(
        "cu falls", PLAIN, put(CU, 2, 1), f"{CU}[2]: expected a value not below the one before, got 1.", (0, 1, 2)
    ),
    Violation(
        "cu falls below 0",
        PLAIN,
        put(CU, 1, -1),
        f"{CU}[1]: expected a value not below the one before, got -1.",
        (0, 1),
    ),
    Violation(
        "cu beyond the rows", PLAIN, put(CU, 3, 9), f"{CU}[3]: expected a value <= token_count = 8, got 9.", (2,)
    ),
    Violation(
        "cu far beyond",
        PLAIN,
        put(CU, 3, INT32_MAX),
        f"{CU}[3]: expected a value <= token_count = 8, got {INT32_MAX}.",
        (2,),
    ),
    *(
        Violation(
            f"past {value}",
            case,
            put("past_seqlens", 1, value),
            f"past_seqlens[1]: expected a value >= 0, got {value}.",
            (1,),
        )
        for case in (PLAIN, SLOTS, WINDOW, ROPE)
        for value in (-1, -3, INT32_MIN)
    ),
    Violation("past beyond the table", PLAIN, put("past_seqlens", 2, 48), CAPACITY.format(2, 49), (2,)),
    Violation("chunk over the table's end", PLAIN, put("past_seqlens", 1, 46), CAPACITY.format(1, 50), (1,)),
    Violation("past far beyond", WINDOW, put("past_seqlens", 0, INT32_MAX), CAPACITY.format(0, INT32_MAX + 3), (0,)),
    *(
        Violation(
            f"block {value}",
            case,
            put("block_table", (2, entry), value),
            BLOCK.format(2, entry, value),
            (2,),
            put("block_table", (2, entry), -1),
        )
        for case, entry in ((PLAIN, 0), (PLAIN, 1), (WINDOW, 1), (SLOTS, 0))
        for value in (7, INT32_MAX, -2, INT32_MIN)
    ),
    *(
        Violation(
            f"slot {value}",
            SLOTS,
            put("slot_mapping", 4, value),
            SLOT.format(4, value),
            (1,),
            put("slot_mapping", 4, -1),
        )
        for value in (112, 112 + 10**6, INT32_MAX, -2, INT32_MIN)
    ),
    Violation(
        "rotation beyond the rows",
        ROPE,
        both(shortened("cos_cache", 0, 17), shortened("sin_cache", 0, 17)),
        "past_seqlens[2]: expected positions < 17, the rows of cos_cache, got 17.",
        (2,),
    ),
    Violation(
        "position beyond the rows",
        POSITIONS,
        put("query_positions", 1, 18),
        "query_positions[1]: expected positions < 18, the rows of cos_cache, got 18.",
        (0,),
    ),
    Violation(
        "position far beyond",
        POSITIONS,
        put("query_positions", 7, INT32_MAX),
        f"query_positions[7]: expected positions < 18, the rows of cos_cache, got {INT32_MAX}.",
        (2,),
    ),
    Violation(
        "query bound too small",
        PLAIN,
        bounds(3, 0),
        "attention_metadata: expected max_query_len_bound >= the batch's 4, got 3.",
        (0, 1, 2),
    ),
    Violation(
        "kv bound too small",
        PLAIN,
        bounds(4, 17),
        "attention_metadata: expected max_kv_len_bound >= the batch's 18, got 17.",
        (0, 1, 2),
    ),
    Violation(
        "bias has too few rows",
        BIAS,
        shortened("attention_bias", 2, 3),
        "attention_bias: expected dimension 2 >= 4, the longest new tokens of the batch, got 3.",
        (1,),
    ),
    Violation(
        "bias has too few columns",
        BIAS,
        shortened("attention_bias", 3, 17),
        "attention_bias: expected dimension 3 >= 18, the longest context of the batch, got 17.",
        (2,),
    ),
]


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize("row", VIOLATIONS, ids=str)
def test_checks_name_the_tensor_the_index_the_value_and_the_range(row, by, monkeypatch):
    monkeypatch.setenv("PAGEDATTN_CHECKS", "1" if by == "environment" else "0")
    checks = True if by == "argument" else None
    good = build(row.case)
    good.copy().run(paged_attention, checks=checks)  # the call without the bad value passes
    row.change(good)
    before = [good[name].tobytes() for name in ("key_cache", "value_cache")]
    with pytest.raises(InvalidArgumentError) as refusal:
        good.run(paged_attention, checks=checks)
    assert str(refusal.value) == row.message
    assert [good[name].tobytes() for name in ("key_cache", "value_cache")] == before


@pytest.mark.parametrize("row", VIOLATIONS, ids=str)
def test_without_checks_the_other_sequences_are_right_and_nothing_outside_is_touched(row, monkeypatch):
    monkeypatch.setenv("PAGEDATTN_CHECKS", "1")
    good, bad = build(row.case), build(row.case)
    before = bad.copy()
    row.change(bad)
    around = bad.surroundings()
    want = good.run(paged_attention)
    got = bad.run(paged_attention, checks=False)  # the argument overrides the variable
    assert bad.surroundings() == around
    assert got.output.shape == want.output.shape
    for b in {0, 1, 2} - set(row.victims):
        assert_same_bits(got.output[ROWS[b]], want.output[ROWS[b]], f"sequence {b}")
        assert_same_bits(got.lse[ROWS[b]], want.lse[ROWS[b]], f"lse of sequence {b}")
    theirs = {int(block) for b in row.victims for block in before["block_table"][b]}
    others = [block for block in range(7) if block not in theirs]
    for name in ("key_cache", "value_cache"):
        assert_same_bits(bad[name][others], good[name][others], name)


@pytest.mark.parametrize("row", [row for row in VIOLATIONS if row.same_as], ids=str)
def test_what_is_out_of_range_counts_as_unmapped(row):
    bad, legal = build(row.case), build(row.case)
    row.change(bad)
    assert row.same_as is not None
    row.same_as(legal)
    got, want = bad.run(paged_attention), legal.run(paged_attention, checks=True)
    for mine, right in zip(got[:3], want[:3], strict=True):
        assert_same_bits(mine, right)
    assert_same_bits(got.lse, want.lse)


@pytest.mark.parametrize("value", [-1, -3, INT32_MIN])
@pytest.mark.parametrize("case", [PLAIN, SLOTS, WINDOW, ROPE, Case(sink=True)], ids=str)
def test_a_negative_past_gives_zero_and_writes_nothing(case, value):
    built = build(case)
    before = built.copy()
    built["past_seqlens"][:] = value
    got = built.run(paged_attention)
    assert not got.output.any()
    assert (got.lse == -np.inf).all()
    for name in ("key_cache", "value_cache"):
        assert_same_bits(built[name], before[name], name)


def test_a_chunk_over_the_end_of_the_table_keeps_what_fits():
    """Two of sequence 1's four tokens have a place; all attend what is there."""
    built = build(PLAIN)
    built["past_seqlens"][1] = 46
    spare = np.setdiff1d(np.arange(7), built["block_table"][built["block_table"] < 7])[:3]
    built["block_table"][1] = spare
    for name in ("key_cache", "value_cache"):
        built[name][spare] = np.random.default_rng(0).standard_normal((3, 16, 2, 64))
    before = built.copy()
    got = built.run(paged_attention)
    shorter = before.copy()
    shorter["cumulative_sequence_length"][:] = [0, 3, 5, 5]
    want = shorter.run(paged_attention, checks=True)
    assert_same_bits(built["key_cache"][spare], shorter["key_cache"][spare])
    assert_same_bits(got.output[3:5], want.output[3:5])
    assert np.isfinite(got.output.astype(np.float32)).all()
    assert np.isfinite(got.lse[5:7]).all()


def test_checks_read_nothing_of_what_no_token_needs():
    """Entries beyond a sequence's length, below its window, and slots and positions of padding may hold anything."""
    built = build(Case(window=4, padding=3, slots="explicit", lengths=((40, 1), (0, 2)), rope="full"))
    built["block_table"][0, :2] = [INT32_MAX, -7]
    built["slot_mapping"][-3:] = [INT32_MAX, -9, 10**6]
    built.run(paged_attention, checks=True)


def test_checks_look_below_the_window_where_positions_are_given():
    """query_positions may reach back further than the past says."""
    built = build(Case(window=4, positions="own", lengths=((40, 1),)))
    built["block_table"][0, 0] = 99
    with pytest.raises(InvalidArgumentError, match=r"^block_table\[0, 0\]: expected -1 or a block id in "):
        built.run(paged_attention, checks=True)


def test_a_bound_operator_remembers_no_values():
    operator = PagedAttention(num_heads=4, kv_num_heads=2, checks=True)
    built = build(PLAIN)
    operator(**built.inputs)
    built["past_seqlens"][0] = -1
    with pytest.raises(InvalidArgumentError, match=r"^past_seqlens\[0\]: expected a value >= 0, got -1\.$"):
        operator(**built.inputs)


def test_negative_positions_are_survived_where_the_host_cannot_see_them():
    """The operator refuses them on the host; a plan, as a replayed graph would, meets them."""
    built = build(POSITIONS)
    want = built.copy().run(paged_attention).output
    built["query_positions"][3:7] = [-1, INT32_MIN, 0, -5]
    problem = problem_of(built.inputs, built.attributes)
    output, lse = np.empty((8, 256), np.float16), np.empty((8, 4), np.float32)
    around = built.surroundings()
    NumpyPlan(problem, np.float32).run({**built.inputs, "output": output, "lse": lse})
    assert built.surroundings() == around
    assert_same_bits(output[:3], want[:3])
    assert_same_bits(output[7:], want[7:])
    assert not output[[3, 4, 6]].any()  # a token before the first position sees nothing


wild = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([INT32_MIN, INT32_MAX, 111, 112, 48, 47, 7, 6, -1]),
    st.integers(INT32_MIN, INT32_MAX),
)
FUZZED = [
    Case(slots="explicit", window=5, rope="full", sink=True, bias="B1", qk_output=2),
    Case(rope="partial", is_causal=False, cache="int4", k_quant="PER_CHANNEL", v_quant="PER_TENSOR"),
    Case(mode="latent", kv_num_heads=1, positions="own", window=3, rope="offset"),
]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("case", FUZZED, ids=str)
def test_any_integers_are_survived(case, data):
    built = build(case)
    for name, least in (
        ("cumulative_sequence_length", INT32_MIN),
        ("past_seqlens", INT32_MIN),
        ("block_table", INT32_MIN),
        ("slot_mapping", INT32_MIN),
        ("query_positions", 0),
    ):
        if name in built.parents:
            x = built[name]
            values = data.draw(st.lists(wild, min_size=x.size, max_size=x.size), label=name)
            x[...] = np.maximum(values, least).astype(i32).reshape(x.shape)
    around = built.surroundings()
    got = built.run(paged_attention)
    assert built.surroundings() == around
    assert got.output.shape == (8, built.attributes["num_heads"] * (case.v_head_size or case.head_size))
