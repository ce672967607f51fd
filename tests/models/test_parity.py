"""Paged models against unmodified ones: logits, cache contents, quantized caches, half precision, the GPU."""

import pytest
import torch

from .driver import (
    PagedRun,
    cache_rows,
    chunked_prompts,
    difference,
    excess,
    logits_of,
    placed,
    quantize,
    reference,
    references,
    relative_error,
    rounded_reference,
    rounded_weights_logits,
    sequences_of,
    spread,
    whole_prompts,
)
from .families import FAMILIES

# Of the largest logit. Sums of float32 in another order; every trap in test_traps.py is a thousand times larger.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("schedule", [whole_prompts, chunked_prompts])
def test_logits(name, schedule):
    run = PagedRun(name)
    got = run.run(schedule(run.family.prompts))
    assert difference(got, logits_of(name)) <= TOLERANCE * spread(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_cache_contents(name):
    run = PagedRun(name)
    run.run(chunked_prompts(run.family.prompts))
    for sequence, expected in enumerate(references(name)):
        for layer in range(len(run.layers)):
            want = cache_rows(name, expected.keys[layer], expected.values[layer])
            for got_rows, want_rows in zip(run.rows(layer, sequence), want, strict=True):
                if want_rows is not None:
                    near = TOLERANCE * float(want_rows.abs().max())
                    torch.testing.assert_close(got_rows, want_rows, rtol=0, atol=near)


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_loses_no_more_than_the_unmodified_model(name, half):
    """Both are compared with float32 on the rounded weights; see `excess`."""
    run = PagedRun(name, half)
    got = run.run(chunked_prompts(run.family.prompts))
    naive = [reference(placed(name, half), tokens).logits for tokens in sequences_of(name)]
    assert excess(got, naive, rounded_weights_logits(name, half)) <= 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["int8", "float8e4m3fn"])
@pytest.mark.parametrize("quant_type", ["PER_TENSOR", "PER_CHANNEL"])
def test_a_quantized_cache_costs_what_its_rounding_costs(name, dtype, quant_type):
    """The unmodified model with its own cache rounded the same way gives the same logits, and so the same error."""
    quantization, reports = quantize(name, dtype, quant_type)
    run = PagedRun(name, quantization=quantization)
    got = run.run(chunked_prompts(run.family.prompts))
    rounded = rounded_reference(name, quantization)
    error = relative_error(got, logits_of(name))
    # A value half way between two codes may be rounded to either: one code in thousands.
    assert relative_error(got, rounded) <= 0.05 * error
    # The calibration foresees the error of a value; two layers of random weights amplify it 1.6 to 4 times.
    assert error <= 6 * max(report.relative_error for report in reports)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["int8", "float8e4m3fn"])
def test_half_precision_with_a_quantized_cache(half, name, dtype):
    quantization, _ = quantize(name, dtype, "PER_CHANNEL")
    run = PagedRun(name, half, quantization)
    got = run.run(chunked_prompts(run.family.prompts))
    naive = rounded_reference(name, quantization, half)
    assert excess(got, naive, rounded_weights_logits(name, half, quantization)) <= 1
