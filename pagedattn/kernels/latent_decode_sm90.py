"""Attention over a LATENT cache with Hopper's warpgroup products and copy engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit import tensor_map as maps
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.jit.params import i32, i64, params, ptr, tensor_map
from pagedattn.jit.spec import Spec
from pagedattn.kernels import latent_sm90
from pagedattn.kernels.latent_sm90 import ALIGNMENT_BYTES, CHANNELS, HEAD_SIZE, TILE_KEYS, VALUE_SIZE, WARPGROUP
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    PackedStructs,
    ceil_div,
    round_up,
)
from pagedattn.kernels.row_tiles import key_span, row_tile_count, tokens_of_tile
from pagedattn.problem import Problem, TensorInfo

ROWS = 64  # query rows, tokens times heads, of a CTA
BARRIER_BYTES = 2304  # barriers, references and sums of rows, the descriptions of two pieces of work, counts of work
LISTED_BYTES = 3 * WARPGROUP * 20  # what the list of work needs to know of sequences


@dataclass(frozen=True)
class LatentDecodeSm90Spec(Spec):
    """What `latent_decode_sm90` is compiled for."""

    io: DType
    has_rules: bool
    ctas: int  # of a cluster that shares the tiles, each with a row tile of the same token: 1 or 2


PARAMS = params(
    "LatentDecodeSm90Params",
    half_map=tensor_map,
    rope_map=tensor_map,
    query_map=tensor_map,
    key_cache=KV_CACHE,
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    query_box=i32,  # heads that one copy brings; divides num_heads and the rows of a tile
    query_groups=i32,  # channel groups that it brings: all where it brings a whole tile, else 1
    query_is_new=i32,  # the kernel ahead writes the query
    reads_once=i32,  # a tile is wanted by CTAs that run side by side, and then no more
    next_work=ptr,  # int32 [1], 0 before the launch
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
)

# Row tiles of a sequence that run at about the same time: they share what one of them brings to L2.
SIDE_BY_SIDE = 8


def threads(spec: LatentDecodeSm90Spec) -> int:
    """Threads of a CTA: the warps of one warpgroup find work and load, two warpgroups compute."""
    return 3 * WARPGROUP


def shared_bytes(spec: LatentDecodeSm90Spec) -> int:
    """Queries, two tiles, barriers, sequences, and room to start on a multiple of the swizzle's period."""
    return (ROWS + 2 * TILE_KEYS) * HEAD_SIZE * 2 + BARRIER_BYTES + LISTED_BYTES + ALIGNMENT_BYTES


KERNEL = Kernel(
    "latent_decode_sm90",
    LatentDecodeSm90Spec,
    PARAMS,
    threads,
    shared_bytes,
    archs=("sm_90a",),
    waits_itself=True,
)


def cluster_ctas(num_heads: int) -> int:
    """CTAs of a cluster: two where the heads of a token are pairs of row tiles, which then attend the same keys."""
    return 2 if num_heads % (2 * ROWS) == 0 else 1


def row_tiles(token_count: int, batch_size: int, num_heads: int) -> int:
    """Most row tiles that a batch has; every sequence, and the padding after them, may end in one that is not full."""
    return min(token_count * ceil_div(num_heads, ROWS), row_tile_count(token_count, batch_size, num_heads, ROWS))


def split_size(span: int, tiles: int, multiprocessors: int) -> int:
    """Keys of a split, a whole number of tiles: the size that keeps the device busiest.

    Parameters
    ----------
    span : int
        Most keys of a row tile.
    tiles : int
        Most row tiles.
    multiprocessors : int
    """
    share = round_up(latent_sm90.typical_share(tiles, multiprocessors), TILE_KEYS)
    if share < span and tiles * ceil_div(span, share) >= multiprocessors:
        return share  # the span is a bound, and what sequences have is left to the order of the work
    return latent_sm90.split_size(span, tiles, multiprocessors, share)


def grid(tiles: int, split_count: int, multiprocessors: int, ctas: int) -> tuple[int, int, int]:
    """CTAs of a launch, in whole clusters: one a multiprocessor, or fewer when there is never so much work."""
    return ctas * max(1, min(multiprocessors, tiles * split_count) // ctas), 1, 1


def why_not_problem(problem: Problem) -> str | None:
    """Reason why the kernel does not serve a problem, or None."""
    p = problem
    if p.cache_dtype != p.io_dtype:
        return f"the cache holds {p.cache_dtype.name}, not the type of the query"
    if p.token_count * p.num_heads >= 2**31:
        return "counts query rows in 32 bits"
    return latent_sm90.why_not_problem(p)


def why_not_tensors(query: tuple[int, int], cache: TensorInfo, output: int) -> str | None:
    """Reason why these arrays cannot be read and written, or None.

    Parameters
    ----------
    query : tuple of int
        Address of the query rows, and elements from one token to the next.
    cache : TensorInfo
        The latent cache.
    output : int
        Address of the output.
    """
    if not 0 < 2 * query[1] < maps.MAX_STRIDE_BYTES:
        return "query rows are too far apart, or not in order"
    if output % 16:
        return "output rows do not start on multiples of 16 bytes"
    return maps.why_not_rows(query, (cache,))


class LatentSm90Kernel:
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
        self.spec = LatentDecodeSm90Spec(p.io_dtype, not p.has_plain_scores, cluster_ctas(p.num_heads))
        self.tile_rows = ROWS
        self.tiles = row_tiles(p.token_count, p.batch_size, p.num_heads)
        self.span = key_span(p, tokens_of_tile(ROWS, p.num_heads))
        self.starts_at_0 = not p.has_window
        self.split_size = split_size(self.span, self.tiles, executor.multiprocessors)
        self.reads_once = self.tiles <= SIDE_BY_SIDE * p.batch_size
        self.query_box = math.gcd(p.num_heads, ROWS)
        self.query_groups = HEAD_SIZE // CHANNELS if self.query_box == ROWS else 1

    def load(self) -> None:
        """Load the kernel, ahead of launches."""
        self.function = self.executor.load(KERNEL, self.spec)

    def launch(
        self,
        query: tuple[int, int],
        query_is_new: bool,
        cache: TensorInfo,
        shared: PackedStructs,
        partials: bytes,
        split_count: int,
        next_work: int,
    ) -> Launch:
        """Launch that attends; ``next_work`` points to a 0.

        ``query_is_new`` says that the launch ahead writes the query rows; else they are read while it still runs.
        """
        packed = PARAMS.pack(
            half_map=latent_sm90.cache_map(self.problem, cache, VALUE_SIZE // 2 // CHANNELS),
            rope_map=latent_sm90.cache_map(self.problem, cache, 1),
            query_map=self._query_map(query),
            query=query[0],
            query_stride=query[1],
            query_box=self.query_box,
            query_groups=self.query_groups,
            query_is_new=query_is_new,
            reads_once=self.reads_once,
            next_work=next_work,
            **shared.of(PARAMS),
            partials=partials,
        )
        shape = grid(self.tiles, split_count, self.executor.multiprocessors, self.spec.ctas)
        return KERNEL.launch(self.function, self.spec, shape, packed)

    def _query_map(self, query: tuple[int, int]) -> bytes:
        """[tokens, channel groups, heads, channels]; a box is some heads of a token in one group, or in all."""
        p = self.problem
        address, stride = query
        return maps.encode(
            p.io_dtype,
            address,
            (CHANNELS, p.num_heads, HEAD_SIZE // CHANNELS, p.token_count),
            (2 * HEAD_SIZE, 2 * CHANNELS, 2 * stride),
            (CHANNELS, self.query_box, self.query_groups, 1),
        )


def smoke_specs() -> Iterator[LatentDecodeSm90Spec]:
    """Specs that together reach every branch of the source."""
    yield LatentDecodeSm90Spec(dtypes.BFLOAT16, False, 1)
    yield LatentDecodeSm90Spec(dtypes.FLOAT16, False, 1)
    yield LatentDecodeSm90Spec(dtypes.BFLOAT16, True, 1)
    yield LatentDecodeSm90Spec(dtypes.BFLOAT16, False, 2)
    yield LatentDecodeSm90Spec(dtypes.FLOAT16, True, 2)
