"""One operator, one stream, several threads: the launches of their calls come in any order."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pagedattn import paged_attention
from pagedattn.testing import emulate
from tests.support.build import build
from tests.support.cases import Case
from tests.support.compare import assert_same_bits

from . import toolchain

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


@pytest.mark.parametrize("backend", ["decode", "dense"])
def test_calls_of_several_threads_share_no_workspace(backend: str):
    # RoPE puts the rotated query into the workspace.
    builts = [build(Case(lengths=((5, 1), (17, 1)), rope="full", seed=seed)) for seed in range(4)]

    def run(i: int) -> Any:
        return builts[i].copy().run(paged_attention, backend=backend).output

    interval = sys.getswitchinterval()
    with emulate(), ThreadPoolExecutor(4) as threads:
        want = [run(i) for i in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            got = list(threads.map(run, list(range(4)) * 8))
        finally:
            sys.setswitchinterval(interval)
    assert len({x.tobytes() for x in want}) == 4
    for i, x in enumerate(got):
        assert_same_bits(np.asarray(x), want[i % 4])
