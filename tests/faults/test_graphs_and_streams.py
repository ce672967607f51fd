"""Captured graphs, streams and devices: what was fixed at capture, what is shared, and where work is issued."""

from __future__ import annotations

import numpy as np
import pytest

import pagedattn
from pagedattn.dtypes import FLOAT16
from pagedattn.support import Feature

from .scene import CACHES, HUGE, Call, Scene, assert_same_bytes
from .targets import gpu_count, targets_for

pytestmark = pytest.mark.gpu

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) { }
}
"""


@pytest.fixture
def gpu(target, cupy):
    """A CUDA backend on a GPU."""
    if not target.on_gpu:
        pytest.skip("of a GPU")
    return target


class OnDevice:
    """A call whose arrays stay on the device, to be changed in place, run, captured and replayed."""

    def __init__(self, target, call, stream=None, **options):
        call = target.fit(call)
        target.require(call, **options)
        self.target, self.call, self.cupy = target, call, target.xp
        self.raw = {n: target.upload(x) for n, x in call.arrays.items() if n != "attention_metadata"}
        self.arrays = {n: target.typed(x, call.arrays[n].dtype) for n, x in self.raw.items()}
        if "attention_metadata" in call.arrays:
            self.arrays["attention_metadata"] = call["attention_metadata"]
        self.operator = target.operator(call, **options)
        self.out = self.cupy.zeros(call["query"].shape, np.float16)
        self.stream = stream or self.cupy.cuda.Stream(non_blocking=True)
        self.cupy.cuda.Device().synchronize()  # the copies are on another stream

    def write(self, call):
        """Overwrite the device arrays by those of another call of the same shapes, on this call's stream."""
        call = self.target.fit(call)
        with self.stream:
            for name, x in self.raw.items():
                x.set(np.ascontiguousarray(call.arrays[name]).view(x.dtype))

    def run(self):
        with self.stream:
            self.operator(**self.arrays, out=self.out)

    def read(self):
        with self.stream:
            return self.out.get()

    def capture(self):
        with self.stream:
            self.stream.begin_capture()
            try:
                self.operator(**self.arrays, out=self.out)
            finally:
                graph = self.stream.end_capture()
        return graph


def eager(target, call, **options):
    """Output of a call run on its own, (token_count, width)."""
    outcome = target.run(target.fit(call), **options)
    return outcome.output.reshape(outcome.output.shape[0], -1)


def decode_calls(lengths, bounds, longest=8192, **kwargs):
    """Decode steps of one sequence at several lengths, all of one shape and with the same bounds."""
    scene = Scene([longest], num_heads=4, kv_num_heads=2, head_size=64, **kwargs)
    caches = scene.pool(scene.key, [longest], "k_scale"), scene.pool(scene.value, [longest], "v_scale")
    metadata = None if bounds is None else np.array(bounds, np.int32)
    return [scene.call([n - 1], [1], caches, attention_metadata=metadata) for n in lengths]


@pytest.mark.by_heads
@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_a_captured_step_serves_every_length(gpu, kind):
    """Captured with one token, replayed with thousands: the split plan must not be that of the capture."""
    lengths = [1, 2, 16, 17, 18, 256, 4096, 8192, 4]
    calls = decode_calls(lengths, [1, 8192], cache=CACHES[kind])
    step = OnDevice(gpu, calls[0])
    step.run()
    graph = step.capture()
    for call in calls:
        step.write(call)
        graph.launch(step.stream)
        assert_same_bytes(step.read(), eager(gpu, call))


@pytest.mark.by_heads
def test_two_captures_with_different_bounds_live_together(gpu):
    short, long = decode_calls([1, 100], [1, 128], 8192), decode_calls([1, 5000], [1, 8192], 8192)
    steps = []
    for calls in (short, long):
        step = OnDevice(gpu, calls[0])
        step.run()
        steps.append((step, step.capture(), calls[1]))
    for _ in range(3):
        for step, graph, call in steps:
            step.write(call)
            graph.launch(step.stream)
        for step, _, call in steps:
            assert_same_bytes(step.read(), eager(gpu, call))


@pytest.mark.by_heads
def test_a_captured_step_serves_a_smaller_batch(gpu, cupy):
    """Fewer live sequences than were captured: level offsets, and rows that belong to nobody."""
    scene = Scene([40] * 8, num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([39] * 8).change(attention_metadata=np.array([1, 64], np.int32))
    step = OnDevice(gpu, call)
    step.run()
    graph = step.capture()
    for live in (8, 3, 1, 0, 5):
        offsets = np.minimum(np.arange(9), live).astype(np.int32)
        fewer = call.change(cumulative_sequence_length=offsets)
        for name in ("query", "key", "value"):
            rows = call[name].copy()
            rows[live:] = np.nan
            fewer = fewer.change(**{name: rows})
        step.write(fewer)
        with step.stream:
            step.out.fill(np.nan)
        graph.launch(step.stream)
        got = step.read()
        assert_same_bytes(got, eager(gpu, fewer))
        assert not got[live:].any()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_without_tokens_is_captured_and_replayed(gpu, batch):
    """Nothing to launch: the capture goes on, and a replay leaves the caches alone."""
    scene = Scene([18, 1, 4][:batch], num_heads=4, kv_num_heads=2, head_size=64)
    step = OnDevice(gpu, scene.call(scene.lengths))
    step.run()
    result = step.operator(**step.arrays)
    assert result.output.shape == (0, 4 * 64)
    assert result.output.dtype == np.float16
    marker = step.cupy.zeros(1, np.int32)
    marker += 1  # compiled before the capture
    step.cupy.cuda.Device().synchronize()
    with step.stream:
        step.stream.begin_capture()
        try:
            step.operator(**step.arrays, out=step.out)
            marker += 1  # so that the graph is not empty
        finally:
            graph = step.stream.end_capture()
    for _ in range(3):
        graph.launch(step.stream)
    step.stream.synchronize()
    assert marker.get().tolist() == [4]
    for name in ("key_cache", "value_cache"):
        assert_same_bytes(gpu.download(step.raw[name]), step.call[name].view(step.raw[name].dtype))


@pytest.mark.by_heads
def test_idle_slots_of_a_captured_batch_stay_zero(gpu):
    scene = Scene([18, 1, 4, 1], num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([17, 0, 3, 0]).change(attention_metadata=np.array([1, 64], np.int32))
    slots = np.array([scene.slots(0, np.array([17]))[0], -1, scene.slots(2, np.array([3]))[0], -1], np.int32)
    table = call["block_table"].copy()
    table[[1, 3]] = -1
    new = {name: call[name].copy() for name in ("query", "key", "value")}
    for x in new.values():
        x[[1, 3]] = np.nan
    call = call.change(slot_mapping=slots, block_table=table, **new)
    step = OnDevice(gpu, call)
    step.run()
    graph = step.capture()
    with step.stream:
        step.out.fill(np.nan)
    graph.launch(step.stream)
    got = step.read()
    assert not got[[1, 3]].any()
    assert_same_bytes(got, eager(gpu, call))
    for name in ("key_cache", "value_cache"):
        want = getattr(gpu.run(gpu.fit(call)), name)
        assert_same_bytes(gpu.download(step.raw[name]).view(want.dtype), want)


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 4], ids=["decode", "four tokens"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_warm_call_captures_and_replays_a_thousand_times(gpu, kind, q_len):
    scene = Scene([300, 40], num_heads=4, kv_num_heads=2, head_size=64, cache=CACHES[kind])
    call = scene.call([300 - q_len, 40 - q_len]).change(attention_metadata=np.array([q_len, 320], np.int32))
    step = OnDevice(gpu, call)
    step.run()
    want = step.read()
    graph = step.capture()
    with step.stream:
        step.out.fill(np.nan)
    for _ in range(1000):
        graph.launch(step.stream)
    assert_same_bytes(step.read(), want)
    assert_same_bytes(want, eager(gpu, call))


def test_a_cold_capture_works_or_is_refused_and_leaves_the_stream_usable(gpu, cupy):
    """Whatever a first call needs, compiled code or memory, must not break a capture half way."""
    scene = Scene([5000, 40], num_heads=4, kv_num_heads=2, head_size=64)
    for bounds in (np.array([1, 5008], np.int32), None):
        call = scene.call([4999, 39]).change(attention_metadata=bounds)
        step = OnDevice(gpu, call)
        graph = None
        try:
            graph = step.capture()
        except pagedattn.PagedAttentionError as error:
            if "capture" not in str(error):
                raise
        with step.stream:
            assert int((cupy.arange(10) + 1).sum().get()) == 55
        step.run()
        assert_same_bytes(step.read(), eager(gpu, call))
        if graph is not None:
            with step.stream:
                step.out.fill(np.nan)
            graph.launch(step.stream)
            assert_same_bytes(step.read(), eager(gpu, call))


def test_what_would_read_the_device_is_refused_in_a_capture(gpu):
    """checks, and the width of output_qk without a bound; a capture that it broke would be lost."""
    scene = Scene([40], num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([39])
    checking = OnDevice(gpu, call, checks=True)
    checking.run()
    with pytest.raises(pagedattn.PagedAttentionError, match="capture"):
        checking.capture()
    checking.run()
    assert_same_bytes(checking.read(), eager(gpu, call))
    if gpu.why_not(call.arrays, {**call.attributes, "qk_output": 1}) is None:
        scores = OnDevice(gpu, call.change(qk_output=1))
        scores.run()
        with pytest.raises(pagedattn.PagedAttentionError, match="attention_metadata"):
            scores.capture()


@pytest.mark.parametrize("with_bounds", [True, False], ids=["bounds", "no bounds"])
def test_a_step_neither_reads_the_device_nor_waits_for_it(gpu, cupy, monkeypatch, with_bounds):
    """Copies to the host and synchronizations are counted where CuPy makes them."""
    scene = Scene([300, 40], num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([299, 39])
    if with_bounds:
        call = call.change(attention_metadata=np.array([1, 320], np.int32))
    step = OnDevice(gpu, call)
    step.run()
    step.stream.synchronize()
    # A long kernel in front: a step that waited would take as long, and its stream would be idle after it.
    spin = cupy.RawKernel(SPIN, "spin")
    with step.stream:
        spin((1,), (1,), (np.int64(400_000_000),))
    step.run()
    assert not step.stream.done
    step.stream.synchronize()
    assert_same_bytes(step.read(), eager(gpu, call))


@pytest.mark.by_heads
def test_operators_on_two_streams_do_not_share_scratch(gpu):
    """Many splits each, interleaved hundreds of times; with shared partial sums some would be the other's."""
    calls = [decode_calls([32_768], None, 32_768, seed=seed)[0] for seed in (1, 2)]
    want = [eager(gpu, call) for call in calls]
    steps = [OnDevice(gpu, call) for call in calls]
    results = [[], []]
    for i in range(300):
        for j, step in enumerate(steps):
            step.run()
            if i % 10 == 0:
                with step.stream:
                    results[j].append(step.out.copy())
    for step, copies, right in zip(steps, results, want, strict=True):
        step.stream.synchronize()
        for copy in copies:
            assert_same_bytes(copy.get(), right)


@pytest.mark.by_heads
def test_one_operator_on_two_streams(gpu, cupy):
    call = decode_calls([20_000], None, 20_000)[0]
    want = eager(gpu, call)
    first = OnDevice(gpu, call)
    second = OnDevice(gpu, call)
    second.operator = first.operator
    for _ in range(100):
        first.run()
        second.run()
    assert_same_bytes(first.read(), want)
    assert_same_bytes(second.read(), want)


@pytest.mark.by_heads
def test_one_operator_alternating_shapes(gpu):
    """Large and small scratch by turns: nothing may rely on what the call before left behind."""
    long = decode_calls([20_000], None, 20_000)[0]
    crowd = Scene([50] * 64, num_heads=4, kv_num_heads=2, head_size=64)
    many = crowd.call([49] * 64)
    prefill = Scene([70, 30], num_heads=4, kv_num_heads=2, head_size=64).call([10, 0])
    want = [eager(gpu, call) for call in (long, many, prefill)]
    steps = [OnDevice(gpu, call) for call in (long, many, prefill)]
    for step in steps[1:]:
        step.operator, step.stream = steps[0].operator, steps[0].stream
    for _ in range(20):
        for step, right in zip(steps, want, strict=True):
            step.run()
            assert_same_bytes(step.read(), right)


@pytest.mark.by_heads
@pytest.mark.parametrize("byte", [0xFF, 0x00, 0x7F])
def test_scratch_may_hold_anything(gpu, cupy, byte):
    call = decode_calls([20_000], None, 20_000)[0]
    want = eager(gpu, call)
    step = OnDevice(gpu, call)
    step.run()
    buffers = [buffer for buffer, *_ in step.operator._arena._buffers.values()]
    for _ in range(5):
        with step.stream:
            for buffer in buffers:
                buffer.memset_async(byte, buffer.mem.size - (buffer.ptr - buffer.mem.ptr), step.stream)
        step.run()
        assert_same_bytes(step.read(), want)


STREAMS = ["non-blocking", "blocking", "external", "per-thread default"]


@pytest.mark.by_heads
@pytest.mark.parametrize("which", STREAMS)
def test_work_is_issued_to_the_callers_stream(gpu, cupy, which):
    """Inputs are written behind a long kernel on that stream; work on another would see the old ones."""
    scene = Scene([300, 40], num_heads=4, kv_num_heads=2, head_size=64)
    call = gpu.fit(scene.call([299, 39]))
    junk = Call({name: np.zeros_like(x) if name == "query" else x for name, x in call.arrays.items()}, call.attributes)
    want = eager(gpu, call)
    assert (want != eager(gpu, junk)).any()
    owner = cupy.cuda.Stream(non_blocking=True)
    stream = {
        "non-blocking": lambda: owner,
        "blocking": cupy.cuda.Stream,
        "external": lambda: cupy.cuda.Stream.from_external(owner),
        "per-thread default": lambda: cupy.cuda.Stream.ptds,
    }[which]()
    spin = cupy.RawKernel(SPIN, "spin")
    step = OnDevice(gpu, junk, stream)
    step.run()
    fresh = {name: gpu.upload(call.arrays[name]) for name in ("query", "key_cache", "value_cache")}
    old = {name: gpu.upload(junk.arrays[name]) for name in fresh}
    cupy.cuda.Device().synchronize()
    for _ in range(50 if which == "non-blocking" else 5):
        with stream:
            for name, x in old.items():
                step.raw[name][...] = x
            stream.synchronize()
            spin((1,), (1,), (np.int64(30_000_000),))
            for name, x in fresh.items():
                step.raw[name][...] = x
            step.out.fill(np.nan)
        step.run()
        assert_same_bytes(step.read(), want)


def test_inputs_by_dlpack_from_another_stream_are_waited_for(gpu, cupy):
    """DLPack orders the producer's stream before the consumer's."""
    producer = cupy.cuda.Stream(non_blocking=True)

    class Foreign:
        """An array of some other library, filled on a stream of its own."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            with producer:
                return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    scene = Scene([300, 40], num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([299, 39])
    want = eager(gpu, call)
    step = OnDevice(gpu, call)
    spin = cupy.RawKernel(SPIN, "spin")
    good = gpu.place(call["query"])
    for _ in range(10):
        query = cupy.zeros_like(good)
        cupy.cuda.Device().synchronize()
        with producer:
            spin((1,), (1,), (np.int64(30_000_000),))
            query[...] = good
        with step.stream:
            step.operator(**{**step.arrays, "query": Foreign(query)}, out=step.out)
        assert_same_bytes(step.read(), want)


@pytest.mark.by_heads
def test_storing_comes_before_reading_beside_a_busy_stream(gpu, cupy):
    """A long prefill, or many single tokens, into NaN, again and again, while another stream keeps the device busy."""
    if gpu.by_heads:
        call = gpu.fit(Scene([200] * 64, num_heads=32, kv_num_heads=8, head_size=64).call([199] * 64))
    else:
        call = Scene([1500], num_heads=32, head_size=64).call([1000])
    want = eager(gpu, call)
    step = OnDevice(gpu, call)
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        matrix = cupy.ones((2048, 2048), np.float32)
    poison = {name: gpu.upload(call[name]) for name in ("key_cache", "value_cache")}
    cupy.cuda.Device().synchronize()
    for _ in range(100):
        with busy:
            matrix @ matrix
        with step.stream:
            for name, x in poison.items():
                step.raw[name][...] = x
        step.run()
        assert_same_bytes(step.read(), want)


def test_arrays_on_another_device_than_the_current_one(gpu, cupy):
    if gpu_count() < 2:
        pytest.skip("needs two GPUs")
    scene = Scene([300, 40], num_heads=4, kv_num_heads=2, head_size=256)
    call = scene.call([299, 39])
    want = eager(gpu, call)
    operator = gpu.operator(call)
    for attempt in range(20):
        device = 1 - attempt % 2
        with cupy.cuda.Device(device):
            arrays = {name: gpu.place(x) for name, x in call.arrays.items()}
        with cupy.cuda.Device(0):
            result = operator(**arrays)
            assert cupy.cuda.runtime.getDevice() == 0
        assert result.output.device.id == device
        with cupy.cuda.Device(device):
            assert_same_bytes(result.output.get(), want)
    with cupy.cuda.Device(1 - device):  # apart from the other arrays
        arrays["query"] = gpu.place(call["query"])
    with pytest.raises(pagedattn.InvalidArgumentError, match="an array on cuda:"):
        operator(**arrays)


def test_latent_and_separate_operators_on_one_stream(cupy):
    """Scratch of the one may lie where that of the other did."""
    latent = [t for t in targets_for(Feature.LATENT) if t.on_gpu]
    separate = [t for t in targets_for(Feature.SEPARATE) if t.on_gpu]
    if not latent or not separate:
        pytest.skip("no backend for each on a GPU")
    scene = Scene([5000], kv_num_heads=1, num_heads=16, head_size=576, v_head_size=512)
    calls = [(latent[0], scene.call([4999])), (separate[0], decode_calls([20_000], None, 20_000)[0])]
    want = [eager(target, call) for target, call in calls]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            for (target, call), right in zip(calls, want, strict=True):
                assert_same_bytes(eager(target, call), right)


def test_the_largest_table_entries_are_harmless_in_a_capture(gpu):
    scene = Scene([40], num_heads=4, kv_num_heads=2, head_size=64)
    call = scene.call([39]).change(attention_metadata=np.array([1, 48], np.int32))
    step = OnDevice(gpu, call)
    step.run()
    graph = step.capture()
    table = call["block_table"].copy()
    table[0, 1] = HUGE
    changed = call.change(block_table=table)
    step.write(changed)
    graph.launch(step.stream)
    assert_same_bytes(step.read(), eager(gpu, changed))
    assert step.out.dtype == FLOAT16.numpy
