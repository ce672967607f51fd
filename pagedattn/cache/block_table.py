"""One sequence in a paged cache: its blocks, and how it grows, forks, shrinks and forgets."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedattn.cache.block_pool import BlockPool, content_key, integer
from pagedattn.errors import InvalidArgumentError

Array = np.ndarray[Any, np.dtype[Any]]
Copies = list[tuple[int, int]]

UNMAPPED = -1


def window_blocks(window: int, block_size: int, chunk: int = 1) -> int:
    """Blocks that hold every position which a chunk of ``chunk`` tokens reads or writes under a window.

    These are ``window + chunk - 1`` consecutive positions, and one block more because they may start inside a block.
    """
    for name, value in (("window", window), ("block_size", block_size), ("chunk", chunk)):
        if integer(name, value) < 1:
            raise InvalidArgumentError(f"{name}: expected a size > 0, got {value}.")
    return -(-(window + chunk - 1) // block_size) + 1


class BlockTable:
    """The blocks of one sequence, in the order of its positions.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
        Dimension 1 of the caches. The operator asks for a power of two >= 16; a table takes any.
    window : int, optional
        ``local_window_size`` of the layers served. Blocks below the window return to the pool when the next tokens
        are appended: only then is it certain that no query before those tokens will run again.
    ring_blocks : int, optional
        With a window: hold at most this many blocks and write round and round in them, instead of returning and
        taking blocks (`window_blocks` gives a size). No allocator traffic, but no prefix cache either.
    root : bytes
        What besides the tokens decides the content, a model or adapter id say, at most 64 bytes: prefixes are shared
        only under equal roots.

    Attributes
    ----------
    length : int
        Tokens in the cache, those of the running step included.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        window: int | None = None,
        ring_blocks: int | None = None,
        root: bytes = b"",
    ) -> None:
        block_size = integer("block_size", block_size)
        window = None if window is None else integer("window", window)
        ring_blocks = None if ring_blocks is None else integer("ring_blocks", ring_blocks)
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: expected a size > 0, got {block_size}.")
        if window is not None and window < 1:
            raise InvalidArgumentError(f"window: expected at least the token's own position, got {window}.")
        if not isinstance(root, bytes):
            raise InvalidArgumentError(f"root: expected bytes, got {root!r}.")
        if len(root) > 64:
            raise InvalidArgumentError(f"root: expected at most 64 bytes, got {len(root)}.")
        if ring_blocks is not None:
            if window is None:
                raise InvalidArgumentError("ring_blocks: a ring needs a window, got none.")
            if ring_blocks * block_size < window:
                raise InvalidArgumentError(
                    f"ring_blocks: expected room for window = {window} positions, "
                    f"got {ring_blocks} blocks of {block_size}."
                )
        self.pool = pool
        self.block_size = block_size
        self.window = window
        self.ring_blocks = ring_blocks
        self.root = root
        self.length = 0
        # Entry i is logical block i, UNMAPPED once the window left it behind; of a ring, logical blocks i, i + n, ...
        self._blocks = array("i")
        self._expired = 0  # leading entries that the window left behind
        self._written = 0  # largest length ever reached: a ring's overwritten positions stay lost after a rollback
        self._keys: list[bytes] = []  # content keys of the leading blocks that are committed

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks held, in order of first use."""
        return self._blocks[self._expired :].tolist()

    @property
    def oldest_resident(self) -> int:
        """Smallest position that the table still holds."""
        if self.ring_blocks is None:
            return self._expired * self.block_size
        return max(0, self._written - self.ring_blocks * self.block_size)

    @property
    def append_limit(self) -> int:
        """Most tokens that one `append` accepts: a ring must hold ``window + count - 1`` positions."""
        if self.ring_blocks is None:
            return sys.maxsize
        return self.ring_blocks * self.block_size - (self.length - self._window_start(self.length))

    def blocks_needed(self, count: int) -> int:
        """Upper bound of the blocks that appending ``count`` tokens takes from the pool."""
        entries, fresh = self._touched(integer("count", count))
        return fresh + sum(self.pool.references(self._blocks[entry]) > 1 for entry in entries)

    def append(self, count: int) -> Copies:
        """Make room for ``count`` more tokens at the end.

        A block about to be written that another table also owns is replaced by a copy of its own.

        Returns
        -------
        list of (source, destination)
            Blocks to `copy_blocks` in every layer's caches before the tokens are written; usually empty.

        Raises
        ------
        OutOfBlocksError
            The pool has too few blocks. Length and live blocks are as before.
        InvalidArgumentError
            The ring cannot hold the tokens beside the keys that the first of them still sees.
        """
        count = integer("append", count)
        if count < 0:
            raise InvalidArgumentError(f"append: expected a count >= 0, got {count}.")
        if count > self.append_limit:
            raise InvalidArgumentError(
                f"append: {count} tokens at position {self.length} would overwrite keys inside the window of "
                f"{self.window}: the ring of {self.ring_blocks} blocks of {self.block_size} takes at most "
                f"{self.append_limit} now. Append in smaller chunks, or size the ring with window_blocks()."
            )
        self._expire()
        entries, fresh = self._touched(count)
        shared = [entry for entry in entries if self.pool.references(self._blocks[entry]) > 1]
        taken = self.pool.allocate(fresh + len(shared))
        copies = []
        for entry, own in zip(shared, taken[fresh:], strict=True):
            copies.append((self._blocks[entry], own))
            self.pool.free(self._blocks[entry])
            self._blocks[entry] = own
        for entry in entries:
            self.pool.unregister(self._blocks[entry])
        self._blocks.extend(taken[:fresh])
        self.length += count
        self._written = max(self._written, self.length)
        return copies

    def truncate(self, length: int) -> None:
        """Roll back to the first ``length`` tokens, and free the blocks that held only later ones.

        Raises
        ------
        InvalidArgumentError
            When the window of the next token would reach positions that are no longer held.
        """
        length = integer("truncate", length)
        if not 0 <= length <= self.length:
            raise InvalidArgumentError(f"truncate: expected a length in [0, {self.length}], got {length}.")
        if length == self.length:
            return
        if self._window_start(length) < self.oldest_resident:
            raise InvalidArgumentError(
                f"truncate: a token at position {length} sees positions from {self._window_start(length)} on, "
                f"but those below {self.oldest_resident} are gone. Recompute the sequence, or keep more blocks."
            )
        keep = -(-length // self.block_size)
        for block in reversed(self._blocks[keep:]):
            self.pool.free(block)
        del self._blocks[keep:]
        del self._keys[length // self.block_size :]
        self.length = length

    def fork(self) -> BlockTable:
        """Make a second table with the same tokens that shares every block; whichever appends first copies the last."""
        child = BlockTable(self.pool, self.block_size, window=self.window, ring_blocks=self.ring_blocks, root=self.root)
        for block in self.blocks:
            self.pool.share(block)
        child._blocks = self._blocks[:]
        child._keys = self._keys[:]
        child.length, child._expired, child._written = self.length, self._expired, self._written
        return child

    def free(self) -> None:
        """Give every block back; the table is empty again and may be reused."""
        # The end first: a prefix is worth more than what follows it, and the longest released is evicted first.
        for block in reversed(self.blocks):
            self.pool.free(block)
        del self._blocks[:]
        self._keys.clear()
        self.length = self._expired = self._written = 0

    def reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Start from the longest prefix of ``tokens`` whose full blocks the pool still holds.

        Leave out the last token of a prompt, which has to run in any case: its logits are what the prompt is for.

        Returns
        -------
        int
            Tokens covered, a multiple of the block size; the new ``length``.

        Raises
        ------
        InvalidArgumentError
            The table is a ring, or not empty.
        """
        self._refuse_ring("reuse_prefix")
        if self.length:
            raise InvalidArgumentError(f"reuse_prefix: expected an empty table, got one of {self.length} tokens.")
        key = self.root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = content_key(key, tokens[start : start + self.block_size])
            block = self.pool.lookup(key)
            if block is None:
                break
            self.pool.share(block)
            self._blocks.append(block)
            self._keys.append(key)
        self.length = self._written = len(self._blocks) * self.block_size
        return self.length

    def commit(self, tokens: Sequence[int]) -> None:
        """Declare the cached tokens final and written, so that later sequences can reuse their full blocks.

        Call it after the step that wrote them, without tokens that may yet be rejected.

        Parameters
        ----------
        tokens : sequence of int
            The sequence's tokens from position 0; at most ``length``.

        Raises
        ------
        InvalidArgumentError
            The table is a ring, or there are more tokens than in the cache.
        """
        self._refuse_ring("commit")
        if len(tokens) > self.length:
            raise InvalidArgumentError(f"commit: {len(tokens)} tokens are given, {self.length} are in the cache.")
        for index in range(len(self._keys), len(tokens) // self.block_size):
            parent = self._keys[-1] if self._keys else self.root
            self._keys.append(content_key(parent, tokens[index * self.block_size : (index + 1) * self.block_size]))
            if self._blocks[index] != UNMAPPED:
                self.pool.register(self._blocks[index], self._keys[-1])

    def row(self, count: int = 0) -> Array:
        """Block table row, (blocks of ``length``,) int32, for a step that runs the last ``count`` tokens.

        Entries below the window of the first of them are -1.

        Raises
        ------
        InvalidArgumentError
            ``count`` is not in [0, length].
        """
        if not 0 <= integer("count", count) <= self.length:
            raise InvalidArgumentError(f"count: expected a number of tokens in [0, {self.length}], got {count}.")
        logical = -(-self.length // self.block_size)
        first = max(self._window_start(self.length - count) // self.block_size, self._expired)
        row = np.full(logical, UNMAPPED, np.int32)
        held = np.frombuffer(self._blocks, np.int32) if self._blocks else np.empty(0, np.int32)
        row[first:] = held[self._entry(np.arange(first, logical))]
        return row

    def slots(self, start: int, stop: int) -> Array:
        """Flat slots of positions [start, stop), (stop - start,) int32: block * block_size + offset.

        Raises
        ------
        InvalidArgumentError
            A position is not in [oldest_resident, length].
        """
        if not self.oldest_resident <= start <= stop <= self.length:
            raise InvalidArgumentError(
                f"slots: expected positions in [{self.oldest_resident}, {self.length}], got [{start}, {stop})."
            )
        positions = np.arange(start, stop)
        blocks = self.row(self.length - start)[positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size, np.int32)

    def _window_start(self, position: int) -> int:
        """Smallest position that a token at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _entry(self, logical: Any) -> Any:
        return logical if self.ring_blocks is None else logical % self.ring_blocks

    def _touched(self, count: int) -> tuple[list[int], int]:
        """Entries held already that ``count`` more tokens write into, and how many entries they add."""
        first, last = self.length // self.block_size, -(-(self.length + count) // self.block_size)
        entries = dict.fromkeys(self._entry(logical) for logical in range(first, last))
        held = [entry for entry in entries if entry < len(self._blocks)]
        return held, len(entries) - len(held)

    def _expire(self) -> None:
        """Return the blocks below the window of the next token."""
        if self.ring_blocks is None:
            first = min(self._window_start(self.length) // self.block_size, len(self._blocks))
            for entry in range(self._expired, first):
                self.pool.free(self._blocks[entry])
                self._blocks[entry] = UNMAPPED
            self._expired = max(self._expired, first)

    def _refuse_ring(self, method: str) -> None:
        if self.ring_blocks is not None:
            raise InvalidArgumentError(f"{method}: a ring's blocks are overwritten and cannot be shared by content.")

    def __repr__(self) -> str:
        return f"BlockTable(length={self.length}, blocks={self.blocks})"
