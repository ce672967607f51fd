"""What docs/mla.md concludes about quantized latent caches, on short contexts and few heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import study_latent_cache as study
from scripts.study_latent_cache import BASE, BF16, FP8, FP8_PAIR, INT8, INT8_CHANNEL, INT8_PAIR, INT8_PARTS, Storage

SMALL = replace(BASE, keys=512, heads=16)


def output(storage: Storage, **assumptions: float) -> float:
    """Relative rms error of the heads' outputs."""
    return study.bench(replace(SMALL, **assumptions)).errors(storage).output


@pytest.mark.parametrize("assumptions", [{}, {"strength": 128.0}, {"rope_ratio": 100.0}], ids=str)
def test_fp8_needs_one_scale_whatever_the_channels(assumptions):
    tensor, pair = (output(x, **assumptions) for x in (FP8, FP8_PAIR))
    assert 0.03 < tensor < 0.07
    assert tensor < 1.4 * pair


@pytest.mark.parametrize("assumptions", [{}, {"strength": 128.0}, {"rope_ratio": 100.0}], ids=str)
def test_int8_needs_a_scale_for_each_channel_and_is_better_then(assumptions):
    assert 2 * output(INT8_PAIR, **assumptions) < output(FP8, **assumptions)
    assert output(INT8, **assumptions) > 0.25
    assert output(INT8_PARTS, **assumptions) > 5 * output(INT8_PAIR, **assumptions)


def test_sixteen_bits_are_far_better_than_eight():
    assert 4 * output(BF16) < output(INT8_PAIR)


def test_a_percentile_clips_what_matters():
    assert output(replace(FP8, percentile=99.9)) > 3 * output(FP8)
    assert output(replace(INT8_PAIR, percentile=99.0)) > 3 * output(INT8_PAIR)


def test_headroom_is_free_in_fp8_only():
    assert output(replace(FP8, headroom=8.0)) < 1.15 * output(FP8)
    assert output(replace(INT8_PAIR, headroom=8.0)) > 5 * output(INT8_PAIR)


def test_rotary_channels_have_to_be_calibrated_over_all_positions_or_by_pair():
    channel, pair = (
        [output(replace(x, calibrated_up_to=share), rope_constant=4.0) for share in (1.0, 1 / 64)]
        for x in (INT8_CHANNEL, INT8_PAIR)
    )
    assert channel[1] > 2 * channel[0]
    assert pair[1] < 1.1 * pair[0]


def test_the_rotary_part_in_16_bits_gains_most_where_it_decides_the_scores():
    kept = replace(FP8, rope_16_bits=True)
    assert 0.7 * output(FP8) < output(kept) < output(FP8)
    assert output(kept, rope_share=0.8) < 0.6 * output(FP8, rope_share=0.8)


def test_the_error_of_a_score_is_a_share_of_their_spread():
    """Whatever the heads are, and as in a cache of their own keys and values."""
    flat, sharp = (study.bench(replace(SMALL, score_spread=x)).errors(FP8) for x in ((0.3, 1.0), (5.0, 12.0)))
    assert flat.score == pytest.approx(sharp.score, rel=0.1)
    assert flat.output < sharp.output / 3
    shared, own = study.bench(SMALL).errors(FP8), study.bench(SMALL).errors_of_heads("float8e4m3fn")
    assert own.score == pytest.approx(shared.score, rel=0.15)
    assert own.output == pytest.approx(shared.output, rel=0.3)


def test_the_error_does_not_grow_with_the_context():
    short, long = (study.bench(replace(SMALL, keys=keys)).errors(FP8) for keys in (256, 2048))
    assert long.score < 1.1 * short.score
    assert long.output < 1.3 * short.output


def test_tables_are_whole():
    """Every line of a table has as many cells as its header."""
    text = study.every_storage(SMALL)
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert text.count("\n") == 1 + len(study.STORAGES) + 2


def test_the_examples_of_the_page_run():
    page = (Path(study.__file__).resolve().parents[1] / "docs" / "mla.md").read_text()
    names: dict[str, Any] = {}
    for code in page.split("```python\n")[1:]:
        exec(code.partition("```")[0], names)
    assert names["heads"].shape == (2, 16 * 128)
    assert names["k"].relative_error < 0.01
    assert names["small"].any()
