"""Without onnx there is nothing to test here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("onnx") else ["test_*.py"]


def pytest_report_header() -> str | None:
    return "tests/onnx: left out, the package onnx is absent" if collect_ignore_glob else None


@pytest.fixture
def _registered():
    """onnx knows the operator."""
    from pagedattn.onnx import register_schema

    register_schema()
