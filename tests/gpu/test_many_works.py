"""Prefill with several pieces of work a multiprocessor, some of them without keys between others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.test_matrix import TARGETS, check_backend
from tests.support.cases import Case

FLASH = next((target for target in TARGETS if target.on_gpu and target.backend == "flash"), None)
# Single tokens and a chunk are mixed, and tokens of no sequence are in the chunk's list.
LENGTHS = (*((60 + i % 97, 1) for i in range(100)), (150, 200))


@pytest.mark.skipif(FLASH is None, reason="needs a GPU with CuPy")
@pytest.mark.parametrize("padding", [0, 640])
@pytest.mark.parametrize(
    ("head_size", "cache"), [(64, ""), (96, ""), (128, ""), (192, ""), (256, ""), (64, "float8e4m3fn"), (128, "int8")]
)
def test_works_without_keys_between_others(cupy: Any, head_size: int, cache: str, padding: int) -> None:
    quant = "PER_TENSOR" if cache else "NONE"
    check_backend(
        FLASH,
        Case(
            io="bfloat16",
            cache=cache,
            k_quant=quant,
            v_quant=quant,
            head_size=head_size,
            kv_num_heads=8,
            group_size=4,
            lengths=LENGTHS,
            padding=padding,
        ),
    )
