"""Fixtures of the fault tests.

`target` is every way to run a call in the SEPARATE layout, `latent_target` in LATENT. `big_target` is `target` for
arrays of many GiB, of which a GPU needs all and the CPU only the pages that are touched. The emulator is slow: it runs
one case of each test and backend, and all of them with PAGEDATTN_EMULATE=1.

A test marked ``by_heads`` also runs on Hopper's decode kernel for eight kv heads, and has to reach it. The mark names
the parameters for which it can: ``by_heads(q_len=1, window=(1, 4))``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from pagedattn import env
from pagedattn.arrays import CupyAdapter, NumpyAdapter
from pagedattn.dtypes import FLOAT32, DType
from pagedattn.support import Feature, No

from .scene import CACHES, IO, UNIT_CACHES, CacheKind
from .targets import Target, bits, by_heads_targets, gpu_count, targets_for

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "by_heads(**params): also on Hopper's decode kernel, for these parameters")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, feature, marks in (
        ("target", Feature.SEPARATE, [pytest.mark.gpu]),
        ("latent_target", Feature.LATENT, [pytest.mark.gpu]),
        ("big_target", Feature.SEPARATE, [pytest.mark.gpu, pytest.mark.big_gpu]),
    ):
        if name in metafunc.fixturenames:
            targets = targets_for(feature)
            if metafunc.definition.get_closest_marker("by_heads"):
                targets += by_heads_targets()
            metafunc.parametrize(name, [pytest.param(t, id=str(t), marks=marks if t.on_gpu else []) for t in targets])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a backend has nothing to do with, but for one float32 call of each, which it has to refuse."""
    refused: set[Target] = set()

    def has_a_point(item: pytest.Item) -> bool:
        params, target = params_of(item), target_of(item)
        if target is None:
            return True
        if target.by_heads and not can_go_by_heads(item):
            return False
        if params.get("splits") and not target.can_split:
            return False
        if params.get("io") is FLOAT32 and isinstance(target.row.cells[Feature.FLOAT32], No):
            first = target not in refused
            refused.add(target)
            return first
        return True

    pointless = [item for item in items if item.path.parent == HERE and not has_a_point(item)]
    if not env.emulate():
        known = set(pointless)
        pointless += beyond_one_of_each([item for item in items if item not in known])
    if pointless:
        config.hook.pytest_deselected(items=pointless)
        dropped = set(pointless)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    target = target_of(pyfuncitem)
    if target is None:
        return (yield)
    with target.reaching_its_kernel():
        return (yield)


def can_go_by_heads(item: pytest.Item) -> bool:
    """Whether the parameters are those for which its mark says that Hopper's decode kernel takes the call."""
    mark, params = item.get_closest_marker("by_heads"), params_of(item)
    assert mark is not None
    return params.get("io") is not FLOAT32 and all(
        params[name] in (values if isinstance(values, tuple) else (values,)) for name, values in mark.kwargs.items()
    )


def params_of(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def target_of(item: pytest.Item) -> Target | None:
    return next((value for value in params_of(item).values() if isinstance(value, Target)), None)


def beyond_one_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Emulated cases without one of each test and backend; which one is as good as random, and always the same."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        target = target_of(item) if item.path.parent == HERE else None
        if target is not None and target.is_emulated:
            groups.setdefault(f"{item.nodeid.partition('[')[0]}[{target}]", []).append(item)
    kept = {group[crc32(name.encode()) % len(group)] for name, group in groups.items()}
    return [item for group in groups.values() for item in group if item not in kept]


@pytest.fixture(autouse=True)
def _results_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator allocates for a result holds NaN, so that whatever a kernel leaves out shows."""
    for adapter in (NumpyAdapter, CupyAdapter):

        def empty(self, shape, dtype, like, make=adapter.empty):
            array = make(self, shape, dtype, like)
            array.view(bits(dtype.numpy)).fill(2 ** (8 * dtype.numpy.itemsize) - 1)
            return array

        monkeypatch.setattr(adapter, "empty", empty)


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
