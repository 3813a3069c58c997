"""``pull_gemm_fp8``: ``pull_gemm`` on rows and weights in blockwise FP8.

    h[r] = silu(x[r] W1[expert]^T) * (x[r] W3[expert]^T)        for every row r of the pool, quantised per 128 columns

Rows cross the link in FP8, with a scale for each 128 columns; weights have a scale for each 128 x 128 block. So each step
of the main loop is 128 deep: its product is made in accumulators of its own, and added to gate or up times the scale of
the row's block and that of the weights'. (That also keeps sums exact: the tensor cores add FP8 products with fewer bits
than fp32 has.) A tile is 128 columns of gate and of up, so its h is one block of each row, and is quantised from registers.

Roles and a token's way are those of ``pull_gemm``. The scales of a tile's rows come with them, by the copy engine.

Shape suffixes are those of ``plan_tables.py``; here also b blocks of 128 columns.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import quantize
from . import plan_tables
from .common import (
    async_load,
    async_store,
    BLOCK_M,
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    fence_async_global,
    finish_tile,
    grid_size,
    HALF_M,
    load_tile_rows,
    make_pipeline,
    receive_tile,
    sigmoid,
    thread_barrier,
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .plan_tables import Counters, KernelPlan
from .pull import pull_constants, pull_rows, schedule_arrived_tiles
from .tuning import PullGemmTuning, tune_pull_gemm_fp8

BLOCK = gl.constexpr(quantize.BLOCK)
"""Depth of a step of the main loop, columns of a tile, and elements that share a scale."""

HALF_N = gl.constexpr(quantize.BLOCK // 2)
"""Columns of gate and of up that are written at a time."""

_FP8_MAX = gl.constexpr(quantize.FP8_MAX)
_MIN_AMAX = gl.constexpr(quantize.MIN_AMAX)
_PROPAGATE = gl.constexpr(tl.PropagateNan.ALL)


def pull_gemm_fp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_addresses_P: torch.Tensor,  # noqa: N803
    x_scales_addresses_P: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w1_scales_Ebb: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    w3_scales_Ebb: torch.Tensor,  # noqa: N803
    pool_RD: torch.Tensor,  # noqa: N803
    pool_scales_bR: torch.Tensor,  # noqa: N803
    h_RF: torch.Tensor,  # noqa: N803
    h_scales_bR: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor | None = None,  # noqa: N803
    up_RF: torch.Tensor | None = None,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PullGemmTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Args:
        plan, counters: as of ``pull_gemm``.
        x_addresses_P, x_scales_addresses_P: int64 ``[P]``, addresses of each rank's ``x``, e4m3 ``[tokens, D]``, and of its
            scales, fp32 ``[tokens, D / 128]``; 16-byte aligned.
        w1_EFD, w3_EFD: e4m3 ``[e, F, D]``, this rank's experts. D and F are multiples of 128.
        w1_scales_Ebb, w3_scales_Ebb: fp32 ``[e, F / 128, D / 128]``.
        pool_RD, pool_scales_bR: e4m3 ``[R, D]`` and fp32 ``[D / 128, R]``, written: x of each row. Padding is as of ``pull_gemm``.
        h_RF, h_scales_bR: e4m3 ``[R, F]`` and fp32 ``[F / 128, R]``, written. Padding rows may be written, with anything.
        gate_RF, up_RF: bf16 ``[R, F]``, both or neither: for backward.
        fault, rank, num_sms, deadline_seconds, tuning: as of ``pull_gemm``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "pull_gemm_fp8"
    num_rows, dim = pool_RD.shape
    num_experts, hidden_dim, _ = w1_EFD.shape
    top_k = plan.pull_rows_UK.shape[1]
    tuning = tuning or tune_pull_gemm_fp8(dim)
    saves = gate_RF is not None
    if saves != (up_RF is not None):
        raise ValueError(f"{name}: pass both gate_RF and up_RF, or neither.")
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k)
    check_blocks(name, dim, hidden_dim)
    blocks_d, blocks_f = dim // BLOCK.value, hidden_dim // BLOCK.value
    check_tensor(name, "pool_RD", pool_RD, (num_rows, dim), quantize.FP8)
    check_tensor(name, "pool_scales_bR", pool_scales_bR, (blocks_d, num_rows), torch.float32)
    check_tensor(name, "h_RF", h_RF, (num_rows, hidden_dim), quantize.FP8)
    check_tensor(name, "h_scales_bR", h_scales_bR, (blocks_f, num_rows), torch.float32)
    for weight_name, weight, scales in (("w1", w1_EFD, w1_scales_Ebb), ("w3", w3_EFD, w3_scales_Ebb)):
        check_tensor(name, f"{weight_name}_EFD", weight, (num_experts, hidden_dim, dim), quantize.FP8)
        check_tensor(name, f"{weight_name}_scales_Ebb", scales, (num_experts, blocks_f, blocks_d), torch.float32)
    for rows_name, rows in (("gate_RF", gate_RF), ("up_RF", up_RF)):
        if rows is not None:
            check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    if num_rows == 0:
        return

    unused_desc = tile_descriptor(pool_RD.view(torch.bfloat16), HALF_M.value, HALF_N.value)
    pull_gemm_fp8_kernel[(grid_size(name, num_sms, pool_RD.device),)](
        fp8_descriptor(pool_RD, BLOCK_M.value),
        fp8_descriptor(pool_RD, HALF_M.value),
        TensorDescriptor.from_tensor(pool_scales_bR, [1, BLOCK_M.value], scales_layout()),
        fp8_descriptor(w1_EFD.view(-1, dim), BLOCK.value),
        fp8_descriptor(w3_EFD.view(-1, dim), BLOCK.value),
        fp8_descriptor(h_RF, HALF_M.value),
        tile_descriptor(gate_RF, HALF_M.value, HALF_N.value) if saves else unused_desc,
        tile_descriptor(up_RF, HALF_M.value, HALF_N.value) if saves else unused_desc,
        w1_scales_Ebb,
        w3_scales_Ebb,
        h_scales_bR,
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        x_addresses_P,
        x_scales_addresses_P,
        pool_RD.view(torch.bfloat16),
        pool_scales_bR,
        num_rows,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_in_us(name, deadline_seconds),
        **pull_gemm_fp8_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=x_addresses_P.numel(),
            saves_gate_up=saves,
        ),
        num_warps=4,
    )


def check_blocks(name: str, dim: int, hidden_dim: int) -> None:
    for size_name, size in (("D", dim), ("F", hidden_dim)):
        if size % BLOCK.value:
            raise ValueError(
                f"{name}: {size_name} = {size} is not a multiple of {BLOCK.value}. Use bf16, or pad the model's."
            )


def fp8_descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """How the copy engine reads or writes tiles of BLOCK columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, BLOCK.value], fp8_layout(rows))


@functools.cache
def fp8_layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK.value], gl.float8e4nv)


@functools.cache
def scales_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(0, 32, 2)


def pull_gemm_fp8_constants(tuning: PullGemmTuning, *, saves_gate_up: bool, **sizes: int) -> dict[str, int | bool]:
    """What the kernel is compiled for. ``sizes``: as of ``pull_constants``."""
    return {**pull_constants(tuning, **sizes), "SAVE_GATE_UP": saves_gate_up}


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM)


@gluon.jit
def _load(descs, operands, stages, tiles, DIM: gl.constexpr, HIDDEN: gl.constexpr, STAGES: gl.constexpr):
    """Producer: load the operands and the rows' scales of each tile, up to STAGES steps ahead of the consumers."""
    pool_desc, half_pool_desc, scales_desc, w1_desc, w3_desc = descs
    pool_bufs, scales_bufs, w1_bufs, w3_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    OTHER_BYTES: gl.constexpr = w1_desc.block_type.nbytes + w3_desc.block_type.nbytes + scales_desc.block_type.nbytes
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        row = m * BLOCK_M
        weight_row = expert * HIDDEN + n * BLOCK
        fence_async_global()  # the scheduler saw the rows arrive; now the copy engine may read them
        for k in range(DIM // BLOCK):
            stage = step % STAGES
            mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = stage_full.index(stage)
            pool_buf = pool_bufs.index(stage)
            load_tile_rows(pool_desc, half_pool_desc, [row, k * BLOCK], rows, full, pool_buf, OTHER_BYTES)
            async_load(scales_desc, [k, row], full, scales_bufs.index(stage))
            async_load(w1_desc, [weight_row, k * BLOCK], full, w1_bufs.index(stage))
            async_load(w3_desc, [weight_row, k * BLOCK], full, w3_bufs.index(stage))
            step += 1
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_PROPAGATE)


@gluon.jit
def quantize_block(x):
    """``[rows, BLOCK]`` in fp32 as e4m3, and the rows' scales. A row with a NaN or an infinity is all NaN."""
    amax_r = _larger(gl.reduce(gl.abs(x), 1, _larger), _MIN_AMAX)
    largest_r = gl.zeros_like(amax_r) + _FP8_MAX
    # Rounded as the reference's: values often lie in the middle between two of FP8, and `/` is an approximation.
    scaled = x * gl.div_rn(largest_r, amax_r)[:, None]
    # Rounding may leave the largest value just above 448: the conversion saturates, and keeps NaN.
    return scaled.to(gl.float8e4nv), gl.div_rn(amax_r, largest_r)


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    weight_scales,
    h_scales,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    SAVE_GATE_UP: gl.constexpr,
):
    """Consumer: gate, up and h of 64 rows x 128 columns, tile after tile."""
    operands, outputs, stages, tiles = consumer
    pool_bufs, scales_bufs, w1_bufs, w3_bufs = operands
    h_desc, gate_desc, up_desc, h_bufs, out_bufs = outputs
    w1_scales_Ebb, w3_scales_Ebb = weight_scales
    h_scales_bR, num_rows = h_scales
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = DIM // BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    layout_r: gl.constexpr = gl.SliceLayout(1, layout)
    row_in_tile_r = HALF * HALF_M + gl.arange(0, HALF_M, layout=layout_r)
    zeros = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            gate = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
            up = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
            first_scale = (expert * (HIDDEN // BLOCK) + n) * NUM_STEPS
            w1_scale = gl.load(w1_scales_Ebb + first_scale)
            w3_scale = gl.load(w3_scales_Ebb + first_scale)
            for k in range(NUM_STEPS):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                x = pool_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
                part = warpgroup_mma(x, w1_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                x_scale_r = scales_bufs.index(stage).reshape([BLOCK_M]).slice(HALF * HALF_M, HALF_M).load(layout_r)
                # The next step's scales of the weights are on their way while this one is multiplied.
                following = first_scale + gl.minimum(k + 1, NUM_STEPS - 1)
                next_w1_scale = gl.load(w1_scales_Ebb + following)
                next_w3_scale = gl.load(w3_scales_Ebb + following)
                part = warpgroup_mma_wait(0, deps=(part,))
                gate += part * (x_scale_r * w1_scale)[:, None]
                part = warpgroup_mma(x, w3_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(stage_empty.index(stage), count=1)
                up += part * (x_scale_r * w3_scale)[:, None]
                w1_scale = next_w1_scale
                w3_scale = next_w3_scale
                step += 1
            finish_tile(ring_empty, count)

            row = m * BLOCK_M + HALF * HALF_M
            column = n * BLOCK
            h_buf = h_bufs.index(HALF)
            if SAVE_GATE_UP:
                # h's buffer is as large as the other one: while a part leaves one of them, the next is written to the other.
                buffers = (out_bufs.index(HALF), h_buf._reinterpret(gl.bfloat16, [HALF_M, HALF_N], gate_desc.layout))
                _write_in_parts(gate, gate_desc, buffers, row, column)
                _write_in_parts(up, up_desc, buffers, row, column)
            h = gate * sigmoid(gate) * up
            values, scale_r = quantize_block(h)
            _write(values, h_desc, h_buf, row, column, 0)
            to_r = h_scales_bR + n.to(gl.int64) * num_rows + m * BLOCK_M + row_in_tile_r
            gl.store(to_r, scale_r, mask=row_in_tile_r < rows)
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)
    tma.store_wait(0)


@gluon.jit
def _write_in_parts(values, desc, buffers, row, column):
    """Write a tile in bf16, HALF_N columns after the others, through two buffers in turns: there is no room for more."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_N, 16])
    first, second = values.to(gl.bfloat16).reshape([HALF_M, 2, HALF_N]).permute([0, 2, 1]).split()
    _write(gl.convert_layout(first, layout, assert_trivial=True), desc, buffers[0], row, column, 1)
    _write(gl.convert_layout(second, layout, assert_trivial=True), desc, buffers[1], row, column + HALF_N, 1)


@gluon.jit
def _write(values, desc, buffer, row, column, PENDING: gl.constexpr):
    """Start the store of a tile, once all stores before it but PENDING have left their buffers."""
    tma.store_wait(PENDING)
    buffer.store(values)
    fence_async_shared()
    thread_barrier()  # that one thread's store follows all threads' writes is not seen through a buffer's second name
    async_store(desc, [row, column], buffer)


@gluon.jit(do_not_specialize=["num_rows", "rank", "deadline_us"])
def pull_gemm_fp8_kernel(
    pool_desc,
    half_pool_desc,
    scales_desc,
    w1_desc,
    w3_desc,
    h_desc,
    gate_desc,
    up_desc,
    w1_scales_Ebb,
    w3_scales_Ebb,
    h_scales_bR,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    x_addresses_P,
    x_scales_addresses_P,
    pool_RD,
    pool_scales_bR,
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
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
    SAVE_GATE_UP: gl.constexpr,
):
    TILES_N: gl.constexpr = HIDDEN // BLOCK
    NUM_SCALES: gl.constexpr = DIM // BLOCK
    pool_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], pool_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scales_desc.layout)
    w1_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w1_desc.layout)
    w3_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w3_desc.layout)
    h_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2, HALF_M, BLOCK], h_desc.layout)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF_M, HALF_N], gate_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 3)  # both consumers and the producer

    operands = (pool_bufs, scales_bufs, w1_bufs, w3_bufs)
    outputs = (h_desc, gate_desc, up_desc, h_bufs, out_bufs)
    descs = (pool_desc, half_pool_desc, scales_desc, w1_desc, w3_desc)
    tables = (pull_source_U, pull_rows_UK, pull_rows_UK)
    scales = (x_scales_addresses_P, pool_scales_bR, num_rows)
    # Rows are copied as so many bytes in bf16.
    pulled = (sizes, tile_rows_M, tables, x_addresses_P, pool_RD, arrival_M, scales, arrival_M, queue)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue)
    faults = (fault, rank, deadline_us)
    consumer = (operands, outputs, stages, tiles)
    weight_scales = (w1_scales_Ebb, w3_scales_Ebb)
    h_scales = (h_scales_bR, num_rows)
    # Registers are granted per warpgroup, in this order: producer and scheduler share one with two idle warps.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, weight_scales, h_scales, DIM, HIDDEN, STAGES, SAVE_GATE_UP)),
            (_multiply, (1, consumer, weight_scales, h_scales, DIM, HIDDEN, STAGES, SAVE_GATE_UP)),
            (_load, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, False, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, False, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, False, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, False, NUM_SCALES)),
        ],
        [4, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, COMM_REGS, COMM_REGS, COMM_REGS, COMM_REGS],
    )
