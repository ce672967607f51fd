"""Nodes of PagedAttention: read, made and checked by the contract's names instead of by index."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from pagedattn import contract
from pagedattn.dtypes import BY_NAME, FLOAT16, FLOAT32, INT4, INT8, INT32
from pagedattn.errors import InvalidArgumentError
from pagedattn.onnx.types import PartialTensor, partial_tensor
from pagedattn.problem import TensorInfo, imagined
from pagedattn.validate import coerce_attributes, expected, validate

OUTPUTS = tuple(row for row in contract.OUTPUTS if row.index is not None)
OUTPUT_NAMES = tuple(row.name for row in OUTPUTS)
# Attributes that other tools write, and what they mean for the rest of the node.
_SCALES = "A node with it has scales per token at inputs 17 and 18, which are query_positions and attention_bias here."
FOREIGN_ATTRIBUTES = {
    "qk_rotation": _SCALES,
    "v_rotation": _SCALES,
    "causal": "GroupQueryAttention's causal is is_causal here.",
    "smooth_softmax": "It is a head_sink of zeros.",
    "kv_cache_bit_width": "The width follows from the caches' type and k_cache_dtype, v_cache_dtype.",
    "sliding_window_cache": "A rolling cache is a block_table with -1 below the window.",
    "q_norm_epsilon": "There is one qk_norm_epsilon.",
    "k_norm_epsilon": "There is one qk_norm_epsilon.",
}


@dataclass(frozen=True)
class PagedAttentionNode:
    """A node by the contract's names.

    Attributes
    ----------
    inputs, outputs : dict of str to str
        Name in the contract to name of the value in the graph; absent ones are left out.
    attributes : dict
        Only those that the node sets; `pagedattn.paged_attention` takes them as they are.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]
    attributes: dict[str, Any]


def attribute_value(attribute: Any) -> Any:
    """Value of an AttributeProto; strings as str."""
    value = helper.get_attribute_value(attribute)
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise InvalidArgumentError(expected(attribute.name, "a string in UTF-8", repr(value))) from None


def names_by_index(names: Sequence[str], rows: Sequence[str], kind: str) -> dict[str, str]:
    """Values of a node by the names of their positions; an empty name is an absent value."""
    if len(names) > len(rows):
        raise InvalidArgumentError(expected(kind, f"at most {len(rows)}, up to {rows[-1]}", len(names)))
    return {row: name for row, name in zip(rows, names, strict=False) if name}


def refuse_unknown_attributes(
    names: Iterable[str],
    operator: str = contract.NAME,
    rows: tuple[contract.Attribute, ...] = contract.ATTRIBUTES,
) -> None:
    """Refuse attributes that an operator does not have, by name: the node would mean something else."""
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            hint = FOREIGN_ATTRIBUTES.get(name, "") if operator == contract.NAME else ""
            raise InvalidArgumentError(
                expected(name, f"an attribute of {operator} among {', '.join(known)}", "an unknown name", hint)
            )


def read_paged_attention_node(node: NodeProto) -> PagedAttentionNode:
    """Read a node of the operator.

    Parameters
    ----------
    node : onnx.NodeProto

    Raises
    ------
    InvalidArgumentError
        The node is of another operator, has more inputs or outputs, or an attribute that the contract does not know.
    """
    if (node.domain, node.op_type) != (contract.DOMAIN, contract.NAME):
        want = f"{contract.DOMAIN}::{contract.NAME}"
        raise InvalidArgumentError(expected("node", f"one of {want}", f"{node.domain}::{node.op_type}"))
    refuse_unknown_attributes(attribute.name for attribute in node.attribute)
    return PagedAttentionNode(
        names_by_index(node.input, [row.name for row in contract.INPUTS], "inputs"),
        names_by_index(node.output, OUTPUT_NAMES, "outputs"),
        {attribute.name: attribute_value(attribute) for attribute in node.attribute},
    )


def make_paged_attention_node(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    *,
    name: str = "",
    types: Any = (),
    **attributes: Any,
) -> NodeProto:
    """Make a node, and refuse one that could not run.

    Parameters
    ----------
    inputs, outputs : mapping of str to str
        Name in the contract ("query", "key_cache_out", ...) to name of the value in the graph.
    name : str
        Name of the node.
    types : mapping of value name to TypeProto, or iterable of ValueInfoProto
        Types and shapes of the graph's values, as far as they are known; symbolic dimensions are left open.
    **attributes
        Attributes of the operator; those equal to their default are left out of the node.

    Returns
    -------
    onnx.NodeProto

    Raises
    ------
    InvalidArgumentError
        The node breaks the contract as far as can be told now; the message names the input, output or attribute.

    Examples
    --------
    >>> node = make_paged_attention_node(
    ...     {"query": "qkv", "key_cache": "past.key", "value_cache": "past.value",
    ...      "cumulative_sequence_length": "cu", "past_seqlens": "past", "block_table": "table"},
    ...     {"output": "attended", "key_cache_out": "present.key", "value_cache_out": "present.value"},
    ...     num_heads=8, kv_num_heads=2)
    >>> list(node.input)[:4]
    ['qkv', '', '', 'past.key']
    """
    for kind, given, known in (("inputs", inputs, contract.INPUT_BY_NAME), ("outputs", outputs, OUTPUT_NAMES)):
        for key in given:
            if key not in known:
                raise InvalidArgumentError(expected(kind, f"names among {', '.join(known)}", repr(key)))
    inputs = {key: value for key, value in inputs.items() if value}
    outputs = {key: value for key, value in outputs.items() if value}
    refuse_unknown_attributes(attributes)
    by_value: Mapping[Any, Any] = types if isinstance(types, Mapping) else {info.name: info.type for info in types}
    check_node({key: partial_tensor(by_value.get(value)) for key, value in inputs.items()}, outputs, attributes)
    values = coerce_attributes(attributes)
    return helper.make_node(
        contract.NAME,
        _positional(inputs, [row.name for row in contract.INPUTS]),
        _positional(outputs, OUTPUT_NAMES),
        name=name,
        domain=contract.DOMAIN,
        **{row.name: values[row.name] for row in contract.ATTRIBUTES if values[row.name] != row.default},
    )


def _positional(given: Mapping[str, str], rows: Sequence[str]) -> list[str]:
    last = max(rows.index(name) for name in given)
    return [given.get(row, "") for row in rows[: last + 1]]


def check_node(inputs: Mapping[str, PartialTensor], outputs: Collection[str], attributes: Mapping[str, Any]) -> None:
    """Hold a node against the contract, as far as its shapes and types are known.

    What is open is filled with the least that the contract allows, then the rules of a call decide: a node passes if
    some sizes make it valid.
    """
    values = coerce_attributes(attributes)
    validate(_complete(inputs, values), values)
    check_outputs(outputs, values["qk_output"], keys_only=values["kv_cache_layout"] == "LATENT")


def check_outputs(
    outputs: Collection[str], qk_output: int, names: Sequence[str] = OUTPUT_NAMES, keys_only: bool = False
) -> None:
    """Check which outputs a node of either operator has; ``names`` are those of the operator."""
    output, key, value, scores = names
    if output not in outputs:
        raise InvalidArgumentError(f"{output}: required output, got an empty name.")
    if keys_only:
        if value in outputs:
            raise InvalidArgumentError(f"{value}: expected an empty name in the LATENT layout, got a name.")
    elif (key in outputs) != (value in outputs):
        there, missing = (key, value) if key in outputs else (value, key)
        raise InvalidArgumentError(f"{missing}: required together with {there}, got none.")
    if bool(qk_output) != (scores in outputs):
        want = f"{scores} as the fourth output" if qk_output else f"1 or 2 with the output {scores}"
        raise InvalidArgumentError(expected("qk_output", want, qk_output))


def _complete(inputs: Mapping[str, PartialTensor], values: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Tensors with every open type and dimension filled in, so that they can be validated like a call's."""
    dtypes = _complete_types(inputs, values)
    sizes = _complete_sizes(inputs, values, dtypes["T_CACHE"] == INT4.numpy)
    infos = {}
    for number, row in enumerate(contract.INPUTS):
        if row.name in inputs:
            shape = _complete_shape(inputs[row.name].shape, _dimensions(row, values), sizes)
            infos[row.name] = imagined(number, shape, inputs[row.name].dtype or dtypes[row.type])
    return infos


def _complete_shape(
    shape: tuple[int | None, ...] | None, dimensions: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """A shape whose open dimensions have their size by name, 1 where there is none; of alternatives 1 or the first."""
    filled = []
    for axis, extent in enumerate((None,) * len(dimensions) if shape is None else shape):
        if extent is None:
            alternatives = (dimensions[axis] if axis < len(dimensions) else "").split("|")
            name, _, plus = ("1" if "1" in alternatives else alternatives[0]).partition("+")
            extent = int(name) if name.isdigit() else sizes.get(name, 1) + int(plus or 0)
        filled.append(extent)
    return tuple(filled)


def _complete_types(inputs: Mapping[str, PartialTensor], values: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
    types: dict[str, np.dtype[Any]] = {"S": INT32.numpy, "T_KV_SCALE": FLOAT32.numpy}
    for row in contract.INPUTS:
        known = inputs[row.name].dtype if row.name in inputs else None
        if known is not None:
            types.setdefault(row.type, known)
    unquantized = values["k_quant_type"] == "NONE"
    types.setdefault("T", types["T_CACHE"] if "T_CACHE" in types and unquantized else FLOAT16.numpy)
    named = BY_NAME.get(values["k_cache_dtype"])
    types.setdefault("T_CACHE", named.numpy if named else types["T"] if unquantized else INT8.numpy)
    return types


def _complete_sizes(inputs: Mapping[str, PartialTensor], values: Mapping[str, Any], is_int4: bool) -> dict[str, int]:
    """Sizes by name: those that shapes show, and for others the least that the contract allows beside them."""
    known = _known_sizes(inputs, values)
    heads, kv_heads = values["num_heads"], values["kv_num_heads"]
    if values["kv_cache_layout"] == "SEPARATE" and "key" not in inputs and "value" not in inputs:  # packed
        heads += 2 * kv_heads
    half, offset = known.get("rotary_half", 0), values["rotary_offset"]
    head_size = (
        known.get("query_width", 0) // heads
        or known.get("kv_width", 0) // kv_heads
        or known.get("cache_width", 0) * (2 if is_int4 else 1)
        or known.get("head_size", 0)
        or -(-max(8, offset + 2 * half, values["v_head_size"]) // 8) * 8
    )
    least = {
        "head_size": head_size,
        "query_width": heads * head_size,
        "kv_width": kv_heads * head_size,
        "cache_width": (head_size + 1) // 2 if is_int4 else head_size,
        "block_size": 16,
        "rotary_half": max(1, (head_size - offset) // 2),
    }
    return {**least, **known, "num_heads": values["num_heads"], "kv_num_heads": kv_heads}


def _known_sizes(inputs: Mapping[str, PartialTensor], values: Mapping[str, Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in contract.INPUTS:
        shape, dimensions = inputs[row.name].shape if row.name in inputs else None, _dimensions(row, values)
        if shape is None or len(shape) != len(dimensions):
            continue
        for dimension, extent in zip(dimensions, shape, strict=True):
            name, _, plus = dimension.removesuffix("|1").partition("+")
            if extent is not None and not (extent == 1 and dimension.endswith("|1")):
                sizes.setdefault(name, extent - int(plus or 0))
    return sizes


def _dimensions(row: contract.Input, values: Mapping[str, Any]) -> tuple[str, ...]:
    kind = {"k_scale": "k_quant_type", "v_scale": "v_quant_type"}.get(row.name)
    if kind is None:
        return row.shape
    return ("kv_num_heads", "1", "head_size") if values[kind] == "PER_CHANNEL" else ("1",)
