"""How rows leave: the store and communication warps, and the scheduler, of ``gemm_push`` and its relatives.

A tile of y that is complete in memory counts in ``done_M``. A token whose rows are complete is added up and written to its
owner. The columns of y are computed in two passes, or in one: see ``gemm_push.py``.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import plan_tables
from .common import (
    async_store,
    await_free_slot,
    BLOCK_M,
    claim,
    clock_ns,
    fence_async_global,
    finish_tile,
    HALF_M,
    hand_out,
    load_acquire,
    pack_tile,
    pause,
    receive_tile,
    record_late,
    STOP,
    thread_barrier,
    tile_in_turn,
    unpack_tile,
    wait_for_tma_stores,
)

_FORWARD_KERNEL = gl.constexpr(plan_tables.KERNEL_GEMM_PUSH)
_BACKWARD_KERNEL = gl.constexpr(plan_tables.KERNEL_GEMM_PUSH_BACKWARD)
_PHASE_DONE = gl.constexpr(plan_tables.PHASE_DONE)
_TILE_QUEUE, _SEND_QUEUE = gl.constexpr(2), gl.constexpr(3)  # and the one after it, for the second pass
_SCORE_QUEUE = gl.constexpr(7)

_SECOND_PASS = gl.constexpr(1 << 16)
"""What a column tile of the second pass adds to ``done_M``: it may overtake the last ones of the first."""


@gluon.jit
def schedule_passes(planned, queue, tiles, EP_SIZE: gl.constexpr, TILES_N: gl.constexpr, FIRST_TILES: gl.constexpr):
    """Scheduler: hand out all tiles of the first pass, then all of the second. Within a pass, those that share their
    rows come one after the other."""
    sizes, expert_start_e1, tile_expert_M, tile_rows_M = planned
    ring, ring_full, ring_empty = tiles
    LAST_TILES: gl.constexpr = TILES_N - FIRST_TILES
    num_tiles = gl.load(sizes) * TILES_N
    first_pass = gl.load(sizes) * FIRST_TILES
    count = 0
    tile = gl.to_tensor(0).to(gl.int64)
    while tile >= 0:
        await_free_slot(ring_empty, count)
        index = claim(queue + _TILE_QUEUE, 1)
        tile = gl.to_tensor(STOP).to(gl.int64)
        if index < num_tiles:
            row_tile = index // FIRST_TILES
            n = index % FIRST_TILES
            if LAST_TILES > 0:
                if index >= first_pass:
                    row_tile = (index - first_pass) // LAST_TILES
                    n = FIRST_TILES + (index - first_pass) % LAST_TILES
            m, expert = tile_in_turn(row_tile, tile_expert_M, expert_start_e1, EP_SIZE)
            tile = pack_tile(m, n, expert, gl.load(tile_rows_M + m))
        hand_out(tile, ring, ring_full, count)
        count += 1


@gluon.jit
def await_turn(HALF: gl.constexpr, turns, count):
    """Wait until the other consumer's rows have left the buffer. The first consumer has the first turn as a gift."""
    if HALF == 0:
        mbarrier.wait(turns.index(0), (count & 1) ^ 1)
    else:
        mbarrier.wait(turns.index(1), count & 1)


@gluon.jit
def store_tiles(stored, tiles, BLOCK_N: gl.constexpr, FIRST_TILES: gl.constexpr):
    """Store warp: write tiles of y from shared memory, one half after the other, and count those that are complete."""
    y_desc, y_buf, turns, y_full, done_M = stored
    ring, ring_full, ring_empty = tiles
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        finish_tile(ring_empty, count)
        for half in gl.static_range(2):
            mbarrier.wait(y_full.index(half), count & 1)
            if rows > half * HALF_M:
                async_store(y_desc, [m * BLOCK_M + half * HALF_M, n * BLOCK_N], y_buf)
                tma.store_wait(0)  # the buffer has been read
            mbarrier.arrive(turns.index(1 - half), count=1)
        wait_for_tma_stores()
        fence_async_global()  # written by the copy engine, to be read by ordinary loads
        thread_barrier()
        gl.atomic_add(done_M + m, 1 if n < FIRST_TILES else _SECOND_PASS, sem="release", scope="gpu")
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _count_done(done_M, tile, column_pass):
    """How many column tiles of this pass are done for row tile ``tile``."""
    done = load_acquire(done_M + tile)
    return (done >> (16 * column_pass)) & (_SECOND_PASS - 1)


@gluon.jit
def _load_routes(table_UK, u_t, route_r, TOP_K: gl.constexpr, other):
    """``[t, r]``: entries of the plan's table for routes r of tokens u."""
    is_route_tr = (u_t >= 0)[:, None] & (route_r < TOP_K)[None, :]
    return gl.load(table_UK + u_t[:, None] * TOP_K + route_r[None, :], mask=is_route_tr, other=other)


@gluon.jit
def _look_up(
    first,
    num_unique,
    tables,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    BACKWARD: gl.constexpr,
    layout: gl.constexpr,
    layout_tw: gl.constexpr,
):
    """What the plan says of the tokens from ``first`` on in the send list; past its end they have no source, no rows.

    Returns:
        source_t: owner rank << 32 | token, or -1; laid out as the sums.
        row_tw: all their rows, for the wait.
        u_t, row_tr, score_tr: their indices in the pull list, and the first ROUTES rows and scores; laid out as y.
    """
    send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK = tables
    layout_tr: gl.constexpr = gl.SliceLayout(2, layout)
    layout_tc: gl.constexpr = gl.SliceLayout(1, layout)
    item_t = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout_tr))
    item_w = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout_tw))
    u_t = gl.load(send_order_U + item_t, mask=item_t < num_unique, other=-1)
    u_w = gl.load(send_order_U + item_w, mask=item_w < num_unique, other=-1)
    u_s = gl.convert_layout(u_t, gl.SliceLayout(1, layout_tc))
    route_r = gl.arange(0, ROUTES, layout=gl.SliceLayout(0, layout_tr))
    route_w = gl.arange(0, triton.next_power_of_2(TOP_K), layout=gl.SliceLayout(0, layout_tw))
    source_t = gl.load(pull_source_U + u_s, mask=u_s >= 0, other=-1)
    row_tw = _load_routes(pull_rows_UK, u_w, route_w, TOP_K, -1)
    row_tr = _load_routes(pull_rows_UK, u_t, route_r, TOP_K, -1)
    score_tr = row_tr if BACKWARD else _load_routes(pull_scores_UK, u_t, route_r, TOP_K, 0.0)
    return source_t, row_tw, u_t, row_tr, score_tr


@gluon.jit
def _load_rows(y_RD, row_tr, column_c, end, DIM: gl.constexpr):
    """``[t, r, c]``: those columns of those rows of y, 0 where there is no row or column."""
    return gl.load(
        y_RD + row_tr.to(gl.int64)[:, :, None] * DIM + column_c[None, None, :],
        mask=(row_tr >= 0)[:, :, None] & (column_c < end)[None, None, :],
        other=0.0,
        cache_modifier=".cg",  # other SMs wrote them during this kernel: not through this SM's own cache
    )


@gluon.jit
def _weigh(y_trc, score_tr, BACKWARD: gl.constexpr):
    """``[t, c]``: the sum over routes, in their order; in backward without weights, for dgate and dup have been scaled."""
    y_trc = y_trc.to(gl.float32)
    if not BACKWARD:
        y_trc *= score_tr[:, :, None]
    return gl.sum(y_trc, axis=1)


@gluon.jit
def _weigh_more(
    first_route,
    tables,
    y_RD,
    u_t,
    column_c,
    end,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    ROUTES: gl.constexpr,
    BACKWARD: gl.constexpr,
    layout: gl.constexpr,
):
    """``[t, c]``: the sum over the next ROUTES routes of tokens that have so many."""
    _, _, pull_rows_UK, pull_scores_UK = tables
    route_r = first_route + gl.arange(0, ROUTES, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row_tr = _load_routes(pull_rows_UK, u_t, route_r, TOP_K, -1)
    score_tr = row_tr if BACKWARD else _load_routes(pull_scores_UK, u_t, route_r, TOP_K, 0.0)
    return _weigh(_load_rows(y_RD, row_tr, column_c, end, DIM), score_tr, BACKWARD)


@gluon.jit
def _send_score_gradients(sent, TOP_K: gl.constexpr, EP_SIZE: gl.constexpr, PARTS: gl.constexpr):
    """Communication warp: add up the parts of the tokens' score gradients and write them to their owners. They are all
    there: it waits for nobody, and it is done before the first row can be sent."""
    sizes, tables, _, _, destinations, score_gradients, queue, faults = sent
    _, pull_source_U, pull_rows_UK, _ = tables
    _, _, max_tokens = destinations
    parts_NR, num_rows, outputs = score_gradients
    _, rank, _ = faults
    ROUTES: gl.constexpr = triton.next_power_of_2(TOP_K)
    TOKENS: gl.constexpr = 32 // ROUTES
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [TOKENS, ROUTES], [1, 1], [1, 0])  # a lane has one route
    item_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    route_r = gl.arange(0, ROUTES, layout=gl.SliceLayout(0, layout))
    num_unique = gl.load(sizes + 1)
    first = claim(queue + _SCORE_QUEUE, TOKENS)
    while first < num_unique:
        is_token_t = first + item_t < num_unique
        u_t = gl.where(is_token_t, first + item_t, -1)
        source_t = gl.load(pull_source_U + u_t, mask=is_token_t, other=0)
        row_tr = _load_routes(pull_rows_UK, u_t, route_r, TOP_K, -1)
        dscore_tr = gl.zeros([TOKENS, ROUTES], gl.float32, layout)
        for part in gl.static_range(PARTS):
            start = num_rows.to(gl.int64) * part
            dscore_tr += gl.load(parts_NR + start + row_tr, mask=row_tr >= 0, other=0.0)
        token_t = source_t & 0xFFFFFFFF
        if EP_SIZE > 1:
            address_t = gl.load(outputs + (source_t >> 32))
            address_t += (rank.to(gl.int64) * max_tokens + token_t) * (4 * TOP_K)
            to_t = address_t.to(gl.pointer_type(gl.float32))
        else:
            to_t = outputs + token_t * TOP_K
        gl.store(to_t[:, None] + route_r[None, :], dscore_tr, mask=is_token_t[:, None] & (route_r < TOP_K)[None, :])
        first = claim(queue + _SCORE_QUEUE, TOKENS)


@gluon.jit
def send_tokens(
    sent,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    TILES_N: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Add up and send tokens until the send list is empty, WARP_TOKENS of them in each warp of the caller at a time.

    First the columns of the first pass, of all tokens, then those of the second. Of each token, COLUMNS columns of
    ROUTES rows are read at a time.
    """
    sizes, tables, y_RD, done_M, destinations, score_gradients, queue, faults = sent
    out_TD, slots_addresses_P, max_tokens = destinations
    fault, rank, deadline_us = faults
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = WARPS * WARP_TOKENS
    FIRST_COLUMNS: gl.constexpr = DIM // TILES_N * FIRST_TILES
    # Tensors are [tokens t, routes r, columns c]. A lane has 16 bytes of each of the routes, so it adds them up alone.
    layout: gl.constexpr = gl.BlockedLayout([WARP_TOKENS, ROUTES, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    layout_c: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    # While it waits, a lane has one or a few rows of one token: [tokens t, routes w].
    layout_tw: gl.constexpr = gl.BlockedLayout([1, 1], [WARP_TOKENS, 32 // WARP_TOKENS], [WARPS, 1], [1, 0])

    num_unique = gl.load(sizes + 1)
    for column_pass in range(1 if FIRST_TILES == TILES_N else 2):
        begin = 0 if column_pass == 0 else FIRST_COLUMNS
        end = FIRST_COLUMNS if column_pass == 0 else DIM
        want = FIRST_TILES if column_pass == 0 else TILES_N - FIRST_TILES
        queue_of_pass = queue + _SEND_QUEUE + column_pass
        first = claim(queue_of_pass, TOKENS)
        source_t, row_tw, u_t, row_tr, score_tr = _look_up(
            first, num_unique, tables, TOP_K, TOKENS, ROUTES, BACKWARD, layout, layout_tw
        )
        while first < num_unique:
            tile_tw = gl.maximum(row_tw, 0) // BLOCK_M
            want_tw = gl.where(row_tw < 0, 0, want)
            done_tw = _count_done(done_M, tile_tw, column_pass)
            num_late = _count_late(done_tw, want_tw)
            if num_late > 0:
                since = clock_ns()
                while (num_late > 0) & (clock_ns() - since < deadline_us.to(gl.int64) * 1000):
                    pause()
                    done_tw = _count_done(done_M, tile_tw, column_pass)
                    num_late = _count_late(done_tw, want_tw)
            if num_late > 0:
                tile = _largest(gl.where(done_tw < want_tw, tile_tw, -1))
                have = _largest(gl.where((done_tw < want_tw) & (tile_tw == tile), done_tw, 0))
                KERNEL: gl.constexpr = _BACKWARD_KERNEL if BACKWARD else _FORWARD_KERNEL
                record_late(fault, rank, KERNEL, _PHASE_DONE, tile, have, want)
                num_unique = 0  # give up
            else:
                thread_barrier()  # what one lane has seen done, all lanes may read
                is_token_t = source_t >= 0
                token_t = source_t & 0xFFFFFFFF
                if EP_SIZE > 1:
                    address_t = gl.load(slots_addresses_P + (source_t >> 32), mask=is_token_t, other=0)
                    address_t += (rank.to(gl.int64) * max_tokens + token_t) * (2 * DIM)
                    out_t = gl.multiple_of(address_t.to(gl.pointer_type(gl.bfloat16)), 16)
                else:
                    out_t = out_TD + token_t * DIM
                num_routes = gl.max(gl.sum((row_tw >= 0).to(gl.int32), axis=1), axis=0)
                sent_u_t, sent_row_tr, sent_score_tr = u_t, row_tr, score_tr
                for start in range(begin, end, COLUMNS):
                    column_c = start + gl.arange(0, COLUMNS, layout=layout_c)
                    y_trc = _load_rows(y_RD, sent_row_tr, column_c, end, DIM)
                    if start == begin:
                        # The next tokens are claimed and looked up while these rows are on their way.
                        first = claim(queue_of_pass, TOKENS)
                        source_t, row_tw, u_t, row_tr, score_tr = _look_up(
                            first, num_unique, tables, TOP_K, TOKENS, ROUTES, BACKWARD, layout, layout_tw
                        )
                    sum_tc = _weigh(y_trc, sent_score_tr, BACKWARD)
                    if TOP_K > ROUTES:
                        for first_route in range(ROUTES, num_routes, ROUTES):
                            sum_tc += _weigh_more(
                                first_route, tables, y_RD, sent_u_t, column_c, end, DIM, TOP_K, ROUTES, BACKWARD, layout
                            )
                    gl.store(
                        out_t[:, None] + column_c[None, :],
                        sum_tc.to(gl.bfloat16),
                        mask=is_token_t[:, None] & (column_c < end)[None, :],
                    )


@gluon.jit
def _count_late(done_tw, want_tw):
    """How many rows are not complete."""
    return gl.sum(gl.sum((done_tw < want_tw).to(gl.int32), axis=1), axis=0)


@gluon.jit
def _largest(values_tw):
    return gl.max(gl.max(values_tw, axis=1), axis=0)


@gluon.jit
def send_tokens_if(
    IS_USED: gl.constexpr,
    sent,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    TILES_N: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    BACKWARD: gl.constexpr,
    SCORE_PARTS: gl.constexpr,
):
    """A communication warp, or one that the tuning leaves idle."""
    if IS_USED:
        if BACKWARD:
            _send_score_gradients(sent, TOP_K, EP_SIZE, SCORE_PARTS)
        send_tokens(sent, DIM, TOP_K, EP_SIZE, TILES_N, FIRST_TILES, WARP_TOKENS, ROUTES, COLUMNS, BACKWARD)
