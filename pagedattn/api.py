"""The operator for callers: `paged_attention`, `PagedAttention` and `explain`."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pagedattn import contract, env
from pagedattn.arrays import Adapter, Signature, adapter_of, dtype_named, identify, import_foreign
from pagedattn.dispatch import Choice, select
from pagedattn.dtypes import FLOAT32, INT32
from pagedattn.errors import InvalidArgumentError, PagedAttentionError
from pagedattn.jit.launch import Executor, Recorder
from pagedattn.problem import Problem, TensorInfo
from pagedattn.runtime import Runtime, emulated, runtime_of
from pagedattn.support import NUMPY
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
# Sets of addresses whose launches are kept by one operator object, a few KiB each: several per layer of a model.
MAX_ADDRESSES = 1024
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


Key = TypeVar("Key")
Value = TypeVar("Value")


class _Newest(OrderedDict[Key, Value]):
    """A cache of the ``limit`` entries that were added last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry; returns its value."""
        self[key] = value
        if len(self) > self.limit:
            self.popitem(last=False)
        return value


@dataclass(frozen=True, eq=False)  # one object a kind of call, so identity is equality and the hash is cheap
class _Prepared:
    """What calls of one kind share; ``infos`` has the addresses of the first one."""

    problem: Problem
    choice: Choice
    plan: Any  # a Plan; without an executor, a NumpyPlan
    runtime: Runtime
    executor: Executor[Any] | None
    infos: dict[str, TensorInfo]
    spans: dict[str, tuple[int, int]]
    on_host: bool


def _rebuilt(kind: type[PagedAttention], arguments: dict[str, Any]) -> PagedAttention:
    return kind(**arguments)


class PagedAttention:
    """The operator with its attributes bound: the fast path for a layer that is called again and again.

    Validation, the choice of a backend, the plan and compiled kernels are kept per kind of call (shapes, types,
    bounds), launches per set of addresses, and the workspace per stream and thread, so a repeated call costs little
    more than its launches. Objects may be shared by the layers of a model and used from several streams and threads; a
    pickle or copy holds the attributes and options alone.

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
    split_keys : int, optional
        Keys of a split, as in `paged_attention`.
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
        split_keys: int | None = None,
        **attributes: Any,
    ) -> None:
        self.attributes = coerce_attributes(attributes)
        self.return_lse = coerce_switch("return_lse", return_lse)
        self.qk_dtype = dtype_named(qk_dtype, "qk_dtype")
        self.options = coerce_options(backend, checks, max_output_qk_bytes, split_keys)
        self._prepared: _Newest[tuple[Any, ...], _Prepared] = _Newest(MAX_PLANS)
        self._issues: _Newest[tuple[Any, ...], Callable[[], None]] = _Newest(MAX_ADDRESSES)
        self._latest: tuple[Any, Any] = (None, None)  # of _prepared
        self._arena = Arena()

    def __reduce__(self) -> tuple[Any, ...]:
        results = {"return_lse": self.return_lse, "qk_dtype": self.qk_dtype}
        return _rebuilt, (type(self), {**self.attributes, **self.options, **results})

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
        # One by one, because a loop over names and values takes twice the time.
        arrays = {}
        if query is not None:
            arrays["query"] = query
        if key is not None:
            arrays["key"] = key
        if value is not None:
            arrays["value"] = value
        if key_cache is not None:
            arrays["key_cache"] = key_cache
        if value_cache is not None:
            arrays["value_cache"] = value_cache
        if cumulative_sequence_length is not None:
            arrays["cumulative_sequence_length"] = cumulative_sequence_length
        if past_seqlens is not None:
            arrays["past_seqlens"] = past_seqlens
        if block_table is not None:
            arrays["block_table"] = block_table
        if cos_cache is not None:
            arrays["cos_cache"] = cos_cache
        if sin_cache is not None:
            arrays["sin_cache"] = sin_cache
        if slot_mapping is not None:
            arrays["slot_mapping"] = slot_mapping
        if head_sink is not None:
            arrays["head_sink"] = head_sink
        if q_norm_weight is not None:
            arrays["q_norm_weight"] = q_norm_weight
        if k_norm_weight is not None:
            arrays["k_norm_weight"] = k_norm_weight
        if k_scale is not None:
            arrays["k_scale"] = k_scale
        if v_scale is not None:
            arrays["v_scale"] = v_scale
        if attention_metadata is not None:
            arrays["attention_metadata"] = attention_metadata
        if query_positions is not None:
            arrays["query_positions"] = query_positions
        if attention_bias is not None:
            arrays["attention_bias"] = attention_bias
        return self.execute(arrays, out)

    def execute(self, arrays: dict[str, Any], out: Any = None) -> PagedAttentionResult:
        """Check the inputs that are present, by name, and run the call. The dict is taken over."""
        key_cache, value_cache = arrays.get("key_cache"), arrays.get("value_cache")
        if out is not None:
            arrays["output"] = out
        environment = env.concerns_calls()
        prepared, pointers = self._prepare(arrays, env.backend() if environment else None)
        # All that follows happens on query's device, and on the stream that is current for query's library.
        query = arrays["query"]
        adapter = adapter_of("query", query)
        with prepared.runtime.active(adapter.stream(query)):
            wanted = self.options["checks"]
            if wanted is None:
                wanted = environment and env.checks()
            if wanted or prepared.on_host:
                self._check_values(prepared, arrays, wanted)
            if environment and env.debug_info():
                _print_debug_line(self.name, prepared.problem, prepared.choice)
            results = self._new_results(prepared, arrays, adapter)
            if not prepared.problem.token_count:
                self._infos_at(prepared, pointers)
            elif prepared.executor is None:
                self._infos_at(prepared, pointers)
                tensors = {name: adapter_of(name, x).to_numpy(x) for name, x in arrays.items()}
                prepared.plan.run({**tensors, **{name: adapter.to_numpy(x) for name, x in results.items()}})
            else:
                self._launch(prepared, prepared.executor, pointers, adapter, query, results)
        output = results["output"] if out is None else out
        # What a NamedTuple's own constructor does, in half the time.
        return tuple.__new__(
            PagedAttentionResult, (output, key_cache, value_cache, results.get("output_qk"), results.get("lse"))
        )

    def _new_results(self, prepared: _Prepared, arrays: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
        """Arrays by name for the results that are wanted and that the caller brought none for."""
        problem, like, results = prepared.problem, arrays["query"], {}
        if "output" not in arrays:
            results["output"] = adapter.empty((problem.token_count, problem.output_width), problem.io_dtype, like)
        if problem.return_lse:
            results["lse"] = adapter.empty((problem.token_count, problem.num_heads), FLOAT32, like)
        if problem.qk_dtype is not None:
            shape = problem.num_heads, problem.token_count, self._context_len(prepared, arrays)
            results["output_qk"] = adapter.empty(shape, problem.qk_dtype, like)
        return results

    def _launch(
        self,
        prepared: _Prepared,
        executor: Executor[Any],
        pointers: list[int],
        adapter: Adapter,
        query: Any,
        results: dict[str, Any],
    ) -> None:
        """Run the kernels. Where all addresses are those of an earlier call, its launches are issued once more."""
        plan, runtime = prepared.plan, prepared.runtime
        stream, size = runtime.stream(), plan.workspace_bytes
        own = adapter.scratch(size, query) if size else None
        # The arena keeps what a thread once got for a stream, so those launches need not ask it again.
        place = threading.get_ident() if own is None else own[1]
        signatures, places = identify(results) if results else ([], [])
        key = (prepared, stream, place, *pointers, *places, *signatures)
        issue = self._issues.get(key)
        if issue is None:
            workspace = self._arena.reserve(runtime, stream, size) if own is None else place
            infos = {**self._infos_at(prepared, pointers), **_infos(results, signatures, places)}
            issue = self._issues.keep(key, executor.prepare(plan.launches(infos, workspace), stream))
        issue()

    def explain(self, *, out: Any = None, **inputs: Any) -> Choice:
        """Tell which backend would serve a call with these inputs, by name, and why each earlier one would not.

        On a GPU also which kernels it would launch; without ``out`` the output is taken to be aligned as new ones are.

        Raises
        ------
        InvalidArgumentError, UnsupportedError
            As the call would.
        """
        prepared, infos, query = self._prepare_named(inputs, out)
        problem = prepared.problem
        if prepared.executor is None or not problem.token_count:
            return prepared.choice
        # Results and workspace lie where no launch of these will ever be issued.
        rows = infos["query"]._replace(pointer=1 << 20)
        imagined = {"output": rows, "lse": rows, "output_qk": rows._replace(shape=(0, 0, problem.max_kv_len_bound))}
        with prepared.runtime.active(adapter_of("query", query).stream(query)):  # kernels may be loaded, as in a call
            launches = prepared.plan.launches({**imagined, **infos}, 1 << 21)
        kernels = (launch.stem for launch in launches if 0 not in launch.grid)
        return replace(prepared.choice, kernels=tuple(kernels))

    def problem_of(self, **inputs: Any) -> Problem:
        """The `Problem` that a call with these inputs, by name, poses; errors are those of the call."""
        return self._prepare_named(inputs)[0].problem

    def _prepare_named(self, inputs: dict[str, Any], out: Any = None) -> tuple[_Prepared, dict[str, TensorInfo], Any]:
        """What `_prepare` makes of inputs by name, the descriptions of the arrays, and query as a known library's."""
        arrays = {name: x for name, x in inputs.items() if x is not None}
        unknown = sorted(set(arrays) - set(contract.INPUT_BY_NAME))
        if unknown:
            raise InvalidArgumentError(f"{unknown[0]}: expected an input among {', '.join(contract.INPUT_BY_NAME)}.")
        if out is not None:
            arrays["output"] = out
        prepared, pointers = self._prepare(arrays, env.backend())
        return prepared, self._infos_at(prepared, pointers), arrays["query"]

    def _prepare(self, arrays: dict[str, Any], backend: str | None) -> tuple[_Prepared, list[int]]:
        """Problem, backend and plan of a call, and its addresses; from the second call of a kind on, one look-up.

        ``backend`` is the environment's. attention_metadata is taken out of the arrays: its values are read here, so it
        may be a new one at every call.
        """
        bounds, metadata = arrays.pop("attention_metadata", None), None
        if bounds is not None:
            bounds = import_foreign("attention_metadata", bounds)
            metadata = _values_of_metadata(bounds)
        signatures, pointers = identify(arrays)
        backend = self.options["backend"] or backend
        kind = (backend, emulated(), metadata, *arrays, *signatures)
        refused = bounds is not None and metadata is None  # by `validate`, which says why
        latest, prepared = self._latest
        if refused or kind != latest:  # the layers of a step are of one kind, and comparing is quicker than hashing
            prepared = None if refused else self._prepared.get(kind)
            if prepared is None:
                infos = _infos(arrays, signatures, pointers, backend)
                prepared = self._prepared.keep(kind, self._first_of_kind(infos, bounds, metadata, backend, arrays))
            self._latest = kind, prepared
        return prepared, pointers

    def _first_of_kind(
        self,
        infos: dict[str, TensorInfo],
        bounds: Any,
        metadata: tuple[int, ...] | None,
        backend: str | None,
        arrays: dict[str, Any],
    ) -> _Prepared:
        if "query" not in infos:
            raise InvalidArgumentError("query: required input, got none.")
        runtime, query = runtime_of(infos["query"].device), arrays["query"]
        with runtime.active(adapter_of("query", query).stream(query)):
            problem = validate(
                infos if bounds is None else {**infos, "attention_metadata": _info_of("attention_metadata", bounds)},
                self.attributes,
                return_lse=self.return_lse,
                qk_dtype=self.qk_dtype,
                metadata=metadata,
                max_output_qk_bytes=self.options["max_output_qk_bytes"],
                split_keys=self.options["split_keys"],
                contiguous=self.contiguous,
            )
            if runtime.is_capturing():
                raise PagedAttentionError(
                    "graph capture: a call of this kind was not run before the capture began, so its kernels may not "
                    "be loaded; run the same call once on this stream first."
                )
            choice = select(problem, runtime.arch, backend)
            executor = runtime.executor if choice.row.min_arch else None
            make_plan = import_module(choice.row.module).plan
            if executor is not None:  # planned twice, so that what has to be compiled is compiled side by side
                recorder = Recorder(executor.arch, executor.max_shared_bytes, executor.multiprocessors)
                make_plan(problem, recorder)
                executor.compile_many(recorder.loaded)
            plan = make_plan(problem, executor)
        on_host = problem.device in ("cpu", "emulated")
        return _Prepared(problem, choice, plan, runtime, executor, infos, spans(infos), on_host)

    def _infos_at(self, prepared: _Prepared, pointers: list[int]) -> dict[str, TensorInfo]:
        """Descriptions of the arrays at these addresses, which are no part of a kind and have rules of their own."""
        infos = {
            name: info._replace(pointer=pointer)
            for (name, info), pointer in zip(prepared.infos.items(), pointers, strict=True)
        }
        if any(map(is_misaligned, infos.values())):
            validate(infos, self.attributes, contiguous=self.contiguous)
        message = shared_memory(infos, prepared.spans)
        if message is not None:
            raise InvalidArgumentError(message)
        return infos

    def _check_values(self, prepared: _Prepared, arrays: dict[str, Any], wanted: bool) -> None:
        """Check all values, or only those that the host can see anyway unless that is ``wanted``."""
        if wanted and prepared.runtime.is_capturing():
            raise PagedAttentionError("checks: expected them off during graph capture, because they read the device.")
        values = {name: adapter_of(name, arrays[name]).to_numpy(arrays[name]) for name in CHECKED if name in arrays}
        if wanted:
            check_device_values(prepared.problem, values)
        else:
            check_host_values(values)

    def _context_len(self, prepared: _Prepared, arrays: dict[str, Any]) -> int:
        """Columns of output_qk: the bound of the metadata, else the batch's longest context, read from the device."""
        problem = prepared.problem
        if problem.max_kv_len_bound:
            return problem.max_kv_len_bound
        if prepared.runtime.is_capturing():
            raise PagedAttentionError(
                "output_qk: expected attention_metadata with max_kv_len_bound during graph "
                "capture, because the size of output_qk would have to be read from the device."
            )
        cu, past = (
            adapter_of(name, arrays[name]).to_numpy(arrays[name]).astype(np.int64)
            for name in ("cumulative_sequence_length", "past_seqlens")
        )
        longest = int(np.clip(past + np.diff(cu), 0, problem.capacity).max(initial=0))
        check_output_qk_size(problem, longest, self.options["max_output_qk_bytes"])
        return longest


def describe(arrays: dict[str, Any]) -> tuple[dict[str, TensorInfo], dict[str, Adapter]]:
    """Descriptions and adapters of arrays by name; a foreign array is replaced by a view of a library that is known."""
    infos = _infos(arrays, *identify(arrays))
    return infos, {name: adapter_of(name, x) for name, x in arrays.items()}


def _infos(
    names: Iterable[str], signatures: list[Signature], pointers: list[int], backend: str | None = None
) -> dict[str, TensorInfo]:
    """Descriptions of arrays that `identify` has seen; ``backend`` is the one that was asked for."""
    infos = {
        name: _named(name, signature, pointer)
        for name, signature, pointer in zip(names, signatures, pointers, strict=True)
    }
    if not emulated() or backend == NUMPY.name:  # which takes arrays as they are, emulator or not
        return infos
    return {name: info._replace(device="emulated") if info.device == "cpu" else info for name, info in infos.items()}


def _named(name: str, signature: Signature, pointer: int) -> TensorInfo:
    """Description of an array whose signature its adapter may refuse."""
    try:
        info: TensorInfo = signature[0].info(signature, pointer)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None
    return info


def _values_of_metadata(bounds: Any) -> tuple[int, ...] | None:
    """Values of attention_metadata, if it is what it should be; `validate` says what it should."""
    if type(bounds) is not np.ndarray:  # the usual, and the quickest to read
        if _info_of("attention_metadata", bounds).device != "cpu":
            return None
        bounds = adapter_of("attention_metadata", bounds).to_numpy(bounds)
    return tuple(bounds.tolist()) if bounds.dtype == INT32.numpy and bounds.shape in ((2,), (3,)) else None


def _info_of(name: str, x: Any) -> TensorInfo:
    (signature,), (pointer,) = identify({name: x})
    return _named(name, signature, pointer)


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
    split_keys: int | None = None,
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
        Array to write the output to, with memory of its own.
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
    split_keys : int, optional
        Keys of a split, a multiple of 16, for the backends that cut a long context into splits and merge them. The size
        that they choose follows from the call's bounds; with a given one (and backend) a sequence's result does not
        depend on the rest of the batch or on its size, bit for bit; in LATENT as long as the bound of new tokens is the
        same (attention_metadata, else the rows of query). Their parts then take whatever memory they need, on a GPU
        ``4 * N * splits of the context's bound * H * (DV + 1)`` bytes: give prompts an operator of their own.

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
            ("qk_dtype", dtype_named(qk_dtype, "qk_dtype")),
            *coerce_options(backend, checks, max_output_qk_bytes, split_keys).items(),
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
    """Tell which backend would serve a call, with which kernels, and why each one of higher priority would not.

    Parameters
    ----------
    backend : str, optional
        Force a backend.
    **call
        Inputs, attributes and options of `paged_attention` by name, ``out`` too; nothing is computed or written.

    Returns
    -------
    Choice
        ``choice.row.name`` is the backend; ``choice.passed_over`` holds the reasons; ``choice.kernels`` are the kernels
        that would be launched on a GPU; ``str(choice)`` shows all of it.

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
    arrays = {name: call.pop(name) for name in list(call) if name == "out" or name in contract.INPUT_BY_NAME}
    return PagedAttention(backend=backend, **call).explain(**arrays)
