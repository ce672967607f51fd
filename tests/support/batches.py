"""Sequences of one pool, of which any batch can be attended: results of a sequence must not depend on its company.

`Pool` holds the sequences, on a GPU or in the emulator; `Pool.run` attends some of them in some order, by a table of
some width. Nothing of a sequence changes from batch to batch but its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedattn import PagedAttention, codec
from pagedattn.dtypes import BFLOAT16, BY_NAME, DType
from tests.faults.targets import Target
from tests.support.build import STEPS

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Layer:
    """Sizes and attributes of attention; ``v_head_size`` makes it LATENT, ``cache`` is "" for bfloat16."""

    num_heads: int
    kv_num_heads: int
    head_size: int
    v_head_size: int = 0
    cache: str = ""
    window: int = -1
    sink: bool = False
    block_size: int = 16

    def __str__(self) -> str:
        size = f"d{self.head_size}" + (f".{self.v_head_size}" if self.v_head_size else "")
        parts = [f"h{self.num_heads}.{self.kv_num_heads}", size, self.cache]
        return "-".join([*filter(None, parts), *(["sink"] * self.sink), *([f"w{self.window}"] * (self.window > 0))])

    @property
    def caches(self) -> tuple[str, ...]:
        return ("key_cache",) if self.v_head_size else ("key_cache", "value_cache")

    @property
    def cache_dtype(self) -> DType:
        return BY_NAME[self.cache] if self.cache else BFLOAT16

    def operator(self, backend: str, **options: Any) -> PagedAttention:
        """The operator, which also returns lse."""
        attributes: dict[str, Any] = {"kv_cache_layout": "LATENT" if self.v_head_size else "SEPARATE"}
        for name in self.caches:
            attributes[f"{name[0]}_quant_type"] = "PER_TENSOR" if self.cache else "NONE"
            attributes[f"{name[0]}_cache_dtype"] = "int4" if self.cache == "int4" else ""
        return PagedAttention(
            num_heads=self.num_heads,
            kv_num_heads=self.kv_num_heads,
            scale=self.head_size**-0.5,
            v_head_size=self.v_head_size,
            local_window_size=self.window,
            backend=backend,
            return_lse=True,
            **attributes,
            **options,
        )

    def stored(self, rng: np.random.Generator, num_blocks: int) -> Array:
        """Blocks of normal values as a cache holds them: one table, no multiple of a row long, laid end to end."""
        width = self.cache_dtype.storage_elements(self.head_size)
        shape = (num_blocks, self.block_size, self.kv_num_heads, width)
        count = int(np.prod(shape))
        rows = rng.standard_normal((min(1 + count // width, 1_000_003 // width), self.head_size), np.float32)
        codes = codec.encode(rows, self.cache_dtype, np.array([STEPS[self.cache]], np.float32) if self.cache else None)
        return np.resize(codes.ravel()[: -3 if len(codes) > 1 else None], count).reshape(shape)


class Pool:
    """Sequences whose keys and values lie scattered over one pool of blocks.

    Parameters
    ----------
    target : Target
        Backend and device.
    layer : Layer
    lengths : sequence of (past, new tokens)
    """

    def __init__(self, target: Target, layer: Layer, lengths: Sequence[tuple[int, int]], seed: int = 0) -> None:
        self.target, self.layer, self.lengths = target, layer, list(lengths)
        rng = np.random.default_rng(seed)
        self.operator = layer.operator(target.backend, **target.options)
        blocks = [-(-(past + new) // layer.block_size) for past, new in self.lengths]
        self.blocks = np.split(rng.permutation(sum(blocks)).astype(np.int32), np.cumsum(blocks)[:-1])
        self.fixed = {name: target.place(layer.stored(rng, sum(blocks))) for name in layer.caches}
        if layer.cache:
            for name in layer.caches:
                self.fixed[f"{name[0]}_scale"] = target.place(np.array([STEPS[layer.cache]], np.float32))
        if layer.sink:
            self.fixed["head_sink"] = target.place(rng.standard_normal(layer.num_heads).astype(BFLOAT16.numpy))
        heads = {"query": layer.num_heads, "key": layer.kv_num_heads, "value": layer.kv_num_heads}
        if layer.v_head_size:
            del heads["value"]
        self.rows = {
            name: [
                rng.standard_normal((new, count * layer.head_size), np.float32).astype(BFLOAT16.numpy)
                for _, new in self.lengths
            ]
            for name, count in heads.items()
        }

    @property
    def width(self) -> int:
        """Entries that the longest sequence needs of a table."""
        return max(map(len, self.blocks))

    def run(self, members: Sequence[int], width: int | None = None) -> dict[int, tuple[bytes, bytes]]:
        """Attend some sequences: of each its bits of output and lse.

        Parameters
        ----------
        members : sequence of int
            The batch, in its order.
        width : int, optional
            Columns of the block table; by default as many as the batch needs.
        """
        target, layer = self.target, self.layer
        table = np.full((len(members), width or max(len(self.blocks[b]) for b in members)), -1, np.int32)
        for row, b in zip(table, members, strict=True):
            row[: len(self.blocks[b])] = self.blocks[b]
        past, new = np.array([self.lengths[b] for b in members], np.int32).T
        ends = np.cumsum([0, *new]).astype(np.int32)
        arrays = {name: np.concatenate([rows[b] for b in members]) for name, rows in self.rows.items()}
        arrays |= {"cumulative_sequence_length": ends, "past_seqlens": past, "block_table": table}
        given: dict[str, Any] = self.fixed | {name: target.place(x) for name, x in arrays.items()}
        with target.active():
            result = self.operator(**given)
        output = target.fetch(result.output, BFLOAT16.numpy)
        lse = target.fetch(result.lse, np.dtype(np.float32))
        assert np.isfinite(lse).all()
        assert output.shape[1] == layer.num_heads * (layer.v_head_size or layer.head_size)
        return {
            b: (output[first:last].tobytes(), lse[first:last].tobytes())
            for b, first, last in zip(members, ends[:-1], ends[1:], strict=True)
        }


def differing(pool: Pool, batches: Sequence[Sequence[int]], widths: Sequence[int | None]) -> list[str]:
    """Sequences whose bits are others in a batch, or by another table, than when they are attended alone.

    Parameters
    ----------
    pool : Pool
    batches : sequence of batches
        Members in their order.
    widths : sequence of int or None
        Of the batches' tables; None is what the batch needs.
    """
    alone = {b: pool.run([b])[b] for b in sorted({b for batch in batches for b in batch})}
    assert len(set(alone.values())) == len(alone)
    found = []
    for batch in batches:
        for width in widths:
            got = pool.run(batch, width)
            found += [
                f"sequence {b} of {pool.lengths[b]} in a batch of {len(batch)}, table of {width}: {what}"
                for b in batch
                for what, mine, own in zip(("output", "lse"), got[b], alone[b], strict=True)
                if mine != own
            ]
    return found
