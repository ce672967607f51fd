"""The emulator gives what a GPU gave: the calls of `tests.support.recorded` against validation/h200_outputs.npz."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pagedattn import runtime as runtimes
from pagedattn import support
from pagedattn.jit.sources import Sources, default_sources
from scripts import gpu_check
from tests.faults.targets import EmulatedTarget
from tests.support import recorded
from tests.support.cases import Case
from tests.support.recorded import CALLS, RecordedCall, Recording, Results, complaints

from . import toolchain
from .executor import EmulatorExecutor
from .runtime import EmulatorRuntime

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


def on_gpu() -> tuple[str | None, Recording]:
    """Why there is nothing to compare with, or None, and the recording."""
    path = gpu_check.OUTPUTS
    if not path.exists():
        return f"no GPU has recorded outputs: {json.loads(gpu_check.RECORD.read_text()).get('pending')}", {}
    digest, recording = recorded.load(path)
    if digest != gpu_check.digest():
        return f"{path.name} is of other sources; run scripts/gpu_check.py on a GPU again", {}
    return None, recording


@cache
def emulated(call: RecordedCall) -> Results:
    return recorded.run(call, recorded.emulated_target(call.backend))


@dataclass(frozen=True)
class Device(EmulatedTarget):
    """A backend in an emulator of its own: other limits, other sources."""

    executor: EmulatorExecutor = field(default_factory=EmulatorExecutor)

    @contextmanager
    def active(self) -> Iterator[None]:
        before = runtimes.use_emulator(EmulatorRuntime(self.executor))
        try:
            yield
        finally:
            runtimes.use_emulator(before)


def run_on(executor: EmulatorExecutor, call: RecordedCall) -> Results:
    return recorded.run(call, Device(support.BY_NAME[call.backend], arch=80, executor=executor))


# ---- against the GPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_call_gives_what_the_gpu_gave(call: RecordedCall) -> None:
    why_not, recording = on_gpu()
    if why_not:
        pytest.skip(why_not)
    assert complaints(call, emulated(call), recording[str(call)]) == []


def test_most_outputs_are_the_gpus_bits() -> None:
    why_not, recording = on_gpu()
    if why_not:
        pytest.skip(why_not)
    mine = {str(call): emulated(call) for call in CALLS}
    assert mine.keys() == recording.keys()
    assert recorded.differing_share(mine, recording) <= recorded.DIFFERING_SHARE


# ---- the comparison itself ---------------------------------------------------------------------------------------


def test_calls_cover_every_backend_cache_and_type() -> None:
    assert {call.backend for call in CALLS} == {row.name for row in support.ROWS if row.min_arch}
    kinds = {(call.case.io, call.case.cache) for call in CALLS}
    assert kinds >= {(io, kind) for io in ("float16", "bfloat16") for kind in ("", "int8", "float8e4m3fn")}
    assert ("bfloat16", "int4") in kinds
    assert len({str(call) for call in CALLS}) == len(CALLS)


def test_a_device_with_the_limits_of_an_h200_gives_the_same_bits(tmp_path: Path) -> None:
    """A whole recording there and back; shared memory and multiprocessors choose nothing that these calls show."""
    device = EmulatorExecutor()
    device.max_shared_bytes, device.multiprocessors = 227 * 1024, 132
    path = tmp_path / "outputs.npz"
    recorded.save(path, {str(call): run_on(device, call) for call in CALLS}, "digest of the sources")
    assert path.stat().st_size < 1 << 20
    digest, recording = recorded.load(path)
    assert digest == "digest of the sources"
    mine = {str(call): emulated(call) for call in CALLS}
    assert [found for call in CALLS for found in complaints(call, mine[str(call)], recording[str(call)])] == []
    assert mine.keys() == recording.keys()
    for name in mine:
        for what in mine[name]:
            np.testing.assert_array_equal(mine[name][what], recording[name][what], f"{name} {what}")
    assert recorded.differing_share(mine, recording) == 0


def test_the_gpu_check_records_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `on_gpu` then reads; before, or of other sources, it says what is missing."""
    monkeypatch.setattr(gpu_check, "OUTPUTS", tmp_path / "outputs.npz")
    assert "no GPU has recorded outputs" in str(on_gpu()[0])
    monkeypatch.setattr(recorded, "gpu_target", recorded.emulated_target)
    result = gpu_check.run_outputs(gpu_check.OUTPUTS)
    assert result["calls"] == len(CALLS)
    why_not, recording = on_gpu()
    assert why_not is None
    assert [found for call in CALLS for found in complaints(call, emulated(call), recording[str(call)])] == []
    monkeypatch.setattr(gpu_check, "digest", lambda: "of other sources")
    assert "outputs.npz is of other sources" in str(on_gpu()[0])


PLAIN = next(call for call in CALLS if call.backend == "flash" and not call.case.cache and not call.rotates_or_norms)
INT8 = next(call for call in CALLS if call.case.cache == "int8")
SCORES = next(call for call in CALLS if call.case.qk_output == 1 and not call.case.is_latent)


def moved(call: RecordedCall, what: str, steps: int) -> Results:
    """Results with the largest element of one of them some bit patterns further."""
    results = {name: x.copy() for name, x in emulated(call).items()}
    x = results[what]
    wide = np.abs(x.view(np.float16 if what == "output" else np.float32).astype(np.float32))
    x.flat[np.argmax(np.where(np.isfinite(wide), wide, 0))] += steps
    return results


def test_a_step_is_accepted_and_two_are_not() -> None:
    want = emulated(PLAIN)
    assert complaints(PLAIN, moved(PLAIN, "output", 1), want) == []
    assert "output: 1 of" in complaints(PLAIN, moved(PLAIN, "output", 2), want)[0]


@pytest.mark.parametrize("call", [PLAIN, SCORES], ids=["lse", "output_qk"])
def test_float32_results_are_held_to_float32(call: RecordedCall) -> None:
    what = "lse" if call is PLAIN else "output_qk"
    assert complaints(call, moved(call, what, 1), emulated(call)) == []
    assert f"{what}: 1 of" in complaints(call, moved(call, what, 64), emulated(call))[0]


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_one_bit_in_a_cache_is_found(name: str) -> None:
    for at in (0, emulated(INT8)[name].size // 2):  # beside the cache, and somewhere in it
        got = {key: x.copy() for key, x in emulated(INT8).items()}
        got[name].flat[at] ^= 1
        assert name in complaints(INT8, got, emulated(INT8))[0]


def test_other_inputs_and_missing_results_are_named() -> None:
    want = emulated(PLAIN)
    assert "the seeds gave other numbers" in complaints(PLAIN, want | {"inputs": want["inputs"] + 1}, want)[0]
    without = {name: x for name, x in want.items() if name != "lse"}
    assert "results [" in complaints(PLAIN, without, want)[0]
    other = replace(PLAIN, case=replace(PLAIN.case, seed=1))
    assert complaints(other, emulated(other), emulated(PLAIN))


def planted(tmp_path: Path, *edits: tuple[str, str, str]) -> EmulatorExecutor:
    """An emulator of the package's sources with statements replaced."""
    shutil.copytree(default_sources().root, tmp_path / "kernels_cu")
    for file, before, after in edits:
        path = tmp_path / "kernels_cu" / "include" / "pagedattn" / file
        text = path.read_text()
        assert text.count(before) == 1, f"{file} has changed: {before}"
        path.write_text(text.replace(before, after))
    return EmulatorExecutor(Sources(tmp_path / "kernels_cu"))


CAPPED = RecordedCall("flash", Case(io="bfloat16", lengths=((70, 2), (0, 18)), softcap=2.0))
EXP2 = "ptx/exp2.cuh", "return exp2f(x);"
MMA = "ptx/mma.cuh", "emulator::Element::kBF16, 16>(c, a, b, c);"


def test_what_a_gpu_does_otherwise_is_accepted(tmp_path: Path) -> None:
    """An `exp2` that is up to 3 ulp off either way, and matrix products cut to 22 bits."""
    bits = "__float_as_uint(x)"
    noise = f"static_cast<float>({bits} >> 3 & 3) - static_cast<float>({bits} >> 7 & 3)"
    cut = "for (int i = 0; i < 4; ++i) c[i] = __uint_as_float(__float_as_uint(c[i]) & ~1u);"
    device = planted(tmp_path, (*EXP2, f"return exp2f(x) * (1.0f + 0x1p-23f * ({noise}));"), (*MMA, f"{MMA[1]} {cut}"))
    got, want = run_on(device, CAPPED), emulated(CAPPED)
    assert (got["lse"] != want["lse"]).any()
    assert complaints(CAPPED, got, want) == []


@pytest.mark.parametrize(
    "edit",
    [
        # Half a rounding of bfloat16: the outputs hardly show it, lse does.
        (*EXP2, "return exp2f(x * 1.002f);"),
        ("mask.cuh", "tanhf(score / rules.softcap)", "tanhf(score / rules.softcap * 1.001f)"),
    ],
    ids=["exp2", "softcap"],
)
def test_an_error_of_a_thousandth_is_found(edit: tuple[str, str, str], tmp_path: Path) -> None:
    found = complaints(CAPPED, run_on(planted(tmp_path, edit), CAPPED), emulated(CAPPED))
    assert any(text.startswith("lse: ") for text in found)
