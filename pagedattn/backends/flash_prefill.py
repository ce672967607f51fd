"""`flash`: prompts, chunks and mixed batches on tensor cores, with pages read in place."""

from __future__ import annotations

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue
from pagedattn.jit.launch import Executor, Function
from pagedattn.kernels import flash_prefill_sm80 as kernel
from pagedattn.problem import Problem


def plan(problem: Problem, executor: Executor[Function]) -> FlashPlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return FlashPlan(problem, executor)


class FlashPlan:
    """The prologue and `flash_prefill_sm80`."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.executor = executor
        self.prologue = Prologue(p, executor)
        self.spec = kernel.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.query_len_bound * p.group_size, executor.max_shared_bytes
        )
        self.function = executor.load(kernel.KERNEL, self.spec)
        self.workspace_bytes = self.prologue.workspace_bytes

    def run(self, tensors: Tensors, workspace: int) -> None:
        """Do the call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        shared = Shared(p, tensors)
        query = self.prologue.run(tensors, shared, workspace)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            sequences=shared.sequences,
            blocks=shared.blocks,
            key_cache=shared.key_cache,
            value_cache=shared.value_cache,
            rules=shared.rules,
            out=shared.out,
            group_size=p.group_size,
        )
        kernel.launch(
            self.executor,
            self.function,
            self.spec,
            p.token_count,
            p.batch_size,
            p.kv_num_heads,
            p.group_size,
            packed,
        )
