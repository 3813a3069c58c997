"""``weight_gradients`` in plain Triton: see ``kernels/weight_gradients.py`` for what it computes. There is nothing to communicate: all
programs multiply.

A tile has BLOCK_F columns of F on one side and BLOCK_D of D on the other, whichever of the products it is of.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import check_sizes, check_tensor, grid_size
from ..plan_tables import Counters, KernelPlan
from .common import claim, dot, matrix_offsets, PADDING_M, row_of, trip_count
from .tuning import gpu_kind, tune_weight_gradients, WeightGradientsTuning


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
        num_sms: programs to launch, at most one for each SM; None: so many. The result does not depend on it.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "weight_gradients"
    num_rows, dim = x_RD.shape
    num_experts, hidden_dim, _ = dw1_EFD.shape
    for tensor_name, tensor, shape in (
        ("x_RD", x_RD, (num_rows, dim)),
        ("dout_RD", dout_RD, (num_rows, dim)),
        ("dgate_RF", dgate_RF, (num_rows, hidden_dim)),
        ("dup_RF", dup_RF, (num_rows, hidden_dim)),
        ("scaled_h_RF", scaled_h_RF, (num_rows, hidden_dim)),
        ("dw1_EFD", dw1_EFD, (num_experts, hidden_dim, dim)),
        ("dw2_EDF", dw2_EDF, (num_experts, dim, hidden_dim)),
        ("dw3_EFD", dw3_EFD, (num_experts, hidden_dim, dim)),
    ):
        check_tensor(name, tensor_name, tensor, shape, torch.bfloat16)
    check_tensor(name, "plan.expert_rows_e", plan.expert_rows_e, (num_experts,), torch.int32)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, plan.pull_rows_UK.shape[1])
    num_programs = grid_size(name, num_sms, x_RD.device)
    tuning = tuning or tune_weight_gradients(gpu_kind(x_RD.device), dim, hidden_dim)
    weight_gradients_kernel[(num_programs,)](
        x_RD,
        dout_RD,
        dgate_RF,
        dup_RF,
        scaled_h_RF,
        dw1_EFD,
        dw2_EDF,
        dw3_EFD,
        plan.expert_start_e1,
        plan.expert_rows_e,
        num_experts,
        counters.queue,
        **weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def weight_gradients_constants(
    tuning: WeightGradientsTuning, *, dim: int, hidden_dim: int, accumulate: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "ACCUMULATE": accumulate,
        "BLOCK_D": tuning.block_d,
        "BLOCK_F": tuning.block_f,
    }


# ---- the kernel

_TILE_QUEUE = tl.constexpr(5)


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    x_RD,
    dout_RD,
    dgate_RF,
    dup_RF,
    scaled_h_RF,
    dw1_EFD,
    dw2_EDF,
    dw3_EFD,
    expert_start_e1,
    expert_rows_e,
    num_experts,
    queue,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # All tiles, expert after expert. Those at work at the same time should read the same columns, so they are taken in strips of
    # columns of D, over all of F, those of dw1 and dw3 together: both read x.
    F_TILES: tl.constexpr = HIDDEN // BLOCK_F
    D_TILES: tl.constexpr = DIM // BLOCK_D
    DW13_TILES: tl.constexpr = 2 * F_TILES * D_TILES
    TILES: tl.constexpr = DW13_TILES + D_TILES * F_TILES
    index = claim(queue + _TILE_QUEUE, 1)
    while index < num_experts * TILES:
        expert = index // TILES
        first_row = tl.load(expert_start_e1 + expert)
        rows = tl.load(expert_rows_e + expert)
        tile = index % TILES
        if (rows > 0) | (not ACCUMULATE):  # an addition of nothing changes nothing
            if tile < DW13_TILES:
                d = tile // (2 * F_TILES) * BLOCK_D
                f = tile % F_TILES * BLOCK_F
                x = row_of(x_RD, first_row, DIM) + d
                if tile // F_TILES % 2 == 0:
                    dgate = row_of(dgate_RF, first_row, HIDDEN) + f
                    dw = row_of(dw1_EFD, expert.to(tl.int64) * HIDDEN + f, DIM) + d
                    _write_product(dw, dgate, x, rows, HIDDEN, DIM, BLOCK_F, BLOCK_D, ACCUMULATE)
                else:
                    dup = row_of(dup_RF, first_row, HIDDEN) + f
                    dw = row_of(dw3_EFD, expert.to(tl.int64) * HIDDEN + f, DIM) + d
                    _write_product(dw, dup, x, rows, HIDDEN, DIM, BLOCK_F, BLOCK_D, ACCUMULATE)
            else:
                d = (tile - DW13_TILES) // F_TILES * BLOCK_D
                f = (tile - DW13_TILES) % F_TILES * BLOCK_F
                dout = row_of(dout_RD, first_row, DIM) + d
                scaled_h = row_of(scaled_h_RF, first_row, HIDDEN) + f
                dw = row_of(dw2_EDF, expert.to(tl.int64) * DIM + d, HIDDEN) + f
                _write_product(dw, dout, scaled_h, rows, DIM, HIDDEN, BLOCK_D, BLOCK_F, ACCUMULATE)
        index = claim(queue + _TILE_QUEUE, 1)


@triton.jit
def _write_product(
    dw_tile,
    left_tile,
    right_tile,
    rows,
    LEFT_STRIDE: tl.constexpr,
    RIGHT_STRIDE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """``left^T right`` ``[LEFT, RIGHT]``, summed over an expert's rows, to where the gradient's tile begins. A step takes PADDING_M
    rows, the last of them zeros where there are no more."""
    left_offsets = matrix_offsets(PADDING_M, LEFT, LEFT_STRIDE)
    right_offsets = matrix_offsets(PADDING_M, RIGHT, RIGHT_STRIDE)
    dw_offsets = matrix_offsets(LEFT, RIGHT, RIGHT_STRIDE)
    dw = tl.zeros([LEFT, RIGHT], tl.float32)
    for step in range(0, trip_count((rows + PADDING_M - 1) // PADDING_M)):
        left = tl.load(left_tile + left_offsets)
        right = tl.load(right_tile + right_offsets)
        dw = dot(tl.trans(left), right, dw)
        left_tile += PADDING_M * LEFT_STRIDE
        right_tile += PADDING_M * RIGHT_STRIDE
    if ACCUMULATE:
        dw += tl.load(dw_tile + dw_offsets).to(tl.float32)
    tl.store(dw_tile + dw_offsets, dw.to(tl.bfloat16))
