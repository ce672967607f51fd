"""Paged cache helpers: who owns which block, where a token goes, and the arrays that tell the operator.

Three owners, each ignorant of the next:

* `BlockPool` counts references to block ids and remembers which blocks hold which content;
* `BlockTable` is one sequence: its blocks, its length, and how it grows, forks, shrinks and forgets;
* `assemble` turns tables into the arrays of one call; `allocate_cache` and `copy_blocks` are the storage itself.

A step of a server is ``copies = table.append(n)`` for each sequence that runs, `copy_blocks` of the copies, one
`assemble` of all of them, the model's layers, and ``table.commit(tokens)`` for what is final::

    pool = BlockPool(num_blocks)
    table = BlockTable(pool, block_size)
    table.append(len(prompt))
    batch = assemble([(table, len(prompt))])
    paged_attention(query, key, value, key_cache, value_cache, **batch.inputs, num_heads=8, kv_num_heads=4)

Nothing here looks at a key or a value, so a table serves every layer that keeps the same positions. Layers that keep
others (full attention beside a sliding window) need a table each.
"""

from __future__ import annotations

from pagedattn.cache.batch import Batch, assemble
from pagedattn.cache.block_pool import BlockPool, OutOfBlocksError, content_key
from pagedattn.cache.block_table import BlockTable, window_blocks
from pagedattn.cache.storage import allocate_cache, copy_blocks

__all__ = [
    "Batch",
    "BlockPool",
    "BlockTable",
    "OutOfBlocksError",
    "allocate_cache",
    "assemble",
    "content_key",
    "copy_blocks",
    "window_blocks",
]
