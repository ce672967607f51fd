"""The emulator itself: each word of the CUDA vocabulary means what the device's does; each planted fault is found."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import ArrayLike

from pagedattn.errors import CompileError, UnsupportedError
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels import flash_prefill_sm90, write_cache

from . import memory, planted, sanitize, toolchain
from .executor import EmulatorError, EmulatorExecutor

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

# Ascending, descending and shuffled orders of the threads.
SEEDS = (0, 1, 2, 3)
_executors: dict[tuple[str, int], EmulatorExecutor] = {}


def executor(mode: str = "plain", seed: int = 0) -> EmulatorExecutor:
    if (mode, seed) not in _executors:
        _executors[mode, seed] = EmulatorExecutor(planted.sources(), mode=mode, seed=seed, workers=2)
    return _executors[mode, seed]


# ---------------------------------------------------------------------------------------------------------- vocabulary


@dataclass(frozen=True)
class VocabularySpec(Spec):
    pass


VOCABULARY_PARAMS = params("VocabularyParams", source=ptr, target=ptr, scratch=ptr, word=i32)
VOCABULARY = Kernel("vocabulary", VocabularySpec, VOCABULARY_PARAMS, lambda spec: 128, lambda spec: 0)
WORDS = re.findall(
    r"\bk[A-Z]\w+",
    (planted.HERE / "kernels" / "vocabulary.cu").read_text().partition("enum Word {")[2].partition("}")[0],
)
X = (np.arange(128) * 37 + 5) % 128  # a permutation, so that 77 occurs once
LANE, WARPS = np.arange(128) % 32, X.reshape(4, 32)


def of_warp(values: np.ndarray) -> np.ndarray:
    """One value a warp, for each of its threads."""
    return np.repeat(np.asarray(values), 32)


def from_lane(lanes: np.ndarray, x: np.ndarray = X) -> np.ndarray:
    """What each thread reads from that lane of its warp."""
    picked: np.ndarray = x.reshape(4, 32)[np.arange(128) // 32, lanes]
    return picked


def signed(values: ArrayLike) -> np.ndarray:
    return np.asarray(values, np.int64).astype(np.uint32).view(np.int32)


def byte_permute(x: np.ndarray) -> np.ndarray:
    """Selector 0x9c61: byte 1, byte 6, the sign of byte 4, the sign of byte 1."""
    low = 0x03020100 + x.astype(np.int64)
    one = low >> 8 & 0xFF
    return signed(one | 0x86 << 8 | 0xFF << 16 | np.where(one & 0x80, 0xFF, 0) << 24)


def rounded_codes(x: np.ndarray) -> np.ndarray:
    y = 0.5 * (x - 60)
    codes: np.ndarray = 8000 * (np.rint(y) + 100) + 40 * (np.floor(y) - np.ceil(y)) + np.trunc(y) + 1
    return codes


UP8 = np.where(LANE % 8 >= 3, LANE - 3, LANE)
DOWN8 = np.where(LANE % 8 < 5, LANE + 3, LANE)
EXPECTED = {
    "kIndices": np.arange(128) + 10000 * 128 + 10000000 * 3,
    "kSyncthreads": X[::-1],
    "kCount": np.count_nonzero(X % 3 == 0),
    "kOr": 10,
    "kAnd": 10,
    "kNamedBarrier": X[np.arange(128) ^ 63],
    "kArrive": np.tile(X[:32], 4),
    "kShfl": from_lane((3 * LANE + 1) % 32),
    "kShflUp": from_lane(np.where(LANE >= 5, LANE - 5, LANE)),
    "kShflDown": from_lane(np.where(LANE < 27, LANE + 5, LANE)),
    "kShflXor": from_lane(LANE ^ 21),
    "kShflWidth": from_lane(LANE // 8 * 8 + 2) + 1000 * from_lane(UP8) + 100000 * from_lane(DOWN8, X % 8),
    "kShflHalfWarp": from_lane(np.where(LANE < 16, LANE ^ 7, LANE ^ 9)),
    "kShflDouble": from_lane(LANE ^ 3),
    "kBallot": of_warp(signed(((WARPS % 5 == 2).astype(np.int64) << np.arange(32)).sum(1))),
    "kAny": of_warp((WARPS == 77).any(1)),
    "kAll": of_warp((WARPS != 77).all(1)),
    "kReduceAdd": of_warp((WARPS - 60).sum(1)),
    "kReduceMin": of_warp((WARPS - 60).min(1)),
    "kReduceMax": of_warp((WARPS - 60).max(1)),
    "kReduceAnd": of_warp(np.bitwise_and.reduce(WARPS | 64, axis=1)),
    "kReduceOr": of_warp(np.bitwise_or.reduce(WARPS, axis=1)),
    "kReduceXor": of_warp(np.bitwise_xor.reduce(WARPS, axis=1)),
    "kAtomicAdd": X.sum(),
    "kAtomicFloat": X.sum(),
    "kAtomicMax": 2 * X.max(),
    "kAtomicExch": 0,
    "kAtomicCas": np.arange(128),
    "kAtomicInc": 128 % 10,
    "kAtomicShared": -1,
    "kPopc": [4 * int(x).bit_count() for x in X],
    "kClz": [32 - int(x - 1).bit_length() if x else 0 for x in X],
    "kFfs": [(int(x & ~1) & -int(x & ~1)).bit_length() for x in X],
    "kBrev": signed([int(f"{x:032b}"[::-1], 2) for x in X]),
    "kBytePerm": byte_permute(X),
    "kFunnel": signed((X * 8 + 4) & 0xFFFFFFFF) ^ signed(1 | (X & 3) << 30),
    "kMulhi": -((X.astype(np.int64) ** 2 << 38) + (1 << 32) - 1 >> 32) + np.maximum(X - 1, 0),
    "kDp4a": 2 * X + 1 * -2 + -1 * 3 + -128 * 127 - 7,
    "kRoundToInt": rounded_codes(X),
    "kMinMax": 1000 * np.maximum(X, 70) + np.minimum(X, 50) + 1 + 2,
    "kPoll": 5,
}


def run_word(device: EmulatorExecutor, word: str, threads: int = 128) -> tuple[np.ndarray, np.ndarray]:
    source, target = device.upload(X.astype(np.int32)), device.empty(128, np.int32)
    scratch = device.zeros(128, np.int32)
    pointers = [device.pointer(array) for array in (source, target, scratch)]
    packed = VOCABULARY_PARAMS.pack(source=pointers[0], target=pointers[1], scratch=pointers[2], word=WORDS.index(word))
    device.launch(device.load(VOCABULARY, VocabularySpec()), (1, 1, 1), threads, 0, packed)
    return target, scratch


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("word", EXPECTED)
def test_word(word: str, seed: int) -> None:
    target, _ = run_word(executor(seed=seed), word)
    np.testing.assert_array_equal(target, np.broadcast_to(EXPECTED[word], 128))


def test_every_word_is_tested() -> None:
    assert set(WORDS) == set(EXPECTED) | {"kPartialWarp"}


def test_partial_warp() -> None:
    """A CTA of 40 threads: the eight lanes of the second warp shuffle among themselves."""
    target, _ = run_word(executor(), "kPartialWarp", threads=40)
    np.testing.assert_array_equal(target[:40], from_lane(LANE ^ 1)[:40])
    assert (target[40:] == -1).all()


def test_atomic_exchange_returns_each_value_once() -> None:
    _, scratch = run_word(executor(), "kAtomicExch")
    assert 0 <= scratch[0] < 128
    assert (scratch[64:] == 1).all()


# --------------------------------------------------------------------------------------------------------- conversions


@dataclass(frozen=True)
class ConversionsSpec(Spec):
    type: int
    decodes: bool


CONVERSIONS_PARAMS = params("ConversionsParams", codes=ptr, values=ptr, count=i32)
CONVERSIONS = Kernel("conversions", ConversionsSpec, CONVERSIONS_PARAMS, lambda spec: 256, lambda spec: 0)
FLOAT_TYPES = (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def convert(spec: ConversionsSpec, codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    device = executor()
    codes, values = device.upload(codes.astype(np.uint16)), device.upload(values.astype(np.float32))
    packed = CONVERSIONS_PARAMS.pack(codes=device.pointer(codes), values=device.pointer(values), count=codes.size)
    device.launch(device.load(CONVERSIONS, spec), (-(-codes.size // 256), 1, 1), 256, 0, packed)
    return codes, values


@pytest.mark.parametrize("type_index", range(4), ids=[np.dtype(t).name for t in FLOAT_TYPES])
def test_every_code_decodes_as_ml_dtypes_does(type_index: int) -> None:
    dtype = np.dtype(FLOAT_TYPES[type_index])
    codes = np.arange(1 << 8 * dtype.itemsize)
    _, values = convert(ConversionsSpec(type_index, True), codes, np.zeros(codes.size))
    expected = codes.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("type_index", range(4), ids=[np.dtype(t).name for t in FLOAT_TYPES])
def test_values_encode_as_ml_dtypes_does(type_index: int) -> None:
    """All codes, the midpoints between neighbours, their neighbours in float32, and what overflows."""
    dtype = np.dtype(FLOAT_TYPES[type_index])
    with np.errstate(all="ignore"):
        exact = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
        exact = np.unique(exact[np.isfinite(exact)])
        middle = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
        around = [np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)]
        beyond = np.array([np.inf, -np.inf, 1e30, -1e30], np.float32)
        values = np.concatenate([exact.astype(np.float32), *around, beyond])
        expected = values.astype(dtype).view(f"u{dtype.itemsize}")
    codes, _ = convert(ConversionsSpec(type_index, False), np.zeros(values.size), values)
    is_nan = np.isnan(expected.view(dtype).astype(np.float32))
    np.testing.assert_array_equal(codes[~is_nan], expected[~is_nan])
    assert np.isnan(codes[is_nan].astype(expected.dtype).view(dtype).astype(np.float32)).all()


# --------------------------------------------------------------------------------------------------------- tensor core


@dataclass(frozen=True)
class TensorCoreSpec(Spec):
    element: int
    k: int


TENSOR_CORE_PARAMS = params("TensorCoreParams", a=ptr, b=ptr, c=ptr)
TENSOR_CORE = Kernel("tensor_core", TensorCoreSpec, TENSOR_CORE_PARAMS, lambda spec: 32, lambda spec: 0)
ELEMENTS = (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8)


@pytest.mark.parametrize("mode", ["plain", "races"])
@pytest.mark.parametrize(("element", "k"), [(0, 8), (0, 16), (1, 8), (1, 16), (2, 16), (2, 32), (3, 16), (3, 32)])
def test_tensor_core(element: int, k: int, mode: str) -> None:
    rng = np.random.default_rng(element * 100 + k)
    dtype = ELEMENTS[element]
    a, b = (rng.integers(-8, 8, (rows, k)).astype(dtype) for rows in (16, 8))  # sums of small integers are exact
    c = rng.integers(-100, 100, (16, 8)).astype(np.int32 if dtype is np.int8 else np.float32)
    device = executor(mode, seed=2)
    arrays = {name: device.upload(array) for name, array in {"a": a, "b": b, "c": c}.items()}
    packed = TENSOR_CORE_PARAMS.pack(**{name: device.pointer(array) for name, array in arrays.items()})
    device.launch(device.load(TENSOR_CORE, TensorCoreSpec(element, k)), (1, 1, 1), 32, 0, packed)
    np.testing.assert_array_equal(arrays["c"], c + (a.astype(np.float64) @ b.astype(np.float64).T).astype(c.dtype))


# -------------------------------------------------------------------------------------------------------------- faults

# Found in any order of the threads; what the message says beside the place.
FOUND_ALWAYS = {
    "kReadPastEnd": ("invalid read", "0 bytes past the end of the 1024-byte buffer of source"),
    "kWritePastEnd": ("past the end of the 1024-byte buffer of target",),
    "kDynamicSharedPastEnd": ("invalid write", "0 bytes past the end of the CTA's 512 bytes of dynamic shared memory"),
    "kDivergentBarrier": ("divergent barrier", "__syncthreads"),
    "kExitedAtBarrier": ("exited", "__syncthreads"),
    "kBarrierAfterExit": ("exited", "__syncthreads"),
    "kDivergentWarp": ("divergent warp", "__shfl_xor_sync"),
    "kExitedLane": ("exited", "__syncwarp"),
    "kNotInMask": ("is not in its own mask", "__shfl_sync"),
    "kNamedBarrierStarves": ("deadlock", "64 threads waited in bar.sync", "at barrier 1, 64 of 96 arrived: 0-63"),
    "kPollsForever": ("deadlock", "polled"),
    "kDivideByZero": ("integer division by zero",),
    "kTrap": ("trap", "thread 70 (warp 2, lane 6) of CTA (0, 0, 0)"),
    "kMisaligned": ("misaligned",),
}
OFFSETS = {"kReadPastEnd": 1, "kReadBefore": 1, "kWritePastEnd": 130, "kDynamicSharedPastEnd": 1, "kMisaligned": 1}


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("fault", FOUND_ALWAYS)
def test_fault_is_found_and_placed(fault: str, seed: int) -> None:
    message = planted.message(executor(seed=seed), fault, OFFSETS.get(fault, 0))
    for part in (*FOUND_ALWAYS[fault], planted.line_of(fault)):
        assert part in message, message


def test_read_before_a_buffer_is_found_by_odd_seeds() -> None:
    message = planted.message(executor(seed=1), "kReadBefore", 1)
    assert "4 bytes before the 1024-byte buffer of source" in message
    assert planted.line_of("kReadBefore") in message


def test_write_into_the_slack_around_a_buffer_is_found() -> None:
    message = planted.message(executor(seed=1), "kWritePastEnd", 130)
    assert "write 0 bytes past the end of the 1024-byte buffer" in message


def test_endless_loop_is_ended_and_placed() -> None:
    message = planted.message(EmulatorExecutor(planted.sources(), seconds=0.3), "kLoopsForever")
    assert "still running after the time limit" in message
    assert planted.line_of("kLoopsForever") in message


def test_uninitialized_shared_memory_reads_as_nan() -> None:
    output = planted.run(executor(), "kUninitializedShared")
    assert np.isnan(output[::2]).all()
    assert (output[1::2] == 2).all()


def test_missing_wait_leaves_poison() -> None:
    assert np.isnan(planted.run(executor(), "kMissingWait")).all()


RACES = ("kMissingBarrier", "kMissingBarrierInLoop", "kRaceBetweenWarps", "kMissingWarpBarrier", "kEarlyRefill")


@pytest.mark.parametrize("fault", RACES)
def test_race_changes_the_output_in_some_order(fault: str) -> None:
    outputs = {planted.run(executor(seed=seed), fault).tobytes() for seed in SEEDS}
    assert len(outputs) > 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", RACES)
def test_race_is_found_in_any_order(fault: str, seed: int) -> None:
    message = planted.message(executor("races", seed), fault)
    assert "race in dynamic shared memory" in message
    assert planted.line_of(fault) in message


ORDERED = ("kSyncthreads", "kNamedBarrier", "kArrive", "kAtomicShared", "kShflHalfWarp", "kAtomicCas")


@pytest.mark.parametrize("word", ORDERED)
def test_ordered_accesses_are_no_race(word: str) -> None:
    target, _ = run_word(executor("races", seed=2), word)
    np.testing.assert_array_equal(target, np.broadcast_to(EXPECTED[word], 128))


def test_launch_works_after_a_fault() -> None:
    device = executor(seed=2)
    assert planted.message(device, "kDivergentBarrier")
    target, _ = run_word(device, "kSyncthreads")
    np.testing.assert_array_equal(target, X[::-1])


# ---------------------------------------------------------------------------------------------------------- sanitizers


@pytest.fixture(scope="module")
def sanitizer_messages() -> dict[str, str]:
    """What the sanitizers say of the faults only they find, from a process that runs under them."""
    try:
        environment = sanitize.environment()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    faults = ("kReadBefore=1", "kStaticSharedPastEnd=1", "kMisaligned=1", "kShiftTooFar=1", "kTrap", "kMissingBarrier")
    process = subprocess.run(
        [sys.executable, "-m", "tests.emulator.planted", *faults],
        cwd=planted.HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    messages: dict[str, str] = json.loads(process.stdout)
    return messages


@pytest.mark.parametrize(
    ("fault", "expected"),
    {
        "kReadBefore": "use-after-poison",
        "kStaticSharedPastEnd": "insufficient space",
        "kMisaligned": "misaligned address",
        "kShiftTooFar": "shift exponent 32 is too large",
        "kTrap": "trap",
    }.items(),
)
def test_sanitizers_find(sanitizer_messages: dict[str, str], fault: str, expected: str) -> None:
    assert expected in sanitizer_messages[fault]
    assert planted.line_of(fault) in sanitizer_messages[fault]


def test_sanitizers_are_silent_about_fibers(sanitizer_messages: dict[str, str]) -> None:
    """A launch right after a fault that left its fibers in the middle: no false report from their stacks."""
    assert sanitizer_messages["kMissingBarrier"] == ""


# ------------------------------------------------------------------------------------------------------- the executor


@dataclass(frozen=True)
class ClustersSpec(Spec):
    size: int


CLUSTERS = Kernel("clusters", ClustersSpec, params("ClustersParams", target=ptr), lambda spec: 32, lambda spec: 0)


def test_clusters_are_refused() -> None:
    with pytest.raises(CompileError, match="clusters of CTAs do not run in the emulator"):
        executor().load(CLUSTERS, ClustersSpec(2))


def test_kernel_with_warpgroup_products_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="flash_prefill_sm90: has warpgroup products"):
        EmulatorExecutor().load(flash_prefill_sm90.KERNEL, next(flash_prefill_sm90.smoke_specs()))


@pytest.mark.parametrize(("grid", "block"), [((1, 65536, 1), 128), ((1, 1, 1), 1025), ((1, 1, 1), 0)])
def test_impossible_launch_is_refused(grid: tuple[int, int, int], block: int) -> None:
    device = executor()
    function = device.load(VOCABULARY, VocabularySpec())
    with pytest.raises(EmulatorError, match="device"):
        device.launch(function, grid, block, 0, VOCABULARY_PARAMS.pack(source=0, target=0, scratch=0, word=0))


def test_empty_grid_runs_nothing() -> None:
    device = executor()
    function = device.load(VOCABULARY, VocabularySpec())
    device.launch(function, (0, 1, 1), 128, 0, VOCABULARY_PARAMS.pack(source=0, target=0, scratch=0, word=0))


def test_compiled_kernels_are_found_again() -> None:
    first = EmulatorExecutor(planted.sources())._compile(VOCABULARY, VocabularySpec())
    built = first.stat().st_ino  # of a file that is built aside and renamed
    again = EmulatorExecutor(planted.sources())._compile(VOCABULARY, VocabularySpec())
    assert (again, again.stat().st_ino) == (first, built)


def test_what_is_not_loaded_is_compiled_at_once_and_found_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    device, compiled = EmulatorExecutor(), []

    def compiling(kernel: Kernel[Any], spec: Spec, really: Any = device._compile) -> Path:
        compiled.append(spec)
        return really(kernel, spec)

    monkeypatch.setattr(device, "_compile", compiling)
    first, second, third = islice(write_cache.smoke_specs(), 3)
    device.load(write_cache.KERNEL, first)
    assert compiled == [first]
    device.compile_many((write_cache.KERNEL, spec) for spec in (first, second, third, second))
    assert sorted(map(str, compiled)) == sorted(map(str, (first, second, third)))
    target = device._compile(write_cache.KERNEL, second)
    assert Path(device.load(write_cache.KERNEL, second).library._name) == target


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("at_start", [False, True])
def test_upload_keeps_strides_and_what_lies_between(at_start: bool) -> None:
    whole = np.arange(6 * 2 * 5, dtype=np.float32).reshape(6, 2, 5)
    view = whole[1:5, 1, ::-2]
    copy = memory.upload(view, at_start)
    np.testing.assert_array_equal(copy, view)
    assert copy.strides == view.strides
    copy[...] = -1
    memory.download(copy, view)
    assert (whole[1:5, 1, ::-2] == -1).all()
    np.testing.assert_array_equal(whole[:, 0], np.arange(60).reshape(6, 2, 5)[:, 0])


def test_empty_is_poison_and_aligned() -> None:
    array = memory.empty((3, 64), ml_dtypes.bfloat16)
    assert np.isnan(array.astype(np.float32)).all()
    assert memory.pointer(array) % 128 == 0
    assert memory.is_guarded(array)
    assert not memory.is_guarded(np.zeros(4))


@pytest.mark.parametrize("shape", [(0,), (0, 5), 0])
def test_empty_array_has_an_address(shape: int | tuple[int, ...]) -> None:
    assert memory.zeros(shape, np.float32).size == 0
    assert memory.upload(np.zeros(shape, np.float32)).size == 0


def test_memory_is_returned() -> None:
    gc.collect()
    before = len(memory._blocks)
    array = memory.zeros(1000, np.float32)[10:]
    assert len(memory._blocks) == before + 1
    del array
    gc.collect()
    assert len(memory._blocks) == before
