"""Batches of 1 to 4096 sequences and contexts of 1 to a million tokens, against the float64 reference.

Sequences share one pool, each through blocks of its own choice, and store nothing; the reference computes some of them
alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16
from tests.faults.scene import assert_close
from tests.support.batches import Layer

Array = np.ndarray[Any, np.dtype[Any]]

LAYER = Layer(num_heads=8, kv_num_heads=1, head_size=128)
BLOCK = LAYER.block_size
CONTEXTS = (1, 15, 16, 17, 127, 128, 129, 8191, 100_001, 1_000_000)
PART_KEYS = 1 << 14  # that the reference reads at a time, a multiple of a block
BATCHES = (1, 2, 3, 64, 257, 1024, 4096)


class Caches(NamedTuple):
    """Keys and values of a million tokens, 512 MB in all, on the host and on the device."""

    host: dict[str, Array]
    device: dict[str, Any]


@pytest.fixture(scope="module")
def caches(cupy: Any) -> Caches:
    rng = np.random.default_rng(0)
    host = {name: LAYER.stored(rng, max(CONTEXTS) // BLOCK) for name in LAYER.caches}
    return Caches(host, {name: cupy.asarray(x.view(np.uint16)).view(BFLOAT16.numpy) for name, x in host.items()})


def check(cupy: Any, caches: Caches, contexts: list[int], samples: list[int]) -> None:
    """Attend one token of each sequence, and compare those of ``samples`` with the reference."""
    rng = np.random.default_rng(len(contexts) + contexts[0])
    order = rng.permutation(len(caches.host["key_cache"])).astype(np.int32)
    blocks = [-(-n // BLOCK) for n in contexts]
    table = np.full((len(contexts), max(blocks)), -1, np.int32)
    for row, count, start in zip(table, blocks, rng.integers(0, len(order), len(contexts)), strict=True):
        row[:count] = order.take(np.arange(start, start + count), mode="wrap")
    rows = {
        name: rng.standard_normal((len(contexts), heads * LAYER.head_size), np.float32).astype(BFLOAT16.numpy)
        for name, heads in (("query", LAYER.num_heads), ("key", 1), ("value", 1))
    }
    past = np.array(contexts, np.int32) - 1
    given = {name: cupy.asarray(x.view(np.uint16)).view(BFLOAT16.numpy) for name, x in rows.items()}
    given |= {
        "cumulative_sequence_length": cupy.arange(len(contexts) + 1, dtype=np.int32),
        "past_seqlens": cupy.asarray(past),
        "block_table": cupy.asarray(table),
        "slot_mapping": cupy.full(len(contexts), -1, np.int32),
    }
    result = LAYER.operator("decode")(**given, **caches.device)
    output = result.output.view(np.uint16).get().view(BFLOAT16.numpy).astype(np.float64)
    lse = result.lse.get()
    assert np.isfinite(output).all()
    assert np.isfinite(lse).all()
    for b in samples:
        want_output, want_lse = reference(rows["query"][b], caches.host, table[b], contexts[b])
        assert_close(output[b].reshape(want_output.shape), want_output, BFLOAT16)
        np.testing.assert_allclose(lse[b], want_lse, rtol=2e-5, atol=1e-4)


def reference(query: Array, caches: dict[str, Array], table: Array, context: int) -> tuple[Array, Array]:
    """Output (num_heads, head_size) and lse of one sequence, written out in float64; a million keys are quick."""
    parts = [slice(i, min(i + PART_KEYS, context)) for i in range(0, context, PART_KEYS)]

    def read(name: str, part: slice) -> Array:
        blocks = caches[name].view(np.uint16)[table[part.start // BLOCK : -(-part.stop // BLOCK)]]
        stored = blocks.reshape(-1, LAYER.head_size)[: part.stop - part.start]
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)  # bfloat16, much faster than astype

    heads = query.astype(np.float64).reshape(LAYER.num_heads, LAYER.head_size)
    scores = np.concatenate([heads @ read("key_cache", part).T for part in parts], axis=1) * LAYER.head_size**-0.5
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    output = np.sum([weights[:, part] @ read("value_cache", part) for part in parts], axis=0)
    return output / total, (top + np.log(total))[:, 0]


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts(cupy: Any, caches: Caches, context: int) -> None:
    """Beside a sequence of one token."""
    check(cupy, caches, [context, 1], [0, 1])


@pytest.mark.parametrize("size", BATCHES)
def test_batches(cupy: Any, caches: Caches, size: int) -> None:
    """Of sequences of all short lengths in turn; the first, the last and some others are compared."""
    contexts = [CONTEXTS[(b + 7) % 8] for b in range(size)]
    samples = {0, size - 1, *np.random.default_rng(size).integers(0, size, 24).tolist()}
    check(cupy, caches, contexts, sorted(samples))
