"""Paged cache helpers: who owns which block, where a token goes, and the arrays that tell the operator.

Three owners, each ignorant of the next:

* `BlockPool` counts references to block ids and remembers which blocks hold which content;
* `BlockTable` is one sequence: its blocks, its length, and how it grows, forks, shrinks and forgets;
* `assemble` turns tables into the arrays of one call; `allocate_cache` and `copy_blocks` are the storage itself.

A step of a server is ``copies = table.append(n)`` for each sequence that runs, `copy_blocks` of the copies, one
`assemble` of all of them, the model's layers, and ``table.commit(tokens)`` for what is final::

    pool = BlockPool(num_blocks)
    table = BlockTable(pool, block_size)
    table.append(len(prompt))
    batch = assemble([(table, len(prompt))])
    paged_attention(query, key, value, key_cache, value_cache, **batch.inputs, num_heads=8, kv_num_heads=4)

Nothing here looks at a key or a value, so a table serves every layer that keeps the same positions. Layers that keep
others (full attention beside a sliding window) need a table each.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn.contract import LAYOUTS, TYPES
from pagedattn.errors import InvalidArgumentError, PagedAttentionError

Array = np.ndarray[Any, np.dtype[Any]]
Copies = list[tuple[int, int]]

UNMAPPED = -1


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
        if count > self.available:
            raise OutOfBlocksError(f"asked for {count} blocks, {self.available} of {self.num_blocks} are available.")
        return [self._take() for _ in range(count)]

    def share(self, block: int) -> None:
        """Add a reference to a block that has an owner or cached content."""
        self._check_id(block)
        if self._references[block] == 0:
            if block not in self._cached:
                raise InvalidArgumentError(f"block {block} is free: there is nothing to share.")
            del self._cached[block]
        self._references[block] += 1

    def free(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached if its content is registered, else free."""
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
        if not 0 <= block < self.num_blocks:
            raise InvalidArgumentError(f"block {block}: expected an id in [0, {self.num_blocks}).")

    def __repr__(self) -> str:
        return f"BlockPool({self.used} used, {self.cached} cached, {len(self._free)} free)"


def content_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: its tokens and, through ``parent``, all tokens before it.

    A digest rather than ``hash()``: two prompts that collide would be served each other's cache.
    """
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


def window_blocks(window: int, block_size: int, chunk: int = 1) -> int:
    """Blocks that hold every position which a chunk of ``chunk`` tokens reads or writes under a window.

    These are ``window + chunk - 1`` consecutive positions, and one block more because they may start inside a block.
    """
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
        What besides the tokens decides the content, a model or adapter id say: prefixes are shared under equal roots.

    Attributes
    ----------
    length : int
        Tokens in the cache, those of the running step included.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, window: int | None = None, ring_blocks: int | None = None,
                 root: bytes = b"") -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: expected a size > 0, got {block_size}.")
        if window is not None and window < 1:
            raise InvalidArgumentError(f"window: expected at least the token's own position, got {window}.")
        if ring_blocks is not None:
            if window is None:
                raise InvalidArgumentError("ring_blocks: a ring needs a window, got none.")
            if ring_blocks * block_size < window:
                raise InvalidArgumentError(f"ring_blocks: expected room for window = {window} positions, "
                                           f"got {ring_blocks} blocks of {block_size}.")
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
        entries, fresh = self._touched(count)
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
        if count < 0:
            raise InvalidArgumentError(f"append: expected a count >= 0, got {count}.")
        if count > self.append_limit:
            raise InvalidArgumentError(
                f"append: {count} tokens at position {self.length} would overwrite keys inside the window of "
                f"{self.window}: the ring of {self.ring_blocks} blocks of {self.block_size} takes at most "
                f"{self.append_limit} now. Append in smaller chunks, or size the ring with window_blocks().")
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
        if not 0 <= length <= self.length:
            raise InvalidArgumentError(f"truncate: expected a length in [0, {self.length}], got {length}.")
        if length == self.length:
            return
        if self._window_start(length) < self.oldest_resident:
            raise InvalidArgumentError(
                f"truncate: a token at position {length} sees positions from {self._window_start(length)} on, "
                f"but those below {self.oldest_resident} are gone. Recompute the sequence, or keep more blocks.")
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
        """
        logical = -(-self.length // self.block_size)
        first = max(self._window_start(self.length - count) // self.block_size, self._expired)
        row = np.full(logical, UNMAPPED, np.int32)
        held = np.frombuffer(self._blocks, np.int32) if self._blocks else np.empty(0, np.int32)
        row[first:] = held[self._entry(np.arange(first, logical))]
        return row

    def slots(self, start: int, stop: int) -> Array:
        """Flat slots of positions [start, stop), int32: block * block_size + offset."""
        if not self.oldest_resident <= start <= stop <= self.length:
            raise InvalidArgumentError(f"slots: expected positions in [{self.oldest_resident}, {self.length}], "
                                       f"got [{start}, {stop}).")
        return _slots(self.row(self.length - start), np.arange(start, stop), self.block_size)

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


def _slots(blocks: Array, positions: Array, block_size: int) -> Array:
    return np.asarray(blocks[positions // block_size] * block_size + positions % block_size, np.int32)


@dataclass(frozen=True)
class Batch:
    """Arrays of one call, by the operator's names; B sequences, N tokens, in the caller's array module.

    Attributes
    ----------
    cumulative_sequence_length : (B + 1,) int32
    past_seqlens : (B,) int32
    block_table : (B, max_blocks) int32
        -1 beyond a sequence's blocks and below its window.
    slot_mapping : (N,) int32
        -1 in padded rows.
    query_positions : (N,) int32
        Position of each token in its sequence; 0 in padded rows. The operator derives the same by itself.
    attention_metadata : (2,) int32, NumPy
        Bounds of query and key lengths, rounded up to powers of two so that consecutive steps look alike to a plan.
    """

    cumulative_sequence_length: Any
    past_seqlens: Any
    block_table: Any
    slot_mapping: Any
    query_positions: Any
    attention_metadata: Array

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `paged_attention`."""
        return {name: getattr(self, name) for name in ("cumulative_sequence_length", "past_seqlens", "block_table",
                                                       "slot_mapping", "attention_metadata")}


def assemble(step: Sequence[tuple[BlockTable, int]], *, max_blocks: int | None = None, batch_size: int | None = None,
             token_count: int | None = None, xp: Any = np) -> Batch:
    """Arrays for a call that runs the last ``count`` tokens of each table, which `BlockTable.append` made room for.

    Parameters
    ----------
    step : sequence of (BlockTable, count)
        In the order of the rows of query; a count may be 0.
    max_blocks, batch_size, token_count : int, optional
        Capacities to pad to, for shapes that stay the same from step to step (a captured graph). Default: what fits.
    xp : module
        NumPy, CuPy, or what has an ``asarray`` like theirs.
    """
    tables, counts = [table for table, _ in step], [count for _, count in step]
    if len({table.block_size for table in tables}) > 1:
        raise InvalidArgumentError("assemble: the tables of one call must have one block size.")
    for table, count in step:
        if not 0 <= count <= table.length:
            raise InvalidArgumentError(f"assemble: {count} new tokens in a table of {table.length}; append them first.")
    rows = [table.row(count) for table, count in step]
    batch_size = _capacity("batch_size", batch_size, len(step), least=1)
    token_count = _capacity("token_count", token_count, sum(counts))
    max_blocks = _capacity("max_blocks", max_blocks, max(map(len, rows), default=0), least=1)

    cumulative = np.full(batch_size + 1, sum(counts), np.int32)  # sequences of padding have no tokens
    cumulative[: len(step)] = np.cumsum([0, *counts])[:-1]
    past = np.zeros(batch_size, np.int32)
    past[: len(step)] = [table.length - count for table, count in step]
    block_table = np.full((batch_size, max_blocks), UNMAPPED, np.int32)
    for padded, row in zip(block_table, rows, strict=False):
        padded[: len(row)] = row

    sequence = np.repeat(np.arange(len(step)), counts)
    positions = np.zeros(token_count, np.int32)
    slots = np.full(token_count, UNMAPPED, np.int32)
    used = slice(0, len(sequence))
    positions[used] = np.arange(len(sequence)) - cumulative[sequence] + past[sequence]
    if len(sequence):
        block_size = tables[0].block_size
        flat = sequence * (max_blocks * block_size) + positions[used]
        slots[used] = _slots(block_table.reshape(-1), flat, block_size)
    bounds = [_power_of_two(max(lengths, default=0)) for lengths in (counts, [table.length for table in tables])]
    return Batch(xp.asarray(cumulative), xp.asarray(past), xp.asarray(block_table), xp.asarray(slots),
                 xp.asarray(positions), np.array(bounds, np.int32))


def _capacity(name: str, capacity: int | None, needed: int, least: int = 0) -> int:
    if capacity is None:
        return max(needed, least)
    if capacity < needed:
        raise InvalidArgumentError(f"{name}: expected a capacity of at least {needed}, got {capacity}.")
    return capacity


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length() if value else 0


def allocate_cache(num_blocks: int, block_size: int, kv_num_heads: int, head_size: int, dtype: str = "float16", *,
                   kv_cache_layout: str = "SEPARATE", xp: Any = np) -> tuple[Any, Any]:
    """Key and value caches of one layer, zero-filled.

    Parameters
    ----------
    num_blocks, block_size, kv_num_heads, head_size : int
    dtype : str
        "float16", "bfloat16", "float32", "int8", "float8e4m3fn", or "int4", which is packed in uint8.
    kv_cache_layout : str
        "LATENT" gives one cache and None.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    key_cache, value_cache : (num_blocks, block_size, kv_num_heads, head_size)
        For int4 the last dimension is ``(head_size + 1) // 2`` bytes.
    """
    rows = {row.name: row for row in TYPES["T_CACHE"]}
    if dtype not in rows:
        raise InvalidArgumentError(f"dtype: expected one of {', '.join(rows)}, got {dtype!r}.")
    if kv_cache_layout not in LAYOUTS:
        raise InvalidArgumentError(f"kv_cache_layout: expected one of {', '.join(LAYOUTS)}, got {kv_cache_layout!r}.")
    if num_blocks * block_size > np.iinfo(np.int32).max:
        raise InvalidArgumentError(f"num_blocks * block_size: expected at most 2**31 - 1 slots, because slot_mapping "
                                   f"is int32, got {num_blocks} * {block_size}.")
    row = rows[dtype]
    shape = (num_blocks, block_size, kv_num_heads, row.storage_elements(head_size))
    # 0 is the code of 0.0 in every type but int4, where the stored nibble is code + 8.
    fill = 0x88 if dtype == "int4" else 0
    caches = [xp.full(shape, fill, np.uint8).view(row.numpy) if row.bits <= 8 else xp.zeros(shape, row.numpy)
              for _ in range(1 if kv_cache_layout == "LATENT" else 2)]
    return caches[0], caches[1] if len(caches) > 1 else None


def copy_blocks(cache: Any, copies: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks inside a cache, in place and as if one after the other.

    Parameters
    ----------
    cache : (num_blocks, ...), NumPy or CuPy, written
    copies : iterable of (source, destination)
        What `BlockTable.append` returned.
    """
    copies = list(copies)
    if not copies:
        return
    if cache.dtype.itemsize == 1:
        cache = cache.view(np.uint8)  # CuPy moves bytes, but has no float8 arithmetic
    sources, destinations = (list(ids) for ids in zip(*copies, strict=True))
    if set(sources) & set(destinations):  # one copy may read what another wrote
        for source, destination in copies:
            cache[destination] = cache[source]
    else:
        cache[destinations] = cache[sources]
