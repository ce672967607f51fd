"""Serve a small Llama with continuous batching on a paged cache.

Without arguments: a random model and a synthetic mix of requests that arrive one after another. With a llama2.c
checkpoint and its tokenizer, real text::

    python run.py --checkpoint stories260K.bin --tokenizer tok512.bin --prompt "Once upon a time" --prompt "The dog"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from display import display, print_table
from engine import Engine, calibrate_scales
from model import Config, load_llama2c, random_model
from sequence import Sequence
from tokenizer import EOS, Tokenizer

from pagedattn import PagedAttentionError

RANDOM_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_layers": 5,
    "num_heads": 8,
    "kv_num_heads": 4,
    "vocab_size": 512,
    "max_length": 512,
}
QUANTIZED = ("int8", "float8e4m3fn", "int4")
TAIL = 60  # characters of a running text on the display


class Request(NamedTuple):
    tokens: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    arrival: int = 0  # step of the engine


def synthetic_requests(count: int, vocab_size: int, seed: int) -> list[Request]:
    """A ragged mix: short and long prompts and answers, greedy and sampled, some behind a common system prompt."""
    rng = np.random.default_rng(seed)
    system_prompt = rng.integers(3, vocab_size, 48).tolist()
    requests = []
    for number in range(count):
        length = int(np.clip(rng.lognormal(3.2, 0.9), 4, 200))
        prompt = rng.integers(3, vocab_size, length).tolist()
        if number % 3 == 0:
            prompt = system_prompt + prompt
        requests.append(Request(prompt, int(rng.integers(8, 64)), 0.8 * (number % 2), 2 * number))
    return requests


def serve(engine: Engine, requests: list[Request], tokenizer: Tokenizer | None = None) -> list[Sequence]:
    """Run requests as they arrive, showing how it goes."""
    pending = sorted(requests, key=lambda request: request.arrival)
    served: list[Sequence] = []

    def growing() -> dict[int, str]:
        return {
            number: tokenizer.decode(sequence.tokens)[-TAIL:].replace("\n", " ")
            for number, sequence in enumerate(served, 1)
            if sequence.is_live
        }

    with display(engine, sum(request.max_new_tokens for request in requests)) as view:
        while pending or engine.scheduler.has_work:
            idle = not engine.scheduler.has_work  # then there is nothing to wait for
            while pending and (idle or pending[0].arrival <= engine.steps):
                request, idle = pending.pop(0), False
                served.append(
                    engine.add(
                        request.tokens,
                        request.max_new_tokens,
                        temperature=request.temperature,
                        stop_tokens=[EOS] if tokenizer else [],
                    )
                )
            view.update(len(engine.step()), growing if tokenizer else dict)
    return served


def stream_text(engine: Engine, request: Request, tokenizer: Tokenizer) -> Sequence:
    """Run one request and print its text as it comes."""
    sequence = engine.add(request.tokens, request.max_new_tokens, temperature=request.temperature, stop_tokens=[EOS])
    printed = tokenizer.decode(sequence.tokens)
    print(printed, end="", flush=True)
    for _ in engine.stream():
        text = tokenizer.decode(sequence.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or not sequence.is_live:  # a character may come in pieces
            print(text[len(printed) :], end="", flush=True)
            printed = text
    print()
    return sequence


def report(engine: Engine, served: list[Sequence]) -> None:
    generated = sum(len(sequence.new_tokens) for sequence in served)
    elapsed = max(sequence.finished_at for sequence in served) - min(sequence.added_at for sequence in served)
    first = sorted(sequence.first_token_at - sequence.added_at for sequence in served)
    reused = sum(sequence.reused_tokens for sequence in served)
    print_table(
        "Continuous batching",
        [
            ("requests", str(len(served))),
            ("tokens generated", str(generated)),
            (
                "tokens run",
                f"{engine.tokens_run} in {engine.steps} steps, {engine.tokens_run / engine.steps:.1f} a step",
            ),
            ("time", f"{elapsed:.2f} s"),
            ("throughput", f"{generated / elapsed:.0f} tokens/s"),
            ("time to first token", f"median {1e3 * np.median(first):.0f} ms, largest {1e3 * first[-1]:.0f} ms"),
            (
                "block use",
                f"peak {engine.peak_blocks} of {engine.pool.num_blocks} blocks "
                f"({engine.peak_blocks / engine.pool.num_blocks:.0%})",
            ),
            ("prefix cache", f"{reused} tokens reused"),
            ("preemptions", str(sum(sequence.preemptions for sequence in served))),
        ],
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = parser.add_argument_group("a real model")
    real.add_argument("--checkpoint", type=Path, help="llama2.c version 0 checkpoint")
    real.add_argument("--tokenizer", type=Path, help="its tokenizer")
    real.add_argument("--prompt", action="append", help="may be given several times")
    real.add_argument("--max-new-tokens", type=int, default=64)
    real.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    synthetic = parser.add_argument_group("the random model")
    synthetic.add_argument("--requests", type=int, default=24)
    synthetic.add_argument("--window", type=int, help="sliding window of the random model")
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--chunk-size", type=int, default=32, help="most tokens of one prompt in one step")
    parser.add_argument("--max-batch-tokens", type=int, default=128, help="most tokens in one step")
    parser.add_argument("--max-running", type=int, default=16, help="most sequences in one step")
    parser.add_argument("--no-prefix-cache", dest="prefix_caching", action="store_false")
    parser.add_argument(
        "--cache-dtype",
        choices=["float32", "float16", "bfloat16", *QUANTIZED],
        help="default: float32, or float16 on cuda",
    )
    parser.add_argument("--device", choices=["numpy", "cuda"], default="numpy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if bool(options.checkpoint) != bool(options.tokenizer):
        parser.error("--checkpoint and --tokenizer go together")
    if options.requests < 1:
        parser.error(f"--requests: expected a count >= 1, got {options.requests}")
    if options.block_size < 1:
        parser.error(f"--block-size: expected a size >= 1, got {options.block_size}")
    for path in (options.checkpoint, options.tokenizer):
        if path and not path.is_file():
            parser.error(f"{path}: no such file")
    if options.prompt and not options.checkpoint:
        parser.error("--prompt needs --checkpoint and --tokenizer: the random model has no words")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.device == "cuda":
        import cupy as xp

        if not xp.cuda.is_available():
            raise SystemExit("error: --device cuda: no GPU is usable; python -m pagedattn info says why")
    else:
        xp = np
    dtype = options.cache_dtype or ("float32" if xp is np else "float16")

    tokenizer = None
    if options.checkpoint:
        model = load_llama2c(options.checkpoint, xp)
        tokenizer = Tokenizer(options.tokenizer, model.config.vocab_size)
        prompts = options.prompt or ["Once upon a time", "The cat and the dog", "Lily wanted"]
        requests = [
            Request(tokenizer.encode(prompt), options.max_new_tokens, options.temperature) for prompt in prompts
        ]
    else:
        model = random_model(Config(**RANDOM_CONFIG, window=options.window), options.seed, xp)
        requests = synthetic_requests(options.requests, model.config.vocab_size, options.seed)

    scales = None
    if dtype in QUANTIZED:
        scales = calibrate_scales(model, [request.tokens for request in requests], dtype, options.max_new_tokens)
    engine = Engine(
        model,
        options.num_blocks,
        options.block_size,
        cache_dtype=dtype,
        scales=scales,
        seed=options.seed,
        chunk_size=options.chunk_size,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        prefix_caching=options.prefix_caching,
    )
    if tokenizer and len(requests) == 1:
        served = [stream_text(engine, requests[0], tokenizer)]
    else:
        served = serve(engine, requests, tokenizer)
        for number, sequence in enumerate(served if tokenizer else [], 1):
            print(f"\n[{number}] {sequence.prompt_length} prompt tokens, {len(sequence.new_tokens)} new ones")
            print(tokenizer.decode(sequence.tokens))
    report(engine, served)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, PagedAttentionError) as error:  # an argument, a request or a file that cannot be served
        raise SystemExit(f"error: {error}") from None
