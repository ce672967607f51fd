"""`latent`: absorbed multi-head latent attention, whose one cache row is key and value of every head."""

from __future__ import annotations

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, aligned
from pagedattn.backends.splits import SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import latent_decode as kernel
from pagedattn.problem import Problem

# Keys of a split, instead of the size that `kernel.split_size` chooses; a multiple of 16. Set by tests and tuning.
FORCED_SPLIT_KEYS: int | None = None


def plan(problem: Problem, executor: Executor[Function]) -> LatentPlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return LatentPlan(problem, executor)


class LatentPlan:
    """The prologue, `latent_decode`, and `combine_splits` where a tile of rows may have several splits."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.prologue = Prologue(p, executor)
        rows = p.num_heads * max(1, min(p.query_len_bound, p.token_count - p.batch_size + 1))
        self.spec = kernel.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.v_head_size, rows, executor.max_shared_bytes
        )
        self.function = executor.load(kernel.KERNEL, self.spec)
        ordered = not p.has_query_positions and p.is_causal
        span = kernel.key_span(self.spec, p.kv_len_bound, p.local_window_size, p.num_heads, ordered)
        tiles, _, _ = kernel.grid(self.spec, p.token_count, p.batch_size, p.num_heads, 1)
        size = FORCED_SPLIT_KEYS or kernel.split_size(span, tiles, executor.multiprocessors)
        self.splits = SplitPlan(p, executor, span, size, self.spec.tile_rows)
        self._partials_at = aligned(self.prologue.workspace_bytes)
        self.workspace_bytes = self._partials_at + self.splits.workspace_bytes

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        shared = Shared(p, tensors)
        query = self.prologue.query(tensors, workspace)
        partials = self.splits.partials(workspace + self._partials_at)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            sequences=shared.sequences,
            blocks=shared.blocks,
            key_cache=shared.key_cache,
            rules=shared.rules,
            out=shared.out,
            partials=partials,
        )
        attention = kernel.launch(
            self.function,
            self.spec,
            p.token_count,
            p.batch_size,
            p.num_heads,
            self.splits.count,
            packed,
        )
        return [self.prologue.launch(tensors, shared, workspace), attention, *self.splits.combine(shared, partials)]
