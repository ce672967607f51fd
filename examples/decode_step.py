"""Two sequences on one paged cache: their prompts in one call, then a decode step."""

import numpy as np

from pagedattn import paged_attention
from pagedattn.cache import BlockPool, BlockTable, allocate_cache, assemble

rng = np.random.default_rng(0)
pool = BlockPool(num_blocks=8)
key_cache, value_cache = allocate_cache(8, block_size=16, kv_num_heads=2, head_size=64, dtype="float16")
tables = [BlockTable(pool, block_size=16), BlockTable(pool, block_size=16)]

for counts in [(20, 5), (1, 1)]:  # new tokens of each sequence
    for table, count in zip(tables, counts, strict=True):
        table.append(count)
    batch = assemble(list(zip(tables, counts, strict=True)))
    query, key, value = (rng.standard_normal((sum(counts), heads * 64)).astype(np.float16) for heads in (8, 2, 2))
    result = paged_attention(query, key, value, key_cache, value_cache, **batch.inputs, num_heads=8, kv_num_heads=2)
    print(f"{sum(counts)} new tokens, blocks {[table.blocks for table in tables]}: output {result.output.shape}")
