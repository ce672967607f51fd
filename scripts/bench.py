"""Benchmark of named workloads on one GPU.

    python scripts/bench.py                       all workloads
    python scripts/bench.py D1 D2 P1 --page 16    some
    python scripts/bench.py --json results.json

Each workload is checked against the float64 reference first, then timed: eager calls behind a kernel that keeps the
GPU busy while the host runs ahead, and replays of a CUDA graph, of 16 calls where they are decode steps, as layers of a
model are; these in a burst from rest, and sustained, when power has settled. Inputs are rotated when they would fit in
the L2 cache. Times are medians of time per call; the ceilings (pure read of 8 GB, a large matrix product) are measured
in the same run. `start` is the first call of a process, with and without compiled kernels on disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pagedattn import Float8View, PagedAttention, codec
from pagedattn.backends import flash_prefill, latent_mla, numpy_reference
from pagedattn.dtypes import BFLOAT16, BY_NAME, DType
from pagedattn.graph import GraphedStep

ROOT = Path(__file__).resolve().parent.parent
ROTATE_BELOW_BYTES = 256 << 20  # several times the L2 cache
LAYERS = 16  # calls in a captured decode step
PAUSE_MS = 10.0  # in which the host runs ahead, and power falls


@dataclass(frozen=True)
class Workload:
    """One named workload: a batch of (past, new) sequences over heads of one shape."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int
    kv_num_heads: int
    head_size: int
    v_head_size: int = 0
    cache: str = "bfloat16"
    quant: str = "NONE"
    page: int = 16
    window: int = -1
    sink: bool = False
    sm80: bool = False  # with the kernel of the sm_80 family on whatever GPU this is
    note: str = ""

    @property
    def is_latent(self) -> bool:
        return self.v_head_size != 0

    @property
    def is_decode(self) -> bool:
        return all(new <= 8 for _, new in self.sequences)

    @property
    def token_count(self) -> int:
        return sum(new for _, new in self.sequences)

    @property
    def cache_dtype(self) -> DType:
        return BY_NAME[self.cache]

    def visible_pairs(self) -> int:
        """Pairs of token and key that attention must form."""
        total = 0
        for past, new in self.sequences:
            seen = np.arange(past + 1, past + new + 1, dtype=np.int64)
            total += int(np.minimum(seen, self.window).sum() if self.window > 0 else seen.sum())
        return total

    def kv_bytes(self) -> int:
        """Bytes of the cache that must be read once: keys that any token of a sequence sees."""
        row = self.kv_num_heads * self.head_size * self.cache_dtype.bits // 8 * (1 if self.is_latent else 2)
        keys = (
            past + new if self.window <= 0 else min(past + new, self.window + new - 1) for past, new in self.sequences
        )
        return row * sum(keys)

    def flops(self) -> int:
        """Floating-point operations of both products."""
        return 2 * self.num_heads * (self.head_size + (self.v_head_size or self.head_size)) * self.visible_pairs()


def batch(count: int, past: int, new: int = 1) -> tuple[tuple[int, int], ...]:
    """``count`` sequences of one length; ``past`` counts the keys before the new tokens."""
    return ((past, new),) * count


def heavy_tail(count: int, total: int, seed: int) -> tuple[int, ...]:
    """Context lengths of a lognormal mix with a fixed sum."""
    weights = np.random.default_rng(seed).lognormal(0.0, 1.2, count)
    lengths = np.maximum(16, np.floor(weights / weights.sum() * total)).astype(int)
    lengths[lengths.argmax()] += total - lengths.sum()
    return tuple(int(n) for n in lengths)


# 16 prompts of 100 to 4000 tokens: those that the times in docs/benchmarks/peers.json are of.
RAGGED = (3856, 961, 3477, 723, 1684, 1164, 987, 3422, 1488, 2820, 3100, 2494, 3151, 1889, 2221, 2124)
D1 = Workload("D1", batch(64, 8191), 64, 8, 128)
P1 = Workload("P1", batch(1, 0, 8192), 64, 8, 128)
P2 = Workload("P2", batch(4, 6144, 2048), 64, 8, 128)
P3 = replace(P1, name="P3", sequences=tuple((0, n) for n in RAGGED))
P4 = replace(P1, name="P4", head_size=64)
M1 = Workload("M1", batch(64, 4095), 128, 1, 576, 512, page=64)
M2 = Workload("M2", batch(64, 8191), 16, 1, 576, 512, page=64)
M3 = Workload("M3", batch(128, 4094, 2), 128, 1, 576, 512, page=64)

WORKLOADS = {
    w.name: w
    for w in (
        D1,
        Workload("D2", batch(1, 131071), 64, 8, 128),
        Workload("D3", batch(256, 2047), 32, 8, 128),
        Workload("D4", batch(64, 8191), 64, 8, 64, window=128, sink=True),
        Workload("D5", batch(32, 4095), 32, 32, 128),
        replace(D1, name="D6", cache="float8e4m3fn", quant="PER_TENSOR"),
        replace(D1, name="D6i4", cache="int4", quant="PER_CHANNEL"),
        replace(D1, name="D7", cache="int8", quant="PER_TENSOR"),
        replace(D1, name="D7c", cache="int8", quant="PER_CHANNEL"),
        replace(D1, name="D8", sequences=tuple((n - 1, 1) for n in heavy_tail(64, 64 * 8192, 8))),
        replace(D1, name="D9", sequences=batch(64, 8188, 4), note="4 new tokens a sequence"),
        P1,
        P2,
        P3,
        P4,
        replace(P2, name="P5", cache="float8e4m3fn", quant="PER_TENSOR"),
        replace(P2, name="P6", cache="int8", quant="PER_TENSOR"),
        replace(P1, name="P7", sequences=batch(1, 0, 32768), window=1024),
        replace(P1, name="P8", sequences=batch(2, 0, 2048) + batch(62, 8191), note="P8p and P8d in one call"),
        replace(P1, name="P8p", sequences=batch(2, 0, 2048)),
        replace(P1, name="P8d", sequences=batch(62, 8191)),
        M1,
        M2,
        M3,
        replace(M2, name="M4", cache="float8e4m3fn", quant="PER_TENSOR"),
        replace(M2, name="M4c", cache="float8e4m3fn", quant="PER_CHANNEL"),
        replace(M1, name="M5", cache="float8e4m3fn", quant="PER_TENSOR"),
        Workload("M6", batch(1, 6144, 2048), 128, 1, 576, 512, page=64),
        replace(M1, name="M7", sequences=tuple((n - 1, 1) for n in heavy_tail(64, 64 * 4096, 7))),
        *(replace(w, name=f"{w.name}_sm80", sm80=True) for w in (P1, P2, P4, M1, M2, P3, M3)),
    )
}


# Small calls for which the kernels of D1, P1, M1 and M2 are compiled.
STARTS = {
    w.name: w
    for w in (
        replace(D1, sequences=batch(64, 1023)),
        replace(P1, sequences=batch(1, 0, 1024)),
        replace(M1, sequences=batch(64, 1023)),
        replace(M2, sequences=batch(64, 1023)),
    )
}
START = "start"
NAMES = (*WORKLOADS, START)  # of what is measured


class Prepared:
    """A workload's arrays on the GPU and the operator that runs it."""

    def __init__(self, workload: Workload, backend: str | None, seed: int = 0) -> None:
        import cupy

        self.cupy = cupy
        self.workload = w = workload
        rng = np.random.default_rng(seed)
        page = w.page
        blocks = [-(-(past + new) // page) for past, new in w.sequences]
        self.num_blocks = sum(blocks)
        self.operator = PagedAttention(
            num_heads=w.num_heads,
            kv_num_heads=w.kv_num_heads,
            local_window_size=w.window,
            scale=w.head_size**-0.5,
            v_head_size=w.v_head_size,
            kv_cache_layout="LATENT" if w.is_latent else "SEPARATE",
            k_quant_type=w.quant,
            v_quant_type="NONE" if w.is_latent else w.quant,
            k_cache_dtype="int4" if w.cache == "int4" else "",
            v_cache_dtype="int4" if w.cache == "int4" and not w.is_latent else "",
            backend=backend,
        )
        scale = np.full((w.kv_num_heads, 1, w.head_size), 4.0 / self._top_code(), np.float32)
        scale *= rng.uniform(0.8, 1.25, scale.shape).astype(np.float32)
        self.scale = None if w.quant == "NONE" else scale if w.quant == "PER_CHANNEL" else scale[:1, 0, 0].copy()
        shape = (self.num_blocks, page, w.kv_num_heads, w.cache_dtype.storage_elements(w.head_size))
        self.caches = {"key_cache": self.filled(rng, shape)}
        self.arrays: dict[str, Any] = {
            "query": self.normal(rng, (w.token_count, w.num_heads * w.head_size)),
            "key": self.normal(rng, (w.token_count, w.kv_num_heads * w.head_size)),
            "key_cache": self.typed(self.caches["key_cache"]),
            "cumulative_sequence_length": self.integers(np.cumsum([0] + [new for _, new in w.sequences])),
            "past_seqlens": self.integers([past for past, _ in w.sequences]),
        }
        if not w.is_latent:
            self.arrays["value"] = self.normal(rng, (w.token_count, w.kv_num_heads * w.head_size))
            self.caches["value_cache"] = self.filled(rng, shape)
            self.arrays["value_cache"] = self.typed(self.caches["value_cache"])
        if self.scale is not None:
            self.arrays["k_scale"] = cupy.asarray(self.scale)
            if not w.is_latent:
                self.arrays["v_scale"] = cupy.asarray(self.scale)
        if w.sink:
            self.arrays["head_sink"] = self.normal(rng, (w.num_heads,))
        rotations = 1
        if w.kv_bytes() < ROTATE_BELOW_BYTES:
            rotations = min(16, max(1, ROTATE_BELOW_BYTES // w.kv_bytes()))
            if self.num_blocks * page * w.kv_num_heads * w.head_size * 4 < ROTATE_BELOW_BYTES:
                rotations = 1  # the pool itself is small; other block tables would name the same bytes
        self.tables = [self.integers(self.table(rng, blocks)) for _ in range(rotations)]
        self.out = cupy.empty((w.token_count, w.num_heads * (w.v_head_size or w.head_size)), BFLOAT16.numpy)

    def _top_code(self) -> float:
        dtype = self.workload.cache_dtype
        return dtype.code_range[1] if dtype.code_range else 1.0

    def integers(self, values: Any) -> Any:
        return self.cupy.asarray(np.asarray(values, np.int32))

    def normal(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return self.cupy.asarray(rng.standard_normal(shape, np.float32).astype(BFLOAT16.numpy))

    def filled(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        """A cache of normal values: a table of four million, its length no multiple of a row, laid end to end."""
        w = self.workload
        rows = 4_000_037 // w.head_size
        values = rng.standard_normal((rows, w.head_size), np.float32)
        scale = None if self.scale is None else self.scale.ravel()[: w.head_size] if self.scale.size > 1 else self.scale
        stored = codec.encode(values, w.cache_dtype, scale).ravel()[: -3 * shape[-1]]
        table = self.cupy.asarray(stored.view(f"u{stored.itemsize}"))
        cache = self.cupy.empty(int(np.prod(shape)), table.dtype)
        for first in range(0, cache.size, table.size):
            part = cache[first : first + table.size]
            part[...] = table[: part.size]
        return cache.reshape(shape)

    def typed(self, cache: Any) -> Any:
        """The cache's bits as an array of its element type; CuPy has no float8."""
        w = self.workload
        return Float8View(cache) if w.cache == "float8e4m3fn" else cache.view(w.cache_dtype.numpy)

    def table(self, rng: np.random.Generator, blocks: list[int]) -> np.ndarray[Any, Any]:
        order = rng.permutation(self.num_blocks)
        table = np.full((len(blocks), max(blocks)), -1, np.int32)
        first = 0
        for row, count in zip(table, blocks, strict=True):
            row[:count] = order[first : first + count]
            first += count
        return table

    def call(self, table: Any) -> Any:
        return self.operator(**self.arrays, block_table=table, out=self.out)

    def check(self) -> float:
        """Relative error of the last tokens of the first and the longest sequence against the float64 reference."""
        w = self.workload
        self.call(self.tables[0])
        longest = max(range(len(w.sequences)), key=lambda b: sum(w.sequences[b]))
        return max(self._sequence_error(b) for b in {0, longest})

    def _sequence_error(self, b: int) -> float:
        w = self.workload
        past, new = w.sequences[b]
        tail = min(new, 4)
        first = sum(n for _, n in w.sequences[: b + 1]) - tail
        blocks = -(-(past + new) // w.page)
        ids = self.tables[0][b, :blocks]
        inputs = {name: x.get() for name, x in self.arrays.items() if name in ("k_scale", "v_scale", "head_sink")}
        for name in ("query", "key", "value"):
            if name in self.arrays:
                inputs[name] = self.arrays[name][first : first + tail].get()
        for name, cache in self.caches.items():
            inputs[name] = cache[ids].get().view(w.cache_dtype.numpy)
        inputs["cumulative_sequence_length"] = np.array([0, tail], np.int32)
        inputs["past_seqlens"] = np.array([past + new - tail], np.int32)
        inputs["block_table"] = np.arange(blocks, dtype=np.int32)[None]
        inputs["slot_mapping"] = np.full(tail, -1, np.int32)  # the call has stored them
        problem = PagedAttention(**self.operator.attributes).problem_of(**inputs)
        reference = np.empty((tail, self.out.shape[1]), np.float64)
        numpy_reference.plan(problem, compute=np.float64).run({**inputs, "output": reference})
        got = self.out[first : first + tail].get().astype(np.float64)
        return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))


class Gpu:
    """Timing on the current device."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.spin = cupy.RawKernel(
            'extern "C" __global__ void spin(long long cycles) {'
            " long long start = clock64(); while (clock64() - start < cycles) {} }",
            "spin",
        )
        self.handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            bus = cupy.cuda.Device().pci_bus_id  # CUDA may number GPUs in another way
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
        except Exception:  # NVML is a convenience: without it clocks and power stay unknown
            self.nvml = None

    def state(self) -> tuple[float | None, int | None]:
        """Power in watts and SM clock in MHz."""
        if self.handle is None:
            return None, None
        return (
            self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000,
            self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM),
        )

    def timed(self, calls: Sequence[Callable[[], Any]], repeats: int, ahead_ms: float = 0.0) -> float:
        """Microseconds a call, over ``repeats`` calls taken in turn from ``calls``."""
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        if ahead_ms:
            self.spin((1,), (1,), (np.int64(ahead_ms * 1.5e6),))
        start.record()
        for i in range(repeats):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end) * 1000 / repeats)

    def host_time(self, calls: Sequence[Callable[[], Any]], repeats: int) -> float:
        """Microseconds of the host's time a call, over calls few enough for the driver's queue."""
        stream = self.cupy.cuda.get_current_stream()
        stream.synchronize()
        start = time.perf_counter()
        for i in range(repeats):
            calls[i % len(calls)]()
        elapsed = time.perf_counter() - start
        stream.synchronize()
        return elapsed * 1e6 / repeats

    def read_ceiling(self) -> float:
        """GB/s of a kernel that only reads 8 GB."""
        cupy = self.cupy
        kernel = cupy.RawKernel(
            r"""
            extern "C" __global__ void __launch_bounds__(512) read(const uint4* data, long long count, unsigned* sink) {
              unsigned sum = 0;
              const long long step = (long long)gridDim.x * blockDim.x * 4;
              for (long long i = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x; i < count; i += step) {
                uint4 v[4];
                #pragma unroll
                for (int k = 0; k < 4; ++k) v[k] = i + k * 512 < count ? __ldcs(data + i + k * 512) : uint4{0, 0, 0, 0};
                #pragma unroll
                for (int k = 0; k < 4; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
              }
              if (sum == 0x12345678u) *sink = sum;
            }""",
            "read",
        )
        size = 8 << 30
        data, sink = cupy.empty(size, np.uint8), cupy.zeros(1, np.uint32)
        data[:] = 1
        grid = 132 * 16

        def run() -> None:
            kernel((grid,), (512,), (data, np.int64(size // 16), sink))

        run()
        return size / min(self.timed([run], 3) for _ in range(4)) / 1000

    def matmul_ceiling(self) -> tuple[float, float] | None:
        """TFLOP/s of an 8192^3 product of 16-bit matrices, from idle and sustained."""
        cupy = self.cupy
        try:
            a, b = (cupy.random.standard_normal((8192, 8192), np.float32).astype(np.float16) for _ in "ab")
            out = cupy.empty((8192, 8192), np.float16)

            def run() -> None:
                cupy.matmul(a, b, out=out)

            run()
            burst = self.timed([run], 10)
            deadline = time.perf_counter() + 1.5
            while time.perf_counter() < deadline:
                self.timed([run], 100)
            return tuple(2 * 8192**3 / us / 1e6 for us in (burst, self.timed([run], 200)))  # type: ignore[return-value]
        except Exception as error:
            print(f"no matrix product: {error}")
            return None


def first_call(name: str) -> float:
    """Seconds that the first call of this process takes, the GPU's work included; arrays are there already."""
    import cupy

    prepared = Prepared(STARTS[name], None)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    prepared.call(prepared.tables[0])
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - start


def starts() -> dict[str, Any]:
    """Seconds of first calls with no compiled kernel on disk, and with all of them.

    Each is in a process of its own; medians of three, because they are the host's, which others may use as well.
    """

    def both(name: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "scripts.bench", "--first-call", name]
            environment = {**os.environ, "PAGEDATTN_CACHE_DIR": folder}
            return [
                float(subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True).stdout)
                for _ in ("compiles", "finds the kernels on disk")
            ]

    rows = {name: zip(*(both(name) for _ in range(3)), strict=True) for name in STARTS}
    return {"workload": START, **{name: [statistics.median(times) for times in row] for name, row in rows.items()}}


def graphs_of(workload: Workload, calls: Sequence[Callable[[], Any]]) -> tuple[list[GraphedStep[Any]], int]:
    """Calls as CUDA graphs, and how many lie in each: the layers of a decode step share what starts a graph."""
    if not workload.is_decode:
        return [GraphedStep(call) for call in calls], 1
    layers = [calls[i % len(calls)] for i in range(LAYERS)]
    return [GraphedStep(lambda: [call() for call in layers])], LAYERS


def burst(gpu: Gpu, workload: Workload, graphs: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of a replay after a rest, before the power limit lowers the clock."""
    if workload.is_decode:
        return statistics.median(gpu.timed(graphs, 3, ahead_ms=PAUSE_MS) for _ in range(3))
    time.sleep(1.0)
    return gpu.timed(graphs, 3)


def sustained(gpu: Gpu, graphs: Sequence[Callable[[], Any]], replays: int, seconds: float) -> float:
    """Microseconds of a replay at the clock that the power limit leaves after some ``seconds``."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        gpu.timed(graphs, replays)
    return statistics.median(gpu.timed(graphs, replays) for _ in range(5))


def measure(workload: Workload, gpu: Gpu, backend: str | None, quick: bool, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Check and time one workload."""
    flash_prefill.FORCE_SM80 = latent_mla.FORCE_SM80 = workload.sm80
    prepared = Prepared(workload, backend)
    # Nothing of the benchmark's own around the operator, whose host time is measured, too.
    bound = partial(prepared.operator, **prepared.arrays, out=prepared.out)
    calls = [partial(bound, block_table=table) for table in prepared.tables]
    error = prepared.check()
    chosen = prepared.operator.explain(**prepared.arrays, block_table=prepared.tables[0]).row.name
    if not error < 2e-2:
        raise AssertionError(f"{workload.name}: relative error {error:.2g} against the float64 reference")
    estimate = gpu.timed(calls, 2)
    repeats = int(np.clip(30_000 / estimate, 4, 40))
    graphs, in_graph = graphs_of(workload, calls)
    burst_us = burst(gpu, workload, graphs) / in_graph
    settling_seconds = 0.1 if workload.is_decode or quick else 1.5
    graph_us = sustained(gpu, graphs, -(-repeats // in_graph), settling_seconds) / in_graph
    power, clock = gpu.state()
    eager_us = statistics.median(gpu.timed(calls, repeats, ahead_ms=PAUSE_MS) for _ in range(3))
    host_us = statistics.median(gpu.host_time(calls, 20) for _ in range(25 if workload.is_decode else 5))
    row = {
        "workload": workload.name,
        "backend": chosen,
        "dtype": "bfloat16",
        "cache": f"{workload.cache} {workload.quant}",
        "page": workload.page,
        "time_us": eager_us,
        "graph_us": graph_us,
        "burst_us": burst_us,
        "host_us": host_us,
        "kv_gbps": workload.kv_bytes() / graph_us / 1000,
        "tflops": workload.flops() / graph_us / 1e6,
        "relative_error": error,
        "power_w": power,
        "sm_mhz": clock,
    }
    of_read, product = row["kv_gbps"] / ceilings["read_gbps"], ceilings["matmul_tflops"]
    bound_by_memory = (workload.is_decode and not workload.is_latent) or not product
    row["pct_of_ceiling"] = 100 * (of_read if bound_by_memory else max(of_read, row["tflops"] / product))
    return row


def results(names: list[str], page: int | None, backend: str | None, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure workloads one by one, the ceilings first."""
    import cupy

    gpu = Gpu()
    read, product = gpu.read_ceiling(), gpu.matmul_ceiling()
    cupy.get_default_memory_pool().free_all_blocks()
    ceilings = {
        "workload": "ceilings",
        "read_gbps": read,
        "matmul_tflops_burst": product and product[0],
        "matmul_tflops": product and product[1],
    }
    yield ceilings
    for name in names:
        workload = None if name == START else replace(WORKLOADS[name], page=page or WORKLOADS[name].page)
        try:
            row = measure(workload, gpu, backend, quick, ceilings) if workload else starts()
        except Exception as error:
            row = {"workload": name, "page": workload and workload.page, "error": f"{type(error).__name__}: {error}"}
        yield row
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    if row["workload"] == "ceilings":
        product = row["matmul_tflops"]
        return f"ceilings: read {row['read_gbps']:.0f} GB/s" + (
            f", 16-bit product {product:.0f} TFLOP/s sustained, {row['matmul_tflops_burst']:.0f} from idle"
            if product
            else ""
        )
    if "error" in row:
        return f"{row['workload']:5} {row['error']}"
    if row["workload"] == START:
        times = ", ".join(f"{name} {row[name][0]:.2f} s, {row[name][1]:.2f} s from disk" for name in STARTS)
        return f"first call: {times}"
    return (
        f"{row['workload']:5} {row['backend']:7} {row['cache']:24} page {row['page']:<4} "
        f"graph {row['graph_us']:9.1f} us  burst {row['burst_us']:9.1f} us  eager {row['time_us']:9.1f} us  "
        f"host {row['host_us']:6.1f} us  {row['kv_gbps']:6.0f} GB/s  {row['tflops']:6.1f} TFLOP/s  "
        f"{row['pct_of_ceiling']:5.1f}%  err {row['relative_error']:.1e}  "
        f"{row['sm_mhz']} MHz {row['power_w'] and round(row['power_w'])} W"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], help=f"among {', '.join(NAMES)}; all by default")
    parser.add_argument("--page", type=int, help="block size, instead of each workload's own")
    parser.add_argument("--backend", help="force a backend")
    parser.add_argument("--quick", action="store_true", help="do not wait for the sustained clock")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--first-call", choices=STARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        print(first_call(options.first_call))
        return
    rows = []
    for row in results(options.workloads or list(NAMES), options.page, options.backend, options.quick):
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
