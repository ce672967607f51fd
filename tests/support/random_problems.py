"""Random calls, each of a family and a seed: what nobody thought of, and so wrote no case for.

Types and head sizes are few, so that little is compiled; lengths, pages, splits and features are many. Each problem has
a second case for the same arrays, for what was captured with the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
    """Problems that mean to reach one kernel.

    Attributes
    ----------
    backend : str
    draw : callable
        Fields of a case but for what all families have in common, from a random generator.
    news : sequence
        Of which sequences take the numbers of their new tokens.
    keys : sequence of int
        Most keys of a sequence.
    edges : sequence of int
        Lengths whose multiples are worth meeting: tiles and pages.
    splits : bool
        Whether the size of splits is an option.
    forced : (module, name, value) or None
        A switch of a backend's module that chooses the kernel.
    """

    backend: str
    draw: Callable[[random.Random], Fields]
    news: Sequence[Sequence[int]]
    keys: Sequence[int]
    edges: Sequence[int] = (16, 64, 128)
    splits: bool = False
    forced: tuple[str, str, bool] | None = None


PLAIN: Fields = {}
INT8: Fields = {"cache": "int8", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
INT8_CHANNELS: Fields = {"cache": "int8", "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"}
FP8: Fields = {"cache": "float8e4m3fn", "k_quant": "PER_TENSOR", "v_quant": "PER_TENSOR"}
FP8_CHANNELS: Fields = {"cache": "float8e4m3fn", "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"}
INT4: Fields = {"cache": "int4", "k_quant": "PER_CHANNEL", "v_quant": "PER_TENSOR"}

SOFTCAP: Fields = {"softcap": 3.0}
SINK: Fields = {"sink": True}
NONCAUSAL: Fields = {"is_causal": False}
POSITIONS: tuple[Fields, ...] = ({"positions": "tree"}, {"positions": "ahead"})
BIASES: tuple[Fields, ...] = tuple({"bias": bias} for bias in ("1H", "11", "BH", "B1"))
RULES = (SOFTCAP, *POSITIONS, *BIASES)


def latent(rng: random.Random, heads: Sequence[int], caches: Sequence[Fields]) -> Fields:
    fixed = {"mode": "latent", "kv_num_heads": 1, "head_size": 576, "v_head_size": 512, "scale": 0.07}
    rules = rng.choice([PLAIN, PLAIN, rng.choice(RULES)])
    return {
        **fixed,
        **rng.choice(caches),
        **rules,
        "v_quant": "NONE",
        "io": rng.choice(["float16", "bfloat16"]),
        "group_size": rng.choice(heads),
        "is_causal": rng.random() < 0.7,
    }


def separate(
    rng: random.Random, types: Sequence[Fields], heads: Sequence[tuple[int, int]], rules: Sequence[Fields]
) -> Fields:
    kv_num_heads, group_size = rng.choice(heads)
    mode = rng.choice(["separate", "separate", "packed"])
    return {
        **rng.choice(types),
        **rng.choice([PLAIN, PLAIN, *rules]),
        "kv_num_heads": kv_num_heads,
        "group_size": group_size,
        "mode": mode,
    }


SINGLE, FEW, CHUNKS = (
    (1, 1, 1, 0),
    (1, 2, 3, 4, 0),
    ((1, 2, 5), (17, 64, 65, 128, 3), (130, 1, 0, 33), (200, 1), (128,)),
)
HEADS = ((1, 8), (2, 4), (2, 1), (3, 2), (2, 7), (1, 3), (2, 16))

FAMILIES = {
    "latent rows": Family(
        "latent",
        lambda rng: latent(rng, (1, 5, 8, 10), [PLAIN]),
        (SINGLE, (1, 2, 3)),
        (300, 700, 1300),
        (32, 64, 336, 672),
        splits=True,
    ),
    "latent heads": Family(
        "latent",
        lambda rng: latent(rng, (12, 16, 17, 24, 32), [PLAIN]),
        (SINGLE,),
        (300, 700, 1300),
        (32, 64, 336, 672),
        splits=True,
    ),
    "latent codes": Family(
        "latent",
        lambda rng: latent(rng, (16, 32, 40, 64, 71, 128), [INT8, INT8_CHANNELS, FP8, FP8, FP8_CHANNELS]),
        (SINGLE, FEW, (2,)),
        (200, 700),
        (32, 64, 336, 672),
        splits=True,
    ),
    "latent tiles": Family(
        "latent",
        lambda rng: latent(rng, (33, 40, 48, 64, 128, 128), [PLAIN]),
        (SINGLE, (1, 2, 3, 0), (3,)),
        (200, 700),
        (32, 64, 336, 672),
        splits=True,
    ),
    "latent sm80": Family(
        "latent",
        lambda rng: latent(rng, (4, 16, 24), [PLAIN, PLAIN, INT8]),
        (SINGLE, (1, 3, 0), (17, 40)),
        (300, 700),
        splits=True,
        forced=("latent_mla", "FORCE_SM80", True),
    ),
    "flash": Family(
        "flash",
        lambda rng: separate(
            rng,
            [
                {"io": "float16", "head_size": 128},
                *({"io": "bfloat16", "head_size": 128, **cache} for cache in (PLAIN, INT8)),
                *({"io": "bfloat16", "head_size": 64, **cache} for cache in (PLAIN, FP8, FP8_CHANNELS)),
            ],
            HEADS,
            [SOFTCAP, SINK, NONCAUSAL, *POSITIONS, *BIASES],
        ),
        CHUNKS,
        (150, 400, 900),
        (16, 32, 64, 128, 192),
    ),
    "flash sm80": Family(
        "flash",
        lambda rng: separate(
            rng,
            [{"io": "float16", "head_size": 80}, {"io": "float16", "head_size": 64, **INT4}],
            HEADS,
            [SOFTCAP, SINK, NONCAUSAL, *POSITIONS, *BIASES],
        ),
        CHUNKS,
        (150, 400, 900),
        forced=("flash_prefill", "FORCE_SM80", True),
    ),
    "decode": Family(
        "decode",
        lambda rng: separate(
            rng,
            [
                {"io": "float16", "head_size": 128},
                {"io": "bfloat16", "head_size": 128, **FP8},
                {"io": "bfloat16", "head_size": 64, **INT8_CHANNELS},
                {"io": "float16", "head_size": 64, **INT4},
            ],
            ((1, 8), (2, 4), (3, 2), (2, 7)),
            [SOFTCAP, SINK],
        ),
        (SINGLE, FEW),
        (300, 700, 1500),
        (16, 64, 128, 256),
        splits=True,
        forced=("decode_split_kv", "FORCE_HEADS", False),
    ),
    "decode all heads": Family(
        "decode",
        lambda rng: separate(
            rng,
            [
                {"head_size": 128, **types}
                for types in ({}, {"io": "bfloat16"}, INT8, FP8, INT4, {"io": "bfloat16", **INT8_CHANNELS})
            ],
            ((8, 2), (8, 4), (16, 1)),
            [SOFTCAP, SINK],
        ),
        (SINGLE, (1,)),
        (300, 700, 1500),
        (16, 64, 128, 256),
        splits=True,
        forced=("decode_split_kv", "FORCE_HEADS", True),
    ),
    "dense": Family(
        "dense",
        lambda rng: separate(
            rng,
            [{"io": "float16", "head_size": 64}, {"io": "float16", "head_size": 64, **INT8}],
            ((2, 1), (2, 3), (2, 4)),
            [SINK, {"bias": "BH"}],
        ),
        (SINGLE, (1, 3, 0), (17, 40)),
        (700,),
        (32, 64, 128),
    ),
}


def random_problem(family: str, seed: int) -> RandomProblem:
    """The problem of a family and a seed: always the same."""
    rng, kind = random.Random(f"{family} {seed}"), FAMILIES[family]
    fields = kind.draw(rng)
    most, news = rng.choice(kind.keys), rng.choice(kind.news)
    if fields["group_size"] > 40:
        most = min(most, 700)
    lengths = random_lengths(rng, rng.randint(1, 5), most, news, kind.edges)
    fewer = random_part(rng, lengths)
    tokens = max(1, sum(new for _, new in lengths))
    if max(news) > 1:
        tokens += rng.choice([0, 0, 3])
    fields |= {
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
