"""Right answers: the operator in float64, and a plain computation in the activations' own type.

The float64 oracle is the NumPy backend with ``compute=np.float64``, checked against `tests.support.naive`. The plain
computation is what one would write without thought for precision: its distance from the oracle is what the type costs,
and so the unit in which another implementation's distance is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pagedattn.arrays import NUMPY, dtype_named
from pagedattn.backends.numpy_reference import Lengths, NumpyPlan, PagedRows
from pagedattn.problem import Problem
from pagedattn.validate import validate
from tests.support.build import Built

Array = np.ndarray[Any, np.dtype[Any]]


class Answer(NamedTuple):
    """Results in float64; caches as stored. ``value_cache`` is None in LATENT."""

    output: Array
    key_cache: Array
    value_cache: Array | None
    output_qk: Array | None
    lse: Array


def problem_of(inputs: Mapping[str, Array], attributes: Mapping[str, Any], qk_dtype: Any = "float32") -> Problem:
    """Problem of a call on NumPy arrays, with lse."""
    metadata = inputs.get("attention_metadata")
    return validate(
        {name: NUMPY.describe(x) for name, x in inputs.items()},
        attributes,
        return_lse=True,
        qk_dtype=dtype_named(qk_dtype),
        metadata=None if metadata is None else tuple(metadata.tolist()),
    )


def oracle(built: Built, written: tuple[Array, Array | None] | None = None) -> Answer:
    """The operator in float64; ``built`` is left alone.

    Parameters
    ----------
    built : Built
    written : (key_cache, value_cache), optional
        Caches after the call under test. Given these, nothing is stored and they are attended: one code that another
        implementation rounded the other way is then no error of its attention.
    """
    return _solve(built, NumpyPlan, np.float64, written)


def naive_low_precision(built: Built, written: tuple[Array, Array | None] | None = None) -> Answer:
    """The plain computation in the activations' type T: Q, K, V and P rounded to T, sums in float32."""
    return _solve(built, _PlainPlan, np.float32, written)


def _solve(
    built: Built,
    plan: type[NumpyPlan],
    compute: type[np.floating[Any]],
    written: tuple[Array, Array | None] | None,
) -> Answer:
    inputs = {name: x.copy() for name, x in built.inputs.items()}
    problem = problem_of(inputs, built.attributes, built.options.get("qk_dtype", "float32"))
    if written is not None:
        inputs["key_cache"] = written[0].copy()
        if written[1] is not None:
            inputs["value_cache"] = written[1].copy()
        inputs["slot_mapping"] = np.full(problem.token_count, -1, np.int32)
        problem = replace(problem, has_slot_mapping=True)
    exact = compute is np.float64
    results: dict[str, Array] = {
        "output": np.empty(
            (problem.token_count, problem.output_width), np.float64 if exact else problem.io_dtype.numpy
        ),
        "lse": np.empty((problem.token_count, problem.num_heads), np.float64 if exact else np.float32),
    }
    if problem.qk_dtype is not None:
        shape = (problem.num_heads, problem.token_count, context_len(problem, inputs))
        results["output_qk"] = np.empty(shape, np.float64 if exact else problem.qk_dtype.numpy)
    if problem.token_count:
        plan(problem, compute).run({**inputs, **results})
    output, lse, output_qk = (
        None if x is None else x.astype(np.float64) for x in map(results.get, ("output", "lse", "output_qk"))
    )
    assert output is not None
    assert lse is not None
    return Answer(output, inputs["key_cache"], inputs.get("value_cache"), output_qk, lse)


def context_len(problem: Problem, inputs: Mapping[str, Array]) -> int:
    """Columns of output_qk."""
    new = np.diff(inputs["cumulative_sequence_length"].astype(np.int64))
    longest = int(np.clip(inputs["past_seqlens"] + new, 0, problem.capacity).max(initial=0))
    return problem.max_kv_len_bound or longest


class _PlainPlan(NumpyPlan):
    """Stores like the backend; attends one head after the other, without blocks, tiles or BLAS."""

    def attend(
        self,
        tensors: Mapping[str, Array],
        query: Array,
        position: Array,
        lengths: Lengths,
        key_rows: PagedRows,
        value_rows: PagedRows | None,
    ) -> None:
        p = self.problem

        def rounded(x: Array) -> Array:
            return x.astype(p.io_dtype.numpy).astype(np.float32)

        output = tensors["output"].reshape(p.token_count, p.num_heads, p.v_head_size)
        output[...], tensors["lse"][...] = 0, -np.inf
        if p.qk_output:
            tensors["output_qk"][...] = 0
        for b in np.flatnonzero(lengths.q_len):
            start, new = int(lengths.start[b]), int(lengths.q_len[b])
            kv_len = min(int(lengths.past[b]) + new, p.capacity)
            keys, mapped = key_rows.read(int(b), 0, kv_len)
            values = keys[..., : p.v_head_size] if value_rows is None else value_rows.read(int(b), 0, kv_len)[0]
            own, k = position[start : start + new, None], np.arange(kv_len)
            seen = mapped & (k <= own if p.is_causal else np.ones((new, 1), bool))
            if p.has_window:
                seen = seen & (k > own - p.local_window_size)
            for h in range(p.num_heads):
                kv_head = h // p.group_size
                q = query[start : start + new, h]
                s = np.einsum("td,kd->tk", rounded(q), rounded(keys[:, kv_head])) * np.float32(p.scale)
                if p.softcap > 0:
                    s = np.float32(p.softcap) * np.tanh(s / np.float32(p.softcap))
                if p.bias_shape is not None:
                    bias = tensors["attention_bias"]
                    s = s + bias[b % len(bias), h % bias.shape[1], :new, :kv_len].astype(np.float32)
                hidden = np.where(seen, s, -np.inf)
                top = hidden.max(axis=1, keepdims=True, initial=-np.inf)
                empty = top == -np.inf
                sink = tensors["head_sink"][h].astype(np.float32) if p.has_head_sink else np.float32(-np.inf)
                top = np.where(empty, 0, np.maximum(top, sink))
                weights = np.exp(hidden - top)
                total = np.where(empty, 1, weights.sum(axis=1, keepdims=True) + np.exp(sink - top))
                v = np.where(seen.any(axis=0)[:, None], rounded(values[:, kv_head]), 0)
                output[start : start + new, h] = np.einsum("tk,kd->td", rounded(weights), v) / total
                tensors["lse"][start : start + new, h] = np.where(empty, -np.inf, top + np.log(total))[:, 0]
                if p.qk_output:
                    shown = np.where(seen, s, 0) if p.qk_output == 1 else weights / total
                    columns = min(kv_len, tensors["output_qk"].shape[2])
                    tensors["output_qk"][h, start : start + new, :columns] = shown[:, :columns]
