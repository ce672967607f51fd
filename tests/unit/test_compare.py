"""The comparison that decides for every backend: it has to refuse what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagedattn import paged_attention
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_close, assert_same_bits, steps_between, ulp, verify

CASES = [
    Case(lengths=((40, 5), (0, 7), (33, 1)), rope="full", qk_output=2),
    Case(
        io="bfloat16", lengths=((40, 5), (0, 7)), cache="int8", k_quant="PER_TENSOR", v_quant="PER_TENSOR", qk_output=1
    ),
    Case(
        io="float32", lengths=((40, 5), (0, 7)), cache="int4", k_quant="PER_CHANNEL", v_quant="PER_CHANNEL", qk_output=2
    ),
]


@pytest.fixture(params=CASES, ids=str)
def call(request):
    built = build(request.param)
    return built, built.copy().run(paged_attention)


def test_the_right_answer_passes(call):
    verify(*call)


def test_one_bad_row_is_seen(call):
    built, got = call
    wrong = got.output.astype(np.float32)
    wrong[3] *= 1.1
    with pytest.raises(AssertionError, match="output: largest error"):
        verify(built, got._replace(output=wrong.astype(got.output.dtype)))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_drift_is_seen(case):
    """Too small for the largest error to tell."""
    built = build(case)
    got = built.copy().run(paged_attention)
    unit = ulp(case.io, float(np.abs(got.output.astype(np.float64)).max()))
    drifted = got.output.astype(np.float64) + 0.9 * unit
    with pytest.raises(AssertionError, match="output: RMS error"):
        verify(built, got._replace(output=drifted.astype(got.output.dtype)))


@pytest.mark.parametrize("name", ["output", "lse", "output_qk"])
def test_nan_is_seen(call, name):
    built, got = call
    wrong = getattr(got, name).copy()
    wrong[1, 1] = np.nan
    with pytest.raises(AssertionError, match=f"{name}: "):
        verify(built, got._replace(**{name: wrong}))


def test_a_logarithm_of_another_base_is_seen(call):
    built, got = call
    with pytest.raises(AssertionError, match="lse: largest error"):
        verify(built, got._replace(lse=(got.lse / np.log(2)).astype(np.float32)))


def test_a_score_where_nothing_is_attended_is_seen(call):
    built, got = call
    wrong = got.output_qk.copy()
    wrong[0, 0, -1] = 1
    with pytest.raises(AssertionError, match="output_qk: "):
        verify(built, got._replace(output_qk=wrong))


@pytest.mark.parametrize("name", ["key_cache_out", "value_cache_out"])
def test_a_code_that_is_off_is_seen(call, name):
    built, got = call
    wrong = getattr(got, name).copy()
    slot = int(built["block_table"][0, 2]), 12
    raw = wrong[slot].view(np.uint8)
    raw += 64 if built.case.cache else 1
    with pytest.raises(AssertionError, match=f"{name[:-4]}: "):
        verify(built, got._replace(**{name: wrong}))


def test_truncated_codes_are_seen():
    """Each is within a step of the right one, but too many are."""
    built = build(CASES[1])
    got = built.copy().run(paged_attention)
    wrong = got.key_cache_out.copy()
    rows = wrong[int(built["block_table"][0, 2]), 8:13]
    rows[...] = np.where(rows % 2, rows - np.sign(rows), rows)
    with pytest.raises(AssertionError, match="too many elements are a step off"):
        verify(built, got._replace(key_cache_out=wrong))


def test_a_write_that_is_missing_or_too_many_is_seen(call):
    built, got = call
    with pytest.raises(AssertionError, match="key_cache: "):
        verify(built, got._replace(key_cache_out=built["key_cache"]))
    wrong = got.value_cache_out.copy()
    wrong.reshape(len(wrong), -1)[-1, 0] = 3
    with pytest.raises(AssertionError, match="value_cache: "):
        verify(built, got._replace(value_cache_out=wrong))


def test_a_row_that_sees_nothing_has_to_be_zero():
    built = build(Case(lengths=((3, 1), (0, 1)), unmapped=True, bias=""))
    built["block_table"][1] = -1
    got = built.copy().run(paged_attention)
    verify(built, got)
    wrong = got.output.copy()
    wrong[1, 0] = 1e-6
    with pytest.raises(AssertionError, match="not 0 where nothing is attended"):
        verify(built, got._replace(output=wrong))
    lse = got.lse.copy()
    lse[1] = -50000
    with pytest.raises(AssertionError, match="lse: infinities are at the wrong places"):
        verify(built, got._replace(lse=lse))


def test_a_missing_result_is_seen():
    built = build(replace(CASES[0], seed=1))
    got = built.copy().run(paged_attention)
    for name in ("lse", "output_qk"):
        with pytest.raises(AssertionError):
            verify(built, got._replace(**{name: None}))


def test_a_case_that_asks_for_nan_is_no_case():
    want = np.array([1.0, np.nan])
    with pytest.raises(AssertionError, match="the case itself asks for NaN"):
        assert_close(want, want, want, "float16")


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2**-10), ("bfloat16", 2**-7), ("float32", 2**-23)])
def test_ulp_is_the_distance_of_neighbours(dtype, unit):
    assert ulp(dtype, 1.0) == ulp(dtype, 1.99) == unit
    assert ulp(dtype, 2.0) == 2 * unit
    assert ulp(dtype, 0.0) == 0


def test_steps_count_representable_values():
    x = np.array([1, -1, 0, 2**-14], np.float16)
    up = np.nextafter(x, np.float16(np.inf))
    assert steps_between(up, x).tolist() == [1, 1, 1, 1]
    assert steps_between(np.array([0.0], np.float16), np.array([-0.0], np.float16)).tolist() == [0]
    assert steps_between(np.array([0x18], np.uint8), np.array([0x27], np.uint8), "int4").tolist() == [[1, 1]]


def test_rows_that_admit_nan_may_be_anything_and_no_others():
    built = build(Case(lengths=((20, 3), (5, 2))))
    built["value"][2] = np.nan  # the last new token of the first sequence
    got = built.copy().run(paged_attention)
    assert np.isnan(got.output[2].astype(np.float32)).all()
    got.output[2] = 7
    verify(built, got, spoilt=True)
    with pytest.raises(AssertionError, match="the case itself asks for NaN"):
        verify(built, got)
    got.output[1] *= np.float16(1.1)
    with pytest.raises(AssertionError, match="output: largest error"):
        verify(built, got, spoilt=True)


def test_one_nan_is_another_only_where_that_is_said():
    one, other = (np.array([1, code], np.uint16).view(np.float16) for code in (0x7E00, 0xFE01))
    assert_same_bits(one, other, any_nan=True)
    with pytest.raises(AssertionError, match=r"output: 1 of 2 elements differ, first at \(1,\)"):
        assert_same_bits(one, other)
    with pytest.raises(AssertionError, match="output: 2 of 2 elements differ"):
        assert_same_bits(one[::-1], other, any_nan=True)
