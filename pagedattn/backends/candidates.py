"""A plan with up to two kernels for one problem: the better one attends where it can read a call's arrays."""

from __future__ import annotations

from typing import Protocol

from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.backends.prologue import Prologue, Rows, Start, aligned
from pagedattn.backends.splits import SplitPlan
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.problem import Problem


class Candidate(Protocol):
    """A kernel that attends, with what it needs around it."""

    @property
    def prologue_start(self) -> Start:
        """When the prologue starts ahead of it."""

    @property
    def splits(self) -> SplitPlan | None:
        """What its workspace is for, if it may split the keys of a token."""

    def load(self) -> None:
        """Load the kernels that it launches and that were not loaded as it was made; called once, ahead of launches."""

    def launches(self, query: Rows, tensors: Tensors, shared: Shared, workspace: int) -> list[Launch]:
        """Launches that attend, after the prologue's."""


class SelectiveCandidate(Candidate, Protocol):
    """One that is not for every array."""

    def why_not_tensors(self, query: Rows, tensors: Tensors) -> str | None:
        """Reason why it cannot read and write these arrays, or None."""


class CandidatePlan:
    """The prologue, and ``better``, where there is one that can read a call's arrays, or else ``general``.

    The one that comes first is loaded with the plan. The other one may never be needed, and is loaded when a call's
    arrays ask for it; an executor refuses that within a graph capture.
    """

    def __init__(
        self, problem: Problem, executor: Executor[Function], better: SelectiveCandidate | None, general: Candidate
    ) -> None:
        self.problem = problem
        self.better, self.general = better, general
        splits = [candidate.splits for candidate in (better, general) if candidate and candidate.splits]
        self.prologue = Prologue(problem, executor, max((plan.zero_count for plan in splits), default=0))
        self._attention_at = aligned(self.prologue.workspace_bytes)
        self.workspace_bytes = self._attention_at + max((plan.workspace_bytes for plan in splits), default=0)
        self._loaded: set[Candidate] = set()
        self._load(better or general)

    def _load(self, candidate: Candidate) -> None:
        if candidate not in self._loaded:
            candidate.load()
            self._loaded.add(candidate)

    def launches(self, tensors: Tensors, workspace: int) -> list[Launch]:
        """Launches of a call; see `pagedattn.backends.base.Plan`."""
        shared = Shared(self.problem, tensors)
        at = workspace + self._attention_at
        query = self.prologue.query(tensors, workspace)
        fits = self.better is not None and self.better.why_not_tensors(query, tensors) is None
        chosen = self.better if self.better and fits else self.general
        self._load(chosen)
        attention = chosen.launches(query, tensors, shared, at)
        return [self.prologue.launch(tensors, shared, workspace, at, chosen.prologue_start), *attention]
