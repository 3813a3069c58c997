"""``weight_gradients`` in plain Triton: see ``kernels/weight_gradients.py`` for what it computes. There is nothing to communicate: all
programs multiply.

All three products go through one loop, for which a tile has the same shape in all: BLOCK_M columns of the left matrix, BLOCK_N of the
right one, which must divide both D and F. With a loop for each shape, each would have shared memory of its own.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import check_sizes, check_tensor, grid_size
from ..plan_tables import Counters, KernelPlan
from .common import claim, dot, PADDING_M, trip_count
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
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # All tiles, expert after expert. Those at work at the same time should read the same columns, so they are taken in strips of
    # columns of D, over all of F, those of dw1 and dw3 together: both read x.
    F_TILES: tl.constexpr = HIDDEN // BLOCK_M
    F_COLUMN_TILES: tl.constexpr = HIDDEN // BLOCK_N
    DW13_TILES: tl.constexpr = 2 * F_TILES * (DIM // BLOCK_N)
    TILES: tl.constexpr = DW13_TILES + DIM // BLOCK_M * F_COLUMN_TILES
    index = claim(queue + _TILE_QUEUE, 1)
    while index < num_experts * TILES:
        expert = index // TILES
        tile = index % TILES
        is_dw2 = tile >= DW13_TILES
        is_dw1 = tile // F_TILES % 2 == 0
        left, right, dw = dup_RF, x_RD, dw3_EFD
        height, width = HIDDEN, DIM
        m, n = tile % F_TILES, tile // (2 * F_TILES)
        if is_dw2:
            left, right, dw = dout_RD, scaled_h_RF, dw2_EDF
            height, width = DIM, HIDDEN
            m, n = (tile - DW13_TILES) // F_COLUMN_TILES, (tile - DW13_TILES) % F_COLUMN_TILES
        elif is_dw1:
            left, dw = dgate_RF, dw1_EFD
        rows = tl.load(expert_rows_e + expert)
        if (rows > 0) | (not ACCUMULATE):  # an addition of nothing changes nothing
            first_row = tl.load(expert_start_e1 + expert).to(tl.int64)
            row, column = m * BLOCK_M, n * BLOCK_N
            product = _multiply(
                left + first_row * height + row,
                right + first_row * width + column,
                height,
                width,
                (rows + PADDING_M - 1) // PADDING_M,
                BLOCK_M,
                BLOCK_N,
            )
            dw += (expert.to(tl.int64) * height + row) * width + column
            dw_offsets = tl.arange(0, BLOCK_M)[:, None] * width + tl.arange(0, BLOCK_N)[None, :]
            if ACCUMULATE:
                product += tl.load(dw + dw_offsets).to(tl.float32)
            tl.store(dw + dw_offsets, product.to(tl.bfloat16))
        index = claim(queue + _TILE_QUEUE, 1)


@triton.jit
def _multiply(left, right, left_width, right_width, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``left^T right`` ``[BLOCK_M, BLOCK_N]``, summed over an expert's rows, given the first element of both. A step takes PADDING_M
    rows, the last of them zeros where there are no more."""
    row_r = tl.arange(0, PADDING_M)[:, None]
    left_offsets = row_r * left_width + tl.arange(0, BLOCK_M)[None, :]
    right_offsets = row_r * right_width + tl.arange(0, BLOCK_N)[None, :]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, trip_count(steps)):
        left_rows = tl.load(left + left_offsets)
        right_rows = tl.load(right + right_offsets)
        product = dot(tl.trans(left_rows), right_rows, product)
        left += PADDING_M * left_width
        right += PADDING_M * right_width
    return product
