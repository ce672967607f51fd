"""The integration: `generate` with a paged cache gives the tokens of `generate` without."""

import pytest
import torch
import transformers

from pagedattn import InvalidArgumentError, UnsupportedError
from pagedattn.integrations.transformers import PagedCache, register

from .driver import CACHE, placed
from .families import FAMILIES, model_of

NEW_TOKENS = 8
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
NINE = [name for name in FAMILIES if name not in ("smollm3", "olmo2")]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def prompts_of(lengths, seed=5):
    """Prompts padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, 101, (len(lengths), width), generator=generator)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, implementation, inputs, **options):
    """New tokens of a model, or of a family's, under an attention implementation."""
    model = model_of(model) if isinstance(model, str) else model
    inputs = {key: x.to(model.device) for key, x in inputs.items()}
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            tokens = model.generate(**inputs, **GREEDY, **options)
    finally:
        model.set_attn_implementation("eager")
    return tokens[:, inputs["input_ids"].shape[1] :].tolist()


def paged(name, **options):
    if CACHE != "cache":
        pytest.skip(f"PagedCache needs transformers 5.24, this is {transformers.__version__}")
    sizes = {"max_batch_size": 3, "max_length": 64, **options}
    return PagedCache(model_of(name).config, **sizes)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lengths", [(19,), (19, 3, 30)], ids=["one", "padded"])
def test_greedy_tokens(name, lengths):
    inputs = prompts_of(lengths)
    expected = generate(name, "eager", inputs)
    assert generate(name, "pagedattn", inputs, cache=paged(name)) == expected


@pytest.mark.parametrize("name", NINE)
def test_greedy_tokens_without_a_paged_cache(name):
    inputs = prompts_of((19, 3, 30))
    expected = generate(name, "eager", inputs)
    assert generate(name, "pagedattn", inputs) == expected
    assert generate(name, "pagedattn", inputs, use_cache=False) == expected


def test_longrope_across_its_limit():
    """transformers drops the cache at the limit and goes on with one of its own."""
    inputs = prompts_of((13,))
    expected = generate("phi3_long", "eager", inputs)
    assert generate("phi3_long", "pagedattn", inputs, cache=paged("phi3_long")) == expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_prompts_in_chunks(name):
    inputs = prompts_of((19, 30))
    expected = generate(name, "eager", inputs)
    assert generate(name, "pagedattn", inputs, cache=paged(name), prefill_chunk_size=7) == expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_half_precision_caches(half, name):
    """Only first tokens are compared: half precision has near ties, and sums in another order."""
    model = placed(name, half)
    inputs, cache = prompts_of((19, 3, 30)), paged(name)
    expected = generate(model, "eager", inputs)
    got = generate(model, "pagedattn", inputs, cache=cache)
    assert [row[0] for row in got] == [row[0] for row in expected]
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].keys.device.type == half.device


def test_a_cache_holds_the_real_tokens_only():
    cache = paged("llama", block_size=16)
    generate("llama", "pagedattn", prompts_of((19, 3, 30)), cache=cache)
    written = [length + NEW_TOKENS - 1 for length in (19, 3, 30)]
    assert [table.length for table in cache.batch.tables] == written
    assert cache.batch.pool.used == sum(-(-length // 16) for length in written)
    assert cache.get_seq_length() == 30 + NEW_TOKENS - 1
    assert cache.layers[0].keys.shape == (3 * 64 // 16, 16, 2, 16)


def test_a_cache_can_be_used_again():
    cache = paged("mistral")
    for seed in (1, 2):
        inputs = prompts_of((19, 30), seed)
        cache.reset()
        assert cache.get_seq_length() == cache.batch.pool.used == 0
        assert generate("mistral", "pagedattn", inputs, cache=cache) == generate("mistral", "eager", inputs)


def test_a_conversation_goes_on_in_the_same_cache():
    cache = paged("llama")
    inputs = prompts_of((9,))
    first = generate("llama", "pagedattn", inputs, cache=cache)
    longer = torch.cat([inputs["input_ids"], torch.tensor(first), torch.tensor([[7, 8, 9]])], 1)
    longer = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert generate("llama", "pagedattn", longer, cache=cache) == generate("llama", "eager", longer)


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_a_cache_has_limits():
    inputs = prompts_of((19, 30))
    with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 1 sequences, got 2"):
        generate("llama", "pagedattn", inputs, cache=paged("llama", max_batch_size=1))
    with pytest.raises(InvalidArgumentError, match="at most max_length = 32 tokens a sequence, got 33"):
        generate("llama", "pagedattn", inputs, cache=paged("llama", max_length=32))
    cache = paged("llama")
    generate("llama", "pagedattn", inputs, cache=cache)
    with pytest.raises(InvalidArgumentError, match=r"expected the 2 sequences that it holds, got a batch of 1; reset"):
        generate("llama", "pagedattn", prompts_of((60,)), cache=cache)


def test_beam_search_is_refused():
    with pytest.raises(UnsupportedError, match="beam search"):
        generate("llama", "pagedattn", prompts_of((5,)), cache=paged("llama", max_batch_size=2), num_beams=2)


def test_cropping_is_refused():
    with pytest.raises(UnsupportedError, match="removing tokens"):
        paged("llama").crop(-1)


def test_a_static_cache_is_refused():
    with pytest.raises(UnsupportedError, match="a static cache is not supported"):
        generate("llama", "pagedattn", prompts_of((5,)), cache_implementation="static")


def test_models_with_other_layers_are_refused():
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(UnsupportedError, match="got linear_attention"):
        PagedCache(config, max_batch_size=1, max_length=16)
    config = transformers.Gemma3nTextConfig(num_hidden_layers=20)
    with pytest.raises(UnsupportedError, match="got layers that share one"):
        PagedCache(config, max_batch_size=1, max_length=16)


def forward(name, **inputs):
    model = model_of(name)
    model.set_attn_implementation("pagedattn")
    try:
        with torch.no_grad():
            return model(**inputs)
    finally:
        model.set_attn_implementation("eager")


def test_masks_that_the_operator_does_not_have_are_refused():
    ids = torch.arange(3, 11)[None]
    with pytest.raises(UnsupportedError, match=r"attention_mask: expected \(batch_size, columns\).*got shape"):
        forward("llama", input_ids=ids, attention_mask=torch.zeros(1, 1, 8, 8))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(UnsupportedError, match="a mask by more than order, window and padding"):
        forward("llama", input_ids=ids, position_ids=packed, use_cache=False)
    model = model_of("llama")
    model.config.is_causal = False
    try:
        with pytest.raises(UnsupportedError, match="a mask by more than order, window and padding"):
            forward("llama", input_ids=ids)
    finally:
        del model.config.is_causal


def test_dropout_is_refused():
    model = model_of("llama")
    layers = [layer.self_attn for layer in model.model.layers]
    model.train()
    try:
        for layer in layers:
            layer.attention_dropout = 0.1
        with pytest.raises(UnsupportedError, match=r"dropout: expected 0.*got 0\.1"):
            forward("llama", input_ids=torch.arange(3, 11)[None])
    finally:
        model.eval()
        for layer in layers:
            layer.attention_dropout = 0.0
