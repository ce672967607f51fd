"""Checks of a call against the contract, and the `Problem` that a valid call poses.

Static checks read shapes, types and attributes only and run for every new kind of call. `check_host_values` and
`check_device_values` read data. Every rule is one function that returns its message or None, so that condition and
text cannot drift apart; `RULES` lists them in the order in which they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedattn import contract
from pagedattn.dtypes import BY_NAME, FLOAT32, INT4, DType, name_of
from pagedattn.errors import InvalidArgumentError
from pagedattn.problem import Problem, TensorInfo

Array = np.ndarray[Any, np.dtype[Any]]
# 1 GiB: scores of 32 heads x 2048 tokens x 4096 keys in float32.
DEFAULT_MAX_OUTPUT_QK_BYTES = 1 << 30
WRITTEN = ("key_cache", "value_cache", "output")
# Kernels compute in float32, where a smaller number is 0 or loses its digits and a larger one is infinite.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Shapes:
    """Tensors whose shapes are being matched: the sizes bound so far, with who bound them."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors
        self.sizes: dict[str, int] = {}
        self.bound_by: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Whether an input is present."""
        return name in self.tensors

    def bind(self, name: str, value: int, who: str) -> None:
        """Fix a size, remembering who fixed it."""
        self.sizes[name], self.bound_by[name] = value, who

    def match(self, name: str, want: tuple[str, ...]) -> str | None:
        """Match a tensor against named sizes, in the notation of `contract`; a message if it does not fit."""
        got = self.tensors[name].shape
        if len(got) != len(want):
            return expected(name, f"rank {len(want)}, ({', '.join(want)})", f"shape {got}")
        for axis, (dimension, extent) in enumerate(zip(want, got, strict=True)):
            message = _match(self, name, axis, dimension, extent)
            if message:
                return message
        return None


class Call(Shapes):
    """A call while it is being checked: tensors, sizes and attributes."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], attributes: Mapping[str, Any], contiguous: bool = False
    ) -> None:
        super().__init__(tensors)
        self.is_contiguous = contiguous
        self.attributes = coerce_attributes(attributes)

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]

    @property
    def is_latent(self) -> bool:
        return bool(self["kv_cache_layout"] == "LATENT")

    @property
    def is_packed(self) -> bool:
        return not self.is_latent and not self.has("key") and not self.has("value")

    @property
    def v_head_size(self) -> int:
        """Width of an output head, resolved."""
        return int(self["v_head_size"]) or self.sizes["head_size"]

    @property
    def cache_dtype(self) -> DType:
        """Logical element type of the caches."""
        stored = self.tensors["key_cache"].dtype
        return next(row for row in contract.TYPES["T_CACHE"] if row.numpy == stored)


Rule = Callable[[Call], "str | None"]
RULES: list[Rule] = []
_TENSOR_ROWS: tuple[contract.Input | contract.Output, ...] = (*contract.INPUTS, *contract.OUTPUTS)


def rule(function: Rule) -> Rule:
    """Append a rule to `RULES`."""
    RULES.append(function)
    return function


def expected(name: str, want: str, got: object, hint: str = "") -> str:
    """Every message's form: who, what was expected, what came, and a way out."""
    return f"{contract.argument(name)}: expected {want}, got {got}.{' ' + hint if hint else ''}"


def validate(
    tensors: Mapping[str, TensorInfo],
    attributes: Mapping[str, Any],
    *,
    return_lse: bool = False,
    qk_dtype: DType = FLOAT32,
    metadata: tuple[int, ...] | None = None,
    max_output_qk_bytes: int = DEFAULT_MAX_OUTPUT_QK_BYTES,
    split_keys: int | None = None,
    contiguous: bool = False,
) -> Problem:
    """Check a call and state it as a `Problem`.

    Parameters
    ----------
    tensors : mapping of input name to TensorInfo
        The inputs that are present; ``out`` and ``lse`` may be among them.
    attributes : mapping of attribute name to value
    return_lse : bool
    qk_dtype : DType
        Type of output_qk.
    metadata : tuple of two or three int, optional
        Values of attention_metadata.
    max_output_qk_bytes : int
        Limit of the size of output_qk.
    split_keys : int, optional
        Keys of a split.
    contiguous : bool
        block_table is absent, and the caches hold one run of positions a sequence, (batch_size, capacity,
        kv_num_heads, head_size) of any capacity; ``rotary_positions`` may be among the tensors.

    Raises
    ------
    InvalidArgumentError
        Naming the tensor or attribute, what was expected and what came.
    """
    call = Call(tensors, attributes, contiguous)
    for check in RULES:
        message = check(call)
        if message is not None:
            raise InvalidArgumentError(message)
    problem = _problem(call, return_lse, qk_dtype, metadata, split_keys)
    check_output_qk_size(problem, problem.kv_len_bound if problem.max_kv_len_bound else 0, max_output_qk_bytes)
    return problem


def coerce_attributes(
    attributes: Mapping[str, Any], rows: tuple[contract.Attribute, ...] = contract.ATTRIBUTES
) -> dict[str, Any]:
    """Attributes with defaults filled in and every number a plain Python int or float.

    Any spelling of a number is taken (Python, NumPy scalar, zero-dimensional array), so that
    kernels cannot see the difference.
    """
    known = [row.name for row in rows]
    for name in sorted(set(attributes).difference(known)):
        raise InvalidArgumentError(expected(name, f"an attribute among {', '.join(known)}", "an unknown name"))
    values: dict[str, Any] = {}
    for row in rows:
        value = attributes.get(row.name, row.default)
        if value is None and row.default is None:
            raise InvalidArgumentError(f"{row.name}: required attribute, got none.")
        values[row.name] = _coerce(row, value)
    return values


def coerce_number(name: str, value: Any, minimum: int) -> int:
    """One integer by the rules of attributes."""
    return int(_coerce(contract.Attribute(name, int, None, "", minimum=minimum), value))


def coerce_switch(name: str, value: Any) -> bool:
    """True or False, in any spelling of the numbers 1 and 0."""
    try:
        return bool(_coerce(contract.Attribute(name, int, None, "", choices=(0, 1)), value))
    except InvalidArgumentError:
        raise InvalidArgumentError(expected(name, "True or False", repr(value))) from None


def coerce_options(backend: Any, checks: Any, max_output_qk_bytes: Any, split_keys: Any) -> dict[str, Any]:
    """Arguments of a call that are neither inputs nor attributes, by name, and nothing about its results."""
    if backend is not None and not isinstance(backend, str):
        raise InvalidArgumentError(expected("backend", "a name or None", repr(backend)))
    return {
        "backend": backend,
        "checks": None if checks is None else coerce_switch("checks", checks),
        "max_output_qk_bytes": coerce_number("max_output_qk_bytes", max_output_qk_bytes, 0),
        "split_keys": coerce_split_keys(split_keys),
    }


def coerce_split_keys(split_keys: Any) -> int | None:
    """Keys of a split, or None."""
    if split_keys is None:
        return None
    keys = int(_coerce(contract.Attribute("split_keys", int, None, ""), split_keys))
    if keys % 16 or not 0 < keys < 2**31:
        raise InvalidArgumentError(expected("split_keys", "a multiple of 16 below 2**31, or None", keys))
    return keys


def _coerce(row: contract.Attribute, value: Any) -> int | float | str:
    if row.type is str:
        if not isinstance(value, str):
            raise InvalidArgumentError(expected(row.name, "a string", repr(value)))
        result: int | float | str = value
    else:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, str) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
            raise InvalidArgumentError(expected(row.name, "a number", repr(value)))
        try:
            number = float(value)
        except OverflowError:  # an integer that no float holds
            number = math.inf
        except (TypeError, ValueError):  # a number in name only
            number = math.nan
        if math.isnan(number) or math.isinf(number):
            raise InvalidArgumentError(expected(row.name, "a finite number", value))
        if row.type is int and number != int(number):
            raise InvalidArgumentError(expected(row.name, "an integer", value))
        if row.type is float and number != 0 and not _SMALLEST <= abs(number) <= _LARGEST:
            want = f"0 or a magnitude in [{_SMALLEST:.3g}, {_LARGEST:.3g}], the normal numbers of float32"
            raise InvalidArgumentError(expected(row.name, want, value))
        result = number if row.type is float else value.__index__() if hasattr(value, "__index__") else int(number)
    if row.choices is not None and result not in row.choices:
        raise InvalidArgumentError(expected(row.name, f"one of {', '.join(map(repr, row.choices))}", repr(value)))
    if row.minimum is not None and result < row.minimum:  # type: ignore[operator]
        raise InvalidArgumentError(expected(row.name, f"a value >= {row.minimum:g}", value))
    return result


# ---- attributes and presence -------------------------------------------------------------------------------------


@rule
def heads_divide(call: Call) -> str | None:
    heads, kv_heads = call["num_heads"], call["kv_num_heads"]
    if heads % kv_heads:
        return expected("num_heads", f"a multiple of kv_num_heads = {kv_heads}", heads)
    call.bind("num_heads", heads, "attribute num_heads")
    call.bind("kv_num_heads", kv_heads, "attribute kv_num_heads")
    return None


@rule
def epsilon_positive(call: Call) -> str | None:
    epsilon = call["qk_norm_epsilon"]
    return None if epsilon > 0 else expected("qk_norm_epsilon", "a value > 0", epsilon)


@rule
def rotary_offset_multiple(call: Call) -> str | None:
    offset = call["rotary_offset"]
    return expected("rotary_offset", "a multiple of 8", offset) if offset % 8 else None


@rule
def required_inputs(call: Call) -> str | None:
    for row in contract.INPUTS:
        needed = not row.optional and not (call.is_contiguous and row.name == "block_table")
        if needed and not call.has(row.name):
            return f"{row.name}: required input, got none."
    return None


@rule
def presence_pattern(call: Call) -> str | None:
    """kv_cache_layout is read before presence is interpreted."""
    layout = call["kv_cache_layout"]
    modes = [mode for mode in contract.MODES if mode.layout == layout]

    def misfits(mode: contract.Mode) -> list[str]:
        missing = [name for name in mode.present if not call.has(name)]
        return missing + [name for name in mode.absent if call.has(name)]

    meant = min(modes, key=lambda mode: len(misfits(mode)))
    for name in misfits(meant):
        if call.has(name):
            return _not_allowed(name, layout)
        others = (f" Or without {' and '.join(mode.absent)}: {mode.doc}." for mode in modes if name in mode.absent)
        return f"{name}: required in the {layout} layout, got none.{''.join(others)}"
    return None


def _not_allowed(name: str, layout: str) -> str:
    return f"{name}: not allowed in the {layout} layout; expected it absent, got a tensor."


@rule
def latent_refuses(call: Call) -> str | None:
    if not call.is_latent:
        return None
    if call["kv_num_heads"] != 1:
        return expected("kv_num_heads", "1 in the LATENT layout", call["kv_num_heads"])
    for name in ("v_scale", "head_sink", "q_norm_weight", "k_norm_weight"):
        if call.has(name):
            return _not_allowed(name, "LATENT")
    if call["v_quant_type"] != "NONE":
        return expected(
            "v_quant_type",
            "NONE in the LATENT layout, where k_quant_type describes the one cache",
            call["v_quant_type"],
        )
    if call["v_cache_dtype"] != "":
        return expected("v_cache_dtype", '"" in the LATENT layout, which has no value cache', call["v_cache_dtype"])
    return None


@rule
def pairs_complete(call: Call) -> str | None:
    for first, second in (("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight")):
        if call.has(first) != call.has(second):
            there, missing = (first, second) if call.has(first) else (second, first)
            return f"{missing}: required together with {there}, got none."
    return None


@rule
def rotary_needs_caches(call: Call) -> str | None:
    if call["do_rotary"] and not call.has("cos_cache"):
        return "cos_cache: required by do_rotary = 1, got none."
    return None


# ---- types -------------------------------------------------------------------------------------------------------


@rule
def types_match(call: Call) -> str | None:
    """The first tensor of T, and of T_CACHE, fixes the type for the others; an unquantized cache has that of T."""
    fixed: dict[str, tuple[np.dtype[Any], str]] = {}
    activations = call.tensors["query"].dtype
    unquantized = [dtype.numpy for dtype in contract.TYPES["T"]]
    for row in _TENSOR_ROWS:
        if not call.has(row.name):
            continue
        got = call.tensors[row.name].dtype
        allowed = contract.TYPES[row.type]
        if got not in [dtype.numpy for dtype in allowed]:
            names = " or ".join(name_of(dtype.numpy) for dtype in allowed)
            return expected(row.name, f"element type {names}", name_of(got))
        if row.type == "T_CACHE" and got in unquantized and got != activations:
            return expected(
                row.name, f"element type {name_of(activations)}, that of query, or a quantized type", name_of(got)
            )
        if row.type in ("T", "T_CACHE"):
            want, who = fixed.setdefault(row.type, (got, row.name))
            if got != want:
                return expected(row.name, f"element type {name_of(want)}, that of {who}", name_of(got))
    return None


@rule
def cache_dtypes_agree(call: Call) -> str | None:
    stored = call.tensors["key_cache"].dtype
    for cache, attribute in (("key_cache", "k_cache_dtype"), ("value_cache", "v_cache_dtype")):
        if not call.has(cache):
            continue
        named = call[attribute]
        if named in contract.REFUSED_CACHE_DTYPES:
            return f"{attribute}: {named!r} is not supported: {contract.REFUSED_CACHE_DTYPES[named]}."
        if stored == INT4.numpy:
            if named != "int4":
                return expected(attribute, f"'int4', because {cache} is uint8", repr(named))
        elif named not in ("", name_of(stored)):
            known = named in BY_NAME
            return expected(
                attribute,
                f"'' or {name_of(stored)!r}, the element type of {cache}",
                repr(named),
                "" if known else "It names no element type.",
            )
    return None


@rule
def quantization_consistent(call: Call) -> str | None:
    quantized = call.cache_dtype.is_quantized
    for cache, quant_type, scale in (
        ("key_cache", "k_quant_type", "k_scale"),
        ("value_cache", "v_quant_type", "v_scale"),
    ):
        if not call.has(cache):
            continue
        kind = call[quant_type]
        if quantized and kind == "NONE":
            return expected(quant_type, f"PER_TENSOR or PER_CHANNEL, because {cache} is {call.cache_dtype}", "NONE")
        if not quantized and kind != "NONE":
            return expected(quant_type, f"NONE, because {cache} is {call.cache_dtype}", kind)
        if kind != "NONE" and not call.has(scale):
            return f"{scale}: required by {quant_type} = {kind}, got none."
        if kind == "NONE" and call.has(scale):
            return f"{scale}: expected it absent with {quant_type} = NONE, got a tensor."
    return None


# ---- shapes ------------------------------------------------------------------------------------------------------


@rule
def query_width(call: Call) -> str | None:
    """head_size is the width of a query row divided by the heads in it."""
    shape = call.tensors["query"].shape
    if len(shape) != 2:
        return expected("query", "rank 2, (token_count, query_width)", f"shape {shape}")
    heads, spelled = call["num_heads"], "num_heads"
    if call.is_packed:
        heads += 2 * call["kv_num_heads"]
        spelled = "num_heads + 2 * kv_num_heads (packed: key and value are absent)"
    width = shape[1]
    if width <= 0 or width % heads:  # a description, which is no array, may be negative
        return expected("query", f"a width divisible by {spelled} = {heads}", width)
    head_size = width // heads
    if head_size % 8:
        return expected("query", f"a head_size (width / {heads}) that is a multiple of 8", head_size)
    note = ", as query without key and value is packed [Q | K | V]" if call.is_packed else ""
    call.bind("token_count", shape[0], "query")
    call.bind("query_width", width, "query")
    call.bind("head_size", head_size, f"query{note}")
    call.bind("kv_width", call["kv_num_heads"] * head_size, f"kv_num_heads * head_size, head_size = {head_size}")
    call.bind(
        "cache_width",
        call.cache_dtype.storage_elements(head_size),
        f"head_size = {head_size}" + (", two int4 codes a byte" if call.cache_dtype is INT4 else "") + note,
    )
    return None


@rule
def v_head_size_valid(call: Call) -> str | None:
    head_size, v_head_size = call.sizes["head_size"], call["v_head_size"]
    if not call.is_latent and v_head_size not in (0, head_size):
        return expected("v_head_size", f"0 or head_size = {head_size} in the SEPARATE layout", v_head_size)
    if v_head_size > head_size:
        return expected("v_head_size", f"a value in [1, head_size = {head_size}], or 0", v_head_size)
    if call.v_head_size != head_size and call["scale"] == 0:
        return (
            f"scale: required when v_head_size ({v_head_size}) differs from head_size ({head_size}), because "
            "1 / sqrt(head_size) would be wrong; got none."
        )
    call.bind("output_width", call["num_heads"] * call.v_head_size, "num_heads * v_head_size")
    return None


@rule
def shapes_match(call: Call) -> str | None:
    """Match every tensor against the contract's named sizes."""
    for row in _TENSOR_ROWS:
        if not call.has(row.name):
            continue
        want = _scale_shape(call, row.name) if row.type == "T_KV_SCALE" and row.name != "lse" else row.shape
        message = call.match(row.name, want)
        if message:
            return message
    return None


def _scale_shape(call: Call, name: str) -> tuple[str, ...]:
    quant_type = call[{"k_scale": "k_quant_type", "v_scale": "v_quant_type"}[name]]
    return ("1",) if quant_type == "PER_TENSOR" else ("kv_num_heads", "1", "head_size")


def _match(call: Shapes, name: str, axis: int, dimension: str, extent: int) -> str | None:
    shape = call.tensors[name].shape
    wanted = []
    for alternative in dimension.split("|"):
        size, _, plus = alternative.partition("+")
        offset = int(plus or 0)
        if size.isdigit():
            value, who = int(size), ""
        elif size in call.sizes:
            value = call.sizes[size] + offset
            who = f" = {value} ({size} from {call.bound_by[size]})"
        elif extent < offset + (1 if size == "batch_size" else 0):
            return expected(name, f"dimension {axis} >= {offset + 1}, {alternative}", f"shape {shape}")
        else:
            call.bind(size, extent - offset, name)
            return None
        if extent == value:
            return None
        wanted.append(f"{alternative}{who}")
    return expected(name, f"dimension {axis} to be {' or '.join(wanted)}", f"shape {shape}")


@rule
def block_size_power_of_two(call: Call) -> str | None:
    block_size = call.sizes["block_size"]
    if call.is_contiguous:
        call.bind("max_blocks_per_sequence", 1, "one block a sequence")
    elif block_size < 16 or block_size & (block_size - 1):
        return expected("key_cache", "block_size (dimension 1) to be a power of two >= 16", block_size)
    return None


@rule
def rotary_fits(call: Call) -> str | None:
    if not call.has("cos_cache"):
        return None
    rotary_dim, offset, head_size = 2 * call.sizes["rotary_half"], call["rotary_offset"], call.sizes["head_size"]
    if rotary_dim > head_size:
        return expected("cos_cache", f"rotary_dim (2 * dimension 1) <= head_size = {head_size}", rotary_dim)
    if offset + rotary_dim > head_size:
        return expected(
            "rotary_offset",
            f"rotary_offset + rotary_dim ({rotary_dim}) <= head_size = {head_size}",
            f"{offset} + {rotary_dim}",
        )
    if call["do_rotary"] and (rotary_dim == 0 or call.sizes["max_seq_len"] == 0):
        return expected(
            "cos_cache", "at least one position and one channel pair", f"shape {call.tensors['cos_cache'].shape}"
        )
    return None


# ---- placement ---------------------------------------------------------------------------------------------------


@rule
def one_device(call: Call) -> str | None:
    device = call.tensors["query"].device
    for name, tensor in call.tensors.items():
        on_host = name in contract.INPUT_BY_NAME and contract.INPUT_BY_NAME[name].on_host
        want = "cpu" if on_host else device
        if tensor.device != want:
            who = "because it is a host input" if on_host else "the device of query"
            return expected(name, f"an array on {want}, {who}", f"one on {tensor.device}")
    return None


@rule
def written_tensors_writeable(call: Call) -> str | None:
    for name, tensor in call.tensors.items():
        if name not in ("key_cache", "value_cache", *contract.OUTPUT_BY_NAME):
            continue
        if not tensor.writeable:
            return expected(name, "a writeable array", "a read-only one")
        if 0 in tensor.shape:  # the strides of an array without elements mean nothing
            continue
        if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.strides, tensor.shape, strict=True)):
            return expected(name, "elements of their own", f"a broadcast view (strides {tensor.strides})")
        reach = 0  # of the axes with smaller strides: slices and transposed arrays step beyond it
        for stride, extent in sorted((abs(s), n) for s, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1):
            if stride <= reach:
                return expected(name, "elements of their own", f"a view that repeats some (strides {tensor.strides})")
            reach += stride * (extent - 1)
    return None


@rule
def layout_contiguous(call: Call) -> str | None:
    """NumPy takes any strides. On a GPU rows may be strided but their elements must touch; no tensor is ever copied."""
    if call.tensors["query"].device == "cpu":
        return None
    strided = {"query", "key", "value", "key_cache", "value_cache", "attention_bias"}
    for name, tensor in call.tensors.items():
        if 0 in tensor.shape or name == "attention_metadata":  # of the host
            continue
        if name in strided:
            if tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
                return expected(
                    name,
                    "elements of a row next to each other (last stride 1)",
                    f"strides {tensor.strides} in elements",
                )
            if any(stride < 0 for stride in tensor.strides):
                return expected(name, "strides >= 0", f"{tensor.strides} in elements")
        elif not tensor.is_contiguous:
            return expected(name, "a C-contiguous array", f"strides {tensor.strides} in elements")
    return None


@rule
def elements_aligned(call: Call) -> str | None:
    """A GPU reads whole elements only. NumPy copes with any address."""
    for name, tensor in call.tensors.items():
        if tensor.device != "cpu" and is_misaligned(tensor):
            multiple = f"multiple of {tensor.dtype.itemsize}, the size of its elements"
            if not tensor.whole_strides:
                return expected(name, f"strides each a {multiple}", "others")
            return expected(name, f"an address that is a {multiple}", f"{tensor.pointer:#x}")
    return None


def is_misaligned(tensor: TensorInfo) -> bool:
    """Whether an array's elements straddle the addresses of their type."""
    return (tensor.pointer % tensor.dtype.itemsize != 0 or not tensor.whole_strides) and 0 not in tensor.shape


@rule
def memory_apart(call: Call) -> str | None:
    return shared_memory(call.tensors, spans(call.tensors))


def spans(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, int]]:
    """Bytes before the first element of each array and from it on, between which all its elements lie."""
    result = {}
    for name, tensor in tensors.items():
        if 0 in tensor.shape or name == "attention_metadata":  # of the host
            continue
        reach = [stride * (extent - 1) for stride, extent in zip(tensor.strides, tensor.shape, strict=True)]
        size = tensor.dtype.itemsize
        result[name] = size * sum(x for x in reach if x < 0), size * (1 + sum(x for x in reach if x > 0))
    return result


def shared_memory(
    tensors: Mapping[str, TensorInfo], spans: Mapping[str, tuple[int, int]], written: Iterable[str] = WRITTEN
) -> str | None:
    """Message if an array that is written shares memory with another.

    Not even output with query: a kernel may read query rows again when it has written their output.
    """
    places = {name: (tensors[name].pointer + low, tensors[name].pointer + high) for name, (low, high) in spans.items()}
    for name in written:
        if name not in places:
            continue
        low, high = places[name]
        for other, (first, last) in places.items():
            if first < high and low < last and other != name:
                one, two = tensors[name], tensors[other]
                if _overlap(one[:4], two[:4], two.pointer - one.pointer):
                    # Of an input and the output it is the output that is in the wrong place.
                    blamed, owner = (name, other) if name == "output" else (other, name)
                    what = f"{'the buffer' if low == first else 'memory'} of {contract.argument(owner)}"
                    return expected(blamed, "memory of its own", what)
    return None


@lru_cache(maxsize=256)
def _overlap(one: tuple[Any, ...], two: tuple[Any, ...], distance: int) -> bool:
    """Whether two arrays, (shape, dtype, device, strides), share a byte, ``distance`` bytes apart."""
    base = 1 << 62  # nothing is read
    arrays = []
    for (shape, dtype, _, strides), address in ((one, base), (two, base + distance)):
        size = dtype.itemsize
        interface = {
            "version": 3,
            "shape": shape,
            "typestr": f"|V{size}",
            "strides": tuple(size * stride for stride in strides),
            "data": (address, True),
        }
        arrays.append(np.asarray(SimpleNamespace(__array_interface__=interface)))
    try:
        return bool(np.shares_memory(arrays[0], arrays[1], max_work=1_000_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # such strides are no slices of one array
        return True


# ---- the problem -------------------------------------------------------------------------------------------------


def _problem(
    call: Call, return_lse: bool, qk_dtype: DType, metadata: tuple[int, ...] | None, split_keys: int | None
) -> Problem:
    sizes = call.sizes
    query_bound, kv_bound, kv_lower = 0, 0, 0
    if metadata is not None:
        for i, bound in enumerate(metadata):
            if bound < 0:
                raise InvalidArgumentError(expected(f"attention_metadata[{i}]", "a bound >= 0", bound))
        query_bound = min(metadata[0], sizes["token_count"])
        kv_bound = min(metadata[1], sizes["max_blocks_per_sequence"] * sizes["block_size"])
        kv_lower = metadata[2] if len(metadata) == 3 else 0
    if qk_dtype not in contract.TYPES["QK"]:
        raise InvalidArgumentError(expected("qk_dtype", " or ".join(map(str, contract.TYPES["QK"])), qk_dtype))
    rotary = bool(call["do_rotary"])
    window = call["local_window_size"]
    return Problem(
        token_count=sizes["token_count"],
        batch_size=sizes["batch_size"],
        num_heads=sizes["num_heads"],
        kv_num_heads=sizes["kv_num_heads"],
        head_size=sizes["head_size"],
        v_head_size=call.v_head_size,
        num_blocks=sizes["num_blocks"],
        block_size=sizes["block_size"],
        max_blocks_per_sequence=sizes["max_blocks_per_sequence"],
        io_dtype=next(row for row in contract.TYPES["T"] if row.numpy == call.tensors["query"].dtype),
        cache_dtype=call.cache_dtype,
        mode="latent" if call.is_latent else "packed" if call.is_packed else "separate",
        scale=call["scale"] or 1.0 / math.sqrt(sizes["head_size"]),
        is_contiguous=call.is_contiguous,
        softcap=call["softcap"],
        local_window_size=window if 0 < window <= np.iinfo(np.int32).max else -1,  # wider than any position: none
        is_causal=bool(call["is_causal"]),
        do_rotary=rotary,
        rotary_interleaved=rotary and bool(call["rotary_interleaved"]),
        rotary_offset=call["rotary_offset"] if rotary else 0,
        rotary_dim=2 * sizes["rotary_half"] if rotary else 0,
        max_seq_len=sizes["max_seq_len"] if rotary else 0,
        has_qk_norm=call.has("q_norm_weight"),
        qk_norm_epsilon=call["qk_norm_epsilon"],
        k_quant_type=call["k_quant_type"],
        v_quant_type=call["v_quant_type"],
        has_slot_mapping=call.has("slot_mapping"),
        has_head_sink=call.has("head_sink"),
        has_query_positions=call.has("query_positions"),
        has_rotary_positions=call.has("rotary_positions"),
        bias_shape=call.tensors["attention_bias"].shape if call.has("attention_bias") else None,  # type: ignore[arg-type]
        qk_output=call["qk_output"],
        qk_dtype=qk_dtype if call["qk_output"] else None,
        return_lse=return_lse,
        max_query_len_bound=query_bound,
        max_kv_len_bound=kv_bound,
        max_kv_len_lower_bound=kv_lower,
        device=call.tensors["query"].device,
        split_keys=split_keys or 0,
    )


def check_output_qk_size(problem: Problem, max_context_len: int, limit: int) -> None:
    """Refuse an output_qk of more than ``limit`` bytes, before anything is allocated or written."""
    if problem.qk_dtype is None:
        return
    size = problem.num_heads * problem.token_count * max_context_len * problem.qk_dtype.bits // 8
    if size > limit:
        raise InvalidArgumentError(
            f"output_qk: expected at most {limit} bytes (max_output_qk_bytes), got {size} for "
            f"(num_heads, token_count, max_context_len) = ({problem.num_heads}, {problem.token_count}, "
            f"{max_context_len}) of {problem.qk_dtype}."
        )


# ---- values ------------------------------------------------------------------------------------------------------


def check_host_values(values: Mapping[str, Array]) -> None:
    """Check the values that the contract forbids wherever the host can see them.

    Parameters
    ----------
    values : mapping of input name to ndarray
        Inputs in host memory; absent ones are skipped.
    """
    for name in ("k_scale", "v_scale"):
        if name in values:
            require_values(name, values[name], np.isfinite(values[name]) & (values[name] > 0), "a finite value > 0")
    if "query_positions" in values:
        require_values("query_positions", values["query_positions"], values["query_positions"] >= 0, "a position >= 0")


def check_device_values(problem: Problem, values: Mapping[str, Array]) -> None:
    """Check every value that the kernels would have to survive: on request only, because it reads the device.

    Parameters
    ----------
    problem : Problem
    values : mapping of input name to ndarray
        Host copies of the integer inputs and scales.

    Raises
    ------
    InvalidArgumentError
        Naming the tensor, the index, the value and the allowed range.
    """
    check_host_values(values)
    cu = values["cumulative_sequence_length"].astype(np.int64)
    past = values["past_seqlens"].astype(np.int64)
    _check_lengths(problem, cu, past)
    q_len = np.diff(cu)
    kv_len = past + q_len
    if "block_table" in values:
        _check_blocks(problem, values["block_table"], past, q_len)
    tokens = int(cu[-1])
    if "slot_mapping" in values:
        slots = values["slot_mapping"][:tokens]
        require_values(
            "slot_mapping",
            slots,
            (slots >= -1) & (slots < problem.slot_count),
            f"-1 or a slot in [0, num_blocks * block_size = {problem.slot_count})",
        )
    if problem.do_rotary:
        name = "rotary_positions" if problem.has_rotary_positions else "query_positions"
        if name in values:
            positions = values[name][:tokens]
        else:
            name, positions = "past_seqlens", np.where(q_len > 0, kv_len - 1, 0)
        require_values(
            name,
            positions,
            positions < problem.max_seq_len,
            f"positions < {problem.max_seq_len}, the rows of cos_cache",
        )
    _check_bounds(problem, int(q_len.max(initial=0)), int(kv_len.max(initial=0)))


def _check_lengths(problem: Problem, cu: Array, past: Array) -> None:
    """Check cumulative_sequence_length and past_seqlens."""
    name = "cumulative_sequence_length"
    require_values(name, cu, (np.arange(cu.size) > 0) | (cu == 0), "0 as the first entry")
    require_values(name, cu, np.diff(cu, prepend=0) >= 0, "a value not below the one before")
    require_values(name, cu, cu <= problem.token_count, f"a value <= token_count = {problem.token_count}")
    require_values("past_seqlens", past, past >= 0, "a value >= 0")
    q_len = np.diff(cu)
    require_values(
        "past_seqlens",
        past + q_len,
        (q_len == 0) | (past + q_len <= problem.capacity),
        f"past + new tokens <= the block table's capacity {problem.capacity}",
    )


def _check_blocks(problem: Problem, table: Array, past: Array, q_len: Array) -> None:
    """Check the entries of block_table that sequences with new tokens read or write."""
    window_start = 0 * past
    if problem.has_window and not problem.has_query_positions:
        window_start = np.maximum(0, past - problem.local_window_size + 1)
    first, end = window_start // problem.block_size, past + q_len
    entry = np.arange(table.shape[1])
    used = (q_len > 0)[:, None] & (entry >= first[:, None]) & (entry * problem.block_size < end[:, None])
    require_values(
        "block_table",
        table,
        ~used | ((table >= -1) & (table < problem.num_blocks)),
        f"-1 or a block id in [0, num_blocks = {problem.num_blocks})",
    )


def _check_bounds(problem: Problem, q_len: int, kv_len: int) -> None:
    """Check bounds and capacities that the host gave against the longest of the batch."""
    for name, longest, bound in (
        ("max_query_len_bound", q_len, problem.max_query_len_bound),
        ("max_kv_len_bound", kv_len, problem.max_kv_len_bound),
    ):
        if bound and longest > bound:
            raise InvalidArgumentError(expected("attention_metadata", f"{name} >= the batch's {longest}", bound))
    if problem.bias_shape is not None:
        for axis, longest, what in ((2, q_len, "new tokens"), (3, kv_len, "context")):
            if problem.bias_shape[axis] < longest:
                want = f"dimension {axis} >= {longest}, the longest {what} of the batch"
                raise InvalidArgumentError(expected("attention_bias", want, problem.bias_shape[axis]))


def require_values(name: str, values: Array, good: Array, allowed: str) -> None:
    """Refuse the first value that is not good, by its tensor and index; ``allowed`` says what would be."""
    if good.all():
        return
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    where = ", ".join(map(str, index))
    raise InvalidArgumentError(expected(f"{name}[{where}]", allowed, values[index]))
