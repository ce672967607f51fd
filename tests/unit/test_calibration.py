"""Calibrated scales, and the errors reported with them."""

import numpy as np
import pytest

from pagedattn import InvalidArgumentError, calibrate, codec
from pagedattn.dtypes import BY_NAME

DTYPES = ["int8", "float8e4m3fn", "int4"]
LARGEST = {"int8": 127, "float8e4m3fn": 448, "int4": 7}


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    spread = np.exp(rng.standard_normal((1, 2, 16)))  # channels of different size
    return (rng.standard_normal((400, 2, 16)) * spread).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_absmax_puts_the_largest_code_on_the_largest_magnitude(samples, dtype):
    result = calibrate(samples, dtype)
    assert result.scale.dtype == np.float32
    np.testing.assert_allclose(result.scale, [np.abs(samples).max() / LARGEST[dtype]], rtol=1e-6)
    assert result.clipped == 0
    per_channel = calibrate(samples, dtype, "PER_CHANNEL")
    np.testing.assert_allclose(per_channel.scale[:, 0], np.abs(samples).max(0) / LARGEST[dtype], rtol=1e-6)
    assert per_channel.scale.shape == (2, 1, 16)
    assert per_channel.clipped == 0


@pytest.mark.parametrize("quant_type", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reported_error_is_that_of_the_cache(samples, dtype, quant_type):
    result = calibrate(samples, dtype, quant_type)
    scale = result.scale if quant_type == "PER_TENSOR" else result.scale[:, 0]
    restored = codec.decode(codec.encode(samples, BY_NAME[dtype], scale), BY_NAME[dtype], scale)
    error = restored.astype(np.float64) - samples
    assert result.max_error == pytest.approx(np.abs(error).max())
    assert result.rms_error == pytest.approx(np.sqrt((error**2).mean()))
    assert result.relative_error == pytest.approx(np.linalg.norm(error) / np.linalg.norm(samples))


def test_the_error_of_int8_is_that_of_rounding():
    samples = np.random.default_rng(1).uniform(-1, 1, (1000, 1, 8))
    result = calibrate(samples, "int8")
    step = float(result.scale[0])
    assert result.max_error <= step / 2 * (1 + 1e-5)
    assert result.rms_error == pytest.approx(step / np.sqrt(12), rel=0.02)


def test_a_scale_for_each_channel_loses_less(samples):
    for dtype in ("int8", "int4"):
        assert calibrate(samples, dtype, "PER_CHANNEL").rms_error < 0.7 * calibrate(samples, dtype).rms_error


def test_a_percentile_clips_outliers_and_resolves_the_rest():
    samples = np.random.default_rng(2).standard_normal((1000, 1, 8)).astype(np.float32)
    samples[0, 0, 0] = 50
    absmax, clipped = calibrate(samples, "int4"), calibrate(samples, "int4", method="percentile", percentile=99.9)
    assert clipped.scale < absmax.scale / 5
    assert 0 < clipped.clipped < 0.002
    assert clipped.max_error > absmax.max_error
    rest = samples[1:]
    errors = [
        np.abs(codec.decode(codec.encode(rest, BY_NAME["int4"], c.scale), BY_NAME["int4"], c.scale) - rest).mean()
        for c in (absmax, clipped)
    ]
    assert errors[1] < errors[0] / 5
    assert calibrate(samples, "int4", method="percentile", percentile=100).scale == absmax.scale


@pytest.mark.parametrize("quant_type", ["PER_TENSOR", "PER_CHANNEL"])
def test_channels_without_samples_get_a_usable_scale(quant_type):
    zeros = calibrate(np.zeros((4, 1, 8)), "int8", quant_type)
    assert (np.isfinite(zeros.scale) & (zeros.scale > 0)).all()
    assert zeros.relative_error == 0
    samples = np.zeros((4, 1, 8))
    samples[..., 0] = 127.0
    result = calibrate(samples, "int8", quant_type)
    np.testing.assert_allclose(result.scale, 1.0)
    tiny = calibrate(np.full((2, 1, 8), 1e-44), "float8e4m3fn", quant_type)
    assert (np.isfinite(tiny.scale) & (tiny.scale > 0)).all()


def test_a_mostly_empty_tensor_is_scaled_by_what_there_is():
    samples = np.zeros((1000, 1, 8))
    samples[0, 0, 0] = 127.0
    np.testing.assert_allclose(calibrate(samples, "int8", method="percentile", percentile=50).scale, 1.0)


def test_the_report_reads_as_one_line(samples):
    assert str(calibrate(samples, "int8")).startswith("PER_TENSOR: relative rms error ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "uint4"}, r"dtype: expected one of int8, float8e4m3fn, int4, got 'uint4'"),
        ({"quant_type": "NONE"}, r"quant_type: expected PER_TENSOR or PER_CHANNEL, got 'NONE'"),
        ({"method": "mse"}, r"method: expected absmax or percentile, got 'mse'"),
        ({"percentile": 0}, r"percentile: expected a value in \(0, 100\], got 0"),
        ({"samples": np.ones((2, 3))}, r"samples: expected shape \(tokens, kv_num_heads, head_size\).*got \(2, 3\)"),
        ({"samples": np.full((2, 1, 8), np.nan)}, r"samples: expected finite values, got 16 others"),
        ({"samples": np.full((2, 1, 8), 1e300)}, r"samples: expected finite values, got 16 others"),
        ({"samples": np.ones((2, 1, 8), complex)}, r"samples: expected a real floating type, got complex128"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        calibrate(**{"samples": np.ones((2, 1, 8)), "dtype": "int8", **arguments})
