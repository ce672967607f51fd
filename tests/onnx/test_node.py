"""Nodes made and read by name; what could not run is refused when it is made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import onnx
import pytest
from onnx import helper

from pagedattn import InvalidArgumentError, MissingDependencyError, contract, gqa
from pagedattn.onnx import make_paged_attention_node, read_paged_attention_node, register_schema
from tests.onnx.graphs import (
    CACHES_OUT,
    F16,
    F32,
    HEADS,
    I32,
    LATENT,
    LATENT_ATTRIBUTES,
    PACKED,
    SEPARATE,
    model_of,
    raw_node,
    value_info,
)

INPUTS = {name: f"{name}.0" for name in SEPARATE}
OUTPUTS = {name: f"{name}.0" for name in CACHES_OUT}


def types_of(entries: Any) -> list[Any]:
    return [value_info(f"{name}.0", entry) for name, entry in entries.items()]


def test_positions_and_empty_names():
    inputs = {name: f"{name}.0" for name in (*PACKED, "head_sink", "query_positions")}
    node = make_paged_attention_node(inputs, {"output": "y", "output_qk": "s"}, name="n", qk_output=2, **HEADS)
    want = [f"{row.name}.0" if row.name in inputs else "" for row in contract.INPUTS[:18]]
    assert list(node.input) == want
    assert list(node.output) == ["y", "", "", "s"]
    assert (node.domain, node.op_type, node.name) == (contract.DOMAIN, contract.NAME, "n")


def test_defaults_are_left_out():
    node = make_paged_attention_node(
        INPUTS, OUTPUTS, **HEADS, scale=0.0, softcap=2.0, local_window_size=-1, is_causal=1, k_quant_type="NONE"
    )
    assert {attribute.name for attribute in node.attribute} == {"num_heads", "kv_num_heads", "softcap"}


def test_read_gives_back_what_was_made():
    attributes = {
        **HEADS,
        "softcap": 2.0,
        "rotary_interleaved": 1,
        "kv_cache_layout": "SEPARATE",
        "k_cache_dtype": "float16",
    }
    read = read_paged_attention_node(make_paged_attention_node(INPUTS, OUTPUTS, **attributes))
    assert read.inputs == INPUTS
    assert read.outputs == OUTPUTS
    del attributes["kv_cache_layout"]  # the default
    assert read.attributes == attributes


def test_empty_names_are_absent():
    node = make_paged_attention_node({**INPUTS, "slot_mapping": ""}, {**OUTPUTS, "output_qk": ""}, **HEADS)
    assert len(node.input) == 8
    assert len(node.output) == 3


def test_numbers_of_other_kinds():
    import numpy as np

    node = make_paged_attention_node(INPUTS, OUTPUTS, num_heads=np.int64(8), kv_num_heads=2.0, scale=np.float32(0.5))
    kinds = {attribute.name: attribute.type for attribute in node.attribute}
    assert kinds == {"num_heads": 2, "kv_num_heads": 2, "scale": 1}  # INT, INT, FLOAT


def test_made_nodes_pass_the_checker():
    register_schema()
    node = make_paged_attention_node(
        {name: name for name in SEPARATE}, {name: name for name in CACHES_OUT}, types=types_of(SEPARATE), **HEADS
    )
    model = model_of([node], SEPARATE)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_known_shapes_are_checked(as_mapping: bool):
    types: Any = types_of({**SEPARATE, "key": (F16, ("N", 64))})
    if as_mapping:
        types = {info.name: info.type for info in types}
    with pytest.raises(InvalidArgumentError, match="key: expected dimension 1 to be kv_width = 128"):
        make_paged_attention_node(INPUTS, OUTPUTS, types=types, **HEADS)
    make_paged_attention_node(INPUTS, OUTPUTS, **HEADS)  # nothing is known


REFUSED: dict[str, tuple[dict[str, str], dict[str, str], dict[str, Any], str]] = {
    "unknown input": ({**INPUTS, "past_key": "x"}, OUTPUTS, HEADS, "inputs: expected names among query, .* 'past_key'"),
    "unknown output": (INPUTS, {**OUTPUTS, "lse": "x"}, HEADS, "outputs: expected names among output, .* got 'lse'"),
    "unknown attribute": (INPUTS, OUTPUTS, {**HEADS, "window": 4}, "window: expected an attribute of PagedAttention"),
    "rotated cache": (INPUTS, OUTPUTS, {**HEADS, "qk_rotation": "HADAMARD"}, "qk_rotation: .* inputs 17 and 18"),
    "no heads": (INPUTS, OUTPUTS, {"num_heads": 8}, "kv_num_heads: required attribute"),
    "no table": (
        {k: v for k, v in INPUTS.items() if k != "block_table"},
        OUTPUTS,
        HEADS,
        "block_table: required input",
    ),
    "half a key": (
        {k: v for k, v in INPUTS.items() if k != "value"},
        OUTPUTS,
        HEADS,
        "value: required in the SEPARATE layout",
    ),
    "no output": (INPUTS, {}, HEADS, "output: required output"),
    "one cache": (INPUTS, {"output": "y", "key_cache_out": "k"}, HEADS, "value_cache_out: required together"),
    "no scores": (INPUTS, OUTPUTS, {**HEADS, "qk_output": 1}, "qk_output: expected output_qk as the fourth output"),
    "scores": (
        INPUTS,
        {**OUTPUTS, "output_qk": "s"},
        HEADS,
        "qk_output: expected 1 or 2 with the output output_qk, got 0",
    ),
    "scale without type": ({**INPUTS, "k_scale": "s"}, OUTPUTS, HEADS, "k_scale: expected it absent with k_quant_type"),
    "type without scale": (
        INPUTS,
        OUTPUTS,
        {**HEADS, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"},
        "k_scale: required by k_quant_type",
    ),
    "offset": (INPUTS, OUTPUTS, {**HEADS, "rotary_offset": 4}, "rotary_offset: expected a multiple of 8"),
    "range": (INPUTS, OUTPUTS, {**HEADS, "softcap": -1.0}, "softcap: expected a value >= 0"),
    "text": (INPUTS, OUTPUTS, {**HEADS, "num_heads": "8"}, "num_heads: expected a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_made(case: str):
    inputs, outputs, attributes, message = REFUSED[case]
    with pytest.raises(InvalidArgumentError, match=message):
        make_paged_attention_node(inputs, outputs, **attributes)


def test_latent():
    inputs = {name: f"{name}.0" for name in LATENT}
    node = make_paged_attention_node(
        inputs, {"output": "y", "key_cache_out": "k"}, types=types_of(LATENT), **LATENT_ATTRIBUTES
    )
    assert list(node.output) == ["y", "k"]
    with pytest.raises(InvalidArgumentError, match="value_cache_out: expected an empty name in the LATENT layout"):
        make_paged_attention_node(inputs, OUTPUTS, **LATENT_ATTRIBUTES)
    with pytest.raises(InvalidArgumentError, match="scale: required when v_head_size"):
        make_paged_attention_node(
            inputs, {"output": "y"}, types=types_of(LATENT), **{**LATENT_ATTRIBUTES, "scale": 0.0}
        )


@pytest.mark.parametrize(
    "known",
    [
        {"key_cache": (F16, (9, 32, 2, 64))},
        {"k_norm_weight": (F16, (64,)), "q_norm_weight": (F16, (64,))},
        {"cos_cache": (F16, (99, 32)), "sin_cache": (F16, (99, 32))},
        {"attention_bias": (F16, (3, 8, 7, 99))},
        {"past_seqlens": (I32, (3,))},
        {"slot_mapping": (I32, (17,))},
        {"query": (F16, (17, None))},
        {"key": (F16, (None, 128))},
    ],
    ids=lambda known: next(iter(known)),
)
def test_whatever_little_is_known_fits_what_is_not(known: dict[str, Any]):
    names = {*INPUTS, *known}
    inputs = {name: f"{name}.0" for name in names}
    make_paged_attention_node(inputs, {"output": "y"}, types=types_of(known), **HEADS)


def test_reading_another_operator():
    node = helper.make_node(gqa.NAME, ["q"], ["y"], domain=contract.DOMAIN, **HEADS)
    with pytest.raises(InvalidArgumentError, match=r"node: expected one of com\.microsoft::Paged.* got .*GroupQ"):
        read_paged_attention_node(node)


def test_reading_too_many_outputs():
    node = helper.make_node(contract.NAME, ["q"], list("abcde"), domain=contract.DOMAIN, **HEADS)
    with pytest.raises(InvalidArgumentError, match="outputs: expected at most 4, up to output_qk, got 5"):
        read_paged_attention_node(node)


def test_types_of_other_values_do_not_matter():
    make_paged_attention_node(INPUTS, OUTPUTS, types=[value_info("other", (F32, (1, 2, 3)))], **HEADS)


# ---- the package itself ------------------------------------------------------------------------------------------


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_the_library_does_not_import_onnx():
    run = python("import sys, pagedattn; sys.exit('onnx' in sys.modules)")
    assert run.returncode == 0, run.stderr


def test_a_process_ends_well_after_registering():
    """onnx keeps the inference function; letting go of it after the interpreter's end used to crash."""
    run = python("import pagedattn.onnx as face; face.register_schema(); face.register_schema(); print('registered')")
    assert (run.returncode, run.stdout, run.stderr) == (0, "registered\n", "")


def test_a_string_that_is_no_text_is_refused():
    node = raw_node(list(SEPARATE), attributes={**HEADS, "kv_cache_layout": b"\xff\xfe"})
    with pytest.raises(InvalidArgumentError, match="kv_cache_layout: expected a string in UTF-8"):
        read_paged_attention_node(node)


def test_an_old_onnx_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onnx, "__version__", "1.22.0")
    with pytest.raises(MissingDependencyError, match=r'expected onnx >= 1.23.* got 1.22.0: pip install "onnx>=1.23"'):
        register_schema()


def test_without_onnx_the_error_names_the_cure():
    run = python(
        "import sys; sys.modules['onnx'] = None\n"
        "from pagedattn import MissingDependencyError\n"
        "try:\n    import pagedattn.onnx\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    assert 'pip install "pagedattn[onnx]"' in run.stdout, run.stderr
    assert issubclass(MissingDependencyError, ImportError)
