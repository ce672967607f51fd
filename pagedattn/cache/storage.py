"""The storage itself: allocating caches, and copying blocks inside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagedattn.cache.block_pool import integer
from pagedattn.contract import LAYOUTS, TYPES
from pagedattn.errors import InvalidArgumentError


def allocate_cache(
    num_blocks: int,
    block_size: int,
    kv_num_heads: int,
    head_size: int,
    dtype: str = "float16",
    *,
    kv_cache_layout: str = "SEPARATE",
    xp: Any = np,
) -> tuple[Any, Any]:
    """Key and value caches of one layer, every value 0.

    Parameters
    ----------
    num_blocks, block_size, kv_num_heads, head_size : int
    dtype : str
        "float16", "bfloat16", "float32", "int8", "float8e4m3fn", or "int4", which is packed in uint8.
    kv_cache_layout : str
        "LATENT" gives one cache and None.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    key_cache, value_cache : (num_blocks, block_size, kv_num_heads, head_size)
        For int4 the last dimension is ``(head_size + 1) // 2`` bytes, full of 0x88: codes are stored as code + 8.

    Raises
    ------
    InvalidArgumentError
        A type or layout is unknown, a size is negative, or the slots are too many for int32.
    """
    for name, size in (
        ("num_blocks", num_blocks),
        ("block_size", block_size),
        ("kv_num_heads", kv_num_heads),
        ("head_size", head_size),
    ):
        if integer(name, size) < 0:
            raise InvalidArgumentError(f"{name}: expected a count >= 0, got {size}.")
    rows = {row.name: row for row in TYPES["T_CACHE"]}
    if dtype not in rows:
        raise InvalidArgumentError(f"dtype: expected one of {', '.join(rows)}, got {dtype!r}.")
    if kv_cache_layout not in LAYOUTS:
        raise InvalidArgumentError(f"kv_cache_layout: expected one of {', '.join(LAYOUTS)}, got {kv_cache_layout!r}.")
    if num_blocks * block_size > np.iinfo(np.int32).max:
        raise InvalidArgumentError(
            f"num_blocks * block_size: expected at most 2**31 - 1 slots, because slot_mapping "
            f"is int32, got {num_blocks} * {block_size}."
        )
    row = rows[dtype]
    shape = (num_blocks, block_size, kv_num_heads, row.storage_elements(head_size))
    # 0 is the code of 0.0 in every type but int4, where the stored nibble is code + 8.
    fill = 0x88 if dtype == "int4" else 0
    caches = [
        xp.full(shape, fill, np.uint8).view(row.numpy) if row.bits <= 8 else xp.zeros(shape, row.numpy)
        for _ in range(1 if kv_cache_layout == "LATENT" else 2)
    ]
    return caches[0], caches[1] if len(caches) > 1 else None


def copy_blocks(cache: Any, copies: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks inside a cache, in place and as if one after the other.

    Parameters
    ----------
    cache : (num_blocks, ...), NumPy or CuPy, written
    copies : iterable of (source, destination)
        What `BlockTable.append` returned.

    Raises
    ------
    InvalidArgumentError
        An id is not a block of the cache, or the cache cannot be written; nothing was copied.
    """
    copies = [(integer("source", source), integer("destination", destination)) for source, destination in copies]
    if not copies:
        return
    blocks = cache.shape[0]
    for block in (block for pair in copies for block in pair):
        if not 0 <= block < blocks:  # -1, an unmapped entry, would be the last block
            raise InvalidArgumentError(f"block {block}: expected an id in [0, {blocks}), the blocks of the cache.")
    if isinstance(cache, np.ndarray) and not cache.flags.writeable:
        raise InvalidArgumentError("cache: expected a writeable array, got a read-only one.")
    if cache.dtype.itemsize == 1:
        cache = cache.view(np.uint8)  # CuPy moves bytes, but has no float8 arithmetic
    sources, destinations = (list(ids) for ids in zip(*copies, strict=True))
    if set(sources) & set(destinations) or len(set(destinations)) < len(destinations):
        # One copy may read, or write again, what another wrote.
        for source, destination in copies:
            cache[destination] = cache[source]
    else:
        cache[destinations] = cache[sources]
