"""One call's static facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedattn.dtypes import DType


class TensorInfo(NamedTuple):
    """What is known of an array without reading its values.

    ``strides`` count elements; ``device`` is as `Problem` has it; ``pointer`` is the address of the first element;
    ``whole_strides`` says that no stride, which a library may count in bytes, ends inside an element.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str
    strides: tuple[int, ...]
    pointer: int
    writeable: bool
    whole_strides: bool = True

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return 0 in self.shape
            step *= extent
        return True


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array whose elements lie in C order without gaps."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def imagined(number: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: str = "cpu") -> TensorInfo:
    """Array ``number`` of several that do not exist, to be checked like a call's: whole, each in memory of its own."""
    return TensorInfo(shape, dtype, device, dense_strides(shape), (number + 1) << 96, writeable=True)


@dataclass(frozen=True)
class Problem:
    """What is known of a call without reading an array: shapes, types, attributes, present inputs, host bounds.

    It is hashable and holds no array, so that everything chosen from it (backend, kernels, grid, workspace) stays
    right for every replay of a captured graph.

    Attributes
    ----------
    scale : float
        Resolved: never the attribute's 0.
    v_head_size : int
        Resolved: never the attribute's 0.
    rotary_dim, max_seq_len : int
        Channels that RoPE rotates and rows of cos_cache; 0 without ``do_rotary``.
    is_contiguous : bool
        There is no block table: block b, of block_size positions, is sequence b's.
    has_rotary_positions : bool
        The array ``rotary_positions`` holds each token's position for RoPE, apart from its position for the mask.
    bias_shape : tuple of int, or None
        Shape of attention_bias.
    max_query_len_bound, max_kv_len_bound : int
        From attention_metadata, clamped to token_count and to the block table's capacity; 0 = unknown.
    max_kv_len_lower_bound : int
        A lower bound of the longest context, a hint only; 0 = unknown.
    split_keys : int
        Keys of a split, where a backend splits; 0: as it chooses.
    device : str
        "cpu", "cuda:N", or "emulated" where a call on arrays in host memory takes the CUDA backends.
    """

    token_count: int
    batch_size: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    v_head_size: int
    num_blocks: int
    block_size: int
    max_blocks_per_sequence: int
    io_dtype: DType
    cache_dtype: DType
    mode: str
    scale: float
    is_contiguous: bool = False
    softcap: float = 0.0
    local_window_size: int = -1
    is_causal: bool = True
    do_rotary: bool = False
    rotary_interleaved: bool = False
    rotary_offset: int = 0
    rotary_dim: int = 0
    max_seq_len: int = 0
    has_qk_norm: bool = False
    qk_norm_epsilon: float = 1e-6
    k_quant_type: str = "NONE"
    v_quant_type: str = "NONE"
    has_slot_mapping: bool = False
    has_head_sink: bool = False
    has_query_positions: bool = False
    has_rotary_positions: bool = False
    bias_shape: tuple[int, int, int, int] | None = None
    qk_output: int = 0
    qk_dtype: DType | None = None
    return_lse: bool = False
    max_query_len_bound: int = 0
    max_kv_len_bound: int = 0
    max_kv_len_lower_bound: int = 0
    split_keys: int = 0
    device: str = "cpu"

    @property
    def is_latent(self) -> bool:
        """Whether values are the first channels of the key rows."""
        return self.mode == "latent"

    @property
    def is_packed(self) -> bool:
        """Whether query holds key and value too."""
        return self.mode == "packed"

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.kv_num_heads

    @property
    def capacity(self) -> int:
        """Positions that one row of the block table can name."""
        return self.max_blocks_per_sequence * self.block_size

    @property
    def slot_count(self) -> int:
        """Slots of the whole pool."""
        return self.num_blocks * self.block_size

    @property
    def has_window(self) -> bool:
        """Whether a token sees a bounded number of positions to its left."""
        return self.local_window_size > 0

    @property
    def has_plain_scores(self) -> bool:
        """Whether a score is q . k times a positive scale, without a cap or a bias."""
        return self.scale > 0 and not self.has_score_rules

    @property
    def has_score_rules(self) -> bool:
        """Whether scores are capped or biased."""
        return self.softcap > 0 or self.bias_shape is not None

    @property
    def query_len_bound(self) -> int:
        """Upper bound of new tokens in one sequence."""
        return self.max_query_len_bound or self.token_count

    @property
    def kv_len_bound(self) -> int:
        """Upper bound of a sequence's context, new tokens included."""
        return self.max_kv_len_bound or self.capacity

    @property
    def output_width(self) -> int:
        """Elements of one row of the output."""
        return self.num_heads * self.v_head_size
