"""Helpers on CuPy arrays: the same numbers as on NumPy's, without leaving the device."""

import numpy as np

import pagedattn

BLOCK = 16
TABLE = np.array([[3, 1, -1], [5, -1, -1], [0, 2, 4]], np.int32)
LENGTHS = np.array([20, 0, 48], np.int32)


def test_layouts(cupy):
    table, lengths = cupy.asarray(TABLE), cupy.asarray(LENGTHS)
    pages = pagedattn.block_table_to_indices(table, lengths, BLOCK)
    for got, want in zip(pages, pagedattn.block_table_to_indices(TABLE, LENGTHS, BLOCK), strict=True):
        assert type(got) is cupy.ndarray
        np.testing.assert_array_equal(got.get(), want)
    again, kv_lens = pagedattn.block_table_from_indices(*pages, BLOCK)
    np.testing.assert_array_equal(kv_lens.get(), LENGTHS)
    assert (again.get()[2] == TABLE[2]).all()


def test_slots_without_a_synchronization(cupy):
    new, past = np.array([4, 0, 3], np.int32), np.array([16, 0, 45], np.int32)
    cumulative = pagedattn.cumulative_lengths(cupy.asarray(new))
    got = pagedattn.slot_mapping(cumulative, cupy.asarray(past), cupy.asarray(TABLE), BLOCK, token_count=9)
    assert type(got) is cupy.ndarray
    assert got.dtype == np.int32
    want = pagedattn.slot_mapping(pagedattn.cumulative_lengths(new), past, TABLE, BLOCK, token_count=9)
    np.testing.assert_array_equal(got.get(), want)


def test_merging(cupy):
    rng = np.random.default_rng(0)
    outputs = [rng.standard_normal((5, 32)).astype(np.float16) for _ in range(3)]
    lses = [rng.standard_normal((5, 4)).astype(np.float32) for _ in range(3)]
    lses[1][2] = -np.inf
    got = pagedattn.merge_attention_states(*([cupy.asarray(x) for x in parts] for parts in (outputs, lses)))
    for mine, want in zip(got, pagedattn.merge_attention_states(outputs, lses), strict=True):
        assert mine.dtype == want.dtype
        np.testing.assert_allclose(mine.get().astype(np.float32), want.astype(np.float32), rtol=1e-3, atol=1e-5)


def test_absorption(cupy):
    rng = np.random.default_rng(0)
    weight, q_nope, q_rope = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((3 * 40, 32), (5, 3, 16), (5, 3, 8))
    )
    sizes = {"num_heads": 3, "qk_nope_head_dim": 16, "v_head_dim": 24}
    got = pagedattn.absorb(cupy.asarray(weight), **sizes).query(cupy.asarray(q_nope), cupy.asarray(q_rope))
    want = pagedattn.absorb(weight, **sizes).query(q_nope, q_rope)
    np.testing.assert_allclose(got.get(), want, rtol=1e-4, atol=1e-4)


def test_calibration(cupy):
    samples = np.random.default_rng(0).standard_normal((20, 2, 8)).astype(np.float16)
    got, want = (pagedattn.calibrate(x, "int8", "PER_CHANNEL") for x in (cupy.asarray(samples), samples))
    np.testing.assert_array_equal(got.scale, want.scale)
