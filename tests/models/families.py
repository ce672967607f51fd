"""Model families: a tiny random model of each, and what each of its layers tells the operator.

`Family.settings` is the recipe of docs/models.md as code: it reads the config and the layer's weights, as a user would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

from pagedattn import mla, rope


@dataclass
class Settings:
    """What one layer passes to `paged_attention` besides its rows, its cache and the batch."""

    attributes: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes
    ----------
    projections : str
        "separate" (q_proj, k_proj, v_proj), "normalised" (a norm over the whole projection follows), "packed"
        (qkv_proj) or "latent" (MLA, absorbed).
    settings : callable of (config, attention module, length)
        ``length`` is that of the longest sequence, on which LongRoPE depends.
    prompts : tuple of int
        Lengths of the three sequences of the test batch.
    """

    name: str
    stem: str
    config: dict[str, Any]
    settings: Callable[[Any, Any, int], Settings]
    projections: str = "separate"
    prompts: tuple[int, ...] = (21, 1, 34)

    def __str__(self) -> str:
        return self.name


# ---- settings ----------------------------------------------------------------------------------------------------


def tables(config: Any, parameters: dict[str, Any], head_size: int, length: int) -> dict[str, Any]:
    """cos_cache and sin_cache for the positions of the tests."""
    frequencies = rope.from_parameters(
        parameters, head_size, max_position_embeddings=config.max_position_embeddings, length=length
    )
    return dict(zip(("cos_cache", "sin_cache"), map(torch.from_numpy, frequencies.caches(64)), strict=True))


def window(config: Any, attention: Any) -> int:
    """The config's window, unchanged, on the layers that have one."""
    layer_types = getattr(config, "layer_types", None)
    sliding = layer_types is None or layer_types[attention.layer_idx] == "sliding_attention"
    return int(getattr(config, "sliding_window", None) or -1) if sliding else -1


def common(config: Any, attention: Any, length: int) -> Settings:
    """Llama, and what every family without MLA shares with it."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Settings(
        {
            "num_heads": config.num_attention_heads,
            "kv_num_heads": config.num_key_value_heads,
            "scale": head_size**-0.5,
            "do_rotary": 1,
            "local_window_size": window(config, attention),
        },
        tables(config, config.rope_parameters, head_size, length),
    )


def qwen3(config: Any, attention: Any, length: int) -> Settings:
    settings = common(config, attention, length)
    settings.attributes["qk_norm_epsilon"] = config.rms_norm_eps
    settings.inputs |= {"q_norm_weight": attention.q_norm.weight, "k_norm_weight": attention.k_norm.weight}
    return settings


def gemma2(config: Any, attention: Any, length: int) -> Settings:
    settings = common(config, attention, length)
    settings.attributes["scale"] = config.query_pre_attn_scalar**-0.5
    settings.attributes["softcap"] = config.attn_logit_softcapping
    return settings


def gemma3(config: Any, attention: Any, length: int) -> Settings:
    layer_type = config.layer_types[attention.layer_idx]
    return Settings(
        {
            "num_heads": config.num_attention_heads,
            "kv_num_heads": config.num_key_value_heads,
            "scale": config.query_pre_attn_scalar**-0.5,
            "do_rotary": 1,
            "local_window_size": window(config, attention),
            "qk_norm_epsilon": config.rms_norm_eps,
        },
        {
            **tables(config, config.rope_parameters[layer_type], config.head_dim, length),
            "q_norm_weight": 1 + attention.q_norm.weight,
            "k_norm_weight": 1 + attention.k_norm.weight,
        },
    )


def gpt_oss(config: Any, attention: Any, length: int) -> Settings:
    settings = common(config, attention, length)
    settings.inputs["head_sink"] = attention.sinks
    return settings


def smollm3(config: Any, attention: Any, length: int) -> Settings:
    settings = common(config, attention, length)
    settings.attributes["do_rotary"] = config.no_rope_layers[attention.layer_idx]  # 1 says: with RoPE
    return settings


def deepseek(config: Any, attention: Any, length: int) -> Settings:
    parameters = config.rope_parameters
    return Settings(
        {
            "num_heads": config.num_attention_heads,
            "kv_num_heads": 1,
            "kv_cache_layout": "LATENT",
            "v_head_size": config.kv_lora_rank,
            "scale": mla.softmax_scale(
                config.qk_nope_head_dim + config.qk_rope_head_dim,
                factor=parameters["factor"],
                mscale_all_dim=parameters["mscale_all_dim"],
            ),
            "do_rotary": 1,
            "rotary_offset": config.kv_lora_rank,
            "rotary_interleaved": int(getattr(config, "rope_interleave", True)),
        },
        tables(config, parameters, config.qk_rope_head_dim, length),
    )


# ---- tiny models -------------------------------------------------------------------------------------------------
# hidden_size differs from num_heads * head_dim wherever the architecture allows, so that head_dim must be read.

BASE = {
    "vocab_size": 101,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}
SMALL = {**BASE, "hidden_size": 48, "head_dim": 16}
ALTERNATING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
MLA = {
    **BASE,
    "hidden_size": 48,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    # All layers dense: a tie in a router would turn a difference of 1e-6 into a jump.
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def phi3(limit: int) -> dict[str, Any]:
    """A config that switches from short to long factors above ``limit`` tokens."""
    return {
        **BASE,
        "hidden_size": 128,
        "sliding_window": 11,
        "original_max_position_embeddings": limit,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
            "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0, 14.0],
            "original_max_position_embeddings": limit,
        },
    }


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "Llama", {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, common),
        Family("mistral", "Mistral", {**SMALL, "sliding_window": 7}, common),
        Family("qwen3", "Qwen3", {**SMALL, **ALTERNATING, "use_sliding_window": True}, qwen3),
        Family(
            "gemma2",
            "Gemma2",
            {**SMALL, **ALTERNATING, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 4.0},
            gemma2,
        ),
        Family(
            "gemma3",
            "Gemma3",
            {
                **SMALL,
                **ALTERNATING,
                "query_pre_attn_scalar": 40,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                },
            },
            gemma3,
        ),
        Family(
            "gpt_oss",
            "GptOss",
            {
                **SMALL,
                **ALTERNATING,
                "num_local_experts": 2,
                "num_experts_per_tok": 2,
                "rope_parameters": {**YARN, "truncate": False},
            },
            gpt_oss,
        ),
        Family("phi3", "Phi3", phi3(limit=64), common, "packed"),
        Family("phi3_long", "Phi3", phi3(limit=16), common, "packed", prompts=(21, 17, 34)),
        Family(
            "deepseek_v2",
            "DeepseekV2",
            {**MLA, "topk_method": "greedy", "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
            deepseek,
            "latent",
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3",
            # mscale differs from mscale_all_dim, so that the tables carry an attention factor beside that in scale.
            {**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
            deepseek,
            "latent",
        ),
        Family("smollm3", "SmolLM3", {**SMALL, "no_rope_layers": [1, 0]}, smollm3),
        Family("olmo2", "Olmo2", SMALL, common, "normalised"),
    )
}


@cache
def model_of(name: str) -> Any:
    """The family's model with random weights: float32 on the CPU, eager attention."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.stem}TextConfig", None) or getattr(transformers, f"{family.stem}Config")
    model_class = getattr(transformers, f"{family.stem}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config(**family.config, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # larger than the default 0.02, so that attention matters
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight += 0.3 * noise
            elif name.endswith("sinks"):
                weight.copy_(2 * noise)
            elif weight.ndim >= 2 and "embed" not in name:
                weight.copy_(1.3 * noise / weight.shape[-1] ** 0.5)
    return model
