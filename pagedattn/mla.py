"""Absorbed multi-head latent attention: what a DeepSeek layer computes around a call in the LATENT layout.

The cache keeps one row ``[latent | rotary key]`` a token instead of keys and values of every head. ``kv_b_proj``, which
would expand the latent part, is absorbed: its key half goes into the query, its value half is applied to the output::

    w = absorb(kv_b_proj.weight, num_heads=128, qk_nope_head_dim=128, v_head_dim=128)
    query = w.query(q_nope, q_rope)
    key = concatenate([latent, k_rope], axis=-1)           # latent after kv_a_layernorm; one head
    out = paged_attention(query, key, None, cache, ..., num_heads=128, kv_num_heads=1, kv_cache_layout="LATENT",
                          v_head_size=512, do_rotary=1, rotary_offset=512, rotary_interleaved=1,
                          scale=softmax_scale(192, factor=40, mscale_all_dim=1.0)).output
    heads = w.output(out)                                  # what o_proj takes
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from pagedattn.errors import InvalidArgumentError
from pagedattn.rope import yarn_mscale

__all__ = ["AbsorbedProjection", "absorb", "softmax_scale"]


class AbsorbedProjection(NamedTuple):
    """The two halves of ``kv_b_proj``, views of its weight; R is kv_lora_rank.

    Attributes
    ----------
    w_uk : (num_heads, qk_nope_head_dim, R)
        Expands the latent into the keys of a head.
    w_uv : (num_heads, v_head_dim, R)
        Expands the latent into its values.
    """

    w_uk: Any
    w_uv: Any

    def query(self, q_nope: Any, q_rope: Any) -> Any:
        """Query rows for the operator, ``[q_nope @ w_uk | q_rope]`` a head.

        Parameters
        ----------
        q_nope : (N, num_heads, qk_nope_head_dim)
        q_rope : (N, num_heads, qk_rope_head_dim)
            Not rotated yet: the operator does it (``do_rotary`` = 1, ``rotary_offset`` = R).

        Returns
        -------
        (N, num_heads * (R + qk_rope_head_dim)), of the arrays' own library and type

        Raises
        ------
        InvalidArgumentError
            The arrays have not these shapes.
        """
        heads, width, _ = self.w_uk.shape
        for name, x in (("q_nope", q_nope), ("q_rope", q_rope)):
            if len(x.shape) != 3 or x.shape[:2] != (q_nope.shape[0], heads):
                raise InvalidArgumentError(
                    f"{name}: expected shape (N, num_heads = {heads}, ...), got {tuple(x.shape)}."
                )
        if q_nope.shape[2] != width:
            raise InvalidArgumentError(f"q_nope: expected heads of {width} channels, got {q_nope.shape[2]}.")
        latent = _per_head(q_nope, self.w_uk)
        joined = sys.modules[_library(q_nope)].concatenate([latent, q_rope], -1)
        return joined.reshape(joined.shape[0], joined.shape[1] * joined.shape[2])

    def output(self, attention_output: Any) -> Any:
        """Rows for ``o_proj`` from the operator's output.

        Parameters
        ----------
        attention_output : (N, num_heads * R)

        Returns
        -------
        (N, num_heads * v_head_dim), of its own library and type

        Raises
        ------
        InvalidArgumentError
            The array has not this shape.
        """
        heads, width, rank = self.w_uv.shape
        if len(attention_output.shape) != 2 or attention_output.shape[1] != heads * rank:
            raise InvalidArgumentError(
                f"attention_output: expected shape (N, num_heads * kv_lora_rank = {heads * rank}), "
                f"got {tuple(attention_output.shape)}."
            )
        count = attention_output.shape[0]
        rows = _per_head(attention_output.reshape(count, heads, rank), self.w_uv.swapaxes(1, 2))
        return rows.reshape(count, heads * width)


def absorb(kv_b_proj: Any, *, num_heads: int, qk_nope_head_dim: int, v_head_dim: int) -> AbsorbedProjection:
    """Split the weight of ``kv_b_proj`` into the parts that the query and the output absorb.

    Parameters
    ----------
    kv_b_proj : (num_heads * (qk_nope_head_dim + v_head_dim), R)
        NumPy, CuPy or torch, of a type that the library multiplies; in the order of ``torch.nn.Linear.weight``, keys
        before values within a head.
    num_heads, qk_nope_head_dim, v_head_dim : int

    Raises
    ------
    InvalidArgumentError
        The weight has not that shape.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C.
    """
    for name, size in (("num_heads", num_heads), ("qk_nope_head_dim", qk_nope_head_dim), ("v_head_dim", v_head_dim)):
        if not size > 0:
            raise InvalidArgumentError(f"{name}: expected a size > 0, got {size}.")
    width = qk_nope_head_dim + v_head_dim
    if kv_b_proj.ndim != 2 or kv_b_proj.shape[0] != num_heads * width:
        raise InvalidArgumentError(
            f"kv_b_proj: expected shape (num_heads * (qk_nope_head_dim + v_head_dim) = {num_heads * width}, "
            f"kv_lora_rank), got {tuple(kv_b_proj.shape)}."
        )
    weight = kv_b_proj.reshape(num_heads, width, kv_b_proj.shape[1])
    return AbsorbedProjection(weight[:, :qk_nope_head_dim], weight[:, qk_nope_head_dim:])


def softmax_scale(qk_head_dim: int, *, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """The operator's ``scale`` for an MLA layer: ``qk_head_dim ** -0.5``, times YaRN's temperature squared.

    Parameters
    ----------
    qk_head_dim : int
        qk_nope_head_dim + qk_rope_head_dim, the width of a head before absorption; not that of the cache row.
    factor, mscale_all_dim : float
        From ``rope_parameters``. DeepSeek-V3 (192, 40, 1.0) gives 0.135234, V2 (192, 40, 0.707) 0.114721.
    """
    return float(qk_head_dim**-0.5 * yarn_mscale(factor, mscale_all_dim) ** 2)


def _per_head(rows: Any, weight: Any) -> Any:
    """Multiply rows (N, heads, a) by weight (heads, a, b) head by head: (N, heads, b)."""
    if isinstance(rows, np.ndarray) and rows.dtype.itemsize == 2:  # NumPy would sum in half precision
        return _per_head(rows.astype(np.float32), weight.astype(np.float32)).astype(rows.dtype)
    return (rows.swapaxes(0, 1) @ weight).swapaxes(0, 1)


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]
