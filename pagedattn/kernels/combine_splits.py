"""Merging the splits that another kernel left for each token and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, params
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    MERGED_SPLITS,
    OUTPUT,
    PARTIALS,
    SCORE_RULES,
    SEQUENCE_TABLE,
    ceil_div,
    round_up,
)

# Warps of a CTA; of one that has a row to itself, one for each run of splits.
WARPS = 4
MANY_WARPS = 16
# Channels of a CTA that has more.
CHANNELS = 64
# With so many rows, heads share a CTA.
CTAS_WORTH_SHARING = 4096


@dataclass(frozen=True)
class CombineSpec(Spec):
    """Type of the output and width of one of its heads."""

    io: DType
    v_head_size: int
    warps: int


PARAMS = params(
    "CombineParams",
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
    heads_per_cta=i32,
)


def threads(spec: CombineSpec) -> int:
    """Threads of a CTA."""
    return 32 * spec.warps


def shared_bytes(spec: CombineSpec) -> int:
    """Sums of each warp."""
    width = round_up(spec.v_head_size, 2)
    return spec.warps * 4 * ((width if spec.warps == WARPS else min(width, CHANNELS)) + 1)


def heads_per_cta(parts: int, token_count: int, num_heads: int) -> int:
    """Heads of a token that a CTA merges: one while CTAs are few and rows may have several runs, else one a warp."""
    return WARPS if parts <= MERGED_SPLITS or token_count * num_heads >= CTAS_WORTH_SHARING else 1


def warps(parts: int, token_count: int, num_heads: int) -> int:
    """Warps of a CTA for rows that may have so many parts."""
    count = WARPS
    while heads_per_cta(parts, token_count, num_heads) == 1 and count < MANY_WARPS and parts > count * MERGED_SPLITS:
        count *= 2
    return count


def grid(spec: CombineSpec, parts: int, token_count: int, num_heads: int) -> tuple[int, int, int]:
    """CTAs of a launch; their heads are also a field of the Params."""
    chunks = 1 if spec.warps == WARPS else ceil_div(spec.v_head_size, CHANNELS)
    return chunks * token_count * ceil_div(num_heads, heads_per_cta(parts, token_count, num_heads)), 1, 1


KERNEL = Kernel("combine_splits", CombineSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[CombineSpec]:
    """Specs that together reach every branch of the source."""
    yield CombineSpec(dtypes.BFLOAT16, 128, WARPS)
    yield CombineSpec(dtypes.BFLOAT16, 128, MANY_WARPS)
    yield CombineSpec(dtypes.FLOAT16, 96, 2 * WARPS)
    yield CombineSpec(dtypes.FLOAT16, 8, WARPS)
    yield CombineSpec(dtypes.FLOAT16, 512, WARPS)
