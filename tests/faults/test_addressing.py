"""Addresses: products beyond 32 bits, grids beyond 16, views with gaps, arrays that start anywhere."""

from __future__ import annotations

import numpy as np
import pytest

import pagedattn
from pagedattn.dtypes import FLOAT8E4M3FN, FLOAT16, INT8

from .scene import CACHES, CacheKind, Call, Scene, assert_close, assert_same_bytes, expected

# ---- products beyond 2^31


def place_all(target, call, **arrays):
    """A call's arrays on the device, but for those given."""
    return {name: target.place(x) for name, x in call.arrays.items() if name not in arrays} | arrays


@pytest.mark.by_heads
@pytest.mark.parametrize("with_slots", [False, True], ids=["derived slots", "slot_mapping"])
@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_block_ids_far_into_a_large_cache(big_target, kind, with_slots):
    """Block id times block stride passes 2^31 elements; wrapped to 32 bits it would lead to the first blocks."""
    target = big_target
    dtype = FLOAT16 if kind == "plain" else INT8
    num_blocks, block, kv_heads, head_size = 131_080, 131_075, 8, 128
    if kind == "int8":  # 2^31 bytes are passed twice as late
        num_blocks, block = 2 * num_blocks, 2 * block
    scene = Scene(
        [16],
        num_heads=8,
        kv_num_heads=8,
        head_size=128,
        key=0,
        value=7,
        cache=CacheKind("", None if kind == "plain" else INT8),
    )
    call = scene.call([15])
    call = call.change(block_table=np.array([[block]], np.int32))
    target.require(call)
    try:
        raw = [target.zeros((num_blocks, 16, kv_heads, head_size), dtype.numpy) for _ in range(2)]
    except MemoryError:
        pytest.skip("no room for the caches")
    decoy, seven = (np.array(x).astype(dtype.numpy).view(raw[0].dtype) for x in (-1, 7))
    raw[1][:11] = decoy
    raw[1][block, :15] = seven
    if with_slots:
        call = call.change(slot_mapping=np.array([block * 16 + 15], np.int32))
    caches = {name: target.typed(x, dtype.numpy) for name, x in zip(("key_cache", "value_cache"), raw, strict=True)}
    result = target.invoke(call, place_all(target, call, **caches))
    assert (target.fetch(result.output, FLOAT16.numpy) == 7).all()
    assert (target.download(raw[1][:11]) == decoy).all()
    assert (target.download(raw[1][block]) == seven).all()
    assert not target.download(raw[1][[11, block - 1, block + 1]]).any()


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_rows_far_apart_in_a_wide_array(big_target, which):
    """Token times row stride passes 2^31 elements."""
    target = big_target
    scene = Scene([5, 3])
    call = scene.call([3, 2])
    target.require(call)
    try:
        raw = target.zeros((3, 2**30 + 64), FLOAT16.numpy)
    except MemoryError:
        pytest.skip("no room for the rows")
    width = call[which].shape[1]
    raw[:, 8 : 8 + width] = target.upload(call[which])
    wide = {which: target.typed(raw[:, 8 : 8 + width], FLOAT16.numpy)}
    result = target.invoke(call, place_all(target, call, **wide))
    want = target.run(call).output
    assert_same_bytes(target.fetch(result.output, FLOAT16.numpy).reshape(want.shape), want)


def test_a_bias_row_far_into_a_large_bias(big_target):
    """Sequence times bias stride passes 2^31 elements."""
    target = big_target
    scene = Scene([5, 7, 20])
    bias = np.zeros((3, 1, 1, 32), np.float16)
    bias[2] = np.random.default_rng(0).standard_normal(32)
    call = scene.call([4, 6, 19]).change(attention_bias=bias)
    target.require(call)
    try:
        raw = target.zeros((3, 1, 1, 2**30 + 64), FLOAT16.numpy)
    except MemoryError:
        pytest.skip("no room for the bias")
    raw[..., :32] = target.upload(bias)
    large = {"attention_bias": target.typed(raw[..., : 2**30], FLOAT16.numpy)}
    result = target.invoke(call, place_all(target, call, **large))
    assert_close(target.fetch(result.output, FLOAT16.numpy).reshape(3, 2, 16), expected(call).output, FLOAT16)


def shared_block(batch, num_heads, head_size, kv_num_heads=1):
    """Decode steps that all see the same two tokens, of values 0 and 2, and store nothing."""
    row = np.zeros((batch, num_heads * head_size), np.float16)
    cache = np.zeros((1, 16, kv_num_heads, head_size), np.float16)
    value_cache = cache.copy()
    value_cache[0, 1] = 2
    return Call(
        {
            "query": row,
            "key": row[:, : kv_num_heads * head_size],
            "value": row[:, : kv_num_heads * head_size],
            "key_cache": cache,
            "value_cache": value_cache,
            "cumulative_sequence_length": np.arange(batch + 1, dtype=np.int32),
            "past_seqlens": np.ones(batch, np.int32),
            "block_table": np.zeros((batch, 1), np.int32),
            "slot_mapping": np.full(batch, -1, np.int32),
        },
        {"num_heads": num_heads, "kv_num_heads": kv_num_heads},
    )


@pytest.mark.by_heads
def test_more_elements_in_query_and_output_than_32_bits_count(big_target, splits):
    target = big_target
    if not target.on_gpu:
        pytest.skip("touches every page of 10 GiB")
    batch, kv_heads = 524_296, 8 if target.by_heads else 1
    small = shared_block(batch, 1, 8)
    target.require(small)
    arrays = place_all(target, small)
    arrays["query"] = target.typed(target.zeros((batch, 32 * 128), FLOAT16.numpy), FLOAT16.numpy)
    for name in ("key", "value"):
        arrays[name] = arrays["query"][:, : 128 * kv_heads]
    for name, x in shared_block(1, 32, 128, kv_heads).arrays.items():
        if name.endswith("_cache"):
            arrays[name] = target.place(x)
    call = small.change(num_heads=32, kv_num_heads=kv_heads)
    out = target.typed(target.zeros((batch, 32 * 128), FLOAT16.numpy), FLOAT16.numpy)
    out[:] = np.float16(np.nan)
    target.invoke(call, arrays, out=out)
    for row in (0, 524_287, 524_288, batch - 1):
        assert bool((out[row] == 1).all()), row


def test_more_scores_than_32_bits_count(big_target):
    target = big_target
    if not target.on_gpu:
        pytest.skip("touches every page of 5 GiB")
    tokens, context = 16_385, 65_536
    scene = Scene([context], num_heads=2, key=0, value=lambda b, pos, h: pos % 13)
    call = scene.call([context - tokens]).change(qk_output=2)
    options = {"qk_dtype": "float16", "max_output_qk_bytes": 1 << 34}
    target.require(call, qk_dtype="float16")
    result = target.invoke(call, place_all(target, call), **options)
    scores = result.output_qk
    assert scores.shape == (2, tokens, context)
    for head, row in ((0, 0), (1, tokens - 1)):
        seen = context - tokens + row + 1
        got = scores[head, row].get().astype(np.float64)
        np.testing.assert_allclose(got[:seen], 1 / seen, rtol=1e-2)
        assert not got[seen:].any()


# ---- grids


@pytest.mark.by_heads
def test_more_sequences_than_a_grid_dimension_holds(target):
    """65535 CTAs is what y and z may count to; the output starts as NaN, so a launch that never ran shows."""
    for batch in (65_535, 65_536, 65_537) if target.on_gpu else (300 if target.is_emulated else 1025,):
        call = shared_block(batch, 2, 64)
        assert (target.run(call).output == 1).all()


def test_more_tokens_than_a_grid_dimension_holds(target):
    tokens = 300 if target.is_emulated else 65_537
    scene = Scene(
        [tokens], num_heads=2, head_size=8 if target.where == "host" else 64, key=0, value=lambda b, pos, h: pos % 13
    )
    outcome = target.run(scene.call([0]).change(local_window_size=1))
    assert (outcome.output == (np.arange(tokens) % 13)[:, None, None]).all()


# ---- views with gaps


def run_or_refuse(target, call, place, *names):
    """Outcome of a call on strided arrays, or None if it is refused by the name of one of them; NumPy takes all."""
    try:
        return target.run(call, place=place)
    except pagedattn.InvalidArgumentError as error:
        if target.where == "host" or not str(error).startswith(names):
            raise
        return None


# Shape of a base array for a cache of shape s, and the cache as a view of it.
LAYOUTS = {
    "half of a buffer that holds both": (lambda s: (s[0], 2, *s[1:]), lambda x, s: x[:, 1]),
    "heads of a wider cache": (lambda s: (s[0], s[1], 2 * s[2], s[3]), lambda x, s: x[:, :, s[2] :]),
    "tokens with a gap": (lambda s: (s[0], s[1], s[2] + 1, s[3]), lambda x, s: x[:, :, :-1]),
    "heads before tokens": (lambda s: (s[0], s[2], s[1], s[3]), lambda x, s: x.transpose(0, 2, 1, 3)),
    "rows with a gap": (lambda s: (*s[:3], s[3] + 16), lambda x, s: x[..., : s[3]]),
    "rows with an odd gap": (lambda s: (*s[:3], s[3] + 1), lambda x, s: x[..., : s[3]]),
    "every second block": (lambda s: (2 * s[0], *s[1:]), lambda x, s: x[::2]),
    "blocks in reverse": (lambda s: s, lambda x, s: x[::-1]),
    "every second channel": (lambda s: (*s[:3], 2 * s[3]), lambda x, s: x[..., ::2]),
}


@pytest.mark.parametrize("q_len", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_that_are_views_of_larger_arrays(target, layout, kind, q_len):
    """Right as if contiguous, written through the view and nowhere else, or refused by name; never a silent copy."""
    scene = Scene([35, 9], num_heads=4, kv_num_heads=2, head_size=64, cache=CACHES[kind])
    call = scene.call([35 - q_len, 9 - q_len])
    target.require(call)
    base_shape, view = LAYOUTS[layout]
    bases, before = {}, {}

    def place(name):
        def make(x):
            raw = np.full(base_shape(x.shape), 0x5A, x.view(f"u{x.dtype.itemsize}").dtype)
            view(raw, x.shape)[...] = x.view(raw.dtype)
            bases[name], before[name] = target.upload(raw), raw
            return target.typed(view(bases[name], x.shape), x.dtype)

        return make

    names = ("key_cache", "value_cache")
    outcome = run_or_refuse(target, call, {name: place(name) for name in names}, *names)
    contiguous = target.run(call)
    for name in names:
        after = target.download(bases[name]).copy()
        if outcome is None:
            assert_same_bytes(after, before[name])
            continue
        want = getattr(contiguous, name)
        assert_same_bytes(getattr(outcome, name), want)
        view(before[name], want.shape)[...] = want.view(after.dtype)
        assert_same_bytes(after, before[name])
    if outcome is None:
        return
    if target.backend == "flash" and target.on_gpu:  # Hopper's copy engine needs aligned rows; others go elsewhere
        assert_close(outcome.output, contiguous.output, call.io)
    else:
        assert_same_bytes(outcome.output, contiguous.output)


def test_key_and_value_cache_may_share_a_buffer_but_not_their_rows(target):
    scene = Scene([35], num_heads=2, head_size=64)
    call = scene.call([33])
    target.require(call)
    both = target.upload(np.stack([call["key_cache"], call["value_cache"]], axis=1))
    place = {
        "key_cache": lambda x: target.typed(both[:, 0], x.dtype),
        "value_cache": lambda x: target.typed(both[:, 1], x.dtype),
    }
    outcome = run_or_refuse(target, call, place, "key_cache", "value_cache")
    if outcome is not None:
        assert_same_bytes(outcome.output, target.run(call).output)
    same = target.place(call["key_cache"])
    with pytest.raises(pagedattn.InvalidArgumentError, match=r"^value_cache: expected memory of its own"):
        target.invoke(call, place_all(target, call, key_cache=same, value_cache=same))


@pytest.mark.parametrize("extras", ["plain", "norm and rotation"])
@pytest.mark.parametrize("tokens", [7, 1])
def test_columns_of_a_fused_projection(target, io, tokens, extras):
    """Three slices of one array, three arrays, and the array itself as packed rows: the same bits."""
    heads, kv_heads, head_size = 8, 2, 64
    scene = Scene([20 + tokens], num_heads=heads, kv_num_heads=kv_heads, head_size=head_size, io=io)
    call = scene.call([20])
    if extras != "plain":
        angles = np.arange(40)[:, None] * 0.5 ** np.arange(32)
        call = call.change(
            do_rotary=1,
            cos_cache=np.cos(angles).astype(io.numpy),
            sin_cache=np.sin(angles).astype(io.numpy),
            q_norm_weight=np.ones(head_size, io.numpy),
            k_norm_weight=np.ones(head_size, io.numpy),
        )
    three = target.run(call)
    fused = np.concatenate([call["query"], call["key"], call["value"]], axis=1)
    packed = target.run(call.change(query=fused, key=None, value=None))
    edges = np.cumsum([0, heads * head_size, kv_heads * head_size, kv_heads * head_size])
    raw = target.upload(fused)
    place = {
        name: lambda x, low=low, high=high: target.typed(raw[:, low:high], x.dtype)
        for name, low, high in zip(("query", "key", "value"), edges[:-1], edges[1:], strict=True)
    }
    slices = target.run(call, place=place)
    assert_same_bytes(target.download(raw), fused.view(raw.dtype))
    for other in (packed, slices):
        assert_same_bytes(other.output, three.output)
        assert_same_bytes(other.key_cache, three.key_cache)
        assert_same_bytes(other.value_cache, three.value_cache)


@pytest.mark.parametrize("how", ["every second row", "rows in reverse", "every second channel", "one row for all"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rows_with_any_strides(target, name, how):
    scene = Scene([20], num_heads=4, kv_num_heads=2)
    call = scene.call([16])
    target.require(call)

    def place(x):
        rows, width = x.shape
        if how == "every second row":
            raw = np.zeros((2 * rows, width), x.dtype)
            raw[::2] = x
            return target.typed(target.upload(raw)[::2], x.dtype)
        if how == "rows in reverse":
            return target.typed(target.upload(x[::-1])[::-1], x.dtype)
        if how == "every second channel":
            return target.typed(target.upload(x.repeat(2, axis=1))[:, ::2], x.dtype)
        return target.typed(target.xp.broadcast_to(target.upload(x[:1]), x.shape), x.dtype)

    if how == "one row for all":
        call = call.change(**{name: np.broadcast_to(call[name][:1], call[name].shape).copy()})
    outcome = run_or_refuse(target, call, {name: place}, name)
    if outcome is not None:
        assert_same_bytes(outcome.output, target.run(call).output)


# ---- arrays that start anywhere

UNALIGNED = {
    "plain": [
        "query",
        "key",
        "value",
        "key_cache",
        "value_cache",
        "cos_cache",
        "sin_cache",
        "head_sink",
        "q_norm_weight",
        "k_norm_weight",
        "attention_bias",
        "cumulative_sequence_length",
        "past_seqlens",
        "block_table",
        "slot_mapping",
        "query_positions",
    ],
    "int8-channel": ["key_cache", "value_cache", "k_scale", "v_scale"],
    "fp8": ["key_cache", "value_cache", "k_scale"],
    "int4": ["key_cache", "value_cache"],
}


# Those of a step of one token each, which Hopper's kernel for eight kv heads takes, and what of it is read in vectors.
READ_BY_HEADS = tuple({name for names in UNALIGNED.values() for name in names} - {"attention_bias"})
IN_VECTORS = ("key_cache", "value_cache", "k_scale", "v_scale")


def with_everything(kind, by_heads):
    """A call with every optional input."""
    head_size, new = (128, 1) if by_heads else (64, 2)
    scene = Scene([35, 9], num_heads=4, kv_num_heads=2, head_size=head_size, cache=CACHES[kind])
    rng = np.random.default_rng(2)
    angles = np.arange(48)[:, None] * 0.5 ** np.arange(16)
    positions = np.arange(35 - new, 35), np.array([8])
    slots = np.concatenate([scene.slots(b, own) for b, own in enumerate(positions)]).astype(np.int32)
    call = scene.call([35 - new, 8]).change(
        do_rotary=1,
        cos_cache=np.cos(angles).astype(np.float16),
        sin_cache=np.sin(angles).astype(np.float16),
        head_sink=rng.standard_normal(4).astype(np.float16),
        q_norm_weight=rng.uniform(1, 2, head_size).astype(np.float16),
        k_norm_weight=rng.uniform(1, 2, head_size).astype(np.float16),
        attention_bias=rng.standard_normal((2, 4, 2, 48)).astype(np.float16),
        slot_mapping=slots,
        query_positions=np.concatenate(positions).astype(np.int32),
    )
    return call.change(attention_bias=None) if by_heads else call


@pytest.mark.by_heads(name=READ_BY_HEADS)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNALIGNED.items() for name in names])
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_arrays_that_do_not_start_on_16_bytes(target, kind, name, shift):
    """Right, or refused by name before anything runs; the device lives on either way."""
    call = with_everything(kind, target.by_heads)
    target.require(call)
    want = target.run(call)

    def place(x):
        whole = np.zeros(x.nbytes + 16, np.uint8)
        whole[shift : shift + x.nbytes] = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
        raw = target.upload(whole)[shift : shift + x.nbytes]
        return target.typed(raw.view(f"u{x.dtype.itemsize}").reshape(x.shape), x.dtype)

    outcome = run_or_refuse(target, call, {name: place}, name)
    if outcome is not None:
        elsewhere = name in IN_VECTORS if target.by_heads else target.backend == "flash" and target.arch == 90
        if elsewhere:  # what the copy engine cannot read takes the other kernel
            assert_close(outcome.output, want.output.astype(np.float64), FLOAT16)
        else:
            assert_same_bytes(outcome.output, want.output)
        assert_same_bytes(outcome.key_cache, want.key_cache)
        assert_same_bytes(outcome.value_cache, want.value_cache)
    assert_same_bytes(target.run(call).output, want.output)


def check_output_at(target, call, shift):
    """The output at an address that is no multiple of 16: right, and nothing beside it is written."""
    want = target.run(call).output
    guard = np.full(16, 0x5A, np.uint8)
    raw = target.upload(np.concatenate([guard, np.full(shift + want.nbytes, 0xFF, np.uint8), guard]))
    place = slice(16 + shift, 16 + shift + want.nbytes)
    out = target.typed(raw[place].view(np.uint16).reshape(want.shape[0], -1), want.dtype)
    arrays = place_all(target, call)
    if target.by_heads:  # it writes in vectors; the other kernel asks before each
        with target.active():
            kernels = target.operator(call).explain(**arrays, out=out).kernels
        assert kernels[1] == "decode_split_kv"
    target.invoke(call, arrays, out=out)
    after = target.download(raw)
    assert_close(after[place].view(want.dtype).reshape(want.shape), want.astype(np.float64), call.io)
    assert (after[16 : 16 + shift] == 0xFF).all()
    assert_same_bytes(after[:16], guard)
    assert_same_bytes(after[-16:], guard)


@pytest.mark.by_heads(q_len=1)
@pytest.mark.parametrize("q_len", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("shift", [2, 4, 8])
def test_an_output_that_does_not_start_on_16_bytes(target, shift, q_len, splits):
    scene = Scene([35, 9], num_heads=4, kv_num_heads=2, head_size=64)
    check_output_at(target, target.fit(scene.call([35 - q_len, 9 - q_len])), shift)


@pytest.mark.parametrize("num_heads", [4, 64])
@pytest.mark.parametrize("shift", [2, 4, 8])
def test_a_latent_output_that_does_not_start_on_16_bytes(latent_target, shift, num_heads, splits):
    scene = Scene([35, 9], num_heads=num_heads, head_size=576, v_head_size=512)
    check_output_at(latent_target, scene.call([34, 8]), shift)


def test_float8_bytes_are_taken_as_a_view(target):
    """A library without float8 hands over the bytes; the view is written in place."""
    scene = Scene([20], cache=CACHES["fp8"])
    call = scene.call([18])
    target.require(call)
    raw = {name: target.upload(call[name]) for name in ("key_cache", "value_cache")}
    views = {name: pagedattn.Float8View(x) for name, x in raw.items()}
    target.invoke(call, place_all(target, call, **views))
    want = target.run(call)
    for name, x in raw.items():
        assert_same_bytes(target.download(x).view(FLOAT8E4M3FN.numpy), getattr(want, name))
