"""Rolling caches give the bits of a cache that keeps everything, through the operator (contract section 9)."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import paged_attention
from pagedattn.cache import BlockPool, BlockTable, allocate_cache, assemble, window_blocks

HEADS, KV_HEADS, SIZE = 4, 2, 16
STEPS = [(40, 3, 0), (1, 5, 20), (17, 1, 20), *[(1, 1, 1)] * 40, (1, 0, 17), *[(1, 1, 1)] * 10]


def quantization(cache_dtype: str, per_channel: bool) -> dict:
    if cache_dtype == "float32":
        return {}
    scale = np.full((KV_HEADS, 1, SIZE) if per_channel else (1,), 0.03, np.float32)
    kind = "PER_CHANNEL" if per_channel else "PER_TENSOR"
    return {
        f"{name}_{what}": value
        for name in "kv"
        for what, value in (("scale", scale), ("quant_type", kind), ("cache_dtype", cache_dtype))
    }


class Run:
    """Three sequences over one cache, with tables of one policy."""

    def __init__(self, cache_dtype: str, window: int, policy: str) -> None:
        most = window_blocks(window, 16, 40)
        num_blocks = {"all": 3 * 8, "ring": 3 * most, "free list": 3 * most}[policy]
        self.pool = BlockPool(num_blocks)
        if policy == "ring":  # ids in another order than the full run's
            self.pool._free.reverse()
        options = {"all": {}, "ring": {"window": window, "ring_blocks": most}, "free list": {"window": window}}[policy]
        self.tables = [BlockTable(self.pool, 16, **options) for _ in range(3)]
        self.caches = allocate_cache(num_blocks, 16, KV_HEADS, SIZE, cache_dtype)
        for cache in self.caches:  # what no slot was given to must not be read
            cache.view(np.uint8)[:] = 0x7F if cache_dtype != "float32" else 0xFF

    def step(self, counts: tuple[int, ...], qkv: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
        for table, count in zip(self.tables, counts, strict=True):
            table.append(count)
        result = paged_attention(
            qkv,
            None,
            None,
            *self.caches,
            **assemble(list(zip(self.tables, counts, strict=True))).inputs,
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            return_lse=True,
            **options,
        )
        return result.output, result.lse


@pytest.mark.parametrize("policy", ["ring", "free list"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("cache_dtype", ["float32", "int8", "float8e4m3fn", "int4"])
@pytest.mark.parametrize("window", [1, 16, 21])
def test_a_mixed_batch_on_a_recycled_pool_equals_a_full_cache(policy, with_sink, cache_dtype, window):
    rng = np.random.default_rng(window)
    sink = rng.standard_normal(HEADS).astype(np.float32) if with_sink else None
    rolling, full = Run(cache_dtype, window, policy), Run(cache_dtype, window, "all")
    for counts in STEPS:
        qkv = rng.standard_normal((sum(counts), (HEADS + 2 * KV_HEADS) * SIZE)).astype(np.float32)
        options = {"local_window_size": window, "head_sink": sink, **quantization(cache_dtype, with_sink)}
        for got, expected in zip(rolling.step(counts, qkv, **options), full.step(counts, qkv, **options), strict=True):
            assert np.array_equal(got, expected)
            assert np.isfinite(got).all()
        for table in rolling.tables:
            assert len(table.blocks) <= window_blocks(window, 16, 40)
    assert full.pool.used > rolling.pool.used


@pytest.mark.parametrize("policy", ["ring", "free list"])
def test_a_window_that_is_never_full_evicts_nothing(policy):
    rng = np.random.default_rng(0)
    rolling, full = Run("float32", 500, policy), Run("float32", 500, "all")
    for counts in STEPS[:20]:
        qkv = rng.standard_normal((sum(counts), (HEADS + 2 * KV_HEADS) * SIZE)).astype(np.float32)
        got, _ = rolling.step(counts, qkv, local_window_size=500)
        expected, _ = full.step(counts, qkv)
        assert np.array_equal(got, expected)
    assert [len(table.blocks) for table in rolling.tables] == [len(table.blocks) for table in full.tables]
