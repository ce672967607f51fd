"""Every rule of the contract that the host can check: one refusal each, word for word, and no cache byte changed."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedattn import InvalidArgumentError, PagedAttention, UnsupportedError, contract, paged_attention, validate
from pagedattn.arrays import NUMPY
from pagedattn.dtypes import FLOAT16
from tests.support.build import build
from tests.support.cases import Case
from tests.support.oracle import problem_of

# head_size 64, num_heads 4, kv_num_heads 2, block_size 16; 3 sequences, 8 tokens, 7 blocks, 3 table columns.
EVERYTHING = Case(qk_norm=True, rope="full", sink=True, bias="BH", positions="own", slots="explicit", metadata=True)
BASES = {
    "all": EVERYTHING,
    "plain": Case(),
    "packed": Case(mode="packed"),
    "int8": Case(cache="int8", k_quant="PER_TENSOR", v_quant="PER_CHANNEL"),
    "int4": Case(cache="int4", k_quant="PER_CHANNEL", v_quant="PER_TENSOR"),
    # head_size 72, v_head_size 64, 4 heads
    "latent": Case(mode="latent", kv_num_heads=1, group_size=4, head_size=72, v_head_size=64, scale=0.1),
    "latent int8": Case(mode="latent", kv_num_heads=1, group_size=4, cache="int8", k_quant="PER_CHANNEL"),
}
f16, f32, i32 = np.float16, np.float32, np.int32


@dataclass(frozen=True)
class Refused:
    """A call that breaks one rule: the changes to a good call, and the message."""

    rule: str
    base: str
    changes: dict[str, Any]
    message: str

    def __str__(self) -> str:
        return f"{self.rule}-{self.base}-{'-'.join(self.changes)}"


def arguments(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call; a function among the changes is applied to what the good call has."""
    built = build(BASES[base])
    call = {**built.inputs, **built.attributes, **built.options}
    for name, change in changes.items():
        call[name] = change(call.get(name)) if callable(change) else change
        if call[name] is None:
            del call[name]
    return call


def cut(axis: int) -> Callable[[Any], Any]:
    """One element less along an axis."""
    return lambda x: np.take(x, range(x.shape[axis] - 1), axis)


def reshaped(*shape: int) -> Callable[[Any], Any]:
    return lambda x: x.reshape(shape)


def frozen(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


MISSING = "{}: required in the {} layout, got none."
OR_PACKED = " Or without key and value: query holds [Q | K | V]."
NOT_IN_LATENT = "{}: not allowed in the LATENT layout; expected it absent, got a tensor."
CHOICES = "'NONE', 'PER_TENSOR', 'PER_CHANNEL'"

ATTRIBUTES = [
    Refused("attribute", "plain", {"num_heads": 0}, "num_heads: expected a value >= 1, got 0."),
    Refused("attribute", "plain", {"kv_num_heads": -2}, "kv_num_heads: expected a value >= 1, got -2."),
    Refused("attribute", "plain", {"num_heads": 4.5}, "num_heads: expected an integer, got 4.5."),
    Refused("attribute", "plain", {"num_heads": "4"}, "num_heads: expected a number, got '4'."),
    Refused("attribute", "plain", {"scale": 1j}, "scale: expected a number, got 1j."),
    Refused("attribute", "plain", {"scale": math.nan}, "scale: expected a finite number, got nan."),
    Refused("attribute", "plain", {"scale": [0.5]}, "scale: expected a number, got [0.5]."),
    Refused("attribute", "plain", {"scale": np.array([0.5])}, "scale: expected a number, got array([0.5])."),
    Refused("attribute", "plain", {"softcap": -1.0}, "softcap: expected a value >= 0, got -1.0."),
    Refused("attribute", "plain", {"softcap": math.inf}, "softcap: expected a finite number, got inf."),
    Refused(
        "attribute",
        "plain",
        {"scale": -1e39},
        "scale: expected 0 or a magnitude in [1.18e-38, 3.4e+38], the normal numbers of float32, got -1e+39.",
    ),
    Refused(
        "attribute",
        "plain",
        {"softcap": 1e-40},
        "softcap: expected 0 or a magnitude in [1.18e-38, 3.4e+38], the normal numbers of float32, got 1e-40.",
    ),
    Refused("attribute", "plain", {"scale": Decimal("sNaN")}, "scale: expected a finite number, got sNaN."),
    Refused("attribute", "plain", {"local_window_size": 2.5}, "local_window_size: expected an integer, got 2.5."),
    Refused(
        "attribute",
        "plain",
        {"local_window_size": 10**400},
        f"local_window_size: expected a finite number, got {10**400}.",
    ),
    Refused("attribute", "plain", {"do_rotary": 2}, "do_rotary: expected one of 0, 1, got 2."),
    Refused("attribute", "plain", {"rotary_interleaved": -1}, "rotary_interleaved: expected one of 0, 1, got -1."),
    Refused("attribute", "plain", {"rotary_offset": -8}, "rotary_offset: expected a value >= 0, got -8."),
    Refused(
        "attribute",
        "plain",
        {"k_quant_type": "per_tensor"},
        f"k_quant_type: expected one of {CHOICES}, got 'per_tensor'.",
    ),
    Refused("attribute", "plain", {"v_quant_type": ""}, f"v_quant_type: expected one of {CHOICES}, got ''."),
    Refused("attribute", "plain", {"v_quant_type": 0}, "v_quant_type: expected a string, got 0."),
    Refused("attribute", "plain", {"v_head_size": -1}, "v_head_size: expected a value >= 0, got -1."),
    Refused(
        "attribute",
        "plain",
        {"kv_cache_layout": "PAGED"},
        "kv_cache_layout: expected one of 'SEPARATE', 'LATENT', got 'PAGED'.",
    ),
    Refused("attribute", "plain", {"qk_output": 3}, "qk_output: expected one of 0, 1, 2, got 3."),
    Refused("attribute", "plain", {"is_causal": 2}, "is_causal: expected one of 0, 1, got 2."),
]

RULES = [
    Refused("heads_divide", "plain", {"num_heads": 5}, "num_heads: expected a multiple of kv_num_heads = 2, got 5."),
    Refused("heads_divide", "plain", {"kv_num_heads": 8}, "num_heads: expected a multiple of kv_num_heads = 8, got 4."),
    Refused("epsilon_positive", "plain", {"qk_norm_epsilon": 0}, "qk_norm_epsilon: expected a value > 0, got 0.0."),
    Refused(
        "epsilon_positive", "plain", {"qk_norm_epsilon": -1e-6}, "qk_norm_epsilon: expected a value > 0, got -1e-06."
    ),
    Refused("rotary_offset_multiple", "all", {"rotary_offset": 4}, "rotary_offset: expected a multiple of 8, got 4."),
    *(
        Refused("required_inputs", "all", {name: None}, f"{name}: required input, got none.")
        for name in ("query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table")
    ),
    Refused("presence_pattern", "plain", {"key": None}, MISSING.format("key", "SEPARATE") + OR_PACKED),
    Refused("presence_pattern", "plain", {"value": None}, MISSING.format("value", "SEPARATE") + OR_PACKED),
    Refused("presence_pattern", "plain", {"value_cache": None}, MISSING.format("value_cache", "SEPARATE")),
    Refused("presence_pattern", "packed", {"value_cache": None}, MISSING.format("value_cache", "SEPARATE")),
    Refused("presence_pattern", "latent", {"key": None}, MISSING.format("key", "LATENT")),
    Refused("presence_pattern", "plain", {"kv_cache_layout": "LATENT"}, NOT_IN_LATENT.format("value")),
    Refused("presence_pattern", "latent", {"value": np.zeros((8, 72), f16)}, NOT_IN_LATENT.format("value")),
    Refused(
        "presence_pattern",
        "latent",
        {"value_cache": np.zeros((7, 16, 1, 72), f16)},
        NOT_IN_LATENT.format("value_cache"),
    ),
    Refused("latent_refuses", "latent", {"kv_num_heads": 2}, "kv_num_heads: expected 1 in the LATENT layout, got 2."),
    *(
        Refused(
            "latent_refuses",
            "latent",
            {name: x},
            f"{name}: not allowed in the LATENT layout; expected it absent, got a tensor.",
        )
        for name, x in (
            ("v_scale", np.ones(1, f32)),
            ("head_sink", np.zeros(4, f16)),
            ("q_norm_weight", np.ones(72, f16)),
            ("k_norm_weight", np.ones(72, f16)),
        )
    ),
    Refused(
        "latent_refuses",
        "latent",
        {"v_quant_type": "PER_TENSOR"},
        "v_quant_type: expected NONE in the LATENT layout, where k_quant_type describes the one cache, got PER_TENSOR.",
    ),
    Refused(
        "latent_refuses",
        "latent",
        {"v_cache_dtype": "float16"},
        'v_cache_dtype: expected "" in the LATENT layout, which has no value cache, got float16.',
    ),
    Refused("pairs_complete", "all", {"sin_cache": None}, "sin_cache: required together with cos_cache, got none."),
    Refused("pairs_complete", "all", {"cos_cache": None}, "cos_cache: required together with sin_cache, got none."),
    Refused(
        "pairs_complete",
        "all",
        {"k_norm_weight": None},
        "k_norm_weight: required together with q_norm_weight, got none.",
    ),
    Refused(
        "pairs_complete",
        "all",
        {"q_norm_weight": None},
        "q_norm_weight: required together with k_norm_weight, got none.",
    ),
    Refused("rotary_needs_caches", "plain", {"do_rotary": 1}, "cos_cache: required by do_rotary = 1, got none."),
    *(
        Refused("cache_dtypes_agree", "int8", {attribute: named}, f"{attribute}: {named!r} is not supported: {why}.")
        for attribute in ("k_cache_dtype", "v_cache_dtype")
        for named, why in (
            ("float4e2m1", "no such cache format is specified"),
            ("int2", "no such cache format is specified"),
            ("uint4", "codes are signed: there is no zero point"),
            ("uint8", "codes are signed: there is no zero point"),
        )
    ),
    Refused(
        "cache_dtypes_agree",
        "int8",
        {"k_cache_dtype": "int4"},
        "k_cache_dtype: expected '' or 'int8', the element type of key_cache, got 'int4'.",
    ),
    Refused(
        "cache_dtypes_agree",
        "int8",
        {"v_cache_dtype": "float16"},
        "v_cache_dtype: expected '' or 'int8', the element type of value_cache, got 'float16'.",
    ),
    Refused(
        "cache_dtypes_agree",
        "plain",
        {"v_cache_dtype": "half"},
        "v_cache_dtype: expected '' or 'float16', the element type of value_cache, got 'half'. "
        "It names no element type.",
    ),
    Refused(
        "cache_dtypes_agree",
        "int4",
        {"k_cache_dtype": ""},
        "k_cache_dtype: expected 'int4', because key_cache is uint8, got ''.",
    ),
    Refused(
        "cache_dtypes_agree",
        "int4",
        {"v_cache_dtype": "int8"},
        "v_cache_dtype: expected 'int4', because value_cache is uint8, got 'int8'.",
    ),
    Refused(
        "quantization_consistent",
        "int8",
        {"k_quant_type": "NONE"},
        "k_quant_type: expected PER_TENSOR or PER_CHANNEL, because key_cache is int8, got NONE.",
    ),
    Refused(
        "quantization_consistent",
        "int4",
        {"v_quant_type": "NONE"},
        "v_quant_type: expected PER_TENSOR or PER_CHANNEL, because value_cache is int4, got NONE.",
    ),
    Refused(
        "quantization_consistent",
        "latent int8",
        {"k_quant_type": "NONE", "k_scale": None},
        "k_quant_type: expected PER_TENSOR or PER_CHANNEL, because key_cache is int8, got NONE.",
    ),
    Refused(
        "quantization_consistent",
        "plain",
        {"k_quant_type": "PER_TENSOR"},
        "k_quant_type: expected NONE, because key_cache is float16, got PER_TENSOR.",
    ),
    Refused(
        "quantization_consistent",
        "plain",
        {"v_quant_type": "PER_CHANNEL"},
        "v_quant_type: expected NONE, because value_cache is float16, got PER_CHANNEL.",
    ),
    Refused(
        "types_match",
        "plain",
        {
            "key_cache": lambda x: x.astype(ml_dtypes.bfloat16),
            "value_cache": lambda x: x.astype(ml_dtypes.bfloat16),
        },
        "key_cache: expected element type float16, that of query, or a quantized type, got bfloat16.",
    ),
    Refused(
        "quantization_consistent",
        "int8",
        {"k_scale": None},
        "k_scale: required by k_quant_type = PER_TENSOR, got none.",
    ),
    Refused(
        "quantization_consistent",
        "int8",
        {"v_scale": None},
        "v_scale: required by v_quant_type = PER_CHANNEL, got none.",
    ),
    Refused(
        "quantization_consistent",
        "plain",
        {"k_scale": np.ones(1, f32)},
        "k_scale: expected it absent with k_quant_type = NONE, got a tensor.",
    ),
    Refused(
        "quantization_consistent",
        "plain",
        {"v_scale": np.ones(1, f32)},
        "v_scale: expected it absent with v_quant_type = NONE, got a tensor.",
    ),
    Refused(
        "query_width",
        "plain",
        {"query": reshaped(2, 4, 256)},
        "query: expected rank 2, (token_count, query_width), got shape (2, 4, 256).",
    ),
    Refused("query_width", "plain", {"query": cut(1)}, "query: expected a width divisible by num_heads = 4, got 255."),
    Refused(
        "query_width",
        "plain",
        {"query": lambda x: x[:, :0]},
        "query: expected a width divisible by num_heads = 4, got 0.",
    ),
    Refused(
        "query_width",
        "packed",
        {"query": cut(1)},
        "query: expected a width divisible by num_heads + 2 * kv_num_heads (packed: key and value are absent) = 8, "
        "got 511.",
    ),
    Refused(
        "query_width",
        "plain",
        {"query": lambda x: x[:, : 4 * 60]},
        "query: expected a head_size (width / 4) that is a multiple of 8, got 60.",
    ),
    Refused(
        "query_width",
        "packed",
        {"query": lambda x: x[:, : 8 * 60]},
        "query: expected a head_size (width / 8) that is a multiple of 8, got 60.",
    ),
    Refused(
        "v_head_size_valid",
        "plain",
        {"v_head_size": 32, "scale": 0.1},
        "v_head_size: expected 0 or head_size = 64 in the SEPARATE layout, got 32.",
    ),
    Refused(
        "v_head_size_valid",
        "latent",
        {"v_head_size": 80},
        "v_head_size: expected a value in [1, head_size = 72], or 0, got 80.",
    ),
    Refused(
        "v_head_size_valid",
        "latent",
        {"scale": 0},
        "scale: required when v_head_size (64) differs from head_size (72), because 1 / sqrt(head_size) would be "
        "wrong; got none.",
    ),
    *(
        Refused(
            "block_size_power_of_two",
            "plain",
            {"key_cache": np.zeros((7, size, 2, 64), f16), "value_cache": np.zeros((7, size, 2, 64), f16)},
            f"key_cache: expected block_size (dimension 1) to be a power of two >= 16, got {size}.",
        )
        for size in (8, 24, 0, 17)
    ),
    Refused(
        "rotary_fits",
        "all",
        {"cos_cache": np.ones((18, 36), f16), "sin_cache": np.ones((18, 36), f16)},
        "cos_cache: expected rotary_dim (2 * dimension 1) <= head_size = 64, got 72.",
    ),
    Refused(
        "rotary_fits",
        "all",
        {"rotary_offset": 8},
        "rotary_offset: expected rotary_offset + rotary_dim (64) <= head_size = 64, got 8 + 64.",
    ),
    Refused(
        "rotary_fits",
        "all",
        {"do_rotary": 0, "rotary_offset": 72},
        "rotary_offset: expected rotary_offset + rotary_dim (64) <= head_size = 64, got 72 + 64.",
    ),
    Refused(
        "rotary_fits",
        "all",
        {"cos_cache": np.ones((0, 32), f16), "sin_cache": np.ones((0, 32), f16)},
        "cos_cache: expected at least one position and one channel pair, got shape (0, 32).",
    ),
    Refused(
        "rotary_fits",
        "all",
        {"cos_cache": np.ones((18, 0), f16), "sin_cache": np.ones((18, 0), f16)},
        "cos_cache: expected at least one position and one channel pair, got shape (18, 0).",
    ),
    Refused(
        "written_tensors_writeable",
        "plain",
        {"key_cache": frozen},
        "key_cache: expected a writeable array, got a read-only one.",
    ),
    Refused(
        "written_tensors_writeable",
        "plain",
        {"value_cache": frozen},
        "value_cache: expected a writeable array, got a read-only one.",
    ),
    Refused(
        "written_tensors_writeable",
        "plain",
        {"out": frozen(np.zeros((8, 256), f16))},
        "out: expected a writeable array, got a read-only one.",
    ),
    Refused(
        "written_tensors_writeable",
        "plain",
        {"value_cache": lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))},
        "value_cache: expected elements of their own, got a broadcast view (strides (0, 128, 64, 1)).",
    ),
    Refused(
        "written_tensors_writeable",
        "plain",
        {"value_cache": lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (x.strides[1], *x.strides[1:]))},
        "value_cache: expected elements of their own, got a view that repeats some (strides (128, 128, 64, 1)).",
    ),
]
# Rules about where arrays lie, seen by the checks as descriptions: no GPU is needed.
PLACED = [
    Refused(
        "one_device",
        "plain",
        {"key": lambda info: info._replace(device="cuda:1")},
        "key: expected an array on cuda:0, the device of query, got one on cuda:1.",
    ),
    Refused(
        "one_device",
        "plain",
        {"block_table": lambda info: info._replace(device="cpu")},
        "block_table: expected an array on cuda:0, the device of query, got one on cpu.",
    ),
    Refused(
        "one_device",
        "all",
        {"attention_metadata": lambda info: info._replace(device="cuda:0")},
        "attention_metadata: expected an array on cpu, because it is a host input, got one on cuda:0.",
    ),
    Refused(
        "layout_contiguous",
        "plain",
        {"query": lambda info: info._replace(strides=(512, 2))},
        "query: expected elements of a row next to each other (last stride 1), got strides (512, 2) in elements.",
    ),
    Refused(
        "layout_contiguous",
        "plain",
        {"value_cache": lambda info: info._replace(strides=(-2048, 128, 64, 1))},
        "value_cache: expected strides >= 0, got (-2048, 128, 64, 1) in elements.",
    ),
    Refused(
        "layout_contiguous",
        "all",
        {"block_table": lambda info: info._replace(strides=(1, 3))},
        "block_table: expected a C-contiguous array, got strides (1, 3) in elements.",
    ),
    Refused(
        "elements_aligned",
        "plain",
        {"past_seqlens": lambda info: info._replace(pointer=4098)},
        "past_seqlens: expected an address that is a multiple of 4, the size of its elements, got 0x1002.",
    ),
    Refused(
        "elements_aligned",
        "plain",
        {"query": lambda info: info._replace(whole_strides=False)},
        "query: expected strides each a multiple of 2, the size of its elements, got others.",
    ),
    Refused(
        "memory_apart",
        "plain",
        {
            "key_cache": lambda info: info._replace(pointer=1 << 40),
            "value_cache": lambda info: info._replace(pointer=(1 << 40) + 4096),
        },
        "value_cache: expected memory of its own, got memory of key_cache.",
    ),
]
# After the rules, in the order of the checks.
LATER = [
    Refused(
        "metadata",
        "all",
        {"attention_metadata": np.array([-1, 0], i32)},
        "attention_metadata[0]: expected a bound >= 0, got -1.",
    ),
    Refused(
        "metadata",
        "all",
        {"attention_metadata": np.array([1, 2, -3], i32)},
        "attention_metadata[2]: expected a bound >= 0, got -3.",
    ),
    Refused(
        "qk_dtype",
        "plain",
        {"qk_output": 1, "qk_dtype": "int8"},
        "qk_dtype: expected float32 or float16 or bfloat16, got int8.",
    ),
    Refused(
        "output_qk size",
        "all",
        {"qk_output": 1, "max_output_qk_bytes": 4 * 8 * 18 * 4 - 1},
        "output_qk: expected at most 2303 bytes (max_output_qk_bytes), got 2304 for "
        "(num_heads, token_count, max_context_len) = (4, 8, 18) of float32.",
    ),
    Refused(
        "output_qk size",
        "plain",
        {"qk_output": 2, "qk_dtype": "float16", "max_output_qk_bytes": 100},
        "output_qk: expected at most 100 bytes (max_output_qk_bytes), got 1152 for "
        "(num_heads, token_count, max_context_len) = (4, 8, 18) of float16.",
    ),
    Refused("scale", "int8", {"k_scale": np.zeros(1, f32)}, "k_scale[0]: expected a finite value > 0, got 0.0."),
    Refused("scale", "int8", {"k_scale": np.array([-2], f32)}, "k_scale[0]: expected a finite value > 0, got -2.0."),
    Refused("scale", "int8", {"k_scale": np.array([np.inf], f32)}, "k_scale[0]: expected a finite value > 0, got inf."),
    Refused(
        "scale",
        "int8",
        {"v_scale": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 70, np.nan, x).astype(f32)},
        "v_scale[1, 0, 6]: expected a finite value > 0, got nan.",
    ),
    Refused(
        "positions",
        "all",
        {"query_positions": np.array([5, 6, 7, 0, 1, -2, 3, 17], i32)},
        "query_positions[5]: expected a position >= 0, got -2.",
    ),
]

# ---- types, from the contract's table ----------------------------------------------------------------------------

WRONG_TYPE = {"T": np.float64, "T_CACHE": np.int16, "T_KV_SCALE": f16, "S": np.int64}
TYPE_NAMES = {
    "T": "float16 or bfloat16 or float32",
    "T_CACHE": "float16 or bfloat16 or float32 or int8 or float8e4m3fn or uint8",
    "T_KV_SCALE": "float32",
    "S": "int32",
}


def _example(name: str) -> str:
    return "int8" if name.endswith("_scale") else "all"


TYPES = [
    Refused(
        "types_match",
        _example(row.name),
        {row.name: lambda x, t=WRONG_TYPE[row.type]: np.zeros(x.shape, t)},
        f"{row.name}: expected element type {TYPE_NAMES[row.type]}, got {np.dtype(WRONG_TYPE[row.type])}.",
    )
    for row in contract.INPUTS
] + [
    Refused(
        "types_match",
        "all",
        {row.name: lambda x: x.astype(ml_dtypes.bfloat16)},
        f"{row.name}: expected element type float16, that of query, got bfloat16.",
    )
    for row in contract.INPUTS
    if row.type == "T" and row.name != "query"
]
TYPES += [
    Refused(
        "types_match",
        "plain",
        {"out": np.zeros((8, 256), f32)},
        "out: expected element type float16, that of query, got float32.",
    ),
    Refused(
        "types_match",
        "int8",
        {"value_cache": lambda x: x.astype(ml_dtypes.float8_e4m3fn)},
        "value_cache: expected element type int8, that of key_cache, got float8e4m3fn.",
    ),
    Refused(
        "types_match",
        "plain",
        {"key_cache": lambda x: x.view(bool)},
        f"key_cache: expected element type {TYPE_NAMES['T_CACHE']}, got bool.",
    ),
]

# ---- shapes, from the contract's table ---------------------------------------------------------------------------

WIDTH = "kv_width = 128 (kv_width from kv_num_heads * head_size, head_size = 64)"
TOKENS = "token_count = 8 (token_count from query)"
HEADS = "num_heads = 4 (num_heads from attribute num_heads)"
KV_HEADS = "kv_num_heads = 2 (kv_num_heads from attribute kv_num_heads)"
HEAD_SIZE = "head_size = 64 (head_size from query)"
BATCH = "batch_size = 3 (batch_size from cumulative_sequence_length)"
CACHE_WIDTH = "cache_width = 64 (cache_width from head_size = 64)"
PACKED_WIDTH = CACHE_WIDTH[:-1] + ", as query without key and value is packed [Q | K | V])"
# (input, axis): what one element less is told.
DIMENSIONS = {
    ("key", 0): TOKENS,
    ("key", 1): WIDTH,
    ("value", 0): TOKENS,
    ("value", 1): WIDTH,
    ("key_cache", 2): KV_HEADS,
    ("key_cache", 3): CACHE_WIDTH,
    ("value_cache", 0): "num_blocks = 7 (num_blocks from key_cache)",
    ("value_cache", 1): "block_size = 16 (block_size from key_cache)",
    ("value_cache", 2): KV_HEADS,
    ("value_cache", 3): CACHE_WIDTH,
    ("past_seqlens", 0): BATCH,
    ("block_table", 0): BATCH,
    ("sin_cache", 0): "max_seq_len = 18 (max_seq_len from cos_cache)",
    ("sin_cache", 1): "rotary_half = 32 (rotary_half from cos_cache)",
    ("slot_mapping", 0): TOKENS,
    ("head_sink", 0): HEADS,
    ("q_norm_weight", 0): HEAD_SIZE,
    ("k_norm_weight", 0): HEAD_SIZE,
    ("attention_metadata", 0): "2 or 3",
    ("query_positions", 0): TOKENS,
    ("attention_bias", 0): f"{BATCH} or 1",
    ("attention_bias", 1): f"{HEADS} or 1",
}
# Sizes that the first tensor to show them may choose, and the rules that bound the choice.
CHOSEN = {
    ("query", 0): None,
    ("query", 1): "query_width",
    ("key_cache", 0): None,
    ("key_cache", 1): "block_size_power_of_two",
    ("cumulative_sequence_length", 0): None,
    ("block_table", 1): None,
    ("cos_cache", 0): "rotary_fits",
    ("cos_cache", 1): "rotary_fits",
    ("attention_bias", 2): None,
    ("attention_bias", 3): None,
}
SCALES = [
    ("k_scale", "int8", (2,), "dimension 0 to be 1", "(2,)"),
    ("k_scale", "int8", (1, 1), "rank 1, (1)", "(1, 1)"),
    ("v_scale", "int8", (2, 64), "rank 3, (kv_num_heads, 1, head_size)", "(2, 64)"),
    ("v_scale", "int8", (1, 1, 64), f"dimension 0 to be {KV_HEADS}", "(1, 1, 64)"),
    ("v_scale", "int8", (2, 2, 64), "dimension 1 to be 1", "(2, 2, 64)"),
    ("v_scale", "int8", (2, 1, 1), f"dimension 2 to be {HEAD_SIZE}", "(2, 1, 1)"),
    ("v_scale", "int8", (1,), "rank 3, (kv_num_heads, 1, head_size)", "(1,)"),
    ("v_scale", "int4", (2, 1, 64), "rank 1, (1)", "(2, 1, 64)"),
    (
        "k_scale",
        "latent int8",
        (2, 1, 64),
        "dimension 0 to be kv_num_heads = 1 (kv_num_heads from attribute kv_num_heads)",
        "(2, 1, 64)",
    ),
]


def _shape(name: str, axis: int) -> str:
    shape = list(build(EVERYTHING)[name].shape)
    shape[axis] -= 1
    return str(tuple(shape))


SHAPES = (
    [
        Refused(
            "shapes_match",
            "all",
            {name: cut(axis)},
            f"{name}: expected dimension {axis} to be {want}, got shape {_shape(name, axis)}.",
        )
        for (name, axis), want in DIMENSIONS.items()
    ]
    + [
        Refused(
            "shapes_match",
            "all",
            {row.name: lambda x: x[None]},
            f"{row.name}: expected rank {len(row.shape)}, ({', '.join(row.shape)}), "
            f"got shape {(1, *build(EVERYTHING)[row.name].shape)}.",
        )
        for row in contract.INPUTS
        if row.name != "query" and not row.name.endswith("_scale")
    ]
    + [
        Refused(
            "shapes_match",
            base,
            {name: np.ones(shape, f32)},
            f"{name}: expected {want}, got shape {came}.",
        )
        for name, base, shape, want, came in SCALES
    ]
)
SHAPES += [
    Refused(
        "shapes_match",
        "plain",
        {"cumulative_sequence_length": np.zeros(1, i32)},
        "cumulative_sequence_length: expected dimension 0 >= 2, batch_size+1, got shape (1,).",
    ),
    Refused(
        "shapes_match",
        "plain",
        {"cumulative_sequence_length": np.zeros(0, i32)},
        "cumulative_sequence_length: expected dimension 0 >= 2, batch_size+1, got shape (0,).",
    ),
    Refused(
        "shapes_match",
        "int4",
        {"key_cache": np.zeros((7, 16, 2, 64), np.uint8), "value_cache": np.zeros((7, 16, 2, 64), np.uint8)},
        "key_cache: expected dimension 3 to be cache_width = 32 (cache_width from head_size = 64, two int4 codes a "
        "byte), got shape (7, 16, 2, 64).",
    ),
    Refused(
        "shapes_match",
        "packed",
        {"key_cache": np.zeros((7, 16, 2, 72), f16), "value_cache": np.zeros((7, 16, 2, 72), f16)},
        f"key_cache: expected dimension 3 to be {PACKED_WIDTH}, got shape (7, 16, 2, 72).",
    ),
    Refused(
        "shapes_match",
        "latent",
        {"key": np.zeros((8, 64), f16)},
        "key: expected dimension 1 to be kv_width = 72 (kv_width from kv_num_heads * head_size, head_size = 72), "
        "got shape (8, 64).",
    ),
    Refused(
        "shapes_match",
        "plain",
        {"out": np.zeros((8, 255), f16)},
        "out: expected dimension 1 to be output_width = 256 (output_width from num_heads * v_head_size), "
        "got shape (8, 255).",
    ),
    Refused(
        "shapes_match",
        "latent",
        {"out": np.zeros((8, 288), f16)},
        "out: expected dimension 1 to be output_width = 256 (output_width from num_heads * v_head_size), "
        "got shape (8, 288).",
    ),
    Refused(
        "shapes_match",
        "all",
        {"attention_bias": np.zeros((3, 2, 5, 21), f16)},
        f"attention_bias: expected dimension 1 to be {HEADS} or 1, got shape (3, 2, 5, 21).",
    ),
]

HOST = ATTRIBUTES + RULES + TYPES + SHAPES + LATER


def broken_rule(infos: Any, attributes: Any) -> str | None:
    """Name of the rule that refuses a call."""
    call = validate.Call(infos, attributes)
    return next((check.__name__ for check in validate.RULES if check(call) is not None), None)


@pytest.mark.parametrize("row", HOST, ids=str)
def test_a_broken_rule_is_named_and_no_cache_is_touched(row):
    call = arguments(row.base, row.changes)
    caches = {name: call[name].tobytes() for name in ("key_cache", "value_cache") if name in call}
    out = call["out"].tobytes() if "out" in call else b""
    with pytest.raises(InvalidArgumentError) as refusal:
        paged_attention(**{"query": None, **call})
    assert str(refusal.value) == row.message
    assert isinstance(refusal.value, ValueError)
    assert refusal.value.code == "INVALID_ARGUMENT"
    assert not isinstance(refusal.value, UnsupportedError)
    assert {name: call[name].tobytes() for name in caches} == caches
    if out:
        assert call["out"].tobytes() == out


@pytest.mark.parametrize("row", RULES + TYPES + SHAPES, ids=str)
def test_it_is_that_rule_which_refuses(row):
    call = arguments(row.base, row.changes)
    infos = {
        {"out": "output"}.get(name, name): NUMPY.describe(x)
        for name, x in call.items()
        if name in contract.INPUT_BY_NAME or name == "out"
    }
    attributes = {name: x for name, x in call.items() if name in contract.ATTRIBUTE_BY_NAME}
    assert broken_rule(infos, attributes) == row.rule


@pytest.mark.parametrize("row", PLACED, ids=str)
def test_arrays_in_the_wrong_place_or_layout_are_named(row):
    built = build(BASES[row.base])
    infos = {
        name: NUMPY.describe(np.ascontiguousarray(x))._replace(
            device="cpu" if name == "attention_metadata" else "cuda:0"
        )
        for name, x in built.inputs.items()
    }
    assert broken_rule(infos, built.attributes) is None
    for name, change in row.changes.items():
        infos[name] = change(infos[name])
    assert broken_rule(infos, built.attributes) == row.rule
    with pytest.raises(InvalidArgumentError) as refusal:
        validate.validate(infos, built.attributes)
    assert str(refusal.value) == row.message


@pytest.mark.parametrize("base", BASES)
def test_the_calls_before_the_change_are_good(base):
    result = paged_attention(**arguments(base, {}))
    assert np.isfinite(result.output.astype(f32)).all()


# ---- nothing is left out -----------------------------------------------------------------------------------------


def test_every_rule_is_broken_by_some_case():
    broken = {row.rule for row in RULES + TYPES + SHAPES + PLACED}
    assert broken == {check.__name__ for check in validate.RULES}


def test_every_input_is_given_a_wrong_type():
    assert {next(iter(row.changes)) for row in TYPES} >= {row.name for row in contract.INPUTS}


def test_every_dimension_is_given_a_wrong_size_or_has_a_rule_of_its_own():
    assert DIMENSIONS.keys() | CHOSEN.keys() == {
        (row.name, axis) for row in contract.INPUTS if not row.name.endswith("_scale") for axis in range(len(row.shape))
    }
    assert {name for name, *_ in SCALES} == {row.name for row in contract.INPUTS if row.type == "T_KV_SCALE"}
    named = {row.rule for row in RULES}
    assert all(rule is None or rule in named for rule in CHOSEN.values())


def test_every_attribute_is_refused_for_some_value():
    refused = {name for row in ATTRIBUTES + RULES for name in row.changes}
    assert refused >= {row.name for row in contract.ATTRIBUTES}


def test_every_optional_input_of_a_mode_is_missed_or_refused():
    broken = {next(iter(row.changes)) for row in RULES if row.rule == "presence_pattern"}
    wanted = {name for mode in contract.MODES for name in (*mode.present, *mode.absent)}
    assert broken >= wanted


# ---- single rules ------------------------------------------------------------------------------------------------


def test_a_missing_attribute_is_named():
    with pytest.raises(InvalidArgumentError) as refusal:
        PagedAttention(kv_num_heads=2)
    assert str(refusal.value) == "num_heads: required attribute, got none."


def test_an_unknown_attribute_is_named():
    with pytest.raises(InvalidArgumentError) as refusal:
        PagedAttention(num_heads=2, kv_num_heads=2, qk_rotation=1)
    known = ", ".join(contract.ATTRIBUTE_BY_NAME)
    assert str(refusal.value) == f"qk_rotation: expected an attribute among {known}, got an unknown name."


def test_an_array_of_no_known_kind_is_named():
    call = arguments("plain", {"block_table": lambda x: x.tolist()})
    with pytest.raises(InvalidArgumentError) as refusal:
        paged_attention(**call)
    assert str(refusal.value) == (
        "block_table: expected a NumPy or CuPy array, a torch tensor, or an object with __dlpack__ or "
        "__cuda_array_interface__, got list."
    )


def test_one_buffer_for_both_caches_is_refused_at_every_call():
    operator = PagedAttention(num_heads=4, kv_num_heads=2)
    built = build(Case())
    message = "value_cache: expected memory of its own, got the buffer of key_cache."
    with pytest.raises(InvalidArgumentError) as refusal:
        operator(**{**built.inputs, "value_cache": built["key_cache"]})
    assert str(refusal.value) == message
    operator(**built.inputs)  # the good call of the same kind is remembered
    before = built["key_cache"].tobytes()
    with pytest.raises(InvalidArgumentError) as refusal:
        operator(**{**built.inputs, "value_cache": built["key_cache"]})
    assert str(refusal.value) == message
    assert built["key_cache"].tobytes() == before


@pytest.mark.parametrize("checks", [False, True])
def test_memory_that_is_written_may_not_be_another_array_too(checks: bool):
    built = build(Case())
    operator = PagedAttention(num_heads=4, kv_num_heads=2, checks=checks)
    operator(**built.inputs)  # addresses are no part of what is remembered
    pool = np.zeros((11, *built["key_cache"].shape[1:]), f16)
    blocks = built["key_cache"].shape[0]
    pool[:] = np.nan
    cases = {
        "value_cache: expected memory of its own, got memory of key_cache.": {
            "key_cache": pool[:blocks],
            "value_cache": pool[1 : blocks + 1],
        },
        "out: expected memory of its own, got memory of key_cache.": {
            "key_cache": pool[:blocks],
            "out": pool.reshape(-1)[512 : 512 + 8 * 256].reshape(8, 256),
        },
        "key: expected memory of its own, got memory of value_cache.": {
            "value_cache": pool[:blocks],
            "key": pool.reshape(-1)[512 : 512 + 8 * 128].reshape(8, 128),
        },
        "out: expected memory of its own, got memory of query.": {
            "query": pool.reshape(-1)[: 8 * 256].reshape(8, 256),
            "out": pool.reshape(-1)[256 : 9 * 256].reshape(8, 256),
        },
    }
    for message, changes in cases.items():
        before = pool.tobytes()
        with pytest.raises(InvalidArgumentError) as refusal:
            operator(**{**built.inputs, **changes})
        assert str(refusal.value) == message
        assert pool.tobytes() == before


def test_options_are_checked():
    for option, message in (
        ({"backend": ["numpy"]}, "backend: expected a name or None, got ['numpy']."),
        ({"scale": None}, "scale: expected a number, got None."),
        ({"checks": [1]}, "checks: expected True or False, got [1]."),
        ({"return_lse": "yes"}, "return_lse: expected True or False, got 'yes'."),
        ({"max_output_qk_bytes": None}, "max_output_qk_bytes: expected a number, got None."),
        ({"max_output_qk_bytes": math.inf}, "max_output_qk_bytes: expected a finite number, got inf."),
        ({"max_output_qk_bytes": -1}, "max_output_qk_bytes: expected a value >= 0, got -1."),
        ({"split_keys": 0}, "split_keys: expected a multiple of 16 below 2**31, or None, got 0."),
        ({"split_keys": 24}, "split_keys: expected a multiple of 16 below 2**31, or None, got 24."),
        ({"split_keys": 2**31}, f"split_keys: expected a multiple of 16 below 2**31, or None, got {2**31}."),
        ({"split_keys": "all"}, "split_keys: expected a number, got 'all'."),
    ):
        built = build(Case())
        for call in (built.run, lambda _, **more: PagedAttention(num_heads=4, kv_num_heads=2, **more)):
            with pytest.raises(InvalidArgumentError) as refusal:
                call(paged_attention, **option)
            assert str(refusal.value) == message


@pytest.mark.parametrize("window", [2**31, 2**100])
def test_a_window_wider_than_any_position_is_none(window: int):
    built = build(Case(positions="ahead"))
    built["query_positions"][-1] = 2**31 - 1
    want = built.copy().run(paged_attention)
    built.attributes["local_window_size"] = window
    got = built.run(paged_attention)
    assert got.output.tobytes() == want.output.tobytes()
    assert problem_of(built.inputs, built.attributes).local_window_size == -1


def test_copies_of_an_operator_hold_its_attributes_and_options():
    operator = PagedAttention(num_heads=4, kv_num_heads=2, softcap=3, return_lse=True, backend="numpy", split_keys=64)
    built = build(Case())
    want = operator(**built.copy().inputs)
    for twin in (copy.copy(operator), copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert twin is not operator
        assert twin.options == operator.options
        got = twin(**built.copy().inputs)
        assert got.output.tobytes() == want.output.tobytes()
        assert got.lse.tobytes() == want.lse.tobytes()


def test_metadata_of_any_kind_is_checked_before_it_is_read():
    built = build(Case())
    for metadata, message in (
        (np.array([{}, {}], object), "attention_metadata: expected element type int32, got object."),
        (np.zeros((1, 2), i32), "attention_metadata: expected rank 1, (2|3), got shape (1, 2)."),
    ):
        with pytest.raises(InvalidArgumentError) as refusal:
            paged_attention(**built.inputs, **built.attributes, attention_metadata=metadata)
        assert str(refusal.value) == message


class OnceOnly:
    """A foreign array that may be taken through DLPack once, as a stream's producer may want it."""

    def __init__(self, array):
        self.array, self.taken = array, False

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        assert not self.taken
        self.taken = True
        return self.array.__dlpack__(**options)


def test_metadata_is_read_once_whatever_its_strides_and_what_came_before():
    built = build(replace(EVERYTHING, metadata=False))
    want = built.copy().run(paged_attention).output
    operator = PagedAttention(**built.attributes)
    bounds = np.array([8, 99, 48, 99], i32)
    for metadata in (bounds[::2], bounds[::2].copy(), OnceOnly(bounds[::2].copy()), bounds[::2]):
        got = operator(**built.copy().inputs, attention_metadata=metadata)
        assert got.output.tobytes() == want.tobytes()
    for metadata in (bounds[::2].astype(np.int64), bounds[::2].astype(">i4"), bounds[None, ::2]):
        with pytest.raises(InvalidArgumentError, match="attention_metadata: expected"):
            operator(**built.copy().inputs, attention_metadata=metadata)


def test_metadata_is_clamped_to_the_batch_and_the_table():
    built = build(EVERYTHING)
    inputs = {**built.inputs, "attention_metadata": np.array([10**6, 10**6, 7], i32)}
    problem = problem_of(inputs, built.attributes)
    assert (problem.max_query_len_bound, problem.max_kv_len_bound) == (8, 48)
    assert problem.max_kv_len_lower_bound == 7
    unknown = problem_of({**inputs, "attention_metadata": np.zeros(2, i32)}, built.attributes)
    assert (unknown.query_len_bound, unknown.kv_len_bound) == (8, 48)


def test_metadata_never_enters_a_mask():
    built = build(replace(EVERYTHING, metadata=False))
    want = built.copy().run(paged_attention)
    for bounds in ([0, 0], [8, 48], [10**6, 10**6], [4, 18, 18]):
        got = built.copy().run(paged_attention, attention_metadata=np.array(bounds, i32))
        assert got.output.tobytes() == want.output.tobytes()


def test_a_refused_size_of_output_qk_depends_on_the_batch_alone():
    built = build(Case(qk_output=2))
    exact = 4 * 8 * 18 * 4
    built.copy().run(paged_attention, max_output_qk_bytes=exact)
    before = built["key_cache"].tobytes()
    with pytest.raises(InvalidArgumentError, match=r"^output_qk: expected at most 2303 bytes"):
        built.run(paged_attention, max_output_qk_bytes=exact - 1)
    assert built["key_cache"].tobytes() == before


# ---- one value, many spellings -----------------------------------------------------------------------------------

SPELLINGS = [int, float, np.float16, np.float32, np.float64, np.int32, np.int64, np.array]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("name", ["scale", "softcap", "qk_norm_epsilon"])
def test_a_real_attribute_means_the_same_however_it_is_spelled(name, spelling):
    built = build(Case(qk_norm=True))
    want = built.copy().run(paged_attention, **{name: 1.0})
    got = built.copy().run(paged_attention, **{name: spelling(1)})
    assert got.output.tobytes() == want.output.tobytes()


@pytest.mark.parametrize("spelling", [*SPELLINGS, np.int8, np.uint16], ids=lambda s: s.__name__)
def test_an_integer_attribute_means_the_same_however_it_is_spelled(spelling):
    built = build(Case(rope="partial", window=5))
    want = built.copy().run(paged_attention)
    spelled = {name: spelling(x) for name, x in built.attributes.items() if isinstance(x, int) and x >= 0}
    assert len(spelled) == 9
    got = built.copy().run(paged_attention, **spelled)
    assert got.output.tobytes() == want.output.tobytes()
    assert got.key_cache_out.tobytes() == want.key_cache_out.tobytes()
    switched = built.copy().run(paged_attention, do_rotary=True, is_causal=np.True_)
    assert switched.output.tobytes() == want.output.tobytes()


@pytest.mark.parametrize("window", [-1, 0, -7, np.int64(-1), np.float32(-1)])
def test_a_window_of_no_size_is_off(window):
    built = build(Case())
    want = built.copy().run(paged_attention)
    got = built.copy().run(paged_attention, local_window_size=window)
    assert got.output.tobytes() == want.output.tobytes()


@pytest.mark.parametrize("spelling", ["float16", f16, np.dtype(f16), FLOAT16], ids=repr)
def test_qk_dtype_takes_names_and_types(spelling):
    result = build(Case(qk_output=1)).run(paged_attention, qk_dtype=spelling)
    assert result.output_qk.dtype == f16


def test_qk_dtype_names_what_it_knows():
    with pytest.raises(InvalidArgumentError, match=r"^qk_dtype: expected one of float16, .*, got 'half'\.$"):
        build(Case(qk_output=1)).run(paged_attention, qk_dtype="half")
