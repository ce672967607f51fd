"""A rewritten model gives the bits of the old one; what cannot be rewritten is reported and left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import helper, numpy_helper

from pagedattn import InvalidArgumentError, contract, gqa
from pagedattn.onnx import Session, migration_report, register_schema, rewrite_group_query_attention
from tests.onnx.graphs import ELEMENTS, F16, F32, HEADS, I32, model_of, raw_node
from tests.onnx.test_reference import cases
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits
from tests.support.padded import has_padded_form, padded

WIDTH = 12 * 64


def padded_node(inputs: Any, outputs: Any, name: str = "layer", **attributes: Any) -> Any:
    names = [row.name if row.name in inputs else "" for row in gqa.INPUTS]
    while not names[-1]:
        names.pop()
    return helper.make_node(gqa.NAME, names, list(outputs), name=name, domain=contract.DOMAIN, **attributes)


def model_of_padded(call: Any, outputs: Any, symbolic: bool = False) -> Any:
    """A model of one node for a padded call."""
    types = {
        name: (ELEMENTS[str(x.dtype)], [f"{name}_{axis}" for axis in range(x.ndim)] if symbolic else x.shape)
        for name, x in call.inputs.items()
    }
    element = {"present_key": types["past_key"][0], "present_value": types["past_key"][0]}
    declared = {name: (element.get(name, types["query"][0]), None) for name in outputs}
    return model_of([padded_node(call.inputs, outputs, **call.attributes)], types, declared)


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == contract.DOMAIN]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(cases().filter(has_padded_form))
def test_same_bits(case: Case):
    register_schema()
    outputs = gqa.OUTPUT_NAMES[: 4 if case.qk_output else 3]
    before, after = padded(build(case)), padded(build(case))
    model = model_of_padded(before, outputs, symbolic=case.seed % 2 == 1)
    rewritten, names, findings = rewrite_group_query_attention(model, block_size=32 if case.padding else 16)
    assert names == ["layer"]
    assert findings == []
    assert operators(model) == [gqa.NAME]
    assert operators(rewritten) == [contract.NAME]
    onnx.shape_inference.infer_shapes(rewritten)
    want = Session(model).run(None, before.inputs)
    got = Session(rewritten).run(None, after.inputs)
    for name, mine, right in zip(outputs, got, want, strict=True):
        assert_same_bits(mine, right, name)


def stack(attributes: dict[str, Any], layers: int = 2, past: Any = ("batch", 2, "past", 64), **more: Any) -> Any:
    """Packed queries through layers one after the other, each with a cache of its own."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((512, WIDTH)).astype(np.float32) / 20, f"w{i}")
        for i in range(layers)
    ]
    inputs: dict[str, Any] = {"x": (F32, ("batch", "length", WIDTH)), "seqlens_k": (I32, ("batch",))}
    inputs.update(total_sequence_length=(I32, ()), **more)
    outputs, nodes, x = {}, [], "x"
    for i in range(layers):
        inputs.update({f"past.{i}.{kind}": (F32, past) for kind in ("key", "value")})
        names = [x, "", "", f"past.{i}.key", f"past.{i}.value", "seqlens_k", "total_sequence_length"]
        names += [name if name in more else "" for name in [row.name for row in gqa.INPUTS][len(names) :]]
        while not names[-1]:
            names.pop()
        presents = [f"present.{i}.{kind}" for kind in ("key", "value")]
        nodes.append(
            helper.make_node(
                gqa.NAME, names, [f"y{i}", *presents], name=f"layer{i}", domain=contract.DOMAIN, **attributes
            )
        )
        nodes.append(helper.make_node("MatMul", [f"y{i}", f"w{i}"], [f"x{i}"]))
        x = f"x{i}"
        outputs.update(dict.fromkeys(presents, (F32, (*past[:2], "total", *past[3:]))))
    outputs[x] = (F32, ("batch", "length", WIDTH))
    return model_of(nodes, inputs, outputs, weights)


ATTRIBUTES = {**HEADS, "local_window_size": 5, "softcap": 3.0, "smooth_softmax": 1}


def steps(batch: int = 2) -> Any:
    """Feeds of a run in steps: a prompt, then tokens one by one, then two at once."""
    rng = np.random.default_rng(1)
    past = 0
    for length in (6, 1, 1, 2):
        past += length
        yield {
            "x": rng.standard_normal((batch, length, WIDTH)).astype(np.float32),
            "seqlens_k": np.full(batch, past - 1, np.int32),
            "total_sequence_length": np.array(past, np.int32),
        }


@pytest.mark.parametrize("dims", [{}, {"past": 24}], ids=["growing", "shared buffer"])
def test_a_stack_keeps_its_interface(dims: dict[str, int]):
    register_schema()
    model = stack(ATTRIBUTES)
    migration = rewrite_group_query_attention(model)
    assert migration.rewritten == ["layer0", "layer1"]
    onnx.checker.check_model(migration.model)
    inferred = onnx.shape_inference.infer_shapes(migration.model, strict_mode=True)
    assert [info.name for info in inferred.graph.input] == [info.name for info in model.graph.input]
    old, new = Session(model, dims), Session(migration.model, {"batch": 2, "past": 0, **dims})
    for feeds in steps():
        want = old.run(None, feeds)
        new_caches = {} if not new.caches else {name: new.caches[name] for name in old.caches}
        got = new.run(None, {**feeds, **(new_caches or empty_caches(dims))})
        for name, mine, right in zip(new.output_names, got, want, strict=True):
            assert_same_bits(mine, right, name)
        new.caches = {f"past.{i}.{kind}": got[2 * i + n] for i in range(2) for n, kind in enumerate(("key", "value"))}


def empty_caches(dims: dict[str, int]) -> dict[str, Any]:
    shape = (2, 2, dims.get("past", 0), 64)
    return {f"past.{i}.{kind}": np.zeros(shape, np.float32) for i in range(2) for kind in ("key", "value")}


def test_layers_share_the_layout_of_the_batch():
    two, three = (rewrite_group_query_attention(stack(ATTRIBUTES, layers)).model for layers in (2, 3))
    one = rewrite_group_query_attention(stack(ATTRIBUTES, 1)).model

    def count(model: Any) -> int:
        return sum(node.op_type == "CumSum" for node in model.graph.node)

    assert count(one) == count(two) == count(three) == 1


def test_paged_caches():
    """With pools as inputs, any block table will do, and caches are written in place."""
    register_schema()
    model = stack(ATTRIBUTES)
    migration = rewrite_group_query_attention(model, paged_caches=True)
    onnx.checker.check_model(migration.model)
    graph = migration.model.graph
    pools = {info.name: info.type.tensor_type.shape.dim for info in graph.input if info.name.startswith("past.")}
    assert {tuple(dim.dim_param or dim.dim_value for dim in dims) for dims in pools.values()} == {
        ("num_blocks", 16, 2, 64)
    }
    assert graph.input[-1].name == "block_table"
    old, new = Session(model), Session(migration.model, {"num_blocks": 7})
    assert set(new.input_names) == {"x", "seqlens_k", "total_sequence_length", "block_table"}
    table = np.array([[5, 2], [0, 6]], np.int32)
    for feeds in steps():
        (want,) = old.run(["x1"], feeds)
        kept = dict(new.caches)
        (got,) = new.run(["x1"], {**feeds, "block_table": table})
        assert_same_bits(got, want)
        assert all(new.caches[name] is kept[name] for name in kept)


def test_ragged_chunks():
    """query_seqlens packs real rows only, in the graph as in the function."""
    model = stack(ATTRIBUTES, past=("batch", 2, 24, 64), query_seqlens=(I32, ("batch",)))
    rewritten = rewrite_group_query_attention(model).model
    old, new = Session(model), Session(rewritten, {"batch": 3})
    total = np.zeros(3, np.int32)
    rng = np.random.default_rng(0)
    new.caches = {
        name: np.zeros((3, 2, 24, 64), np.float32)
        for name in (f"past.{i}.{k}" for i in (0, 1) for k in ("key", "value"))
    }
    for lengths in ([4, 1, 2], [1, 0, 3], [0, 2, 1], [1, 1, 1]):
        count = np.array(lengths, np.int32)
        total = total + count
        feeds = {
            "x": rng.standard_normal((3, max(lengths), WIDTH)).astype(np.float32),
            "seqlens_k": total - 1,
            "total_sequence_length": np.array(24, np.int32),
            "query_seqlens": count,
        }
        want = old.run(None, feeds)
        got = new.run(None, {**feeds, **new.caches})
        live = np.arange(max(lengths)) < count[:, None]
        for name, mine, right in zip(new.output_names, got, want, strict=True):
            same = (mine, right) if name.startswith("present") else (mine[live], right[live])
            assert_same_bits(*same, name)
        new.caches = {f"past.{i}.{kind}": got[2 * i + n] for i in range(2) for n, kind in enumerate(("key", "value"))}


def test_prompt_without_past_inputs():
    names = ["query", "", "", "", "", "seqlens_k", "total_sequence_length"]
    node = helper.make_node(gqa.NAME, names, ["output", "k", "v"], name="n", domain=contract.DOMAIN, **HEADS)
    types = {"query": (F16, (2, 3, WIDTH)), "seqlens_k": (I32, (2,)), "total_sequence_length": (I32, (1,))}
    model = model_of([node], types, dict.fromkeys(("output", "k", "v"), (F16, None)))
    feeds = {
        "query": np.random.default_rng(0).standard_normal((2, 3, WIDTH)).astype(np.float16),
        "seqlens_k": np.array([2, 1], np.int32),
        "total_sequence_length": np.array([3], np.int32),
    }
    rewritten = rewrite_group_query_attention(model).model
    for mine, right in zip(Session(rewritten).run(None, feeds), Session(model).run(None, feeds), strict=True):
        assert_same_bits(mine, right)


def test_scales_with_four_axes():
    case = Case(cache="int8", k_quant="PER_CHANNEL", v_quant="PER_TENSOR", lengths=((3, 2), (0, 4)))
    before, after = padded(build(case)), padded(build(case))
    for call in (before, after):
        call.inputs["k_scale"] = call.inputs["k_scale"][None]
    model = model_of_padded(before, gqa.OUTPUT_NAMES[:3])
    rewritten = rewrite_group_query_attention(model).model
    want, got = Session(model).run(None, before.inputs), Session(rewritten).run(None, after.inputs)
    for mine, right in zip(got, want, strict=True):
        assert_same_bits(mine, right)


def test_names_in_the_graph_are_kept_apart():
    model = stack(ATTRIBUTES, 1)
    model.graph.node[0].name = ""
    clash = helper.make_node("Identity", ["x"], ["y0/paged/Shape_1"])
    model.graph.node.append(clash)
    rewritten = rewrite_group_query_attention(model).model
    names = [name for node in rewritten.graph.node for name in node.output]
    assert len(names) == len(set(names))


# ---- what cannot be rewritten ------------------------------------------------------------------------------------

ANGLES = {
    "cos_cache": (F32, (64, 32)),
    "sin_cache": (F32, (64, 32)),
    "position_ids": (onnx.TensorProto.INT64, ("batch", "length")),
}
NORMS = {"q_norm_weight": (F32, (64,)), "k_norm_weight": (F32, (64,))}
BLOCKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "position_ids": ({**HEADS, "do_rotary": 1}, ANGLES),
    "sliding_window_cache": ({**HEADS, "sliding_window_cache": 1, "local_window_size": 4}, {}),
    "k_norm_epsilon": ({**HEADS, "k_norm_epsilon": 1e-3}, NORMS),
    "local_window_size": ({**HEADS, "local_window_size": 0}, {}),
    "node": ({**HEADS, "cached_since": 3}, {}),
}


@pytest.mark.parametrize("feature", BLOCKING)
def test_a_node_that_says_more_is_left_alone(feature: str):
    attributes, inputs = BLOCKING[feature]
    model = stack(attributes, **inputs)
    migration = rewrite_group_query_attention(model)
    assert migration.rewritten == []
    assert [finding.feature for finding in migration.findings] == [feature, feature]
    assert [finding.node for finding in migration.findings] == ["layer0", "layer1"]
    assert all(finding.blocks for finding in migration.findings)
    assert operators(migration.model) == [gqa.NAME] * 2
    assert migration_report(model) == migration.findings
    assert feature in str(migration.findings[0])
    assert "layer0" in str(migration.findings[0])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "output: required output"),
        (["", "k", "v"], "output: required output"),
        (["y", "k"], "present_value: required together with present_key"),
        (["y", "k", "v", "s"], "qk_output: expected 1 or 2 with the output output_qk"),
    ],
)
def test_output_lists_that_do_not_fit_are_reported(outputs: list[str], message: str):
    model = stack(HEADS, 1)
    node = model.graph.node[0]
    del node.output[:]
    node.output.extend(outputs)
    node.name = ""
    (finding,) = migration_report(model)
    assert message in finding.note
    assert finding.blocks
    assert finding.node == next(filter(None, outputs), gqa.NAME)
    assert rewrite_group_query_attention(model).rewritten == []


@pytest.mark.parametrize(
    ("attributes", "inputs", "message"),
    [
        (HEADS, {"cos_cache": (F32, (64, 32))}, "sin_cache: required together with cos_cache"),
        (HEADS, {"q_norm_weight": (F32, (64,))}, "k_norm_weight: required together with q_norm_weight"),
        (HEADS, {"k_scale": (F32, (1,))}, "k_scale: expected it absent with k_quant_type = NONE"),
        ({"num_heads": 8, "kv_num_heads": 3}, {}, "num_heads: expected a multiple of kv_num_heads = 3"),
        ({**HEADS, "do_rotary": 1}, {}, "cos_cache: required by do_rotary"),
        (HEADS, {"key": (F32, ("batch", "length", 128))}, "value: required in the SEPARATE layout"),
        (HEADS, {"past_value": None}, "past_value: required together with past_key"),
    ],
)
def test_a_malformed_node_is_reported_and_left_alone(attributes: Any, inputs: Any, message: str):
    """It does not keep the others from being rewritten."""
    model = stack(attributes, 1, **{name: entry for name, entry in inputs.items() if name not in ("key", "past_value")})
    node = model.graph.node[0]
    for name, entry in inputs.items():
        node.input[[row.name for row in gqa.INPUTS].index(name)] = name if entry else ""
    (finding,) = migration_report(model)
    assert message in finding.note
    assert finding.blocks
    assert rewrite_group_query_attention(model).rewritten == []
    model.graph.node.extend(stack(HEADS, 1).graph.node)
    model.graph.node[2].name = "good"
    assert rewrite_group_query_attention(model).rewritten == ["good"]


def test_block_table_gets_a_name_of_its_own():
    model = stack(ATTRIBUTES)
    model.graph.input.append(helper.make_tensor_value_info("block_table", I32, ("B", "M")))
    rewritten = rewrite_group_query_attention(model, paged_caches=True).model
    onnx.checker.check_model(rewritten)
    table = rewritten.graph.input[-1].name
    assert table != "block_table"
    assert [node.input[7] for node in rewritten.graph.node if node.op_type == contract.NAME] == [table, table]


def test_positions_can_be_dropped():
    attributes, inputs = BLOCKING["position_ids"]
    model = stack(attributes, **inputs)
    migration = rewrite_group_query_attention(model, assume_sequential_positions=True)
    assert migration.rewritten == ["layer0", "layer1"]
    assert not any(finding.blocks for finding in migration.findings)
    old, new = Session(model, {"past": 0}), Session(migration.model, {"past": 0})
    angle = np.arange(64)[:, None] / 100 ** (np.arange(32) / 32)
    tables = {"cos_cache": np.cos(angle).astype(np.float32), "sin_cache": np.sin(angle).astype(np.float32)}
    feeds = {**next(steps()), **tables, "position_ids": np.arange(6)[None].repeat(2, 0), **empty_caches({})}
    assert_same_bits(new.run(["x1"], feeds)[0], old.run(["x1"], feeds)[0])


def test_positions_that_do_not_turn_are_no_obstacle():
    _, inputs = BLOCKING["position_ids"]
    assert migration_report(stack(HEADS, position_ids=inputs["position_ids"])) == []


def test_nodes_in_a_subgraph_are_left_alone():
    model = stack(HEADS, 1)
    body = helper.make_graph(list(model.graph.node), "then", [], [helper.make_tensor_value_info("x0", F32, None)])
    node = helper.make_node("If", ["flag"], ["result"], then_branch=body, else_branch=body)
    inputs = {info.name: (info.type.tensor_type.elem_type, None) for info in model.graph.input}
    nested = model_of([node], {**inputs, "flag": (onnx.TensorProto.BOOL, ())}, {"result": (F32, None)})
    migration = rewrite_group_query_attention(nested)
    assert migration.rewritten == []
    assert {finding.note for finding in migration.findings} == {
        "it is inside a subgraph or a function, which are left alone"
    }


PAGED = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
)
ABSORBED = ("query", "key", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table")


@pytest.mark.parametrize(
    ("inputs", "attributes", "features"),
    [
        (PAGED, {}, {}),
        ((*PAGED, "slot_mapping", "attention_metadata"), {}, {"slot_mapping": True, "attention_metadata": False}),
        ((*PAGED, "query_positions"), {}, {"query_positions": True}),
        ((*PAGED, "cos_cache", "sin_cache"), {"do_rotary": 1, "rotary_offset": 8}, {"rotary_offset": True}),
        (PAGED, {"is_causal": 0, "local_window_size": 4}, {"is_causal": True, "local_window_size": True}),
        (ABSORBED, {"kv_cache_layout": "LATENT", "kv_num_heads": 1}, {"kv_cache_layout": True}),
        (PAGED, {"qk_rotation": "HADAMARD"}, {"node": True}),
    ],
)
def test_what_a_padded_node_cannot_say(inputs: Any, attributes: Any, features: dict[str, bool]):
    node = raw_node(inputs, ("output",), {**HEADS, **attributes})
    model = model_of([node], dict.fromkeys(inputs, (F16, None)))
    found = {finding.feature: finding.blocks for finding in migration_report(model)}
    if "node" not in features:
        assert found.pop("block_table") is False
    assert found == features


@pytest.mark.parametrize("block_size", [8, 24, 0])
def test_block_size(block_size: int):
    with pytest.raises(InvalidArgumentError, match="block_size: expected a power of two >= 16"):
        rewrite_group_query_attention(stack(HEADS), block_size=block_size)


def test_old_opsets():
    model = stack(HEADS)
    model.opset_import[0].version = 14
    with pytest.raises(InvalidArgumentError, match="model: expected a default opset >= 15, got 14"):
        rewrite_group_query_attention(model)


def test_paged_caches_have_to_be_graph_inputs():
    model = stack(HEADS, 1)
    model.graph.node.insert(0, helper.make_node("Identity", ["past.0.key"], ["copy"]))
    model.graph.node[1].input[3] = "copy"
    with pytest.raises(InvalidArgumentError, match="past_key of layer0: expected a graph input"):
        rewrite_group_query_attention(model, paged_caches=True)
