"""The operator as loops over Python numbers, from the contract's text alone.

It shares no code with the package: element types are decoded from their bits and rounded by arithmetic on powers of
two, and every step is a loop over tokens, heads, keys and channels in float64. For small sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Bits of exponent and mantissa.
FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float8_e4m3fn": (4, 3)}
LIMITS = {"int8": (-128, 127), "float8_e4m3fn": (-448.0, 448.0), "int4": (-8, 7)}
DEFAULTS: dict[str, Any] = {
    "scale": 0.0,
    "softcap": 0.0,
    "local_window_size": -1,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "rotary_offset": 0,
    "qk_norm_epsilon": 1e-6,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "k_cache_dtype": "",
    "v_cache_dtype": "",
    "v_head_size": 0,
    "kv_cache_layout": "SEPARATE",
    "qk_output": 0,
    "is_causal": 1,
}


class Answer(NamedTuple):
    """float64 results, and the caches as bits in unsigned integers of their width."""

    output: Array
    lse: Array
    output_qk: Array
    key_codes: Array
    value_codes: Array | None


# ---- numbers -----------------------------------------------------------------------------------------------------


@cache
def float_of(code: int, name: str) -> float:
    """Value of the bits of a floating-point number."""
    exponent_bits, mantissa_bits = FORMATS[name]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        if name == "float8_e4m3fn":  # no infinity: one code is NaN, the others are numbers
            if mantissa == 7:
                return math.nan
        else:
            return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def code_of(value: float, name: str) -> int:
    """Bits of the nearest floating-point number, ties to even."""
    exponent_bits, mantissa_bits = FORMATS[name]
    bias = (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    if math.isnan(value):
        return infinity + (7 if name == "float8_e4m3fn" else 1 << (mantissa_bits - 1))
    sign = (1 if math.copysign(1.0, value) < 0 else 0) << (exponent_bits + mantissa_bits)
    value = abs(value)
    if math.isinf(value):
        return sign + infinity
    exponent = max(math.frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
    units = round(math.ldexp(value, mantissa_bits - exponent))  # exact scaling; round() takes ties to even
    if units == 2 << mantissa_bits:
        units, exponent = units // 2, exponent + 1
    if exponent > bias and name != "float8_e4m3fn":
        return sign + infinity
    return sign + units + ((exponent + bias - 1) << mantissa_bits)  # a normal number's leading 1 adds one exponent


def bits_of(x: Array) -> Array:
    """The same array as unsigned integers."""
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def floats(x: Array) -> list[Any]:
    """Array as nested lists of numbers."""
    name = x.dtype.name
    if x.dtype.kind in "iu":
        return x.tolist()  # type: ignore[no-any-return]

    def decode(item: Any) -> Any:
        return [decode(part) for part in item] if isinstance(item, list) else float_of(item, name)

    return decode(bits_of(np.ascontiguousarray(x)).tolist())  # type: ignore[no-any-return]


class Store:
    """A cache as bits; rows are read and written as numbers."""

    def __init__(self, cache_array: Array, cache_dtype: str, scale: Array | None, head_size: int) -> None:
        self.name = "int4" if cache_dtype == "int4" else cache_array.dtype.name
        self.codes = bits_of(np.ascontiguousarray(cache_array)).copy()
        self.scale = None if scale is None else floats(scale)
        self.head_size = head_size
        self.blocks, self.block_size = self.codes.shape[:2]
        self._rows: dict[tuple[int, int], list[float]] = {}

    def scale_of(self, head: int, channel: int) -> float:
        if self.scale is None:
            return 1.0
        return (
            self.scale[0] if len(self.scale) == 1 and isinstance(self.scale[0], float) else self.scale[head][0][channel]
        )

    def write(self, slot: int, head: int, row: list[float]) -> None:
        if not 0 <= slot < self.blocks * self.block_size:
            return
        self._rows.clear()
        target = self.codes[slot // self.block_size, slot % self.block_size, head]
        for c, x in enumerate(row):
            if self.name in LIMITS:
                low, high = LIMITS[self.name]
                x = x / self.scale_of(head, c)
                if self.name == "float8_e4m3fn":
                    target[c] = code_of(x if math.isnan(x) else min(max(x, low), high), self.name)
                    continue
                code = int(min(max(round(x), low), high))
                if self.name == "int8":
                    target[c] = code % 256
                else:
                    byte, shift = int(target[c // 2]), 4 * (c % 2)
                    target[c // 2] = (byte & ~(15 << shift)) | ((code + 8) << shift)
            else:
                target[c] = code_of(x, self.name)

    def read(self, slot: int, head: int) -> list[float]:
        if (slot, head) not in self._rows:
            raw = self.codes[slot // self.block_size, slot % self.block_size, head].tolist()
            row = []
            for c in range(self.head_size):
                if self.name == "int4":
                    value: float = ((raw[c // 2] >> (4 * (c % 2))) & 15) - 8
                elif self.name == "int8":
                    value = raw[c] - 256 if raw[c] > 127 else raw[c]
                else:
                    value = float_of(raw[c], self.name)
                row.append(value * self.scale_of(head, c))
            self._rows[slot, head] = row
        return self._rows[slot, head]


# ---- the operator ------------------------------------------------------------------------------------------------


def normalize(x: list[float], weight: list[float], epsilon: float) -> list[float]:
    mean = sum(v * v for v in x) / len(x)
    return [v / math.sqrt(mean + epsilon) * w for v, w in zip(x, weight, strict=True)]


def rotate(x: list[float], cos: list[float], sin: list[float], offset: int, interleaved: bool) -> list[float]:
    half = len(cos)
    y = list(x)
    for i in range(half):
        a, b = (offset + 2 * i, offset + 2 * i + 1) if interleaved else (offset + i, offset + i + half)
        y[a] = x[a] * cos[i] - x[b] * sin[i]
        y[b] = x[a] * sin[i] + x[b] * cos[i]
    return y


def naive(inputs: Mapping[str, Array], attributes: Mapping[str, Any], max_context_len: int | None = None) -> Answer:
    """Compute the operator; the caches given are left alone."""
    a = {**DEFAULTS, **attributes}
    num_heads, kv_num_heads = a["num_heads"], a["kv_num_heads"]
    latent = a["kv_cache_layout"] == "LATENT"
    query = floats(inputs["query"])
    token_count = len(query)
    packed = "key" not in inputs
    head_size = inputs["query"].shape[1] // (num_heads + 2 * kv_num_heads * packed)
    v_head_size = a["v_head_size"] or head_size
    scale = a["scale"] or 1 / math.sqrt(head_size)

    def heads(row: list[float], first: int, count: int) -> list[list[float]]:
        return [row[(first + h) * head_size : (first + h + 1) * head_size] for h in range(count)]

    keys = Store(inputs["key_cache"], a["k_cache_dtype"], inputs.get("k_scale"), head_size)
    values = None if latent else Store(inputs["value_cache"], a["v_cache_dtype"], inputs.get("v_scale"), head_size)
    table = inputs["block_table"].tolist()
    optional = {
        name: floats(inputs[name])
        for name in (
            "key",
            "value",
            "cos_cache",
            "sin_cache",
            "head_sink",
            "q_norm_weight",
            "k_norm_weight",
            "slot_mapping",
            "query_positions",
            "attention_bias",
        )
        if name in inputs
    }
    cumulative = inputs["cumulative_sequence_length"].tolist()
    past_seqlens = inputs["past_seqlens"].tolist()

    def slot_of(b: int, position: int) -> int:
        entry = position // keys.block_size
        block = table[b][entry] if entry < len(table[b]) else -1
        return block * keys.block_size + position % keys.block_size if 0 <= block < keys.blocks else -1

    # Steps 1 to 4: split, normalise, rotate, store.
    prepared: dict[int, tuple[int, int, int, list[list[float]]]] = {}
    for b, past in enumerate(past_seqlens):
        for j in range(cumulative[b + 1] - cumulative[b]):
            t = cumulative[b] + j
            own = optional["query_positions"][t] if "query_positions" in optional else past + j
            q = heads(query[t], 0, num_heads)
            k = heads(query[t], num_heads, kv_num_heads) if packed else heads(optional["key"][t], 0, kv_num_heads)
            v = []
            if not latent:
                v = (
                    heads(query[t], num_heads + kv_num_heads, kv_num_heads)
                    if packed
                    else heads(optional["value"][t], 0, kv_num_heads)
                )
            if "q_norm_weight" in optional:
                q = [normalize(x, optional["q_norm_weight"], a["qk_norm_epsilon"]) for x in q]
                k = [normalize(x, optional["k_norm_weight"], a["qk_norm_epsilon"]) for x in k]
            if a["do_rotary"]:
                angles = optional["cos_cache"][own], optional["sin_cache"][own]
                q, k = (
                    [rotate(x, *angles, a["rotary_offset"], bool(a["rotary_interleaved"])) for x in rows]
                    for rows in (q, k)
                )
            prepared[t] = (b, j, own, q)
            slot = optional["slot_mapping"][t] if "slot_mapping" in optional else slot_of(b, past + j)
            for h in range(kv_num_heads):
                keys.write(slot, h, k[h])
                if values is not None:
                    values.write(slot, h, v[h])

    # Steps 5 to 7: attend.
    longest = max((past + cumulative[b + 1] - cumulative[b] for b, past in enumerate(past_seqlens)), default=0)
    width = longest if max_context_len is None else max_context_len
    output = np.zeros((token_count, num_heads * v_head_size))
    lse = np.full((token_count, num_heads), -math.inf)
    output_qk = np.zeros((num_heads, token_count, width))
    bias = optional.get("attention_bias")
    for t, (b, j, own, q) in prepared.items():
        kv_len = past_seqlens[b] + cumulative[b + 1] - cumulative[b]
        for h in range(num_heads):
            kv_head = h // (num_heads // kv_num_heads)
            scores: dict[int, float] = {}
            for k_position in range(kv_len):
                slot = slot_of(b, k_position)
                if slot < 0 or (a["is_causal"] and k_position > own):
                    continue
                if a["local_window_size"] > 0 and k_position <= own - a["local_window_size"]:
                    continue
                row = keys.read(slot, kv_head)
                s = scale * sum(x * y for x, y in zip(q[h], row, strict=True))
                if a["softcap"] > 0:
                    s = a["softcap"] * math.tanh(s / a["softcap"])
                if bias is not None:
                    s += bias[b % len(bias)][h % len(bias[0])][j][k_position]
                scores[k_position] = s
            top = max(scores.values(), default=-math.inf)
            if top == -math.inf:
                if a["qk_output"] == 1:
                    for k_position, s in scores.items():
                        output_qk[h, t, k_position] = s
                continue
            sink = optional["head_sink"][h] if "head_sink" in optional else -math.inf
            top = max(top, sink)
            total = sum(math.exp(s - top) for s in scores.values()) + math.exp(sink - top)
            lse[t, h] = top + math.log(total)
            result = [0.0] * v_head_size
            for k_position, s in scores.items():
                p = math.exp(s - top) / total
                slot = slot_of(b, k_position)
                row = (keys if values is None else values).read(slot, kv_head)
                result = [r + p * x for r, x in zip(result, row, strict=False)]
                if a["qk_output"] and k_position < width:
                    output_qk[h, t, k_position] = s if a["qk_output"] == 1 else p
            output[t, h * v_head_size : (h + 1) * v_head_size] = result
    return Answer(output, lse, output_qk, keys.codes, None if values is None else values.codes)
