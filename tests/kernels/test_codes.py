"""Codes of new keys and values are those of the NumPy backend, which divides; the kernel goes a shorter way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedattn import PagedAttention
from pagedattn.dtypes import BFLOAT16, BY_NAME
from tests.faults.targets import Target
from tests.kernels.test_matrix import TARGETS

Array = np.ndarray[Any, np.dtype[Any]]
TOKENS, HEADS, BLOCK = 64, 2, 16


def parameters() -> list[Any]:
    return [
        pytest.param(
            target, cache, size, id=f"{target}-{cache}-{size}", marks=[pytest.mark.gpu] if target.on_gpu else []
        )
        for target in TARGETS
        if target.backend in ("decode", "flash", "dense")
        for cache in ("int8", "float8e4m3fn", "int4")
        for size in (40, 128)
    ]


def scales(rng: np.random.Generator, size: int) -> Array:
    """Scales of channels. Eight neighbours are prepared together, and one very large or small changes the way."""
    ones = np.float32(1 - 2.0**-24)  # whose inverse is the hardest to round
    kinds = [
        lambda: rng.uniform(0.01, 2.0, 8),
        lambda: ones * 2.0 ** rng.integers(-40, 40, 8),
        lambda: 2.0 ** rng.uniform(-59, 59, 8),
        lambda: np.where(np.arange(8) == 3, 2.0**70, rng.uniform(0.01, 2.0, 8)),
        lambda: np.where(np.arange(8) == 5, 2.0**-70, ones),
        lambda: 2.0 ** rng.integers(-149, -120, 8),
    ]
    rows = [np.concatenate([kinds[i % len(kinds)]() for i in range(h, h + size // 8)]) for h in range(HEADS)]
    return np.stack(rows).astype(np.float32)[:, None, :]


def values(rng: np.random.Generator, scale: Array) -> Array:
    """New rows: codes times their scales, what lies halfway between two, powers of two, and what is no number."""
    shape = (TOKENS, *scale.shape[::2])
    steps = rng.choice([0.5, 1.0, 2.0**-9, 2.0**-10], shape) * rng.integers(-300, 300, shape)
    x = np.where(rng.random(shape) < 0.5, steps, 2.0 ** rng.integers(-12, 9, shape)) * scale[:, 0].astype(np.float64)
    x = x.astype(np.float32).astype(BFLOAT16.numpy)
    x[rng.random(shape) < 0.01] = np.inf
    x[rng.random(shape) < 0.01] = -np.inf
    x[rng.random(shape) < 0.01] = np.nan
    x[rng.random(shape) < 0.02] = -0.0
    return x.reshape(TOKENS, -1)


@pytest.mark.skipif(not TARGETS, reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize(("target", "cache", "size"), parameters())
def test_codes_are_those_of_a_division(target: Target, cache: str, size: int) -> None:
    rng = np.random.default_rng(size)
    dtype = BY_NAME[cache]
    k_scale, v_scale = scales(rng, size), scales(rng, size)
    inputs: dict[str, Array] = {
        "query": rng.standard_normal((TOKENS, HEADS * size), np.float32).astype(BFLOAT16.numpy),
        "key": values(rng, k_scale),
        "value": values(rng, v_scale),
        "cumulative_sequence_length": np.arange(TOKENS + 1, dtype=np.int32),
        "past_seqlens": np.zeros(TOKENS, np.int32),
        "block_table": np.arange(TOKENS, dtype=np.int32)[:, None],
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": HEADS}
    for side in "kv":
        attributes |= {f"{side}_quant_type": "PER_CHANNEL", f"{side}_cache_dtype": cache if cache == "int4" else ""}
    shape = (TOKENS, BLOCK, HEADS, dtype.storage_elements(size))

    def stored(where: Target | None) -> list[Array]:
        caches = {name: np.zeros(shape, dtype.numpy) for name in ("key_cache", "value_cache")}
        if where is None:
            PagedAttention(**attributes, backend="numpy")(**inputs, **caches)
            return [x.view(np.uint8)[:, 0] for x in caches.values()]
        given = {name: where.place(x) for name, x in {**inputs, **caches}.items()}
        with where.active():
            PagedAttention(**attributes, backend=where.backend)(**given)
        return [where.fetch(given[name], dtype.numpy).view(np.uint8)[:, 0] for name in caches]

    for got, want in zip(stored(target), stored(None), strict=True):
        np.testing.assert_array_equal(got, want)
