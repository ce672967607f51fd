"""cos_cache and sin_cache for every common kind of rotary position embedding.

Each function gives the frequencies of one kind as a `Rope`; `Rope.caches` turns them into the operator's two inputs::

    cos_cache, sin_cache = rope.yarn(64, factor=40, original_max_position_embeddings=4096).caches(8192, "bfloat16")

`from_parameters` reads the ``rope_parameters`` (formerly ``rope_scaling``) of a Hugging Face config. Everything is
computed in float64 and rounded once. The tables are NumPy arrays; ``cupy.asarray`` and ``torch.from_numpy`` take them.

For all kinds ``rotary_dim`` is the even number of channels that are rotated, and ``theta`` the base, above 0.
Parameters that are out of range raise an `InvalidArgumentError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedattn.dtypes import BFLOAT16, FLOAT16, FLOAT32
from pagedattn.errors import InvalidArgumentError

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Rope", "default", "dynamic_ntk", "from_parameters", "linear", "llama3", "longrope", "yarn", "yarn_mscale"]

_DTYPES = {dtype.name: dtype.numpy for dtype in (FLOAT16, BFLOAT16, FLOAT32)}


class Rope(NamedTuple):
    """Frequencies of one rotary embedding.

    Attributes
    ----------
    inverse_frequencies : (rotary_dim / 2,), float64
        Angle by which channel pair i turns from one position to the next.
    attention_factor : float
        Factor of cosines and sines, by which YaRN and LongRoPE change the scores.
    """

    inverse_frequencies: Array
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Channels rotated."""
        return 2 * self.inverse_frequencies.size

    def caches(self, max_seq_len: int, dtype: str = "float32") -> tuple[Array, Array]:
        """Tables for positions [0, max_seq_len).

        Parameters
        ----------
        max_seq_len : int
        dtype : str
            Element type T of the call: "float16", "bfloat16" or "float32".

        Returns
        -------
        cos_cache, sin_cache : (max_seq_len, rotary_dim / 2), of that type

        Raises
        ------
        InvalidArgumentError
            ``dtype`` is none of these.
        """
        if dtype not in _DTYPES:
            raise InvalidArgumentError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}.")
        angles = np.arange(max_seq_len)[:, None] * self.inverse_frequencies
        cos, sin = (self.attention_factor * table for table in (np.cos(angles), np.sin(angles)))
        return cos.astype(_DTYPES[dtype]), sin.astype(_DTYPES[dtype])


def default(rotary_dim: int, theta: float = 10000.0) -> Rope:
    """The original: pair i turns by ``theta ** (-2i / rotary_dim)`` (Su et al., RoFormer, 2021).

    Parameters
    ----------
    rotary_dim : int
        Channels rotated; even.
    theta : float
        The base.

    Raises
    ------
    InvalidArgumentError
        One of them is out of range.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise InvalidArgumentError(f"rotary_dim: expected an even number > 0, got {rotary_dim}.")
    _positive("theta", theta)
    return Rope(theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim))


def linear(rotary_dim: int, theta: float = 10000.0, *, factor: float) -> Rope:
    """Position interpolation: every position is divided by ``factor`` (Chen et al., 2023)."""
    _positive("factor", factor)
    return Rope(default(rotary_dim, theta).inverse_frequencies / factor)


def dynamic_ntk(
    rotary_dim: int, theta: float = 10000.0, *, factor: float, max_position_embeddings: int, length: int
) -> Rope:
    """Dynamic NTK scaling: a base that grows with the sequence.

    Parameters
    ----------
    factor : float
    max_position_embeddings : int
        Length up to which nothing changes.
    length : int
        Length of the sequence. The table holds for this length only: keys cached under another one do not fit it.
    """
    _positive("max_position_embeddings", max_position_embeddings)
    if rotary_dim <= 2:
        raise InvalidArgumentError(f"rotary_dim: expected more than 2 channels, got {rotary_dim}.")
    stretch = factor * max(length, max_position_embeddings) / max_position_embeddings - (factor - 1)
    return default(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2)))


def yarn(
    rotary_dim: int,
    theta: float = 10000.0,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> Rope:
    """YaRN: fast pairs stay, slow pairs are interpolated, with a ramp between (Peng et al., 2023).

    Parameters
    ----------
    factor : float
        Stretch of the context.
    original_max_position_embeddings : int
        Length of the original context; it decides which pairs are fast.
    beta_fast, beta_slow : float
        Turns within the original context above which a pair stays as it is, and below which it is interpolated whole.
    mscale, mscale_all_dim : float, optional
        DeepSeek's form: the attention factor is ``yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)``,
        and the rest of it goes into the operator's ``scale``; see `pagedattn.mla.softmax_scale`.
    attention_factor : float, optional
        The factor itself; by default ``yarn_mscale(factor)``, or of mscale and mscale_all_dim when both are given.
    truncate : bool
        Begin and end the ramp at whole pairs. GPT-OSS does not.
    """
    _positive("factor", factor)
    _positive("original_max_position_embeddings", original_max_position_embeddings)
    if theta == 1:
        raise InvalidArgumentError("theta: expected a base other than 1, by which no pair turns slower than another.")

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if attention_factor is None:
        attention_factor = yarn_mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    kept = default(rotary_dim, theta).inverse_frequencies
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return Rope(kept * (1 - ramp) + kept / factor * ramp, attention_factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: ``0.1 * mscale * ln(factor) + 1``, and 1 for a factor up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope(
    rotary_dim: int,
    theta: float = 10000.0,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    length: int,
    factor: float | None = None,
    attention_factor: float | None = None,
) -> Rope:
    """LongRoPE: each pair has its own divisor, one for short and one for long sequences (Ding et al., 2024).

    Parameters
    ----------
    short_factor, long_factor : sequence of rotary_dim / 2 float
    original_max_position_embeddings : int
        Longest sequence that takes ``short_factor``.
    length : int
        Length of the sequence. One table serves all of its positions, so a sequence that grows past the limit needs
        the other table and its cached keys anew, and short and long sequences cannot share a call with do_rotary = 1.
    factor : float, optional
        Stretch of the context, from which the attention factor follows: max_position_embeddings /
        original_max_position_embeddings.
    attention_factor : float, optional
        The factor itself; by default ``sqrt(1 + ln(factor) / ln(original_max_position_embeddings))``.
    """
    divisors = np.asarray(long_factor if length > original_max_position_embeddings else short_factor, np.float64)
    if divisors.shape != (rotary_dim // 2,):
        raise InvalidArgumentError(
            f"short_factor, long_factor: expected rotary_dim / 2 = {rotary_dim // 2} divisors, got {divisors.size}."
        )
    if not (divisors > 0).all():
        raise InvalidArgumentError(f"short_factor, long_factor: expected divisors > 0, got {divisors.min()}.")
    if original_max_position_embeddings <= 1:
        raise InvalidArgumentError(
            f"original_max_position_embeddings: expected a length > 1, got {original_max_position_embeddings}."
        )
    if attention_factor is None:
        if factor is None:
            raise InvalidArgumentError("factor: required when attention_factor is not given, got none.")
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings)) if factor > 1 else 1.0
        )
    return Rope(default(rotary_dim, theta).inverse_frequencies / divisors, attention_factor)


def llama3(
    rotary_dim: int,
    theta: float = 500000.0,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Rope:
    """Llama 3.1: pairs that turn often stay, pairs that turn seldom are interpolated, with a ramp between.

    Parameters
    ----------
    factor : float
        Divisor of the slow pairs.
    low_freq_factor, high_freq_factor : float
        Turns within the original context up to which a pair is divided, and from which on it stays.
    original_max_position_embeddings : int
        Length of the original context.
    """
    _positive("factor", factor)
    if not low_freq_factor < high_freq_factor:
        raise InvalidArgumentError(
            f"high_freq_factor: expected a value above low_freq_factor = {low_freq_factor}, got {high_freq_factor}."
        )
    kept = default(rotary_dim, theta).inverse_frequencies
    turns = original_max_position_embeddings * kept / (2 * math.pi)
    share = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return Rope(share * kept + (1 - share) * kept / factor)


def from_parameters(
    parameters: Mapping[str, Any],
    head_size: int,
    *,
    max_position_embeddings: int | None = None,
    length: int | None = None,
) -> Rope:
    """Frequencies of a Hugging Face config.

    Parameters
    ----------
    parameters : mapping
        ``config.rope_parameters``, of one layer type where there are several (Gemma 3); keys as there. Without
        ``rope_theta`` the base is 10000.
    head_size : int
        ``config.head_dim``, or ``qk_rope_head_dim`` in MLA; ``partial_rotary_factor`` is applied to it.
    max_position_embeddings : int, optional
        ``config.max_position_embeddings``: needed by "dynamic", and by "yarn" and "longrope" without a factor.
    length : int, optional
        Length of the sequence, for "dynamic" and "longrope"; by default a short one.

    Raises
    ------
    InvalidArgumentError
        The type is unknown, or lacks a parameter that it cannot do without.
    """
    given = dict(parameters)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    theta = float(given.get("rope_theta") or 10000.0)
    rotary_dim = int(head_size * (given.get("partial_rotary_factor") or 1.0))
    original = given.get("original_max_position_embeddings") or max_position_embeddings

    def stretch() -> float:
        if given.get("factor") is not None:
            return float(given["factor"])
        longest = float(_required("max_position_embeddings", max_position_embeddings))
        return longest / float(_required("original_max_position_embeddings", original))

    def take(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if given.get(name) is not None}

    def need(*names: str) -> dict[str, Any]:
        return {name: _required(name, given.get(name)) for name in names}

    if kind == "default":
        return default(rotary_dim, theta)
    if kind == "linear":
        return linear(rotary_dim, theta, **need("factor"))
    if kind == "dynamic":
        limit = int(_required("max_position_embeddings", max_position_embeddings))
        return dynamic_ntk(rotary_dim, theta, max_position_embeddings=limit, length=length or limit, **need("factor"))
    if kind == "yarn":
        optional = take("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
        limit = int(_required("original_max_position_embeddings", original))
        return yarn(rotary_dim, theta, factor=stretch(), original_max_position_embeddings=limit, **optional)
    if kind in ("longrope", "su"):
        limit = int(_required("original_max_position_embeddings", original))
        return longrope(
            rotary_dim,
            theta,
            original_max_position_embeddings=limit,
            length=length or 0,
            factor=stretch(),
            **need("short_factor", "long_factor"),
            **take("attention_factor"),
        )
    if kind == "llama3":
        return llama3(
            rotary_dim,
            theta,
            **need("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        )
    raise InvalidArgumentError(
        f"rope_type: expected one of default, linear, dynamic, yarn, longrope, llama3, got {kind!r}."
    )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidArgumentError(f"{name}: expected a finite value > 0, got {value}.")


def _required(name: str, value: Any) -> Any:
    if value is None:
        raise InvalidArgumentError(f"{name}: required by this rope_type, got none.")
    return value
