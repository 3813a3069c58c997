"""What follows the product in ``pull_gemm_backward`` and its FP8 relative: back through SwiGLU, in a warpgroup of its own.

The consumers only multiply. They leave g in shared memory, in bf16, and start with the next tile, while this warpgroup turns it into
dgate, dup and scaled_h, which replace gate, up and g in their buffers and leave from there. (With the consumers doing both, tensor
cores waited for about half of the time at D = 2048: docs/kernels.md.)

It has 16 rows in registers at a time, few of them, and a thread has 8 columns side by side: it reads and writes shared memory 16
bytes at a time. (Two such warpgroups would be too many threads: a product of 128 columns needs 90 registers in all of them.)

In FP8, dgate and dup are quantised from the bf16 that is written, in a second go over them, and leave through the buffer that scaled_h
has left.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .common import (
    async_load,
    async_store,
    BLOCK_M,
    finish_tile,
    HALF_M,
    receive_tile,
    sigmoid,
    thread_barrier,
    unpack_tile,
)
from .pull_gemm_fp8 import BLOCK, quantize_block

PART_N = gl.constexpr(64)
"""Columns of a buffer of gate, up or g: what a swizzled row of bf16 holds."""
_ROWS = gl.constexpr(16)
"""Rows that the warpgroup has in registers at a time."""
_GATE, _UP = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def allocate_products(BLOCK_N: gl.constexpr, desc):
    """Buffers of g, then of scaled_h, for both halves of a tile's rows."""
    return gl.allocate_shared_memory(gl.bfloat16, [2 * (BLOCK_N // PART_N), HALF_M, PART_N], desc.layout)


@gluon.jit
def allocate_activations(BLOCK_N: gl.constexpr, desc):
    """Buffers of gate and up, then of their gradients, for both halves of a tile's rows."""
    return gl.allocate_shared_memory(gl.bfloat16, [2 * (BLOCK_N // PART_N) * 2, HALF_M, PART_N], desc.layout)


@gluon.jit
def _activations_buffer(bufs, HALF: gl.constexpr, part, WHAT: gl.constexpr, PARTS: gl.constexpr):
    """The ``[HALF_M, PART_N]`` buffer of gate or up, and later of its gradient."""
    return bufs.index((HALF * PARTS + part) * 2 + WHAT)


@gluon.jit
def load_activations(activations, tiles, BLOCK_N: gl.constexpr):
    """Load gate and up of each tile into the epilogue's buffers, as soon as the tile before has left them."""
    gate_desc, up_desc, bufs, full, empty = activations
    ring, ring_full, ring_empty = tiles
    PARTS: gl.constexpr = BLOCK_N // PART_N
    BYTES: gl.constexpr = PARTS * (gate_desc.block_type.nbytes + up_desc.block_type.nbytes)
    count = 0
    upper_count = 0  # of tiles that have rows in the second half
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        finish_tile(ring_empty, count)
        for half in gl.static_range(2):
            if rows > half * HALF_M:
                loaded = count if half == 0 else upper_count
                mbarrier.wait(empty.index(half), (loaded & 1) ^ 1)
                mbarrier.expect(full.index(half), BYTES)
                for part in gl.static_range(PARTS):
                    at = [m * BLOCK_M + half * HALF_M, n * BLOCK_N + part * PART_N]
                    async_load(gate_desc, at, full.index(half), _activations_buffer(bufs, half, part, _GATE, PARTS))
                    async_load(up_desc, at, full.index(half), _activations_buffer(bufs, half, part, _UP, PARTS))
        if rows > HALF_M:
            upper_count += 1
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _part_of(g, PART: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Columns of g that a thread has already: nothing moves."""
    if BLOCK_N == PART_N:
        part = g
    else:
        first, second = g.reshape([HALF_M, 2, PART_N]).permute([0, 2, 1]).split()
        part = gl.convert_layout(second if PART == 1 else first, layout, assert_trivial=True)
    return part


@gluon.jit
def hand_over(g, products, HALF: gl.constexpr, num_done, BLOCK_N: gl.constexpr, K_WIDTH: gl.constexpr):
    """Consumer: leave g of half a tile's rows, as soon as that of the tile before has been taken."""
    g_bufs, g_full, g_empty = products
    PARTS: gl.constexpr = BLOCK_N // PART_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, K_WIDTH]
    )
    mbarrier.wait(g_empty.index(HALF), (num_done & 1) ^ 1)
    for part in gl.static_range(PARTS):
        g_bufs.index(HALF * PARTS + part).store(_part_of(g, part, BLOCK_N, layout).to(gl.bfloat16))
    mbarrier.arrive(g_full.index(HALF), count=1)


@gluon.jit
def go_back_through_swiglu(
    products,
    outputs,
    quantized,  # in FP8: where dgate and dup go, and their scales
    scores,
    tiles,
    BLOCK_N: gl.constexpr,
    IS_FP8: gl.constexpr,
):
    """Epilogue: dgate, dup, scaled_h and the score gradient's part of each tile, one half of its rows after the other."""
    g_bufs, g_full, g_empty = products
    dgate_desc, dup_desc, scaled_h_desc, bufs, full, empty = outputs
    _, _, num_rows = scores
    ring, ring_full, ring_empty = tiles
    PARTS: gl.constexpr = BLOCK_N // PART_N
    CHUNKS: gl.constexpr = HALF_M // _ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # The same memory, _ROWS rows at a time: swizzling repeats every 8 rows.
    chunks = bufs._reinterpret(gl.bfloat16, [bufs.shape[0] * CHUNKS, _ROWS, PART_N], bufs.layout)
    g_chunks = g_bufs._reinterpret(gl.bfloat16, [g_bufs.shape[0] * CHUNKS, _ROWS, PART_N], g_bufs.layout)
    count = 0
    upper_count = 0  # of tiles that have rows in the second half
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        finish_tile(ring_empty, count)
        for half in range(2):
            if rows > half * HALF_M:
                num_before = gl.where(half == 0, count, upper_count)
                mbarrier.wait(full.index(half), num_before & 1)
                mbarrier.wait(g_full.index(half), num_before & 1)
                # Most tiles have no padding, and are spared its masks.
                if rows >= (half + 1) * HALF_M:
                    _replace_half(g_chunks, chunks, scores, half, m, n, rows, PARTS, layout, False)
                else:
                    _replace_half(g_chunks, chunks, scores, half, m, n, rows, PARTS, layout, True)
                # Of what all threads wrote, before one thread has the copy engine read it.
                fence_async_shared()
                thread_barrier()
                for part in gl.static_range(PARTS):
                    at = [m * BLOCK_M + half * HALF_M, n * BLOCK_N + part * PART_N]
                    async_store(scaled_h_desc, at, g_bufs.index(half * PARTS + part))
                for part in gl.static_range(PARTS):
                    at = [m * BLOCK_M + half * HALF_M, n * BLOCK_N + part * PART_N]
                    async_store(dgate_desc, at, _activations_buffer(bufs, half, part, _GATE, PARTS))
                    async_store(dup_desc, at, _activations_buffer(bufs, half, part, _UP, PARTS))
                if IS_FP8:
                    tma.store_wait(2 * PARTS)  # scaled_h has left its buffers
                    _quantize_half(quantized, g_bufs, chunks, half, m, n, rows, num_rows, layout)
                tma.store_wait(0)  # the buffers have been read
                mbarrier.arrive(g_empty.index(half), count=1)
                mbarrier.arrive(empty.index(half), count=1)
        if rows > HALF_M:
            upper_count += 1
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _replace_half(
    g_chunks,
    chunks,
    scores,
    half,
    m,
    n,
    rows,
    PARTS: gl.constexpr,
    layout: gl.constexpr,
    HAS_PADDING: gl.constexpr,
):
    """Half of a tile's rows, chunk by chunk."""
    row_scores_R, dscore_parts_NR, num_rows = scores
    CHUNKS: gl.constexpr = HALF_M // _ROWS
    for chunk in range(CHUNKS):
        row_in_tile_r = half * HALF_M + chunk * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
        row_r = m * BLOCK_M + row_in_tile_r
        is_row_r = row_in_tile_r < rows
        # Another SM wrote them during this kernel: not through this SM's own cache.
        score_r = gl.load(row_scores_R + row_r, mask=is_row_r, other=0.0, cache_modifier=".cg")
        dscore_r = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
        for part in gl.static_range(PARTS):
            gate_buf = chunks.index(((half * PARTS + part) * 2 + _GATE) * CHUNKS + chunk)
            up_buf = chunks.index(((half * PARTS + part) * 2 + _UP) * CHUNKS + chunk)
            g_buf = g_chunks.index((half * PARTS + part) * CHUNKS + chunk)
            dscore_r += _replace(g_buf, gate_buf, up_buf, score_r, is_row_r, layout, HAS_PADDING)
        gl.store(dscore_parts_NR + n.to(gl.int64) * num_rows + row_r, dscore_r, mask=is_row_r)


@gluon.jit
def _quantize_half(quantized, g_bufs, chunks, half, m, n, rows, num_rows, layout: gl.constexpr):
    """Write dgate and dup of half a tile in FP8, from the bf16 in their buffers and through that of scaled_h."""
    dgate_fp8_desc, dup_fp8_desc, dgate_scales_bR, dup_scales_bR = quantized
    CHUNKS: gl.constexpr = HALF_M // _ROWS
    # scaled_h's [2, HALF_M, PART_N] in bf16 are as many bytes as [2, HALF_M, BLOCK] in FP8.
    fp8_bufs = g_bufs._reinterpret(gl.float8e4nv, [g_bufs.shape[0], HALF_M, BLOCK], dgate_fp8_desc.layout)
    fp8_chunks = g_bufs._reinterpret(gl.float8e4nv, [g_bufs.shape[0] * CHUNKS, _ROWS, BLOCK], dgate_fp8_desc.layout)
    for chunk in range(CHUNKS):
        for what in gl.static_range(2):
            first = chunks.index((half * 2 * 2 + what) * CHUNKS + chunk).load(layout).to(gl.float32)
            second = chunks.index(((half * 2 + 1) * 2 + what) * CHUNKS + chunk).load(layout).to(gl.float32)
            whole = gl.join(first, second).permute([0, 2, 1]).reshape([_ROWS, BLOCK])
            values, scale_r = quantize_block(whole)
            fp8_chunks.index((half * 2 + what) * CHUNKS + chunk).store(values)
            row_in_tile_r = half * HALF_M + chunk * _ROWS + gl.arange(0, _ROWS, layout=scale_r.type.layout)
            to_r = (dgate_scales_bR if what == 0 else dup_scales_bR) + n.to(gl.int64) * num_rows
            gl.store(to_r + m * BLOCK_M + row_in_tile_r, scale_r, mask=row_in_tile_r < rows)
    fence_async_shared()
    thread_barrier()
    at = [m * BLOCK_M + half * HALF_M, n * BLOCK]
    async_store(dgate_fp8_desc, at, fp8_bufs.index(half * 2))
    async_store(dup_fp8_desc, at, fp8_bufs.index(half * 2 + 1))


@gluon.jit
def _replace(g_buf, gate_buf, up_buf, score_r, is_row_r, layout: gl.constexpr, HAS_PADDING: gl.constexpr):
    """Put scaled_h, dgate and dup where g, gate and up are. Returns their part of the score gradient."""
    gate = gate_buf.load(layout).to(gl.float32)
    up = up_buf.load(layout).to(gl.float32)
    g = g_buf.load(layout).to(gl.float32)
    sigma = sigmoid(gate)
    silu = gate * sigma
    a = silu * up
    dscore_r = gl.sum(g * a, axis=1)
    score = score_r[:, None]
    g *= score
    scaled_h = score * a
    dup = g * silu
    dgate = g * up * (sigma + silu * (1.0 - sigma))
    if HAS_PADDING:
        # It is written as zeros (the weight gradients read it), whatever its g, gate and up are.
        is_row = is_row_r[:, None]
        scaled_h = gl.where(is_row, scaled_h, 0.0)
        dup = gl.where(is_row, dup, 0.0)
        dgate = gl.where(is_row, dgate, 0.0)
    g_buf.store(scaled_h.to(gl.bfloat16))
    gate_buf.store(dgate.to(gl.bfloat16))
    up_buf.store(dup.to(gl.bfloat16))
    return dscore_r
