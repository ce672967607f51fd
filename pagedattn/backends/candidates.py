"""A plan with several kernels for one problem: the first that can read a call's arrays attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, Rows, aligned
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.problem import Problem


class Candidate(Protocol):
    """A kernel that attends, with what it needs around it: `combine_splits` where rows may have several splits.

    Attributes
    ----------
    zero_count : int
        Counters at the start of its workspace; the prologue sets them to 0.
    """

    zero_count: int
    workspace_bytes: int

    def load(self) -> None:
        """Load the kernels that it launches and that were not loaded as it was made; called once, ahead of launches."""

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        """Reason why it cannot read and write these arrays, or None."""

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        """Launches that attend, after the prologue's."""


class CandidatePlan:
    """The prologue, and the first of ``candidates`` that can read a call's arrays; the last one can read any.

    The first one is loaded with the plan. The others may never be needed, and are loaded when a call's arrays ask for
    one; an executor refuses that within a graph capture.
    """

    def __init__(self, problem: Problem, executor: Executor[Function], candidates: Sequence[Candidate]) -> None:
        self.problem = problem
        self.candidates = candidates
        self.prologue = Prologue(problem, executor, max(candidate.zero_count for candidate in candidates))
        self._attention_at = aligned(self.prologue.workspace_bytes)
        self.workspace_bytes = self._attention_at + max(candidate.workspace_bytes for candidate in candidates)
        self._loaded: set[Candidate] = set()
        self._load(candidates[0])

    def _load(self, candidate: Candidate) -> None:
        if candidate not in self._loaded:
            candidate.load()
            self._loaded.add(candidate)

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        shared = Shared(self.problem, tensors)
        at = workspace + self._attention_at
        query = self.prologue.query(tensors, workspace)
        first = next(candidate for candidate in self.candidates if candidate.why_not_tensors(query, tensors) is None)
        self._load(first)
        attention = first.launches(query, tensors, shared, at)
        return [self.prologue.launch(tensors, shared, workspace, at), *attention]
