"""A latent attention layer on the NumPy backend, and small on the CUDA kernels, run on the CPU."""

from __future__ import annotations

import pytest

from pagedattn.testing import emulate
from tests.support.mla_layer import Shape, check_layer, check_rotation

from . import toolchain

emulated = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

SMALL = {"nope": 16, "value": 24, "hidden": 32, "q_rank": 24}
SHAPES = [
    Shape(3, 128, 32, **SMALL),
    Shape(20, 256, 32, **SMALL),
    Shape(16, **SMALL),
    Shape(1, 960, 64, **SMALL),
]
SCHEDULES = {
    "whole": [(27, 1, 14), (1, 1, 1), (2, 1, 2)],
    "chunked": [(19, 1, 5), (8, 0, 9), (1, 1, 1), (2, 0, 1)],
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, Shape(128, 128, 32, **SMALL)], ids=str)
def test_layer_is_right_on_numpy(shape, io, schedule):
    check_layer(shape, io, schedule)


@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_before_the_call_gives_the_same_bits_on_numpy(shape, io):
    check_rotation(shape, io, SCHEDULES["chunked"])


@emulated
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_is_right_on_the_kernels(shape, io):
    with emulate():
        check_layer(shape, io, SCHEDULES["chunked"], backend=shape.backend)


@emulated
@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[-1:], ids=str)
def test_rotation_before_the_call_gives_the_same_bits_on_the_kernels(shape):
    with emulate():
        check_rotation(shape, "bfloat16", SCHEDULES["chunked"], backend=shape.backend)
