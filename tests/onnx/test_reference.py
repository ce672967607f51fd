"""Nodes run by `onnx.reference.ReferenceEvaluator` against direct calls, for models from hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from pagedattn import InvalidArgumentError, contract, gqa, group_query_attention, paged_attention
from pagedattn.onnx import reference_ops, register_schema
from tests.onnx.graphs import CACHES_OUT, ELEMENTS, F16, F32, model_of, model_of_call, raw_node
from tests.support.build import TYPES, Built, build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits
from tests.support.padded import has_padded_form, padded


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call that the contract allows, small."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    latent = draw(st.booleans()) and draw(st.booleans())
    cache = one_of("", "", "int8", "float8e4m3fn", "int4")
    kinds = ("PER_TENSOR", "PER_CHANNEL") if cache else ("NONE",)
    rope = one_of("none", "none", "full", "partial", "offset")
    fields = {
        "io": one_of("float16", "bfloat16", "float32"),
        "cache": cache,
        "k_quant": one_of(*kinds),
        "v_quant": "NONE" if latent else one_of(*kinds),
        "head_size": one_of(16, 24, 32),
        "mode": "latent" if latent else one_of("separate", "packed"),
        "kv_num_heads": 1 if latent else one_of(1, 2),
        "group_size": one_of(1, 3),
        "lengths": tuple(draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=4))),
        "padding": one_of(0, 0, 2),
        "qk_norm": not latent and draw(st.booleans()),
        "rope": rope,
        "interleaved": draw(st.booleans()),
        "window": one_of(-1, 1, 5),
        "softcap": one_of(0.0, 2.0),
        "sink": not latent and draw(st.booleans()),
        "bias": one_of("", "", "BH", "1H", "B1", "11"),
        "positions": one_of("", "", "own", "tree"),
        "slots": one_of("", "", "explicit", "holes"),
        "unmapped": one_of(False, False, True),
        "is_causal": one_of(True, True, False),
        "qk_output": one_of(0, 0, 1, 2),
        "scale": 0.25,
        "v_head_size": one_of(0, 8) if latent else 0,
        "lse": False,
        "metadata": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
    return Case(**fields)


def listed(built: Built, drop_caches: bool) -> tuple[str, ...]:
    """Outputs of a node: those there are, with empty names in between where they are dropped."""
    latent = built.case.is_latent
    names = ["output", "" if drop_caches else "key_cache_out", "" if drop_caches or latent else "value_cache_out"]
    if built.case.qk_output:
        names.append("output_qk")
    while not names[-1]:
        names.pop()
    return tuple(names)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.booleans(), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_a_node_equals_a_call(case: Case, drop_caches: bool, qk_dtype: str):
    register_schema()
    built, called = build(case), build(case)
    outputs = listed(built, drop_caches)
    declared = {"output_qk": ELEMENTS[str(TYPES[qk_dtype])]} if case.qk_output else {}
    model = model_of_call(built.inputs, built.attributes, outputs, **declared)
    onnx.shape_inference.infer_shapes(model)
    feeds = built.inputs
    results = dict(
        zip(
            filter(None, outputs), ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, feeds), strict=True
        )
    )
    called.options.update(qk_dtype=qk_dtype)
    want = called.run(paged_attention)
    for name, got in results.items():
        assert_same_bits(got, getattr(want, name), name)
    for name in ("key_cache", "value_cache"):
        if name in feeds:
            assert_same_bits(feeds[name], called[name], name)
            if not drop_caches:
                assert results[f"{name}_out"] is feeds[name]
    assert built.surroundings() == called.surroundings()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(cases().filter(has_padded_form))
def test_a_padded_node_equals_a_call(case: Case):
    call, other = padded(build(case)), padded(build(case))
    names = [row.name if row.name in call.inputs else "" for row in gqa.INPUTS]
    outputs = list(gqa.OUTPUT_NAMES[: 4 if case.qk_output else 3])
    node = helper.make_node(gqa.NAME, names, outputs, domain=contract.DOMAIN, **call.attributes)
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in call.inputs.items()}
    model = model_of([node], types, dict.fromkeys(outputs, (types["query"][0], None)))
    results = ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, call.inputs)
    want = group_query_attention(**other.inputs, **other.attributes)
    assert results[1] is call.inputs["past_key"]
    for got, right in zip(results, want, strict=False):
        assert_same_bits(got, right)


# ---- what an evaluator does around a node ------------------------------------------------------------------------

SMALL = Case(io="float16", lengths=((5, 2), (0, 3)))


class LeavesAnEmptyName(OpRun):
    """An operator that returns something for an output that nobody asked for."""

    op_domain = "test"

    def _run(self, x: Any) -> tuple[Any, ...]:
        return x, np.full((3, 3), np.nan, np.float32), x


def test_absent_inputs_stay_absent_after_other_nodes():
    """The evaluator keeps results by name, the empty name among them."""
    built, plain = build(SMALL), build(SMALL)
    packed = np.concatenate([built[name] for name in ("query", "key", "value")], axis=1)
    inputs = {name: x for name, x in built.inputs.items() if name not in ("key", "value")} | {"query": packed}
    before = helper.make_node("LeavesAnEmptyName", ["x"], ["a", "", "b"], domain="test")
    node = raw_node(list(inputs), CACHES_OUT, built.attributes)
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in inputs.items()}
    model = model_of([before, node], {**types, "x": (F32, (2,))}, {"output": (F16, None), "a": (F32, None)})
    model.opset_import.append(helper.make_opsetid("test", 1))
    ops = [LeavesAnEmptyName, *reference_ops(model)]
    output, _ = ReferenceEvaluator(model, new_ops=ops).run(None, {**inputs, "x": np.zeros(2, np.float32)})
    assert_same_bits(output, plain.run(paged_attention).output)


def test_absent_outputs_leave_nothing_behind():
    """A later node with an absent input must not get this node's results for it."""
    built = build(SMALL)
    outputs = ("output", "", "", "output_qk")
    attributes = {**built.attributes, "qk_output": 1}
    node = raw_node(list(built.inputs), outputs, attributes)
    clip = helper.make_node("Clip", ["output_qk", "", "most"], ["clipped"])
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in built.inputs.items()}
    most = numpy_helper.from_array(np.float32(0.5), "most")
    model = model_of([node, clip], types, {"output_qk": (F32, None), "clipped": (F32, None)}, [most])
    scores, clipped = ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, dict(built.inputs))
    assert scores.min() < 0
    assert_same_bits(clipped, np.minimum(scores, np.float32(0.5)))


def test_inference_lets_the_evaluator_alone():
    """Registering the schema does not change how a model runs."""
    register_schema()
    built, plain = build(SMALL), build(SMALL)
    model = model_of_call(built.inputs, built.attributes)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model))
    output, *_ = ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, dict(built.inputs))
    assert_same_bits(output, plain.run(paged_attention).output)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"qk_rotation": "HADAMARD"}, "qk_rotation: .* an unknown name.* inputs 17 and 18"),
        ({"v_rotation": "HADAMARD"}, "v_rotation: .* an unknown name.* inputs 17 and 18"),
        ({"causal": 1}, "causal: expected an attribute of PagedAttention among .* is_causal here"),
        ({"kv_num_heads": None}, "kv_num_heads: required attribute, got none"),
    ],
)
def test_unknown_and_missing_attributes_are_refused_when_loaded(attributes: dict[str, Any], message: str):
    built = build(SMALL)
    chosen = {name: x for name, x in {**built.attributes, **attributes}.items() if x is not None}
    model = model_of_call(built.inputs, chosen)
    with pytest.raises(InvalidArgumentError, match=message):
        ReferenceEvaluator(model, new_ops=reference_ops(model))


@pytest.mark.parametrize(
    ("outputs", "qk_output", "message"),
    [
        ((*CACHES_OUT, "output_qk"), 0, "qk_output: expected 1 or 2 with the output output_qk, got 0"),
        (CACHES_OUT, 1, "qk_output: expected output_qk as the fourth output, got 1"),
        (("output", "key_cache_out"), 0, "value_cache_out: required together with key_cache_out"),
        (("", *CACHES_OUT[1:]), 0, "output: required output"),
    ],
)
@pytest.mark.parametrize("operator", [contract.NAME, gqa.NAME])
def test_output_lists_that_do_not_fit_are_refused(
    operator: str, outputs: tuple[str, ...], qk_output: int, message: str
):
    built = build(SMALL)
    if operator == contract.NAME:
        feeds, model = built.inputs, model_of_call(built.inputs, {**built.attributes, "qk_output": qk_output}, outputs)
    else:
        call = padded(built)
        feeds, attributes = call.inputs, {**call.attributes, "qk_output": qk_output}
        ours = dict(zip(CACHES_OUT, gqa.OUTPUT_NAMES[:3], strict=True))
        for name, own in ours.items():
            message = message.replace(name, own)
        names = [row.name if row.name in feeds else "" for row in gqa.INPUTS]
        listed_names = [ours.get(name, name) for name in outputs]
        node = helper.make_node(gqa.NAME, names, listed_names, domain=contract.DOMAIN, **attributes)
        types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in feeds.items()}
        model = model_of([node], types, {name: (F16, None) for name in listed_names if name})
    before = {name: x.copy() for name, x in feeds.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, dict(feeds))
    for name, x in before.items():
        assert_same_bits(feeds[name], x, name)


def test_scales_per_token_are_refused_by_type():
    """What another builder writes at input 17."""
    built = build(SMALL)
    inputs = {**built.inputs, "query_positions": np.ones((9, 16, 2), np.float16)}
    model = model_of_call(inputs, built.attributes)
    with pytest.raises(InvalidArgumentError, match="query_positions: expected element type int32, got float16"):
        ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, inputs)


def test_errors_of_a_call_come_out_as_they_are():
    built = build(SMALL)
    model = model_of_call(built.inputs, built.attributes)
    feeds = {**built.inputs, "past_seqlens": np.zeros(7, np.int32)}
    with pytest.raises(InvalidArgumentError, match="past_seqlens: expected dimension 0"):
        ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, feeds)


def test_a_cache_that_cannot_be_written_is_refused():
    built = build(SMALL)
    feeds = dict(built.inputs)
    feeds["key_cache"].flags.writeable = False
    model = model_of_call(feeds, built.attributes)
    with pytest.raises(InvalidArgumentError, match="key_cache: expected a writeable array"):
        ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, feeds)


def test_backend_can_be_forced():
    built = build(SMALL)
    model = model_of_call(built.inputs, built.attributes)
    with pytest.raises(InvalidArgumentError, match="backend: expected one of"):
        ReferenceEvaluator(model, new_ops=reference_ops(model, backend="fastest")).run(None, dict(built.inputs))
    assert ReferenceEvaluator(model, new_ops=reference_ops(model, backend="numpy")).run(None, dict(built.inputs))


def test_read_only_past_of_a_padded_node_is_copied():
    call = padded(build(SMALL))
    for name in ("past_key", "past_value"):
        call.inputs[name].flags.writeable = False
    names = [row.name if row.name in call.inputs else "" for row in gqa.INPUTS]
    node = helper.make_node(gqa.NAME, names, list(gqa.OUTPUT_NAMES[:3]), domain=contract.DOMAIN, **call.attributes)
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in call.inputs.items()}
    model = model_of([node], types, dict.fromkeys(gqa.OUTPUT_NAMES[:3], (F16, None)))
    results = ReferenceEvaluator(model, new_ops=reference_ops(model)).run(None, call.inputs)
    want = group_query_attention(**padded(build(SMALL)).inputs, **call.attributes)
    assert_same_bits(results[0], want.output)
    assert_same_bits(results[1], want.present_key)
