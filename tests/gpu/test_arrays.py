"""Arrays of other libraries and odd layouts on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import InvalidArgumentError, PagedAttention, paged_attention
from tests.faults.targets import CupyTarget, gpu_count
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits

CASES = [
    Case(io="bfloat16"),
    Case(io="float16", lengths=((30, 1), (7, 1))),
    Case(io="bfloat16", cache="float8e4m3fn", k_quant="PER_TENSOR", v_quant="PER_CHANNEL"),
    Case(io="float16", cache="int8", k_quant="PER_CHANNEL", v_quant="PER_TENSOR", sink=True, window=9),
]


def host_result(case):
    built = build(case)
    return built, built.copy().run(paged_attention)


def close(got, want):
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02, rtol=0.02)


@pytest.fixture
def torch(cupy):
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    return torch


def to_torch(torch, x):
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    x = np.ascontiguousarray(x)
    if x.dtype.kind == "V":
        bits = torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8).copy())
        return bits.cuda().view(names[x.dtype.name])
    return torch.from_numpy(x.copy()).cuda()


def from_torch(torch, t, dtype):
    raw = t.view(torch.int16) if t.element_size() == 2 else t.view(torch.uint8) if t.element_size() == 1 else t
    return raw.cpu().numpy().view(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_tensors_in_and_out_without_a_copy(torch, case):
    built, want = host_result(case)
    inputs = {name: to_torch(torch, x) for name, x in built.inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = paged_attention(**inputs, **built.attributes, **built.options)
    stream.synchronize()
    assert type(got.output) is torch.Tensor
    assert got.output.dtype == inputs["query"].dtype
    assert got.key_cache_out is inputs["key_cache"]
    close(from_torch(torch, got.output, want.output.dtype), want.output)
    # The new rows are in the caller's own cache.
    stored = from_torch(torch, inputs["key_cache"], want.key_cache_out.dtype)
    changed = stored.view(np.uint8) != built["key_cache"].view(np.uint8)
    assert changed.any()


@pytest.mark.parametrize(
    "quantized", [{}, {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}], ids=["bf16", "fp8"]
)
def test_torch_graph_capture(torch, quantized):
    built, want = host_result(Case(io="bfloat16", lengths=((30, 1), (7, 1), (100, 1)), **quantized))
    inputs = {name: to_torch(torch, x) for name, x in built.inputs.items()}
    operator = PagedAttention(**built.attributes, **built.options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operator(**inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of torch's own
        result = operator(**inputs)
    result.output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    close(from_torch(torch, result.output, want.output.dtype), want.output)


def test_dlpack_and_cuda_array_interface_objects(cupy):
    built, want = host_result(Case(io="float16"))
    target = CupyTarget()

    class Interface:
        def __init__(self, x):
            self.x = x
            self.__cuda_array_interface__ = x.__cuda_array_interface__

    class Capsule:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **keywords):
            return self.x.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    for wrap in (Interface, Capsule):
        inputs = {name: wrap(target.place(x)) for name, x in built.inputs.items()}
        got = paged_attention(**inputs, **built.attributes, **built.options)
        close(got.output.get(), want.output)
        assert got.key_cache_out is inputs["key_cache"]


def test_arrays_on_host_and_device_are_refused(cupy):
    built, _ = host_result(Case(io="float16"))
    inputs = {name: CupyTarget().place(x) for name, x in built.inputs.items()}
    inputs["past_seqlens"] = built["past_seqlens"]
    with pytest.raises(
        InvalidArgumentError, match="past_seqlens: expected an array on cuda:0, the device of query, got"
    ):
        paged_attention(**inputs, **built.attributes, **built.options)


def test_out_is_written_and_returned(cupy):
    built, want = host_result(Case(io="float16"))
    inputs = {name: CupyTarget().place(x) for name, x in built.inputs.items()}
    out = cupy.full(want.output.shape, np.nan, np.float16)
    got = paged_attention(**inputs, **built.attributes, **built.options, out=out)
    assert got.output is out
    close(out.get(), want.output)


def test_a_device_that_is_not_current(cupy):
    if gpu_count() < 2:
        pytest.skip("needs two GPUs")
    built, want = host_result(Case(io="float16"))
    with cupy.cuda.Device(1):
        inputs = {name: CupyTarget().place(x) for name, x in built.inputs.items()}
    with cupy.cuda.Device(0):
        first = paged_attention(**inputs, **built.attributes, **built.options)
        assert cupy.cuda.runtime.getDevice() == 0
        assert first.output.device.id == 1
    close(first.output.get(), want.output)
    inputs["query"] = CupyTarget().place(built["query"])
    with pytest.raises(InvalidArgumentError, match="the device of query"):
        paged_attention(**inputs, **built.attributes, **built.options)


def test_results_are_the_same_on_every_stream(cupy):
    built, _ = host_result(Case(io="bfloat16", lengths=((500, 1), (90, 1))))
    inputs = {name: CupyTarget().place(x) for name, x in built.inputs.items()}
    operator = PagedAttention(**built.attributes, **built.options)
    first = operator(**inputs).output.view(np.uint16).get()
    for _ in range(3):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            again = operator(**inputs).output
            stream.synchronize()
        assert_same_bits(again.view(np.uint16).get(), first)
