"""The support table, the choice made from it, and what is said about that choice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from importlib import import_module

import numpy as np
import pytest

from pagedattn import (
    InvalidArgumentError,
    PagedAttention,
    UnsupportedError,
    dispatch,
    explain,
    paged_attention,
    runtime,
    support,
)
from pagedattn.dispatch import Choice, select
from pagedattn.problem import Problem
from pagedattn.support import ALL_YES, NUMPY, ROWS, Feature, No, Row, Yes, features_of, why_not
from tests.support.build import Built, build
from tests.support.cases import Case
from tests.support.oracle import problem_of

INT8 = {"cache": "int8", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
INT4 = {"cache": "int4", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
# The smallest call that needs each feature.
NEEDS = {
    Feature.SEPARATE: Case(),
    Feature.LATENT: Case(mode="latent", kv_num_heads=1),
    Feature.FLOAT32: Case(io="float32"),
    Feature.QUANTIZED_CACHE: Case(**INT8),
    Feature.INT4_CACHE: Case(**INT4),
    Feature.WINDOW: Case(window=4),
    Feature.SOFTCAP: Case(softcap=2.0),
    Feature.HEAD_SINK: Case(sink=True),
    Feature.QUERY_POSITIONS: Case(positions="own"),
    Feature.ATTENTION_BIAS: Case(bias="11"),
    Feature.OUTPUT_QK: Case(qk_output=1),
    Feature.NON_CAUSAL: Case(is_causal=False),
}
PROLOGUE = {
    "packed QKV": Case(mode="packed"),
    "QK-norm": Case(qk_norm=True),
    "RoPE": Case(rope="offset", interleaved=True),
    "slot_mapping": Case(slots="explicit"),
    "padding": Case(padding=2),
    "metadata": Case(metadata=True),
}


def problem(case: Case) -> Problem:
    built = build(case)
    return replace(problem_of(built.inputs, built.attributes, case.qk_dtype), return_lse=False)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("PAGEDATTN_BACKEND", "PAGEDATTN_DEBUG_INFO", "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"):
        monkeypatch.delenv(name, raising=False)


# ---- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_answers_for_every_feature(row):
    assert set(row.cells) == set(Feature)
    assert all(isinstance(cell, Yes | No) for cell in row.cells.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_no_has_a_reason(row):
    for feature, cell in row.cells.items():
        if isinstance(cell, No):
            assert cell.reason.strip(), feature
            assert not cell.reason.endswith("."), "reasons are parts of a sentence"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_a_module_with_a_plan(row):
    assert callable(import_module(row.module).plan)
    assert row.sdpa_kernel
    assert row.sdpa_kernel == row.sdpa_kernel.upper()
    assert row.prefers_text


def test_names_are_distinct():
    assert len({row.name for row in ROWS}) == len({row.module for row in ROWS}) == len(ROWS)
    assert {row.name: row for row in ROWS} == support.BY_NAME


def test_numpy_serves_everything():
    assert all(isinstance(cell, Yes) for cell in NUMPY.cells.values())


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_a_feature_is_recognised(feature):
    if feature is Feature.LSE:
        needed = features_of(replace(problem(Case()), return_lse=True))
    else:
        needed = features_of(problem(NEEDS[feature]))
    layout = Feature.LATENT if feature is Feature.LATENT else Feature.SEPARATE
    assert set(needed) == {feature, layout}


@pytest.mark.parametrize("what", PROLOGUE)
def test_what_the_prologue_serves_is_no_feature(what):
    assert features_of(problem(PROLOGUE[what])) == (Feature.SEPARATE,)


def test_fp8_is_a_quantized_cache_and_int4_another():
    fp8 = Case(cache="float8e4m3fn", k_quant="PER_TENSOR", v_quant="PER_TENSOR")
    assert Feature.QUANTIZED_CACHE in features_of(problem(fp8))
    assert Feature.QUANTIZED_CACHE not in features_of(problem(Case(**INT4)))


@pytest.mark.parametrize(
    ("row", "feature"),
    [(row, feature) for row in ROWS for feature in Feature if isinstance(row.cells[feature], No)],
    ids=lambda x: x.name,
)
def test_each_no_gives_its_own_reason(row, feature):
    needy = replace(problem(Case()), return_lse=True) if feature is Feature.LSE else problem(NEEDS[feature])
    reasons = [
        f"{need.value}: {row.cells[need].reason}" for need in features_of(needy) if isinstance(row.cells[need], No)
    ]
    assert why_not(row, needy, max(row.min_arch, 80)) == reasons[0]
    assert f"{feature.value}: {row.cells[feature].reason}" in reasons


# ---- the choice --------------------------------------------------------------------------------------------------


def _small(problem: Problem) -> str | None:
    return None if problem.head_size <= 64 else f"head_size {problem.head_size} is above 64"


FIRST = Row(
    "first",
    "pagedattn.backends.numpy_reference",
    "FIRST_KERNEL",
    80,
    {**ALL_YES, Feature.HEAD_SINK: No("its softmax has no sink"), Feature.OUTPUT_QK: No("scores stay in registers")},
    limits=_small,
    prefers=lambda problem: problem.token_count <= problem.batch_size,
    prefers_text="one new token a sequence",
)
SECOND = Row(
    "second",
    "pagedattn.backends.numpy_reference",
    "SECOND_KERNEL",
    90,
    {**ALL_YES, Feature.OUTPUT_QK: No("scores stay in registers")},
)


@pytest.fixture
def three(monkeypatch):
    """A table of three backends, two of them for a GPU."""
    rows = (FIRST, SECOND, NUMPY)
    monkeypatch.setattr(dispatch, "ROWS", rows)
    monkeypatch.setattr(dispatch, "BY_NAME", {row.name: row for row in rows})


DECODE = Case(lengths=((5, 1), (9, 1)))


@pytest.mark.usefixtures("three")
class TestChoice:
    def test_the_first_that_can_and_is_meant_for_it(self):
        assert select(problem(DECODE), 90) == Choice(FIRST, ())

    def test_the_next_when_the_first_is_meant_for_something_else(self):
        choice = select(problem(Case()), 90)
        assert choice.row is SECOND
        assert choice.passed_over == (("first", "can, but is meant for: one new token a sequence"),)

    def test_the_first_that_can_when_none_is_meant_for_it(self, monkeypatch):
        monkeypatch.setattr(dispatch, "ROWS", (FIRST, NUMPY))
        assert select(problem(Case()), 80) == Choice(FIRST, ())

    def test_a_missing_feature_is_named(self):
        choice = select(problem(replace(DECODE, sink=True)), 90)
        assert choice.row is SECOND
        assert choice.passed_over == (("first", "head_sink: its softmax has no sink"),)

    def test_a_size_out_of_its_limits_is_named(self):
        choice = select(problem(replace(DECODE, head_size=128)), 90)
        assert choice.passed_over == (("first", "head_size 128 is above 64"),)

    def test_arrays_on_the_host(self):
        choice = select(problem(DECODE), 0)
        assert choice.row is NUMPY
        assert choice.passed_over == (
            ("first", "needs arrays on a CUDA device"),
            ("second", "needs arrays on a CUDA device"),
        )

    def test_it_shows_the_backend_and_the_reasons(self):
        assert str(select(problem(replace(DECODE, sink=True)), 90)) == (
            "backend: second (SdpaKernel=SECOND_KERNEL)\n  not first: head_sink: its softmax has no sink"
        )

    def test_no_backend_names_the_features_and_every_reason(self):
        with pytest.raises(UnsupportedError) as refusal:
            select(problem(replace(DECODE, sink=True, qk_output=1)), 80)
        assert str(refusal.value) == (
            "no backend serves this call (kv_cache_layout = SEPARATE, head_sink, output_qk) on sm_80: "
            "first: head_sink: its softmax has no sink; "
            "second: needs compute capability 9.0, the device has 8.0; "
            "numpy: runs on arrays in host memory only."
        )
        assert isinstance(refusal.value, InvalidArgumentError)
        assert refusal.value.code == "INVALID_ARGUMENT"

    def test_no_backend_on_the_host(self, monkeypatch):
        monkeypatch.setattr(dispatch, "ROWS", (FIRST,))
        with pytest.raises(
            UnsupportedError, match=r"^no backend serves this call \(.*\) on the CPU: first: needs arrays"
        ):
            select(problem(DECODE), 0)

    def test_no_backend_for_an_emulated_call_points_at_the_one_that_has_to_be_named(self):
        with pytest.raises(UnsupportedError, match="numpy: is for emulated calls only if asked for by name"):
            select(replace(problem(replace(DECODE, sink=True, qk_output=1)), device="emulated"), 80)

    def test_an_old_device(self):
        with pytest.raises(UnsupportedError, match=r"first: needs compute capability 8\.0, the device has 7\.5; "):
            select(problem(DECODE), 75)

    def test_forcing_a_backend(self):
        choice = select(problem(DECODE), 90, "second")
        assert choice == Choice(SECOND, (("first", "backend second was asked for"),))

    def test_forcing_one_that_is_meant_for_something_else(self):
        assert select(problem(Case()), 90, "first").row is FIRST

    @pytest.mark.parametrize(
        ("case", "arch", "name", "reason"),
        [
            (Case(sink=True), 90, "first", "head_sink: its softmax has no sink"),
            (Case(head_size=128), 90, "first", "head_size 128 is above 64"),
            (Case(), 80, "second", "needs compute capability 9.0, the device has 8.0"),
            (Case(), 0, "second", "needs arrays on a CUDA device"),
            (Case(), 90, "numpy", "runs on arrays in host memory only"),
        ],
        ids=str,
    )
    def test_forcing_one_that_cannot(self, case, arch, name, reason):
        with pytest.raises(UnsupportedError) as refusal:
            select(problem(case), arch, name)
        assert str(refusal.value) == f"backend {name} cannot serve this call: {reason}."

    def test_an_unknown_name(self):
        with pytest.raises(InvalidArgumentError) as refusal:
            select(problem(DECODE), 90, "fastest")
        assert str(refusal.value) == "backend: expected one of first, second, numpy, got 'fastest'."

    def test_a_call_that_cannot_be_served_touches_nothing(self, monkeypatch):
        monkeypatch.setattr(dispatch, "ROWS", (FIRST, SECOND))
        built = build(Case())
        before = built["key_cache"].tobytes()
        with pytest.raises(UnsupportedError):
            PagedAttention(**built.attributes)(**built.inputs)
        assert built["key_cache"].tobytes() == before

    def test_a_call_reports_why_others_were_passed_over(self, capsys, monkeypatch):
        monkeypatch.setenv("PAGEDATTN_DEBUG_INFO", "1")
        built = build(Case())
        PagedAttention(**built.attributes)(**built.inputs)
        assert capsys.readouterr().err == (
            "Operator=PagedAttention DataType=float16 CacheType=float16 SdpaKernel=NUMPY_REFERENCE Backend=numpy "
            "first=0(needs arrays on a CUDA device) second=0(needs arrays on a CUDA device)\n"
        )

    def test_explain_reports_the_same(self):
        built = build(Case())
        choice = explain(**built.inputs, **built.attributes)
        assert choice.row is NUMPY
        assert [name for name, _ in choice.passed_over] == ["first", "second"]


# ---- explain, forcing and reports of real calls ------------------------------------------------------------------


def explained(built: Built, **more) -> Choice:
    return explain(**{**built.inputs, **built.attributes, **built.options, **more})


def test_explain_computes_and_writes_nothing():
    built = build(Case(bias="BH", sink=True, **INT8))
    before = {name: parent.tobytes() for name, (parent, _) in built.parents.items()}
    choice = explained(built)
    assert choice.row.name == "numpy"
    assert str(choice).startswith("backend: numpy (SdpaKernel=NUMPY_REFERENCE)")
    assert {name: parent.tobytes() for name, (parent, _) in built.parents.items()} == before


def test_explain_refuses_what_the_call_would():
    built = build(Case())
    with pytest.raises(InvalidArgumentError, match=r"^query: expected a width divisible by num_heads = 3, got 256"):
        explained(built, num_heads=3, kv_num_heads=1)
    with pytest.raises(InvalidArgumentError, match=r"^backend: expected one of .*numpy, got 'none'\.$"):
        explained(built, backend="none")


def test_explain_names_an_unknown_input():
    operator = PagedAttention(num_heads=4, kv_num_heads=2)
    with pytest.raises(InvalidArgumentError, match=r"^k_cache: expected an input among query, key, "):
        operator.explain(**build(Case()).inputs, k_cache=np.zeros(3))


def test_forcing_numpy_by_argument_or_variable(monkeypatch):
    want = build(Case()).run(paged_attention)
    got = build(Case()).run(paged_attention, backend="numpy")
    assert got.output.tobytes() == want.output.tobytes()
    monkeypatch.setenv("PAGEDATTN_BACKEND", "numpy")
    build(Case()).run(paged_attention)


def test_forcing_numpy_where_calls_are_emulated(monkeypatch):
    want = build(Case()).run(paged_attention)
    monkeypatch.setattr(runtime, "_emulator", object())
    got = build(Case()).run(paged_attention, backend="numpy")
    assert got.output.tobytes() == want.output.tobytes()
    monkeypatch.setenv("PAGEDATTN_BACKEND", "numpy")
    assert build(Case()).run(paged_attention).output.tobytes() == want.output.tobytes()


def test_the_variable_is_read_at_every_call_and_the_argument_wins(monkeypatch):
    operator = PagedAttention(num_heads=4, kv_num_heads=2)
    operator(**build(Case()).inputs)
    monkeypatch.setenv("PAGEDATTN_BACKEND", "abacus")
    with pytest.raises(InvalidArgumentError, match=r"^backend: expected one of .*, got 'abacus'\.$"):
        operator(**build(Case()).inputs)
    build(Case()).run(paged_attention, backend="numpy")
    monkeypatch.delenv("PAGEDATTN_BACKEND")
    operator(**build(Case()).inputs)


def test_a_gpu_backend_cannot_be_forced_on_host_arrays():
    for row in ROWS:
        if row.min_arch:
            with pytest.raises(
                UnsupportedError, match=f"^backend {row.name} cannot serve this call: needs arrays on a"
            ):
                build(Case()).run(paged_attention, backend=row.name)


@pytest.mark.parametrize("name", ["PAGEDATTN_DEBUG_INFO", "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"])
def test_debug_info_prints_one_line_a_call(name, capsys, monkeypatch):
    monkeypatch.setenv(name, "1")
    operator = PagedAttention(num_heads=4, kv_num_heads=2, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR")
    built = build(Case(io="bfloat16", **INT8))
    for _ in range(2):
        operator(**built.inputs)
    out, err = capsys.readouterr()
    assert not out
    first, second = err.splitlines()
    assert first == second
    assert first.startswith(
        "Operator=PagedAttention DataType=bfloat16 CacheType=int8 SdpaKernel=NUMPY_REFERENCE Backend=numpy"
    )


def test_nothing_is_printed_unasked(capsys):
    build(Case()).run(paged_attention)
    assert capsys.readouterr() == ("", "")


# ---- static facts only -------------------------------------------------------------------------------------------


def test_a_problem_is_frozen_and_hashable_and_holds_no_array():
    one, two = problem(Case(bias="BH")), problem(Case(bias="BH", seed=7))
    assert one == two
    assert hash(one) == hash(two)
    with pytest.raises(FrozenInstanceError):
        one.head_size = 3  # type: ignore[misc]
    assert not any(isinstance(value, np.ndarray) for value in vars(one).values())


def test_values_on_the_device_do_not_change_the_problem():
    built = build(Case(lengths=((5, 3), (17, 2))))
    before = problem_of(built.inputs, built.attributes)
    built["past_seqlens"][:] = 0
    built["cumulative_sequence_length"][:] = [0, 1, 5]
    built["block_table"][...] = -1
    assert problem_of(built.inputs, built.attributes) == before


def test_the_numpy_path_imports_no_gpu_library():
    code = (
        "import sys, numpy as np, pagedattn\n"
        "z = np.zeros; c = z((1, 16, 1, 8), np.float32)\n"
        "x = z((1, 8), np.float32); i = lambda *v: np.array(v, np.int32)\n"
        "pagedattn.paged_attention(x, x, x, c, c.copy(), i(0, 1), i(0), i(0)[None], num_heads=1, kv_num_heads=1)\n"
        "assert not {'cupy', 'torch', 'onnx', 'cuda', 'platformdirs'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
