"""Attention of prompts, chunks and mixed batches with the tensor-core instructions that every GPU from sm_80 on has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    SCORE_RULES,
    SEQUENCE_TABLE,
    channel_step,
    fit_together,
    round_up,
    tile_row_stride,
)
from pagedattn.kernels.row_tiles import row_tile_count


@dataclass(frozen=True)
class FlashSpec(Spec):
    """What `flash_prefill_sm80` is compiled for; `choose` fills the last four."""

    io: DType
    cache: DType
    head_size: int
    row_tiles: int
    warps: int
    tile_keys: int
    ctas: int

    @property
    def tile_rows(self) -> int:
        """Query rows (tokens times heads of a group) of a CTA."""
        return 16 * self.row_tiles * self.warps


PARAMS = params(
    "FlashParams",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    rules=SCORE_RULES,
    out=OUTPUT,
    group_size=i32,
)

# (row_tiles, warps, tile_keys, ctas) by the largest head they serve, best first. Two row tiles in a warp halve what
# it reads from shared memory for each product; accumulators of wide heads leave room for one. Two CTAs on a
# multiprocessor keep its tensor cores busy while either waits; where only one fits, it has more warps instead.
SHAPES = (
    (128, ((2, 4, 64, 2), (2, 8, 32, 1))),
    (256, ((1, 8, 64, 1), (1, 4, 32, 1))),
)
# For sequences whose new tokens make few rows.
SHORT_SHAPES = ((1, 4, 64, 2), (1, 4, 32, 2), (1, 4, 32, 1))
SHORT_ROWS = 64


def threads(spec: FlashSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.warps


def shared_bytes(spec: FlashSpec) -> int:
    """Queries, what is known of each row, and a tile of keys and of values."""
    queries = spec.tile_rows * tile_row_stride(spec.io, round_up(spec.head_size, channel_step(spec.cache)))
    return queries + 16 * (spec.tile_rows + 1) + 2 * spec.tile_keys * tile_row_stride(spec.cache, spec.head_size)


def choose(io: DType, cache: DType, head_size: int, rows: int, shared_limit: int) -> FlashSpec:
    """Spec for sequences of up to ``rows`` query rows: a bound of new tokens times the heads of a group."""
    padded = round_up(head_size, channel_step(cache))
    shapes = SHORT_SHAPES if rows <= SHORT_ROWS else next(shapes for most, shapes in SHAPES if padded <= most)
    specs = [FlashSpec(io, cache, head_size, *shape) for shape in shapes]
    return next(spec for spec in specs if fit_together(spec.ctas, shared_bytes(spec), shared_limit))


def grid(
    spec: FlashSpec, token_count: int, batch_size: int, kv_num_heads: int, group_size: int
) -> tuple[int, int, int]:
    """CTAs of a launch."""
    return row_tile_count(token_count, batch_size, group_size, spec.tile_rows), kv_num_heads, 1


KERNEL = Kernel("flash_prefill_sm80", FlashSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[FlashSpec]:
    """Specs that together reach every branch of the source."""
    full, small = 227 << 10, 99 << 10
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 128, 1 << 20, full)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 64, 1 << 20, small)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 128, 1 << 20, small)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 256, 1 << 20, full)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 256, 1 << 20, small)
    yield choose(dtypes.FLOAT16, dtypes.INT8, 72, 32, small)
