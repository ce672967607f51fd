"""`flash`: prompts, chunks and mixed batches on tensor cores, with pages read in place."""

from __future__ import annotations

from typing import Any

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, Rows
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import flash_prefill_sm80, flash_prefill_sm90
from pagedattn.problem import Problem

# Leave Hopper's kernel aside; for tests and comparisons.
FORCE_SM80 = False


def plan(problem: Problem, executor: Executor[Function]) -> FlashPlan:
    """Plan a problem; see `pagedattn.backends.base`."""
    return FlashPlan(problem, executor)


class FlashPlan:
    """The prologue, and the kernel of the architecture: `flash_prefill_sm90` on Hopper, else `flash_prefill_sm80`.

    Hopper's kernel reads through the copy engine, which wants rows that start on multiples of 16 bytes, and takes some
    head sizes only; arrays and problems that do not comply take the other one.
    """

    def __init__(self, problem: Problem, executor: Executor[Function]) -> None:
        p = self.problem = problem
        self.executor = executor
        self.prologue = Prologue(p, executor)
        self.workspace_bytes = self.prologue.workspace_bytes
        self.spec = flash_prefill_sm80.choose(
            p.io_dtype, p.cache_dtype, p.head_size, p.query_len_bound * p.group_size, executor.max_shared_bytes
        )
        self.hopper: flash_prefill_sm90.Sm90Kernel | None = None
        self.function: Any = None
        if executor.arch == "sm_90a" and not FORCE_SM80 and flash_prefill_sm90.why_not_problem(p) is None:
            self.hopper = flash_prefill_sm90.Sm90Kernel(p, executor)
        else:
            self._load_sm80()

    def _load_sm80(self) -> None:
        self.function = self.executor.load(flash_prefill_sm80.KERNEL, self.spec)

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        shared = Shared(self.problem, tensors)
        query = self.prologue.query(tensors, workspace)
        caches = tensors["key_cache"], tensors["value_cache"]
        if self.hopper is not None and self.hopper.why_not(query, *caches) is None:
            attention = self.hopper.launch(query, *caches, shared)
        else:
            attention = self._launch_sm80(query, shared)
        return [self.prologue.launch(tensors, shared, workspace), attention]

    def _launch_sm80(self, query: Rows, shared: Shared) -> Launch:
        p = self.problem
        if self.function is None:
            self._load_sm80()
        packed = flash_prefill_sm80.PARAMS.pack(
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
        return flash_prefill_sm80.launch(
            self.function,
            self.spec,
            p.token_count,
            p.batch_size,
            p.kv_num_heads,
            p.group_size,
            packed,
        )
