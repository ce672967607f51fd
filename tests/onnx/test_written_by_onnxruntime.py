"""Graphs that onnxruntime's and onnxruntime-genai's own builders write, run here and compared with ONNX Runtime.

Tiny random models, no download. They need torch, transformers and onnxruntime-genai, and are left out without them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pagedattn import contract, gqa
from pagedattn.onnx import Session, migration_report, register_schema, rewrite_group_query_attention
from tests.onnx.graphs import F32, model_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
onnxruntime = pytest.importorskip("onnxruntime", reason="the oracle, onnxruntime, is absent")
torch = pytest.importorskip("torch", reason="the builders need torch, which is absent")

from tests.onnx import ort  # noqa: E402  it needs onnxruntime

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, LAYERS, WINDOW = 4, 2, 16, 96, 2, 8
# float32 sums in another order, through two layers.
CLOSE = {"rtol": 0, "atol": 2e-5}
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, (2, 14))
STEPS = ((0, 9), (9, 10), (10, 11), (11, 12), (12, 13), (13, 14))


# ---- onnxruntime-genai -------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 80,  # not vocab_size, or the builder takes a matrix of the MLP for the head
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": HEAD_SIZE},
    ),
}


class Builder:
    """onnxruntime-genai's model builder, which writes each graph once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[tuple[str, ...], Any] = {}

    def __call__(self, family: str, precision: str, provider: str, *options: str) -> Any:
        key = (family, precision, provider, *options)
        if key not in self.graphs:
            source, target = self.folder / family, self.folder / "-".join(key).replace("=", ".")
            if not source.exists():
                self.save(family, source)
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
            command += ["-p", precision, "-e", provider, "--extra_options", "hf_token=false", *options]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            self.graphs[key] = onnx.load(target / "model.onnx")
        return self.graphs[key]

    def save(self, family: str, folder: Path) -> None:
        """A random model of a family with a made-up tokenizer."""
        import tokenizers
        import transformers

        transformers.logging.set_verbosity_error()
        name, more = FAMILIES[family]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, **more)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
        words = tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
        special = {"unk_token": "0", "pad_token": "0", "bos_token": "1", "eos_token": "2"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **special)
        fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    for module in ("transformers", "onnx_ir", "onnxruntime_genai"):
        pytest.importorskip(module, reason=f"the model builder of onnxruntime-genai needs {module}, which is absent")
    return Builder(tmp_path_factory.mktemp("graphs"))


def padded_steps() -> Any:
    """Feeds of a run: a prompt of two rows, then tokens one by one."""
    for start, stop in STEPS:
        yield {"input_ids": TOKENS[:, start:stop], "attention_mask": np.ones((2, stop), np.int64)}


def onnxruntime_steps(model: Any, feeds: Any) -> list[Any]:
    """All outputs of each step by ONNX Runtime, whose caches are handed from step to step."""
    session = ort.session_of(model)
    names = [out.name for out in session.get_outputs()]
    sliding = [x.name for x in session.get_inputs() if "past_sliding_length" in x.shape]
    caches = {
        x.name: np.zeros((2, KV_HEADS, WINDOW if x.name in sliding else 0, HEAD_SIZE), np.float32)
        for x in session.get_inputs()
        if x.name.startswith("past_key_values")
    }
    steps = []
    for feed in feeds:
        results = dict(zip(names, session.run(None, {**feed, **caches}), strict=True))
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        steps.append(results)
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_graphs_agree_with_onnxruntime(builder: Builder, family: str):
    model = builder(family, "fp32", "cpu")
    assert [node.op_type for node in model.graph.node].count(gqa.NAME) == LAYERS
    session = Session(model, {"kv_cache_dim": HEAD_SIZE})
    assert session.input_names == ["input_ids", "attention_mask"]
    for feeds, want in zip(padded_steps(), onnxruntime_steps(model, padded_steps()), strict=True):
        got = dict(zip(session.output_names, session.run(None, feeds), strict=True))
        for name, right in want.items():
            mine, length = got[name], feeds["attention_mask"].shape[1]
            if name != "logits" and mine.shape[2] == WINDOW:  # rows beyond those that slid in are anything
                mine, right = mine[:, :, :length], right[:, :, :length]
            np.testing.assert_allclose(mine, right, **CLOSE, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padded_graphs_can_be_rewritten(builder: Builder, family: str):
    register_schema()
    model = builder(family, "fp32", "cpu")
    migration = rewrite_group_query_attention(model)
    assert len(migration.rewritten) == LAYERS
    assert migration.findings == []
    onnx.shape_inference.infer_shapes(migration.model, strict_mode=True)
    old, new = Session(model, {"kv_cache_dim": HEAD_SIZE}), Session(migration.model)
    shape = (2, KV_HEADS, 0, HEAD_SIZE)
    caches = {info.name: np.zeros(shape, np.float32) for info in model.graph.input if "past" in info.name}
    for feeds in padded_steps():
        (want,) = old.run(["logits"], feeds)
        got = dict(zip(new.output_names, new.run(None, {**feeds, **caches}), strict=True))
        np.testing.assert_array_equal(got["logits"], want)
        caches = {name: got[name.replace("past_key_values", "present")] for name in caches}


def test_rewritten_pools_take_the_place_of_growing_caches(builder: Builder):
    model = builder("llama", "fp32", "cpu")
    migration = rewrite_group_query_attention(model, paged_caches=True)
    old = Session(model, {"kv_cache_dim": HEAD_SIZE})
    new = Session(migration.model, {"num_blocks": 4, "kv_cache_dim": HEAD_SIZE})
    for feeds in padded_steps():
        (want,) = old.run(["logits"], feeds)
        (got,) = new.run(["logits"], {**feeds, "block_table": np.array([[3], [1]], np.int32)})
        np.testing.assert_array_equal(got, want)


def test_a_sliding_cache_is_reported(builder: Builder):
    findings = migration_report(builder("gemma2", "fp32", "cpu"))
    assert [finding.feature for finding in findings] == ["sliding_window_cache"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_paged_graphs_agree_with_padded_ones(builder: Builder, family: str, precision: str):
    """ONNX Runtime has no kernel of PagedAttention on the CPU, so the same model with padded batches is the oracle."""
    register_schema()
    model = builder(family, precision, "cuda", "use_paged_attention=true")
    assert [node.op_type for node in model.graph.node].count(contract.NAME) == LAYERS
    onnx.shape_inference.infer_shapes(model)
    dims = {"num_blocks": 5, "num_blocks_windowed": 5, "block_size": 16}
    session = Session(model, dims)
    want = onnxruntime_steps(builder(family, "fp32", "cpu"), padded_steps())
    largest = max(np.abs(step["logits"]).max() for step in want)
    # What the weights lose by rounding, through two layers.
    tolerance = {"fp16": 1e-2, "bf16": 6e-2}[precision] * max(1.0, float(largest))
    table = np.array([[4], [2]], np.int32)
    for (start, stop), right in zip(STEPS, want, strict=True):
        length = stop - start
        feeds = {
            "input_ids": TOKENS[:, start:stop].reshape(-1),
            "block_table": table,
            "block_table_windowed": table,
            "cumulative_sequence_lengths": np.array([0, length, 2 * length], np.int32),
            "past_sequence_lengths": np.full(2, start, np.int32),
            "attention_metadata": np.array([length, 0, 0], np.int32),
        }
        (logits,) = session.run(["logits"], {name: x for name, x in feeds.items() if name in session.input_names})
        mine = logits.astype(np.float32).reshape(2, length, VOCABULARY)
        np.testing.assert_allclose(mine, right["logits"], rtol=0, atol=tolerance)


# ---- onnxruntime.transformers ------------------------------------------------------------------------------------


def attention_model(bias: bool) -> Any:
    """Projections, rotations and MultiHeadAttention, as an exporter leaves them."""
    rng = np.random.default_rng(0)
    width = HEADS * HEAD_SIZE
    angle = np.arange(32)[:, None] / 100 ** (np.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
    arrays = {f"w_{kind}": rng.standard_normal((width, width)) / 8 for kind in "qkv"}
    arrays.update({f"b_{kind}": rng.standard_normal(width) / 8 for kind in "qkv"})
    arrays.update(cos_cache=np.cos(angle), sin_cache=np.sin(angle))
    nodes = []
    for kind in "qkv":
        product = f"{kind}_product" if bias else f"{kind}_projected"
        nodes.append(helper.make_node("MatMul", ["x", f"w_{kind}"], [product], name=f"{kind}_matmul"))
        if bias:
            nodes.append(helper.make_node("Add", [product, f"b_{kind}"], [f"{kind}_projected"], name=f"{kind}_add"))
    for kind in "qk":
        names = [f"{kind}_projected", "position_ids", "cos_cache", "sin_cache"]
        node = helper.make_node(
            "RotaryEmbedding", names, [f"{kind}_turned"], name=f"{kind}_turn", domain=contract.DOMAIN
        )
        nodes.append(node)
    names = ["q_turned", "k_turned", "v_projected", "", "", "", "past_key", "past_value"]
    outputs = ["y", "present_key", "present_value"]
    attributes = {"name": "MultiHeadAttention_0", "domain": contract.DOMAIN, "num_heads": HEADS}
    nodes.append(helper.make_node("MultiHeadAttention", names, outputs, **attributes))
    past = (F32, ("batch_size", HEADS, "past_length", HEAD_SIZE))
    inputs = {
        "x": (F32, ("batch_size", "length", width)),
        "position_ids": (TensorProto.INT64, ("batch_size", "length")),
        "attention_mask": (TensorProto.INT64, ("batch_size", "total_length")),
        "past_key": past,
        "past_value": past,
    }
    used = [name for name in arrays if bias or not name.startswith("b_")]
    weights = [numpy_helper.from_array(arrays[name].astype(np.float32), name) for name in used]
    return model_of(nodes, inputs, dict.fromkeys(outputs, (F32, None)), weights, opset=17)


@pytest.mark.parametrize("bias", [False, True])
def test_a_converted_graph_agrees_with_onnxruntime(bias: bool):
    """onnxruntime.transformers makes GroupQueryAttention of MultiHeadAttention, rotations included."""
    conversion = pytest.importorskip(
        "onnxruntime.transformers.convert_generation", reason="its requirements are absent"
    )
    models = pytest.importorskip("onnxruntime.transformers.onnx_model", reason="its requirements are absent")
    converted = models.OnnxModel(attention_model(bias))
    converted = conversion.replace_mha_with_gqa(converted, "attention_mask", kv_num_heads=HEADS)
    converted.prune_graph()
    model = converted.model
    assert gqa.NAME in [node.op_type for node in model.graph.node]
    theirs, mine = ort.session_of(model), Session(model)
    rng = np.random.default_rng(1)
    caches = {name: np.zeros((2, HEADS, 0, HEAD_SIZE), np.float32) for name in ("past_key", "past_value")}
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        feeds = {
            "x": rng.standard_normal((2, stop - start, HEADS * HEAD_SIZE)).astype(np.float32),
            "attention_mask": np.ones((2, stop), np.int64),
            "position_ids": np.arange(start, stop)[None].repeat(2, 0),
        }
        feeds = {name: x for name, x in feeds.items() if name in [i.name for i in model.graph.input]}
        names = [out.name for out in theirs.get_outputs()]
        want = dict(zip(names, theirs.run(None, {**feeds, **caches}), strict=True))
        got = dict(zip(names, mine.run(names, feeds), strict=True))
        for name in names:
            np.testing.assert_allclose(got[name], want[name], **CLOSE, err_msg=name)
        caches = {"past_key": want["present_key"], "past_value": want["present_value"]}
