"""Operators for `onnx.reference.ReferenceEvaluator`: models with attention nodes run on this library.

The evaluator hands its arrays to the operators, so caches that are fed to a model are written in place, and the cache
outputs of a node are the very arrays of its inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from onnx.reference.op_run import OpRun, RefAttrName

from pagedattn import api, contract, gqa
from pagedattn.dtypes import FLOAT32, DType
from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import cuda
from pagedattn.onnx.companions import COMPANIONS
from pagedattn.onnx.node import OUTPUT_NAMES, check_outputs, names_by_index, refuse_unknown_attributes
from pagedattn.onnx.types import dtype_of_element

_HOST_INPUTS = ("attention_metadata", "total_sequence_length")


class AttentionOp(OpRun):  # type: ignore[misc]
    """What the two operators share: inputs by name, absent values, and arrays on a GPU.

    Caches decide where a node runs: when they are CuPy arrays, its other inputs are moved to their device, and its
    results back to NumPy, where the rest of the graph is; the caches stay where they are.
    """

    op_domain = contract.DOMAIN
    # Types that the model declares for its values, and the backend that serves the nodes; see `reference_ops`.
    declared: ClassVar[Mapping[str, DType]] = {}
    backend: ClassVar[str | None] = None
    # The operator's tables.
    input_rows: ClassVar[tuple[contract.Input, ...]]
    attribute_rows: ClassVar[tuple[contract.Attribute, ...]]
    output_names: ClassVar[tuple[str, ...]]

    def __init__(self, onnx_node: Any, run_params: dict[str, Any], schema: Any = None) -> None:
        super().__init__(onnx_node, run_params, schema)
        given = [attribute.name for attribute in onnx_node.attribute]
        refuse_unknown_attributes(given, onnx_node.op_type, self.attribute_rows)
        for row in self.attribute_rows:
            if row.default is None and row.name not in given:
                raise InvalidArgumentError(f"{row.name}: required attribute, got none.")
        self.present_inputs = names_by_index(onnx_node.input, [row.name for row in self.input_rows], "inputs")
        self.present_outputs = names_by_index(onnx_node.output, self.output_names, "outputs")

    @abstractmethod
    def compute(self, inputs: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
        """Results in the order of `output_names`, from the present inputs and the attributes that the node sets."""

    def run(self, *args: Any, linked_attributes: Mapping[str, Any] | None = None, **ignored: Any) -> tuple[Any, ...]:
        """Run the node; called by the evaluator."""
        attributes = {attribute.name: getattr(self, attribute.name) for attribute in self.onnx_node.attribute}
        for name, value in attributes.items():
            if isinstance(value, RefAttrName):
                attributes[name] = (linked_attributes or {})[value.name]
        return self._run(*args, **attributes)

    def _run(self, *args: Any, **attributes: Any) -> tuple[Any, ...]:
        # Presence is read from the node: the evaluator keeps what any node returned under an empty name, and would
        # hand it over for an absent input of this one.
        inputs = {row.name: x for row, x in zip(self.input_rows, args, strict=False) if row.name in self.present_inputs}
        on_device = [inputs[row.name] for row in self.input_rows if row.written and row.name in inputs]
        if not on_device or isinstance(on_device[0], np.ndarray):
            results = self.compute(inputs, attributes)
        else:
            cupy = cuda.cupy()
            with on_device[0].device:
                inputs = {name: x if name in _HOST_INPUTS else cupy.asarray(x) for name, x in inputs.items()}
                caches, results = self.output_names[1:3], self.compute(inputs, attributes)
                results = tuple(
                    x if x is None or name in caches else x.get()
                    for name, x in zip(self.output_names, results, strict=True)
                )
        # None under the empty name is what the evaluator has there itself, for absent inputs.
        return tuple(x if name else None for name, x in zip(self.onnx_node.output, results, strict=False))


class PagedAttention(AttentionOp):
    """``com.microsoft::PagedAttention``."""

    input_rows = contract.INPUTS
    attribute_rows = contract.ATTRIBUTES
    output_names = OUTPUT_NAMES

    def __init__(self, onnx_node: Any, run_params: dict[str, Any], schema: Any = None) -> None:
        super().__init__(onnx_node, run_params, schema)
        self.operators: dict[tuple[Any, ...], api.PagedAttention] = {}

    def compute(self, inputs: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
        key = tuple(attributes.items())
        if key not in self.operators:
            keys_only = attributes.get("kv_cache_layout") == "LATENT"
            check_outputs(self.present_outputs, attributes.get("qk_output", 0), keys_only=keys_only)
            qk_dtype = self.declared.get(self.present_outputs.get("output_qk", ""), FLOAT32)
            self.operators[key] = api.PagedAttention(backend=self.backend, qk_dtype=qk_dtype, **attributes)
        result = self.operators[key](**{"query": None, **inputs})
        return result.output, result.key_cache_out, result.value_cache_out, result.output_qk


class GroupQueryAttention(AttentionOp):
    """``com.microsoft::GroupQueryAttention``."""

    input_rows = gqa.INPUTS
    attribute_rows = gqa.ATTRIBUTES
    output_names = gqa.OUTPUT_NAMES

    def compute(self, inputs: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
        check_outputs(self.present_outputs, attributes.get("qk_output", 0), self.output_names)
        for name in ("past_key", "past_value"):  # such as an initializer; its present is an output of its own anyway
            if isinstance(inputs.get(name), np.ndarray) and not inputs[name].flags.writeable:
                inputs[name] = inputs[name].copy()
        return gqa.group_query_attention(**{"query": None, **inputs}, **attributes, backend=self.backend)


def reference_ops(model: Any = None, backend: str | None = None) -> list[type[OpRun]]:
    """Operators for the ``new_ops`` of `onnx.reference.ReferenceEvaluator`.

    PagedAttention, GroupQueryAttention, and the norms that ONNX Runtime's model builders put next to them.

    Parameters
    ----------
    model : onnx.ModelProto, optional
        The model they will run: an output_qk then has the type that it declares; float32 without it.
    backend : str, optional
        Force a backend of `pagedattn.paged_attention`.

    Returns
    -------
    list of OpRun classes

    Examples
    --------
    >>> evaluator = ReferenceEvaluator(model, new_ops=reference_ops(model))  # doctest: +SKIP
    """
    declared: dict[str, DType] = {}
    if model is not None:
        for info in [*model.graph.output, *model.graph.value_info]:
            dtype = dtype_of_element(info.type.tensor_type.elem_type)
            if dtype is not None:
                declared[info.name] = dtype
    bound = {"declared": declared, "backend": backend}
    # An evaluator finds an operator by the name of its class.
    attention = [
        type(op.__name__, (op,), {**bound, "__doc__": op.__doc__}) for op in (PagedAttention, GroupQueryAttention)
    ]
    return [*attention, *COMPANIONS]
