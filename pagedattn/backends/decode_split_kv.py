"""`decode`: one token at a time over splits of its keys, for batches in which few tokens of a sequence are new."""

from __future__ import annotations

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, aligned
from pagedattn.backends.splits import SplitPlan
from pagedattn.jit.launch import Executor, Function
from pagedattn.kernels import decode_split_kv as kernel
from pagedattn.problem import Problem

# Keys of a split, instead of the size that `kernel.split_size` chooses; a multiple of 16. Set by tests and tuning.
FORCED_SPLIT_KEYS: int | None = None


def plan(problem: Problem, executor: Executor[Function]) -> DecodePlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return DecodePlan(problem, executor)


class DecodePlan:
    """The prologue, `decode_split_kv`, and `combine_splits` where a token may have several splits."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.executor = executor
        self.prologue = Prologue(p, executor)
        self.spec = kernel.choose(p.io_dtype, p.cache_dtype, p.head_size, p.group_size, executor.max_shared_bytes)
        self.function = executor.load(kernel.KERNEL, self.spec)
        _, kv_heads, row_chunks = kernel.grid(self.spec, 1, 1, p.kv_num_heads, p.group_size)
        span = min(p.kv_len_bound, p.local_window_size) if p.has_window else p.kv_len_bound
        size = FORCED_SPLIT_KEYS or kernel.split_size(
            span, max(1, p.token_count) * kv_heads * row_chunks, executor.multiprocessors
        )
        self.splits = SplitPlan(p, executor, span, size)
        self._partials_at = aligned(self.prologue.workspace_bytes)
        self.workspace_bytes = self._partials_at + self.splits.workspace_bytes

    def run(self, tensors: Tensors, workspace: int) -> None:
        """Do the call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        shared = Shared(p, tensors)
        query = self.prologue.run(tensors, shared, workspace)
        partials = self.splits.partials(workspace + self._partials_at)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            sequences=shared.sequences,
            blocks=shared.blocks,
            key_cache=shared.key_cache,
            value_cache=shared.value_cache,
            rules=shared.rules,
            out=shared.out,
            partials=partials,
            group_size=p.group_size,
        )
        kernel.launch(
            self.executor,
            self.function,
            self.spec,
            p.token_count,
            self.splits.count,
            p.kv_num_heads,
            p.group_size,
            packed,
        )
        self.splits.combine(shared, partials)
