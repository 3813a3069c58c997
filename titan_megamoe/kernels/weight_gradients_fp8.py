"""``weight_gradients_fp8``: ``weight_gradients`` from rows in FP8.

For each local expert, with the rows of the pool that are its own:

    dw1 = dgate^T x        [F, D]
    dw3 = dup^T x          [F, D]
    dw2 = dout^T scaled_h  [D, F]

8-bit tensor cores want both operands contiguous along what is summed over, here rows of the pool: the five matrices come
from ``quantize_columns``, which transposes each tile of 128 rows, with a scale for each column of a tile. An expert's rows
begin with a tile, so each step of the main loop is one tile: its product is made in an accumulator of its own, and added to the
gradient in fp32, times the scales of the left matrix's columns and those of the right one's. (That also keeps sums exact:
the tensor cores add FP8 products with fewer bits than fp32 has.)

Roles, order of the tiles and a tile's way are those of ``weight_gradients``. A consumer makes up to 256 columns of its 64
rows, PART_N at a time, from the same left operand: a step's product takes half as many registers as the gradient does.
The buffer for results holds one part, so that one more step's operands fit beside it.

Shape suffixes are those of ``plan_tables.py``; here also r the 128 rows of a tile.
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
    finish_tile,
    grid_size,
    HALF_M,
    idle,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    RING_SLOTS,
    tile_descriptor,
)
from .plan_tables import Counters, KernelPlan
from .pull_gemm_fp8 import BLOCK, check_blocks, fp8_descriptor, scales_layout
from .tuning import tune_weight_gradients_fp8, WeightGradientsTuning
from .weight_gradients import (
    _DW1,
    _DW3,
    _get_first_row,
    _MAX_ROWS,
    _MAX_WIDTH,
    _schedule,
    _store,
    _unpack,
    weight_gradients_constants,
)

PART_N = BLOCK
"""Columns of a gradient that a consumer multiplies, and writes, at a time."""


def weight_gradients_fp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_MDr: torch.Tensor,  # noqa: N803
    x_scales_MD: torch.Tensor,  # noqa: N803
    dout_MDr: torch.Tensor,  # noqa: N803
    dout_scales_MD: torch.Tensor,  # noqa: N803
    dgate_MFr: torch.Tensor,  # noqa: N803
    dgate_scales_MF: torch.Tensor,  # noqa: N803
    dup_MFr: torch.Tensor,  # noqa: N803
    dup_scales_MF: torch.Tensor,  # noqa: N803
    scaled_h_MFr: torch.Tensor,  # noqa: N803
    scaled_h_scales_MF: torch.Tensor,  # noqa: N803
    dw1_EFD: torch.Tensor,  # noqa: N803
    dw2_EDF: torch.Tensor,  # noqa: N803
    dw3_EFD: torch.Tensor,  # noqa: N803
    accumulate: bool = False,
    num_sms: int | None = None,
    tuning: WeightGradientsTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    The five inputs are as ``quantize_columns`` writes them: e4m3, transposed, zeros in a tile's padding; and fp32 scales,
    one for each tile and column. What is in tiles that the plan does not use is not read.

    Args:
        plan: the routing plan that the rows are in the order of.
        counters: ``queue[5]`` must be zero, and is used up.
        x_MDr, x_scales_MD: ``[R / 128, D, 128]`` and ``[R / 128, D]``: the experts' inputs. D and F are multiples of 128.
        dout_MDr, dout_scales_MD: likewise, the gradient of the layer's output at each row's token.
        dgate_MFr, dgate_scales_MF: ``[R / 128, F, 128]`` and ``[R / 128, F]``, the gradient of the gate projection's result.
        dup_MFr, dup_scales_MF: likewise, that of the up projection's.
        scaled_h_MFr, scaled_h_scales_MF: likewise, silu(gate) * up, times the route's score.
        dw1_EFD: bf16 ``[e, F, D]``, this rank's experts, written.
        dw2_EDF: bf16 ``[e, D, F]``, likewise.
        dw3_EFD: bf16 ``[e, F, D]``, likewise.
        accumulate: add to what the gradients hold, in fp32, rounding once. Else an expert without rows gets zeros.
        num_sms: SMs to occupy, one CTA each; None: all. The result does not depend on it.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "weight_gradients_fp8"
    num_tiles, dim, _ = x_MDr.shape
    num_experts, hidden_dim, _ = dw1_EFD.shape
    num_rows = num_tiles * BLOCK_M.value
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, plan.pull_rows_UK.shape[1])
    check_blocks(name, dim, hidden_dim)
    for size_name, size, limit in (("R", num_rows, _MAX_ROWS), ("D", dim, _MAX_WIDTH), ("F", hidden_dim, _MAX_WIDTH)):
        if size >= limit:
            raise ValueError(f"{name}: {size_name} = {size}; less than {limit} is supported.")
    for values_name, values, scales_name, scales, width in (
        ("x_MDr", x_MDr, "x_scales_MD", x_scales_MD, dim),
        ("dout_MDr", dout_MDr, "dout_scales_MD", dout_scales_MD, dim),
        ("dgate_MFr", dgate_MFr, "dgate_scales_MF", dgate_scales_MF, hidden_dim),
        ("dup_MFr", dup_MFr, "dup_scales_MF", dup_scales_MF, hidden_dim),
        ("scaled_h_MFr", scaled_h_MFr, "scaled_h_scales_MF", scaled_h_scales_MF, hidden_dim),
    ):
        check_tensor(name, values_name, values, (num_tiles, width, BLOCK_M.value), quantize.FP8)
        check_tensor(name, scales_name, scales, (num_tiles, width), torch.float32)
    for gradient_name, gradient, shape in (
        ("dw1_EFD", dw1_EFD, (num_experts, hidden_dim, dim)),
        ("dw2_EDF", dw2_EDF, (num_experts, dim, hidden_dim)),
        ("dw3_EFD", dw3_EFD, (num_experts, hidden_dim, dim)),
    ):
        check_tensor(name, gradient_name, gradient, shape, torch.bfloat16)
    check_tensor(name, "plan.expert_rows_e", plan.expert_rows_e, (num_experts,), torch.int32)
    num_ctas = grid_size(name, num_sms, x_MDr.device)
    if num_rows == 0:  # of which the copy engine cannot be told
        if not accumulate:
            for gradient in (dw1_EFD, dw2_EDF, dw3_EFD):
                gradient.zero_()
        return

    tuning = tuning or tune_weight_gradients_fp8(dim, hidden_dim)
    left, right, half, part_n = BLOCK_M.value, tuning.block_n, HALF_M.value, PART_N.value
    weight_gradients_fp8_kernel[(num_ctas,)](
        fp8_descriptor(x_MDr.view(-1, BLOCK.value), right),
        fp8_descriptor(dout_MDr.view(-1, BLOCK.value), left),
        fp8_descriptor(dgate_MFr.view(-1, BLOCK.value), left),
        fp8_descriptor(dup_MFr.view(-1, BLOCK.value), left),
        fp8_descriptor(scaled_h_MFr.view(-1, BLOCK.value), right),
        _scales_descriptor(x_scales_MD),
        _scales_descriptor(dout_scales_MD),
        _scales_descriptor(dgate_scales_MF),
        _scales_descriptor(dup_scales_MF),
        _scales_descriptor(scaled_h_scales_MF),
        tile_descriptor(dw1_EFD.view(-1, dim), half, part_n),
        tile_descriptor(dw2_EDF.view(-1, hidden_dim), half, part_n),
        tile_descriptor(dw3_EFD.view(-1, dim), half, part_n),
        plan.expert_start_e1,
        plan.expert_rows_e,
        num_experts,
        counters.queue,
        **weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate),
        num_warps=4,
    )


def _scales_descriptor(scales_MI: torch.Tensor) -> TensorDescriptor:  # noqa: N803
    """How the copy engine reads the scales of 128 columns of a tile."""
    return TensorDescriptor.from_tensor(scales_MI, [1, BLOCK.value], scales_layout())


# ---- the kernel


@gluon.jit
def _load(
    descs,
    scales_descs,
    operands,
    stages,
    tiles,
    first_rows,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Producer: load the operands and their scales of each tile, up to STAGES steps ahead of the consumers."""
    x_desc, dout_desc, dgate_desc, dup_desc, scaled_h_desc = descs
    x_scales, dout_scales, dgate_scales, dup_scales, scaled_h_scales = scales_descs
    ring, ring_full, ring_empty = tiles
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        product, m, n, _, _, steps = _unpack(tile)
        place = (_get_first_row(first_rows, count), m * BLOCK_M, n * BLOCK_N)
        if product == _DW1:
            _load_tile(
                (dgate_desc, x_desc),
                (dgate_scales, x_scales),
                place,
                steps,
                step,
                operands,
                stages,
                HIDDEN,
                DIM,
                STAGES,
            )
        elif product == _DW3:
            _load_tile(
                (dup_desc, x_desc), (dup_scales, x_scales), place, steps, step, operands, stages, HIDDEN, DIM, STAGES
            )
        else:
            _load_tile(
                (dout_desc, scaled_h_desc),
                (dout_scales, scaled_h_scales),
                place,
                steps,
                step,
                operands,
                stages,
                DIM,
                HIDDEN,
                STAGES,
            )
        step += steps
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _load_tile(
    descs,
    scales_descs,
    place,
    steps,
    step,
    operands,
    stages,
    LEFT_WIDTH: gl.constexpr,
    RIGHT_WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load all steps of one tile, the first of which is the producer's ``step``-th."""
    left_desc, right_desc = descs
    left_scales_desc, right_scales_desc = scales_descs
    first_row, left_column, right_column = place
    left_bufs, right_bufs, left_scales_bufs, right_scales_bufs = operands
    stage_full, stage_empty = stages
    PARTS: gl.constexpr = right_desc.block_type.shape[0] // PART_N
    SCALES_BYTES: gl.constexpr = left_scales_desc.block_type.nbytes * (1 + PARTS)
    BYTES: gl.constexpr = left_desc.block_type.nbytes + right_desc.block_type.nbytes + SCALES_BYTES
    first_tile = first_row // BLOCK_M
    for k in range(steps):
        stage = step % STAGES
        row_tile = first_tile + k
        full = stage_full.index(stage)
        mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full, BYTES)
        async_load(left_desc, [row_tile * LEFT_WIDTH + left_column, 0], full, left_bufs.index(stage))
        async_load(right_desc, [row_tile * RIGHT_WIDTH + right_column, 0], full, right_bufs.index(stage))
        async_load(left_scales_desc, [row_tile, left_column], full, left_scales_bufs.index(stage))
        for part in gl.static_range(PARTS):
            at = [row_tile, right_column + part * PART_N]
            async_load(right_scales_desc, at, full, right_scales_bufs.index(PARTS * stage + part))
        step += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Consumer: 64 x BLOCK_N of a gradient, tile after tile, in turns as in ``weight_gradients``."""
    operands, turns, dw_buf, dw_full, stages, tiles = consumer
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    PARTS: gl.constexpr = BLOCK_N // PART_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 32])
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        _, _, _, _, _, steps = _unpack(tile)
        dw = gl.zeros([HALF_M, PART_N], gl.float32, layout)
        next_dw = gl.zeros([HALF_M, PART_N], gl.float32, layout)  # of a second part, if there is one
        for _ in range(steps):
            stage = step % STAGES
            mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
            dw = _add_product(dw, HALF, 0, PARTS, operands, stage_empty, stage)
            if PARTS == 2:
                next_dw = _add_product(next_dw, HALF, 1, PARTS, operands, stage_empty, stage)
            step += 1
        finish_tile(ring_empty, count)
        _hand_over(dw, HALF, count * PARTS, turns, dw_buf, dw_full, ACCUMULATE)
        if PARTS == 2:
            _hand_over(next_dw, HALF, count * PARTS + 1, turns, dw_buf, dw_full, ACCUMULATE)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _add_product(dw, HALF: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, operands, stage_empty, stage):
    """Consumer: add a step's product to a part of the gradient. With the last part, the stage can be loaded again."""
    left_bufs, right_bufs, left_scales_bufs, right_scales_bufs = operands
    layout: gl.constexpr = dw.type.layout
    left = left_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
    right = right_bufs.index(stage).slice(PART * PART_N, PART_N).permute((1, 0))
    zeros = gl.zeros([HALF_M, PART_N], gl.float32, layout)
    product = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
    left_scales = left_scales_bufs.index(stage).reshape([BLOCK_M]).slice(HALF * HALF_M, HALF_M)
    left_scale_r = left_scales.load(gl.SliceLayout(1, layout))
    product = warpgroup_mma_wait(0, deps=(product,))
    # Loaded only now, few at a time: there is no room for more beside the product and both parts of the gradient.
    right_scale_c = right_scales_bufs.index(PARTS * stage + PART).reshape([PART_N]).load(gl.SliceLayout(0, layout))
    dw += product * left_scale_r[:, None] * right_scale_c[None, :]
    if PART == PARTS - 1:
        mbarrier.arrive(stage_empty.index(stage), count=1)
    return dw


@gluon.jit
def _hand_over(dw, HALF: gl.constexpr, turn, turns, dw_buf, dw_full, ACCUMULATE: gl.constexpr):
    """Consumer: at its ``turn``-th turn, leave a part of the gradient to the store warp. Where that writes nothing (an
    expert without rows, accumulating), it does not matter what is left."""
    mbarrier.wait(turns.index(HALF), turn & 1)
    if ACCUMULATE:
        dw += dw_buf.load(dw.type.layout).to(gl.float32)
    dw_buf.store(dw.to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(dw_full.index(HALF), count=1)


@gluon.jit(do_not_specialize=["num_experts"])
def weight_gradients_fp8_kernel(
    x_desc,
    dout_desc,
    dgate_desc,
    dup_desc,
    scaled_h_desc,
    x_scales_desc,
    dout_scales_desc,
    dgate_scales_desc,
    dup_scales_desc,
    scaled_h_scales_desc,
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
    PARTS: gl.constexpr = BLOCK_N // PART_N
    left_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], dgate_desc.layout)
    right_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK], x_desc.layout)
    left_scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], dgate_scales_desc.layout)
    right_scales_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, 1, PART_N], x_scales_desc.layout)
    dw_buf = gl.allocate_shared_memory(gl.bfloat16, [HALF_M, PART_N], dw1_desc.layout)
    first_rows = gl.allocate_shared_memory(gl.int32, [RING_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stages, tiles = make_pipeline(STAGES, 2, 4)  # both consumers, the producer and the store warp
    dw_full, turns = make_half_barriers()

    descs = (x_desc, dout_desc, dgate_desc, dup_desc, scaled_h_desc)
    scales_descs = (x_scales_desc, dout_scales_desc, dgate_scales_desc, dup_scales_desc, scaled_h_scales_desc)
    operands = (left_bufs, right_bufs, left_scales_bufs, right_scales_bufs)
    planned = (expert_start_e1, expert_rows_e)
    consumer = (operands, turns, dw_buf, dw_full, stages, tiles)
    dw_descs = (dw1_desc, dw3_desc, dw2_desc)
    # Registers are granted per warpgroup, in this order: the last three roles share one with a warp that does nothing.
    gl.warp_specialize(
        [
            (_multiply, (0, consumer, STAGES, BLOCK_N, ACCUMULATE)),
            (_multiply, (1, consumer, STAGES, BLOCK_N, ACCUMULATE)),
            (_load, (descs, scales_descs, operands, stages, tiles, first_rows, DIM, HIDDEN, BLOCK_N, STAGES)),
            (_schedule, (planned, queue, num_experts, tiles, first_rows, DIM, HIDDEN, BLOCK_N, BLOCK_M)),
            (_store, (dw_descs, turns, dw_buf, dw_full, tiles, DIM, HIDDEN, BLOCK_N, ACCUMULATE)),
            (idle, ()),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGS] + [OTHER_REGS] * 4,
    )
