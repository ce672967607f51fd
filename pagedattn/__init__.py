"""pagedattn: paged attention as one function.

`paged_attention` computes ONNX Runtime's ``com.microsoft::PagedAttention`` on NumPy, CuPy and torch arrays.
"""

from __future__ import annotations

from pagedattn.api import PagedAttention, PagedAttentionResult, explain, paged_attention
from pagedattn.arrays import Float8View
from pagedattn.dispatch import Choice
from pagedattn.errors import (
    CompileError,
    InvalidArgumentError,
    MissingDependencyError,
    PagedAttentionError,
    UnsupportedError,
)
from pagedattn.problem import Problem

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "CompileError",
    "Float8View",
    "InvalidArgumentError",
    "MissingDependencyError",
    "PagedAttention",
    "PagedAttentionError",
    "PagedAttentionResult",
    "Problem",
    "UnsupportedError",
    "explain",
    "paged_attention",
]
