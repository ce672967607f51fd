"""Attention of single tokens over splits of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import Executor, Function
from pagedattn.jit.params import i32, i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    ceil_div,
    channel_step,
    round_up,
    tile_row_stride,
)

TILE_KEYS = 16
MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class DecodeSpec(Spec):
    """What `decode_split_kv` is compiled for; `choose` fills the last three."""

    io: DType
    cache: DType
    head_size: int
    row_tiles: int
    warps: int
    stages: int


PARAMS = params(
    "DecodeParams",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
    group_size=i32,
)

# (warps, stages), best first. The first one of which two CTAs fit a multiprocessor is taken, else the first that fits.
SHAPES = ((4, 8), (4, 6), (4, 5), (4, 4), (4, 3), (4, 2), (2, 3), (2, 2))


def threads(spec: DecodeSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.warps


def shared_bytes(spec: DecodeSpec) -> int:
    """Queries and pipelines of the main loop, or the rows of all warps while they merge, whichever is more."""
    rows = 16 * spec.row_tiles
    padded = round_up(spec.head_size, channel_step(spec.cache))
    queries = rows * tile_row_stride(spec.io, padded)
    pipelines = spec.warps * spec.stages * 2 * TILE_KEYS * tile_row_stride(spec.cache, spec.head_size)
    merge = spec.warps * rows * (4 * (padded + 8) + 8)
    return max(queries + pipelines, merge)


def choose(io: DType, cache: DType, head_size: int, group_size: int, shared_limit: int) -> DecodeSpec:
    """Spec for a group of query heads, on a device with ``shared_limit`` bytes of shared memory for a CTA."""
    row_tiles = 2 if group_size > 16 and round_up(head_size, channel_step(cache)) <= 128 else 1
    specs = [DecodeSpec(io, cache, head_size, row_tiles, warps, stages) for warps, stages in SHAPES]
    fitting = [spec for spec in specs if shared_bytes(spec) <= shared_limit]
    return next((spec for spec in fitting if 2 * shared_bytes(spec) <= shared_limit), fitting[-1])


def grid(
    spec: DecodeSpec, token_count: int, split_count: int, kv_num_heads: int, group_size: int
) -> tuple[int, int, int]:
    """CTAs of a launch."""
    return token_count * split_count, kv_num_heads, ceil_div(group_size, 16 * spec.row_tiles)


KERNEL = Kernel("decode_split_kv", DecodeSpec, PARAMS, threads, shared_bytes)


def launch(
    executor: Executor[Function],
    function: Function,
    spec: DecodeSpec,
    token_count: int,
    split_count: int,
    kv_num_heads: int,
    group_size: int,
    packed: bytes,
) -> None:
    """Launch what ``executor.load(KERNEL, spec)`` returned."""
    shape = grid(spec, token_count, split_count, kv_num_heads, group_size)
    executor.launch(function, shape, threads(spec), shared_bytes(spec), packed)


def split_size(kv_len_bound: int, ctas_per_split: int, multiprocessors: int) -> int:
    """Keys of a split: long enough to be worth a CTA, short enough that the splits fill the device.

    Only static sizes enter, so every replay of a graph and every composition of a batch of this size splits alike.

    Parameters
    ----------
    kv_len_bound : int
        Longest context, or the window when there is one.
    ctas_per_split : int
        CTAs that one split of every token makes: ``token_count * kv_num_heads * row chunks``.
    multiprocessors : int
    """
    wanted = ceil_div(4 * multiprocessors, ctas_per_split)
    size = round_up(ceil_div(kv_len_bound, wanted), 64)
    return max(256, min(size, 4096))


def smoke_specs() -> Iterator[DecodeSpec]:
    """Specs that together reach every branch of the source."""
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 128, 8, 227 << 10)
    for cache in (dtypes.FLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.FLOAT16, cache, 64, 32, 227 << 10)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 8, 1, 99 << 10)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 256, 16, 99 << 10)
    yield choose(dtypes.BFLOAT16, dtypes.INT4, 72, 5, 99 << 10)
