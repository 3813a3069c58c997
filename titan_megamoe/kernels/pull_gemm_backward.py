"""``pull_gemm_backward``: fetch the rows of ``dout`` from their owners, multiply by W2, go back through SwiGLU.

For every row r of the pool, of a route with score s, and with a = silu(gate) * up of the forward:

    g[r]        = dout[r] W2[expert]                                    not written: it stays in shared memory, in bf16
    dgate[r]    = s g up silu'(gate)        silu'(z) = sigmoid(z) (1 + z (1 - sigmoid(z)))
    dup[r]      = s g silu(gate)
    scaled_h[r] = s a                       the other factor of the gradient of W2
    dscore[r]   = <g, a>                    one part for each column tile, added up in their order where it is sent

so neither the forward's result of the down projection nor its h is needed. The roles are those of ``pull_gemm``
(``common.py``), and two more (``swiglu_backward.py``): a warp that loads gate and up of a tile while the tile is being multiplied,
and a warpgroup that computes all but g.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import plan_tables
from .common import (
    async_load,
    BLOCK_K,
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
    load_tile_rows,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .plan_tables import Counters, KernelPlan
from .pull import pull_constants, pull_rows, schedule_arrived_tiles
from .swiglu_backward import (
    allocate_activations,
    allocate_products,
    go_back_through_swiglu,
    hand_over,
    load_activations,
    PART_N,
)
from .tuning import PullGemmBackwardTuning, tune_pull_gemm_backward


def pull_gemm_backward(
    plan: KernelPlan,
    counters: Counters,
    *,
    dout_addresses_P: torch.Tensor,  # noqa: N803
    w2_EDF: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor,  # noqa: N803
    up_RF: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    row_scores_R: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
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
        plan: the forward's.
        counters: zeroed. ``arrival_M`` and ``queue[0, 1, 6]`` are used up.
        dout_addresses_P: int64 ``[P]``, address of each rank's ``dout``, bf16 ``[tokens, D]``, 16-byte aligned.
        w2_EDF: bf16 ``[e, D, F]``, this rank's experts. D and F are multiples of 64.
        gate_RF, up_RF: bf16 ``[R, F]``, of the forward.
        dout_RD: bf16 ``[R, D]``, written: dout of each row.
        row_scores_R: fp32 ``[R]``, written: the score of each row. Padding rows are left alone.
        dgate_RF, dup_RF, scaled_h_RF: bf16 ``[R, F]``, written.
        dscore_parts_NR: fp32 ``[F / block_n, R]``, written: parts of each row's score gradient, which is their sum over N.
            Padding rows are left alone.
        fault, rank, num_sms, deadline_seconds, tuning: as of ``pull_gemm``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    num_rows, dim = dout_RD.shape
    num_experts, _, hidden_dim = w2_EDF.shape
    top_k = plan.pull_rows_UK.shape[1]
    tuning = tuning or tune_pull_gemm_backward(dim, hidden_dim)
    name = "pull_gemm_backward"
    check_tensor(name, "dout_RD", dout_RD, (num_rows, dim), torch.bfloat16)
    check_tensor(name, "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), torch.bfloat16)
    for rows_name, rows in dict(
        gate_RF=gate_RF, up_RF=up_RF, dgate_RF=dgate_RF, dup_RF=dup_RF, scaled_h_RF=scaled_h_RF
    ).items():
        check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    check_tensor(name, "row_scores_R", row_scores_R, (num_rows,), torch.float32)
    check_tensor(name, "dscore_parts_NR", dscore_parts_NR, (hidden_dim // tuning.block_n, num_rows), torch.float32)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k)
    if num_rows == 0:
        return

    pull_gemm_backward_kernel[(grid_size(name, num_sms, dout_RD.device),)](
        tile_descriptor(dout_RD, BLOCK_M.value, BLOCK_K.value),
        tile_descriptor(dout_RD, HALF_M.value, BLOCK_K.value),
        tile_descriptor(w2_EDF.view(-1, hidden_dim), BLOCK_K.value, tuning.block_n),
        *(
            tile_descriptor(rows, HALF_M.value, PART_N.value)
            for rows in (gate_RF, up_RF, dgate_RF, dup_RF, scaled_h_RF)
        ),
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        dout_addresses_P,
        dout_RD,
        row_scores_R,
        dscore_parts_NR,
        num_rows,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_in_us(name, deadline_seconds),
        **pull_gemm_backward_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=dout_addresses_P.numel()
        ),
        num_warps=4,
    )


def pull_gemm_backward_constants(tuning: PullGemmBackwardTuning, **sizes: int) -> dict[str, int]:
    """What the kernel is compiled for. ``sizes``: as of ``pull_constants``."""
    return {**pull_constants(tuning, **sizes), "BLOCK_N": tuning.block_n, "EPILOGUE_REGS": tuning.epilogue_registers}


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM_BACKWARD)


@gluon.jit
def _load(
    descs,
    operands,
    stages,
    tiles,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Producer: load the operands of each tile, up to STAGES steps ahead of the consumers."""
    dout_desc, half_dout_desc, w2_desc = descs
    dout_bufs, w2_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        row = m * BLOCK_M
        fence_async_global()  # the scheduler saw the rows arrive; now the copy engine may read them
        for k in range(DIM // BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = stage_full.index(stage)
            dout_buf = dout_bufs.index(stage)
            load_tile_rows(
                dout_desc, half_dout_desc, [row, k * BLOCK_K], rows, full, dout_buf, w2_desc.block_type.nbytes
            )
            async_load(w2_desc, [expert * DIM + k * BLOCK_K, n * BLOCK_N], full, w2_bufs.index(stage))
            step += 1
        finish_tile(ring_empty, count)
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
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    NUM_STEPS: gl.constexpr = DIM // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
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
            hand_over(g, products, HALF, num_done, BLOCK_N, 16)
            num_done += 1
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit(do_not_specialize=["num_rows", "rank", "deadline_us"])
def pull_gemm_backward_kernel(
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
    dout_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], dout_desc.layout)
    w2_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], w2_desc.layout)
    bufs = allocate_activations(BLOCK_N, gate_desc)
    g_bufs = allocate_products(BLOCK_N, gate_desc)
    stages, tiles = make_pipeline(STAGES, 2, 5)  # both consumers, the epilogue, and the two warps that load
    full, empty = make_half_barriers()
    g_full, g_empty = make_half_barriers()

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
            (go_back_through_swiglu, (products, outputs, (), scores, tiles, BLOCK_N, False)),
            (_load, (descs, operands, stages, tiles, DIM, STAGES, BLOCK_N)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (load_activations, (activations, tiles, BLOCK_N)),
            (idle, ()),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM, TOP_K, TOKENS, COLUMNS, True, 0)),
        ],
        [4, 4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, EPILOGUE_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
