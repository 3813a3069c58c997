"""How rows leave: the movers of ``gemm_push`` and ``gemm_push_backward``, which add up each token's rows and write the sum to its
owner, once they are done.

The columns of y are computed in two passes, or in one: see ``kernels/gemm_push.py``.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import plan_tables
from .common import BLOCK_M, claim, finish_stores, load_acquire, pause, record_late, row_of

_PHASE_DONE = tl.constexpr(plan_tables.PHASE_DONE)
_TILE_QUEUE, _SEND_QUEUE = tl.constexpr(2), tl.constexpr(3)  # and the one after it, for the second pass
_SCORE_QUEUE = tl.constexpr(7)

_SECOND_PASS = tl.constexpr(1 << 16)
"""What a column tile of the second pass adds to ``done_M``: it may overtake the last ones of the first."""


@triton.jit
def claim_tile(queue):
    """Index of the next tile to multiply."""
    return claim(queue + _TILE_QUEUE, 1)


@triton.jit
def count_done(done_M, m, n, FIRST_TILES: tl.constexpr):
    """A column tile of the m-th row tile has been written."""
    finish_stores()
    tl.atomic_add(done_M + m, tl.where(n < FIRST_TILES, 1, _SECOND_PASS), sem="release", scope="gpu")


@triton.jit
def _is_route(u_t, is_token_t, route_r, TOP_K: tl.constexpr):
    """``[t, r]``: entries of the plan's tables, and which of them there are."""
    return u_t[:, None] * TOP_K + route_r[None, :], is_token_t[:, None] & (route_r < TOP_K)[None, :]


@triton.jit
def send_score_gradients(sent, TOP_K: tl.constexpr, EP_SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Add up the parts of the tokens' score gradients and write them to their owners. They are all there: it waits for nobody."""
    sizes, tables, _, _, destinations, score_gradients, queue, faults = sent
    _, pull_source_U, pull_rows_UK, _ = tables
    _, _, max_tokens = destinations
    parts_NR, num_rows, outputs = score_gradients
    _, rank, _ = faults
    ROUTES: tl.constexpr = triton.next_power_of_2(TOP_K)
    TOKENS: tl.constexpr = 256 // ROUTES
    token_t = tl.arange(0, TOKENS)
    route_r = tl.arange(0, ROUTES)
    num_unique = tl.load(sizes + 1)
    first = claim(queue + _SCORE_QUEUE, TOKENS)
    while first < num_unique:
        u_t = first + token_t
        is_token_t = u_t < num_unique
        source_t = tl.load(pull_source_U + u_t, mask=is_token_t, other=0)
        entry_tr, is_route_tr = _is_route(u_t, is_token_t, route_r, TOP_K)
        row_tr = tl.load(pull_rows_UK + entry_tr, mask=is_route_tr, other=-1)
        dscore_tr = tl.zeros([TOKENS, ROUTES], tl.float32)
        for part in tl.static_range(PARTS):
            dscore_tr += tl.load(parts_NR + num_rows.to(tl.int64) * part + row_tr, mask=row_tr >= 0, other=0.0)
        to_t = _destination(source_t, is_token_t, outputs, outputs, max_tokens, rank, TOP_K, EP_SIZE, tl.float32)
        tl.store(to_t[:, None] + route_r[None, :], dscore_tr, mask=is_route_tr)
        first = claim(queue + _SCORE_QUEUE, TOKENS)


@triton.jit
def _destination(
    source_t,
    is_token_t,
    output_TC,
    slots_addresses_P,
    max_tokens,
    rank,
    WIDTH: tl.constexpr,
    EP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Where the tokens' rows of WIDTH values go: with one rank into the output, else into this rank's slots at their owners."""
    token_t = source_t & 0xFFFFFFFF
    if EP_SIZE > 1:
        BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
        address_t = tl.load(slots_addresses_P + (source_t >> 32), mask=is_token_t, other=0)
        address_t += (rank.to(tl.int64) * max_tokens + token_t) * (WIDTH * BYTES)
        to_t = address_t.to(tl.pointer_type(DTYPE))
    else:
        to_t = output_TC + token_t * WIDTH
    return to_t


@triton.jit
def send_tokens(
    sent,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    TILES_N: tl.constexpr,
    FIRST_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROUTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Add up and send tokens, TOKENS at a time, until the send list is empty: first the columns of the first pass, of all tokens,
    then those of the second."""
    sizes, tables, y_RD, done_M, destinations, _, queue, faults = sent
    send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK = tables
    out_TD, slots_addresses_P, max_tokens = destinations
    _, rank, deadline_us = faults
    FIRST_COLUMNS: tl.constexpr = DIM // TILES_N * FIRST_TILES
    token_t = tl.arange(0, TOKENS)
    route_r = tl.arange(0, triton.next_power_of_2(TOP_K))
    num_unique = tl.load(sizes + 1)
    column_pass = 0
    begin = 0
    end = FIRST_COLUMNS
    want = FIRST_TILES
    while begin < DIM:
        first = claim(queue + _SEND_QUEUE + column_pass, TOKENS)
        while first < num_unique:
            is_token_t = first + token_t < num_unique
            u_t = tl.load(send_order_U + first + token_t, mask=is_token_t, other=0)
            entry_tr, is_route_tr = _is_route(u_t, is_token_t, route_r, TOP_K)
            row_tr = tl.load(pull_rows_UK + entry_tr, mask=is_route_tr, other=-1)
            if _await_rows(row_tr, done_M, column_pass, want, faults, deadline_us, KERNEL):
                source_t = tl.load(pull_source_U + u_t, mask=is_token_t, other=0)
                to_t = _destination(
                    source_t, is_token_t, out_TD, slots_addresses_P, max_tokens, rank, DIM, EP_SIZE, tl.bfloat16
                )
                to_t = tl.multiple_of(to_t, 16)
                num_routes = tl.max(tl.sum((row_tr >= 0).to(tl.int32), axis=1), axis=0)
                start = begin
                while start < end:
                    column_c = start + tl.arange(0, COLUMNS)
                    is_column_c = column_c < end
                    sum_tc = tl.zeros([TOKENS, COLUMNS], tl.float32)
                    route = 0
                    while route < num_routes:
                        for i in tl.static_range(ROUTES):  # unrolled: so many loads in flight before the first addition
                            entry_t = u_t * TOP_K + route + i
                            is_route_t = is_token_t & (route + i < TOP_K)
                            row_t = tl.load(pull_rows_UK + entry_t, mask=is_route_t, other=-1)
                            is_row_t = row_t >= 0
                            y_tc = tl.load(
                                row_of(y_RD, row_t, DIM)[:, None] + column_c[None, :],
                                mask=is_row_t[:, None] & is_column_c[None, :],
                                other=0.0,
                                cache_modifier=".cg",
                            ).to(tl.float32)
                            if BACKWARD:  # dgate and dup have been scaled
                                sum_tc += y_tc
                            else:
                                score_t = tl.load(pull_scores_UK + entry_t, mask=is_row_t, other=0.0)
                                sum_tc += score_t[:, None] * y_tc
                        route += ROUTES
                    is_sent_tc = is_token_t[:, None] & is_column_c[None, :]
                    tl.store(to_t[:, None] + column_c[None, :], sum_tc.to(tl.bfloat16), mask=is_sent_tc)
                    start += COLUMNS
                first = claim(queue + _SEND_QUEUE + column_pass, TOKENS)
            else:
                first = num_unique  # give up
                end = DIM
        begin = end
        end = DIM
        want = TILES_N - FIRST_TILES
        column_pass += 1


@triton.jit
def _await_rows(row_tr, done_M, column_pass, want, faults, deadline_us, KERNEL: tl.constexpr):
    """Wait until the tiles of all these rows are done, or until the deadline. Returns whether they are."""
    is_row_tr = row_tr >= 0
    tile_tr = tl.maximum(row_tr, 0) // BLOCK_M
    done_tr = _count_of_pass(done_M + tile_tr, is_row_tr, column_pass)
    num_late = _count_late(done_tr, is_row_tr, want)
    looks = 0
    while (num_late > 0) & (looks < deadline_us):
        pause()
        done_tr = _count_of_pass(done_M + tile_tr, is_row_tr, column_pass)
        num_late = _count_late(done_tr, is_row_tr, want)
        looks += 1
    tl.debug_barrier()  # what one thread has seen done, all may rely on
    if num_late > 0:
        tile = tl.max(tl.max(tl.where(is_row_tr & (done_tr < want), tile_tr, -1), axis=1), axis=0)
        have = tl.max(tl.max(tl.where(is_row_tr & (tile_tr == tile), done_tr, 0), axis=1), axis=0)
        record_late(faults, KERNEL, _PHASE_DONE, tile, have, want)
    return num_late == 0


@triton.jit
def _count_of_pass(counter_tr, is_row_tr, column_pass):
    return (load_acquire(counter_tr, is_row_tr) >> (16 * column_pass)) & (_SECOND_PASS - 1)


@triton.jit
def _count_late(done_tr, is_row_tr, want):
    return tl.sum(tl.sum((is_row_tr & (done_tr < want)).to(tl.int32), axis=1), axis=0)
