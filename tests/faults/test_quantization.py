"""Quantized caches: scales on every path, once, each its own; and the codes themselves, byte for byte."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from pagedattn.dtypes import FLOAT8E4M3FN, FLOAT16, INT4, INT8

from .scene import CACHES, CacheKind, Scene, assert_close, assert_same_bytes, expected

QUANTIZED = [kind for kind in CACHES.values() if kind.dtype is not None]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("window", [-1, 9])
def test_scales_are_used_on_every_path(target, io, kind, window):
    """A prompt at once, after a prefix that is in the cache already, in chunks, token by token."""
    scene = Scene([24], num_heads=4, kv_num_heads=2, head_size=32, io=io, cache=kind, seed=4)
    changes = {"local_window_size": window}

    def grown(cuts):
        rows, caches = [], (scene.pool(scene.key, [0], "k_scale"), scene.pool(scene.value, [0], "v_scale"))
        for past, end in pairwise(cuts):
            outcome = target.check(scene.call([past], [end - past], caches, **changes))
            rows.append(outcome.output)
            caches = outcome.caches
        return np.concatenate(rows), caches

    whole, caches = grown([0, 24])
    for cuts in ([0, 8, 16, 24], list(range(25))):
        rows, other = grown(cuts)
        assert_close(rows, whole, io)
        assert_same_bytes(other[0], caches[0])
        assert_same_bytes(other[1], caches[1])
    after_prefix = target.check(scene.call([16], **changes))
    assert_close(after_prefix.output, whole[16:], io)
    # The prefix is sent again but stored nowhere, because it lies in the cache.
    slots = scene.slots(0, np.arange(24)).astype(np.int32)
    slots[:16] = -1
    prefix = scene.pool(scene.key, [16], "k_scale"), scene.pool(scene.value, [16], "v_scale")
    again = target.check(scene.call([0], [24], prefix, slot_mapping=slots, **changes))
    assert_close(again.output, whole, io)


# (dtype, k_scale, v_scale): keys 2 and 0, values 3 and 0 are exact codes of each.
EXACT = [(FLOAT8E4M3FN, 0.125, 0.5), (INT8, 0.125, 0.5), (INT4, 0.5, 1.0)]


@pytest.mark.parametrize("q_len", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("past_extra", [0, 30], ids=["short", "long"])
@pytest.mark.parametrize(("dtype", "k_scale", "v_scale"), EXACT, ids=lambda x: str(x))
def test_each_scale_is_applied_once_to_its_own(target, io, dtype, k_scale, v_scale, q_len, past_extra, splits):
    """3 / (1 + e^-2) = 2.6424; 5.285 or 1.321 if V is scaled never or twice, 3.000 or 1.687 likewise for K."""
    length = 2 + past_extra
    scene = Scene(
        [length],
        head_size=64,
        io=io,
        cache=CacheKind("", dtype, False, k_scale, v_scale),
        query=lambda b, pos, h: np.eye(64)[0],
        key=0,
        value=0,
    )
    scene.key[0][-2, :, 0] = 2
    scene.value[0][-2] = 3
    call = scene.call([length - q_len]).change(scale=1.0, local_window_size=2)
    outcome = target.check(call, return_lse=True)
    assert_close(outcome.output[-1], np.full((2, 64), 2.6424), io)
    np.testing.assert_allclose(outcome.lse[-1], np.log(1 + np.exp(2)), rtol=1e-5)


@pytest.mark.parametrize("kind", [k for k in QUANTIZED if k.per_channel], ids=lambda kind: kind.name)
def test_a_channels_scale_stays_with_its_channel_and_head(target, kind, splits):
    """Scales that differ by a thousand between channels and heads, and between keys and values."""
    scene = Scene([40, 3], num_heads=4, kv_num_heads=2, head_size=32, cache=kind)
    rng = np.random.default_rng(9)
    for name, history in (("k_scale", scene.key), ("v_scale", scene.value)):
        factor = np.ldexp(np.float32(1), rng.integers(-5, 6, (2, 1, 32)))
        scene.scales[name] = scene.scales[name] * factor
        history[:] = [(rows * factor[:, 0]).astype(np.float16) for rows in history]
    per_head = {name: scale[:, 0].repeat(2, axis=0) for name, scale in scene.scales.items()}
    scene.query = [(rows / per_head["k_scale"] * 0.03).astype(np.float16) for rows in scene.query]
    call = scene.call([37, 2])
    outcome = target.check(call, return_lse=True)
    # In units of each channel's scale, so that no large channel hides an error of a small one.
    assert_close(outcome.output / per_head["v_scale"], expected(call).output / per_head["v_scale"], FLOAT16)


def stored_codes(target, values, dtype, scale=1.0, io=FLOAT16, head_size=64, past=3):
    """Codes of K and V that a call stores for rows of ``values`` repeated along the channels; neighbours untouched."""
    row = np.resize(np.asarray(values), head_size)
    kind = CacheKind("", dtype, False, scale, scale)
    with np.errstate(over="ignore"):
        scene = Scene([past + 2, 2], kv_num_heads=2, head_size=head_size, io=io, cache=kind, key=row, value=row)
    for history in (scene.key, scene.value):  # the past is not what is looked at
        history[0][:past] = 0
    call = scene.call([past, 0])
    outcome = target.run(call)
    new = np.concatenate([scene.slots(0, np.arange(past, past + 2)), scene.slots(1, np.arange(2))])
    rows = []
    for name in ("key_cache", "value_cache"):
        before, after = (x.reshape(-1, *x.shape[2:]) for x in (call[name], getattr(outcome, name)))
        untouched = np.delete(np.arange(len(after)), new)
        assert_same_bytes(after[untouched], before[untouched])
        rows.append(after[new])
    codes = np.concatenate(rows).reshape(-1, after.shape[-1])
    for other in codes[1:]:
        assert_same_bytes(other, codes[0])
    return codes[0]


BEYOND = [448, 449, 464, 480, 1000, 65504, np.inf]


def test_float8_stores_saturate(target, io):
    """Only NaN becomes NaN; whatever is too large becomes the largest code, infinity included."""
    values = np.array([*BEYOND, *(-x for x in BEYOND), np.nan, 0, -0.0, 1, 447, 2.0**-9, 2.0**-10], np.float32)
    codes = stored_codes(target, values, FLOAT8E4M3FN, io=io).view(np.uint8)
    want = [0x7E] * 7 + [0xFE] * 7 + [0x7F, 0x00, 0x80, 0x38, 0x7E, 0x01, 0x00]
    got = codes[: len(want)].tolist()
    got[14] &= 0x7F  # the sign of a NaN says nothing
    assert got == want


def test_float8_stores_saturate_after_scaling(target, io):
    codes = stored_codes(target, [1, -1, 0.25, 0.5], FLOAT8E4M3FN, scale=0.001, io=io).view(np.uint8)
    assert codes[:4].tolist() == [0x7E, 0xFE, ml_dtypes.float8_e4m3fn(250).view(np.uint8), 0x7E]


def test_float8_is_e4m3fn_both_ways(target, io):
    """1.0 is 0x38; 0x3C would be an e5m2 writer, and a reader of e5m2 or of bias 8 would see 0.5."""
    assert (stored_codes(target, [1], FLOAT8E4M3FN, io=io).view(np.uint8) == 0x38).all()
    kind = CacheKind("", FLOAT8E4M3FN)
    scene = Scene([2], io=io, cache=kind, key=0, value=0)
    call = scene.call([1])
    for first in range(0, 256, 16):  # every code but the NaNs, sixteen at a time
        table = np.arange(first, first + 16, dtype=np.uint8)
        table[(table & 0x7F) == 0x7F] = 0x38
        cache = call["value_cache"].copy()
        cache.reshape(-1, 1, 16)[scene.slots(0, np.array([0]))] = table.view(FLOAT8E4M3FN.numpy)
        changed = call.change(value_cache=cache, query_positions=np.zeros(1, np.int32))
        outcome = target.run(changed)
        assert (outcome.output[0, 0] == table.view(FLOAT8E4M3FN.numpy).astype(io.numpy)).all()


TIES = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.999, 126.5, 127.5, -128.5, 200, -200]


@pytest.mark.parametrize("head_size", [64, 72, 8])
def test_int8_stores_round_ties_to_even(target, io, head_size):
    want = [0, 2, 2, 0, -2, -2, 1, 126, 127, -128, 127, -128]
    codes = stored_codes(target, TIES, INT8, io=io, head_size=head_size)
    with_io = np.asarray(TIES).astype(io.numpy).astype(np.float32)  # bfloat16 has no 126.5
    want = np.where(with_io == np.asarray(TIES, np.float32), want, np.clip(np.rint(with_io), -128, 127))
    assert codes.tolist() == np.resize(want, head_size).astype(int).tolist()


@pytest.mark.parametrize("scale", [0.3, 0.1, 1 / 3, 0.007])
@pytest.mark.parametrize("dtype", [INT8, FLOAT8E4M3FN, INT4], ids=str)
def test_stores_divide_by_the_scale(target, dtype, scale):
    """A multiplication by 1 / scale rounds some values the other way; the codes are those of a division."""
    kind = CacheKind("", dtype, False, scale, scale)
    scene = Scene([64], kv_num_heads=2, head_size=128, cache=kind, seed=8)
    limit = dtype.code_range[1] * scale
    for history in (scene.key, scene.value):
        history[0] = (history[0] * limit / 3).astype(np.float16)
    target.check(scene.call([0]))


def test_int8_stores_take_infinity_and_nan(target, io):
    """An integer has no NaN: it becomes 0; infinities saturate."""
    codes = stored_codes(target, [np.inf, -np.inf, np.nan, 3], INT8, io=io)
    assert codes[:4].tolist() == [127, -128, 0, 3]


@pytest.mark.parametrize("head_size", [64, 96, 72, 8])
def test_int4_packs_even_channels_low(target, io, head_size):
    """Code + 8 in a nibble, channel 2i low; beyond the range codes clamp."""
    values = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    packed = stored_codes(target, values, INT4, io=io, head_size=head_size)
    assert packed.shape == ((head_size + 1) // 2,)
    assert packed.tolist() == np.resize([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], head_size // 2).tolist()
    packed = stored_codes(target, [7.5, -8.5, 100, -100, 0.5, 1.5, -0.5, -1.5], INT4, io=io)
    assert packed[:4].tolist() == [0x0F, 0x0F, 0xA8, 0x68]


@pytest.mark.parametrize("head_size", [64, 96, 72, 8])
def test_int4_rows_come_back_exactly(target, io, head_size, splits):
    values = np.resize(np.arange(-8, 8), head_size)
    kind = CacheKind("", INT4)
    scene = Scene([3], io=io, head_size=head_size, cache=kind, key=0)
    for position in range(3):
        scene.value[0][position] = np.roll(values, position)
    outcome = target.check(scene.call([0]).change(local_window_size=1))
    assert_same_bytes(outcome.output[:, 0], scene.value[0][:, 0])


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("head_size", [8, 24, 40, 128])
def test_codes_of_every_width(target, io, kind, head_size):
    """Many tokens in one call, across blocks, three heads, widths that no vector divides."""
    scene = Scene([37, 5], num_heads=3, kv_num_heads=3, head_size=head_size, io=io, cache=kind, seed=head_size)
    target.check(scene.call([14, 0]))
