"""Every variant of ``pull_gemm`` and ``gemm_push`` that the tuning table can choose compiles for Hopper without one,
and keeps its data in registers."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.compiled import check_code
from titan_megamoe.kernels.gemm_push import gemm_push_constants, gemm_push_kernel, push_constants
from titan_megamoe.kernels.gemm_push_fp8 import gemm_push_fp8_kernel
from titan_megamoe.kernels.pull_gemm import pull_gemm_constants, pull_gemm_kernel
from titan_megamoe.kernels.pull_gemm_backward import pull_gemm_backward_constants, pull_gemm_backward_kernel
from titan_megamoe.kernels.pull_gemm_backward_fp8 import (
    pull_gemm_backward_fp8_constants,
    pull_gemm_backward_fp8_kernel,
)
from titan_megamoe.kernels.pull_gemm_fp8 import (
    fp8_layout,
    pull_gemm_fp8_constants,
    pull_gemm_fp8_kernel,
    scales_layout,
)
from titan_megamoe.kernels.tuning import (
    GEMM_PUSH_ITEMS,
    GEMM_PUSH_STAGES,
    num_score_parts,
    PULL_GEMM_BACKWARD_STAGES,
    PULL_GEMM_STAGES,
    tune_gemm_push,
    tune_gemm_push_fp8,
    tune_pull_gemm,
    tune_pull_gemm_backward,
    tune_pull_gemm_backward_fp8,
    tune_pull_gemm_fp8,
)

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
"""Bytes that a CTA can have on Hopper."""

# D, F, K, P. Together they reach every entry of the table: asserted below.
SHAPES = {
    "Qwen3-30B EP=1": (2048, 768, 8, 1),
    "Qwen3-30B EP=2": (2048, 768, 8, 2),
    "Qwen3-30B EP=8": (2048, 768, 8, 8),
    "Qwen3-235B EP=1": (4096, 1536, 8, 1),
    "Qwen3-235B EP=8": (4096, 1536, 8, 8),
    "D=7168 EP=72": (7168, 2048, 8, 72),
    "smallest": (64, 64, 1, 1),
    "K=32, odd multiples of 64": (1984, 192, 32, 4),
    "K=32 EP=1": (2880, 2880, 32, 1),
    "K=32 EP=16": (1984, 320, 32, 16),
    "K=32 EP=64": (2944, 448, 32, 64),
}
PLANNED = "sizes expert_start_e1 tile_expert_M tile_rows_M queue fault "
"""Pointers to int32 that all of the kernels take."""


def over(shapes: dict):
    return pytest.mark.parametrize("shape", shapes.values(), ids=shapes.keys())


every_shape = over(SHAPES)
fp8_shape = over({name: shape for name, shape in SHAPES.items() if not shape[0] % 128 and not shape[1] % 128})


def matrix(rows: int, columns: int) -> str:
    """The signature of a bf16 tile descriptor."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


def compile_kernel(kernel, descriptors: dict[str, str], pointers: dict[str, str], constants: dict):
    """Compile ``kernel``; every parameter that is not an int32 is named in one of the three dicts."""
    given = descriptors | {name: f"*{type}" for name, type in pointers.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: given.pop(name, "i32") for name in kernel.arg_names}
    assert not given, f"{kernel.__name__} has no parameters {sorted(given)}"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors come aligned to 16 bytes at least; a launch finds that out by itself.
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4})


def check(compiled, *, registers: tuple[int, ...], product: str) -> None:
    """``registers``: of all warpgroups but the first consumer's, which gets what is left."""
    ptx = compiled.asm["ptx"]
    check_code(compiled)
    assert ".local" not in ptx
    assert compiled.metadata.shared <= SHARED_MEMORY
    warpgroups = 1 + len(registers)  # consumers, communication warps, the rest
    assert compiled.metadata.num_warps == 4 * warpgroups
    pool = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
    granted = {int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert {*registers, pool - sum(registers)} <= granted
    assert f"wgmma.mma_async.sync.aligned.{product}" in ptx
    check_stores_wait_for_all_threads(ptx)
    assert "cp.async.bulk.tensor" in ptx and "ld.acquire.gpu" in ptx and "globaltimer" in ptx


def check_stores_wait_for_all_threads(ptx: str) -> None:
    """Between a fence of what was written to shared memory and the copy engine's reading it lies a barrier: the thread that has
    it read must not be ahead of those that write. Triton adds the barrier where it sees which buffer is meant."""
    events = re.findall(
        r"fence\.proxy\.async\.shared::cta|bar\.\w*\.?sync|cp\.async\.bulk\.tensor\.2d\.global\.shared", ptx
    )
    is_fenced_only = False
    for event in events:
        if event.startswith("fence"):
            is_fenced_only = True
        elif event.startswith("bar"):
            is_fenced_only = False
        else:
            assert not is_fenced_only, "a store starts before all threads have written"


@every_shape
@pytest.mark.parametrize("saves_gate_up", [False, True])
def test_pull_gemm(shape, saves_gate_up):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm(dim, hidden_dim)
    n = tuning.block_n
    int32 = PLANNED + "pull_rows_UK arrival_M"
    compiled = compile_kernel(
        pull_gemm_kernel,
        dict(pool_desc=matrix(128, 64), half_pool_desc=matrix(64, 64), w1_desc=matrix(n, 64), w3_desc=matrix(n, 64))
        | dict(h_desc=matrix(64, n), gate_desc=matrix(64, n), up_desc=matrix(64, n)),
        dict.fromkeys(int32.split(), "i32") | dict(pull_source_U="i64", x_addresses_P="i64", pool_RD="bf16"),
        pull_gemm_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, saves_gate_up=saves_gate_up
        ),
    )
    check(compiled, registers=tuning.registers, product=f"m64n{min(n, 128)}k16.f32.bf16.bf16")
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx) and "st.global.v4" in ptx, "rows are copied 16 bytes at a time"
    assert ptx.count("fence.proxy.async.global") >= 2, "on the writing and on the reading side"


@every_shape
def test_pull_gemm_backward(shape):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm_backward(dim, hidden_dim)
    n = tuning.block_n
    outputs = "gate_desc up_desc dgate_desc dup_desc scaled_h_desc"
    floats = "pull_scores_UK row_scores_R dscore_parts_NR"
    compiled = compile_kernel(
        pull_gemm_backward_kernel,
        dict(dout_desc=matrix(128, 64), half_dout_desc=matrix(64, 64), w2_desc=matrix(64, n))
        | dict.fromkeys(outputs.split(), matrix(64, 64)),
        dict.fromkeys((PLANNED + "pull_rows_UK arrival_M").split(), "i32")
        | dict.fromkeys(floats.split(), "fp32")
        | dict(pull_source_U="i64", dout_addresses_P="i64", dout_RD="bf16"),
        pull_gemm_backward_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size),
    )
    check(
        compiled,
        registers=(tuning.epilogue_registers, *tuning.registers),
        product=f"m64n{min(n, 128)}k16.f32.bf16.bf16",
    )


def fp8(rows: int) -> str:
    """The signature of an e4m3 tile descriptor."""
    return f"tensordesc<fp8e4nv[{rows}, 128],{fp8_layout(rows)!r}>"


ROW_SCALES = f"tensordesc<fp32[1, 128],{scales_layout()!r}>"


@fp8_shape
@pytest.mark.parametrize("saves_gate_up", [False, True])
def test_pull_gemm_fp8(shape, saves_gate_up):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm_fp8(dim)
    compiled = compile_kernel(
        pull_gemm_fp8_kernel,
        dict(pool_desc=fp8(128), half_pool_desc=fp8(64), w1_desc=fp8(128), w3_desc=fp8(128), h_desc=fp8(64))
        | dict(scales_desc=ROW_SCALES)
        | dict(gate_desc=matrix(64, 64), up_desc=matrix(64, 64)),
        dict.fromkeys((PLANNED + "pull_rows_UK arrival_M").split(), "i32")
        | dict.fromkeys("w1_scales_Ebb w3_scales_Ebb h_scales_bR pool_scales_bR".split(), "fp32")
        | dict(pull_source_U="i64", x_addresses_P="i64", x_scales_addresses_P="i64", pool_RD="bf16"),
        pull_gemm_fp8_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, saves_gate_up=saves_gate_up
        ),
    )
    check(compiled, registers=tuning.registers, product="m64n128k32.f32.e4m3.e4m3")
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]


@fp8_shape
def test_pull_gemm_backward_fp8(shape):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm_backward_fp8(dim)
    outputs = "gate_desc up_desc dgate_desc dup_desc scaled_h_desc"
    floats = "pull_scores_UK row_scores_R dscore_parts_NR w2_scales_Ebb dout_scales_bR dgate_scales_bR dup_scales_bR"
    compiled = compile_kernel(
        pull_gemm_backward_fp8_kernel,
        dict(dout_desc=fp8(128), half_dout_desc=fp8(64), scales_desc=ROW_SCALES, w2t_desc=fp8(128))
        | dict.fromkeys(outputs.split(), matrix(64, 64))
        | dict(dgate_fp8_desc=fp8(64), dup_fp8_desc=fp8(64)),
        dict.fromkeys((PLANNED + "pull_rows_UK arrival_M").split(), "i32")
        | dict.fromkeys(floats.split(), "fp32")
        | dict(pull_source_U="i64", dout_addresses_P="i64", dout_scales_addresses_P="i64", dout_RD="bf16"),
        pull_gemm_backward_fp8_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size),
    )
    check(compiled, registers=(tuning.epilogue_registers, *tuning.registers), product="m64n128k32.f32.e4m3.e4m3")
    ptx = compiled.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert re.search(r"ld\.global\S*\.v4", ptx) and "st.global.v4" in ptx, "rows are copied 16 bytes at a time"
    assert ptx.count("fence.proxy.async.global") >= 2, "on the writing and on the reading side"


@fp8_shape
@pytest.mark.parametrize("is_backward", [False, True])
def test_gemm_push_fp8(shape, is_backward):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_gemm_push_fp8(dim, hidden_dim, top_k=top_k, ep_size=ep_size)
    operands = dict(a_desc=fp8(128), half_a_desc=fp8(64), scales_desc=ROW_SCALES, b_desc=fp8(128))
    score_outputs = ("i32" if not is_backward else "fp32") if ep_size == 1 else "i64"
    compiled = compile_kernel(
        gemm_push_fp8_kernel,
        operands | {f"next_{name}": signature for name, signature in operands.items()} | dict(y_desc=matrix(64, 128)),
        dict.fromkeys((PLANNED + "send_order_U pull_rows_UK done_M").split(), "i32")
        | dict(pull_source_U="i64", pull_scores_UK="fp32", b_scales_Ebb="fp32", next_b_scales_Ebb="fp32")
        | dict(y_RD="bf16", out_TD="bf16", slots_addresses_P="i64")
        | dict(dscore_parts_NR="fp32" if is_backward else "i32", score_outputs=score_outputs),
        push_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=ep_size,
            score_parts=num_score_parts(dim, hidden_dim, is_fp8=True) if is_backward else 0,
        ),
    )
    check(compiled, registers=tuning.registers, product="m64n128k32.f32.e4m3.e4m3")
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx) and "st.global.v4" in ptx, "rows are read and sent 16 bytes at a time"
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", ptx), "tiles are counted when they are in memory"


@every_shape
@pytest.mark.parametrize("is_backward", [False, True])
def test_gemm_push(shape, is_backward):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_gemm_push(dim, hidden_dim, top_k=top_k, ep_size=ep_size)
    n = tuning.block_n
    operands = dict(a_desc=matrix(128, 64), half_a_desc=matrix(64, 64))
    operands |= dict(b_desc=matrix(64, n) if is_backward else matrix(n, 64))
    score_outputs = ("i32" if not is_backward else "fp32") if ep_size == 1 else "i64"
    compiled = compile_kernel(
        gemm_push_kernel,
        operands | {f"next_{name}": signature for name, signature in operands.items()} | dict(y_desc=matrix(64, n)),
        dict.fromkeys((PLANNED + "send_order_U pull_rows_UK done_M").split(), "i32")
        | dict(pull_source_U="i64", pull_scores_UK="fp32", y_RD="bf16", out_TD="bf16", slots_addresses_P="i64")
        | dict(dscore_parts_NR="fp32" if is_backward else "i32", score_outputs=score_outputs),
        gemm_push_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=ep_size,
            score_parts=num_score_parts(dim, hidden_dim) if is_backward else 0,
        ),
    )
    check(compiled, registers=tuning.registers, product=f"m64n{min(n, 128)}k16.f32.bf16.bf16")
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx) and "st.global.v4" in ptx, "rows are read and sent 16 bytes at a time"
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", ptx), "tiles are counted when they are in memory"


def test_the_shapes_reach_the_whole_table():
    pulls = [tune_pull_gemm(dim, hidden_dim) for dim, hidden_dim, _, _ in SHAPES.values()]
    pushes = [tune_gemm_push(d, f, top_k=k, ep_size=p) for d, f, k, p in SHAPES.values()]
    assert {tuning.block_n for tuning in pulls} == set(PULL_GEMM_STAGES)
    pulls = [tune_pull_gemm_backward(dim, hidden_dim) for dim, hidden_dim, _, _ in SHAPES.values()]
    assert {tuning.block_n for tuning in pulls} == set(PULL_GEMM_BACKWARD_STAGES)
    assert {tuning.block_n for tuning in pushes} == set(GEMM_PUSH_STAGES)
    assert {tuning.routes for tuning in pushes} == set(GEMM_PUSH_ITEMS)
    assert {tuning.last_tiles > 0 for tuning in pushes} == {True, False}
