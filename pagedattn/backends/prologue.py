"""What every CUDA backend does first: rotate the query, and store the new keys and values."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from pagedattn.backends import arguments
from pagedattn.backends.arguments import Shared, Tensors
from pagedattn.jit.launch import Executor, Function, Launch
from pagedattn.kernels import write_cache
from pagedattn.problem import Problem


def aligned(size: int) -> int:
    """Round up to where the next region of a workspace may start."""
    return (size + 255) // 256 * 256


class Rows(NamedTuple):
    """Query rows that attention reads: their address, and elements from one token to the next."""

    pointer: int
    stride: int


class Start(Enum):
    """When the prologue starts; what is best depends on the attention that follows.

    LATE
        When what is ahead of the call has ended.
    EARLY
        Its CTAs may be there already, and wait.
    SPREAD
        Likewise, but where there are no more than two for each multiprocessor, none has a third: else the few that are
        done first have all of them, and attention finds those taken.
    """

    LATE = auto()
    EARLY = auto()
    SPREAD = auto()


class Prologue:
    """The `write_cache` kernel for one problem.

    Attributes
    ----------
    workspace_bytes : int
        Room for the rotated query; 0 when attention can read the caller's.
    """

    def __init__(self, problem: Problem, executor: Executor[Function], zero_count: int = 0) -> None:
        p = self.problem = problem
        self.executor = executor
        self.zero_count = zero_count
        self.spec = write_cache.WriteCacheSpec(io=p.io_dtype, cache=p.cache_dtype, head_size=p.head_size)
        self.function = executor.load(write_cache.KERNEL, self.spec)
        self.rewrites_query = p.do_rotary or p.has_qk_norm
        self.workspace_bytes = p.token_count * p.num_heads * p.head_size * p.io_dtype.bits // 8 * self.rewrites_query
        rows = p.num_heads * self.rewrites_query + p.kv_num_heads * (1 if p.is_latent else 2)
        self.row_chunks = write_cache.row_chunks(self.spec, p.token_count, rows) if p.token_count else 1

    def query(self, tensors: Tensors, workspace: int) -> Rows:
        """The query rows that attention shall read."""
        if self.rewrites_query:
            return Rows(workspace, self.problem.num_heads * self.problem.head_size)
        query = tensors["query"]
        return Rows(query.pointer, query.strides[0])

    def launch(
        self, tensors: Tensors, shared: Shared, workspace: int, zeros: int | None = None, start: Start = Start.LATE
    ) -> Launch:
        """Its launch; ``zeros`` is the address of ``zero_count`` int32 that are set to 0 on the way."""
        p = self.problem
        query = tensors["query"]
        if p.is_packed:
            item = p.io_dtype.bits // 8
            key_pointer = query.pointer + p.num_heads * p.head_size * item
            value_pointer: int | None = key_pointer + p.kv_num_heads * p.head_size * item
            key_stride = value_stride = query.strides[0]
        else:
            key_pointer, key_stride = tensors["key"].pointer, tensors["key"].strides[0]
            value_pointer = arguments.pointer(tensors, "value")
            value_stride = tensors["value"].strides[0] if value_pointer is not None else 0
        sequences = shared.sequences
        if p.has_rotary_positions:  # RoPE alone goes by them; slots follow from the order of the tokens
            sequences = arguments.sequence_table(p, tensors, "rotary_positions")
        packed = write_cache.PARAMS.pack(
            query=query.pointer,
            key=key_pointer,
            value=value_pointer,
            query_stride=query.strides[0],
            key_stride=key_stride,
            value_stride=value_stride,
            query_out=workspace if self.rewrites_query else None,
            q_norm_weight=arguments.pointer(tensors, "q_norm_weight"),
            k_norm_weight=arguments.pointer(tensors, "k_norm_weight"),
            slot_mapping=arguments.pointer(tensors, "slot_mapping"),
            sequences=sequences,
            blocks=shared.blocks,
            key_cache=shared.key_cache,
            value_cache=shared.value_cache,
            zeros=zeros,
            zero_count=self.zero_count,
            rotary=arguments.rotary(p, tensors),
            num_heads=p.num_heads,
            kv_num_heads=p.kv_num_heads,
            row_chunks=self.row_chunks,
            qk_norm_epsilon=p.qk_norm_epsilon,
        )
        grid = write_cache.grid(self.spec, p.token_count, self.row_chunks)
        launch = write_cache.KERNEL.launch(self.function, self.spec, grid, packed)
        if start is Start.SPREAD and grid[0] <= 2 * self.executor.multiprocessors:
            launch = launch._replace(shared_bytes=max(launch.shared_bytes, self.executor.max_shared_bytes // 3))
        return launch._replace(starts_early=start is not Start.LATE)
