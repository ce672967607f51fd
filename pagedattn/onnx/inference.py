"""Type and shape inference of the ONNX operator."""

from __future__ import annotations

from typing import Any

from onnx import numpy_helper, shape_inference

from pagedattn import contract
from pagedattn.dtypes import FLOAT32
from pagedattn.errors import InvalidArgumentError
from pagedattn.onnx.node import FOREIGN_ATTRIBUTES, OUTPUTS, attribute_value, check_node, refuse_unknown_attributes
from pagedattn.onnx.types import element_type, partial_tensor, tensor_type
from pagedattn.validate import coerce_attributes, expected


class NodeInferenceError(InvalidArgumentError, shape_inference.InferenceError):  # type: ignore[misc]
    """A node that breaks the contract, met during shape inference."""


def infer(context: Any) -> None:
    """Set the types and shapes of a node's outputs.

    Parameters
    ----------
    context : onnx InferenceContext

    Raises
    ------
    NodeInferenceError
        The node is malformed; the message names the input, output or attribute.
    """
    try:
        _infer(context)
    except InvalidArgumentError as error:
        raise NodeInferenceError(f"{context.get_display_name()}: {error}") from None


def _infer(context: Any) -> None:
    # The context answers for attributes by name only, so of those unknown to the contract only known ones are seen.
    refuse_unknown_attributes(name for name in FOREIGN_ATTRIBUTES if context.get_attribute(name) is not None)
    found = {row.name: context.get_attribute(row.name) for row in contract.ATTRIBUTES}
    attributes = {name: attribute_value(proto) for name, proto in found.items() if proto is not None}
    count = context.get_num_inputs()
    if count > len(contract.INPUTS):
        raise InvalidArgumentError(expected("inputs", f"at most {len(contract.INPUTS)}", count))
    protos = {
        row.name: context.get_input_type(row.index)
        for row in contract.INPUTS
        if row.index < count and context.has_input(row.index)
    }
    outputs = [row for row in OUTPUTS if row.index < context.get_num_outputs() and context.has_output(row.index)]
    check_node(
        {name: partial_tensor(proto) for name, proto in protos.items()}, {row.name for row in outputs}, attributes
    )
    values = coerce_attributes(attributes)
    for row in outputs:
        proto = _cache_type(protos.get(row.alias)) if row.alias else None
        if row.name == "output":
            proto = _output_type(protos, values)
        elif row.name == "output_qk":
            proto = _output_qk_type(context, protos, values)
        if proto is not None:
            context.set_output_type(row.index, proto)


def _cache_type(proto: Any) -> Any:
    return proto if proto is not None and proto.HasField("tensor_type") else None


def _output_type(protos: dict[str, Any], values: dict[str, Any]) -> Any:
    """The type and shape of query; its width is computed only where it differs from the output's."""
    query = protos["query"]
    if query is None or not query.HasField("tensor_type"):
        return None
    tensor = query.tensor_type
    if not tensor.HasField("shape"):
        return tensor_type(tensor.elem_type, None)
    rows, width = tensor.shape.dim
    if values["kv_cache_layout"] == "LATENT":
        if values["v_head_size"]:
            width = values["num_heads"] * values["v_head_size"]
    elif "key" not in protos:  # packed
        heads = values["num_heads"] + 2 * values["kv_num_heads"]
        width = width.dim_value // heads * values["num_heads"] if width.HasField("dim_value") else None
    return tensor_type(tensor.elem_type, (rows, width))


def _output_qk_type(context: Any, protos: dict[str, Any], values: dict[str, Any]) -> Any:
    """float32, because a context does not show the declared type of an output; the width where a bound is constant."""
    query = protos["query"]
    shaped = query is not None and query.tensor_type.HasField("shape")
    rows = query.tensor_type.shape.dim[0] if shaped else None
    return tensor_type(element_type(FLOAT32), (values["num_heads"], rows, _max_context_len(context, protos)))


def _max_context_len(context: Any, protos: dict[str, Any]) -> int | None:
    metadata = next(row for row in contract.INPUTS if row.name == "attention_metadata")
    constant = context.get_input_data(metadata.index) if metadata.name in protos else None
    table, cache = (partial_tensor(protos[name]).shape for name in ("block_table", "key_cache"))
    if constant is None or table is None or cache is None or table[1] is None or cache[1] is None:
        return None
    bound = int(numpy_helper.to_array(constant)[1])
    return min(bound, table[1] * cache[1]) if bound else None
