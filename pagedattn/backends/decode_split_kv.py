"""`decode`: one token at a time over splits of its keys, for batches in which few tokens of a sequence are new."""

from __future__ import annotations

from typing import Any

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.candidates import CandidatePlan
from pagedattn.backends.prologue import Rows, Start
from pagedattn.backends.splits import Merging, SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import decode_heads_sm90, decode_split_kv
from pagedattn.kernels.row_tiles import key_span, row_bound
from pagedattn.problem import Problem

# For tests and comparisons: Hopper's kernel attends wherever it can (True), or nowhere (False). None: where it pays.
FORCE_HEADS: bool | None = None


def plan(problem: Problem, executor: Executor[Function]) -> CandidatePlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    better = _ByHeads(problem, executor) if _pays_by_heads(problem, executor) else None
    return CandidatePlan(problem, executor, better, _General(problem, executor))


def _tokens_share_keys(problem: Problem) -> bool:
    """Whether a sequence may have several new tokens, which then share tiles."""
    return problem.token_count > problem.batch_size and row_bound(problem) > problem.group_size


def _pays_by_heads(problem: Problem, executor: Executor[Function]) -> bool:
    """Whether `decode_heads_sm90` is the better kernel: there are many tokens, or a few long splits of each.

    A caller who pins the size of splits wants a sequence's bits to be the same in any batch, whatever the others' new
    tokens are; so one kernel has to serve all of them.
    """
    kernel = decode_heads_sm90
    if executor.arch != "sm_90a" or _tokens_share_keys(problem) or kernel.why_not_problem(problem) is not None:
        return False
    if FORCE_HEADS is not None:
        return FORCE_HEADS
    works = max(1, problem.token_count * problem.kv_num_heads // kernel.HEADS)
    return not problem.split_keys and kernel.pays(key_span(problem, 1), works, executor.multiprocessors)


class _ByHeads:
    """`decode_heads_sm90`: all kv heads at a time, from caches whose tokens are one run of bytes."""

    prologue_start = Start.SPREAD

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        p = self.problem = problem
        kernel = decode_heads_sm90
        self.executor = executor
        self.spec = kernel.choose(p.io_dtype, p.cache_dtype, p.head_size, p.kv_num_heads, executor.max_shared_bytes)
        self.works = p.token_count * p.kv_num_heads // kernel.HEADS  # CTAs of a split
        span = key_span(p, 1)
        size = kernel.split_size(span, max(1, self.works), executor.multiprocessors)
        merges = (p.split_keys or size) >= kernel.MERGED_SPLIT_KEYS
        merging = Merging(counters=p.token_count * p.kv_num_heads if merges else 0)
        self.splits = SplitPlan(p, executor, span, size, starts_at_0=not p.has_window, merging=merging)

    def load(self) -> None:
        self.function = self.executor.load(decode_heads_sm90.KERNEL, self.spec)
        self.splits.load()

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return decode_heads_sm90.why_not_tensors(tensors, query)

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        kernel = decode_heads_sm90
        partials = self.splits.partials(workspace)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            **shared.of(kernel.PARAMS),
            partials=partials,
            finished=self.splits.finished(workspace),
            group_size=self.problem.group_size,
            head_tiles=self.problem.kv_num_heads // kernel.HEADS,
            query_is_new=query.pointer != tensors["query"].pointer,
        )
        grid = (self.works * self.splits.count, 1, 1)
        attention = kernel.KERNEL.launch(self.function, self.spec, grid, packed)
        return [attention, *self.splits.combine(shared, partials)]


class _General:
    """`decode_split_kv`, which runs everywhere and on everything."""

    prologue_start = Start.SPREAD

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        p = self.problem = problem
        self.executor = executor
        kernel = decode_split_kv
        # Tokens of a sequence that read the same keys share tiles as soon as a sequence may have several.
        shares_tokens = _tokens_share_keys(p)
        span = key_span(p, kernel.MAX_ROWS if shares_tokens else 1)
        self.spec = kernel.choose(
            p.io_dtype,
            p.cache_dtype,
            p.head_size,
            kernel.MAX_ROWS if shares_tokens else p.group_size,  # one kernel, however many tokens there are
            executor.max_shared_bytes,
            has_rules=p.has_score_rules,
            shares_tokens=shares_tokens,
            span=span if p.has_window else kernel.ANY_SPAN,
        )
        self.row_tiles = kernel.row_tile_count(self.spec, p.token_count, p.batch_size, p.group_size)
        self.head_tiles = p.kv_num_heads * kernel.row_chunks(self.spec, p.group_size)
        size = kernel.split_size(span, max(1, p.token_count) * self.head_tiles, executor.multiprocessors)
        self.splits = SplitPlan(
            p,
            executor,
            span,
            size,
            tile_rows=self.spec.tile_rows if shares_tokens else 0,
            starts_at_0=not p.has_window,
            merging=Merging(counters=self.row_tiles * self.head_tiles),
        )

    def load(self) -> None:
        self.function = self.executor.load(decode_split_kv.KERNEL, self.spec)
        self.splits.load()

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        p = self.problem
        kernel = decode_split_kv
        partials = self.splits.partials(workspace)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            **shared.of(kernel.PARAMS),
            partials=partials,
            finished=self.splits.finished(workspace),
            group_size=p.group_size,
            row_chunks=kernel.row_chunks(self.spec, p.group_size),
            head_tiles=self.head_tiles,
        )
        grid = (self.row_tiles * self.head_tiles * self.splits.count, 1, 1)
        attention = kernel.KERNEL.launch(self.function, self.spec, grid, packed)
        return [attention, *self.splits.combine(shared, partials)]
