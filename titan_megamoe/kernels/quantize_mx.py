"""MXFP8 on the device: the bits that ``quantize_mx`` of ``titan_megamoe/quantize.py`` (torchao's) makes.

    quantize_rows      activations and weights, for products that contract their last dimension
    quantize_columns   rows of the pool, for weight gradients: transposed, so that an expert's rows are contiguous
    dequantize_rows    rows of the pool back in bf16, for weight gradients in bf16

Scales are e8m0 in uint8: 2 to the power of the number less 127.

A scale is the smallest power of two with which a block's largest magnitude, m 2^k with 1 <= m < 2, does not exceed 448 = 1.75 * 2^8:
2^(k - 8), or twice that if m > 1.75. So it follows from the bits of the magnitude. torchao takes a logarithm in fp32, which cannot tell
some m from 1.75 that are a few units of the last place above it: then its scale is half of this one, and the value is cut off to 448
times that. It happens to no value of bf16.

Shape suffixes are those of ``plan_tables.py``; here also I, any dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import quantize
from .plan_tables import BLOCK_M, KernelPlan
from .quantize import check_buffer, to_fp8

_GROUP = tl.constexpr(quantize.MX_BLOCK)
_TILE = tl.constexpr(BLOCK_M)
_ROWS, _COLUMNS = 32, 128
"""Of a program of ``quantize_rows`` and ``dequantize_rows``."""

_TRANSPOSED_COLUMNS = 64
"""Of a program of ``quantize_columns``, which holds all rows of a tile."""


def quantize_rows(x_RI: torch.Tensor, values_RI: torch.Tensor, scales_Rg: torch.Tensor) -> None:  # noqa: N803
    """Quantise each 32 elements of a row.

    Args:
        x_RI: ``[R, I]`` bf16 or fp32, contiguous; I a multiple of 32.
        values_RI: ``[R, I]`` e4m3, written.
        scales_Rg: ``[R, I / 32]`` uint8, written.
    """
    num_rows, width = x_RI.shape
    _check_rows(values_RI, scales_Rg, num_rows, width)
    if x_RI.numel():
        grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS))
        quantize_rows_kernel[grid](
            x_RI, values_RI, scales_Rg, num_rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
        )


def quantize_columns(
    plan: KernelPlan,
    x_RI: torch.Tensor,  # noqa: N803
    values_IR: torch.Tensor,  # noqa: N803
    scales_Ig: torch.Tensor,  # noqa: N803
    *,
    row_scales_Rg: torch.Tensor | None = None,  # noqa: N803
) -> None:
    """Quantise each 32 rows of an expert, column by column, and transpose.

    Args:
        plan: says which rows there are.
        x_RI: ``[R, I]`` bf16 or fp32, contiguous, R a multiple of 128 and I one of 32; or e4m3 as :func:`quantize_rows` writes it, with
        row_scales_Rg: uint8 ``[R, I / 32]``, its scales.
        values_IR: ``[I, R]`` e4m3, written where there are tiles: zeros in padding.
        scales_Ig: ``[I, R / 32]`` uint8, written where there are tiles.
    """
    num_rows, width = x_RI.shape
    check_buffer("values_IR", values_IR, (width, num_rows), quantize.FP8)
    check_buffer("scales_Ig", scales_Ig, (width, num_rows // quantize.MX_BLOCK), torch.uint8)
    is_fp8 = x_RI.dtype == quantize.FP8
    if is_fp8 != (row_scales_Rg is not None):
        raise ValueError(
            f"quantize_columns: pass row_scales_Rg with e4m3 rows, and only with them; x_RI is {x_RI.dtype}."
        )
    if is_fp8:
        _check_rows(x_RI, row_scales_Rg, num_rows, width)
    if x_RI.numel():
        quantize_columns_kernel[(num_rows // BLOCK_M, triton.cdiv(width, _TRANSPOSED_COLUMNS))](
            x_RI,
            row_scales_Rg if is_fp8 else scales_Ig,
            plan.sizes,
            plan.tile_rows_M,
            values_IR,
            scales_Ig,
            num_rows,
            width,
            HAS_ROW_SCALES=is_fp8,
            COLUMNS=_TRANSPOSED_COLUMNS,
            num_warps=8,
        )


def dequantize_rows(
    plan: KernelPlan,
    values_RI: torch.Tensor,  # noqa: N803
    scales_Rg: torch.Tensor,  # noqa: N803
    out_RI: torch.Tensor,  # noqa: N803
) -> None:
    """Rows of the pool back from MXFP8, exactly, for weight gradients in bf16.

    Args:
        plan: says which rows there are.
        values_RI: ``[R, I]`` e4m3, R a multiple of 128 and I one of 32.
        scales_Rg: uint8 ``[R, I / 32]``.
        out_RI: ``[R, I]`` bf16, written where there are tiles: zeros in padding.
    """
    num_rows, width = values_RI.shape
    _check_rows(values_RI, scales_Rg, num_rows, width)
    check_buffer("out_RI", out_RI, (num_rows, width), torch.bfloat16)
    if values_RI.numel():
        dequantize_rows_kernel[(num_rows // _ROWS, triton.cdiv(width, _COLUMNS))](
            values_RI,
            scales_Rg,
            plan.sizes,
            plan.tile_rows_M,
            out_RI,
            width,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )


def _check_rows(values_RI: torch.Tensor, scales_Rg: torch.Tensor, num_rows: int, width: int) -> None:  # noqa: N803
    if width % quantize.MX_BLOCK:
        raise ValueError(f"quantize: rows of {width} columns; MXFP8 needs a multiple of {quantize.MX_BLOCK}.")
    check_buffer("values_RI", values_RI, (num_rows, width), quantize.FP8)
    check_buffer("scales_Rg", scales_Rg, (num_rows, width // quantize.MX_BLOCK), torch.uint8)


@triton.jit
def to_mx(x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """e4m3 ``[HEIGHT, WIDTH]`` and uint8 ``[HEIGHT, WIDTH / 32]`` of fp32 ``[HEIGHT, WIDTH]``."""
    x = x.reshape([HEIGHT, WIDTH // _GROUP, _GROUP])
    # As integers, magnitudes are in order, with infinity behind all numbers and NaN behind infinity.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    mantissa = largest & 0x7FFFFF
    scale = tl.maximum((largest >> 23) - 8 + (mantissa > 0x600000).to(tl.int32), 0)
    scale = tl.where(largest >= 0x7F800000, tl.where(mantissa == 0, 254, 255), scale)
    # 2^(127 - scale). 0, whose block rounds to zeros, is given 1; 2^-127, an infinity's, is no normal number.
    inverse = tl.where(scale == 0, 127 << 23, (254 - scale) << 23)
    inverse = tl.where(scale == 254, 0x00400000, inverse)
    inverse = tl.where(scale == 255, largest, inverse).to(tl.float32, bitcast=True)
    values = to_fp8(x * inverse[:, :, None])
    return values.reshape([HEIGHT, WIDTH]), scale.to(tl.uint8)


@triton.jit
def from_mx(values, scales, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 ``[HEIGHT, WIDTH]`` of what :func:`to_mx` returns."""
    # For a scale of 0 this is 0 instead of 2^-127: its values are zeros. 255 is NaN.
    exponent = scales.to(tl.int32)
    factor = tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    groups = values.to(tl.float32).reshape([HEIGHT, WIDTH // _GROUP, _GROUP])
    return (groups * factor[:, :, None]).reshape([HEIGHT, WIDTH])


@triton.jit
def quantize_rows_kernel(x_RI, values_RI, scales_Rg, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_I = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group_g = tl.program_id(1) * (COLUMNS // _GROUP) + tl.arange(0, COLUMNS // _GROUP)
    is_inside_RI = (row_R < num_rows)[:, None] & (column_I < width)[None, :]
    is_inside_Rg = (row_R < num_rows)[:, None] & (group_g < width // _GROUP)[None, :]
    at_RI = row_R[:, None] * width + column_I[None, :]
    x = tl.load(x_RI + at_RI, mask=is_inside_RI, other=0.0).to(tl.float32)
    values, scales = to_mx(x, ROWS, COLUMNS)
    tl.store(values_RI + at_RI, values, mask=is_inside_RI)
    tl.store(scales_Rg + row_R[:, None] * (width // _GROUP) + group_g[None, :], scales, mask=is_inside_Rg)


@triton.jit
def quantize_columns_kernel(
    x_RI,
    row_scales_Rg,
    sizes,
    tile_rows_M,
    values_IR,
    scales_Ig,
    num_rows,
    width,
    HAS_ROW_SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a tile to a program."""
    tile = tl.program_id(0)
    if tile < tl.load(sizes):
        row_R = tl.arange(0, _TILE)
        first_row = tile.to(tl.int64) * _TILE
        column_I = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row_R = row_R < tl.load(tile_rows_M + tile)  # what is in padding is not read
        is_column_I = column_I < width
        at_RI = (first_row + row_R)[:, None] * width + column_I[None, :]
        x = tl.load(x_RI + at_RI, mask=is_row_R[:, None] & is_column_I[None, :], other=0.0)
        if HAS_ROW_SCALES:
            group_g = tl.program_id(1) * (COLUMNS // _GROUP) + tl.arange(0, COLUMNS // _GROUP)
            at_Rg = (first_row + row_R)[:, None] * (width // _GROUP) + group_g[None, :]
            is_group_g = group_g < width // _GROUP
            scales = tl.load(row_scales_Rg + at_Rg, mask=is_row_R[:, None] & is_group_g[None, :], other=0)
            x = from_mx(x, scales, _TILE, COLUMNS)
        values, scales = to_mx(tl.trans(x.to(tl.float32)), COLUMNS, _TILE)
        at_IR = column_I.to(tl.int64)[:, None] * num_rows + (first_row + row_R)[None, :]
        tl.store(values_IR + at_IR, values, mask=is_column_I[:, None])
        group_of_rows = first_row // _GROUP + tl.arange(0, _TILE // _GROUP)
        at_Ig = column_I.to(tl.int64)[:, None] * (num_rows // _GROUP) + group_of_rows[None, :]
        tl.store(scales_Ig + at_Ig, scales, mask=is_column_I[:, None])


@triton.jit
def dequantize_rows_kernel(
    values_RI, scales_Rg, sizes, tile_rows_M, out_RI, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS rows of a tile to a program."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) * ROWS // _TILE
    if tile < tl.load(sizes):
        column_I = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        group_g = tl.program_id(1) * (COLUMNS // _GROUP) + tl.arange(0, COLUMNS // _GROUP)
        is_row_R = row_R - tile * _TILE < tl.load(tile_rows_M + tile)  # what is in padding is not read
        is_column_RI = (column_I < width)[None, :]
        at_RI = row_R.to(tl.int64)[:, None] * width + column_I[None, :]
        at_Rg = row_R.to(tl.int64)[:, None] * (width // _GROUP) + group_g[None, :]
        values = tl.load(values_RI + at_RI, mask=is_row_R[:, None] & is_column_RI, other=0.0)
        is_group_Rg = is_row_R[:, None] & (group_g < width // _GROUP)[None, :]
        scales = tl.load(scales_Rg + at_Rg, mask=is_group_Rg, other=0)
        tl.store(out_RI + at_RI, from_mx(values, scales, ROWS, COLUMNS).to(tl.bfloat16), mask=is_column_RI)
