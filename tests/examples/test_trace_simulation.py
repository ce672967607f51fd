"""The example's scheduler under an hour of a real service: arrival times and lengths, without a model."""

from __future__ import annotations

import csv
from datetime import datetime

import numpy as np
import pytest

from pagedattn.cache import BlockPool
from tests.support.serving import DATA, Scheduler, Status, audit

REQUESTS = 150
STEP_SECONDS = 0.05  # what a step of the simulated model takes
BLOCK_SIZE = 16


def trace(name: str) -> list[tuple[float, int, int]]:
    """(seconds since the first, prompt tokens, answer tokens) of the first requests."""
    path = DATA / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {DATA}")
    with path.open(newline="") as file:
        rows = [row for _, row in zip(range(REQUESTS), csv.DictReader(file), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        ((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize(("name", "num_blocks"), [("conv", 800), ("code", 800), ("conv", 6000)])
def test_every_request_of_a_trace_is_served(name, num_blocks, window, record_property):
    requests = trace(name)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(
        pool, BLOCK_SIZE, max_length=1 << 20, max_batch_tokens=1024, chunk_size=512, max_running=64, window=window
    )
    pending, sequences, used, now, steps = list(requests), [], [], 0.0, 0
    while pending or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            _, prompt, answer = pending.pop(0)
            # Nothing is known of the texts; each is made of its own token.
            sequences.append((scheduler.add([len(sequences)] * prompt, answer), answer))
        step = scheduler.schedule()
        assert step.entries, "there is work, but none is scheduled"
        assert sum(count for _, count in step.entries) <= 1024
        assert all(1 <= count <= 512 for _, count in step.entries)
        used.append(pool.used / num_blocks)
        scheduler.complete(step, {sequence: 0 for sequence, _ in step.entries if sequence.remaining == 0})
        now += STEP_SECONDS
        steps += 1
        if steps % 50 == 0:
            audit(pool, [sequence.table for sequence in scheduler.running])
    assert len(sequences) == REQUESTS
    for sequence, answer in sequences:
        assert sequence.status is Status.FINISHED
        assert len(sequence.new_tokens) == answer
    audit(pool, [])
    assert pool.available == num_blocks
    preemptions = sum(sequence.preemptions for sequence, _ in sequences)
    record_property("steps, mean use of blocks, preemptions", (steps, float(np.mean(used)), preemptions))
    print(
        f"{name}, {num_blocks} blocks, window {window}: {steps} steps, mean use {np.mean(used):.0%}, "
        f"largest {np.max(used):.0%}, {preemptions} preemptions"
    )
    if window is None and num_blocks == 6000:
        assert preemptions == 0, "the pool has room for all, and still somebody had to leave"
    if window is not None:
        assert preemptions == 0, "windows keep every request small"
