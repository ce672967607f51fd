"""Prefill with many pieces of work a multiprocessor, some of them without keys between others."""

from __future__ import annotations

from typing import Any

import pytest

from pagedattn.kernels import flash_prefill_sm90
from tests.kernels.test_matrix import ON_HOPPER, check_backend, needs_hopper
from tests.support.cases import Case

# Single tokens and a chunk are mixed, and tokens of no sequence are in the chunk's list.
LENGTHS = (*((40 + i % 61, 1) for i in range(30)), (150, 200))
KINDS = [(64, ""), (96, ""), (128, ""), (192, ""), (256, ""), (64, "float8e4m3fn"), (128, "int8")]


@needs_hopper
@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("padding", [0, 300])
@pytest.mark.parametrize(("head_size", "cache"), KINDS)
def test_works_without_keys_between_others(
    cupy: Any, head_size: int, cache: str, padding: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_prefill_sm90, "grid", lambda *sizes: (ctas, 1, 1))
    quant = "PER_TENSOR" if cache else "NONE"
    check_backend(
        ON_HOPPER["flash"],
        Case(
            io="bfloat16",
            cache=cache,
            k_quant=quant,
            v_quant=quant,
            head_size=head_size,
            kv_num_heads=2,
            group_size=5,
            lengths=LENGTHS,
            padding=padding,
        ),
    )
