"""From tables to arrays, and the storage."""

import ml_dtypes
import numpy as np
import pytest

from pagedattn import InvalidArgumentError, paged_attention
from pagedattn.cache import BlockPool, BlockTable, allocate_cache, assemble, copy_blocks
from pagedattn.codec import decode
from pagedattn.dtypes import BY_NAME


def tables_of(*lengths: int, pool: BlockPool | None = None, **options) -> list[BlockTable]:
    pool = pool or BlockPool(64)
    tables = [BlockTable(pool, 16, **options) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        table.append(length)
    return tables


def test_ragged_batch():
    first, idle, decode_ = tables_of(20, 7, 40)
    batch = assemble([(first, 20), (idle, 0), (decode_, 1)])
    assert batch.cumulative_sequence_length.tolist() == [0, 20, 20, 21]
    assert batch.past_seqlens.tolist() == [0, 7, 39]
    assert batch.block_table.tolist() == [[*first.blocks, -1], [*idle.blocks, -1, -1], decode_.blocks]
    assert batch.slot_mapping.tolist() == [*first.slots(0, 20), *decode_.slots(39, 40)]
    assert batch.query_positions.tolist() == [*range(20), 39]
    assert batch.attention_metadata.tolist() == [32, 64], "bounds, rounded up to powers of two"
    for name, array in vars(batch).items():
        assert array.dtype == np.int32, name


def test_fixed_capacity_pads_with_what_the_operator_ignores():
    (table,) = tables_of(20)
    batch = assemble([(table, 3)], batch_size=4, token_count=8, max_blocks=5)
    assert batch.cumulative_sequence_length.tolist() == [0, 3, 3, 3, 3]
    assert batch.past_seqlens.tolist() == [17, 0, 0, 0]
    assert batch.block_table.shape == (4, 5)
    assert (batch.block_table[1:] == -1).all()
    assert (batch.block_table[0, 2:] == -1).all()
    assert batch.slot_mapping.tolist() == [*table.slots(17, 20), -1, -1, -1, -1, -1]
    assert batch.query_positions.tolist() == [17, 18, 19, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("capacity", "name"),
    [({"batch_size": 1}, "batch_size"), ({"token_count": 3}, "token_count"), ({"max_blocks": 1}, "max_blocks")],
)
def test_too_small_a_capacity_is_refused(capacity, name):
    tables = tables_of(20, 2)
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected a capacity of at least"):
        assemble([(tables[0], 2), (tables[1], 2)], **capacity)


def test_an_empty_step_is_a_legal_call():
    batch = assemble([])
    assert batch.cumulative_sequence_length.tolist() == [0, 0]
    assert batch.block_table.shape == (1, 1)
    assert batch.slot_mapping.shape == (0,)


def test_tokens_must_be_appended_first_and_block_sizes_agree():
    pool = BlockPool(8)
    table, other = BlockTable(pool, 16), BlockTable(pool, 32)
    with pytest.raises(InvalidArgumentError, match="1 new tokens in a table of 0; append them first"):
        assemble([(table, 1)])
    with pytest.raises(InvalidArgumentError, match="one block size"):
        assemble([(table, 0), (other, 0)])


def test_slots_of_rings_and_windows_come_from_their_rows():
    pool = BlockPool(32)
    ring, window = BlockTable(pool, 16, window=16, ring_blocks=2), BlockTable(pool, 16, window=16)
    for _ in range(5):
        for table in (ring, window):
            table.append(17)
    batch = assemble([(ring, 17), (window, 17)])
    assert batch.slot_mapping.tolist() == [*ring.slots(68, 85), *window.slots(68, 85)]
    assert (batch.block_table[:, :3] == -1).all()
    assert len(set(batch.slot_mapping.tolist())) == 34


def test_padded_arrays_give_the_same_output_as_exact_ones():
    rng = np.random.default_rng(0)
    outputs = []
    for capacity in ({}, {"batch_size": 3, "token_count": 9, "max_blocks": 6}):
        tables = tables_of(18, 30)
        caches = allocate_cache(64, 16, 2, 8, "float32")
        rng = np.random.default_rng(0)
        for cache in caches:
            cache[:] = rng.standard_normal(cache.shape)
        rows = rng.standard_normal((6, (4 + 4) * 8)).astype(np.float32)
        batch = assemble([(tables[0], 2), (tables[1], 4)], **capacity)
        query = np.full((len(batch.slot_mapping), rows.shape[1]), np.nan, np.float32)
        query[:6] = rows
        outputs.append(paged_attention(query, None, None, *caches, **batch.inputs, num_heads=4, kv_num_heads=2).output)
    assert np.array_equal(outputs[0], outputs[1][:6])
    assert not outputs[1][6:].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8e4m3fn", "int4"])
def test_a_new_cache_holds_zeros_of_its_type(dtype):
    key_cache, value_cache = allocate_cache(3, 16, 2, 24, dtype)
    row = BY_NAME[dtype]
    for cache in (key_cache, value_cache):
        assert cache.shape == (3, 16, 2, 12 if dtype == "int4" else 24)
        assert cache.dtype == row.numpy
        assert not decode(cache, row).any()
    assert not np.shares_memory(key_cache.view(np.uint8), value_cache.view(np.uint8))


def test_the_latent_layout_has_one_cache():
    key_cache, value_cache = allocate_cache(2, 16, 1, 576, kv_cache_layout="LATENT")
    assert (key_cache.shape, value_cache) == ((2, 16, 1, 576), None)


def test_cache_arguments_are_checked():
    with pytest.raises(InvalidArgumentError, match=r"dtype: expected one of float16, .* got 'uint4'"):
        allocate_cache(2, 16, 1, 8, "uint4")
    with pytest.raises(InvalidArgumentError, match="kv_cache_layout: expected one of SEPARATE, LATENT, got 'FUSED'"):
        allocate_cache(2, 16, 1, 8, kv_cache_layout="FUSED")
    with pytest.raises(InvalidArgumentError, match="slot_mapping is int32, got 134217728 \\* 16"):
        allocate_cache(1 << 27, 16, 1, 8)
    with pytest.raises(InvalidArgumentError, match="num_blocks: expected a count >= 0, got -2"):
        allocate_cache(-2, 16, 1, 8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn, np.uint8])
def test_copied_blocks_carry_every_byte(dtype):
    data = np.random.default_rng(0).integers(0, 256, (6, 16, 2, 8 * np.dtype(dtype).itemsize), np.uint8)
    cache = data.view(dtype).copy()
    copy_blocks(cache, [(0, 3), (5, 1)])
    copied = cache.view(np.uint8)
    assert np.array_equal(copied[[0, 3, 5, 1, 2, 4]], data[[0, 0, 5, 5, 2, 4]])


def test_copies_act_one_after_the_other():
    cache = np.arange(4.0).reshape(4, 1, 1, 1)
    copy_blocks(cache, [(0, 1), (1, 2), (3, 0)])
    assert cache.ravel().tolist() == [0 + 3, 0, 0, 3]


def test_no_copies_are_no_work():
    copy_blocks(None, [])


def test_copies_reach_a_view_of_a_larger_buffer():
    both = np.zeros((4, 2, 16, 1, 8), np.int8)
    both[0, 1] = 7
    copy_blocks(both[:, 1], [(0, 2)])
    assert (both[2, 1] == 7).all()
    assert not both[:, 0].any()


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(0, 1), (-1, 2)], r"block -1: expected an id in \[0, 4\), the blocks of the cache"),
        ([(0, 1), (1, 4)], r"block 4: expected an id in \[0, 4\), the blocks of the cache"),
        ([(0, 1.0)], "destination: expected an integer, got 1.0"),
    ],
)
def test_copies_of_no_block_of_the_cache_are_refused(copies, message):
    cache = np.arange(4, dtype=np.float16).reshape(4, 1, 1, 1)
    with pytest.raises(InvalidArgumentError, match=message):
        copy_blocks(cache, copies)
    assert cache.ravel().tolist() == [0, 1, 2, 3]


def test_the_last_copy_to_a_block_counts():
    cache = np.arange(4, dtype=np.float16).reshape(4, 1, 1, 1)
    copy_blocks(cache, [(0, 1), (3, 1)])
    assert cache.ravel().tolist() == [0, 3, 2, 3]


def test_a_read_only_cache_is_not_copied_in():
    with pytest.raises(InvalidArgumentError, match="cache: expected a writeable array"):
        copy_blocks(np.broadcast_to(np.float16(0), (4, 1, 1, 1)), [(0, 1)])


def test_counts_of_a_step_are_integers():
    table = BlockTable(BlockPool(4), 16)
    table.append(5)
    with pytest.raises(InvalidArgumentError, match=r"count: expected an integer, got 1\.0"):
        assemble([(table, 1.0)])
    with pytest.raises(InvalidArgumentError, match=r"max_blocks: expected an integer, got 2\.5"):
        assemble([(table, 1)], max_blocks=2.5)
