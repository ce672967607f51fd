"""What a backend is: a module with ``plan(problem, executor)``, and what that returns.

A plan of a CUDA backend is a `Plan`. That of the NumPy backend, which has nothing to launch, has ``run(tensors)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pagedattn.jit.launch import Launch
from pagedattn.problem import TensorInfo


class Plan(Protocol):
    """Everything that can be decided before the arrays are known; made once per problem, used many times."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the launches need."""

    def launches(self, tensors: Mapping[str, TensorInfo], workspace: int) -> list[Launch]:
        """Launches, in order, that store the new keys and values, attend, and fill every requested output.

        They depend on nothing but the arguments, so they may be issued for as long as the arrays stay where they are.

        Parameters
        ----------
        tensors : mapping of name to TensorInfo
            Present inputs, ``output``, and ``output_qk`` and ``lse`` where requested; all of them are written whole.
        workspace : int
            Address of at least `workspace_bytes`.
        """
