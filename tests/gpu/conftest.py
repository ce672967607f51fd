"""Tests that only a GPU can run."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pagedattn.backends import decode_split_kv
from pagedattn.kernels import decode_heads_sm90
from tests.faults.targets import gpu_count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
    share, shares = map(int, os.environ.get("PAGEDATTN_SHARE", "0/1").split("/"))  # of scripts/sanitize.py
    items[:] = items[share::shares]


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, where there is a GPU."""
    if not gpu_count():
        pytest.skip("needs an NVIDIA GPU with CuPy")
    import cupy

    if os.environ.get("PAGEDATTN_SANITIZE") == "1":
        cupy.cuda.set_allocator(None)  # each array an allocation of its own, which the sanitizer can guard
    return cupy


@pytest.fixture(autouse=True)
def all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are small here: Hopper's kernel for all heads at a time would never be chosen, nor merge splits."""
    monkeypatch.setattr(decode_split_kv, "FORCE_HEADS", True)
    monkeypatch.setattr(decode_heads_sm90, "MERGED_SPLIT_KEYS", 0)
