"""A decode step on the GPU whose lengths grow, eager or from a graph, for tests of graphs and streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn import Float8View, PagedAttention, codec
from pagedattn.dtypes import BFLOAT16, BY_NAME


@dataclass(frozen=True)
class Model:
    """Sizes of a step; ``v_head_size`` makes it LATENT, ``new_tokens`` of each sequence a chunk."""

    batch_size: int = 3
    new_tokens: int = 1
    num_heads: int = 8
    kv_num_heads: int = 2
    head_size: int = 64
    v_head_size: int = 0
    cache: str = "bfloat16"
    window: int = -1
    capacity: int = 512
    block_size: int = 16

    def __str__(self) -> str:
        layout = "latent" if self.v_head_size else "separate"
        new = f"-n{self.new_tokens}" if self.new_tokens > 1 else ""
        return f"{layout}-{self.cache}-h{self.num_heads}.{self.kv_num_heads}-d{self.head_size}-w{self.window}{new}"


class Decoder:
    """One layer's arrays on the GPU, changed in place from step to step.

    Parameters
    ----------
    model : Model
    metadata : sequence of int, optional
        attention_metadata.
    """

    def __init__(
        self, cupy: Any, model: Model, metadata: tuple[int, ...] | None = None, backend: str | None = None
    ) -> None:
        self.cupy, self.model = cupy, model
        m = model
        rng = np.random.default_rng(5)
        quantized = m.cache not in ("float16", "bfloat16")
        self.operator = PagedAttention(
            num_heads=m.num_heads,
            kv_num_heads=m.kv_num_heads,
            scale=0.1,
            local_window_size=m.window,
            return_lse=True,
            v_head_size=m.v_head_size,
            kv_cache_layout="LATENT" if m.v_head_size else "SEPARATE",
            backend=backend,
            k_quant_type="PER_TENSOR" if quantized else "NONE",
            v_quant_type="PER_TENSOR" if quantized and not m.v_head_size else "NONE",
            k_cache_dtype="int4" if m.cache == "int4" else "",
            v_cache_dtype="int4" if m.cache == "int4" and not m.v_head_size else "",
        )
        blocks = m.capacity // m.block_size
        table = rng.permutation(m.batch_size * blocks).reshape(m.batch_size, blocks)
        dtype = BY_NAME[m.cache]
        tokens = m.batch_size * m.new_tokens
        shape = (m.batch_size * blocks, m.block_size, m.kv_num_heads, m.head_size)
        self.arrays: dict[str, Any] = {
            "query": cupy.empty((tokens, m.num_heads * m.head_size), BFLOAT16.numpy),
            "key": cupy.empty((tokens, m.kv_num_heads * m.head_size), BFLOAT16.numpy),
            "cumulative_sequence_length": cupy.arange(m.batch_size + 1, dtype=np.int32) * m.new_tokens,
            "past_seqlens": cupy.zeros(m.batch_size, np.int32),
            "block_table": cupy.asarray(table.astype(np.int32)),
        }
        if not m.v_head_size:
            self.arrays["value"] = cupy.empty_like(self.arrays["key"])
        for name in ("key_cache",) if m.v_head_size else ("key_cache", "value_cache"):
            codes = codec.encode(
                rng.standard_normal(shape, np.float32), dtype, np.float32([1 / 32]) if quantized else None
            )
            raw = cupy.asarray(codes.view(f"u{codes.itemsize}"))
            self.arrays[name] = Float8View(raw) if m.cache == "float8e4m3fn" else raw.view(dtype.numpy)
            if quantized:
                self.arrays["k_scale" if name == "key_cache" else "v_scale"] = cupy.full(1, 1 / 32, np.float32)
        if metadata is not None:
            self.arrays["attention_metadata"] = np.array(metadata, np.int32)

    def prepare(self, past: list[int], seed: int) -> None:
        """Write a step's lengths and new rows into the arrays, on the current stream."""
        rng = np.random.default_rng(seed)
        self.arrays["past_seqlens"].set(np.array(past, np.int32))
        for name in ("query", "key", "value"):
            if name in self.arrays:
                x = self.arrays[name]
                x.view(np.uint16).set(rng.standard_normal(x.shape, np.float32).astype(BFLOAT16.numpy).view(np.uint16))

    def step(self) -> tuple[Any, Any]:
        """Issue the call; output and lse on the device."""
        result = self.operator(**self.arrays)
        return result.output, result.lse

    def caches(self) -> list[np.ndarray[Any, Any]]:
        """Bits of the caches."""
        arrays = [self.arrays[name] for name in ("key_cache", "value_cache") if name in self.arrays]
        return [(x.array if isinstance(x, Float8View) else x).view(np.uint8).get() for x in arrays]


def host(results: tuple[Any, Any]) -> list[bytes]:
    """Bits of a step's results."""
    return [x.view(np.uint8).get().tobytes() for x in results]
