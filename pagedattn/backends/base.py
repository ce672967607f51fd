"""What a backend is: a module with ``plan(problem, executor)``, and what that returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Plan(Protocol):
    """Everything that can be decided before the arrays are known; made once per problem, run many times."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that `run` needs."""

    def run(self, tensors: Mapping[str, Any], workspace: Any) -> None:
        """Store the new keys and values, attend, and fill every requested output.

        Parameters
        ----------
        tensors : mapping of name to the backend's kind of array
            Present inputs, ``output``, and ``output_qk`` and ``lse`` where requested; all of them are written whole.
        workspace : buffer of at least `workspace_bytes`
        """
