"""What is kept from call to call, over a device that runs nothing: kinds of calls, and launches by their addresses."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from pagedattn import Float8View, PagedAttention, api, contract
from pagedattn import arrays as arrays_module
from pagedattn import runtime as runtimes
from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import tensor_map
from pagedattn.jit.spec import Spec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class ndarray:
    """An array on a GPU, as far as a call looks at it."""

    def __init__(self, pointer, shape, dtype=np.float16, strides=None, device=0):
        self.shape, self.dtype = shape, np.dtype(dtype)
        dense = np.empty(shape, np.int8).strides
        self.strides = tuple(stride * self.dtype.itemsize for stride in dense) if strides is None else strides
        self.data = SimpleNamespace(ptr=pointer, device_id=device)
        self._c_contiguous = strides is None


ndarray.__module__ = "cupy"


class Loaded(NamedTuple):
    """A kernel, as far as a call looks at it."""

    name: str
    spec: Spec


class Executor:
    """Loads nothing, notes what is prepared and what is issued."""

    arch, max_shared_bytes, multiprocessors = "sm_80", 163 << 10, 108

    def __init__(self):
        self.prepared, self.issued, self.loaded, self.compiled = [], [], [], []

    def load(self, kernel, spec):
        self.loaded.append((kernel, spec))
        return Loaded(kernel.expression(spec), spec)

    def compile_many(self, items):
        self.compiled.append((len(self.loaded), list(items)))

    def prepare(self, launches, stream):
        launches = (stream, tuple(launches))
        self.prepared.append(launches)
        return lambda: self.issued.append(launches)


class Device:
    """A runtime without a GPU; the stream is the test's to choose."""

    arch = 80

    def __init__(self):
        self.executor, self.current, self.taken = Executor(), 7, 1 << 50

    def stream(self):
        return self.current

    def is_capturing(self):
        return False

    def allocate(self, size):
        self.taken += 1 << 30
        return self.taken

    def address(self, buffer):
        return buffer

    def active(self, stream=None):
        return nullcontext()


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(runtimes, "cuda_runtime", lambda device_id: fake)
    return fake


@pytest.fixture
def validations(monkeypatch):
    """A list that grows with each validation of a call."""
    count = []
    real = api.validate
    monkeypatch.setattr(api, "validate", lambda *args, **more: count.append(1) or real(*args, **more))
    return count


def arrays(base=1 << 44, **changes):
    """A decode step with RoPE, whose rotated query takes a workspace: 4 query heads, 2 key heads of 64."""
    shapes = {
        "query": ((3, 256), np.float16),
        "key": ((3, 128), np.float16),
        "value": ((3, 128), np.float16),
        "key_cache": ((8, 16, 2, 64), np.float16),
        "value_cache": ((8, 16, 2, 64), np.float16),
        "cumulative_sequence_length": ((4,), np.int32),
        "past_seqlens": ((3,), np.int32),
        "block_table": ((3, 4), np.int32),
        "cos_cache": ((64, 32), np.float16),
        "sin_cache": ((64, 32), np.float16),
        "out": ((3, 256), np.float16),
    }
    given = {name: ndarray(base + (i << 24), *shape) for i, (name, shape) in enumerate(shapes.items())}
    return {**given, **changes}


def operator(**attributes):
    return PagedAttention(num_heads=4, kv_num_heads=2, do_rotary=1, **attributes)


def test_the_same_call_is_checked_and_packed_once(device, validations):
    paged = operator()
    for _ in range(3):
        paged(**arrays())
    assert (len(validations), len(device.executor.prepared), len(device.executor.issued)) == (1, 1, 3)
    assert len(set(device.executor.issued)) == 1
    assert device.executor.issued[0][1][0].function.name.startswith("write_cache<")


def test_what_a_kind_of_call_loads_is_compiled_together_before_it_is_loaded(device):
    paged = operator()
    for base in (1 << 44, 1 << 45):
        paged(**arrays(base))
    ((loaded_before, compiled),) = device.executor.compiled
    assert loaded_before == 0
    assert compiled == device.executor.loaded
    assert {kernel.stem for kernel, _ in compiled} >= {"write_cache", "decode_split_kv"}


def test_other_addresses_are_packed_anew_and_nothing_else(device, validations):
    paged = operator()
    for base in (1 << 44, 1 << 45, 1 << 44, 1 << 45):
        paged(**arrays(base))
    assert (len(validations), len(device.executor.prepared)) == (1, 2)
    first, second, *again = device.executor.issued
    assert first != second
    assert again == [first, second]
    fresh = operator()
    fresh(**arrays(1 << 45))
    # But for the workspace, which is the operator's own.
    attention, attention_of_fresh = (launches[1][1] for launches in (second, device.executor.issued[-1]))
    assert attention._replace(params=b"") == attention_of_fresh._replace(params=b"")
    assert (1 << 45).to_bytes(8, "little") in second[1][0].params
    assert (1 << 44).to_bytes(8, "little") not in second[1][0].params


@pytest.mark.parametrize("name", sorted(arrays()))
def test_the_address_of_every_array_counts(device, name):
    paged = operator()
    paged(**arrays())
    moved = ndarray(1 << 46, arrays()[name].shape, arrays()[name].dtype)
    paged(**arrays(**{name: moved}))
    params = b"".join(launch.params for launch in device.executor.issued[-1][1])
    assert (1 << 46).to_bytes(8, "little") in params
    assert len(device.executor.prepared) == 2


WIDER = ndarray(1 << 46, (3, 256), strides=(1024, 2))
CHANGES = {
    "rows further apart": {"query": WIDER},
    "rows of the output further apart": {"out": WIDER},
    "a cache of another layout": {
        "key_cache": ndarray(1 << 46, (8, 16, 2, 64), strides=(4096, 128, 2048, 2)),
    },
    "more blocks": {"key_cache": ndarray(1 << 46, (9, 16, 2, 64)), "value_cache": ndarray(1 << 47, (9, 16, 2, 64))},
    "blocks of one cache": {"key_cache": ndarray(1 << 46, (9, 16, 2, 64))},
    "type of one input": {"query": ndarray(1 << 46, (3, 256), BFLOAT16)},
    "type of a table": {"block_table": ndarray(1 << 46, (3, 4), np.int64)},
    "another device": {"key": ndarray(1 << 46, (3, 128), device=1)},
    "columns apart": {"query": ndarray(1 << 46, (3, 256), strides=(2048, 4))},
    "strides inside an element": {"key_cache": ndarray(1 << 46, (8, 16, 2, 64), strides=(4097, 256, 128, 2))},
    "host memory": {"past_seqlens": np.zeros(3, np.int32)},
    "an input less": {"cos_cache": None},
    "an input more": {"head_sink": ndarray(1 << 46, (4,))},
    "bytes as float8": {"key_cache": Float8View(ndarray(1 << 46, (8, 16, 2, 64), np.uint8))},
    "bounds": {"attention_metadata": np.array([1, 32], np.int32)},
    "wrong bounds": {"attention_metadata": np.array([1, 32, 3, 4], np.int32)},
}


def outcome(paged, device, given):
    """Launches of a call but for what they point at, or the refusal."""
    before = len(device.executor.issued)
    try:
        paged(**given)
    except InvalidArgumentError as error:
        return str(error)
    (_, launches), *none = device.executor.issued[before:]
    assert not none
    return [launch._replace(params=b"") for launch in launches]


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_any_static_fact_is_judged_as_if_it_came_first(device, validations, change):
    given = arrays(**CHANGES[change])
    want = outcome(operator(), device, given)
    paged = operator()
    usual = outcome(paged, device, arrays())
    seen = len(validations)
    for again in (given, given, arrays(), arrays(), given):
        assert outcome(paged, device, again) == (want if again is given else usual)
    assert len(validations) == seen + (3 if isinstance(want, str) else 1)


def test_the_shape_of_an_array_may_change_in_place(device, validations):
    paged = operator()
    given = arrays()
    paged(**given)
    given["query"].shape = (6, 128)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="token_count = 6"):
            paged(**given)
    given["query"].shape = (3, 256)
    paged(**given)
    assert len(validations) == 3
    assert device.executor.issued[0] == device.executor.issued[1]


def test_every_input_of_the_contract_arrives_under_its_name(monkeypatch):
    monkeypatch.setattr(PagedAttention, "execute", lambda self, arrays, out=None: (arrays, out))
    given = {row.name: object() for row in contract.INPUTS}
    out = object()
    for name in given:
        one = {name: given[name]}
        assert operator()(**{"query": None, **one}) == (one, None)
    assert operator()(*given.values(), out=out) == (given, out)


def test_bounds_are_read_at_every_call_and_may_come_in_a_new_array(device, validations):
    paged = operator()
    kept = []
    for bound in (32, 32, 48, 32):
        kept.append(np.array([1, bound], np.int32))
        paged(**arrays(attention_metadata=kept[-1]))
    assert (len(validations), len(device.executor.prepared)) == (2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": ndarray((1 << 44) + (3 << 24), (3, 256))}, "expected memory of its own"),
        ({"value_cache": ndarray((1 << 44) + (3 << 24) + 512, (8, 16, 2, 64))}, "expected memory of its own"),
        ({"query": ndarray((1 << 44) + 1, (3, 256))}, "expected an address that is a multiple of 2"),
    ],
)
def test_rules_about_addresses_hold_in_a_kind_that_is_known(device, change, message):
    paged = operator()
    paged(**arrays())
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=message):
            paged(**arrays(**change))
    assert len(device.executor.issued) == 1
    paged(**arrays())
    assert device.executor.issued[0] == device.executor.issued[1]


def test_output_is_not_the_memory_of_query_in_a_kind_that_is_known_either(device):
    paged = operator()
    given = arrays()
    paged(**given)
    with pytest.raises(InvalidArgumentError, match="out: expected memory of its own, got the buffer of query"):
        paged(**{**given, "out": given["query"]})
    assert len(device.executor.issued) == 1


def test_explain_minds_addresses_too(device):
    paged = operator()
    given = {name: x for name, x in arrays().items() if name != "out"}
    assert paged.explain(**given).row.name == "decode"
    with pytest.raises(InvalidArgumentError, match="expected memory of its own"):
        paged.explain(**{**given, "value_cache": given["key_cache"]})


def test_explain_names_the_kernels_and_runs_nothing(device):
    paged = operator()
    given = {name: x for name, x in arrays().items() if name != "out"}
    before = device.taken
    choice = paged.explain(**given)
    assert choice.kernels == ("write_cache", "decode_split_kv")
    assert str(choice).splitlines()[1] == "kernels: write_cache, decode_split_kv"
    wide = {**given, "block_table": ndarray(1 << 46, (3, 4096), np.int32)}
    assert paged.explain(**wide).kernels == ("write_cache", "decode_split_kv", "combine_splits")
    scores = operator(qk_output=1).explain(**given, attention_metadata=np.array([1, 64], np.int32))
    assert scores.kernels == ("write_cache", "dense_attention")
    none = {name: ndarray(1 << 46, (0, width)) for name, width in (("query", 256), ("key", 128), ("value", 128))}
    assert paged.explain(**{**given, **none}).kernels == ()
    assert not device.executor.prepared
    assert device.taken == before
    paged(**arrays())
    assert tuple(launch.stem for launch in device.executor.issued[0][1]) == choice.kernels


HOPPER = {
    "decode": ((132, 132, 16, 8, 128), {}, "decode_heads_sm90", "decode_split_kv"),
    "flash": ((900, 2, 16, 8, 128), {}, "flash_prefill_sm90", "flash_prefill_sm80"),
    "latent": ((132, 132, 128, 1, 576), {"v_head_size": 512}, "latent_decode_sm90", "latent_decode"),
    "few latent rows": ((132, 132, 16, 1, 576), {"v_head_size": 512}, "latent_rows_sm90", "latent_decode"),
}


@pytest.mark.parametrize("case", HOPPER)
@pytest.mark.parametrize("shifted", [None, "key_cache", "out"])
def test_explain_names_the_kernel_that_can_read_the_arrays(device, monkeypatch, case, shifted):
    """As a call then launches: the better kernel, or that for arrays that lie anywhere."""
    monkeypatch.setattr(tensor_map, "_encode", lambda: lambda *arguments: 0)  # needs a driver
    device.arch, device.executor.arch, device.executor.max_shared_bytes = 90, "sm_90a", 227 << 10
    (tokens, batch, heads, kv_heads, head_size), attributes, better, other = HOPPER[case]
    cache = (64, 64, kv_heads, head_size)
    shapes = {"query": (tokens, heads * head_size), "key": (tokens, kv_heads * head_size), "key_cache": cache}
    if attributes:
        attributes = {**attributes, "kv_cache_layout": "LATENT", "scale": 0.1}
    else:
        shapes = {**shapes, "value": shapes["key"], "value_cache": cache}
    numbers = {"cumulative_sequence_length": (batch + 1,), "past_seqlens": (batch,), "block_table": (batch, 4)}
    width = heads * attributes.get("v_head_size", head_size)
    given = {name: ndarray((1 << 44) + (i << 32), shape) for i, (name, shape) in enumerate(shapes.items())}
    given |= {name: ndarray((1 << 45) + (i << 32), shape, np.int32) for i, (name, shape) in enumerate(numbers.items())}
    given["out"] = ndarray(1 << 46, (tokens, width))
    if shifted:
        given[shifted].data.ptr += 8
    paged = PagedAttention(num_heads=heads, kv_num_heads=kv_heads, **attributes)
    kernels = paged.explain(**given).kernels
    anywhere = shifted == "out" and better in (
        "flash_prefill_sm90",
        "latent_rows_sm90",
    )  # they ask before each wide store
    assert kernels[1] == (better if shifted is None or anywhere else other)
    assert kernels == api.explain(**given, num_heads=heads, kv_num_heads=kv_heads, **attributes).kernels
    paged(**given)
    assert tuple(launch.stem for launch in device.executor.issued[0][1]) == kernels


def test_explain_asks_the_stream_of_querys_library_like_a_call(device, monkeypatch):
    """Where kernels are loaded for the arrays' alignment, it has to be known that that very stream records nothing."""
    monkeypatch.setattr(arrays_module.CupyAdapter, "stream", lambda self, x: 42)
    made_current = []
    monkeypatch.setattr(device, "active", lambda stream=None: nullcontext(made_current.append(stream)))
    given = {name: x for name, x in arrays().items() if name != "out"}
    assert operator().explain(**given).kernels
    assert made_current == [42, 42]  # to plan, and to lay launches out


def test_launches_belong_to_a_stream(device):
    paged = operator()
    for stream in (7, 8, 7, 8):
        device.current = stream
        paged(**arrays())
    assert [stream for stream, _ in device.executor.issued] == [7, 8, 7, 8]
    assert len(device.executor.prepared) == 2
    assert device.executor.issued[0][1] != device.executor.issued[1][1]  # each stream has a workspace of its own


def test_launches_keep_their_workspace_when_another_call_has_outgrown_it(device):
    paged = operator()
    more = arrays(1 << 46, query=ndarray(1 << 47, (300, 256)), out=ndarray(1 << 48, (300, 256)))
    more.update(key=ndarray(1 << 49, (300, 128)), value=ndarray(1 << 50, (300, 128)))
    for given in (arrays(), more, arrays(), arrays(1 << 45)):
        paged(**given)
    small, _, again, other = (launches for _, launches in device.executor.issued)
    assert again is small
    assert len(device.executor.prepared) == 3
    assert other[1].params[:8] != small[1].params[:8]  # a new set of addresses takes the newest workspace
    assert len(paged._arena._outgrown) == 1  # and the one before is there


def test_a_library_that_gives_its_own_workspace_may_give_another_one_at_each_call(device, monkeypatch):
    given = iter([1 << 51, 1 << 52, 1 << 51])
    monkeypatch.setattr(arrays_module.CupyAdapter, "scratch", lambda self, size, like: (object(), next(given)))
    paged = operator()
    for _ in range(3):
        paged(**arrays())
    first, second, third = (launches for _, launches in device.executor.issued)
    for launches, address in ((first, 1 << 51), (second, 1 << 52)):
        assert launches[1].params[:8] == address.to_bytes(8, "little")  # the query that attention reads
    assert third is first
    assert not paged._arena._buffers


def test_what_is_kept_is_bounded(device, validations, monkeypatch):
    monkeypatch.setattr(api, "MAX_ADDRESSES", 4)
    monkeypatch.setattr(api, "MAX_PLANS", 2)
    paged = operator()
    for base in range(1, 10):
        paged(**arrays(base << 44))
    assert len(paged._issues) == 4
    paged(**arrays(9 << 44))
    assert len(device.executor.prepared) == 9
    paged(**arrays(1 << 44))  # forgotten
    assert len(device.executor.prepared) == 10
    for blocks in range(9, 14):
        paged(
            **arrays(key_cache=ndarray(1 << 46, (blocks, 16, 2, 64)), value_cache=ndarray(1 << 47, (blocks, 16, 2, 64)))
        )
    assert len(paged._prepared) == 2
    assert len(validations) == 6


def test_threads_share_an_operator_but_no_workspace(device):
    paged = operator()
    rounds, interval = 50, sys.getswitchinterval()
    gate = threading.Barrier(4)

    def run(i):
        gate.wait()
        for _ in range(rounds):
            paged(**arrays((i + 1) << 44))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(run, range(4)))
    finally:
        sys.setswitchinterval(interval)
    issued = device.executor.issued
    assert len(issued) == 4 * rounds
    assert len(set(issued)) == 4
    by_workspace = {launches[1][0].params for launches in issued}
    assert len(by_workspace) == 4
    # The query that attention reads is the workspace: no two threads name the same one.
    assert len({launches[1][1].params[:8] for launches in issued}) == 4
