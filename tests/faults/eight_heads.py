"""Calls made as wide as Hopper's decode kernel needs: eight kv heads or a multiple, rows of at least 64 bytes.

Heads and channels are there several times over, and the scale is the smaller for it, so each copy must give what the
call by itself does, and all copies the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any, TypeVar

import numpy as np

from pagedattn.dtypes import INT4
from pagedattn.kernels import decode_heads_sm90

from .scene import Array, Call, assert_same_bytes

Outcome = TypeVar("Outcome", bound=Any)


def copies(call: Call) -> tuple[int, int]:
    """How often heads, and the channels of a head, have to be there."""
    kv_heads = int(call["kv_num_heads"])
    head_size = call["key"].shape[1] // kv_heads
    wanted = 128 if call.cache_dtype is INT4 else 64
    return lcm(kv_heads, decode_heads_sm90.HEADS) // kv_heads, max(1, wanted // head_size)


def widen(call: Call) -> Call:
    """The call with every head and channel several times."""
    heads, channels = copies(call)
    if heads == channels == 1:
        return call
    assert channels == 1 or not call.attributes.get("do_rotary"), "copies of channels would not be rotated alike"

    def rows(x: Array, count: int) -> Array:
        return np.tile(x.reshape(x.shape[0], count, -1), (1, heads, channels)).reshape(x.shape[0], -1)

    wide: dict[str, Any] = {
        "query": rows(call["query"], call["num_heads"]),
        "key": rows(call["key"], call["kv_num_heads"]),
        "value": rows(call["value"], call["kv_num_heads"]),
        "num_heads": heads * call["num_heads"],
        "kv_num_heads": heads * call["kv_num_heads"],
    }
    head_size = call["key"].shape[1] // call["kv_num_heads"]
    wide["scale"] = (call.attributes.get("scale") or head_size**-0.5) / channels
    for name, shape in {
        "key_cache": (1, 1, heads, channels),
        "value_cache": (1, 1, heads, channels),
        "head_sink": (heads,),
        "q_norm_weight": (channels,),
        "k_norm_weight": (channels,),
        "attention_bias": (1, heads, 1, 1),
    }.items():
        if name in call.arrays:
            wide[name] = np.tile(call[name], shape)
    for name in ("k_scale", "v_scale"):
        if name in call.arrays and call[name].ndim == 3:
            wide[name] = np.tile(call[name], (heads, 1, channels))
    return call.change(**wide)


def narrow(outcome: Outcome, call: Call) -> Outcome:
    """One copy of what a widened call gave, where they are all the same."""
    heads, channels = copies(call)

    def one(x: Array, channels: int) -> Array:
        parts = x.reshape(*x.shape[:-2], heads, x.shape[-2] // heads, channels, x.shape[-1] // channels)
        first = parts[..., :1, :, :1, :]
        assert_same_bytes(parts, np.broadcast_to(first, parts.shape))
        return np.ascontiguousarray(first[..., 0, :, 0, :])

    assert outcome.output_qk is None, "copies of scores are not looked at"
    return replace(
        outcome,
        output=one(outcome.output, channels),
        key_cache=one(outcome.key_cache, channels),
        value_cache=one(outcome.value_cache, channels),
        lse=None if outcome.lse is None else one(outcome.lse[..., None], 1)[..., 0],
    )
