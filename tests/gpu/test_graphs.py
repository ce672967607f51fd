"""Captured steps: replays equal eager calls, bit for bit, while lengths grow and shrink."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn import PagedAttentionError
from pagedattn.graph import GraphBuckets, GraphedStep
from pagedattn.jit.launch import cuda_executor

from .decoding import Decoder, Model, host

MODELS = [
    Model(),
    Model(cache="int8"),
    Model(cache="float8e4m3fn"),
    Model(cache="int4"),
    Model(window=40),
    Model(num_heads=16, kv_num_heads=1, head_size=576, v_head_size=512),
    Model(num_heads=5, kv_num_heads=1, head_size=160, v_head_size=128, cache="int8"),
    Model(new_tokens=3, num_heads=16),
    Model(num_heads=16, kv_num_heads=8, head_size=128),
    Model(num_heads=16, kv_num_heads=8, head_size=128, cache="int8"),
    Model(new_tokens=3, num_heads=16, kv_num_heads=1, head_size=576, v_head_size=512),
    Model(new_tokens=48),
    Model(new_tokens=48, head_size=128, window=70),
    Model(new_tokens=48, head_size=128, cache="float8e4m3fn"),
    Model(num_heads=128, kv_num_heads=1, head_size=576, v_head_size=512),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_replays_equal_eager_calls_while_lengths_grow(cupy, model):
    eager, graphed = Decoder(cupy, model), Decoder(cupy, model)
    graphed.prepare([0, 0, 0], 0)
    before = [x.copy() for x in graphed.caches()]
    graph = GraphedStep(graphed.step)
    eager.prepare([0, 0, 0], 0)
    host(eager.step())
    assert any((a != b).any() for a, b in zip(before, graphed.caches(), strict=True))
    for step in range(64):
        past = [step, 7 * step, max(0, 300 - 5 * step)]
        for decoder in (eager, graphed):
            decoder.prepare(past, step)
        assert host(graph()) == host(eager.step()), f"step {step}"
    for mine, right in zip(graphed.caches(), eager.caches(), strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("model", MODELS[:1] + MODELS[5:6], ids=str)
def test_bounds_change_no_bit(cupy, model):
    results = []
    for metadata in (None, (1, 200), (1, 512), (0, 0), (64, 100_000), (1, 200, 100)):
        decoder = Decoder(cupy, model, metadata)
        outputs = []
        for step in range(4):
            decoder.prepare([step, 50 * step, 150], step)
            outputs += host(decoder.step())
        results.append((metadata, outputs))
    # The bound also chooses how keys are split, so bits are compared where the splits are the same; values everywhere.
    for metadata, outputs in results[1:]:
        for mine, right in zip(outputs, results[0][1], strict=True):
            if len(mine) == model.batch_size * model.num_heads * 4:
                a, b = (np.frombuffer(x, np.float32) for x in (mine, right))
                np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=str(metadata))
    assert results[2][1] == results[0][1]


def test_a_bound_that_is_too_small_reads_nothing_it_must_not(cupy):
    decoder = Decoder(cupy, Model(), (1, 16))
    decoder.prepare([400, 20, 3], 1)
    output, _ = decoder.step()
    assert np.isfinite(output[2].astype(np.float32).get()).all()  # the one within the bound is still right


def test_a_step_of_many_layers_and_two_graphs_alive(cupy):
    layers = [Decoder(cupy, model) for model in (MODELS[0], MODELS[1], MODELS[4])]
    again = [Decoder(cupy, model) for model in (MODELS[0], MODELS[1], MODELS[4])]
    for layer in layers:
        layer.prepare([3, 3, 3], 0)
    first = GraphedStep(lambda: [layer.step() for layer in layers])
    second = GraphedStep(lambda: [layer.step() for layer in layers[:2]])
    for layer in again:
        layer.prepare([3, 3, 3], 0)
        layer.step()
    for step in range(5):
        for layer in layers + again:
            layer.prepare([3 + step, 60 + step, 300], step)
        live = 2 if step % 2 else 3
        got = [host(x) for x in (second() if step % 2 else first())]
        assert got == [host(layer.step()) for layer in again[:live]]


def test_buckets_answer_padding_with_zeros(cupy):
    model = Model(batch_size=8)
    decoders = {}

    def make_step(size):
        decoders[size] = Decoder(cupy, Model(batch_size=size))
        decoders[size].prepare([5] * size, 1)
        return decoders[size].step

    buckets = GraphBuckets(make_step, (2, 4, model.batch_size))
    size, graph = buckets.of(3)
    assert size == 4
    decoder = decoders[4]
    decoder.prepare([5, 6, 7, 0], 2)
    decoder.arrays["cumulative_sequence_length"].set(np.array([0, 1, 2, 3, 3], np.int32))
    before = decoder.caches()
    output, lse = (x.astype(np.float32).get() for x in graph())
    assert np.abs(output[:3]).sum(axis=1).all()
    assert (output[3] == 0).all()
    assert (lse[3] == -np.inf).all()
    for x, y in zip(before, decoder.caches(), strict=True):
        assert (x != y).any(axis=(1, 2, 3)).sum() == 3  # one block of each live sequence changed, none of the padding
    with pytest.raises(ValueError, match="at most 8"):
        buckets.of(9)


def test_a_cold_capture_is_refused_before_it_breaks(cupy):
    decoder = Decoder(cupy, Model())
    decoder.prepare([1, 2, 3], 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(PagedAttentionError, match="run the same call once on this stream first"):
            decoder.step()
        stream.end_capture()
        decoder.step()  # the stream is as good as before
        stream.synchronize()


@pytest.mark.parametrize(
    "model",
    [
        Model(num_heads=16, kv_num_heads=8, head_size=128, block_size=64),
        Model(num_heads=16, kv_num_heads=1, head_size=576, v_head_size=512, block_size=64),
        Model(new_tokens=48, head_size=128, block_size=64),
    ],
    ids=str,
)
def test_a_kernel_that_only_arrays_aligned_otherwise_need_is_not_loaded_in_a_capture(cupy, model, monkeypatch):
    executor = cuda_executor(0)
    if executor.arch != "sm_90a":
        pytest.skip("of Hopper's kernels, which read in vectors")
    monkeypatch.setattr(executor, "_functions", {})  # other tests' calls have loaded everything
    decoder = Decoder(cupy, model)
    decoder.prepare([1, 2, 3], 0)
    cache = decoder.arrays["key_cache"]
    shifted = cupy.empty(cache.size + 4, np.uint16)[4:].view(cache.dtype).reshape(cache.shape)
    shifted.view(np.uint16)[...] = cache.view(np.uint16)
    aligned, shifted = decoder.arrays, {**decoder.arrays, "key_cache": shifted}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        decoder.step()  # a call of this kind was run, but not with such arrays
        decoder.arrays = shifted
        stream.begin_capture()
        with pytest.raises(PagedAttentionError, match="run the same call once on this stream first"):
            decoder.step()
        stream.end_capture()
        want = host(decoder.step())
        stream.begin_capture()
        results = decoder.step()
        graph = stream.end_capture()
        graph.launch(stream)
        assert host(results) == want
        decoder.arrays = aligned
        decoder.step()
        stream.synchronize()


def test_a_workspace_that_was_never_reserved_on_the_stream_is_refused_in_capture(cupy):
    decoder = Decoder(cupy, Model(capacity=8192))
    decoder.prepare([1, 2, 3], 0)
    decoder.step()  # the plan exists now, but this stream's workspace is not the other's
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(PagedAttentionError, match="reserved before the capture began"):
            decoder.step()
        stream.end_capture()
