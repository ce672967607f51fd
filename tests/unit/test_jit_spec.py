from dataclasses import dataclass

import numpy as np
import pytest

from pagedattn import dtypes
from pagedattn.jit.spec import Spec
from tests.support.tiny_kernel import KERNEL, TinySpec, write_sources

SPEC = TinySpec(dtypes.BFLOAT16, 128, True)


def test_renders_as_a_template_argument():
    assert SPEC.cpp() == "TinySpec{.io = DType::bf16, .width = 128, .negate = true}"
    assert KERNEL.expression(SPEC) == f"tiny<{SPEC.cpp()}>"


def test_short_form():
    assert str(SPEC) == "io=bf16,width=128,negate=1"


@pytest.mark.parametrize("dtype", dtypes.ALL)
def test_every_element_type(dtype):
    assert f".io = DType::{dtype.cpp}," in TinySpec(dtype, 1, False).cpp()


@pytest.mark.parametrize(
    ("width", "error"), [(1.0, TypeError), ("1", TypeError), (np.int32(1), TypeError), (2**31, OverflowError)]
)
def test_other_values_are_refused(width, error):
    with pytest.raises(error, match="width"):
        TinySpec(dtypes.FLOAT16, width, False).cpp()


def test_equal_specs_are_one_key():
    assert {SPEC: 1}[TinySpec(dtypes.BFLOAT16, 128, True)] == 1
    assert TinySpec(dtypes.BFLOAT16, 128, False) != SPEC


def test_the_spec_of_another_kernel_is_refused():
    @dataclass(frozen=True)
    class Other(Spec):
        io: dtypes.DType

    with pytest.raises(TypeError, match="tiny: expected TinySpec, got Other"):
        KERNEL.expression(Other(dtypes.FLOAT16))


def test_translation_unit(tmp_path):
    sources = write_sources(tmp_path)
    lines = KERNEL.translation_unit(SPEC, sources).splitlines()
    assert lines[0] == f"// {sources.digest('tiny')}"
    assert lines[1] == '#line 1 "kernels/tiny.cu"'
    assert lines[2:].index("#include <pagedattn/tiny.cuh>") == 1
    assert lines[-1] == f"template __global__ void tiny<{SPEC.cpp()}>(const __grid_constant__ TinyParams);"
