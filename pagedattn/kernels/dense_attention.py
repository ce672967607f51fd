"""The kernel that serves every call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels import wide_attention
from pagedattn.kernels.layouts import BLOCK_TABLE, KV_CACHE, OUTPUT, SCORE_RULES, SEQUENCE_TABLE
from pagedattn.kernels.row_tiles import row_tile_count


@dataclass(frozen=True)
class DenseSpec(Spec):
    """What `dense_attention` is compiled for; `choose` fills row_tiles to stages.

    ``qk`` is the type of output_qk: float32 when there is none, so as not to compile twice.
    """

    io: DType
    cache: DType
    head_size: int
    v_head_size: int
    latent: bool
    row_tiles: int
    column_warps: int
    tile_keys: int
    stages: int
    has_qk: bool
    qk: DType

    @property
    def tile_rows(self) -> int:
        """Query rows (tokens times heads of a group) of a CTA."""
        return 16 * self.row_tiles


PARAMS = params(
    "DenseParams",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    rules=SCORE_RULES,
    out=OUTPUT,
    output_qk=ptr,  # [num_heads, token_count, max_context_len], or None
    max_context_len=i32,
    qk_output=i32,
    group_size=i32,
)

# (row_tiles, column_warps, tile_keys, stages), best first: the first whose accumulators and shared memory fit is taken.
SHAPES = (
    (4, 2, 64, 2),
    (4, 2, 32, 2),
    (2, 4, 32, 2),
    (2, 4, 32, 1),
    (1, 8, 32, 2),
    (1, 8, 32, 1),
    (1, 8, 16, 1),
)
MAX_ACCUMULATOR_TILES = 16


def threads(spec: DenseSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.row_tiles * spec.column_warps


def shared_bytes(spec: DenseSpec) -> int:
    """See `wide_attention.shared_bytes`."""
    return wide_attention.shared_bytes(
        spec.io,
        spec.cache,
        spec.head_size,
        spec.v_head_size,
        spec.latent,
        spec.row_tiles,
        spec.column_warps,
        spec.tile_keys,
        spec.stages,
    )


def choose(
    io: DType,
    cache: DType,
    head_size: int,
    v_head_size: int,
    latent: bool,
    qk: DType | None,
    shared_limit: int,
) -> DenseSpec:
    """Spec for a call; ``qk`` is the type of output_qk, None without one."""
    for shape in SHAPES:
        spec = DenseSpec(
            io, cache, head_size, v_head_size, latent, *shape, has_qk=qk is not None, qk=qk or dtypes.FLOAT32
        )
        tiles = wide_attention.accumulator_tiles(cache, v_head_size, spec.column_warps)
        if tiles <= MAX_ACCUMULATOR_TILES and shared_bytes(spec) <= shared_limit:
            return spec
    raise ValueError(f"heads of {head_size} channels do not fit {shared_limit} bytes of shared memory")


def grid(
    spec: DenseSpec, token_count: int, batch_size: int, kv_num_heads: int, group_size: int
) -> tuple[int, int, int]:
    """CTAs of a launch."""
    return row_tile_count(token_count, batch_size, group_size, spec.tile_rows), kv_num_heads, 1


KERNEL = Kernel("dense_attention", DenseSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[DenseSpec]:
    """Specs that together reach every branch of the source."""
    full, small = 227 << 10, 99 << 10
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 128, 128, False, dtypes.FLOAT32, full)
    yield choose(dtypes.BFLOAT16, dtypes.INT8, 320, 320, False, None, full)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT8E4M3FN, 512, 512, False, dtypes.FLOAT16, full)
    yield choose(dtypes.FLOAT16, dtypes.FLOAT16, 1024, 1024, False, dtypes.BFLOAT16, full)
    yield choose(dtypes.BFLOAT16, dtypes.BFLOAT16, 1024, 1024, False, None, small)
    yield choose(dtypes.FLOAT16, dtypes.INT4, 576, 512, True, dtypes.FLOAT32, full)
