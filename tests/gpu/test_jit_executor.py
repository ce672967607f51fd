"""The compile-and-launch layer on a GPU: a throw-away kernel from source text to results."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import dtypes
from pagedattn.errors import MissingDependencyError
from pagedattn.jit import cuda
from pagedattn.jit.compiler import Compiler
from pagedattn.jit.disk_cache import DiskCache
from pagedattn.jit.launch import CudaExecutor
from tests.support.tiny_kernel import KERNEL, PARAMS, ROWS, TinySpec, shared_bytes, threads, write_sources

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy():
    try:
        cuda.require_device()
        return cuda.cupy()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture
def executor(cupy, tmp_path):
    return CudaExecutor(0, Compiler(write_sources(tmp_path / "sources"), DiskCache(tmp_path / "cache")))


def run(executor, source, out, spec, factor=2.0):
    rows = ROWS.pack(data=source.data.ptr, stride=1, count=source.size)
    packed = PARAMS.pack(out=out.data.ptr, rows=rows, n=out.size, factor=factor)
    grid = (-(-out.size // threads(spec)), 1, 1)
    executor.launch(executor.load(KERNEL, spec), grid, threads(spec), shared_bytes(spec), packed)


def expected(source, spec, factor=2.0):
    value = source * np.float32(factor) * (-1 if spec.negate else 1)
    return value + spec.width + (0.5 if spec.io is dtypes.BFLOAT16 else 0)


@pytest.mark.parametrize("io", [dtypes.FLOAT16, dtypes.BFLOAT16])
@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("width", [128, 48 * 256 + 1])  # the second needs more shared memory than the default
def test_result(cupy, executor, io, negate, width):
    spec = TinySpec(io, width, negate)
    source = np.arange(1000, dtype=np.float32)
    out = cupy.full(1000, np.nan, dtype=cupy.float32)
    run(executor, cupy.asarray(source), out, spec)
    np.testing.assert_array_equal(out.get(), expected(source, spec))


def test_the_current_stream_is_used_and_can_be_captured(cupy, executor):
    spec = TinySpec(dtypes.FLOAT16, 128, False)
    executor.load(KERNEL, spec)
    source, out = cupy.arange(256, dtype=cupy.float32), cupy.zeros(256, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        run(executor, source, out, spec)
        graph = stream.end_capture()
    assert not out.get().any()  # recorded, not run
    for factor in (1.0, 3.0):
        source[...] = cupy.arange(256) * factor
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), expected(np.arange(256, dtype=np.float32) * np.float32(factor), spec))


def test_a_second_executor_compiles_nothing(cupy, executor):
    spec = TinySpec(dtypes.FLOAT16, 128, False)
    executor.load(KERNEL, spec)
    other = CudaExecutor(0, Compiler(executor.compiler.sources, executor.compiler.cache))
    other.load(KERNEL, spec)
    assert (executor.compiler.compilations, other.compiler.compilations) == (1, 0)


def test_two_devices(cupy, executor, tmp_path):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    spec = TinySpec(dtypes.FLOAT16, 48 * 256 + 1, False)
    executors = [executor, CudaExecutor(1, executor.compiler)]
    arrays = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            arrays.append((cupy.arange(100, dtype=cupy.float32), cupy.zeros(100, dtype=cupy.float32)))
    for turn in range(20):
        device = turn % 2
        run(executors[device], *arrays[device], spec, factor=turn)
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(device):
            out = arrays[device][1].get()
        np.testing.assert_array_equal(out, expected(np.arange(100, dtype=np.float32), spec, turn))
