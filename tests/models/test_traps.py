"""Settings that are easily taken wrong: each wrong one must show, in the logits or as an error."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

import pagedattn
from pagedattn import InvalidArgumentError, rope

from .driver import (
    PagedRun,
    chunked_prompts,
    difference,
    logits_of,
    reference,
    references,
    sequences_of,
    spread,
    whole_prompts,
)
from .families import FAMILIES, model_of

# Of the largest logit; what is right is a thousand times nearer (test_parity.TOLERANCE).
VISIBLE = 0.01


def put(**attributes):
    """Set attributes."""
    return lambda settings: settings.attributes.update(attributes)


def shift(name, by):
    """Add to an attribute where it is in use."""

    def change(settings):
        if settings.attributes[name] > 0:
            settings.attributes[name] += by

    return change


def drop(*names):
    """Leave inputs or attributes out."""

    def change(settings):
        for name in names:
            settings.attributes.pop(name, None)
            settings.inputs.pop(name, None)

    return change


def alter(function, *names):
    """Change the values of inputs."""
    return lambda settings: settings.inputs.update({name: function(settings.inputs[name]) for name in names})


def weights(query_width, key_width):
    """Add QK-norm weights."""
    return lambda settings: settings.inputs.update(
        q_norm_weight=torch.ones(query_width), k_norm_weight=torch.ones(key_width)
    )


def tables_of(parameters, head_size=16, **options):
    """Take cos and sin of other parameters."""
    cos, sin = rope.from_parameters(parameters, head_size, **options).caches(64)
    return lambda settings: settings.inputs.update(cos_cache=torch.from_numpy(cos), sin_cache=torch.from_numpy(sin))


def without_linear_factor(settings):
    """Take the full layers' tables, those of layers without a window, of their base alone."""
    if settings.attributes["local_window_size"] < 0:
        tables_of({**GEMMA3["full_attention"], "factor": 1.0})(settings)


@dataclass(frozen=True)
class Trap:
    """A wrong setting of a family."""

    family: str
    wrong: str
    change: Callable

    def __str__(self):
        return f"{self.family}: {self.wrong}"


COS_SIN = ("cos_cache", "sin_cache")
WEIGHTS = ("q_norm_weight", "k_norm_weight")
QK_HEAD = FAMILIES["deepseek_v3"].config["qk_nope_head_dim"] + FAMILIES["deepseek_v3"].config["qk_rope_head_dim"]
YARN = FAMILIES["gpt_oss"].config["rope_parameters"]
GEMMA3 = FAMILIES["gemma3"].config["rope_parameters"]
LONGROPE = FAMILIES["phi3_long"].config["rope_parameters"]
TRAPS = [
    Trap("llama", "interleaved pairs", put(rotary_interleaved=1)),
    Trap("llama", "base 10000 instead of rope_theta", tables_of({})),
    Trap("llama", "scale from hidden_size / num_heads", put(scale=(48 / 4) ** -0.5)),
    Trap("mistral", "window W - 1, as flash-attention counts", shift("local_window_size", -1)),
    Trap("mistral", "window W + 1", shift("local_window_size", 1)),
    Trap("mistral", "no window", put(local_window_size=-1)),
    Trap("qwen3", "no QK-norm", drop(*WEIGHTS)),
    Trap("qwen3", "norm weight 1 + w instead of w", alter(lambda w: w + 1, *WEIGHTS)),
    Trap("qwen3", "window on the full layers too", put(local_window_size=7)),
    Trap("gemma2", "no softcap", put(softcap=0)),
    Trap("gemma2", "scale 1 / sqrt(head_size)", put(scale=0)),
    Trap("gemma2", "QK-norm, which it does not have", weights(16, 16)),
    Trap("gemma2", "window on the full layers too", put(local_window_size=7)),
    Trap("gemma3", "norm weight w instead of 1 + w", alter(lambda w: w - 1, *WEIGHTS)),
    Trap("gemma3", "scale 1 / sqrt(head_size)", put(scale=0)),
    Trap("gemma3", "Gemma 2's softcap, which it does not apply", put(softcap=4.0)),
    Trap("gemma3", "window on the full layers too", put(local_window_size=7)),
    Trap("gemma3", "tables of the full layers on all", tables_of(GEMMA3["full_attention"])),
    Trap("gemma3", "tables of the sliding layers on all", tables_of(GEMMA3["sliding_attention"])),
    Trap("gemma3", "no linear factor on the full layers", without_linear_factor),
    Trap("gpt_oss", "no sink", drop("head_sink")),
    Trap("gpt_oss", "no attention factor in cos and sin", tables_of({**YARN, "attention_factor": 1.0})),
    Trap("gpt_oss", "ramp truncated to whole pairs", tables_of({**YARN, "truncate": True})),
    Trap("gpt_oss", "window on the full layers too", put(local_window_size=7)),
    Trap("phi3", "interleaved pairs", put(rotary_interleaved=1)),
    Trap("phi3", "no attention factor in cos and sin", alter(lambda x: x / x[0, 0], "cos_cache")),
    Trap("phi3", "cos and sin as cat(freqs, freqs)", alter(lambda x: torch.cat([x, x], -1), *COS_SIN)),
    Trap("phi3", "the whole head rotated", tables_of({"rope_type": "default"}, head_size=32)),
    Trap("phi3", "rotation of the last channels", put(rotary_offset=16)),
    Trap("phi3", "window W - 1", shift("local_window_size", -1)),
    Trap("phi3_long", "short factors", tables_of(LONGROPE, head_size=32, max_position_embeddings=256, length=16)),
    Trap("deepseek_v2", "scale without mscale squared", put(scale=QK_HEAD**-0.5)),
    Trap("deepseek_v2", "half-split pairs", put(rotary_interleaved=0)),
    Trap("deepseek_v3", "scale without mscale squared", put(scale=QK_HEAD**-0.5)),
    Trap("deepseek_v3", "scale 1 / sqrt(head_size), that of the cache row", put(scale=48**-0.5)),
    Trap("deepseek_v3", "half-split pairs", put(rotary_interleaved=0)),
    Trap("deepseek_v3", "rotation of the first channels", put(rotary_offset=0)),
    Trap("deepseek_v3", "no attention factor in cos and sin", alter(lambda x: x / x.max(), "cos_cache")),
    Trap("smollm3", "rotation on the layers without it", put(do_rotary=1)),
]
REFUSED = [
    (
        Trap("llama", "cos and sin as cat(freqs, freqs)", alter(lambda x: torch.cat([x, x], -1), *COS_SIN)),
        r"cos_cache: expected rotary_dim \(2 \* dimension 1\) <= head_size = 16, got 32",
    ),
    (
        Trap("olmo2", "its norm over the whole projection as QK-norm", weights(64, 32)),
        r"q_norm_weight: expected dimension 0 to be head_size = 16",
    ),
    (
        Trap("gpt_oss", "a sink in another type than the activations", alter(lambda x: x.bfloat16(), "head_sink")),
        r"head_sink: expected element type float32, that of query, got bfloat16",
    ),
    (
        Trap("deepseek_v3", "no scale", put(scale=0)),
        r"scale: required when v_head_size \(32\) differs from head_size \(48\)",
    ),
    (
        Trap("deepseek_v3", "a rotary_offset that is no multiple of 8", put(rotary_offset=12)),
        r"rotary_offset: expected a multiple of 8, got 12",
    ),
]


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_a_wrong_setting_shows_in_the_logits(trap):
    run = PagedRun(trap.family, change=trap.change)
    got = run.run(whole_prompts(run.family.prompts))
    assert difference(got, logits_of(trap.family)) >= VISIBLE * spread(trap.family)


@pytest.mark.parametrize(("trap", "message"), REFUSED, ids=str)
def test_a_wrong_setting_is_refused(trap, message):
    run = PagedRun(trap.family, change=trap.change)
    with pytest.raises(InvalidArgumentError, match=message):
        run.run(whole_prompts(run.family.prompts))


@pytest.mark.parametrize(("family", "scalar"), [("gemma2", 144), ("gemma3", 168)])
def test_the_27b_gemma_models_have_a_scale_of_their_own(family, scalar):
    """Not 128 ** -0.5, although head_dim is 128; the settings take it from the config."""
    module = copy.deepcopy(model_of(family).model.layers[0].self_attn)
    module.config = type(module.config)(**FAMILIES[family].config | {"query_pre_attn_scalar": scalar, "head_dim": 128})
    rebuilt = type(module)(module.config, layer_idx=0)
    assert FAMILIES[family].settings(module.config, rebuilt, 1).attributes["scale"] == rebuilt.scaling == scalar**-0.5


# ---- LongRoPE ----------------------------------------------------------------------------------------------------


def test_longrope_short_and_long_sequences_cannot_share_a_table():
    """Each sequence is right under the table of its own length only."""
    tokens = [sequences_of("phi3_long")[0][:10], sequences_of("phi3_long")[2][:30]]
    want = [reference(model_of("phi3_long"), x).logits for x in tokens]
    near = 1e-5 * spread("phi3_long")
    for length, right, wrong in ((10, 0, 1), (30, 1, 0)):
        tables = tables_of(LONGROPE, head_size=32, max_position_embeddings=256, length=length)
        run = PagedRun("phi3_long", change=tables)
        run.tokens, run.past, run.block_table = tokens, [0, 0], run.block_table[:2]
        got = run.run([[10, 30]])
        assert difference([got[right]], [want[right]]) <= near
        assert difference([got[wrong]], [want[wrong]]) >= VISIBLE * spread("phi3_long")


def test_longrope_keys_cached_before_the_limit_do_not_serve_after_it():
    tokens = sequences_of("phi3_long")[0][:20]
    want = reference(model_of("phi3_long"), tokens).logits
    run = PagedRun("phi3_long")
    run.tokens, run.past, run.block_table = [tokens], [0], run.block_table[:1]

    def use_tables_for(length):
        for layer in run.layers:
            tables_of(LONGROPE, head_size=32, max_position_embeddings=256, length=length)(layer.settings)

    use_tables_for(16)
    run.step([16])
    use_tables_for(20)
    got = run.step([4])
    assert difference(got, [want[16:]]) >= VISIBLE * spread("phi3_long")
    run.past = [0]  # computing the sequence anew under the long table is right
    assert difference(run.step([20]), [want]) <= 1e-5 * spread("phi3_long")


# ---- MLA ---------------------------------------------------------------------------------------------------------


def test_mla_norms_the_latent_part_only(monkeypatch):
    run = PagedRun("deepseek_v3")
    for layer in run.layers:

        def whole_row(x, layer=layer, latent=layer.latent):
            query, row, _ = latent(x)
            raw = layer.module.kv_a_proj_with_mqa(x)
            variance = raw.pow(2).mean(-1, keepdim=True)
            return query, torch.cat([row[:, :32], (raw * torch.rsqrt(variance + 1e-6))[:, 32:]], -1), None

        monkeypatch.setattr(layer, "latent", whole_row)
    got = run.run(whole_prompts(run.family.prompts))
    assert difference(got, logits_of("deepseek_v3")) >= VISIBLE * spread("deepseek_v3")


def test_mla_takes_a_query_that_is_not_rotated_yet(monkeypatch):
    run = PagedRun("deepseek_v3")
    cos, sin = (run.layers[0].settings.inputs[name] for name in COS_SIN)
    for layer in run.layers:

        def rotated(x, latent=layer.latent):
            query, row, _ = latent(x)
            counts = run.batch["cumulative_sequence_length"].diff().tolist()
            positions = torch.cat([past + torch.arange(n) for past, n in zip(run.past, counts, strict=True)])
            rows = query.view(len(x), -1, 48).clone()
            even, odd, c, s = rows[..., 32::2], rows[..., 33::2], cos[positions][:, None], sin[positions][:, None]
            rows[..., 32:] = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
            return rows.flatten(1), row, None

        monkeypatch.setattr(layer, "latent", rotated)
    got = run.run(whole_prompts(run.family.prompts))
    assert difference(got, logits_of("deepseek_v3")) >= VISIBLE * spread("deepseek_v3")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_mla_norms_have_an_epsilon_of_their_own(name):
    """rms_norm_eps is 1e-5 in this config, and kv_a_layernorm does not use it; small rows tell them apart."""
    config, module = model_of(name).config, model_of(name).model.layers[0].self_attn
    assert config.rms_norm_eps == 1e-5
    for norm, width in ((module.kv_a_layernorm, config.kv_lora_rank), (module.q_a_layernorm, config.q_lora_rank)):
        x = 1e-3 * torch.randn(20, width, generator=torch.Generator().manual_seed(0))
        right, wrong = (
            norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
            for epsilon in (1e-6, config.rms_norm_eps)
        )
        torch.testing.assert_close(norm(x), right, rtol=1e-5, atol=1e-6)
        assert bool(((norm(x) - wrong).abs() > 0.1).any())


def test_deepseek_v3_caches_rotated_pairs_apart():
    """The cache of transformers holds [evens | odds], the operator's the pairs as they are."""
    run = PagedRun("deepseek_v3")
    run.run(chunked_prompts(run.family.prompts))
    rows, _ = run.rows(0, 2)
    expected = references("deepseek_v3")[2].values[0][0]
    rotated = rows[:, 0, 32:]
    torch.testing.assert_close(torch.cat([rotated[:, ::2], rotated[:, 1::2]], -1), expected, rtol=0, atol=1e-5)
    assert float((rotated - expected).abs().max()) > 0.1


# ---- QK-norm -----------------------------------------------------------------------------------------------------


def stored_keys(key, weight, epsilon=1e-6):
    """Rows that the operator stores for normalised keys (N, 16), one head, no rotation; of their type."""
    count = len(key)
    cache = torch.zeros(2, 16, 1, 16, dtype=key.dtype)
    pagedattn.paged_attention(
        key, key, key, cache, torch.zeros_like(cache),
        torch.tensor([0, count], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        torch.tensor([[0, 1]], dtype=torch.int32),
        q_norm_weight=weight, k_norm_weight=weight, num_heads=1, kv_num_heads=1, qk_norm_epsilon=epsilon,
    )  # fmt: skip
    return cache.view(32, 16)[:count]


def test_qk_norm_epsilon():
    """In logits a wrong one hardly shows; in the keys of small rows it does."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    key = 1e-3 * torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    norm = Qwen3RMSNorm(16, eps=1e-6)
    expected = norm(key).detach()
    torch.testing.assert_close(stored_keys(key, norm.weight.detach()), expected, rtol=1e-5, atol=1e-6)
    wrong = stored_keys(key, norm.weight.detach(), epsilon=1e-5)
    assert float((wrong - expected).abs().max()) > 0.1


def test_qk_norm_rounds_once_where_qwen3_rounds_twice():
    """Gemma multiplies in float32, as the operator does; Qwen3 rounds x / rms to T first. One rounding apart."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(0)
    key = torch.randn(32, 16, generator=generator).bfloat16()
    weight = (1 + 0.3 * torch.randn(16, generator=generator)).bfloat16()
    stored = stored_keys(key, weight)
    gemma, qwen = Gemma3RMSNorm(16), Qwen3RMSNorm(16).bfloat16()
    gemma.weight.data = weight.float() - 1  # in float32, so that 1 + w is the weight exactly
    qwen.weight.data = weight

    def apart(x):
        return ((x.float() - stored.float()).abs() / stored.float().abs()).detach()

    ulp = torch.finfo(torch.bfloat16).eps
    assert float(apart(gemma(key)).max()) <= ulp
    assert float((apart(gemma(key)) == 0).float().mean()) > 0.99
    assert 0 < float(apart(qwen(key)).max()) <= 2 * ulp


# ---- masks -------------------------------------------------------------------------------------------------------


def test_gemma3_images_need_a_bias():
    """Tokens of an image see each other both ways: `is_causal` = 0 with a bias that restores the causal rest."""
    rng = np.random.default_rng(0)
    count, image = 12, slice(3, 9)
    query, key, value = (rng.standard_normal((count, 32)).astype(np.float32) for _ in range(3))
    seen = np.tri(count, dtype=bool)
    seen[image, image] = True
    heads = [torch.from_numpy(x).view(count, 2, 16).transpose(0, 1) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=torch.from_numpy(seen))
    expected = expected.transpose(0, 1).reshape(count, 32).numpy()

    def run(**options):
        caches = np.zeros((2, 1, 16, 2, 16), np.float32)
        return pagedattn.paged_attention(
            query, key, value, *caches, np.array([0, count], np.int32), np.zeros(1, np.int32),
            np.zeros((1, 1), np.int32), num_heads=2, kv_num_heads=2, **options,
        ).output  # fmt: skip

    bias = np.where(seen, 0, -np.inf).astype(np.float32)[None, None]
    np.testing.assert_allclose(run(is_causal=0, attention_bias=bias), expected, rtol=1e-5, atol=1e-5)
    for wrong in ({}, {"is_causal": 0}, {"attention_bias": bias}):
        assert np.abs(run(**wrong) - expected).max() > 0.1


def test_embedding_gemma_rewrites_its_window():
    config = transformers.Gemma3TextConfig(use_bidirectional_attention=True, sliding_window=512)
    assert config.sliding_window == 257


# ---- types -------------------------------------------------------------------------------------------------------


def test_tables_in_bfloat16_are_float32_tables_rounded_once():
    cos, sin = rope.default(16).caches(64)
    for narrow, wide in zip(rope.default(16).caches(64, "bfloat16"), (cos, sin), strict=True):
        assert narrow.dtype == ml_dtypes.bfloat16
        assert (torch.from_numpy(narrow.view(np.int16)).view(torch.bfloat16) == torch.from_numpy(wide).bfloat16()).all()
