"""Blockwise FP8 and MXFP8 in plain PyTorch: what the kernels must reproduce, value for value. And which precision uses which.

Blockwise FP8 is e4m3 values (``torch.float8_e4m3fn``: 4 exponent and 3 mantissa bits, largest 448, no infinities) with one fp32 scale for each
block, chosen so that the block's largest magnitude becomes 448:

    rows      1 x 128 along the last dimension: activations, as the left factor of a product that contracts it
    columns   128 x 1 within an expert's rows, from its first row on: factors of the weight gradients, which contract rows
    weights   128 x 128: transposing a weight transposes its blocks, so both orientations are one quantisation

A block at the end may be smaller. Zeros stay zeros; a block that holds an infinity or a NaN is all NaN after
dequantisation, so that neither is hidden.

MXFP8 (OCP Microscaling Formats 1.0) is e4m3 values, too, with a power of two (e8m0: 8 bits of exponent) for each 32 elements along what is
contracted. Blocks of 1 x 32 do not transpose, so a matrix is quantised anew for each dimension along which it is contracted. Of an
infinity's block, the scale is 2^127, at which the infinity comes back as one; a NaN makes its block NaN.

Shape suffixes are those of ``plan.py``; here also B blocks of 128, and I, J any dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

MX_BLOCK = 32

MIN_AMAX = 1e-30
"""Below it a block counts as zeros: ``448 / amax`` must be finite."""


@dataclass(frozen=True)
class Formats:
    """What the GEMMs of a precision multiply: ``"fp8"`` (blockwise), ``"mxfp8"``, or None for the inputs' own dtype."""

    forward: str | None
    backward: str | None

    def of_weight_gradients(self, wgrad: str) -> str | None:
        """Given ``wgrad`` of :func:`titan_megamoe.mega_moe`."""
        return self.backward if wgrad == self.backward else None

    @property
    def wgrads(self) -> tuple[str, ...]:
        """What ``wgrad`` may be."""
        return ("bf16", "fp8", "mxfp8") if self.backward is None else ("bf16", self.backward)


FORMATS = {
    "bf16": Formats(forward=None, backward=None),
    "fp8": Formats(forward="fp8", backward="fp8"),
    "fp8_bwd": Formats(forward=None, backward="fp8"),
    "mxfp8": Formats(forward="mxfp8", backward="mxfp8"),
}
"""By precision. Without a quantised backward, ``wgrad`` says nothing, and may be anything."""


@dataclass(frozen=True)
class Blocks:
    """A quantised matrix: ``values`` in FP8; ``scales`` in fp32, in MXFP8 in e8m0, one for each block, at the same positions."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    """Rows and columns of a block."""

    def dequantize(self) -> torch.Tensor:
        """fp32, exactly value times scale rounded once."""
        return self.values.float() * _spread(self.scales.float(), self.block, self.values.shape)


def quantize_rows(x_RI: torch.Tensor) -> Blocks:
    """``[..., I]``: a scale for each 128 elements of a row."""
    return _quantize(x_RI, (1, BLOCK))


def quantize_weights(w_EIJ: torch.Tensor) -> Blocks:
    """``[..., I, J]``: a scale for each 128 x 128 elements."""
    return _quantize(w_EIJ, (BLOCK, BLOCK))


def quantize_columns(x_RI: torch.Tensor, experts: Iterable[slice], number_format: str = "fp8") -> torch.Tensor:
    """fp32 ``[R, I]``, quantised and dequantised with a scale for each 128 rows (in MXFP8 32) of an expert and column. ``experts``:
    the rows of each expert."""
    out_RI = x_RI.new_empty(x_RI.shape, dtype=torch.float32)
    for rows in experts:
        blocks = quantize_mx(x_RI[rows], dim=-2) if number_format == "mxfp8" else _quantize(x_RI[rows], (BLOCK, 1))
        out_RI[rows] = blocks.dequantize()
    return out_RI


def quantize_mx(x_RI: torch.Tensor, dim: int = -1) -> Blocks:
    """``[..., R, I]`` in MXFP8: a scale for each 32 elements along ``dim``, -1 or -2.

    By torchao, whose formats TorchTitan's own MXFP8 uses, with scales rounded up (RCEIL, the recipe of cuBLAS and of TorchTitan's
    grouped GEMMs): the smallest power of two with which no value of the block exceeds 448. Rounded down (FLOOR, as the
    specification recommends) they would cut off values between 448 and 512 times the scale.
    """
    # Here, for it takes seconds to import and no other precision needs it.
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    if dim == -2:
        transposed = quantize_mx(x_RI.transpose(-1, -2))
        values_RI, scales_rI = (t.transpose(-1, -2) for t in (transposed.values, transposed.scales))
        return Blocks(values=values_RI, scales=scales_rI, block=(MX_BLOCK, 1))
    width = x_RI.shape[-1]
    padded = torch.nn.functional.pad(x_RI.float(), (0, -width % MX_BLOCK)).contiguous()
    scales_Ri, values = to_mx(padded, FP8, MX_BLOCK, ScaleCalculationMode.RCEIL)
    return Blocks(values=values[..., :width], scales=scales_Ri, block=(1, MX_BLOCK))


def _quantize(x: torch.Tensor, block: tuple[int, int]) -> Blocks:
    x = x.float()
    amax = _block_amax(x.abs(), block).clamp(min=MIN_AMAX)  # clamp and amax keep NaN
    # A tensor: with a number, PyTorch would multiply by a reciprocal instead of dividing.
    largest = torch.full_like(amax, FP8_MAX)
    inverse = _spread(largest / amax, block, x.shape)
    values = (x * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Blocks(values=values, scales=amax / largest, block=block)


def _block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = x.shape[-2:]
    padding = (0, -columns % block[1], 0, -rows % block[0])
    x = torch.nn.functional.pad(x, padding)  # zeros do not change the largest magnitude
    x = x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return x.amax(dim=(-3, -1))


def _spread(per_block: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The value of each element's block, for a matrix of that shape."""
    spread = per_block.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return spread[..., : shape[-2], : shape[-1]]
