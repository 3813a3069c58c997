"""How rows get from their owners into this rank's pool while others multiply those that are there already.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import plan_tables
from .common import await_count, BLOCK_M, claim, finish_stores, PADDING_M, record_late, row_of, tile_in_turn

_PHASE_ARRIVAL = tl.constexpr(plan_tables.PHASE_ARRIVAL)
_PULL_QUEUE, _TILE_QUEUE, _PADDING_QUEUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(6)


@triton.jit
def pull_rows(
    pulled,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_SCORES: tl.constexpr,  # whether each row's score is wanted, too
):
    """Mover: copy tokens into the pool until the pull list is empty. Waits for nobody."""
    _pull_tokens(pulled, DIM, TOP_K, TOKENS, COLUMNS, WITH_SCORES)
    _zero_padding(pulled, DIM, COLUMNS)


@triton.jit
def _pull_tokens(
    pulled,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_SCORES: tl.constexpr,
):
    sizes, _, tables, x_addresses_P, pool_RD, row_scores_R, arrival_M, queue = pulled
    pull_source_U, pull_rows_UK, pull_scores_UK = tables
    token_t = tl.arange(0, TOKENS)
    column_c = tl.arange(0, COLUMNS)
    route_r = tl.arange(0, triton.next_power_of_2(TOP_K))
    num_unique = tl.load(sizes + 1)
    first = claim(queue + _PULL_QUEUE, TOKENS)
    while first < num_unique:
        u_t = first + token_t
        is_token_t = u_t < num_unique
        source_t = tl.load(pull_source_U + u_t, mask=is_token_t, other=0)
        address_t = tl.load(x_addresses_P + (source_t >> 32)) + (source_t & 0xFFFFFFFF) * (2 * DIM)
        x_t = tl.multiple_of(address_t.to(tl.pointer_type(tl.bfloat16)), 16)
        entry_tr = u_t[:, None] * TOP_K + route_r[None, :]
        row_tr = tl.load(pull_rows_UK + entry_tr, mask=is_token_t[:, None] & (route_r < TOP_K)[None, :], other=-1)
        is_row_tr = row_tr >= 0
        num_routes = tl.max(tl.sum(is_row_tr.to(tl.int32), axis=1), axis=0)
        if WITH_SCORES:
            tl.store(row_scores_R + row_tr, tl.load(pull_scores_UK + entry_tr, mask=is_row_tr), mask=is_row_tr)
        for start in tl.static_range(0, DIM, COLUMNS):
            is_column_c = start + column_c < DIM
            x_tc = tl.load(
                x_t[:, None] + (start + column_c)[None, :],
                mask=is_token_t[:, None] & is_column_c[None, :],
                cache_modifier=".cg",  # read once
            )
            route = 0
            while route < num_routes:
                row_t = tl.load(pull_rows_UK + u_t * TOP_K + route, mask=is_token_t, other=-1)
                tl.store(
                    row_of(pool_RD, row_t, DIM)[:, None] + (start + column_c)[None, :],
                    x_tc,
                    mask=(row_t >= 0)[:, None] & is_column_c[None, :],
                )
                route += 1
        finish_stores()
        tl.atomic_add(arrival_M + row_tr // BLOCK_M, 1, mask=is_row_tr, sem="release", scope="gpu")
        first = claim(queue + _PULL_QUEUE, TOKENS)


@triton.jit
def _zero_padding(pulled, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the padding that the weight gradients multiply: what was in memory may be NaN. Nobody in this kernel waits for it."""
    sizes, tile_rows_M, _, _, pool_RD, _, _, queue = pulled
    column_c = tl.arange(0, COLUMNS)
    zero_c = tl.zeros([COLUMNS], tl.bfloat16)
    num_tiles = tl.load(sizes)
    tile = claim(queue + _PADDING_QUEUE, 1)
    while tile < num_tiles:
        row = tl.load(tile_rows_M + tile)
        end = padded(row)
        while row < end:
            to = row_of(pool_RD, tile * BLOCK_M + row, DIM)
            for start in tl.static_range(0, DIM, COLUMNS):
                tl.store(to + start + column_c, zero_c, mask=start + column_c < DIM)
            row += 1
        tile = claim(queue + _PADDING_QUEUE, 1)


@triton.jit
def padded(rows):
    """Rows of a tile with the padding that is to be zero."""
    return (rows + PADDING_M - 1) // PADDING_M * PADDING_M


@triton.jit
def claim_tile(queue):
    """Index of the next tile to multiply."""
    return claim(queue + _TILE_QUEUE, 1)


@triton.jit
def await_tile(row_tile, planned, faults, EP_SIZE: tl.constexpr, KERNEL: tl.constexpr):
    """``m, expert, rows`` of the ``row_tile``-th tile of rows, once all of them are in the pool: ``rows`` is 0 if they come too
    late."""
    expert_start_e1, tile_expert_M, tile_rows_M, arrival_M = planned
    _, _, deadline_us = faults
    m, expert = tile_in_turn(row_tile, tile_expert_M, expert_start_e1, EP_SIZE)
    rows = tl.load(tile_rows_M + m)
    have = await_count(arrival_M + m, rows, deadline_us)
    if have < rows:
        record_late(faults, KERNEL, _PHASE_ARRIVAL, m, have, rows)
        rows = 0
    return m, expert, rows
