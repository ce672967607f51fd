"""Merged parts against attention over all keys at once."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import InvalidArgumentError, merge_attention_states, paged_attention

ROWS, HEADS, WIDTH = 3, 2, 4


def attend(scores, values):
    """Output (rows, heads * width) and lse (rows, heads) of scores (rows, heads, keys) and values (keys, width)."""
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    weights = np.where(np.isfinite(lse)[..., None], np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    return (weights @ values).reshape(len(scores), -1).astype(np.float32), lse.astype(np.float32)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 99))
def test_any_split_of_the_keys_merges_to_the_whole(sizes, seed):
    rng = np.random.default_rng(seed)
    keys = sum(sizes)
    scores, values = 3 * rng.standard_normal((ROWS, HEADS, keys)), rng.standard_normal((keys, WIDTH))
    scores[0, 0] = -np.inf  # a row that sees nothing
    bounds = np.cumsum([0, *sizes])
    parts = [attend(scores[..., a:b], values[a:b]) for a, b in pairwise(bounds)]
    output, lse = merge_attention_states([part[0] for part in parts], [part[1] for part in parts])
    expected_output, expected_lse = attend(scores, values)
    np.testing.assert_allclose(output, expected_output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert (output[0, :WIDTH] == 0).all()
    assert lse[0, 0] == -np.inf


@pytest.mark.filterwarnings("error")
def test_an_empty_part_may_hold_anything():
    rng = np.random.default_rng(0)
    output, lse = attend(rng.standard_normal((ROWS, HEADS, 3)), rng.standard_normal((3, WIDTH)))
    nothing = np.full_like(output, np.nan), np.full_like(lse, -np.inf)
    merged, merged_lse = merge_attention_states([nothing[0], output], [nothing[1], lse])
    np.testing.assert_array_equal(merged, output)
    np.testing.assert_array_equal(merged_lse, lse)
    merged, merged_lse = merge_attention_states([nothing[0]], [nothing[1]])
    assert (merged == 0).all()
    assert (merged_lse == -np.inf).all()


def test_large_logarithms_do_not_overflow():
    output = np.ones((1, WIDTH), np.float32)
    merged, lse = merge_attention_states([output, 3 * output], [np.full((1, 1), 1e4), np.full((1, 1), 1e4)])
    np.testing.assert_allclose(merged, 2)
    np.testing.assert_allclose(lse, 1e4 + np.log(2))


def test_type_and_shape_of_the_outputs_stay():
    output = np.ones((ROWS, HEADS, WIDTH), ml_dtypes.bfloat16)
    merged, lse = merge_attention_states([output, output], [np.zeros((ROWS, HEADS), np.float32)] * 2)
    assert merged.dtype == output.dtype
    assert merged.shape == output.shape
    assert lse.dtype == np.float32
    assert (merged == 1).all()


def test_parts_must_agree():
    output, lse = np.ones((ROWS, HEADS * WIDTH)), np.zeros((ROWS, HEADS))
    with pytest.raises(InvalidArgumentError, match="lses: expected one for each of outputs"):
        merge_attention_states([output], [])
    with pytest.raises(InvalidArgumentError, match=r"expected the shapes of the first part.*got \(2, 8\)"):
        merge_attention_states([output, output[:2]], [lse, lse[:2]])
    for wrong in (lse.T, lse[:, 0], np.zeros((ROWS, 3))):
        with pytest.raises(InvalidArgumentError, match=r"lses: expected shape \(rows, heads\) of outputs"):
            merge_attention_states([output, output], [wrong, wrong])
    with pytest.raises(InvalidArgumentError, match=r"lses: expected shape \(rows, heads\) of outputs"):
        merge_attention_states([output.reshape(ROWS, HEADS, WIDTH)], [np.zeros((ROWS, WIDTH))])


def test_no_rows_and_stacked_parts():
    output, lse = np.zeros((2, 0, 8), np.float16), np.zeros((2, 0, 2), np.float32)
    merged, merged_lse = merge_attention_states(output, lse)
    assert (merged.shape, merged_lse.shape) == ((0, 8), (0, 2))


def test_parts_of_a_context_that_the_operator_attended():
    """A prefix, a part without keys and the rest, by block tables that map some of the blocks; the sink in one part."""
    rng = np.random.default_rng(0)
    heads, kv_heads, width = 4, 2, 16
    query, key, value, sink = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, heads * width), (2, kv_heads * width), (2, kv_heads * width), (heads,))
    )
    caches = rng.standard_normal((2, 8, 16, kv_heads, width)).astype(np.float32)
    table = rng.permutation(8)[:6].reshape(2, 3).astype(np.int32)

    def attend_blocks(mapped, head_sink=None):
        return paged_attention(
            query, key, value, *caches, np.array([0, 1, 2], np.int32), np.array([40, 23], np.int32),
            np.where(mapped, table, -1).astype(np.int32), head_sink=head_sink,
            num_heads=heads, kv_num_heads=kv_heads, return_lse=True,
        )  # fmt: skip

    whole = attend_blocks([True, True, True], sink)
    parts = [attend_blocks([True, False, False], sink), attend_blocks(False), attend_blocks([False, True, True])]
    assert (parts[1].lse == -np.inf).all()
    output, lse = merge_attention_states([part.output for part in parts], [part.lse for part in parts])
    np.testing.assert_allclose(output, whole.output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-5, atol=1e-5)
    parts[2] = attend_blocks([False, True, True], sink)  # in two denominators, so counted twice
    output, _ = merge_attention_states([part.output for part in parts], [part.lse for part in parts])
    assert np.abs(output - whole.output).max() > 0.01
