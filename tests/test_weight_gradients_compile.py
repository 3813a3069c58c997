"""Every variant of ``weight_gradients`` and ``weight_gradients_fp8`` that the tuning table can choose compiles for Hopper
without one, and keeps its data in registers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.compiled import check_code
from tests.test_kernels_compile import compile_kernel, fp8, matrix, ROW_SCALES, SHARED_MEMORY
from titan_megamoe.kernels.tuning import (
    tune_weight_gradients,
    tune_weight_gradients_fp8,
    WEIGHT_GRADIENTS_FP8_STAGES,
    WEIGHT_GRADIENTS_STAGES,
)
from titan_megamoe.kernels.weight_gradients import STEP, weight_gradients_constants, weight_gradients_kernel
from titan_megamoe.kernels.weight_gradients_fp8 import weight_gradients_fp8_kernel

# D, F. Together they reach every entry of the table: asserted below.
SHAPES = {
    "Qwen3-30B": (2048, 768),
    "Qwen3-235B": (4096, 1536),
    "F an odd multiple of 128": (2048, 640),
    "smallest": (64, 64),
    "odd multiples of 64": (2880, 320),
}
FP8_SHAPES = {
    "Qwen3-30B": (2048, 768),
    "Qwen3-235B": (4096, 1536),
    "F an odd multiple of 128": (2048, 640),
    "D an odd multiple of 128": (384, 256),
    "smallest": (128, 128),
}


def check(compiled, tuning) -> None:
    check_code(compiled)
    ptx = compiled.asm["ptx"]
    assert ".local" not in ptx
    assert compiled.metadata.shared <= SHARED_MEMORY
    # 384 threads: two consumers, the rest.
    assert compiled.metadata.num_warps == 12
    granted = {int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert {*tuning.registers, 504 - sum(tuning.registers)} <= granted
    assert len(re.findall(r"\b(?:atom|red)\.\S*global", ptx)) == 1, "nothing but the queue is atomic"


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_weight_gradients(shape, accumulate):
    dim, hidden_dim = shape
    tuning = tune_weight_gradients(dim, hidden_dim)
    n, step = tuning.block_n, STEP.value
    compiled = compile_kernel(
        weight_gradients_kernel,
        dict.fromkeys(("dout_desc", "dgate_desc", "dup_desc"), matrix(step, 64))
        | dict.fromkeys(("x_desc", "scaled_h_desc"), matrix(step, n))
        | dict.fromkeys(("dw1_desc", "dw2_desc", "dw3_desc"), matrix(64, n)),
        dict.fromkeys(("expert_start_e1", "expert_rows_e", "queue"), "i32"),
        weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate),
    )
    check(compiled, tuning)
    ptx = compiled.asm["ptx"]
    products = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16\S+ [^;]*?(\d), (\d);", ptx)
    assert products and set(products) == {("1", "1")}, "both operands are read across their rows"


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", FP8_SHAPES.values(), ids=FP8_SHAPES.keys())
def test_weight_gradients_fp8(shape, accumulate):
    dim, hidden_dim = shape
    tuning = tune_weight_gradients_fp8(dim, hidden_dim)
    inputs = ("x", "dout", "dgate", "dup", "scaled_h")
    compiled = compile_kernel(
        weight_gradients_fp8_kernel,
        dict.fromkeys(("dout_desc", "dgate_desc", "dup_desc"), fp8(128))
        | dict.fromkeys(("x_desc", "scaled_h_desc"), fp8(tuning.block_n))
        | dict.fromkeys([f"{name}_scales_desc" for name in inputs], ROW_SCALES)
        | dict.fromkeys(("dw1_desc", "dw2_desc", "dw3_desc"), matrix(64, 128)),
        dict.fromkeys(("expert_start_e1", "expert_rows_e", "queue"), "i32"),
        weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=accumulate),
    )
    check(compiled, tuning)
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.asm["ptx"])
    # Of each consumer, 128 rows in steps of 32, for each part of the columns.
    assert products == ["m64n128k32.f32.e4m3.e4m3"] * (2 * 4 * tuning.block_n // 128)


def test_the_shapes_reach_the_whole_table():
    assert {tune_weight_gradients(*shape).block_n for shape in SHAPES.values()} == set(WEIGHT_GRADIENTS_STAGES)
    fp8_widths = {tune_weight_gradients_fp8(*shape).block_n for shape in FP8_SHAPES.values()}
    assert fp8_widths == set(WEIGHT_GRADIENTS_FP8_STAGES)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 64"):
        tune_weight_gradients(2048, 800)
    with pytest.raises(ValueError, match="not a multiple of 128"):
        tune_weight_gradients_fp8(2048, 320)
