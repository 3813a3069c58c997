"""Blockwise FP8 and MXFP8 against their definitions, block by block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from titan_megamoe.quantize import (
    BLOCK,
    FP8,
    FP8_MAX,
    MX_BLOCK,
    quantize_columns,
    quantize_mx,
    quantize_rows,
    quantize_weights,
)

sizes = st.integers(1, 300)


def matrix(rows: int, columns: int, seed: int = 0, *, leading: tuple[int, ...] = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, rows, columns, generator=generator)
    return x * torch.exp2(torch.randint(-20, 20, x.shape, generator=generator))


def expected(block: torch.Tensor) -> torch.Tensor:
    """A block after quantisation, written as its definition."""
    scale = block.abs().max() / FP8_MAX
    return (block * (FP8_MAX / block.abs().max())).to(FP8).float() * scale


@settings(max_examples=30, deadline=None)
@given(sizes, sizes, st.integers(0, 100))
def test_rows(rows, columns, seed):
    x = matrix(rows, columns, seed)
    blocks = quantize_rows(x)
    assert blocks.values.dtype == FP8 and blocks.scales.shape == (rows, math.ceil(columns / BLOCK))
    got = blocks.dequantize()
    for row in {0, rows // 2, rows - 1}:
        for start in range(0, columns, BLOCK):
            assert torch.equal(got[row, start : start + BLOCK], expected(x[row, start : start + BLOCK]))
    # Half a step of a 3-bit mantissa in the largest values' octave, which is 256 to 448.
    assert (got - x).abs().max() <= x.abs().max() * (16 / 448) * 1.001


@settings(max_examples=20, deadline=None)
@given(sizes, sizes, st.integers(0, 100))
def test_transposing_a_weight_transposes_its_blocks(rows, columns, seed):
    w = matrix(rows, columns, seed, leading=(2,))
    straight, transposed = quantize_weights(w), quantize_weights(w.transpose(-1, -2))
    assert torch.equal(straight.values.view(torch.uint8), transposed.values.transpose(-1, -2).view(torch.uint8))
    assert torch.equal(straight.scales, transposed.scales.transpose(-1, -2))
    got = straight.dequantize()
    for i in range(0, rows, BLOCK):
        for j in range(0, columns, BLOCK):
            part = (1, slice(i, i + BLOCK), slice(j, j + BLOCK))
            assert torch.equal(got[part], expected(w[part]))


def expected_mx(block: torch.Tensor) -> torch.Tensor:
    """A block of MXFP8, written as its definition: the smallest power of two with which nothing exceeds 448."""
    scale = 2.0 ** math.ceil(math.log2(block.abs().max().item() / FP8_MAX))
    return (block / scale).to(FP8).float() * scale


@settings(max_examples=30, deadline=None)
@given(sizes, sizes, st.integers(0, 100), st.sampled_from([torch.float32, torch.bfloat16]))
def test_mx(rows, columns, seed, dtype):
    x = matrix(rows, columns, seed, leading=(2,)).to(dtype)
    for dim, straight in ((-1, x), (-2, x.transpose(-1, -2))):
        blocks = quantize_mx(x, dim)
        assert blocks.values.dtype == FP8 and blocks.values.shape == x.shape
        assert blocks.scales.dtype == torch.float8_e8m0fnu
        got = blocks.dequantize() if dim == -1 else blocks.dequantize().transpose(-1, -2)
        for row in {0, straight.shape[1] - 1}:
            for start in range(0, straight.shape[2], MX_BLOCK):
                part = (1, row, slice(start, start + MX_BLOCK))
                assert torch.equal(got[part], expected_mx(straight[part].float()))


@pytest.mark.parametrize("number_format, block, expect", [("fp8", BLOCK, expected), ("mxfp8", MX_BLOCK, expected_mx)])
def test_columns_start_anew_with_each_expert(number_format, block, expect):
    x = matrix(500, 70)
    experts = [slice(0, 0), slice(0, 130), slice(130, 131), slice(131, 500)]
    got = quantize_columns(x, experts, number_format)
    for expert in experts:
        for start in range(expert.start, expert.stop, block):
            for column in (0, 33, 69):
                part = (slice(start, min(start + block, expert.stop)), column)
                assert torch.equal(got[part], expect(x[part]))


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_weights])
def test_special_values(quantize):
    assert not quantize(torch.zeros(3, 200)).dequantize().any()
    tiny = torch.full((2, 128), 1e-38)
    assert quantize(tiny).dequantize().isfinite().all()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(130, 256)
        x[0, 3] = bad
        got = quantize(x).dequantize()
        assert got[0, :128].isnan().all(), "it is not hidden"
        assert torch.equal(got[:, 128:], x[:, 128:]) and torch.equal(got[129], x[129]), "and stays in its block"


@pytest.mark.parametrize("dim", [-1, -2])
def test_special_values_in_mx(dim):
    def dequantised(x):
        return quantize_mx(x, dim).dequantize()

    assert not dequantised(torch.zeros(3, 200)).any()
    assert dequantised(torch.full((2, 128), 1e-38)).isfinite().all()
    large = torch.full((40, 40), 1.5 * 2.0**127)
    assert torch.equal(dequantised(large), large)
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(64, 64)
        x[3, 3] = bad
        got = dequantised(x)
        assert got[3, 3].isnan() if math.isnan(bad) else got[3, 3] == bad, "it is not hidden"
        got[:MX_BLOCK, :MX_BLOCK] = 1
        assert torch.equal(got, torch.ones(64, 64)), "and stays in its block"


def test_no_rows():
    assert quantize_mx(torch.empty(0, 256)).dequantize().shape == (0, 256)
    assert quantize_mx(torch.empty(0, 256), -2).dequantize().shape == (0, 256)
    assert quantize_rows(torch.empty(0, 256)).dequantize().shape == (0, 256)
    assert quantize_columns(torch.empty(0, 256), [slice(0, 0)]).shape == (0, 256)
