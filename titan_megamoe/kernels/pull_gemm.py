"""``pull_gemm``: fetch the rows of this rank's experts from their owners, multiply by W1 and W3, apply SwiGLU.

    h[r] = silu(x[r] W1[expert]^T) * (x[r] W3[expert]^T)        for every row r of the pool

A token's way through the kernel (roles: see ``common.py``):

    a communication warp  claims the token from the pull list, reads its row of x once from its owner's memory, writes
                          it to the pool row of each of its routes to this rank, and adds 1 to the arrival count of
                          each row's tile
    the scheduler         claims tiles in order of experts, waits until the tile's rows have arrived, hands it out
    the producer          loads [128, 64] of the pool and [BLOCK_N, 64] of W1 and of W3, step by step along D
    the consumers         multiply: gate and up are two accumulators of one tile, so SwiGLU is applied in registers

The pull list is ordered by first local expert, so the tiles of expert i have all their rows once the tokens whose first
expert is at most i are in: the tensor cores start after a small part of the rows, and the rest arrives behind them.

What bounds it on an H200 is the traffic between L2 and the SMs, which is at its peak throughout (9.6 TB/s): 48 KiB for
each step of a 128 x 256 tile. So pulling costs what its own bytes add to that.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
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
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .plan_tables import Counters, KernelPlan
from .pull import pull_constants, pull_rows, schedule_arrived_tiles
from .tuning import PullGemmTuning, tune_pull_gemm


def pull_gemm(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_addresses_P: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    pool_RD: torch.Tensor,  # noqa: N803
    h_RF: torch.Tensor,  # noqa: N803
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
        plan: the routing plan; its rows must fit in R (what did not fit is not in the plan).
        counters: zeroed. ``arrival_M`` and ``queue[0, 1, 6]`` are used up.
        x_addresses_P: int64 ``[P]``, address of each rank's ``x``, bf16 ``[tokens, D]``, 16-byte aligned.
        w1_EFD, w3_EFD: bf16 ``[e, F, D]``, this rank's experts. D and F are multiples of 64.
        pool_RD: bf16 ``[R, D]``, written: x of each row; zeros in padding up to the next multiple of HALF_M rows. The rest
            of the padding is left alone.
        h_RF: bf16 ``[R, F]``, written: silu(gate) * up. Padding rows may be written, with anything.
        gate_RF, up_RF: bf16 ``[R, F]``, both or neither: x W1^T and x W3^T, rounded, for backward.
        fault: int32, at least 7: the record of a missed deadline (``plan_tables.FAULT_FIELDS``).
        rank: this rank, for that record.
        num_sms: SMs to occupy, one CTA each; None: all. The result does not depend on it.
        deadline_seconds: how long to wait for the rows of a tile before giving up.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    num_rows, dim = pool_RD.shape
    num_experts, hidden_dim, _ = w1_EFD.shape
    top_k = plan.pull_rows_UK.shape[1]
    tuning = tuning or tune_pull_gemm(dim, hidden_dim)
    saves = gate_RF is not None
    if saves != (up_RF is not None):
        raise ValueError("pull_gemm: pass both gate_RF and up_RF, or neither.")
    check_tensor("pull_gemm", "pool_RD", pool_RD, (num_rows, dim), torch.bfloat16)
    for name, weight in (("w1_EFD", w1_EFD), ("w3_EFD", w3_EFD)):
        check_tensor("pull_gemm", name, weight, (num_experts, hidden_dim, dim), torch.bfloat16)
    for name, rows in (("h_RF", h_RF), ("gate_RF", gate_RF), ("up_RF", up_RF)):
        if rows is not None:
            check_tensor("pull_gemm", name, rows, (num_rows, hidden_dim), torch.bfloat16)
    check_sizes("pull_gemm", num_rows, dim, hidden_dim, num_experts, top_k)
    if num_rows == 0:
        return

    h_desc = tile_descriptor(h_RF, HALF_M.value, tuning.block_n)
    pull_gemm_kernel[(grid_size("pull_gemm", num_sms, pool_RD.device),)](
        tile_descriptor(pool_RD, BLOCK_M.value, BLOCK_K.value),
        tile_descriptor(pool_RD, HALF_M.value, BLOCK_K.value),
        tile_descriptor(w1_EFD.view(-1, dim), tuning.block_n, BLOCK_K.value),
        tile_descriptor(w3_EFD.view(-1, dim), tuning.block_n, BLOCK_K.value),
        h_desc,
        tile_descriptor(gate_RF, HALF_M.value, tuning.block_n) if saves else h_desc,
        tile_descriptor(up_RF, HALF_M.value, tuning.block_n) if saves else h_desc,
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        x_addresses_P,
        pool_RD,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_in_us("pull_gemm", deadline_seconds),
        **pull_gemm_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=x_addresses_P.numel(),
            saves_gate_up=saves,
        ),
        num_warps=4,
    )


def pull_gemm_constants(tuning: PullGemmTuning, *, saves_gate_up: bool, **sizes: int) -> dict[str, int | bool]:
    """What the kernel is compiled for. ``sizes``: as of ``pull_constants``."""
    return {**pull_constants(tuning, **sizes), "BLOCK_N": tuning.block_n, "SAVE_GATE_UP": saves_gate_up}


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM)


@gluon.jit
def _load(
    descs,
    operands,
    stages,
    tiles,
    HIDDEN: gl.constexpr,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Producer: load the operands of each tile, up to STAGES steps ahead of the consumers."""
    pool_desc, half_pool_desc, w1_desc, w3_desc = descs
    pool_bufs, w1_bufs, w3_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    WEIGHT_BYTES: gl.constexpr = w1_desc.block_type.nbytes + w3_desc.block_type.nbytes
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        row = m * BLOCK_M
        weight_row = expert * HIDDEN + n * BLOCK_N
        fence_async_global()  # the scheduler saw the rows arrive; now the copy engine may read them
        for k in range(NUM_STEPS):
            stage = step % STAGES
            mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = stage_full.index(stage)
            pool_buf = pool_bufs.index(stage)
            load_tile_rows(pool_desc, half_pool_desc, [row, k * BLOCK_K], rows, full, pool_buf, WEIGHT_BYTES)
            async_load(w1_desc, [weight_row, k * BLOCK_K], full, w1_bufs.index(stage))
            async_load(w3_desc, [weight_row, k * BLOCK_K], full, w3_bufs.index(stage))
            step += 1
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SAVE_GATE_UP: gl.constexpr,
):
    """Consumer: gate, up and h of 64 rows x BLOCK_N columns, tile after tile."""
    operands, outputs, stages, tiles = consumer
    pool_bufs, w1_bufs, w3_bufs = operands
    h_desc, gate_desc, up_desc, out_bufs = outputs
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_buf = out_bufs.index(HALF)
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            gate = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            up = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            for k in range(NUM_STEPS):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                x = pool_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
                gate = warpgroup_mma(x, w1_bufs.index(stage).permute((1, 0)), gate, is_async=True)
                up = warpgroup_mma(x, w3_bufs.index(stage).permute((1, 0)), up, is_async=True)
                # Two products stay in flight. Those of the step before are done, so its stage can be loaded again.
                gate, up = warpgroup_mma_wait(2, deps=(gate, up))
                if k > 0:
                    mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
                step += 1
            gate, up = warpgroup_mma_wait(0, deps=(gate, up))
            mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
            finish_tile(ring_empty, count)

            row = m * BLOCK_M + HALF * HALF_M
            column = n * BLOCK_N
            if SAVE_GATE_UP:
                _write(gate, gate_desc, out_buf, row, column)
            h = (gate * sigmoid(gate) * up).to(gl.bfloat16)  # while gate leaves the buffer
            if SAVE_GATE_UP:
                _write(up, up_desc, out_buf, row, column)
            _write(h, h_desc, out_buf, row, column)
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)
    tma.store_wait(0)


@gluon.jit
def _write(values, desc, buffer, row, column):
    """Round to bf16 and start the store of a tile; the buffer is in use until the next ``tma.store_wait``."""
    tma.store_wait(0)
    buffer.store(values.to(gl.bfloat16))
    fence_async_shared()
    async_store(desc, [row, column], buffer)


@gluon.jit(do_not_specialize=["rank", "deadline_us"])
def pull_gemm_kernel(
    pool_desc,
    half_pool_desc,
    w1_desc,
    w3_desc,
    h_desc,
    gate_desc,
    up_desc,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    x_addresses_P,
    pool_RD,
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
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
    SAVE_GATE_UP: gl.constexpr,
):
    TILES_N: gl.constexpr = HIDDEN // BLOCK_N
    NUM_STEPS: gl.constexpr = DIM // BLOCK_K
    pool_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], pool_desc.layout)
    w1_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], w1_desc.layout)
    w3_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], w3_desc.layout)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF_M, BLOCK_N], h_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 3)  # both consumers and the producer

    operands = (pool_bufs, w1_bufs, w3_bufs)
    outputs = (h_desc, gate_desc, up_desc, out_bufs)
    descs = (pool_desc, half_pool_desc, w1_desc, w3_desc)
    # No scores are wanted: any pointers stand in for the tables of scores.
    tables = (pull_source_U, pull_rows_UK, pull_rows_UK)
    pulled = (sizes, tile_rows_M, tables, x_addresses_P, pool_RD, arrival_M, (), arrival_M, queue)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue)
    faults = (fault, rank, deadline_us)
    consumer = (operands, outputs, stages, tiles)
    # Registers are granted per warpgroup, in this order: producer and scheduler share one with two idle warps.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, NUM_STEPS, STAGES, BLOCK_N, SAVE_GATE_UP)),
            (_multiply, (1, consumer, NUM_STEPS, STAGES, BLOCK_N, SAVE_GATE_UP)),
            (_load, (descs, operands, stages, tiles, HIDDEN, NUM_STEPS, STAGES, BLOCK_N)),
            (schedule_arrived_tiles, (planned, faults, tiles, EP_SIZE, TILES_N, _KERNEL)),
            (pull_rows, (COMM_WARPS > 0, pulled, DIM, TOP_K, TOKENS, COLUMNS, False, 0)),
            (pull_rows, (COMM_WARPS > 1, pulled, DIM, TOP_K, TOKENS, COLUMNS, False, 0)),
            (pull_rows, (COMM_WARPS > 2, pulled, DIM, TOP_K, TOKENS, COLUMNS, False, 0)),
            (pull_rows, (COMM_WARPS > 3, pulled, DIM, TOP_K, TOKENS, COLUMNS, False, 0)),
        ],
        [4, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, COMM_REGS, COMM_REGS, COMM_REGS, COMM_REGS],
    )
