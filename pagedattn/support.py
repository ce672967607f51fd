"""Which backend serves what: the one table that dispatch walks, errors quote, documentation prints and tests enumerate.

Order is priority. Features that the prologue serves (packed QKV, QK-norm, RoPE, quantized stores, slot_mapping) are no
column: `write_cache` does them for every CUDA backend alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from pagedattn.dtypes import FLOAT32, INT4
from pagedattn.problem import Problem


class Feature(Enum):
    """What a call may need of the attention kernels; the value is its name in messages and tables."""

    SEPARATE = "kv_cache_layout = SEPARATE"
    LATENT = "kv_cache_layout = LATENT"
    FLOAT32 = "float32 activations"
    QUANTIZED_CACHE = "int8 or float8e4m3fn cache"
    INT4_CACHE = "packed int4 cache"
    WINDOW = "local_window_size"
    SOFTCAP = "softcap"
    HEAD_SINK = "head_sink"
    QUERY_POSITIONS = "query_positions"
    ATTENTION_BIAS = "attention_bias"
    OUTPUT_QK = "output_qk"
    NON_CAUSAL = "is_causal = 0"
    LSE = "lse"


def features_of(problem: Problem) -> tuple[Feature, ...]:
    """Features that a call needs."""
    needs = {
        Feature.SEPARATE: not problem.is_latent,
        Feature.LATENT: problem.is_latent,
        Feature.FLOAT32: problem.io_dtype == FLOAT32,
        Feature.QUANTIZED_CACHE: problem.cache_dtype.is_quantized and problem.cache_dtype != INT4,
        Feature.INT4_CACHE: problem.cache_dtype == INT4,
        Feature.WINDOW: problem.has_window,
        Feature.SOFTCAP: problem.softcap > 0,
        Feature.HEAD_SINK: problem.has_head_sink,
        Feature.QUERY_POSITIONS: problem.has_query_positions,
        Feature.ATTENTION_BIAS: problem.bias_shape is not None,
        Feature.OUTPUT_QK: problem.qk_output != 0,
        Feature.NON_CAUSAL: not problem.is_causal,
        Feature.LSE: problem.return_lse,
    }
    return tuple(feature for feature, needed in needs.items() if needed)


@dataclass(frozen=True)
class Yes:
    """The backend serves the feature; ``note`` says how."""

    note: str = ""


@dataclass(frozen=True)
class No:
    """It does not; ``reason`` completes the sentence "decode: ..."."""

    reason: str


def no_limit(problem: Problem) -> str | None:
    """Every head size that is a multiple of 8 is served."""
    return None


def always(problem: Problem) -> bool:
    """Preferred whenever it can serve the call."""
    return True


@dataclass(frozen=True, eq=False)  # rows are compared by identity
class Row:
    """One backend.

    Attributes
    ----------
    name, module : str
        Name in ``backend=`` and the module that holds its ``plan``.
    sdpa_kernel : str
        Name in debug output, as ONNX Runtime spells it.
    min_arch : int
        Smallest compute capability, 80 for 8.0; 0 = runs on the CPU.
    cells : mapping of Feature to Yes or No
    limits : callable
        Problem to the reason why its sizes are not served, or None.
    prefers : callable
        Problem to whether the backend is a good choice, given that it can serve it.
    """

    name: str
    module: str
    sdpa_kernel: str
    min_arch: int
    cells: Mapping[Feature, Yes | No]
    limits: Callable[[Problem], str | None] = no_limit
    prefers: Callable[[Problem], bool] = always
    prefers_text: str = "whenever it can serve the call"


ALL_YES: dict[Feature, Yes | No] = {feature: Yes() for feature in Feature}

_NO_FLOAT32 = No("the kernels take float16 and bfloat16")
_IN_REGISTERS = Yes("codes are widened in registers")
# Kernels that add up weighted values tile by tile.
_FUSED: dict[Feature, Yes | No] = {
    **ALL_YES,
    Feature.FLOAT32: _NO_FLOAT32,
    Feature.QUANTIZED_CACHE: _IN_REGISTERS,
    Feature.INT4_CACHE: _IN_REGISTERS,
    Feature.OUTPUT_QK: No("its kernel never holds the scores; dense does"),
}
_FUSED_SEPARATE: dict[Feature, Yes | No] = {**_FUSED, Feature.LATENT: No("needs a value cache")}


def narrow_heads(problem: Problem) -> str | None:
    """Head sizes up to 256, whose accumulators fit a warp's registers."""
    return None if problem.head_size <= 256 else f"head_size {problem.head_size} is above 256"


def decode_shaped(problem: Problem) -> bool:
    """One new token a sequence on average, or up to 8 by the metadata's bound or, without one, 4 on average.

    A guess that costs speed at worst.
    """
    if problem.token_count <= problem.batch_size:
        return True
    if problem.max_query_len_bound > 0:
        return problem.max_query_len_bound <= 8
    return problem.token_count <= 4 * problem.batch_size


DECODE = Row(
    "decode",
    "pagedattn.backends.decode_split_kv",
    "DECODER_ATTENTION",
    80,
    _FUSED_SEPARATE,
    limits=narrow_heads,
    prefers=decode_shaped,
    prefers_text="batches of few new tokens a sequence: up to four on average, up to eight if bounds say so",
)


FLASH = Row(
    "flash",
    "pagedattn.backends.flash_prefill",
    "FLASH_ATTENTION",
    80,
    _FUSED_SEPARATE,
    limits=narrow_heads,
)


def latent_limits(problem: Problem) -> str | None:
    """Rows up to 576 channels, of which a tile fits shared memory beside the queries."""
    return None if problem.head_size <= 576 else f"head_size {problem.head_size} is above 576"


LATENT = Row(
    "latent",
    "pagedattn.backends.latent_mla",
    "LATENT_ATTENTION",
    80,
    {
        **_FUSED,
        Feature.SEPARATE: No("serves the LATENT layout only"),
        Feature.HEAD_SINK: No("the contract refuses it in the LATENT layout"),
    },
    limits=latent_limits,
)


def dense_limits(problem: Problem) -> str | None:
    """Head sizes up to 1024, of which a tile fits shared memory."""
    return None if problem.head_size <= 1024 else f"head_size {problem.head_size} is above 1024"


DENSE = Row(
    "dense",
    "pagedattn.backends.dense_attention",
    "MATH",
    80,
    {**ALL_YES, Feature.FLOAT32: _NO_FLOAT32},
    limits=dense_limits,
)

NUMPY = Row("numpy", "pagedattn.backends.numpy_reference", "NUMPY_REFERENCE", 0, ALL_YES)

ROWS: tuple[Row, ...] = (LATENT, DECODE, FLASH, DENSE, NUMPY)
BY_NAME = {row.name: row for row in ROWS}


def why_not(row: Row, problem: Problem, arch: int) -> str | None:
    """Reason why a backend cannot serve a call, or None.

    Parameters
    ----------
    row : Row
    problem : Problem
    arch : int
        Compute capability of the device, 90 for 9.0; 0 for the CPU.
    """
    if (row.min_arch == 0) != (arch == 0):
        if row.min_arch:
            return "needs arrays on a CUDA device"
        is_emulated = problem.device == "emulated"
        return (
            "is for emulated calls only if asked for by name" if is_emulated else "runs on arrays in host memory only"
        )
    if arch < row.min_arch:
        return f"needs compute capability {row.min_arch / 10:.1f}, the device has {arch / 10:.1f}"
    for feature in features_of(problem):
        cell = row.cells[feature]
        if isinstance(cell, No):
            return f"{feature.value}: {cell.reason}"
    return row.limits(problem)
