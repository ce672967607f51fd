"""The cache codec against bit arithmetic in Python, and its layout byte for byte."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from pagedattn import codec, paged_attention
from pagedattn.dtypes import BFLOAT16, FLOAT8E4M3FN, FLOAT16, FLOAT32, INT4, INT8
from tests.support.compare import assert_same_bits, bits
from tests.support.naive import code_of, float_of

f32, f64 = np.float32, np.float64
ONE = np.ones(1, f32)
FLOATING = [FLOAT16, BFLOAT16, FLOAT32, FLOAT8E4M3FN]


def neighbourhood(values: np.ndarray) -> np.ndarray:
    """Values, the middles between them, and what lies just beside both, with both signs."""
    middles = (values[:-1] + values[1:]) / 2
    points = np.concatenate([values, middles])
    near = [np.nextafter(points, side) for side in (-np.inf, np.inf)]
    nearer = [points * (1 + side * 2.0**-40) for side in (-1, 1)]
    points = np.unique(np.concatenate([points, *near, *nearer]))
    return np.concatenate([-points[::-1], points])


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_decoding_agrees_with_the_bits(dtype):
    if dtype.bits == 32:
        codes = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    else:
        codes = np.arange(2**dtype.bits, dtype={8: np.uint8, 16: np.uint16}[dtype.bits])
    got = codec.decode(codes.view(dtype.numpy), dtype)
    want = [float_of(int(code), dtype.numpy.name) for code in codes]
    assert np.array_equal(got, np.array(want, f32), equal_nan=True)


@pytest.mark.parametrize("compute", [f32, f64])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_encoding_rounds_once_to_the_nearest_even(dtype, compute):
    """At every code of 8 bits and at many of more, at every tie, and a hair beside both."""
    top = {8: 0x7E, 16: 0x7C00 if dtype is FLOAT16 else 0x7F80, 32: 0x7F800000}[dtype.bits]
    rng = np.random.default_rng(1)
    codes = np.unique(np.concatenate([[0, 1, 2, top - 2, top - 1], rng.integers(0, top, 300)]))
    codes = np.unique(np.concatenate([codes, codes + 1]).clip(0, top))
    values = np.array([float_of(int(code), dtype.numpy.name) for code in codes])
    values = neighbourhood(values[np.isfinite(values)])
    with np.errstate(over="ignore"):
        values = values.astype(compute)
    got = bits(codec.encode(values, dtype, ONE))
    low, high = dtype.code_range or (-math.inf, math.inf)
    want = [code_of(min(max(float(x), low), high), dtype.numpy.name) for x in values]
    assert got.tolist() == want


def test_a_float64_just_beside_a_tie_is_not_rounded_twice():
    """By way of float32, 1 + 2**-8 + 2**-40 would first become the tie, then 1."""
    for dtype, tie in ((BFLOAT16, 2.0**-8), (FLOAT8E4M3FN, 2.0**-4)):
        x = np.array([1 + tie + 2.0**-40, 1 + tie, 1 + tie - 2.0**-40, 1 + 3 * tie - 2.0**-40])
        got = codec.encode(x, dtype, ONE).astype(f64)
        assert got.tolist() == [1 + 2 * tie, 1, 1, 1 + 2 * tie]


def test_float8_saturates_and_keeps_nan():
    x = np.array([448, 449, 464, 480, 1000, 65504, np.inf, np.nan], f32)
    got = bits(codec.encode(np.concatenate([x, -x]), FLOAT8E4M3FN, ONE))
    assert got[:7].tolist() == [0x7E] * 7
    assert got[8:15].tolist() == [0xFE] * 7
    assert {got[7] & 0x7F, got[15] & 0x7F} == {0x7F}
    assert bits(codec.encode(np.array([1, -1], f32), FLOAT8E4M3FN, np.array([0.001], f32))).tolist() == [0x7E, 0xFE]


def test_float8_is_e4m3fn():
    assert bits(codec.encode(np.ones(1, f32), FLOAT8E4M3FN, ONE)).tolist() == [0x38]
    assert codec.decode(np.array([0x38], np.uint8).view(ml_dtypes.float8_e4m3fn), FLOAT8E4M3FN, ONE).tolist() == [1.0]


def test_int8_rounds_half_to_even_and_saturates():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.999, 126.5, 127.5, -128.5, 200, -200], f32)
    want = [0, 2, 2, 0, -2, -2, 1, 126, 127, -128, 127, -128]
    assert codec.encode(x, INT8, ONE).tolist() == want


def test_int8_of_what_is_no_number():
    x = np.array([np.nan, np.inf, -np.inf], f32)
    assert codec.encode(x, INT8, ONE).tolist() == [0, 127, -128]
    assert codec.unpack_int4(codec.encode(np.resize(x, 4), INT4, ONE)).tolist() == [0, 7, -8, 0]


def test_division_comes_before_rounding():
    """x / scale, not x * (1 / scale): with some scales they round to different codes."""
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.01, 0.1, 2000).astype(f32)
    x = (rng.integers(-120, 120, 2000) + f32(0.5)) * scale
    got = codec.encode(x, INT8, scale)
    want = [int(np.rint(a / b)) for a, b in zip(x, scale, strict=True)]
    assert got.tolist() == want
    assert (got != np.rint(x * (1 / scale))).any(), "the example tells the two apart"


@pytest.mark.parametrize("head_size", [64, 72, 96, 7])
def test_int4_layout(head_size):
    """Element 2i in the low nibble, stored as code + 8; rows of odd width end in code 0."""
    codes = np.resize(np.arange(-8, 8), (3, head_size))
    packed = codec.encode(codes.astype(f32), INT4, ONE)
    assert packed.shape == (3, (head_size + 1) // 2)
    assert packed.dtype == np.uint8
    for row, raw in zip(codes, packed, strict=True):
        nibbles = list(itertools.chain.from_iterable((byte & 15, byte >> 4) for byte in raw.tolist()))
        assert nibbles[:head_size] == [int(code) + 8 for code in row]
        assert nibbles[head_size:] == [8] * (head_size % 2)
    assert np.array_equal(codec.unpack_int4(packed, head_size), codes)
    assert np.array_equal(codec.decode(packed, INT4, ONE, head_size), codes)


def test_int4_rounds_half_to_even_and_saturates():
    x = np.array([7.5, -8.5, 100, -100, 6.5, 0.5, 1.5, -0.5], f32)
    assert codec.unpack_int4(codec.encode(x, INT4, ONE)).tolist() == [7, -8, 7, -8, 6, 0, 2, 0]


@pytest.mark.parametrize("dtype", [INT8, FLOAT8E4M3FN, INT4], ids=str)
def test_every_code_survives_a_round_trip(dtype):
    if dtype is INT4:
        codes = np.arange(256, dtype=np.uint8)
    else:
        codes = np.array([c for c in range(256) if dtype is INT8 or c & 0x7F != 0x7F], np.uint8).view(dtype.numpy)
    scale = np.array([0.037], f32)
    assert_same_bits(codec.encode(codec.decode(codes, dtype, scale), dtype, scale), codes)


@pytest.mark.parametrize("dtype", [INT8, FLOAT8E4M3FN, INT4], ids=str)
def test_scales_broadcast_by_head_and_channel(dtype):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 2, 16)).astype(f32)
    scale = rng.uniform(0.05, 0.4, (2, 16)).astype(f32)
    stored = codec.encode(x, dtype, scale)
    got = codec.decode(stored, dtype, scale, 16)
    for h in range(2):
        for c in range(16):
            alone = codec.encode(np.repeat(x[:, h, c, None], 2, -1), dtype, scale[h, c, None])
            assert np.array_equal(codec.decode(alone, dtype, scale[h, c, None], 2)[:, 0], got[:, h, c])


def test_plain_types_are_stored_as_they_are():
    x = np.array([1e5, -1e5, 1e-9, np.nan, -0.0], f32)
    got = codec.encode(x, FLOAT16)
    assert got[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(got[3])
    assert np.signbit(got[4])
    assert_same_bits(codec.encode(x, FLOAT32), x)


@pytest.mark.parametrize("dtype", [INT8, INT4], ids=str)
@pytest.mark.parametrize("head_size", [64, 72])
def test_keys_and_values_of_the_operator_are_coded_alike_in_every_lane(dtype, head_size):
    """Ties and ends of the range in each channel of K and of V, two tokens in one block in one call."""
    pattern = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.999, 126.5, 127.5, -128.5, 200, -200, 7.5, -8.5]
    x = np.resize(np.array(pattern, np.float16), (2, head_size))
    width = dtype.storage_elements(head_size)
    caches = [np.full((1, 16, 1, width), 0x11, np.uint8).view(dtype.numpy) for _ in range(2)]
    name = "int4" if dtype is INT4 else ""
    paged_attention(
        x,
        x,
        x,
        *caches,
        np.array([0, 2], np.int32),
        np.array([5], np.int32),
        np.array([[0]], np.int32),
        k_scale=ONE,
        v_scale=ONE,
        num_heads=1,
        kv_num_heads=1,
        k_quant_type="PER_TENSOR",
        v_quant_type="PER_TENSOR",
        k_cache_dtype=name,
        v_cache_dtype=name,
    )
    want = np.clip(np.rint(x.astype(f64)), *dtype.code_range).astype(np.int8)
    for cache in caches:
        assert (cache[0, :5].view(np.uint8) == 0x11).all()
        assert (cache[0, 7:].view(np.uint8) == 0x11).all()
        got = codec.unpack_int4(cache[0, 5:7, 0]) if dtype is INT4 else cache[0, 5:7, 0]
        assert np.array_equal(got, want)
