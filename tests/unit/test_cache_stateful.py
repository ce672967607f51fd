"""The pool and its tables under any order of events, against a cache that is simulated cell by cell.

A cell holds all tokens up to its own, since a real key depends on all of them. So the check that a sequence finds its
own cells at its slots covers copy-on-write, prefix sharing, recycling, eviction and rollback at once.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedattn import InvalidArgumentError
from pagedattn.cache import BlockPool, BlockTable, OutOfBlocksError, assemble, window_blocks
from tests.support.serving import audit, prefix_keys

BLOCK_SIZE = 4
# Few different tokens, so that prompts often share a prefix.
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=14)
PICK = st.integers(0, 1000)
LARGEST_STEP = 9


class Sequence:
    """What the machine knows of one sequence: its tokens, of which the table holds the first ``table.length``."""

    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table, self.tokens = table, tokens

    @property
    def is_ring(self) -> bool:
        return self.table.ring_blocks is not None

    def visible_from(self, position: int) -> int:
        return 0 if self.table.window is None else max(0, position - self.table.window + 1)


class Machine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 24))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.cells = np.full((num_blocks, BLOCK_SIZE), None, object)
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def pick(self, number: int) -> Sequence:
        return self.live[number % len(self.live)]

    @precondition(lambda self: len(self.live) < 5)
    @rule(tokens=TEXT, window=st.sampled_from([None, None, 1, 3, 6]), ring=st.booleans(), slack=st.integers(0, 2))
    def admit(self, tokens, window, ring, slack):
        ring_blocks = -(-window // BLOCK_SIZE) + slack if window and ring else None
        self.enter(Sequence(BlockTable(self.pool, BLOCK_SIZE, window=window, ring_blocks=ring_blocks), tokens))

    @precondition(lambda self: self.waiting)
    @rule()
    def readmit(self):
        self.enter(self.waiting.pop())

    def enter(self, sequence: Sequence) -> None:
        if not sequence.is_ring:
            covered = sequence.table.reuse_prefix(sequence.tokens[:-1])
            assert covered == sequence.table.length <= max(0, len(sequence.tokens) - 1)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(more=st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=5, max_size=5), final=st.booleans())
    def step(self, more, final):
        """Give every sequence tokens; append, copy, write, read; commit, unless the tokens may yet be rejected."""
        entries = []
        for sequence, tokens in zip(self.live, more, strict=False):
            sequence.tokens += tokens
            count = min(len(sequence.tokens) - sequence.table.length, LARGEST_STEP)
            if final:  # else a ring may be asked for too much
                count = min(count, sequence.table.append_limit)
            if self.append(sequence, count):
                entries.append((sequence, count))
        batch = assemble([(sequence.table, count) for sequence, count in entries])
        slots = iter(batch.slot_mapping.tolist())
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), "two tokens share a slot"
        for (sequence, count), past in zip(entries, batch.past_seqlens.tolist(), strict=False):
            assert past == sequence.table.length - count
            for position in range(past, past + count):
                slot = next(slots)
                assert self.pool.references(slot // BLOCK_SIZE) == 1, "a shared block is written"
                assert [slot] == sequence.table.slots(position, position + 1).tolist()
                self.cells[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = tuple(sequence.tokens[: position + 1])
        for (sequence, _), past, row in zip(entries, batch.past_seqlens.tolist(), batch.block_table, strict=False):
            self.check_content(sequence, row, past)
            if final and not sequence.is_ring:
                sequence.table.commit(sequence.tokens[: sequence.table.length])

    def append(self, sequence: Sequence, count: int) -> bool:
        """Whether the pool and the ring had room; if not, nothing may have changed."""
        table, past = sequence.table, sequence.table.length
        first_visible = sequence.visible_from(past)
        before = table.row()[first_visible // BLOCK_SIZE :].tolist()
        needed = table.blocks_needed(count)
        try:
            copies = table.append(count)
        except (OutOfBlocksError, InvalidArgumentError) as error:
            if isinstance(error, OutOfBlocksError):
                assert needed > self.pool.available
            else:
                assert sequence.is_ring
                assert past + count - first_visible > table.ring_blocks * BLOCK_SIZE
            assert table.length == past
            assert table.row()[first_visible // BLOCK_SIZE :].tolist() == before
            return False
        for source, destination in copies:
            self.cells[destination] = self.cells[source]
        return True

    @precondition(lambda self: 0 < len(self.live) < 5)
    @rule(number=PICK)
    def fork(self, number):
        sequence = self.pick(number)
        used = self.pool.used
        self.live.append(Sequence(sequence.table.fork(), list(sequence.tokens)))
        assert self.pool.used == used

    @precondition(lambda self: self.live)
    @rule(number=PICK, back=st.integers(0, 9), other=st.lists(st.integers(0, 1), max_size=3))
    def rollback(self, number, back, other):
        """Reject the last tokens, and go on with others."""
        sequence = self.pick(number)
        table = sequence.table
        length = max(0, table.length - back)
        if length < table.length and sequence.visible_from(length) < table.oldest_resident:
            try:
                table.truncate(length)
            except InvalidArgumentError:
                return
            raise AssertionError("a rewind past what is held went through")
        table.truncate(length)
        sequence.tokens[length:] = other

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def preempt(self, number):
        sequence = self.pick(number)
        sequence.table.free()
        self.live.remove(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def finish(self, number):
        """Finish, or abort."""
        sequence = self.pick(number)
        sequence.table.free()
        assert (sequence.table.length, sequence.table.blocks) == (0, [])
        self.live.remove(sequence)

    @invariant()
    def every_block_is_in_one_place(self):
        if hasattr(self, "pool"):
            audit(self.pool, [sequence.table for sequence in self.live])

    @invariant()
    def every_sequence_finds_its_own_cells(self):
        for sequence in getattr(self, "live", []):
            self.check_content(sequence, sequence.table.row(0), sequence.table.length)

    @invariant()
    def tables_hold_no_more_than_they_need(self):
        for sequence in getattr(self, "live", []):
            table = sequence.table
            held = len(table.blocks)
            if table.window is None:
                assert held == -(-table.length // BLOCK_SIZE)
            elif table.ring_blocks is not None:
                assert held <= min(table.ring_blocks, -(-table.length // BLOCK_SIZE))
            elif not table._keys:  # a reused prefix may be longer than the window until the first append
                assert held <= window_blocks(table.window, BLOCK_SIZE, LARGEST_STEP)

    @invariant()
    def registered_blocks_hold_what_their_key_says(self):
        for key, block in (self.pool._block_of if hasattr(self, "pool") else {}).items():
            tokens = self.cells[block, -1]
            assert tokens is not None
            assert prefix_keys(list(tokens), BLOCK_SIZE)[-1] == key
            for offset in range(BLOCK_SIZE):
                assert self.cells[block, offset] == tokens[: len(tokens) - BLOCK_SIZE + 1 + offset]

    def check_content(self, sequence: Sequence, row: np.ndarray, past: int) -> None:
        """What a step from ``past`` on sees, and a step after it, are the sequence's own tokens."""
        for position in range(sequence.visible_from(past), sequence.table.length):
            block = row[position // BLOCK_SIZE]
            assert block >= 0, "a visible position is unmapped"
            assert self.cells[block, position % BLOCK_SIZE] == tuple(sequence.tokens[: position + 1])

    def teardown(self):
        if hasattr(self, "pool"):
            for sequence in self.live:
                sequence.table.free()
            audit(self.pool, [])
            assert self.pool.available == self.pool.num_blocks
            assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
