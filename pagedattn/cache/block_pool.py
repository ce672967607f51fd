"""Who owns which block: reference counts, and an index of what full blocks hold."""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedattn.errors import InvalidArgumentError, PagedAttentionError


def integer(name: str, value: Any) -> int:
    """A Python int from any spelling of one; a float that is whole by chance is a mistake."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}: expected an integer, got {value!r}.") from None


class OutOfBlocksError(PagedAttentionError, MemoryError):
    """The pool cannot give as many blocks as were asked for; nothing was allocated."""


class BlockPool:
    """Reference counts over the block ids of a cache, with an optional index of what full blocks hold.

    A block is in exactly one place: owned (one reference or more), free, or cached: without an owner, but still
    holding content that `lookup` can find. Cached blocks count as available; they are evicted, the one released
    longest ago first, once no free block is left. Every operation takes constant time per block.

    Parameters
    ----------
    num_blocks : int
        Dimension 0 of the caches.
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = integer("num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgumentError(f"num_blocks: expected a count >= 0, got {num_blocks}.")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # One key per block and one block per key, in both directions.
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give, the evictable ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without an owner whose content can still be found."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.available

    def references(self, block: int) -> int:
        """How many tables own a block."""
        self._check_id(block)
        return self._references[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Take ``count`` blocks, one reference each, all or none.

        Raises
        ------
        OutOfBlocksError
            When fewer are available.
        """
        count = integer("count", count)
        if count < 0:
            raise InvalidArgumentError(f"count: expected a number of blocks >= 0, got {count}.")
        if count > self.available:
            raise OutOfBlocksError(f"asked for {count} blocks, {self.available} of {self.num_blocks} are available.")
        return [self._take() for _ in range(count)]

    def share(self, block: int) -> None:
        """Add a reference to a block that has an owner or cached content.

        Raises
        ------
        InvalidArgumentError
            The block is free.
        """
        self._check_id(block)
        if self._references[block] == 0:
            if block not in self._cached:
                raise InvalidArgumentError(f"block {block} is free: there is nothing to share.")
            del self._cached[block]
        self._references[block] += 1

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached if its content is registered, else free.

        Raises
        ------
        InvalidArgumentError
            The block has no owner.
        """
        self._check_id(block)
        if self._references[block] == 0:
            raise InvalidArgumentError(f"block {block} is freed twice: it has no owner.")
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Let `lookup` find an owned block by the key of its content.

        Of several blocks with equal content the first stays the one that is found; the others remain ordinary blocks,
        so that freeing or evicting one copy never touches another.

        Raises
        ------
        InvalidArgumentError
            The block has no owner.
        """
        if self.references(block) == 0:
            raise InvalidArgumentError(f"block {block} has no owner: its content cannot be registered.")
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def unregister(self, block: int) -> None:
        """Forget a block's content, because it is about to be written."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def lookup(self, key: bytes) -> int | None:
        """Block that holds the content of a key, or None; `share` it before anything else is allocated."""
        return self._block_of.get(key)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def _check_id(self, block: int) -> None:
        if not 0 <= integer("block", block) < self.num_blocks:
            raise InvalidArgumentError(f"block {block}: expected an id in [0, {self.num_blocks}).")

    def __repr__(self) -> str:
        return f"BlockPool({self.used} used, {self.cached} cached, {len(self._free)} free)"


def content_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: its tokens and, through ``parent``, all tokens before it.

    A digest rather than ``hash()``: two prompts that collide would be served each other's cache.

    Parameters
    ----------
    parent : bytes
        Key of the block before, or at most 64 bytes of the caller's for the first.
    tokens : sequence of int
    """
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" and ids.size:  # cut to integers, two prompts could be one
        raise InvalidArgumentError(f"tokens: expected integers, got elements of {ids.dtype}.")
    return hashlib.blake2b(ids.astype(np.int64).tobytes(), key=parent, digest_size=16).digest()
