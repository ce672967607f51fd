"""`latent`: absorbed multi-head latent attention, whose one cache row is key and value of every head."""

from __future__ import annotations

from typing import Any

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.candidates import CandidatePlan
from pagedattn.backends.prologue import Rows, Start
from pagedattn.backends.splits import NO_MERGING, Merging, SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.jit.tensor_map import why_not_rows
from pagedattn.kernels import latent_decode, latent_decode_sm90, latent_rows_sm90
from pagedattn.kernels.layouts import ceil_div
from pagedattn.kernels.row_tiles import key_span, row_bound, tokens_of_tile
from pagedattn.problem import Problem

# Leave Hopper's kernels aside; for tests and comparisons.
FORCE_SM80 = False


def plan(problem: Problem, executor: Executor[Function]) -> CandidatePlan:
    """Plan a problem; see `pagedattn.backends.base`.

    On Hopper the first one of `_HOPPER` that is for the problem comes before `latent_decode`. Hopper's kernels read
    through the copy engine, which wants rows that start on multiples of 16 bytes; arrays that do not comply take the
    other one.
    """
    kinds = _HOPPER if executor.arch == "sm_90a" and not FORCE_SM80 else ()
    best = next((kind for kind in kinds if kind.is_for(problem)), None)
    better = None if best is None else best(problem, executor)
    return CandidatePlan(problem, executor, better, _General(problem, executor))


def _splits_for(
    kernel: latent_rows_sm90.LatentRowsKernel | latent_decode_sm90.LatentSm90Kernel,
    merging: Merging = NO_MERGING,
    own_counters: int = 0,
) -> SplitPlan:
    """Splits as one of Hopper's kernels wants them."""
    return SplitPlan(
        kernel.problem,
        kernel.executor,
        kernel.span,
        kernel.split_size,
        kernel.tile_rows,
        kernel.starts_at_0,
        merging,
        own_counters,
    )


class _FewRows:
    """`latent_rows_sm90`: for sequences with few query rows, and for caches of codes whatever the rows."""

    prologue_start = Start.LATE  # else it takes multiprocessors that this kernel's CTAs want as a whole

    @staticmethod
    def is_for(problem: Problem) -> bool:
        p = problem
        few = row_bound(p) <= latent_rows_sm90.FEW_ROWS
        return (few or p.cache_dtype.is_quantized) and latent_rows_sm90.why_not_problem(p) is None

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        self.kernel = latent_rows_sm90.LatentRowsKernel(problem, executor)
        self.splits = _splits_for(self.kernel, Merging(in_cluster=self.kernel.cluster))

    def load(self) -> None:
        self.kernel.load(self.splits.count)
        self.splits.load()

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return why_not_rows(query, (tensors["key_cache"],))

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        partials = self.splits.partials(workspace)
        attention = self.kernel.launch(
            query,
            tensors["key_cache"],
            shared,
            partials,
            self.splits.count,
        )
        return [attention, *self.splits.combine(shared, partials)]


class _ManyRows:
    """`latent_decode_sm90`: 64 query rows at a time, from a cache of their type."""

    prologue_start = Start.EARLY

    @staticmethod
    def is_for(problem: Problem) -> bool:
        return latent_decode_sm90.why_not_problem(problem) is None

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        self.kernel = latent_decode_sm90.LatentSm90Kernel(problem, executor)
        self.splits = _splits_for(self.kernel, own_counters=1)  # of the pieces of work that are taken

    def load(self) -> None:
        self.kernel.load()
        self.splits.load()

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return latent_decode_sm90.why_not_tensors(query, tensors["key_cache"], tensors["output"].pointer)

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        partials = self.splits.partials(workspace)
        attention = self.kernel.launch(
            query,
            query.pointer != tensors["query"].pointer,
            tensors["key_cache"],
            shared,
            partials,
            self.splits.count,
            workspace,
        )
        return [attention, *self.splits.combine(shared, partials)]


# Hopper's kernels, the better one first.
_HOPPER: tuple[type[_FewRows] | type[_ManyRows], ...] = (_FewRows, _ManyRows)


class _General:
    """`latent_decode`, which runs everywhere and on everything."""

    prologue_start = Start.EARLY

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        p = self.problem = problem
        self.executor = executor
        self.spec = latent_decode.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.v_head_size, row_bound(p), executor.max_shared_bytes
        )
        span = key_span(p, tokens_of_tile(self.spec.tile_rows, p.num_heads))
        tokens = ceil_div(max(1, p.token_count), max(1, p.batch_size))  # of a sequence, were they all alike
        tiles = max(1, p.batch_size) * ceil_div(tokens * p.num_heads, self.spec.tile_rows)
        slots = executor.multiprocessors * latent_decode.resident(self.spec, executor.max_shared_bytes)
        size = latent_decode.split_size(span, tiles, slots)
        self.splits = SplitPlan(p, executor, span, size, self.spec.tile_rows)

    def load(self) -> None:
        self.function = self.executor.load(latent_decode.KERNEL, self.spec)
        self.splits.load()

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        p = self.problem
        kernel = latent_decode
        partials = self.splits.partials(workspace)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            **shared.of(kernel.PARAMS),
            partials=partials,
        )
        grid = kernel.grid(self.spec, p.token_count, p.batch_size, p.num_heads, self.splits.count)
        attention = kernel.KERNEL.launch(self.function, self.spec, grid, packed)
        return [attention, *self.splits.combine(shared, partials)]
