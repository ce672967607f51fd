"""Cosine and sine tables against closed forms; tests/models compares them with transformers."""

import math

import ml_dtypes
import numpy as np
import pytest

from pagedattn import InvalidArgumentError, rope


def test_default_is_the_geometric_series():
    frequencies = rope.default(8, 10000.0).inverse_frequencies
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-15)


def test_caches_hold_cosine_and_sine_of_position_times_frequency():
    cos, sin = rope.default(8).caches(5)
    assert cos.shape == sin.shape == (5, 4)
    assert cos.dtype == sin.dtype == np.float32
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    np.testing.assert_allclose(cos[3], np.cos([3, 0.3, 0.03, 0.003]), rtol=1e-6)
    np.testing.assert_allclose(sin[3], np.sin([3, 0.3, 0.03, 0.003]), rtol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_narrow_tables_are_rounded_once(name, dtype):
    exact = np.cos(np.arange(50)[:, None] * rope.default(16).inverse_frequencies)
    cos, _ = rope.default(16).caches(50, name)
    assert cos.dtype == dtype
    assert (cos == exact.astype(dtype)).all()


def test_linear_divides_positions():
    np.testing.assert_allclose(rope.linear(16, factor=4.0).caches(9)[1][8], rope.default(16).caches(9)[1][2], rtol=1e-6)


def test_dynamic_ntk_changes_nothing_up_to_the_limit_and_keeps_the_fastest_pair_after_it():
    plain = rope.default(16).inverse_frequencies
    scaled = {
        n: rope.dynamic_ntk(16, factor=2.0, max_position_embeddings=64, length=n).inverse_frequencies
        for n in (1, 64, 128)
    }
    assert (scaled[1] == plain).all()
    assert (scaled[64] == plain).all()
    assert scaled[128][0] == plain[0]
    # base * 3 ** (16 / 14), so that the slowest pair, exponent 14 / 16, is slower by exactly 3
    assert scaled[128][-1] == pytest.approx(plain[-1] / 3, rel=1e-12)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    plain = rope.default(64).inverse_frequencies
    yarn = rope.yarn(64, factor=40, original_max_position_embeddings=4096)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(yarn.inverse_frequencies[turns > 2 * 32], plain[turns > 2 * 32])
    np.testing.assert_allclose(yarn.inverse_frequencies[turns < 0.5], plain[turns < 0.5] / 40)
    assert (np.diff(yarn.inverse_frequencies) < 0).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"factor": 32}, 1.346574),  # GPT-OSS
        ({"factor": 1}, 1.0),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),  # DeepSeek: all of it goes into scale
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707}, 1.368888 / 1.260804),
        ({"factor": 40, "mscale": 1.0}, 1.368888),
        ({"factor": 40, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.5),
    ],
)
def test_yarn_attention_factor(settings, expected):
    yarn = rope.yarn(64, original_max_position_embeddings=4096, **settings)
    assert yarn.attention_factor == pytest.approx(expected, rel=1e-6)
    cos, _ = yarn.caches(1)
    np.testing.assert_allclose(cos, expected, rtol=1e-6)


def test_yarn_without_truncation_ramps_between_fractions_of_pairs():
    whole, fraction = (
        rope.yarn(64, theta=150000.0, factor=32, original_max_position_embeddings=4096, truncate=t).inverse_frequencies
        for t in (True, False)
    )
    assert not np.allclose(whole, fraction, rtol=1e-3)


LONG = {"short_factor": [1, 1, 2, 2], "long_factor": [1, 4, 8, 16], "original_max_position_embeddings": 4096}


def test_longrope_divides_each_pair_and_switches_by_length():
    plain = rope.default(8).inverse_frequencies
    short, long = (rope.longrope(8, length=n, factor=32, **LONG) for n in (4096, 4097))
    np.testing.assert_allclose(short.inverse_frequencies, plain / [1, 1, 2, 2])
    np.testing.assert_allclose(long.inverse_frequencies, plain / [1, 4, 8, 16])
    assert short.attention_factor == long.attention_factor == pytest.approx(1.190238, abs=1e-6)  # Phi-3 128k


def test_longrope_needs_as_many_divisors_as_pairs_and_a_factor():
    with pytest.raises(InvalidArgumentError, match=r"expected rotary_dim / 2 = 8 divisors, got 4"):
        rope.longrope(16, length=1, factor=32, **LONG)
    with pytest.raises(InvalidArgumentError, match="factor: required when attention_factor is not given"):
        rope.longrope(8, length=1, **LONG)


def test_llama3_leaves_fast_pairs_divides_slow_ones_and_joins_them():
    settings = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = rope.default(128, 500000.0).inverse_frequencies
    turns = 8192 * plain / (2 * math.pi)
    scaled = rope.llama3(128, **settings).inverse_frequencies
    assert (scaled[turns >= 4] == plain[turns >= 4]).all()
    np.testing.assert_allclose(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


PARAMETERS = {
    "default": ({"rope_type": "default", "rope_theta": 5e5}, rope.default(32, 5e5)),
    "no type": ({}, rope.default(32)),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.25}, rope.default(8)),
    "linear": ({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, rope.linear(32, 1e6, factor=8.0)),
    "old key": ({"type": "linear", "factor": 2.0}, rope.linear(32, factor=2.0)),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        rope.dynamic_ntk(32, factor=2.0, max_position_embeddings=4096, length=9000),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
        rope.yarn(32, factor=4.0, original_max_position_embeddings=1024, truncate=False),
    ),
    "yarn without factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 1024},
        rope.yarn(32, factor=4.0, original_max_position_embeddings=1024),
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 1024,
        },
        rope.longrope(
            32,
            short_factor=[1.0] * 16,
            long_factor=[2.0] * 16,
            original_max_position_embeddings=1024,
            length=9000,
            factor=4.0,
        ),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 1024,
        },
        rope.llama3(32, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024),
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_config(name):
    parameters, expected = PARAMETERS[name]
    got = rope.from_parameters(parameters, 32, max_position_embeddings=4096, length=9000)
    np.testing.assert_array_equal(got.inverse_frequencies, expected.inverse_frequencies)
    assert got.attention_factor == expected.attention_factor
    assert got.rotary_dim == 2 * got.inverse_frequencies.size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope.default(7), r"rotary_dim: expected an even number > 0, got 7"),
        (lambda: rope.default(8).caches(4, "int8"), r"dtype: expected one of float16, bfloat16, float32, got 'int8'"),
        (lambda: rope.from_parameters({"rope_type": "axial"}, 8), r"rope_type: expected one of .*got 'axial'"),
        (lambda: rope.from_parameters({"rope_type": "dynamic", "factor": 2.0}, 8), "max_position_embeddings: required"),
        (lambda: rope.from_parameters({"rope_type": "yarn"}, 8), "original_max_position_embeddings: required"),
        (lambda: rope.from_parameters({"rope_type": "linear"}, 8), "factor: required by this rope_type"),
        (lambda: rope.from_parameters({"rope_type": "llama3", "factor": 8.0}, 8), "low_freq_factor: required"),
        (lambda: rope.default(8, 0), "theta: expected a finite value > 0, got 0"),
        (lambda: rope.default(8, math.nan), "theta: expected a finite value > 0, got nan"),
        (lambda: rope.linear(8, factor=0), "factor: expected a finite value > 0, got 0"),
        (
            lambda: rope.dynamic_ntk(2, factor=2, max_position_embeddings=8, length=16),
            "rotary_dim: expected more than 2 channels",
        ),
        (
            lambda: rope.yarn(8, factor=2, original_max_position_embeddings=0),
            "original_max_position_embeddings: expected a finite value > 0, got 0",
        ),
        (
            lambda: rope.llama3(8, factor=2, low_freq_factor=1, high_freq_factor=1, original_max_position_embeddings=8),
            "high_freq_factor: expected a value above low_freq_factor = 1, got 1",
        ),
        (
            lambda: rope.longrope(
                4, short_factor=[1, 0], long_factor=[1, 1], original_max_position_embeddings=8, length=1, factor=2
            ),
            "short_factor, long_factor: expected divisors > 0, got 0",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call()
