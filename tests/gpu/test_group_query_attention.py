"""group_query_attention on the GPU: right against the oracle, and the caller's kind of arrays out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedattn import (
    Float8View,
    PagedAttentionError,
    PagedAttentionResult,
    UnsupportedError,
    gqa,
    group_query_attention,
)
from tests.support.build import TYPES, Built, build
from tests.support.cases import SMOKE, Case
from tests.support.compare import assert_same_bits, verify
from tests.support.padded import Padded, has_padded_form, padded
from tests.support.recorded import gpu_target

CASES = [case for case in SMOKE if has_padded_form(case) and case.io != "float32"]


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def on_gpu(cupy: Any, call: Padded) -> dict[str, Any]:
    """Inputs as CuPy arrays, but for the scalar."""

    def moved(x: Any) -> Any:
        return Float8View(cupy.asarray(x.view(np.uint8))) if x.dtype == FLOAT8 else cupy.asarray(x)

    return {name: x if name == "total_sequence_length" else moved(x) for name, x in call.inputs.items()}


def to_host(x: Any) -> Any:
    return x.array.get().view(FLOAT8) if isinstance(x, Float8View) else x.get()


def ragged(built: Built, call: Padded, got: Any) -> PagedAttentionResult:
    """Results in the places of a paged call; its lse is not among them."""
    case, rows = built.case, call.sequence.size
    output = np.zeros((case.token_count, got.output.shape[2]), TYPES[case.io])
    output[:rows] = call.ragged(got.output.get())
    output_qk = None
    if got.output_qk is not None:
        scores = call.ragged(got.output_qk.get().swapaxes(1, 2)).swapaxes(0, 1)
        output_qk = np.zeros((case.num_heads, case.token_count, scores.shape[2]), scores.dtype)
        output_qk[:, :rows] = scores
    caches = (
        call.paged(to_host(present), built[name])
        for present, name in ((got.present_key, "key_cache"), (got.present_value, "value_cache"))
    )
    return PagedAttentionResult(output, *caches, output_qk)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_against_the_oracle(cupy: Any, case: Case):
    case = Case(**{**vars(case), "lse": False, "qk_dtype": case.io})
    built = build(case)
    call = padded(built)
    inputs = on_gpu(cupy, call)
    got = group_query_attention(**inputs, **call.attributes)
    assert got.present_key is inputs["past_key"]
    verify(built, ragged(built, call, got))


@pytest.mark.parametrize("backend", ["decode", "flash", "dense"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_paged_attention(cupy: Any, case: Case, backend: str):
    """The same bits are stored, and outputs are a few roundings apart where the keys were split elsewhere."""
    case = Case(**{**vars(case), "lse": False, "qk_dtype": case.io})
    built = build(case)
    call = padded(built)
    try:
        got = group_query_attention(**on_gpu(cupy, call), **call.attributes, backend=backend)
    except UnsupportedError as error:
        pytest.skip(str(error))
    mine = ragged(built, call, got)
    want, _ = gpu_target(backend).run_built(built)
    assert_same_bits(mine.key_cache_out, want.key_cache_out, "key cache")
    assert_same_bits(mine.value_cache_out, want.value_cache_out, "value cache")
    one, other = (x.output.astype(np.float32) for x in (mine, want))
    tolerance = 4 * float(ml_dtypes.finfo(TYPES[case.io]).eps) * np.abs(other).max()
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def test_rows_are_packed_without_reading_the_device(cupy: Any):
    """Inside a capture any read of the device is an error."""
    total, new = cupy.asarray([9, 4, 3]), cupy.asarray([3, 0, 2])
    x = cupy.arange(3 * 4 * 8, dtype=cupy.float16).reshape(12, 8)

    def there_and_back() -> Any:
        rows = gqa._Rows(cupy, 4, total, new, all_full=False)
        return rows.unpack(rows.pack(x))

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        want = there_and_back().get()
        stream.begin_capture()
        got = there_and_back()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(got.get(), want)
    live = np.arange(4) < new.get()[:, None]
    np.testing.assert_array_equal(want, np.where(live.reshape(12, 1), x.get(), 0))


def test_growing_and_sliding_caches(cupy: Any):
    rng = np.random.default_rng(0)
    caches = {name: cupy.zeros((2, 2, 6, 64), cupy.float16) for name in ("past_key", "past_value")}
    right = {name: x.get() for name, x in caches.items()}
    total = 0
    for length in (5, 1, 3, 1):
        total += length
        call: dict[str, Any] = {
            name: rng.standard_normal((2, length, heads * 64)).astype(np.float16)
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        }
        call.update(seqlens_k=np.full(2, total - 1, np.int32), query_seqlens=np.full(2, length, np.int32))
        options = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 4, "sliding_window_cache": 1}
        want = group_query_attention(**call, **right, **options, total_sequence_length=total)
        moved = {name: cupy.asarray(x) for name, x in call.items()}
        got = group_query_attention(**moved, **caches, **options, total_sequence_length=total)
        assert isinstance(got.output, cupy.ndarray)
        np.testing.assert_allclose(got.output.get().astype(np.float32), want.output.astype(np.float32), atol=4e-3)
    np.testing.assert_array_equal(caches["past_key"].get()[:, :, :4], right["past_key"][:, :, :4])
    small = {name: x[:, :, :3] for name, x in caches.items()}
    for name in ("local_window_size", "sliding_window_cache"):
        del options[name]
    moved["seqlens_k"] = cupy.full(2, length - 1, np.int32)
    grown = group_query_attention(**moved, **small, **options, total_sequence_length=4)
    assert grown.present_key.shape == (2, 2, 4, 64)


def test_torch_tensors(cupy: Any):
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    built = build(Case(io="float16", lengths=((9, 3), (4, 1), (0, 2)), rope="full"))
    call, other = padded(built), padded(built)
    want = group_query_attention(**other.inputs, **other.attributes)
    inputs = {
        name: x if name == "total_sequence_length" else torch.from_numpy(x).cuda() for name, x in call.inputs.items()
    }
    got = group_query_attention(**inputs, **call.attributes)
    assert isinstance(got.output, torch.Tensor)
    assert got.present_key is inputs["past_key"]
    np.testing.assert_allclose(got.output.cpu().float().numpy(), want.output.astype(np.float32), atol=1e-2)


def test_capture_is_refused(cupy: Any):
    call = padded(build(Case(lengths=((9, 1), (4, 1)))))
    inputs = on_gpu(cupy, call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        group_query_attention(**inputs, **call.attributes)
        stream.begin_capture()
        try:
            with pytest.raises(PagedAttentionError, match="graph capture"):
                group_query_attention(**inputs, **call.attributes)
        finally:
            stream.end_capture()
