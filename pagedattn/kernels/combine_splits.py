"""Merging the splits that another kernel left for each token and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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

# Warps of a CTA: each has a row, or all have one together and a run of its splits each. With more of them, a CTA has
# some channels of a row.
WARPS = 4
MANY_WARPS = 16
CHANNELS = 64
# With so many rows, heads share a CTA.
CTAS_WORTH_SHARING = 4096


@dataclass(frozen=True)
class CombineSpec(Spec):
    """Type of the output, width of one of its heads, and warps of a CTA."""

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


class MergePlan(NamedTuple):
    """A merge of parts: the Spec, and of a launch the heads of a CTA and the CTAs."""

    spec: CombineSpec
    heads_per_cta: int
    ctas: int


def plan(io: DType, v_head_size: int, parts: int, token_count: int, num_heads: int) -> MergePlan:
    """Plan the merge of up to ``parts`` parts of each of ``token_count`` times ``num_heads`` rows.

    A warp has a row where that has one run of parts, or where CTAs are many; else a CTA has one, with a warp a run.
    """
    shares = parts <= MERGED_SPLITS or token_count * num_heads >= CTAS_WORTH_SHARING
    heads = warps = WARPS
    if not shares:
        heads = 1
        while warps < MANY_WARPS and parts > warps * MERGED_SPLITS:
            warps *= 2
    chunks = 1 if warps == WARPS else ceil_div(v_head_size, CHANNELS)
    ctas = chunks * token_count * ceil_div(num_heads, heads)
    return MergePlan(CombineSpec(io, v_head_size, warps), heads, ctas)


KERNEL = Kernel("combine_splits", CombineSpec, PARAMS, threads, shared_bytes, waits_itself=True)


def smoke_specs() -> Iterator[CombineSpec]:
    """Specs that together reach every branch of the source."""
    yield CombineSpec(dtypes.BFLOAT16, 128, WARPS)
    yield CombineSpec(dtypes.BFLOAT16, 128, MANY_WARPS)
    yield CombineSpec(dtypes.BFLOAT16, 510, MANY_WARPS)
    yield CombineSpec(dtypes.FLOAT16, 96, 2 * WARPS)
    yield CombineSpec(dtypes.FLOAT16, 33, 2 * WARPS)
    yield CombineSpec(dtypes.FLOAT16, 8, WARPS)
    yield CombineSpec(dtypes.FLOAT16, 512, WARPS)
