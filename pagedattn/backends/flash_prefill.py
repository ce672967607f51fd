"""`flash`: prompts, chunks and mixed batches on tensor cores, with pages read in place."""

from __future__ import annotations

from typing import Any

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.candidates import CandidatePlan
from pagedattn.backends.prologue import Rows, Start
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import flash_prefill_sm80, flash_prefill_sm90
from pagedattn.problem import Problem

# Leave Hopper's kernel aside; for tests and comparisons.
FORCE_SM80 = False


def plan(problem: Problem, executor: Executor[Function]) -> CandidatePlan:
    """Plan a problem; see `pagedattn.backends.base`.

    Hopper's kernel reads through the copy engine, which wants rows that start on multiples of 16 bytes, and takes some
    head sizes only; arrays and problems that do not comply take the other one.
    """
    on_hopper = executor.arch == "sm_90a" and not FORCE_SM80 and flash_prefill_sm90.why_not_problem(problem) is None
    better = _Hopper(problem, executor) if on_hopper else None
    return CandidatePlan(problem, executor, better, _General(problem, executor))


class _Hopper:
    """`flash_prefill_sm90`."""

    splits = None
    prologue_start = Start.EARLY

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        self.kernel = flash_prefill_sm90.Sm90Kernel(problem, executor)

    def load(self) -> None:
        self.kernel.load()

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        return self.kernel.why_not(query, tensors["key_cache"], tensors["value_cache"])

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        output = tensors["output"].pointer
        return [self.kernel.launch(query, tensors["key_cache"], tensors["value_cache"], output, shared)]


class _General:
    """`flash_prefill_sm80`, which runs everywhere and on everything."""

    splits = None
    prologue_start = Start.EARLY

    def __init__(self, problem: Problem, executor: Executor[Any]) -> None:
        p = self.problem = problem
        self.executor = executor
        self.spec = flash_prefill_sm80.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.query_len_bound * p.group_size, executor.max_shared_bytes
        )

    def load(self) -> None:
        self.function = self.executor.load(flash_prefill_sm80.KERNEL, self.spec)

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        p = self.problem
        kernel = flash_prefill_sm80
        packed = kernel.PARAMS.pack(
            query=query.pointer,
            query_stride=query.stride,
            **shared.of(kernel.PARAMS),
            group_size=p.group_size,
        )
        grid = kernel.grid(self.spec, p.token_count, p.batch_size, p.kv_num_heads, p.group_size)
        return [kernel.KERNEL.launch(self.function, self.spec, grid, packed)]
