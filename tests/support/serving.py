"""The serving example under test, and a model that notices every wrong key.

`RecallModel` takes the place of `Llama` in the example's engine, without the operator, for block sizes and counts of
events that attention would be too strict or too slow for. What it writes for a token and what it answers are hashes
of what its cache gives back for the visible positions, two layers deep. A key that is lost, stale, misplaced or of
another sequence therefore changes the answer, and `recall` says what the answer has to be.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedattn.cache import Batch, BlockPool, BlockTable, assemble, content_key

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "continuous_batching"
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(EXAMPLE))  # where the example's files find each other

import display  # noqa: E402
import run as command  # noqa: E402
from engine import Engine, calibrate_scales, sample  # noqa: E402
from kv_cache import KVCache, Scales  # noqa: E402
from model import Config, Llama, Weights, load_llama2c, random_model  # noqa: E402
from scheduler import RequestError, Scheduler, Step  # noqa: E402
from sequence import Sequence, Status  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

__all__ = [
    "DATA",
    "EXAMPLE",
    "ROOT",
    "Config",
    "Engine",
    "KVCache",
    "Llama",
    "RecallModel",
    "RequestError",
    "Scales",
    "Scheduler",
    "Sequence",
    "Status",
    "Step",
    "Tokenizer",
    "Weights",
    "audit",
    "calibrate_scales",
    "cells",
    "command",
    "display",
    "drain",
    "greedy",
    "load_llama2c",
    "poison",
    "prefix_keys",
    "random_model",
    "recall",
    "run_step",
    "sample",
]

PRIME = 1048573  # hashes are exact in float32
VOCAB = 64
_WEIGHTS = np.random.default_rng(0).integers(1, PRIME, 4096)


def _hash(values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Hash of the visible values of each row, by position: (keys,), (rows, keys) -> (rows,)."""
    return (visible * ((values + 3) * _WEIGHTS[: len(values)] % PRIME)).sum(axis=1) % PRIME


def _visible(past: int, length: int, window: int | None) -> np.ndarray:
    """(length - past, length) bool: what each of the last tokens sees."""
    own, key = np.arange(past, length)[:, None], np.arange(length)
    return (key <= own) & (key > own - (window or length))


class RecallModel:
    """A drop-in for `Llama`."""

    def __init__(self, window: int | None = None, max_length: int = 2048) -> None:
        self.xp = np
        self.config = SimpleNamespace(
            num_layers=1, kv_num_heads=1, head_size=8, max_length=max_length, window=window, vocab_size=VOCAB
        )

    def forward(self, tokens: np.ndarray, batch: Batch, cache: KVCache, rows: np.ndarray) -> np.ndarray:
        layers = [stored[..., 0, 0] for stored in cache.layers[0]]
        block_size = layers[0].shape[1]
        written = batch.slot_mapping
        assert len(set(written.tolist())) == len(written), "two tokens of a step share a slot"
        starts = batch.cumulative_sequence_length
        answers = np.zeros(len(tokens), np.int64)
        layers[0][written // block_size, written % block_size] = tokens
        for layer, last in zip(layers, (False, True), strict=True):
            for b, past in enumerate(batch.past_seqlens):
                mine = slice(starts[b], starts[b + 1])
                length = past + starts[b + 1] - starts[b]
                positions = np.arange(length)
                blocks = batch.block_table[b, positions // block_size]
                visible = _visible(past, length, self.config.window)
                seen = visible.any(axis=0)
                assert (blocks[seen] >= 0).all(), "a visible position is unmapped"
                values = np.where(seen, layer[blocks, positions % block_size], 0)
                assert not np.isnan(values).any(), "a visible position holds poison"
                answers[mine] = _hash(values.astype(np.int64), visible)
            if not last:
                layers[1][written // block_size, written % block_size] = answers
        logits = np.zeros((len(rows), VOCAB), np.float32)
        logits[np.arange(len(rows)), answers[rows] % VOCAB] = 1
        return logits


def cells(tokens: list[int], window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What `RecallModel` has to have in its two layers for the tokens."""
    tokens = np.array(tokens)
    return tokens, _hash(tokens, _visible(0, len(tokens), window))


def recall(prompt: list[int], max_new_tokens: int, window: int | None = None) -> list[int]:
    """The tokens that `RecallModel` has to answer."""
    tokens, hidden = list(prompt), cells(prompt, window)[1].tolist()

    def last(values: list[int]) -> int:
        return int(_hash(np.array(values), _visible(len(values) - 1, len(values), window))[0])

    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(last(hidden) % VOCAB)
        hidden.append(last(tokens))
    return tokens[len(prompt) :]


def drain(engine: Engine, step_limit: int = 2000) -> None:
    """Run everything to its end."""
    limit = engine.steps + step_limit
    while engine.scheduler.has_work:
        assert engine.steps < limit, "the engine makes no progress"
        engine.step()


def greedy(model: Any, prompt: list[int], max_new_tokens: int, block_size: int = 16) -> list[int]:
    """Answer of a model with a pool of its own."""
    num_blocks = -(-(len(prompt) + max_new_tokens) // block_size)
    engine = Engine(model, num_blocks, block_size, prefix_caching=False)
    sequence = engine.add(prompt, max_new_tokens)
    drain(engine)
    return sequence.new_tokens


def run_step(model: Any, cache: KVCache, table: BlockTable, tokens: list[int]) -> np.ndarray:
    """Run tokens at the end of one table without a scheduler: logits of each, (tokens, vocab_size)."""
    cache.copy(table.append(len(tokens)))
    batch = assemble([(table, len(tokens))])
    return model.forward(np.array(tokens), batch, cache, np.arange(len(tokens)))


def poison(pool: BlockPool, cache: KVCache) -> None:
    """Fill every block of a float cache with NaN while it is free, and again when it is allocated."""
    allocate, free = pool.allocate, pool.free

    def fill(blocks: list[int]) -> None:
        for pair in cache.layers:
            for array in pair:
                array[blocks] = np.nan

    def poisoned_allocate(count: int = 1) -> list[int]:
        blocks = allocate(count)
        fill(blocks)
        return blocks

    def poisoned_free(block: int) -> None:
        free(block)
        if block in pool._free:
            fill([block])

    fill(list(range(pool.num_blocks)))
    pool.allocate, pool.free = poisoned_allocate, poisoned_free


def audit(pool: BlockPool, tables: list[BlockTable]) -> None:
    """Every block is in exactly one place, and owned as often as it is referenced."""
    owners = Counter(block for table in tables for block in table.blocks)
    free, cached = set(pool._free), set(pool._cached)
    references = {block: count for block in range(pool.num_blocks) if (count := pool.references(block))}
    assert references == owners, "a block leaks, or is owned without a reference"
    assert sorted([*owners, *pool._free, *cached]) == list(range(pool.num_blocks)), "a block is in no place, or in two"
    assert (pool.used, pool.cached, pool.available) == (len(owners), len(cached), len(free) + len(cached))
    assert {key: block for block, key in pool._key_of.items()} == pool._block_of
    assert cached <= set(pool._key_of)
    assert not free & set(pool._key_of), "a free block still answers for its old content"


def prefix_keys(tokens: list[int], block_size: int, root: bytes = b"") -> list[bytes]:
    """Content keys of the full blocks of a text."""
    keys, key = [], root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = content_key(key, tokens[start : start + block_size])
        keys.append(key)
    return keys
