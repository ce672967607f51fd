"""The NumPy backend against a triple loop that shares no code with it, and against itself in float64."""

import numpy as np
import pytest

from pagedattn import paged_attention
from tests.support.build import build
from tests.support.cases import CORNER, SMOKE, grid, tiny
from tests.support.compare import bits, verify
from tests.support.naive import naive
from tests.support.oracle import oracle

# float64 sums in another order.
ROUNDING = 1e-13
LOOPED = [case for case in SMOKE if case.num_heads * case.head_size <= 1024]


@pytest.mark.parametrize("case", LOOPED + tiny(), ids=str)
def test_float64_mode_equals_the_loops(case):
    built = build(case)
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
