"""``gemm_push_fp8``: ``gemm_push`` on h and W2 in blockwise FP8.

    y[r] = h[r] W2[expert]^T                                        for every row r of the pool, rounded to bf16
    slots[my rank, token] (at the owner) = sum over the token's local routes, in route order, of score * y[row]

The main loop is that of ``pull_gemm_fp8``: steps of 128, each product added with the scales of the row's block and the
weights'. A tile is 128 columns: with 256, the accumulators leave too few registers to the communication warps. What
happens to y is as in ``gemm_push``: results travel in bf16.

In backward (``gemm_push_backward_fp8``) the same kernel makes the gradient of x from those of gate and up:

    y[r] = dgate[r] W1[expert] + dup[r] W3[expert]

Tensor cores want both factors in FP8 contiguous along what is contracted: W1 and W3 come transposed, with the scales of the
originals, which are read in the other order.

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
    check_tensor,
    DEFAULT_DEADLINE_SECONDS,
    finish_tile,
    HALF_M,
    idle,
    load_tile_rows,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    skip_steps,
    unpack_tile,
)
from .gemm_push import launch_push, push_constants
from .launch import ScoreGradients
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
    check_blocks(name, dim, hidden_dim)
    blocks_d, blocks_f = dim // BLOCK.value, hidden_dim // BLOCK.value
    check_tensor(name, "h_RF", h_RF, (num_rows, hidden_dim), quantize.FP8)
    check_tensor(name, "h_scales_bR", h_scales_bR, (blocks_f, num_rows), torch.float32)
    check_tensor(name, "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), quantize.FP8)
    check_tensor(name, "w2_scales_Ebb", w2_scales_Ebb, (num_experts, blocks_d, blocks_f), torch.float32)

    def operands(_: int) -> tuple:
        descriptors = product_descriptors(h_RF, h_scales_bR, w2_EDF)
        # Those of the second product are for backward.
        return *descriptors, *descriptors, w2_scales_Ebb, w2_scales_Ebb

    _launch_fp8(
        name,
        operands,
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        y_RD=y_RD,
        out_TD=out_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=None,
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def gemm_push_backward_fp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    dgate_RF: torch.Tensor,  # noqa: N803
    dgate_scales_bR: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    dup_scales_bR: torch.Tensor,  # noqa: N803
    w1t_EDF: torch.Tensor,  # noqa: N803
    w1_scales_Ebb: torch.Tensor,  # noqa: N803
    w3t_EDF: torch.Tensor,  # noqa: N803
    w3_scales_Ebb: torch.Tensor,  # noqa: N803
    dx_RD: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    dx_TD: torch.Tensor | None = None,  # noqa: N803
    dscores_TK: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    score_slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: GemmPushTuning | None = None,
) -> None:
    """Launch the kernel on the current stream, as :func:`gemm_push_fp8`.

    Args:
        plan, counters: as of ``gemm_push_backward``.
        dgate_RF, dup_RF: e4m3 ``[R, F]``, and
        dgate_scales_bR, dup_scales_bR: fp32 ``[F / 128, R]``, as ``pull_gemm_backward_fp8`` writes them.
        w1t_EDF, w3t_EDF: e4m3 ``[e, D, F]``: W1 and W3 of this rank's experts, transposed. D and F are multiples of 128.
        w1_scales_Ebb, w3_scales_Ebb: fp32 ``[e, F / 128, D / 128]``: of W1 and W3 as they are in forward.
        dx_RD, dscore_parts_NR, dx_TD, dscores_TK, slots_addresses_P, score_slots_addresses_P, max_tokens, fault, rank,
            num_sms, deadline_seconds, tuning: as of ``gemm_push_backward``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "gemm_push_backward_fp8"
    num_rows, hidden_dim = dgate_RF.shape
    num_experts, dim, _ = w1t_EDF.shape
    check_blocks(name, dim, hidden_dim)
    blocks_d, blocks_f = dim // BLOCK.value, hidden_dim // BLOCK.value
    for rows_name, rows, scales in (("dgate", dgate_RF, dgate_scales_bR), ("dup", dup_RF, dup_scales_bR)):
        check_tensor(name, f"{rows_name}_RF", rows, (num_rows, hidden_dim), quantize.FP8)
        check_tensor(name, f"{rows_name}_scales_bR", scales, (blocks_f, num_rows), torch.float32)
    for weight_name, weight, scales in (("w1", w1t_EDF, w1_scales_Ebb), ("w3", w3t_EDF, w3_scales_Ebb)):
        check_tensor(name, f"{weight_name}t_EDF", weight, (num_experts, dim, hidden_dim), quantize.FP8)
        check_tensor(name, f"{weight_name}_scales_Ebb", scales, (num_experts, blocks_f, blocks_d), torch.float32)

    def operands(_: int) -> tuple:
        return (
            *product_descriptors(dgate_RF, dgate_scales_bR, w1t_EDF),
            *product_descriptors(dup_RF, dup_scales_bR, w3t_EDF),
            w1_scales_Ebb,
            w3_scales_Ebb,
        )

    _launch_fp8(
        name,
        operands,
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        y_RD=dx_RD,
        out_TD=dx_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=ScoreGradients(
            parts_NR=dscore_parts_NR, dscores_TK=dscores_TK, slots_addresses_P=score_slots_addresses_P
        ),
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def product_descriptors(rows_RI: torch.Tensor, scales_bR: torch.Tensor, weights_EJI: torch.Tensor) -> tuple:  # noqa: N803
    """Of the operands of a product that contracts I: the rows, whole tiles and halves; their scales; the weights."""
    return (
        fp8_descriptor(rows_RI, BLOCK_M.value),
        fp8_descriptor(rows_RI, HALF_M.value),
        TensorDescriptor.from_tensor(scales_bR, [1, BLOCK_M.value], scales_layout()),
        fp8_descriptor(weights_EJI.view(-1, weights_EJI.shape[2]), BLOCK.value),
    )


def _launch_fp8(*args, **kwargs) -> None:
    """As ``launch_push``. Its ``operands`` are descriptors of both products', then the scales of both's weights."""
    kernel = gemm_push_fp8_kernel
    launch_push(*args, kernel=kernel, constants=push_constants, tune=tune_gemm_push_fp8, **kwargs)


# ---- the kernel


@gluon.jit
def load_blocks(descs, operands, stages, row, rows, weight_row, step, NUM_STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Producer: load the operands of a product, BLOCK columns after the others: the tile's rows with their scales, and
    BLOCK rows of weights. Up to STAGES steps ahead of the consumers. Returns the step after."""
    rows_desc, half_rows_desc, scales_desc, weights_desc = descs
    rows_bufs, scales_bufs, weights_bufs = operands
    stage_full, stage_empty = stages
    OTHER_BYTES: gl.constexpr = weights_desc.block_type.nbytes + scales_desc.block_type.nbytes
    for k in range(NUM_STEPS):
        stage = step % STAGES
        mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
        full = stage_full.index(stage)
        rows_buf = rows_bufs.index(stage)
        load_tile_rows(rows_desc, half_rows_desc, [row, k * BLOCK], rows, full, rows_buf, OTHER_BYTES)
        async_load(scales_desc, [k, row], full, scales_bufs.index(stage))
        async_load(weights_desc, [weight_row, k * BLOCK], full, weights_bufs.index(stage))
        step += 1
    return step


@gluon.jit
def multiply_blocks(
    HALF: gl.constexpr,  # which half of the tile's rows
    y,
    scales,  # pointer to the weights' scale of the first step
    scale,  # which has been loaded
    STRIDE: gl.constexpr,  # from there to that of the next step
    operands,
    stages,
    step,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer: add a product to 64 rows x 128 columns of y, block by block. Returns y and the step after."""
    rows_bufs, scales_bufs, weights_bufs = operands
    stage_full, stage_empty = stages
    layout: gl.constexpr = y.type.layout
    layout_r: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
    for k in range(NUM_STEPS):
        stage = step % STAGES
        mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
        rows = rows_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
        part = warpgroup_mma(rows, weights_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        row_scale_r = scales_bufs.index(stage).reshape([BLOCK_M]).slice(HALF * HALF_M, HALF_M).load(layout_r)
        # The next step's scale of the weights is on its way while this one is multiplied.
        next_scale = gl.load(scales + gl.minimum(k + 1, NUM_STEPS - 1) * STRIDE)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(stage_empty.index(stage), count=1)
        y += part * (row_scale_r * scale)[:, None]
        scale = next_scale
        step += 1
    return y, step


@gluon.jit
def _load(
    descs,
    operands,
    stages,
    tiles,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Producer: load the operands and the rows' scales of each tile."""
    first_descs, next_descs = descs
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = HIDDEN // BLOCK
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        row = m * BLOCK_M
        weight_row = expert * DIM + n * BLOCK
        step = load_blocks(first_descs, operands, stages, row, rows, weight_row, step, NUM_STEPS, STAGES)
        if BACKWARD:  # that was dgate and W1; dup and W3 follow
            step = load_blocks(next_descs, operands, stages, row, rows, weight_row, step, NUM_STEPS, STAGES)
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    weight_scales,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Consumer: 64 rows x 128 columns of y, tile after tile, in turns as in ``gemm_push``."""
    operands, y_buf, turns, y_full, stages, tiles = consumer
    scales_Ebb, next_scales_Ebb = weight_scales
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = HIDDEN // BLOCK
    ALL_STEPS: gl.constexpr = 2 * NUM_STEPS if BACKWARD else NUM_STEPS
    TILES_N: gl.constexpr = DIM // BLOCK
    # In backward the weights are transposed, but not their scales.
    STRIDE: gl.constexpr = TILES_N if BACKWARD else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            y = gl.zeros([HALF_M, BLOCK], gl.float32, layout)
            if BACKWARD:
                at = expert * (NUM_STEPS * TILES_N) + n
            else:
                at = (expert * TILES_N + n) * NUM_STEPS
            scale = gl.load(scales_Ebb + at)
            next_scale = gl.load(next_scales_Ebb + at) if BACKWARD else scale
            y, step = multiply_blocks(
                HALF, y, scales_Ebb + at, scale, STRIDE, operands, stages, step, NUM_STEPS, STAGES
            )
            if BACKWARD:
                y, step = multiply_blocks(
                    HALF, y, next_scales_Ebb + at, next_scale, STRIDE, operands, stages, step, NUM_STEPS, STAGES
                )
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
            y_buf.store(y.to(gl.bfloat16))
            fence_async_shared()
        else:
            step = skip_steps(stages, step, ALL_STEPS, STAGES)
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
        mbarrier.arrive(y_full.index(HALF), count=1)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply_and_send(
    HALF: gl.constexpr,
    consumer,
    weight_scales,
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
    BACKWARD: gl.constexpr,
):
    """Consumer; once there are no more tiles, a communication warp in each of its four."""
    _multiply(HALF, consumer, weight_scales, DIM, HIDDEN, STAGES, BACKWARD)
    send_tokens(sent, DIM, TOP_K, EP_SIZE, TILES_N, FIRST_TILES, WARP_TOKENS, ROUTES, COLUMNS, BACKWARD)


@gluon.jit(do_not_specialize=["max_tokens", "num_rows", "rank", "deadline_us"])
def gemm_push_fp8_kernel(
    a_desc,
    half_a_desc,
    scales_desc,
    b_desc,
    next_a_desc,
    next_half_a_desc,
    next_scales_desc,
    next_b_desc,
    b_scales_Ebb,
    next_b_scales_Ebb,
    y_desc,
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
    dscore_parts_NR,
    num_rows,
    score_outputs,
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
    BACKWARD: gl.constexpr,
    SCORE_PARTS: gl.constexpr,
):
    TILES_N: gl.constexpr = DIM // BLOCK
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], a_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scales_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], b_desc.layout)
    y_buf = gl.allocate_shared_memory(gl.bfloat16, [HALF_M, BLOCK], y_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 4)  # both consumers, the producer and the store warp
    y_full, turns = make_half_barriers()

    first_descs = (a_desc, half_a_desc, scales_desc, b_desc)
    next_descs = (next_a_desc, next_half_a_desc, next_scales_desc, next_b_desc)
    descs = (first_descs, next_descs)
    operands = (a_bufs, scales_bufs, b_bufs)
    consumer = (operands, y_buf, turns, y_full, stages, tiles)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M)
    stored = (y_desc, y_buf, turns, y_full, done_M)
    tables = (send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK)
    destinations = (out_TD, slots_addresses_P, max_tokens)
    faults = (fault, rank, deadline_us)
    score_gradients = (dscore_parts_NR, num_rows, score_outputs)
    sent = (sizes, tables, y_RD, done_M, destinations, score_gradients, queue, faults)
    weight_scales = (b_scales_Ebb, next_b_scales_Ebb)
    # Registers are granted per warpgroup, in this order: the producer's has a warp that does nothing.
    gl.warp_specialize(
        [
            (
                _multiply_and_send,
                (
                    0,
                    consumer,
                    weight_scales,
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
                    BACKWARD,
                ),
            ),
            (
                _multiply_and_send,
                (
                    1,
                    consumer,
                    weight_scales,
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
                    BACKWARD,
                ),
            ),
            (_load, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES, BACKWARD)),
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
                    BACKWARD,
                    SCORE_PARTS,
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
                    BACKWARD,
                    SCORE_PARTS,
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
                    BACKWARD,
                    SCORE_PARTS,
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
                    BACKWARD,
                    SCORE_PARTS,
                ),
            ),
        ],
        [4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
