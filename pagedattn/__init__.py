"""pagedattn: paged attention as one function.

`paged_attention` computes ONNX Runtime's ``com.microsoft::PagedAttention`` on NumPy, CuPy and torch arrays.
"""

from __future__ import annotations

from pagedattn import cache, graph, mla, rope
from pagedattn.api import PagedAttention, PagedAttentionResult, explain, paged_attention
from pagedattn.arrays import Float8View
from pagedattn.calibration import Calibration, calibrate
from pagedattn.dispatch import Choice
from pagedattn.errors import (
    CompileError,
    InvalidArgumentError,
    MissingDependencyError,
    PagedAttentionError,
    UnsupportedError,
)
from pagedattn.gqa import GroupQueryAttentionResult, group_query_attention
from pagedattn.layout import block_table_from_indices, block_table_to_indices, cumulative_lengths, slot_mapping
from pagedattn.merge import merge_attention_states
from pagedattn.mla import AbsorbedProjection, absorb
from pagedattn.problem import Problem

__version__ = "0.1.0"
__all__ = [
    "AbsorbedProjection",
    "Calibration",
    "Choice",
    "CompileError",
    "Float8View",
    "GroupQueryAttentionResult",
    "InvalidArgumentError",
    "MissingDependencyError",
    "PagedAttention",
    "PagedAttentionError",
    "PagedAttentionResult",
    "Problem",
    "UnsupportedError",
    "absorb",
    "block_table_from_indices",
    "block_table_to_indices",
    "cache",
    "calibrate",
    "cumulative_lengths",
    "explain",
    "graph",
    "group_query_attention",
    "merge_attention_states",
    "mla",
    "paged_attention",
    "rope",
    "slot_mapping",
]
