"""Hopper's decode kernel on the CPU: bulk copies end late, in any order; what they bring is undefined until then."""

from __future__ import annotations

import pytest

from pagedattn import support
from pagedattn.backends import decode_split_kv
from tests.emulator import runtime as emulated
from tests.emulator import toolchain
from tests.emulator.executor import EmulatorExecutor
from tests.faults.targets import EmulatedTarget
from tests.kernels.test_matrix import check_backend
from tests.support.cases import EIGHT_HEADS, Case

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


class Hopper(EmulatorExecutor):
    """An executor that plans as a Hopper GPU would."""

    arch = "sm_90a"
    max_shared_bytes = 227 << 10
    multiprocessors = 132

    stems: set[str]

    def load(self, kernel, spec):
        self.stems.add(kernel.stem)
        return super().load(kernel, spec)


class HopperRuntime(emulated.EmulatorRuntime):
    arch = 90


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    executor = Hopper(workers=1)
    executor.stems = set()
    monkeypatch.setattr(emulated, "runtime", lambda: HopperRuntime(executor))
    monkeypatch.setattr(decode_split_kv, "FORCE_HEADS", True)
    return executor


@pytest.mark.parametrize("case", EIGHT_HEADS, ids=str)
def test_all_heads_at_a_time(case: Case, hopper: Hopper) -> None:
    check_backend(EmulatedTarget(support.DECODE, arch=90), case)
    row_bytes = case.head_size * (4 if case.cache == "int4" else 8 if case.cache else 16) // 8
    assert ("decode_heads_sm90" in hopper.stems) == (row_bytes in (64, 128, 256) and case.head_size % 64 == 0)
