"""The loop that joins policy, ownership, storage and model: schedule, run, sample, take the result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from kv_cache import KVCache, Scales
from model import Llama
from scheduler import Scheduler, Step
from sequence import Sequence

from pagedattn.cache import BlockPool, assemble


class Engine:
    """A server without a network.

    Parameters
    ----------
    model : Llama
    num_blocks, block_size : int
    cache_dtype : str
    scales : list, optional
        Of a quantized cache; see `calibrate_scales`.
    seed : int
        Of sampling. Each request draws from a generator of its own, so its text does not depend on its neighbours.
    **policy
        Options of `Scheduler`.
    """

    def __init__(
        self,
        model: Llama,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        cache_dtype: str = "float32",
        scales: Scales | None = None,
        seed: int = 0,
        **policy: Any,
    ) -> None:
        config = model.config
        self.model = model
        self.pool = BlockPool(num_blocks)
        self.cache = KVCache(config, num_blocks, block_size, cache_dtype, scales, model.xp)
        self.scheduler = Scheduler(self.pool, block_size, max_length=config.max_length, window=config.window, **policy)
        self.seed = seed
        self.sequences: list[Sequence] = []  # every request ever added
        self.steps = self.tokens_run = self.peak_blocks = 0

    def add(
        self, tokens: list[int], max_new_tokens: int, *, temperature: float = 0.0, stop_tokens: Iterable[int] = ()
    ) -> Sequence:
        """Queue a request; temperature 0 is greedy."""
        rng = np.random.default_rng((self.seed, len(self.sequences)))
        sequence = self.scheduler.add(
            tokens, max_new_tokens, temperature=temperature, stop_tokens=frozenset(stop_tokens), rng=rng
        )
        self.sequences.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)

    def stream(self) -> Iterator[tuple[Sequence, int]]:
        """Run until nothing is left, giving each token as it comes. Requests may be added and aborted meanwhile."""
        while self.scheduler.has_work:
            yield from self.step()

    def step(self) -> list[tuple[Sequence, int]]:
        """One forward pass: the sequences that got a token, with it."""
        step = self.scheduler.schedule()
        if not step.entries:
            return []
        try:
            logits = self.run(step)
        except BaseException:
            self.scheduler.cancel(step)
            raise
        ready = [sequence for sequence, _ in step.entries if sequence.remaining == 0]
        sampled = {
            sequence: sample(row, sequence.temperature, sequence.rng)
            for sequence, row in zip(ready, logits, strict=True)
        }
        self.scheduler.complete(step, sampled)
        now = time.perf_counter()
        for sequence in sampled:
            sequence.first_token_at = sequence.first_token_at or now
            if not sequence.is_live:
                sequence.finished_at = now
        return list(sampled.items())

    def run(self, step: Step) -> np.ndarray:
        """Logits of each sequence whose last token is in this step, (sequences, vocab_size)."""
        xp = self.model.xp
        self.steps += 1
        self.tokens_run += sum(count for _, count in step.entries)
        self.peak_blocks = max(self.peak_blocks, self.pool.used)
        self.cache.copy(step.copies)
        batch = assemble([(sequence.table, count) for sequence, count in step.entries], xp=xp)
        tokens = [
            token
            for sequence, count in step.entries
            for token in sequence.tokens[sequence.table.length - count : sequence.table.length]
        ]
        last = np.cumsum([count for _, count in step.entries]) - 1
        rows = [row for (sequence, _), row in zip(step.entries, last, strict=True) if sequence.remaining == 0]
        logits = self.model.forward(xp.asarray(tokens), batch, self.cache, xp.asarray(rows, np.int64))
        return logits if xp is np else xp.asnumpy(logits)


def sample(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Next token: the most likely one at temperature 0, else a draw."""
    if temperature == 0:
        return int(logits.argmax())
    return int((logits / temperature + rng.gumbel(size=logits.shape)).argmax())  # the same as a draw from the softmax


def calibrate_scales(model: Llama, prompts: list[list[int]], dtype: str, max_new_tokens: int) -> Scales:
    """Scales for a quantized cache, from the keys and values that some prompts and their continuations produce.

    Let the texts be as long as those to come: a channel that RoPE turns slowly is largest far into a text.
    """
    block_size = 16
    num_blocks = sum(-(-(len(prompt) + max_new_tokens) // block_size) for prompt in prompts)
    engine = Engine(model, num_blocks, block_size, cache_dtype="float32" if model.xp is np else "float16")
    for prompt in prompts:
        engine.add(prompt, max_new_tokens)
    for _ in engine.stream():
        pass
    return engine.cache.absmax_scales(dtype, model.xp)
