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
import triton
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
    await_count,
    await_free_slot,
    BLOCK_K,
    BLOCK_M,
    check_sizes,
    check_tensor,
    claim,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    fence_async_global,
    finish_tile,
    grid_size,
    HALF_M,
    hand_out,
    pack_tile,
    receive_tile,
    record_late,
    RING_SLOTS,
    STOP,
    thread_barrier,
    tile_descriptor,
    tile_in_turn,
    unpack_tile,
)
from .plan_tables import Counters, KernelPlan
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
        counters: zeroed. ``arrival_M`` and ``queue[:2]`` are used up.
        x_addresses_P: int64 ``[P]``, address of each rank's ``x``, bf16 ``[tokens, D]``, 16-byte aligned.
        w1_EFD, w3_EFD: bf16 ``[e, F, D]``, this rank's experts. D and F are multiples of 64.
        pool_RD: bf16 ``[R, D]``, written: x of each row. Padding rows are left alone.
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


def pull_gemm_constants(
    tuning: PullGemmTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int, saves_gate_up: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    consumer, comm, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "BLOCK_N": tuning.block_n,
        "STAGES": tuning.stages,
        "COMM_WARPS": tuning.comm_warps,
        "TOKENS": tuning.tokens,
        "COLUMNS": tuning.columns,
        "CONSUMER_REGS": consumer,
        "COMM_REGS": comm,
        "OTHER_REGS": other,
        "SAVE_GATE_UP": saves_gate_up,
    }


# ---- the kernel

_KERNEL = gl.constexpr(plan_tables.KERNEL_PULL_GEMM)
_PHASE_ARRIVAL = gl.constexpr(plan_tables.PHASE_ARRIVAL)
_PULL_QUEUE, _TILE_QUEUE = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def _pull(
    pulled,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,  # of one item
    COLUMNS: gl.constexpr,  # of each, held in registers at a time
):
    """Communication warp: copy tokens into the pool until the pull list is empty. Waits for nobody."""
    sizes, pull_source_U, pull_rows_UK, x_addresses_P, pool_RD, arrival_M, queue = pulled
    # [tokens t, columns c]: a lane has 16 bytes, so a warp copies 512 bytes of a row at a time.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    token_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    column_c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # [tokens t, routes r]: a lane has one route, to count it.
    layout_tr: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    BLOCK_R: gl.constexpr = triton.next_power_of_2(TOP_K)
    item_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout_tr))
    route_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, layout_tr))
    one_tr = gl.full([TOKENS, BLOCK_R], 1, gl.int32, layout_tr)

    num_unique = gl.load(sizes + 1)
    first = claim(queue + _PULL_QUEUE, TOKENS)
    source_t = gl.load(pull_source_U + first + token_t, mask=first + token_t < num_unique, other=0)
    while first < num_unique:
        u_t = first + token_t
        is_token_t = u_t < num_unique
        address_t = gl.load(x_addresses_P + (source_t >> 32)) + (source_t & 0xFFFFFFFF) * (2 * DIM)
        x_t = gl.multiple_of(address_t.to(gl.pointer_type(gl.bfloat16)), 16)
        is_route_tr = (first + item_t < num_unique)[:, None] & (route_r < TOP_K)[None, :]
        row_tr = gl.load(
            pull_rows_UK + (first + item_t)[:, None] * TOP_K + route_r[None, :], mask=is_route_tr, other=-1
        )
        num_routes = gl.max(gl.sum((row_tr >= 0).to(gl.int32), axis=1), axis=0)

        following = first
        for start in gl.static_range(0, DIM, COLUMNS):
            is_column_c = start + column_c < DIM
            x_tc = gl.load(
                x_t[:, None] + (start + column_c)[None, :],
                mask=is_token_t[:, None] & is_column_c[None, :],
                cache_modifier=".cg",  # read once
            )
            if start == 0:
                # The next tokens are claimed and looked up while these are on their way.
                following = claim(queue + _PULL_QUEUE, TOKENS)
                source_t = gl.load(pull_source_U + following + token_t, mask=following + token_t < num_unique, other=0)
            for route in range(num_routes):
                row_t = gl.load(pull_rows_UK + u_t * TOP_K + route, mask=is_token_t, other=-1)
                gl.store(
                    pool_RD + row_t.to(gl.int64)[:, None] * DIM + (start + column_c)[None, :],
                    x_tc,
                    mask=(row_t >= 0)[:, None] & is_column_c[None, :],
                )

        # All lanes' parts of the rows are written, and the copy engine may read them, before they are counted.
        fence_async_global()
        thread_barrier()
        gl.atomic_add(arrival_M + row_tr // BLOCK_M, one_tr, mask=row_tr >= 0, sem="release", scope="gpu")
        first = following


@gluon.jit
def _pull_if(
    IS_USED: gl.constexpr,
    pulled,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """A communication warp, or one that the tuning leaves idle."""
    if IS_USED:
        _pull(pulled, DIM, TOP_K, TOKENS, COLUMNS)


@gluon.jit
def _schedule(planned, faults, tiles, EP_SIZE: gl.constexpr, TILES_N: gl.constexpr):
    """Scheduler: hand out tiles whose rows are there. Those that share their rows come one after the other."""
    sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue = planned
    fault, rank, deadline_us = faults
    ring, ring_full, ring_empty = tiles
    num_tiles = gl.load(sizes) * TILES_N
    count = 0
    tile = gl.to_tensor(0).to(gl.int64)
    while tile >= 0:
        await_free_slot(ring_empty, count)
        index = claim(queue + _TILE_QUEUE, 1)
        tile = gl.to_tensor(STOP).to(gl.int64)
        if index < num_tiles:
            m, expert = tile_in_turn(index // TILES_N, tile_expert_M, expert_start_e1, EP_SIZE)
            rows = gl.load(tile_rows_M + m)
            have = await_count(arrival_M + m, rows, deadline_us)
            if have < rows:
                record_late(fault, rank, _KERNEL, _PHASE_ARRIVAL, m, have, rows)
            else:
                tile = pack_tile(m, index % TILES_N, expert, rows)
        hand_out(tile, ring, ring_full, count)
        count += 1


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
            if rows > HALF_M:
                mbarrier.expect(full, WEIGHT_BYTES + pool_desc.block_type.nbytes)
                async_load(pool_desc, [row, k * BLOCK_K], full, pool_buf)
            else:
                mbarrier.expect(full, WEIGHT_BYTES + half_pool_desc.block_type.nbytes)
                async_load(half_pool_desc, [row, k * BLOCK_K], full, pool_buf.slice(0, HALF_M))
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
                _write(up, up_desc, out_buf, row, column)
            _write(gate / (1.0 + gl.exp(-gate)) * up, h_desc, out_buf, row, column)
        else:
            # The tile has no rows in this half: leave the tensor cores to the other one.
            for k in range(NUM_STEPS):
                mbarrier.wait(stage_full.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(stage_empty.index(step % STAGES), count=1)
                step += 1
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
    ring = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stage_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(stage_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=2)  # both consumers
    for i in gl.static_range(RING_SLOTS):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=3)  # both consumers and the producer

    operands = (pool_bufs, w1_bufs, w3_bufs)
    stages = (stage_full, stage_empty)
    tiles = (ring, ring_full, ring_empty)
    outputs = (h_desc, gate_desc, up_desc, out_bufs)
    descs = (pool_desc, half_pool_desc, w1_desc, w3_desc)
    pulled = (sizes, pull_source_U, pull_rows_UK, x_addresses_P, pool_RD, arrival_M, queue)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M, arrival_M, queue)
    faults = (fault, rank, deadline_us)
    consumer = (operands, outputs, stages, tiles)
    # Registers are granted per warpgroup, in this order: producer and scheduler share one with two idle warps.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, NUM_STEPS, STAGES, BLOCK_N, SAVE_GATE_UP)),
            (_multiply, (1, consumer, NUM_STEPS, STAGES, BLOCK_N, SAVE_GATE_UP)),
            (_load, (descs, operands, stages, tiles, HIDDEN, NUM_STEPS, STAGES, BLOCK_N)),
            (_schedule, (planned, faults, tiles, EP_SIZE, TILES_N)),
            (_pull_if, (COMM_WARPS > 0, pulled, DIM, TOP_K, TOKENS, COLUMNS)),
            (_pull_if, (COMM_WARPS > 1, pulled, DIM, TOP_K, TOKENS, COLUMNS)),
            (_pull_if, (COMM_WARPS > 2, pulled, DIM, TOP_K, TOKENS, COLUMNS)),
            (_pull_if, (COMM_WARPS > 3, pulled, DIM, TOP_K, TOKENS, COLUMNS)),
        ],
        [4, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, COMM_REGS, COMM_REGS, COMM_REGS, COMM_REGS],
    )
