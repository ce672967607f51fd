"""Fixtures of the fault tests: `target` is every way to run a call in the SEPARATE layout, `latent_target` in LATENT."""

from __future__ import annotations

import pytest

from pagedattn.dtypes import DType
from pagedattn.support import Feature

from .scene import CACHES, IO, UNIT_CACHES, CacheKind
from .targets import Target, gpu_count, targets_for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, feature in (("target", Feature.SEPARATE), ("latent_target", Feature.LATENT)):
        if name in metafunc.fixturenames:
            extra = [pytest.mark.big_gpu] if metafunc.definition.get_closest_marker("big_gpu") else []
            params = [
                pytest.param(t, id=str(t), marks=[pytest.mark.gpu, *extra] if t.on_gpu else [])
                for t in targets_for(feature)
            ]
            metafunc.parametrize(name, params)


@pytest.fixture(params=IO.values(), ids=str)
def io(request: pytest.FixtureRequest) -> DType:
    """Element type of the activations; float32 is served on the CPU only."""
    return request.param


@pytest.fixture(params=CACHES.values(), ids=lambda kind: kind.name)
def cache(request: pytest.FixtureRequest) -> CacheKind:
    """How the caches store values."""
    return request.param


@pytest.fixture(params=UNIT_CACHES.values(), ids=lambda kind: kind.name)
def unit_cache(request: pytest.FixtureRequest) -> CacheKind:
    """How the caches store values, with scale 1: for values that are exact codes."""
    return request.param


@pytest.fixture(params=[0, 16], ids=["whole", "splits"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether the work of a sequence is cut into pieces of 16 keys, or as the backend likes (0)."""
    if request.param:
        name = "target" if "target" in request.fixturenames else "latent_target"
        request.getfixturevalue(name).force_splits(monkeypatch, request.param)
    return request.param


@pytest.fixture
def cupy():
    """CuPy, where there is a GPU."""
    if not gpu_count():
        pytest.skip("needs an NVIDIA GPU with CuPy")
    import cupy

    return cupy
