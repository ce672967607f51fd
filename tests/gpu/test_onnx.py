"""ONNX models with their caches and attention on the GPU, everything else on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx")

from pagedattn.onnx import Session
from tests.onnx.test_session import lengths, padded_model, paged_model, queries, step_of


def test_paged_steps(cupy: Any):
    host, device = Session(paged_model(), {"blocks": 4}), Session(paged_model(), {"blocks": 4}, device="cuda")
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        feeds = {"query": queries(stop - start, start), **lengths([start], [stop - start])}
        (want,) = host.run(["output"], feeds)
        (got,) = device.run(["output"], feeds)
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=4e-3)
    cache = device.caches["key_cache"]
    assert isinstance(cache, cupy.ndarray)
    np.testing.assert_array_equal(cache.get(), host.caches["key_cache"])


def test_padded_steps(cupy: Any):
    host, device = Session(padded_model()), Session(padded_model(), device="cuda")
    rows = queries(2 * 6).reshape(2, 6, -1)
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        feeds = step_of(rows[:, start:stop], start)
        (want,) = host.run(["output"], feeds)
        (got,) = device.run(["output"], feeds)
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=4e-3)
    assert isinstance(device.caches["past_key"], cupy.ndarray)
