"""What `explain` says against what a call launches."""

from __future__ import annotations

import pytest

from pagedattn.jit.launch import cuda_executor

from .decoding import Decoder
from .test_graphs import MODELS


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_kernels_are_those_of_a_call(cupy, model, monkeypatch):
    executor, launched = cuda_executor(0), []

    def prepare(launches, stream, really=executor.prepare):
        launches = list(launches)
        launched.extend(launch.stem for launch in launches)
        return really(launches, stream)

    monkeypatch.setattr(executor, "prepare", prepare)
    decoder = Decoder(cupy, model)
    decoder.prepare([3, 40, 150], 0)
    kernels = decoder.operator.explain(**decoder.arrays).kernels
    assert not launched
    decoder.step()
    assert kernels == tuple(launched)
    if model.kv_num_heads == 8 and executor.arch == "sm_90a":
        assert kernels == ("write_cache", "decode_heads_sm90")
