"""Attention of prompts, chunks and mixed batches with Hopper's warpgroup products and copy engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit import tensor_map as maps
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.jit.params import i32, i64, params, ptr, tensor_map
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import BLOCK_TABLE, KV_CACHE, OUTPUT, SCORE_RULES, SEQUENCE_TABLE, PackedStructs
from pagedattn.problem import Problem, TensorInfo

WARPGROUP = 128
ROWS = 64  # of a warpgroup
HEAD_SIZES = (64, 96, 128, 192, 256)
WORK_BYTES = 48  # description of a piece of work
ALIGNMENT_BYTES = 1024  # the swizzle repeats after so many


@dataclass(frozen=True)
class FlashPrefillSm90Spec(Spec):
    """What `flash_prefill_sm90` is compiled for; `choose` fills it."""

    io: DType
    cache: DType
    head_size: int
    tile_kv: int
    stages: int
    warpgroups: int
    has_rules: bool


PARAMS = params(
    "FlashPrefillSm90Params",
    query_map=tensor_map,
    key_map=tensor_map,
    value_map=tensor_map,
    output_map=tensor_map,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    query=ptr,
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    out=OUTPUT,
    group_size=i32,
    warpgroup_tokens=i32,
    kv_num_heads=i32,
    key_head_step=i32,
    value_head_step=i32,
)

# (tile_kv, warpgroups) by head size: as many rows as the registers of acc and scores allow.
SHAPES = {64: (128, 3), 96: (128, 2), 128: (128, 2), 192: (64, 2), 256: (64, 2)}
STAGES = (4, 3, 2)  # tiles in flight, and as many of codes; the best that fits


def threads(spec: FlashPrefillSm90Spec) -> int:
    """Threads of a CTA: one warpgroup loads and clears, with codes another one widens, the others compute."""
    return WARPGROUP * (1 + spec.cache.is_quantized + spec.warpgroups)


def shared_bytes(spec: FlashPrefillSm90Spec) -> int:
    """Queries, output on its way, stages of key and value tiles, barriers, and room to start on a swizzle's period."""
    rows = spec.warpgroups * ROWS + spec.stages * 2 * spec.tile_kv
    code_stages = spec.stages if spec.cache.is_quantized else 0
    codes = code_stages * 2 * spec.tile_kv * spec.head_size * spec.cache.bits // 8
    stages = spec.stages + code_stages
    cleared = 0 if code_stages else spec.stages  # value tiles are full twice, then with zeros where nobody looks
    barriers = 8 * (6 + 4 * stages + cleared) + 4 * stages + 2 * WORK_BYTES
    return rows * spec.head_size * 2 + _staged_bytes(spec) + codes + barriers + ALIGNMENT_BYTES


def _staged_bytes(spec: FlashPrefillSm90Spec) -> int:
    """One or two channel groups of all output rows, unless a query that is in registers leaves its place."""
    if spec.warpgroups == 2 and spec.head_size <= (128 if spec.cache.is_quantized else 192):
        return 0
    channels = group_channels(spec.head_size)
    return spec.warpgroups * ROWS * 2 * channels * (2 if spec.head_size // channels % 2 == 0 else 1)


KERNEL = Kernel("flash_prefill_sm90", FlashPrefillSm90Spec, PARAMS, threads, shared_bytes, archs=("sm_90a",))


def group_channels(head_size: int) -> int:
    """Channels of a row of the swizzle."""
    return 64 if head_size % 64 == 0 else 32


def choose(io: DType, cache: DType, head_size: int, has_rules: bool, shared_limit: int) -> FlashPrefillSm90Spec:
    """Spec with the most stages that fit ``shared_limit`` bytes."""
    # The rules' code takes registers, and is written out for each score.
    tile_kv, warpgroups = (64, 2) if has_rules else SHAPES[head_size]
    if cache.is_quantized:
        warpgroups = 2  # one more widens
    specs = [FlashPrefillSm90Spec(io, cache, head_size, tile_kv, stages, warpgroups, has_rules) for stages in STAGES]
    return next(spec for spec in specs if shared_bytes(spec) <= shared_limit)


def tile_tokens(spec: FlashPrefillSm90Spec, group_size: int) -> int:
    """Tokens of one piece of work; each has a row per query head of the group."""
    return spec.warpgroups * (ROWS // group_size)


def grid(
    spec: FlashPrefillSm90Spec,
    token_count: int,
    batch_size: int,
    kv_num_heads: int,
    group_size: int,
    multiprocessors: int,
) -> tuple[int, int, int]:
    """CTAs of a launch: one a multiprocessor, or fewer when there is never so much work."""
    tokens = tile_tokens(spec, group_size)
    # Every sequence, and the padding after them, may end in a tile that is not full.
    tiles = min(token_count, token_count // tokens + batch_size + 1)
    return max(1, min(multiprocessors, tiles * kv_num_heads)), 1, 1


def why_not_problem(problem: Problem) -> str | None:
    """Reason why the kernel does not serve a problem, or None."""
    p = problem
    if p.is_latent:
        return "needs a value cache"
    if p.is_contiguous or not p.num_blocks:
        return "reads blocks of a power of two of positions, not one run of any length, and at least one"
    if p.io_dtype not in (dtypes.FLOAT16, dtypes.BFLOAT16):
        return "takes float16 and bfloat16"
    if p.head_size not in HEAD_SIZES:
        return f"head_size {p.head_size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    if p.cache_dtype.is_quantized and p.head_size == HEAD_SIZES[-1]:
        return "widening codes leaves too few registers for head_size 256"
    if p.group_size > ROWS:
        return f"{p.group_size} query heads a kv head are more than {ROWS}"
    return None


def why_not_tensors(query: tuple[int, int], caches: tuple[TensorInfo, TensorInfo], head_bytes: int) -> str | None:
    """Reason why the copy engine cannot read these arrays, or None.

    Parameters
    ----------
    query : tuple of int
        Address of the query rows, and elements from one token to the next.
    caches : tuple of TensorInfo
        Key and value cache.
    head_bytes : int
        What bytes from one head to the next must be a multiple of.
    """
    return maps.why_not_rows(query, caches, head_bytes)


class Sm90Kernel:
    """The kernel for one problem, ready to launch.

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
        self.spec = choose(p.io_dtype, p.cache_dtype, p.head_size, not p.has_plain_scores, executor.max_shared_bytes)
        self.channels = group_channels(p.head_size)
        self.grid = grid(self.spec, p.token_count, p.batch_size, p.kv_num_heads, p.group_size, executor.multiprocessors)

    def load(self) -> None:
        """Load what was planned."""
        self.function = self.executor.load(KERNEL, self.spec)

    def why_not(self, query: tuple[int, int], key_cache: TensorInfo, value_cache: TensorInfo) -> str | None:
        """Reason why these arrays cannot be read, or None; ``query`` is the rows' address and stride in elements."""
        head_bytes = maps.STRIDE_ALIGNMENT if self.problem.cache_dtype.is_quantized else 2 * self.channels
        return why_not_tensors(query, (key_cache, value_cache), head_bytes)

    def launch(
        self,
        query: tuple[int, int],
        key_cache: TensorInfo,
        value_cache: TensorInfo,
        output: int,
        shared: PackedStructs,
    ) -> Launch:
        """Launch that attends; ``output`` is an address."""
        p = self.problem
        packed = PARAMS.pack(
            query_map=self._rows_map(*query),
            key_map=self._cache_map(key_cache),
            value_map=self._cache_map(value_cache),
            output_map=bytes(128) if output % 16 else self._rows_map(output, p.num_heads * p.head_size),
            query=query[0],
            query_stride=query[1],
            **shared.of(PARAMS),
            group_size=p.group_size,
            warpgroup_tokens=ROWS // p.group_size,
            kv_num_heads=p.kv_num_heads,
            key_head_step=self._head_step(key_cache),
            value_head_step=self._head_step(value_cache),
        )
        return KERNEL.launch(self.function, self.spec, self.grid, packed)

    def _rows_map(self, address: int, stride: int) -> bytes:
        """Of query or output, [channel groups, tokens, heads, channels]; a box is a warpgroup's rows in one group."""
        p, channels = self.problem, self.channels
        return maps.encode(
            p.io_dtype,
            address,
            (channels, p.num_heads, p.token_count, p.head_size // channels),
            (2 * p.head_size, 2 * stride, 2 * channels),
            (channels, p.group_size, ROWS // p.group_size, 1),
        )

    def _cache_map(self, cache: TensorInfo) -> bytes:
        """[blocks, block_size / 8, pieces of all heads, 8, piece]; a box is what a tile has of a block.

        A piece of a row is a channel group, or all codes of a head.
        """
        p, codes = self.problem, self.problem.cache_dtype.is_quantized
        size = cache.dtype.itemsize
        block, token, head = (stride * size for stride in cache.strides[:3])
        row = p.head_size * p.cache_dtype.bits // 8
        piece = row if codes else size * self.channels
        step = (head if p.kv_num_heads > 1 else row) if codes else piece  # bytes from piece to piece
        pieces = (p.kv_num_heads - 1) * self._head_step(cache) + row // piece
        return maps.encode(
            p.cache_dtype,
            cache.pointer,
            (piece // size, 8, pieces, p.block_size // 8, p.num_blocks),
            (token, step, 8 * token, block),
            (piece // size, 8, row // piece, min(p.block_size, self.spec.tile_kv) // 8, 1),
            swizzled=not codes,
        )

    def _head_step(self, cache: TensorInfo) -> int:
        """Pieces of rows from one head of a cache to the next."""
        p = self.problem
        if p.kv_num_heads == 1:
            return 0
        return 1 if p.cache_dtype.is_quantized else cache.strides[2] // self.channels


def smoke_specs() -> Iterator[FlashPrefillSm90Spec]:
    """Specs that together reach every branch of the source."""
    f16, bf16, i8, f8, i4 = dtypes.FLOAT16, dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4
    kinds = [(bf16, bf16, head_size, False) for head_size in HEAD_SIZES]
    kinds += [(f16, f16, 128, False), (f16, f16, 64, True), (bf16, bf16, 128, True), (bf16, bf16, 256, True)]
    kinds += [(bf16, f8, 128, False), (bf16, i8, 128, False), (f16, i4, 128, False), (f16, f8, 64, False)]
    kinds += [(bf16, i4, 96, False), (bf16, i8, 192, False), (bf16, i8, 128, True), (f16, i4, 192, True)]
    for io, cache, head_size, has_rules in kinds:
        yield choose(io, cache, head_size, has_rules, 227 << 10)
