"""The operator's schema, built from the contract and registered with onnx."""

from __future__ import annotations

import atexit
from typing import Any

import onnx
import onnx.reference  # it lists the schemas once, at import, and expects those of onnx alone
from onnx import defs, helper

from pagedattn import contract
from pagedattn.errors import MissingDependencyError
from pagedattn.onnx.inference import infer
from pagedattn.onnx.node import OUTPUTS
from pagedattn.onnx.types import type_string

MIN_ONNX = (1, 23)
DOC = """Attention of a ragged batch of new tokens to a paged key-value cache.

The new keys and values are stored at their slots of the cache, which is updated in place: outputs 1 and 2 are the
buffers of inputs 3 and 4. Optional values in the middle of a list are written as empty names.

float32 for T and T_CACHE, the inputs query_positions and attention_bias, the output output_qk and the attribute
qk_output are extensions to what ONNX Runtime registers."""
TYPE_DOCS = {
    "T": "Type of queries, keys, values and of the output.",
    "T_CACHE": "Type of the caches: T, or a quantized type; uint8 holds two int4 codes a byte.",
    "T_KV_SCALE": "Type of the dequantization scales.",
    "S": "Type of lengths, tables, slots and positions.",
    "QK": "Type of output_qk; float32 unless declared otherwise.",
}
_ATTRIBUTE_TYPES = {
    int: defs.OpSchema.AttrType.INT,
    float: defs.OpSchema.AttrType.FLOAT,
    str: defs.OpSchema.AttrType.STRING,
}


def make_schema() -> Any:
    """The `onnx.defs.OpSchema` of the operator."""

    def parameter(row: contract.Input | contract.Output) -> Any:
        kinds = defs.OpSchema.FormalParameterOption
        option = kinds.Optional if row.optional else kinds.Single
        doc = f"Shape ({', '.join(row.shape)}). {row.doc}"
        return defs.OpSchema.FormalParameter(row.name, row.type, doc, param_option=option)

    def attribute(row: contract.Attribute) -> Any:
        if row.default is None:
            return defs.OpSchema.Attribute(row.name, _ATTRIBUTE_TYPES[row.type], row.doc, required=True)
        return defs.OpSchema.Attribute(row.name, helper.make_attribute(row.name, row.default), row.doc)

    used = {row.type for row in contract.INPUTS} | {row.type for row in OUTPUTS}
    schema = defs.OpSchema(
        contract.NAME,
        contract.DOMAIN,
        contract.OPSET,
        DOC,
        inputs=[parameter(row) for row in contract.INPUTS],
        outputs=[parameter(row) for row in OUTPUTS],
        type_constraints=[
            (name, [type_string(row) for row in types], TYPE_DOCS[name])
            for name, types in contract.TYPES.items()
            if name in used
        ],
        attributes=[attribute(row) for row in contract.ATTRIBUTES],
    )
    schema.set_type_and_shape_inference_function(infer)
    return schema


def register_schema() -> None:
    """Make onnx know the operator: its checker then counts and types its inputs, and shapes are inferred through it.

    Calling it again changes nothing. Only the onnx library is affected, not ONNX Runtime.

    Raises
    ------
    MissingDependencyError
        onnx is older than 1.23.
    """
    if tuple(map(int, onnx.__version__.split(".")[:2])) < MIN_ONNX:
        raise MissingDependencyError(
            "register_schema: expected onnx >= 1.23, as earlier ones do not tell an inference function which names "
            f'are empty, got {onnx.__version__}: pip install "onnx>=1.23"'
        )
    if not defs.has(contract.NAME, contract.DOMAIN):
        defs.register_schema(make_schema())
        # onnx would let go of the inference function after the interpreter has ended, which hangs or crashes.
        atexit.unregister(deregister_schema)
        atexit.register(deregister_schema)


def deregister_schema() -> None:
    """Undo `register_schema`."""
    if defs.has(contract.NAME, contract.DOMAIN):
        defs.deregister_schema(contract.NAME, contract.OPSET, contract.DOMAIN)
