"""BlockPool: reference counts, eviction order, and the content index."""

import time

import numpy as np
import pytest

from pagedattn import InvalidArgumentError, PagedAttentionError
from pagedattn.cache import BlockPool, OutOfBlocksError, content_key


def key(number: int) -> bytes:
    return content_key(b"", [number])


def cached_pool(count: int) -> BlockPool:
    """Every block cached under its own id, released in the order of the ids."""
    pool = BlockPool(count)
    for block in sorted(pool.allocate(count)):
        pool.register(block, key(block))
        pool.free(block)
    return pool


def test_allocation_is_all_or_none():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match=r"asked for 2 blocks, 1 of 3 are available"):
        pool.allocate(2)
    assert pool.available == 1
    assert len(pool.allocate(1)) == 1
    assert pool.used == 3


def test_out_of_blocks_is_a_memory_error_of_this_package():
    assert issubclass(OutOfBlocksError, PagedAttentionError)
    assert issubclass(OutOfBlocksError, MemoryError)


def test_shared_block_is_free_when_its_last_owner_frees_it():
    pool = BlockPool(1)
    (block,) = pool.allocate()
    pool.share(block)
    pool.free(block)
    assert (pool.references(block), pool.available) == (1, 0)
    pool.free(block)
    assert (pool.references(block), pool.available) == (0, 1)


@pytest.mark.parametrize("registered", [False, True])
def test_double_free_is_refused_and_changes_nothing(registered):
    pool = BlockPool(2)
    (block,) = pool.allocate()
    if registered:
        pool.register(block, key(1))
    pool.free(block)
    with pytest.raises(InvalidArgumentError, match=f"block {block} is freed twice"):
        pool.free(block)
    assert pool.available == 2
    assert sorted(pool.allocate(2)) == [0, 1]


@pytest.mark.parametrize("block", [-1, 2, 99])
def test_ids_outside_the_pool_are_refused(block):
    pool = BlockPool(2)
    for method in (pool.free, pool.share, pool.references):
        with pytest.raises(InvalidArgumentError, match=rf"block {block}: expected an id in \[0, 2\)"):
            method(block)


def test_a_free_block_cannot_be_shared_or_registered():
    pool = BlockPool(2)
    with pytest.raises(InvalidArgumentError, match="nothing to share"):
        pool.share(0)
    with pytest.raises(InvalidArgumentError, match="no owner"):
        pool.register(0, key(0))


def test_a_negative_pool_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        BlockPool(-1)


def test_cached_blocks_are_available_and_found_until_evicted():
    pool = cached_pool(2)
    assert (pool.cached, pool.available, pool.used) == (2, 2, 0)
    assert pool.lookup(key(0)) == 0
    pool.share(0)
    assert (pool.cached, pool.available, pool.references(0)) == (1, 1, 1)
    assert pool.allocate() == [1]
    assert pool.lookup(key(1)) is None
    assert pool.lookup(key(0)) == 0


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(3)
    first, second, _ = pool.allocate(3)
    pool.register(first, key(1))
    pool.free(first)
    pool.free(second)
    assert pool.allocate() == [second]
    assert pool.lookup(key(1)) == first


def test_the_block_released_longest_ago_is_evicted_first():
    pool = cached_pool(4)
    pool.share(0)  # a new use makes it the most recent
    pool.free(0)
    assert [pool.allocate()[0] for _ in range(4)] == [1, 2, 3, 0]


def test_of_equal_contents_the_first_is_found_and_the_copy_is_an_ordinary_block():
    pool = BlockPool(2)
    first, copy = pool.allocate(2)
    pool.register(first, key(7))
    pool.register(copy, key(7))
    pool.free(copy)
    assert pool.lookup(key(7)) == first
    assert (pool.cached, pool.available) == (0, 1)
    pool.free(first)
    assert pool.cached == 1


def test_unregistered_content_is_not_found():
    pool = cached_pool(2)
    pool.unregister(0)
    pool.unregister(0)
    assert pool.lookup(key(0)) is None
    assert (pool.cached, pool.available) == (1, 2)
    assert pool.allocate() == [0], "a block without content is free, not cached"


def test_content_keys_tell_order_position_and_root_apart():
    root = content_key(b"", [1, 2])
    keys = [
        root,
        content_key(b"", [2, 1]),
        content_key(root, [1, 2]),
        content_key(b"adapter", [1, 2]),
        content_key(b"", [1, 2, 0]),
        content_key(b"", [12]),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key(b"", np.array([1, 2], np.int32)) == root


def test_operations_take_constant_time():
    """A large pool costs no more per operation than a small one, evictions included."""

    def cost(count: int) -> float:
        pool = cached_pool(count)
        start = time.perf_counter()
        for _ in range(3):
            blocks = pool.allocate(1000)
            for number, block in enumerate(blocks):
                pool.register(block, key(-number - 1))
                pool.share(block)
                pool.free(block)
                pool.free(block)
        return time.perf_counter() - start

    assert min(cost(100_000) for _ in range(3)) < 10 * min(cost(1000) for _ in range(3))


def test_repr_tells_the_state():
    pool = cached_pool(3)
    pool.share(1)
    assert repr(pool) == "BlockPool(1 used, 2 cached, 0 free)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.allocate(-1), "count: expected a number of blocks >= 0, got -1"),
        (lambda pool: pool.allocate(1.0), "count: expected an integer, got 1.0"),
        (lambda pool: pool.free(0.0), "block: expected an integer, got 0.0"),
        (lambda pool: BlockPool(2.5), "num_blocks: expected an integer, got 2.5"),
        (lambda pool: content_key(b"", [1.5]), "tokens: expected integers, got elements of float64"),
    ],
)
def test_numbers_of_another_kind_are_refused(call, message):
    pool = BlockPool(4)
    with pytest.raises(InvalidArgumentError, match=message):
        call(pool)
    assert pool.available == 4


def test_any_spelling_of_a_count_is_taken():
    pool = BlockPool(np.int64(4))
    assert pool.allocate(np.int32(2)) == [0, 1]
    assert content_key(b"", [3, 4]) == content_key(b"", np.array([3, 4], np.int32))
