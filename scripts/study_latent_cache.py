"""What a quantized LATENT cache costs: errors of scores, lse, output and top key, against float64.

Usage, from the root of a checkout::

    python -m scripts.study_latent_cache          # the tables of docs/mla.md, a minute or two on two cores
    python -m scripts.study_latent_cache --small  # the same on short contexts and few heads, half a minute

Rows of 512 latent and 64 rotary channels are drawn with the statistics that `Statistics` states, one assumption a
field, and each table of the study varies some of them. Only the cache is rounded: queries, softmax and sums are
float64, so that what is seen is the cost of the cache's type and of its scales. Scales come from `pagedattn.calibrate`
on other tokens than those that are attended.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pagedattn import absorb, calibrate, codec, rope
from pagedattn.dtypes import BFLOAT16, BY_NAME

Array = np.ndarray[Any, np.dtype[Any]]

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # DeepSeek-V2, V3 and R1
QUERY_ROWS = 128  # tokens times heads
CALIBRATION_TOKENS = 2048


# ---- what is attended --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """How the rows of a layer are distributed, and who asks; each field is an assumption.

    Attributes
    ----------
    name : str
    keys, heads : int
        Context length, and heads that share it; there are QUERY_ROWS / heads query tokens.
    decay : float
        Before the norm, latent rows are normal with singular values ``i ** -decay`` in a random basis.
    tails : float
        Degrees of freedom of a Student factor of each element, on top; infinity for none.
    gain_spread : float
        The gain of a channel in kv_a_layernorm is lognormal with this deviation.
    outliers, strength : int, float
        That many channels have a gain larger by that factor.
    constant : float
        Of an outlier channel, the share of its magnitude that is the same for every token.
    compensation : float
        Columns of kv_b_proj are divided by their channel's gain to this power: 1 when training has balanced the
        channels, 0 when large channels matter as much more as they are larger.
    rope_ratio : float
        Root mean square of the rotary channels, over that of the latent ones.
    rope_spread, rope_constant : float
        The magnitude of a rotary pair is lognormal with this deviation; before rotation a pair has a constant part of
        this many deviations of its varying part.
    score_spread : (float, float)
        Standard deviation of a head's scores over the keys, from the flattest head to the sharpest, in even ratios.
    rope_share : float
        Of the variance of scores, the share that comes from the rotary part.
    """

    name: str = "base"
    keys: int = 4096
    heads: int = 128
    decay: float = 0.5
    tails: float = np.inf
    gain_spread: float = 0.5
    outliers: int = 4
    strength: float = 8.0
    constant: float = 0.5
    compensation: float = 1.0
    rope_ratio: float = 4.0
    rope_spread: float = 1.0
    rope_constant: float = 1.0
    score_spread: tuple[float, float] = (1.0, 5.0)
    rope_share: float = 0.3


class Layer:
    """Random weights of a layer with some statistics, and rows of its cache.

    Parameters
    ----------
    statistics : Statistics
    seed : int
    """

    def __init__(self, statistics: Statistics, seed: int = 0) -> None:
        s = self.statistics = statistics
        rng = np.random.default_rng(seed)
        self.basis = _basis(s.decay)
        self.gain = np.exp(s.gain_spread * rng.standard_normal(RANK))
        self.is_outlier = np.zeros(RANK, bool)
        self.is_outlier[rng.choice(RANK, s.outliers, replace=False)] = True
        self.gain[self.is_outlier] *= s.strength
        self.sign = rng.choice([-1.0, 1.0], RANK)
        weight = _standard_weight(s.heads) / self.gain.astype(np.float32) ** np.float32(s.compensation)
        self.projection = absorb(weight, num_heads=s.heads, qk_nope_head_dim=NOPE, v_head_dim=VALUE)
        magnitude = np.exp(s.rope_spread * rng.standard_normal(ROPE // 2))
        angle = rng.uniform(0, 2 * np.pi, ROPE // 2)
        self.pair_constant = s.rope_constant * magnitude * np.exp(1j * angle)
        self.pair_deviation = magnitude / np.sqrt(2)
        latent_rms = np.sqrt(np.mean(self.gain**2))
        pair_rms = np.sqrt(np.mean(np.abs(self.pair_constant) ** 2 / 2 + self.pair_deviation**2))
        self.rope_factor = s.rope_ratio * latent_rms / pair_rms
        self.turn = rope.yarn(
            ROPE, 1e4, factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
        ).inverse_frequencies

    def rows(self, positions: Array, seed: int) -> Array:
        """Rows of the cache before it rounds them, (positions.size, RANK + ROPE) float32; rotary pairs lie together."""
        s, rng = self.statistics, np.random.default_rng(seed)
        raw = rng.standard_normal((positions.size, RANK), np.float32) @ self.basis
        if np.isfinite(s.tails):
            raw *= np.sqrt(s.tails / rng.chisquare(s.tails, raw.shape)).astype(np.float32)
        varying = np.sqrt(1 - s.constant**2)
        raw = np.where(self.is_outlier, varying * raw + s.constant * self.sign, raw)
        latent = raw / np.sqrt(np.mean(raw**2, axis=1, keepdims=True)) * self.gain
        noise = rng.standard_normal((2, positions.size, ROPE // 2))
        pairs = self.pair_constant + self.pair_deviation * (noise[0] + 1j * noise[1])
        pairs = pairs * np.exp(1j * positions[:, None] * self.turn) * self.rope_factor
        rotary = np.stack([pairs.real, pairs.imag], axis=-1).reshape(positions.size, ROPE)
        return np.concatenate([latent, rotary], axis=1).astype(np.float32)

    def queries(self, rows: Array) -> tuple[Array, Array]:
        """Queries of the wanted spread of scores, the softmax scale in them, absorbed and before: (QUERY_ROWS, ...)."""
        s, rng = self.statistics, np.random.default_rng(7)
        shape = (QUERY_ROWS // s.heads, s.heads)
        q_nope, q_rope = (rng.standard_normal((*shape, width)) for width in (NOPE, ROPE))
        joined = self.projection.query(q_nope, q_rope)
        query = joined.reshape(QUERY_ROWS, RANK + ROPE).astype(np.float64)
        plain = np.concatenate([q_nope, q_rope], axis=2).reshape(QUERY_ROWS, NOPE + ROPE)
        spread = np.tile(np.geomspace(*s.score_spread, s.heads), shape[0])
        sample = rows[:: max(1, len(rows) // 1024)].astype(np.float64)
        for share, part, same in (
            (1 - s.rope_share, slice(0, RANK), slice(0, NOPE)),
            (s.rope_share, slice(RANK, None), slice(NOPE, None)),
        ):
            now = (query[:, part] @ sample[:, part].T).std(axis=1)
            for each, channels in ((query, part), (plain, same)):
                each[:, channels] *= (spread * np.sqrt(share) / now)[:, None]
        return query, plain


@cache
def _basis(decay: float) -> Array:
    """Mixes normal numbers into channels of variance about 1 with decaying singular values."""
    q, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((RANK, RANK)))
    values = np.arange(1, RANK + 1) ** -decay
    return np.asarray((values / np.sqrt(np.mean(values**2)))[:, None] * q, np.float32)


@cache
def _standard_weight(heads: int) -> Array:
    """kv_b_proj of a layer whose channels are all alike."""
    rng = np.random.default_rng(2)
    return np.asarray(rng.standard_normal((heads * (NOPE + VALUE), RANK), np.float32) / np.float32(RANK**0.5))


# ---- how it is stored --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    """Type and scales of a cache.

    Attributes
    ----------
    dtype : str
    scales : str
        "tensor": one. "parts": one of the latent part, one of the rotary part. "channel": one each. "pair": one each,
        of a rotary pair the same one, from the pair's length, which no rotation changes.
    percentile : float
        Of the magnitudes, what the largest code stands for; 100 is absmax.
    headroom : float
        Factor of the scales.
    rope_16_bits : bool
        Keep the rotary part in bfloat16: no cache of the operator does, it shows what that would gain.
    calibrated_up_to : float
        Share of the context from which the calibration's tokens are taken: positions [0, share * keys).
    """

    dtype: str
    scales: str = "tensor"
    percentile: float = 100.0
    headroom: float = 1.0
    rope_16_bits: bool = False
    calibrated_up_to: float = 1.0

    def __str__(self) -> str:
        if self.dtype == "bfloat16":
            return self.dtype
        short = {"float8e4m3fn": "fp8"}.get(self.dtype, self.dtype)
        return f"{short} {self.scales}" + ", rope bf16" * self.rope_16_bits

    def scale(self, sample: Array) -> Array:
        """Scales from a sample of rows: (1, RANK + ROPE) float32."""
        sample = sample.copy()
        if self.scales == "pair":
            pairs = sample[:, RANK:].reshape(len(sample), -1, 2)
            sample[:, RANK:] = np.repeat(np.linalg.norm(pairs, axis=2), 2, axis=1)
        per_tensor = self.scales in ("tensor", "parts")
        parts = [sample[:, :RANK], sample[:, RANK:]] if self.scales == "parts" else [sample]
        found = [
            np.broadcast_to(
                calibrate(
                    part[:, None],
                    self.dtype,
                    "PER_TENSOR" if per_tensor else "PER_CHANNEL",
                    method="percentile",
                    percentile=self.percentile,
                ).scale.reshape(1, -1),
                (1, part.shape[1]),
            )
            for part in parts
        ]
        return np.asarray(np.concatenate(found, axis=1) * np.float32(self.headroom))

    def restored(self, rows: Array, sample: Array) -> Array:
        """Rows as the cache gives them back."""
        latent = rows[:, :RANK].astype(BFLOAT16.numpy).astype(np.float32)  # what the norm hands over
        given = np.concatenate([latent, rows[:, RANK:]], axis=1)
        narrow = rows.astype(BFLOAT16.numpy).astype(np.float32)
        if self.dtype == "bfloat16":
            return narrow
        dtype, scale = BY_NAME[self.dtype], self.scale(sample)
        back = codec.decode(codec.encode(given, dtype, scale), dtype, scale)
        if self.rope_16_bits:
            back[:, RANK:] = narrow[:, RANK:]
        return back


@dataclass(frozen=True)
class Errors:
    """What a storage costs; rows are query rows, root mean squares and maxima are over all of them.

    Attributes
    ----------
    score : float
        Root mean square of the error of a score, over the spread of its row's scores.
    score_max : float
        Largest error of a score, in the units of the softmax.
    lse_max : float
        Largest error of a log-sum-exp.
    output : float
        Root mean square of each head's relative error, after its value projection.
    output_max : float
        Largest error of an element, over the largest element of its head.
    top1 : float
        Share of rows whose largest weight is on the right key.
    """

    score: float
    score_max: float
    lse_max: float
    output: float
    output_max: float
    top1: float


class Bench:
    """One layer, its keys and queries, and the right answers."""

    def __init__(self, statistics: Statistics) -> None:
        self.layer = Layer(statistics)
        self.rows = self.layer.rows(np.arange(statistics.keys), seed=3)
        self.query, self.plain_query = self.layer.queries(self.rows)
        self.scores, self.lse, self.output = self._attend(self.rows)
        self._samples: dict[float, Array] = {}
        self._errors: dict[Storage, Errors] = {}

    def _attend(self, rows: Array) -> tuple[Array, Array, Array]:
        """Scores (rows, keys), lse (rows,) and head outputs (rows, VALUE) in float64."""
        rows = rows.astype(np.float64)
        scores = self.query @ rows.T
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        latent = (weights / total) @ rows[:, :RANK]
        heads = self.layer.statistics.heads
        output = self.layer.projection.output(latent.reshape(-1, heads * RANK)).reshape(QUERY_ROWS, VALUE)
        return scores, (top + np.log(total))[:, 0], output

    def errors(self, storage: Storage) -> Errors:
        """Errors with a storage."""
        if storage not in self._errors:
            sample = self._sample(storage.calibrated_up_to)
            self._errors[storage] = self._compare(*self._attend(storage.restored(self.rows, sample)))
        return self._errors[storage]

    def errors_of_heads(self, dtype: str) -> Errors:
        """Errors of a cache of every head's own keys and values, expanded, with one scale of keys and one of values."""
        heads, row = self.layer.statistics.heads, BY_NAME[dtype]
        rows, projection = self.rows.astype(np.float64), self.layer.projection
        scores, output = np.empty_like(self.scores), np.empty_like(self.output)
        for head in range(heads):
            key = np.concatenate([rows[:, :RANK] @ projection.w_uk[head].T, rows[:, RANK:]], axis=1)
            value = rows[:, :RANK] @ projection.w_uv[head].T
            for x in (key, value):
                scale = calibrate(x[:, None], dtype).scale
                x[...] = codec.decode(codec.encode(x, row, scale), row, scale)
            mine = slice(head, None, heads)
            scores[mine] = self.plain_query[mine] @ key.T
            weights = np.exp(scores[mine] - scores[mine].max(axis=1, keepdims=True))
            output[mine] = weights / weights.sum(axis=1, keepdims=True) @ value
        top = scores.max(axis=1)
        return self._compare(scores, top + np.log(np.exp(scores - top[:, None]).sum(axis=1)), output)

    def _sample(self, up_to: float) -> Array:
        """Rows for the calibration, of other tokens at positions in the first part of the context."""
        if up_to not in self._samples:
            below = max(1, round(self.layer.statistics.keys * up_to))
            positions = np.random.default_rng(5).integers(0, below, CALIBRATION_TOKENS)
            self._samples[up_to] = self.layer.rows(positions, seed=6)
        return self._samples[up_to]

    def _compare(self, scores: Array, lse: Array, output: Array) -> Errors:
        wrong, off, norm = scores - self.scores, output - self.output, np.linalg.norm
        return Errors(
            score=_rms(wrong / self.scores.std(axis=1, keepdims=True)),
            score_max=float(np.abs(wrong).max()),
            lse_max=float(np.abs(lse - self.lse).max()),
            output=_rms(norm(off, axis=1) / norm(self.output, axis=1)),
            output_max=float((np.abs(off).max(axis=1) / np.abs(self.output).max(axis=1)).max()),
            top1=float(np.mean(scores.argmax(axis=1) == self.scores.argmax(axis=1))),
        )


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# ---- the study ---------------------------------------------------------------------------------------------------

BASE = Statistics()
BF16 = Storage("bfloat16")
FP8, FP8_PARTS, FP8_CHANNEL, FP8_PAIR = (
    Storage("float8e4m3fn", scales) for scales in ("tensor", "parts", "channel", "pair")
)
INT8, INT8_PARTS, INT8_CHANNEL, INT8_PAIR = (
    Storage("int8", scales) for scales in ("tensor", "parts", "channel", "pair")
)
STORAGES = (
    BF16,
    *(FP8, FP8_PARTS, FP8_CHANNEL, FP8_PAIR, replace(FP8, rope_16_bits=True)),
    *(INT8, INT8_PARTS, INT8_CHANNEL, INT8_PAIR, replace(INT8_PAIR, rope_16_bits=True)),
)
COMPARED = (FP8, FP8_PARTS, FP8_PAIR, replace(FP8, rope_16_bits=True), INT8, INT8_PARTS, INT8_PAIR)
VARIED = (
    BASE,
    replace(BASE, name="16 heads", heads=16),
    replace(BASE, name="no outlier channel", outliers=0),
    replace(BASE, name="outliers x 32", strength=32),
    replace(BASE, name="outliers x 128", strength=128),
    replace(BASE, name="outliers nearly constant", strength=32, constant=0.95),
    replace(BASE, name="gains spread by e^1", gain_spread=1.0),
    replace(BASE, name="large channels matter more", compensation=0.0),
    replace(BASE, name="the same, outliers x 32, nearly constant", compensation=0.0, strength=32, constant=0.95),
    replace(BASE, name="long tails (Student, 4)", tails=4.0),
    replace(BASE, name="white latents", decay=0.0),
    replace(BASE, name="low-rank latents", decay=1.0),
    replace(BASE, name="rope x 1", rope_ratio=1.0),
    replace(BASE, name="rope x 16", rope_ratio=16.0),
    replace(BASE, name="rope x 100", rope_ratio=100.0),
    replace(BASE, name="rope constant x 4", rope_constant=4.0),
    replace(BASE, name="scores mostly by rope", rope_share=0.8),
    replace(BASE, name="flat heads", score_spread=(0.3, 1.0)),
    replace(BASE, name="sharp heads", score_spread=(5.0, 12.0)),
)
CONTEXTS = (1024, 4096, 16384, 32768)
CALIBRATIONS: dict[str, dict[str, Any]] = {
    "absmax": {},
    "percentile 99.99": {"percentile": 99.99},
    "percentile 99.9": {"percentile": 99.9},
    "percentile 99": {"percentile": 99.0},
    "absmax x 2": {"headroom": 2.0},
    "absmax x 8": {"headroom": 8.0},
}


@cache
def bench(statistics: Statistics) -> Bench:
    return Bench(statistics)


def percent(share: float) -> str:
    """A share with two digits that mean something."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1 if share >= 0.00995 else 2}f} %"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def every_storage(base: Statistics) -> str:
    """All errors of all storages."""

    def cells(name: str, e: Errors) -> list[str]:
        numbers = [percent(e.score), f"{e.score_max:.2g}", f"{e.lse_max:.2g}", percent(e.output)]
        return [name, *numbers, percent(e.output_max), percent(e.top1)]

    header = ["cache", "score, rms", "score, max", "lse, max", "output, rms", "output, max", "top key kept"]
    few_heads = bench(replace(base, heads=16))
    of_heads = [cells(f"16 heads' own, {x}", few_heads.errors_of_heads(x.dtype)) for x in (FP8, INT8)]
    return table(header, [*(cells(str(x), bench(base).errors(x)) for x in STORAGES), *of_heads])


def every_assumption(varied: Sequence[Statistics]) -> str:
    """Output error of some storages, one assumption changed at a time."""
    lines = ([s.name, *(percent(bench(s).errors(x).output) for x in COMPARED)] for s in varied)
    return table(["rows", *map(str, COMPARED)], lines)


def every_context(base: Statistics, contexts: Sequence[int]) -> str:
    """Output error, and top keys kept, by context length and number of heads."""
    chosen = (FP8, FP8_PARTS, INT8_PARTS, INT8_PAIR)

    def cells(keys: int, heads: int) -> list[str]:
        errors = [bench(replace(base, keys=keys, heads=heads)).errors(storage) for storage in chosen]
        return [str(keys), str(heads), *(f"{percent(e.output)} ({percent(e.top1)})" for e in errors)]

    return table(["context", "heads", *map(str, chosen)], (cells(n, h) for h in (128, 16) for n in contexts))


def every_calibration(base: Statistics) -> str:
    """Output error by how the scales are chosen."""
    chosen = (FP8, FP8_PAIR, INT8, INT8_PARTS, INT8_PAIR)
    cases = (base, replace(base, name="outliers x 32", strength=32), replace(base, name="long tails", tails=4.0))
    lines = (
        [s.name, how, *(percent(bench(s).errors(replace(x, **options)).output) for x in chosen)]
        for s in cases
        for how, options in CALIBRATIONS.items()
    )
    return table(["rows", "scales", *map(str, chosen)], lines)


def every_span(base: Statistics, keys: int) -> str:
    """Output error when the calibration has seen the first positions only."""
    chosen = (FP8_CHANNEL, FP8_PAIR, INT8_PARTS, INT8_CHANNEL, INT8_PAIR)
    turning = replace(base, keys=keys, rope_constant=4.0)
    lines = (
        [f"{round(keys * share)} of {keys}", *(percent(bench(turning).errors(x).output) for x in storages)]
        for share in (1.0, 1 / 16, 1 / 64)
        for storages in [[replace(x, calibrated_up_to=share) for x in chosen]]
    )
    return table(["positions calibrated on", *map(str, chosen)], lines)


def study(small: bool) -> dict[str, Callable[[], str]]:
    """The tables by title."""
    base = replace(BASE, keys=512, heads=16) if small else BASE
    contexts = (256, 512) if small else CONTEXTS
    varied = [replace(s, keys=512, heads=16) for s in VARIED if s.name != "16 heads"] if small else VARIED
    return {
        f"All errors, {base.heads} heads, {base.keys} keys": lambda: every_storage(base),
        "Relative rms error of the output, one assumption changed at a time": lambda: every_assumption(varied),
        "Relative rms error of the output (and top keys kept) by context": lambda: every_context(base, contexts),
        "Relative rms error of the output by calibration": lambda: every_calibration(base),
        "Relative rms error of the output, scales from first positions": lambda: every_span(
            base, 512 if small else 8192
        ),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short contexts and few heads")
    for title, make in study(parser.parse_args(argv).small).items():
        print(f"### {title}\n\n{make()}\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
