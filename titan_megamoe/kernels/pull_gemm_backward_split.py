"""``pull_gemm_backward``, in bf16 and FP8, with a warpgroup of its own for what follows the product.

In ``pull_gemm_backward.py`` a consumer multiplies, then goes back through SwiGLU, and the tensor cores wait: at D = 2048 about half
of the time. Here the consumers only multiply. They leave g in shared memory, in bf16, and start with the next tile, while a
third warpgroup turns it into dgate, dup and scaled_h, which replace gate, up and g in their buffers and leave from there.

That warpgroup has 16 rows in registers at a time, few of them, and a thread has 8 columns side by side: it reads and writes shared
memory 16 bytes at a time. (Two of them would be too many threads: a product of 128 columns needs 90 registers in all of them.)

g is rounded to bf16 on the way, one rounding more than there, before results that are bf16 themselves. In FP8, dgate and dup are
quantised from the bf16 that is written, in a second go over them, and leave through the buffer that scaled_h has left.

Written for the next measurement: the kernels compile, but have not been run. A tuning of ``tune_pull_gemm_backward_split`` (or its
FP8 relative) selects them in ``pull_gemm_backward`` and ``pull_gemm_backward_fp8``; no default does.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import plan_tables
from .common import (
    async_load,
    async_store,
    BLOCK_K,
    BLOCK_M,
    fence_async_global,
    finish_tile,
    HALF_M,
    idle,
    make_pipeline,
    receive_tile,
    skip_steps,
    thread_barrier,
    unpack_tile,
)
from .gemm_push_fp8 import load_blocks, multiply_blocks
from .pull import pull_rows, schedule_arrived_tiles
from .pull_gemm_backward import load_operands, part_of, PART_N
from .pull_gemm_fp8 import BLOCK, quantize_block
from .tuning import PullGemmTuning

ROWS = gl.constexpr(16)
"""Rows that a warpgroup of the epilogue has in registers at a time."""


def split_constants(
    tuning: PullGemmTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int, is_fp8: bool
) -> dict[str, int]:
    """What the kernels are compiled for."""
    epilogue, comm, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        **({} if is_fp8 else {"BLOCK_N": tuning.block_n}),
        "STAGES": tuning.stages,
        "COMM_WARPS": tuning.comm_warps,
        "TOKENS": tuning.tokens,
        "COLUMNS": tuning.columns,
        "CONSUMER_REGS": tuning.consumer_registers,
        "EPILOGUE_REGS": epilogue,
        "COMM_REGS": comm,
        "OTHER_REGS": other,
    }


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM_BACKWARD)
_GATE, _UP = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def _activations_buffer(bufs, HALF: gl.constexpr, part, WHAT: gl.constexpr, PARTS: gl.constexpr):
    """The ``[HALF_M, PART_N]`` buffer of gate or up, and later of its gradient."""
    return bufs.index((HALF * PARTS + part) * 2 + WHAT)


@gluon.jit
def _load_activations(activations, tiles, BLOCK_N: gl.constexpr):
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
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Consumer: g of 64 rows x BLOCK_N columns, tile after tile."""
    operands, products, stages, tiles = consumer
    dout_bufs, w2_bufs = operands
    g_bufs, g_full, g_empty = products
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = DIM // BLOCK_K
    PARTS: gl.constexpr = BLOCK_N // PART_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    part_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 16]
    )
    step = 0
    count = 0
    num_done = 0  # tiles that had rows in this half
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            g = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            for k in range(NUM_STEPS):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                dout = dout_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
                g = warpgroup_mma(dout, w2_bufs.index(stage), g, is_async=True)
                # One product stays in flight. That of the step before is done, so its stage can be loaded again.
                g = warpgroup_mma_wait(1, deps=(g,))
                if k > 0:
                    mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
                step += 1
            g = warpgroup_mma_wait(0, deps=(g,))
            mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
            finish_tile(ring_empty, count)
            mbarrier.wait(g_empty.index(HALF), (num_done & 1) ^ 1)
            for part in gl.static_range(PARTS):
                g_bufs.index(HALF * PARTS + part).store(part_of(g, part, BLOCK_N, part_layout).to(gl.bfloat16))
            mbarrier.arrive(g_full.index(HALF), count=1)
            num_done += 1
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _go_back_through_swiglu(
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
    row_scores_R, dscore_parts_NR, num_rows = scores
    ring, ring_full, ring_empty = tiles
    PARTS: gl.constexpr = BLOCK_N // PART_N
    CHUNKS: gl.constexpr = HALF_M // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # The same memory, ROWS rows at a time: swizzling repeats every 8 rows.
    chunks = bufs._reinterpret(gl.bfloat16, [bufs.shape[0] * CHUNKS, ROWS, PART_N], bufs.layout)
    g_chunks = g_bufs._reinterpret(gl.bfloat16, [g_bufs.shape[0] * CHUNKS, ROWS, PART_N], g_bufs.layout)
    row_in_chunk_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
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
                for chunk in range(CHUNKS):
                    row_in_tile_r = half * HALF_M + chunk * ROWS + row_in_chunk_r
                    row_r = m * BLOCK_M + row_in_tile_r
                    is_row_r = row_in_tile_r < rows
                    # Another SM wrote them during this kernel: not through this SM's own cache.
                    score_r = gl.load(row_scores_R + row_r, mask=is_row_r, other=0.0, cache_modifier=".cg")
                    dscore_r = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
                    for part in gl.static_range(PARTS):
                        gate_buf = chunks.index(((half * PARTS + part) * 2 + _GATE) * CHUNKS + chunk)
                        up_buf = chunks.index(((half * PARTS + part) * 2 + _UP) * CHUNKS + chunk)
                        g_buf = g_chunks.index((half * PARTS + part) * CHUNKS + chunk)
                        dscore_r += _replace(g_buf, gate_buf, up_buf, score_r, is_row_r, layout)
                    gl.store(dscore_parts_NR + n.to(gl.int64) * num_rows + row_r, dscore_r, mask=is_row_r)
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
def _quantize_half(quantized, g_bufs, chunks, half, m, n, rows, num_rows, layout: gl.constexpr):
    """Write dgate and dup of half a tile in FP8, from the bf16 in their buffers and through that of scaled_h."""
    dgate_fp8_desc, dup_fp8_desc, dgate_scales_bR, dup_scales_bR = quantized
    CHUNKS: gl.constexpr = HALF_M // ROWS
    # scaled_h's [2, HALF_M, PART_N] in bf16 are as many bytes as [2, HALF_M, BLOCK] in FP8.
    fp8_bufs = g_bufs._reinterpret(gl.float8e4nv, [g_bufs.shape[0], HALF_M, BLOCK], dgate_fp8_desc.layout)
    fp8_chunks = g_bufs._reinterpret(gl.float8e4nv, [g_bufs.shape[0] * CHUNKS, ROWS, BLOCK], dgate_fp8_desc.layout)
    for chunk in range(CHUNKS):
        for what in gl.static_range(2):
            first = chunks.index((half * 2 * 2 + what) * CHUNKS + chunk).load(layout).to(gl.float32)
            second = chunks.index(((half * 2 + 1) * 2 + what) * CHUNKS + chunk).load(layout).to(gl.float32)
            whole = gl.join(first, second).permute([0, 2, 1]).reshape([ROWS, BLOCK])
            values, scale_r = quantize_block(whole)
            fp8_chunks.index((half * 2 + what) * CHUNKS + chunk).store(values)
            row_in_tile_r = half * HALF_M + chunk * ROWS + gl.arange(0, ROWS, layout=scale_r.type.layout)
            to_r = (dgate_scales_bR if what == 0 else dup_scales_bR) + n.to(gl.int64) * num_rows
            gl.store(to_r + m * BLOCK_M + row_in_tile_r, scale_r, mask=row_in_tile_r < rows)
    fence_async_shared()
    thread_barrier()
    at = [m * BLOCK_M + half * HALF_M, n * BLOCK]
    async_store(dgate_fp8_desc, at, fp8_bufs.index(half * 2))
    async_store(dup_fp8_desc, at, fp8_bufs.index(half * 2 + 1))


@gluon.jit
def _replace(g_buf, gate_buf, up_buf, score_r, is_row_r, layout: gl.constexpr):
    """Put scaled_h, dgate and dup where g, gate and up are. Returns their part of the score gradient."""
    gate = gate_buf.load(layout).to(gl.float32)
    up = up_buf.load(layout).to(gl.float32)
    g = g_buf.load(layout).to(gl.float32)
    sigmoid = 1.0 / (1.0 + gl.exp(-gate))
    silu = gate * sigmoid
    dscore_r = gl.sum(g * silu * up, axis=1)
    # Padding is written as zeros (the weight gradients read it), whatever its g, gate and up are.
    is_row = is_row_r[:, None]
    score = score_r[:, None]
    g *= score
    dgate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    g_buf.store(gl.where(is_row, score * silu * up, 0.0).to(gl.bfloat16))
    gate_buf.store(gl.where(is_row, dgate, 0.0).to(gl.bfloat16))
    up_buf.store(gl.where(is_row, g * silu, 0.0).to(gl.bfloat16))
    return dscore_r


@gluon.jit(do_not_specialize=["num_rows", "rank", "deadline_us"])
def pull_gemm_backward_split_kernel(
    dout_desc,
    half_dout_desc,
    w2_desc,
    gate_desc,
    up_desc,
    dgate_desc,
    dup_desc,
    scaled_h_desc,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    dout_addresses_P,
    dout_RD,
    row_scores_R,
    dscore_parts_NR,
    num_rows,
    arrival_M,
    queue,
    fault,
    rank,
    deadline_us,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    COMM_WARPS: gl.constexpr,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    EPILOGUE_REGS: gl.constexpr,
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
):
    TILES_N: gl.constexpr = HIDDEN // BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // PART_N
    dout_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], dout_desc.layout)
    w2_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], w2_desc.layout)
    bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS * 2, HALF_M, PART_N], gate_desc.layout)
    g_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, HALF_M, PART_N], gate_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 5)  # both consumers, the epilogue, and the two warps that load
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=1)

    operands = (dout_bufs, w2_bufs)
    descs = (dout_desc, half_dout_desc, w2_desc)
    products = (g_bufs, g_full, g_empty)
    activations = (gate_desc, up_desc, bufs, full, empty)
    outputs = (dgate_desc, dup_desc, scaled_h_desc, bufs, full, empty)
    scores = (row_scores_R, dscore_parts_NR, num_rows)
    tables = (pull_source_U, pull_rows_UK, pull_scores_UK)
    pulled = (sizes, tile_rows_M, tables, dout_addresses_P, dout_RD, row_scores_R, (), arrival_M, queue)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue)
    faults = (fault, rank, deadline_us)
    consumer = (operands, products, stages, tiles)
    # Registers are granted per warpgroup, in this order: the producer's has a warp that does nothing.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, DIM, STAGES, BLOCK_N)),
            (_multiply, (1, consumer, DIM, STAGES, BLOCK_N)),
            (_go_back_through_swiglu, (products, outputs, (), scores, tiles, BLOCK_N, False)),
            (load_operands, (descs, operands, stages, tiles, DIM, STAGES, BLOCK_N)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (_load_activations, (activations, tiles, BLOCK_N)),
            (idle, ()),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
        ],
        [4, 4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, EPILOGUE_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )


# ---- in FP8


@gluon.jit
def _load_fp8(descs, operands, stages, tiles, DIM: gl.constexpr, HIDDEN: gl.constexpr, STAGES: gl.constexpr):
    """Producer: load the operands and the rows' scales of each tile."""
    ring, ring_full, ring_empty = tiles
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        fence_async_global()  # the scheduler saw the rows arrive; now the copy engine may read them
        weight_row = expert * HIDDEN + n * BLOCK
        step = load_blocks(descs, operands, stages, m * BLOCK_M, rows, weight_row, step, DIM // BLOCK, STAGES)
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply_fp8(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    w2_scales_Ebb,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer: g of 64 rows x 128 columns, tile after tile."""
    operands, products, stages, tiles = consumer
    g_bufs, g_full, g_empty = products
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = DIM // BLOCK
    TILES_N: gl.constexpr = HIDDEN // BLOCK
    PARTS: gl.constexpr = BLOCK // PART_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 32]
    )
    step = 0
    count = 0
    num_done = 0  # tiles that had rows in this half
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            g = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
            # The weights are transposed, but not their scales.
            w2_scales = w2_scales_Ebb + (expert * (NUM_STEPS * TILES_N) + n)
            w2_scale = gl.load(w2_scales)
            g, step = multiply_blocks(HALF, g, w2_scales, w2_scale, TILES_N, operands, stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
            mbarrier.wait(g_empty.index(HALF), (num_done & 1) ^ 1)
            for part in gl.static_range(PARTS):
                g_bufs.index(HALF * PARTS + part).store(part_of(g, part, BLOCK, part_layout).to(gl.bfloat16))
            mbarrier.arrive(g_full.index(HALF), count=1)
            num_done += 1
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit(do_not_specialize=["num_rows", "rank", "deadline_us"])
def pull_gemm_backward_split_fp8_kernel(
    dout_desc,
    half_dout_desc,
    scales_desc,
    w2t_desc,
    gate_desc,
    up_desc,
    dgate_desc,
    dup_desc,
    scaled_h_desc,
    dgate_fp8_desc,
    dup_fp8_desc,
    w2_scales_Ebb,
    dgate_scales_bR,
    dup_scales_bR,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    dout_addresses_P,
    dout_scales_addresses_P,
    dout_RD,
    dout_scales_bR,
    row_scores_R,
    dscore_parts_NR,
    num_rows,
    arrival_M,
    queue,
    fault,
    rank,
    deadline_us,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    COMM_WARPS: gl.constexpr,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    EPILOGUE_REGS: gl.constexpr,
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
):
    TILES_N: gl.constexpr = HIDDEN // BLOCK
    NUM_SCALES: gl.constexpr = DIM // BLOCK
    PARTS: gl.constexpr = BLOCK // PART_N
    dout_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], dout_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scales_desc.layout)
    w2t_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w2t_desc.layout)
    bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS * 2, HALF_M, PART_N], gate_desc.layout)
    g_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, HALF_M, PART_N], gate_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 5)  # both consumers, the epilogue, and the two warps that load
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=1)

    operands = (dout_bufs, scales_bufs, w2t_bufs)
    descs = (dout_desc, half_dout_desc, scales_desc, w2t_desc)
    products = (g_bufs, g_full, g_empty)
    activations = (gate_desc, up_desc, bufs, full, empty)
    outputs = (dgate_desc, dup_desc, scaled_h_desc, bufs, full, empty)
    quantized = (dgate_fp8_desc, dup_fp8_desc, dgate_scales_bR, dup_scales_bR)
    scores = (row_scores_R, dscore_parts_NR, num_rows)
    tables = (pull_source_U, pull_rows_UK, pull_scores_UK)
    scales = (dout_scales_addresses_P, dout_scales_bR, num_rows)
    # Rows are copied as so many bytes in bf16.
    pulled = (sizes, tile_rows_M, tables, dout_addresses_P, dout_RD, row_scores_R, scales, arrival_M, queue)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue)
    faults = (fault, rank, deadline_us)
    consumer = (operands, products, stages, tiles)
    # Registers are granted per warpgroup, in this order: the producer's has a warp that does nothing.
    gl.warp_specialize(
        [
            (_multiply_fp8, (0, consumer, w2_scales_Ebb, DIM, HIDDEN, STAGES)),
            (_multiply_fp8, (1, consumer, w2_scales_Ebb, DIM, HIDDEN, STAGES)),
            (_go_back_through_swiglu, (products, outputs, quantized, scores, tiles, BLOCK, True)),
            (_load_fp8, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (_load_activations, (activations, tiles, BLOCK)),
            (idle, ()),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
        ],
        [4, 4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, EPILOGUE_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
