"""Sizes of ``wide_attention.cuh``: a CTA whose warps share a row tile, for heads too wide for one warp."""

from __future__ import annotations

from pagedattn.dtypes import DType
from pagedattn.kernels.layouts import ceil_div, channel_step, round_up, tile_row_stride


def shared_bytes(
    io: DType,
    cache: DType,
    head_size: int,
    v_head_size: int,
    latent: bool,
    row_tiles: int,
    column_warps: int,
    tile_keys: int,
    stages: int,
    weighed: int = 1,
) -> int:
    """Queries, probabilities, row statistics, and the stages of keys and, unless LATENT, values.

    LATENT keys whose last channels are no values have room for the probabilities there. ``weighed`` tiles have
    probabilities at a time.
    """
    rows = 16 * row_tiles
    queries = rows * tile_row_stride(io, round_up(head_size, channel_step(cache)))
    in_keys = latent and not cache.is_quantized and rows <= tile_keys <= head_size - round_up(v_head_size, 16)
    probabilities = 0 if in_keys else weighed * rows * 16 * (tile_keys // 8 | 1)
    statistics = 4 * rows * min(column_warps, tile_keys // 16)
    stage = tile_keys * (tile_row_stride(cache, head_size) + (0 if latent else tile_row_stride(cache, v_head_size)))
    return queries + probabilities + statistics + stages * stage


def accumulator_tiles(cache: DType, v_head_size: int, column_warps: int) -> int:
    """8-channel tiles of the accumulator that one warp holds; the kernel allows 32."""
    channels = channel_step(cache)
    return ceil_div(ceil_div(v_head_size, channels), column_warps) * channels // 8
