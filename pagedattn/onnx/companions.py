"""Operators that ONNX Runtime's model builders put next to attention, for the evaluator: the norms.

Everything else in such models is standard ONNX.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from pagedattn import contract


def _normalize(x: Any, scale: Any, epsilon: float) -> tuple[Any, Any]:
    """RMS norm of the last axis in float32, and the reciprocal root it multiplied by."""
    x = x.astype(np.float32)
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return x * inverse * scale.astype(np.float32), inverse


class SimplifiedLayerNormalization(OpRun):  # type: ignore[misc]
    """RMS norm; ONNX Runtime has it in the default domain."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> tuple[Any, ...]:
        axes = tuple(range(axis % x.ndim, x.ndim))
        flat = x.reshape(*x.shape[: axes[0]], -1)
        y, inverse = _normalize(flat, scale.reshape(-1), epsilon)
        inverse = inverse.reshape(*x.shape[: axes[0]], *(1 for _ in axes))
        return (y.reshape(x.shape).astype(x.dtype), inverse)[: len(self.onnx_node.output)]


class SkipSimplifiedLayerNormalization(OpRun):  # type: ignore[misc]
    """RMS norm of a sum, which is an output as well."""

    op_domain = contract.DOMAIN

    def run(self, *args: Any, **ignored: Any) -> tuple[Any, ...]:
        """Run the node; called by the evaluator. Overridden because it may return None for absent outputs."""
        given = [x for name, x in zip(self.onnx_node.input, args, strict=False) if name]
        results = self._run(*given)
        return tuple(x if name else None for name, x in zip(self.onnx_node.output, results, strict=False))

    def _run(self, *terms: Any) -> tuple[Any, ...]:
        x, skip, gamma, *bias = terms
        total = x.astype(np.float32) + sum(term.astype(np.float32) for term in (skip, *bias))
        y, inverse = _normalize(total, gamma, getattr(self, "epsilon", 1e-12))
        mean = np.zeros_like(inverse)  # this norm subtracts none
        return y.astype(x.dtype), mean, inverse, total.astype(x.dtype)


COMPANIONS = [SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization]
