"""Hopper's decode kernel on the CPU: bulk copies end late, in any order; what they bring is undefined until then."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pagedattn import support
from pagedattn.kernels import decode_heads_sm90
from tests.emulator import toolchain
from tests.faults.targets import EmulatedTarget
from tests.kernels.test_matrix import check_backend
from tests.support.cases import EIGHT_HEADS, Case

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


@pytest.mark.parametrize(("case", "merged_keys"), [(case, i % 2 << 20) for i, case in enumerate(EIGHT_HEADS)], ids=str)
def test_all_heads_at_a_time(case: Case, merged_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_heads_sm90, "MERGED_SPLIT_KEYS", merged_keys)
    target = EmulatedTarget(support.DECODE, arch=90, by_heads=True)
    row_bytes = case.head_size * (4 if case.cache == "int4" else 8 if case.cache else 16) // 8
    taken = row_bytes in (64, 128, 256) and case.head_size % 64 == 0 and not case.strided
    with target.reaching_its_kernel() if taken else nullcontext():
        check_backend(target, case)
