"""PagedAttention as an ONNX operator: schema and shape inference, execution, nodes and graph rewriting.

Needs the package onnx: ``pip install "pagedattn[onnx]"``.
"""

from __future__ import annotations

from pagedattn.errors import MissingDependencyError

try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f'pagedattn.onnx needs the package onnx ({error}): pip install "pagedattn[onnx]"'
    ) from error

from pagedattn.onnx.inference import NodeInferenceError
from pagedattn.onnx.node import PagedAttentionNode, make_paged_attention_node, read_paged_attention_node
from pagedattn.onnx.reference import reference_ops
from pagedattn.onnx.rewrite import Finding, Migration, migration_report, rewrite_group_query_attention
from pagedattn.onnx.schema import deregister_schema, make_schema, register_schema
from pagedattn.onnx.session import Session

__all__ = [
    "Finding",
    "Migration",
    "NodeInferenceError",
    "PagedAttentionNode",
    "Session",
    "deregister_schema",
    "make_paged_attention_node",
    "make_schema",
    "migration_report",
    "read_paged_attention_node",
    "reference_ops",
    "register_schema",
    "rewrite_group_query_attention",
]
