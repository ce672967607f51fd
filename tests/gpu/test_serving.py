"""The paged cache helpers and the continuous batching example on CuPy arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pagedattn.cache import BlockPool, BlockTable, allocate_cache, assemble, copy_blocks
from tests.support.serving import Config, Engine, calibrate_scales, drain, load_llama2c, random_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CHECKPOINT = DATA / "stories260K.bin"

CONFIG = Config(
    hidden_size=256, intermediate_size=128, num_layers=2, num_heads=4, kv_num_heads=2, vocab_size=64, max_length=256
)
DTYPES = ["float16", "bfloat16", "int8", "float8e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_start_as_zeros_and_blocks_are_copied_whole(cupy, dtype):
    ours, theirs = (allocate_cache(6, 16, 2, 24, dtype, xp=xp)[0] for xp in (np, cupy))
    assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
    assert np.array_equal(theirs.view(np.uint8).get(), ours.view(np.uint8))
    data = np.random.default_rng(0).integers(0, 256, ours.view(np.uint8).shape, np.uint8)
    ours.view(np.uint8)[:] = data
    theirs.view(np.uint8)[:] = cupy.asarray(data)
    for cache in (ours, theirs):
        copy_blocks(cache, [(0, 3), (5, 1)])
        copy_blocks(cache, [(3, 4), (4, 2)])
    assert np.array_equal(theirs.view(np.uint8).get(), ours.view(np.uint8))


def test_assembled_arrays_are_on_the_device(cupy):
    table = BlockTable(BlockPool(4), 16)
    table.append(20)
    batch, expected = (assemble([(table, 3)], batch_size=2, token_count=4, xp=xp) for xp in (cupy, np))
    for name, array in vars(expected).items():
        got = getattr(batch, name)
        assert type(got) is (np.ndarray if name == "attention_metadata" else cupy.ndarray), name
        np.testing.assert_array_equal(np.asarray(got if name == "attention_metadata" else got.get()), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_example_serves_the_same_logits_as_on_the_cpu(cupy, dtype):
    """Given texts in chunks, several in a batch, in a pool that lets one of them wait."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, length).tolist() for length in (30, 5, 44)]
    answers = [rng.integers(0, 64, 12).tolist() for _ in prompts]
    host = random_model(CONFIG, 1)
    scales = calibrate_scales(host, prompts, dtype, 12) if dtype in ("int8", "float8e4m3fn", "int4") else None
    logits = []
    for xp in (np, cupy):
        on_device = scales and [tuple(map(xp.asarray, pair)) for pair in scales]
        engine = Engine(random_model(CONFIG, 1, xp), 8, 16, cache_dtype=dtype, scales=on_device, chunk_size=16)
        for prompt, answer in zip(prompts, answers, strict=True):
            engine.add([*prompt, *answer], 1)
        seen, run = [], engine.run

        def noted(step, run=run, seen=seen):
            seen.append(run(step))
            return seen[-1]

        engine.run = noted
        drain(engine)
        logits.append(np.concatenate(seen))
    spread = logits[0].std()
    # Activations are float16 or bfloat16 on the device, float32 on the host; a code may fall to its other side.
    bound = {"float16": 0.01, "bfloat16": 0.08}.get(dtype, 0.1)
    assert np.sqrt(np.mean((logits[1] - logits[0]) ** 2)) < bound * spread


@pytest.mark.skipif(not CHECKPOINT.exists(), reason=f"{CHECKPOINT} is absent")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_real_model_tells_the_reference_stories(cupy, dtype):
    """Greedy ids are equal up to the first choice whose margin half-precision activations could turn."""
    references = json.loads((DATA / "stories260K_greedy.json").read_text())["runs"]
    engine = Engine(load_llama2c(CHECKPOINT, cupy), 64, 16, cache_dtype=dtype)
    sequences = [engine.add(run["prompt_ids"], len(run["ids"])) for run in references]
    drain(engine)
    error = {"float16": 0.12, "bfloat16": 0.8}[dtype]  # twice the largest error of a logit on the host
    compared = 0
    for run, sequence in zip(references, sequences, strict=True):
        sure = next((i for i, margin in enumerate(run["margins"]) if margin < error), len(run["ids"]))
        assert sequence.new_tokens[:sure] == run["ids"][:sure]
        compared += sure
    assert compared > 20
