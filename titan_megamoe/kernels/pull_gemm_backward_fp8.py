"""``pull_gemm_backward_fp8``: ``pull_gemm_backward`` on rows of ``dout`` and W2 in blockwise FP8.

    g[r] = dout[r] W2[expert]       not written: dgate, dup, scaled_h, dscore follow from it as in ``pull_gemm_backward``

Rows and scales arrive as in ``pull_gemm_fp8``; the main loop is that of ``gemm_push_fp8``, with W2 transposed and its scales
read in the other order. gate and up are in bf16. A tile is 128 columns, so that its dgate and dup are one block of each row:
they are written in bf16, for the weight gradients (which quantise along the other dimension, if at all), and quantised, to be multiplied
by W1 and W3.

Shape suffixes are those of ``plan_tables.py``; here also b blocks of 128.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import quantize
from . import plan_tables
from .common import (
    BLOCK_M,
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    fence_async_global,
    finish_tile,
    grid_size,
    HALF_M,
    idle,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .gemm_push_fp8 import load_blocks, multiply_blocks, product_descriptors
from .plan_tables import Counters, KernelPlan
from .pull import pull_constants, pull_rows, schedule_arrived_tiles
from .pull_gemm_fp8 import BLOCK, check_blocks, fp8_descriptor
from .swiglu_backward import (
    allocate_activations,
    allocate_products,
    go_back_through_swiglu,
    hand_over,
    load_activations,
    PART_N,
)
from .tuning import PullGemmBackwardTuning, tune_pull_gemm_backward_fp8


def pull_gemm_backward_fp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    dout_addresses_P: torch.Tensor,  # noqa: N803
    dout_scales_addresses_P: torch.Tensor,  # noqa: N803
    w2t_EFD: torch.Tensor,  # noqa: N803
    w2_scales_Ebb: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor,  # noqa: N803
    up_RF: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    dout_scales_bR: torch.Tensor,  # noqa: N803
    row_scores_R: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
    dgate_fp8_RF: torch.Tensor,  # noqa: N803
    dgate_scales_bR: torch.Tensor,  # noqa: N803
    dup_fp8_RF: torch.Tensor,  # noqa: N803
    dup_scales_bR: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PullGemmBackwardTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Padding rows of ``dout_RD``, ``dgate_RF``, ``dup_RF`` and ``scaled_h_RF`` are zero up to the next multiple of HALF_M
    rows of an expert, and left alone beyond.

    Args:
        plan, counters: as of ``pull_gemm_backward``.
        dout_addresses_P, dout_scales_addresses_P: int64 ``[P]``, addresses of each rank's ``dout``, e4m3 ``[tokens, D]``,
            and of its scales, fp32 ``[tokens, D / 128]``; 16-byte aligned.
        w2t_EFD: e4m3 ``[e, F, D]``: W2 of this rank's experts, transposed. D and F are multiples of 128.
        w2_scales_Ebb: fp32 ``[e, D / 128, F / 128]``: of W2 as it is in forward.
        gate_RF, up_RF: bf16 ``[R, F]``, of the forward.
        dout_RD, dout_scales_bR: e4m3 ``[R, D]`` and fp32 ``[D / 128, R]``, written: dout of each row. Scales of padding rows
            are left alone.
        row_scores_R: fp32 ``[R]``, written: the score of each row. Padding rows are left alone.
        dgate_RF, dup_RF, scaled_h_RF: bf16 ``[R, F]``, written.
        dgate_fp8_RF, dup_fp8_RF: e4m3 ``[R, F]``, and
        dgate_scales_bR, dup_scales_bR: fp32 ``[F / 128, R]``, written: the same dgate and dup, quantised from
            what they are in bf16. Padding is as in bf16, without scales.
        dscore_parts_NR: fp32 ``[F / 128, R]``, written: parts of each row's score gradient, which is their sum over N.
            Padding rows are left alone.
        fault, rank, num_sms, deadline_seconds, tuning: as of ``pull_gemm``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "pull_gemm_backward_fp8"
    num_rows, dim = dout_RD.shape
    num_experts, hidden_dim, _ = w2t_EFD.shape
    top_k = plan.pull_rows_UK.shape[1]
    tuning = tuning or tune_pull_gemm_backward_fp8(dim)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k)
    check_blocks(name, dim, hidden_dim)
    blocks_d, blocks_f = dim // BLOCK.value, hidden_dim // BLOCK.value
    check_tensor(name, "dout_RD", dout_RD, (num_rows, dim), quantize.FP8)
    check_tensor(name, "dout_scales_bR", dout_scales_bR, (blocks_d, num_rows), torch.float32)
    check_tensor(name, "w2t_EFD", w2t_EFD, (num_experts, hidden_dim, dim), quantize.FP8)
    check_tensor(name, "w2_scales_Ebb", w2_scales_Ebb, (num_experts, blocks_d, blocks_f), torch.float32)
    for rows_name, rows in dict(
        gate_RF=gate_RF, up_RF=up_RF, dgate_RF=dgate_RF, dup_RF=dup_RF, scaled_h_RF=scaled_h_RF
    ).items():
        check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    for rows_name, rows, scales in (("dgate", dgate_fp8_RF, dgate_scales_bR), ("dup", dup_fp8_RF, dup_scales_bR)):
        check_tensor(name, f"{rows_name}_fp8_RF", rows, (num_rows, hidden_dim), quantize.FP8)
        check_tensor(name, f"{rows_name}_scales_bR", scales, (blocks_f, num_rows), torch.float32)
    check_tensor(name, "row_scores_R", row_scores_R, (num_rows,), torch.float32)
    check_tensor(name, "dscore_parts_NR", dscore_parts_NR, (blocks_f, num_rows), torch.float32)
    if num_rows == 0:
        return

    pull_gemm_backward_fp8_kernel[(grid_size(name, num_sms, dout_RD.device),)](
        *product_descriptors(dout_RD, dout_scales_bR, w2t_EFD),
        *(
            tile_descriptor(rows, HALF_M.value, PART_N.value)
            for rows in (gate_RF, up_RF, dgate_RF, dup_RF, scaled_h_RF)
        ),
        fp8_descriptor(dgate_fp8_RF, HALF_M.value),
        fp8_descriptor(dup_fp8_RF, HALF_M.value),
        w2_scales_Ebb,
        dgate_scales_bR,
        dup_scales_bR,
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        dout_addresses_P,
        dout_scales_addresses_P,
        dout_RD.view(torch.bfloat16),
        dout_scales_bR,
        row_scores_R,
        dscore_parts_NR,
        num_rows,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_in_us(name, deadline_seconds),
        **pull_gemm_backward_fp8_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=dout_addresses_P.numel()
        ),
        num_warps=4,
    )


def pull_gemm_backward_fp8_constants(tuning: PullGemmBackwardTuning, **sizes: int) -> dict[str, int]:
    """What the kernel is compiled for. ``sizes``: as of ``pull_constants``."""
    return {**pull_constants(tuning, **sizes), "EPILOGUE_REGS": tuning.epilogue_registers}


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM_BACKWARD)


@gluon.jit
def _load(descs, operands, stages, tiles, DIM: gl.constexpr, HIDDEN: gl.constexpr, STAGES: gl.constexpr):
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
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    w2_scales_Ebb,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer: g of 64 rows x 128 columns, tile after tile."""
    operands, products, stages, tiles = consumer
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = DIM // BLOCK
    TILES_N: gl.constexpr = HIDDEN // BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
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
            hand_over(g, products, HALF, num_done, BLOCK, 32)
            num_done += 1
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit(do_not_specialize=["num_rows", "rank", "deadline_us"])
def pull_gemm_backward_fp8_kernel(
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
    dout_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], dout_desc.layout)
    scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scales_desc.layout)
    w2t_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w2t_desc.layout)
    bufs = allocate_activations(BLOCK, gate_desc)
    g_bufs = allocate_products(BLOCK, gate_desc)
    stages, tiles = make_pipeline(STAGES, 2, 5)  # both consumers, the epilogue, and the two warps that load
    full, empty = make_half_barriers()
    g_full, g_empty = make_half_barriers()

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
            (_multiply, (0, consumer, w2_scales_Ebb, DIM, HIDDEN, STAGES)),
            (_multiply, (1, consumer, w2_scales_Ebb, DIM, HIDDEN, STAGES)),
            (go_back_through_swiglu, (products, outputs, quantized, scores, tiles, BLOCK, True)),
            (_load, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (load_activations, (activations, tiles, BLOCK)),
            (idle, ()),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM // 2, TOP_K, TOKENS, COLUMNS, True, NUM_SCALES)),
        ],
        [4, 4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, EPILOGUE_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
