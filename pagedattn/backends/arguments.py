"""The structs that kernels share, filled from a problem and the descriptions of its arrays."""

from __future__ import annotations

from collections.abc import Mapping

from pagedattn.jit.params import Layout
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    NO_CACHE,
    NO_ROTARY,
    OUTPUT,
    ROTARY,
    SCORE_RULES,
    SEQUENCE_TABLE,
)
from pagedattn.problem import Problem, TensorInfo

Tensors = Mapping[str, TensorInfo]

# An array without elements may have address 0, which tells kernels that there is none.
NO_ELEMENTS = 256


def pointer(tensors: Tensors, name: str) -> int | None:
    """Address of an array, None when it is absent; never 0, which nobody reads where an array has no elements."""
    info = tensors.get(name)
    return None if info is None else info.pointer or NO_ELEMENTS


def sequence_table(p: Problem, tensors: Tensors, positions: str = "query_positions") -> bytes:
    """Lengths of the batch; ``positions`` names the array of the tokens' positions, which may be absent."""
    return SEQUENCE_TABLE.pack(
        cumulative_sequence_length=tensors["cumulative_sequence_length"].pointer,
        past_seqlens=tensors["past_seqlens"].pointer,
        query_positions=pointer(tensors, positions),
        batch_size=p.batch_size,
        token_count=p.token_count,
    )


def block_table(p: Problem, tensors: Tensors) -> bytes:
    """Where each sequence's blocks are; no table in a contiguous cache, where block b is sequence b's."""
    return BLOCK_TABLE.pack(
        entries=pointer(tensors, "block_table"),
        num_blocks=p.num_blocks,
        block_size=p.block_size,
        max_blocks_per_sequence=p.max_blocks_per_sequence,
    )


def kv_cache(p: Problem, tensors: Tensors, name: str) -> bytes:
    """One cache; ``name`` is key_cache or value_cache."""
    cache = tensors.get(name)
    if cache is None:
        return NO_CACHE
    scale = tensors.get("k_scale" if name == "key_cache" else "v_scale")
    per_channel = scale is not None and len(scale.shape) == 3
    return KV_CACHE.pack(
        data=cache.pointer,
        block_stride=cache.strides[0],
        token_stride=cache.strides[1],
        head_stride=cache.strides[2],
        scale=None if scale is None else scale.pointer,
        scale_head_stride=p.head_size if per_channel else 0,
        scale_channel_stride=1 if per_channel else 0,
    )


def rotary(p: Problem, tensors: Tensors) -> bytes:
    """Rotation of query and key."""
    if not p.do_rotary:
        return NO_ROTARY
    return ROTARY.pack(
        cos_cache=tensors["cos_cache"].pointer,
        sin_cache=tensors["sin_cache"].pointer,
        max_seq_len=p.max_seq_len,
        dim=p.rotary_dim,
        offset=p.rotary_offset,
        interleaved=p.rotary_interleaved,
    )


def score_rules(p: Problem, tensors: Tensors) -> bytes:
    """Mask, cap and bias."""
    bias = tensors.get("attention_bias")
    batch_stride = head_stride = row_stride = rows = columns = 0
    if bias is not None:
        batch, heads, rows, columns = bias.shape
        batch_stride = bias.strides[0] if batch > 1 else 0
        head_stride = bias.strides[1] if heads > 1 else 0
        row_stride = bias.strides[2]
    return SCORE_RULES.pack(
        attention_bias=pointer(tensors, "attention_bias"),
        bias_batch_stride=batch_stride,
        bias_head_stride=head_stride,
        bias_row_stride=row_stride,
        bias_rows=rows,
        bias_columns=columns,
        local_window_size=min(p.local_window_size, 2**31 - 1),
        is_causal=p.is_causal,
        scale=p.scale,
        softcap=p.softcap,
    )


def output(p: Problem, tensors: Tensors) -> bytes:
    """Where results go, and the sink."""
    return OUTPUT.pack(
        output=tensors["output"].pointer,
        lse=pointer(tensors, "lse"),
        head_sink=pointer(tensors, "head_sink"),
        num_heads=p.num_heads,
    )


class Shared:
    """The structs that kernels share, packed once a call under the names that they have in every Params."""

    def __init__(self, p: Problem, tensors: Tensors) -> None:
        self.sequences = sequence_table(p, tensors)
        self.blocks = block_table(p, tensors)
        self.key_cache = kv_cache(p, tensors, "key_cache")
        self.value_cache = kv_cache(p, tensors, "value_cache")
        self.rules = score_rules(p, tensors)
        self.out = output(p, tensors)

    def of(self, params: Layout) -> dict[str, bytes]:
        """Those that a kernel's Params has."""
        return {name: packed for name, packed in vars(self).items() if name in params.fields}
