"""Multi-head latent attention: kv_cache_layout = LATENT."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from pagedattn import InvalidArgumentError, codec, paged_attention
from pagedattn.backends import numpy_reference
from pagedattn.dtypes import FLOAT8E4M3FN, INT4, INT8
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits, verify
from tests.support.oracle import problem_of

f32, f64, i32 = np.float32, np.float64, np.int32
IO = [np.float16, ml_dtypes.bfloat16, np.float32]


def name(dtype) -> str:
    return np.dtype(dtype).name


def batch(*lengths: tuple[int, int], block_size: int = 16) -> dict[str, np.ndarray]:
    """Arrays of a ragged batch on shuffled blocks, for caches of `pool(lengths)` blocks."""
    past, new = np.array(lengths).T
    blocks = -(-(past + new) // block_size)
    ids = np.random.default_rng(5).permutation(int(blocks.sum()))
    table = np.full((len(lengths), int(blocks.max())), -1, i32)
    table[np.arange(table.shape[1]) < blocks[:, None]] = ids
    return {
        "cumulative_sequence_length": np.cumsum([0, *new]).astype(i32),
        "past_seqlens": past.astype(i32),
        "block_table": table,
    }


# ---- absorbed and not --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    heads: int
    nope: int
    rope: int
    value: int
    rank: int

    @property
    def scale(self) -> float:
        return float(1 / np.sqrt(self.nope + self.rope))

    def __str__(self) -> str:
        return f"{self.rank + self.rope}.{self.rank}-{self.nope + self.rope}.{self.value}"


class Model:
    """Random projections and tokens of one MLA layer, in values that float32 holds."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        rng = np.random.default_rng(11)

        def draw(*size: int, spread: float = 1.0) -> np.ndarray:
            return (rng.standard_normal(size) * spread).astype(f32).astype(f64)

        self.shape = shape
        self.w_uk = draw(shape.heads, shape.nope, shape.rank, spread=shape.rank**-0.5)
        self.w_uv = draw(shape.heads, shape.value, shape.rank, spread=shape.rank**-0.5)
        self.q_nope, self.q_rope = draw(tokens, shape.heads, shape.nope), draw(tokens, shape.heads, shape.rope)
        self.latent, self.k_rope = draw(tokens, shape.rank), draw(tokens, shape.rope)

    def not_absorbed(self, q: slice, k: slice) -> np.ndarray:
        """Attention of tokens ``q``, the last of ``k``, over keys and values expanded for every head."""
        keys = np.concatenate(
            [
                np.einsum("hnr,tr->thn", self.w_uk, self.latent[k]),
                np.repeat(self.k_rope[k][:, None], self.shape.heads, axis=1),
            ],
            axis=2,
        )
        values = np.einsum("hvr,tr->thv", self.w_uv, self.latent[k])
        queries = np.concatenate([self.q_nope[q], self.q_rope[q]], axis=2)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * self.shape.scale
        n, m = scores.shape[1:]
        scores[:, np.arange(m) > np.arange(n)[:, None] + m - n] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hqk,khv->qhv", weights, values)

    def absorbed_query(self) -> np.ndarray:
        absorbed = np.einsum("thn,hnr->thr", self.q_nope, self.w_uk)
        return np.concatenate([absorbed, self.q_rope], axis=2).reshape(len(absorbed), -1)

    def key(self) -> np.ndarray:
        return np.concatenate([self.latent, self.k_rope], axis=1)

    def project(self, output: np.ndarray) -> np.ndarray:
        output = output.astype(f64).reshape(len(output), self.shape.heads, self.shape.rank)
        return np.einsum("thr,hvr->thv", output, self.w_uv)


SHAPES = [Shape(4, 128, 64, 128, 512), Shape(3, 8, 8, 16, 24)]
# Three sequences of 23, 1 and 40 tokens, run as a prefill and then a mixed step.
STEPS = [[(0, 20), (0, 0), (0, 39)], [(20, 3), (0, 1), (39, 1)]]
FIRST = [0, 23, 24]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_absorbed_equals_not_absorbed(shape):
    model = Model(shape, 64)
    query, key = model.absorbed_query().astype(f32), model.key().astype(f32)
    head_size = shape.rank + shape.rope
    tables = batch((0, 23), (0, 1), (0, 40))
    cache = np.full((6, 16, 1, head_size), np.nan, f32)
    for step in STEPS:
        past, new = np.array(step).T
        rows = np.concatenate([np.arange(first + p, first + p + n) for first, (p, n) in zip(FIRST, step, strict=True)])
        got = paged_attention(
            query[rows],
            key[rows],
            key_cache=cache,
            cumulative_sequence_length=np.cumsum([0, *new]).astype(i32),
            past_seqlens=past.astype(i32),
            block_table=tables["block_table"],
            num_heads=shape.heads,
            kv_num_heads=1,
            v_head_size=shape.rank,
            scale=shape.scale,
            kv_cache_layout="LATENT",
        )
        want = np.concatenate(
            [
                model.not_absorbed(slice(first + p, first + p + n), slice(first, first + p + n))
                for first, (p, n) in zip(FIRST, step, strict=True)
                if n
            ]
        )
        assert got.value_cache_out is None
        assert got.output.shape == (len(rows), shape.heads * shape.rank)
        assert np.abs(model.project(got.output) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_absorbed_equals_not_absorbed_to_the_last_digits_in_float64(shape):
    """But for the rounding of the absorbed query, the one number that float32 does not hold."""
    model = Model(shape, 40)
    inputs = {
        "query": model.absorbed_query().astype(f32),
        "key": model.key().astype(f32),
        "key_cache": np.zeros((3, 16, 1, shape.rank + shape.rope), f32),
        **batch((0, 40)),
    }
    attributes = {
        "num_heads": shape.heads,
        "kv_num_heads": 1,
        "v_head_size": shape.rank,
        "scale": shape.scale,
        "kv_cache_layout": "LATENT",
    }
    plan = numpy_reference.plan(problem_of(inputs, attributes), compute=np.float64)
    output, lse = np.empty((40, shape.heads * shape.rank)), np.empty((40, shape.heads))
    plan.run({**inputs, "query": model.absorbed_query(), "output": output, "lse": lse})
    want = model.not_absorbed(slice(0, 40), slice(0, 40))
    assert np.abs(model.project(output) - want).max() < 1e-12


# ---- rotation ----------------------------------------------------------------------------------------------------


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, offset: int, interleaved: bool) -> np.ndarray:
    """RoPE of rows (tokens, heads, head_size) outside of the operator: in float32, rounded once to x's type."""
    wide, half = x.astype(f32), cos.shape[1]
    c, s = cos.astype(f32)[:, None], sin.astype(f32)[:, None]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    a, b = offset + first, offset + first + (1 if interleaved else half)
    y = wide.copy()
    y[..., a] = wide[..., a] * c - wide[..., b] * s
    y[..., b] = wide[..., b] * c + wide[..., a] * s
    return y.astype(x.dtype)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("head_size", "v_head_size", "rotary_dim"), [(576, 512, 64), (40, 24, 16), (48, 48, 8)])
@pytest.mark.parametrize("io", IO, ids=name)
def test_rotation_inside_is_rotation_outside_bit_for_bit(io, head_size, v_head_size, rotary_dim, interleaved):
    rng = np.random.default_rng(3)
    offset = v_head_size if v_head_size < head_size else 24
    lengths = ((20, 3), (0, 5), (7, 1))
    tables = batch(*lengths)
    query, key = rng.standard_normal((9, 4 * head_size)).astype(io), rng.standard_normal((9, head_size)).astype(io)
    cache = rng.standard_normal((4, 16, 1, head_size)).astype(io)
    angle = np.arange(30)[:, None] / 50 ** (np.arange(rotary_dim // 2) / rotary_dim)
    cos, sin = np.cos(angle).astype(io), np.sin(angle).astype(io)
    attributes = {
        "num_heads": 4,
        "kv_num_heads": 1,
        "v_head_size": v_head_size,
        "scale": 0.07,
        "kv_cache_layout": "LATENT",
        "return_lse": True,
    }
    inside = paged_attention(
        query,
        key,
        key_cache=cache.copy(),
        **tables,
        cos_cache=cos,
        sin_cache=sin,
        do_rotary=1,
        rotary_offset=offset,
        rotary_interleaved=interleaved,
        **attributes,
    )
    position = np.concatenate([np.arange(p, p + n) for p, n in lengths])
    turned = [
        rotated(x.reshape(9, -1, head_size), cos[position], sin[position], offset, bool(interleaved)).reshape(9, -1)
        for x in (query, key)
    ]
    outside = paged_attention(*turned, key_cache=cache.copy(), **tables, **attributes)
    assert_same_bits(inside.output, outside.output)
    assert_same_bits(inside.key_cache_out, outside.key_cache_out, "key_cache")
    assert_same_bits(inside.lse, outside.lse, "lse")
    assert not np.array_equal(inside.key_cache_out, cache)


@pytest.mark.parametrize("io", IO, ids=name)
@pytest.mark.parametrize("interleaved", [0, 1])
def test_offset_rotation_outside_of_latent_too(io, interleaved):
    case = Case(io=np.dtype(io).name, rope="offset", interleaved=bool(interleaved))
    built = build(case)
    inside = built.copy().run(paged_attention)
    position = np.array([5, 6, 7, 0, 1, 2, 3, 17])
    cos, sin = built["cos_cache"][position], built["sin_cache"][position]
    turned = {
        name: rotated(built[name].reshape(8, -1, 64), cos, sin, 8, bool(interleaved)).reshape(8, -1)
        for name in ("query", "key")
    }
    outside = built.run(paged_attention, **turned, do_rotary=0, rotary_offset=0)
    assert_same_bits(inside.output, outside.output)
    assert_same_bits(inside.key_cache_out, outside.key_cache_out)


# ---- values are the first channels of the keys -------------------------------------------------------------------


def two_keys(io=np.float16, head_size: int = 576, v_head_size: int = 512, suffix: float = 1e4, **attributes):
    """One query over latent rows of 1s and of 0s in the value channels, with ``suffix`` behind them."""
    key = np.zeros((2, head_size), io)
    key[0, :v_head_size] = 1
    key[:, v_head_size:] = suffix
    query = np.zeros((2, head_size), io)
    query[:, 0] = 2
    cache = np.full((1, 16, 1, head_size), np.nan, io)
    return paged_attention(
        query,
        key,
        key_cache=cache,
        cumulative_sequence_length=np.array([0, 2], i32),
        past_seqlens=np.zeros(1, i32),
        block_table=np.zeros((1, 1), i32),
        num_heads=1,
        kv_num_heads=1,
        v_head_size=v_head_size,
        kv_cache_layout="LATENT",
        **attributes,
    )


@pytest.mark.parametrize("io", IO, ids=name)
def test_values_end_where_the_rotary_channels_begin(io):
    got = two_keys(io, scale=1.0).output.astype(f32)
    assert got.shape == (2, 512)
    want = np.exp(2) / (np.exp(2) + 1)  # 0.8808; 0.8000 in the wrong base; 1e4 shows the suffix
    assert np.abs(got[1] - want).max() < {2: 2e-3, 4: 1e-6}[np.dtype(io).itemsize] * (4 if io is IO[1] else 1)
    assert (got[1] == got[1, 0]).all()


@pytest.mark.parametrize("v_head_size", [1, 8, 70, 72, 0])
def test_the_output_is_v_head_size_wide(v_head_size):
    width = v_head_size or 72
    built = build(Case(mode="latent", kv_num_heads=1, group_size=4, head_size=72, v_head_size=v_head_size, scale=0.2))
    whole = built.copy().run(paged_attention, v_head_size=0).output.reshape(8, 4, 72)
    got = built.run(paged_attention)
    assert got.output.shape == (8, 4 * width)
    assert got.value_cache_out is None
    close = np.abs(got.output.reshape(8, 4, width).astype(f32) - whole[..., :width].astype(f32))
    assert close.max() <= 2**-9  # BLAS may sum a narrower product in another order


def test_the_default_scale_is_that_of_the_row_when_values_are_as_wide():
    got = two_keys(head_size=64, v_head_size=64, suffix=0).output.astype(f32)
    assert abs(got[1, 0] - 1 / (1 + np.exp(-2 / 8))) < 1e-3


def test_no_scale_is_an_error_when_values_are_narrower():
    with pytest.raises(InvalidArgumentError) as refusal:
        two_keys()
    assert str(refusal.value) == (
        "scale: required when v_head_size (512) differs from head_size (576), because 1 / sqrt(head_size) would be "
        "wrong; got none."
    )


def test_an_explicit_scale_is_used_as_it_is():
    key = np.zeros((2, 576), np.float16)
    key[0, 0] = key[0, 1] = 1
    query = np.zeros((2, 576), np.float16)
    query[1, 0] = 96
    got = paged_attention(
        query,
        key,
        key_cache=np.zeros((1, 16, 1, 576), np.float16),
        cumulative_sequence_length=np.array([0, 2], i32),
        past_seqlens=np.zeros(1, i32),
        block_table=np.zeros((1, 1), i32),
        num_heads=1,
        kv_num_heads=1,
        v_head_size=512,
        scale=192**-0.5,
        kv_cache_layout="LATENT",
    )
    assert abs(float(got.output[1, 1]) - 0.99902) < 5e-4  # 0.98201 with 1 / sqrt(576)


# ---- caches ------------------------------------------------------------------------------------------------------

QUANTIZED = [("int8", INT8), ("float8e4m3fn", FLOAT8E4M3FN), ("int4", INT4)]


@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize(("cache", "dtype"), QUANTIZED, ids=[cache for cache, _ in QUANTIZED])
def test_one_scale_serves_keys_and_values(cache, dtype, kind):
    """A latent row of code 1 everywhere, attended alone, gives its scale channel by channel."""
    stored = codec.encode(np.ones((1, 16, 1, 72), f32), dtype, np.ones(1, f32))
    scale = np.linspace(0.5, 2, 72, dtype=f32).reshape(1, 1, 72) if kind == "PER_CHANNEL" else np.array([0.75], f32)
    before = stored.copy()
    got = paged_attention(
        np.ones((1, 144), np.float16),
        np.full((1, 72), np.nan, np.float16),
        key_cache=stored,
        cumulative_sequence_length=np.array([0, 1], i32),
        past_seqlens=np.array([4], i32),
        block_table=np.zeros((1, 1), i32),
        slot_mapping=np.array([-1], i32),
        k_scale=scale,
        num_heads=2,
        kv_num_heads=1,
        v_head_size=64,
        scale=0.1,
        kv_cache_layout="LATENT",
        k_quant_type=kind,
        k_cache_dtype=cache,
    )
    want = np.broadcast_to(scale.ravel(), (72,))[:64].astype(np.float16)
    assert np.array_equal(got.output.reshape(2, 64), [want, want])
    assert_same_bits(stored, before)


@pytest.mark.parametrize(
    "case",
    [
        Case(mode="latent", kv_num_heads=1, head_size=576, v_head_size=512, scale=0.07, group_size=heads, **more)
        for heads, more in (
            (1, {}),
            (8, {"io": "bfloat16", "rope": "offset"}),
            (20, {"cache": "int8", "k_quant": "PER_CHANNEL", "rope": "offset", "interleaved": True}),
            (16, {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "window": 6, "softcap": 2.0}),
            (16, {"cache": "int4", "k_quant": "PER_CHANNEL", "bias": "1H", "positions": "tree"}),
            (40, {"slots": "holes", "qk_output": 2, "is_causal": False}),
            (64, {"io": "float32", "lengths": ((40, 1), (0, 3)), "strided": True, "padding": 2}),
        )
    ],
    ids=str,
)
def test_features_at_full_size(case):
    built = build(case)
    verify(built, built.copy().run(paged_attention))


@pytest.mark.parametrize("cache", [{}, {"cache": "int8", "k_quant": "PER_CHANNEL"}], ids=["plain", "int8"])
def test_slot_minus_one_stores_nothing_and_attends_what_is_there(cache):
    built = build(Case(mode="latent", kv_num_heads=1, group_size=4, head_size=72, v_head_size=64, scale=0.1, **cache))
    want = built.run(paged_attention)
    stored = built["key_cache"].copy()
    key = np.full((8, 72), np.nan, np.float16)
    got = built.run(paged_attention, key=key, slot_mapping=np.full(8, -1, i32))
    assert_same_bits(built["key_cache"], stored)
    assert_same_bits(got.output, want.output)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"value": np.zeros((8, 72), np.float16)}, "value: not allowed in the LATENT layout"),
        ({"value_cache": np.zeros((4, 16, 1, 72), np.float16)}, "value_cache: not allowed in the LATENT layout"),
        ({"head_sink": np.zeros(4, np.float16)}, "head_sink: not allowed in the LATENT layout"),
        ({"q_norm_weight": np.ones(72, np.float16)}, "q_norm_weight: not allowed in the LATENT layout"),
        ({"v_scale": np.ones(1, f32)}, "v_scale: not allowed in the LATENT layout"),
        ({"kv_num_heads": 2}, "kv_num_heads: expected 1 in the LATENT layout, got 2"),
        ({"v_head_size": 73}, r"v_head_size: expected a value in \[1, head_size = 72\], or 0, got 73"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_latent_has_no_use_for_is_refused(extra, word):
    built = build(Case(mode="latent", kv_num_heads=1, group_size=4, head_size=72, v_head_size=64, scale=0.1))
    with pytest.raises(InvalidArgumentError, match=f"^{word}"):
        built.run(paged_attention, **extra)
