"""Kernels that start before the one ahead has ended: the same bits as one after the other, in steps without a pause."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from pagedattn.graph import GraphedStep
from pagedattn.jit.launch import cuda_executor

from .decoding import Decoder, Model, host

MODELS = [
    Model(),
    Model(cache="int8", window=40),
    Model(batch_size=1, num_heads=2, kv_num_heads=1, capacity=8192),  # splits that a kernel merges
    Model(num_heads=32, kv_num_heads=8, head_size=128),  # Hopper's kernel for eight kv heads at a time
    Model(batch_size=1, num_heads=16, kv_num_heads=8, cache="float8e4m3fn", capacity=8192),
    Model(batch_size=3, new_tokens=3, num_heads=16),
    Model(num_heads=16, kv_num_heads=1, head_size=576, v_head_size=512),
    Model(num_heads=128, kv_num_heads=1, head_size=576, v_head_size=512, capacity=2048),  # splits of clusters
]


@pytest.fixture
def plain(cupy, monkeypatch):
    """A function after which no kernel starts early."""

    def arrange():
        executor = cuda_executor(0)
        monkeypatch.setattr(executor, "_can_overlap", False)
        functions = {key: replace(function, overlaps=False) for key, function in executor._functions.items()}
        monkeypatch.setattr(executor, "_functions", functions)

    return arrange


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_steps_without_a_pause(cupy, plain, model, graphed):
    def run():
        decoder = Decoder(cupy, model)
        decoder.prepare([300] * model.batch_size, 0)
        step = GraphedStep(decoder.step) if graphed else decoder.step
        decoder.prepare([300] * model.batch_size, 0)
        results = []
        for _ in range(40):
            output, lse = (x.copy() for x in step())
            results += [output, lse]
            # The next query is what was just computed.
            decoder.arrays["query"].view(np.uint16)[:, : output.shape[1]] = output.view(np.uint16)
            decoder.arrays["past_seqlens"] += 1
        return host(results), [x.tobytes() for x in decoder.caches()]

    overlapped = run()
    plain()
    assert run() == overlapped


SPIN = r"""extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}"""


class Ahead:
    """Ways to write arrays ahead of a call, after a while in which the call could start too early."""

    def __init__(self, cupy):
        self.cupy, self._spin, self._other = cupy, cupy.RawKernel(SPIN, "spin"), cupy.cuda.Stream(non_blocking=True)

    def spin(self):
        self._spin((1,), (1,), (np.int64(200_000),))

    def kernel(self, pairs):
        self.spin()
        for target, source in pairs:
            target[...] = source

    def copy(self, pairs):
        self.spin()
        for target, source in pairs:
            target.data.copy_from_device_async(source.data, source.nbytes)

    def fill(self, pairs):
        self.kernel(pairs)
        for target, source in pairs:
            target.data.memset_async(0, target.nbytes)
            target.data.copy_from_device_async(source.data, source.nbytes // 2)
        self.spin()
        for target, source in pairs:
            half = source.nbytes // 2
            (target.data + half).copy_from_device_async(source.data + half, source.nbytes - half)

    def other_stream(self, pairs, own=()):
        current = self.cupy.cuda.get_current_stream()
        self._other.wait_event(current.record())
        with self._other:
            self.kernel(pairs)
        if own:
            self.kernel(own)
        current.wait_event(self._other.record())

    def both_streams(self, pairs):
        self.other_stream(pairs[:1], pairs[1:])


@pytest.mark.parametrize("way", ["kernel", "copy", "fill", "other_stream", "both_streams"])
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("model", [Model(), *MODELS[3:4], *MODELS[6:]], ids=str)
def test_what_is_ahead_of_a_call_has_ended_whatever_it_is(cupy, model, graphed, way):
    decoder = Decoder(cupy, model)
    decoder.prepare([300] * model.batch_size, 0)
    names = ("query", "past_seqlens", "block_table", "key")
    fresh = {name: decoder.arrays[name].copy() for name in names}
    want, caches = host(decoder.step()), [x.tobytes() for x in decoder.caches()]

    write = getattr(Ahead(cupy), way)
    pairs = [(decoder.arrays[name].view(np.uint8), fresh[name].view(np.uint8)) for name in names]

    def step():
        write(pairs)
        return decoder.step()

    replay = GraphedStep(step) if graphed else step
    for _ in range(5):
        for name in names:  # of another call, as it may have been
            decoder.arrays[name].view(np.uint8)[...] = 0
        assert host(replay()) == want
    assert [x.tobytes() for x in decoder.caches()] == caches


def test_a_call_may_be_the_first_thing_that_a_thread_asks_of_the_device(cupy):
    decoder = Decoder(cupy, Model())
    decoder.prepare([3, 40, 150], 0)
    want = host(decoder.step())
    outcomes = []

    def run():
        try:
            decoder.operator(**decoder.arrays)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcomes == [None]
    assert host(decoder.step()) == want
