"""The NumPy backend against a triple loop that shares no code with it, and against itself in float64."""

import sys

import numpy as np
import pytest

from pagedattn import codec, paged_attention
from pagedattn.backends import numpy_reference
from tests.support.build import build
from tests.support.cases import CORNER, SMOKE, Case, grid, tiny
from tests.support.compare import bits, verify
from tests.support.naive import naive
from tests.support.oracle import oracle

# float64 sums in another order.
ROUNDING = 1e-13
LOOPED = [case for case in SMOKE if case.num_heads * case.head_size <= 1024]


def assert_equals_the_loops(built):
    got = oracle(built)
    want = naive(built.inputs, built.attributes, None if got.output_qk is None else got.output_qk.shape[2])

    def same(mine, right):
        assert mine.shape == right.shape
        finite = np.isfinite(right)
        assert np.array_equal(mine[~finite], right[~finite])
        scale = max(1.0, np.abs(right[finite]).max(initial=0))
        assert np.abs(mine[finite] - right[finite]).max(initial=0) <= ROUNDING * scale

    assert np.array_equal(bits(got.key_cache), want.key_codes)
    if got.value_cache is not None:
        assert np.array_equal(bits(got.value_cache), want.value_codes)
    same(got.output, want.output)
    same(got.lse, want.lse)
    if got.output_qk is not None:
        same(got.output_qk, want.output_qk)


@pytest.mark.parametrize("case", LOOPED + tiny(), ids=str)
def test_float64_mode_equals_the_loops(case):
    assert_equals_the_loops(build(case))


@pytest.mark.parametrize("elements", [1, 50, 400])
def test_a_chunk_may_be_attended_in_tiles(elements, monkeypatch):
    """One token at a time and a few, where a tile is as wide as its tokens' windows."""
    monkeypatch.setattr(numpy_reference, "TILE_ELEMENTS", elements)
    for case in (
        Case(lengths=((9, 11), (0, 20)), window=4, bias="BH", qk_output=1, sink=True),
        Case(lengths=((9, 11), (0, 20)), bias="11", qk_output=2, positions="tree"),
        Case(lengths=((30, 7),), window=10, is_causal=False, softcap=2.0, unmapped=True),
        Case(lengths=((20, 9),), mode="latent", kv_num_heads=1, group_size=3, window=3, qk_output=2),
    ):
        assert_equals_the_loops(build(case))


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_limits_what_is_read(is_causal, monkeypatch):
    """O(window) keys, whatever the length of the context."""
    read = []
    original = numpy_reference.PagedRows.read

    def spy(self, sequence, low, high):
        read.append((low, high))
        return original(self, sequence, low, high)

    monkeypatch.setattr(numpy_reference.PagedRows, "read", spy)
    build(Case(lengths=((700, 1), (640, 5), (3, 2)), window=33, is_causal=is_causal)).run(paged_attention)
    assert read == [(668, 701), (668, 701), (608, 645), (608, 645), (0, 5), (0, 5)]


@pytest.mark.parametrize("case", SMOKE + tiny() + CORNER + grid(), ids=str)
def test_each_type_is_as_near_to_float64_as_it_can_be(case):
    built = build(case)
    called = built.copy()
    around = called.surroundings()
    got = called.run(paged_attention)
    assert called.surroundings() == around
    for name, x in built.inputs.items():
        if name not in ("key_cache", "value_cache"):
            assert np.array_equal(bits(x), bits(called[name])), f"{name} was written"
    assert got.key_cache_out is not None
    assert np.shares_memory(got.key_cache_out, called["key_cache"])
    verify(built, got)


@pytest.mark.parametrize("window", [-1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_a_token_does_not_see_cannot_reach_it(bad, window):
    """A weight of 0 times NaN is NaN, unless it is left out."""
    case = Case(lengths=((9, 12), (0, 3)), window=window, sink=True)
    want = build(case).run(paged_attention)
    built = build(case)
    for name in ("key", "value"):
        built[name][3] = bad
    got = built.run(paged_attention)
    reached = np.zeros(15, bool)
    reached[3 : 7 if window > 0 else 12] = True
    assert np.array_equal(bits(got.output[~reached]), bits(want.output[~reached]))
    assert np.array_equal(bits(got.lse[~reached]), bits(want.lse[~reached]))
    assert not np.isfinite(got.output[reached]).any(axis=1).all()


def test_a_value_that_is_not_finite_stays_in_its_channel():
    case = Case(lengths=((9, 6),), kv_num_heads=2, group_size=3)
    want = build(case).run(paged_attention).output
    built = build(case)
    built["value"][2, 64 + 5] = np.inf
    got = built.run(paged_attention).output.reshape(6, 6, 64)
    assert (got[2:, 3:, 5] == np.inf).all()
    got[2:, 3:, 5] = want.reshape(6, 6, 64)[2:, 3:, 5]
    assert np.array_equal(bits(got), bits(want.reshape(6, 6, 64)))


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=((9, 12), (0, 7))),
        Case(lengths=((9, 12), (0, 7)), io="float32", window=3, sink=True, mode="packed"),
        Case(lengths=((9, 12), (0, 7)), kv_num_heads=1, group_size=3, bias="BH"),  # some of it -inf: weights of 0
        Case(lengths=((9, 12), (0, 7)), io="bfloat16", is_causal=False, unmapped=True),
    ],
    ids=str,
)
def test_values_that_are_not_finite_sum_as_in_the_loops(case):
    """NaN and both infinities, each in many keys."""
    built = build(case)
    rng = np.random.default_rng(5)
    width = case.kv_num_heads * case.head_size
    value = built["query"][:, -width:] if case.mode == "packed" else built["value"]
    for bad in (np.nan, np.inf, -np.inf):
        value[rng.random(value.shape) < 0.02] = bad
    got = oracle(built)
    want = naive(built.inputs, built.attributes, None)
    finite = np.isfinite(want.output)
    assert {"nan", "inf", "-inf"} <= set(map(str, want.output[~finite]))
    assert np.array_equal(got.output[~finite], want.output[~finite], equal_nan=True)
    assert np.abs(got.output[finite] - want.output[finite]).max() <= ROUNDING * np.abs(want.output[finite]).max()


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"cache": "int4", "k_quant": "PER_CHANNEL", "v_quant": "PER_TENSOR", "mode": "packed", "rope": "full"},
        {"window": 7, "sink": True, "softcap": 3.0, "bias": "BH", "qk_norm": True, "qk_output": 2},
        {
            "positions": "tree",
            "slots": "holes",
            "cache": "float8e4m3fn",
            "k_quant": "PER_TENSOR",
            "v_quant": "PER_TENSOR",
        },
    ],
    ids=["plain", "int4", "window", "tree"],
)
def test_tokens_heads_and_keys_are_not_looped_over(features):
    """However many there are, the same lines of Python run; also where many values are infinite."""

    def lines(**sizes) -> int:
        built = build(Case(**{"lengths": ((40, 5), (0, 3)), "kv_num_heads": 2, **features, **sizes}))
        if "value" in built.parents:
            built["value"][::2] = np.inf
        built.run(paged_attention)  # the plan is made
        count = 0

        def counted(frame, event, argument):
            nonlocal count
            count += frame.f_code.co_filename in (numpy_reference.__file__, codec.__file__)
            return counted

        before = sys.gettrace()
        sys.settrace(counted)
        try:
            built.run(paged_attention)
        finally:
            sys.settrace(before)
        return count

    few = lines()
    assert few > 50
    assert lines(lengths=((400, 5), (300, 3))) == few
    assert lines(lengths=((40, 120), (0, 90))) == few
    assert lines(kv_num_heads=8, group_size=5) == few
