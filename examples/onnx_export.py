"""Export the decoder of the serving example to ONNX, attention as PagedAttention nodes, and generate with the file.

Without arguments: a random model and two prompts of numbers. With a llama2.c checkpoint and its tokenizer, real text::

    python onnx_export.py --checkpoint stories260K.bin --tokenizer tok512.bin --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pagedattn import PagedAttentionError
from pagedattn.cache import BlockPool, BlockTable, assemble
from pagedattn.onnx import Session, make_paged_attention_node, register_schema

sys.path.insert(0, str(Path(__file__).parent / "continuous_batching"))  # where the decoder and its tokenizer are

from model import Config, Llama, load_llama2c, random_model
from tokenizer import EOS, Tokenizer

BLOCK_SIZE = 16
ELEMENTS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
# Graph inputs by the operator's names; every layer's node reads the same ones.
LENGTHS = {"cumulative_sequence_length": ["batch_size_1"], "past_seqlens": ["batch_size"]}
TABLE = {"block_table": ["batch_size", "max_blocks"]}


class Graph:
    """Nodes and weights of a graph being written; values are named by what made them."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, array: Any, name: str) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def norm(self, x: str, weight: str, epsilon: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.last, keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, epsilon))
        return self.op("Mul", self.op("Div", x, root), weight)

    @property
    def last(self) -> str:
        if not any(weight.name == "last_axis" for weight in self.weights):
            self.weight(np.array([-1]), "last_axis")
        return "last_axis"


def export(model: Llama, dtype: str = "float32") -> onnx.ModelProto:
    """Write a decoder as ONNX.

    Parameters
    ----------
    model : Llama
    dtype : str
        Type of queries, keys, values and caches. ONNX Runtime's kernel takes float16 and bfloat16.

    Returns
    -------
    onnx.ModelProto
        Inputs ``input_ids`` (tokens,) int64, the batch's lengths and block table by the operator's names, and two
        caches a layer; outputs ``logits`` (tokens, vocab_size) and the caches.
    """
    config, graph = model.config, Graph()
    io, epsilon = ELEMENTS[dtype], graph.weight(np.float32(config.norm_epsilon), "norm_epsilon")
    angles = {
        name: graph.weight(x, name) for name, x in zip(("cos_cache", "sin_cache"), model.rope(dtype), strict=True)
    }
    cache_shape = ["num_blocks", BLOCK_SIZE, config.kv_num_heads, config.head_size]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["tokens"])]
    inputs += [helper.make_tensor_value_info(*each, shape) for each, shape in _lengths()]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["tokens", config.vocab_size])]
    x = graph.op("Gather", graph.weight(model.embedding, "embedding"), "input_ids")
    for number, layer in enumerate(model.layers):
        name = f"layers.{number}"

        def matrix(kind: str, layer: Any = layer, name: str = name) -> str:
            return graph.weight(getattr(layer, kind).T, f"{name}.{kind}")

        def scaled(x: str, kind: str, layer: Any = layer, name: str = name) -> str:
            return graph.norm(x, graph.weight(getattr(layer, kind), f"{name}.{kind}"), epsilon)

        qkv = graph.op("MatMul", scaled(x, "attention_norm"), matrix("qkv"))
        pasts = {f"{kind}_cache": f"past.{number}.{kind}" for kind in ("key", "value")}
        presents = {f"{kind}_cache_out": f"present.{number}.{kind}" for kind in ("key", "value")}
        node = make_paged_attention_node(
            {"query": graph.op("Cast", qkv, to=io), **pasts, **{key: key for key in (*LENGTHS, *TABLE)}, **angles},
            {"output": f"{name}.attended", **presents},
            name=f"{name}.attention",
            num_heads=config.num_heads,
            kv_num_heads=config.kv_num_heads,
            local_window_size=config.window or -1,
            do_rotary=1,
            rotary_interleaved=int(config.rope_interleaved),
        )
        graph.nodes.append(node)
        inputs += [helper.make_tensor_value_info(each, io, cache_shape) for each in pasts.values()]
        outputs += [helper.make_tensor_value_info(each, io, cache_shape) for each in presents.values()]
        attended = graph.op("Cast", f"{name}.attended", to=TensorProto.FLOAT)
        x = graph.op("Add", x, graph.op("MatMul", attended, matrix("attention_out")))
        both = graph.op("MatMul", scaled(x, "mlp_norm"), matrix("gate_up"))
        gate, up = graph.op("Split", both, outputs=2, axis=1, num_outputs=2)
        hidden = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
        x = graph.op("Add", x, graph.op("MatMul", hidden, matrix("down")))
    x = graph.norm(x, graph.weight(model.final_norm, "final_norm"), epsilon)
    logits = helper.make_node("MatMul", [x, graph.weight(model.classifier.T, "classifier")], ["logits"])
    body = helper.make_graph([*graph.nodes, logits], "decoder", inputs, outputs, graph.weights)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(body, opset_imports=imports, ir_version=10)


def _lengths() -> Any:
    return [((name, TensorProto.INT32), shape) for name, shape in {**LENGTHS, **TABLE}.items()]


def generate(session: Session, prompts: list[list[int]], max_new_tokens: int, num_blocks: int) -> list[list[int]]:
    """Greedy continuations: all prompts in one step, then one token of each at a time."""
    pool = BlockPool(num_blocks)
    tables = [BlockTable(pool, BLOCK_SIZE) for _ in prompts]
    new: list[list[int]] = [list(prompt) for prompt in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        live = [i for i, tokens in enumerate(results) if EOS not in tokens]
        if not live:
            break
        for i in live:
            tables[i].append(len(new[i]))
        batch = assemble([(tables[i], len(new[i])) for i in live])
        feeds = {name: batch.inputs[name] for name in (*LENGTHS, *TABLE)}
        feeds["input_ids"] = np.array([token for i in live for token in new[i]])
        (logits,) = session.run(["logits"], feeds)
        for i, row in zip(live, batch.cumulative_sequence_length[1:] - 1, strict=True):
            new[i] = [int(logits[row].argmax())]
            results[i] += new[i]
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="llama2.c version 0 checkpoint")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=list(ELEMENTS), default="float32")
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the caches and attention are")
    parser.add_argument("--output", type=Path, help="where to write the model; default: a temporary file")
    options = parser.parse_args(argv)
    if bool(options.checkpoint) != bool(options.tokenizer):
        parser.error("--checkpoint and --tokenizer go together")
    for path in (options.checkpoint, options.tokenizer):
        if path and not path.is_file():
            parser.error(f"{path}: no such file")

    if options.checkpoint:
        model = load_llama2c(options.checkpoint)
        tokenizer = Tokenizer(options.tokenizer, model.config.vocab_size)
        prompts = [tokenizer.encode(text) for text in options.prompt or ["Once upon a time", "The cat and the dog"]]
    else:
        model = random_model(Config(64, 172, 3, 8, 4, vocab_size=512, max_length=256))
        tokenizer, prompts = None, [list(range(10, 30)), [7, 8, 9]]

    with tempfile.TemporaryDirectory() as folder:
        path = options.output or Path(folder) / "decoder.onnx"
        register_schema()
        exported = export(model, options.dtype)
        onnx.checker.check_model(exported, full_check=True)
        onnx.save(exported, path)
        nodes = sum(node.op_type == "PagedAttention" for node in exported.graph.node)
        print(f"{path.name}: {len(exported.graph.node)} nodes, {nodes} of PagedAttention, {path.stat().st_size} bytes")
        session = Session(path, {"num_blocks": options.num_blocks}, device=options.device)
        answers = generate(session, prompts, options.max_new_tokens, options.num_blocks)
    for prompt, tokens in zip(prompts, answers, strict=True):
        print(tokenizer.decode(prompt + tokens) if tokenizer else f"{prompt} -> {tokens}")


if __name__ == "__main__":
    try:
        main()
    except PagedAttentionError as error:
        raise SystemExit(f"error: {error}") from None
