"""The operator ``com.microsoft::PagedAttention`` (opset 1) as tables.

Everything else reads these rows: validation matches shapes and types against them, the ONNX schema and its
inference are loops over them, the documentation prints them and the tests enumerate them. A dimension is

* a number, ``"2"``;
* a size by name, ``"token_count"``: the first tensor that shows it binds it, later ones must agree;
* a size plus a number, ``"batch_size+1"``;
* alternatives, ``"batch_size|1"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.dtypes import BFLOAT16, FLOAT8E4M3FN, FLOAT16, FLOAT32, INT4, INT8, INT32, DType

DOMAIN = "com.microsoft"
NAME = "PagedAttention"
OPSET = 1


@dataclass(frozen=True)
class Input:
    """One input of the operator; ``shape`` follows the module's notation."""

    index: int
    name: str
    type: str
    shape: tuple[str, ...]
    doc: str
    optional: bool = False
    written: bool = False
    on_host: bool = False


@dataclass(frozen=True)
class Output:
    """One output; ``alias`` names the input whose buffer it is. ``index`` is None where ONNX has no such output."""

    index: int | None
    name: str
    type: str
    shape: tuple[str, ...]
    doc: str
    optional: bool = True
    alias: str | None = None


@dataclass(frozen=True)
class Attribute:
    """One attribute; ``default`` None means required."""

    name: str
    type: type[int] | type[float] | type[str]
    default: int | float | str | None
    doc: str
    choices: tuple[int | str, ...] | None = None
    minimum: int | float | None = None


@dataclass(frozen=True)
class Mode:
    """One legal pattern of present inputs, chosen by ``kv_cache_layout`` and the presence of key and value."""

    name: str
    layout: str
    present: tuple[str, ...]
    absent: tuple[str, ...]
    doc: str


# float32 is no type of the ONNX operator: it is served by the NumPy backend only.
TYPES: dict[str, tuple[DType, ...]] = {
    "T": (FLOAT16, BFLOAT16, FLOAT32),
    "T_CACHE": (FLOAT16, BFLOAT16, FLOAT32, INT8, FLOAT8E4M3FN, INT4),
    "T_KV_SCALE": (FLOAT32,),
    "S": (INT32,),
    "QK": (FLOAT32, FLOAT16, BFLOAT16),
}

INPUTS: tuple[Input, ...] = (
    Input(
        0,
        "query",
        "T",
        ("token_count", "query_width"),
        "Query rows, num_heads * head_size wide; or packed rows [Q heads | K heads | V heads], "
        "(num_heads + 2 * kv_num_heads) * head_size wide, when key and value are absent. head_size is a multiple of 8.",
    ),
    Input(
        1,
        "key",
        "T",
        ("token_count", "kv_width"),
        "New key rows, kv_num_heads * head_size wide; in the LATENT layout the latent row.",
        optional=True,
    ),
    Input(2, "value", "T", ("token_count", "kv_width"), "New value rows; absent in the LATENT layout.", optional=True),
    Input(
        3,
        "key_cache",
        "T_CACHE",
        ("num_blocks", "block_size", "kv_num_heads", "cache_width"),
        "Pool of key blocks, written in place. block_size is a power of two >= 16; cache_width is head_size, or "
        "(head_size + 1) / 2 bytes for packed int4.",
        written=True,
    ),
    Input(
        4,
        "value_cache",
        "T_CACHE",
        ("num_blocks", "block_size", "kv_num_heads", "cache_width"),
        "Pool of value blocks, written in place; absent in the LATENT layout.",
        optional=True,
        written=True,
    ),
    Input(
        5,
        "cumulative_sequence_length",
        "S",
        ("batch_size+1",),
        "Rows [c[b], c[b+1]) of query are those of sequence b; starts at 0, non-decreasing. Rows from the last entry "
        "on are padding.",
    ),
    Input(6, "past_seqlens", "S", ("batch_size",), "Tokens of each sequence in the cache before this call."),
    Input(
        7,
        "block_table",
        "S",
        ("batch_size", "max_blocks_per_sequence"),
        "Entry i of a row is the block that holds positions [i * block_size, (i + 1) * block_size); "
        "-1 means unmapped: neither read nor written.",
    ),
    Input(
        8,
        "cos_cache",
        "T",
        ("max_seq_len", "rotary_half"),
        "Cosines by position; rotary_dim = 2 * rotary_half.",
        optional=True,
    ),
    Input(9, "sin_cache", "T", ("max_seq_len", "rotary_half"), "Sines by position.", optional=True),
    Input(
        10,
        "slot_mapping",
        "S",
        ("token_count",),
        "Where each token's key and value are stored: block * block_size + offset; -1 stores nothing. "
        "Derived from block_table when absent.",
        optional=True,
    ),
    Input(
        11, "head_sink", "T", ("num_heads",), "One more logit per head, in the softmax denominator only.", optional=True
    ),
    Input(
        12,
        "q_norm_weight",
        "T",
        ("head_size",),
        "RMSNorm weight of each query head, applied before RoPE.",
        optional=True,
    ),
    Input(
        13, "k_norm_weight", "T", ("head_size",), "RMSNorm weight of each key head, applied before RoPE.", optional=True
    ),
    Input(
        14,
        "k_scale",
        "T_KV_SCALE",
        ("k_scale_shape",),
        "Key dequantization scale: (1,) for PER_TENSOR, (kv_num_heads, 1, head_size) for PER_CHANNEL.",
        optional=True,
    ),
    Input(
        15, "v_scale", "T_KV_SCALE", ("v_scale_shape",), "Value dequantization scale, shaped likewise.", optional=True
    ),
    Input(
        16,
        "attention_metadata",
        "S",
        ("2|3",),
        "[max_query_len_bound, max_kv_len_bound(, max_kv_len_lower_bound)], host bounds that hold for every step "
        "served; 0 = unknown. They size launches and workspace and never enter a mask.",
        optional=True,
        on_host=True,
    ),
    Input(
        17,
        "query_positions",
        "S",
        ("token_count",),
        "Position of each token for RoPE and for the mask; past + offset in its sequence when absent.",
        optional=True,
    ),
    Input(
        18,
        "attention_bias",
        "T",
        ("batch_size|1", "num_heads|1", "query_capacity", "context_capacity"),
        "Added to the scores after softcap, indexed by [sequence, head, offset of the token, key position]; what lies "
        "beyond its capacities is not attended.",
        optional=True,
    ),
)

OUTPUTS: tuple[Output, ...] = (
    Output(
        0,
        "output",
        "T",
        ("token_count", "output_width"),
        "Attention result, num_heads * v_head_size wide.",
        optional=False,
    ),
    Output(
        1,
        "key_cache_out",
        "T_CACHE",
        ("num_blocks", "block_size", "kv_num_heads", "cache_width"),
        "The buffer of key_cache.",
        alias="key_cache",
    ),
    Output(
        2,
        "value_cache_out",
        "T_CACHE",
        ("num_blocks", "block_size", "kv_num_heads", "cache_width"),
        "The buffer of value_cache; absent in the LATENT layout.",
        alias="value_cache",
    ),
    Output(
        3,
        "output_qk",
        "QK",
        ("num_heads", "token_count", "max_context_len"),
        "Scores or probabilities, as qk_output says; 0 where a token does not attend.",
    ),
    Output(
        None,
        "lse",
        "T_KV_SCALE",
        ("token_count", "num_heads"),
        "Natural logarithm of the softmax denominator (sink included); -inf where nothing is attended. "
        "An extension: not an output of the ONNX operator.",
    ),
)

QUANT_TYPES = ("NONE", "PER_TENSOR", "PER_CHANNEL")
LAYOUTS = ("SEPARATE", "LATENT")
# Spelled in the design but without meaning here; named so that the refusal can say why.
REFUSED_CACHE_DTYPES = {
    "float4e2m1": "no such cache format is specified",
    "int2": "no such cache format is specified",
    "uint4": "codes are signed: there is no zero point",
    "uint8": "codes are signed: there is no zero point",
}

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("num_heads", int, None, "Number of query heads.", minimum=1),
    Attribute("kv_num_heads", int, None, "Number of key and value heads; divides num_heads.", minimum=1),
    Attribute(
        "scale",
        float,
        0.0,
        "Factor of q . k; 0 means 1 / sqrt(head_size). Required when v_head_size differs from head_size.",
    ),
    Attribute("softcap", float, 0.0, "Scores become softcap * tanh(score / softcap); 0 = off.", minimum=0.0),
    Attribute("local_window_size", int, -1, "A token sees this many positions, its own included; below 1 = all."),
    Attribute("do_rotary", int, 0, "Apply RoPE to query and key.", choices=(0, 1)),
    Attribute("rotary_interleaved", int, 0, "Pairs are (2i, 2i+1) instead of (i, i + rotary_dim / 2).", choices=(0, 1)),
    Attribute("rotary_offset", int, 0, "First channel that RoPE rotates; a multiple of 8.", minimum=0),
    Attribute("qk_norm_epsilon", float, 1e-6, "Epsilon inside the root of QK-norm; > 0."),
    Attribute("k_quant_type", str, "NONE", "Granularity of k_scale.", choices=QUANT_TYPES),
    Attribute("v_quant_type", str, "NONE", "Granularity of v_scale.", choices=QUANT_TYPES),
    Attribute(
        "k_cache_dtype", str, "", 'Logical type of key_cache: "" or its own type by name, "int4" for packed uint8.'
    ),
    Attribute("v_cache_dtype", str, "", "Logical type of value_cache, likewise."),
    Attribute(
        "v_head_size", int, 0, "Width of an output head; 0 = head_size. Differs from it only in LATENT.", minimum=0
    ),
    Attribute(
        "kv_cache_layout",
        str,
        "SEPARATE",
        "LATENT: one cache whose first v_head_size channels are the values.",
        choices=LAYOUTS,
    ),
    Attribute(
        "qk_output", int, 0, "1: output_qk holds scores just before softmax; 2: probabilities.", choices=(0, 1, 2)
    ),
    Attribute("is_causal", int, 1, "0: a token also sees the later new tokens of its sequence.", choices=(0, 1)),
)

MODES: tuple[Mode, ...] = (
    Mode("separate", "SEPARATE", ("key", "value", "value_cache"), (), "query, key and value as three tensors"),
    Mode("packed", "SEPARATE", ("value_cache",), ("key", "value"), "query holds [Q | K | V]"),
    Mode("latent", "LATENT", ("key",), ("value", "value_cache"), "absorbed MLA: key is the latent row"),
)

INPUT_BY_NAME = {row.name: row for row in INPUTS}
ATTRIBUTE_BY_NAME = {row.name: row for row in ATTRIBUTES}
OUTPUT_BY_NAME = {row.name: row for row in OUTPUTS}


def argument(name: str) -> str:
    """A tensor's name as the caller knows it: the array that the output goes to is the argument ``out``."""
    return "out" if name == "output" else name
