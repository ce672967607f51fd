"""The LATENT layout: one cache whose rows are keys and, in their first channels, values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, FLOAT16

from .scene import CACHES, UNIT_CACHES, Scene, assert_close, assert_same_bytes, expected

# Head and value sizes; the first is that of the models that have such a cache.
SIZES = [(576, 512), (320, 256), (72, 64), (40, 16), (64, 64)]
LATENT_CACHES = ["plain", "int8", "int8-channel", "fp8", "fp8-channel", "int4", "int4-channel"]


def latent(lengths, head_size=576, v_head_size=512, **kwargs):
    return Scene(lengths, kv_num_heads=1, head_size=head_size, v_head_size=v_head_size, **kwargs)


@pytest.mark.parametrize("batch", [([1, 1, 1], [20, 0, 65]), ([4, 1, 0], [20, 7, 9]), ([17], [40])], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_latent_attention_of_every_size(latent_target, io, size, batch, splits):
    q_lens, pasts = batch
    scene = latent([q + past for q, past in zip(q_lens, pasts, strict=True)], *size, num_heads=4, io=io)
    latent_target.check(scene.call(pasts, q_lens), return_lse=True)


@pytest.mark.parametrize("kind", LATENT_CACHES)
def test_latent_attention_with_every_cache(latent_target, io, kind, splits):
    scene = latent([40, 9, 1], num_heads=4, io=io, cache=CACHES[kind])
    latent_target.check(scene.call([38, 8, 0]), return_lse=True)


def test_the_default_scale_is_refused(latent_target):
    """1 / sqrt(head_size) is that of the absorbed width, and wrong for the model."""
    call = latent([4], num_heads=2).call([3])
    latent_target.refuses(call.change(scale=None), "^scale: required when v_head_size")
    latent_target.refuses(call.change(scale=0.0), "^scale: required when v_head_size")


def test_the_given_scale_is_applied_once(latent_target, io, splits):
    """Scores 96 / sqrt(192) and 0: 0.99902 of the weight; 0.98201 with the width of the cache."""
    scene = latent([2], num_heads=2, io=io, query=lambda b, pos, h: np.eye(576)[575] * 8, key=0)
    scene.key[0][0, :, 575] = 12
    scene.key[0][0, :, :512] = 1
    outcome = latent_target.check(scene.call([1]).change(scale=1 / math.sqrt(192)), return_lse=True)
    assert_close(outcome.output, np.full((1, 2, 512), 0.99902), io, roundings=1)


@pytest.mark.parametrize("q_len", [1, 3], ids=["decode", "prefill"])
def test_absorbed_attention_equals_the_plain_one(latent_target, q_len):
    """Keys W_UK c and k_rope of 192 channels, values W_UV c of 128, against their absorbed form."""
    heads, rank, nope, rope, v_size, length = 4, 512, 128, 64, 128, 30
    rng = np.random.default_rng(0)
    up_k = rng.standard_normal((heads, nope, rank)) / math.sqrt(rank)
    up_v = rng.standard_normal((heads, v_size, rank)) / math.sqrt(rank)
    scene = latent([length], num_heads=heads)
    rows = scene.key[0][:, 0].astype(np.float64)
    content, k_rope = rows[:, :rank], rows[:, rank:]
    q_nope, q_rope = rng.standard_normal((length, heads, nope)), rng.standard_normal((length, heads, rope))
    scene.query[0][...] = np.concatenate([np.einsum("thn,hnr->thr", q_nope, up_k), q_rope], axis=-1)
    scale = 1 / math.sqrt(nope + rope)
    outcome = latent_target.run(scene.call([length - q_len]).change(scale=scale))
    got = np.einsum("thr,hvr->thv", outcome.output.astype(np.float64), up_v)
    keys = np.concatenate([np.einsum("hnr,kr->khn", up_k, content), np.repeat(k_rope[:, None], heads, 1)], axis=-1)
    values = np.einsum("hvr,kr->khv", up_v, content)
    for j in range(q_len):
        own = length - q_len + j
        query = np.concatenate([q_nope[own], q_rope[own]], axis=-1)
        scores = scale * np.einsum("hd,khd->hk", query, keys[: own + 1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        want = np.einsum("hk,khv->hv", weights / weights.sum(axis=1, keepdims=True), values[: own + 1])
        np.testing.assert_allclose(got[j], want, atol=4e-3 * np.abs(want).max())


@pytest.mark.parametrize("num_heads", [1, 2, 8, 16, 17, 20, 40, 64, 128])
def test_any_number_of_heads(latent_target, num_heads):
    """A kernel made for 128 heads would read the next token's rows; what lies behind the query is NaN."""
    scene = latent([20, 5, 40, 1], num_heads=num_heads, seed=num_heads, key=lambda b, pos, h: (b + 1) / 4)
    for b, query in enumerate(scene.query):
        query[...] = query / 8 + (b + 1) / 64
    call = scene.call([19, 4, 39, 0])

    def followed_by_nan(x):
        whole = np.full((x.shape[0] + 4, x.shape[1]), np.nan).astype(x.dtype)
        whole[: x.shape[0]] = x
        return latent_target.typed(latent_target.upload(whole)[: x.shape[0]], x.dtype)

    outcome = latent_target.run(call, place={"query": followed_by_nan})
    assert (outcome.output == (np.arange(4)[:, None, None] + 1) / 4).all()
    latent_target.check(call, return_lse=True)


def test_values_end_before_the_rotary_channels(latent_target, io, splits):
    """Scores 2 and 0: 0.8808; 0.8000 without the change of base; the last 64 channels hold 10 thousand."""
    scene = latent([2], num_heads=2, io=io, query=0, key=0)
    scene.query[0][:, :, 0] = 2
    scene.key[0][0, :, :512] = 1
    scene.key[0][:, :, 512:] = 1e4
    outcome = latent_target.check(scene.call([1]).change(scale=1.0), return_lse=True)
    assert outcome.output.shape == (1, 2, 512)
    assert_close(outcome.output, np.full((1, 2, 512), 0.8808), io, roundings=1)


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("num_heads", [5, 16, 128])
@pytest.mark.parametrize("q_len", [1, 4])
def test_large_products_do_not_overflow(latent_target, io, kind, num_heads, q_len, splits):
    """Scores of half a million: equal keys weigh the same, and one that is larger by the next code takes everything."""
    shown = slice(256, 512)  # channels that no query looks at

    def row(pos, large):
        x = np.full((576,), large, np.float64)
        x[shown] = 2 * pos
        return x

    scene = latent([7], num_heads=num_heads, io=io, cache=UNIT_CACHES[kind].with_scales(2 if kind == "int8" else 1, 1))
    scene.query[0][...] = row(0, 192)
    scene.key[0][:, 0] = [row(pos, 192) for pos in range(7)]
    output = latent_target.run(scene.call([7 - q_len]), return_lse=True).output[-1:, :, shown]
    assert_close(output, np.full(output.shape, 6.0), io, roundings=1)
    scene.key[0][5, 0] = row(5, 208)
    output = latent_target.run(scene.call([7 - q_len]), return_lse=True).output[-1:, :, shown]
    assert_close(output, np.full(output.shape, 10.0), io, roundings=1)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotating_the_suffix_inside_equals_rotating_before(latent_target, io, interleaved):
    scene = latent([20, 5], num_heads=4, io=io)
    pasts = [17, 4]
    angles = np.arange(24)[:, None] * 0.5 ** np.arange(32)
    cos, sin = np.cos(angles).astype(io.numpy), np.sin(angles).astype(io.numpy)
    inside = scene.call(pasts).change(
        do_rotary=1, rotary_offset=512, rotary_interleaved=interleaved, cos_cache=cos, sin_cache=sin
    )
    position = np.array([17, 18, 19, 4])
    first = 512 + (np.arange(0, 64, 2) if interleaved else np.arange(32))
    second = first + (1 if interleaved else 32)

    def rotated(x):
        x = x.reshape(4, -1, 576).astype(np.float32)
        c, s = (table[position][:, None].astype(np.float32) for table in (cos, sin))
        y = x.copy()
        y[..., first] = x[..., first] * c - x[..., second] * s
        y[..., second] = x[..., second] * c + x[..., first] * s
        return y.astype(io.numpy).reshape(4, -1)

    before = scene.call(pasts).change(query=rotated(inside["query"]), key=rotated(inside["key"]))
    got, want = latent_target.run(inside), latent_target.run(before)
    assert_same_bytes(got.key_cache, want.key_cache)
    assert_same_bytes(got.output, want.output)


REFUSED = {
    "value": {"value": np.zeros((1, 576), np.float16)},
    "value_cache": {"value_cache": np.zeros((3, 16, 1, 576), np.float16)},
    "no key": {"key": None},
    "v_scale": {"v_scale": np.ones(1, np.float32)},
    "v_quant_type": {"v_quant_type": "PER_TENSOR"},
    "v_cache_dtype": {"v_cache_dtype": "float16"},
    "head_sink": {"head_sink": np.zeros(2, np.float16)},
    "norm weights": {"q_norm_weight": np.ones(576, np.float16), "k_norm_weight": np.ones(576, np.float16)},
    "v_head_size too large": {"v_head_size": 577},
    "two key heads": {"kv_num_heads": 2},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_there_is_refused(latent_target, what):
    name = {
        "no key": "key",
        "norm weights": "q_norm_weight",
        "v_head_size too large": "v_head_size",
        "two key heads": "kv_num_heads",
    }
    call = latent([2], num_heads=2).call([1])
    latent_target.refuses(call.change(**REFUSED[what]), f"^{name.get(what, what)}: ")


@pytest.mark.parametrize(
    "extras",
    [
        {"local_window_size": 5},
        {"softcap": 3.0},
        {"is_causal": 0},
        {"query_positions": np.array([36, 2, 38, 8], np.int32)},
        {"attention_bias": np.random.default_rng(0).standard_normal((2, 4, 3, 48)).astype(np.float16)},
        {"qk_output": 2},
    ],
    ids=lambda extras: next(iter(extras)),
)
def test_what_touches_a_score_works_there_too(latent_target, extras, splits):
    scene = latent([40, 9], 72, 64, num_heads=4)
    latent_target.check(scene.call([37, 8]).change(**extras), return_lse=True)


@pytest.mark.parametrize("io", [FLOAT16, BFLOAT16], ids=str, indirect=True)
@pytest.mark.parametrize("unused", ["nan", "inf"])
def test_junk_behind_a_latent_sequence_does_not_leak(latent_target, io, unused, splits):
    for length in (1, 16, 33, 65):
        scene = latent([length, 3], num_heads=2, io=io, unused=unused, seed=length)
        latent_target.check(scene.call([length - 1, 2]))


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hidden_by", ["window", "causality", "positions"])
def test_junk_that_some_tokens_see_does_not_leak_to_others(latent_target, what, hidden_by, splits):
    """All tokens of a sequence share a tile of rows, and the product with a value that is no number is none."""
    if hidden_by == "window":
        bad, rows, changes = np.array([6, 7]), [2, 3, 4], {"local_window_size": 30}
    elif hidden_by == "causality":
        bad, rows, changes = np.array([38, 39]), [0, 1, 2], {}
    else:
        bad, rows = np.array([39]), [0, 2, 3, 4]
        changes = {"query_positions": np.array([35, 39, 36, 37, 38], np.int32)}
    scene = latent([40], num_heads=4)
    call = scene.call([35]).change(**changes)
    clean = expected(call).output
    new, cache = call["key"].copy(), call["key_cache"].copy()
    new[bad[bad >= 35] - 35] = what
    cache.reshape(-1, 1, 576)[scene.slots(0, bad[bad < 35])] = what
    outcome = latent_target.run(call.change(key=new, key_cache=cache))
    assert_close(outcome.output[rows], clean[rows], FLOAT16)


def test_latent_rows_that_see_nothing_are_zero(latent_target, splits):
    scene = latent([20, 5], num_heads=2)
    call = scene.call([19, 3])
    table = call["block_table"].copy()
    table[0] = -1
    outcome = latent_target.check(call.change(block_table=table), return_lse=True)
    assert not outcome.output[0].any()
