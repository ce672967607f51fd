"""Runs a family's model twice: unmodified, and packed and paged with `paged_attention` in place of its attention.

The paged run replaces each layer's attention module by one that keeps its projections and hands the rows to the
operator before any norm or rotation of queries and keys. Three sequences of different lengths share a pool of blocks
in shuffled order; whatever has not been written holds NaN.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers

import pagedattn
from pagedattn import codec
from pagedattn.dtypes import BY_NAME

from .families import FAMILIES, Family, Settings, model_of

BLOCK_SIZE = 16
DECODE_STEPS = 4
Change = Callable[[Settings], None]


@dataclass(frozen=True)
class Place:
    """Where and in which type a paged run computes."""

    device: str = "cpu"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.device}-{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


CPU = Place()
# How a model of transformers takes its cache: `cache`, or `past_key_values` in releases before 5.24.
_PARAMETERS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = next(name for name in ("cache", "past_key_values") if name in _PARAMETERS)


# ---- schedules: new tokens of each sequence, step by step --------------------------------------------------------


def whole_prompts(prompts: Sequence[int]) -> list[list[int]]:
    """A ragged prefill, then decode steps."""
    return [list(prompts)] + [[1] * len(prompts)] * DECODE_STEPS


def chunked_prompts(prompts: Sequence[int], chunk: int = 9) -> list[list[int]]:
    """Prompts in chunks. A sequence decodes while others still read theirs; one that is done has no tokens."""
    rows = []
    for prompt in prompts:
        chunks = [chunk] * (prompt // chunk) + [prompt % chunk] * (prompt % chunk > 0)
        rows.append(chunks + [1] * DECODE_STEPS)
    steps = max(map(len, rows))
    return [list(step) for step in zip(*(row + [0] * (steps - len(row)) for row in rows), strict=True)]


@cache
def sequences_of(name: str) -> list[list[int]]:
    """Tokens of the test batch, prompts and what the decode steps are fed."""
    rng = np.random.default_rng(2)
    return [rng.integers(3, 101, prompt + DECODE_STEPS).tolist() for prompt in FAMILIES[name].prompts]


# ---- the unmodified model ----------------------------------------------------------------------------------------


@dataclass
class Reference:
    """One sequence through the unmodified model: logits (S, vocab), and each layer's cache, (heads, S, width)."""

    logits: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class RoundedCache(transformers.DynamicCache):
    """A cache that gives back what a quantized cache would: each value rounded to its code."""

    def __init__(self, formats: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.formats = formats

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key_format, value_format = self.formats[layer_idx]
        return super().update(key_format(keys), value_format(values), layer_idx, *args, **kwargs)


@torch.no_grad()
def reference(model: Any, tokens: Sequence[int], cache: Any = None) -> Reference:
    """One forward of one sequence, with every layer's cache kept whole."""
    cache = transformers.DynamicCache() if cache is None else cache
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    logits = model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits[0]
    layers = cache.layers
    return Reference(logits.float().cpu(), [x.keys[0] for x in layers], [x.values[0] for x in layers])


@cache
def references(name: str) -> list[Reference]:
    """References of the test batch, float32 on the CPU."""
    return [reference(model_of(name), tokens) for tokens in sequences_of(name)]


# ---- the paged run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quantization:
    """A quantized cache: its type, and k_scale and v_scale of each layer (None for the value cache in LATENT)."""

    dtype: str
    scales: list[tuple[Any, Any]]

    def attributes(self, layer: int) -> dict[str, Any]:
        names = ("k", "v")
        return {
            f"{name}_quant_type": "PER_TENSOR" if scale.ndim == 1 else "PER_CHANNEL"
            for name, scale in zip(names, self.scales[layer], strict=True)
            if scale is not None
        }

    def inputs(self, layer: int, device: str) -> dict[str, Any]:
        return {
            f"{name}_scale": torch.from_numpy(scale).to(device)
            for name, scale in zip(("k", "v"), self.scales[layer], strict=True)
            if scale is not None
        }


class PagedSelfAttention(torch.nn.Module):
    """A layer's attention module with the operator inside."""

    def __init__(self, family: Family, module: Any, settings: Settings, run: PagedRun) -> None:
        super().__init__()
        self.family, self.module, self.settings, self.run = family, module, settings, run
        config = module.config
        if family.projections == "latent":
            heads, head_size = 1, config.kv_lora_rank + config.qk_rope_head_dim
            self.absorbed = pagedattn.absorb(
                module.kv_b_proj.weight,
                num_heads=config.num_attention_heads,
                qk_nope_head_dim=config.qk_nope_head_dim,
                v_head_dim=config.v_head_dim,
            )
        else:
            heads, head_size = config.num_key_value_heads, module.head_dim
        self.key_cache = run.allocate(heads, head_size)
        self.value_cache = None if family.projections == "latent" else run.allocate(heads, head_size)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        query, key, value = getattr(self, self.family.projections)(hidden_states[0])
        output = pagedattn.paged_attention(
            query,
            key,
            value,
            self.key_cache,
            self.value_cache,
            **self.run.batch,
            **self.settings.inputs,
            **self.settings.attributes,
        ).output
        if self.family.projections == "latent":
            output = self.absorbed.output(output)
        return self.module.o_proj(output)[None], None

    def separate(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        return self.module.q_proj(x), self.module.k_proj(x), self.module.v_proj(x)

    def normalised(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        query, key, value = self.separate(x)
        return self.module.q_norm(query), self.module.k_norm(key), value

    def packed(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        return self.module.qkv_proj(x), None, None

    def latent(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        module, config = self.module, self.module.config
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
        query = query.view(len(x), config.num_attention_heads, -1)
        q_nope, q_rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        row = torch.cat([module.kv_a_layernorm(latent), k_rope], dim=-1)
        return self.absorbed.query(q_nope, q_rope), row, None


class PagedRun:
    """A batch of sequences on one model, its blocks and lengths, step by step.

    Parameters
    ----------
    name : str
        Family.
    place : Place
    quantization : Quantization, optional
    change : callable, optional
        Applied to every layer's settings: how a trap is set.
    """

    def __init__(
        self,
        name: str,
        place: Place = CPU,
        quantization: Quantization | None = None,
        change: Change | None = None,
    ) -> None:
        self.family, self.place, self.quantization = FAMILIES[name], place, quantization
        self.tokens = sequences_of(name)
        self.past = [0] * len(self.tokens)
        longest = max(map(len, self.tokens))
        per_sequence = -(-longest // BLOCK_SIZE)
        self.num_blocks = len(self.tokens) * per_sequence + 3
        ids = np.random.default_rng(3).permutation(self.num_blocks)[: len(self.tokens) * per_sequence]
        self.block_table = ids.astype(np.int32).reshape(len(self.tokens), per_sequence)
        self.model = placed(name, place)
        self.layers: list[PagedSelfAttention] = []
        for index, layer in enumerate(self.model.model.layers):
            settings = self.family.settings(self.model.config, layer.self_attn, longest)
            settings.inputs = {
                key: x.detach().to(place.device, place.torch_dtype) for key, x in settings.inputs.items()
            }
            if quantization is not None:
                settings.attributes |= quantization.attributes(index)
                settings.inputs |= quantization.inputs(index, place.device)
            if change is not None:
                change(settings)
            self.layers.append(PagedSelfAttention(self.family, layer.self_attn, settings, self))

    def allocate(self, heads: int, head_size: int) -> torch.Tensor:
        """A pool of blocks filled with NaN, or with the largest code."""
        shape = (self.num_blocks, BLOCK_SIZE, heads, head_size)
        if self.quantization is None:
            return torch.full(shape, torch.nan, dtype=self.place.torch_dtype, device=self.place.device)
        name = {"int8": "int8", "float8e4m3fn": "float8_e4m3fn"}[self.quantization.dtype]
        return torch.full(shape, 127, dtype=torch.uint8, device=self.place.device).view(getattr(torch, name))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the paged modules into the model, and the originals back at exit."""
        try:
            for layer, paged in zip(self.model.model.layers, self.layers, strict=True):
                layer.self_attn = paged
            yield
        finally:
            for layer, paged in zip(self.model.model.layers, self.layers, strict=True):
                layer.self_attn = paged.module

    @torch.no_grad()
    def step(self, counts: Sequence[int]) -> list[torch.Tensor]:
        """Run the next tokens of each sequence; return their logits, (count, vocab) each."""
        device = self.place.device
        new = [tokens[past : past + count] for tokens, past, count in zip(self.tokens, self.past, counts, strict=True)]
        positions = [past + i for past, count in zip(self.past, counts, strict=True) for i in range(count)]
        cumulative = torch.from_numpy(pagedattn.cumulative_lengths(counts))
        self.batch = {
            "cumulative_sequence_length": cumulative.to(device),
            "past_seqlens": torch.tensor(self.past, dtype=torch.int32, device=device),
            "block_table": torch.from_numpy(self.block_table).to(device),
        }
        with self.installed():
            logits = self.model(
                input_ids=torch.tensor([list(chain(*new))], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
            ).logits[0]
        self.past = [past + count for past, count in zip(self.past, counts, strict=True)]
        return list(logits.float().cpu().split(list(counts)))

    def run(self, schedule: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Run a schedule; return each sequence's logits, (S, vocab)."""
        return [torch.cat(parts) for parts in zip(*map(self.step, schedule), strict=True)]

    def rows(self, layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Key and value rows of one sequence in the order of its positions, (S, heads, width)."""
        slots = pagedattn.slot_mapping([0, self.past[sequence]], [0], self.block_table[[sequence]], BLOCK_SIZE)
        caches = (self.layers[layer].key_cache, self.layers[layer].value_cache)
        keys, values = (None if x is None else x.flatten(0, 1)[torch.from_numpy(slots).to(x.device)] for x in caches)
        return keys, values


@cache
def placed(name: str, place: Place) -> Any:
    """The family's model in a type and on a device."""
    if place == CPU:
        return model_of(name)
    return copy.deepcopy(model_of(name)).to(place.device, place.torch_dtype)


# ---- caches ------------------------------------------------------------------------------------------------------


def cache_rows(name: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows (S, heads, width) as the operator stores them from what transformers caches, (heads, S, width)."""
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if FAMILIES[name].projections != "latent":
        return keys, values
    if name == "deepseek_v3":  # rotated pairs are cached as [evens | odds]; the operator leaves them in place
        values = values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([keys, values], dim=-1), None


def quantize(name: str, dtype: str, quant_type: str) -> tuple[Quantization, list[pagedattn.Calibration]]:
    """Calibrate each layer's scales on the unmodified model's caches."""
    scales, reports = [], []
    for layer in range(len(references(name)[0].keys)):
        rows = [cache_rows(name, x.keys[layer], x.values[layer]) for x in references(name)]
        results = [
            pagedattn.calibrate(torch.cat(parts), dtype, quant_type) if parts[0] is not None else None
            for parts in zip(*rows, strict=True)
        ]
        scales.append(tuple(None if x is None else x.scale for x in results))
        reports += [x for x in results if x is not None]
    return Quantization(dtype, scales), reports


def rounded_reference(name: str, quantization: Quantization, place: Place = CPU) -> list[torch.Tensor]:
    """Logits of the unmodified model with the same rounding applied in its own cache."""
    return rounded_logits(name, placed(name, place), quantization)


def rounded_logits(name: str, model: Any, quantization: Quantization) -> list[torch.Tensor]:
    """Logits of a model of the family whose cache gives back rounded values."""
    row = BY_NAME[quantization.dtype]

    def rounding(scale: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rounding of (1, heads, S, width); scale (1,) or (heads, 1, width)."""

        def through_codes(x: torch.Tensor) -> torch.Tensor:
            codes = codec.encode(x.float().cpu().numpy(), row, scale)
            return torch.from_numpy(codec.decode(codes, row, scale)).to(x)

        return through_codes

    formats = []
    for k_scale, v_scale in quantization.scales:
        if v_scale is None:  # one row, which transformers keeps in two pieces
            rank = FAMILIES[name].config["kv_lora_rank"]
            k_scale, v_scale = (k_scale, k_scale) if k_scale.ndim == 1 else (k_scale[..., :rank], k_scale[..., rank:])
            if name == "deepseek_v3" and v_scale.ndim == 3:
                v_scale = np.concatenate([v_scale[..., ::2], v_scale[..., 1::2]], -1)
        formats.append((rounding(k_scale), rounding(v_scale)))
    return [reference(model, tokens, RoundedCache(formats)).logits for tokens in sequences_of(name)]


# ---- comparisons -------------------------------------------------------------------------------------------------


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest difference of two lists of logits; NaN counts as infinite."""
    largest = float((torch.cat(list(got)) - torch.cat(list(want))).abs().max())
    return largest if largest == largest else float("inf")


def relative_error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Root mean square of the difference over that of ``want``."""
    expected = torch.cat(list(want))
    return float((torch.cat(list(got)) - expected).norm() / expected.norm())


def excess(got: Sequence[torch.Tensor], naive: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Error of ``got`` over what is allowed, for the largest and for the root mean square of the differences.

    Allowed is twice the error of ``naive``, which is the unmodified model in the same type, plus the type's rounding.
    """
    rounding = float(torch.cat(list(exact)).abs().max()) * torch.finfo(torch.bfloat16).eps
    largest = difference(got, exact) / (2 * difference(naive, exact) + rounding)
    mean_square = relative_error(got, exact) / (2 * relative_error(naive, exact) + torch.finfo(torch.bfloat16).eps)
    return max(largest, mean_square)


def rounded_weights_logits(name: str, place: Place, quantization: Quantization | None = None) -> list[torch.Tensor]:
    """Logits in float32 of the model whose weights are rounded to the type of ``place``."""
    model = copy.deepcopy(model_of(name)).to(place.torch_dtype).float()
    if quantization is not None:
        return rounded_logits(name, model, quantization)
    return [reference(model, tokens).logits for tokens in sequences_of(name)]


def logits_of(name: str) -> list[torch.Tensor]:
    """Logits of the unmodified model for the test batch."""
    return [x.logits for x in references(name)]


def spread(name: str) -> float:
    """Largest logit of the test batch, against which differences are small or large."""
    return max(float(x.abs().max()) for x in logits_of(name))
