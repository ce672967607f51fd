"""The export example: the file generates what the decoder generates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from pagedattn import contract
from pagedattn.cache import BlockPool, BlockTable, assemble
from pagedattn.onnx import Session, register_schema
from tests.support.serving import DATA, ROOT, Config, KVCache, Llama, Tokenizer, load_llama2c, random_model

sys.path.insert(0, str(ROOT / "examples"))

import onnx_export

CONFIG = Config(32, 48, 2, 4, 2, vocab_size=64, max_length=96)
STORIES = DATA / "stories260K.bin"


def logits_of(model: Llama, tokens: list[int], dtype: str) -> Any:
    """Logits of every token by the decoder itself."""
    cache = KVCache(model.config, 8, onnx_export.BLOCK_SIZE, dtype)
    table = BlockTable(BlockPool(8), onnx_export.BLOCK_SIZE)
    table.append(len(tokens))
    return model.forward(np.array(tokens), assemble([(table, len(tokens))]), cache, np.arange(len(tokens)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"rope_interleaved": False}], ids=str)
def test_logits_are_those_of_the_decoder(dtype: str, changes: dict[str, Any]):
    model = random_model(Config(**{**vars(CONFIG), **changes}))
    tokens = np.random.default_rng(0).integers(0, 64, 21).tolist()
    session = Session(onnx_export.export(model, dtype), {"num_blocks": 8})
    table = BlockTable(BlockPool(8), onnx_export.BLOCK_SIZE)
    table.append(len(tokens))
    batch = assemble([(table, len(tokens))])
    feeds = {name: batch.inputs[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table")}
    (got,) = session.run(["logits"], {**feeds, "input_ids": np.array(tokens)})
    want = logits_of(model, tokens, dtype)
    # One rounding of an activation that falls the other way moves a logit by about that much.
    step = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=step * max(1, np.abs(want).max()))


def test_export_is_a_valid_model():
    register_schema()
    model = onnx_export.export(random_model(CONFIG), "float16")
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    shapes = {info.name: info.type.tensor_type.shape.dim for info in inferred.graph.value_info}
    assert [dim.dim_param or dim.dim_value for dim in shapes["layers.0.attended"]] == ["tokens", 32]
    assert sum(node.op_type == contract.NAME for node in model.graph.node) == CONFIG.num_layers


def test_batch_of_prompts_equals_each_alone():
    session = Session(onnx_export.export(random_model(CONFIG)), {"num_blocks": 16})
    prompts = [[5, 6, 7, 8], list(range(20)), [63]]
    together = onnx_export.generate(session, prompts, 12, 16)
    for prompt, tokens in zip(prompts, together, strict=True):
        session.reset()
        assert onnx_export.generate(session, [prompt], 12, 16) == [tokens]


@pytest.mark.skipif(not STORIES.exists(), reason=f"stories260K.bin is not in {DATA}")
def test_real_model_writes_its_story():
    model = load_llama2c(STORIES)
    right = json.loads((DATA / "stories260K_greedy.json").read_text())["runs"]
    session = Session(onnx_export.export(model), {"num_blocks": 64})
    runs = right[:2]
    got = onnx_export.generate(session, [run["prompt_ids"] for run in runs], 60, 64)
    for run, tokens in zip(runs, got, strict=True):
        assert tokens == run["ids"][: len(tokens)]
        assert len(tokens) == 60
    tokenizer = Tokenizer(DATA / "tok512.bin", model.config.vocab_size)
    assert tokenizer.decode(runs[0]["prompt_ids"] + got[0])


@pytest.mark.parametrize("options", [[], ["--dtype", "float16", "--max-new-tokens", "3"]], ids=["plain", "float16"])
def test_command_line(options: list[str], tmp_path: Path):
    target = tmp_path / "decoder.onnx"
    command = [sys.executable, str(ROOT / "examples" / "onnx_export.py"), "--output", str(target), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("decoder.onnx: ")
    assert sum(" -> [" in line for line in lines) == 2
    assert target.exists()
