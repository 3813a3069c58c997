"""How rows get from their owners into this rank's pool while others multiply those that are there already.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quantize import MX_BLOCK
from .. import plan_tables
from .common import await_count, BLOCK_M, claim, finish_stores, PADDING_M, record_late, row_of, tile_in_turn

_PHASE_ARRIVAL = tl.constexpr(plan_tables.PHASE_ARRIVAL)
_PULL_QUEUE, _TILE_QUEUE, _PADDING_QUEUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(6)


@triton.constexpr_function
def words(columns: int, is_mx: bool) -> int:
    """Two-byte words of a token, which is bf16 or e4m3."""
    return columns // 2 if is_mx else columns


@triton.constexpr_function
def scale_words(columns: int, is_mx: bool) -> int:
    """Two-byte words of a token's scales."""
    return columns // MX_BLOCK // 2 if is_mx else 0


@triton.jit
def pull_rows(
    pulled,
    WIDTH: tl.constexpr,  # two-byte words of a token
    SCALE_WIDTH: tl.constexpr,  # likewise of its scales, 0 in bf16
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_SCORES: tl.constexpr,  # whether each row's score is wanted, too
):
    """Mover: copy tokens into the pool until the pull list is empty. Waits for nobody."""
    _pull_tokens(pulled, WIDTH, SCALE_WIDTH, TOP_K, TOKENS, COLUMNS, WITH_SCORES)
    _zero_padding(pulled, WIDTH, COLUMNS)


@triton.jit
def _pull_tokens(
    pulled,
    WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_SCORES: tl.constexpr,
):
    sizes, _, tables, addresses, pool, row_scores_R, arrival_M, queue = pulled
    pull_source_U, pull_rows_UK, pull_scores_UK = tables
    x_addresses_P, scales_addresses_P = addresses
    pool_RD, pool_scales_Rg = pool
    token_t = tl.arange(0, TOKENS)
    route_r = tl.arange(0, triton.next_power_of_2(TOP_K))
    num_unique = tl.load(sizes + 1)
    first = claim(queue + _PULL_QUEUE, TOKENS)
    while first < num_unique:
        u_t = first + token_t
        is_token_t = u_t < num_unique
        source_t = tl.load(pull_source_U + u_t, mask=is_token_t, other=0)
        entry_tr = u_t[:, None] * TOP_K + route_r[None, :]
        row_tr = tl.load(pull_rows_UK + entry_tr, mask=is_token_t[:, None] & (route_r < TOP_K)[None, :], other=-1)
        is_row_tr = row_tr >= 0
        num_routes = tl.max(tl.sum(is_row_tr.to(tl.int32), axis=1), axis=0)
        if WITH_SCORES:
            tl.store(row_scores_R + row_tr, tl.load(pull_scores_UK + entry_tr, mask=is_row_tr), mask=is_row_tr)
        routes = (pull_rows_UK, u_t, is_token_t, num_routes)
        _copy_tokens(x_addresses_P, source_t, pool_RD, routes, TOP_K, WIDTH, COLUMNS, 16)
        if SCALE_WIDTH > 0:
            SCALE_COLUMNS: tl.constexpr = triton.next_power_of_2(SCALE_WIDTH)
            _copy_tokens(scales_addresses_P, source_t, pool_scales_Rg, routes, TOP_K, SCALE_WIDTH, SCALE_COLUMNS, 4)
        finish_stores()
        tl.atomic_add(arrival_M + row_tr // BLOCK_M, 1, mask=is_row_tr, sem="release", scope="gpu")
        first = claim(queue + _PULL_QUEUE, TOKENS)


@triton.jit
def _copy_tokens(
    addresses_P,
    source_t,
    to,
    routes,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Copy tokens of WIDTH two-byte words, aligned to so many bytes, from their owners to their rows."""
    pull_rows_UK, u_t, is_token_t, num_routes = routes
    column_c = tl.arange(0, COLUMNS)
    to = to.to(tl.pointer_type(tl.int16), bitcast=True)
    address_t = tl.load(addresses_P + (source_t >> 32)) + (source_t & 0xFFFFFFFF) * (2 * WIDTH)
    x_t = tl.multiple_of(address_t.to(tl.pointer_type(tl.int16)), ALIGNMENT)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        is_column_c = start + column_c < WIDTH
        x_tc = tl.load(
            x_t[:, None] + (start + column_c)[None, :],
            mask=is_token_t[:, None] & is_column_c[None, :],
            cache_modifier=".cg",  # read once
        )
        route = 0
        while route < num_routes:
            row_t = tl.load(pull_rows_UK + u_t * TOP_K + route, mask=is_token_t, other=-1)
            tl.store(
                row_of(to, row_t, WIDTH)[:, None] + (start + column_c)[None, :],
                x_tc,
                mask=(row_t >= 0)[:, None] & is_column_c[None, :],
            )
            route += 1


@triton.jit
def _zero_padding(pulled, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the padding that the weight gradients multiply: what was in memory may be NaN. Nobody in this kernel waits for it."""
    sizes, tile_rows_M, _, _, pool, _, _, queue = pulled
    pool_RD, _ = pool
    column_c = tl.arange(0, COLUMNS)
    zero_c = tl.zeros([COLUMNS], tl.int16)
    num_tiles = tl.load(sizes)
    tile = claim(queue + _PADDING_QUEUE, 1)
    while tile < num_tiles:
        row = tl.load(tile_rows_M + tile)
        end = padded(row)
        while row < end:
            to = row_of(pool_RD.to(tl.pointer_type(tl.int16), bitcast=True), tile * BLOCK_M + row, WIDTH)
            for start in tl.static_range(0, WIDTH, COLUMNS):
                tl.store(to + start + column_c, zero_c, mask=start + column_c < WIDTH)
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
