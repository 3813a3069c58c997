"""The quantisation kernels on a GPU: every value and scale as ``titan_megamoe/quantize.py`` computes them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.test_quantize_kernels import (
    check_columns,
    check_dequantize,
    check_mx_columns,
    check_mx_dequantize,
    check_mx_rows,
    check_mx_weights,
    check_rows,
    check_weights,
    EXPERTS,
    ROWS,
    WEIGHTS,
)
from titan_megamoe.quantize import FP8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [*ROWS, (0, 128), (16384, 2048), (5000, 7168)])
def test_rows(rows, width, dtype):
    check_rows(rows, width, dtype, device="cuda")


@pytest.mark.parametrize("experts, rows, columns", [*WEIGHTS, (16, 768, 2048)])
def test_weights(experts, rows, columns):
    check_weights(experts, rows, columns, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8])
@pytest.mark.parametrize("rows_of_experts", [*EXPERTS, [1000] * 8])
def test_columns(rows_of_experts, dtype):
    check_columns(rows_of_experts, 768, dtype, device="cuda")


@pytest.mark.parametrize("rows_of_experts", [*EXPERTS, [1000] * 8])
def test_dequantize(rows_of_experts):
    check_dequantize(rows_of_experts, 768, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [*ROWS, (16384, 2048), (5000, 7168)])
def test_mx_rows(rows, width, dtype):
    check_mx_rows(rows, width, dtype, device="cuda")


@pytest.mark.parametrize("experts, rows, columns", [*WEIGHTS, (16, 768, 2048)])
def test_mx_weights(experts, rows, columns):
    check_mx_weights(experts, rows, columns, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8])
@pytest.mark.parametrize("rows_of_experts", [*EXPERTS, [1000] * 8])
def test_mx_columns(rows_of_experts, dtype):
    check_mx_columns(rows_of_experts, 768, dtype, device="cuda")


@pytest.mark.parametrize("rows_of_experts", [*EXPERTS, [1000] * 8])
def test_mx_dequantize(rows_of_experts):
    check_mx_dequantize(rows_of_experts, 768, device="cuda")
