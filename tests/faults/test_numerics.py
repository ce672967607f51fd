"""Range and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, FLOAT16, FLOAT32

from .scene import Scene, assert_close, assert_same_bytes

# A key's scale, and what one key is raised to, by the next code at least.
LARGER = {"plain": (1, 201), "int8": (2, 202), "fp8": (1, 224), "int4": (40, 240)}


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 4], ids=["decode", "prefill"])
def test_large_products_do_not_overflow(target, io, unit_cache, q_len, splits):
    """q . k of 5 million is beyond float16; equal keys weigh the same, and a slightly larger one takes everything."""
    k_scale, larger = LARGER[unit_cache.name]
    kind = unit_cache.with_scales(k_scale, 1)
    scene = Scene([7], num_heads=1, head_size=128, io=io, cache=kind, query=200, key=200, value=lambda b, pos, h: pos)
    assert (target.run(scene.call([7 - q_len])).output[-1] == 3).all()
    scene.key[0][5] = larger
    output = target.run(scene.call([7 - q_len])).output[-1]
    if target.backend == "flash" and target.arch == 90:
        # Hopper's kernel takes the key's score less itself by a fused product, which is off by a rounding of 650
        # thousand, and the weight that comes of it is rounded to the io type.
        assert np.abs(output.astype(np.float64) - 5).max() <= 5 * 2.0 ** -(7 if io is BFLOAT16 else 10)
    else:
        assert (output == 5).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_of_either_sign_stay_finite(target, io, sign, cache, splits):
    """Scores around plus or minus 100 thousand, a few of which are the largest."""
    scene = Scene([40], num_heads=2, head_size=64, io=io, cache=cache, seed=3)
    scene.query[0][:] = np.abs(scene.query[0]) * 1000
    scene.key[0][:] = sign * np.abs(scene.key[0])
    outcome = target.run(scene.call([36]), return_lse=True)
    assert np.isfinite(outcome.output.astype(np.float64)).all()
    assert np.isfinite(outcome.lse).all()


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
def test_probabilities_of_large_scores_are_finite(target, io):
    scene = Scene([9], num_heads=1, head_size=128, io=io, query=200, key=200)
    outcome = target.run(scene.call([8]).change(qk_output=2))
    np.testing.assert_allclose(outcome.output_qk, 1 / 9, rtol=1e-6)
    scene.key[0][4] = 201
    outcome = target.run(scene.call([8]).change(qk_output=2))
    assert outcome.output_qk[0, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_values_near_the_edge_of_the_type_stay_finite(target):
    """A mean of values near float16's largest must not pass through a float16 sum."""
    scene = Scene([40], key=0, value=65504)
    assert (target.run(scene.call([37])).output == 65504).all()


def crowd(length, others, place, size, **kwargs):
    """A batch of decode steps of which row ``place`` is always the same sequence."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, others, size - 1).tolist()
    lengths.insert(place, length)
    scene = Scene(lengths, num_heads=4, kv_num_heads=2, head_size=32, seed=7, **kwargs)
    alone = Scene([length], num_heads=4, kv_num_heads=2, head_size=32, seed=11, **kwargs)
    for history, own in ((scene.query, alone.query), (scene.key, alone.key), (scene.value, alone.value)):
        history[place] = own[0]
    return scene, alone


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
def test_a_row_hardly_depends_on_its_batch_mates(target, io):
    """Repeats are bitwise equal; other company, which may change the number of splits, costs two roundings at most."""
    length, others, repeats = (3000, 8000, 20) if target.on_gpu else (200, 100, 3)
    results = []
    for place, size in ((None, 1), (0, 32), (31, 32), (5, 64)):
        if target.is_emulated and size > 1:
            size, place = 6, place % 6
        scene, alone = crowd(length, others, place or 0, max(size, 2), io=io)
        scene = scene if size > 1 else alone
        call = scene.call([n - 1 for n in scene.lengths])
        runs = [target.run(call).output[place or 0] for _ in range(repeats)]
        for other in runs[1:]:
            assert_same_bytes(other, runs[0])
        results.append(runs[0])
    for other in results[1:]:
        assert_close(other, results[0], io, roundings=2)


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 9])
def test_repeats_are_bitwise_equal(target, cache, q_len):
    scene = Scene([150, 40, 9], num_heads=4, kv_num_heads=2, cache=cache)
    call = scene.call([n - q_len for n in scene.lengths])
    first = target.run(call, return_lse=True)
    for _ in range(3):
        again = target.run(call, return_lse=True)
        assert_same_bytes(again.output, first.output)
        assert_same_bytes(again.lse, first.lse)
        assert_same_bytes(again.key_cache, first.key_cache)


def test_float32_is_not_rounded_to_half(target):
    outcome = target.check(Scene([20], io=FLOAT32).call([17]))
    assert np.any(outcome.output != outcome.output.astype(np.float16).astype(np.float32))
