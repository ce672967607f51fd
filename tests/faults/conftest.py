"""Fixtures of the fault tests.

`target` is every way to run a call in the SEPARATE layout, `latent_target` in LATENT. `big_target` is `target` for
arrays of many GiB, of which a GPU needs all and the CPU only the pages that are touched.
"""

from __future__ import annotations

import pytest

from pagedattn.dtypes import DType
from pagedattn.support import Feature

from .scene import CACHES, IO, UNIT_CACHES, CacheKind
from .targets import Target, gpu_count, targets_for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, feature, marks in (
        ("target", Feature.SEPARATE, [pytest.mark.gpu]),
        ("latent_target", Feature.LATENT, [pytest.mark.gpu]),
        ("big_target", Feature.SEPARATE, [pytest.mark.gpu, pytest.mark.big_gpu]),
    ):
        if name in metafunc.fixturenames:
            params = [pytest.param(t, id=str(t), marks=marks if t.on_gpu else []) for t in targets_for(feature)]
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
        name = next(name for name in request.fixturenames if name.endswith("target"))
        request.getfixturevalue(name).force_splits(monkeypatch, request.param)
    return request.param


@pytest.fixture
def cupy():
    """CuPy, where there is a GPU."""
    if not gpu_count():
        pytest.skip("needs an NVIDIA GPU with CuPy")
    import cupy

    return cupy
