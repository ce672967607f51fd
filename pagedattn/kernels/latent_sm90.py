"""What Hopper's two kernels for LATENT caches share: sizes, splits, and how the copy engine is told of the cache."""

from __future__ import annotations

from pagedattn import dtypes
from pagedattn.jit import tensor_map as maps
from pagedattn.kernels.layouts import ceil_div, round_up
from pagedattn.problem import Problem, TensorInfo

WARPGROUP = 128
HEAD_SIZE, VALUE_SIZE = 576, 512
TILE_KEYS = 64
CHANNELS = 64  # of a channel group: a row of the swizzle
ALIGNMENT_BYTES = 1024  # the swizzle repeats after so many

# A split costs what so many keys cost: its query, its part of the result, and the merge.
SPLIT_KEYS = 160
# Lengths differ, so no split is longer than a multiprocessor's share when all row tiles have this many keys.
TYPICAL_KEYS = 4096


def typical_share(tiles: int, multiprocessors: int) -> int:
    """Keys of a multiprocessor's share when all row tiles have `TYPICAL_KEYS`; at least those of one tile."""
    return int(TYPICAL_KEYS * max(1.0, tiles / multiprocessors))


def split_size(span: int, tiles: int, multiprocessors: int, longest: int) -> int:
    """Keys of a split, a whole number of tiles: the size that keeps the device busiest.

    Parameters
    ----------
    span : int
        Most keys of a row tile.
    tiles : int
        Row tiles.
    multiprocessors : int
    longest : int
        Keys that no split shall exceed, but for rounding.
    """
    fewest = max(1, ceil_div(span, longest))

    def cost(splits: int) -> float:
        rounds = ceil_div(tiles * splits, multiprocessors)
        return rounds * (span / splits + SPLIT_KEYS * (splits > 1))

    splits = min(range(fewest, 2 * fewest + multiprocessors), key=cost)
    return max(256, round_up(ceil_div(span, splits), TILE_KEYS))


def why_not_problem(problem: Problem) -> str | None:
    """Reason why neither kernel serves a problem, whatever the type of its cache, or None."""
    p = problem
    if not p.is_latent or p.kv_num_heads != 1:
        return "needs a LATENT cache"
    if p.is_contiguous or not p.num_blocks:
        return "reads blocks of a power of two of positions, not one run of any length, and at least one"
    if p.io_dtype not in (dtypes.FLOAT16, dtypes.BFLOAT16):
        return "takes float16 and bfloat16"
    if (p.head_size, p.v_head_size) != (HEAD_SIZE, VALUE_SIZE):
        return f"head sizes ({p.head_size}, {p.v_head_size}) are not ({HEAD_SIZE}, {VALUE_SIZE})"
    return None


def cache_map(problem: Problem, cache: TensorInfo, groups: int, promoted_bytes: int = 256) -> bytes:
    """[blocks, block_size / 8, channel groups, 8, channels]; a box is what a tile has of a block in some groups."""
    p = problem
    item = p.cache_dtype.bits // 8
    block, token = item * cache.strides[0], item * cache.strides[1]
    return maps.encode(
        p.cache_dtype,
        cache.pointer,
        (CHANNELS, 8, HEAD_SIZE // CHANNELS, p.block_size // 8, p.num_blocks),
        (token, CHANNELS * item, 8 * token, block),
        (CHANNELS, 8, groups, min(p.block_size, TILE_KEYS) // 8, 1),
        promoted_bytes=promoted_bytes,
    )
