"""Random problems: eager, then replayed with other lengths, with hostile ones, and in bursts between other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from pagedattn import PagedAttentionResult
from pagedattn.graph import GraphedStep
from tests.faults.targets import Placed, Target
from tests.kernels.test_matrix import TARGETS, check_untouched
from tests.support.build import INT32_MAX, Built, build
from tests.support.compare import assert_same_bits, verify
from tests.support.random_problems import FAMILIES, RandomProblem, random_problem

from .decoding import Decoder, Model, host

ON_GPU = {target.backend: target for target in TARGETS if target.on_gpu}
PROBLEMS, PIECE = 48, 4  # of a family, and of a test
# A few numbers of the plain computation may be nearer to the oracle than the activations' type lets one expect.
UNITS = 3
# Lengths, blocks, slots and positions that nobody should pass; beside them the first ones that do not exist.
HOSTILE = (-1, 0, 1, 2, 7, 63, 64, 500, 3000, -5, INT32_MAX, -(2**31), 100_000)
READ_ON_DEVICE = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "query_positions")

Bits = dict[str, np.ndarray[Any, Any]]


class Beside:
    """A step of other kernels, to be replayed between the calls of a problem; its results are always the same."""

    def __init__(self, cupy: Any) -> None:
        models = [Model(), Model(new_tokens=48)]
        models += [Model(num_heads=n, kv_num_heads=1, head_size=576, v_head_size=512) for n in (16, 128)]
        self.layers = [Decoder(cupy, model) for model in models]  # a graph does not keep the arrays that it reads
        for layer in self.layers:
            layer.prepare([3, 60, 300], 0)
        self.step = GraphedStep(lambda: [layer.step() for layer in self.layers])
        self.want = self.bits()

    def bits(self) -> list[list[bytes]]:
        return [host(results) for results in self.step()]


@pytest.fixture(scope="module")
def beside(cupy: Any) -> Beside:
    return Beside(cupy)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU with CuPy")
@pytest.mark.parametrize("first", range(0, PROBLEMS, PIECE))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_problems(cupy: Any, beside: Beside, family: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = FAMILIES[family]
    if kind.forced is not None:
        module, name, value = kind.forced
        monkeypatch.setattr(import_module(f"pagedattn.backends.{module}"), name, value)
    for seed in range(first, first + PIECE):
        problem = random_problem(family, seed)
        with named(problem):
            check(cupy, ON_GPU[kind.backend], problem, seed, beside)


@contextmanager
def named(problem: RandomProblem) -> Iterator[None]:
    """Failures name the problem, to be put among the cases."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{error}\n{problem!r}") from error


def check(cupy: Any, target: Target, problem: RandomProblem, seed: int, beside: Beside) -> None:
    rng = np.random.default_rng(seed)
    built, other = build(problem.case), build(problem.other, problem.case)
    if problem.spoilt:
        for each in (built, other):
            spoil(each, rng)
    placed = Placed(target, built, split_keys=problem.split_keys)

    def judged(result: PagedAttentionResult) -> Bits:
        """All bits of a call's results, if they are right."""
        results, after = placed.fetch(result)
        check_untouched(placed.built, after)
        verify(placed.built, results, units=UNITS, spoilt=problem.spoilt)
        return {name: x for name, x in results._asdict().items() if x is not None}

    def replayed() -> PagedAttentionResult:
        """A replay into results, over scratch, that hold NaN."""
        for x in (graph.result.output, graph.result.lse):
            x.view(np.uint8).fill(0xFF)
        for _, size, address in placed.operator._arena._buffers.values():
            cupy.cuda.runtime.memset(address, 0xFF, size)
        return graph()

    want = judged(placed.run())
    graph = GraphedStep(placed.run)
    placed.fill(other)
    want_other = judged(replayed())
    placed.fill(hostile(built, rng))
    check_untouched(placed.built, placed.fetch(replayed())[1])
    placed.fill(built)
    assert_same(placed, replayed(), want)
    placed.fill(other)
    assert_same(placed, placed.run(), want_other)
    placed.fill(built)
    for _ in range(5):
        results = placed.run()
        beside.step()
        graph()
    assert_same(placed, graph.result, want)
    assert_same(placed, results, want)
    assert beside.bits() == beside.want


def assert_same(placed: Placed, result: PagedAttentionResult, want: Bits) -> None:
    results, _ = placed.fetch(result)
    for name, right in want.items():
        assert_same_bits(getattr(results, name), right, name)


def spoil(built: Built, rng: np.random.Generator) -> None:
    """Put what is no finite number into some channels of the last new token of some sequences."""
    end = 0
    for _, new in built.case.lengths:
        end += new
        if new > 1 and rng.random() < 0.7:
            step = rng.choice([1, 7])
            built["key"][end - 1, ::step] = np.nan
            if "value" in built.parents:
                built["value"][end - 1, ::step] = rng.choice([np.nan, np.inf])


def hostile(built: Built, rng: np.random.Generator) -> Built:
    """The call with some of what kernels read of batch and cache replaced by what they must survive."""
    built = built.copy()
    num_blocks, block_size = built["key_cache"].shape[:2]
    values = (*HOSTILE, num_blocks, num_blocks * block_size, built["block_table"].shape[1] * block_size)
    for name in [name for name in READ_ON_DEVICE if name in built.parents]:
        x = built[name]
        some = rng.random(x.shape) < rng.choice([0.2, 0.9])
        x[some] = rng.choice(values, int(some.sum()))
    return built
