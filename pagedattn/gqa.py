"""``com.microsoft::GroupQueryAttention`` of ONNX Runtime: a padded batch and a contiguous cache, on the same backends.

A padded batch is a ragged one whose rows are not packed yet, and a cache (batch_size, kv_num_heads, capacity, width) is
a pool of one block a sequence with two axes swapped. So this module packs the rows that count, states the call as a
contiguous `pagedattn.problem.Problem`, and puts the results back in their rows; nothing is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from pagedattn import env
from pagedattn.api import PagedAttention, describe
from pagedattn.arrays import Adapter, Float8View, adapter_of, dtype_named
from pagedattn.contract import QUANT_TYPES, TYPES, Attribute, Input
from pagedattn.dtypes import INT4, name_of
from pagedattn.errors import InvalidArgumentError, PagedAttentionError, UnsupportedError
from pagedattn.jit import cuda
from pagedattn.problem import TensorInfo
from pagedattn.runtime import runtime_of
from pagedattn.validate import (
    DEFAULT_MAX_OUTPUT_QK_BYTES,
    Shapes,
    coerce_attributes,
    coerce_options,
    expected,
    require_values,
    shared_memory,
    spans,
)

NAME = "GroupQueryAttention"

INPUTS: tuple[Input, ...] = (
    Input(0, "query", "T", ("batch_size", "sequence_length", "query_width"), "Query rows; or packed [Q | K | V]."),
    Input(1, "key", "T", ("batch_size", "kv_sequence_length", "kv_width"), "New key rows.", optional=True),
    Input(2, "value", "T", ("batch_size", "kv_sequence_length", "kv_width"), "New value rows.", optional=True),
    Input(
        3,
        "past_key",
        "T_CACHE",
        ("batch_size", "kv_num_heads", "capacity", "cache_width"),
        "Keys by position; written in place where they have room.",
        optional=True,
        written=True,
    ),
    Input(
        4,
        "past_value",
        "T_CACHE",
        ("batch_size", "kv_num_heads", "capacity", "cache_width"),
        "Values by position, likewise.",
        optional=True,
        written=True,
    ),
    Input(5, "seqlens_k", "S", ("batch_size",), "Tokens of each sequence after this call, minus one."),
    Input(6, "total_sequence_length", "S", (), "The largest of them, or a bound with query_seqlens.", on_host=True),
    Input(7, "cos_cache", "T", ("max_seq_len", "rotary_half"), "Cosines by position.", optional=True),
    Input(8, "sin_cache", "T", ("max_seq_len", "rotary_half"), "Sines by position.", optional=True),
    Input(9, "position_ids", "S", ("batch_size", "sequence_length"), "Positions for RoPE alone.", optional=True),
    Input(
        10,
        "attention_bias",
        "T",
        ("batch_size|1", "num_heads|1", "sequence_length", "total_sequence_length"),
        "Added to the scores after softcap.",
        optional=True,
    ),
    Input(11, "head_sink", "T", ("num_heads",), "One more logit per head, in the denominator only.", optional=True),
    Input(12, "k_scale", "T_KV_SCALE", ("k_scale_shape",), "Key dequantization scale.", optional=True),
    Input(13, "v_scale", "T_KV_SCALE", ("v_scale_shape",), "Value dequantization scale.", optional=True),
    Input(14, "q_norm_weight", "T", ("head_size",), "RMSNorm weight of each query head.", optional=True),
    Input(15, "k_norm_weight", "T", ("head_size",), "RMSNorm weight of each key head.", optional=True),
    Input(
        16, "query_seqlens", "S", ("batch_size",), "New tokens of each sequence; the rest is padding.", optional=True
    ),
)
INPUT_BY_NAME = {row.name: row for row in INPUTS}
OUTPUT_NAMES = ("output", "present_key", "present_value", "output_qk")

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("num_heads", int, None, "Number of query heads.", minimum=1),
    Attribute("kv_num_heads", int, None, "Number of key and value heads; divides num_heads.", minimum=1),
    Attribute("scale", float, 0.0, "Factor of q . k; 0 means 1 / sqrt(head_size)."),
    Attribute("softcap", float, 0.0, "Scores become softcap * tanh(score / softcap); 0 = off.", minimum=0.0),
    Attribute("local_window_size", int, -1, "A token sees this many positions, its own included; -1 = all."),
    Attribute("do_rotary", int, 0, "Apply RoPE to query and key.", choices=(0, 1)),
    Attribute("rotary_interleaved", int, 0, "Pairs are (2i, 2i+1).", choices=(0, 1)),
    Attribute("smooth_softmax", int, -1, "1: a head_sink of zeros, unless there is one.", choices=(-1, 0, 1)),
    Attribute("causal", int, 1, "0: a token also sees the later new tokens of its sequence.", choices=(0, 1)),
    Attribute("k_quant_type", str, "NONE", "Granularity of k_scale.", choices=QUANT_TYPES),
    Attribute("v_quant_type", str, "NONE", "Granularity of v_scale.", choices=QUANT_TYPES),
    Attribute("kv_cache_bit_width", int, 0, "Width of a quantized element.", choices=(0, 4, 8)),
    Attribute("qk_output", int, 0, "1: scores just before softmax; 2: probabilities.", choices=(0, 1, 2)),
    Attribute("qk_norm_epsilon", float, 1e-6, "Epsilon of QK-norm; > 0."),
    Attribute("q_norm_epsilon", float, 0.0, "The same for queries; 0 = qk_norm_epsilon.", minimum=0.0),
    Attribute("k_norm_epsilon", float, 0.0, "The same for keys; 0 = qk_norm_epsilon.", minimum=0.0),
    Attribute("sliding_window_cache", int, 0, "1: the cache holds the last positions only.", choices=(0, 1)),
)
# Attributes that both operators have under one name.
SHARED_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "do_rotary",
    "rotary_interleaved",
    "k_quant_type",
    "v_quant_type",
    "qk_output",
)
# The backends know inputs by PagedAttention's names; their messages are put in these.
_NAMES = {
    "key_cache": "past_key",
    "value_cache": "past_value",
    "is_causal": "causal",
    "rotary_positions": "position_ids",
}


class GroupQueryAttentionResult(NamedTuple):
    """What a call returns.

    Attributes
    ----------
    output : (batch_size, sequence_length, num_heads * head_size), T; 0 in padding rows
    present_key, present_value : the caller's past arrays where they had room, else new ones
    output_qk : (batch_size, num_heads, sequence_length, total_sequence_length), T, or None
    """

    output: Any
    present_key: Any
    present_value: Any
    output_qk: Any = None


class _ContiguousAttention(PagedAttention):
    """The operator on a cache of one run of positions a sequence."""

    name = NAME
    contiguous = True


@lru_cache(maxsize=64)
def _operator(attributes: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> PagedAttention:
    return _ContiguousAttention(**dict(attributes), **dict(options))


def group_query_attention(
    query: Any,
    key: Any = None,
    value: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    seqlens_k: Any = None,
    total_sequence_length: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids: Any = None,
    attention_bias: Any = None,
    head_sink: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    query_seqlens: Any = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    smooth_softmax: int = -1,
    causal: int = 1,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    qk_output: int = 0,
    qk_norm_epsilon: float = 1e-6,
    q_norm_epsilon: float = 0.0,
    k_norm_epsilon: float = 0.0,
    sliding_window_cache: int = 0,
    out: Any = None,
    backend: str | None = None,
    checks: bool | None = None,
    max_output_qk_bytes: int = DEFAULT_MAX_OUTPUT_QK_BYTES,
    split_keys: int | None = None,
) -> GroupQueryAttentionResult:
    """Append new keys and values to a contiguous cache and attend a padded batch to it.

    This is ``com.microsoft::GroupQueryAttention`` of ONNX Runtime, computed by the backends of `paged_attention` on
    arrays of the same kinds. B is batch_size, S sequence_length, H num_heads, KH kv_num_heads, D head_size, C the
    cache's capacity; T is float16 or bfloat16, on the CPU also float32. After the call sequence b has
    ``seqlens_k[b] + 1`` tokens; its first ``query_seqlens[b]`` rows are the newest of them, the others are padding.

    Parameters
    ----------
    query : (B, S, H * D), T
        Or packed rows ``[Q | K | V]``, (B, S, (H + 2 * KH) * D), with key and value absent.
    key, value : (B, S, KH * D), T
        Or (B, 0, KH * D): nothing is appended, and the tokens attend what the cache holds already.
    past_key, past_value : (B, KH, C, D), T, int8, float8e4m3fn, or uint8 with int4 codes; optional
        The cache. **Written in place** and returned if ``C >= total_sequence_length``; else copied into larger arrays.
    seqlens_k : (B,), int32
        Tokens of each sequence in the cache **after** this call, **minus one**.
    total_sequence_length : int, or array of one integer in host memory
        The largest number of tokens in the batch; with query_seqlens a bound of it. At most the rows of past_key and
        the new ones.
    cos_cache, sin_cache : (max_seq_len, rotary_dim / 2), T, optional
    position_ids : (B, S), int64 or int32, optional
        Positions for RoPE; the mask goes by order in the sequence. In a prompt (S is total_sequence_length, without
        query_seqlens) only the first one is read, as the offset of all.
    attention_bias : (B or 1, H or 1, S, total_sequence_length), T, optional
        Added to the scores after softcap.
    head_sink : (H,), T, optional
        An extra logit per head, in the denominator only.
    k_scale, v_scale : (1,), (KH, 1, D) or (1, KH, 1, D), float32, optional
        Dequantized value = code * scale.
    q_norm_weight, k_norm_weight : (D,), T, optional
        RMSNorm of each query and key head, before RoPE.
    query_seqlens : (B,), int32, optional
        New tokens of each sequence; ``min(S, seqlens_k + 1)`` when absent. 0 is an idle sequence.
    num_heads, kv_num_heads : int
    scale, softcap, local_window_size, do_rotary, rotary_interleaved, k_quant_type, v_quant_type, qk_output
        As in `paged_attention`.
    smooth_softmax : {-1, 0, 1}
        1 is a head_sink of zeros, unless there is one.
    causal : {0, 1}
        0: a token also sees the later new tokens of its sequence. Not with a window or query_seqlens.
    kv_cache_bit_width : {0, 4, 8}
        4 for a cache of packed int4; for others it may be left out.
    qk_norm_epsilon, q_norm_epsilon, k_norm_epsilon : float
        The last two replace the first where they are not 0; they must agree.
    sliding_window_cache : {0, 1}
        1: the cache holds the newest positions only, in order from row 0, and drops the oldest by itself.
    out : (B, S, H * D), T, optional
        Array to write the output to, with memory of its own.
    backend, checks, max_output_qk_bytes, split_keys
        As in `paged_attention`.

    Returns
    -------
    GroupQueryAttentionResult
        ``output``, ``present_key``, ``present_value``, ``output_qk``; arrays of the caller's kind.

    Raises
    ------
    InvalidArgumentError
        The call breaks the contract; no cache was touched.
    UnsupportedError
        No backend, or not the forced one, serves the call.
    PagedAttentionError
        A graph is being captured.

    See Also
    --------
    paged_attention : the same on a paged cache and a ragged batch.
    """
    given = (
        query,
        key,
        value,
        past_key,
        past_value,
        seqlens_k,
        total_sequence_length,
        cos_cache,
        sin_cache,
        position_ids,
        attention_bias,
        head_sink,
        k_scale,
        v_scale,
        q_norm_weight,
        k_norm_weight,
        query_seqlens,
    )
    arrays = {row.name: x for row, x in zip(INPUTS, given, strict=True) if x is not None}
    attributes = coerce_attributes(
        {
            "num_heads": num_heads,
            "kv_num_heads": kv_num_heads,
            "scale": scale,
            "softcap": softcap,
            "local_window_size": local_window_size,
            "do_rotary": do_rotary,
            "rotary_interleaved": rotary_interleaved,
            "smooth_softmax": smooth_softmax,
            "causal": causal,
            "k_quant_type": k_quant_type,
            "v_quant_type": v_quant_type,
            "kv_cache_bit_width": kv_cache_bit_width,
            "qk_output": qk_output,
            "qk_norm_epsilon": qk_norm_epsilon,
            "q_norm_epsilon": q_norm_epsilon,
            "k_norm_epsilon": k_norm_epsilon,
            "sliding_window_cache": sliding_window_cache,
        },
        ATTRIBUTES,
    )
    for name in ("query", "seqlens_k", "total_sequence_length"):
        if name not in arrays:
            raise InvalidArgumentError(f"{name}: required input, got none.")
    total = _host_int(arrays.pop("total_sequence_length"))
    if out is not None:
        arrays["output"] = out
    options = coerce_options(backend, checks, max_output_qk_bytes, split_keys)
    call = _Call(arrays, attributes, total, options)
    runtime = runtime_of(call.infos["query"].device)
    with runtime.active(call.adapters["query"].stream(call.arrays["query"])):
        if runtime.is_capturing():
            raise PagedAttentionError(
                "graph capture: group_query_attention allocates the arrays of its packed form, which a graph would not "
                "keep; capture paged_attention instead."
            )
        return call.run()


def _host_int(x: Any) -> int:
    """total_sequence_length: a Python int, or an array of one element in host memory."""
    if not hasattr(x, "shape"):
        if not isinstance(x, Integral):
            raise InvalidArgumentError(expected("total_sequence_length", "an integer", repr(x)))
        return int(x)
    infos, adapters = describe({"total_sequence_length": x})
    info = infos["total_sequence_length"]
    if info.device.startswith("cuda"):
        raise InvalidArgumentError(
            expected("total_sequence_length", "an integer in host memory", f"one on {info.device}")
        )
    values = adapters["total_sequence_length"].to_numpy(x)
    if values.size != 1 or values.dtype.kind not in "iu":
        got = f"shape {info.shape} of {values.dtype}"
        raise InvalidArgumentError(expected("total_sequence_length", "one integer", got))
    return int(values.reshape(()))


def _check(infos: Mapping[str, TensorInfo], attributes: Mapping[str, Any], total: int) -> dict[str, int]:
    """Check what the padded form adds to the rules of PagedAttention; returns the sizes by name."""
    shapes = Shapes(infos)
    for size in ("num_heads", "kv_num_heads"):
        shapes.bind(size, attributes[size], f"attribute {size}")
    shapes.bind("total_sequence_length", total, "total_sequence_length")
    for message in _faults(shapes, attributes):
        raise InvalidArgumentError(message)
    in_place = attributes["sliding_window_cache"] or shapes.sizes.get("capacity", 0) >= total
    written = ("past_key", "past_value", "output") if in_place else ("output",)
    shared = shared_memory(infos, spans(infos), written)
    if shared is not None:
        raise InvalidArgumentError(shared)
    return shapes.sizes


def _faults(shapes: Shapes, attributes: Mapping[str, Any]) -> Iterator[str]:
    """Messages of the broken rules; each rule relies on those before it."""
    for first, second in (("key", "value"), ("past_key", "past_value")):
        if shapes.has(first) != shapes.has(second):
            there, missing = (first, second) if shapes.has(first) else (second, first)
            yield f"{missing}: required together with {there}, got none."
    for row in INPUTS:
        if not shapes.has(row.name):
            continue
        shape = shapes.tensors[row.name].shape
        if row.name in ("k_scale", "v_scale"):
            if len(shape) == 4 and shape[0] != 1:
                yield expected(row.name, "dimension 0 of four to be 1", f"shape {shape}")
        elif not (row.name == "seqlens_k" and shape == (shapes.sizes["batch_size"], 1)):
            message = shapes.match(row.name, row.shape)
            if message:
                yield message
        allowed = [dtype.numpy for dtype in TYPES[row.type]]  # that they agree, the paged operator checks
        if row.name == "position_ids":
            allowed.insert(0, np.dtype(np.int64))
        if shapes.tensors[row.name].dtype not in allowed:
            names = " or ".join(map(name_of, allowed))
            yield expected(row.name, f"element type {names}", name_of(shapes.tensors[row.name].dtype))
    if shapes.has("output"):
        heads = attributes["num_heads"] + (0 if shapes.has("key") else 2 * attributes["kv_num_heads"])
        width = shapes.sizes["query_width"] // heads * attributes["num_heads"]
        shapes.bind("output_width", width, "num_heads * head_size")
        message = shapes.match("output", ("batch_size", "sequence_length", "output_width"))
        if message:
            yield message
        want, got = (name_of(shapes.tensors[name].dtype) for name in ("query", "output"))
        if got != want:
            yield expected("output", f"element type {want}, that of query", got)
    length, total = shapes.sizes["sequence_length"], shapes.sizes["total_sequence_length"]
    if total < max(1, length):
        yield expected("total_sequence_length", f"a value >= sequence_length = {length}, and > 0", total)
    if total > np.iinfo(np.int32).max:
        yield expected("total_sequence_length", "a value that int32 holds", total)
    if shapes.sizes.get("kv_sequence_length", length) not in (0, length):
        kv_length = shapes.sizes["kv_sequence_length"]
        yield expected("key", f"dimension 1 to be sequence_length = {length}, or 0", kv_length)
    if shapes.sizes.get("kv_sequence_length") == 0 and not shapes.has("past_key"):
        yield "past_key: required by a key of length 0, got none."
    window = attributes["local_window_size"]
    if window == 0 or window < -1:
        yield expected("local_window_size", "-1 or a value >= 1", window)
    if not attributes["causal"] and window > 0:
        yield expected("local_window_size", "-1 with causal = 0", window)
    if shapes.has("query_seqlens") and not attributes["causal"]:
        yield expected("causal", "1 with query_seqlens", 0)
    yield from _cache_faults(shapes, attributes)
    most = shapes.sizes.get("capacity", 0) + shapes.sizes.get("kv_sequence_length", length)
    if total > most and not attributes["sliding_window_cache"]:
        yield expected("total_sequence_length", f"a value <= {most}, the rows of past_key and the new ones", total)


def _cache_faults(shapes: Shapes, attributes: Mapping[str, Any]) -> Iterator[str]:
    quantized = attributes["k_quant_type"] != "NONE" or attributes["v_quant_type"] != "NONE"
    if not shapes.has("past_key"):
        if quantized:
            yield "past_key: required with a quantized cache, whose type it shows, got none."
    else:
        stored = shapes.tensors["past_key"].dtype
        allowed = (4,) if stored == INT4.numpy else (0, 8) if stored.itemsize == 1 else (0,)
        if attributes["kv_cache_bit_width"] not in allowed:
            want = f"{' or '.join(map(str, allowed))}, because past_key is {stored}"
            yield expected("kv_cache_bit_width", want, attributes["kv_cache_bit_width"])
    epsilons = [attributes[name] or attributes["qk_norm_epsilon"] for name in ("q_norm_epsilon", "k_norm_epsilon")]
    if shapes.has("q_norm_weight") and epsilons[0] != epsilons[1]:
        raise UnsupportedError(expected("k_norm_epsilon", f"that of queries, {epsilons[0]}", epsilons[1]))
    if attributes["sliding_window_cache"]:
        window = attributes["local_window_size"]
        if window < 1:
            yield expected("local_window_size", "a value >= 1 with sliding_window_cache", window)
        if not shapes.has("past_key"):
            yield "past_key: required by sliding_window_cache, got none."
        for name in ("past_key", "past_value"):
            if not shapes.tensors[name].writeable:
                yield f"{name}: expected a writeable array, got a read-only one."
        if shapes.sizes["capacity"] < window:
            yield expected("past_key", f"dimension 2 >= local_window_size = {window}", shapes.sizes["capacity"])
        if shapes.sizes.get("kv_sequence_length") == 0:
            raise UnsupportedError("key: expected new rows with sliding_window_cache, got a length of 0.")
        if attributes["qk_output"]:
            raise UnsupportedError(expected("qk_output", "0 with sliding_window_cache", attributes["qk_output"]))
    elif shapes.has("query_seqlens") and not shapes.has("past_key"):
        yield "past_key: required by query_seqlens, got none."


@contextmanager
def _own_names() -> Iterator[None]:
    """Put the messages of the paged operator in this operator's names."""
    try:
        yield
    except InvalidArgumentError as error:
        text = re.sub(r"\w+", lambda word: _NAMES.get(word[0], word[0]), str(error))
        raise type(error)(text) from None


class _Rows:
    """The rows that count among those of a padded batch.

    Attributes
    ----------
    total, new, past : (batch_size,) int64
        Tokens of each sequence after the call, new ones, and before.
    cumulative_sequence_length : (batch_size + 1,) int32
    are_packed : bool
        They lie one after the other already, with no padding but at the end.
    """

    def __init__(self, xp: Any, length: int, total: Any, new: Any, all_full: bool) -> None:
        self.xp, self.total, self.new, self.past = xp, total, new, total - new
        batch_size = total.shape[0]
        ends = xp.cumsum(new)
        self.cumulative_sequence_length = xp.concatenate([xp.zeros(1, ends.dtype), ends]).astype(np.int32)
        self.are_packed = all_full or batch_size == 1
        if self.are_packed:
            return
        padded = xp.arange(batch_size * length)
        sequence, offset = padded // length, padded % length
        self.live = offset < new[sequence]
        starts = ends - new
        self.place = xp.where(self.live, starts[sequence] + offset, 0)
        # On the host the packed rows can be counted; elsewhere padding rows follow them, which the operator allows.
        packed = padded[: int(ends[-1])] if xp is np else padded
        sequence = xp.minimum(xp.searchsorted(ends, packed, side="right"), batch_size - 1)
        self.source = xp.minimum(sequence * length + packed - starts[sequence], batch_size * length - 1)

    def pack(self, x: Any) -> Any:
        """(batch_size * sequence_length, ...) to (rows, ...)."""
        return x if self.are_packed else _bits(x)[self.source].view(x.dtype)

    def unpack(self, x: Any) -> Any:
        """(rows, ...) to (batch_size * sequence_length, ...), 0 in padding rows."""
        if self.are_packed:
            return x
        bits, rows = _bits(x), self.place.size
        zero = bits.dtype.type(0)
        if not x.shape[0]:
            return self.xp.full((rows, *x.shape[1:]), zero).view(x.dtype)
        live = self.live.reshape(rows, *(1 for _ in x.shape[1:]))
        return self.xp.where(live, bits[self.place], zero).view(x.dtype)


def _bits(x: Any) -> Any:
    """An array as unsigned integers, which every library can move."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


class _Call:
    """One call: its arrays as given, and as arrays of NumPy or CuPy where rows are moved."""

    def __init__(self, arrays: dict[str, Any], attributes: dict[str, Any], total: int, options: dict[str, Any]) -> None:
        self.given, self.arrays = dict(arrays), arrays
        self.attributes, self.total, self.options = attributes, total, options
        self.infos, self.adapters = describe(arrays)
        self.sizes = _check(self.infos, attributes, total)
        self.batch_size, self.length = self.sizes["batch_size"], self.sizes["sequence_length"]
        self.on_host = not self.infos["query"].device.startswith("cuda")
        self.xp: Any = np if self.on_host else cuda.cupy()

    def native(self, x: Any, adapter: Adapter) -> Any:
        """The same memory as an array of NumPy, or of CuPy for one on a GPU."""
        if self.on_host:
            return adapter.to_numpy(x)
        return x if isinstance(x, self.xp.ndarray) else self.xp.from_dlpack(x)

    def array(self, name: str) -> Any:
        """An input as an array of NumPy or CuPy."""
        return self.native(self.arrays[name], self.adapters[name])

    def run(self) -> GroupQueryAttentionResult:
        """Pack, run and unpack."""
        rows = self.rows()
        cache = (_WindowCache if self.attributes["sliding_window_cache"] else _Cache)(self, rows)
        B, S, H = self.batch_size, self.length, self.attributes["num_heads"]
        adapter, like = self.adapters["query"], self.arrays["query"]
        io_dtype = dtype_named(self.infos["query"].dtype)
        width = self.infos["query"].shape[2]
        if "key" not in self.infos:
            width = width // (H + 2 * self.attributes["kv_num_heads"]) * H
        out = self.arrays.get("output")
        if out is None:
            out = adapter.empty((B, S, width), io_dtype, like)
        target = self.native(out, self.adapters.get("output", adapter))
        direct = rows.are_packed and target.flags.c_contiguous
        with _own_names():
            operator = _operator(self.paged_attributes(), (*self.options.items(), ("qk_dtype", io_dtype)))
            result = operator.execute(self.tensors(rows, cache), target.reshape(B * S, width) if direct else None)
        if not direct:
            target[...] = rows.unpack(result.output).reshape(target.shape)
        output_qk = None
        if result.output_qk is not None:
            output_qk = adapter.empty((B, H, S, self.total), io_dtype, like)
            by_token = rows.unpack(result.output_qk.swapaxes(0, 1)).reshape(B, S, H, self.total)
            self.native(output_qk, adapter)[...] = by_token.swapaxes(1, 2)
        cache.finish()
        return GroupQueryAttentionResult(self.given.get("output", out), cache.key, cache.value, output_qk)

    def paged_attributes(self) -> tuple[tuple[str, Any], ...]:
        """Attributes of the paged operator."""
        attributes = {name: self.attributes[name] for name in SHARED_ATTRIBUTES}
        attributes["is_causal"] = self.attributes["causal"]
        attributes["qk_norm_epsilon"] = self.attributes["q_norm_epsilon"] or self.attributes["qk_norm_epsilon"]
        if "past_key" in self.infos and self.infos["past_key"].dtype == INT4.numpy:
            attributes.update(k_cache_dtype="int4", v_cache_dtype="int4")
        return tuple(attributes.items())

    def tensors(self, rows: _Rows, cache: _Cache) -> dict[str, Any]:
        """Inputs of the paged operator."""
        names = ("cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale")
        tensors = {name: self.arrays[name] for name in names if name in self.arrays}
        for name in ("k_scale", "v_scale"):
            if name in tensors and len(tensors[name].shape) == 4:
                tensors[name] = tensors[name].reshape(tensors[name].shape[1:])
        for name in ("query", "key", "value"):
            if name in self.arrays:
                tensors[name] = rows.pack(self.padded(name))
        tensors.update(
            key_cache=_by_token(cache.work_key),
            value_cache=_by_token(cache.work_value),
            cumulative_sequence_length=rows.cumulative_sequence_length,
            past_seqlens=cache.past.astype(np.int32),
            attention_metadata=np.array([self.length, cache.bound], np.int32),
        )
        if "attention_bias" in self.arrays:
            tensors["attention_bias"] = cache.bias()
        positions = self.positions(cache) if self.attributes["do_rotary"] else None
        if positions is not None:
            tensors["rotary_positions"] = rows.pack(positions.reshape(-1).astype(np.int32))
        if self.attributes["smooth_softmax"] == 1 and "head_sink" not in tensors:
            tensors["head_sink"] = self.xp.zeros(self.attributes["num_heads"], self.infos["query"].dtype)
        if self.sizes.get("kv_sequence_length", self.length) != self.length:
            tensors["slot_mapping"] = self.xp.full(tensors["query"].shape[0], -1, np.int32)
        return tensors

    def padded(self, name: str) -> Any:
        """Rows of an activation, (batch_size * sequence_length, width); zeros for keys that are not appended."""
        x = self.array(name)
        if x.shape[1] != self.length:
            return self.xp.zeros((self.batch_size * self.length, x.shape[2]), x.dtype)
        return x.reshape(self.batch_size * self.length, x.shape[2])

    def rows(self) -> _Rows:
        """Where the rows that count are. Lengths are checked on the host, and with checks on."""
        xp, checks = self.xp, self.options["checks"]
        total = self.array("seqlens_k").reshape(-1).astype(np.int64) + 1
        most = xp.clip(total, 0, self.length)
        new = self.array("query_seqlens").astype(np.int64) if "query_seqlens" in self.arrays else None
        if self.on_host or (env.checks() if checks is None else checks):
            seqlens, bound = _host(total) - 1, self.total
            require_values("seqlens_k", seqlens, seqlens >= 0, "a value >= 0")
            require_values("seqlens_k", seqlens, seqlens < bound, f"a value < total_sequence_length = {bound}")
            if new is not None:
                good = (new >= 0) & (new <= most)
                want = "a value in [0, min(sequence_length, seqlens_k + 1)]"
                require_values("query_seqlens", _host(new), _host(good), want)
            if not self.attributes["sliding_window_cache"]:
                past, capacity = _host(total - (most if new is None else new)), self.sizes.get("capacity", 0)
                want = f"a value with at most {capacity} tokens before the new ones, the rows of past_key"
                require_values("seqlens_k", seqlens, past <= capacity, want)
        if new is None and self.length == 1:  # a total of 0 makes the past negative, which sees and writes nothing
            return _Rows(xp, 1, total, xp.ones_like(total), all_full=True)
        new = most if new is None else xp.clip(new, 0, most)
        return _Rows(xp, self.length, total, new, all_full=self.on_host and bool((new == self.length).all()))

    def positions(self, cache: _Cache) -> Any:
        """Positions for RoPE, (batch_size, sequence_length), where they are not those of the mask."""
        order = self.xp.arange(self.length)
        if "position_ids" not in self.arrays:
            return None if cache.origin is None else cache.origin[:, None] + order
        ids = self.array("position_ids")
        prompt = self.total == self.length and "query_seqlens" not in self.arrays
        return self.xp.broadcast_to(ids[:1, :1] + order, ids.shape) if prompt else ids


def _host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.get()


class _Cache:
    """The caches of a call that keeps every position.

    Attributes
    ----------
    key, value : (batch_size, kv_num_heads, capacity, width)
        What the caller gets: its own arrays, or larger ones.
    work_key, work_value
        What the call reads and writes.
    past : (batch_size,) int64
        Rows of each sequence in ``work_key`` before the call.
    bound : int
        No sequence has more rows after it.
    origin : (batch_size,) int64, or None
        Position of each sequence's first new token where it is not ``past``.
    """

    def __init__(self, call: _Call, rows: _Rows) -> None:
        self.call, self.past, self.origin = call, rows.past, None
        self.key, self.value = (self._present(name) for name in ("past_key", "past_value"))
        self.work_key, self.work_value = self.key, self.value
        capacity = self.key.shape[2]
        # Rounded up, so that consecutive steps look alike to a plan; output_qk has exactly this many columns.
        rounded = 1 << (call.total - 1).bit_length()
        self.bound = call.total if call.attributes["qk_output"] else min(capacity, rounded)

    def _present(self, name: str) -> Any:
        call = self.call
        if name not in call.arrays:
            kv_heads = call.attributes["kv_num_heads"]
            width = call.infos["query"].shape[2]
            width //= call.attributes["num_heads"] + (0 if "key" in call.infos else 2 * kv_heads)
            shape = (call.batch_size, kv_heads, call.total, width)
            query = call.adapters["query"]
            present = query.empty(shape, dtype_named(call.infos["query"].dtype), call.arrays["query"])
            call.native(present, query)[...] = 0
            return present
        fits = call.infos[name].shape[2] >= call.total
        return call.given[name] if fits else _enlarged(call.arrays[name], call.total)

    def bias(self) -> Any:
        """attention_bias by the positions of `work_key`."""
        return self.call.arrays["attention_bias"]

    def finish(self) -> None:
        """Bring what was written to the caller's arrays."""


class _WindowCache(_Cache):
    """Caches that keep the newest positions only, from row 0 in order.

    With capacity C, window W and G = C - W + 1, a sequence of T tokens keeps T of them up to C, and beyond that
    ``T - G * ceil((T - C) / G)``. A step runs on a copy with room for its new tokens, whose newest rows then come back.
    """

    def __init__(self, call: _Call, rows: _Rows) -> None:
        self.call, self.xp, self.new, self.origin = call, call.xp, rows.new, rows.past
        self.key, self.value = call.given["past_key"], call.given["past_value"]
        self.capacity = call.sizes["capacity"]
        self.bound = self.capacity + call.length
        self.work_key, self.work_value = (
            _enlarged(call.arrays[name], self.bound) for name in ("past_key", "past_value")
        )
        self.past, self.kept = self._kept(rows.past), self._kept(rows.total)

    def _kept(self, total: Any) -> Any:
        step = self.capacity - self.call.attributes["local_window_size"] + 1
        excess = total - self.capacity
        return self.xp.where(excess > 0, total - step * -(-excess // step), total)

    def bias(self) -> Any:
        bias = self.call.array("attention_bias")
        bias = self.xp.broadcast_to(bias, (self.call.batch_size, *bias.shape[1:]))
        columns = (self.origin - self.past)[:, None] + self.xp.arange(self.bound)
        columns = self.xp.clip(columns, 0, bias.shape[3] - 1)[:, None, None]
        index = self.xp.broadcast_to(columns, (*bias.shape[:3], self.bound))
        return self.xp.take_along_axis(_bits(bias), index, axis=3).view(bias.dtype)

    def finish(self) -> None:
        first = self.past + self.new - self.kept
        row = self.xp.clip(first[:, None] + self.xp.arange(self.capacity), 0, self.bound - 1)[:, None, :, None]
        for name, work in (("past_key", self.work_key), ("past_value", self.work_value)):
            stored = self._bits(self.call.arrays[name], self.call.adapters[name])
            source = self._bits(work, self.call.adapters[name])
            stored[...] = self.xp.take_along_axis(source, self.xp.broadcast_to(row, stored.shape), axis=2)

    def _bits(self, x: Any, adapter: Adapter) -> Any:
        if isinstance(x, Float8View):
            return self._bits(x.array, adapter_of("array", x.array))
        if not self.call.on_host and hasattr(x, "data_ptr"):  # a torch tensor, of a type DLPack may not know
            import torch

            x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
        return _bits(self.call.native(x, adapter))


def _by_token(x: Any) -> Any:
    """A cache (B, KH, T, D) as (B, T, KH, D)."""
    return Float8View(_by_token(x.array)) if isinstance(x, Float8View) else x.swapaxes(1, 2)


def _enlarged(x: Any, capacity: int) -> Any:
    """A copy of a cache with room for more positions, zeros beyond the old ones."""
    if isinstance(x, Float8View):
        return Float8View(_enlarged(x.array, capacity))
    shape = (*x.shape[:2], capacity, x.shape[3])
    if hasattr(x, "new_zeros"):  # torch
        larger = x.new_zeros(shape)
        larger[:, :, : x.shape[2]] = x
        return larger
    xp = np if isinstance(x, np.ndarray) else cuda.cupy()
    larger = xp.zeros(shape, x.dtype)
    _bits(larger)[:, :, : x.shape[2]] = _bits(x)
    return larger
