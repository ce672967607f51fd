"""Tiles of query rows, new tokens times query heads of a kv head, as ``row_tiles.cuh`` has them."""

from __future__ import annotations

from pagedattn.kernels.layouts import ceil_div
from pagedattn.problem import Problem


def row_bound(problem: Problem) -> int:
    """Most query rows that a sequence has for one kv head, where every sequence has a new token.

    Beside empty sequences one may have more, up to ``query_len_bound`` tokens' rows: kernels serve it all the same, but
    were chosen, and had their tiles sized, for fewer.
    """
    p = problem
    return p.group_size * max(1, min(p.query_len_bound, p.token_count - p.batch_size + 1))


def row_tile_count(token_count: int, batch_size: int, group_size: int, tile_rows: int) -> int:
    """Numbers that row tiles of a batch may have, the padding tokens' included."""
    return token_count * group_size // tile_rows + batch_size + 1


def tokens_of_tile(tile_rows: int, group_size: int) -> int:
    """Most tokens that have rows in one tile."""
    return ceil_div(tile_rows - 1, group_size) + 1


def key_span(problem: Problem, tokens: int) -> int:
    """Most keys that ``tokens`` neighbouring tokens of a sequence attend together.

    A window bounds those of one token only with causality, else what is behind the token is admitted too; those of
    several only if their positions do not come in any order.
    """
    p = problem
    if not p.has_window or not p.is_causal or (tokens > 1 and p.has_query_positions):
        return p.kv_len_bound
    return min(p.kv_len_bound, p.local_window_size + tokens - 1)
