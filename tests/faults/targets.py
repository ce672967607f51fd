"""Every way to run a call that exists on this machine: the NumPy backend, and each CUDA backend on a GPU or emulated.

A target takes host arrays, puts them where its backend wants them, and brings the results back. A call that the support
table says its backend does not serve has to be refused with that very reason; `Target.run` sees to it and skips.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import pagedattn
from pagedattn import env, support
from pagedattn import runtime as runtimes
from pagedattn.arrays import NUMPY, dtype_named
from pagedattn.backends import decode_split_kv
from pagedattn.dtypes import FLOAT8E4M3FN
from pagedattn.jit.launch import Launch
from pagedattn.kernels import decode_heads_sm90
from pagedattn.support import Feature, No, Row
from pagedattn.testing import emulator
from pagedattn.validate import validate
from tests.emulator import toolchain
from tests.support.build import TYPES, Built

from . import eight_heads
from .scene import ROUNDING, Array, Call, assert_close, assert_same_bytes, expected

Place = Callable[[str, Array], Any]


@dataclass(frozen=True)
class Outcome:
    """Results of a call in host memory; output is (token_count, num_heads, v_head_size)."""

    output: Array
    key_cache: Array
    value_cache: Array | None
    lse: Array | None = None
    output_qk: Array | None = None

    @property
    def caches(self) -> tuple[Array, Array | None]:
        return self.key_cache, self.value_cache


def bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned type of an element's size: what every array library has."""
    return np.dtype(f"u{dtype.itemsize}")


# Backends that cut the keys into splits, whose size is an option.
SPLITTING = ("decode", "latent")


@dataclass(frozen=True)
class Target:
    """The NumPy backend; arrays stay where they are.

    ``options`` are those of every operator that it makes. ``by_heads`` is for the decode backend on Hopper: its kernel
    for eight kv heads at a time attends wherever it can, to calls that are made as wide as it needs.
    """

    row: Row = support.NUMPY
    where: str = "host"
    device: str = "cpu"
    arch: int = 0
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    by_heads: bool = False

    def __str__(self) -> str:
        if self.by_heads:
            return f"{decode_heads_sm90.KERNEL.stem}-{self.where}"
        return self.row.name if self.where == "host" else f"{self.row.name}-{self.where}"

    @property
    def backend(self) -> str:
        return self.row.name

    @property
    def on_gpu(self) -> bool:
        return self.where == "gpu"

    @property
    def is_emulated(self) -> bool:
        return self.where == "emulated"

    # ---- arrays

    @property
    def xp(self) -> Any:
        """The array library."""
        return np

    def upload(self, x: Array) -> Any:
        """A copy of the elements' bits on the device, same shape; views of it become arrays through `typed`."""
        return np.ascontiguousarray(x).view(bits(x.dtype)).copy()

    def overwrite(self, raw: Any, x: Array) -> None:
        """Put the bits of another array in the place of one that was uploaded."""
        raw[...] = np.ascontiguousarray(x).view(raw.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Zero bits on the device, for `typed`; where memory is virtual only what is touched costs any."""
        return np.zeros(shape, bits(dtype))

    def typed(self, raw: Any, dtype: np.dtype[Any]) -> Any:
        """Bits on the device, strided or not, as an array of ``dtype``."""
        return raw.view(dtype)

    def download(self, raw: Any) -> Array:
        """Bits back in host memory."""
        return np.asarray(raw)

    def place(self, x: Array) -> Any:
        """A copy of an array on the device."""
        return self.typed(self.upload(x), x.dtype)

    def fetch(self, x: Any, dtype: np.dtype[Any]) -> Array:
        """A result back in host memory."""
        return np.array(x).view(dtype)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Where calls of this target run."""
        runtimes.emulated()  # installs what the environment asks for, once
        before = runtimes.use_emulator(self.runtime if self.is_emulated else None)
        try:
            yield
        finally:
            runtimes.use_emulator(before)

    @property
    def runtime(self) -> runtimes.Runtime:
        """What runs calls of this target."""
        return runtimes.runtime_of(self.device)

    # ---- calls

    def fit(self, call: Call) -> Call:
        """The call, as wide as the kernel under test needs; `run` does so by itself."""
        return eight_heads.widen(call) if self.by_heads else call

    @contextmanager
    def reaching_its_kernel(self) -> Iterator[None]:
        """With ``by_heads``: see that the kernel attends to something meanwhile."""
        if not self.by_heads:
            yield
            return
        executor, launched = self.runtime.executor, set()
        assert executor is not None

        def prepare(launches: Iterable[Launch], stream: int, really: Any = executor.prepare) -> Any:
            launches = list(launches)
            launched.update(launch.stem for launch in launches if 0 not in launch.grid)
            return really(launches, stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_split_kv, "FORCE_HEADS", True)
            patch.setattr(executor, "prepare", prepare)
            yield
        assert decode_heads_sm90.KERNEL.stem in launched

    def why_not(self, inputs: Mapping[str, Array], attributes: Mapping[str, Any], **options: Any) -> str | None:
        """Reason by which the support table says that the backend does not serve a call, whose inputs are named."""
        infos = {
            name: NUMPY.describe(x)._replace(device="cpu" if name == "attention_metadata" else self.device)
            for name, x in inputs.items()
        }
        metadata = inputs.get("attention_metadata")
        problem = validate(
            infos,
            attributes,
            return_lse=options.get("return_lse", False),
            qk_dtype=dtype_named(options.get("qk_dtype", "float32")),
            metadata=None if metadata is None else tuple(metadata.tolist()),
        )
        return support.why_not(self.row, problem, self.arch)

    def operator(self, call: Call, **options: Any) -> pagedattn.PagedAttention:
        """An operator object for a call, with no plan made yet."""
        return pagedattn.PagedAttention(backend=self.backend, **call.attributes, **{**self.options, **options})

    def invoke(self, call: Call, arrays: dict[str, Any], out: Any = None, **options: Any) -> Any:
        """Run a call on arrays that lie on the device; the operator's own result."""
        with self.active():
            return self.operator(call, **options)(**arrays, out=out)

    def require(self, call: Call, **options: Any) -> None:
        """Go on if the backend serves a call; else see that it is refused for the table's reason, and skip."""
        placed = {name: np.ascontiguousarray(x) for name, x in call.arrays.items()}
        reason = self.why_not(placed, call.attributes, **options)
        if reason is None:
            return
        arrays = {name: self.place(x) if name != "attention_metadata" else x for name, x in call.arrays.items()}
        with pytest.raises(pagedattn.UnsupportedError, match=re.escape(reason)):
            self.invoke(call, arrays, **options)
        pytest.skip(f"{self.backend} refuses, as it says: {reason}")

    def run(self, call: Call, place: dict[str, Callable[[Array], Any]] | None = None, **options: Any) -> Outcome:
        """Run a call: caches lie between guards, the output starts as NaN, and inputs must come out unchanged.

        Parameters
        ----------
        call : Call
        place : mapping of input name to a function of the host array, optional
            Makes that input's device array; a plain copy by default.
        **options
            Of `pagedattn.PagedAttention`.
        """
        narrow, call = call, self.fit(call)
        self.require(call, **options)
        place = place or {}
        raw: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for name, x in call.arrays.items():
            if name == "attention_metadata":
                arrays[name] = x
            elif name in place:
                arrays[name] = place[name](x)
            elif name in ("key_cache", "value_cache"):
                raw[name] = self.upload(np.concatenate([_guard(x), x, _guard(x)]))
                arrays[name] = self.typed(raw[name][1:-1], x.dtype)
            else:
                raw[name] = self.upload(x)
                arrays[name] = self.typed(raw[name], x.dtype)
        heads = int(call.attributes["num_heads"])
        out_size = int(call.attributes.get("v_head_size") or _head_size(call))
        shape = (call.arrays["query"].shape[0], heads * out_size)
        io = call.arrays["query"].dtype
        raw_out = self.upload(np.full(shape, np.nan).astype(io))
        result = self.invoke(call, arrays, out=self.typed(raw_out, io), **options)
        back = {name: self.download(x).view(call.arrays[name].dtype) for name, x in raw.items()}
        for name, x in back.items():
            if name in ("key_cache", "value_cache"):
                assert_same_bytes(x[[0, -1]], np.concatenate([_guard(x), _guard(x)]))  # nothing beside it changed
            else:
                assert_same_bytes(x, call.arrays[name])

        def cache(name: str) -> Array | None:
            if name in back:
                return back[name][1:-1]
            return self.fetch(arrays[name], call.arrays[name].dtype) if name in arrays else None

        key_cache = cache("key_cache")
        assert key_cache is not None
        qk_dtype = np.dtype(options.get("qk_dtype", np.float32))
        outcome = Outcome(
            self.download(raw_out).view(io).reshape(shape[0], heads, out_size),
            key_cache,
            cache("value_cache"),
            None if result.lse is None else self.fetch(result.lse, np.dtype(np.float32)),
            None if result.output_qk is None else self.fetch(result.output_qk, qk_dtype),
        )
        return eight_heads.narrow(outcome, narrow) if self.by_heads else outcome

    def run_built(
        self, built: Built, into_nan: bool = False
    ) -> tuple[pagedattn.PagedAttentionResult, dict[str, Array]]:
        """Run the call of a case, into memory that holds NaN if that is asked for; see `Placed.fetch`."""
        placed = Placed(self, built)
        return placed.fetch(placed.run(out=placed.nan_output()) if into_nan else placed.run())

    def refuses(self, call: Call, match: str, **options: Any) -> None:
        """See that a call is refused with a message, and that no cache changes."""
        arrays = {name: self.place(x) if name != "attention_metadata" else x for name, x in call.arrays.items()}
        with pytest.raises(pagedattn.InvalidArgumentError, match=match):
            self.invoke(call, arrays, **options)
        for name in ("key_cache", "value_cache"):
            if name in arrays:
                assert_same_bytes(self.fetch(arrays[name], call.arrays[name].dtype), call.arrays[name])

    def check(self, call: Call, roundings: float = 2, **options: Any) -> Outcome:
        """Run a call and compare everything with what `expected` says: caches bit for bit."""
        outcome = self.run(call, **options)
        want = expected(call)
        assert_close(outcome.output, want.output, call.io, roundings)
        assert_same_bytes(outcome.key_cache, want.key_cache)
        if want.value_cache is not None:
            assert_same_bytes(outcome.value_cache, want.value_cache)
        if outcome.lse is not None:
            assert not np.isnan(outcome.lse).any()
            np.testing.assert_allclose(outcome.lse, want.lse, rtol=2e-5, atol=_lse_slack(call))
        return outcome

    @property
    def can_split(self) -> bool:
        """Whether `force_splits` means anything."""
        return self.backend in SPLITTING or hasattr(import_module(self.row.module), "TILE_ELEMENTS")

    def force_splits(self, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
        """Make the backend cut its work into pieces of ``keys`` keys, or of one token; skip where it never cuts."""
        if not self.can_split:
            pytest.skip(f"{self.backend} does not split")
        elif self.backend in SPLITTING:
            monkeypatch.setitem(self.options, "split_keys", keys)
        else:
            monkeypatch.setattr(import_module(self.row.module), "TILE_ELEMENTS", 1)


class Placed:
    """The call of a case on a target's device, where another one of the same kind may take its place.

    Parameters
    ----------
    target : Target
    built : Built
    **options
        Of `pagedattn.PagedAttention`, beside those of the target and the case.
    """

    def __init__(self, target: Target, built: Built, **options: Any) -> None:
        self.target, self.built = target, built
        self.raw = {name: target.upload(array) for name, (array, _) in built.parents.items()}
        self.arrays = {
            name: built[name] if name == "attention_metadata" else target.typed(self.raw[name][index], array.dtype)
            for name, (array, index) in built.parents.items()
        }
        options = {**target.options, **built.options, **options}
        self.operator = pagedattn.PagedAttention(backend=target.backend, **built.attributes, **options)

    def fill(self, built: Built) -> None:
        """Write the values of another call, of the same shapes and attributes, into the arrays."""
        self.built = built
        for name, (array, _) in built.parents.items():
            self.target.overwrite(self.raw[name], array)

    def run(self, **more: Any) -> pagedattn.PagedAttentionResult:
        """Issue the call."""
        with self.target.active():
            return self.operator(**self.arrays, **more)

    def nan_output(self) -> Any:
        """Memory for the output, every bit of which is set."""
        case = self.built.case
        width = case.num_heads * (case.v_head_size or case.head_size)
        raw = self.target.zeros((len(self.built["query"]), width), TYPES[case.io])
        raw.fill(np.iinfo(raw.dtype).max)
        return self.target.typed(raw, TYPES[case.io])

    def fetch(self, result: pagedattn.PagedAttentionResult) -> tuple[pagedattn.PagedAttentionResult, dict[str, Array]]:
        """Results in host memory, and of each input the larger array that it is a slice of.

        The caches among the results are those of the second.
        """
        case, parents = self.built.case, self.built.parents
        after = {name: self.target.download(x).view(parents[name][0].dtype) for name, x in self.raw.items()}

        def fetched(x: Any, dtype: np.dtype[Any]) -> Any:
            return None if x is None else self.target.fetch(x, dtype)

        def cache(name: str) -> Any:
            return after[name][parents[name][1]] if name in after else None

        return pagedattn.PagedAttentionResult(
            fetched(result.output, TYPES[case.io]),
            cache("key_cache"),
            cache("value_cache"),
            fetched(result.output_qk, TYPES[case.qk_dtype]),
            fetched(result.lse, np.dtype(np.float32)),
        ), after


@dataclass(frozen=True)
class CupyTarget(Target):
    """A CUDA backend on CuPy arrays."""

    where: str = "gpu"

    @property
    def xp(self) -> Any:
        import cupy

        return cupy

    def upload(self, x: Array) -> Any:
        return self.xp.asarray(np.ascontiguousarray(x).view(bits(x.dtype)), order="C")

    def overwrite(self, raw: Any, x: Array) -> None:
        raw.set(np.ascontiguousarray(x).view(raw.dtype))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self.xp.zeros(shape, bits(dtype))

    def typed(self, raw: Any, dtype: np.dtype[Any]) -> Any:
        if dtype == FLOAT8E4M3FN.numpy:
            return pagedattn.Float8View(raw)
        return raw.view(dtype)

    def download(self, raw: Any) -> Array:
        return raw.get()

    def fetch(self, x: Any, dtype: np.dtype[Any]) -> Array:
        raw = x.array if isinstance(x, pagedattn.Float8View) else x.view(bits(dtype))
        return raw.get().view(dtype)


@dataclass(frozen=True)
class EmulatedTarget(Target):
    """A CUDA backend whose kernels run on the CPU, on arrays between guard pages."""

    where: str = "emulated"
    device: str = "emulated"

    def upload(self, x: Array) -> Any:
        return import_module("tests.emulator.memory").upload(np.ascontiguousarray(x).view(bits(x.dtype)))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return import_module("tests.emulator.memory").zeros(shape, bits(dtype))

    @property
    def runtime(self) -> runtimes.Runtime:
        return import_module("tests.emulator.runtime").hopper() if self.arch == 90 else emulator()


@cache
def gpu_count() -> int:
    """GPUs that CuPy can use; 0 without CuPy."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) if cupy.cuda.is_available() else 0
    except Exception:  # a broken driver is no GPU either
        return 0


@cache
def all_targets() -> tuple[Target, ...]:
    """Every target of this machine."""
    targets = [Target()]
    rows = [row for row in support.ROWS if row.min_arch]
    if gpu_count():
        arch = runtimes.runtime_of("cuda:0").arch
        targets += [CupyTarget(row, device="cuda:0", arch=arch) for row in rows]
    if env.emulate() or toolchain.missing() is None:
        targets += [EmulatedTarget(row, arch=emulator().arch) for row in rows]
    return tuple(targets)


@cache
def by_heads_targets() -> tuple[Target, ...]:
    """Ways to run calls by Hopper's kernel for eight kv heads at a time."""
    targets = [replace(t, by_heads=True) for t in all_targets() if t.row is support.DECODE and t.arch == 90]
    if toolchain.missing() is None:
        targets.append(EmulatedTarget(support.DECODE, arch=90, by_heads=True))
    return tuple(targets)


def targets_for(*features: Feature) -> list[Target]:
    """Targets whose backends serve all of some features."""
    return [t for t in all_targets() if not any(isinstance(t.row.cells[f], No) for f in features)]


def _guard(x: Array) -> Array:
    pattern = np.resize(np.arange(1, 252, dtype=np.uint8), x[:1].nbytes)
    return pattern.view(x.dtype).reshape(x[:1].shape)


def _head_size(call: Call) -> int:
    heads = int(call.attributes["num_heads"])
    if "key" not in call.arrays:  # packed
        heads += 2 * int(call.attributes["kv_num_heads"])
    return int(call.arrays["query"].shape[1] // heads)


def _lse_slack(call: Call) -> float:
    """Scores come from queries that were rounded to the activations' type, with the scales of channels in them."""
    return max(2 * ROUNDING[call.io], 1e-5)
