"""A window in a table for a million tokens: right, read nowhere else, and no more work than in a small table.

Outside of the window's blocks the table names nothing, or a block of NaN; so do the positions of the first block that
the window has left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedattn.backends import numpy_reference
from pagedattn.dtypes import BFLOAT16
from tests.faults.scene import assert_close
from tests.faults.targets import Target
from tests.kernels.test_matrix import TARGETS
from tests.support.batches import Layer

Array = np.ndarray[Any, np.dtype[Any]]

ENTRIES, BLOCK = 65536, 16
PAST = (ENTRIES * BLOCK - 1, 1_000_000, 70_000, 5)
LAYERS = {
    "decode": Layer(8, 2, 128),
    "flash": Layer(8, 2, 128),
    "dense": Layer(4, 2, 64),
    "latent": Layer(16, 1, 576, 512),
}


def parameters() -> list[Any]:
    return [
        pytest.param(target, window, id=f"{target}-{window}", marks=[pytest.mark.gpu] if target.on_gpu else [])
        for target in TARGETS
        for window in ((100, 4096) if target.on_gpu else (100,))
        if target.backend in LAYERS
    ]


def reference(layer: Layer, window: int, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """The operator in float64 on keys that begin where each window does."""
    past = inputs["past_seqlens"]
    first = np.maximum(past + 1 - window, 0)
    used = np.minimum(past + 1, window)
    shape = (len(past), -(-int(used.max()) // BLOCK))
    compact = dict(inputs)
    for name in layer.caches:
        rows = np.zeros((len(past), shape[1] * BLOCK, *inputs[name].shape[2:]), inputs[name].dtype)
        for b, table in enumerate(inputs["block_table"]):
            positions = np.arange(first[b], past[b] + 1)
            rows[b, : used[b]] = inputs[name][table[positions // BLOCK], positions % BLOCK]
        compact[name] = rows.reshape(-1, BLOCK, *rows.shape[2:])
    compact["block_table"] = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    compact["past_seqlens"] = (used - 1).astype(np.int32)
    problem = Layer(**{**vars(layer), "window": -1}).operator("numpy").problem_of(**compact)
    output = np.empty((len(past), problem.output_width), np.float64)
    lse = np.empty((len(past), problem.num_heads), np.float64)
    numpy_reference.plan(problem, compute=np.float64).run({**compact, "output": output, "lse": lse})
    return output, lse


@pytest.mark.skipif(not TARGETS, reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize("elsewhere", ["unmapped", "poison"])
@pytest.mark.parametrize(("target", "window"), parameters())
def test_a_window_in_a_table_for_a_million_tokens(target: Target, window: int, elsewhere: str) -> None:
    layer = Layer(**{**vars(LAYERS[target.backend]), "window": window})
    rng = np.random.default_rng(0)
    past = np.array(PAST, np.int32)
    blocks = [np.arange(max(0, n + 1 - window) // BLOCK, n // BLOCK + 1) for n in PAST]
    count = sum(map(len, blocks))
    ids = rng.permutation(count).astype(np.int32)
    table = np.full((len(PAST), ENTRIES), -1 if elsewhere == "unmapped" else count, np.int32)
    caches = {name: layer.stored(rng, count + 1) for name in layer.caches}
    for cache in caches.values():
        cache[count] = np.nan
    for b, own in enumerate(np.split(ids, np.cumsum([len(x) for x in blocks])[:-1])):
        table[b, blocks[b]] = own
        for cache in caches.values():
            cache[own[0], : max(0, PAST[b] + 1 - window) % BLOCK] = np.nan
            cache[own[-1], PAST[b] % BLOCK :] = np.nan  # not written yet, or never
    inputs = {
        name: rng.standard_normal((len(PAST), heads * layer.head_size), np.float32).astype(BFLOAT16.numpy)
        for name, heads in (("query", layer.num_heads), ("key", layer.kv_num_heads), ("value", layer.kv_num_heads))
        if name != "value" or not layer.v_head_size
    }
    inputs |= {"past_seqlens": past, "block_table": table}
    inputs["cumulative_sequence_length"] = np.arange(len(PAST) + 1, dtype=np.int32)
    given = {name: target.place(x) for name, x in {**inputs, **caches}.items()}
    with target.active():
        result = layer.operator(target.backend)(**given)
    written = {name: target.fetch(given[name], BFLOAT16.numpy) for name in layer.caches}
    output, lse = reference(layer, window, inputs | written)
    got = target.fetch(result.output, BFLOAT16.numpy).reshape(len(PAST), layer.num_heads, -1)
    assert_close(got, output.reshape(got.shape), BFLOAT16)
    np.testing.assert_allclose(target.fetch(result.lse, np.dtype(np.float32)), lse, rtol=2e-5, atol=1e-4)
