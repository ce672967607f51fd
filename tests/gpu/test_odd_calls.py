"""Calls that nobody means to make: refused with the caches as they were, or right, and so is the next good call."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedattn import InvalidArgumentError, PagedAttention, PagedAttentionError, api
from pagedattn.jit.launch import cuda_executor

from .decoding import Decoder, Model, host

# Of Hopper's kernels, on other devices what serves such calls there.
MODELS = {
    "decode_heads_sm90": Model(num_heads=16, kv_num_heads=8, head_size=128),
    "flash_prefill_sm90": Model(num_heads=16, kv_num_heads=8, head_size=128, new_tokens=24),
    "latent_rows_sm90": Model(num_heads=16, kv_num_heads=1, head_size=576, v_head_size=512, block_size=64),
    "latent_decode_sm90": Model(num_heads=128, kv_num_heads=1, head_size=576, v_head_size=512, block_size=64),
}


@pytest.fixture(params=MODELS)
def decoder(request: pytest.FixtureRequest, cupy: Any) -> Decoder:
    """A call that has been made once; `expect` makes it again."""
    decoder = Decoder(cupy, MODELS[request.param])
    decoder.prepare([3, 40, 150], 0)
    if cuda_executor(0).arch == "sm_90a":
        assert request.param in decoder.operator.explain(**decoder.arrays).kernels
    return decoder


def refused(decoder: Decoder, match: str, operator: PagedAttention | None = None, **changes: Any) -> None:
    """See that a call with some other inputs is refused, and touches no cache."""
    before = [x.tobytes() for x in decoder.caches()]
    with pytest.raises(PagedAttentionError, match=match):
        (operator or decoder.operator)(**{**decoder.arrays, **changes})
    decoder.cupy.cuda.Device().synchronize()
    assert [x.tobytes() for x in decoder.caches()] == before


def results(decoder: Decoder, operator: PagedAttention | None = None, **changes: Any) -> list[bytes]:
    """Bits of output and lse of a call with some other inputs."""
    result = (operator or decoder.operator)(**{**decoder.arrays, **changes})
    return host((result.output, result.lse))


def in_columns(cupy: Any, x: Any) -> Any:
    return cupy.asfortranarray(x.view(np.uint16)).view(x.dtype)


def at_an_odd_byte(cupy: Any, x: Any) -> Any:
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.alloc(x.nbytes + 64) + 1)


ODD: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("query", in_columns, "expected elements of a row next to each other"),
    ("key_cache", in_columns, "expected elements of a row next to each other"),
    ("query", lambda cupy, x: x[::-1], "expected strides >= 0"),
    ("query", lambda cupy, x: x.ravel(), "expected rank 2"),
    ("query", at_an_odd_byte, "expected an address that is a multiple of 2"),
    ("query", lambda cupy, x: x.view(np.uint16), "expected element type float16 or bfloat16 or float32"),
    ("block_table", lambda cupy, x: x.astype(np.int64), "expected element type int32"),
    ("block_table", lambda cupy, x: x.get(), "expected an array on cuda:0, the device of query, got one on cpu"),
    ("past_seqlens", lambda cupy, x: x.tolist(), "expected a NumPy or CuPy array"),
    ("past_seqlens", lambda cupy, x: np.ma.masked_array(x.get()), "expected an array without a mask"),
    ("attention_metadata", lambda cupy, x: cupy.array([1, 5], np.int32), "expected an array on cpu"),
    ("attention_metadata", lambda cupy, x: np.array([1.0, 5.0]), "expected element type int32"),
    ("attention_metadata", lambda cupy, x: np.array([-1, 5], np.int32), "expected a bound >= 0"),
    ("attention_metadata", lambda cupy, x: np.array([1, 2, 3, 4], np.int32), "expected dimension 0 to be 2 or 3"),
]


def test_an_odd_array_is_refused_by_name(decoder: Decoder) -> None:
    want = results(decoder)
    for name, odd, message in ODD:
        refused(decoder, rf"^{name}(\[0\])?: {message}", **{name: odd(decoder.cupy, decoder.arrays.get(name))})
        assert results(decoder) == want, f"after {name}: {message}"


def test_a_shape_that_is_changed_in_place_makes_another_call(decoder: Decoder) -> None:
    want, query = results(decoder), decoder.arrays["query"]
    rows, width = query.shape
    query.shape = 2 * rows, width // 2
    refused(decoder, "expected")
    query.shape = rows, width
    assert results(decoder) == want


def test_output_is_not_the_memory_of_a_cache(decoder: Decoder) -> None:
    want, cache = results(decoder), decoder.arrays["key_cache"]
    model, query = decoder.model, decoder.arrays["query"]
    shape = query.shape[0], model.num_heads * (model.v_head_size or model.head_size)
    inside = decoder.cupy.ndarray(shape, query.dtype, cache.data + 64)
    refused(decoder, "^out: expected memory of its own, got memory of key_cache", out=inside)
    assert results(decoder) == want


def test_a_table_without_columns_is_one_whatever_its_address(decoder: Decoder) -> None:
    """A new array without elements may have address 0, as one that is absent."""
    table, want = decoder.arrays["block_table"], results(decoder)
    before = [x.tobytes() for x in decoder.caches()]
    fresh = decoder.cupy.empty((len(table), 0), np.int32)
    assert results(decoder, block_table=fresh) == results(decoder, block_table=table[:, :0]) != want
    assert [x.tobytes() for x in decoder.caches()] == before
    assert results(decoder) == want


def test_the_environment_is_read_at_every_call(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    want = results(decoder)
    for name, value, message in (
        ("BACKEND", "nonsense", "^backend: expected one of"),
        ("BACKEND", "numpy", "runs on arrays in host memory only"),
        ("CHECKS", "maybe", "^PAGEDATTN_CHECKS: expected one of"),
        ("DEBUG_INFO", "what", "^PAGEDATTN_DEBUG_INFO: expected one of"),
    ):
        monkeypatch.setenv(f"PAGEDATTN_{name}", value)
        refused(decoder, message)
        monkeypatch.delenv(f"PAGEDATTN_{name}")
        assert results(decoder) == want
    monkeypatch.setenv("PAGEDATTN_CHECKS", "1")
    assert results(decoder) == want
    past = decoder.arrays["past_seqlens"].copy()
    past[0] = -3
    refused(decoder, r"^past_seqlens\[0\]: expected a value >= 0, got -3", past_seqlens=past)


def test_strides_that_are_never_stepped_by_mean_nothing(decoder: Decoder) -> None:
    """Of a single row, and of the heads of a cache that has one."""
    strided, arrays = decoder.cupy.lib.stride_tricks.as_strided, decoder.arrays
    heads = arrays["key_cache"].shape[2]
    tokens = decoder.model.new_tokens
    one = {
        name: arrays[name][: tokens if name in ("query", "key", "value") else 1]
        for name in arrays
        if "cache" not in name
    }
    one["cumulative_sequence_length"] = arrays["cumulative_sequence_length"][:2]
    want = results(decoder, **one)
    rows = [name for name in one if one[name].shape[0] == 1 and one[name].ndim == 2]
    for step in (0, 2, 6, 1 << 34):
        odd = {name: strided(one[name], strides=(2 * step, one[name].itemsize)) for name in rows}
        if heads == 1:
            block, token, _, channel = arrays["key_cache"].strides
            odd["key_cache"] = strided(arrays["key_cache"], strides=(block, token, 2 * step, channel))
        assert results(decoder, **{**one, **odd}) == want, f"rows {2 * step} bytes apart"


def test_a_copy_of_an_operator_gives_the_same_bits(decoder: Decoder) -> None:
    want = results(decoder)
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert results(decoder, make(decoder.operator)) == want


def test_more_kinds_and_addresses_than_are_kept(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_PLANS", 3)
    monkeypatch.setattr(api, "MAX_ADDRESSES", 5)
    operator, cupy = copy.copy(decoder.operator), decoder.cupy
    want, query, table = results(decoder, operator), decoder.arrays["query"], decoder.arrays["block_table"]
    queries = [query.copy() for _ in range(12)]
    assert all(results(decoder, operator, query=x) == want for x in queries)
    for width in range(1, 7):
        wider = cupy.concatenate([table, cupy.full((len(table), width), -1, np.int32)], axis=1)
        results(decoder, operator, block_table=wider)
        assert results(decoder, operator) == want
    assert all(results(decoder, operator, query=x) == want for x in queries)


def test_operators_that_are_dropped_while_their_work_is_under_way(decoder: Decoder) -> None:
    """Scratch of many splits goes with them, and may be given to the next one at once."""
    attributes = {**decoder.operator.attributes, "return_lse": True, "split_keys": 16}
    want = results(decoder, PagedAttention(**attributes))
    for _ in range(20):
        result = PagedAttention(**attributes)(**decoder.arrays)
        gc.collect(0)
    assert host((result.output, result.lse)) == want


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "own streams"])
def test_threads_share_an_operator(decoder: Decoder, own_streams: bool) -> None:
    """Two kinds of call from four threads, each with arrays of its own."""
    cupy, table = decoder.cupy, decoder.arrays["block_table"]
    wide = cupy.concatenate([table, table], axis=1)
    wants = [results(decoder), results(decoder, block_table=wide)]
    failures: list[Any] = []

    def work(kind: int) -> None:
        try:
            arrays = {**decoder.arrays, "block_table": wide} if kind else decoder.arrays
            arrays = {name: x.copy() for name, x in arrays.items()}
            cupy.cuda.Device().synchronize()
            stream = cupy.cuda.Stream(non_blocking=True) if own_streams else cupy.cuda.Stream.null
            with stream:
                for i in range(24):
                    result = decoder.operator(**arrays)
                    stream.synchronize()
                    if i % 8 == 7 and host((result.output, result.lse)) != wants[kind]:
                        failures.append(f"kind {kind}, call {i}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_refusal_within_a_capture_leaves_the_capture_as_it_was(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, query = results(decoder), decoder.arrays["query"]
    stream = decoder.cupy.cuda.Stream(non_blocking=True)
    other = PagedAttention(**decoder.operator.attributes, split_keys=48)
    with stream:
        decoder.step()
        stream.synchronize()
        stream.begin_capture()
        first = decoder.step()
        with pytest.raises(InvalidArgumentError, match="expected element type"):
            decoder.operator(**{**decoder.arrays, "query": query.view(np.uint16)})
        with pytest.raises(PagedAttentionError, match="run the same call once on this stream first"):
            other(**decoder.arrays)
        monkeypatch.setenv("PAGEDATTN_CHECKS", "1")
        with pytest.raises(PagedAttentionError, match="expected them off during graph capture"):
            decoder.step()
        monkeypatch.delenv("PAGEDATTN_CHECKS")
        second = decoder.step()
        graph = stream.end_capture()
        for _ in range(3):
            for x in (*first, *second):
                x.view(np.uint8).fill(0xFF)
            graph.launch(stream)
            stream.synchronize()
            assert host(first) == host(second) == want
    assert results(decoder) == want
