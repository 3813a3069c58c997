"""Blockwise FP8 in plain PyTorch: what the FP8 kernels must reproduce, value for value.

e4m3 values (``torch.float8_e4m3fn``: 4 exponent and 3 mantissa bits, largest 448, no infinities) with one fp32 scale for each
block, chosen so that the block's largest magnitude becomes 448:

    rows      1 x 128 along the last dimension: activations, as the left factor of a product that contracts it
    columns   128 x 1 within an expert's rows, from its first row on: factors of the weight gradients, which contract rows
    weights   128 x 128: transposing a weight transposes its blocks, so both orientations are one quantisation

A block at the end may be smaller. Zeros stay zeros; a block that holds an infinity or a NaN is all NaN after
dequantisation, so that neither is hidden.

Shape suffixes are those of ``plan.py``; here also B blocks of 128, and I, J any dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

MIN_AMAX = 1e-30
"""Below it a block counts as zeros: ``448 / amax`` must be finite."""


@dataclass(frozen=True)
class Blocks:
    """A quantised matrix: ``values`` in FP8; ``scales`` in fp32, one for each block, at the same positions."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    """Rows and columns of a block."""

    def dequantize(self) -> torch.Tensor:
        """fp32, exactly value times scale rounded once."""
        return self.values.float() * _spread(self.scales, self.block, self.values.shape)


def quantize_rows(x_RI: torch.Tensor) -> Blocks:
    """``[..., I]``: a scale for each 128 elements of a row."""
    return _quantize(x_RI, (1, BLOCK))


def quantize_weights(w_EIJ: torch.Tensor) -> Blocks:
    """``[..., I, J]``: a scale for each 128 x 128 elements."""
    return _quantize(w_EIJ, (BLOCK, BLOCK))


def quantize_columns(x_RI: torch.Tensor, experts: Iterable[slice]) -> torch.Tensor:
    """fp32 ``[R, I]``, quantised and dequantised with a scale for each 128 rows of an expert and column. ``experts``: the rows
    of each expert."""
    out_RI = x_RI.new_empty(x_RI.shape, dtype=torch.float32)
    for rows in experts:
        out_RI[rows] = _quantize(x_RI[rows], (BLOCK, 1)).dequantize()
    return out_RI


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
