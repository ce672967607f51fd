"""Attention over a LATENT cache, whose rows are keys and values at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels import wide_attention
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    ceil_div,
    fit_together,
    round_up,
)
from pagedattn.kernels.row_tiles import row_tile_count


@dataclass(frozen=True)
class LatentSpec(Spec):
    """What `latent_decode` is compiled for; `choose` fills the last six."""

    io: DType
    cache: DType
    head_size: int
    v_head_size: int
    row_tiles: int
    warp_tiles: int
    column_warps: int
    score_warps: int
    tile_keys: int
    stages: int

    @property
    def tile_rows(self) -> int:
        """Query rows (tokens times heads) of a CTA."""
        return 16 * self.row_tiles


PARAMS = params(
    "LatentParams",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
)

# (row_tiles, warp_tiles, column_warps, score_warps, tile_keys, stages): by rows of a CTA, best first; see `choose`.
SHAPES = {
    4: ((4, 2, 4, 4, 64, 2), (4, 2, 4, 4, 32, 2), (4, 2, 4, 0, 64, 2), (4, 2, 4, 0, 64, 1)),
    2: ((2, 1, 4, 0, 64, 2), (2, 1, 4, 0, 32, 2)),
    1: ((1, 1, 4, 0, 64, 2), (1, 1, 4, 0, 32, 3), (1, 1, 4, 0, 32, 2), (1, 1, 4, 0, 16, 2)),
}
FACTS_BYTES = 64  # of a CTA's work, in shared memory for its teams
# What a split costs beyond its keys, in keys: its start, and its part in memory and back.
SPLIT_KEYS = 256


def threads(spec: LatentSpec) -> int:
    """Threads of a CTA."""
    return 32 * (spec.row_tiles // spec.warp_tiles * spec.column_warps + spec.score_warps)


def shared_bytes(spec: LatentSpec) -> int:
    """See `wide_attention.shared_bytes`; and, for teams, what they tell each other."""
    for_teams = spec.stages * (24 + 8 * spec.tile_rows) + FACTS_BYTES if spec.score_warps else 0
    return for_teams + wide_attention.shared_bytes(
        spec.io,
        spec.cache,
        spec.head_size,
        spec.v_head_size,
        True,
        spec.row_tiles,
        spec.column_warps,
        spec.tile_keys,
        spec.stages,
        spec.stages if spec.score_warps else 1,
    )


def resident(spec: LatentSpec, shared_limit: int) -> int:
    """CTAs that share a multiprocessor, one or two: registers hold eight warps."""
    return 2 if threads(spec) <= 128 and fit_together(2, shared_bytes(spec), shared_limit) else 1


def _fits(spec: LatentSpec, shared_limit: int) -> bool:
    """Whether there is room in shared memory; and, in the registers of teams, for the values (codes take more)."""
    return shared_bytes(spec) <= shared_limit and not (spec.score_warps and spec.cache.is_quantized)


def choose(io: DType, cache: DType, head_size: int, v_head_size: int, rows: int, shared_limit: int) -> LatentSpec:
    """Spec for sequences of ``rows`` query rows (a bound of new tokens times heads).

    Many rows are attended by two teams of warps, from caches of 16 bits.
    Few rows wait for memory: there a smaller tile is better, if two CTAs then share a multiprocessor.
    """
    wanted = 1 if rows <= 16 else 2 if rows <= 32 else 4
    for row_tiles in (4, 2, 1):
        if row_tiles > wanted:
            continue
        shapes = [LatentSpec(io, cache, head_size, v_head_size, *shape) for shape in SHAPES[row_tiles]]
        fitting = [spec for spec in shapes if _fits(spec, shared_limit)]
        paired = [spec for spec in fitting if spec.tile_keys >= 32 and resident(spec, shared_limit) == 2]
        for spec in (*paired, *fitting):
            return spec
    raise ValueError(f"latent rows of {head_size} channels do not fit {shared_limit} bytes of shared memory")


def grid(spec: LatentSpec, token_count: int, batch_size: int, num_heads: int, split_count: int) -> tuple[int, int, int]:
    """CTAs of a launch."""
    tiles = row_tile_count(token_count, batch_size, num_heads, spec.tile_rows)
    return tiles * split_count, 1, 1


KERNEL = Kernel("latent_decode", LatentSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def split_size(span: int, tiles: int, slots: int) -> int:
    """Keys of a split, a multiple of 64: the size with which the last CTA ends first.

    Parameters
    ----------
    span : int
        Most keys of a row tile.
    tiles : int
        Row tiles, as many as there are when all sequences are alike.
    slots : int
        CTAs that run at a time.
    """

    def cost(splits: int) -> float:
        return ceil_div(tiles * splits, slots) * (span / splits + SPLIT_KEYS * (splits > 1))

    splits = min(range(1, 2 + ceil_div(2 * slots, tiles)), key=cost)
    return max(256, min(round_up(ceil_div(span, splits), 64), 8192))


def smoke_specs() -> Iterator[LatentSpec]:
    """Specs that together reach every branch of the source."""
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 576, 512, 128, 227 << 10)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 576, 512, 16, 227 << 10)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 576, 512, 32, 227 << 10)
    for limit in (163 << 10, 99 << 10):
        yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 576, 512, 128, limit)
    for cache in (dtypes.FLOAT16, dtypes.INT8):
        yield choose(dtypes.FLOAT16, cache, 160, 128, 64, 99 << 10)
