"""What kernels share: structs of their Params, each as a header in ``include/pagedattn`` has it, and sizes."""

from __future__ import annotations

from typing import Protocol

from pagedattn.dtypes import DType
from pagedattn.jit.params import Layout, f32, i32, i64, params, ptr

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


class PackedStructs(Protocol):
    """What attention kernels take, packed: sequences, blocks, key_cache, value_cache, rules and out."""

    def of(self, params: Layout) -> dict[str, bytes]:
        """Those that a kernel's Params has."""


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


PARTIALS = params(
    "Partials",
    acc=ptr,  # float32 [token_count, split_count, num_heads, v_head_size rounded up to even]
    lse=ptr,  # float32 [token_count, split_count, num_heads], base 2
    split_size=i32,  # keys; a multiple of KEY_ALIGNMENT
    split_count=i32,
    tile_rows=i32,  # rows of a CTA that plans for a row tile; 0: each token has a plan of its own
    group_size=i32,
)

MERGED_SPLITS = 8
"""`kMergedSplits`: splits that the last CTA to finish may merge, of kernels that count (`backends.splits.Merging`)."""

KEY_ALIGNMENT = 16
"""Splits and tiles start on multiples of this many keys."""


def partial_bytes(token_count: int, split_count: int, num_heads: int, v_head_size: int) -> tuple[int, int]:
    """Bytes of ``acc`` and of ``lse`` in `PARTIALS`; with one split neither is used."""
    if split_count <= 1:
        return 0, 0
    rows = token_count * split_count * num_heads
    return 4 * rows * round_up(v_head_size, 2), 4 * rows


def split_count(kv_len_bound: int, split_size: int, starts_at_0: bool = False) -> int:
    """Splits that cover any range of ``kv_len_bound`` keys, wherever it starts unless that is known to be 0."""
    return max(1, ceil_div(kv_len_bound + (0 if starts_at_0 else KEY_ALIGNMENT - 1), split_size))


RESERVED_BYTES = 1 << 10
"""Shared memory that the system takes for each CTA; a multiprocessor has that much more than one CTA may have."""


def fit_together(ctas: int, shared_bytes: int, shared_limit: int) -> bool:
    """Whether a multiprocessor has room for CTAs of ``shared_bytes``, where one may have ``shared_limit``."""
    return ctas * (shared_bytes + RESERVED_BYTES) <= shared_limit + RESERVED_BYTES


def channel_step(cache: DType) -> int:
    """Channels that one fragment load covers; tile rows are padded to a multiple of it (``kv_tile.cuh``)."""
    return 32 if cache.is_quantized else 16


def tile_row_stride(cache: DType, channels: int) -> int:
    """Bytes from row to row of a tile in shared memory (``kv_tile.cuh``)."""
    row_bytes = round_up(channels, channel_step(cache)) * cache.bits // 8
    return 16 * (ceil_div(row_bytes, 16) | 1)
