"""A model of the operator as it first shipped, kept as a file, runs unchanged and gives the bytes it always gave."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from pagedattn import contract
from pagedattn.onnx import Session, read_paged_attention_node, reference_ops, register_schema
from tests.onnx import shipped_contract
from tests.support.compare import assert_same_bits

DATA = Path(__file__).parent / "data"
MODEL = DATA / "shipped_contract.onnx"
MODEL_SHA256 = "8490b260b9ad48d385e1d845d940d44aefa70583a2071de60501a76c7b6ce510"
RESULT_SHA256 = "115118692933da9be66b781ebc0f9edd08aba682cd80070f125e1b60496bc63d"


@pytest.fixture
def arrays() -> dict[str, Any]:
    with np.load(DATA / "shipped_contract.npz") as file:
        return {name: file[name] for name in file.files}


def feeds_of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x.copy() for name, x in arrays.items() if not name.startswith("expected/")}


def expected_of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("expected/"): x for name, x in arrays.items() if name.startswith("expected/")}


def test_files_are_those_that_were_kept(arrays: dict[str, Any]):
    assert hashlib.sha256(MODEL.read_bytes()).hexdigest() == MODEL_SHA256
    digest = hashlib.sha256()
    for _, x in sorted(expected_of(arrays).items()):
        digest.update(x.tobytes())
    assert digest.hexdigest() == RESULT_SHA256


def test_model_has_the_first_contract_only():
    model = onnx.load(MODEL)
    whole, least = (read_paged_attention_node(node) for node in model.graph.node)
    assert list(whole.inputs) == list(shipped_contract.INPUTS) == [row.name for row in contract.INPUTS[:10]]
    assert set(whole.attributes) == set(shipped_contract.ALL_SEVEN)
    assert set(least.attributes) == {"num_heads", "kv_num_heads"}
    assert [len(node.output) for node in model.graph.node] == [3, 3]


def test_checker_and_inference_take_it():
    register_schema()
    onnx.checker.check_model(MODEL, full_check=True)
    onnx.shape_inference.infer_shapes(onnx.load(MODEL), check_type=True, strict_mode=True)


def test_bytes_in_the_evaluator(arrays: dict[str, Any]):
    model, feeds = onnx.load(MODEL), feeds_of(arrays)
    names = [info.name for info in model.graph.output]
    got = ReferenceEvaluator(model, new_ops=reference_ops(model)).run(names, feeds)
    for name, x in zip(names, got, strict=True):
        assert_same_bits(x, arrays[f"expected/{name}"], name)
    for suffix in ("", ".1"):
        assert got[names.index(f"key_cache_out{suffix}")] is feeds[f"key_cache{suffix}"]


def test_bytes_in_a_session(arrays: dict[str, Any]):
    session = Session(MODEL)
    got = dict(zip(session.output_names, session.run(None, feeds_of(arrays)), strict=True))
    for name, x in expected_of(arrays).items():
        assert_same_bits(got[name], x, name)


def test_bytes_of_direct_calls(arrays: dict[str, Any]):
    for name, x in shipped_contract.results(feeds_of(arrays)).items():
        assert_same_bits(x, arrays[f"expected/{name}"], name)


def test_numbers_are_far_from_ties(arrays: dict[str, Any]):
    """So the bytes do not depend on the order of a sum."""
    assert shipped_contract.margin(feeds_of(arrays)) > shipped_contract.SAFE
