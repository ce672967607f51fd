"""A few fixed calls whose results a GPU keeps in validation/, and how far another machine's may lie from them.

The same sources run on a GPU and in the emulator, so results differ by the last bits of float32 only: a tensor core
sums in another order and cuts where the CPU rounds, `ex2` is 2 ulp off, other products are fused. What follows:

* A stored row that no such arithmetic precedes (a copy, or one IEEE division and one rounding) is the same bits. A key
  after RoPE or QK-norm may fall to its other side, seldom and by one step.
* An output is rounded once, so a last bit of float32 moves it by no more than one step. But probabilities are rounded
  to the activations' type before they meet the values, and one that falls to its other side moves each channel of its
  row by up to half a step of what that key adds, however much the keys cancel there. So the step is taken at the
  magnitude of the row: the largest output of the token in that head.
* Scores and lse are float32 all along: some roundings at the magnitude of the terms of q * k. After RoPE or QK-norm an
  element of the query may fall to its other side as well, which moves a score by a rounding of the activations' type.
* To fall to the other side has a chance of float32's error in a step, 2^-21 in 2^-11 at worst, and may take a row
  along. So most outputs are the same bits; `differing_share` of all calls together is held to that.

In the emulator, `exp2` that is up to 3 ulp off together with matrix products cut to 22 bits gives: one step at most,
5 roundings in lse, 0.05 % of the outputs differing (tests/emulator/test_recorded.py plants the same in one call).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pagedattn import support
from tests.faults.targets import CupyTarget, EmulatedTarget, Target
from tests.support.build import TYPES, Built, build
from tests.support.cases import Case
from tests.support.compare import MANTISSA_BITS, assert_codes_close, bits, ulp

Array = np.ndarray[Any, np.dtype[Any]]
Results = dict[str, Array]
Recording = dict[str, Results]

# Of all outputs, how many may differ at all.
DIFFERING_SHARE = 0.01
# Roundings of float32 in a score or lse, and the least magnitude of what was summed: 64 products of N(0, 1) by 1/8.
ROUNDINGS, TERMS = 16, 4.0


@dataclass(frozen=True)
class RecordedCall:
    """One call on one backend; its arrays follow from the case, whose name and seed are those of its numbers."""

    backend: str
    case: Case

    def __str__(self) -> str:
        return f"{self.backend}-{self.case}"

    @property
    def rotates_or_norms(self) -> bool:
        """Whether float32 arithmetic comes before queries and keys are rounded."""
        return self.case.rope != "none" or self.case.qk_norm


_INT8 = {"cache": "int8", "k_quant": "PER_TENSOR", "v_quant": "PER_CHANNEL"}
_FP8 = {"cache": "float8e4m3fn", "k_quant": "PER_CHANNEL", "v_quant": "PER_TENSOR"}
_INT4 = {"cache": "int4", "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"}
_LATENT = {"mode": "latent", "kv_num_heads": 1, "head_size": 144, "v_head_size": 128, "scale": 0.1}
_BF16 = {"io": "bfloat16"}
_DECODE, _MIXED, _PREFILL = ((75, 1), (0, 1), (140, 1)), ((70, 2), (0, 18), (31, 1)), ((0, 20), (0, 3))

CALLS = [
    RecordedCall(backend, case)
    for backend, cases in {
        "decode": [
            Case(lengths=_DECODE, group_size=4),
            Case(**_BF16, lengths=_DECODE, group_size=4, sink=True),
            Case(lengths=_DECODE, group_size=4, window=50, softcap=2.0),
            Case(**_BF16, lengths=_DECODE, group_size=4, rope="full", qk_norm=True),
            Case(lengths=_DECODE, group_size=4, bias="BH", unmapped=True),
            Case(lengths=((75, 3), (0, 2)), group_size=4, positions="tree"),
            Case(**_INT8, lengths=_DECODE, group_size=4, window=20, sink=True),
            Case(**_BF16, **_FP8, lengths=_DECODE, group_size=4),
            Case(**_BF16, **_INT4, lengths=_DECODE, group_size=4, rope="partial", softcap=2.0),
        ],
        "flash": [
            Case(lengths=_MIXED),
            Case(**_BF16, lengths=_PREFILL, mode="packed", rope="full", qk_norm=True),
            Case(**_BF16, lengths=_MIXED, window=9, softcap=2.0, sink=True),
            Case(lengths=_MIXED, unmapped=True, is_causal=False),
            Case(lengths=_PREFILL, bias="1H", positions="tree"),
            Case(**_INT8, lengths=_MIXED),
            Case(**_BF16, **_FP8, lengths=_MIXED, window=20),
            Case(**_BF16, **_INT4, lengths=_MIXED, sink=True),
        ],
        "latent": [
            Case(**_LATENT, lengths=_MIXED, group_size=4),
            Case(**_LATENT, **_BF16, lengths=_DECODE, group_size=16, rope="offset", interleaved=True),
            Case(**_LATENT, lengths=_DECODE, group_size=16, cache="int8", k_quant="PER_CHANNEL", window=50),
            Case(**_LATENT, **_BF16, lengths=_MIXED, group_size=4, cache="float8e4m3fn", k_quant="PER_TENSOR"),
            Case(**_LATENT, lengths=_MIXED, group_size=4, cache="int4", k_quant="PER_TENSOR", softcap=2.0, bias="11"),
        ],
        "dense": [
            Case(**_BF16, lengths=_MIXED, bias="BH", softcap=2.0),
            Case(lengths=_MIXED, qk_output=1, window=9),
            Case(**_BF16, lengths=_MIXED, qk_output=2, qk_dtype="bfloat16", sink=True),
            Case(**_INT8, lengths=_MIXED, unmapped=True, qk_output=2, qk_dtype="float16"),
            Case(**_BF16, lengths=_DECODE, kv_num_heads=1, head_size=320),
            Case(**_LATENT, lengths=_DECODE, group_size=4, qk_output=1),
        ],
    }.items()
    for case in cases
] + [  # what the prologue stores
    RecordedCall("flash", Case(**_BF16, **_INT4, slots="elsewhere", qk_norm=True, rope="full", interleaved=True)),
    RecordedCall("flash", Case(**_FP8, slots="holes", strided=True, rope="partial", padding=2)),
    RecordedCall("flash", Case(**_BF16, **_INT8, mode="packed", rope="offset", slots="explicit")),
    RecordedCall("flash", Case(slots="elsewhere", qk_norm=True, strided=True)),
]


# ---- running them ------------------------------------------------------------------------------------------------


def gpu_target(backend: str) -> Target:
    """A backend on the first GPU."""
    from pagedattn import runtime

    return CupyTarget(support.BY_NAME[backend], device="cuda:0", arch=runtime.runtime_of("cuda:0").arch)


def emulated_target(backend: str) -> Target:
    """A backend in the emulator."""
    return EmulatedTarget(support.BY_NAME[backend], arch=80)


@contextmanager
def same_work_everywhere() -> Iterator[None]:
    """Kernels that every architecture has.

    What else is chosen by the device is its own affair, and the same for these calls (tests/emulator/test_recorded.py).
    """
    with ExitStack() as stack:
        for row in support.ROWS:
            module = import_module(row.module)
            if hasattr(module, "FORCE_SM80"):
                stack.enter_context(patch.object(module, "FORCE_SM80", True))
        yield


def run(call: RecordedCall, target: Target) -> Results:
    """Results of a call: bits of output, lse and output_qk, and of each cache with its surroundings what changed.

    What changed is the exclusive or with what was there, of which the untouched part costs nothing in a file.
    """
    built = build(call.case)
    with same_work_everywhere(), patch.dict(target.options, split_keys=64):
        result, after = target.run_built(built)
    named = {"output": result.output, "lse": result.lse, "output_qk": result.output_qk}
    results = {name: bits(np.ascontiguousarray(x)) for name, x in named.items() if x is not None}
    for name in ("key_cache", "value_cache"):
        if name in after:
            results[name] = bits(after[name]) ^ bits(built.parents[name][0])
    return results | {"inputs": _fingerprint(built)}


def _fingerprint(built: Built) -> Array:
    """Tells whether two machines made the same numbers of a seed."""
    total = 0
    for name, (array, _) in sorted(built.parents.items()):
        total = zlib.crc32(name.encode() + array.tobytes(), total)
    return np.array([total], np.uint32)


# ---- the file ----------------------------------------------------------------------------------------------------


def save(path: Path, recording: Mapping[str, Results], digest: str) -> None:
    """Write a recording and the digest of the sources that made it."""
    arrays = {f"{call}/{name}": x for call, results in recording.items() for name, x in results.items()}
    np.savez_compressed(path, digest=np.array(digest), **arrays)


def load(path: Path) -> tuple[str, Recording]:
    """The digest and the recording of a file."""
    recording: Recording = {}
    with np.load(path) as file:
        for key in file.files:
            call, _, name = key.rpartition("/")
            if call:
                recording.setdefault(call, {})[name] = file[key]
        return str(file["digest"]), recording


# ---- comparison --------------------------------------------------------------------------------------------------


def complaints(call: RecordedCall, got: Results, want: Results) -> list[str]:
    """Everything by which two machines' results of a call differ more than they may."""
    if not np.array_equal(got["inputs"], want["inputs"]):
        return ["the seeds gave other numbers on the two machines (another version of NumPy?)"]
    if got.keys() != want.keys():
        return [f"results {sorted(got)} against {sorted(want)}"]
    case = call.case
    found = _caches(call, got, want)
    rows = (case.token_count, case.num_heads, -1)
    mine, theirs = (x["output"].view(TYPES[case.io]).astype(np.float64).reshape(rows) for x in (got, want))
    step = ulp(case.io, np.abs(theirs).max(axis=-1, keepdims=True, initial=0))
    found += _beyond("output", mine, theirs, np.broadcast_to(step, theirs.shape))
    if "lse" in got:
        mine, theirs = (x["lse"].view(np.float32).astype(np.float64) for x in (got, want))
        found += _beyond("lse", mine, theirs, _score_bound(call, theirs))
    if "output_qk" in got:
        mine, theirs = (x["output_qk"].view(TYPES[case.qk_dtype]).astype(np.float64) for x in (got, want))
        stored = ulp(case.qk_dtype, np.abs(theirs)) if case.qk_dtype != "float32" else 0.0
        found += _beyond("output_qk", mine, theirs, np.maximum(_score_bound(call, theirs), stored))
    return found


def _caches(call: RecordedCall, got: Results, want: Results) -> list[str]:
    """Same bytes everywhere, but for keys after arithmetic: those within one step, and seldom off at all."""
    built, found = build(call.case), []
    for name in ("key_cache", "value_cache"):
        if name not in got:
            continue
        before = built.parents[name][0]
        mine, theirs = ((bits(before) ^ x[name]).view(before.dtype) for x in (got, want))
        steps = int(call.rotates_or_norms and name == "key_cache")
        try:
            assert_codes_close(mine, theirs, before, call.case.cache, steps, name)
        except AssertionError as error:
            found.append(str(error))
    return found


def _score_bound(call: RecordedCall, scores: Array) -> Array:
    magnitude = np.maximum(np.abs(np.where(np.isinf(scores), 0, scores)), TERMS)
    bound = ROUNDINGS * 2.0**-24 * magnitude
    if call.rotates_or_norms:
        bound = np.maximum(bound, 2.0 ** -(MANTISSA_BITS[call.case.io] + 1) * magnitude)
    return np.asarray(bound)


def _beyond(what: str, got: Array, want: Array, bound: Array) -> list[str]:
    with np.errstate(invalid="ignore"):  # infinities, which have to be at the same places
        error = np.where(got == want, 0, np.abs(got - want))
    bad = np.argwhere(~(error <= bound))
    if not len(bad):
        return []
    worst = tuple(bad[np.argmax((error / np.maximum(bound, 1e-300))[tuple(bad.T)])])
    return [f"{what}: {len(bad)} of {got.size} too far, {got[worst]:.7g} against {want[worst]:.7g} at {worst}"]


def differing_share(got: Mapping[str, Results], want: Mapping[str, Results]) -> float:
    """Of the outputs of several calls, the share that is not the same bits."""
    pairs = [(got[name]["output"], want[name]["output"]) for name in got]
    return float(sum(np.count_nonzero(a != b) for a, b in pairs) / sum(a.size for a, _ in pairs))
