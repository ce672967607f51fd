"""`latent`: absorbed multi-head latent attention, whose one cache row is key and value of every head."""

from __future__ import annotations

from typing import Any

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, Rows, aligned
from pagedattn.backends.splits import SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.jit.tensor_map import why_not_rows
from pagedattn.kernels import latent_decode, latent_decode_sm90, latent_rows_sm90
from pagedattn.kernels.layouts import ceil_div
from pagedattn.problem import Problem

# Leave Hopper's kernels aside; for tests and comparisons.
FORCE_SM80 = False

_COUNTER_BYTES = 256


def plan(problem: Problem, executor: Executor[Function]) -> LatentPlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return LatentPlan(problem, executor)


class LatentPlan:
    """The prologue, the best kernel, and `combine_splits` where a tile of rows may have several splits.

    On Hopper that is the first one of `_HOPPER` that is for the problem, else `latent_decode`. Hopper's read through
    the copy engine, which wants rows that start on multiples of 16 bytes; arrays that do not comply take the other one.
    """

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        kinds = _HOPPER if executor.arch == "sm_90a" and not FORCE_SM80 else ()
        self.hopper = next((kind(p, executor) for kind in kinds if kind.is_for(p)), None)
        self.general = _General(p, executor)
        self.prologue = Prologue(p, executor, self.hopper.zero_count if self.hopper is not None else 0)
        if self.hopper is None:
            self.general.load()
        self._partials_at = aligned(self.prologue.workspace_bytes)
        parts = self.general.splits.workspace_bytes
        if self.hopper is not None:
            parts = max(parts, self.hopper.workspace_bytes)
        self.workspace_bytes = self._partials_at + parts

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        shared = Shared(self.problem, tensors)
        at = workspace + self._partials_at
        query = self.prologue.query(tensors, workspace)
        if self.hopper is not None and self.hopper.why_not_tensors(query, tensors) is None:
            attention = self.hopper.launches(query, tensors, shared, at)
        else:
            attention = self.general.launches(query, shared, at)
        return [self.prologue.launch(tensors, shared, workspace, at), *attention]


class _FewRows:
    """`latent_rows_sm90`: for sequences with few query rows, and for caches of codes whatever the rows."""

    @staticmethod
    def is_for(problem: Problem) -> bool:
        p = problem
        few = latent_rows_sm90.row_bound(p) <= latent_rows_sm90.FEW_ROWS
        return (few or p.cache_dtype.is_quantized) and latent_rows_sm90.why_not_problem(p) is None

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        kernel = self.kernel = latent_rows_sm90.LatentRowsKernel(problem, executor)
        self.splits = SplitPlan(problem, executor, kernel.span, kernel.split_size, kernel.tile_rows, kernel.starts_at_0)
        self.merges = 1 < self.splits.count <= latent_rows_sm90.MERGED_SPLITS
        # Counters start the workspace; the prologue sets them to 0.
        self.zero_count = kernel.tiles if self.merges else 0
        self._partials_at = aligned(4 * self.zero_count)
        self.workspace_bytes = self._partials_at + self.splits.workspace_bytes

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return why_not_rows(query, (tensors["key_cache"],))

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        partials = self.splits.partials(workspace + self._partials_at)
        attention = self.kernel.launch(
            query,
            tensors["key_cache"],
            shared.sequences,
            shared.blocks,
            shared.key_cache,
            shared.rules,
            shared.out,
            partials,
            self.splits.count,
            workspace if self.merges else None,
        )
        return [attention] if self.merges else [attention, *self.splits.combine(shared, partials)]


class _ManyRows:
    """`latent_decode_sm90`: 64 query rows at a time, from a cache of their type. A counter starts its workspace."""

    zero_count = 1

    @staticmethod
    def is_for(problem: Problem) -> bool:
        return latent_decode_sm90.why_not_problem(problem) is None

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        self.kernel = latent_decode_sm90.LatentSm90Kernel(problem, executor)
        self.splits = SplitPlan(
            problem,
            executor,
            self.kernel.span,
            self.kernel.split_size,
            latent_decode_sm90.ROWS,
            self.kernel.starts_at_0,
        )
        self.workspace_bytes = _COUNTER_BYTES + self.splits.workspace_bytes

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return latent_decode_sm90.why_not_tensors(query, tensors["key_cache"], tensors["output"].pointer)

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        partials = self.splits.partials(workspace + _COUNTER_BYTES)
        attention = self.kernel.launch(
            query,
            query.pointer != tensors["query"].pointer,
            tensors["key_cache"],
            shared.sequences,
            shared.blocks,
            shared.key_cache,
            shared.rules,
            shared.out,
            partials,
            self.splits.count,
            workspace,
        )
        return [attention, *self.splits.combine(shared, partials)]


# Hopper's kernels, the better one first.
_HOPPER: tuple[type[_FewRows] | type[_ManyRows], ...] = (_FewRows, _ManyRows)


class _General:
    """`latent_decode`, which runs everywhere and on everything."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.executor = executor
        rows = p.num_heads * max(1, min(p.query_len_bound, p.token_count - p.batch_size + 1))
        self.spec = latent_decode.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.v_head_size, rows, executor.max_shared_bytes
        )
        ordered = not p.has_query_positions and p.is_causal
        span = latent_decode.key_span(self.spec, p.kv_len_bound, p.local_window_size, p.num_heads, ordered)
        tokens = ceil_div(max(1, p.token_count), max(1, p.batch_size))  # of a sequence, were they all alike
        tiles = max(1, p.batch_size) * ceil_div(tokens * p.num_heads, self.spec.tile_rows)
        slots = executor.multiprocessors * latent_decode.resident(self.spec, executor.max_shared_bytes)
        size = latent_decode.split_size(span, tiles, slots)
        self.splits = SplitPlan(p, executor, span, size, self.spec.tile_rows)
        self.function: Any = None

    def load(self) -> None:
        """Compile it; whoever may not need it does so late."""
        self.function = self.executor.load(latent_decode.KERNEL, self.spec)

    def launches(self, query: Rows, shared: Shared, workspace: int) -> list[Launch]:
        p = self.problem
        if self.function is None:
            self.load()
        partials = self.splits.partials(workspace)
        packed = latent_decode.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            sequences=shared.sequences,
            blocks=shared.blocks,
            key_cache=shared.key_cache,
            rules=shared.rules,
            out=shared.out,
            partials=partials,
        )
        attention = latent_decode.launch(
            self.function,
            self.spec,
            p.token_count,
            p.batch_size,
            p.num_heads,
            self.splits.count,
            packed,
        )
        return [attention, *self.splits.combine(shared, partials)]
