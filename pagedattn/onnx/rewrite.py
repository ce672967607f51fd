"""From GroupQueryAttention to PagedAttention in ONNX graphs, and what of either operator the other cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from pagedattn import contract, gqa
from pagedattn.errors import InvalidArgumentError
from pagedattn.onnx.node import (
    attribute_value,
    check_node,
    check_outputs,
    make_paged_attention_node,
    names_by_index,
    read_paged_attention_node,
    refuse_unknown_attributes,
)
from pagedattn.onnx.types import partial_tensor
from pagedattn.validate import coerce_attributes, expected

MIN_OPSET = 15  # CastLike
# Inputs that both operators have under one name.
SHARED_INPUTS = [row.name for row in contract.INPUTS if row.name in gqa.INPUT_BY_NAME]
_PRESENTS = {"key_cache_out": "present_key", "value_cache_out": "present_value"}


@dataclass(frozen=True)
class Finding:
    """Something that one operator says and the other cannot, or not in the same way.

    Attributes
    ----------
    node : str
        Name of the node, or of its first output, or its operator.
    operator : str
        Its operator.
    feature : str
        Input, output or attribute.
    note : str
    blocks : bool
        The node cannot be rewritten as it is; otherwise something of it is lost without changing results.
    """

    node: str
    operator: str
    feature: str
    note: str
    blocks: bool = True

    def __str__(self) -> str:
        return f"{self.operator} {self.node}: {self.feature}: {self.note}{'' if self.blocks else ' (no obstacle)'}"


class Migration(NamedTuple):
    """What a rewrite returns.

    Attributes
    ----------
    model : onnx.ModelProto
        A new model.
    rewritten : list of str
        Names of the nodes that became PagedAttention.
    findings : list of Finding
        Of all attention nodes; those with a finding that blocks were left alone.
    """

    model: onnx.ModelProto
    rewritten: list[str]
    findings: list[Finding]


class _PaddedNode(NamedTuple):
    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    attributes: dict[str, Any]


def _read(node: NodeProto) -> _PaddedNode:
    refuse_unknown_attributes((attribute.name for attribute in node.attribute), gqa.NAME, gqa.ATTRIBUTES)
    given = {attribute.name: attribute_value(attribute) for attribute in node.attribute}
    return _PaddedNode(
        _name_of(node),
        names_by_index(node.input, [row.name for row in gqa.INPUTS], "inputs"),
        names_by_index(node.output, gqa.OUTPUT_NAMES, "outputs"),
        coerce_attributes(given, gqa.ATTRIBUTES),
    )


def _name_of(node: NodeProto) -> str:
    return str(node.name or next(filter(None, node.output), node.op_type))


# ---- the report --------------------------------------------------------------------------------------------------


def migration_report(model: onnx.ModelProto) -> list[Finding]:
    """What keeps a model's attention nodes from becoming nodes of the other operator.

    Parameters
    ----------
    model : onnx.ModelProto

    Returns
    -------
    list of Finding
        For each GroupQueryAttention node what PagedAttention cannot say, and the other way round; ``str`` of one is a
        line of text. Nodes of which nothing is said can be rewritten.
    """
    return [finding for node, nested in _attention_nodes(model) for finding in _findings(node, nested)]


def _attention_nodes(model: onnx.ModelProto) -> Iterator[tuple[NodeProto, bool]]:
    """Nodes of both operators, with whether they are inside a subgraph or a function."""

    def walk(nodes: Any, nested: bool) -> Iterator[tuple[NodeProto, bool]]:
        for node in nodes:
            if node.domain == contract.DOMAIN and node.op_type in (contract.NAME, gqa.NAME):
                yield node, nested
            for attribute in node.attribute:
                for graph in [attribute.g, *attribute.graphs]:
                    yield from walk(graph.node, True)

    yield from walk(model.graph.node, False)
    for function in model.functions:
        yield from walk(function.node, True)


def _findings(node: NodeProto, nested: bool) -> list[Finding]:
    name, operator = _name_of(node), node.op_type
    try:
        notes = list(_padded_notes(node) if operator == gqa.NAME else _paged_notes(node))
        if operator == gqa.NAME and not any(blocks for *_, blocks in notes):
            _check_counterpart(_read(node))
    except InvalidArgumentError as error:
        return [Finding(name, operator, "node", str(error))]
    if nested:
        notes.append(("node", "it is inside a subgraph or a function, which are left alone", True))
    return [Finding(name, operator, *note) for note in notes]


def _padded_notes(node: NodeProto) -> Iterator[tuple[str, str, bool]]:
    """What PagedAttention cannot say of a GroupQueryAttention node: feature, note, whether it blocks."""
    _, inputs, outputs, attributes = _read(node)
    check_outputs(outputs, attributes["qk_output"], gqa.OUTPUT_NAMES)
    for name in ("query", "seqlens_k", "total_sequence_length"):
        if name not in inputs:
            yield name, "it is required", True
    if "position_ids" in inputs and attributes["do_rotary"]:
        yield "position_ids", "they turn queries and keys only, query_positions would move the mask too", True
    if attributes["sliding_window_cache"]:
        yield "sliding_window_cache", "rows of its cache move; a block table that drops blocks does the same", True
    if attributes["local_window_size"] == 0:
        yield "local_window_size", "0 sees nothing", True
    epsilons = {attributes[name] or attributes["qk_norm_epsilon"] for name in ("q_norm_epsilon", "k_norm_epsilon")}
    if "q_norm_weight" in inputs and len(epsilons) > 1:
        yield "k_norm_epsilon", "it differs from that of queries, and there is one qk_norm_epsilon", True
    if attributes["k_quant_type"] != "NONE" and "past_key" not in inputs:
        yield "past_key", "it is required with a quantized cache", True


def _check_counterpart(node: _PaddedNode) -> None:
    """Raise for a node that breaks rules which both operators have: what became of it could not run either."""
    pairs = {"past_key": "key_cache", "past_value": "value_cache"}
    for name, other in zip(pairs, reversed(pairs), strict=True):
        if name in node.inputs and other not in node.inputs:
            raise InvalidArgumentError(f"{other}: required together with {name}, got none.")
    lengths = ("cumulative_sequence_length", "past_seqlens", "block_table")
    inputs = {*(node.inputs.keys() & set(SHARED_INPUTS)), *pairs.values(), *lengths}
    outputs = {"output", "output_qk"} if node.attributes["qk_output"] else {"output"}
    check_node(dict.fromkeys(inputs, partial_tensor(None)), outputs, _paged_attributes(node.attributes))


def _paged_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: attributes[name] for name in gqa.SHARED_ATTRIBUTES}
    chosen["is_causal"] = attributes["causal"]
    chosen["qk_norm_epsilon"] = attributes["q_norm_epsilon"] or attributes["qk_norm_epsilon"]
    if attributes["kv_cache_bit_width"] == 4:
        chosen.update(k_cache_dtype="int4", v_cache_dtype="int4")
    return chosen


def _paged_notes(node: NodeProto) -> Iterator[tuple[str, str, bool]]:
    """What GroupQueryAttention cannot say of a PagedAttention node."""
    read = read_paged_attention_node(node)
    values = coerce_attributes(read.attributes)
    yield "block_table", "caches have to be gathered into (batch_size, kv_num_heads, capacity, head_size)", False
    if values["kv_cache_layout"] == "LATENT":
        yield "kv_cache_layout", "LATENT has no counterpart", True
    if values["rotary_offset"] and values["do_rotary"]:
        yield "rotary_offset", "rotation starts at channel 0", True
    if "query_positions" in read.inputs:
        yield "query_positions", "position_ids turn queries and keys, but do not move the mask", True
    if "slot_mapping" in read.inputs:
        yield (
            "slot_mapping",
            "tokens are stored at their own positions; tokens that are not stored have no counterpart",
            True,
        )
    if not values["is_causal"] and values["local_window_size"] > 0:
        yield "local_window_size", "a window goes with a causal mask only", True
    if not values["is_causal"]:
        yield (
            "is_causal",
            "causal = 0 does not go with query_seqlens: sequences must have equally many new tokens",
            True,
        )
    if "attention_metadata" in read.inputs:
        yield "attention_metadata", "total_sequence_length takes its place", False


# ---- the rewrite -------------------------------------------------------------------------------------------------


def rewrite_group_query_attention(
    model: onnx.ModelProto,
    *,
    block_size: int = 16,
    paged_caches: bool = False,
    assume_sequential_positions: bool = False,
) -> Migration:
    """Make PagedAttention nodes of a model's GroupQueryAttention nodes.

    Padded rows are packed and unpacked again around each node. As it is, the new model takes and returns what the old
    one did: caches are cut into blocks and put together again, with a block table in the graph that gives each sequence
    its blocks in order. With ``paged_caches`` the caches become pools of blocks, written in place, and the block table
    becomes an input, which is what a server wants.

    Parameters
    ----------
    model : onnx.ModelProto
        Left as it is; its default opset is 15 or later.
    block_size : int
        A power of two, at least 16.
    paged_caches : bool
        Graph inputs that are caches become ``(num_blocks, block_size, kv_num_heads, width)``, and there is a new graph
        input ``block_table``, or of another name where the graph has that one. Every cache has to be a graph input, and
        its present a graph output or absent.
    assume_sequential_positions : bool
        Drop position_ids, trusting them to count on from the tokens that are in the cache.

    Returns
    -------
    Migration

    Raises
    ------
    InvalidArgumentError
        ``block_size`` or the model's opset will not do.
    """
    if block_size < 16 or block_size & (block_size - 1):
        raise InvalidArgumentError(expected("block_size", "a power of two >= 16", block_size))
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < MIN_OPSET:
        raise InvalidArgumentError(expected("model", f"a default opset >= {MIN_OPSET}", opset))
    result = onnx.ModelProto()
    result.CopyFrom(model)
    findings = migration_report(model)
    if assume_sequential_positions:
        findings = [
            Finding(each.node, each.operator, each.feature, "dropped as asked for", False)
            if each.feature == "position_ids"
            else each
            for each in findings
        ]
    blocked = {finding.node for finding in findings if finding.blocks}
    writer = _Writer(result, block_size, paged_caches)
    for node in model.graph.node:
        padded = (node.domain, node.op_type) == (contract.DOMAIN, gqa.NAME)
        if padded and _name_of(node) not in blocked:
            writer.rewrite(_read(node))
        else:
            writer.nodes.append(node)
    writer.finish()
    return Migration(result, writer.rewritten, findings)


class _Layout(NamedTuple):
    """Values of a batch's layout, by name: all int64 but for the operator's inputs."""

    batch: str  # (1,)
    length: str  # (1,)
    source: str  # (rows,), padded row of each packed row
    place: str  # (rows,), packed row of each padded row
    live: str  # (rows, 1) bool, whether a padded row counts
    cumulative: str  # int32
    past: str  # int32


class _Writer:
    """A graph being rewritten: its new nodes, and the values that several of them share."""

    def __init__(self, model: onnx.ModelProto, block_size: int, paged_caches: bool) -> None:
        self.model, self.block_size, self.paged_caches = model, block_size, paged_caches
        self.nodes: list[NodeProto] = []
        self.rewritten: list[str] = []
        # Names of the lengths, dimensions of the batch if they are known, and its layout.
        self.layouts: list[tuple[tuple[str, str | None], tuple[Any, ...] | None, _Layout]] = []
        self.block_table = ""
        self.constants: dict[tuple[Any, ...], str] = {}
        self.prefix = "paged"
        self.count = 0
        graph = model.graph
        taken = [name for node in graph.node for name in (*node.input, *node.output)]
        self.taken = {*taken, *(each.name for each in (*graph.input, *graph.initializer))}
        known = onnx.shape_inference.infer_shapes(model).graph
        infos = (*known.input, *known.value_info, *known.output)
        self.dims = {info.name: list(info.type.tensor_type.shape.dim) for info in infos}

    # ---- writing

    def name(self, hint: str) -> str:
        """A name that no other value has."""
        while True:
            self.count += 1
            name = f"{self.prefix}/{hint}_{self.count}"
            if name not in self.taken:
                self.taken.add(name)
                return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node of one output; returns the output's name."""
        out = self.name(kind)
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        return out

    def ints(self, *values: int) -> str:
        """A constant of int64, (len(values),)."""
        return self.constant(np.array(values, np.int64))

    def constant(self, value: Any) -> str:
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self.constants:
            self.constants[key] = self.name("constant")
            self.model.graph.initializer.append(numpy_helper.from_array(value, self.constants[key]))
        return self.constants[key]

    def long(self, x: str) -> str:
        return self.op("Cast", x, to=onnx.TensorProto.INT64)

    def narrow(self, x: str) -> str:
        return self.op("Cast", x, to=onnx.TensorProto.INT32)

    def scalar(self, x: str) -> str:
        return self.op("Squeeze", x, self.ints(0))

    def range_to(self, stop: str) -> str:
        """0 .. stop - 1; ``stop`` is (1,)."""
        return self.op("Range", self.constant(np.int64(0)), self.scalar(stop), self.constant(np.int64(1)))

    def extent(self, x: str, axis: int) -> str:
        """A dimension of a value, (1,)."""
        return self.op("Gather", self.op("Shape", x), self.ints(axis))

    def zeros(self, shape: str, like: str) -> str:
        return self.op("CastLike", self.op("ConstantOfShape", shape), like)

    # ---- the pieces

    def layout(self, node: _PaddedNode) -> _Layout:
        """How the rows of a batch are packed; nodes share it whose lengths are the same values.

        Nodes whose queries are known to differ in shape do not. Where shapes are not known it is safe to share: queries
        of another shape would not fit, so the model would fail instead of giving something else.
        """
        inputs = node.inputs
        dims = self.dims.get(inputs["query"], [])[:2]
        named = [dim.dim_param or dim.dim_value for dim in dims]
        shape = tuple(named) if len(named) == 2 and all(named) else None
        lengths = (inputs["seqlens_k"], inputs.get("query_seqlens"))
        for known, other, layout in self.layouts:
            if known == lengths and (other == shape or other is None or shape is None):
                return layout
        layout = self.make_layout(node)
        self.layouts.append((lengths, shape, layout))
        return layout

    def make_layout(self, node: _PaddedNode) -> _Layout:
        inputs = node.inputs
        batch, length = self.extent(inputs["query"], 0), self.extent(inputs["query"], 1)
        total = self.op("Add", self.long(self.op("Reshape", inputs["seqlens_k"], self.ints(-1))), self.ints(1))
        new = self.op("Max", self.op("Min", total, length), self.ints(0))
        if "query_seqlens" in inputs:
            new = self.op("Max", self.op("Min", self.long(inputs["query_seqlens"]), new), self.ints(0))
        ends = self.op("CumSum", new, self.constant(np.int64(0)))
        starts = self.op("Sub", ends, new)
        rows = self.op("Mul", batch, length)
        row = self.range_to(rows)
        sequence, offset = self.op("Div", row, length), self.op("Mod", row, length)
        live = self.op("Less", offset, self.op("Gather", new, sequence))
        place = self.op("Add", self.op("Gather", starts, sequence), offset)
        place = self.op("Where", live, place, self.ints(0))
        # Packed rows beyond the last sequence repeat one that exists; the operator passes them over.
        ended = self.op(
            "LessOrEqual", self.op("Unsqueeze", ends, self.ints(0)), self.op("Unsqueeze", row, self.ints(1))
        )
        sequence = self.op("ReduceSum", self.long(ended), self.ints(1), keepdims=0)
        sequence = self.op("Min", sequence, self.op("Sub", batch, self.ints(1)))
        source = self.op(
            "Sub", self.op("Add", self.op("Mul", sequence, length), row), self.op("Gather", starts, sequence)
        )
        source = self.op("Min", source, self.op("Sub", rows, self.ints(1)))
        return _Layout(
            batch,
            length,
            source,
            place,
            self.op("Unsqueeze", live, self.ints(1)),
            self.narrow(self.op("Concat", self.ints(0), ends, axis=0)),
            self.narrow(self.op("Sub", total, new)),
        )

    def packed(self, x: str, layout: _Layout) -> str:
        """(batch_size, sequence_length, width) to (rows, width)."""
        rows = self.op(
            "Reshape", x, self.op("Concat", self.op("Mul", layout.batch, layout.length), self.ints(-1), axis=0)
        )
        return self.op("Gather", rows, layout.source, axis=0)

    def unpacked(self, x: str, layout: _Layout, live: str, *shape: str) -> str:
        """(rows, ...) to (batch_size, sequence_length, ...), zeros in padding rows."""
        rows = self.op("Gather", x, layout.place, axis=0)
        rows = self.op("Where", live, rows, self.op("CastLike", self.constant(np.float32(0)), rows))
        return self.op("Reshape", rows, self.op("Concat", layout.batch, layout.length, *shape, axis=0))

    def pool(self, past: str | None, node: _PaddedNode, layout: _Layout, blocks: str) -> str:
        """A cache cut into blocks; ``blocks`` of them a sequence."""
        heads = node.attributes["kv_num_heads"]
        if past is None:
            query = node.inputs["query"]
            parts = node.attributes["num_heads"] + (0 if "key" in node.inputs else 2 * heads)
            head_size = self.op("Div", self.extent(query, 2), self.ints(parts))
            count = self.op("Mul", layout.batch, blocks)
            shape = self.op("Concat", count, self.ints(self.block_size, heads), head_size, axis=0)
            return self.zeros(shape, query)
        more = self.op("Sub", self.op("Mul", blocks, self.ints(self.block_size)), self.extent(past, 2))
        pads = self.op("Concat", self.ints(0, 0, 0, 0, 0, 0), more, self.ints(0), axis=0)
        by_token = self.op("Transpose", self.op("Pad", past, pads), perm=[0, 2, 1, 3])
        return self.op("Reshape", by_token, self.ints(-1, self.block_size, 0, 0))

    def present(self, out: str, pool: str, capacity: str, layout: _Layout) -> None:
        """A pool put together again, cut to ``capacity`` positions."""
        shape = self.op("Concat", layout.batch, self.ints(-1, 0, 0), axis=0)
        by_head = self.op("Transpose", self.op("Reshape", pool, shape), perm=[0, 2, 1, 3])
        whole = self.op("Slice", by_head, self.ints(0), capacity, self.ints(2))
        self.nodes.append(helper.make_node("Identity", [whole], [out], name=self.name("Identity")))

    def scale(self, x: str, kind: str, node: _PaddedNode) -> str:
        shape = (node.attributes["kv_num_heads"], 1, -1) if kind == "PER_CHANNEL" else (1,)
        return self.op("Reshape", x, self.ints(*shape))

    # ---- a node

    def rewrite(self, node: _PaddedNode) -> None:
        """Write one node's replacement."""
        self.prefix = f"{node.name}/paged"
        layout = self.layout(node)
        total = self.long(self.op("Reshape", node.inputs["total_sequence_length"], self.ints(1)))
        presents = {name: node.outputs[present] for name, present in _PRESENTS.items() if present in node.outputs}
        inputs, outputs = self.paged_inputs(node, layout), {"output": self.name("output")}
        if node.attributes["qk_output"]:
            outputs["output_qk"] = self.name("output_qk")
        if self.paged_caches:
            inputs.update(self.graph_caches(node))
            outputs.update(presents)
        else:
            capacity = total
            if "past_key" in node.inputs:
                capacity = self.op("Max", total, self.extent(node.inputs["past_key"], 2))
            inputs.update(self.own_caches(node, layout, capacity))
            outputs.update((name, self.name(name)) for name in _PRESENTS)
        attributes = _paged_attributes(node.attributes)
        self.nodes.append(make_paged_attention_node(inputs, outputs, name=self.name(contract.NAME), **attributes))
        flat = self.unpacked(outputs["output"], layout, layout.live, self.ints(-1))
        self.nodes.append(helper.make_node("Identity", [flat], [node.outputs["output"]], name=self.name("Identity")))
        if not self.paged_caches:
            for name, present in presents.items():
                self.present(present, outputs[name], capacity, layout)
        if "output_qk" in node.outputs:
            self.scores(node, outputs["output_qk"], layout, total)
        self.rewritten.append(node.name)

    def paged_inputs(self, node: _PaddedNode, layout: _Layout) -> dict[str, str]:
        """Inputs of the new node but for the caches and their block table."""
        inputs, attributes = node.inputs, node.attributes
        paged: dict[str, str] = {
            name: self.packed(inputs[name], layout) for name in ("query", "key", "value") if name in inputs
        }
        paged.update(cumulative_sequence_length=layout.cumulative, past_seqlens=layout.past)
        same = ("cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight", "attention_bias")
        paged.update((name, inputs[name]) for name in same if name in inputs)
        for name, kind in (("k_scale", "k_quant_type"), ("v_scale", "v_quant_type")):
            if name in inputs:
                paged[name] = self.scale(inputs[name], attributes[kind], node)
        if attributes["smooth_softmax"] == 1 and "head_sink" not in inputs:
            paged["head_sink"] = self.zeros(self.ints(attributes["num_heads"]), inputs["query"])
        return paged

    def own_caches(self, node: _PaddedNode, layout: _Layout, capacity: str) -> dict[str, str]:
        """Caches cut into blocks for this node alone, and a block table that gives each sequence its own in order."""
        step = self.ints(self.block_size)
        blocks = self.op("Div", self.op("Add", capacity, self.ints(self.block_size - 1)), step)
        caches = {
            cache: self.pool(node.inputs.get(past), node, layout, blocks)
            for cache, past in (("key_cache", "past_key"), ("value_cache", "past_value"))
        }
        table = self.range_to(self.op("Mul", layout.batch, blocks))
        shape = self.op("Concat", layout.batch, blocks, axis=0)
        return {**caches, "block_table": self.narrow(self.op("Reshape", table, shape))}

    def scores(self, node: _PaddedNode, scores: str, layout: _Layout, total: str) -> None:
        """(num_heads, rows, longest) to (batch_size, num_heads, sequence_length, total)."""
        by_row = self.op("Transpose", scores, perm=[1, 0, 2])
        live = self.op("Unsqueeze", layout.live, self.ints(2))
        shape = (self.ints(node.attributes["num_heads"]), self.ints(-1))
        padded = self.op("Transpose", self.unpacked(by_row, layout, live, *shape), perm=[0, 2, 1, 3])
        more = self.op("Sub", total, self.extent(padded, 3))
        whole = self.op("Pad", padded, self.op("Concat", self.ints(0, 0, 0, 0, 0, 0, 0), more, axis=0))
        out = node.outputs["output_qk"]
        self.nodes.append(
            helper.make_node("CastLike", [whole, node.inputs["query"]], [out], name=self.name("CastLike"))
        )

    # ---- caches as pools

    def graph_caches(self, node: _PaddedNode) -> dict[str, str]:
        """Caches that are graph inputs, turned into pools, and the graph's block table."""
        graph = self.model.graph
        for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
            info = next((each for each in graph.input if each.name == node.inputs.get(past)), None)
            if info is None:
                raise InvalidArgumentError(
                    f"{past} of {node.name}: expected a graph input with paged_caches, got none."
                )
            self.make_pool(info, node)
            for out in graph.output:
                if out.name == node.outputs.get(present):
                    out.type.CopyFrom(info.type)
        if not self.block_table:
            self.block_table = "block_table" if "block_table" not in self.taken else self.name("block_table")
            shape = ("batch_size", "max_blocks_per_sequence")
            table = helper.make_tensor_value_info(self.block_table, onnx.TensorProto.INT32, shape)
            graph.input.append(table)
        return {
            "key_cache": node.inputs["past_key"],
            "value_cache": node.inputs["past_value"],
            "block_table": self.block_table,
        }

    def make_pool(self, info: Any, node: _PaddedNode) -> None:
        dims = list(info.type.tensor_type.shape.dim)
        width = dims[3] if len(dims) == 4 else None
        tensor = info.type.tensor_type
        shape = onnx.TensorShapeProto()
        shape.dim.add().dim_param = "num_blocks"
        shape.dim.add().dim_value = self.block_size
        shape.dim.add().dim_value = node.attributes["kv_num_heads"]
        last = shape.dim.add()
        if width is not None:
            last.CopyFrom(width)
        tensor.shape.CopyFrom(shape)

    def finish(self) -> None:
        """Put the new nodes into the model."""
        graph = self.model.graph
        del graph.node[:]
        graph.node.extend(self.nodes)
        del graph.value_info[:]  # shapes around the new nodes are others; inference finds them again
