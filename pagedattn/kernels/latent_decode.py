"""Attention over a LATENT cache, whose rows are keys and values at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import Launch
from pagedattn.jit.params import i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels import wide_attention
from pagedattn.kernels.layouts import BLOCK_TABLE, KV_CACHE, OUTPUT, PARTIALS, SCORE_RULES, SEQUENCE_TABLE, ceil_div


@dataclass(frozen=True)
class LatentSpec(Spec):
    """What `latent_decode` is compiled for; `choose` fills the last four."""

    io: DType
    cache: DType
    head_size: int
    v_head_size: int
    row_tiles: int
    column_warps: int
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

# (row_tiles, column_warps, tile_keys, stages): by rows of a CTA, then best first; the first that fits is taken.
SHAPES = {
    4: ((4, 2, 32, 3), (4, 2, 32, 2)),
    2: ((2, 4, 64, 2), (2, 4, 32, 2)),
    1: ((1, 4, 64, 2), (1, 4, 32, 3), (1, 4, 32, 2), (1, 4, 16, 2)),
}


def threads(spec: LatentSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.row_tiles * spec.column_warps


def shared_bytes(spec: LatentSpec) -> int:
    """See `wide_attention.shared_bytes`."""
    return wide_attention.shared_bytes(
        spec.io,
        spec.cache,
        spec.head_size,
        spec.v_head_size,
        True,
        spec.row_tiles,
        spec.column_warps,
        spec.tile_keys,
        spec.stages,
    )


def choose(io: DType, cache: DType, head_size: int, v_head_size: int, rows: int, shared_limit: int) -> LatentSpec:
    """Spec for sequences of ``rows`` query rows (a bound of new tokens times heads)."""
    wanted = 1 if rows <= 16 else 2 if rows <= 32 else 4
    for row_tiles in (4, 2, 1):
        if row_tiles > wanted:
            continue
        for shape in SHAPES[row_tiles]:
            spec = LatentSpec(io, cache, head_size, v_head_size, *shape)
            if shared_bytes(spec) <= shared_limit:
                return spec
    raise ValueError(f"latent rows of {head_size} channels do not fit {shared_limit} bytes of shared memory")


def grid(spec: LatentSpec, token_count: int, batch_size: int, num_heads: int, split_count: int) -> tuple[int, int, int]:
    """CTAs of a launch."""
    tiles = wide_attention.row_tile_count(token_count, batch_size, num_heads, spec.tile_rows)
    return tiles * split_count, 1, 1


KERNEL = Kernel("latent_decode", LatentSpec, PARAMS, threads, shared_bytes)


def launch(
    function: Any,
    spec: LatentSpec,
    token_count: int,
    batch_size: int,
    num_heads: int,
    split_count: int,
    packed: bytes,
) -> Launch:
    """Launch of what ``executor.load(KERNEL, spec)`` returned."""
    shape = grid(spec, token_count, batch_size, num_heads, split_count)
    return Launch(function, shape, threads(spec), shared_bytes(spec), packed)


def key_span(spec: LatentSpec, kv_len_bound: int, local_window_size: int, num_heads: int, ordered: bool) -> int:
    """Most keys that the tokens of one row tile attend together.

    ``ordered`` says that positions follow the order of tokens: there are no query_positions.
    """
    if local_window_size <= 0 or not ordered:
        return kv_len_bound
    return min(kv_len_bound, local_window_size + ceil_div(spec.tile_rows - 1, num_heads))


def split_size(kv_len_bound: int, ctas_per_split: int, multiprocessors: int) -> int:
    """Keys of a split: enough splits to fill the device once or twice, each a whole number of tiles."""
    wanted = ceil_div(2 * multiprocessors, ctas_per_split)
    size = ceil_div(ceil_div(kv_len_bound, wanted), 64) * 64
    return max(256, min(size, 8192))


def smoke_specs() -> Iterator[LatentSpec]:
    """Specs that together reach every branch of the source."""
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 576, 512, 128, 227 << 10)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 576, 512, 16, 227 << 10)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 576, 512, 32, 227 << 10)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 576, 512, 128, 99 << 10)
    yield choose(dtypes.FLOAT16, dtypes.INT8, 160, 128, 64, 99 << 10)
