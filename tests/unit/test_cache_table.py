"""BlockTable: one sequence that grows, forks, rolls back, and leaves its window behind."""

import numpy as np
import pytest

from pagedattn import InvalidArgumentError
from pagedattn.cache import BlockPool, BlockTable, OutOfBlocksError, window_blocks
from tests.support.serving import audit, prefix_keys


def table_of(
    length: int, pool: BlockPool | None = None, block_size: int = 4, chunk: int | None = None, **options
) -> BlockTable:
    table = BlockTable(pool or BlockPool(32), block_size, **options)
    while table.length < length:
        table.append(min(chunk or length, length - table.length))
    return table


def test_blocks_come_as_tokens_need_them():
    pool = BlockPool(8)
    table = BlockTable(pool, 4)
    used = []
    for count in (1, 3, 1, 9, 0):
        assert table.append(count) == []
        used.append(pool.used)
    assert used == [1, 1, 2, 4, 4]
    assert table.length == 14


def test_slots_follow_the_blocks():
    pool = BlockPool(8)
    pool.allocate(3)
    table = table_of(6, pool)
    first, second = table.blocks
    assert table.slots(0, 6).tolist() == [*range(4 * first, 4 * first + 4), 4 * second, 4 * second + 1]
    assert table.slots(3, 3).size == 0
    assert table.slots(0, 6).dtype == np.int32
    with pytest.raises(InvalidArgumentError, match=r"slots: expected positions in \[0, 6\], got \[5, 7\)"):
        table.slots(5, 7)


def test_a_refused_append_changes_nothing():
    pool = BlockPool(3)
    table, other = table_of(5, pool), table_of(1, pool)
    before = (table.length, table.blocks, pool.available)
    with pytest.raises(OutOfBlocksError):
        table.append(4)
    assert (table.length, table.blocks, pool.available) == before
    assert table.append(3) == []
    audit(pool, [table, other])


def test_negative_counts_and_sizes_are_refused():
    with pytest.raises(InvalidArgumentError, match="append: expected a count >= 0, got -1"):
        table_of(3).append(-1)
    with pytest.raises(InvalidArgumentError, match="block_size"):
        BlockTable(BlockPool(1), 0)
    with pytest.raises(InvalidArgumentError, match="window: expected at least the token's own position, got 0"):
        BlockTable(BlockPool(1), 4, window=0)
    with pytest.raises(InvalidArgumentError, match="a ring needs a window"):
        BlockTable(BlockPool(1), 4, ring_blocks=2)
    with pytest.raises(InvalidArgumentError, match="room for window = 9 positions, got 2 blocks of 4"):
        BlockTable(BlockPool(1), 4, window=9, ring_blocks=2)
    with pytest.raises(InvalidArgumentError, match="root: expected at most 64 bytes, got 65"):
        BlockTable(BlockPool(1), 4, root=bytes(65))


def test_blocks_needed_is_what_append_takes():
    pool = BlockPool(32)
    table = table_of(6, pool)
    child = table.fork()
    for count in (0, 1, 2, 3, 7, 20):
        probe = child.fork()
        needed, before = probe.blocks_needed(count), pool.available
        probe.append(count)
        assert before - pool.available == needed
        probe.free()


def test_free_returns_every_block_and_the_table_can_be_used_again():
    pool = BlockPool(4)
    table = table_of(10, pool)
    table.free()
    table.free()
    assert (pool.available, table.length, table.blocks) == (4, 0, [])
    table.append(16)
    assert pool.available == 0


class TestFork:
    def test_a_fork_takes_no_block(self):
        pool = BlockPool(4)
        table = table_of(6, pool)
        child = table.fork()
        assert child.blocks == table.blocks
        assert pool.used == 2
        audit(pool, [table, child])

    def test_the_first_to_append_copies_the_shared_last_block_and_the_second_keeps_it(self):
        pool = BlockPool(4)
        table = table_of(6, pool)
        child = table.fork()
        last = table.blocks[-1]
        assert child.append(1) == [(last, child.blocks[-1])]
        assert child.blocks[0] == table.blocks[0]
        assert child.blocks[-1] != last
        assert table.append(1) == []
        assert table.blocks[-1] == last
        audit(pool, [table, child])

    def test_at_a_block_edge_there_is_nothing_to_copy(self):
        pool = BlockPool(4)
        table = table_of(8, pool)
        child = table.fork()
        assert child.append(1) == []
        assert table.append(1) == []
        assert child.blocks[:2] == table.blocks[:2]
        assert child.blocks[2] != table.blocks[2]

    def test_without_a_block_for_the_copy_nothing_changes(self):
        pool = BlockPool(2)
        table = table_of(6, pool)
        child = table.fork()
        with pytest.raises(OutOfBlocksError):
            child.append(1)
        assert child.blocks == table.blocks
        assert child.length == 6
        audit(pool, [table, child])

    def test_freeing_one_leaves_the_other(self):
        pool = BlockPool(4)
        table = table_of(6, pool)
        child = table.fork()
        table.free()
        assert pool.used == 2
        assert child.append(1) == [], "the only owner writes in place"
        child.free()
        assert pool.available == 4

    def test_a_rollback_into_a_shared_block_is_copied_before_it_is_written(self):
        pool = BlockPool(6)
        table = table_of(12, pool)
        child = table.fork()
        child.truncate(6)
        shared = child.blocks[1]
        assert child.append(1) == [(shared, child.blocks[1])]
        assert table.blocks[1] == shared
        audit(pool, [table, child])


class TestTruncate:
    @pytest.mark.parametrize(("length", "held"), [(13, 4), (12, 3), (9, 3), (8, 2), (1, 1), (0, 0)])
    def test_blocks_with_only_later_tokens_are_freed(self, length, held):
        pool = BlockPool(8)
        table = table_of(13, pool)
        table.truncate(length)
        assert (table.length, len(table.blocks), pool.used) == (length, held, held)

    @pytest.mark.parametrize("length", [-1, 6])
    def test_only_to_a_length_that_was(self, length):
        with pytest.raises(InvalidArgumentError, match=rf"truncate: expected a length in \[0, 5\], got {length}"):
            table_of(5).truncate(length)


class TestPrefixCache:
    TOKENS = tuple(range(100, 111))

    def committed(self, pool: BlockPool, tokens=TOKENS, **options) -> BlockTable:
        table = table_of(len(tokens), pool, **options)
        table.commit(tokens)
        return table

    def test_full_blocks_of_a_common_prefix_are_shared(self):
        pool = BlockPool(8)
        first = self.committed(pool)
        second = BlockTable(pool, 4)
        assert second.reuse_prefix(self.TOKENS) == 8
        assert second.blocks == first.blocks[:2]
        audit(pool, [first, second])

    def test_a_differing_token_ends_the_prefix(self):
        pool = BlockPool(8)
        self.committed(pool)
        for at, covered in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
            tokens = list(self.TOKENS)
            tokens[at] = 5
            table = BlockTable(pool, 4)
            assert table.reuse_prefix(tokens) == covered

    def test_the_same_tokens_after_another_prefix_are_other_content(self):
        pool = BlockPool(8)
        self.committed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
        assert BlockTable(pool, 4).reuse_prefix([5, 6, 7, 8]) == 0

    def test_roots_do_not_share(self):
        pool = BlockPool(8)
        self.committed(pool, root=b"adapter")
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 0
        assert BlockTable(pool, 4, root=b"adapter").reuse_prefix(self.TOKENS) == 8

    def test_a_freed_prefix_is_found_until_it_is_evicted_end_first(self):
        pool = BlockPool(3)
        self.committed(pool).free()
        assert (pool.available, pool.cached) == (3, 2)
        filler = table_of(8, pool)  # the free block and one cached
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 4
        filler.free()

    def test_committing_in_pieces_equals_committing_at_once(self):
        pool = BlockPool(16)
        table = BlockTable(pool, 4)
        for length in range(1, len(self.TOKENS) + 1):
            table.append(1)
            table.commit(self.TOKENS[:length])
        assert set(pool._block_of) == set(prefix_keys(self.TOKENS, 4))

    def test_uncommitted_tokens_are_not_found(self):
        pool = BlockPool(8)
        table = table_of(len(self.TOKENS), pool)
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 0
        table.commit(self.TOKENS[:7])
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 4

    def test_more_tokens_than_are_cached_cannot_be_committed(self):
        with pytest.raises(InvalidArgumentError, match="commit: 11 tokens are given, 5 are in the cache"):
            table_of(5).commit(self.TOKENS)

    def test_only_an_empty_table_takes_a_prefix(self):
        with pytest.raises(InvalidArgumentError, match="expected an empty table, got one of 5 tokens"):
            table_of(5).reuse_prefix(self.TOKENS)

    def test_a_registered_block_is_forgotten_when_its_only_owner_writes_into_it(self):
        pool = BlockPool(8)
        table = self.committed(pool)
        table.truncate(6)
        assert pool.lookup(prefix_keys(self.TOKENS, 4)[1]) == table.blocks[1], "its content still stands"
        assert table.append(1) == []
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 4

    def test_a_registered_block_is_copied_when_one_of_several_owners_writes_into_it(self):
        pool = BlockPool(8)
        table = self.committed(pool)
        other = BlockTable(pool, 4)
        other.reuse_prefix(self.TOKENS)
        other.truncate(6)
        assert other.append(1) == [(table.blocks[1], other.blocks[1])]
        assert BlockTable(pool, 4).reuse_prefix(self.TOKENS) == 8

    def test_other_content_after_a_rollback_is_registered_as_such(self):
        pool = BlockPool(8)
        table = self.committed(pool)
        table.truncate(5)
        other = [*self.TOKENS[:5], 1, 2, 3]
        table.append(3)
        table.commit(other)
        assert set(pool._block_of) == set(prefix_keys(other, 4))


class TestWindow:
    def test_window_blocks_cover_any_alignment(self):
        for window in (1, 3, 4, 5, 16):
            for chunk in (1, 2, 4, 7):
                most = max((start + window + chunk - 2) // 4 - start // 4 + 1 for start in range(8))
                assert most <= window_blocks(window, 4, chunk) <= most + 1

    @pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
    @pytest.mark.parametrize("chunk", [1, 3, 4, 8])
    def test_blocks_below_the_window_return_and_visible_ones_stay(self, window, chunk):
        pool = BlockPool(window_blocks(window, 4, chunk))
        table = BlockTable(pool, 4, window=window)
        while table.length < 60:
            past = table.length
            table.append(chunk)
            row = table.row(chunk)
            visible = np.arange(max(0, past - window + 1), table.length) // 4
            assert (row[visible] >= 0).all()
            assert (row[: visible[0]] == -1).all()
            assert table.oldest_resident <= max(0, past - window + 1)
        audit(pool, [table])

    def test_a_rewind_to_what_is_held_is_allowed_and_beyond_it_refused(self):
        table = table_of(24, window=4, chunk=1)  # the last append, at 23, kept positions from 20 on
        assert table.oldest_resident == 20
        table.truncate(23)
        with pytest.raises(
            InvalidArgumentError, match="a token at position 22 sees positions from 19 on, but those below 20 are gone"
        ):
            table.truncate(22)
        assert table.length == 23

    def test_a_fork_shares_the_window(self):
        pool = BlockPool(12)
        table = table_of(21, pool, window=6, chunk=1)
        child = table.fork()
        for _ in range(20):
            child.append(1)
        assert len(child.blocks) <= window_blocks(6, 4)
        audit(pool, [table, child])
        table.free()
        child.free()
        assert pool.available == 12


class TestRing:
    def test_slots_go_round(self):
        pool = BlockPool(8)
        table = BlockTable(pool, 4, window=5, ring_blocks=3)
        slots = []
        for _ in range(40):
            table.append(1)
            slots += table.slots(table.length - 1, table.length).tolist()
        ring = table.blocks
        assert len(ring) == 3
        assert slots == [ring[p // 4 % 3] * 4 + p % 4 for p in range(40)]

    def test_short_sequences_hold_only_what_they_need(self):
        pool = BlockPool(8)
        table = BlockTable(pool, 4, window=16, ring_blocks=5)
        table.append(6)
        assert pool.used == 2

    def test_the_first_chunk_may_fill_the_ring_and_later_ones_leave_the_window(self):
        table = BlockTable(BlockPool(8), 4, window=4, ring_blocks=2)
        assert table.append_limit == 8
        table.append(8)
        assert table.append_limit == 5
        with pytest.raises(
            InvalidArgumentError,
            match=r"append: 6 tokens at position 8 would overwrite keys inside "
            r"the window of 4.*takes at most 5 now",
        ):
            table.append(6)
        assert table.length == 8
        table.append(5)

    def test_row_names_a_recycled_block_at_both_of_its_places(self):
        table = BlockTable(BlockPool(8), 4, window=4, ring_blocks=2)
        table.append(8)
        table.append(5)
        first, second = table.blocks
        # Position 5 is the oldest visible one: slot 4 of the old round is overwritten, 5, 6 and 7 are not.
        assert table.row(5).tolist() == [-1, second, first, second]

    def test_ring_blocks_are_never_shared_by_content(self):
        table = BlockTable(BlockPool(8), 4, window=4, ring_blocks=2)
        with pytest.raises(InvalidArgumentError, match="reuse_prefix: a ring's blocks are overwritten"):
            table.reuse_prefix([1, 2, 3, 4])
        with pytest.raises(InvalidArgumentError, match="commit: a ring's blocks are overwritten"):
            table.commit([])

    def test_a_forked_ring_copies_each_block_once_before_it_writes(self):
        pool = BlockPool(8)
        table = table_of(11, pool, window=4, ring_blocks=2, chunk=1)
        child = table.fork()
        copies = [copy for _ in range(12) for copy in child.append(1)]
        assert [source for source, _ in copies] == [table.blocks[0], table.blocks[1]]
        assert not set(child.blocks) & set(table.blocks)
        audit(pool, [table, child])

    def test_overwritten_positions_stay_lost_after_a_rollback(self):
        table = table_of(24, window=4, ring_blocks=2, chunk=1)
        assert table.oldest_resident == 16
        table.truncate(20)
        assert table.oldest_resident == 16
        table.append(1)
        with pytest.raises(InvalidArgumentError, match="those below 16 are gone"):
            table.truncate(18)
        table.truncate(19)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda table: table.append(1.0), "append: expected an integer, got 1.0"),
        (lambda table: table.truncate(1.5), "truncate: expected an integer, got 1.5"),
        (lambda table: table.row(6), r"count: expected a number of tokens in \[0, 5\], got 6"),
        (lambda table: table.row(-1), r"count: expected a number of tokens in \[0, 5\], got -1"),
        (lambda table: BlockTable(table.pool, 16.0), "block_size: expected an integer, got 16.0"),
        (lambda table: BlockTable(table.pool, 16, window=1.5), "window: expected an integer, got 1.5"),
        (lambda table: BlockTable(table.pool, 16, root="adapter"), "root: expected bytes, got 'adapter'"),
        (lambda table: window_blocks(0, 16), "window: expected a size > 0, got 0"),
        (lambda table: window_blocks(4, 0), "block_size: expected a size > 0, got 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call, message):
    table = BlockTable(BlockPool(4), 16)
    table.append(np.int32(5))
    with pytest.raises(InvalidArgumentError, match=message):
        call(table)
    assert (table.length, table.blocks, table.pool.used) == (5, [0], 1)
    assert type(table.length) is int
