"""`dense`: any call at all, output_qk and head sizes up to 1024 included."""

from __future__ import annotations

from pagedattn.backends import arguments
from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import dense_attention as kernel
from pagedattn.problem import Problem


def plan(problem: Problem, executor: Executor[Function]) -> DensePlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return DensePlan(problem, executor)


class DensePlan:
    """The prologue and `dense_attention`, which reads pages in place and needs no workspace of its own."""

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.prologue = Prologue(p, executor)
        self.spec = kernel.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.v_head_size, p.is_latent, p.qk_dtype, executor.max_shared_bytes
        )
        self.function = executor.load(kernel.KERNEL, self.spec)
        self.workspace_bytes = self.prologue.workspace_bytes

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        p = self.problem
        shared = Shared(p, tensors)
        query = self.prologue.query(tensors, workspace)
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            **shared.of(kernel.PARAMS),
            output_qk=arguments.pointer(tensors, "output_qk"),
            max_context_len=tensors["output_qk"].shape[2] if p.qk_output else 0,
            qk_output=p.qk_output,
            group_size=p.group_size,
        )
        grid = kernel.grid(self.spec, p.token_count, p.batch_size, p.kv_num_heads, p.group_size)
        attention = kernel.KERNEL.launch(self.function, self.spec, grid, packed)
        return [self.prologue.launch(tensors, shared, workspace), attention]
