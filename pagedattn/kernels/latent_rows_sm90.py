"""Attention over a LATENT cache for few query rows, and over quantized ones, on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.jit.params import i32, i64, params, ptr, tensor_map
from pagedattn.jit.spec import Spec
from pagedattn.kernels import latent_sm90
from pagedattn.kernels.latent_sm90 import ALIGNMENT_BYTES, CHANNELS, HEAD_SIZE, TILE_KEYS, WARPGROUP
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    PackedStructs,
    ceil_div,
)
from pagedattn.kernels.row_tiles import key_span, row_bound, row_tile_count, tokens_of_tile
from pagedattn.problem import Problem, TensorInfo

FEW_ROWS = 32  # query rows, tokens times heads, of a tile of one warpgroup
WORKERS = 2  # warpgroups that multiply with values
CLUSTER = 2  # CTAs; larger clusters leave multiprocessors without work
SLOT_GROUPS = 3  # channel groups of a third of a tile
PARTS, PAD_BYTES = 4, 16  # of a tile of codes
BARRIER_BYTES = 512  # barriers, and the description of the work
SHARED_LIMIT = 227 << 10


@dataclass(frozen=True)
class LatentRowsSm90Spec(Spec):
    """What `latent_rows_sm90` is compiled for; `choose` fills ``rows`` and ``slots``.

    ``ctas`` of a cluster have the splits of a row tile, which are two, and merge them; 1: there is one split, or
    `combine_splits` follows.
    """

    io: DType
    cache: DType
    rows: int
    slots: int
    ctas: int
    has_rules: bool


PARAMS = params(
    "LatentRowsSm90Params",
    cache_map=tensor_map,
    key_cache=KV_CACHE,
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    tile_count=i32,  # row tiles of a split
    tiles_of_token=i32,  # 0: tiles may span tokens
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
)


def threads(spec: LatentRowsSm90Spec) -> int:
    """Threads of a CTA: a warp of one warpgroup loads, the others compute."""
    return (WORKERS + (spec.rows > FEW_ROWS) + 1) * WARPGROUP


def slot_bytes(cache: DType) -> int:
    """A tile of codes, or a third of a tile of elements of 16 bits."""
    if cache.is_quantized:
        return TILE_KEYS * HEAD_SIZE + PARTS * PAD_BYTES
    return TILE_KEYS * SLOT_GROUPS * CHANNELS * 2


def fixed_bytes(rows: int) -> int:
    """All but the ring: queries, buffers of weights, and what is small."""
    softmaxes, buffers = (1, 3) if rows > FEW_ROWS else (WORKERS, 2 * WORKERS)
    row_bytes = 2 * (HEAD_SIZE + buffers * TILE_KEYS) + 36 + softmaxes * 64  # the latter is told about a row
    return rows * row_bytes + BARRIER_BYTES + ALIGNMENT_BYTES


def shared_bytes(spec: LatentRowsSm90Spec) -> int:
    """The ring and what is beside it."""
    return fixed_bytes(spec.rows) + spec.slots * slot_bytes(spec.cache)


def spans_tokens(problem: Problem, tile_rows: int) -> bool:
    """Whether a tile has to hold rows of several tokens."""
    return row_bound(problem) > problem.num_heads and problem.num_heads % tile_rows != 0


def tile_rows(cache: DType, rows: int) -> int:
    """Rows of a tile, where sequences have at most ``rows``."""
    return 16 if rows <= 16 else FEW_ROWS if rows <= FEW_ROWS or not cache.is_quantized else 64


def choose(io: DType, cache: DType, rows: int, ctas: int, has_rules: bool) -> LatentRowsSm90Spec:
    """Spec for sequences of ``rows`` query rows (a bound of new tokens times heads), and clusters of ``ctas``."""
    own_rows = tile_rows(cache, rows)
    slots = (SHARED_LIMIT - fixed_bytes(own_rows)) // slot_bytes(cache)
    return LatentRowsSm90Spec(io, cache, own_rows, slots, ctas, has_rules)


KERNEL = Kernel(
    "latent_rows_sm90",
    LatentRowsSm90Spec,
    PARAMS,
    threads,
    shared_bytes,
    archs=("sm_90a",),
    waits_itself=True,
)


def why_not_problem(problem: Problem) -> str | None:
    """Reason why the kernel does not serve a problem, or None."""
    p = problem
    if p.cache_dtype not in (p.io_dtype, dtypes.INT8, dtypes.FLOAT8E4M3FN):
        return f"the cache holds {p.cache_dtype.name}, not the type of the query or codes of 8 bits"
    return latent_sm90.why_not_problem(p)


class LatentRowsKernel:
    """The kernel for one problem.

    Parameters
    ----------
    problem : Problem
        One for which `why_not_problem` returns None.
    executor : Executor
        On a device of compute capability 9.0.
    """

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.executor = executor
        rows = tile_rows(p.cache_dtype, row_bound(p))
        if not spans_tokens(p, rows):
            self.tiles_of_token, self.tile_rows, tokens = ceil_div(p.num_heads, rows), 0, 1
            self.tiles = typical_tiles = max(1, p.token_count * self.tiles_of_token)
        else:
            self.tiles_of_token, self.tile_rows, tokens = 0, rows, tokens_of_tile(rows, p.num_heads)
            self.tiles = row_tile_count(p.token_count, p.batch_size, p.num_heads, rows)
            sequences = max(1, p.batch_size)
            typical_tiles = sequences * max(1, ceil_div(ceil_div(p.token_count, sequences) * p.num_heads, rows))
        self.span = key_span(p, tokens)
        self.starts_at_0 = not p.has_window
        self.cluster = CLUSTER if CLUSTER * self.tiles <= executor.multiprocessors else 1  # splits that it merges
        longest = latent_sm90.typical_share(typical_tiles, executor.multiprocessors)
        self.split_size = latent_sm90.split_size(self.span, typical_tiles, executor.multiprocessors, longest)

    def load(self, split_count: int) -> None:
        """Load the kernel for as many splits as a row tile may have, ahead of launches."""
        p = self.problem
        ctas = split_count if split_count <= self.cluster else 1
        self.spec = choose(p.io_dtype, p.cache_dtype, row_bound(p), ctas, not p.has_plain_scores)
        self.function = self.executor.load(KERNEL, self.spec)

    def launch(
        self,
        query: tuple[int, int],
        cache: TensorInfo,
        shared: PackedStructs,
        partials: bytes,
        split_count: int,
    ) -> Launch:
        """Launch that attends."""
        packed = PARAMS.pack(
            cache_map=latent_sm90.cache_map(self.problem, cache, SLOT_GROUPS, promoted_bytes=128),
            query=query[0],
            query_stride=query[1],
            tile_count=self.tiles,
            tiles_of_token=self.tiles_of_token,
            **shared.of(PARAMS),
            partials=partials,
        )
        grid = (self.tiles * split_count, 1, 1)
        return Launch(self.function, grid, threads(self.spec), shared_bytes(self.spec), packed)


def smoke_specs() -> Iterator[LatentRowsSm90Spec]:
    """Specs that together reach every branch of the source."""
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 16, 2, False)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 32, 1, True)
    yield choose(dtypes.BFLOAT16, dtypes.FLOAT8E4M3FN, 16, 2, False)
    yield choose(dtypes.BFLOAT16, dtypes.FLOAT8E4M3FN, 32, 2, False)
    yield choose(dtypes.BFLOAT16, dtypes.INT8, 32, 1, True)
    yield choose(dtypes.BFLOAT16, dtypes.FLOAT8E4M3FN, 64, 1, False)
    yield choose(dtypes.FLOAT16, dtypes.INT8, 64, 2, True)
    yield choose(dtypes.FLOAT16, dtypes.INT8, 16, 1, False)
