"""A multi-head latent attention layer as DeepSeek's, with the operator inside, and what it has to give.

The layer is computed three times: with absorbed queries through `pagedattn.PagedAttention`, step by step and paged; not
absorbed, whole and in float64, which is right by definition; and plainly in the activations' type, which says how far
from that an answer may be. Up to ``o_proj``, which is nobody's business here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedattn import PagedAttention, absorb, cumulative_lengths, mla, rope
from pagedattn.dtypes import BY_NAME
from tests.support.compare import assert_close, assert_lse_close, assert_same_bits

Array = np.ndarray[Any, np.dtype[Any]]
Step = tuple[int, ...]  # new tokens of each sequence

BLOCK_SIZE = 16
# The original length is below those of the tests, so that YaRN's ramp and its temperatures show.
YARN: dict[str, Any] = {"factor": 40.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.8}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, by the names of DeepSeek's configs without their prefixes."""

    heads: int
    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    hidden: int = 256
    q_rank: int = 192

    @property
    def head_size(self) -> int:
        """Width of a row of the cache."""
        return self.rank + self.rope

    @property
    def backend(self) -> str:
        """Of the CUDA backends the one for it."""
        return "latent" if self.head_size <= 576 else "dense"

    def __str__(self) -> str:
        return f"{self.head_size}.{self.rank}-h{self.heads}"


class Rows(NamedTuple):
    """What the projections make of hidden states, nothing rotated yet."""

    q_nope: Any  # (N, heads, nope)
    q_rope: Any  # (N, heads, rope)
    latent: Any  # (N, rank), after its norm
    k_rope: Any  # (N, rope)


class Answer(NamedTuple):
    """Results of one sequence: (S, heads * value) and (S, heads)."""

    heads: Array
    lse: Array


class Layer:
    """Random weights and tables, in values of the activations' type.

    Parameters
    ----------
    shape : Shape
    io : str
    tokens : int
        Longest sequence.
    """

    def __init__(self, shape: Shape, io: str, tokens: int) -> None:
        s, self.shape, self.io = shape, shape, BY_NAME[io].numpy
        rng = np.random.default_rng(17)

        def draw(rows: int, columns: int, spread: float = 1.0) -> Array:
            return np.asarray(self.narrow(spread * rng.standard_normal((rows, columns)) / math.sqrt(columns)))

        def norm(size: int) -> Array:
            return np.asarray(self.narrow(1 + 0.3 * rng.standard_normal(size)))

        self.weights = {
            "q_a": draw(s.q_rank, s.hidden),
            "q_a_norm": norm(s.q_rank),
            "q_b": draw(s.heads * (s.nope + s.rope), s.q_rank, spread=1.5),
            "kv_a": draw(s.rank + s.rope, s.hidden),
            "kv_a_norm": norm(s.rank),
            "kv_b": draw(s.heads * (s.nope + s.value), s.rank),
        }
        self.cos, self.sin = rope.yarn(s.rope, 1e4, **YARN).caches(tokens, io)
        self.scale = mla.softmax_scale(s.nope + s.rope, factor=YARN["factor"], mscale_all_dim=YARN["mscale_all_dim"])

    def narrow(self, x: Any) -> Any:
        """Round to the activations' type, keep the wide one."""
        return x.astype(self.io).astype(x.dtype)

    def rows(self, hidden: Any, weights: dict[str, Any], rounded: Callable[[Any], Any]) -> Rows:
        """Project hidden states (N, hidden), in their type and library, rounding every result."""
        s = self.shape

        def norm(x: Any, weight: Any) -> Any:
            return rounded(x / ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** 0.5 * weight)

        query = rounded(norm(rounded(hidden @ weights["q_a"].T), weights["q_a_norm"]) @ weights["q_b"].T)
        query = query.reshape(len(hidden), s.heads, s.nope + s.rope)
        row = rounded(hidden @ weights["kv_a"].T)
        latent = norm(row[:, : s.rank], weights["kv_a_norm"])
        return Rows(query[..., : s.nope], query[..., s.nope :], latent, row[:, s.rank :])

    # ---- right answers, of a whole sequence

    def right(self, rows: Rows) -> Answer:
        """Not absorbed, in float64: keys and values of every head."""
        s = self.shape
        rows = Rows(*(x.astype(np.float64) for x in rows))
        expanded = (rows.latent @ self.weights["kv_b"].astype(np.float64).T).reshape(-1, s.heads, s.nope + s.value)
        key, value = (x.swapaxes(0, 1) for x in (expanded[..., : s.nope], expanded[..., s.nope :]))
        cos, sin = (x.astype(np.float64) for x in (self.cos, self.sin))
        scores = rows.q_nope.swapaxes(0, 1) @ key.swapaxes(1, 2)
        scores += rotated(rows.q_rope, cos, sin).swapaxes(0, 1) @ rotated(rows.k_rope[:, None], cos, sin)[:, 0].T
        temperature = 0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1
        weights, lse = _softmax(scores * temperature**2 / math.sqrt(s.nope + s.rope))
        return Answer(_joined(weights @ value), lse)

    def plain(self, rows: Rows) -> Answer:
        """Absorbed, as one would write it without thought for precision: results rounded, sums in float32."""
        s, narrow = self.shape, self.narrow
        rows = Rows(*(x.astype(np.float32) for x in rows))
        projection = self.projection(np)
        cos, sin = (x.astype(np.float32) for x in (self.cos, self.sin))
        absorbed = projection.query(rows.q_nope, narrow(rotated(rows.q_rope, cos, sin)))
        query = narrow(absorbed).reshape(-1, s.heads, s.head_size).swapaxes(0, 1)
        key = narrow(np.concatenate([rows.latent, rotated(rows.k_rope[:, None], cos, sin)[:, 0]], axis=1))
        weights, lse = _softmax(query @ key.T * np.float32(self.scale))
        latent = narrow(narrow(weights) @ key[:, : s.rank])
        return Answer(narrow(projection.output(_joined(latent))), lse)

    # ---- the operator

    def projection(self, xp: Any) -> mla.AbsorbedProjection:
        """kv_b_proj, absorbed; in float32, which every library multiplies."""
        s, weight = self.shape, xp.asarray(self.weights["kv_b"].astype(np.float32))
        return absorb(weight, num_heads=s.heads, qk_nope_head_dim=s.nope, v_head_dim=s.value)

    def operator(self, rotate_inside: bool, **options: Any) -> PagedAttention:
        rotation: dict[str, Any] = {"do_rotary": 1, "rotary_offset": self.shape.rank, "rotary_interleaved": 1}
        return PagedAttention(
            num_heads=self.shape.heads,
            kv_num_heads=1,
            kv_cache_layout="LATENT",
            v_head_size=self.shape.rank,
            scale=self.scale,
            return_lse=True,
            **options,
            **(rotation if rotate_inside else {}),
        )


@dataclass
class Paged:
    """What a paged run gave, by sequence: answers, the rows that were projected, and the bits of the whole cache."""

    answers: list[Answer]
    rows: list[Rows]
    cache: Array


def run_paged(
    layer: Layer,
    hidden: Sequence[Array],
    schedule: Sequence[Step],
    xp: Any = np,
    *,
    rotate_inside: bool = True,
    **options: Any,
) -> Paged:
    """Run sequences of hidden states, (S, hidden) each, through a layer step by step on shuffled blocks of NaN."""
    s = layer.shape
    weights = {name: xp.asarray(x.astype(np.float32)) for name, x in layer.weights.items()}
    tables = {"cos_cache": _placed(xp, layer.cos), "sin_cache": _placed(xp, layer.sin)}
    wide_tables = [xp.asarray(x.astype(np.float32)) for x in (layer.cos, layer.sin)]
    projection, operator = layer.projection(xp), layer.operator(rotate_inside, **{"backend": "numpy", **options})
    blocks = -(-max(map(len, hidden)) // BLOCK_SIZE)
    ids = np.random.default_rng(4).permutation(len(hidden) * blocks + 2)[: len(hidden) * blocks]
    block_table = xp.asarray(ids.reshape(len(hidden), blocks).astype(np.int32))
    cache = _placed(xp, np.full((ids.size + 2, BLOCK_SIZE, 1, s.head_size), np.nan).astype(layer.io))
    past = np.zeros(len(hidden), np.int32)
    parts: list[list[tuple[Answer, Rows]]] = [[] for _ in hidden]
    for step in schedule:
        new = np.concatenate([x[p : p + n] for x, p, n in zip(hidden, past, step, strict=True)])
        rows = layer.rows(xp.asarray(new.astype(np.float32)), weights, layer.narrow)
        q_rope, k_rope = rows.q_rope, rows.k_rope
        if not rotate_inside:
            position = np.concatenate([np.arange(p, p + n) for p, n in zip(past, step, strict=True)])
            # A product of two numbers of a 16-bit type is exact in float32, so no order and no fused step matters.
            cos, sin = (table[xp.asarray(position)] for table in wide_tables)
            q_rope, k_rope = rotated(q_rope, cos, sin), rotated(k_rope[:, None], cos, sin)[:, 0]
        result = operator(
            query=projection.query(rows.q_nope, q_rope).astype(layer.io),
            key=xp.concatenate([rows.latent, k_rope], axis=1).astype(layer.io),
            key_cache=cache,
            cumulative_sequence_length=xp.asarray(cumulative_lengths(step)),
            past_seqlens=xp.asarray(past),
            block_table=block_table,
            **(tables if rotate_inside else {}),
        )
        heads = layer.narrow(projection.output(result.output.astype(np.float32)))
        cuts = np.cumsum(step)[:-1]
        split = [np.split(_fetched(x), cuts) for x in (heads, result.lse, *rows)]
        for mine, (heads_part, lse_part, *row_parts) in zip(parts, zip(*split, strict=True), strict=True):
            mine.append((Answer(heads_part, lse_part), Rows(*row_parts)))
        past = past + np.array(step, np.int32)
    return Paged(
        [Answer(*map(np.concatenate, zip(*(answer for answer, _ in mine), strict=True))) for mine in parts],
        [Rows(*map(np.concatenate, zip(*(rows for _, rows in mine), strict=True))) for mine in parts],
        _fetched(cache.view(np.uint16)),
    )


# ---- checks ------------------------------------------------------------------------------------------------------


def hidden_states(layer: Layer, schedule: Sequence[Step]) -> list[Array]:
    """Hidden states of the sequences of a schedule."""
    rng = np.random.default_rng(23)
    lengths = np.sum(schedule, axis=0)
    return [layer.narrow(rng.standard_normal((length, layer.shape.hidden))) for length in lengths]


def layer_of(shape: Shape, io: str, schedule: Sequence[Step]) -> Layer:
    return Layer(shape, io, int(np.sum(schedule, axis=0).max()))


def check_layer(shape: Shape, io: str, schedule: Sequence[Step], xp: Any = np, **options: Any) -> None:
    """A paged run against the layer in float64, from the hidden states on and from the projected rows on."""
    layer = layer_of(shape, io, schedule)
    hidden = hidden_states(layer, schedule)
    got = run_paged(layer, hidden, schedule, xp, **options)
    for answer, states, rows in zip(got.answers, hidden, got.rows, strict=True):
        exact = layer.rows(states, layer.weights, lambda x: x)
        narrow = layer.rows(states.astype(np.float32), _wide(layer.weights), layer.narrow)
        for name, want, plain in (
            ("layer", layer.right(exact), layer.plain(narrow)),
            ("absorbed against not absorbed", layer.right(rows), layer.plain(rows)),
        ):
            assert_close(answer.heads, want.heads, plain.heads, io, name)
            assert_lse_close(answer.lse, want.lse, plain.lse, io)


def check_rotation(shape: Shape, io: str, schedule: Sequence[Step], xp: Any = np, **options: Any) -> None:
    """Rotation inside the operator and before it: the same bits everywhere."""
    layer = layer_of(shape, io, schedule)
    hidden = hidden_states(layer, schedule)
    inside, outside = (run_paged(layer, hidden, schedule, xp, rotate_inside=x, **options) for x in (True, False))
    assert_same_bits(inside.cache, outside.cache, "key_cache")
    for mine, right in zip(inside.answers, outside.answers, strict=True):
        assert_same_bits(mine.heads, right.heads)
        assert_same_bits(mine.lse, right.lse, "lse")
    turned = [np.array_equal(x.k_rope, rotated(x.k_rope[:, None], *_tables(layer))[:, 0]) for x in inside.rows]
    assert not all(turned), "nothing was rotated"


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Interleaved pairs of (N, heads, rope), turned by the first N rows of the tables; nothing is rounded."""
    first, second, (cos, sin) = x[..., ::2], x[..., 1::2], (table[: len(x), None] for table in (cos, sin))
    y = x.copy()
    y[..., ::2], y[..., 1::2] = first * cos - second * sin, second * cos + first * sin
    return y


def _tables(layer: Layer) -> tuple[Array, Array]:
    return layer.cos.astype(np.float32), layer.sin.astype(np.float32)


def _wide(weights: dict[str, Array]) -> dict[str, Array]:
    return {name: x.astype(np.float32) for name, x in weights.items()}


def _softmax(scores: Array) -> tuple[Array, Array]:
    """Causal weights of scores (heads, S, S), and lse (S, heads)."""
    scores = np.where(np.tri(scores.shape[1], dtype=bool), scores, -np.inf)
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0].T


def _joined(x: Array) -> Array:
    """(heads, S, width) to (S, heads * width)."""
    return np.asarray(x.swapaxes(0, 1).reshape(x.shape[1], -1))


def _placed(xp: Any, x: Array) -> Any:
    return xp.asarray(x.view(np.uint16)).view(x.dtype)


def _fetched(x: Any) -> Array:
    return np.asarray(x.get() if hasattr(x, "get") else x)
