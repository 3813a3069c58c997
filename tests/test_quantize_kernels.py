"""The quantisation kernels: under Triton's interpreter against ``titan_megamoe/quantize.py``, and compiled for Hopper.

Triton decides when it is imported whether kernels are interpreted, so the former run in a pytest of their own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from titan_megamoe import quantize as reference
from titan_megamoe.kernels import quantize, quantize_mx
from titan_megamoe.weight_cache import NO_CACHE, quantized

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# ---- used under the interpreter here and on a GPU by tests/gpu


def random_matrix(*shape: int, device="cpu", dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Magnitudes over many octaves, some rows of zeros, and a NaN and an infinity where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp2(torch.randint(-12, 12, shape, generator=generator))
    x[..., ::7, :] = 0
    if x.shape[-2] > 3 and x.shape[-1] > 140:
        x[..., 1, 3], x[..., 2, 135] = math.nan, math.inf
    return x.to(device, dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with NaN equal to NaN (whose sign and payload are nobody's business)."""
    a, b = a.float(), b.float()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_rows(rows: int, width: int, dtype: torch.dtype, device="cpu") -> None:
    x = random_matrix(rows, width, dtype=dtype, device=device)
    values = torch.empty(x.shape, dtype=reference.FP8, device=device)
    scales = torch.full((rows, math.ceil(width / 128)), -1.0, device=device)
    quantize.quantize_rows(x, values, scales)
    expected = reference.quantize_rows(x)
    assert same_bits(values, expected.values) and same_bits(scales, expected.scales)


def check_weights(experts: int, rows: int, columns: int, device="cpu") -> None:
    w = random_matrix(experts, rows, columns, dtype=torch.bfloat16, device=device)
    values = torch.empty(w.shape, dtype=reference.FP8, device=device)
    transposed = torch.empty(experts, columns, rows, dtype=reference.FP8, device=device)
    scales = torch.full((experts, math.ceil(rows / 128), math.ceil(columns / 128)), -1.0, device=device)
    quantize.quantize_weights(w, values, transposed, scales)
    expected = reference.quantize_weights(w)
    assert same_bits(values, expected.values) and same_bits(scales, expected.scales)
    assert same_bits(transposed, expected.values.transpose(1, 2))


def plan_of(rows_of_experts: list[int], device) -> tuple[SimpleNamespace, int]:
    """What the kernels need of a plan, and the pool's rows: those of its tiles, and of one that it does not use."""
    tiles = [min(128, rows - first) for rows in rows_of_experts for first in range(0, rows, 128)]
    plan = SimpleNamespace(
        sizes=torch.tensor([len(tiles), 0, 0, 0], dtype=torch.int32, device=device),
        tile_rows_M=torch.tensor(tiles + [99], dtype=torch.int32, device=device),
    )
    return plan, 128 * (len(tiles) + 1)


def check_columns(rows_of_experts: list[int], width: int, dtype: torch.dtype, device="cpu") -> None:
    plan, num_rows = plan_of(rows_of_experts, device)
    tiles = plan.tile_rows_M[: int(plan.sizes[0])].tolist()
    is_fp8 = dtype == reference.FP8
    x = random_matrix(num_rows, width, device=device, dtype=torch.float32 if is_fp8 else dtype)
    row_scales = None
    exact = x.float()
    if is_fp8:
        if INTERPRETED:
            x = x.nan_to_num(0, 0, 0)
        blocks = reference.quantize_rows(x)
        x, row_scales, exact = blocks.values, blocks.scales.T.contiguous(), blocks.dequantize()
    values = torch.empty(num_rows // 128, width, 128, dtype=reference.FP8, device=device)
    scales = torch.full((num_rows // 128, width), -1.0, device=device)
    quantize.quantize_columns(plan, x, values, scales, row_scales_bR=row_scales)
    for tile, rows in enumerate(tiles):
        start = 128 * tile
        expected = reference._quantize(exact[start : start + rows], (128, 1))
        assert same_bits(values[tile, :, :rows].T, expected.values), tile
        assert same_bits(scales[tile], expected.scales[0]), tile
        padding = values[tile, :, rows:].float()
        is_finite = scales[tile].isfinite()
        assert not padding[is_finite].any()
    assert bool((scales[len(tiles)] == -1).all())


def check_dequantize(rows_of_experts: list[int], width: int, device="cpu") -> None:
    plan, num_rows = plan_of(rows_of_experts, device)
    blocks = reference.quantize_rows(random_matrix(num_rows, width, device=device).nan_to_num(0, 0, 0))
    out = torch.full((num_rows, width), math.nan, dtype=torch.bfloat16, device=device)
    quantize.dequantize_rows(plan, blocks.values, blocks.scales.T.contiguous(), out)
    expected = blocks.dequantize().bfloat16()
    num_tiles = int(plan.sizes[0])
    for tile, rows in enumerate(plan.tile_rows_M[:num_tiles].tolist()):
        start = 128 * tile
        # The interpreter cuts off where it should round.
        close = torch.isclose(
            out[start : start + rows], expected[start : start + rows], rtol=2**-7 * INTERPRETED, atol=0
        )
        assert bool(close.all()), tile
        assert not out[start + rows : start + 128].any(), tile
    assert out[128 * num_tiles :].isnan().all()


def check_mx_rows(rows: int, width: int, dtype: torch.dtype, device="cpu") -> None:
    x = random_matrix(rows, width, dtype=dtype, device=device)
    x[0, :3] = torch.tensor(
        [448, 1e-38, -449]
    )  # the largest that needs no larger scale, hardly anything, and one that does
    values = torch.empty(x.shape, dtype=reference.FP8, device=device)
    scales = torch.full((rows, width // 32), 77, dtype=torch.uint8, device=device)
    quantize_mx.quantize_rows(x, values, scales)
    expected = reference.quantize_mx(x)
    assert same_bits(values, expected.values) and torch.equal(scales, expected.scales.view(torch.uint8))


def check_mx_weights(experts: int, rows: int, columns: int, device="cpu") -> None:
    w = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    made = quantized(w, "w1", NO_CACHE, "mxfp8")
    for dim, values, scales in (
        (-1, made.values_EIJ, made.scales_EIg),
        (-2, made.transposed_EJI.transpose(1, 2), made.transposed_scales_EJg.transpose(1, 2)),
    ):
        expected = reference.quantize_mx(w, dim)
        assert same_bits(values, expected.values) and torch.equal(scales, expected.scales.view(torch.uint8))


def check_mx_columns(rows_of_experts: list[int], width: int, dtype: torch.dtype, device="cpu") -> None:
    plan, num_rows = plan_of(rows_of_experts, device)
    is_fp8 = dtype == reference.FP8
    x = random_matrix(num_rows, width, device=device, dtype=torch.float32 if is_fp8 else dtype)
    row_scales, exact = None, x
    if is_fp8:
        blocks = reference.quantize_mx(x)
        x, row_scales, exact = blocks.values, blocks.scales.view(torch.uint8), blocks.dequantize()
    values = torch.empty(width, num_rows, dtype=reference.FP8, device=device)
    scales = torch.full((width, num_rows // 32), 77, dtype=torch.uint8, device=device)
    quantize_mx.quantize_columns(plan, x, values, scales, row_scales_Rg=row_scales)
    tiles = plan.tile_rows_M[: int(plan.sizes[0])].tolist()
    for tile, rows in enumerate(tiles):
        padded = torch.zeros(128, width, device=device)
        padded[:rows] = exact[128 * tile : 128 * tile + rows]
        expected = reference.quantize_mx(padded, dim=-2)
        assert same_bits(values[:, 128 * tile : 128 * (tile + 1)].T, expected.values), tile
        assert torch.equal(scales[:, 4 * tile : 4 * (tile + 1)].T, expected.scales.view(torch.uint8)), tile
    assert bool((scales[:, 4 * len(tiles) :] == 77).all())


def check_mx_dequantize(rows_of_experts: list[int], width: int, device="cpu") -> None:
    plan, num_rows = plan_of(rows_of_experts, device)
    blocks = reference.quantize_mx(random_matrix(num_rows, width, device=device))
    out = torch.full((num_rows, width), math.nan, dtype=torch.bfloat16, device=device)
    quantize_mx.dequantize_rows(plan, blocks.values, blocks.scales.view(torch.uint8), out)
    for tile, rows in enumerate(plan.tile_rows_M[: int(plan.sizes[0])].tolist()):
        start = 128 * tile
        assert same_bits(out[start : start + rows], blocks.dequantize()[start : start + rows]), "it is exact"
        assert not out[start + rows : start + 128].any(), tile


ROWS = [(1, 64), (37, 320), (16, 128), (3, 2048)]
WEIGHTS = [(2, 128, 128), (3, 192, 320), (1, 64, 448)]
EXPERTS = [[130, 0, 1, 128], [300]]

if INTERPRETED:

    @pytest.mark.parametrize("rows, width", ROWS)
    def test_rows(rows, width):
        check_rows(rows, width, torch.float32)

    @pytest.mark.parametrize("experts, rows, columns", WEIGHTS)
    def test_weights(experts, rows, columns):
        check_weights(experts, rows, columns)

    @pytest.mark.parametrize("rows_of_experts", EXPERTS)
    @pytest.mark.parametrize("dtype", [torch.float32, reference.FP8])
    def test_columns(rows_of_experts, dtype):
        check_columns(rows_of_experts, 192, dtype)

    @pytest.mark.parametrize("rows_of_experts", EXPERTS)
    def test_dequantize(rows_of_experts):
        check_dequantize(rows_of_experts, 192)

    @pytest.mark.parametrize("rows, width", ROWS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_mx_rows(rows, width, dtype):
        check_mx_rows(rows, width, dtype)

    @pytest.mark.parametrize("experts, rows, columns", WEIGHTS)
    def test_mx_weights(experts, rows, columns, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        check_mx_weights(experts, rows, columns)

    @pytest.mark.parametrize("rows_of_experts", EXPERTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, reference.FP8])
    def test_mx_columns(rows_of_experts, dtype):
        check_mx_columns(rows_of_experts, 192, dtype)

    @pytest.mark.parametrize("rows_of_experts", EXPERTS)
    def test_mx_dequantize(rows_of_experts):
        check_mx_dequantize(rows_of_experts, 192)

    def test_arguments_are_checked():
        x = torch.zeros(4, 128)
        values, scales = torch.empty(4, 128, dtype=reference.FP8), torch.empty(4, 1)
        with pytest.raises(
            ValueError, match=r"values_RI is \(4, 128\) torch.float32; expected \(4, 128\) torch.float8"
        ):
            quantize.quantize_rows(x, x, scales)
        with pytest.raises(ValueError, match=r"scales_Rb is \(4, 2\)"):
            quantize.quantize_rows(x, values, torch.empty(4, 2))
        with pytest.raises(ValueError, match="pass row_scales_bR with e4m3 rows, and only with them"):
            quantize.quantize_columns(
                None,
                torch.zeros(128, 4),
                torch.empty(1, 4, 128, dtype=reference.FP8),
                torch.empty(1, 4),
                row_scales_bR=scales,
            )

else:
    from tests.compiled import check_code
    from tests.test_plan_compile import compile_kernel

    def test_kernels_under_the_interpreter():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr

    def check_compiled(compiled) -> None:
        check_code(compiled)
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]

    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_rows_compile(dtype):
        pointers = dict(x_RI=dtype, values_RI="fp8e4nv", scales_Rb="fp32")
        constants = dict(BLOCK_R=quantize._ROWS)
        check_compiled(
            compile_kernel(quantize.quantize_rows_kernel, pointers, dict(num_rows="i32", width="i32"), constants, 4)
        )

    def test_weights_compile():
        pointers = dict(w_EIJ="bf16", values_EIJ="fp8e4nv", transposed_EJI="fp8e4nv", scales_Ebb="fp32")
        kernel, scalars = quantize.quantize_weights_kernel, dict(rows="i32", columns="i32")
        compiled = compile_kernel(kernel, pointers, scalars, {}, 8, multiples_of_16=tuple(scalars))
        check_compiled(compiled)
        ptx = compiled.asm["ptx"]
        assert ptx.count("ld.global.v4") == 8, "each element is read once, 16 bytes at a time"
        assert "shared.b8" not in ptx, "words are transposed, not bytes"

    def test_dequantize_compiles():
        pointers = dict(values_RI="fp8e4nv", scales_bR="fp32", sizes="i32", tile_rows_M="i32", out_RI="bf16")
        scalars = dict(num_rows="i32", width="i32")
        constants = dict(PART=quantize._PART)
        check_code(compile_kernel(quantize.dequantize_rows_kernel, pointers, scalars, constants, 4))

    @pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8e4nv"])
    def test_columns_compile(dtype):
        pointers = dict(x_RI=dtype, row_scales_bR="fp32", sizes="i32", tile_rows_M="i32", values_MIr="fp8e4nv")
        columns, num_warps = quantize._COLUMNS[{"bf16": 2, "fp32": 4, "fp8e4nv": 1}[dtype]]
        constants = dict(HAS_ROW_SCALES=dtype == "fp8e4nv", COLUMNS=columns)
        scalars = dict(num_rows="i32", width="i32")
        kernel = quantize.quantize_columns_kernel
        compiled = compile_kernel(kernel, pointers | dict(scales_MI="fp32"), scalars, constants, num_warps)
        check_compiled(compiled)
        ptx = compiled.asm["ptx"]
        assert "shared.b8" not in ptx, "words are transposed, not bytes"
        assert ptx.count("div.rn.f32") == 2, "a thread divides once for the values and once for the scale"
