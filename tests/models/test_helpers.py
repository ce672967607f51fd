"""Helpers against transformers: RoPE tables, MLA absorption; and helpers on torch tensors."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pagedattn
from pagedattn import mla, rope

from .families import FAMILIES, model_of

PAIRS = 16
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default, theta 1e6, partial": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, GPT-OSS": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "truncate": False,
                      "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
    "yarn, DeepSeek-V3": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "yarn, two mscales": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0,
                          "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096},
    "yarn, attention factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.25,
                               "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 1024},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024,
                 "short_factor": np.linspace(1, 2, PAIRS).tolist(), "long_factor": np.linspace(1, 20, PAIRS).tolist()},
    "longrope, attention factor": {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.19, "factor": 32.0,
                                   "original_max_position_embeddings": 1024,
                                   "short_factor": [1.0] * PAIRS, "long_factor": [4.0] * PAIRS},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


def config_of(parameters):
    return transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=2 * PAIRS, max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [1, 1024, 1025, 10000])
def test_frequencies(name, length):
    parameters = ROPES[name]
    config = config_of(parameters)
    if parameters["rope_type"] == "default":
        rotary_dim = int(2 * PAIRS * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
        expected, factor = 1 / parameters["rope_theta"] ** exponents, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
    got = rope.from_parameters(config.rope_parameters, 2 * PAIRS, max_position_embeddings=4096, length=length)
    np.testing.assert_allclose(got.inverse_frequencies, expected, rtol=3e-6)
    assert got.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in ROPES if "partial" not in name])
@pytest.mark.parametrize("length", [900, 6000])
def test_tables(name, length):
    """transformers multiplies position and frequency in float32, so its angles are off by position * 2**-24 or so."""
    config = config_of(ROPES[name])
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    got = rope.from_parameters(
        config.rope_parameters, 2 * PAIRS, max_position_embeddings=4096, length=length
    ).caches(length)  # fmt: skip
    allowed = 1e-6 + 3e-7 * positions[:, None].numpy()
    for mine, theirs in zip(got, (cos, sin), strict=True):
        assert (np.abs(mine - theirs[0, :, :PAIRS].numpy()) <= allowed).all()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_absorption_is_the_expansion_of_the_module(name):
    module = model_of(name).model.layers[0].self_attn
    config = module.config
    weight = pagedattn.absorb(
        module.kv_b_proj.weight.detach(),
        num_heads=config.num_attention_heads,
        qk_nope_head_dim=config.qk_nope_head_dim,
        v_head_dim=config.v_head_dim,
    )
    generator = torch.Generator().manual_seed(0)
    q_nope, q_rope = (torch.randn(5, 4, width, generator=generator) for width in (24, 16))
    latent, k_rope = (torch.randn(1, 1, 7, width, generator=generator) for width in (32, 16))
    with torch.no_grad():
        keys, values = (x[0] for x in module.expand_kv(latent, k_rope))  # (heads, 7, width)
    expected = torch.einsum("thd,hkd->thk", torch.cat([q_nope, q_rope], -1), keys)
    query = weight.query(q_nope, q_rope)
    assert query.shape == (5, 4 * 48)
    row = torch.cat([latent, k_rope], -1)[0, 0]
    torch.testing.assert_close(query.view(5, 4, 48) @ row.T, expected, rtol=1e-5, atol=1e-5)
    probabilities = torch.rand(5, 4, 7, generator=generator)
    expected = torch.einsum("thk,hkv->thv", probabilities, values).flatten(1)
    got = weight.output((probabilities @ latent[0, 0]).flatten(1))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert mla.softmax_scale(
        config.qk_nope_head_dim + config.qk_rope_head_dim,
        factor=config.rope_parameters["factor"],
        mscale_all_dim=config.rope_parameters["mscale_all_dim"],
    ) == pytest.approx(module.scaling, rel=1e-12)


def test_released_deepseek_v3_scale():
    config = transformers.DeepseekV3Config(**FAMILIES["deepseek_v3"].config | {
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_parameters": ROPES["yarn, DeepSeek-V3"],
    })  # fmt: skip
    attention = type(model_of("deepseek_v3").model.layers[0].self_attn)(config, 0)
    assert attention.scaling == pytest.approx(mla.softmax_scale(192, factor=40, mscale_all_dim=1.0), rel=1e-12)
    assert attention.scaling == pytest.approx(0.135234, abs=5e-7)


def test_merging_torch_tensors():
    outputs = [torch.randn(3, 8).bfloat16() for _ in range(2)]
    lses = [torch.randn(3, 2), torch.full((3, 2), -torch.inf)]
    merged, lse = pagedattn.merge_attention_states(outputs, lses)
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, outputs[0])
    assert torch.equal(lse, lses[0])


def test_calibrating_torch_tensors():
    samples = torch.randn(50, 2, 8).bfloat16()
    assert pagedattn.calibrate(samples, "int8").scale == pagedattn.calibrate(samples.float().numpy(), "int8").scale
