"""Every variant of the portable kernels that their table can choose compiles for NVIDIA's and AMD's GPUs without one, fits in shared
memory, and keeps its data in registers; in MXFP8 for those that have instructions for it, and for Hopper, where Triton emulates it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compiled import check_code, MAX_STACK as MAX_STACK_TUNED, resources
from titan_megamoe.kernels import quantize_mx
from titan_megamoe.kernels.portable.gemm_push import gemm_push_constants, gemm_push_kernel
from titan_megamoe.kernels.portable.pull_gemm import pull_gemm_constants, pull_gemm_kernel
from titan_megamoe.kernels.portable.pull_gemm_backward import (
    MX_ARGUMENTS,
    pull_gemm_backward_constants,
    pull_gemm_backward_kernel,
)
from titan_megamoe.kernels.portable.tuning import (
    GPUS,
    tune_gemm_push,
    tune_pull_gemm,
    tune_pull_gemm_backward,
    tune_weight_gradients,
)
from titan_megamoe.kernels.portable.weight_gradients import weight_gradients_constants, weight_gradients_kernel
from titan_megamoe.kernels.tuning import num_score_parts

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

# D, F, K, P. Together they reach every entry of the tables: asserted below.
SHAPES = {
    "Qwen3-30B EP=1": (2048, 768, 8, 1),
    "odd multiples of 64, K=32": (1984, 192, 32, 4),
    "128 divides, 256 does not": (2944, 384, 8, 8),
}
MX_SHAPES = {
    "Qwen3-30B EP=1": (2048, 768, 8, 1),
    "odd multiples of 128, K=32": (1920, 384, 32, 4),
}
MX_KINDS = [kind for kind, gpu in GPUS.items() if gpu.mxfp8]
PRODUCTS = {
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma_f32",
    "gfx950": "v_mfma_f32",
}
MX_PRODUCTS = PRODUCTS | {"sm_100": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale", "gfx950": "v_mfma_scale_f32"}
"""The instructions that multiply. Hopper's are those of bf16."""

MAX_STACK = 128 if triton.__version__.startswith("3.6.") else 192
"""Bytes per thread, on other NVIDIA GPUs than Hopper's: there ptxas aims at a number of registers of its own, and spills a few. The tables were
made with Triton 3.6."""


def compile_kernel(
    kind: str, kernel, pointers: dict[str, str], constants: dict, tuning, divisible: tuple[str, ...] = ()
):
    """Compile ``kernel``; every parameter that is not an int32 is named in one of the two dicts. ``divisible``: of the int32, those that
    are multiples of 16."""
    given = {name: f"*{type}" for name, type in pointers.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: given.pop(name, "i32") for name in kernel.arg_names}
    assert not given, f"{kernel.__name__} has no parameters {sorted(given)}"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors come aligned to 16 bytes at least; a launch finds that out by itself.
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *divisible)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages}
    return triton.compile(source, target=TARGETS[kind], options=options)


def check(compiled, kind: str, is_mx: bool = False) -> None:
    assert compiled.metadata.shared <= GPUS[kind].shared_memory
    if kind.startswith("gfx"):
        amdgcn = compiled.asm["amdgcn"]
        spilled = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", amdgcn)
        assert spilled and 4 * max(map(int, spilled)) <= MAX_STACK_TUNED, spilled
    else:
        if kind == "sm_90" and not is_mx:  # which is emulated there
            check_code(compiled)
        used = resources(compiled)
        assert used["LOCAL"] == 0 and used["STACK"] <= MAX_STACK, used
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "operands are loaded ahead, 16 bytes at a time"
    assembly = compiled.asm["amdgcn" if kind.startswith("gfx") else "ptx"]
    assert re.search((MX_PRODUCTS if is_mx else PRODUCTS).get(kind, "mma.sync"), assembly)


def check_waits(compiled, kind: str) -> None:
    """Counters are read with acquire and written with release semantics at the GPU's scope; rows move 16 bytes at a time."""
    if kind.startswith("gfx"):
        amdgcn = compiled.asm["amdgcn"]
        assert "s_memrealtime" in amdgcn and "buffer_inv sc1" in amdgcn
        # Between the last stores and the barrier, every wave waits for its own: see waiting.flush_stores.
        assert re.search(
            r"store_\w+(?:(?!s_barrier).)*s_waitcnt vmcnt\(0\)\nbuffer_wbl2 sc1\ns_waitcnt vmcnt\(0\)", amdgcn, re.S
        )
        assert re.search(r"(global|buffer)_load_dwordx4", amdgcn) and re.search(
            r"(global|buffer)_store_dwordx4", amdgcn
        )
    else:
        ptx = compiled.asm["ptx"]
        assert "globaltimer" in ptx
        assert re.search(r"(atom|ld)\.global\.gpu\.acquire", ptx) and "atom.global.gpu.release.add" in ptx
        assert re.search(r"ld\.global\S*\.v4", ptx) and re.search(r"st\.global\S*\.v4", ptx)


PLANNED = "sizes expert_start_e1 tile_expert_M pull_rows_UK queue fault ".split()
"""Pointers to int32 that the communicating kernels take."""


def every_variant(width):
    """Parameters ``kind, shape, is_mx``: for each kind of GPU and format, a shape for each width of tile that its table has.
    ``width(kind, *shape, is_mx)``."""
    variants = {
        (kind, is_mx, width(kind, *shape, is_mx)): (name, shape)
        for is_mx, kinds, shapes in ((False, TARGETS, SHAPES), (True, MX_KINDS, MX_SHAPES))
        for kind in kinds
        for name, shape in reversed(shapes.items())
    }
    params = [
        pytest.param(kind, shape, is_mx, id=f"{kind}{' MXFP8' if is_mx else ''} {name}")
        for (kind, is_mx, _), (name, shape) in variants.items()
    ]
    return pytest.mark.parametrize("kind, shape, is_mx", params)


def operands(names: str, scales: str, is_mx: bool) -> dict[str, str]:
    return dict.fromkeys(names.split(), "fp8e4nv" if is_mx else "bf16") | dict.fromkeys(
        scales.split(), "u8" if is_mx else "bf16"
    )


@every_variant(lambda kind, d, f, k, p, is_mx: tune_pull_gemm(kind, d, f, is_mx=is_mx).block_n)
def test_pull_gemm(kind, shape, is_mx):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm(kind, dim, hidden_dim, is_mx=is_mx)
    compiled = compile_kernel(
        kind,
        pull_gemm_kernel,
        dict.fromkeys([*PLANNED, "tile_rows_M", "arrival_M"], "i32")
        | dict(pull_source_U="i64", x_addresses_P="i64", x_scales_addresses_P="i64", gate_RF="bf16", up_RF="bf16")
        | operands("w1_EFD w3_EFD pool_RD h_RF", "w1_scales_EFg w3_scales_EFg pool_scales_Rg h_scales_Rg", is_mx),
        pull_gemm_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, saves_gate_up=True, is_mx=is_mx
        ),
        tuning,
    )
    check(compiled, kind, is_mx)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p, is_mx: tune_pull_gemm_backward(kind, d, f, is_mx=is_mx).block_n)
def test_pull_gemm_backward(kind, shape, is_mx):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm_backward(kind, dim, hidden_dim, is_mx=is_mx)
    mx_values = "dgate_fp8_RF dup_fp8_RF"
    mx_scales = " ".join(name for name in MX_ARGUMENTS if "scales" in name and "addresses" not in name)
    compiled = compile_kernel(
        kind,
        pull_gemm_backward_kernel,
        dict.fromkeys([*PLANNED, "tile_rows_M", "arrival_M"], "i32")
        | dict(pull_source_U="i64", dout_addresses_P="i64", dout_scales_addresses_P="i64")
        | dict.fromkeys("pull_scores_UK row_scores_R dscore_parts_NR".split(), "fp32")
        | dict.fromkeys("gate_RF up_RF dgate_RF dup_RF scaled_h_RF".split(), "bf16")
        | operands(f"w2 dout_RD {mx_values}", mx_scales, is_mx),
        pull_gemm_backward_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, is_mx=is_mx),
        tuning,
    )
    check(compiled, kind, is_mx)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p, is_mx: tune_gemm_push(kind, d, top_k=k, ep_size=p, is_mx=is_mx).block_n)
@pytest.mark.parametrize("is_backward", [False, True])
def test_gemm_push(kind, shape, is_mx, is_backward):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_gemm_push(kind, dim, top_k=top_k, ep_size=ep_size, is_mx=is_mx)
    score_outputs = ("i32" if not is_backward else "fp32") if ep_size == 1 else "i64"
    compiled = compile_kernel(
        kind,
        gemm_push_kernel,
        dict.fromkeys([*PLANNED, "send_order_U", "done_M"], "i32")
        | dict(pull_source_U="i64", pull_scores_UK="fp32", slots_addresses_P="i64")
        | dict(
            dscore_parts_NR="fp32" if is_backward else "i32", score_outputs=score_outputs, y_RD="bf16", out_TD="bf16"
        )
        | operands("a_RF b_weights next_a_RF next_b_weights", "a_scales b_scales next_a_scales next_b_scales", is_mx),
        gemm_push_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=ep_size,
            score_parts=num_score_parts(dim, hidden_dim) if is_backward else 0,
            is_mx=is_mx,
        ),
        tuning,
    )
    check(compiled, kind, is_mx)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p, is_mx: tune_weight_gradients(kind, d, f, is_mx=is_mx).block_n)
def test_weight_gradients(kind, shape, is_mx):
    dim, hidden_dim, _, _ = shape
    tuning = tune_weight_gradients(kind, dim, hidden_dim, is_mx=is_mx)
    compiled = compile_kernel(
        kind,
        weight_gradients_kernel,
        dict.fromkeys("expert_start_e1 expert_rows_e queue".split(), "i32")
        | dict.fromkeys("dw1_EFD dw2_EDF dw3_EFD".split(), "bf16")
        | operands("x dout dgate dup scaled_h", "x_scales dout_scales dgate_scales dup_scales scaled_h_scales", is_mx),
        weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=True, is_mx=is_mx),
        tuning,
        divisible=("num_rows",),
    )
    check(compiled, kind, is_mx)


@pytest.mark.parametrize("kind", MX_KINDS)
def test_quantisation_in_mxfp8(kind):
    rows = dict(x_RI="bf16", values_RI="fp8e4nv", scales_Rg="u8")
    pool = dict(sizes="i32", tile_rows_M="i32")
    for kernel, pointers, constants, num_warps in (
        (quantize_mx.quantize_rows_kernel, rows, dict(ROWS=32, COLUMNS=128), 4),
        (
            quantize_mx.quantize_columns_kernel,
            pool | dict(x_RI="fp8e4nv", row_scales_Rg="u8", values_IR="fp8e4nv", scales_Ig="u8"),
            dict(HAS_ROW_SCALES=True, COLUMNS=quantize_mx._TRANSPOSED_COLUMNS),
            8,
        ),
        (
            quantize_mx.dequantize_rows_kernel,
            pool | dict(values_RI="fp8e4nv", scales_Rg="u8", out_RI="bf16"),
            dict(ROWS=32, COLUMNS=128),
            4,
        ),
    ):
        compiled = compile_kernel(kind, kernel, pointers, constants, SimpleNamespace(warps=num_warps, stages=1))
        if kind == "sm_90":
            check_code(compiled)


@pytest.mark.parametrize("kind, is_mx", [*((kind, False) for kind in TARGETS), *((kind, True) for kind in MX_KINDS)])
def test_the_shapes_reach_the_whole_table(kind, is_mx):
    stages, shapes = GPUS[kind].stages(is_mx), (MX_SHAPES if is_mx else SHAPES).values()
    mx = dict(is_mx=is_mx)
    assert {tune_pull_gemm(kind, d, f, **mx).block_n for d, f, _, _ in shapes} == set(stages.pull_gemm)
    assert {tune_pull_gemm_backward(kind, d, f, **mx).block_n for d, f, _, _ in shapes} == set(
        stages.pull_gemm_backward
    )
    assert {tune_gemm_push(kind, d, top_k=k, ep_size=p, **mx).block_n for d, _, k, p in shapes} == set(stages.gemm_push)
    assert {tune_weight_gradients(kind, d, f, **mx).block_n for d, f, _, _ in shapes} == set(stages.weight_gradients)
