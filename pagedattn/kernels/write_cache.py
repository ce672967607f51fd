"""The prologue: split, normalise, rotate, quantize and store the new tokens of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import f32, i32, i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import BLOCK_TABLE, KV_CACHE, ROTARY, SEQUENCE_TABLE, ceil_div

WARP = 32
WARPS = 4  # of a CTA
# A token's rows are spread over warps while there are few tokens, and looped over in one warp when there are many.
WARPS_WORTH_SPREADING = 16384


@dataclass(frozen=True)
class WriteCacheSpec(Spec):
    """Element types of the inputs and of the cache, and the width of a head (a multiple of 8, at most 1024)."""

    io: DType
    cache: DType
    head_size: int


PARAMS = params(
    "WriteCacheParams",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    key=ptr,  # [token_count, kv_num_heads, head_size]; in a packed query, the address of its key columns
    value=ptr,  # likewise; None in the LATENT layout
    query_stride=i64,
    key_stride=i64,
    value_stride=i64,
    query_out=ptr,  # [token_count, num_heads, head_size], contiguous; None: attention reads `query` itself
    q_norm_weight=ptr,  # [head_size], or None
    k_norm_weight=ptr,
    slot_mapping=ptr,  # int32 [token_count], or None
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    zeros=ptr,  # int32 [zero_count]: counters of the kernel that follows
    zero_count=i32,
    rotary=ROTARY,
    num_heads=i32,
    kv_num_heads=i32,
    row_chunks=i32,
    qk_norm_epsilon=f32,
)


def threads(spec: WriteCacheSpec) -> int:
    """Threads of a CTA."""
    return WARP * WARPS


def rows_at_once(spec: WriteCacheSpec) -> int:
    """Heads that a warp works on side by side: a head takes the lanes that hold 8 channels each, up to all."""
    lanes = 1
    while lanes < min(WARP, spec.head_size // 8):
        lanes *= 2
    return WARP // lanes


def shared_bytes(spec: WriteCacheSpec) -> int:
    """One float32 row per head that is worked on."""
    return 4 * spec.head_size * rows_at_once(spec) * WARPS


def row_chunks(spec: WriteCacheSpec, token_count: int, row_count: int) -> int:
    """Warps per token, for ``row_count`` heads of query, key and value together."""
    most = ceil_div(row_count, rows_at_once(spec))
    return max(1, min(most, ceil_div(WARPS_WORTH_SPREADING, token_count)))


def grid(spec: WriteCacheSpec, token_count: int, row_chunks: int) -> tuple[int, int, int]:
    """CTAs of a launch; ``row_chunks`` is also a field of the Params."""
    return ceil_div(token_count * row_chunks, WARPS), 1, 1


KERNEL = Kernel("write_cache", WriteCacheSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[WriteCacheSpec]:
    """Specs that together reach every branch of the source."""
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield WriteCacheSpec(dtypes.BFLOAT16, cache, 128)
    yield WriteCacheSpec(dtypes.FLOAT16, dtypes.FLOAT16, 8)
    yield WriteCacheSpec(dtypes.FLOAT16, dtypes.INT8, 1024)
    yield WriteCacheSpec(dtypes.BFLOAT16, dtypes.BFLOAT16, 576)
