"""A latent attention layer on the GPU: against float64 and not absorbed, rotated inside and outside, in any steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mla_layer import Shape, check_layer, check_rotation

HEADS = [Shape(heads) for heads in (1, 3, 16, 20, 128)]
WIDTHS = [
    *(Shape(heads, 256, 32) for heads in (1, 20, 128)),
    *(Shape(heads, 128, 32) for heads in (3, 16, 128)),
    *(Shape(heads, 960, 64) for heads in (1, 20)),
]
SCHEDULES = {
    "whole": [(131, 1, 70), (1, 1, 1), (2, 2, 2), (1, 0, 2)],
    "chunked": [(80, 1, 37), (51, 0, 33), (1, 1, 1), (2, 1, 2), (1, 1, 0)],
    "decoded": [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)] * 6,
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", HEADS + WIDTHS, ids=str)
def test_layer_is_right(cupy: Any, shape: Shape, io: str, schedule: list[tuple[int, ...]]) -> None:
    check_layer(shape, io, schedule, cupy, backend=shape.backend)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", HEADS[2:] + WIDTHS, ids=str)
def test_rotation_before_the_call_gives_the_same_bits(
    cupy: Any, shape: Shape, io: str, schedule: list[tuple[int, ...]]
) -> None:
    check_rotation(shape, io, schedule, cupy, backend=shape.backend)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("keys", [16, 64])
def test_any_split_of_the_keys(cupy: Any, keys: int, schedule: list[tuple[int, ...]]) -> None:
    check_layer(Shape(16), "bfloat16", schedule, cupy, backend="latent", split_keys=keys)


@pytest.mark.parametrize("shape", [Shape(16), Shape(3, 128, 32)], ids=str)
def test_layer_is_right_on_dense_too(cupy: Any, shape: Shape) -> None:
    check_layer(shape, "bfloat16", SCHEDULES["chunked"], cupy, backend="dense")
