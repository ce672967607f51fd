"""Type and shape inference: the rules of the operator's shape inference one by one, then what is malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import pagedattn.onnx as face
from pagedattn import InvalidArgumentError, contract
from tests.onnx.graphs import (
    CACHES_OUT,
    F16,
    F32,
    HEADS,
    I8,
    I32,
    LATENT,
    LATENT_ATTRIBUTES,
    PACKED,
    SEPARATE,
    model_of,
    one_node,
    raw_node,
)

FOUR = (*CACHES_OUT, "output_qk")


pytestmark = pytest.mark.usefixtures("_registered")


def infer(model: Any, strict: bool = True) -> dict[str, tuple[int, tuple[int | str | None, ...] | None]]:
    """Element type and shape of every value after inference; a dimension is a number, a symbol or None."""
    graph = onnx.shape_inference.infer_shapes(model, check_type=strict, strict_mode=strict).graph
    found = {}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        tensor = info.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else symbol(dim) for dim in tensor.shape.dim)
        found[info.name] = tensor.elem_type, dims if tensor.HasField("shape") else None
    return found


def symbol(dim: Any) -> str | None:
    """A dimension's symbol; onnx calls unknown ones unk__0 and so on."""
    return None if dim.dim_param.startswith("unk__") else dim.dim_param or None


def without(inputs: dict[str, Any], *names: str, **changed: Any) -> dict[str, Any]:
    return {**{name: entry for name, entry in inputs.items() if name not in names}, **changed}


# ---- output 0 ----------------------------------------------------------------------------------------------------


def test_separate_output_has_the_type_and_shape_of_query():
    assert infer(one_node())["output"] == (F16, ("N", 512))


def test_separate_output_keeps_a_symbolic_width():
    """head_size is not derived, which a symbolic hidden dimension would not allow."""
    inputs = without(SEPARATE, query=(F16, ("tokens", "hidden")), key=(F16, ("tokens", "kv_hidden")))
    assert infer(one_node(inputs))["output"] == (F16, ("tokens", "hidden"))


def test_separate_output_keeps_unknown_dimensions_unknown():
    inputs = without(SEPARATE, query=(F16, (None, None)))
    assert infer(one_node(inputs))["output"] == (F16, (None, None))


def test_packed_width_is_computed():
    assert infer(one_node(PACKED))["output"] == (F16, ("N", 8 * 64))


def test_packed_width_stays_unknown_when_query_is_symbolic():
    """It is another width than that of query, so that symbol would be wrong."""
    inputs = without(PACKED, query=(F16, ("N", "packed_width")))
    assert infer(one_node(inputs))["output"] == (F16, ("N", None))


def test_latent_width_is_num_heads_times_v_head_size():
    assert infer(one_node(LATENT, attributes=LATENT_ATTRIBUTES))["output"] == (F16, ("N", 8 * 512))


def test_latent_width_is_known_for_a_symbolic_query():
    inputs = without(LATENT, query=(F16, ("N", "absorbed")))
    assert infer(one_node(inputs, attributes=LATENT_ATTRIBUTES))["output"] == (F16, ("N", 8 * 512))


@pytest.mark.parametrize("width", [8 * 576, "absorbed"])
def test_latent_without_v_head_size_keeps_the_shape_of_query(width: int | str):
    inputs = without(LATENT, query=(F16, ("N", width)))
    attributes = without(LATENT_ATTRIBUTES, "v_head_size")
    assert infer(one_node(inputs, attributes=attributes))["output"] == (F16, ("N", width))


def test_layout_is_read_before_presence():
    """value is absent in LATENT too, but its query is not packed: 8 heads of 576, not 10 of 460.8."""
    attributes = without(LATENT_ATTRIBUTES, v_head_size=576)
    assert infer(one_node(LATENT, attributes=attributes))["output"] == (F16, ("N", 8 * 576))


def test_query_of_unknown_rank_gives_a_type_only():
    inputs = without(SEPARATE, query=(F16, None))
    assert infer(one_node(inputs))["output"] == (F16, None)


def test_query_without_a_type_infers_nothing():
    node = raw_node(list(SEPARATE))
    source = helper.make_node("Unknown", ["x"], ["query"], domain="other")
    model = model_of([source, node], without(SEPARATE, "query", x=(F16, (1,))))
    model.opset_import.append(helper.make_opsetid("other", 1))
    assert "output" not in infer(model, strict=False)


@pytest.mark.parametrize("element", [TensorProto.BFLOAT16, F32])
def test_output_type_is_that_of_query(element: int):
    inputs = {name: (element if entry[0] == F16 else entry[0], entry[1]) for name, entry in SEPARATE.items()}
    assert infer(one_node(inputs))["output"][0] == element


# ---- outputs 1 and 2 ---------------------------------------------------------------------------------------------

INT8_CACHES = without(
    SEPARATE,
    key_cache=(I8, ("blocks", 32, 2, 64)),
    value_cache=(I8, ("blocks", 32, 2, 64)),
    k_scale=(F32, (1,)),
    v_scale=(F32, (2, 1, 64)),
)
INT8_ATTRIBUTES = {**HEADS, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL"}


def test_cache_outputs_have_the_type_and_shape_of_the_caches():
    found = infer(one_node(INT8_CACHES, CACHES_OUT, INT8_ATTRIBUTES))
    assert found["output"] == (F16, ("N", 512))
    assert found["key_cache_out"] == found["key_cache"] == (I8, ("blocks", 32, 2, 64))
    assert found["value_cache_out"] == found["value_cache"]


def test_quantized_cache_types_agree_with_declared_outputs():
    """A first guess from the type of query would clash with these declarations."""
    declared = {"key_cache_out": (I8, ("blocks", 32, 2, 64)), "value_cache_out": (I8, ("blocks", 32, 2, 64))}
    assert infer(one_node(INT8_CACHES, CACHES_OUT, INT8_ATTRIBUTES, **declared))["key_cache_out"][0] == I8


@pytest.mark.parametrize(
    ("element", "width", "name"), [(TensorProto.FLOAT8E4M3FN, 64, ""), (TensorProto.UINT8, 32, "int4")]
)
def test_other_quantized_caches(element: int, width: int, name: str):
    cache = (element, ("blocks", 32, 2, width))
    attributes = {**INT8_ATTRIBUTES, "k_cache_dtype": name, "v_cache_dtype": name}
    found = infer(one_node(without(INT8_CACHES, key_cache=cache, value_cache=cache), CACHES_OUT, attributes))
    assert found["key_cache_out"] == cache


def test_latent_has_one_cache_output():
    found = infer(one_node(LATENT, ("output", "key_cache_out"), LATENT_ATTRIBUTES))
    assert found["key_cache_out"] == found["key_cache"]


def test_cache_of_unknown_rank_gives_a_type_only():
    caches = {"key_cache": (F16, None), "value_cache": (F16, None)}
    found = infer(one_node(without(SEPARATE, **caches), CACHES_OUT))
    assert found["key_cache_out"] == (F16, None)


def test_caches_may_be_left_out_of_the_outputs():
    assert set(infer(one_node(outputs=("output",)))) == {*SEPARATE, "output"}


# ---- the fourth output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [FOUR, ("output", "", "", "output_qk")], ids=["all", "empty-names"])
@pytest.mark.parametrize("qk_output", [1, 2])
def test_output_qk_of_a_four_entry_list(outputs: tuple[str, ...], qk_output: int):
    found = infer(one_node(outputs=outputs, attributes={**HEADS, "qk_output": qk_output}))
    assert found["output_qk"] == (F32, (8, "N", None))
    assert set(found) == {*SEPARATE, *filter(None, outputs)}


@pytest.mark.parametrize("key_out", ["key_cache_out", ""])
def test_output_qk_in_latent(key_out: str):
    outputs = ("output", key_out, "", "output_qk")
    found = infer(one_node(LATENT, outputs, {**LATENT_ATTRIBUTES, "qk_output": 1}))
    assert found["output_qk"] == (F32, (8, "N", None))
    assert ("key_cache_out" in found) == bool(key_out)


@pytest.mark.parametrize(("bound", "width"), [(40, 40), (1000, 3 * 16), (0, None)])
def test_output_qk_width_from_constant_metadata(bound: int, width: int | None):
    inputs = without(SEPARATE, block_table=(I32, ("B", 3)))
    node = raw_node([*inputs, "attention_metadata"], ("output", "", "", "output_qk"), {**HEADS, "qk_output": 1})
    metadata = numpy_helper.from_array(np.array([0, bound], np.int32), "attention_metadata")
    assert infer(model_of([node], inputs, initializers=[metadata]))["output_qk"] == (F32, (8, "N", width))


def test_declared_type_of_output_qk_is_kept():
    model = one_node(outputs=FOUR, attributes={**HEADS, "qk_output": 1}, output_qk=(F16, (8, "N", "context")))
    assert infer(model, strict=False)["output_qk"] == (F16, (8, "N", "context"))


# ---- every input -------------------------------------------------------------------------------------------------

OPTIONAL = {
    "cos_cache": (F16, ("positions", 16)),
    "sin_cache": (F16, ("positions", 16)),
    "slot_mapping": (I32, ("N",)),
    "head_sink": (F16, (8,)),
    "q_norm_weight": (F16, (64,)),
    "k_norm_weight": (F16, (64,)),
    "attention_metadata": (I32, (3,)),
    "query_positions": (I32, ("N",)),
    "attention_bias": (F16, (1, 8, "q", "k")),
}


def test_all_inputs_at_once():
    inputs = {**INT8_CACHES, **OPTIONAL}
    assert set(inputs) == set(contract.INPUT_BY_NAME)
    model = one_node(inputs, CACHES_OUT, {**INT8_ATTRIBUTES, "do_rotary": 1, "rotary_offset": 32})
    assert infer(model)["output"] == (F16, ("N", 512))
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("name", OPTIONAL)
def test_inputs_of_unknown_shape_are_no_obstacle(name: str):
    pairs = {"cos_cache": "sin_cache", "sin_cache": "cos_cache", "q_norm_weight": "k_norm_weight"}
    names = {name, pairs.get(name, name), "q_norm_weight" if name == "k_norm_weight" else name}
    inputs = {**SEPARATE, **{each: (OPTIONAL[each][0], None) for each in names}}
    assert infer(one_node(inputs))["output"] == (F16, ("N", 512))


def test_inference_reaches_later_nodes():
    more = helper.make_node("Identity", ["output"], ["after"])
    assert infer(model_of([raw_node(list(SEPARATE)), more], SEPARATE))["after"] == (F16, ("N", 512))


# ---- malformed nodes ---------------------------------------------------------------------------------------------

MALFORMED: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any], str]] = {
    "key without value": (without(SEPARATE, "value"), ("output",), HEADS, "value: required in the SEPARATE"),
    "no value cache": (without(SEPARATE, "value_cache"), ("output",), HEADS, "value_cache: required in"),
    "value in LATENT": (
        without(LATENT, value=(F16, ("N", 576))),
        ("output",),
        LATENT_ATTRIBUTES,
        "value: not allowed in the LATENT layout",
    ),
    "unknown layout": (SEPARATE, ("output",), {**HEADS, "kv_cache_layout": "FUSED"}, "kv_cache_layout: expected one"),
    "heads": (SEPARATE, ("output",), {"num_heads": 8, "kv_num_heads": 3}, "num_heads: expected a multiple"),
    "no heads": (SEPARATE, ("output",), {"num_heads": 0, "kv_num_heads": 2}, "num_heads: expected a value >= 1"),
    "query rank": (without(SEPARATE, query=(F16, ("N",))), ("output",), HEADS, "query: expected rank 2"),
    "query rank 3": (without(SEPARATE, query=(F16, (1, "N", 512))), ("output",), HEADS, "query: expected rank 2"),
    "separate width": (without(SEPARATE, query=(F16, ("N", 513))), ("output",), HEADS, "query: expected a width"),
    "packed width": (without(PACKED, query=(F16, ("N", 512))), ("output",), HEADS, "query: expected a width"),
    "head_size": (without(SEPARATE, query=(F16, ("N", 80))), ("output",), HEADS, "query: expected a head_size"),
    "key width": (without(SEPARATE, key=(F16, ("N", 64))), ("output",), HEADS, "key: expected dimension 1"),
    "key width, symbolic query": (
        without(SEPARATE, query=(F16, ("N", None)), key=(F16, ("N", 64))),
        ("output",),
        HEADS,
        "expected dimension 1 to be kv_width = 64|expected dimension 3 to be cache_width = 32",
    ),
    "rows": (
        without(SEPARATE, query=(F16, (4, 512)), key=(F16, (5, 128))),
        ("output",),
        HEADS,
        "key: expected dimension 0 to be token_count = 4",
    ),
    "block_size": (
        without(SEPARATE, key_cache=(F16, (9, 24, 2, 64)), value_cache=(F16, (9, 24, 2, 64))),
        ("output",),
        HEADS,
        "block_size",
    ),
    "cache shapes": (
        without(SEPARATE, value_cache=(F16, ("blocks", 32, 2, 64))),
        ("output",),
        HEADS,
        "value_cache: expected dimension 1",
    ),
    "cache type": (
        without(SEPARATE, key_cache=(I8, ("blocks", 16, 2, 64)), value_cache=(I8, ("blocks", 16, 2, 64))),
        ("output",),
        HEADS,
        "k_quant_type: expected PER_TENSOR or PER_CHANNEL",
    ),
    "scale type": (
        without(INT8_CACHES, k_scale=(F16, (1,))),
        ("output",),
        INT8_ATTRIBUTES,
        "k_scale: expected element",
    ),
    "scale shape": (
        without(INT8_CACHES, v_scale=(F32, (2, 64))),
        ("output",),
        INT8_ATTRIBUTES,
        "v_scale: expected rank",
    ),
    "table rank": (without(SEPARATE, block_table=(I32, ("B",))), ("output",), HEADS, "block_table: expected rank 2"),
    "batch": (
        without(SEPARATE, past_seqlens=(I32, (4,)), block_table=(I32, (3, 9))),
        ("output",),
        HEADS,
        "block_table: expected dimension 0",
    ),
    "half a rotation": (
        without(SEPARATE, cos_cache=(F16, (64, 32))),
        ("output",),
        HEADS,
        "sin_cache: required together with cos_cache",
    ),
    "rotation without angles": (SEPARATE, ("output",), {**HEADS, "do_rotary": 1}, "cos_cache: required by do_rotary"),
    "scales per token": (
        without(SEPARATE, query_positions=(F16, ("blocks", 16, 2))),
        ("output",),
        HEADS,
        "query_positions: expected element type int32, got float16",
    ),
    "rotated cache": (SEPARATE, ("output",), {**HEADS, "qk_rotation": "HADAMARD"}, "qk_rotation: .* inputs 17 and 18"),
    "another operator's attribute": (SEPARATE, ("output",), {**HEADS, "causal": 1}, "causal: .* is_causal"),
    "one cache output": (SEPARATE, ("output", "key_cache_out"), HEADS, "value_cache_out: required together"),
    "the other cache output": (SEPARATE, ("output", "", "value_cache_out"), HEADS, "key_cache_out: required together"),
    "value cache out of LATENT": (LATENT, CACHES_OUT, LATENT_ATTRIBUTES, "value_cache_out: expected an empty name"),
    "no output": (SEPARATE, ("", "key_cache_out", "value_cache_out"), HEADS, "output: required output"),
    "qk_output without output": (SEPARATE, CACHES_OUT, {**HEADS, "qk_output": 1}, "qk_output: expected output_qk"),
    "output without qk_output": (SEPARATE, FOUR, HEADS, "qk_output: expected 1 or 2 with the output"),
    "no scale in LATENT": (
        LATENT,
        ("output",),
        without(LATENT_ATTRIBUTES, "scale"),
        "scale: required when v_head_size",
    ),
    "wide v_head_size": (LATENT, ("output",), {**LATENT_ATTRIBUTES, "v_head_size": 600}, "v_head_size: expected"),
    "double": (without(SEPARATE, query=(TensorProto.DOUBLE, ("N", 512))), ("output",), HEADS, "query: .* got float64"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_node_is_an_inference_error(case: str, strict: bool):
    inputs, outputs, attributes, message = MALFORMED[case]
    with pytest.raises(face.NodeInferenceError, match=message) as caught:
        infer(one_node(inputs, outputs, attributes), strict)
    assert isinstance(caught.value, onnx.shape_inference.InferenceError)
    assert "attention" in str(caught.value)  # the node's name


def test_error_is_of_the_library_too():
    with pytest.raises(InvalidArgumentError):
        infer(one_node(without(SEPARATE, "value")))


def test_absent_required_input_is_an_inference_error():
    node = helper.make_node(contract.NAME, ["query", "", "", "key_cache"], ["output"], domain=contract.DOMAIN, **HEADS)
    with pytest.raises(face.NodeInferenceError, match="cumulative_sequence_length: required input"):
        infer(model_of([node], SEPARATE))


def test_too_many_inputs():
    node = raw_node([*SEPARATE, "attention_bias"])
    node.input.append("query")
    with pytest.raises(face.NodeInferenceError, match="inputs: expected at most 19, got 20"):
        infer(model_of([node], {**SEPARATE, "attention_bias": OPTIONAL["attention_bias"]}))


# ---- checker -----------------------------------------------------------------------------------------------------


def test_checker_passes_a_good_model():
    onnx.checker.check_model(one_node(outputs=CACHES_OUT), full_check=True)


def test_checker_refuses_unknown_attributes_by_name():
    with pytest.raises(onnx.checker.ValidationError, match="v_rotation"):
        onnx.checker.check_model(one_node(attributes={**HEADS, "v_rotation": "HADAMARD"}))


def test_checker_counts_inputs_and_outputs():
    node = raw_node([*SEPARATE, "attention_bias"])
    node.input.append("query")
    with pytest.raises(onnx.checker.ValidationError, match="input size 20"):
        onnx.checker.check_model(model_of([node], {**SEPARATE, "attention_bias": OPTIONAL["attention_bias"]}))


def test_checker_types_the_inputs():
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(one_node(without(SEPARATE, past_seqlens=(TensorProto.INT64, ("B",)))), full_check=True)


def test_checker_still_passes_other_operators_of_the_domain():
    other = helper.make_node("FastGelu", ["output"], ["after"], domain=contract.DOMAIN)
    onnx.checker.check_model(model_of([raw_node(list(SEPARATE)), other], SEPARATE))


def test_registration_can_be_repeated_and_undone():
    face.register_schema()
    assert onnx.defs.has(contract.NAME, contract.DOMAIN)
    face.deregister_schema()
    face.deregister_schema()
    assert not onnx.defs.has(contract.NAME, contract.DOMAIN)
    onnx.checker.check_model(one_node(attributes={**HEADS, "qk_rotation": "HADAMARD"}))  # nobody knows better


def test_schema_says_what_the_contract_says():
    schema = onnx.defs.get_schema(contract.NAME, contract.OPSET, contract.DOMAIN)
    kinds = onnx.defs.OpSchema.FormalParameterOption
    assert [(x.name, x.type_str, x.option == kinds.Optional) for x in schema.inputs] == [
        (row.name, row.type, row.optional) for row in contract.INPUTS
    ]
    assert [x.name for x in schema.outputs] == ["output", "key_cache_out", "value_cache_out", "output_qk"]
    defaults = {
        name: None if attribute.required else helper.get_attribute_value(attribute.default_value)
        for name, attribute in schema.attributes.items()
    }
    assert {name: value.decode() if isinstance(value, bytes) else value for name, value in defaults.items()} == {
        row.name: pytest.approx(row.default) if isinstance(row.default, float) else row.default
        for row in contract.ATTRIBUTES
    }
