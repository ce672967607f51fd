"""Policy: which sequences run in the next step, with how many tokens each.

Oldest first, always. A step gives every running sequence at least one token and prompts a chunk, so that prefill and
decode share one call; what is left of the step admits waiting sequences. When the pool is dry the youngest running
sequence gives its blocks back and waits again, at the front; its tokens are recomputed later, from whatever the prefix
cache still holds. The oldest can therefore always go on, and everything finishes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sequence import Sequence, Status

from pagedattn.cache import BlockPool, BlockTable, OutOfBlocksError, window_blocks


class RequestError(ValueError):
    """A request that could never run."""


@dataclass
class Step:
    """One call of the model: (sequence, tokens to run), and block copies to make before it."""

    entries: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Two queues and a pool.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
    max_length : int
        Longest sequence the model takes.
    max_batch_tokens : int
        Most tokens in one step.
    chunk_size : int
        Most tokens of one sequence in one step.
    max_running : int
    window : int, optional
        Sliding window of the model; blocks below it are returned.
    prefix_caching : bool
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        max_length: int,
        max_batch_tokens: int = 128,
        chunk_size: int = 32,
        max_running: int = 16,
        window: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        if min(max_batch_tokens, chunk_size, max_running) < 1:
            raise ValueError(
                f"max_batch_tokens ({max_batch_tokens}), chunk_size ({chunk_size}) and max_running "
                f"({max_running}) must be at least 1."
            )
        self.pool = pool
        self.block_size = block_size
        self.max_length = max_length
        self.max_batch_tokens = max_batch_tokens
        self.chunk_size = chunk_size
        self.max_running = max_running
        self.window = window
        self.prefix_caching = prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, tokens: list[int], max_new_tokens: int, **options) -> Sequence:
        """Queue a request, or raise `RequestError`."""
        if not tokens or max_new_tokens < 1:
            raise RequestError(
                f"a request needs a prompt and room for an answer, got {len(tokens)} tokens and "
                f"max_new_tokens {max_new_tokens}."
            )
        length = len(tokens) + max_new_tokens
        if length > self.max_length:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {max_new_tokens} new ones exceed the model's "
                f"{self.max_length} positions."
            )
        needed = self._blocks_for(length - 1)  # the last token is never run
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"the request needs {needed} blocks of {self.block_size}, the pool has "
                f"{self.pool.num_blocks}: shorten it, or enlarge the pool."
            )
        table = BlockTable(self.pool, self.block_size, window=self.window)
        sequence = Sequence(list(tokens), table, max_new_tokens, **options)
        self.waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence wherever it is; harmless if it is over."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        if sequence.is_live:
            self._release(sequence, Status.ABORTED)

    def schedule(self) -> Step:
        """Choose the next step and make room for its tokens; every step ends in `complete` or `cancel`."""
        step = Step()
        budget = self.max_batch_tokens
        turn = 0
        while turn < len(self.running):
            sequence = self.running[turn]
            # At least 1: its elders want no more than in the step that admitted it, and that one had room for it.
            count = min(sequence.remaining, self.chunk_size, budget)
            try:
                step.copies += sequence.table.append(count)
            except OutOfBlocksError:
                self._preempt(self.running.pop())  # the youngest, perhaps this one; none that has had its turn
                continue
            step.entries.append((sequence, count))
            budget -= count
            turn += 1
        while self.waiting and budget and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if self.prefix_caching:
                # Not the last token: it must run, for its logits.
                sequence.table.reuse_prefix(sequence.tokens[:-1])
            if sum(map(self._blocks_owed, [*self.running, sequence])) > self.pool.available:
                sequence.table.free()
                break
            sequence.reused_tokens += sequence.table.length
            self.running.append(self.waiting.popleft())
            sequence.status = Status.RUNNING
            count = min(sequence.remaining, self.chunk_size, budget)
            step.copies += sequence.table.append(count)
            step.entries.append((sequence, count))
            budget -= count
        return step

    def complete(self, step: Step, sampled: dict[Sequence, int]) -> None:
        """Take a step's result: the next token of each sequence that has run all of its tokens."""
        for sequence, _ in step.entries:
            if self.prefix_caching:
                sequence.table.commit(sequence.tokens[: sequence.table.length])
            if sequence in sampled:
                sequence.tokens.append(sampled[sequence])
                if sequence.is_complete:
                    self.running.remove(sequence)
                    self._release(sequence, Status.FINISHED)

    def cancel(self, step: Step) -> None:
        """Undo a step that failed, as if it had not been scheduled."""
        for sequence, count in step.entries:
            sequence.table.truncate(sequence.table.length - count)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self._release(sequence, Status.WAITING)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence, status: Status) -> None:
        sequence.table.free()
        sequence.status = status

    def _blocks_for(self, length: int) -> int:
        """Most blocks that a sequence of ``length`` tokens holds at a time."""
        blocks = -(-length // self.block_size)
        if self.window is None:
            return blocks
        return min(blocks, window_blocks(self.window, self.block_size, self.chunk_size))

    def _blocks_owed(self, sequence: Sequence) -> int:
        """Blocks that a sequence still needs for the tokens it has."""
        return max(0, self._blocks_for(len(sequence.tokens)) - len(sequence.table.blocks))
