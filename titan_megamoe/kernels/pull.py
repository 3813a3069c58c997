"""How rows get from their owners into this rank's pool while tensor cores work on those that are there already: the
communication warps and the scheduler of ``pull_gemm`` and its relatives.

Rows are copied as bytes: a row of D values in FP8 is one of D / 2 in bf16 here.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import plan_tables
from .common import (
    await_count,
    await_free_slot,
    BLOCK_M,
    claim,
    fence_async_global,
    HALF_M,
    hand_out,
    pack_tile,
    record_late,
    STOP,
    thread_barrier,
    tile_in_turn,
)
from .tuning import PullGemmTuning

_PHASE_ARRIVAL = gl.constexpr(plan_tables.PHASE_ARRIVAL)
_PULL_QUEUE, _TILE_QUEUE, _PADDING_QUEUE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(6)


def pull_constants(
    tuning: PullGemmTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int
) -> dict[str, int | bool]:
    """What all kernels that pull are compiled for."""
    consumer, comm, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "STAGES": tuning.stages,
        "COMM_WARPS": tuning.comm_warps,
        "TOKENS": tuning.tokens,
        "COLUMNS": tuning.columns,
        "CONSUMER_REGS": consumer,
        "COMM_REGS": comm,
        "OTHER_REGS": other,
    }


@gluon.jit
def pull_rows(
    IS_USED: gl.constexpr,  # whether the tuning uses this warp at all
    pulled,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,  # of one item
    COLUMNS: gl.constexpr,  # of each, held in registers at a time
    WITH_SCORES: gl.constexpr,  # whether each row's score is wanted, too
    NUM_SCALES: gl.constexpr,  # of a row in FP8; 0: the rows have none
):
    """Communication warp: copy tokens into the pool until the pull list is empty. Waits for nobody."""
    if IS_USED:
        _pull_tokens(pulled, DIM, TOP_K, TOKENS, COLUMNS, WITH_SCORES, NUM_SCALES)
        _zero_padding(pulled, DIM, COLUMNS)


@gluon.jit
def _pull_tokens(
    pulled,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WITH_SCORES: gl.constexpr,
    NUM_SCALES: gl.constexpr,
):
    sizes, _, tables, x_addresses_P, pool_RD, row_scores_R, scales, arrival_M, queue = pulled
    pull_source_U, pull_rows_UK, pull_scores_UK = tables
    # [tokens t, columns c]: a lane has 16 bytes, so a warp copies 512 bytes of a row at a time.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    token_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    column_c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # [tokens t, routes r]: a lane has one route, to count it.
    layout_tr: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    BLOCK_R: gl.constexpr = triton.next_power_of_2(TOP_K)
    item_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout_tr))
    route_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, layout_tr))
    one_tr = gl.full([TOKENS, BLOCK_R], 1, gl.int32, layout_tr)

    num_unique = gl.load(sizes + 1)
    first = claim(queue + _PULL_QUEUE, TOKENS)
    source_t = gl.load(pull_source_U + first + token_t, mask=first + token_t < num_unique, other=0)
    while first < num_unique:
        u_t = first + token_t
        is_token_t = u_t < num_unique
        address_t = gl.load(x_addresses_P + (source_t >> 32)) + (source_t & 0xFFFFFFFF) * (2 * DIM)
        x_t = gl.multiple_of(address_t.to(gl.pointer_type(gl.bfloat16)), 16)
        is_route_tr = (first + item_t < num_unique)[:, None] & (route_r < TOP_K)[None, :]
        entry_tr = (first + item_t)[:, None] * TOP_K + route_r[None, :]
        row_tr = gl.load(pull_rows_UK + entry_tr, mask=is_route_tr, other=-1)
        num_routes = gl.max(gl.sum((row_tr >= 0).to(gl.int32), axis=1), axis=0)
        if WITH_SCORES:
            gl.store(row_scores_R + row_tr, gl.load(pull_scores_UK + entry_tr, mask=row_tr >= 0), mask=row_tr >= 0)

        following = first
        pulled_source_t = source_t
        for start in gl.static_range(0, DIM, COLUMNS):
            is_column_c = start + column_c < DIM
            x_tc = gl.load(
                x_t[:, None] + (start + column_c)[None, :],
                mask=is_token_t[:, None] & is_column_c[None, :],
                cache_modifier=".cg",  # read once
            )
            if start == 0:
                # The next tokens are claimed and looked up while these are on their way.
                following = claim(queue + _PULL_QUEUE, TOKENS)
                source_t = gl.load(pull_source_U + following + token_t, mask=following + token_t < num_unique, other=0)
            for route in range(num_routes):
                row_t = gl.load(pull_rows_UK + u_t * TOP_K + route, mask=is_token_t, other=-1)
                gl.store(
                    pool_RD + row_t.to(gl.int64)[:, None] * DIM + (start + column_c)[None, :],
                    x_tc,
                    mask=(row_t >= 0)[:, None] & is_column_c[None, :],
                )

        if NUM_SCALES > 0:
            _pull_scales(u_t, pulled_source_t, num_unique, num_routes, tables, scales, TOP_K, NUM_SCALES)

        # All lanes' parts of the rows are written, and the copy engine may read them, before they are counted.
        fence_async_global()
        thread_barrier()
        gl.atomic_add(arrival_M + row_tr // BLOCK_M, one_tr, mask=row_tr >= 0, sem="release", scope="gpu")
        first = following


@gluon.jit
def _pull_scales(
    u_t,
    source_t,
    num_unique,
    num_routes,
    tables,
    scales,
    TOP_K: gl.constexpr,
    NUM_SCALES: gl.constexpr,
):
    """Copy the scales of tokens in FP8. In the pool they lie block by block, so that a tile's are side by side."""
    scales_addresses_P, pool_scales_bR, num_rows = scales
    _, pull_rows_UK, _ = tables
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])  # a lane has a block
    block_b = gl.arange(0, triton.next_power_of_2(NUM_SCALES), layout=gl.SliceLayout(0, layout))
    u_t = gl.convert_layout(u_t, gl.SliceLayout(1, layout))
    source_t = gl.convert_layout(source_t, gl.SliceLayout(1, layout))
    is_token_t = u_t < num_unique
    address_t = gl.load(scales_addresses_P + (source_t >> 32)) + (source_t & 0xFFFFFFFF) * (4 * NUM_SCALES)
    is_scale_tb = is_token_t[:, None] & (block_b < NUM_SCALES)[None, :]
    from_tb = address_t.to(gl.pointer_type(gl.float32))[:, None] + block_b[None, :]
    scale_tb = gl.load(from_tb, mask=is_scale_tb)
    for route in range(num_routes):
        row_t = gl.load(pull_rows_UK + u_t * TOP_K + route, mask=is_token_t, other=-1)
        to_tb = pool_scales_bR + block_b.to(gl.int64)[None, :] * num_rows + row_t[:, None]
        gl.store(to_tb, scale_tb, mask=is_scale_tb & (row_t >= 0)[:, None])


@gluon.jit
def _zero_padding(pulled, DIM: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero the padding that the weight gradients may multiply: they take several rows at a time, a divisor of HALF_M, and what
    was in memory may be NaN. Nobody in this kernel waits for it."""
    sizes, tile_rows_M, _, _, pool_RD, _, _, _, queue = pulled
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    column_c = gl.arange(0, COLUMNS, layout=layout)
    zero_c = gl.zeros([COLUMNS], gl.bfloat16, layout)
    num_tiles = gl.load(sizes)
    tile = claim(queue + _PADDING_QUEUE, 1)
    while tile < num_tiles:
        rows = gl.load(tile_rows_M + tile)
        for row in range(rows, (rows + HALF_M - 1) // HALF_M * HALF_M):
            for start in gl.static_range(0, DIM, COLUMNS):
                to_c = pool_RD + (tile * BLOCK_M + row).to(gl.int64) * DIM + start + column_c
                gl.store(to_c, zero_c, mask=start + column_c < DIM)
        tile = claim(queue + _PADDING_QUEUE, 1)


@gluon.jit
def schedule_arrived_tiles(planned, faults, tiles, EP_SIZE: gl.constexpr, TILES_N: gl.constexpr, KERNEL: gl.constexpr):
    """Scheduler: hand out tiles whose rows are there. Those that share their rows come one after the other."""
    sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue = planned
    fault, rank, deadline_us = faults
    ring, ring_full, ring_empty = tiles
    num_tiles = gl.load(sizes) * TILES_N
    count = 0
    tile = gl.to_tensor(0).to(gl.int64)
    while tile >= 0:
        await_free_slot(ring_empty, count)
        index = claim(queue + _TILE_QUEUE, 1)
        tile = gl.to_tensor(STOP).to(gl.int64)
        if index < num_tiles:
            m, expert = tile_in_turn(index // TILES_N, tile_expert_M, expert_start_e1, EP_SIZE)
            rows = gl.load(tile_rows_M + m)
            have = await_count(arrival_M + m, rows, deadline_us)
            if have < rows:
                record_late(fault, rank, KERNEL, _PHASE_ARRIVAL, m, have, rows)
            else:
                tile = pack_tile(m, index % TILES_N, expert, rows)
        hand_out(tile, ring, ring_full, count)
        count += 1
