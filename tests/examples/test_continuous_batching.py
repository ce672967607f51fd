"""The continuous batching example: its parts, its command line, and a real model's text."""

from __future__ import annotations

import json
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import pytest

from pagedattn.cache import assemble
from tests.support.serving import (
    DATA,
    EXAMPLE,
    ROOT,
    Config,
    Engine,
    Llama,
    Scales,
    Sequence,
    Status,
    Tokenizer,
    Weights,
    audit,
    calibrate_scales,
    command,
    display,
    drain,
    greedy,
    load_llama2c,
    random_model,
    sample,
)

CONFIG = Config(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, kv_num_heads=2, vocab_size=64, max_length=256
)
CHECKPOINT, TOKENIZER, GREEDY = (DATA / name for name in ("stories260K.bin", "tok512.bin", "stories260K_greedy.json"))
needs_stories = pytest.mark.skipif(
    not all(path.exists() for path in (CHECKPOINT, TOKENIZER, GREEDY)),
    reason=f"stories260K.bin, tok512.bin and stories260K_greedy.json are not in {DATA}",
)


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, rng.integers(1, longest)).tolist() for _ in range(count)]


# --- the model -------------------------------------------------------------------------------------------------------


def plain_logits(model: Llama, tokens: list[int]) -> np.ndarray:
    """The textbook forward pass over one whole sequence in float64: no cache, no paging, no operator."""
    config, size = model.config, model.config.head_size
    x = model.embedding[tokens].astype(np.float64)
    length = len(tokens)
    angles = np.outer(np.arange(length), config.rope_theta ** (-np.arange(0, size, 2) / size))

    def norm(values, weight):
        return values * weight / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + config.norm_epsilon)

    def rotate(heads):
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = (
            (heads[..., 0::2], heads[..., 1::2])
            if config.rope_interleaved
            else (heads[..., : size // 2], heads[..., size // 2 :])
        )
        pairs = first * cos - second * sin, first * sin + second * cos
        return np.stack(pairs, -1).reshape(heads.shape) if config.rope_interleaved else np.concatenate(pairs, -1)

    own, key = np.arange(length)[:, None], np.arange(length)
    hidden = (key > own) | (key <= own - (config.window or length))
    for layer in model.layers:
        heads = (norm(x, layer.attention_norm) @ layer.qkv.T).reshape(length, -1, size)
        queries, keys, values = np.split(heads, [config.num_heads, config.num_heads + config.kv_num_heads], axis=1)
        group = config.num_heads // config.kv_num_heads
        keys, values = (np.repeat(rows, group, axis=1) for rows in (rotate(keys), values))
        scores = np.einsum("qhd,khd->hqk", rotate(queries), keys) / np.sqrt(size)
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, values).reshape(length, -1) @ layer.attention_out.T
        gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return norm(x, model.final_norm) @ model.classifier.T


def forced_logits(model: Llama, texts: list[list[int]], chunk_size: int = 32, **options) -> list[np.ndarray]:
    """Logits at every position of given texts, which run as one batch in chunks."""
    engine = Engine(
        model, sum(-(-len(text) // 16) for text in texts), 16, chunk_size=chunk_size, prefix_caching=False, **options
    )
    sequences = [engine.add(text, 1) for text in texts]
    logits = [[] for _ in texts]
    while engine.scheduler.has_work:
        step = engine.scheduler.schedule()
        batch = assemble([(sequence.table, count) for sequence, count in step.entries])
        ids = np.concatenate(
            [sequence.tokens[sequence.table.length - count : sequence.table.length] for sequence, count in step.entries]
        )
        rows = np.split(
            model.forward(ids, batch, engine.cache, np.arange(len(ids))), batch.cumulative_sequence_length[1:-1]
        )
        for (sequence, _), part in zip(step.entries, rows, strict=True):
            logits[sequences.index(sequence)].append(part)
        engine.scheduler.complete(step, {sequence: 0 for sequence, _ in step.entries if not sequence.remaining})
    return [np.concatenate(parts) for parts in logits]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("chunk_size", [7, 64])
def test_logits_equal_the_textbook_forward_pass(interleaved, window, chunk_size):
    model = random_model(replace(CONFIG, rope_interleaved=interleaved, window=window), 1)
    texts = prompts(3, seed=3)
    for text, logits in zip(texts, forced_logits(model, texts, chunk_size), strict=True):
        assert np.abs(logits - plain_logits(model, text)).max() < 2e-5


def test_pair_layouts_differ_by_a_permutation_of_the_rotated_channels():
    """A checkpoint stored for one layout serves the other once each head's query and key rows are reordered."""
    interleaved = random_model(CONFIG, 2)
    halves_first = np.concatenate([np.arange(0, CONFIG.head_size, 2), np.arange(1, CONFIG.head_size, 2)])
    layers = []
    for layer in interleaved.layers:
        heads = layer.qkv.reshape(-1, CONFIG.head_size, CONFIG.hidden_size).copy()
        rotated = slice(0, CONFIG.num_heads + CONFIG.kv_num_heads)
        heads[rotated] = heads[rotated][:, halves_first]
        layers.append(replace(layer, qkv=heads.reshape(layer.qkv.shape)))
    halves = Llama(
        replace(CONFIG, rope_interleaved=False),
        Weights(interleaved.embedding, layers, interleaved.final_norm, interleaved.classifier),
    )
    texts = prompts(2, seed=5)
    for one, other in zip(forced_logits(halves, texts), forced_logits(interleaved, texts), strict=True):
        assert np.allclose(one, other, atol=1e-5)


def write_checkpoint(path, shared: bool) -> Config:
    """A llama2.c file of counting numbers, so that each tensor is known by its values."""
    dim, hidden, layers, heads, kv_heads, vocab, length = 16, 24, 2, 2, 1, 11, 8
    sizes = [
        vocab * dim,
        layers * dim,
        layers * dim * dim,
        layers * dim * dim // 2,
        layers * dim * dim // 2,
        layers * dim * dim,
        layers * dim,
        *[layers * hidden * dim] * 3,
        dim,
        length * dim // heads,
    ]
    if not shared:
        sizes.append(vocab * dim)
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, vocab if shared else -vocab, length)
    path.write_bytes(header + np.arange(sum(sizes), dtype="<f4").tobytes())
    return Config(dim, hidden, layers, heads, kv_heads, vocab, length)


@pytest.mark.parametrize("shared", [True, False])
def test_checkpoint_tensors_land_where_they_belong(tmp_path, shared):
    expected = write_checkpoint(tmp_path / "model.bin", shared)
    model = load_llama2c(tmp_path / "model.bin")
    assert model.config == expected
    first, second = model.layers
    assert model.embedding[0, 0] == 0
    assert (first.attention_norm[0], second.attention_norm[0]) == (176, 192)
    assert [first.qkv[row, 0] for row in (0, 16, 24)] == [208, 720, 976]
    assert [second.qkv[row, 0] for row in (0, 16, 24)] == [464, 848, 1104]
    assert (first.attention_out[0, 0], second.attention_out[0, 0], first.mlp_norm[0]) == (1232, 1488, 1744)
    gate, down, up = 1776, 1776 + 768, 1776 + 1536  # the file holds w1, w2, w3; w2 is the way down
    assert [first.gate_up[0, 0], first.down[0, 0], first.gate_up[24, 0]] == [gate, down, up]
    assert model.final_norm[0] == up + 768
    assert model.classifier[0, 0] == (0 if shared else up + 768 + 16 + 64)


def test_damaged_checkpoints_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    write_checkpoint(path, shared=True)
    data = path.read_bytes()
    path.write_bytes(data[:-400])
    with pytest.raises(ValueError, match="its header asks for more"):
        load_llama2c(path)
    path.write_bytes(struct.pack("<7i", 16, 24, 2, 3, 1, 11, 8) + data[28:])
    with pytest.raises(ValueError, match=r"no llama2\.c version 0 checkpoint"):
        load_llama2c(path)
    path.write_bytes(b"1234")
    with pytest.raises(ValueError, match="too short"):
        load_llama2c(path)


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 32},
        {"chunk_size": 3},
        {"num_blocks": 8},
        {"max_running": 2},
        {"num_blocks": 10, "chunk_size": 5, "prefix_caching": False},
    ],
)
def test_a_batch_answers_as_each_request_alone(options):
    model = random_model(CONFIG, 0)
    requests = prompts(7, seed=1)
    options = {"num_blocks": 64, "block_size": 16, **options}
    engine = Engine(model, **options)
    sequences = [engine.add(prompt, 20) for prompt in requests]
    drain(engine)
    assert [sequence.new_tokens for sequence in sequences] == [greedy(model, prompt, 20) for prompt in requests]
    assert engine.pool.available == options["num_blocks"]
    if options["num_blocks"] < 16:
        assert sum(sequence.preemptions for sequence in sequences) > 0


def test_prompts_and_decoding_share_calls():
    model = random_model(CONFIG, 0)
    engine = Engine(model, 64, 16, chunk_size=8)
    mixed, run = [], engine.run

    def noted(step):
        mixed.append({count > 1 for _, count in step.entries} == {True, False})
        return run(step)

    engine.run = noted
    first = engine.add([1, 2, 3], 12)
    engine.step()
    second = engine.add(list(range(40)), 4)
    drain(engine)
    assert sum(mixed) == 5, "the long prompt's five chunks run beside the first request's tokens"
    assert (len(first.new_tokens), len(second.new_tokens)) == (12, 4)


def test_requests_with_a_common_prefix_run_it_once():
    model = random_model(CONFIG, 0)
    engine = Engine(model, 64, 16)
    common = prompts(1, seed=9)[0][:1] * 50
    first = engine.add([*common, 1], 4)
    engine.step()
    engine.step()
    others = [engine.add([*common, number, 5], 4) for number in range(3)]
    drain(engine)
    assert [sequence.reused_tokens for sequence in others] == [48] * 3
    assert engine.tokens_run < 51 + 3 * (52 - 48) + 4 * 4
    for number, sequence in enumerate(others):
        assert sequence.new_tokens == greedy(model, [*common, number, 5], 4)
    assert first.new_tokens == greedy(model, [*common, 1], 4)


def test_an_aborted_request_leaves_the_others_alone():
    model = random_model(CONFIG, 0)
    engine = Engine(model, 16, 16)
    requests = prompts(5, seed=4)
    sequences = [engine.add(prompt, 15) for prompt in requests]
    for _, (sequence, _) in zip(range(20), engine.stream(), strict=False):
        if len(sequence.new_tokens) == 3 and sequence is sequences[1]:
            engine.abort(sequence)
            engine.abort(sequence)
    engine.abort(sequences[4])
    drain(engine)
    assert [sequence.status is Status.ABORTED for sequence in sequences] == [False, True, False, False, True]
    for prompt, sequence in zip(requests, sequences, strict=True):
        expected = greedy(model, prompt, 15)
        assert sequence.new_tokens == expected[: len(sequence.new_tokens)]
        assert sequence.status is Status.ABORTED or len(sequence.new_tokens) == 15
    audit(engine.pool, [])


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_another_array_module_takes_the_place_of_numpy(cache_dtype):
    """As CuPy does: arrays made through ``xp`` only, 16-bit activations, logits fetched with ``asnumpy``."""
    fetched = []

    class Other(ModuleType):
        def __getattr__(self, name: str):
            return getattr(np, name)

        def asnumpy(self, array: np.ndarray) -> np.ndarray:
            fetched.append(array.shape)
            return array

    requests = prompts(3, seed=2)
    model = random_model(CONFIG, 0, Other("other"))
    scales = calibrate_scales(model, requests, cache_dtype, 20) if cache_dtype == "int8" else None
    engine = Engine(model, cache_dtype=cache_dtype, scales=scales)
    assert engine.cache.io.name == "float16"
    sequences = [engine.add(prompt, 20) for prompt in requests]
    drain(engine)
    assert all(columns == CONFIG.vocab_size for _, columns in fetched)
    assert len(fetched) >= engine.steps
    assert all(len(sequence.new_tokens) == 20 for sequence in sequences)


def test_stop_tokens_end_a_text_after_themselves():
    model = random_model(CONFIG, 0)
    answer = greedy(model, [1, 2, 3], 20)
    stop = answer[6]
    engine = Engine(model)
    sequence = engine.add([1, 2, 3], 20, stop_tokens=[stop])
    drain(engine)
    assert sequence.new_tokens == answer[: answer.index(stop) + 1]


def test_sampled_text_depends_on_the_seed_and_not_on_the_neighbours():
    model = random_model(CONFIG, 0)

    def texts(num_blocks: int, seed: int, neighbours: int, **options) -> list[list[int]]:
        engine = Engine(model, num_blocks, 16, seed=seed, **options)
        sequences = [engine.add(prompt, 20, temperature=0.9) for prompt in prompts(2 + neighbours)]
        drain(engine)
        return [sequence.new_tokens for sequence in sequences[:2]]

    alone = texts(16, 0, 0)
    assert alone == texts(64, 0, 4, chunk_size=5)
    assert alone == texts(8, 0, 3)
    assert alone != texts(16, 1, 0)


def test_sampling_follows_the_softmax():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    rng = np.random.default_rng(0)
    counts = np.bincount([sample(logits, 1.0, rng) for _ in range(20_000)], minlength=4)
    assert np.allclose(counts / 20_000, [0.1, 0.2, 0.3, 0.4], atol=0.015)  # over four standard deviations
    cold = np.bincount([sample(logits, 0.5, rng) for _ in range(20_000)], minlength=4)
    assert np.allclose(cold / 20_000, np.array([1, 4, 9, 16]) / 30, atol=0.015)
    assert sample(logits, 0, rng) == 3


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories() -> Llama:
    return load_llama2c(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER, 512)


@pytest.fixture(scope="module")
def references() -> list[dict]:
    return json.loads(GREEDY.read_text())["runs"]


@pytest.fixture(scope="module")
def scales_of(stories, references) -> Callable[[str], Scales | None]:
    """Scales of a quantized cache, from texts as long as those it will serve."""
    return cache(
        lambda dtype: (
            None
            if dtype in ("float32", "float16", "bfloat16")
            else calibrate_scales(stories, [run["prompt_ids"] for run in references], dtype, 200)
        )
    )


@pytest.fixture(scope="module")
def logits_of(stories, references, scales_of) -> Callable[[str], list[np.ndarray]]:
    """Logits at every position of the reference texts, by cache type."""
    texts = [run["prompt_ids"] + run["ids"][:-1] for run in references]
    return cache(lambda dtype: forced_logits(stories, texts, cache_dtype=dtype, scales=scales_of(dtype)))


def tell(model: Llama, references: list[dict], **options) -> tuple[Engine, list[Sequence]]:
    """All reference prompts in one continuous batch."""
    engine = Engine(model, **options)
    sequences = [engine.add(run["prompt_ids"], len(run["ids"])) for run in references]
    drain(engine)
    return engine, sequences


@needs_stories
class TestStories:
    def test_tokenizer(self, tokenizer, references):
        for run in references:
            assert tokenizer.encode(run["prompt"]) == run["prompt_ids"]
            assert tokenizer.decode(run["prompt_ids"] + run["ids"]) == run["text"]
        assert tokenizer.decode(tokenizer.encode("naïve €5\n  two spaces")) == "naïve €5\n  two spaces"

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"num_blocks": 64, "block_size": 16}, id="block-16"),
            pytest.param({"num_blocks": 32, "block_size": 32}, id="block-32"),
            pytest.param({"num_blocks": 16, "block_size": 64}, id="block-64"),
            pytest.param({"num_blocks": 64, "block_size": 16, "chunk_size": 3}, id="chunks-of-3"),
            pytest.param({"num_blocks": 24, "block_size": 16, "chunk_size": 3}, id="preemption"),
            pytest.param({"num_blocks": 24, "block_size": 16, "prefix_caching": False}, id="preemption-without-cache"),
        ],
    )
    def test_all_references_token_for_token_in_one_batch(self, stories, references, options):
        engine, sequences = tell(stories, references, **options)
        for run, sequence in zip(references, sequences, strict=True):
            assert sequence.new_tokens == run["ids"]
        preemptions = sum(sequence.preemptions for sequence in sequences)
        assert (preemptions > 0) == (options["num_blocks"] == 24)
        assert engine.pool.available == options["num_blocks"]

    def test_logits_equal_the_reference(self, references, logits_of):
        for run, logits in zip(references, logits_of("float32"), strict=True):
            answer = logits[len(run["prompt_ids"]) - 1 :]
            assert np.abs(answer[0] - run["first_logits"]).max() < 1e-4
            assert np.abs(answer[-1] - run["last_logits"]).max() < 1e-4
            top = np.sort(answer, axis=1)
            assert np.abs(top[:, -1] - top[:, -2] - run["margins"]).max() < 1e-4

    # Bounds of the largest and of the root mean square error over all positions and the vocabulary, about twice what
    # was measured; the logits' own standard deviation is 7.6. The 16-bit types round queries and outputs as well. A
    # head of 8 channels averages little of the rounding out.
    @pytest.mark.parametrize(
        ("cache_dtype", "largest", "rms"),
        [
            ("float16", 0.12, 0.012),
            ("bfloat16", 1.0, 0.1),
            ("int8", 1.1, 0.13),
            ("float8e4m3fn", 7.0, 0.8),
            ("int4", 20.0, 2.4),
        ],
    )
    def test_logits_error_of_smaller_caches(self, logits_of, record_property, cache_dtype, largest, rms):
        error = np.concatenate(logits_of(cache_dtype)) - np.concatenate(logits_of("float32"))
        measured = float(np.abs(error).max()), float(np.sqrt(np.mean(error**2)))
        record_property(f"{cache_dtype} logits error, max and rms", measured)
        print(f"{cache_dtype}: logits error max {measured[0]:.4f}, rms {measured[1]:.5f}")
        assert 0 < measured[0] < largest
        assert 0 < measured[1] < rms

    @pytest.mark.parametrize("cache_dtype", ["float16", "int8", "float8e4m3fn"])
    def test_smaller_caches_answer_alike_up_to_the_first_close_call(
        self, stories, references, scales_of, logits_of, cache_dtype
    ):
        """A choice can turn only where the margin is below twice the logits' error."""
        _, sequences = tell(stories, references, num_blocks=64, cache_dtype=cache_dtype, scales=scales_of(cache_dtype))
        for run, sequence, exact, other in zip(
            references, sequences, logits_of("float32"), logits_of(cache_dtype), strict=True
        ):
            error = np.abs(other - exact).max(axis=1)[len(run["prompt_ids"]) - 1 :]
            close = np.flatnonzero(np.array(run["margins"]) <= 2 * error)
            first = close[0] if close.size else len(run["ids"])
            assert sequence.new_tokens[:first] == run["ids"][:first]

    def test_command_line_prints_each_text_whole(self, references, capsys):
        arguments = ["--checkpoint", str(CHECKPOINT), "--tokenizer", str(TOKENIZER), "--max-new-tokens", "200"]
        for run in references:
            arguments += ["--prompt", run["prompt"]]
        command.main(arguments)
        printed = capsys.readouterr().out
        for run in references:
            assert run["text"] in printed
        assert "tokens/s" in printed

    def test_command_line_streams_a_single_text(self, references, capsys):
        run = references[2]
        command.main(
            [
                "--checkpoint",
                str(CHECKPOINT),
                "--tokenizer",
                str(TOKENIZER),
                "--prompt",
                run["prompt"],
                "--max-new-tokens",
                "200",
                "--block-size",
                "32",
                "--chunk-size",
                "3",
            ]
        )
        assert capsys.readouterr().out.startswith(run["text"] + "\n")

    @pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "int8", "float8e4m3fn", "int4"])
    def test_command_line_takes_every_cache_dtype(self, cache_dtype, capsys):
        command.main(
            [
                "--checkpoint",
                str(CHECKPOINT),
                "--tokenizer",
                str(TOKENIZER),
                "--prompt",
                "Once upon a time",
                "--max-new-tokens",
                "12",
                "--cache-dtype",
                cache_dtype,
            ]
        )
        assert capsys.readouterr().out.startswith("Once upon a time")


# --- the command line ------------------------------------------------------------------------------------------------


def test_it_runs_from_the_repository_root_without_arguments():
    result = subprocess.run(
        [sys.executable, "examples/continuous_batching/run.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
    )
    for row in ("requests", "tokens generated", "tokens/s", "time to first token", "block use", "preemptions"):
        assert row in result.stdout


def test_it_runs_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(display, "Console", None)
    command.main(["--requests", "5", "--window", "24", "--num-blocks", "24"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["requests", "5"] in lines


def test_rich_display_shows_progress_and_growing_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine = Engine(random_model(CONFIG, 0))
    engine.add([1, 2], 3)
    with display.display(engine, 3) as view:
        assert isinstance(view, display.RichDisplay)
        for fresh in iter(engine.step, []):
            view.update(len(fresh), lambda: {1: "the last words"})
    printed = capsys.readouterr().err
    assert "the last words" in printed
    assert "3/3" in printed


def test_plain_display_writes_a_line_a_second(monkeypatch, capsys):
    engine = Engine(random_model(CONFIG, 0), 7)
    clock = iter([0.0, 0.5, 1.5, 1.6, 2.2])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    view = display.PlainDisplay(engine, 10)
    for _ in range(4):
        view.update(2, dict)
    assert capsys.readouterr().err.splitlines() == [
        f"{done}/10 tokens: 0 running, 0 waiting, 0 of 7 blocks used, 0 cached" for done in (4, 8)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x"], "--prompt needs --checkpoint and --tokenizer"),
        (["--checkpoint", "model.bin"], "--checkpoint and --tokenizer go together"),
        (["--checkpoint", "model.bin", "--tokenizer", "tokens.bin"], "model.bin: no such file"),
        (["--requests", "0"], "--requests: expected a count >= 1, got 0"),
        (["--block-size", "0"], "--block-size: expected a size >= 1, got 0"),
        (["--cache-dtype", "uint4"], "invalid choice: 'uint4'"),
    ],
)
def test_senseless_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "5", "--num-blocks", "2"], "the request needs .* blocks of 16, the pool has 2"),
        (["--block-size", "12"], "key_cache: expected block_size .* got 12"),
        (["--chunk-size", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        runpy.run_path(str(EXAMPLE / "run.py"), run_name="__main__")


def test_decode_step_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "decode_step.py"), run_name="__main__")
    assert "output (2, 512)" in capsys.readouterr().out
