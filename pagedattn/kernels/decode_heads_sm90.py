"""Attention of single tokens over splits of their keys on Hopper, several kv heads at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagedattn import dtypes
from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import i32, i64, params, ptr
from pagedattn.jit.spec import Spec
from pagedattn.kernels.layouts import (
    BLOCK_TABLE,
    KV_CACHE,
    OUTPUT,
    PARTIALS,
    RESERVED_BYTES,
    SCORE_RULES,
    SEQUENCE_TABLE,
    ceil_div,
    round_up,
)
from pagedattn.problem import Problem, TensorInfo

HEADS = 8  # kv heads of a CTA
CTAS = 2  # of a multiprocessor
GROUP_SIZE = 8  # query heads of a kv head: the N side of the tensor core
SLICE = 16  # keys that lie in one block
MAX_UNITS = 16
WORK_BYTES = 256  # what finds the work
# Of a CTA. With more in flight, multiprocessors get less equal shares, and what a CTA reads first arrives later.
RING_BYTES = 48 << 10
MAX_HEAD_SIZE = 128  # more would not leave a thread the registers it needs
MIN_SPLIT_KEYS = 256
# Where one split of every token makes fewer CTAs than there are multiprocessors: with shorter splits a CTA a head is
# better off, unless tokens are few and yet there is a CTA for nearly all multiprocessors.
GOOD_SPLIT_KEYS = 512
FEW_WORKS = 16
MAX_SPLIT_KEYS = 2048  # lengths differ: one CTA shall not have much more to do than others
# Splits of so many keys are merged by the last of a token's to finish, which takes as long as another kernel does but
# mostly has others running beside it.
MERGED_SPLIT_KEYS = 1024


@dataclass(frozen=True)
class DecodeHeadsSm90Spec(Spec):
    """What `decode_heads_sm90` is compiled for; `choose` fills it."""

    io: DType
    cache: DType
    head_size: int
    heads: int
    copy_tokens: int
    tile_keys: int
    unit_keys: int
    units: int


PARAMS = params(
    "DecodeHeadsSm90Params",
    query=ptr,  # [token_count, num_heads, head_size], rows query_stride elements apart
    query_stride=i64,
    sequences=SEQUENCE_TABLE,
    blocks=BLOCK_TABLE,
    key_cache=KV_CACHE,
    value_cache=KV_CACHE,
    rules=SCORE_RULES,
    out=OUTPUT,
    partials=PARTIALS,
    finished=ptr,  # int32 [token_count, kv_num_heads], zeros; None: no merge here
    group_size=i32,
    head_tiles=i32,
    query_is_new=i32,  # the kernel ahead writes it
)


def threads(spec: DecodeHeadsSm90Spec) -> int:
    """Threads of a CTA: a warp for each kv head, and a warpgroup of which one warp loads."""
    return 32 * spec.heads + 128


def unit_bytes(spec: DecodeHeadsSm90Spec) -> int:
    """Bytes of a unit of the ring."""
    return spec.unit_keys * spec.heads * spec.head_size * spec.cache.bits // 8


def shared_bytes(spec: DecodeHeadsSm90Spec) -> int:
    """Barriers, what finds the work, and the ring."""
    return round_up(16 * spec.units, 128) + WORK_BYTES + spec.units * unit_bytes(spec)


KERNEL = Kernel(
    "decode_heads_sm90",
    DecodeHeadsSm90Spec,
    PARAMS,
    threads,
    shared_bytes,
    archs=("sm_90a",),
    waits_itself=True,
)


def choose(io: DType, cache: DType, head_size: int, kv_num_heads: int, shared_limit: int) -> DecodeHeadsSm90Spec:
    """Spec for a device that lets a CTA have ``shared_limit`` bytes: a ring of RING_BYTES, or of what fits."""
    tile_keys = 256 // cache.bits
    copy_tokens = SLICE if kv_num_heads == HEADS else 1
    room = (shared_limit + RESERVED_BYTES) // CTAS - RESERVED_BYTES - round_up(16 * MAX_UNITS, 128) - WORK_BYTES
    unit_keys = max(SLICE, tile_keys // 2)
    one = DecodeHeadsSm90Spec(io, cache, head_size, HEADS, copy_tokens, tile_keys, unit_keys, 1)
    wanted = max(2, RING_BYTES // unit_bytes(one))
    return replace(one, units=min(MAX_UNITS, wanted, room // unit_bytes(one)))


def why_not_problem(problem: Problem) -> str | None:
    """Reason why the kernel does not serve a problem, or None."""
    p = problem
    if p.is_latent or p.head_size != p.v_head_size:
        return "needs a value cache with rows like the keys'"
    if p.is_contiguous:
        return "reads blocks"
    if p.io_dtype not in (dtypes.FLOAT16, dtypes.BFLOAT16):
        return "takes float16 and bfloat16"
    if p.head_size > MAX_HEAD_SIZE or p.head_size % 64 or p.head_size * p.cache_dtype.bits // 8 not in (64, 128, 256):
        return f"rows of {p.head_size} {p.cache_dtype.name} are not 64, 128 or 256 bytes"
    if p.kv_num_heads % HEADS or p.group_size > GROUP_SIZE:
        return f"takes multiples of {HEADS} kv heads with up to {GROUP_SIZE} query heads each"
    if p.has_score_rules:
        return "takes neither softcap nor attention_bias"
    return None


def why_not_tensors(tensors: Mapping[str, TensorInfo], query: tuple[int, int]) -> str | None:
    """Reason why whole blocks, query rows or scales cannot be read, or output not be written, in vectors; or None.

    Parameters
    ----------
    tensors : mapping of name to TensorInfo
    query : tuple of int
        Address of the query rows, and elements from one token to the next.
    """
    if query[0] % 16 or query[1] % 8:
        return "query rows do not start on multiples of 16 bytes"
    for name in ("output", "k_scale", "v_scale"):
        if name in tensors and tensors[name].pointer % 16:
            return f"{name} does not start on a multiple of 16 bytes"
    for cache in (tensors["key_cache"], tensors["value_cache"]):
        block, token, head = (stride * cache.dtype.itemsize for stride in cache.strides[:3])
        _, _, heads, channels = cache.shape
        if cache.pointer % 16 or block % 16 or token % 16:
            return "cache rows do not start on multiples of 16 bytes"
        if head != channels * cache.dtype.itemsize or (heads == HEADS and token != heads * head):
            return "the heads of a token do not lie side by side"
    return None


def split_size(span: int, works: int, multiprocessors: int) -> int:
    """Keys of a split: so many that splits fill the device, once if that is enough.

    Only static sizes enter, so every replay of a graph and every composition of a batch of this size splits alike.

    Parameters
    ----------
    span : int
        Most keys of a token.
    works : int
        CTAs that one split of every token makes.
    multiprocessors : int
    """
    wanted = max(1, CTAS * multiprocessors // works)
    return max(MIN_SPLIT_KEYS, min(round_up(ceil_div(span, wanted), SLICE), MAX_SPLIT_KEYS))


def pays(span: int, works: int, multiprocessors: int) -> bool:
    """Whether the kernel is faster than one with a CTA a kv head; parameters as for `split_size`."""
    size = split_size(span, works, multiprocessors)
    fills_device = 10 * works * ceil_div(span, size) >= 9 * multiprocessors
    return works >= multiprocessors or size >= GOOD_SPLIT_KEYS or (works <= FEW_WORKS and fills_device)


def smoke_specs() -> Iterator[DecodeHeadsSm90Spec]:
    """Specs that together reach every branch of the source."""
    limit = 227 << 10
    for cache in (dtypes.BFLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN, dtypes.INT4):
        yield choose(dtypes.BFLOAT16, cache, 128, 8, limit)
    for cache in (dtypes.FLOAT16, dtypes.INT8, dtypes.FLOAT8E4M3FN):
        yield choose(dtypes.FLOAT16, cache, 64, 32, limit)
    yield choose(dtypes.FLOAT16, dtypes.INT4, 128, 32, limit)
