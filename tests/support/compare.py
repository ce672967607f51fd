"""When an answer is right.

Tolerances are derived, not typed in: an answer may be twice as far from the float64 oracle as the plain computation in
the same type, plus one rounding unit. The maximum finds one bad row, the root mean square finds drift.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.build import TYPES, Built
from tests.support.oracle import Answer, naive_low_precision, oracle

Array = np.ndarray[Any, np.dtype[Any]]

MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23}
# Of the stored codes that took floating-point steps, how many may be rounded to the neighbour of the oracle's.
FLIPPED_SHARE = 0.005


def ulp(dtype: str, magnitude: Any) -> Any:
    """Distance of two neighbours in an element type at a magnitude, or at each of an array; 0 at 0."""
    with np.errstate(divide="ignore"):
        return 2.0 ** (np.floor(np.log2(magnitude)) - MANTISSA_BITS[dtype])


def assert_close(got: Array, want: Array, plain: Array, dtype: str, what: str = "output", units: float = 1) -> None:
    """Accept ``got`` when it is about as near to the oracle ``want`` as ``plain`` is, give or take some rounding units.

    Infinities (scores under a -inf bias, lse of rows that see nothing) have to be at the same places.
    """
    got, want, plain = (np.asarray(x).astype(np.float64) for x in (got, want, plain))
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert not np.isnan(want).any(), f"{what}: the case itself asks for NaN"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{what}: infinities are at the wrong places"
    got, want, plain = (x[~infinite] for x in (got, want, plain))
    assert np.isfinite(got).all(), f"{what}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
    if not got.size:
        return
    error, allowed = np.abs(got - want), np.abs(plain - want)
    bound = 2 * allowed.max() + units * ulp(dtype, np.abs(want).max())
    assert error.max() <= bound, f"{what}: largest error {error.max():.3g}, allowed {bound:.3g}"
    bound = 2 * _rms(allowed) + units * ulp(dtype, _rms(want))
    assert _rms(error) <= bound, f"{what}: RMS error {_rms(error):.3g}, allowed {bound:.3g}"


def assert_lse_close(got: Array, want: Array, plain: Array, io: str, units: float = 1) -> None:
    """Accept log-sum-exps; rows that see nothing have to be -inf."""
    assert got.dtype == np.float32
    assert_close(got, want, plain, io, "lse", units)


def bits(x: Array) -> Array:
    """Array as unsigned integers of its width, for bitwise comparisons (NaN included)."""
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(got: Array, want: Array, what: str = "output", any_nan: bool = False) -> None:
    """Accept only the same bits everywhere; with ``any_nan`` any NaN for another, as a conversion may give."""
    assert got.dtype == want.dtype, f"{what}: element type {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    differ = bits(got) != bits(want)
    if any_nan and got.dtype.kind not in "iub":
        differ &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    wrong = np.argwhere(differ)
    assert not wrong.size, f"{what}: {len(wrong)} of {got.size} elements differ, first at {tuple(wrong[0].tolist())}"


def steps_between(got: Array, want: Array, cache: str = "") -> Array:
    """How many representable values two stored arrays are apart, by element; 0 between two NaN."""
    a, b = (_ordinals(x, cache) for x in (got, want))
    distance = np.abs(a - b)
    if got.dtype.kind not in "iu":
        distance[np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))] = 0
    return np.asarray(distance)


def assert_codes_close(got: Array, want: Array, before: Array, cache: str, steps: int, what: str = "cache") -> None:
    """Accept stored elements: exactly, or within ``steps`` representable values of the oracle's and only seldom so.

    A value that is the small difference of two large ones may be off by more steps, but by little beside the largest.
    """
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if steps == 0:
        assert_same_bits(got, want, what, any_nan=True)
        return
    distance = steps_between(got, want, cache)
    bad = distance > steps
    if bad.any() and not cache:
        wide = [np.nan_to_num(x.astype(np.float64)) for x in (got, want)]
        bad &= np.abs(wide[0] - wide[1]) > 2.0**-20 * np.abs(wide[1]).max()
    assert not bad.any(), f"{what}: {np.count_nonzero(bad)} elements are more than {steps} steps off"
    if got.dtype != np.float32:
        changed = np.count_nonzero(steps_between(want, before, cache))
        assert np.count_nonzero(distance) <= 2 + FLIPPED_SHARE * changed, f"{what}: too many elements are a step off"


def verify(built: Built, got: Any, steps: int | None = None, units: float = 1, spoilt: bool = False) -> Answer:
    """Check all results of a call.

    Parameters
    ----------
    built : Built
        The call's arrays as they were before it.
    got : PagedAttentionResult of NumPy arrays
    steps : int, optional
        How far a stored code may be from the oracle's; the default is 0 where no arithmetic comes before the store.
    units : float
        Rounding units that are allowed beside twice the error of the plain computation: more where nobody looks at
        each case, and a few numbers of the plain one may be nearer to the oracle than it has a right to be.
    spoilt : bool
        New keys or values are NaN or infinite: rows that admit one may be anything, the others are to be right.

    Returns
    -------
    Answer
        The oracle's.
    """
    case = built.case
    if steps is None:
        steps = int(case.is_quantized or case.qk_norm or case.rope != "none")
    stored = oracle(built)
    for name, mine, right in (
        ("key_cache", got.key_cache_out, stored.key_cache),
        ("value_cache", got.value_cache_out, stored.value_cache),
    ):
        if right is not None:
            exact = name == "value_cache" and not case.is_quantized
            assert_codes_close(mine, right, built[name], case.cache, 0 if exact else steps, name)
    written = (got.key_cache_out, got.value_cache_out if not case.is_latent else None)
    want = oracle(built, written)
    # The plain computation multiplies what a row does not admit by 0, so for it there has to be a number.
    plain = naive_low_precision(built, (_numbers(written[0]), _numbers(written[1])) if spoilt else written)
    assert got.output.dtype == TYPES[case.io]
    assert got.output.shape == want.output.shape
    rows = (*want.lse.shape, case.v_head_size or case.head_size)
    judged = np.full(want.lse.shape, True)
    if spoilt:
        judged = ~np.isnan(want.lse) & np.isfinite(want.output.reshape(rows)).all(axis=2)
    output = got.output.reshape(rows)
    assert_close(
        output[judged], want.output.reshape(rows)[judged], plain.output.reshape(rows)[judged], case.io, units=units
    )
    assert (output[judged & (want.lse == -np.inf)] == 0).all(), "output: not 0 where nothing is attended"
    assert (got.lse is not None) == case.lse
    if case.lse:
        assert got.lse.shape == want.lse.shape
        assert_lse_close(got.lse[judged], want.lse[judged], plain.lse[judged], case.io, units)
    assert (got.output_qk is not None) == bool(case.qk_output)
    if case.qk_output:
        assert want.output_qk is not None
        assert plain.output_qk is not None
        assert got.output_qk.dtype == TYPES[case.qk_dtype]
        # A query is rounded to the activations' type before it is multiplied, whatever the scores are stored in.
        coarser = min((case.io, case.qk_dtype), key=MANTISSA_BITS.__getitem__)
        assert_close(got.output_qk, want.output_qk, plain.output_qk, coarser, "output_qk", units)
    return want


def _numbers(x: Array | None) -> Array | None:
    """A cache with zeros where its values are no finite numbers."""
    return x if x is None or x.dtype.kind in "iu" else np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(x.dtype)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _ordinals(x: Array, cache: str) -> Array:
    """Integers in the order of the values, one apart for neighbours."""
    if cache == "int4":
        return np.stack([x & 15, x >> 4], axis=-1).astype(np.int64)
    if x.dtype.kind in "iu":
        return x.astype(np.int64)
    raw = bits(x).astype(np.int64)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return np.where(raw & sign, sign - raw, raw)
