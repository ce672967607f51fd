"""group_query_attention against ONNX Runtime's CPU kernel, over the whole grid of the features it has."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the oracle, onnxruntime, is absent")

from pagedattn import codec, group_query_attention
from pagedattn.dtypes import BY_NAME
from tests.onnx import ort

Array = np.ndarray[Any, np.dtype[Any]]
H, KH, D = 6, 2, 32
PAST, NEW = np.array([5, 0, 8, 6]), np.array([3, 4, 1, 0])
TOTAL = PAST + NEW
LENGTH, BOUND = int(NEW.max()), int(TOTAL.max())
CAPACITY = int(PAST.max()) + LENGTH  # their kernel wants room for the padding rows too
EPSILON = 1e-5
# Rounding units of the larger of the two results' type that float32 sums in another order may cost.
UNITS = 32


class Setting(NamedTuple):
    """One point of the grid."""

    sink: bool = False
    window: int = -1
    softcap: float = 0.0
    norm: bool = False
    rope: str = ""  # "half" or "pairs"
    packed: bool = False
    cache: str = ""
    quant: str = "NONE"

    def __str__(self) -> str:
        flags = [name for name in ("sink", "norm", "packed") if getattr(self, name)]
        numbers = [f"w{self.window}"] * (self.window > 0) + [f"cap{self.softcap:g}"] * (self.softcap > 0)
        return (
            "-".join([*flags, *numbers, *filter(None, (self.rope, self.cache))]) + f"-{self.quant}".replace("-NONE", "")
            or "plain"
        )


CACHES = (("", "NONE"), *product(("int8", "float8e4m3fn", "int4"), ("PER_TENSOR", "PER_CHANNEL")))
GRID = [
    Setting(sink, window, softcap, norm, rope, packed, *cache)
    for sink, window, softcap, norm, rope, packed, cache in product(
        (False, True), (-1, 4), (0.0, 1.5), (False, True), ("", "half", "pairs"), (False, True), CACHES
    )
]


def normalize(x: Array, weight: Array) -> Array:
    """RMSNorm of each head in float64; x (batch, rows, heads * D)."""
    heads = x.astype(np.float64).reshape(*x.shape[:2], -1, D)
    scaled = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + EPSILON) * weight
    return scaled.reshape(x.shape).astype(np.float32)


def turn(x: Array, cos: Array, sin: Array, pairs: bool) -> Array:
    """Rotation of each head's first channels in float64, by complex multiplication."""
    heads = x.astype(np.float64).reshape(*x.shape[:2], -1, D)
    half = cos.shape[1]
    position = PAST[:, None] + np.arange(x.shape[1])
    angle = (cos + 1j * sin.astype(np.float64))[position][:, :, None]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if pairs else (slice(half), slice(half, 2 * half))
    turned = (heads[..., first] + 1j * heads[..., second]) * angle
    heads[..., first], heads[..., second] = turned.real, turned.imag
    return heads.reshape(x.shape).astype(np.float32)


class Numbers:
    """Arrays of a setting, for both sides."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting = setting
        rng = self.rng = np.random.default_rng(seed)
        batch = PAST.size
        self.query = self.normal(batch, LENGTH, H * D)
        self.key, self.value = (self.normal(batch, LENGTH, KH * D) for _ in "kv")
        self.sink = 2 * self.normal(H) if setting.sink else None
        self.norms = [1 + 0.1 * self.normal(D) for _ in "qk"] if setting.norm else None
        angle = np.arange(32)[:, None] / 100 ** (np.arange(8) / 8)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.dtype = BY_NAME[setting.cache or "float32"]
        self.scales = [None, None]
        if setting.cache:
            shape = (1,) if setting.quant == "PER_TENSOR" else (KH, 1, D)
            high = {"int8": 40, "float8e4m3fn": 100, "int4": 3}[setting.cache]
            self.scales = [(rng.uniform(0.7, 1.4, shape) / high).astype(np.float32) for _ in "kv"]
        self.past = [codec.encode(self.normal(batch, KH, CAPACITY, D), self.dtype, scale) for scale in self.scales]

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def attributes(self) -> dict[str, Any]:
        s = self.setting
        chosen = {
            "num_heads": H,
            "kv_num_heads": KH,
            "softcap": s.softcap,
            "local_window_size": s.window,
            "do_rotary": int(bool(s.rope)),
            "rotary_interleaved": int(s.rope == "pairs"),
            "k_quant_type": s.quant,
            "v_quant_type": s.quant,
        }
        if s.cache:
            chosen["kv_cache_bit_width"] = self.dtype.bits
        return chosen

    def common(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {
            "seqlens_k": (TOTAL - 1).astype(np.int32),
            "total_sequence_length": BOUND,
            "query_seqlens": NEW.astype(np.int32),
            "head_sink": self.sink,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
        }
        if self.setting.rope:
            inputs.update(cos_cache=self.cos, sin_cache=self.sin)
        return inputs

    def ours(self) -> Any:
        inputs = self.common()
        if self.norms:
            inputs.update(q_norm_weight=self.norms[0], k_norm_weight=self.norms[1])
        inputs.update(activations(self.setting.packed, self.query, self.key, self.value))
        past = {"past_key": self.past[0].copy(), "past_value": self.past[1].copy()}
        return group_query_attention(**inputs, **past, **self.attributes(), qk_norm_epsilon=EPSILON)

    def theirs(self) -> list[Array]:
        """Their kernel has no norm, which comes first, and no float8 cache, which then is one of float32."""
        inputs, attributes = self.common(), self.attributes()
        query, key, value, past = self.query, self.key, self.value, self.past
        if self.norms:
            query, key = normalize(query, self.norms[0]), normalize(key, self.norms[1])
        if self.setting.cache == "float8e4m3fn":
            if self.setting.rope:
                tables = inputs.pop("cos_cache"), inputs.pop("sin_cache")
                query, key = (turn(x, *tables, self.setting.rope == "pairs") for x in (query, key))
            key, value = (self.rounded(x, scale) for x, scale in zip((key, value), self.scales, strict=True))
            past = [codec.decode(x, self.dtype, scale) for x, scale in zip(past, self.scales, strict=True)]
            inputs.update(k_scale=None, v_scale=None)
            attributes.update(k_quant_type="NONE", v_quant_type="NONE", kv_cache_bit_width=0, do_rotary=0)
        inputs.update(activations(self.setting.packed, query, key, value))
        return ort.group_query_attention(attributes, past_key=past[0], past_value=past[1], **inputs)

    def rounded(self, x: Array, scale: Array | None) -> Array:
        assert scale is not None
        heads = x.reshape(*x.shape[:2], KH, D)
        by_head = scale[:, 0] if scale.ndim == 3 else scale
        return codec.decode(codec.encode(heads, self.dtype, by_head), self.dtype, by_head).reshape(x.shape)


def activations(packed: bool, query: Array, key: Array, value: Array) -> dict[str, Array]:
    if packed:
        return {"query": np.concatenate([query, key, value], axis=2)}
    return {"query": query, "key": key, "value": value}


@pytest.mark.parametrize("setting", GRID, ids=str)
def test_grid(setting: Setting):
    numbers = Numbers(setting)
    got, want = numbers.ours(), numbers.theirs()
    flipped = 0
    for mine, right in ((got.present_key, want[1]), (got.present_value, want[2])):
        for b, total in enumerate(TOTAL):
            flipped += compare_cache(numbers, mine[b, :, :total], right[b, :, :total])
    live = np.arange(LENGTH) < NEW[:, None]
    error = np.abs(got.output[live] - want[0][live]).max()
    scale = np.abs(want[0][live]).max()
    # A code rounded to its neighbour moves a result by at most its own step.
    steps = max((float(s.max()) for s in numbers.scales if s is not None), default=0.0) if flipped else 0.0
    assert error <= UNITS * np.finfo(np.float32).eps * scale + steps


def compare_cache(numbers: Numbers, mine: Array, right: Array) -> int:
    """Compare stored rows; returns how many codes differ, each by one step."""
    if numbers.setting.cache == "float8e4m3fn":
        return 0  # theirs is not quantized; the output shows what was stored
    if not numbers.setting.cache:
        np.testing.assert_allclose(mine, right, rtol=0, atol=UNITS * np.finfo(np.float32).eps)
        return 0
    unpack = codec.unpack_int4 if numbers.setting.cache == "int4" else np.asarray
    apart = np.abs(unpack(mine).astype(int) - unpack(right).astype(int))
    assert apart.max(initial=0) <= 1
    return int(apart.sum())


@pytest.mark.parametrize(
    "setting", [Setting(), Setting(cache="int8", quant="PER_TENSOR"), Setting(sink=True, window=4)]
)
def test_float16(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    numbers = Numbers(setting)
    for name in ("query", "key", "value", "cos", "sin"):
        setattr(numbers, name, getattr(numbers, name).astype(np.float16))
    if not setting.cache:
        numbers.past = [x.astype(np.float16) for x in numbers.past]
    if numbers.sink is not None:
        numbers.sink = numbers.sink.astype(np.float16)
    got, want = numbers.ours(), numbers.theirs()
    live = np.arange(LENGTH) < NEW[:, None]
    assert got.output.dtype == want[0].dtype == np.float16
    error = np.abs(got.output[live].astype(np.float32) - want[0][live].astype(np.float32)).max()
    assert error <= 2 * np.finfo(np.float16).eps * np.abs(want[0][live].astype(np.float32)).max()


@pytest.mark.parametrize("heads", ["BH", "1H", "B1", "11"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("qk_output", [0, 1, 2])
def test_bias_and_scores(heads: str, softcap: float, qk_output: int):
    numbers = Numbers(Setting(softcap=softcap, sink=qk_output == 2, window=4))
    batch = PAST.size
    shape = (batch if heads[0] == "B" else 1, H if heads[1] == "H" else 1, LENGTH, BOUND)
    bias = 2 * numbers.normal(*shape)
    inputs = {**numbers.common(), "attention_bias": bias}
    inputs.update(activations(False, numbers.query, numbers.key, numbers.value))
    past = {"past_key": numbers.past[0], "past_value": numbers.past[1]}
    attributes = {**numbers.attributes(), "qk_output": qk_output}
    want = ort.group_query_attention(attributes, **inputs, **past)
    got = group_query_attention(**inputs, **past, **attributes)
    live = np.arange(LENGTH) < NEW[:, None]
    tolerance = UNITS * np.finfo(np.float32).eps
    np.testing.assert_allclose(got.output[live], want[0][live], rtol=0, atol=tolerance * np.abs(want[0][live]).max())
    if qk_output:
        for b, total in enumerate(TOTAL):
            mine, right = (x[b, :, : NEW[b], :total] for x in (got.output_qk, want[3]))
            np.testing.assert_allclose(mine, right, rtol=0, atol=tolerance * max(1, np.abs(right).max(initial=0)))


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("head_size", [8, 40, 128, 256])
def test_head_sizes_and_groups(group_size: int, head_size: int):
    rng = np.random.default_rng(group_size * head_size)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    inputs = {
        "query": normal(1, 3, 2 * group_size * head_size),
        "key": normal(1, 3, 2 * head_size),
        "value": normal(1, 3, 2 * head_size),
        "past_key": normal(1, 2, 9, head_size),
        "past_value": normal(1, 2, 9, head_size),
        "seqlens_k": np.array([7], np.int32),
        "total_sequence_length": 8,
    }
    attributes = {"num_heads": 2 * group_size, "kv_num_heads": 2, "scale": 0.2}
    want = ort.group_query_attention(attributes, **inputs)
    got = group_query_attention(**inputs, **attributes)
    np.testing.assert_allclose(
        got.output, want[0], rtol=0, atol=UNITS * np.finfo(np.float32).eps * np.abs(want[0]).max()
    )


def prompt(batch: int = 2, length: int = 3, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "query": normal(batch, length, H * D),
        "key": normal(batch, length, KH * D),
        "value": normal(batch, length, KH * D),
        "past_key": np.zeros((batch, KH, 0, D), np.float32),
        "past_value": np.zeros((batch, KH, 0, D), np.float32),
        "seqlens_k": np.full(batch, length - 1, np.int32),
        "total_sequence_length": length,
        **more,
    }


HEADS = {"num_heads": H, "kv_num_heads": KH}
TABLES = {
    name: getattr(Numbers(Setting()), attribute) for name, attribute in (("cos_cache", "cos"), ("sin_cache", "sin"))
}


def agree(attributes: dict[str, Any], inputs: dict[str, Any]) -> None:
    want = ort.group_query_attention({**HEADS, **attributes}, **inputs)
    got = group_query_attention(**inputs, **HEADS, **attributes)
    tolerance = UNITS * np.finfo(np.float32).eps * max(1, np.abs(want[0]).max())
    total = int(inputs["seqlens_k"].max()) + 1
    valid = min(total, inputs["query"].shape[1])
    np.testing.assert_allclose(got.output[:, :valid], want[0][:, :valid], rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.present_key[:, :, :total], want[1][:, :, :total], rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.present_value[:, :, :total], want[2][:, :, :total], rtol=0, atol=tolerance)


def test_prompt_of_two_lengths_and_no_query_seqlens():
    inputs = prompt(seqlens_k=np.array([1, 2], np.int32))
    want = ort.group_query_attention(HEADS, **inputs)
    got = group_query_attention(**inputs, **HEADS)
    np.testing.assert_allclose(got.output[0, :2], want[0][0, :2], rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.output[1], want[0][1], rtol=0, atol=1e-6)


def test_causal_0():
    agree({"causal": 0}, prompt())


def test_growing_cache_of_one_sequence():
    rng = np.random.default_rng(1)
    past = {name: rng.standard_normal((1, KH, 4, D)).astype(np.float32) for name in ("past_key", "past_value")}
    inputs = prompt(1, seqlens_k=np.array([6], np.int32), total_sequence_length=7, **past)
    agree({}, inputs)
    agree({"causal": 0}, inputs)
    agree({"smooth_softmax": 1}, inputs)
    agree({"smooth_softmax": 1}, {**inputs, "head_sink": np.ones(H, np.float32)})
    agree({"do_rotary": 1}, {**inputs, **TABLES, "position_ids": np.array([[5, 9, 1]])})


def test_prompt_positions():
    agree({"do_rotary": 1}, prompt(**TABLES, position_ids=np.array([[5, 9, 1], [7, 8, 2]])))


def test_prompt_without_past_inputs():
    inputs = {name: x for name, x in prompt().items() if not name.startswith("past")}
    agree({}, inputs)


@pytest.mark.parametrize(("batch", "length"), [(2, 1), (1, 3)])
def test_keys_of_length_zero(batch: int, length: int):
    rng = np.random.default_rng(1)
    past = {name: rng.standard_normal((batch, KH, 9, D)).astype(np.float32) for name in ("past_key", "past_value")}
    inputs = prompt(batch, length, seqlens_k=np.full(batch, 6, np.int32), total_sequence_length=7, **past, **TABLES)
    inputs.update({name: inputs[name][:, :0] for name in ("key", "value")})
    want = ort.group_query_attention({**HEADS, "do_rotary": 1}, **inputs)
    got = group_query_attention(**inputs, **HEADS, do_rotary=1)
    np.testing.assert_allclose(got.output, want[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("capacity", "window"), [(4, 4), (6, 4), (9, 4), (5, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_sliding_cache_step_by_step(capacity: int, window: int, bias: bool):
    """Each side keeps its own cache; the rows that count agree after every step."""
    rng = np.random.default_rng(capacity)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    batch = 3
    mine = [np.zeros((batch, KH, capacity, D), np.float32) for _ in "kv"]
    right = [x.copy() for x in mine]
    attributes = {**HEADS, "local_window_size": window, "sliding_window_cache": 1, "do_rotary": 1}
    total = np.zeros(batch, np.int64)
    for step, length in enumerate((5, 1, 3, 1, 7, 1, 2, 1, 4)):
        new = rng.integers(0 if step else 1, length + 1, batch)
        total += new
        bound = max(int(total.max()), length)
        inputs = {
            "query": normal(batch, length, H * D),
            "key": normal(batch, length, KH * D),
            "value": normal(batch, length, KH * D),
            "seqlens_k": (total - 1).astype(np.int32),
            "total_sequence_length": bound,
            "query_seqlens": new.astype(np.int32),
            "attention_bias": normal(batch, H, length, bound) if bias else None,
            **TABLES,
        }
        want = ort.group_query_attention(attributes, past_key=right[0], past_value=right[1], **inputs)
        got = group_query_attention(**inputs, past_key=mine[0], past_value=mine[1], **attributes)
        live = np.arange(length) < new[:, None]
        np.testing.assert_allclose(got.output[live], want[0][live], rtol=0, atol=4e-6)
        right = want[1:3]
        excess = total - capacity
        drop = capacity - window + 1
        count = np.where(excess > 0, total - drop * -(-excess // drop), total)
        for b in range(batch):
            for x, y in zip(mine, right, strict=True):
                np.testing.assert_allclose(x[b, :, : count[b]], y[b, :, : count[b]], rtol=0, atol=2e-6)
