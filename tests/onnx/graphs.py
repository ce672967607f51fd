"""Small ONNX models for the tests of `pagedattn.onnx`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from pagedattn import contract

F16, F32, I32, I8 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT8
ELEMENTS = {
    "float16": F16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": F32,
    "int8": I8,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "uint8": TensorProto.UINT8,
    "int32": I32,
    "int64": TensorProto.INT64,
}
Shape = Sequence["int | str | None"] | None

# A separate-mode node with 8 query heads over 2 key heads of 64 channels; None leaves a rank open.
SEPARATE: dict[str, tuple[int, Shape]] = {
    "query": (F16, ("N", 512)),
    "key": (F16, ("N", 128)),
    "value": (F16, ("N", 128)),
    "key_cache": (F16, ("blocks", 16, 2, 64)),
    "value_cache": (F16, ("blocks", 16, 2, 64)),
    "cumulative_sequence_length": (I32, ("B1",)),
    "past_seqlens": (I32, ("B",)),
    "block_table": (I32, ("B", "M")),
}
PACKED: dict[str, tuple[int, Shape]] = {
    **{name: entry for name, entry in SEPARATE.items() if name not in ("key", "value")},
    "query": (F16, ("N", 12 * 64)),
}
LATENT: dict[str, tuple[int, Shape]] = {
    **{name: entry for name, entry in SEPARATE.items() if name not in ("value", "value_cache")},
    "query": (F16, ("N", 8 * 576)),
    "key": (F16, ("N", 576)),
    "key_cache": (F16, ("blocks", 64, 1, 576)),
}
HEADS = {"num_heads": 8, "kv_num_heads": 2}
LATENT_ATTRIBUTES = {"num_heads": 8, "kv_num_heads": 1, "kv_cache_layout": "LATENT", "v_head_size": 512, "scale": 0.1}
CACHES_OUT = ("output", "key_cache_out", "value_cache_out")


def raw_node(
    inputs: Sequence[str], outputs: Sequence[str] = ("output",), attributes: Mapping[str, Any] = HEADS
) -> NodeProto:
    """A node with nothing checked: the inputs named, the outputs as given, "" for an absent one among them."""
    rows = [row.name for row in contract.INPUTS]
    last = max(map(rows.index, inputs))
    names = [row if row in inputs else "" for row in rows[: last + 1]]
    return helper.make_node(contract.NAME, names, outputs, name="attention", domain=contract.DOMAIN, **attributes)


def value_info(name: str, entry: tuple[int, Shape]) -> ValueInfoProto:
    """A ValueInfoProto; a shape of None has no rank."""
    return helper.make_tensor_value_info(name, *entry)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]] | None = None,
    initializers: Sequence[TensorProto] = (),
    opset: int = 21,
) -> ModelProto:
    """A model; graph outputs without a declaration are left to inference."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [value_info(name, entry) for name, entry in inputs.items()],
        [value_info(name, entry) for name, entry in (outputs or {}).items()],
        list(initializers),
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.OPSET)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def one_node(
    inputs: Mapping[str, tuple[int, Shape]] = SEPARATE,
    outputs: Sequence[str] = ("output",),
    attributes: Mapping[str, Any] = HEADS,
    **declared: tuple[int, Shape],
) -> ModelProto:
    """A model of one node whose outputs are intermediate values, so that inference shows in ``value_info``."""
    return model_of([raw_node(list(inputs), outputs, attributes)], inputs, declared)


def model_of_call(
    inputs: Mapping[str, Any], attributes: Mapping[str, Any], outputs: Sequence[str] = CACHES_OUT, **declared: int
) -> ModelProto:
    """A model of one node for a call of paged_attention; ``declared`` gives types of outputs other than the usual."""
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in inputs.items()}
    usual = {
        "output": types["query"][0],
        "key_cache_out": types["key_cache"][0],
        "value_cache_out": types["key_cache"][0],
        "output_qk": F32,
    }
    named = {name: (declared.get(name, usual[name]), None) for name in outputs if name}
    return model_of([raw_node(list(inputs), outputs, attributes)], types, named)
