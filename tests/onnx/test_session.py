"""A session keeps caches: a sequence run in steps equals one run at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun

from pagedattn import InvalidArgumentError, MissingDependencyError, contract, gqa, paged_attention
from pagedattn.jit import cuda
from pagedattn.onnx import Session
from pagedattn.onnx.session import caches_of
from tests.onnx.graphs import CACHES_OUT, ELEMENTS, F16, F32, HEADS, I8, I32, PACKED, model_of, raw_node
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits

WIDTH = 12 * 64
ONE = {"query": (F16, ("N", WIDTH))}


def paged_model(**changes: Any) -> onnx.ModelProto:
    """Packed queries through one node, whose caches are graph inputs with a symbolic number of blocks."""
    inputs = {**PACKED, **ONE, **changes}
    outputs = {name: (F16 if name == "output" else inputs["key_cache"][0], None) for name in CACHES_OUT}
    return model_of([raw_node(list(inputs), CACHES_OUT)], inputs, outputs)


def lengths(past: list[int], new: list[int]) -> dict[str, Any]:
    batch = len(past)
    return {
        "cumulative_sequence_length": np.cumsum([0, *new]).astype(np.int32),
        "past_seqlens": np.array(past, np.int32),
        "block_table": np.arange(2 * batch, dtype=np.int32)[::-1].reshape(batch, 2).copy(),
    }


def queries(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float16)


def test_steps_equal_one_run():
    rows = queries(9)
    whole, stepped = Session(paged_model(), {"blocks": 4}), Session(paged_model(), {"blocks": 4})
    (want,) = whole.run(["output"], {"query": rows, **lengths([0], [9])})
    got = [
        stepped.run(["output"], {"query": rows[start:stop], **lengths([start], [stop - start])})[0]
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9))
    ]
    assert_same_bits(np.concatenate(got), want)
    for name in ("key_cache", "value_cache"):
        assert_same_bits(stepped.caches[name], whole.caches[name])


def test_names_and_caches():
    session = Session(paged_model(), {"blocks": 4})
    assert session.input_names == ["query", "cumulative_sequence_length", "past_seqlens", "block_table"]
    assert session.output_names == list(CACHES_OUT)
    assert session.caches == {}
    output, key_cache, value_cache = session.run(None, {"query": queries(2), **lengths([0], [2])})
    assert output.shape == (2, 512)
    assert session.caches["key_cache"] is key_cache
    assert session.caches["value_cache"] is value_cache
    assert key_cache.shape == (4, 16, 2, 64)
    assert key_cache.any()
    session.reset()
    assert session.caches == {}


def test_a_fed_cache_is_used_in_place_and_kept():
    session = Session(paged_model())
    caches = {name: np.zeros((8, 16, 2, 64), np.float16) for name in ("key_cache", "value_cache")}
    session.run(["output"], {"query": queries(3), **lengths([0], [3]), **caches})
    assert session.caches["key_cache"] is caches["key_cache"]
    assert caches["key_cache"].any()
    written = caches["key_cache"].copy()
    session.run(["output"], {"query": queries(1), **lengths([3], [1])})
    assert not np.array_equal(written, caches["key_cache"])


def test_caches_that_the_model_does_not_return():
    inputs = {**PACKED, **ONE}
    model = model_of([raw_node(list(inputs))], inputs, {"output": (F16, None)})
    session = Session(model, {"blocks": 4})
    session.run(None, {"query": queries(3), **lengths([0], [3])})
    (got,) = session.run(None, {"query": queries(1, 1), **lengths([3], [1])})
    (want, *_) = run_direct([queries(3), queries(1, 1)])
    assert_same_bits(got, want)


def run_direct(steps: list[Any]) -> Any:
    key_cache, value_cache = (np.zeros((4, 16, 2, 64), np.float16) for _ in "kv")
    past = 0
    for rows in steps:
        call = lengths([past], [rows.shape[0]])
        result = paged_attention(rows, key_cache=key_cache, value_cache=value_cache, **call, **HEADS)
        past += rows.shape[0]
    return result


@pytest.mark.parametrize("kind", ["path", "text", "bytes"])
def test_model_by_path_and_by_bytes(tmp_path: Path, kind: str):
    path = tmp_path / "model.onnx"
    onnx.save(paged_model(), path)
    source = {"path": path, "text": str(path), "bytes": path.read_bytes()}[kind]
    (got,) = Session(source, {"blocks": 4}).run(["output"], {"query": queries(3), **lengths([0], [3])})
    assert_same_bits(got, run_direct([queries(3)]).output)


@pytest.mark.parametrize(
    ("element", "dtype"),
    [(TensorProto.BFLOAT16, ml_dtypes.bfloat16), (TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn), (I8, np.int8)],
)
def test_types_of_new_caches(element: int, dtype: Any):
    session = Session(paged_model(key_cache=(element, ("blocks", 16, 2, 64)), value_cache=(element, (4, 16, 2, 64))))
    session._dims["blocks"] = 4
    for cache in session._caches:
        assert session._allocate(cache, {}).dtype == dtype


def test_output_qk_has_its_declared_type():
    built, other = (build(Case(qk_output=2, qk_dtype="float16")) for _ in range(2))
    outputs = ("output", "", "", "output_qk")
    types = {name: (ELEMENTS[str(x.dtype)], x.shape) for name, x in built.inputs.items()}
    node = raw_node(list(built.inputs), outputs, built.attributes)
    model = model_of([node], types, {"output": (F16, None), "output_qk": (F16, None)})
    _, got = Session(model).run(None, built.inputs)
    assert got.dtype == np.float16
    assert_same_bits(got, other.run(paged_attention).output_qk)


# ---- GroupQueryAttention -----------------------------------------------------------------------------------------


def padded_model(past: Any = ("batch", 2, "past_length", 64), windowed: int = 0) -> onnx.ModelProto:
    names = ["query", "", "", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    outputs = ["output", "present_key", "present_value"]
    more = {"sliding_window_cache": 1, "local_window_size": windowed} if windowed else {}
    node = helper.make_node(gqa.NAME, names, outputs, domain=contract.DOMAIN, **HEADS, **more)
    inputs = {
        "query": (F16, ("batch", "length", WIDTH)),
        "past_key": (F16, past),
        "past_value": (F16, past),
        "seqlens_k": (I32, ("batch",)),
        "total_sequence_length": (I32, ()),
    }
    return model_of([node], inputs, dict.fromkeys(outputs, (F16, None)))


def step_of(rows: Any, past: int) -> dict[str, Any]:
    total = past + rows.shape[1]
    return {
        "query": rows,
        "seqlens_k": np.full(rows.shape[0], total - 1, np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }


@pytest.mark.parametrize("dims", [{}, {"past_length": 32}], ids=["growing", "shared buffer"])
def test_padded_steps_equal_one_run(dims: dict[str, int]):
    rows = queries(2 * 6).reshape(2, 6, WIDTH)
    (want,) = Session(padded_model()).run(["output"], step_of(rows, 0))
    session = Session(padded_model(), dims)
    assert session.input_names == ["query", "seqlens_k", "total_sequence_length"]
    got = [session.run(["output"], step_of(rows[:, start:stop], start))[0] for start, stop in ((0, 3), (3, 4), (4, 6))]
    assert_same_bits(np.concatenate(got, axis=1), want)
    assert session.caches["past_key"].shape == (2, 2, dims.get("past_length", 6), 64)


def test_sliding_caches_are_kept():
    rows = queries(8).reshape(1, 8, WIDTH)
    session = Session(padded_model((1, 2, 4, 64), windowed=4))
    got = [session.run(["output"], step_of(rows[:, t : t + 1], t))[0] for t in range(8)]
    full = model_of_window(4)
    (want,) = Session(full).run(["output"], step_of(rows, 0))
    assert_same_bits(np.concatenate(got, axis=1), want)


def model_of_window(window: int) -> onnx.ModelProto:
    model = padded_model()
    model.graph.node[0].attribute.append(helper.make_attribute("local_window_size", window))
    return model


# ---- functions and other operators -------------------------------------------------------------------------------


def test_nodes_inside_a_function_take_its_attributes():
    inputs = list({**PACKED, **ONE})
    node = raw_node(inputs)
    linked = node.attribute.add()
    linked.name, linked.type, linked.ref_attr_name = "softcap", onnx.AttributeProto.FLOAT, "cap"
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(contract.DOMAIN, 1)]
    function = helper.make_function("test", "Capped", inputs, ["output"], [node], imports, ["cap"])
    callers = [helper.make_node("Capped", inputs, [f"r{cap:g}"], domain="test", cap=cap) for cap in (1.5, 50.0)]
    model = model_of(callers, {**PACKED, **ONE}, {"r1.5": (F16, None), "r50": (F16, None)})
    model.opset_import.append(helper.make_opsetid("test", 1))
    model.functions.append(function)
    caches = {name: np.zeros((4, 16, 2, 64), np.float16) for name in ("key_cache", "value_cache")}
    feeds = {"query": queries(3), **lengths([0], [3])}
    got = Session(model).run(None, {**feeds, **caches})
    for result, cap in zip(got, (1.5, 50.0), strict=True):
        fresh = {name: np.zeros_like(x) for name, x in caches.items()}
        assert_same_bits(result, paged_attention(**feeds, **fresh, **HEADS, softcap=cap).output)


class Double(OpRun):
    op_domain = "test"

    def _run(self, x: Any) -> tuple[Any, ...]:
        return (x + x,)


def test_more_operators():
    inputs = {**PACKED, **ONE}
    nodes = [raw_node(list(inputs)), helper.make_node("Double", ["output"], ["twice"], domain="test")]
    model = model_of(nodes, inputs, {"twice": (F16, None)})
    model.opset_import.append(helper.make_opsetid("test", 1))
    (got,) = Session(model, {"blocks": 4}, new_ops=[Double]).run(None, {"query": queries(2), **lengths([0], [2])})
    assert_same_bits(got, 2 * run_direct([queries(2)]).output)


@pytest.mark.parametrize("axis", [-1, 1])
def test_the_norms_next_to_attention(axis: int):
    x, skip = (np.random.default_rng(seed).standard_normal((2, 3, 8)).astype(np.float16) for seed in (0, 1))
    scale = np.linspace(0.5, 2, 8 if axis == -1 else 24).astype(np.float16).reshape((8,) if axis == -1 else (3, 8))
    nodes = [helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["y"], axis=axis, epsilon=1e-3)]
    model = model_of(nodes, {"x": (F16, (2, 3, 8)), "scale": (F16, scale.shape)}, {"y": (F16, None)})
    (got,) = Session(model).run(None, {"x": x, "scale": scale})
    wide = x.astype(np.float64)
    axes = tuple(range(axis % 3, 3))
    want = wide / np.sqrt((wide**2).mean(axes, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3)
    if axis == -1:
        inputs = {"x": (F16, (2, 3, 8)), "skip": (F16, (2, 3, 8)), "scale": (F16, (8,))}
        names = ["y", "", "", "sum"]
        node = helper.make_node("SkipSimplifiedLayerNormalization", list(inputs), names, domain=contract.DOMAIN)
        model = model_of([node], inputs, {"y": (F16, None), "sum": (F16, None)})
        y, total = Session(model).run(None, {"x": x, "skip": skip, "scale": scale})
        assert_same_bits(total, (x.astype(np.float32) + skip.astype(np.float32)).astype(np.float16))
        wide = x.astype(np.float64) + skip
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True)) * scale
        np.testing.assert_allclose(y, want, rtol=2e-3, atol=2e-3)


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_unknown_and_missing_feeds_are_named():
    session = Session(paged_model(), {"blocks": 4})
    feeds = {"query": queries(2), **lengths([0], [2])}
    with pytest.raises(InvalidArgumentError, match=r"feeds: expected inputs among query, .* got 'tokens'"):
        session.run(None, {**feeds, "tokens": queries(2)})
    with pytest.raises(InvalidArgumentError, match=r"output_names: .* whose outputs are output, .* got 'logits'"):
        session.run(["logits"], feeds)
    del feeds["past_seqlens"]
    with pytest.raises(InvalidArgumentError, match="past_seqlens: required input of the model, got none"):
        session.run(None, feeds)


def test_unknown_sizes_are_named():
    feeds = {"query": queries(2), **lengths([0], [2])}
    with pytest.raises(InvalidArgumentError, match=r"dims: expected a value for blocks, got none\. Or feed key_cache"):
        Session(paged_model()).run(None, feeds)
    unnamed = paged_model(key_cache=(F16, (None, 16, 2, 64)))
    with pytest.raises(InvalidArgumentError, match="dims: expected a value for dimension 0 of key_cache"):
        Session(unnamed).run(None, feeds)
    shapeless = paged_model(key_cache=(F16, None))
    with pytest.raises(InvalidArgumentError, match="key_cache: expected a cache in the feeds"):
        Session(shapeless).run(None, feeds)


def test_unknown_device():
    with pytest.raises(InvalidArgumentError, match="device: expected cpu or cuda, got 'tpu'"):
        Session(paged_model(), device="tpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise MissingDependencyError("no GPU is usable")

    monkeypatch.setattr(cuda, "require_device", refuse)
    with pytest.raises(MissingDependencyError, match="no GPU is usable"):
        Session(paged_model(), device="cuda")


def test_caches_of_a_model():
    assert [(cache.name, cache.output) for cache in caches_of(paged_model())] == [
        ("key_cache", "key_cache_out"),
        ("value_cache", "value_cache_out"),
    ]
    assert [cache.output for cache in caches_of(padded_model())] == ["present_key", "present_value"]
    assert caches_of(model_of([], {"x": (F32, (1,))})) == []
