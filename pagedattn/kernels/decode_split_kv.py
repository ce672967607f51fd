"""Attention of single tokens over splits of their keys."""

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
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    ceil_div,
    fit_together,
    round_up,
)

ROW_TILE = 8
MAX_ROWS = 32
ANY_SPAN = 1 << 31  # keys


@dataclass(frozen=True)
class DecodeSpec(Spec):
    """What `decode_split_kv` is compiled for; `choose` fills it."""

    io: DType
    cache: DType
    head_size: int
    row_tiles: int
    warps: int
    ctas: int
    tile_keys: int
    units: int
    has_rules: bool
    shares_tokens: bool

    @property
    def tile_rows(self) -> int:
        """Query rows of a CTA."""
        return ROW_TILE * self.row_tiles


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
    finished=ptr,  # int32 [row tiles, head_tiles], zeros; None: combine_splits follows
    group_size=i32,
    row_chunks=i32,
    head_tiles=i32,
)

# (warps, CTAs of a multiprocessor, keys of a tile, units of a ring), best first; the first that fits is taken. They
# depend on the cache alone, so that a row's result does not depend on how many rows share its tile.
SHAPES = (
    (4, 4, 32, 4),
    (4, 2, 32, 8),
    (4, 2, 32, 5),
    (4, 2, 32, 4),
    (4, 2, 32, 3),
    (4, 2, 16, 4),
    (4, 2, 16, 3),
    (4, 1, 16, 3),
    (4, 1, 16, 2),
    (2, 1, 16, 2),
)
MAX_SPLIT_KEYS = 8192
MAX_CTAS = 4  # of a multiprocessor: more would not leave a thread the registers it needs


def threads(spec: DecodeSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.warps


def column_tile(cache: DType, head_size: int) -> tuple[int, int]:
    """Bytes from row to row of a tile, and channels of a row, padded (``ColumnTile`` in key_fragments.cuh)."""
    groups = ceil_div(head_size * cache.bits // 8, 32)
    return 16 * (2 * groups + 1), groups * 256 // cache.bits


def shared_bytes(spec: DecodeSpec) -> int:
    """What the end needs, then queries and rings of the main loop or the rows of all warps, whichever is more."""
    stride, padded = column_tile(spec.cache, spec.head_size)
    kept = 64 + 4 * spec.tile_rows + (4 * padded if spec.cache.is_quantized else 0)
    rings = spec.warps * spec.units * spec.tile_keys * stride
    merge = spec.warps * spec.tile_rows * (4 * (padded + 4) + 8)
    return kept + max(spec.tile_rows * (2 * padded + 24) + rings, merge)


def max_row_tiles(cache: DType, head_size: int) -> int:
    """Row tiles whose acc fits the registers of a warp."""
    padded = column_tile(cache, head_size)[1]
    return 4 if padded <= 128 else 2 if padded <= 256 else 1


def choose(
    io: DType,
    cache: DType,
    head_size: int,
    rows: int,
    shared_limit: int,
    has_rules: bool = False,
    shares_tokens: bool = False,
    span: int = ANY_SPAN,
) -> DecodeSpec:
    """Spec for ``rows`` query rows that share keys.

    ``shared_limit`` is the shared memory that a CTA may have; a window leaves a token no more than ``span`` keys.
    """
    most = max_row_tiles(cache, head_size)
    row_tiles = next((n for n in (1, 2, 4) if n <= most and ROW_TILE * n >= rows), most)

    def spec(shape: tuple[int, int, int, int], row_tiles: int, ctas: int) -> DecodeSpec:
        warps, _, tile_keys, units = shape
        return DecodeSpec(io, cache, head_size, row_tiles, warps, ctas, tile_keys, units, has_rules, shares_tokens)

    def fits(shape: tuple[int, int, int, int], row_tiles: int, ctas: int) -> bool:
        need = shared_bytes(spec(shape, row_tiles, ctas))
        return need <= shared_limit and fit_together(ctas, need, shared_limit)

    shape = next(shape for shape in SHAPES if fits(shape, 1, shape[1]) and fits(shape, most, 1))
    warps, ctas, tile_keys, units = shape
    # A ring that a short span cannot fill makes room for more CTAs.
    short = 2 * max(1, span // (warps * tile_keys))
    if short < units:
        shape, ctas = (warps, ctas, tile_keys, short), MAX_CTAS
    if row_tiles > 1:  # whose registers are many
        ctas = min(ctas, 2)
    return spec(shape, row_tiles, next(n for n in range(ctas, 0, -1) if fits(shape, row_tiles, n)))


def row_chunks(spec: DecodeSpec, group_size: int) -> int:
    """Tiles that the query heads of a token make for one kv head."""
    return 1 if spec.shares_tokens else ceil_div(group_size, spec.tile_rows)


def row_tile_count(spec: DecodeSpec, token_count: int, batch_size: int, group_size: int) -> int:
    """Row tiles of a launch, those without rows included."""
    if not spec.shares_tokens:
        return token_count
    return token_count * group_size // spec.tile_rows + batch_size + 1


KERNEL = Kernel("decode_split_kv", DecodeSpec, PARAMS, threads, shared_bytes, waits_itself=True)


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
    wanted = max(1, 2 * multiprocessors // ctas_per_split)
    size = round_up(ceil_div(kv_len_bound, wanted), 128)
    return max(256, min(size, MAX_SPLIT_KEYS))


def smoke_specs() -> Iterator[DecodeSpec]:
    """Specs that together reach every branch of the source."""
    big, small = 227 << 10, 99 << 10
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 128, 8, big)
        yield choose(dtypes.BFLOAT16, cache, 128, 32, big, shares_tokens=True)
    for cache in (dtypes.FLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.FLOAT16, cache, 64, 16, small, has_rules=True)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 8, 1, small)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 64, 8, big, span=128)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 256, 16, small)
    yield choose(dtypes.BFLOAT16, dtypes.INT4, 72, 5, small, has_rules=True, shares_tokens=True)
