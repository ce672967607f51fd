"""Splits of the keys: how many there are, where their parts are kept, and the merge."""

from __future__ import annotations

from typing import Any, NamedTuple

from pagedattn.backends.arguments import Shared
from pagedattn.backends.prologue import aligned
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import combine_splits
from pagedattn.kernels.layouts import MERGED_SPLITS, PARTIALS, partial_bytes, split_count
from pagedattn.problem import Problem

# Parts of splits take memory in proportion to tokens and splits; many tokens fill the device without splitting.
MAX_PARTIAL_BYTES = 1 << 30
MAX_SPLIT_KEYS = 2**31 - 16  # a multiple of 16 that an int32 holds


class Merging(NamedTuple):
    """What the kernel that makes the parts merges of them itself; by default nothing.

    Attributes
    ----------
    counters : int
        Pieces of work whose splits it counts, so that the last one to finish merges them, where there are
        `MERGED_SPLITS` at most.
    in_cluster : int
        Up to so many splits of a token are CTAs of one cluster, which needs no memory to merge them.
    """

    counters: int = 0
    in_cluster: int = 1


NO_MERGING = Merging()


class SplitPlan:
    """Splits of one problem: as the caller wants them, else of ``size`` keys, or more where parts took too much memory.

    Parameters
    ----------
    problem : Problem
    executor : Executor
    span : int
        Most keys that one token attends.
    size : int
        Keys of a split that suit the device, a multiple of 16.
    tile_rows : int
        Rows, tokens times query heads of a group, that are split alike; 0: each token has splits of its own.
    starts_at_0 : bool
        Whether every token's keys start with the first one of its sequence.
    merging : Merging
        What the kernel leaves for `combine_splits`, and what it needs to merge the others.
    own_counters : int
        Counters that the kernel wants whatever the splits are.

    Attributes
    ----------
    zero_count : int
        Counters of both kinds at the start of its workspace, its own first; the prologue sets them to 0.
    workspace_bytes : int
        Room for counters and parts.
    parts : int
        What is left of the splits of a token for `combine_splits`; 1: nothing.
    """

    def __init__(
        self,
        problem: Problem,
        executor: Executor[Function],
        span: int,
        size: int,
        tile_rows: int = 0,
        starts_at_0: bool = False,
        merging: Merging = NO_MERGING,
        own_counters: int = 0,
    ) -> None:
        p = self.problem = problem

        def part_bytes(size: int) -> tuple[int, int]:
            return partial_bytes(p.token_count, split_count(span, size, starts_at_0), p.num_heads, p.v_head_size)

        while not p.split_keys and size < MAX_SPLIT_KEYS and sum(part_bytes(size)) > MAX_PARTIAL_BYTES:
            size = min(2 * size, MAX_SPLIT_KEYS)
        size = p.split_keys or size
        self.tile_rows = tile_rows
        self.size = size
        self.count = split_count(span, size, starts_at_0)
        in_cluster = self.count <= merging.in_cluster  # or a single one, which is a part of nothing
        merges = not in_cluster and merging.counters > 0 and self.count <= MERGED_SPLITS
        self.parts = 1 if in_cluster or merges else self.count
        self._finished = merging.counters if merges else 0
        self.zero_count = own_counters + self._finished
        acc_bytes, lse_bytes = (0, 0) if in_cluster else part_bytes(size)
        self._acc_at = aligned(4 * self.zero_count)
        self._lse_at = self._acc_at + aligned(acc_bytes)
        self.workspace_bytes = self._lse_at + lse_bytes
        self.executor = executor
        self.merge = combine_splits.plan(p.io_dtype, p.v_head_size, self.parts, p.token_count, p.num_heads)
        self.function: Any = None

    def load(self) -> None:
        """Load `combine_splits`, if something may be left for it."""
        if self.parts > 1:
            self.function = self.executor.load(combine_splits.KERNEL, self.merge.spec)

    def partials(self, workspace: int) -> bytes:
        """Where the parts are, for the kernel that makes them and the one that merges them."""
        return PARTIALS.pack(
            acc=workspace + self._acc_at,
            lse=workspace + self._lse_at,
            split_size=self.size,
            split_count=self.count,
            tile_rows=self.tile_rows,
            group_size=self.problem.group_size,
        )

    def finished(self, workspace: int) -> int | None:
        """Where the counters of splits are, if there are any."""
        return workspace + 4 * (self.zero_count - self._finished) if self._finished else None

    def combine(self, shared: Shared, partials: bytes) -> list[Launch]:
        """The launch that merges the parts of every token that has several, if any may; the others are finished."""
        if self.parts == 1:
            return []
        kernel, merge = combine_splits, self.merge
        packed = kernel.PARAMS.pack(**shared.of(kernel.PARAMS), partials=partials, heads_per_cta=merge.heads_per_cta)
        return [kernel.KERNEL.launch(self.function, merge.spec, (merge.ctas, 1, 1), packed)]
