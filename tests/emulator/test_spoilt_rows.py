"""spoilt_rows.cuh: which rows a hidden value has spoilt, and what they are without it.

The kernels that use it need a Hopper GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pagedattn import codec, dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, params, ptr
from pagedattn.jit.sources import Sources, default_sources
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import BLOCK_TABLE, KV_CACHE, SCORE_RULES

from .executor import EmulatorExecutor

BLOCK, KV_HEADS, KV_HEAD = 16, 2, 1
MOST_KEYS = 512  # of Values


@dataclass(frozen=True)
class SpoiltSpec(Spec):
    io: DType
    cache: DType
    head_size: int


PARAMS = params(
    "SpoiltParams",
    query=ptr,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    blocks=BLOCK_TABLE,
    rules=SCORE_RULES,
    own=ptr,
    nan=ptr,
    spoilt=ptr,
    output=ptr,
    kv_head=i32,
    key_count=i32,
)
KERNEL = Kernel("spoilt", SpoiltSpec, PARAMS, lambda spec: 32, lambda spec: 0)


@pytest.fixture(scope="module")
def device() -> EmulatorExecutor:
    own = Sources(Path(__file__).resolve().parent)
    own.include_dir = default_sources().include_dir
    return EmulatorExecutor(own)


class Scene:
    """Rows of one sequence that admit ranges of its keys; unmapped blocks hold nothing."""

    def __init__(self, spec, key_count, ranges, unmapped=(), seed=0):
        rng = np.random.default_rng(seed)
        self.spec, self.key_count, self.own = spec, key_count, np.array(ranges, np.int32)
        d, blocks = spec.head_size, -(-key_count // BLOCK)
        self.table = rng.permutation(blocks).astype(np.int32)
        self.table[list(unmapped)] = -1
        self.query = rng.standard_normal((len(ranges), d)).astype(spec.io.numpy)
        shape = (blocks, BLOCK, KV_HEADS, d)
        self.scales = [None, None]
        self.stored = [rng.standard_normal(shape).astype(spec.io.numpy) for _ in range(2)]
        if spec.cache.is_quantized:
            self.scales = [rng.uniform(0.01, 0.03, (KV_HEADS, 1, d)).astype(np.float32) for _ in range(2)]
            self.stored = [
                codec.encode(x.astype(np.float32), spec.cache, scale.transpose(1, 0, 2))
                for x, scale in zip(self.stored, self.scales, strict=True)
            ]

    @property
    def mapped(self):
        return self.table[np.arange(self.key_count) // BLOCK] >= 0

    def poison(self, position, channels, what):
        """Put a value that is not finite at some channels of a position; float8 has NaN only."""
        code = np.uint8(0x7F).view(self.stored[1].dtype) if self.spec.cache.is_quantized else what
        self.stored[1][self.table[position // BLOCK], position % BLOCK, KV_HEAD, channels] = code

    def rows(self, which):
        """Keys (0) or values (1) in float64, zeros where unmapped."""
        position = np.arange(self.key_count)
        x = self.stored[which][self.table[position // BLOCK], position % BLOCK, KV_HEAD]
        if self.spec.cache.is_quantized:
            x = codec.decode(x, self.spec.cache, self.scales[which][KV_HEAD], channels=self.spec.head_size)
        return np.where(self.mapped[:, None], x.astype(np.float64), 0)

    def admits(self, row):
        key = np.arange(self.key_count)
        return (key >= self.own[row, 0]) & (key < self.own[row, 1])

    @np.errstate(invalid="ignore")
    def multiplied(self, row, hides):
        """A row's weights times values: as the tensor cores have it, or without the hidden ones."""
        seen = self.admits(row) & self.mapped
        s = np.where(seen, self.rows(0) @ self.query[row].astype(np.float64) / 8, -np.inf)
        w = np.exp(s - s.max()) if seen.any() else np.zeros(s.shape)
        values = np.where(seen[:, None], self.rows(1), 0) if hides else self.rows(1)
        return w @ values / max(w.sum(), 1e-300)

    def run(self, device):
        d, at = self.spec.head_size, device.pointer
        rows = len(self.own)
        arrays = {"query": self.query, "own": self.own}
        arrays["nan"] = np.array([np.isnan(self.multiplied(row, hides=False)) for row in range(rows)], np.uint8)
        put = {name: device.upload(x) for name, x in arrays.items()}
        spoilt, output = device.empty(rows, np.uint8), device.empty((rows, d), np.float32)
        table = device.upload(self.table)
        caches, kept = [], []
        for stored, scale in zip(self.stored, self.scales, strict=True):
            kept += [device.upload(stored), None if scale is None else device.upload(scale)]
            caches.append(
                KV_CACHE.pack(
                    data=at(kept[-2]),
                    block_stride=BLOCK * KV_HEADS * d,
                    token_stride=KV_HEADS * d,
                    head_stride=d,
                    scale=None if scale is None else at(kept[-1]),
                    scale_head_stride=0 if scale is None else d,
                    scale_channel_stride=int(scale is not None),
                )
            )
        packed = PARAMS.pack(
            **{name: at(x) for name, x in put.items()},
            key_cache=caches[0],
            value_cache=caches[1],
            blocks=BLOCK_TABLE.pack(
                entries=at(table), num_blocks=len(self.table), block_size=BLOCK, max_blocks_per_sequence=len(self.table)
            ),
            rules=SCORE_RULES.pack(
                attention_bias=None,
                bias_batch_stride=0,
                bias_head_stride=0,
                bias_row_stride=0,
                bias_rows=0,
                bias_columns=0,
                local_window_size=-1,
                is_causal=1,
                scale=1 / 8,
                softcap=0.0,
            ),
            spoilt=at(spoilt),
            output=at(output),
            kv_head=KV_HEAD,
            key_count=self.key_count,
        )
        device.launch(device.load(KERNEL, self.spec), (rows, 1, 1), 32, 0, packed)
        return np.array(spoilt).astype(bool), np.array(output)

    def check(self, device, infinite=False):
        """The decision is exact for NaN; with infinities a row may be taken for spoilt that is NaN by itself."""
        spoilt, output = self.run(device)
        for row in range(len(self.own)):
            with_hidden, without = self.multiplied(row, hides=False), self.multiplied(row, hides=True)
            differs = (np.isnan(with_hidden) & ~np.isnan(without)).any()
            assert spoilt[row] if differs else infinite or not spoilt[row], (row, self.own[row])
            np.testing.assert_allclose(output[row], without, rtol=2e-3, atol=2e-4, equal_nan=True)
        return spoilt


SPECS = {
    "f16": SpoiltSpec(dtypes.FLOAT16, dtypes.FLOAT16, 64),
    "bf16 96": SpoiltSpec(dtypes.BFLOAT16, dtypes.BFLOAT16, 96),
    "float8": SpoiltSpec(dtypes.BFLOAT16, dtypes.FLOAT8E4M3FN, 96),
}


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


def causal(key_count, tokens):
    return [(0, key_count - tokens + 1 + i) for i in range(tokens)]


def test_a_hidden_nan_spoils_the_rows_that_hide_it(device, spec):
    scene = Scene(spec, 60, causal(60, 6), unmapped=[1])
    scene.poison(57, [3, 63], np.nan)
    assert scene.check(device).tolist() == [True, True, True, False, False, False]


def test_a_row_with_the_same_nan_itself_is_left_alone(device, spec):
    scene = Scene(spec, 60, causal(60, 6))
    scene.poison(57, [3, 63], np.nan)
    scene.poison(2, [3, 63], np.nan)
    assert not scene.check(device).any()
    scene.poison(58, [4], np.nan)  # one channel more, of some
    assert scene.check(device).tolist() == [True] * 4 + [False] * 2


def test_a_nan_behind_a_window(device, spec):
    scene = Scene(spec, 60, [(20 + i, 55 + i) for i in range(6)])
    scene.poison(22, slice(None), np.nan)
    assert scene.check(device).tolist() == [False] * 3 + [True] * 3


def test_rows_that_admit_nothing(device, spec):
    scene = Scene(spec, 40, [(0, 0), (40, 40), (90, 90), (3, 3), (0, 40)])
    scene.poison(7, [1], np.nan)
    assert scene.check(device).tolist() == [True] * 4 + [False]


def test_nan_everywhere_is_everybodys_own(device, spec):
    scene = Scene(spec, 50, causal(50, 20))
    for position in range(50):
        scene.poison(position, slice(None), np.nan)
    assert not scene.check(device).any()


def test_what_nobody_looks_at_is_attended_again(device, spec):
    """More hidden keys than are looked at, or a NaN of its own that is too far back: taken for spoilt, and right."""
    far = MOST_KEYS + 20
    scene = Scene(spec, 2 * far, [(0, 4), (0, far), (0, far + 19), (0, far + 20)])
    scene.poison(2, [5], np.nan)
    spoilt, output = scene.run(device)
    # Its own NaN is near; too far, with more hidden keys than are looked at; and with as many as are.
    assert spoilt.tolist() == [False, True, True, False]
    assert np.isnan(output[:, 5]).all()
    assert not np.isnan(np.delete(output, 5, axis=1)).any()
    scene.poison(2 * far - 1, [5], np.nan)
    assert scene.run(device)[0].tolist() == [False, True, True, True]


@pytest.mark.parametrize("seed", range(6))
def test_random_junk(device, spec, seed):
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, 91, (12, 2))
    scene = Scene(spec, 90, np.sort(ends, axis=1), unmapped=[2], seed=seed)
    for position in rng.choice(np.flatnonzero(scene.mapped), 5, replace=False):
        what = [np.nan, np.inf, -np.inf][rng.integers(3)]
        scene.poison(position, rng.choice(spec.head_size, 3, replace=False) // 16, what)
    scene.check(device, infinite=True)
