"""Command line: ``python -m pagedattn info``, ``explain`` and ``warmup``.

The first two run anywhere: without a GPU, without CuPy. The last needs NVRTC.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata

import pagedattn
from pagedattn import contract, env
from pagedattn.dispatch import select
from pagedattn.dtypes import BY_NAME, FLOAT32, INT32, DType
from pagedattn.errors import PagedAttentionError
from pagedattn.jit import cuda
from pagedattn.jit.compiler import arch_of
from pagedattn.jit.disk_cache import default_directory
from pagedattn.problem import Problem, TensorInfo, imagined
from pagedattn.support import ROWS, Row
from pagedattn.testing import emulator
from pagedattn.validate import coerce_split_keys, validate
from pagedattn.warmup import record, warm_up

Lines = list[tuple[str, str]]
INT32_MAX = 2**31 - 1  # lengths are int32
PACKAGES = ("numpy", "ml_dtypes", "torch", "transformers", "onnx", "platformdirs", "nvidia-ml-py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 for a call that cannot be served, or 2 for a usage error."""
    parser = argparse.ArgumentParser("pagedattn", description="Paged attention as one function.")
    parser.add_argument("--version", action="version", version=f"pagedattn {pagedattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")

    command("info", "versions, devices, compiler, caches, and which backends can run")
    _add_problem(command("explain", "which backend and kernels serve a call, and why not each earlier backend"))
    _add_problem(
        command(
            "warmup",
            "compile the kernels of a call, and for decoding those of other batch sizes, into the cache, GPU or not",
        )
    )
    given = parser.parse_args(arguments)
    if given.command == "info":
        print(info())
        return 0
    try:
        if given.command == "warmup":
            _arch_number(given.arch)
        problem, choice = explain(given)
        lines = [f"problem: {_shown(problem)}\n{choice}"]
        if choice.row.min_arch:  # for warmup, too: what nothing can be compiled for is refused before anything is shown
            kernels = _kernels(problem, choice, _arch_number(given.arch))
            lines += [kernels] if given.command == "explain" else []
        print("\n".join(lines))
        if given.command == "warmup":
            count = warm_up([problem], _arch_number(given.arch), choice.row.name, progress=_show_progress)
            print(f"{count} kernels are in the cache for {given.arch}")
    except PagedAttentionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show_progress(ready: int, total: int) -> None:
    if not sys.stderr.isatty():  # a log keeps every line
        if ready == total:
            print(f"{total} ready", file=sys.stderr)
        return
    width = 40
    filled = width * ready // total
    end = "\n" if ready == total else ""
    print(f"\rcompiling [{'#' * filled}{'.' * (width - filled)}] {ready}/{total}", end=end, file=sys.stderr, flush=True)


# ---- info --------------------------------------------------------------------------------------------------------


def info() -> str:
    """What is installed, what of it works, and what to do about the rest."""
    devices, cuda_lines = _cuda()
    sections = {
        "packages": _packages(),
        "CUDA": cuda_lines,
        "kernel cache": [_kernel_cache()],
        "backends": [(row.name, _runs(row, devices)) for row in ROWS],
        "environment": [(variable.name, f"{variable.text() or '(unset)'}\n{variable.doc}") for variable in env.TABLE],
    }
    head = f"pagedattn {pagedattn.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return "\n\n".join([head, *(f"{title}\n{_table(lines)}" for title, lines in sections.items())])


def _table(lines: Lines) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        f"  {name if first else '':{width}}  {line}"
        for name, text in lines
        for first, line in zip((True, *[False] * text.count("\n")), text.splitlines(), strict=True)
    )


def _packages() -> Lines:
    found = {name: _version(name) for name in PACKAGES}
    # CuPy has one name per CUDA version.
    cupys = {dist.name: dist.version for dist in metadata.distributions() if (dist.name or "").startswith("cupy")}
    lines = [(name, version or "not installed") for name, version in {**found, **cupys}.items()]
    if len(cupys) > 1:
        lines.append(("", f"{' and '.join(cupys)} exclude each other: keep one"))
    return lines


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> tuple[dict[int, tuple[int, int]], Lines]:
    """Compute capability of each device by id, and lines about each part of CUDA."""
    try:
        cupy = cuda.cupy()
    except PagedAttentionError as error:
        return {}, [("CuPy", f"not usable: {error}")]
    lines = [("CuPy", f"{cupy.__version__}, built for CUDA {_dotted(cupy.cuda.runtime.runtimeGetVersion())}")]
    try:
        nvrtc = cuda.nvrtc()
        version, headers = (".".join(map(str, x)) for x in (nvrtc.version, nvrtc.header_version))
        lines.append(("NVRTC", f"{version}, compiles for sm_{min(nvrtc.archs)} to sm_{max(nvrtc.archs)}"))
        lines.append(("headers", f"{headers} in {nvrtc.include_dir}"))
    except PagedAttentionError as error:
        lines.append(("NVRTC", f"not usable: {error}"))
    try:
        cuda.require_device()
    except PagedAttentionError as error:
        return {}, [*lines, ("devices", f"none: {error}")]
    runtime, api = cupy.cuda.runtime, cuda.Api()
    lines.append(("driver", f"supports CUDA {_dotted(runtime.driverGetVersion())}"))
    devices = {device: api.capability(device) for device in range(runtime.getDeviceCount())}
    for device, (major, minor) in devices.items():
        properties = runtime.getDeviceProperties(device)
        name, size = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        lines.append((f"device {device}", f"{name}, compute capability {major}.{minor}, {size:.1f} GiB"))
    return devices, lines


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _kernel_cache() -> tuple[str, str]:
    directory = default_directory()
    if directory is None:
        return ("none", "the user has no home, so kernels are kept in memory only: set PAGEDATTN_CACHE_DIR")
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # False for a name too long
    if not os.path.isdir(there) or not os.access(there, os.W_OK):
        return (str(directory), "cannot be written, so kernels are kept in memory only: set PAGEDATTN_CACHE_DIR")
    kernels = list(directory.glob("*.kernel")) if there == directory else []
    size = sum(path.stat().st_size for path in kernels) / 2**20
    return (str(directory), f"{len(kernels)} kernels, {size:.1f} MiB")


def _runs(row: Row, devices: dict[int, tuple[int, int]]) -> str:
    """Whether a backend can run here, on which devices, and if not why."""
    if row.min_arch == 0:
        return "yes, on arrays in host memory" + (" if asked for by name" if env.emulate() else "")
    if env.emulate():
        try:
            emulator()
        except PagedAttentionError as error:
            return f"no: {error}"
        return "yes, on arrays in host memory, emulated" + ("\n" + _on_gpus(row, devices) if devices else "")
    return _on_gpus(row, devices) if devices else "no: needs a GPU"


def _on_gpus(row: Row, devices: dict[int, tuple[int, int]]) -> str:
    try:
        archs = cuda.nvrtc().archs
    except PagedAttentionError:
        return "no: needs NVRTC"
    answers = []
    for device, capability in devices.items():
        answer = "yes"
        if 10 * capability[0] + capability[1] < row.min_arch:
            answer = f"no: needs compute capability {row.min_arch / 10:.1f}"
        else:
            try:
                answer = f"yes, compiled for {arch_of(capability, archs)}"
            except PagedAttentionError as error:
                answer = f"no: {error}"
        answers.append(f"device {device}: {answer}")
    return "\n".join(answers)


# ---- explain -----------------------------------------------------------------------------------------------------


def _add_problem(parser: argparse.ArgumentParser) -> None:
    def size(name: str, default: int | None = None, text: str = "", *, required: bool = False) -> None:
        parser.add_argument(name, type=int, metavar="N", default=default, required=required, help=text)

    def flag(name: str, text: str = "") -> None:
        parser.add_argument(name, action="store_true", help=text)

    types, cache_types = ([row.name for row in contract.TYPES[name]] for name in ("T", "T_CACHE"))
    size("--num-heads", required=True)
    size("--head-size", required=True)
    size("--kv-num-heads", text="default: num_heads; with --layout LATENT 1")
    parser.add_argument("--dtype", default="bfloat16", choices=types)
    parser.add_argument("--cache-dtype", choices=cache_types, help="default: that of --dtype")
    size("--batch", 1, "sequences (default: %(default)s)")
    size("--query-len", 1, "new tokens of each sequence (default: %(default)s)")
    size("--context", 4096, "longest context, new tokens included (default: %(default)s)")
    parser.add_argument("--arch", default="sm_90", help="cpu, sm_80, sm_90, ... (default: %(default)s)")
    size("--block-size", 16, "default: %(default)s")
    parser.add_argument("--layout", default="SEPARATE", choices=contract.LAYOUTS, help="kv_cache_layout")
    size("--v-head-size", 0, "width of an output head, with --layout LATENT")
    size("--window", -1, "local_window_size")
    parser.add_argument("--softcap", default=0.0, type=float, metavar="X")
    parser.add_argument("--qk-output", default=0, type=int, choices=(0, 1, 2))
    flag("--per-channel", "scales of a quantized cache per channel, not per tensor")
    flag("--packed", "query holds [Q | K | V]")
    flag("--metadata", "attention_metadata gives the exact bounds")
    flag("--head-sink")
    flag("--query-positions")
    flag("--attention-bias")
    flag("--non-causal", "is_causal = 0")
    flag("--lse", "return_lse")
    size("--split-keys", 0, "split_keys; 0: as the backend chooses")
    parser.add_argument("--backend", help="force one, as backend= does")


def explain(given: argparse.Namespace) -> tuple[Problem, pagedattn.Choice]:
    """The problem that flags describe, checked like a call, and the choice for it."""
    for flag, least in (("batch", 1), ("query_len", 1), ("block_size", 1), ("context", given.query_len)):
        value, name = getattr(given, flag), flag.replace("_", "-")
        why = ", the new tokens included" if flag == "context" else ""
        if not least <= value <= INT32_MAX:
            want = f">= {least}{why}" if value < least else f"<= {INT32_MAX}"
            raise pagedattn.InvalidArgumentError(f"--{name}: expected a value {want}, got {value}.")
    if given.batch * given.query_len > INT32_MAX:
        got = f"{given.batch} sequences with {given.query_len} each"
        raise pagedattn.InvalidArgumentError(f"--batch: expected at most {INT32_MAX} new tokens in all, got {got}.")
    arch = 0 if given.arch == "cpu" else _arch_number(given.arch)
    latent = given.layout == "LATENT"
    kv_heads = given.kv_num_heads or (1 if latent else given.num_heads)
    cache = BY_NAME[given.cache_dtype or given.dtype]
    quant_type = "NONE" if not cache.is_quantized else "PER_CHANNEL" if given.per_channel else "PER_TENSOR"
    cache_dtype = cache.name if cache.name == "int4" else ""
    problem = validate(
        _inputs(given, kv_heads, cache, "cuda:0" if arch else "cpu"),
        {
            "num_heads": given.num_heads,
            "kv_num_heads": kv_heads,
            "scale": 1.0,  # required with --v-head-size, and without influence on the choice
            "softcap": given.softcap,
            "local_window_size": given.window,
            "k_quant_type": quant_type,
            "v_quant_type": "NONE" if latent else quant_type,
            "k_cache_dtype": cache_dtype,
            "v_cache_dtype": "" if latent else cache_dtype,
            "v_head_size": given.v_head_size,
            "kv_cache_layout": given.layout,
            "qk_output": given.qk_output,
            "is_causal": int(not given.non_causal),
        },
        return_lse=given.lse,
        metadata=(given.query_len, given.context) if given.metadata else None,
        split_keys=coerce_split_keys(given.split_keys or None),
    )
    return problem, select(problem, arch, given.backend or env.backend())


def _inputs(given: argparse.Namespace, kv_heads: int, cache: DType, device: str) -> dict[str, TensorInfo]:
    """Descriptions of the inputs of a call that flags describe."""
    latent = given.layout == "LATENT"
    tokens, blocks = given.batch * given.query_len, -(-given.context // given.block_size)
    io = BY_NAME[given.dtype]
    heads = given.num_heads + 2 * kv_heads if given.packed else given.num_heads
    kv_shape = (tokens, kv_heads * given.head_size)
    cache_shape = (given.batch * blocks, given.block_size, kv_heads, cache.storage_elements(given.head_size))
    scale_shape = (kv_heads, 1, given.head_size) if given.per_channel else (1,)
    rows: dict[str, tuple[bool, tuple[int, ...], DType]] = {
        "query": (True, (tokens, heads * given.head_size), io),
        "key": (not given.packed, kv_shape, io),
        "value": (not given.packed and not latent, kv_shape, io),
        "key_cache": (True, cache_shape, cache),
        "value_cache": (not latent, cache_shape, cache),
        "cumulative_sequence_length": (True, (given.batch + 1,), INT32),
        "past_seqlens": (True, (given.batch,), INT32),
        "block_table": (True, (given.batch, blocks), INT32),
        "head_sink": (given.head_sink, (given.num_heads,), io),
        "k_scale": (cache.is_quantized, scale_shape, FLOAT32),
        "v_scale": (cache.is_quantized and not latent, scale_shape, FLOAT32),
        "query_positions": (given.query_positions, (tokens,), INT32),
        "attention_bias": (given.attention_bias, (given.batch, 1, given.query_len, given.context), io),
    }
    return {
        name: imagined(number, shape, dtype.numpy, device)
        for number, (name, (is_present, shape, dtype)) in enumerate(rows.items())
        if is_present
    }


def _kernels(problem: Problem, choice: pagedattn.Choice, arch: int) -> str:
    """Kernels that a call with aligned arrays launches on a GPU that need not be here, with their Specs, in order."""
    try:
        archs = cuda.nvrtc().archs
    except PagedAttentionError:  # nothing is compiled here
        archs = (arch,)
    recorder = record(choice.row, [problem], arch, archs)
    title = f"kernels, compiled for {recorder.arch} and chosen for {recorder.multiprocessors} multiprocessors:"
    return f"{title}\n{_table([(kernel.stem, str(spec)) for kernel, spec in recorder.loaded])}"


def _shown(problem: Problem) -> str:
    """Fields of a problem that are not as by default."""
    values = ((row.name, getattr(problem, row.name), row.default) for row in fields(problem) if row.name != "scale")
    return ", ".join(f"{name}={value}" for name, value, default in values if value != default)


def _arch_number(text: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", text)
    if match is None:
        want = "a GPU: sm_ and a number as in sm_90" if text == "cpu" else "cpu, or sm_ and a number as in sm_90"
        raise pagedattn.InvalidArgumentError(f"--arch: expected {want}, got {text!r}.")
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
