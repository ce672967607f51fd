"""The shapes that `flash_prefill_sm80` is compiled in fit every GPU."""

from __future__ import annotations

import pytest

from pagedattn import dtypes
from pagedattn.jit.compiler import MAX_SHARED_BYTES
from pagedattn.kernels import flash_prefill_sm80 as kernel
from pagedattn.kernels.layouts import RESERVED_BYTES


@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
@pytest.mark.parametrize("rows", [1, kernel.SHORT_ROWS, kernel.SHORT_ROWS + 1, 1 << 20])
@pytest.mark.parametrize("cache", [dtypes.BFLOAT16, dtypes.FLOAT8E4M3FN, dtypes.INT4], ids=lambda dtype: dtype.name)
def test_a_shape_fits(capability: int, rows: int, cache: dtypes.DType) -> None:
    limit = MAX_SHARED_BYTES[capability]
    for head_size in range(8, 257, 8):
        spec = kernel.choose(dtypes.BFLOAT16, cache, head_size, rows, limit)
        assert spec.ctas * (kernel.shared_bytes(spec) + RESERVED_BYTES) <= limit + RESERVED_BYTES
        assert rows > kernel.SHORT_ROWS or spec.tile_rows == kernel.SHORT_ROWS
