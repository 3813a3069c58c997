"""Blockwise FP8 on the device, value for value what ``titan_megamoe/quantize.py`` computes.

    quantize_rows      activations, for products that contract their last dimension
    quantize_weights   weights, both orientations in one pass: 8-bit tensor cores want both factors contiguous along what
                       is contracted, which for a weight is one dimension in forward and the other in backward
    quantize_columns   rows of the pool, for weight gradients: each tile of 128 rows transposed, so that they are contiguous
    dequantize_rows    rows of the pool back in bf16, for weight gradients in bf16

Shape suffixes are those of ``plan_tables.py``; here also I, J any dimension, b blocks of 128, and r the 128 rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import quantize
from .plan_tables import BLOCK_M, KernelPlan
from .waiting import INTERPRETED

_BLOCK = tl.constexpr(quantize.BLOCK)
_FP8_MAX = tl.constexpr(quantize.FP8_MAX)
_MIN_AMAX = tl.constexpr(quantize.MIN_AMAX)

_ROWS = 16
"""Rows of a program of ``quantize_rows``."""

_PART = 32
"""Rows of a program of ``dequantize_rows``."""

_COLUMNS = {1: (128, 8), 2: (64, 4), 4: (64, 4)}
"""Of ``quantize_columns``, by an element's bytes: columns of a program (128 bytes of a row, or 256), and its warps. Several
programs fit on an SM, so that some load while others compute."""


def quantize_rows(x_RI: torch.Tensor, values_RI: torch.Tensor, scales_Rb: torch.Tensor) -> None:  # noqa: N803
    """Quantise each 128 elements of a row.

    Args:
        x_RI: ``[R, I]`` bf16 or fp32, contiguous.
        values_RI: ``[R, I]`` e4m3, written.
        scales_Rb: ``[R, I / 128 rounded up]`` fp32, written.
    """
    num_rows, width = x_RI.shape
    check_buffer("values_RI", values_RI, (num_rows, width), quantize.FP8)
    check_buffer("scales_Rb", scales_Rb, (num_rows, triton.cdiv(width, quantize.BLOCK)), torch.float32)
    if x_RI.numel():
        grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(width, quantize.BLOCK))
        quantize_rows_kernel[grid](x_RI, values_RI, scales_Rb, num_rows, width, BLOCK_R=_ROWS, num_warps=4)


def quantize_weights(
    w_EIJ: torch.Tensor,  # noqa: N803
    values_EIJ: torch.Tensor,  # noqa: N803
    transposed_EJI: torch.Tensor,  # noqa: N803
    scales_Ebb: torch.Tensor,  # noqa: N803
) -> None:
    """Quantise each 128 x 128 elements of an expert's matrix.

    Args:
        w_EIJ: ``[E, I, J]`` bf16, contiguous; I is a multiple of 4.
        values_EIJ, transposed_EJI: e4m3, written: the same values in both orientations.
        scales_Ebb: fp32 ``[E, I / 128, J / 128]``, each rounded up, written; the other orientation's are its transpose.
    """
    num_experts, rows, columns = w_EIJ.shape
    blocks = triton.cdiv(rows, quantize.BLOCK), triton.cdiv(columns, quantize.BLOCK)
    check_buffer("w_EIJ", w_EIJ, (num_experts, rows, columns), torch.bfloat16)
    if rows % 4:
        raise ValueError(f"quantize: w_EIJ has {rows} rows, which is not a multiple of 4. Pad the model's.")
    check_buffer("values_EIJ", values_EIJ, (num_experts, rows, columns), quantize.FP8)
    check_buffer("transposed_EJI", transposed_EJI, (num_experts, columns, rows), quantize.FP8)
    check_buffer("scales_Ebb", scales_Ebb, (num_experts, *blocks), torch.float32)
    if w_EIJ.numel():
        quantize_weights_kernel[(num_experts, *blocks)](
            w_EIJ, values_EIJ, transposed_EJI, scales_Ebb, rows, columns, num_warps=8
        )


def quantize_columns(
    plan: KernelPlan,
    x_RI: torch.Tensor,  # noqa: N803
    values_MIr: torch.Tensor,  # noqa: N803
    scales_MI: torch.Tensor,  # noqa: N803
    *,
    row_scales_bR: torch.Tensor | None = None,  # noqa: N803
) -> None:
    """Quantise each 128 rows of an expert, column by column, and transpose each of them: what a program reads here, or a step of the
    weight gradients there, is one piece of memory.

    Args:
        plan: says which rows there are. Tiles of 128 rows are the blocks.
        x_RI: ``[R, I]`` bf16 or fp32, contiguous, R a multiple of 128; or e4m3 as :func:`quantize_rows` writes it, with
        row_scales_bR: fp32 ``[I / 128 rounded up, R]``, its scales: those of a block of 128 columns lie side by side, as the
            kernels that pull rows leave them.
        values_MIr: ``[R / 128, I, 128]`` e4m3, written where there are tiles: zeros in padding.
        scales_MI: ``[R / 128, I]`` fp32, written where there are tiles.
    """
    num_rows, width = x_RI.shape
    check_buffer("values_MIr", values_MIr, (num_rows // BLOCK_M, width, BLOCK_M), quantize.FP8)
    check_buffer("scales_MI", scales_MI, (num_rows // BLOCK_M, width), torch.float32)
    is_fp8 = x_RI.dtype == quantize.FP8
    if is_fp8 != (row_scales_bR is not None):
        raise ValueError(
            f"quantize_columns: pass row_scales_bR with e4m3 rows, and only with them; x_RI is {x_RI.dtype}."
        )
    if is_fp8:
        check_buffer("row_scales_bR", row_scales_bR, (triton.cdiv(width, quantize.BLOCK), num_rows), torch.float32)
    if x_RI.numel():
        columns, num_warps = _COLUMNS[x_RI.element_size()]
        quantize_columns_kernel[(num_rows // BLOCK_M * triton.cdiv(width, columns),)](
            x_RI,
            row_scales_bR if is_fp8 else scales_MI,
            plan.sizes,
            plan.tile_rows_M,
            values_MIr,
            scales_MI,
            num_rows,
            width,
            HAS_ROW_SCALES=is_fp8,
            COLUMNS=columns,
            num_warps=num_warps,
        )


def dequantize_rows(
    plan: KernelPlan,
    values_RI: torch.Tensor,  # noqa: N803
    scales_bR: torch.Tensor,  # noqa: N803
    out_RI: torch.Tensor,  # noqa: N803
) -> None:
    """Rows of the pool back from FP8, for weight gradients in bf16.

    Args:
        plan: says which rows there are.
        values_RI: ``[R, I]`` e4m3, R a multiple of 128.
        scales_bR: fp32 ``[I / 128 rounded up, R]``: those of a block of 128 columns lie side by side.
        out_RI: ``[R, I]`` bf16, written where there are tiles: zeros in padding.
    """
    num_rows, width = values_RI.shape
    check_buffer("scales_bR", scales_bR, (triton.cdiv(width, quantize.BLOCK), num_rows), torch.float32)
    check_buffer("out_RI", out_RI, (num_rows, width), torch.bfloat16)
    if values_RI.numel():
        dequantize_rows_kernel[(num_rows // _PART, triton.cdiv(width, quantize.BLOCK))](
            values_RI, scales_bR, plan.sizes, plan.tile_rows_M, out_RI, num_rows, width, PART=_PART, num_warps=4
        )


def check_buffer(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` is as a quantisation kernel reads or writes it."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"quantize: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}, contiguous."
        )


if INTERPRETED:

    def _round_to_fp8(x):
        """As PyTorch rounds, and as NVIDIA's GPUs do, saturating: the interpreter's own conversion loses carries into the exponent, cuts off
        subnormals, and makes numbers of NaN."""
        values = (
            torch.from_numpy(x.handle.data.copy())
            .clamp(-quantize.FP8_MAX, quantize.FP8_MAX)
            .to(quantize.FP8)
            .view(torch.uint8)
            .numpy()
        )
        as_bytes = tl.zeros(x.shape, tl.uint8)
        as_bytes.handle.data = values
        return as_bytes.to(tl.float8e4nv, bitcast=True)

else:

    @triton.jit
    def _round_to_fp8(x):
        return x.to(tl.float8e4nv)


@triton.jit
def to_fp8(x):
    """e4m3 of fp32, on any GPU. Rounding of what is scaled may leave the largest value just above 448; NaN must stay."""
    return _round_to_fp8(tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, axis: tl.constexpr):
    """Largest magnitude along ``axis``, at least _MIN_AMAX; NaN if there is one."""
    return _larger(tl.reduce(tl.abs(x), axis, _larger), _MIN_AMAX)


@triton.jit
def _scale(amax):
    return tl.div_rn(amax, tl.zeros_like(amax) + _FP8_MAX)  # rounded as PyTorch does; `/` is an approximation


@triton.jit
def _inverse(amax):
    return tl.div_rn(tl.zeros_like(amax) + _FP8_MAX, amax)


@triton.jit
def quantize_rows_kernel(x_RI, values_RI, scales_Rb, num_rows, width, BLOCK_R: tl.constexpr):
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.program_id(1)
    column_I = block * _BLOCK + tl.arange(0, _BLOCK)
    is_row_R = row_R < num_rows
    is_inside_RI = is_row_R[:, None] & (column_I < width)[None, :]
    at_RI = row_R[:, None] * width + column_I[None, :]
    x = tl.load(x_RI + at_RI, mask=is_inside_RI, other=0.0).to(tl.float32)
    amax_R = _amax(x, 1)
    tl.store(values_RI + at_RI, _round_to_fp8(x * _inverse(amax_R)[:, None]), mask=is_inside_RI)
    tl.store(scales_Rb + row_R * tl.cdiv(width, _BLOCK) + block, _scale(amax_R), mask=is_row_R)


@triton.jit
def quantize_weights_kernel(w_EIJ, values_EIJ, transposed_EJI, scales_Ebb, rows, columns):
    """A block to a program, read once. Rows are held as four matrices, as in :func:`quantize_columns_kernel`."""
    matrix = tl.program_id(0).to(tl.int64) * rows * columns
    first_row = tl.program_id(1) * _BLOCK
    first_column = tl.program_id(2) * _BLOCK
    column_J = tl.arange(0, _BLOCK)
    is_column_J = column_J < columns - first_column
    fourth_I = tl.arange(0, _BLOCK // 4)
    # Where this program's elements begin: from there, 32 bits say where each is.
    first = matrix + first_row.to(tl.int64) * columns + first_column
    limits = (rows - first_row, is_column_J)
    w0 = _load_rows(w_EIJ + first, columns, scales_Ebb, 4 * fourth_I, column_J, limits, False)
    w1 = _load_rows(w_EIJ + first, columns, scales_Ebb, 4 * fourth_I + 1, column_J, limits, False)
    w2 = _load_rows(w_EIJ + first, columns, scales_Ebb, 4 * fourth_I + 2, column_J, limits, False)
    w3 = _load_rows(w_EIJ + first, columns, scales_Ebb, 4 * fourth_I + 3, column_J, limits, False)
    largest = _larger(_larger(tl.abs(w0), tl.abs(w1)), _larger(tl.abs(w2), tl.abs(w3)))
    amax = tl.reduce(_amax(largest, 0), 0, _larger)
    inverse = _inverse(amax)
    # Converted once for each orientation: ptxas loses bytes that tl.split gave where they are stored as they are.
    _store_rows(values_EIJ + first, columns, 4 * fourth_I, column_J, limits, w0 * inverse)
    _store_rows(values_EIJ + first, columns, 4 * fourth_I + 1, column_J, limits, w1 * inverse)
    _store_rows(values_EIJ + first, columns, 4 * fourth_I + 2, column_J, limits, w2 * inverse)
    _store_rows(values_EIJ + first, columns, 4 * fourth_I + 3, column_J, limits, w3 * inverse)
    b0, b1 = _to_bytes(w0, w1, inverse)
    b2, b3 = _to_bytes(w2, w3, inverse)
    transposed = transposed_EJI + matrix + first_column.to(tl.int64) * rows + first_row
    transposed = transposed.to(tl.pointer_type(tl.int32), bitcast=True)
    at_JI = column_J[:, None] * (rows // 4) + fourth_I[None, :]
    is_inside_JI = is_column_J[:, None] & (4 * fourth_I < rows - first_row)[None, :]
    words = _to_half_word(b0, b1) | (_to_half_word(b2, b3) << 16)
    tl.store(transposed + at_JI, tl.trans(words), mask=is_inside_JI)
    block = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(scales_Ebb + block, _scale(amax))


@triton.jit
def _store_rows(values, width, row_R, column_I, limits, rows):
    num_rows, is_column_I = limits
    is_inside_RI = (row_R < num_rows)[:, None] & is_column_I[None, :]
    tl.store(values + row_R[:, None] * width + column_I[None, :], _round_to_fp8(rows), mask=is_inside_RI)


@triton.jit
def quantize_columns_kernel(
    x_RI,
    row_scales_bR,
    sizes,
    tile_rows_M,
    values_MIr,
    scales_MI,
    num_rows,
    width,
    HAS_ROW_SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a tile, a divisor of _BLOCK, to a program.

    Rows are held as four matrices of every fourth row, so that four values of a column can become one word in a thread's
    registers: transposing words takes a quarter of the accesses to shared memory that transposing bytes does.
    """
    # All columns of a tile, then those of the next: programs that run at the same time read whole rows, and write what lies
    # side by side.
    num_blocks = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // num_blocks
    first_column = tl.program_id(0) % num_blocks * COLUMNS
    num_tile_rows = tl.load(tile_rows_M + tile)  # what is in padding is not read
    if tile < tl.load(sizes):
        column_I = tl.arange(0, COLUMNS)
        is_column_I = column_I < width - first_column
        fourth_R = tl.arange(0, _BLOCK // 4)
        first_row = tile.to(tl.int64) * _BLOCK
        # Where this program's elements begin: from there, 32 bits say where each is.
        x = x_RI + first_row * width + first_column
        row_scales_R = row_scales_bR + (first_column // _BLOCK).to(tl.int64) * num_rows + first_row
        values = (values_MIr + first_row * width + first_column * _BLOCK).to(tl.pointer_type(tl.int32), bitcast=True)
        limits = (num_tile_rows, is_column_I)
        x0 = _load_rows(x, width, row_scales_R, 4 * fourth_R, column_I, limits, HAS_ROW_SCALES)
        x1 = _load_rows(x, width, row_scales_R, 4 * fourth_R + 1, column_I, limits, HAS_ROW_SCALES)
        x2 = _load_rows(x, width, row_scales_R, 4 * fourth_R + 2, column_I, limits, HAS_ROW_SCALES)
        x3 = _load_rows(x, width, row_scales_R, 4 * fourth_R + 3, column_I, limits, HAS_ROW_SCALES)
        largest = _larger(_larger(tl.abs(x0), tl.abs(x1)), _larger(tl.abs(x2), tl.abs(x3)))
        # A division is many instructions: gathering brings what is divided to where each column is one thread's, and back.
        amax_I = tl.gather(_amax(largest, 0), column_I, 0)
        inverse = tl.gather(_inverse(amax_I), column_I, 0)[None, :]
        b0, b1 = _to_bytes(x0, x1, inverse)
        b2, b3 = _to_bytes(x2, x3, inverse)
        words = _to_half_word(b0, b1) | (_to_half_word(b2, b3) << 16)
        at_Ir = column_I[:, None] * (_BLOCK // 4) + fourth_R[None, :]
        tl.store(values + at_Ir, tl.trans(words), mask=is_column_I[:, None])
        tl.store(scales_MI + tile.to(tl.int64) * width + first_column + column_I, _scale(amax_I), mask=is_column_I)


@triton.jit
def _load_rows(x, width, row_scales_R, row_R, column_I, limits, HAS_ROW_SCALES: tl.constexpr):
    """These rows, of those that begin at ``x``, in fp32; zeros outside of the limits."""
    num_tile_rows, is_column_I = limits
    is_row_R = row_R < num_tile_rows
    is_inside_RI = is_row_R[:, None] & is_column_I[None, :]
    rows = tl.load(x + row_R[:, None] * width + column_I[None, :], mask=is_inside_RI, other=0.0).to(tl.float32)
    if HAS_ROW_SCALES:
        rows *= tl.load(row_scales_R + row_R, mask=is_row_R, other=0.0)[:, None]
    return rows


@triton.jit
def _to_bytes(x0, x1, inverse):
    """Both in FP8, as uint8: one instruction converts two values that are neighbours, which joining makes them."""
    return tl.split(_round_to_fp8(tl.join(x0 * inverse, x1 * inverse)).to(tl.uint8, bitcast=True))


@triton.jit
def _to_half_word(low, high):
    return low.to(tl.int32) | (high.to(tl.int32) << 8)


@triton.jit
def dequantize_rows_kernel(values_RI, scales_bR, sizes, tile_rows_M, out_RI, num_rows, width, PART: tl.constexpr):
    """PART rows of a tile to a program."""
    row_R = tl.program_id(0) * PART + tl.arange(0, PART)
    tile = tl.program_id(0) * PART // _BLOCK
    if tile < tl.load(sizes):
        block = tl.program_id(1)
        column_I = block * _BLOCK + tl.arange(0, _BLOCK)
        is_row_R = row_R - tile * _BLOCK < tl.load(tile_rows_M + tile)  # what is in padding is not read
        is_column_RI = (column_I < width)[None, :]
        at_RI = row_R.to(tl.int64)[:, None] * width + column_I[None, :]
        values = tl.load(values_RI + at_RI, mask=is_row_R[:, None] & is_column_RI, other=0.0).to(tl.float32)
        scale_R = tl.load(scales_bR + block.to(tl.int64) * num_rows + row_R, mask=is_row_R, other=0.0)
        tl.store(out_RI + at_RI, (values * scale_R[:, None]).to(tl.bfloat16), mask=is_column_RI)
