"""Random calls, each of a family and a seed: what nobody thought of, and so wrote no case for.

Types and head sizes are few, so that little is compiled; lengths, pages, splits and features are many. Each problem has
a second case for the same arrays, for what was captured with the first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.cases import Case
from tests.support.cases import Row as Fields

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RandomProblem:
    """A call to run, and one to run in its place.

    Attributes
    ----------
    backend : str
    case, other : Case
        The second needs no more room than the first one.
    split_keys : int or None
        Of both calls.
    spoilt : bool
        New keys or values are to be infinite or NaN.
    """

    backend: str
    case: Case
    other: Case
    split_keys: int | None
    spoilt: bool


@dataclass(frozen=True)
class Family:
    """Problems that mean to reach one kernel: from each field one of its values is taken.

    Attributes
    ----------
    backend : str
    types : sequence of fields of a case
        Element types and head size; "mode" where only one will do.
    heads : sequence of (kv_num_heads, group_size)
    rules : sequence of fields of a case
        Features that a third of the problems have.
    news : sequence
        Of which sequences take the numbers of their new tokens.
    keys : sequence of int
        Most keys of a sequence.
    edges : sequence of int
        Lengths whose multiples are worth meeting: tiles, pages, and what splits are made of.
    splits : bool
        Whether the size of splits is an option.
    forced : (module, name, value) or None
        A switch of a backend's module that chooses the kernel.
    """

    backend: str
    types: Sequence[Fields]
    heads: Sequence[tuple[int, int]]
    rules: Sequence[Fields]
    news: Sequence[Sequence[int]]
    keys: Sequence[int]
    edges: Sequence[int] = (16, 64, 128)
    splits: bool = False
    forced: tuple[str, str, bool] | None = None


F16: Fields = {"io": "float16"}
BF16: Fields = {"io": "bfloat16"}
PLAIN: Fields = {}
INT8: Fields = {"cache": "int8", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
INT8_CHANNELS: Fields = {"cache": "int8", "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"}
FP8: Fields = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
FP8_CHANNELS: Fields = {"cache": "float8e4m3fn", "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"}
INT4: Fields = {"cache": "int4", "k_quant": "PER_CHANNEL", "v_quant": "PER_TENSOR"}


def latent(*caches: Fields) -> list[Fields]:
    fixed = {"mode": "latent", "head_size": 576, "v_head_size": 512, "scale": 0.07}
    return [{**io, **cache, **fixed, "v_quant": "NONE"} for io in (F16, BF16) for cache in caches]


def heads(*counts: int) -> list[tuple[int, int]]:
    return [(1, n) for n in counts]


SINK: Fields = {"sink": True}
SOFTCAP: Fields = {"softcap": 3.0}
RULES: list[Fields] = [
    SOFTCAP,
    {"is_causal": False},
    *({"positions": which} for which in ("tree", "ahead")),
    *({"bias": shape} for shape in ("1H", "11", "BH", "B1")),
]

SINGLES = ((1, 1, 1, 0), (1,))
FEW = ((1, 1, 1, 0), (1, 2, 3), (1, 2, 3, 4, 0), (2,))
CHUNKS = ((1, 2, 5), (17, 64, 65, 128, 3), (130, 1, 0, 33), (200, 1), (128,))
ANY = (*SINGLES, (1, 3, 0), (17, 40))
GROUPS = ((1, 8), (2, 4), (2, 1), (3, 2), (2, 7), (1, 3), (2, 16))
LONG = (300, 700, 1300)
# Hopper's kernels for LATENT have tiles of 64 keys.
TILES = (32, 64, 336, 672)

FAMILIES = {
    "latent few rows": Family("latent", latent(PLAIN), heads(1, 5, 8, 10), RULES, FEW, LONG, TILES, True),
    "latent few heads": Family("latent", latent(PLAIN), heads(12, 16, 17, 24, 32), RULES, SINGLES, LONG, TILES, True),
    "latent codes": Family(
        "latent",
        latent(INT8, INT8_CHANNELS, FP8, FP8_CHANNELS),
        heads(16, 32, 40, 64, 71, 128),
        RULES,
        FEW,
        (200, 700),
        TILES,
        True,
    ),
    "latent many rows": Family(
        "latent", latent(PLAIN), heads(33, 40, 48, 64, 128, 128), RULES, FEW, (200, 700), TILES, True
    ),
    "latent sm80": Family(
        "latent",
        latent(PLAIN, INT8),
        heads(4, 16, 24),
        RULES,
        ANY,
        (300, 700),
        splits=True,
        forced=("latent_mla", "FORCE_SM80", True),
    ),
    "flash": Family(
        "flash",
        [
            *({**types, "head_size": 128} for types in (F16, BF16, {**BF16, **INT8})),
            *({**BF16, **cache, "head_size": 64} for cache in (PLAIN, FP8, FP8_CHANNELS)),
        ],
        GROUPS,
        [SINK, *RULES],
        CHUNKS,
        (150, 400, 900),
        (16, 32, 64, 128, 192),
    ),
    "flash sm80": Family(
        "flash",
        [{**F16, "head_size": 80}, {**F16, **INT4, "head_size": 64}],
        GROUPS,
        [SINK, *RULES],
        CHUNKS,
        (150, 400, 900),
        forced=("flash_prefill", "FORCE_SM80", True),
    ),
    "decode": Family(
        "decode",
        [
            *({**types, "head_size": 128} for types in (F16, {**BF16, **FP8})),
            *({**types, "head_size": 64} for types in ({**BF16, **INT8_CHANNELS}, {**F16, **INT4})),
        ],
        ((1, 8), (2, 4), (3, 2), (2, 7)),
        [SINK, SOFTCAP],
        FEW,
        LONG,
        splits=True,
        forced=("decode_split_kv", "FORCE_HEADS", False),
    ),
    "decode all heads": Family(
        "decode",
        [
            {**types, "head_size": 128}
            for types in (F16, BF16, {**F16, **INT8}, {**F16, **FP8}, {**F16, **INT4}, {**BF16, **INT8_CHANNELS})
        ],
        ((8, 2), (8, 4), (16, 1)),
        [SINK, SOFTCAP],
        SINGLES,
        LONG,
        splits=True,
        forced=("decode_split_kv", "FORCE_HEADS", True),
    ),
    "dense": Family(
        "dense",
        [{**F16, **cache, "head_size": 64} for cache in (PLAIN, INT8)],
        ((2, 1), (2, 3), (2, 4)),
        [SINK, {"bias": "BH"}],
        ANY,
        (700,),
    ),
}


def random_problem(family: str, seed: int) -> RandomProblem:
    """The problem of a family and a seed: always the same."""
    rng, kind = random.Random(f"{family} {seed}"), FAMILIES[family]
    kv_num_heads, group_size = rng.choice(kind.heads)
    fields = {"mode": rng.choice(["separate", "separate", "packed"])}
    fields |= {**rng.choice(kind.types), **rng.choice([PLAIN, PLAIN, rng.choice(kind.rules)])}
    most, news = rng.choice(kind.keys), rng.choice(kind.news)
    lengths = random_lengths(rng, rng.randint(1, 5), most, news, kind.edges)
    fewer = random_part(rng, lengths)
    tokens = max(1, sum(new for _, new in lengths))
    if max(news) > 1:
        tokens += rng.choice([0, 0, 3])
    fields |= {
        "kv_num_heads": kv_num_heads,
        "group_size": group_size,
        "block_size": rng.choice([16, 32, 64, 64, 128, 256]),
        "window": rng.choice([-1, -1, -1, 1, 20, 63, 64, 65, 129, 300, 513]),
        "unmapped": rng.random() < 0.25,
        "strided": rng.random() < 0.2,
        "slots": rng.choice(["", "", "", "explicit", "holes", "elsewhere"]),
        "metadata": rng.random() < 0.6,
        "rope": rng.choice(["none"] * 4 + ["offset" if fields["mode"] == "latent" else "full"]),
        "seed": seed,
    }
    case, other = (
        Case(**fields, lengths=part, padding=tokens - sum(new for _, new in part)) for part in (lengths, fewer)
    )
    can_spoil = case.mode != "packed" and case.cache in ("", "float8e4m3fn") and case.is_causal
    return RandomProblem(
        kind.backend,
        case,
        other,
        case.split_keys(rng.choice([1, 2, 2, 2, 3, 5])) if kind.splits and rng.random() < 0.8 else None,
        spoilt=can_spoil and case.positions != "ahead" and max(news) > 1 and rng.random() < 0.5,
    )


def random_lengths(rng: random.Random, count: int, most: int, news: Sequence[int], edges: Sequence[int]) -> Lengths:
    """Sequences of up to ``most`` tokens: many of them end near a multiple of an edge, or are short."""
    lengths = []
    for _ in range(count):
        edge, new = rng.choice(edges), rng.choice(news)
        near = edge * rng.randint(1, max(1, most // edge)) + rng.randint(-2, 2)
        total = rng.choice([rng.randint(0, most), near, rng.randint(0, 70), most])
        lengths.append((max(0, min(total, most) - new), new))
    return tuple(lengths)


def random_part(rng: random.Random, lengths: Lengths) -> Lengths:
    """Sequences of which each is a part of another one, in another order."""
    part = []
    for past, new in rng.sample(lengths, len(lengths)):
        fewer = rng.choice([new, rng.randint(0, new)])
        total = rng.choice([past + new, rng.randint(fewer, past + new)])
        part.append((total - fewer, fewer))
    return tuple(part)
