"""The CUDA executor over a fake driver: devices, streams, limits and what is done once."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from pagedattn import dtypes
from pagedattn.errors import PagedAttentionError, UnsupportedError
from pagedattn.jit import cuda, driver, launch
from pagedattn.jit.disk_cache import Binary
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.launch import CudaExecutor, Launch
from tests.support.tiny_kernel import KERNEL, PARAMS, TinySpec

SPEC = TinySpec(dtypes.FLOAT16, 64, False)
WAITING = Kernel("tiny", TinySpec, PARAMS, lambda _: 128, lambda _: 0, waits_itself=True)
HUGE = Kernel("tiny", TinySpec, PARAMS, lambda _: 128, lambda spec: spec.width * 1024)


class FakeApi(cuda.Api):
    """A driver that notes the calls; the current device is per thread, as CUDA's is."""

    def __init__(self):
        self.calls = []
        self._thread = threading.local()
        self.current_stream = lambda: SimpleNamespace(ptr=100 + self.current, is_capturing=lambda: self.capturing)
        self.capturing = False
        self.version = 12030
        self.status = 0
        self.attributes = []

    @property
    def current(self):
        return getattr(self._thread, "device", 0)

    @contextmanager
    def device(self, device_id):
        previous, self._thread.device = self.current, device_id
        yield
        self._thread.device = previous

    def capability(self, device_id):
        return (9, 0) if device_id == 0 else (8, 0)

    def driver_version(self):
        return self.version

    def max_shared_bytes(self, device_id):
        return 232448

    def multiprocessors(self, device_id):
        return 132

    def load(self, cubin, entry, shared_bytes):
        self.calls.append(("load", self.current, entry))
        self.allowed = shared_bytes
        return object(), len(self.calls)

    def function(self, name):
        return getattr(self, name)

    def cuLaunchKernelEx(self, config, function, params, extra):
        config = config._obj
        attributes = [(config.attributes[i].id, config.attributes[i].value) for i in range(config.attribute_count)]
        self.calls.append(
            (
                "launch",
                self.current,
                function.value,
                tuple(config.grid),
                tuple(config.block),
                config.shared_bytes,
                config.stream,
                ctypes.string_at(params[0], PARAMS.size),
            )
        )
        self.attributes.append(attributes)
        return self.status

    def cuGetErrorName(self, status, text):
        text._obj.value = {719: b"CUDA_ERROR_LAUNCH_FAILED"}.get(status)
        return 0 if status == 719 else 1

    def cuGetErrorString(self, status, text):
        text._obj.value = {719: b"unspecified launch failure"}.get(status)
        return 0 if status == 719 else 1


class FakeCompiler:
    def __init__(self):
        self.compiled, self.many = [], []

    def compile(self, kernel, spec, arch):
        self.compiled.append((kernel, spec, arch))
        return Binary(b"cubin", f"{spec}@{arch}")

    def compile_many(self, items, arch, jobs):
        self.many.append((items, arch, jobs))


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    monkeypatch.setattr(cuda, "Api", lambda: fake)
    monkeypatch.setattr(driver, "function", fake.function)
    monkeypatch.setattr(cuda, "require_device", lambda: None)
    monkeypatch.setattr(cuda, "nvrtc", lambda: type("Nvrtc", (), {"archs": (80, 90)}))
    return fake


def packed(n=1):
    return PARAMS.pack(out=8, rows=bytes(24), n=n, factor=1)


def test_each_device_compiles_for_its_own_architecture(api):
    assert [CudaExecutor(device, FakeCompiler()).arch for device in (0, 1)] == ["sm_90a", "sm_80"]


def test_loads_once(api):
    compiler = FakeCompiler()
    executor = CudaExecutor(0, compiler)
    functions = []
    threads = [threading.Thread(target=lambda: functions.append(executor.load(KERNEL, SPEC))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, functions))) == 1
    assert api.calls == [("load", 0, f"{SPEC}@sm_90a")]


def test_nothing_is_loaded_within_a_capture(api):
    compiler = FakeCompiler()
    executor = CudaExecutor(0, compiler)
    api.capturing = True
    with pytest.raises(PagedAttentionError, match=r"^graph capture: tiny was not loaded before the capture began"):
        executor.load(KERNEL, SPEC)
    assert not compiler.compiled
    assert not api.calls
    api.capturing = False
    function = executor.load(KERNEL, SPEC)
    api.capturing = True
    assert executor.load(KERNEL, SPEC) is function


def test_launch_passes_everything_on(api):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)
    executor.launch(function, (5, 4, 3), 128, 256, packed(7))
    assert api.calls[-1] == ("launch", 0, function.pointer, (5, 4, 3), (128, 1, 1), 256, 100, packed(7))


def test_the_device_of_the_executor_is_used_and_the_caller_s_restored(api):
    executors = [CudaExecutor(device, FakeCompiler()) for device in (0, 1)]
    functions = [executor.load(KERNEL, SPEC) for executor in executors]
    assert [call[:2] for call in api.calls] == [("load", 0), ("load", 1)]
    for turn in range(20):
        device = turn % 2
        executors[device].launch(functions[device], (1, 1, 1), 32, 0, packed())
        name, at, *_, stream, _ = api.calls[-1]
        assert (name, at, stream) == ("launch", device, 100 + device)
        assert api.current == 0


def test_launches_may_have_all_shared_memory_of_the_device_and_kernels_not_more(api):
    executor = CudaExecutor(1, FakeCompiler())
    for width in (1, 227):
        executor.load(HUGE, TinySpec(dtypes.FLOAT16, width, False))
        assert api.allowed == 227 << 10
    with pytest.raises(
        UnsupportedError, match=r"tiny<TinySpec.*needs 233472 bytes of shared memory.*device 1 has 232448"
    ):
        executor.load(HUGE, TinySpec(dtypes.FLOAT16, 228, False))


@pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 65536, 1), (1, 1, 65536), (-1, 1, 1)])
def test_a_grid_beyond_the_limits_is_refused(api, grid):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)
    with pytest.raises(UnsupportedError, match=r"tiny<.*the grid \(.*beyond the limits \(2147483647, 65535, 65535\)"):
        executor.launch(function, grid, 128, 0, packed())
    assert api.calls[-1][0] == "load"


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_grid_launches_nothing(api, grid):
    executor = CudaExecutor(0, FakeCompiler())
    executor.launch(executor.load(KERNEL, SPEC), grid, 128, 0, packed())
    assert api.calls[-1][0] == "load"


def test_the_largest_grid_passes(api):
    executor = CudaExecutor(0, FakeCompiler())
    executor.launch(executor.load(KERNEL, SPEC), launch.MAX_GRID, 128, 0, packed())
    assert api.calls[-1][3] == launch.MAX_GRID


def test_parameters_beyond_the_limit_are_refused(api):
    executor = CudaExecutor(0, FakeCompiler())
    with pytest.raises(ValueError, match="5000 bytes of parameters"):
        executor.launch(executor.load(KERNEL, SPEC), (1, 1, 1), 128, 0, bytes(5000))


def test_threads_do_not_share_parameters(api):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)

    def run(n):
        for _ in range(200):
            executor.launch(function, (n, 1, 1), 128, 0, packed(n))

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = [call for call in api.calls if call[0] == "launch"]
    assert len(launches) == 600
    assert all(call[-1] == packed(call[3][0]) for call in launches)


def test_what_is_not_loaded_is_compiled_side_by_side_and_once(api):
    compiler = FakeCompiler()
    executor = CudaExecutor(1, compiler)
    specs = [TinySpec(dtypes.FLOAT16, width, False) for width in (16, 32, 48)]
    executor.load(KERNEL, specs[0])
    executor.compile_many((KERNEL, spec) for spec in [*specs, specs[1]])
    assert compiler.many == [([(KERNEL, specs[1]), (KERNEL, specs[2])], "sm_80", 2)]
    executor.compile_many((KERNEL, spec) for spec in specs[:2])  # one alone needs no thread
    assert len(compiler.many) == 1
    assert [call[:2] for call in api.calls] == [("load", 1)]


def test_what_is_prepared_is_issued_in_order_as_often_as_it_is_called(api):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)
    issue = executor.prepare(
        (Launch(function, grid, 32, 0, packed(grid[0])) for grid in ((2, 1, 1), (0, 1, 1), (3, 1, 1))), 7
    )
    assert api.calls[-1][0] == "load"
    for _ in range(2):
        issue()
    launches = api.calls[1:]
    assert [(grid[0], stream, params) for *_, grid, _, _, stream, params in launches] == 2 * [
        (2, 7, packed(2)),
        (3, 7, packed(3)),
    ]


def test_a_grid_is_checked_before_anything_is_issued(api):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)
    with pytest.raises(UnsupportedError, match="beyond the limits"):
        executor.prepare([Launch(function, (1, y, 1), 32, 0, packed()) for y in (1, 65536)], 0)
    assert api.calls[-1][0] == "load"


@pytest.mark.parametrize(
    ("device", "version", "kernel", "can"),
    [
        (0, 12030, WAITING, True),
        (0, 13000, WAITING, True),
        (0, 12020, WAITING, False),  # a capture would lose it
        (1, 13000, WAITING, False),  # compute capability 8.0
        (0, 13000, KERNEL, False),
    ],
)
@pytest.mark.parametrize("starts_early", [False, True])
def test_a_kernel_that_waits_itself_may_start_early_where_the_device_and_the_driver_can(
    api, device, version, kernel, can, starts_early
):
    api.version = version
    executor = CudaExecutor(device, FakeCompiler())
    launch = Launch(executor.load(kernel, SPEC), (1, 1, 1), 32, 0, packed())
    first = launch._replace(starts_early=starts_early)
    executor.prepare([first, launch._replace(grid=(0, 1, 1)), launch], 0)()
    # What is ahead of the first one is not ours, and may write the lengths that kernels read before they wait.
    assert api.attributes == [[(6, 1)] if can and early else [] for early in (starts_early, True)]


@pytest.mark.parametrize(
    ("status", "text"), [(719, "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"), (12345, "error 12345")]
)
def test_an_error_of_the_driver_is_named(api, status, text):
    executor = CudaExecutor(0, FakeCompiler())
    function = executor.load(KERNEL, SPEC)
    api.status = status
    with pytest.raises(PagedAttentionError) as caught:
        executor.launch(function, (5, 4, 3), 128, 256, packed())
    assert str(caught.value).startswith("tiny<")
    assert str(caught.value).endswith(
        f"refused to launch (5, 4, 3) CTAs of 128 threads with 256 bytes of shared memory: {text}"
    )


def test_the_structs_are_those_of_the_driver():
    """Sizes and offsets of CUlaunchAttribute and CUlaunchConfig in cuda.h, for 64 bits."""
    assert (ctypes.sizeof(driver._Attribute), driver._Attribute.value.offset) == (72, 8)
    config = driver._Config
    assert (ctypes.sizeof(config), config.block.offset, config.shared_bytes.offset) == (56, 12, 24)
    assert (config.stream.offset, config.attributes.offset, config.attribute_count.offset) == (32, 40, 48)
