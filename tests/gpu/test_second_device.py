"""Calls on a device that is not the current one, on a machine with two GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import InvalidArgumentError, PagedAttention, paged_attention
from pagedattn.graph import GraphedStep
from tests.faults.targets import gpu_count
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits

pytestmark = pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")

CASES = {
    "decode": Case(io="bfloat16", lengths=((30, 1), (7, 1), (100, 1))),
    "decode_int8": Case(io="float16", cache="int8", k_quant="PER_CHANNEL", v_quant="PER_TENSOR", sink=True, window=9),
    "flash": Case(io="bfloat16", head_size=128, lengths=((40, 90), (0, 33))),
    "latent": Case(
        io="bfloat16",
        mode="latent",
        head_size=576,
        v_head_size=512,
        kv_num_heads=1,
        group_size=16,
        scale=0.07,
        lengths=((70, 1), (130, 1)),
    ),
}


def on_device(cupy, device, built):
    with cupy.cuda.Device(device):
        return {name: cupy.asarray(x) for name, x in built.inputs.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_arrays_choose_the_device_not_the_current_one(cupy, case):
    built = build(case)
    operator = PagedAttention(**built.attributes, **built.options)
    results = []
    for device in (0, 1, 0, 1):  # one operator for both
        arrays = on_device(cupy, device, built)
        result = operator(**arrays)
        assert cupy.cuda.runtime.getDevice() == 0
        assert result.output.device.id == device
        assert result.key_cache_out is arrays["key_cache"]
        with cupy.cuda.Device(device):
            results.append((cupy.asnumpy(result.output), cupy.asnumpy(arrays["key_cache"])))
    for output, key_cache in results[1:]:
        assert_same_bits(output, results[0][0], "output")
        assert_same_bits(key_cache, results[0][1], "key_cache")


def test_a_step_is_captured_on_the_second_device(cupy):
    built = build(CASES["decode"])
    want = built.copy().run(paged_attention).output.astype(np.float32)
    arrays = on_device(cupy, 1, built)
    operator = PagedAttention(**built.attributes, **built.options)
    graph = GraphedStep(lambda: operator(**arrays), device=1)
    result = graph()
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        got = cupy.asnumpy(result.output).astype(np.float32)
    np.testing.assert_allclose(got, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["key", "value_cache", "block_table", "past_seqlens"])
def test_arrays_of_two_devices_are_refused_by_name(cupy, name):
    built = build(CASES["decode"])
    arrays = on_device(cupy, 1, built)
    arrays[name] = on_device(cupy, 0, built)[name]
    with cupy.cuda.Device(1):
        before = cupy.asnumpy(arrays["key_cache"])
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected an array on cuda:1.* got one on cuda:0"):
        paged_attention(**arrays, **built.attributes, **built.options)
    with cupy.cuda.Device(1):
        assert_same_bits(cupy.asnumpy(arrays["key_cache"]), before, "key_cache")
