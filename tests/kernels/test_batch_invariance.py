"""A sequence's bits are its own: the same alone, in any batch, in any order and by a block table of any width.

For `decode` this holds whatever the batch is made of; for `latent` with one new token a sequence, and for `flash` as
long as the bound of new tokens chooses one shape of its kernel. Keys are cut into splits of one size here: the size
that is chosen otherwise follows from the bounds of a call. On a GPU and, at small sizes, emulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedattn.backends import decode_split_kv, flash_prefill, latent_mla
from pagedattn.kernels.layouts import MERGED_SPLITS as MERGED
from tests.faults.targets import Target
from tests.kernels.test_matrix import TARGETS
from tests.support.batches import Layer, Pool, differing

BLOCK = 16


def targets(backend: str) -> list[Any]:
    return [
        pytest.param(target, id=str(target), marks=[pytest.mark.gpu] if target.on_gpu else [])
        for target in TARGETS
        if target.backend == backend
    ]


def hopper(backend: str) -> list[Any]:
    return [param for param in targets(backend) if param.values[0].on_gpu and param.values[0].arch == 90]


def kernels(backend: str) -> list[Any]:
    """Targets of a backend; Hopper has a kernel of its own beside that of all others, so it is there twice."""
    both = [pytest.param(*param.values, True, id=f"{param.id}-sm80", marks=param.marks) for param in hopper(backend)]
    return [*(pytest.param(*param.values, False, id=param.id, marks=param.marks) for param in targets(backend)), *both]


def contexts(count: int, longest: int) -> list[int]:
    """Past tokens of sequences from none to many, in an order of no meaning."""
    lengths = np.unique(np.geomspace(1, longest, count).astype(int)) - 1
    return [int(n) for n in np.random.default_rng(0).permutation(lengths)]


def batches(count: int) -> list[tuple[int, ...]]:
    """All sequences forwards and backwards, and batches of some, of many sizes, in any order."""
    rng = np.random.default_rng(1)
    sizes = [n for n in (2, 3, 7, 16, 33, 48) if n < count] if count > 8 else [2]
    some = [tuple(int(b) for b in rng.permutation(count)[:n]) for n in sizes]
    return [tuple(range(count)), tuple(reversed(range(count))), *some]


def pool_of(target: Target, layer: Layer, new: tuple[int, ...] = (1,)) -> Pool:
    """64 sequences of up to 20000 tokens on a GPU, 5 of up to 320 in the emulator; ``new`` goes round them."""
    past = contexts(64, 19900) if target.on_gpu else contexts(5, 310)
    return Pool(target, layer, [(n, new[b % len(new)]) for b, n in enumerate(past)])


def split_keys(target: Target) -> int:
    """Of a size that the longest sequence has several splits, few enough for `decode` to merge them itself."""
    return 2560 if target.on_gpu else 64


@pytest.mark.skipif(not targets("decode"), reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize("new", [(1,), (1, 3, 2)], ids=["one", "several"])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(num_heads=8, kv_num_heads=2, head_size=64),
        Layer(num_heads=16, kv_num_heads=2, head_size=128, cache="float8e4m3fn"),
        Layer(num_heads=3, kv_num_heads=1, head_size=64, cache="int8", sink=True),
        Layer(num_heads=4, kv_num_heads=1, head_size=128, cache="int4"),
        Layer(num_heads=4, kv_num_heads=1, head_size=64, window=100, sink=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", targets("decode"))
def test_decode(target: Target, layer: Layer, new: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    size = split_keys(target)
    target.force_splits(monkeypatch, size)
    pool = pool_of(target, layer, new)
    merged = MERGED * size // BLOCK  # entries of the widest table whose splits the kernel merges
    assert pool.width < merged
    assert differing(pool, batches(len(pool.lengths)), [None, merged, 8 * merged]) == []


@pytest.mark.skipif(not targets("decode"), reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize("target", targets("decode"))
def test_decode_whoever_merges(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of the table decides who does, not how many splits a sequence has."""
    size = 256 if target.on_gpu else 64
    target.force_splits(monkeypatch, size)
    layer = Layer(num_heads=8, kv_num_heads=1, head_size=64)
    pool = Pool(target, layer, [(size * MERGED - 1 - 30 * i, 1) for i in range(8)])
    assert differing(pool, [tuple(range(8))], [2 * pool.width]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not hopper("decode"), reason="needs a Hopper GPU")
@pytest.mark.parametrize("cache", ["", "int8", "float8e4m3fn", "int4"])
@pytest.mark.parametrize("target", hopper("decode"))
def test_decode_of_all_heads(target: Target, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_split_kv, "FORCE_HEADS", True)
    target.force_splits(monkeypatch, 2560)
    pool = pool_of(target, Layer(num_heads=16, kv_num_heads=8, head_size=128, cache=cache))
    merged = MERGED * 2560 // BLOCK
    assert differing(pool, batches(len(pool.lengths)), [None, merged, 8 * merged]) == []


@pytest.mark.skipif(not targets("latent"), reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize("cache", ["", "float8e4m3fn"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("target", "force_sm80"), kernels("latent"))
def test_latent(target: Target, force_sm80: bool, num_heads: int, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_mla, "FORCE_SM80", force_sm80)
    target.force_splits(monkeypatch, split_keys(target))
    head_size, v_head_size = (576, 512) if target.on_gpu else (144, 128)
    pool = pool_of(target, Layer(num_heads, 1, head_size, v_head_size, cache=cache))
    wider = 20 if num_heads < 128 or not target.on_gpu else 2  # the parts of all rows and splits lie in memory
    assert differing(pool, batches(len(pool.lengths)), [None, wider * pool.width]) == []


@pytest.mark.skipif(not targets("flash"), reason="needs a GPU with CuPy, or g++ and the CUDA headers")
@pytest.mark.parametrize("layer", [Layer(8, 1, 64), Layer(8, 1, 128, window=70)], ids=str)
@pytest.mark.parametrize(("target", "force_sm80"), kernels("flash"))
def test_flash(target: Target, force_sm80: bool, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_prefill, "FORCE_SM80", force_sm80)
    pool = pool_of(target, layer, new=(9, 40, 17, 300) if target.on_gpu else (9, 40, 17))
    assert differing(pool, batches(len(pool.lengths)), [None, 20 * pool.width]) == []
