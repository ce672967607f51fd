"""The package's kernels in every mode of the emulator: no race, and the same bits in whatever order threads run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedattn import PagedAttention
from pagedattn import runtime as runtimes
from pagedattn.jit.sources import Sources, default_sources
from tests.support.build import Built, build
from tests.support.cases import SMOKE, Case

from . import sanitize, toolchain
from .executor import EmulatorError, EmulatorExecutor
from .runtime import EmulatorRuntime

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

# Long enough that each stage of a pipeline is filled again, and that a token has several splits.
MIXED, DECODE = ((190, 5), (80, 1), (0, 70)), ((300, 1), (700, 1), (0, 1), (63, 1))
FP8: dict[str, Any] = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}
LATENT: dict[str, Any] = {"mode": "latent", "kv_num_heads": 1, "head_size": 144, "v_head_size": 128, "scale": 0.1}
CASES = {
    "decode": Case(lengths=DECODE, group_size=8, sink=True),
    "decode rotated": Case(lengths=DECODE, group_size=4, rope="full", qk_norm=True),
    "decode several": Case(lengths=((300, 4), (700, 2), (63, 3)), group_size=4),
    "decode fp8": Case(lengths=DECODE, io="bfloat16", group_size=4, **FP8),
    "flash": Case(lengths=MIXED, group_size=4),
    "flash fp8": Case(lengths=MIXED, io="bfloat16", window=50, **FP8),
    "dense": Case(lengths=MIXED, bias="BH", softcap=5.0),
    "dense scores": Case(lengths=MIXED, qk_output=2),
    "dense wide": Case(lengths=((70, 3),), io="bfloat16", kv_num_heads=1, head_size=1024),
    "latent": Case(lengths=DECODE, group_size=16, **LATENT),
    "latent many heads": Case(lengths=((130, 5), (20, 1)), group_size=20, **(LATENT | {"head_size": 192})),
    "latent many heads of few channels": Case(lengths=((150, 3),), group_size=20, **LATENT),
    "latent fp8": Case(
        lengths=MIXED, io="bfloat16", group_size=20, cache="float8e4m3fn", k_quant="PER_TENSOR", **LATENT
    ),
}


def run(built: Built, backend: str, executor: EmulatorExecutor) -> dict[str, bytes]:
    """Every result of a call, as bytes."""
    parents = {name: executor.upload(array) for name, (array, _) in built.parents.items()}
    arrays = {name: parents[name][index] for name, (_, index) in built.parents.items()}
    if "attention_metadata" in built.parents:
        arrays["attention_metadata"] = built["attention_metadata"]
    before = runtimes.use_emulator(EmulatorRuntime(executor))
    try:
        result = PagedAttention(backend=backend, **built.attributes, **built.options)(**arrays)
    finally:
        runtimes.use_emulator(before)
    results = {name: getattr(result, name) for name in ("output", "output_qk", "lse")} | parents
    return {name: np.asarray(x).tobytes() for name, x in results.items() if x is not None}


def with_infinities(built: Built) -> Built:
    """Some new values are infinite: rows that do not admit their keys must not see them."""
    built["value" if "value" in built.parents else "key"][1::7] = np.inf
    return built


def check_orders(built: Built, backend: str) -> None:
    run(built, backend, EmulatorExecutor(mode="races", seed=2))
    want = run(built, backend, EmulatorExecutor(seed=0))
    for seed in (1, 3):
        got = run(built, backend, EmulatorExecutor(seed=seed))
        assert [name for name in want if got[name] != want[name]] == [], f"differs with seed {seed}"


@pytest.mark.parametrize("name", CASES)
def test_any_order_gives_the_same_bits_and_no_race(name: str) -> None:
    check_orders(build(CASES[name]), name.split()[0])


@pytest.mark.parametrize("name", ["decode", "flash", "dense", "latent many heads"])
def test_infinite_values_in_any_order(name: str) -> None:
    check_orders(with_infinities(build(CASES[name])), name.split()[0])


@pytest.mark.parametrize("chunks", [1, 4096])
def test_prologue_with_few_and_many_rows_to_a_warp(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows pass through the same shared memory one after the other."""
    monkeypatch.setattr("pagedattn.kernels.write_cache.WARPS_WORTH_SPREADING", chunks)
    case = Case(lengths=((5, 9),), kv_num_heads=8, group_size=4, rope="partial", qk_norm=True)
    check_orders(build(case), "flash")


# A barrier or wait of a kernel, and a case that must fail without it.
NEEDED = [
    ("kernels/write_cache.cu", "__syncwarp();  // the row is whole", "decode rotated"),
    ("kernels/decode_split_kv.cu", "__syncthreads();  // every warp has left", "decode"),
    ("kernels/decode_split_kv.cu", "__syncthreads();  // acc and state", "decode"),
    ("kernels/decode_split_kv.cu", "__syncthreads();  // the query rows", "decode"),
    ("kernels/decode_split_kv.cu", "__syncwarp();  // the keys are visible", "decode"),
    ("kernels/decode_split_kv.cu", "__syncwarp();  // the values are visible", "decode"),
    ("include/pagedattn/cta_tiles.cuh", "__syncthreads();  // all warps are done", "dense wide"),
    ("include/pagedattn/cta_tiles.cuh", "ptx::cp_async_wait<", "dense"),
    ("include/pagedattn/cta_tiles.cuh", "__syncthreads();\n    if", "dense"),
    ("include/pagedattn/turn_tiles.cuh", "ptx::cp_async_wait<", "flash"),
    ("include/pagedattn/turn_tiles.cuh", "__syncthreads();", "flash"),
    ("kernels/flash_prefill_sm80.cu", "__syncthreads();  // the facts", "flash"),
    ("kernels/flash_prefill_sm80.cu", "__syncwarp();  // the warp's rows", "flash"),
    ("include/pagedattn/hidden_values.cuh", "__syncwarp();  // all lanes have", "flash infinite"),
    ("include/pagedattn/hidden_values.cuh", "Meeting::sync();  // every warp has taken", "flash infinite"),
    ("include/pagedattn/hidden_values.cuh", "Meeting::sync();  // the cleared rows", "flash infinite"),
    ("include/pagedattn/wide_attention.cuh", "__syncthreads();  // the maxima of every", "latent"),
    ("include/pagedattn/wide_attention.cuh", "__syncthreads();  // the probabilities", "dense"),
    ("include/pagedattn/wide_attention.cuh", "__syncthreads();  // the partial sums", "dense"),
    ("kernels/latent_decode.cu", "ptx::mbarrier_wait(&news.copied", "latent many heads"),
    ("kernels/latent_decode.cu", "T::ScoreTeam::sync();  // the maxima of every", "latent many heads"),
    ("kernels/latent_decode.cu", "ptx::mbarrier_wait(&news.weighed", "latent many heads"),
    ("kernels/latent_decode.cu", "T::ValueTeam::sync();  // nobody reads the tile", "latent many heads"),
    ("kernels/latent_decode.cu", "__syncthreads();  // the queries are visible, the barriers", "latent many heads"),
    ("kernels/latent_decode.cu", "ptx::mbarrier_wait(&T::news(tiles.count)", "latent many heads"),
]


@pytest.mark.parametrize(("file", "statement", "name"), NEEDED)
def test_a_barrier_taken_out_of_a_kernel_is_missed(file: str, statement: str, name: str, tmp_path: Path) -> None:
    """The races mode reports it; a missing wait leaves poison, which changes the results."""
    shutil.copytree(default_sources().root, tmp_path / "kernels_cu")
    source = tmp_path / "kernels_cu" / file
    text = source.read_text()
    assert text.count(statement) == 1, f"{file} has changed: {statement}"
    source.write_text(text.replace(statement, "//" + statement))
    built = build(CASES[name.removesuffix(" infinite")])
    if "infinite" in name:
        with_infinities(built)
    try:
        results = run(built, name.split()[0], EmulatorExecutor(Sources(tmp_path / "kernels_cu"), mode="races"))
    except EmulatorError as error:
        message = str(error)
    else:
        message = ""
        assert results != run(built, name.split()[0], EmulatorExecutor(mode="races"))
    assert not message or "race in dynamic shared memory" in message


# Which case of each backend.
SANITIZED: dict[str, Callable[[Case], bool]] = {
    "decode": lambda case: case.cache == "int8" and not case.is_latent,
    "flash": lambda case: case.cache == "float8e4m3fn" and not case.is_latent,
    "dense": lambda case: case.qk_output > 0 and not case.is_latent,
    "latent": lambda case: case.cache == "float8e4m3fn" and case.is_latent,
}


def test_sanitizers_find_nothing_in_any_backend() -> None:
    """In a process that runs under AddressSanitizer and UndefinedBehaviorSanitizer; more by hand."""
    try:
        environment = sanitize.environment()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    test = "tests/kernels/test_matrix.py::test_backend_is_right_or_refuses"
    cases = [f"{test}[{name}-emulated-{next(filter(fits, SMOKE))}]" for name, fits in SANITIZED.items()]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{len(cases)} passed" in process.stdout
