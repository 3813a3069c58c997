"""``gemm_push_fp8``: ``gemm_push`` on h and W2 in blockwise FP8.

    y[r] = h[r] W2[expert]^T                                        for every row r of the pool, rounded to bf16
    slots[my rank, token] (at the owner) = sum over the token's local routes, in route order, of score * y[row]

The main loop is that of ``pull_gemm_fp8``: steps of 128, each product added with the scales of the row's block and the
weights'. A tile is 128 columns: with 256, the accumulators leave too few registers to the communication warps. What
happens to y is as in ``gemm_push``: results travel in bf16.

Shape suffixes are those of ``plan_tables.py``; here also b blocks of 128.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import quantize
from .common import (
    async_load,
    BLOCK_M,
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    finish_tile,
    grid_size,
    HALF_M,
    idle,
    load_tile_rows,
    make_pipeline,
    receive_tile,
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .plan_tables import Counters, KernelPlan
from .pull_gemm_fp8 import BLOCK, check_blocks, fp8_descriptor, scales_layout
from .send import await_turn, schedule_passes, send_tokens, send_tokens_if, store_tiles
from .tuning import GemmPushTuning, tune_gemm_push_fp8


def gemm_push_fp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    h_RF: torch.Tensor,  # noqa: N803
    h_scales_bR: torch.Tensor,  # noqa: N803
    w2_EDF: torch.Tensor,  # noqa: N803
    w2_scales_Ebb: torch.Tensor,  # noqa: N803
    y_RD: torch.Tensor,  # noqa: N803
    out_TD: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: GemmPushTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Args:
        plan, counters: as of ``gemm_push``.
        h_RF, h_scales_bR: e4m3 ``[R, F]`` and fp32 ``[F / 128, R]``, as ``pull_gemm_fp8`` writes them.
        w2_EDF: e4m3 ``[e, D, F]``, this rank's experts. D and F are multiples of 128.
        w2_scales_Ebb: fp32 ``[e, D / 128, F / 128]``.
        y_RD, out_TD, slots_addresses_P, max_tokens, fault, rank, num_sms, deadline_seconds, tuning: as of ``gemm_push``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "gemm_push_fp8"
    num_rows, hidden_dim = h_RF.shape
    num_experts, dim, _ = w2_EDF.shape
    top_k = plan.pull_rows_UK.shape[1]
    alone = slots_addresses_P is None
    if (out_TD is None) == alone:
        raise ValueError(f"{name}: pass out_TD (with one rank) or slots_addresses_P (with several).")
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k)
    check_blocks(name, dim, hidden_dim)
    blocks_d, blocks_f = dim // BLOCK.value, hidden_dim // BLOCK.value
    check_tensor(name, "h_RF", h_RF, (num_rows, hidden_dim), quantize.FP8)
    check_tensor(name, "h_scales_bR", h_scales_bR, (blocks_f, num_rows), torch.float32)
    check_tensor(name, "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), quantize.FP8)
    check_tensor(name, "w2_scales_Ebb", w2_scales_Ebb, (num_experts, blocks_d, blocks_f), torch.float32)
    check_tensor(name, "y_RD", y_RD, (num_rows, dim), torch.bfloat16)
    if alone:
        check_tensor(name, "out_TD", out_TD, (out_TD.shape[0], dim), torch.bfloat16)
    if num_rows == 0:
        return

    ep_size = 1 if alone else slots_addresses_P.numel()
    tuning = tuning or tune_gemm_push_fp8(dim, hidden_dim, top_k=top_k, ep_size=ep_size)
    gemm_push_fp8_kernel[(grid_size(name, num_sms, y_RD.device),)](
        fp8_descriptor(h_RF, BLOCK_M.value),
        fp8_descriptor(h_RF, HALF_M.value),
        TensorDescriptor.from_tensor(h_scales_bR, [1, BLOCK_M.value], scales_layout()),
        fp8_descriptor(w2_EDF.view(-1, hidden_dim), BLOCK.value),
        tile_descriptor(y_RD, HALF_M.value, BLOCK.value),
        w2_scales_Ebb,
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.send_order_U,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        y_RD,
        counters.done_M,
        out_TD if alone else y_RD,
        counters.queue if alone else slots_addresses_P,
        max_tokens,
        counters.queue,
        fault,
        rank,
        deadline_in_us(name, deadline_seconds),
        **gemm_push_fp8_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size),
        num_warps=4,
    )


def gemm_push_fp8_constants(
    tuning: GemmPushTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int
) -> dict[str, int]:
    """What the kernel is compiled for."""
    consumer, comm, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "STAGES": tuning.stages,
        "FIRST_TILES": dim // tuning.block_n - tuning.last_tiles,
        "COMM_WARPS": tuning.comm_warps,
        "WARP_TOKENS": tuning.tokens,
        "ROUTES": tuning.routes,
        "COLUMNS": tuning.columns,
        "CONSUMER_REGS": consumer,
        "COMM_REGS": comm,
        "OTHER_REGS": other,
    }


# ---- the kernel


@gluon.jit
def _load(descs, operands, stages, tiles, DIM: gl.constexpr, HIDDEN: gl.constexpr, STAGES: gl.constexpr):
    """Producer: load the operands and the rows' scales of each tile, up to STAGES steps ahead of the consumers."""
    h_desc, half_h_desc, scales_desc, w2_desc = descs
    h_bufs, scales_bufs, w2_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    OTHER_BYTES: gl.constexpr = w2_desc.block_type.nbytes + scales_desc.block_type.nbytes
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        row = m * BLOCK_M
        for k in range(HIDDEN // BLOCK):
            stage = step % STAGES
            mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = stage_full.index(stage)
            h_buf = h_bufs.index(stage)
            load_tile_rows(h_desc, half_h_desc, [row, k * BLOCK], rows, full, h_buf, OTHER_BYTES)
            async_load(scales_desc, [k, row], full, scales_bufs.index(stage))
            async_load(w2_desc, [expert * DIM + n * BLOCK, k * BLOCK], full, w2_bufs.index(stage))
            step += 1
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    w2_scales_Ebb,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer: 64 rows x 128 columns of y, tile after tile, in turns as in ``gemm_push``."""
    operands, y_buf, turns, y_full, stages, tiles = consumer
    h_bufs, scales_bufs, w2_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = HIDDEN // BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    layout_r: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            y = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
            scales = w2_scales_Ebb + (expert * (DIM // BLOCK) + n) * NUM_STEPS
            w2_scale = gl.load(scales)
            for k in range(NUM_STEPS):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                h = h_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
                part = warpgroup_mma(h, w2_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                h_scale_r = scales_bufs.index(stage).reshape([BLOCK_M]).slice(HALF * HALF_M, HALF_M).load(layout_r)
                # The next step's scale of the weights is on its way while this one is multiplied.
                next_w2_scale = gl.load(scales + gl.minimum(k + 1, NUM_STEPS - 1))
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(stage_empty.index(stage), count=1)
                y += part * (h_scale_r * w2_scale)[:, None]
                w2_scale = next_w2_scale
                step += 1
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
            y_buf.store(y.to(gl.bfloat16))
            fence_async_shared()
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
        mbarrier.arrive(y_full.index(HALF), count=1)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply_and_send(
    HALF: gl.constexpr,
    consumer,
    w2_scales_Ebb,
    sent,
    STAGES: gl.constexpr,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    TILES_N: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Consumer; once there are no more tiles, a communication warp in each of its four."""
    _multiply(HALF, consumer, w2_scales_Ebb, DIM, HIDDEN, STAGES)
    send_tokens(sent, DIM, TOP_K, EP_SIZE, TILES_N, FIRST_TILES, WARP_TOKENS, ROUTES, COLUMNS, False)


@gluon.jit(do_not_specialize=["max_tokens", "rank", "deadline_us"])
def gemm_push_fp8_kernel(
    h_desc,
    half_h_desc,
    scales_desc,
    w2_desc,
    y_desc,
    w2_scales_Ebb,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    send_order_U,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    y_RD,
    done_M,
    out_TD,
    slots_addresses_P,
    max_tokens,
    queue,
    fault,
    rank,
    deadline_us,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    COMM_WARPS: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
):
    TILES_N: gl.constexpr = DIM // BLOCK
    h_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], h_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scales_desc.layout)
    w2_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w2_desc.layout)
    y_buf = gl.allocate_shared_memory(gl.bfloat16, [HALF_M, BLOCK], y_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 4)  # both consumers, the producer and the store warp
    y_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(y_full.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)

    descs = (h_desc, half_h_desc, scales_desc, w2_desc)
    operands = (h_bufs, scales_bufs, w2_bufs)
    consumer = (operands, y_buf, turns, y_full, stages, tiles)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M)
    stored = (y_desc, y_buf, turns, y_full, done_M)
    tables = (send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK)
    destinations = (out_TD, slots_addresses_P, max_tokens)
    faults = (fault, rank, deadline_us)
    sent = (sizes, tables, y_RD, done_M, destinations, (), queue, faults)
    # Registers are granted per warpgroup, in this order: the producer's has a warp that does nothing.
    gl.warp_specialize(
        [
            (
                _multiply_and_send,
                (
                    0,
                    consumer,
                    w2_scales_Ebb,
                    sent,
                    STAGES,
                    DIM,
                    HIDDEN,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                ),
            ),
            (
                _multiply_and_send,
                (
                    1,
                    consumer,
                    w2_scales_Ebb,
                    sent,
                    STAGES,
                    DIM,
                    HIDDEN,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                ),
            ),
            (_load, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES)),
            (schedule_passes, (planned, queue, tiles, EP_SIZE, TILES_N, FIRST_TILES)),
            (store_tiles, (stored, tiles, BLOCK, FIRST_TILES)),
            (idle, ()),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 0,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    False,
                    0,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 1,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    False,
                    0,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 2,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    False,
                    0,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 3,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    False,
                    0,
                ),
            ),
        ],
        [4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
