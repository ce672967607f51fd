"""The tables of docs/models.md: ``python -m tests.models.report [--gpu] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
import transformers

from .driver import (
    PagedRun,
    Place,
    cache_rows,
    chunked_prompts,
    difference,
    logits_of,
    placed,
    quantize,
    reference,
    references,
    relative_error,
    rounded_weights_logits,
    sequences_of,
    spread,
    whole_prompts,
)
from .families import FAMILIES
from .test_traps import REFUSED, TRAPS


def print_table(head: list[str], rows: list[list[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def cache_difference(name: str, run: PagedRun) -> float:
    """Largest difference of stored keys and values from those that transformers caches."""
    largest = 0.0
    for sequence, expected in enumerate(references(name)):
        for layer, (keys, values) in enumerate(zip(expected.keys, expected.values, strict=True)):
            for got, want in zip(run.rows(layer, sequence), cache_rows(name, keys, values), strict=True):
                if got is not None:
                    largest = max(largest, float((got - want).abs().max()))
    return largest


def parity() -> None:
    rows = []
    for name, family in FAMILIES.items():
        want = logits_of(name)
        runs = [PagedRun(name), PagedRun(name)]
        errors = [
            difference(run.run(schedule(family.prompts)), want)
            for run, schedule in zip(runs, (whole_prompts, chunked_prompts), strict=True)
        ]
        stored = cache_difference(name, runs[1])
        rows.append([name, f"{spread(name):.1f}", *(f"{error:.1e}" for error in (*errors, stored))])
    print_table(["family", "largest logit", "whole prompts", "prompts in chunks", "keys and values"], rows)


def quantized() -> None:
    rows = []
    for name, family in FAMILIES.items():
        cells = []
        for dtype in ("int8", "float8e4m3fn"):
            for quant_type in ("PER_TENSOR", "PER_CHANNEL"):
                quantization, reports = quantize(name, dtype, quant_type)
                got = PagedRun(name, quantization=quantization).run(chunked_prompts(family.prompts))
                foreseen = max(report.relative_error for report in reports)
                cells.append(f"{100 * relative_error(got, logits_of(name)):.1f} % ({100 * foreseen:.1f} %)")
        rows.append([name, *cells])
    print_table(["family", "int8, per tensor", "int8, per channel", "float8, per tensor", "float8, per channel"], rows)


def half(place: Place) -> dict[str, dict[str, float]]:
    """Errors of each family in half precision, those of the paged and of the unmodified model."""
    figures = {}
    for name, family in FAMILIES.items():
        exact = rounded_weights_logits(name, place)
        runs = {
            "paged": PagedRun(name, place).run(chunked_prompts(family.prompts)),
            "unmodified": [reference(placed(name, place), tokens).logits for tokens in sequences_of(name)],
        }
        figures[name] = {f"rms_{which}": relative_error(logits, exact) for which, logits in runs.items()} | {
            f"largest_{which}": difference(logits, exact) for which, logits in runs.items()
        }
    return figures


def print_half(figures: dict[str, dict[str, float]]) -> None:
    rows = [
        [name]
        + [f"{100 * row[key]:.2f} %" for key in ("rms_paged", "rms_unmodified")]
        + [f"{row[key]:.3f}" for key in ("largest_paged", "largest_unmodified")]
        for name, row in figures.items()
    ]
    print_table(["family", "rms, paged", "rms, unmodified", "largest, paged", "largest, unmodified"], rows)


def traps() -> None:
    rows = []
    for trap in TRAPS:
        got = PagedRun(trap.family, change=trap.change).run(whole_prompts(FAMILIES[trap.family].prompts))
        rows.append([trap.family, trap.wrong, f"{difference(got, logits_of(trap.family)) / spread(trap.family):.2f}"])
    rows += [[trap.family, trap.wrong, "refused"] for trap, _ in REFUSED]
    print_table(["family", "wrong setting", "change of the logits, of the largest logit"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="bfloat16 on CUDA")
    parser.add_argument("--json", type=Path, help="keep the figures in bfloat16 in a file")
    options = parser.parse_args()
    gpu = options.gpu
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    where = torch.cuda.get_device_name() if gpu else platform.machine()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}, {where}\n")
    if not gpu:
        parity()
        quantized()
        traps()
    figures = half(Place("cuda" if gpu else "cpu", "bfloat16"))
    print_half(figures)
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.json.write_text(json.dumps({**versions, "families": figures}, indent=1))


if __name__ == "__main__":
    main()
