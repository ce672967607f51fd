"""Arrays of every kind in, the same kind out, never a copy of a cache."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedattn import Float8View, InvalidArgumentError, PagedAttention, arrays, paged_attention
from pagedattn.dtypes import BFLOAT16, FLOAT8E4M3FN, FLOAT16, FLOAT32
from tests.support.build import Built, build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits, bits

FP8 = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}
INT8 = {"cache": "int8", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}
INT4 = {"cache": "int4", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}
EVERYTHING: dict[str, Any] = {
    "qk_norm": True,
    "rope": "full",
    "sink": True,
    "bias": "BH",
    "positions": "own",
    "slots": "holes",
    "metadata": True,
    "qk_output": 2,
    "padding": 2,
}
CASES = [
    Case(**EVERYTHING),
    Case(io="float32", strided=True, **EVERYTHING),
    Case(io="bfloat16", **EVERYTHING),
    Case(**INT8),
    Case(io="bfloat16", **FP8),
    Case(**INT4),
    Case(mode="packed", io="bfloat16", strided=True),
    Case(mode="latent", kv_num_heads=1, io="bfloat16"),
]


def called(built: Built, convert: Any) -> tuple[Any, dict[str, Any]]:
    inputs = built.convert(convert)
    return paged_attention(**{**inputs, **built.attributes, **built.options}), inputs


# ---- NumPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_results_are_new_arrays_and_the_callers_caches(case):
    built = build(case)
    got = built.run(paged_attention)
    inputs = built.inputs
    key_cache = inputs["key_cache"]
    again = paged_attention(**{**inputs, **built.attributes, **built.options})
    assert again.key_cache_out is key_cache
    assert again.value_cache_out is inputs.get("value_cache")
    for x in (got.output, got.output_qk, got.lse):
        assert x is None or type(x) is np.ndarray
    assert not any(np.shares_memory(got.output, x) for x in inputs.values())


def test_a_strided_cache_is_written_in_place_and_its_other_half_left_alone():
    """K and V as halves of one buffer, and heads sliced out of it."""
    built = build(Case())
    want = built.copy()
    expected = want.run(paged_attention)
    both = np.full((7, 2, 16, 5, 64), 7, np.float16)
    both[:, 0, :, 1:3], both[:, 1, :, 2:4] = built["key_cache"], built["value_cache"]
    key_cache, value_cache = both[:, 0, :, 1:3], both[:, 1, :, 2:4]
    got = built.run(paged_attention, key_cache=key_cache, value_cache=value_cache)
    assert_same_bits(got.output, expected.output)
    assert_same_bits(key_cache, want["key_cache"])
    assert_same_bits(value_cache, want["value_cache"])
    rest = both.copy()
    rest[:, 0, :, 1:3] = rest[:, 1, :, 2:4] = 7
    assert (rest == 7).all()


@pytest.mark.parametrize("tokens", [7, 1])
def test_column_slices_of_a_fused_array_are_the_packed_form(tokens):
    built = build(Case(mode="packed", lengths=((9, tokens),)))
    fused = built["query"].copy()
    packed = built.copy().run(paged_attention)
    parts = {"query": fused[:, :256], "key": fused[:, 256:384], "value": fused[:, 384:]}
    sliced = built.copy().run(paged_attention, **parts)
    whole = built.copy().run(paged_attention, **{name: x.copy() for name, x in parts.items()})
    for got in (sliced, whole):
        for mine, right in zip(got[:3], packed[:3], strict=True):
            assert_same_bits(mine, right)
    assert_same_bits(fused, built["query"])


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_read_only_cache_is_refused(name):
    built = build(Case())
    frozen = built[name]
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected a writeable array, got a read-only one.$"):
        built.run(paged_attention, **{name: frozen})


def test_read_only_inputs_are_fine():
    built = build(Case(**EVERYTHING))
    want = built.copy().run(paged_attention)
    inputs = built.inputs
    for name, x in inputs.items():
        if name not in ("key_cache", "value_cache"):
            x.flags.writeable = False
    got = paged_attention(**{**inputs, **built.attributes, **built.options})
    assert_same_bits(got.output, want.output)


def test_a_subclass_of_ndarray_is_an_ndarray(tmp_path):
    built = build(Case())
    want = built.copy().run(paged_attention)
    mapped = np.memmap(tmp_path / "keys", np.float16, "w+", shape=built["key_cache"].shape)
    mapped[...] = built["key_cache"]
    got = built.run(paged_attention, key_cache=mapped)
    assert got.key_cache_out is mapped
    assert_same_bits(got.output, want.output)
    assert_same_bits(np.asarray(mapped), want.key_cache_out)


def test_a_subclass_is_read_as_a_plain_array():
    built = build(CASES[0])
    want = built.copy().run(paged_attention)
    plain = {name: x for name, x in built.inputs.items() if x.ndim == 2}
    got = built.run(paged_attention, **{name: x.view(np.matrix) for name, x in plain.items()})
    assert type(got.output) is np.ndarray
    assert_same_bits(got.output, want.output)


@pytest.mark.parametrize("name", ["query", "key_cache", "past_seqlens"])
def test_a_mask_or_a_class_in_an_arrays_place_is_refused(name):
    built = build(Case())
    for x, message in (
        (np.ma.array(built[name], mask=True), "expected an array without a mask, which would count for nothing."),
        (
            np.ndarray,
            "expected a NumPy or CuPy array, a torch tensor, or an object with __dlpack__ or "
            "__cuda_array_interface__, got type.",
        ),
    ):
        with pytest.raises(InvalidArgumentError) as refusal:
            built.run(paged_attention, **{name: x})
        assert str(refusal.value) == f"{name}: {message}"


@pytest.mark.parametrize("layout", ["C", "F", "columns", "reversed"])
def test_out_takes_the_result_in_any_layout(layout):
    built = build(Case(padding=2))
    want = built.copy().run(paged_attention).output
    wide = np.full((10, 600), np.nan, np.float16)
    out = {
        "C": wide[:, :256].copy(),
        "F": np.asfortranarray(wide[:, :256]),
        "columns": wide[:, 10:522:2],
        "reversed": wide[::-1, 300:556],
    }[layout]
    got = built.run(paged_attention, out=out)
    assert got.output is out
    assert_same_bits(np.ascontiguousarray(out), want)
    if layout == "columns":
        assert np.isnan(wide[:, 11:522:2]).all()
        assert np.isnan(wide[:, 522:]).all()


def test_out_is_not_the_memory_of_query():
    """Rows of a query may be read again after their output has been written."""
    built = build(Case(is_causal=False))
    query = built["query"].copy()
    with pytest.raises(InvalidArgumentError, match=r"^out: expected memory of its own, got the buffer of query\."):
        built.run(paged_attention, query=query, out=query)


# ---- float8 in a byte array --------------------------------------------------------------------------------------


def test_a_float8_view_is_the_float8_array():
    built, raw = build(Case(**FP8)), build(Case(**FP8))
    want = built.run(paged_attention)
    views = {name: Float8View(raw[name].view(np.uint8)) for name in ("key_cache", "value_cache")}
    got = raw.run(paged_attention, **views)
    assert got.key_cache_out is views["key_cache"]
    assert got.value_cache_out is views["value_cache"]
    assert_same_bits(got.output, want.output)
    for name in ("key_cache", "value_cache"):
        assert_same_bits(raw[name], built[name], name)
    assert views["key_cache"].shape == raw["key_cache"].shape
    assert repr(views["key_cache"]).startswith("Float8View(array(")


def test_a_float8_view_needs_bytes():
    with pytest.raises(InvalidArgumentError) as refusal:
        Float8View(np.zeros(3, np.int8))
    assert str(refusal.value) == "array: expected element type uint8, got int8."


def test_bytes_without_the_view_are_int4():
    built = build(Case(**FP8))
    caches = {name: built[name].view(np.uint8) for name in ("key_cache", "value_cache")}
    with pytest.raises(
        InvalidArgumentError, match=r"^k_cache_dtype: expected 'int4', because key_cache is uint8, got ''"
    ):
        built.run(paged_attention, **caches)


# ---- DLPack ------------------------------------------------------------------------------------------------------


class Foreign:
    """An array of a library that nobody knows, in host memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OldForeign(Foreign):
    """The same from before DLPack could tell what is read-only."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._array.__dlpack__()


@pytest.mark.parametrize(
    "case", [Case(**EVERYTHING), Case(io="float32", strided=True), Case(**INT8), Case(**INT4)], ids=str
)
def test_dlpack_objects_are_used_in_place(case):
    built = build(case)
    want = built.copy().run(paged_attention)
    got, inputs = called(built, lambda parent, index: Foreign(parent[index]))
    assert got.key_cache_out is inputs["key_cache"]
    assert type(got.output) is np.ndarray
    assert_same_bits(got.output, want.output)
    assert_same_bits(built["key_cache"], want.key_cache_out)
    assert_same_bits(built["value_cache"], want.value_cache_out)


def test_a_dlpack_object_takes_the_result():
    built = build(Case())
    want = built.copy().run(paged_attention).output
    room = np.zeros((8, 256), np.float16)
    out = Foreign(room)
    assert built.run(paged_attention, out=out).output is out
    assert_same_bits(room, want)


def test_old_dlpack_objects_are_read_but_never_written():
    """Their memory may be read-only without their being able to say so."""
    built = build(Case())
    want = built.copy().run(paged_attention).output
    assert_same_bits(built.copy().run(paged_attention, query=OldForeign(built["query"].copy())).output, want)
    with pytest.raises(InvalidArgumentError, match=r"^key_cache: expected a writeable array, got a read-only one\.$"):
        built.run(paged_attention, key_cache=OldForeign(built["key_cache"]))


def test_what_numpy_cannot_take_through_dlpack_is_named():
    built = build(Case(io="bfloat16"))
    with pytest.raises(
        InvalidArgumentError, match=r"^query: NumPy cannot take it through DLPack: DLPack only supports "
    ):
        built.run(paged_attention, query=Foreign(built["query"]))


# ---- descriptions ------------------------------------------------------------------------------------------------


def test_a_description_counts_strides_in_elements():
    x = np.zeros((4, 6, 8), ml_dtypes.bfloat16)[1:, ::2]
    info = arrays.NUMPY.describe(x)
    assert info.shape == (3, 3, 8)
    assert info.strides == (48, 16, 1)
    assert info.pointer == x.ctypes.data
    assert info.dtype == ml_dtypes.bfloat16
    assert (info.device, info.writeable) == ("cpu", True)


@pytest.mark.parametrize(
    ("x", "contiguous"),
    [
        (np.zeros((3, 4)), True),
        (np.zeros((3, 4)).T, False),
        (np.zeros((3, 8))[:, :4], False),
        (np.zeros((1, 8))[:, :4], True),
        (np.zeros((3, 4))[:, ::4], False),
        (np.zeros((3, 1)).T, True),
        (np.zeros((0, 4))[:, ::2], True),
        (np.zeros(4)[::-1], False),
        (np.zeros(()), True),
    ],
)
def test_contiguous_means_no_gaps_in_c_order(x, contiguous):
    assert arrays.NUMPY.describe(x).is_contiguous is contiguous
    assert contiguous == x.flags.c_contiguous


@pytest.mark.parametrize("name", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), BFLOAT16])
def test_element_types_by_name_or_type(name):
    assert arrays.dtype_named(name) is BFLOAT16


def test_float8_by_its_types():
    assert arrays.dtype_named("float8e4m3fn") is FLOAT8E4M3FN
    assert arrays.dtype_named(ml_dtypes.float8_e4m3fn) is FLOAT8E4M3FN


@pytest.mark.parametrize("name", ["half", np.uint8, np.float64, object(), None, 3])
def test_what_is_no_element_type_is_named(name):
    with pytest.raises(InvalidArgumentError, match=r"^dtype: expected one of float16, bfloat16, .*, got "):
        arrays.dtype_named(name)


# ---- CuPy --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy_array():
    """Makes an array of CuPy over an address of device 0, which nothing reads: no GPU is needed."""
    cupy = pytest.importorskip("cupy", reason="CuPy is absent")
    memory = cupy.cuda.UnownedMemory(1 << 44, 1 << 20, None, 0)
    return lambda shape, strides=None: cupy.ndarray(shape, np.float16, cupy.cuda.MemoryPointer(memory, 512), strides)


@pytest.mark.parametrize(
    ("shape", "strides", "described"),
    [
        ((4, 6), None, (6, 1)),
        ((4, 6), (12, 2), (6, 1)),
        ((4, 6), (40, 2), (20, 1)),
        ((4, 6), (2, 8), (1, 4)),
        ((4, 6), (0, 2), (0, 1)),
        ((3, 1, 5), (10, 10, 2), (5, 5, 1)),
        ((7,), (2,), (1,)),
    ],
)
def test_an_array_of_cupy_is_described_by_its_strides(cupy_array, shape, strides, described):
    x = cupy_array(shape, strides)
    info = arrays.adapter_of("x", x).describe(x)
    assert info == (shape, np.dtype(np.float16), "cuda:0", described, (1 << 44) + 512, True, True)


def test_strides_of_cupy_that_are_never_stepped_by_make_no_other_kind(cupy_array):
    assert arrays.identify({"x": cupy_array((1, 6))}) == arrays.identify({"x": cupy_array((1, 6), (40, 2))})


def test_strides_of_cupy_inside_an_element_are_seen(cupy_array):
    x = cupy_array((4, 6), (13, 2))
    assert not arrays.adapter_of("x", x).describe(x).whole_strides


def test_a_shape_that_changes_in_place_is_seen(cupy_array):
    x = cupy_array((4, 6))
    before = arrays.identify({"x": x})
    x.shape = (6, 4)
    assert arrays.identify({"x": x}) != before
    assert arrays.adapter_of("x", x).describe(x).strides == (4, 1)
    x.shape = (4, 6)
    assert arrays.identify({"x": x}) == before


# ---- torch -------------------------------------------------------------------------------------------------------


class TestTorch:
    """CPU tensors; bfloat16 and float8 are torch's own types."""

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @staticmethod
    def take(torch: Any) -> Any:
        def convert(parent: np.ndarray, index: Any) -> Any:
            if parent.dtype.kind != "V":
                return torch.from_numpy(parent)[index]
            raw = torch.from_numpy(bits(parent).view({1: np.uint8, 2: np.int16}[parent.dtype.itemsize]))
            own = {1: "float8_e4m3fn", 2: "bfloat16"}[parent.dtype.itemsize]
            return raw.view(getattr(torch, own))[index]

        return convert

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_tensors_in_tensors_out(self, torch, case):
        built = build(case)
        want = built.copy().run(paged_attention)
        got, inputs = called(built, self.take(torch))
        assert got.key_cache_out is inputs["key_cache"]
        assert_same_bits(built["key_cache"], want.key_cache_out)
        for mine, right in ((got.output, want.output), (got.lse, want.lse), (got.output_qk, want.output_qk)):
            assert (mine is None) == (right is None)
            if mine is not None:
                assert isinstance(mine, torch.Tensor)
                assert str(mine.dtype) == f"torch.{right.dtype.name}"
                assert_same_bits(arrays.adapter_of("mine", mine).to_numpy(mine), right)

    def test_out_is_the_callers_tensor(self, torch):
        built = build(Case(io="bfloat16"))
        want = built.copy().run(paged_attention).output
        out = torch.zeros((8, 300), dtype=torch.bfloat16)[:, 20:276]
        inputs = built.convert(self.take(torch))
        got = paged_attention(**{**inputs, **built.attributes, **built.options}, out=out)
        assert got.output is out
        assert_same_bits(out.view(torch.int16).numpy().view(np.uint16), bits(want))

    def test_tensors_and_arrays_mix(self, torch):
        built = build(Case())
        want = built.copy().run(paged_attention).output
        got = built.run(paged_attention, block_table=torch.from_numpy(built["block_table"].copy()))
        assert type(got.output) is np.ndarray
        assert_same_bits(got.output, want)

    def test_tensors_that_need_gradients_are_read(self, torch):
        built = build(Case())
        want = built.copy().run(paged_attention).output
        query = torch.from_numpy(built["query"].copy()).requires_grad_()
        got = built.run(paged_attention, query=query).output
        assert not got.requires_grad
        assert_same_bits(got.numpy(), want)

    def test_a_parameter_is_a_tensor(self, torch):
        built = build(Case(sink=True))
        want = built.copy().run(paged_attention).output
        sink = torch.nn.Parameter(torch.from_numpy(built["head_sink"].copy()))
        assert_same_bits(built.run(paged_attention, head_sink=sink).output, want)

    def test_other_types_and_devices_are_named(self, torch):
        built = build(Case())
        with pytest.raises(InvalidArgumentError, match=r"expected one of torch\.float16, .*, got torch\.complex64\.$"):
            built.run(paged_attention, query=torch.zeros((8, 256), dtype=torch.complex64))
        with pytest.raises(InvalidArgumentError, match=r"expected one on cpu or cuda, got one on meta\.$"):
            built.run(paged_attention, query=torch.zeros((8, 256), dtype=torch.float16, device="meta"))

    def test_a_float8_view_of_a_tensor(self, torch):
        built = build(Case(**FP8))
        want = built.copy().run(paged_attention)
        raw = {name: Float8View(torch.from_numpy(built[name].view(np.uint8))) for name in ("key_cache", "value_cache")}
        got = built.run(paged_attention, **raw)
        assert_same_bits(got.output, want.output)
        assert_same_bits(built["key_cache"], want.key_cache_out)


def test_one_operator_takes_arrays_of_any_kind_in_turn():
    operator = PagedAttention(num_heads=4, kv_num_heads=2)
    built = build(Case())
    want = operator(**built.copy().inputs).output
    foreign = built.copy().convert(lambda parent, index: Foreign(parent[index]))
    assert_same_bits(operator(**foreign).output, want)
    other = build(Case(io="float32"))
    assert operator(**other.inputs).output.dtype == FLOAT32.numpy
    assert operator(**built.inputs).output.dtype == FLOAT16.numpy
