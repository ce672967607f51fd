"""The way in: spellings of numbers, devices, compiling no more than once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import pagedattn
from pagedattn import runtime as runtimes
from pagedattn.arrays import NUMPY
from pagedattn.dtypes import FLOAT16
from pagedattn.validate import validate

from .scene import Scene, assert_same_bytes
from .targets import emulator

REALS = [float, np.float16, np.float32, np.float64, np.array, lambda x: np.array(x, np.float32)]
INTEGERS = [int, np.int64, np.int32, np.int8, np.uint16, float, np.float32, np.array, lambda x: np.array(float(x))]


def with_numbers():
    """A call that depends on each of its attributes."""
    scene = Scene([40, 9], num_heads=4, kv_num_heads=2, head_size=32)
    rng = np.random.default_rng(0)
    angles = np.arange(48)[:, None] * 0.5 ** np.arange(8)
    return scene.call([36, 8]).change(
        scale=0.5,
        softcap=2.0,
        local_window_size=17,
        do_rotary=1,
        rotary_interleaved=1,
        rotary_offset=8,
        qk_norm_epsilon=0.25,
        is_causal=1,
        v_head_size=32,
        cos_cache=np.cos(angles).astype(np.float16),
        sin_cache=np.sin(angles).astype(np.float16),
        q_norm_weight=rng.uniform(1, 2, 32).astype(np.float16),
        k_norm_weight=rng.uniform(1, 2, 32).astype(np.float16),
    )


def assert_same_results(got, want):
    assert_same_bytes(got.output, want.output)
    assert_same_bytes(got.key_cache, want.key_cache)
    assert_same_bytes(got.value_cache, want.value_cache)


def test_any_spelling_of_a_number_gives_the_same_bits(target):
    call = with_numbers()
    want = target.run(call)
    for name in ("scale", "softcap", "qk_norm_epsilon"):
        for spell in REALS:
            assert_same_results(target.run(call.change(**{name: spell(call[name])})), want)
    integers = (
        "num_heads",
        "kv_num_heads",
        "local_window_size",
        "do_rotary",
        "rotary_interleaved",
        "rotary_offset",
        "is_causal",
        "v_head_size",
    )
    for name in integers:
        for spell in INTEGERS:
            assert_same_results(target.run(call.change(**{name: spell(call[name])})), want)
    for name in ("do_rotary", "rotary_interleaved", "is_causal"):
        for spell in (bool, np.bool_):
            assert_same_results(target.run(call.change(**{name: spell(call[name])})), want)


def test_whole_and_real_spellings_of_one_agree(target):
    call = with_numbers().change(scale=1.0)
    want = target.run(call)
    for one in (1, True, np.int64(1), np.int8(1), np.float16(1), np.array(1)):
        assert_same_results(target.run(call.change(scale=one)), want)


def test_minus_one_switches_the_window_off_in_every_spelling(target):
    call = with_numbers().change(local_window_size=None)
    want = target.run(call)
    for off in (-1, np.int64(-1), np.int32(-1), -1.0, np.array(-1)):
        assert_same_results(target.run(call.change(local_window_size=off)), want)


@pytest.mark.gpu
def test_numbers_on_the_device(cupy, target):
    call = with_numbers()
    if not target.on_gpu:
        pytest.skip("of a GPU")
    for half in (cupy.array(0.5), cupy.float32(0.5)):
        assert_same_results(target.run(call.change(scale=half)), target.run(call))


BAD_NUMBERS = {
    "num_heads": [0, -1, 1.5, "2", None, [2], np.array([2, 2]), np.nan, np.inf, 1j],
    "kv_num_heads": [0, -2, 3, "1"],
    "scale": ["0.1", np.nan, np.inf, [0.1], object()],
    "softcap": [-1.0, np.nan, "0"],
    "local_window_size": [1.5, "4", np.nan, np.inf],
    "do_rotary": [2, -1, "1", 0.5],
    "rotary_offset": [4, -8, 1.5],
    "qk_norm_epsilon": [0, -1e-6, np.nan],
    "is_causal": [2, "yes"],
    "qk_output": [3, -1],
    "k_quant_type": ["none", 0, "PER_BLOCK"],
    "kv_cache_layout": ["latent", 1],
    "v_head_size": [8, -1, 1.5],
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_what_is_no_such_number_is_refused_by_name(target, name):
    scene = Scene([40, 9], num_heads=4, kv_num_heads=2, head_size=32)
    call = scene.call([36, 8])
    for value in BAD_NUMBERS[name]:
        wrong = type(call)(call.arrays, {**call.attributes, name: value})
        arrays = {n: target.place(x) for n, x in call.arrays.items()}
        with pytest.raises((pagedattn.InvalidArgumentError, TypeError), match=name.removeprefix("kv_")):
            target.invoke(wrong, arrays)


def test_an_unknown_attribute_or_input_is_refused(target):
    call = Scene([4]).call([3])
    arrays = {name: target.place(x) for name, x in call.arrays.items()}
    target.refuses(call.change(window=3), "^window: ")
    with pytest.raises(TypeError, match="no_such_input"):
        target.invoke(call, {**arrays, "no_such_input": arrays["query"]})


# ---- devices


PLACED = ["key", "value", "key_cache", "value_cache", "block_table", "past_seqlens", "slot_mapping", "head_sink"]


@pytest.mark.parametrize("name", PLACED)
def test_arrays_on_several_devices_are_refused_by_name(name):
    call = with_numbers().change(slot_mapping=np.zeros(5, np.int32), head_sink=np.zeros(4, np.float16))
    infos = {n: NUMPY.describe(x)._replace(device="cuda:0") for n, x in call.arrays.items()}
    validate(infos, call.attributes)
    for other in ("cuda:1", "cpu"):
        match = f"^{name}: expected an array on cuda:0.* got one on {other}"
        with pytest.raises(pagedattn.InvalidArgumentError, match=match):
            validate({**infos, name: infos[name]._replace(device=other)}, call.attributes)


def test_bounds_on_the_device_are_refused():
    call = with_numbers().change(attention_metadata=np.array([4, 40], np.int32))
    infos = {n: NUMPY.describe(x)._replace(device="cuda:0") for n, x in call.arrays.items()}
    with pytest.raises(pagedattn.InvalidArgumentError, match=r"^attention_metadata: expected an array on cpu"):
        validate(infos, call.attributes)


class FakeDevice:
    """A device of a CuPy that only notes which one is current."""

    current = 0
    compute_capability = "90"

    def __init__(self, device_id):
        self.id, self.before = device_id, []

    def __enter__(self):
        self.before.append(FakeDevice.current)
        FakeDevice.current = self.id

    def __exit__(self, *error):
        FakeDevice.current = self.before.pop()


def test_the_device_of_the_arrays_is_current_while_they_are_used(monkeypatch):
    """Whichever device the caller has, before and after; an error restores it as well."""
    made_current = []
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=FakeDevice,
            runtime=SimpleNamespace(getDevice=lambda: FakeDevice.current, setDevice=made_current.append),
            get_current_stream=lambda: None,
        )
    )
    monkeypatch.setattr(runtimes.cuda, "require_device", lambda: None)
    monkeypatch.setattr(runtimes.cuda, "cupy", lambda: fake)
    monkeypatch.setattr(runtimes, "cuda_executor", lambda device_id: None)
    first, second = runtimes.CudaRuntime(0), runtimes.CudaRuntime(1)
    assert first.arch == 90
    for _ in range(3):
        with second.active():
            assert FakeDevice.current == 1
            with first.active():
                assert FakeDevice.current == 0
            assert FakeDevice.current == 1
        assert FakeDevice.current == 0
        with pytest.raises(KeyError), second.active():
            raise KeyError
        assert FakeDevice.current == 0
    assert set(made_current) == {0, 1}  # a thread has a context of its own on each


# ---- compiling


def compile_counter(target, monkeypatch):
    """A function that tells how many kernels were compiled so far."""
    if target.on_gpu:
        from pagedattn.jit.compiler import default_compiler

        return lambda: default_compiler().compilations
    executor, asked = emulator().executor, set()
    load = executor.load

    def counting(kernel, spec):
        asked.add((kernel, spec))
        return load(kernel, spec)

    monkeypatch.setattr(executor, "load", counting)
    return lambda: len(asked)


def test_a_warm_operator_compiles_nothing(target, monkeypatch):
    """Batch, lengths, width of the table and window change from step to step; the geometry of the model does not."""
    if target.where == "host":
        pytest.skip("compiles nothing at all")
    compiled = compile_counter(target, monkeypatch)
    rng = np.random.default_rng(0)

    def step(lengths, q_lens, table_width, window, metadata):
        scene = Scene(lengths, num_heads=4, kv_num_heads=2, head_size=64)
        call = scene.call([n - q for n, q in zip(lengths, q_lens, strict=True)], local_window_size=window)
        table = np.full((len(lengths), table_width), -1, np.int32)
        width = min(table_width, call["block_table"].shape[1])
        table[:, :width] = call["block_table"][:, :width]
        call = call.change(block_table=table)
        if metadata:
            call = call.change(attention_metadata=np.array([max(q_lens), max(lengths)], np.int32))
        target.run(call)

    longest = 3000 if target.on_gpu else 200
    for window in (-1, 20):
        for table_width in (3, 256):
            step([20], [1], table_width, window, False)
            step([20], [20], table_width, window, False)
    before = compiled()
    for _ in range(200 if target.on_gpu else 12):
        batch = int(rng.integers(1, 17 if target.on_gpu else 3))
        lengths = rng.integers(1, longest, batch)
        q_lens = [1] * batch if rng.random() < 0.7 else [int(rng.integers(1, min(n, 20) + 1)) for n in lengths]
        window = int(rng.choice([-1, 1, 16, 100]))
        step(lengths.tolist(), q_lens, int(rng.integers(200, 257)), window, rng.random() < 0.5)
    assert compiled() == before


def test_plans_are_kept_per_kind_of_call(target):
    """A second call of a kind validates nothing again; one of another kind is not mistaken for it."""
    scene = Scene([40, 9], num_heads=2, head_size=32)
    call = scene.call([36, 8])
    target.require(call)
    operator = target.operator(call)

    def outcome(call):
        arrays = {name: target.place(x) for name, x in call.arrays.items()}
        with target.active():
            return target.fetch(operator(**arrays).output, FLOAT16.numpy).reshape(-1, 2, 32)

    calls = [
        call,
        scene.call([39, 8]),
        call.change(head_sink=np.ones(2, np.float16)),
        call.change(attention_bias=np.ones((1, 1, 4, 48), np.float16) * np.arange(48, dtype=np.float16)),
        call.change(slot_mapping=np.full(5, -1, np.int32)),
    ]
    want = [target.run(c).output for c in calls]
    for _ in range(2):
        for c, right in zip(calls, want, strict=True):
            assert_same_bytes(np.nan_to_num(outcome(c)), np.nan_to_num(right))
