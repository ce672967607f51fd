"""Storage: the key and value blocks of every layer, and the scales of quantized ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedattn import calibrate
from pagedattn.cache import allocate_cache, copy_blocks
from pagedattn.dtypes import BY_NAME

Scales = list[tuple[Any, Any]]  # (k_scale, v_scale) of each layer, (kv_num_heads, 1, head_size) float32


class KVCache:
    """Caches of all layers; block ids mean the same in each.

    Parameters
    ----------
    config : Config
        Of the model.
    num_blocks, block_size : int
    dtype : str
        As `allocate_cache` names it. A float type is also the type of query, key, value and attention output.
    scales : list, optional
        From `absmax_scales`; needed by "int8", "float8e4m3fn" and "int4".
    xp : module
        NumPy or CuPy.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
        scales: Scales | None = None,
        xp: Any = np,
    ) -> None:
        row = BY_NAME[dtype]
        if row.is_quantized and scales is None:
            raise ValueError(f"a {dtype} cache needs scales; see engine.calibrate_scales().")
        # A quantized cache says nothing of the activations. The CUDA backends take 16 bits.
        self.io = BY_NAME["float32" if xp is np else "float16"] if row.is_quantized else row
        self.dtype = row
        self.layers = [
            allocate_cache(num_blocks, block_size, config.kv_num_heads, config.head_size, dtype, xp=xp)
            for _ in range(config.num_layers)
        ]
        self.scales = scales if row.is_quantized else None

    def inputs(self, layer: int) -> dict[str, Any]:
        """Keyword arguments of `paged_attention` for one layer."""
        key_cache, value_cache = self.layers[layer]
        inputs = {"key_cache": key_cache, "value_cache": value_cache}
        if self.scales is not None:
            k_scale, v_scale = self.scales[layer]
            for name, scale in (("k", k_scale), ("v", v_scale)):
                inputs |= {
                    f"{name}_scale": scale,
                    f"{name}_quant_type": "PER_CHANNEL",
                    f"{name}_cache_dtype": self.dtype.name,
                }
        return inputs

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for pair in self.layers:
            for cache in pair:
                copy_blocks(cache, copies)

    def absmax_scales(self, dtype: str, xp: Any = np) -> Scales:
        """Scales under which the largest value that this float cache holds in a channel gets the largest code."""

        def scale(cache: Any) -> Any:
            rows = cache.reshape(-1, *cache.shape[2:])  # unused ones are zero, and make no difference
            return xp.asarray(calibrate(rows, dtype, "PER_CHANNEL").scale)

        return [(scale(key_cache), scale(value_cache)) for key_cache, value_cache in self.layers]
