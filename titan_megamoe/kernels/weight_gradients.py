"""``weight_gradients``: the gradients of all experts' weights, three products over the rows that are already here.

For each local expert, with the rows of the pool that are its own:

    dw1 = dgate^T x        [F, D]
    dw3 = dup^T x          [F, D]
    dw2 = dout^T scaled_h  [D, F]

Here the rows are what is summed over: K is ragged, different for every expert, and known to the device only. Tiles of
all three products of all experts are claimed from one queue, expert after expert, so that an expert's rows are read
from memory once and then from L2. No sum is split: a tile is one CTA's, so two runs are bitwise equal.

A tile's way through the kernel (roles: see ``common.py``; there is nothing to communicate):

    the scheduler    claims tiles, looks up their expert's rows and hands them out
    the producer     loads [STEP rows, 128] of the left matrix and [STEP rows, BLOCK_N] of the right one, step by step
    the consumers    multiply: the first has rows 0..63 of the tile (columns of the left matrix), the second the rest
    the store warp   writes their halves by TMA; to accumulate, it first fetches what is there

The matrices stay as they are in memory, row after row: the tensor cores read both operands across their rows.

An expert's rows are read in steps of STEP. Those after its last one up to a multiple of 64 must be zero in all five
inputs: then they add nothing. Rows after those are not read.

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

from .common import (
    async_load,
    async_store,
    await_free_slot,
    BLOCK_M,
    check_sizes,
    check_tensor,
    claim,
    finish_tile,
    grid_size,
    HALF_M,
    hand_out,
    idle,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    RING_SLOTS,
    skip_steps,
    STOP,
    tile_descriptor,
)
from .plan_tables import Counters, KernelPlan
from .tuning import tune_weight_gradients, WeightGradientsTuning

STEP = gl.constexpr(32)
"""Rows of one step of the main loop, a divisor of 64. The columns are what lies side by side in shared memory here, so
a step may be as shallow as it likes. 32 rows let more of what fits be loading, and waste less of a last step, than 64:
on an H200, Qwen3-30B's 128 experts take 1.68 ms instead of 1.70."""

_MAX_ROWS = 1 << 25
_MAX_WIDTH = 1 << 18
"""What the bit fields of :func:`_pack` hold: R must be less, and D and F."""


def weight_gradients(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_RD: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
    dw1_EFD: torch.Tensor,  # noqa: N803
    dw2_EDF: torch.Tensor,  # noqa: N803
    dw3_EFD: torch.Tensor,  # noqa: N803
    accumulate: bool = False,
    num_sms: int | None = None,
    tuning: WeightGradientsTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    In the five inputs, each expert's rows must be followed by rows of zeros up to the next multiple of 64.

    Args:
        plan: the routing plan that the rows are in the order of.
        counters: ``queue[5]`` must be zero, and is used up.
        x_RD: bf16 ``[R, D]``, as are all: the experts' inputs.
        dout_RD: ``[R, D]``, the gradient of the layer's output at each row's token.
        dgate_RF: ``[R, F]``, the gradient of the gate projection's result.
        dup_RF: ``[R, F]``, that of the up projection's.
        scaled_h_RF: ``[R, F]``, silu(gate) * up, times the route's score.
        dw1_EFD: ``[e, F, D]``, this rank's experts, written. D and F are multiples of 64.
        dw2_EDF: ``[e, D, F]``, likewise.
        dw3_EFD: ``[e, F, D]``, likewise.
        accumulate: add to what the gradients hold, in fp32, rounding once. Else an expert without rows gets zeros.
        num_sms: SMs to occupy, one CTA each; None: all. The result does not depend on it.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    num_rows, dim = x_RD.shape
    num_experts, hidden_dim, _ = dw1_EFD.shape
    for name, tensor, shape in (
        ("x_RD", x_RD, (num_rows, dim)),
        ("dout_RD", dout_RD, (num_rows, dim)),
        ("dgate_RF", dgate_RF, (num_rows, hidden_dim)),
        ("dup_RF", dup_RF, (num_rows, hidden_dim)),
        ("scaled_h_RF", scaled_h_RF, (num_rows, hidden_dim)),
        ("dw1_EFD", dw1_EFD, (num_experts, hidden_dim, dim)),
        ("dw2_EDF", dw2_EDF, (num_experts, dim, hidden_dim)),
        ("dw3_EFD", dw3_EFD, (num_experts, hidden_dim, dim)),
    ):
        check_tensor("weight_gradients", name, tensor, shape, torch.bfloat16)
    check_tensor("weight_gradients", "plan.expert_rows_e", plan.expert_rows_e, (num_experts,), torch.int32)
    check_sizes("weight_gradients", num_rows, dim, hidden_dim, num_experts, plan.pull_rows_UK.shape[1])
    for name, size, limit in (("R", num_rows, _MAX_ROWS), ("D", dim, _MAX_WIDTH), ("F", hidden_dim, _MAX_WIDTH)):
        if size >= limit:
            raise ValueError(f"weight_gradients: {name} = {size}; less than {limit} is supported.")
    num_ctas = grid_size("weight_gradients", num_sms, x_RD.device)
    if num_rows == 0:  # of which the copy engine cannot be told
        if not accumulate:
            for gradient in (dw1_EFD, dw2_EDF, dw3_EFD):
                gradient.zero_()
        return

    tuning = tuning or tune_weight_gradients(dim, hidden_dim)
    step, half, block_n = STEP.value, HALF_M.value, tuning.block_n
    weight_gradients_kernel[(num_ctas,)](
        tile_descriptor(x_RD, step, block_n),
        tile_descriptor(dout_RD, step, half),
        tile_descriptor(dgate_RF, step, half),
        tile_descriptor(dup_RF, step, half),
        tile_descriptor(scaled_h_RF, step, block_n),
        tile_descriptor(dw1_EFD.view(-1, dim), half, block_n),
        tile_descriptor(dw2_EDF.view(-1, hidden_dim), half, block_n),
        tile_descriptor(dw3_EFD.view(-1, dim), half, block_n),
        plan.expert_start_e1,
        plan.expert_rows_e,
        num_experts,
        counters.queue,
        **weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate),
        num_warps=4,
    )


def weight_gradients_constants(
    tuning: WeightGradientsTuning, *, dim: int, hidden_dim: int, accumulate: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    consumer, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "ACCUMULATE": accumulate,
        "BLOCK_N": tuning.block_n,
        "STAGES": tuning.stages,
        "CONSUMER_REGS": consumer,
        "OTHER_REGS": other,
    }


# ---- the kernel

_TILE_QUEUE = gl.constexpr(5)

_DW1, _DW3, _DW2 = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Which product a tile is of."""


@gluon.jit
def _pack(product, m, n, is_whole, expert, steps):
    """A tile as one int64, at least 0: steps in 20 bits, expert in 16, column tile and row tile in 12 each, whether the
    second consumer has rows of it in 1, product in 2."""
    high = (product << 25) | (m << 13) | (n << 1) | is_whole
    return (high.to(gl.int64) << 36) | (expert.to(gl.int64) << 20) | steps.to(gl.int64)


@gluon.jit
def _unpack(tile):
    """``product, m, n, is_whole, expert, steps`` of :func:`_pack`."""
    high = (tile >> 36).to(gl.int32)
    expert = (tile >> 20).to(gl.int32) & 0xFFFF
    steps = tile.to(gl.int32) & 0xFFFFF
    return high >> 25, (high >> 13) & 0xFFF, (high >> 1) & 0xFFF, high & 1, expert, steps


@gluon.jit
def _is_written(HALF: gl.constexpr, is_whole, steps, ACCUMULATE: gl.constexpr):
    """Whether this half of a tile changes: it has rows, and is not an addition of nothing."""
    return ((HALF == 0) | (is_whole != 0)) & ((steps > 0) | (not ACCUMULATE))


@gluon.jit
def _schedule(
    planned,
    queue,
    num_experts,
    tiles,
    first_rows,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP_ROWS: gl.constexpr,
):
    """Scheduler: hand out all tiles, expert after expert.

    Tiles at work at the same time should read the same columns. So they are taken in strips of BLOCK_N (or BLOCK_M)
    columns of D, over all of F, those of dw1 and dw3 together: both read x.
    """
    expert_start_e1, expert_rows_e = planned
    ring, ring_full, ring_empty = tiles
    F_TILES: gl.constexpr = (HIDDEN + BLOCK_M - 1) // BLOCK_M
    F_COLUMN_TILES: gl.constexpr = HIDDEN // BLOCK_N
    DW13_TILES: gl.constexpr = 2 * F_TILES * (DIM // BLOCK_N)
    DW2_TILES: gl.constexpr = (DIM + BLOCK_M - 1) // BLOCK_M * F_COLUMN_TILES
    TILES: gl.constexpr = DW13_TILES + DW2_TILES
    count = 0
    tile = gl.to_tensor(0).to(gl.int64)
    while tile >= 0:
        await_free_slot(ring_empty, count)
        index = claim(queue + _TILE_QUEUE, 1)
        tile = gl.to_tensor(STOP).to(gl.int64)
        if index < num_experts * TILES:
            expert = index // TILES
            first_row = gl.load(expert_start_e1 + expert)
            steps = (gl.load(expert_rows_e + expert) + STEP_ROWS - 1) // STEP_ROWS
            index = index % TILES
            product = index // F_TILES % 2
            m = index % F_TILES
            n = index // (2 * F_TILES)
            height = HIDDEN
            if index >= DW13_TILES:
                product = gl.to_tensor(_DW2)
                m = (index - DW13_TILES) // F_COLUMN_TILES
                n = (index - DW13_TILES) % F_COLUMN_TILES
                height = DIM
            is_whole = (m * BLOCK_M + HALF_M < height).to(gl.int32)
            tile = _pack(product, m, n, is_whole, expert, steps)
            _put_first_row(first_row, first_rows, count)
        hand_out(tile, ring, ring_full, count)
        count += 1


@gluon.jit
def _put_first_row(first_row, first_rows, count):
    """Scheduler: leave for the producer, beside the ``count``-th tile, where its expert's rows begin."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    first_rows.index(count % RING_SLOTS).store(gl.full([1], 0, gl.int32, layout) + first_row)


@gluon.jit
def _get_first_row(first_rows, count):
    """Producer: what :func:`_put_first_row` left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(first_rows.index(count % RING_SLOTS).load(layout), axis=0)


@gluon.jit
def _load(descs, operands, stages, tiles, first_rows, STAGES: gl.constexpr):
    """Producer: load the operands of each tile, up to STAGES steps ahead of the consumers."""
    x_desc, dout_desc, dgate_desc, dup_desc, scaled_h_desc = descs
    ring, ring_full, ring_empty = tiles
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        product, m, n, is_whole, _, steps = _unpack(tile)
        tile_place = (_get_first_row(first_rows, count), m, n, is_whole)
        if product == _DW1:
            _load_tile(dgate_desc, x_desc, tile_place, steps, step, operands, stages, STAGES)
        elif product == _DW3:
            _load_tile(dup_desc, x_desc, tile_place, steps, step, operands, stages, STAGES)
        else:
            _load_tile(dout_desc, scaled_h_desc, tile_place, steps, step, operands, stages, STAGES)
        step += steps
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _load_tile(left_desc, right_desc, tile_place, steps, step, operands, stages, STAGES: gl.constexpr):
    """Load all steps of one tile, the first of which is the producer's ``step``-th."""
    first_row, m, n, is_whole = tile_place
    left_bufs, right_bufs = operands
    stage_full, stage_empty = stages
    is_whole = is_whole != 0
    BYTES: gl.constexpr = right_desc.block_type.nbytes + left_desc.block_type.nbytes
    left_column = m * BLOCK_M
    right_column = n * right_desc.block_type.shape[1]
    for k in range(steps):
        stage = step % STAGES
        row = first_row + k * STEP
        full = stage_full.index(stage)
        mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full, BYTES, pred=not is_whole)
        mbarrier.expect(full, BYTES + left_desc.block_type.nbytes, pred=is_whole)
        async_load(left_desc, [row, left_column], full, left_bufs.index(2 * stage))
        async_load(right_desc, [row, right_column], full, right_bufs.index(stage))
        async_load(left_desc, [row, left_column + HALF_M], full, left_bufs.index(2 * stage + 1), pred=is_whole)
        step += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Consumer: 64 x BLOCK_N of a gradient, tile after tile.

    The two consumers share one buffer for what they have computed and take turns, the first one first. So they drift
    apart until one multiplies while the other empties its accumulators, and the tensor cores do not wait.
    """
    operands, turns, dw_buf, dw_full, stages, tiles = consumer
    left_bufs, right_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        _, _, _, is_whole, _, steps = _unpack(tile)
        if _is_written(HALF, is_whole, steps, ACCUMULATE):
            dw = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                left = left_bufs.index(2 * stage + HALF).permute((1, 0))
                dw = warpgroup_mma(left, right_bufs.index(stage), dw, is_async=True)
                # One product stays in flight. That of the step before is done, so its stage can be loaded again.
                dw = warpgroup_mma_wait(1, deps=(dw,))
                if k > 0:
                    mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
                step += 1
            dw = warpgroup_mma_wait(0, deps=(dw,))
            if steps > 0:
                mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
            finish_tile(ring_empty, count)
            mbarrier.wait(turns.index(HALF), count & 1)
            if ACCUMULATE:
                dw += dw_buf.load(layout).to(gl.float32)
            dw_buf.store(dw.to(gl.bfloat16))
            fence_async_shared()
        else:
            # Nothing to compute in this half: leave the tensor cores to the other one.
            step = skip_steps(stages, step, steps, STAGES)
            finish_tile(ring_empty, count)
            mbarrier.wait(turns.index(HALF), count & 1)
        mbarrier.arrive(dw_full.index(HALF), count=1)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _store(
    dw_descs,
    turns,
    dw_buf,
    dw_full,
    tiles,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Store warp: give the consumers their turns at the buffer, and write what they leave there.

    To accumulate, a consumer's turn begins when the buffer holds what its half of the gradient was. A buffer that is
    narrower than a tile has a turn for each of a half's parts.
    """
    dw1_desc, dw3_desc, dw2_desc = dw_descs
    ring, ring_full, ring_empty = tiles
    PART_N: gl.constexpr = dw1_desc.block_type.shape[1]
    PARTS: gl.constexpr = BLOCK_N // PART_N
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        product, m, n, is_whole, expert, steps = _unpack(tile)
        finish_tile(ring_empty, count)
        height = gl.where(product == _DW2, DIM, HIDDEN)
        for half in gl.static_range(2):
            row = expert * height + m * BLOCK_M + half * HALF_M
            for part in gl.static_range(PARTS):
                place = [row, n * BLOCK_N + part * PART_N]
                is_written = _is_written(half, is_whole, steps, ACCUMULATE)
                turn = turns.index(half)
                if ACCUMULATE and is_written:
                    mbarrier.expect(turn, dw1_desc.block_type.nbytes)
                    if product == _DW1:
                        async_load(dw1_desc, place, turn, dw_buf)
                    elif product == _DW3:
                        async_load(dw3_desc, place, turn, dw_buf)
                    else:
                        async_load(dw2_desc, place, turn, dw_buf)
                else:
                    mbarrier.arrive(turn, count=1)
                mbarrier.wait(dw_full.index(half), (count * PARTS + part) & 1)
                if is_written:
                    if product == _DW1:
                        async_store(dw1_desc, place, dw_buf)
                    elif product == _DW3:
                        async_store(dw3_desc, place, dw_buf)
                    else:
                        async_store(dw2_desc, place, dw_buf)
                    tma.store_wait(0)  # the buffer has been read
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    x_desc,
    dout_desc,
    dgate_desc,
    dup_desc,
    scaled_h_desc,
    dw1_desc,
    dw2_desc,
    dw3_desc,
    expert_start_e1,
    expert_rows_e,
    num_experts,
    queue,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
):
    left_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, STEP, HALF_M], dgate_desc.layout)
    right_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STEP, BLOCK_N], x_desc.layout)
    dw_buf = gl.allocate_shared_memory(gl.bfloat16, [HALF_M, BLOCK_N], dw1_desc.layout)
    first_rows = gl.allocate_shared_memory(gl.int32, [RING_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stages, tiles = make_pipeline(STAGES, 2, 4)  # both consumers, the producer and the store warp
    dw_full, turns = make_half_barriers()

    descs = (x_desc, dout_desc, dgate_desc, dup_desc, scaled_h_desc)
    operands = (left_bufs, right_bufs)
    planned = (expert_start_e1, expert_rows_e)
    consumer = (operands, turns, dw_buf, dw_full, stages, tiles)
    dw_descs = (dw1_desc, dw3_desc, dw2_desc)
    # Registers are granted per warpgroup, in this order: the last three roles share one with a warp that does nothing.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, STAGES, BLOCK_N, ACCUMULATE)),
            (_multiply, (1, consumer, STAGES, BLOCK_N, ACCUMULATE)),
            (_load, (descs, operands, stages, tiles, first_rows, STAGES)),
            (_schedule, (planned, queue, num_experts, tiles, first_rows, DIM, HIDDEN, BLOCK_N, STEP)),
            (_store, (dw_descs, turns, dw_buf, dw_full, tiles, DIM, HIDDEN, BLOCK_N, ACCUMULATE)),
            (idle, ()),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGS] + [OTHER_REGS] * 4,
    )
