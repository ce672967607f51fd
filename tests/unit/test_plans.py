"""Plans by themselves: with a window, nothing of them grows with the room that a block table has."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from pagedattn import dtypes, warmup
from pagedattn.backends import arguments, decode_split_kv
from pagedattn.errors import PagedAttentionError
from pagedattn.jit import tensor_map
from pagedattn.jit.launch import Recorder
from pagedattn.kernels import decode_heads_sm90
from pagedattn.problem import Problem, TensorInfo
from tests.support.batches import Layer

LAYERS = {
    "decode_split_kv": Layer(64, 8, 128),
    "flash_prefill": Layer(64, 8, 128),
    "dense_attention": Layer(64, 8, 128),
    "latent_mla": Layer(128, 1, 576, 512),
}


class Shapes:
    """An executor that loads nothing."""

    def __init__(self, arch: str = "sm_80") -> None:
        self.arch = arch
        self.max_shared_bytes, self.multiprocessors = {"sm_80": (163 << 10, 108), "sm_90a": (227 << 10, 132)}[arch]

    def load(self, kernel: Any, spec: Any) -> Any:
        return kernel.stem, spec


def problem_of(layer: Layer, batch_size: int, new: int, width: int, num_blocks: int) -> Problem:
    """A batch's problem, of arrays that need no memory."""
    shapes = {
        "query": (batch_size * new, layer.num_heads * layer.head_size),
        "key": (batch_size * new, layer.kv_num_heads * layer.head_size),
        "value": (batch_size * new, layer.kv_num_heads * layer.head_size),
        "key_cache": (1, layer.block_size, layer.kv_num_heads, layer.head_size),
        "value_cache": (1, layer.block_size, layer.kv_num_heads, layer.head_size),
    }
    arrays = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    if layer.v_head_size:
        del arrays["value"], arrays["value_cache"]
    arrays["cumulative_sequence_length"] = np.arange(0, batch_size * new + 1, new, dtype=np.int32)
    arrays["past_seqlens"] = np.zeros(batch_size, np.int32)
    arrays["block_table"] = np.zeros((batch_size, 1), np.int32)
    small = layer.operator("numpy").problem_of(**arrays)
    return replace(small, max_blocks_per_sequence=width, num_blocks=num_blocks)


def tensors_of(problem: Problem, pointer: int = 4096) -> dict[str, TensorInfo]:
    """Arrays that all lie at one address."""
    names = ("query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens")
    info = TensorInfo((1, 1, 1, 1), np.dtype(np.float16), "cuda:0", (4096, 1024, 128, 1), pointer, True)
    tensors = dict.fromkeys((*names, "block_table", "output", "lse"), info)
    if problem.is_latent:
        del tensors["value"], tensors["value_cache"]
    return tensors


def launches(backend: str, problem: Problem) -> tuple[int, list[Any]]:
    """Bytes of the workspace, and of each launch the kernel, its grid, its threads and its shared memory."""
    plan = import_module(f"pagedattn.backends.{backend}").plan(problem, Shapes())
    tensors = tensors_of(problem)
    return plan.workspace_bytes, [launch[:4] for launch in plan.launches(tensors, 1 << 20)]


def prologue_of(backend: str, batch_size: int) -> Any:
    problem = problem_of(LAYERS[backend], batch_size, 1, 64, 64 * batch_size)
    return (
        import_module(f"pagedattn.backends.{backend}").plan(problem, Shapes()).launches(tensors_of(problem), 1 << 20)[0]
    )


def test_the_prologue_starts_early_where_attention_gains_by_it() -> None:
    early = {backend: prologue_of(backend, 4).starts_early for backend in LAYERS}
    assert early == {"decode_split_kv": True, "flash_prefill": True, "dense_attention": False, "latent_mla": True}


def test_early_ctas_of_a_decode_step_are_spread_while_they_are_few() -> None:
    device, reserved = Shapes(), 1024
    few, many = prologue_of("decode_split_kv", 4), prologue_of("decode_split_kv", 4096)
    all_bytes = device.max_shared_bytes + reserved  # of a multiprocessor, the system's part of each CTA included
    assert 2 * (few.shared_bytes + reserved) <= all_bytes < 3 * (few.shared_bytes + reserved)
    assert many.grid[0] > 2 * device.multiprocessors
    assert many.shared_bytes < few.shared_bytes


@pytest.mark.parametrize("new", [1, 3, 100])
@pytest.mark.parametrize("window", [1, 128, 4096])
@pytest.mark.parametrize("backend", LAYERS)
def test_a_window_bounds_workspace_and_grid(backend: str, window: int, new: int) -> None:
    layer = Layer(**{**vars(LAYERS[backend]), "window": window})
    small, large, huge = (
        launches(backend, problem_of(layer, 4, new, width, 4 * width)) for width in (1024, 65536, 1 << 20)
    )
    assert small[1]
    assert small == large == huge


@pytest.mark.parametrize("backend", LAYERS)
def test_a_window_bounds_the_workspace_on_hopper(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches need a driver."""
    module = import_module(f"pagedattn.backends.{backend}")
    if hasattr(module, "FORCE_SM80"):
        monkeypatch.setattr(module, "FORCE_SM80", False)
    layer = Layer(**{**vars(LAYERS[backend]), "window": 4096})
    sizes = {
        module.plan(problem_of(layer, 4, 1, width, 4 * width), Shapes("sm_90a")).workspace_bytes
        for width in (1024, 65536, 1 << 20)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("backend", ["decode_split_kv", "latent_mla"])
def test_without_a_window_splits_cover_the_table(backend: str) -> None:
    """That the test above sees the grid where it does grow."""
    small, large = (launches(backend, problem_of(LAYERS[backend], 4, 1, width, 4 * width)) for width in (1024, 65536))
    assert small[1][1][1][0] < large[1][1][1][0]
    assert small[0] < large[0]


@pytest.mark.parametrize("backend", LAYERS)
def test_blocks_of_the_pool_change_nothing(backend: str) -> None:
    problem = problem_of(LAYERS[backend], 4, 1, 1024, 4096)
    assert launches(backend, problem) == launches(backend, replace(problem, num_blocks=1 << 24))


@pytest.mark.parametrize("batch_size", [1, 33, 1024])
def test_warm_up_compiles_the_kernels_of_any_batch(batch_size: int) -> None:
    """Of what a Hopper GPU decodes with, eight kv heads have two."""
    pytest.importorskip("cupy")
    problem = problem_of(LAYERS["decode_split_kv"], batch_size, 1, 256, 256 * batch_size)
    stems = {kernel.stem for kernel, _ in warmup.kernels_of(problem, 90)}
    assert stems == {"write_cache", "combine_splits", "decode_split_kv", "decode_heads_sm90"}


@pytest.mark.parametrize(
    ("num_heads", "cache"), [(16, dtypes.FLOAT16), (128, dtypes.FLOAT8E4M3FN), (128, dtypes.FLOAT16)]
)
@pytest.mark.parametrize("keys", [2048, 8192])
def test_warm_up_compiles_what_latent_batches_of_any_size_need(num_heads: int, cache: dtypes.DType, keys: int) -> None:
    """Whether there are two splits, which a cluster merges, is up to the size of the batch."""
    pytest.importorskip("cupy")

    def of(size: int) -> Problem:
        small = problem_of(Layer(num_heads, 1, 576, 512), 1, 1, keys // 16, 4096)
        return replace(small, token_count=size, batch_size=size, cache_dtype=cache)

    warmed = set(warmup.kernels_of(of(1), 90))
    for size in (2, 30, 33, 57, 64, 66, 67, 100, 131, 133, 200, 263, 265, 300, 2000):
        recorder = Recorder("sm_90a", 227 << 10, 132)
        import_module("pagedattn.backends.latent_mla").plan(of(size), recorder)
        assert set(recorder.loaded) <= warmed, size


@pytest.mark.parametrize(
    ("backend", "first", "other"),
    [
        ("decode_split_kv", "decode_heads_sm90", "decode_split_kv"),
        ("flash_prefill", "flash_prefill_sm90", "flash_prefill_sm80"),
        ("latent_mla", "latent_decode_sm90", "latent_decode"),
    ],
)
def test_the_kernel_for_other_arrays_is_loaded_once_when_it_is_needed_and_not_in_a_capture(
    backend: str, first: str, other: str
) -> None:
    class Capturing(Shapes):
        """An executor that notes what is loaded, and refuses it while ``capturing``."""

        def __init__(self) -> None:
            super().__init__("sm_90a")
            self.capturing, self.loaded = False, [""]

        def load(self, kernel: Any, spec: Any) -> Any:
            if self.capturing:
                raise PagedAttentionError("graph capture")
            self.loaded.append(kernel.stem)
            return super().load(kernel, spec)

    executor = Capturing()
    problem = problem_of(LAYERS[backend], 256, 1, 16, 256 * 16)
    plan = import_module(f"pagedattn.backends.{backend}").plan(problem, executor)
    assert first in executor.loaded
    assert other not in executor.loaded
    unaligned = tensors_of(problem, 4104)
    executor.capturing = True
    with pytest.raises(PagedAttentionError, match="graph capture"):
        plan.launches(unaligned, 1 << 20)
    executor.capturing = False
    assert other in [launch.function[0] for launch in plan.launches(unaligned, 1 << 20)]
    executor.capturing = True  # all is there now
    assert plan.launches(unaligned, 1 << 20) == plan.launches(unaligned, 1 << 20)
    assert executor.loaded.count(other) == 1


@pytest.mark.parametrize(
    ("tokens", "width", "by_heads"),
    [
        (64, 512, True),  # four splits of 2048 keys
        (64, 16, False),  # splits of 256 keys
        (4, 2048, True),  # 64 splits of 512
        (4, 512, True),  # 32 of 256
        (4, 256, False),  # too few
        (1, 8192, True),  # 256 of one token
        (1, 1024, False),
        (33, 64, False),  # too many tokens for splits of 256
        (132, 16, True),  # tokens enough
    ],
)
def test_which_kernel_decodes_on_hopper(tokens: int, width: int, by_heads: bool) -> None:
    problem = problem_of(LAYERS["decode_split_kv"], tokens, 1, width, tokens * width)
    assert (decode_split_kv.plan(problem, Shapes("sm_90a")).better is not None) == by_heads
    pinned = decode_split_kv.plan(replace(problem, split_keys=512), Shapes("sm_90a"))
    assert pinned.better is None  # its bits are those of batches with several new tokens


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", {"pointer": 4104}),
        ("output", {"pointer": 4098}),
        ("key_cache", {"pointer": 4104}),
        ("value_cache", {"strides": (16384 + 4, 1024, 128, 1)}),
        ("value_cache", {"strides": (32768, 2048, 128, 1)}),  # tokens further apart than their heads are long
        ("key_cache", {"strides": (32768, 1024, 256, 1)}),  # heads
    ],
)
def test_arrays_that_bulk_copies_cannot_read(name: str, change: dict[str, Any]) -> None:
    """Another kernel takes them."""
    cache = TensorInfo((64, 16, 8, 128), np.dtype(np.float16), "cuda:0", (16384, 1024, 128, 1), 4096, True)
    rows = TensorInfo((1, 8192), np.dtype(np.float16), "cuda:0", (8192, 1), 4096, True)
    tensors = {"query": rows, "output": rows, "key_cache": cache, "value_cache": cache}

    def reason() -> str | None:
        return decode_heads_sm90.why_not_tensors(tensors, (tensors["query"].pointer, tensors["query"].strides[0]))

    assert reason() is None
    tensors[name] = tensors[name]._replace(**change)
    assert reason() is not None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("backend", LAYERS)
def test_a_table_without_columns_and_a_pool_without_blocks(
    backend: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can attend anything, and nothing is divided by that."""
    monkeypatch.setattr(tensor_map, "encode", lambda *args, **options: _map_of(args[2]))
    for width, num_blocks in ((0, 8), (4, 0), (0, 0)):
        problem = problem_of(LAYERS[backend], 4, 1, width, num_blocks)
        plan = import_module(f"pagedattn.backends.{backend}").plan(problem, Shapes(arch))
        assert len(plan.launches(tensors_of(problem), 1 << 20)) >= 2


@pytest.mark.parametrize("name", ["block_table", "attention_bias"])
def test_an_array_without_elements_is_not_an_absent_one(name: str) -> None:
    """Its address may be 0."""
    empty = TensorInfo((3, 0), np.dtype(np.int32), "cuda:0", (0, 1), 0, True)
    assert arguments.pointer({name: empty}, name)
    assert arguments.pointer({}, name) is None


def _map_of(extents: tuple[int, ...]) -> bytes:
    assert all(extents), "the driver refuses to describe nothing"
    return bytes(128)
