"""ONNX Runtime's own GroupQueryAttention on the CPU, as an oracle: one node, fed by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from pagedattn import contract, gqa

Array = np.ndarray[Any, np.dtype[Any]]
ELEMENT = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


def session_of(model: Any) -> onnxruntime.InferenceSession:
    """A session on the CPU with one thread and no log."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def _session(
    attributes: tuple[tuple[str, Any], ...], inputs: tuple[tuple[str, str, int], ...], outputs: int
) -> onnxruntime.InferenceSession:
    given = {name: (ELEMENT[dtype], rank) for name, dtype, rank in inputs}
    rows = [row.name for row in gqa.INPUTS]
    last = max(map(rows.index, given))
    names = [name if name in given else "" for name in rows[: last + 1]]
    results = list(gqa.OUTPUT_NAMES[:outputs])
    node = helper.make_node(gqa.NAME, names, results, domain=contract.DOMAIN, **dict(attributes))
    cache_type = given.get("past_key", given["query"])[0]
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, *_open(*entry, name)) for name, entry in given.items()],
        [
            helper.make_tensor_value_info(name, cache_type if "present" in name else given["query"][0], None)
            for name in results
        ],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(contract.DOMAIN, 1)]
    return session_of(helper.make_model(graph, opset_imports=imports, ir_version=10))


def _open(element: int, rank: int, name: str) -> tuple[int, list[str]]:
    return element, [f"{name}_{axis}" for axis in range(rank)]


def group_query_attention(attributes: dict[str, Any], **inputs: Array | int | None) -> list[Array]:
    """output, present_key, present_value, and output_qk where it is asked for. Past arrays are not written."""
    feeds = {name: np.asarray(x, np.int32) if isinstance(x, int) else x for name, x in inputs.items() if x is not None}
    kinds = tuple((name, str(feeds[name].dtype), feeds[name].ndim) for name in sorted(feeds))
    session = _session(tuple(sorted(attributes.items())), kinds, 4 if attributes.get("qk_output") else 3)
    return session.run(None, feeds)
