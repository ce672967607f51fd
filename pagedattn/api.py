"""The operator for callers: `paged_attention`, `PagedAttention` and `explain`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from pagedattn import contract, env
from pagedattn.arrays import Adapter, adapter_of, dtype_named, import_foreign
from pagedattn.backends.base import Plan
from pagedattn.dispatch import Choice, select
from pagedattn.errors import InvalidArgumentError, PagedAttentionError
from pagedattn.problem import Problem, TensorInfo
from pagedattn.runtime import Runtime, emulated, runtime_of
from pagedattn.support import Row
from pagedattn.validate import (
    DEFAULT_MAX_OUTPUT_QK_BYTES,
    check_device_values,
    check_host_values,
    check_output_qk_size,
    coerce_attributes,
    coerce_options,
    coerce_switch,
    is_misaligned,
    shared_memory,
    spans,
    validate,
)
from pagedattn.workspace import Arena

# Plans kept by one operator object: one per batch shape of a server, with room to spare.
MAX_PLANS = 256
# Inputs whose values `checks` reads; small, unlike the rest.
CHECKED = (
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "slot_mapping",
    "query_positions",
    "rotary_positions",
    "k_scale",
    "v_scale",
)


class PagedAttentionResult(NamedTuple):
    """What a call returns.

    Attributes
    ----------
    output : (token_count, num_heads * v_head_size), T
    key_cache_out, value_cache_out : the caller's own cache arrays, updated; None for the value cache in LATENT
    output_qk : (num_heads, token_count, max_context_len), or None
    lse : (token_count, num_heads), float32, or None
    """

    output: Any
    key_cache_out: Any
    value_cache_out: Any = None
    output_qk: Any = None
    lse: Any = None


class _Prepared(NamedTuple):
    problem: Problem
    choice: Choice
    plan: Plan
    runtime: Runtime
    spans: dict[str, tuple[int, int]]


def _rebuilt(kind: type[PagedAttention], arguments: dict[str, Any]) -> PagedAttention:
    return kind(**arguments)


class PagedAttention:
    """The operator with its attributes bound: the fast path for a layer that is called again and again.

    Validation, the choice of a backend, the plan and compiled kernels are kept per kind of call (shapes, types,
    bounds), and the workspace per stream and thread, so a repeated call costs little more than its launches. Objects
    may be shared by the layers of a model and used from several streams and threads; a pickle or copy holds the
    attributes and options alone.

    Parameters
    ----------
    return_lse : bool
        Also return the log-sum-exp of each row.
    qk_dtype : str or dtype
        Type of output_qk: float32, float16 or bfloat16.
    backend : str, optional
        Force a backend; the default is PAGEDATTN_BACKEND, else the best that serves the call.
    checks : bool, optional
        Read lengths, tables and slots back and check their values; the default is PAGEDATTN_CHECKS. Not during capture.
    max_output_qk_bytes : int
        Largest output_qk that is computed.
    **attributes
        The operator's attributes by name, as in `paged_attention`.

    Raises
    ------
    InvalidArgumentError
        An attribute is unknown, missing or out of range.
    """

    name = contract.NAME
    contiguous = False  # one run of positions a sequence instead of a block table

    def __init__(
        self,
        *,
        return_lse: bool = False,
        qk_dtype: Any = "float32",
        backend: str | None = None,
        checks: bool | None = None,
        max_output_qk_bytes: int = DEFAULT_MAX_OUTPUT_QK_BYTES,
        **attributes: Any,
    ) -> None:
        self.attributes = coerce_attributes(attributes)
        self.return_lse = coerce_switch("return_lse", return_lse)
        self.qk_dtype = dtype_named(qk_dtype)
        self.backend, self.checks, self.max_output_qk_bytes = coerce_options(backend, checks, max_output_qk_bytes)
        self._prepared: OrderedDict[Any, _Prepared] = OrderedDict()
        self._arena = Arena()

    def __reduce__(self) -> tuple[Any, ...]:
        options = ("return_lse", "qk_dtype", "backend", "checks", "max_output_qk_bytes")
        return _rebuilt, (type(self), {**self.attributes, **{name: getattr(self, name) for name in options}})

    def __call__(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        key_cache: Any = None,
        value_cache: Any = None,
        cumulative_sequence_length: Any = None,
        past_seqlens: Any = None,
        block_table: Any = None,
        cos_cache: Any = None,
        sin_cache: Any = None,
        slot_mapping: Any = None,
        head_sink: Any = None,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        attention_metadata: Any = None,
        query_positions: Any = None,
        attention_bias: Any = None,
        *,
        out: Any = None,
    ) -> PagedAttentionResult:
        """Run the operator; inputs and results are those of `paged_attention`."""
        given = (
            query,
            key,
            value,
            key_cache,
            value_cache,
            cumulative_sequence_length,
            past_seqlens,
            block_table,
            cos_cache,
            sin_cache,
            slot_mapping,
            head_sink,
            q_norm_weight,
            k_norm_weight,
            k_scale,
            v_scale,
            attention_metadata,
            query_positions,
            attention_bias,
        )
        arrays = {row.name: x for row, x in zip(contract.INPUTS, given, strict=True) if x is not None}
        return self.execute(arrays, out)

    def execute(self, arrays: dict[str, Any], out: Any = None) -> PagedAttentionResult:
        """Check the inputs that are present, by name, and run the call."""
        own_caches = arrays.get("key_cache"), arrays.get("value_cache")
        if out is not None:
            arrays["output"] = out
        infos, adapters = describe(arrays)
        if "query" not in infos:
            raise InvalidArgumentError("query: required input, got none.")
        # All that follows happens on query's device, and on the stream that is current for query's library.
        with runtime_of(infos["query"].device).active(), adapters["query"].stream(arrays["query"]):
            results = self._execute(arrays, infos, adapters)
        output = results["output"] if out is None else out
        return PagedAttentionResult(output, *own_caches, results.get("output_qk"), results.get("lse"))

    def _execute(
        self, arrays: dict[str, Any], infos: dict[str, TensorInfo], adapters: dict[str, Adapter]
    ) -> dict[str, Any]:
        """Results of a call by name."""
        prepared = self._prepare(arrays, infos, adapters)
        problem, choice, runtime = prepared.problem, prepared.choice, prepared.runtime
        self._check_values(problem, arrays, infos, adapters, runtime)
        if env.debug_info():
            _print_debug_line(self.name, problem, choice)
        make, like = adapters["query"].empty, arrays["query"]
        output = arrays.get("output")
        if output is None:
            output = make((problem.token_count, problem.output_width), problem.io_dtype, like)
        results: dict[str, Any] = {"output": output}
        if problem.return_lse:
            results["lse"] = make((problem.token_count, problem.num_heads), dtype_named("float32"), like)
        if problem.qk_dtype is not None:
            width = self._context_len(problem, arrays, adapters, runtime)
            results["output_qk"] = make((problem.num_heads, problem.token_count, width), problem.qk_dtype, like)
        if problem.token_count:
            self._run(prepared, arrays, infos, adapters, results)
        return results

    def explain(self, **inputs: Any) -> Choice:
        """Tell which backend would serve a call with these inputs, by name, and why each earlier one would not."""
        return self._prepare_named(inputs).choice

    def problem_of(self, **inputs: Any) -> Problem:
        """The `Problem` that a call with these inputs, by name, poses."""
        return self._prepare_named(inputs).problem

    def _prepare_named(self, inputs: dict[str, Any]) -> _Prepared:
        arrays = {name: x for name, x in inputs.items() if x is not None}
        unknown = sorted(set(arrays) - set(contract.INPUT_BY_NAME))
        if unknown:
            raise InvalidArgumentError(f"{unknown[0]}: expected an input among {', '.join(contract.INPUT_BY_NAME)}.")
        infos, adapters = describe(arrays)
        return self._prepare(arrays, infos, adapters)

    def _prepare(self, arrays: dict[str, Any], infos: dict[str, TensorInfo], adapters: dict[str, Adapter]) -> _Prepared:
        """Problem, backend and plan of a call; from the second call of a kind on this is one look-up."""
        metadata = None
        bounds = infos.get("attention_metadata")
        if bounds is not None and bounds.device == "cpu" and bounds.dtype.kind == "i" and bounds.shape in ((2,), (3,)):
            metadata = tuple(adapters["attention_metadata"].to_numpy(arrays["attention_metadata"]).tolist())
        backend = self.backend or env.backend()
        kind = (
            backend,
            metadata,
            *(
                (name, info.shape, info.dtype, info.device, info.strides, info.writeable)
                for name, info in infos.items()
            ),
        )
        prepared = self._prepared.get(kind)
        if prepared is None:
            problem = validate(
                infos,
                self.attributes,
                return_lse=self.return_lse,
                qk_dtype=self.qk_dtype,
                metadata=metadata,
                max_output_qk_bytes=self.max_output_qk_bytes,
                contiguous=self.contiguous,
            )
            runtime = runtime_of(problem.device)
            if runtime.is_capturing():
                raise PagedAttentionError(
                    "graph capture: a call of this kind was not run before the capture began, so its kernels may not "
                    "be loaded; run the same call once on this stream first."
                )
            choice = select(problem, runtime.arch, backend)
            plan = _planner(choice.row)(problem, runtime.executor)
            prepared = self._prepared[kind] = _Prepared(problem, choice, plan, runtime, spans(infos))
            if len(self._prepared) > MAX_PLANS:
                self._prepared.popitem(last=False)
        # The rules about addresses, which are no part of a kind.
        if any(map(is_misaligned, infos.values())):
            validate(infos, self.attributes, contiguous=self.contiguous)
        message = shared_memory(infos, prepared.spans)
        if message is not None:
            raise InvalidArgumentError(message)
        return prepared

    def _check_values(
        self,
        problem: Problem,
        arrays: dict[str, Any],
        infos: dict[str, TensorInfo],
        adapters: dict[str, Adapter],
        runtime: Runtime,
    ) -> None:
        on_host = problem.device in ("cpu", "emulated")
        wanted = env.checks() if self.checks is None else self.checks
        if not wanted and not on_host:
            return
        if wanted and runtime.is_capturing():
            raise PagedAttentionError("checks: expected them off during graph capture, because they read the device.")
        values = {name: adapters[name].to_numpy(arrays[name]) for name in CHECKED if name in arrays}
        if wanted:
            check_device_values(problem, values)
        else:
            check_host_values(values)

    def _context_len(
        self, problem: Problem, arrays: dict[str, Any], adapters: dict[str, Adapter], runtime: Runtime
    ) -> int:
        """Columns of output_qk: the bound of the metadata, else the batch's longest context, read from the device."""
        if problem.max_kv_len_bound:
            return problem.max_kv_len_bound
        if runtime.is_capturing():
            raise PagedAttentionError(
                "output_qk: expected attention_metadata with max_kv_len_bound during graph "
                "capture, because the size of output_qk would have to be read from the device."
            )
        cu, past = (
            adapters[name].to_numpy(arrays[name]).astype(np.int64)
            for name in ("cumulative_sequence_length", "past_seqlens")
        )
        longest = int(np.clip(past + np.diff(cu), 0, problem.capacity).max(initial=0))
        check_output_qk_size(problem, longest, self.max_output_qk_bytes)
        return longest

    def _run(
        self,
        prepared: _Prepared,
        arrays: dict[str, Any],
        infos: dict[str, TensorInfo],
        adapters: dict[str, Adapter],
        results: dict[str, Any],
    ) -> None:
        _, choice, plan, runtime, _ = prepared
        if choice.row.min_arch == 0:
            tensors = {name: adapters[name].to_numpy(x) for name, x in arrays.items()}
            tensors.update((name, adapters["query"].to_numpy(x)) for name, x in results.items() if name != "output")
            tensors["output"] = adapters.get("output", adapters["query"]).to_numpy(results["output"])
            plan.run(tensors, None)
            return
        size = plan.workspace_bytes
        own = adapters["query"].scratch(size, arrays["query"]) if size else None
        workspace = own[1] if own is not None else self._arena.reserve(runtime, size)
        described, _ = describe(results)
        plan.run({**infos, **described}, workspace)


def describe(arrays: dict[str, Any]) -> tuple[dict[str, TensorInfo], dict[str, Adapter]]:
    """Descriptions and adapters of arrays by name; a foreign array is replaced by a view of a library that is known."""
    infos: dict[str, TensorInfo] = {}
    adapters: dict[str, Adapter] = {}
    for name, x in arrays.items():
        foreign = import_foreign(name, x)
        if foreign is not x:
            arrays[name] = x = foreign
        adapters[name] = adapter_of(name, x)
        infos[name] = adapters[name].describe(x)
    if emulated():
        infos = {
            name: info._replace(device="emulated") if name != "attention_metadata" else info
            for name, info in infos.items()
        }
    return infos, adapters


@cache
def _planner(row: Row) -> Any:
    return import_module(row.module).plan


def _print_debug_line(operator: str, problem: Problem, choice: Choice) -> None:
    passed = " ".join(f"{name}=0({reason})" for name, reason in choice.passed_over)
    print(
        f"Operator={operator} DataType={problem.io_dtype} CacheType={problem.cache_dtype} "
        f"SdpaKernel={choice.row.sdpa_kernel} Backend={choice.row.name} {passed}".rstrip(),
        file=sys.stderr,
    )


@lru_cache(maxsize=64)
def _operator(attributes: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> PagedAttention:
    return PagedAttention(**dict(attributes), **dict(options))


def paged_attention(
    query: Any,
    key: Any = None,
    value: Any = None,
    key_cache: Any = None,
    value_cache: Any = None,
    cumulative_sequence_length: Any = None,
    past_seqlens: Any = None,
    block_table: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    slot_mapping: Any = None,
    head_sink: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    attention_metadata: Any = None,
    query_positions: Any = None,
    attention_bias: Any = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    k_cache_dtype: str = "",
    v_cache_dtype: str = "",
    v_head_size: int = 0,
    kv_cache_layout: str = "SEPARATE",
    qk_output: int = 0,
    is_causal: int = 1,
    out: Any = None,
    return_lse: bool = False,
    qk_dtype: Any = "float32",
    backend: str | None = None,
    checks: bool | None = None,
    max_output_qk_bytes: int = DEFAULT_MAX_OUTPUT_QK_BYTES,
) -> PagedAttentionResult:
    """Store new keys and values in a paged cache and attend a ragged batch to it.

    This is ``com.microsoft::PagedAttention`` of ONNX Runtime (opset 1). Arrays may be of NumPy, of CuPy, torch
    tensors, or anything that speaks DLPack or the CUDA array interface; all of one call live on one device. Work on a
    GPU is issued to the library's current stream. N is token_count, B batch_size, H num_heads, KH kv_num_heads, D
    head_size, DV v_head_size; T is float16 or bfloat16, on the CPU also float32. There is no backward pass.

    Parameters
    ----------
    query : (N, H * D), T
        Or packed rows ``[Q | K | V]``, (N, (H + 2 * KH) * D), with key and value absent.
    key, value : (N, KH * D), T
        New keys and values; in LATENT only key, the latent rows.
    key_cache, value_cache : (num_blocks, block_size, KH, D), T, int8, float8e4m3fn, or uint8 with int4 codes
        The block pools; **written in place**; `pagedattn.cache.allocate_cache` makes them. block_size is a power of
        two >= 16. Packed int4 rows are (D + 1) // 2 bytes. No value_cache in LATENT.
    cumulative_sequence_length : (B + 1,), int32
        Rows ``[c[b], c[b + 1])`` of query are those of sequence b; c[0] is 0, rows from c[B] on are padding.
    past_seqlens : (B,), int32
        Tokens of each sequence in the cache **before** this call.
    block_table : (B, max_blocks_per_sequence), int32
        Entry i of row b is the block with positions ``[i * block_size, (i + 1) * block_size)``; -1 is unmapped.
    cos_cache, sin_cache : (max_seq_len, rotary_dim / 2), T, optional
        Needed with do_rotary, ignored without; `pagedattn.rope` makes them.
    slot_mapping : (N,), int32, optional
        Slot ``block * block_size + offset`` for each token's key and value; -1 stores nothing. By default where
        block_table says.
    head_sink : (H,), T, optional
        An extra logit per head, in the denominator only.
    q_norm_weight, k_norm_weight : (D,), T, optional
        RMSNorm of each query and key head, before RoPE.
    k_scale, v_scale : (1,) or (KH, 1, D), float32, optional
        Dequantized value = code * scale; shaped as k_quant_type and v_quant_type say. `pagedattn.calibrate` finds one.
    attention_metadata : (2,) or (3,), int32, in host memory, optional
        Bounds ``[max_query_len, max_kv_len(, lower bound of max_kv_len)]``, 0 = unknown; they size launches only.
    query_positions : (N,), int32, optional
        Position of each token for RoPE and the mask; by default its place in the sequence.
    attention_bias : (B or 1, H or 1, query capacity, context capacity), T, optional
        Added to the scores after softcap. Tokens and keys beyond its capacities are not attended.
    num_heads, kv_num_heads : int
        The second divides the first: query head h reads key head ``h // (H // KH)``.
    scale : float
        Factor of q . k; 0 means ``1 / sqrt(D)``. Required when DV differs from D.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 = off.
    local_window_size : int
        Positions a token sees, **its own included**; below 1 = all.
    do_rotary, rotary_interleaved, rotary_offset : int
        RoPE; pairs are half-split unless interleaved; the first rotated channel, a multiple of 8.
    qk_norm_epsilon : float
        Epsilon inside the root of QK-norm.
    k_quant_type, v_quant_type : {"NONE", "PER_TENSOR", "PER_CHANNEL"}
        One scale, or one for each channel of each head; other than NONE exactly with a quantized cache.
    k_cache_dtype, v_cache_dtype : str
        "" or the cache's own type; "int4" with uint8.
    v_head_size : int
        Output width of a head in LATENT; 0 = D.
    kv_cache_layout : {"SEPARATE", "LATENT"}
        LATENT is absorbed multi-head latent attention: values are the first DV channels of the keys.
    qk_output : {0, 1, 2}
        1: also return scores just before softmax; 2: probabilities.
    is_causal : {0, 1}
        0: a token also sees the later new tokens of its sequence.
    out : (N, H * DV), T, optional
        Array to write the output to.
    return_lse : bool
        Also return the natural logarithm of each row's softmax denominator.
    qk_dtype : str or dtype
        Type of output_qk: float32, float16 or bfloat16.
    backend : {"latent", "decode", "flash", "dense", "numpy"}, optional
        Force a backend; by default PAGEDATTN_BACKEND, else the best that serves the call (`explain`).
    checks : bool, optional
        Also check the values of lengths, tables, slots and positions, which may live on the device; costs a
        synchronization. By default PAGEDATTN_CHECKS. Without, a value out of range may lose work, and never reads or
        writes out of bounds.
    max_output_qk_bytes : int
        Largest output_qk that is computed.

    Returns
    -------
    PagedAttentionResult
        ``output``, ``key_cache_out``, ``value_cache_out``, ``output_qk``, ``lse``; arrays of the caller's kind. A row
        that sees nothing is 0.

    Raises
    ------
    InvalidArgumentError
        The call breaks the contract; no cache was touched.
    UnsupportedError
        No backend, or not the forced one, serves the call.

    See Also
    --------
    PagedAttention : the same with attributes bound and plans kept, for repeated calls.
    pagedattn.cache : blocks, block tables and the arrays of a batch.

    References
    ----------
    ONNX Runtime, contrib operator com.microsoft.PagedAttention. Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", SOSP 2023.

    Examples
    --------
    A prompt of 20 tokens, then one more token, in blocks 3 and 1 of a pool of four:

    >>> import numpy as np
    >>> key_cache, value_cache = (np.zeros((4, 16, 2, 64), np.float16) for _ in range(2))
    >>> table = np.array([[3, 1]], np.int32)
    >>> for past, new in [(0, 20), (20, 1)]:
    ...     query, key, value = (np.ones((new, heads * 64), np.float16) for heads in (8, 2, 2))
    ...     lengths, pasts = np.array([0, new], np.int32), np.array([past], np.int32)
    ...     result = paged_attention(
    ...         query, key, value, key_cache, value_cache, lengths, pasts, table, num_heads=8, kv_num_heads=2
    ...     )
    >>> result.output.shape
    (1, 512)
    """
    attributes = coerce_attributes(
        {
            "num_heads": num_heads,
            "kv_num_heads": kv_num_heads,
            "scale": scale,
            "softcap": softcap,
            "local_window_size": local_window_size,
            "do_rotary": do_rotary,
            "rotary_interleaved": rotary_interleaved,
            "rotary_offset": rotary_offset,
            "qk_norm_epsilon": qk_norm_epsilon,
            "k_quant_type": k_quant_type,
            "v_quant_type": v_quant_type,
            "k_cache_dtype": k_cache_dtype,
            "v_cache_dtype": v_cache_dtype,
            "v_head_size": v_head_size,
            "kv_cache_layout": kv_cache_layout,
            "qk_output": qk_output,
            "is_causal": is_causal,
        }
    )
    operator = _operator(
        tuple(attributes.items()),
        (
            ("return_lse", coerce_switch("return_lse", return_lse)),
            ("qk_dtype", dtype_named(qk_dtype)),
            *zip(
                ("backend", "checks", "max_output_qk_bytes"),
                coerce_options(backend, checks, max_output_qk_bytes),
                strict=True,
            ),
        ),
    )
    return operator(
        query,
        key,
        value,
        key_cache,
        value_cache,
        cumulative_sequence_length,
        past_seqlens,
        block_table,
        cos_cache,
        sin_cache,
        slot_mapping,
        head_sink,
        q_norm_weight,
        k_norm_weight,
        k_scale,
        v_scale,
        attention_metadata,
        query_positions,
        attention_bias,
        out=out,
    )


def explain(*, backend: str | None = None, **call: Any) -> Choice:
    """Tell which backend would serve a call, and why each one of higher priority would not.

    Parameters
    ----------
    backend : str, optional
        Force a backend.
    **call
        Inputs, attributes and options of `paged_attention` by name; nothing is computed or written.

    Returns
    -------
    Choice
        ``choice.row.name`` is the backend; ``choice.passed_over`` holds the reasons; ``str(choice)`` shows both.

    Raises
    ------
    InvalidArgumentError
        The call breaks the contract.
    UnsupportedError
        No backend, or not the forced one, serves the call.

    Examples
    --------
    >>> print(explain(query=q, key=k, ..., num_heads=8, kv_num_heads=2))  # doctest: +SKIP
    backend: numpy (SdpaKernel=NUMPY_REFERENCE)
    """
    inputs = {name: call.pop(name) for name in list(call) if name in contract.INPUT_BY_NAME}
    return PagedAttention(backend=backend, **call).explain(**inputs)
