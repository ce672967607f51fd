"""`decode`: one token at a time over splits of its keys, for batches in which few tokens of a sequence are new."""

from __future__ import annotations

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, aligned
from pagedattn.backends.splits import SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import decode_split_kv as kernel
from pagedattn.problem import Problem


def plan(problem: Problem, executor: Executor[Function]) -> DecodePlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return DecodePlan(problem, executor)


class DecodePlan:
    """The prologue, `decode_split_kv`, and `combine_splits` where a token may have several splits."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        # Tokens of a sequence that read the same keys share tiles as soon as a sequence may have several.
        tokens = max(1, min(p.query_len_bound, p.token_count - p.batch_size + 1))
        shares_tokens = p.token_count > p.batch_size and tokens > 1
        span = p.kv_len_bound
        if p.has_window and not (shares_tokens and (p.has_query_positions or not p.is_causal)):
            span = min(span, p.local_window_size + (kernel.MAX_ROWS if shares_tokens else 0))
        self.spec = kernel.choose(
            p.io_dtype,
            p.cache_dtype,
            p.head_size,
            kernel.MAX_ROWS if shares_tokens else p.group_size,  # one kernel, however many tokens there are
            executor.max_shared_bytes,
            has_rules=p.softcap > 0 or p.bias_shape is not None,
            shares_tokens=shares_tokens,
            span=span if p.has_window else kernel.ANY_SPAN,
        )
        self.function = executor.load(kernel.KERNEL, self.spec)
        row_tiles = kernel.row_tile_count(self.spec, p.token_count, p.batch_size, p.group_size)
        self.head_tiles = p.kv_num_heads * kernel.row_chunks(self.spec, p.group_size)
        size = kernel.split_size(span, max(1, p.token_count) * self.head_tiles, executor.multiprocessors)
        self.splits = SplitPlan(
            p, executor, span, size, self.spec.tile_rows if shares_tokens else 0, starts_at_0=not p.has_window
        )
        self.merges = 1 < self.splits.count <= kernel.MERGED_SPLITS
        self.prologue = Prologue(p, executor, row_tiles * self.head_tiles if self.merges else 0)
        self._finished_at = aligned(self.prologue.workspace_bytes)
        self._partials_at = aligned(self._finished_at + 4 * row_tiles * self.head_tiles * self.merges)
        self.workspace_bytes = self._partials_at + self.splits.workspace_bytes

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        shared = Shared(p, tensors)
        finished = workspace + self._finished_at if self.merges else None
        query = self.prologue.query(tensors, workspace)
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
            finished=finished,
            group_size=p.group_size,
            row_chunks=kernel.row_chunks(self.spec, p.group_size),
            head_tiles=self.head_tiles,
        )
        attention = kernel.launch(
            self.function,
            self.spec,
            p.token_count,
            p.batch_size,
            self.splits.count,
            p.kv_num_heads,
            p.group_size,
            packed,
        )
        merge = [] if self.merges else self.splits.combine(shared, partials)
        return [self.prologue.launch(tensors, shared, workspace, finished), attention, *merge]
