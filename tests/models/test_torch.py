"""torch tensors in and out: the caller's own memory, the caller's own type."""

import ml_dtypes
import numpy as np
import pytest
import torch

import pagedattn
from pagedattn import InvalidArgumentError

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 16, 5
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def arrays(dtype, cache=None):
    """NumPy inputs of a call, element type ``dtype``, cache type ``cache``."""
    rng = np.random.default_rng(0)
    rows = {
        name: rng.standard_normal((TOKENS, heads * WIDTH)).astype(dtype)
        for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    }
    caches = {name: np.zeros((3, 16, KV_HEADS, WIDTH), cache or dtype) for name in ("key_cache", "value_cache")}
    lengths = {
        "cumulative_sequence_length": np.array([0, 2, TOKENS], np.int32),
        "past_seqlens": np.zeros(2, np.int32),
        "block_table": np.array([[2], [0]], np.int32),
    }
    return {**rows, **caches, **lengths}


def to_torch(x):
    """The same bytes as a tensor, bfloat16 and float8 included."""
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if x.dtype.kind != "V":
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(f"u{x.itemsize}").view(f"i{x.itemsize}")).view(names[x.dtype.name])


def call(inputs, **options):
    return pagedattn.paged_attention(**inputs, num_heads=HEADS, kv_num_heads=KV_HEADS, **options)


@pytest.mark.parametrize("name", TYPES)
def test_results_are_tensors_of_the_same_type(name):
    expected = call(arrays(TYPES[name]), return_lse=True)
    inputs = {key: to_torch(x) for key, x in arrays(TYPES[name]).items()}
    result = call(inputs, return_lse=True)
    assert result.output.dtype == getattr(torch, name)
    assert result.lse.dtype == torch.float32
    assert torch.equal(result.output, to_torch(expected.output))
    assert torch.equal(result.lse, to_torch(expected.lse))


@pytest.mark.parametrize("name", TYPES)
def test_caches_are_written_in_place(name):
    inputs = {key: to_torch(x) for key, x in arrays(TYPES[name]).items()}
    result = call(inputs)
    assert result.key_cache_out is inputs["key_cache"]
    assert result.value_cache_out is inputs["value_cache"]
    stored = inputs["value_cache"][2, :2].reshape(2, -1)
    assert torch.equal(stored, inputs["value"][:2])
    assert float(inputs["value_cache"][1].float().abs().max()) == 0


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("float8_e4m3fn", torch.float8_e4m3fn)])
def test_quantized_caches(name, dtype):
    numpy_inputs = arrays(np.float32, getattr(ml_dtypes, name, np.int8))
    inputs = {key: to_torch(x) for key, x in numpy_inputs.items()}
    assert inputs["key_cache"].dtype == dtype
    options = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL"}
    scales = {"k_scale": np.full(1, 0.02, np.float32), "v_scale": np.full((KV_HEADS, 1, WIDTH), 0.03, np.float32)}
    expected = call({**numpy_inputs, **scales}, **options)
    result = call({**inputs, **{key: to_torch(x) for key, x in scales.items()}}, **options)
    assert torch.equal(result.output, to_torch(expected.output))
    assert (inputs["key_cache"].view(torch.uint8).numpy() == numpy_inputs["key_cache"].view(np.uint8)).all()
    assert bool(inputs["key_cache"].view(torch.uint8).any())


def test_int4_caches():
    numpy_inputs = arrays(np.float32)
    for name in ("key_cache", "value_cache"):
        numpy_inputs[name] = np.full((3, 16, KV_HEADS, WIDTH // 2), 0x88, np.uint8)
    inputs = {key: to_torch(x.copy()) for key, x in numpy_inputs.items()}
    options = {
        f"{name}_{what}": value
        for name in ("k", "v")
        for what, value in (("quant_type", "PER_TENSOR"), ("cache_dtype", "int4"))
    }
    scales = {name: np.full(1, 0.3, np.float32) for name in ("k_scale", "v_scale")}
    expected = call({**numpy_inputs, **scales}, **options)
    result = call({**inputs, **{key: to_torch(x) for key, x in scales.items()}}, **options)
    assert torch.equal(result.output, to_torch(expected.output))
    assert (inputs["key_cache"].numpy() == numpy_inputs["key_cache"]).all()


def test_columns_of_a_fused_projection_are_taken_as_they_are():
    inputs = {key: to_torch(x) for key, x in arrays(ml_dtypes.bfloat16).items()}
    fused = torch.cat([inputs["query"], inputs["key"], inputs["value"]], -1)
    expected = call(inputs).output
    split = dict(zip(("query", "key", "value"), fused.split([64, 32, 32], -1), strict=True))
    assert not split["key"].is_contiguous()
    assert torch.equal(call({**inputs, **split}).output, expected)


def test_parameters_and_tensors_that_require_grad_are_taken():
    inputs = {key: to_torch(x) for key, x in arrays(np.float32).items()}
    expected = call(inputs).output
    inputs["query"] = torch.nn.Parameter(inputs["query"])
    output = call(inputs).output
    assert torch.equal(output, expected)
    assert not output.requires_grad


def test_out_is_filled():
    inputs = {key: to_torch(x) for key, x in arrays(ml_dtypes.bfloat16).items()}
    out = torch.full((TOKENS, HEADS * WIDTH), torch.nan, dtype=torch.bfloat16)
    assert call(inputs, out=out).output is out
    assert torch.equal(out, call(inputs).output)


def test_tensors_of_an_unknown_type_or_place_are_refused():
    inputs = {key: to_torch(x) for key, x in arrays(np.float32).items()}
    with pytest.raises(InvalidArgumentError, match="query: expected element type float16 or bfloat16 or float32"):
        call({**inputs, "query": inputs["query"].double()})
    with pytest.raises(InvalidArgumentError, match=r"expected one of torch\.float16.*got torch\.complex64"):
        call({**inputs, "query": inputs["query"].to(torch.complex64)})
    with pytest.raises(InvalidArgumentError, match="expected one on cpu or cuda, got one on meta"):
        call({**inputs, "query": inputs["query"].to("meta")})


def test_int64_lengths_are_named():
    inputs = {key: to_torch(x) for key, x in arrays(np.float32).items()}
    with pytest.raises(InvalidArgumentError, match="past_seqlens: expected element type int32, got int64"):
        call({**inputs, "past_seqlens": inputs["past_seqlens"].long()})
