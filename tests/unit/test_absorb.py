"""Absorption against plain expansion of the latent rows."""

import ml_dtypes
import numpy as np
import pytest

from pagedattn import InvalidArgumentError, absorb, mla

HEADS, NOPE, ROPE, VALUE, RANK, TOKENS = 3, 16, 8, 24, 32, 5


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "weight": rng.standard_normal((HEADS * (NOPE + VALUE), RANK)),
        "q_nope": rng.standard_normal((TOKENS, HEADS, NOPE)),
        "q_rope": rng.standard_normal((TOKENS, HEADS, ROPE)),
        "latent": rng.standard_normal((7, RANK)),
        "k_rope": rng.standard_normal((7, ROPE)),
    }


def absorbed(weight):
    return absorb(weight, num_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=VALUE)


def test_scores_of_absorbed_queries_are_those_of_expanded_keys(arrays):
    expanded = (arrays["latent"] @ arrays["weight"].T).reshape(7, HEADS, NOPE + VALUE)
    expected = np.einsum("thn,khn->thk", arrays["q_nope"], expanded[..., :NOPE])
    expected += np.einsum("thr,kr->thk", arrays["q_rope"], arrays["k_rope"])
    query = absorbed(arrays["weight"]).query(arrays["q_nope"], arrays["q_rope"])
    assert query.shape == (TOKENS, HEADS * (RANK + ROPE))
    row = np.concatenate([arrays["latent"], arrays["k_rope"]], -1)
    np.testing.assert_allclose(query.reshape(TOKENS, HEADS, -1) @ row.T, expected, rtol=1e-12, atol=1e-12)


def test_output_of_latent_values_is_that_of_expanded_values(arrays):
    weights = np.random.default_rng(1).random((TOKENS, HEADS, 7))
    expanded = (arrays["latent"] @ arrays["weight"].T).reshape(7, HEADS, NOPE + VALUE)[..., NOPE:]
    expected = np.einsum("thk,khv->thv", weights, expanded).reshape(TOKENS, -1)
    latent_output = (weights @ arrays["latent"]).reshape(TOKENS, -1)
    got = absorbed(arrays["weight"]).output(latent_output)
    assert got.shape == (TOKENS, HEADS * VALUE)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_types_are_summed_wide_and_rounded_once(arrays, dtype):
    narrow = {name: x.astype(dtype) for name, x in arrays.items()}
    got = absorbed(narrow["weight"]).query(narrow["q_nope"], narrow["q_rope"])
    wide = {name: x.astype(np.float32) for name, x in narrow.items()}
    expected = absorbed(wide["weight"]).query(wide["q_nope"], wide["q_rope"]).astype(dtype)
    assert got.dtype == dtype
    assert (got == expected).all()


def test_halves_are_views_of_the_weight(arrays):
    w = absorbed(arrays["weight"])
    assert np.shares_memory(w.w_uk, arrays["weight"])
    assert np.shares_memory(w.w_uv, arrays["weight"])


def test_a_weight_of_another_shape_is_refused(arrays):
    with pytest.raises(InvalidArgumentError, match=r"kv_b_proj: expected shape .* = 120, kv_lora.*got \(32, 120"):
        absorbed(arrays["weight"].T)


@pytest.mark.parametrize(("mscale_all_dim", "expected"), [(1.0, 0.135234), (0.707, 0.114721), (0.0, 192**-0.5)])
def test_softmax_scale_of_the_released_models(mscale_all_dim, expected):
    assert mla.softmax_scale(192, factor=40, mscale_all_dim=mscale_all_dim) == pytest.approx(expected, abs=5e-7)
    assert mla.softmax_scale(192) == 192**-0.5


def test_no_rows():
    projection = absorb(np.ones((2 * 7, 5), np.float32), num_heads=2, qk_nope_head_dim=4, v_head_dim=3)
    assert projection.query(np.ones((0, 2, 4), np.float32), np.ones((0, 2, 6), np.float32)).shape == (0, 2 * 11)
    assert projection.output(np.ones((0, 10), np.float32)).shape == (0, 6)


def test_rows_of_another_shape_are_named():
    projection = absorb(np.ones((2 * 7, 5), np.float32), num_heads=2, qk_nope_head_dim=4, v_head_dim=3)
    with pytest.raises(InvalidArgumentError, match="q_nope: expected heads of 4 channels, got 3"):
        projection.query(np.ones((1, 2, 3)), np.ones((1, 2, 6)))
    with pytest.raises(
        InvalidArgumentError, match=r"q_rope: expected shape \(N, num_heads = 2, ...\), got \(3, 2, 6\)"
    ):
        projection.query(np.ones((1, 2, 4)), np.ones((3, 2, 6)))
    with pytest.raises(InvalidArgumentError, match=r"attention_output: expected shape .* = 10\), got \(1, 7\)"):
        projection.output(np.ones((1, 7)))
    with pytest.raises(InvalidArgumentError, match="num_heads: expected a size > 0, got -2"):
        absorb(np.ones((14, 5)), num_heads=-2, qk_nope_head_dim=-4, v_head_dim=-3)
