"""One request: its tokens, and how far the cache has followed them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from pagedattn.cache import BlockTable


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass(eq=False)
class Sequence:
    """A prompt that grows.

    There is no separate prefill or decode state: ``tokens`` beyond ``table.length`` have not run yet, whether they are
    a prompt, the one token sampled last, or everything again after a preemption.
    """

    tokens: list[int]
    table: BlockTable
    max_new_tokens: int
    temperature: float = 0.0
    stop_tokens: frozenset[int] = frozenset()
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    status: Status = Status.WAITING
    reused_tokens: int = 0  # found in the prefix cache, over all admissions
    preemptions: int = 0
    added_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that have not run yet."""
        return len(self.tokens) - self.table.length

    @property
    def new_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def is_complete(self) -> bool:
        """Whether the last token ends the text."""
        generated = len(self.tokens) - self.prompt_length
        return generated >= self.max_new_tokens or (generated > 0 and self.tokens[-1] in self.stop_tokens)

    @property
    def is_live(self) -> bool:
        return self.status in (Status.WAITING, Status.RUNNING)
