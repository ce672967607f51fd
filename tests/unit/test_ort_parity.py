"""The operator against ONNX Runtime's GroupQueryAttention on the CPU, which shares its meaning but no line of code.

GroupQueryAttention knows neither blocks nor ragged rows: the past of each sequence is gathered from its blocks, new
rows are padded, and the answer is scattered back. Its CPU kernel has no bfloat16, so data of 16 bits are widened to
float32, where the two agree to a few rounding units; then the 16-bit call is compared as well.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedattn import codec, paged_attention
from tests.support.build import Built, build
from tests.support.cases import Case
from tests.support.compare import assert_close, assert_same_bits
from tests.support.oracle import naive_low_precision

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracles" / "ort_gqa_oracle.py"
f32 = np.float32
# Sums of float32 in another order, for results of order 1.
ROUNDING = 1e-5

SINK = (False, True)
WINDOW = (-1, 1, 6)
SOFTCAP = (0.0, 2.0)
NORM = (False, True)
PACKED = ("separate", "packed")
ROPE = (("none", False), ("full", False), ("full", True), ("partial", False), ("partial", True))
CACHE = (
    ("", "NONE"),
    ("int8", "PER_TENSOR"),
    ("int8", "PER_CHANNEL"),
    ("int4", "PER_TENSOR"),
    ("int4", "PER_CHANNEL"),
)
# What the product does not cover is drawn for each combination.
DRAWN: dict[str, tuple[Any, ...]] = {
    "io": ("float16", "bfloat16", "float32"),
    "qk_output": (0, 0, 0, 1, 2),
    "bias": ("", "", "", "", "BH", "1H", "B1", "11"),
    "scale": (0.0, 0.0, 0.4),
    "heads": ((2, 3), (1, 4), (3, 1), (2, 2)),
    "lengths": (
        ((5, 3), (0, 4), (18, 1)),
        ((33, 1), (0, 1), (15, 1), (6, 1)),
        ((0, 19), (0, 0), (12, 6)),
        ((16, 16), (31, 2)),
    ),
}


def product() -> dict[tuple[Any, Any], list[Case]]:
    """Every combination of the features above, by (cache, rope)."""
    cases: dict[tuple[Any, Any], list[Case]] = {}
    rng = random.Random(0)
    for cache, rope, sink, window, softcap, norm, mode in itertools.product(
        CACHE, ROPE, SINK, WINDOW, SOFTCAP, NORM, PACKED
    ):
        drawn = {name: rng.choice(values) for name, values in DRAWN.items()}
        kv_num_heads, group_size = drawn.pop("heads")
        cases.setdefault((cache, rope), []).append(
            Case(
                cache=cache[0],
                k_quant=cache[1],
                v_quant=cache[1],
                head_size=32,
                kv_num_heads=kv_num_heads,
                group_size=group_size,
                mode=mode,
                qk_norm=norm,
                rope=rope[0],
                interleaved=rope[1],
                window=window,
                softcap=softcap,
                sink=sink,
                **drawn,
            )
        )
    return cases


PRODUCT = product()


@pytest.fixture(scope="module")
def ort() -> ModuleType:
    """The bridge to ONNX Runtime, which is kept beside the repository."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    if not ORACLE.exists():
        pytest.skip(f"{ORACLE} is not there: it calls ONNX Runtime's GroupQueryAttention")
    spec = importlib.util.spec_from_file_location("ort_gqa_oracle", ORACLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Answer(NamedTuple):
    """ONNX Runtime's, on our rows: output, the new rows of K and V as stored, and output_qk or None."""

    output: np.ndarray
    key_rows: np.ndarray
    value_rows: np.ndarray
    output_qk: np.ndarray | None


def slots_of(built: Built) -> list[np.ndarray]:
    """Slot of every position of each sequence, by its block table."""
    size = built.case.block_size
    return [
        built["block_table"][b, np.arange(past + new) // size].astype(np.int64) * size + np.arange(past + new) % size
        for b, (past, new) in enumerate(built.case.lengths)
    ]


def tame(x: np.ndarray) -> np.ndarray:
    """Without NaN: ONNX Runtime multiplies what it masks by 0, and NaN would stay NaN."""
    return np.where(np.isnan(x), np.zeros((), x.dtype), x)


def ask(ort: ModuleType, built: Built) -> Answer:
    """Answer a call on float32 with one GroupQueryAttention node."""
    case, inputs, a = built.case, built.inputs, built.attributes
    past, new = np.array(case.lengths).T
    starts = np.cumsum([0, *new])
    slots = slots_of(built)

    def padded(x: np.ndarray | None) -> np.ndarray | None:
        if x is None:
            return None
        rows = np.zeros((len(new), max(new), x.shape[1]), f32)
        for b, count in enumerate(new):
            rows[b, :count] = x[starts[b] : starts[b + 1]]
        return rows

    def gathered(cache: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(past), cache.shape[2], max(1, *past), cache.shape[3]), cache.dtype)
        for b, count in enumerate(past):
            rows[b, :, :count] = cache.reshape(-1, *cache.shape[2:])[slots[b][:count]].swapaxes(0, 1)
        return tame(rows)

    bias = inputs.get("attention_bias")
    output, keys, values, qk = ort.gqa_reference(
        *(padded(inputs.get(name)) for name in ("query", "key", "value")),
        gathered(inputs["key_cache"]),
        gathered(inputs["value_cache"]),
        past_lens=past,
        new_lens=new,
        attention_bias=None if bias is None else tame(bias),
        kv_cache_bit_width={"int8": 8, "int4": 4}.get(case.cache, 0),
        **{
            name: inputs.get(name)
            for name in ("cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale")
        },
        **{
            name: a[name]
            for name in (
                "num_heads",
                "kv_num_heads",
                "qk_norm_epsilon",
                "k_quant_type",
                "v_quant_type",
                "scale",
                "softcap",
                "local_window_size",
                "do_rotary",
                "rotary_interleaved",
                "qk_output",
            )
        },
    )

    def flat(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[b, :count] for b, count in enumerate(new)])

    scores = None
    if qk is not None:
        scores = np.concatenate([qk[b, :, :count] for b, count in enumerate(new)], axis=1)
    new_rows = [
        np.concatenate([x[b, :, p : p + n].swapaxes(0, 1) for b, (p, n) in enumerate(case.lengths)])
        for x in (keys, values)
    ]
    return Answer(flat(output), *new_rows, scores)


def widened(built: Built) -> Built:
    """The same call with everything of 16 bits in float32."""
    wide = built.copy()
    wide.case = replace(built.case, io="float32")
    for name, (array, index) in built.parents.items():
        if array.dtype.itemsize == 2:
            wide.parents[name] = (array.astype(f32), index)
    return wide


def agree(ort: ModuleType, case: Case) -> None:
    narrow = build(case)
    wide = widened(narrow)
    want = ask(ort, wide)
    got = wide.copy().run(paged_attention)
    seen = np.repeat(got.lse > -np.inf, case.head_size, axis=1)  # GroupQueryAttention gives NaN under a bias of -inf
    flips = assert_stored(case, wide, got, want)
    bound = ROUNDING + flips * max((wide[name].max() for name in ("k_scale", "v_scale") if case.cache), default=0)
    assert np.abs(got.output - want.output)[seen].max(initial=0) <= bound
    assert not got.output[~seen].any()
    if case.qk_output:
        assert want.output_qk is not None
        rows = (got.lse > -np.inf).T
        mine, right = got.output_qk[rows], want.output_qk[rows]
        finite = np.isfinite(right)
        assert np.array_equal(mine[~finite], right[~finite])
        assert np.abs(mine[finite] - right[finite]).max(initial=0) <= bound * max(
            1.0, np.abs(right[finite]).max(initial=0)
        )
    if case.io != "float32":
        got = narrow.copy().run(paged_attention)
        written = (got.key_cache_out, got.value_cache_out)
        right = np.where(seen, want.output, 0)
        plain = naive_low_precision(narrow, written).output
        assert_close(got.output, right, plain, case.io)


def assert_stored(case: Case, built: Built, got: Any, want: Answer) -> int:
    """Compare the new rows of both caches; returns how many codes were rounded the other way.

    ONNX Runtime multiplies by the reciprocal of the scale, we divide: ties may part ways.
    """
    slots = np.concatenate([s[past:] for s, (past, _) in zip(slots_of(built), case.lengths, strict=True)])
    flips = 0
    for mine, right in ((got.key_cache_out, want.key_rows), (got.value_cache_out, want.value_rows)):
        mine = mine.reshape(-1, *mine.shape[2:])[slots]
        if not case.cache:
            assert np.abs(mine - right).max(initial=0) <= 1e-6 * max(1.0, np.abs(right).max(initial=0))
            if right is want.value_rows:
                assert_same_bits(mine, right)
            continue
        if case.cache == "int4":
            mine, right = codec.unpack_int4(mine), codec.unpack_int4(right)
        apart = np.abs(mine.astype(int) - right.astype(int))
        assert apart.max(initial=0) <= 1
        flips += int(apart.sum())
    assert flips <= 2
    return flips


@pytest.mark.parametrize(
    "key", PRODUCT, ids=lambda key: f"{key[0][0] or 'plain'}-{key[0][1]}-{key[1][0]}{'.il' * key[1][1]}"
)
def test_group_query_attention_agrees(ort, key):
    for case in PRODUCT[key]:
        try:
            agree(ort, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("head_size", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("group_size", [1, 5, 7, 16])
def test_other_sizes_agree(ort, head_size, group_size):
    agree(ort, Case(io="float32", head_size=head_size, kv_num_heads=2, group_size=group_size, window=9, sink=True))


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_long_contexts_on_shuffled_blocks_agree(ort, block_size):
    lengths = ((300, 1), (0, 200), (511, 3), (128, 128))
    agree(
        ort,
        Case(
            block_size=block_size,
            lengths=lengths,
            rope="full",
            cache="int8",
            k_quant="PER_CHANNEL",
            v_quant="PER_CHANNEL",
            head_size=32,
            softcap=5.0,
        ),
    )


@pytest.mark.parametrize("case", PRODUCT[CACHE[0], ROPE[1]][:8] + PRODUCT[CACHE[2], ROPE[2]][:8], ids=str)
def test_the_bridge_to_a_paged_call_gives_the_same(ort, case):
    """`paged_via_gqa`, which answers a whole paged call by itself."""
    built = widened(build(case))
    poisoned = [name for name in ("key_cache", "value_cache", "attention_bias") if name in built.parents]
    output, key_cache, _, _ = ort.paged_via_gqa(
        {**built.inputs, **{name: tame(built[name]) for name in poisoned}}, built.attributes, ort_bias_order=True
    )
    got = built.copy().run(paged_attention)
    seen = np.repeat(got.lse > -np.inf, case.head_size, axis=1)
    assert np.abs(got.output - output)[seen].max() <= ROUNDING
    if case.cache:
        apart = np.abs(got.key_cache_out.astype(int) - key_cache.astype(int))
        assert apart.max() <= 1
        assert apart.sum() <= 2
