"""Structs that several kernels' Params share, one for each header of ``kernels_cu/include/pagedattn`` that defines it."""

from __future__ import annotations

from pagedattn.jit.params import f32, i32, i64, params, ptr

SEQUENCE_TABLE = params(
    "SequenceTable",
    cumulative_sequence_length=ptr,  # int32 [batch_size + 1]
    past_seqlens=ptr,  # int32 [batch_size]
    query_positions=ptr,  # int32 [token_count], or None
    batch_size=i32,
    token_count=i32,
)

BLOCK_TABLE = params(
    "BlockTable",
    entries=ptr,  # int32 [batch_size, max_blocks_per_sequence]; None: one contiguous block per sequence
    num_blocks=i32,
    block_size=i32,
    max_blocks_per_sequence=i32,
)

KV_CACHE = params(
    "KvCache",
    data=ptr,  # [num_blocks, block_size, kv_num_heads, head_size]
    block_stride=i64,  # all three in storage elements
    token_stride=i64,
    head_stride=i64,
    scale=ptr,  # float32 [1] or [kv_num_heads, 1, head_size], or None
    scale_head_stride=i64,  # head_size when per channel, else 0
    scale_channel_stride=i32,  # 1 when per channel, else 0
)

ROTARY = params(
    "Rotary",
    cos_cache=ptr,  # [max_seq_len, dim / 2]; None: no rotation
    sin_cache=ptr,
    max_seq_len=i32,
    dim=i32,
    offset=i32,
    interleaved=i32,
)

SCORE_RULES = params(
    "ScoreRules",
    attention_bias=ptr,  # [batch_size or 1, num_heads or 1, bias_rows, bias_columns], or None
    bias_batch_stride=i64,  # elements; 0 where the axis has length 1
    bias_head_stride=i64,
    bias_row_stride=i64,
    bias_rows=i32,
    bias_columns=i32,
    local_window_size=i32,  # <= 0: off
    is_causal=i32,
    scale=f32,
    softcap=f32,  # 0: off
)

OUTPUT = params(
    "Output",
    output=ptr,  # [token_count, num_heads * v_head_size]
    lse=ptr,  # float32 [token_count, num_heads], or None
    head_sink=ptr,  # [num_heads], or None
    num_heads=i32,
)

NO_CACHE = KV_CACHE.pack(
    data=None, block_stride=0, token_stride=0, head_stride=0, scale=None, scale_head_stride=0, scale_channel_stride=0
)
"""The value cache of the LATENT layout."""

NO_ROTARY = ROTARY.pack(cos_cache=None, sin_cache=None, max_seq_len=0, dim=0, offset=0, interleaved=0)


def ceil_div(a: int, b: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b
