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

from ... import quantize
from ..launch import check_scales, check_sizes, check_tensor, grid_size
from ..plan_tables import Counters, KernelPlan
from .common import BLOCK_M as TILE_ROWS, claim, dot, GROUP, load_step, multiply_step, PADDING_M, trip_count
from .tuning import gpu_kind, step_depth, tune_weight_gradients, WeightGradientsTuning


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
    rows = dict(x_RD=x_RD, dout_RD=dout_RD, dgate_RF=dgate_RF, dup_RF=dup_RF, scaled_h_RF=scaled_h_RF)
    num_rows, dim = x_RD.shape
    hidden_dim = dw1_EFD.shape[1]
    for name, tensor in rows.items():
        check_tensor(
            "weight_gradients", name, tensor, (num_rows, dim if name.endswith("D") else hidden_dim), torch.bfloat16
        )
    _launch(
        "weight_gradients",
        (num_rows, dim, hidden_dim),
        plan,
        counters,
        tuple(rows.values()),
        None,
        dw1_EFD=dw1_EFD,
        dw2_EDF=dw2_EDF,
        dw3_EFD=dw3_EFD,
        accumulate=accumulate,
        num_sms=num_sms,
        tuning=tuning,
    )


def weight_gradients_mxfp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_DR: torch.Tensor,  # noqa: N803
    x_scales_Dg: torch.Tensor,  # noqa: N803
    dout_DR: torch.Tensor,  # noqa: N803
    dout_scales_Dg: torch.Tensor,  # noqa: N803
    dgate_FR: torch.Tensor,  # noqa: N803
    dgate_scales_Fg: torch.Tensor,  # noqa: N803
    dup_FR: torch.Tensor,  # noqa: N803
    dup_scales_Fg: torch.Tensor,  # noqa: N803
    scaled_h_FR: torch.Tensor,  # noqa: N803
    scaled_h_scales_Fg: torch.Tensor,  # noqa: N803
    dw1_EFD: torch.Tensor,  # noqa: N803
    dw2_EDF: torch.Tensor,  # noqa: N803
    dw3_EFD: torch.Tensor,  # noqa: N803
    accumulate: bool = False,
    num_sms: int | None = None,
    tuning: WeightGradientsTuning | None = None,
) -> None:
    """:func:`weight_gradients` in MXFP8, from rows as ``quantize_columns`` of ``kernels/quantize_mx.py`` writes them: transposed, e4m3 ``[D, R]``
    and ``[F, R]``, zeros in padding, with scales (e8m0 in uint8) of 32 rows, ``[D, R / 32]`` and ``[F, R / 32]``. D and F are multiples of 128.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "weight_gradients_mxfp8"
    dim, num_rows = x_DR.shape
    hidden_dim = dw1_EFD.shape[1]
    operands = (
        ("x_DR", x_DR, x_scales_Dg, dim),
        ("dout_DR", dout_DR, dout_scales_Dg, dim),
        ("dgate_FR", dgate_FR, dgate_scales_Fg, hidden_dim),
        ("dup_FR", dup_FR, dup_scales_Fg, hidden_dim),
        ("scaled_h_FR", scaled_h_FR, scaled_h_scales_Fg, hidden_dim),
    )
    for operand_name, values, scales, width in operands:
        check_tensor(name, operand_name, values, (width, num_rows), quantize.FP8)
        check_scales(name, f"the scales of {operand_name}", scales, (width, num_rows))
    _launch(
        name,
        (num_rows, dim, hidden_dim),
        plan,
        counters,
        tuple(values for _, values, _, _ in operands),
        tuple(scales for _, _, scales, _ in operands),
        dw1_EFD=dw1_EFD,
        dw2_EDF=dw2_EDF,
        dw3_EFD=dw3_EFD,
        accumulate=accumulate,
        num_sms=num_sms,
        tuning=tuning,
    )


def _launch(
    name: str,
    sizes: tuple[int, int, int],
    plan: KernelPlan,
    counters: Counters,
    rows: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] | None,
    *,
    dw1_EFD: torch.Tensor,  # noqa: N803
    dw2_EDF: torch.Tensor,  # noqa: N803
    dw3_EFD: torch.Tensor,  # noqa: N803
    accumulate: bool,
    num_sms: int | None,
    tuning: WeightGradientsTuning | None,
) -> None:
    """``rows``: x, dout, dgate, dup and scaled_h; ``scales``: theirs, in MXFP8."""
    is_mx = scales is not None
    num_rows, dim, hidden_dim = sizes
    num_experts = dw1_EFD.shape[0]
    for gradient_name, gradient, shape in (
        ("dw1_EFD", dw1_EFD, (num_experts, hidden_dim, dim)),
        ("dw2_EDF", dw2_EDF, (num_experts, dim, hidden_dim)),
        ("dw3_EFD", dw3_EFD, (num_experts, hidden_dim, dim)),
    ):
        check_tensor(name, gradient_name, gradient, shape, torch.bfloat16)
    check_tensor(name, "plan.expert_rows_e", plan.expert_rows_e, (num_experts,), torch.int32)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, plan.pull_rows_UK.shape[1], is_mx=is_mx)
    device = dw1_EFD.device
    num_programs = grid_size(name, num_sms, device)
    tuning = tuning or tune_weight_gradients(gpu_kind(device), dim, hidden_dim, is_mx=is_mx)
    weight_gradients_kernel[(num_programs,)](
        *rows,
        *(scales or rows),
        dw1_EFD,
        dw2_EDF,
        dw3_EFD,
        plan.expert_start_e1,
        plan.expert_rows_e,
        num_experts,
        num_rows,
        counters.queue,
        **weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate, is_mx=is_mx),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def weight_gradients_constants(
    tuning: WeightGradientsTuning, *, dim: int, hidden_dim: int, accumulate: bool, is_mx: bool = False
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "ACCUMULATE": accumulate,
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": step_depth(is_mx),
        "MX": is_mx,
    }


# ---- the kernel

_TILE_QUEUE = tl.constexpr(5)


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    x,  # [R, D]; in MX this and the next four transposed
    dout,
    dgate,
    dup,
    scaled_h,
    x_scales,
    dout_scales,
    dgate_scales,
    dup_scales,
    scaled_h_scales,
    dw1_EFD,
    dw2_EDF,
    dw3_EFD,
    expert_start_e1,
    expert_rows_e,
    num_experts,
    num_rows,
    queue,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MX: tl.constexpr,
):
    # All tiles, expert after expert. Those at work at the same time should read the same columns, so they are taken in strips of
    # columns of D, over all of F, those of dw1 and dw3 together: both read x.
    F_TILES: tl.constexpr = HIDDEN // BLOCK_M
    F_COLUMN_TILES: tl.constexpr = HIDDEN // BLOCK_N
    DW13_TILES: tl.constexpr = 2 * F_TILES * (DIM // BLOCK_N)
    TILES: tl.constexpr = DW13_TILES + DIM // BLOCK_M * F_COLUMN_TILES
    num_rows = tl.multiple_of(num_rows, TILE_ROWS)
    index = claim(queue + _TILE_QUEUE, 1)
    while index < num_experts * TILES:
        expert = index // TILES
        tile = index % TILES
        is_dw2 = tile >= DW13_TILES
        is_dw1 = tile // F_TILES % 2 == 0
        left, right, dw = dup, x, dw3_EFD
        left_scales, right_scales = dup_scales, x_scales
        height, width = HIDDEN, DIM
        m, n = tile % F_TILES, tile // (2 * F_TILES)
        if is_dw2:
            left, right, dw = dout, scaled_h, dw2_EDF
            left_scales, right_scales = dout_scales, scaled_h_scales
            height, width = DIM, HIDDEN
            m, n = (tile - DW13_TILES) // F_COLUMN_TILES, (tile - DW13_TILES) % F_COLUMN_TILES
        elif is_dw1:
            left, dw, left_scales = dgate, dw1_EFD, dgate_scales
        rows = tl.load(expert_rows_e + expert)
        if (rows > 0) | (not ACCUMULATE):  # an addition of nothing changes nothing
            first_row = tl.multiple_of(tl.load(expert_start_e1 + expert), TILE_ROWS).to(tl.int64)
            row, column = m * BLOCK_M, n * BLOCK_N
            if MX:
                product = _multiply_mx(
                    _columns_of(left, left_scales, row, first_row, num_rows),
                    _columns_of(right, right_scales, column, first_row, num_rows),
                    num_rows,
                    (rows + BLOCK_K - 1) // BLOCK_K,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
            else:
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
def _columns_of(values, scales, column, first_row, num_rows):
    """Columns of the rows of an expert, from ``column`` on, as an operand: they are rows of the transposed matrix."""
    at = column.to(tl.int64) * num_rows + first_row
    return values + at, scales + at // GROUP


@triton.jit
def _multiply_mx(left, right, num_rows, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """As :func:`_multiply`, of operands transposed. A step takes BLOCK_K rows, a tile of the pool, whose padding is zeros."""
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, trip_count(steps)):
        left_step = load_step(left, step * BLOCK_K, num_rows, BLOCK_M, BLOCK_K, True, "")
        right_step = load_step(right, step * BLOCK_K, num_rows, BLOCK_N, BLOCK_K, True, "")
        product = multiply_step(left_step, right_step, product, True)
    return product


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
