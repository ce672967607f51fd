"""Merging the splits that another kernel left for each token and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, params
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import BLOCK_TABLE, OUTPUT, PARTIALS, SCORE_RULES, SEQUENCE_TABLE, ceil_div, round_up

WARPS = 4
# With so many rows, heads share a CTA.
CTAS_WORTH_SHARING = 4096


@dataclass(frozen=True)
class CombineSpec(Spec):
    """Type of the output and width of one of its heads."""

    io: DType
    v_head_size: int


PARAMS = params(
    "CombineParams",
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
    heads_per_cta=i32,
    run=i32,  # neighbouring splits that the producer has merged into one part
)


def threads(spec: CombineSpec) -> int:
    """Threads of a CTA."""
    return 32 * WARPS


def shared_bytes(spec: CombineSpec) -> int:
    """Sums of each warp."""
    return WARPS * 4 * (round_up(spec.v_head_size, 2) + 1)


def heads_per_cta(token_count: int, num_heads: int) -> int:
    """Heads of a token that a CTA merges: one while CTAs are few, else one for each warp."""
    return WARPS if token_count * num_heads >= CTAS_WORTH_SHARING else 1


def grid(token_count: int, num_heads: int) -> tuple[int, int, int]:
    """CTAs of a launch; their heads are also a field of the Params."""
    return token_count * ceil_div(num_heads, heads_per_cta(token_count, num_heads)), 1, 1


KERNEL = Kernel("combine_splits", CombineSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[CombineSpec]:
    """Specs that together reach every branch of the source."""
    yield CombineSpec(dtypes.BFLOAT16, 128)
    yield CombineSpec(dtypes.FLOAT16, 8)
    yield CombineSpec(dtypes.FLOAT16, 512)
