"""RoPE and QK-norm: which channels pair up, in which order the two happen, and over what."""

from __future__ import annotations

import numpy as np
import pytest

from pagedattn.dtypes import BFLOAT16, FLOAT16

from .scene import CACHES, Scene, assert_close, assert_same_bytes

# (head_size, rotary_dim, offset, interleaved): channels 1..n with the first pair turned by 90 degrees.
TURNED = {
    "halves": (8, 8, 0, 0, [-5, 2, 3, 4, 1, 6, 7, 8]),
    "neighbours": (8, 8, 0, 1, [-2, 1, 3, 4, 5, 6, 7, 8]),
    "halves of a part": (16, 8, 0, 0, [-5, 2, 3, 4, 1, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    "halves behind an offset": (16, 8, 8, 0, [1, 2, 3, 4, 5, 6, 7, 8, -13, 10, 11, 12, 9, 14, 15, 16]),
    "neighbours behind an offset": (16, 8, 8, 1, [1, 2, 3, 4, 5, 6, 7, 8, -10, 9, 11, 12, 13, 14, 15, 16]),
    "halves in a wide head": (64, 8, 0, 0, [-5, 2, 3, 4, 1, 6, 7, 8, *range(9, 65)]),
    "all of a wide head": (64, 64, 0, 0, [-33, *range(2, 33), 1, *range(34, 65)]),
    "offset in a wide head": (64, 16, 40, 0, [*range(1, 41), -49, *range(42, 49), 41, *range(50, 65)]),
    "neighbours in a wide head": (64, 16, 40, 1, [*range(1, 41), -42, 41, *range(43, 65)]),
    "an odd number of pairs": (24, 10, 8, 0, [*range(1, 9), -14, 10, 11, 12, 13, 9, *range(15, 25)]),
}


def tables(io, rotary_dim, rows, position):
    """cos and sin caches that turn the first pair by 90 degrees at one position and nothing elsewhere."""
    cos = np.ones((rows, rotary_dim // 2))
    sin = np.zeros_like(cos)
    cos[position, 0], sin[position, 0] = 0, 1
    return {"cos_cache": cos.astype(io.numpy), "sin_cache": sin.astype(io.numpy)}


def stored_row(scene, cache, position, b=0):
    """Row (kv_num_heads, width) of a position of a sequence, as it lies in a cache."""
    slot = int(scene.slots(b, np.array([position]))[0])
    return cache[slot // scene.block_size, slot % scene.block_size]


@pytest.mark.parametrize("kind", ["plain", "int8"])
@pytest.mark.parametrize("where", TURNED)
def test_keys_are_rotated_in_the_right_pairs(target, io, where, kind):
    head_size, rotary_dim, offset, interleaved, want = TURNED[where]
    cache = CACHES["plain"] if kind == "plain" else CACHES["int8"].with_scales(1, 1)
    row = np.arange(1, head_size + 1)
    scene = Scene([5], kv_num_heads=2, head_size=head_size, io=io, cache=cache, key=row, value=row)
    call = scene.call([3]).change(
        do_rotary=1, rotary_interleaved=interleaved, rotary_offset=offset, **tables(io, rotary_dim, 6, 4)
    )
    outcome = target.run(call)
    for head in range(2):
        assert stored_row(scene, outcome.key_cache, 4)[head].tolist() == want
        assert stored_row(scene, outcome.key_cache, 3)[head].tolist() == list(range(1, head_size + 1))
        assert stored_row(scene, outcome.value_cache, 4)[head].tolist() == list(range(1, head_size + 1))


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("where", TURNED)
def test_queries_are_rotated_like_keys(target, io, where, packed):
    """Sequence i has the unit vector of channel i as its only key, so that its score is channel i of the query."""
    head_size, rotary_dim, offset, interleaved, want = TURNED[where]
    query = np.arange(1, head_size + 1)
    scene = Scene([2] * head_size, head_size=head_size, io=io, query=query, value=1, unused="zero")
    for i in range(head_size):
        scene.key[i][:] = np.eye(head_size)[i]
    call = scene.call([1] * head_size).change(
        slot_mapping=np.full(head_size, -1, np.int32),
        do_rotary=1,
        rotary_interleaved=interleaved,
        rotary_offset=offset,
        scale=0.125,
        **tables(io, rotary_dim, 2, 1),
    )
    bias = np.zeros((1, 1, 1, 2), io.numpy)
    bias[..., 1] = -np.inf
    call = call.change(attention_bias=bias)
    if packed:
        fused = np.concatenate([call["query"], call["key"], call["value"]], axis=1)
        call = call.change(query=fused, key=None, value=None)
    outcome = target.run(call, return_lse=True)  # of one key, the logarithm is its score
    np.testing.assert_allclose(outcome.lse, np.repeat(want, 2).reshape(-1, 2) / 8, rtol=1e-3)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "int8-channel", "fp8"])
def test_rotating_inside_equals_rotating_before(target, io, kind, interleaved):
    """The same attention from inputs that were rotated by hand; quantized keys may differ by a rounding."""
    scene = Scene([40, 7], num_heads=4, kv_num_heads=2, head_size=32, io=io, cache=CACHES[kind])
    pasts = [33, 6]
    angles = np.arange(64)[:, None] * 0.5 ** np.arange(8)
    cos, sin = np.cos(angles).astype(io.numpy), np.sin(angles).astype(io.numpy)
    inside = scene.call(pasts).change(
        do_rotary=1, rotary_interleaved=interleaved, rotary_offset=8, cos_cache=cos, sin_cache=sin
    )
    position = np.concatenate([np.arange(past, n) for past, n in zip(pasts, scene.lengths, strict=True)])
    first = 8 + (np.arange(0, 16, 2) if interleaved else np.arange(8))
    second = first + (1 if interleaved else 8)

    def rotated(rows):
        x = rows.reshape(len(position), -1, 32).astype(np.float32)
        c, s = (table[position][:, None].astype(np.float32) for table in (cos, sin))
        y = x.copy()
        y[..., first] = x[..., first] * c - x[..., second] * s
        y[..., second] = x[..., second] * c + x[..., first] * s
        return y.astype(io.numpy).reshape(rows.shape)

    before = scene.call(pasts).change(query=rotated(inside["query"]), key=rotated(inside["key"]))
    got, want = target.run(inside), target.run(before)
    if kind == "plain":
        assert_same_bytes(got.key_cache, want.key_cache)
        assert_same_bytes(got.output, want.output)
    assert_close(got.output, want.output, io, roundings=8 if kind == "plain" else 40)


def test_positions_of_rotation_follow_query_positions(target):
    scene = Scene([6], kv_num_heads=1, head_size=8, key=np.arange(1, 9))
    call = scene.call([3]).change(
        do_rotary=1, query_positions=np.array([9, 4, 5], np.int32), **tables(FLOAT16, 8, 10, 9)
    )
    outcome = target.run(call)
    assert stored_row(scene, outcome.key_cache, 3)[0].tolist() == TURNED["halves"][4]
    assert stored_row(scene, outcome.key_cache, 4)[0].tolist() == list(range(1, 9))


def test_a_position_beyond_the_tables_spoils_its_own_row_only(target):
    scene = Scene([6, 9, 3], kv_num_heads=1, head_size=8)
    call = scene.call([5, 8, 2]).change(do_rotary=1, **tables(FLOAT16, 8, 6, 5))
    outcome = target.run(call)
    want = target.run(call.change(**tables(FLOAT16, 8, 16, 5)))
    assert_same_bytes(outcome.output[[0, 2]], want.output[[0, 2]])


def test_a_rotation_that_does_not_fit_is_refused(target):
    scene = Scene([4], head_size=16)
    call = scene.call([3]).change(do_rotary=1, **tables(FLOAT16, 8, 8, 0))
    for changes, name in (
        ({"rotary_offset": 16}, "rotary_offset"),
        ({"rotary_offset": 4}, "rotary_offset"),
        ({"rotary_offset": -8}, "rotary_offset"),
        (tables(FLOAT16, 24, 8, 0), "cos_cache"),
        ({"sin_cache": None}, "sin_cache"),
        ({"sin_cache": None, "cos_cache": None}, "cos_cache"),
        ({"sin_cache": np.zeros((7, 4), np.float16)}, "sin_cache"),
    ):
        target.refuses(call.change(**changes), f"^{name}: ")


# ---- QK-norm


def normed(io, head_size, **changes):
    return {
        "q_norm_weight": np.ones(head_size, io.numpy),
        "k_norm_weight": np.arange(1, head_size + 1).astype(io.numpy),
        "scale": 0.25,
        **changes,
    }


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_norm_comes_before_rotation(target, io, kind):
    """Rotating first gives -1 and 5 in the turned pair."""
    cache = CACHES["plain"] if kind == "plain" else CACHES["int8"].with_scales(1, 1)
    scene = Scene([3], num_heads=2, kv_num_heads=2, head_size=8, io=io, cache=cache, key=2, value=2)
    outcome = target.run(scene.call([2]).change(do_rotary=1, **tables(io, 8, 3, 2), **normed(io, 8)))
    row = stored_row(scene, outcome.key_cache, 2)
    np.testing.assert_allclose(row.astype(np.float64), [TURNED["halves"][4]] * 2, rtol=1e-6)
    assert (stored_row(scene, outcome.value_cache, 2) == 2).all()


@pytest.mark.parametrize("head_size", [8, 64, 72, 256])
def test_each_head_is_normalised_alone(target, io, head_size):
    """Heads of 2 and of 4 both become 1; over both jointly they would be 0.632 and 1.265."""
    scene = Scene([3], kv_num_heads=2, head_size=head_size, io=io, key=lambda b, pos, h: 2 * (h + 1), value=1)
    weights = {name: np.ones(head_size, io.numpy) for name in ("q_norm_weight", "k_norm_weight")}
    outcome = target.run(scene.call([2]).change(**weights))
    np.testing.assert_allclose(stored_row(scene, outcome.key_cache, 2).astype(np.float64), 1, rtol=1e-6)


@pytest.mark.parametrize(("epsilon", "want"), [(1e-6, 2**-0.5), (1e-5, 11**-0.5), (None, 2**-0.5)])
def test_epsilon_is_inside_the_root(target, io, epsilon, want):
    scene = Scene([3], num_heads=2, kv_num_heads=2, head_size=8, io=io, key=1e-3)
    weights = {name: np.ones(8, io.numpy) for name in ("q_norm_weight", "k_norm_weight")}
    call = scene.call([2]).change(**weights)
    outcome = target.run(call if epsilon is None else call.change(qk_norm_epsilon=epsilon))
    row = stored_row(scene, outcome.key_cache, 2).astype(np.float64)
    assert_close(row, np.full((2, 8), want), io)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_queries_are_normalised_with_their_own_weight(target, io, packed):
    """Sequence i's only key is the unit vector of channel i; the score is channel i of the query."""
    scene = Scene([2] * 8, num_heads=2, head_size=8, io=io, query=lambda b, pos, h: 3 * (h + 1), value=1)
    for i in range(8):
        scene.key[i][:] = np.eye(8)[i]
    bias = np.zeros((1, 1, 1, 2), io.numpy)
    bias[..., 1] = -np.inf
    call = scene.call([1] * 8).change(
        attention_bias=bias,
        scale=1.0,
        q_norm_weight=np.arange(1, 9).astype(io.numpy),
        k_norm_weight=np.ones(8, io.numpy),
    )
    if packed:
        fused = np.concatenate([call["query"], call["key"], call["value"]], axis=1)
        call = call.change(query=fused, key=None, value=None)
    outcome = target.run(call, return_lse=True)
    np.testing.assert_allclose(outcome.lse, np.repeat(np.arange(1, 9), 2).reshape(8, 2), rtol=1e-3)


@pytest.mark.parametrize("head_size", [8, 40, 128])
def test_norm_of_random_rows(target, io, head_size):
    """The stored keys against the formula in float64, rounded once."""
    scene = Scene([20, 3], num_heads=4, kv_num_heads=2, head_size=head_size, io=io, seed=head_size)
    weight = np.random.default_rng(1).uniform(-2, 2, head_size).astype(io.numpy)
    call = scene.call([11, 0]).change(**normed(io, head_size, k_norm_weight=weight))
    outcome = target.run(call)
    for b, past in ((0, 11), (1, 0)):
        for position in range(past, scene.lengths[b]):
            x = scene.key[b][position].astype(np.float64)
            want = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
            got = stored_row(scene, outcome.key_cache, position, b).astype(np.float64)
            assert_close(got, want, io, roundings=1)


WRONG = {
    "float32 weight in a bfloat16 call": (BFLOAT16, {"q_norm_weight": np.ones(16, np.float32)}, "q_norm_weight"),
    "bfloat16 weight in a float16 call": (FLOAT16, {"k_norm_weight": np.ones(16, BFLOAT16.numpy)}, "k_norm_weight"),
    "float64 weight": (FLOAT16, {"q_norm_weight": np.ones(16)}, "q_norm_weight"),
    "query's weight only": (FLOAT16, {"k_norm_weight": None}, "k_norm_weight"),
    "key's weight only": (FLOAT16, {"q_norm_weight": None}, "q_norm_weight"),
    "one element too many": (FLOAT16, {"q_norm_weight": np.ones(17, np.float16)}, "q_norm_weight"),
    "one element too few": (FLOAT16, {"k_norm_weight": np.ones(15, np.float16)}, "k_norm_weight"),
    "two dimensions": (FLOAT16, {"k_norm_weight": np.ones((1, 16), np.float16)}, "k_norm_weight"),
    "rotary tables of another type": (
        FLOAT16,
        {"cos_cache": np.ones((8, 4), np.float32), "sin_cache": np.ones((8, 4), np.float32), "do_rotary": 1},
        "cos_cache",
    ),
    "sink of another type": (FLOAT16, {"head_sink": np.ones(2, np.float32)}, "head_sink"),
    "bias of another type": (BFLOAT16, {"attention_bias": np.ones((1, 1, 1, 4), np.float32)}, "attention_bias"),
    "scale of another type": (
        FLOAT16,
        {
            "k_scale": np.ones(1, np.float16),
            "key_cache": np.zeros((3, 16, 1, 16), np.int8),
            "k_quant_type": "PER_TENSOR",
            "v_scale": np.ones(1, np.float32),
            "value_cache": np.zeros((3, 16, 1, 16), np.int8),
            "v_quant_type": "PER_TENSOR",
        },
        "k_scale",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_input_of_another_type_is_refused_by_name(target, what):
    """Read as the wrong type it would be NaN, or plausible and wrong."""
    io, changes, name = WRONG[what]
    call = Scene([4], io=io).call([3])
    if "weight" in what or "element" in what or "dimensions" in what:
        call = call.change(q_norm_weight=np.ones(16, io.numpy), k_norm_weight=np.ones(16, io.numpy))
    target.refuses(call.change(**changes), f"^{name}: ")
