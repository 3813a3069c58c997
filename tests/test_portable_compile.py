"""Every variant of the portable kernels that their table can choose compiles for NVIDIA's and AMD's GPUs without one, fits in shared
memory, and keeps its data in registers."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compiled import check_no_spills, MAX_STACK as MAX_STACK_TUNED, resources
from titan_megamoe.kernels.portable.gemm_push import gemm_push_constants, gemm_push_kernel
from titan_megamoe.kernels.portable.pull_gemm import pull_gemm_constants, pull_gemm_kernel
from titan_megamoe.kernels.portable.pull_gemm_backward import pull_gemm_backward_constants, pull_gemm_backward_kernel
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
MAX_STACK = 128
"""Bytes per thread, on other NVIDIA GPUs than Hopper's: there ptxas aims at a number of registers of its own, and spills a few."""


def compile_kernel(kind: str, kernel, pointers: dict[str, str], constants: dict, tuning):
    """Compile ``kernel``; every parameter that is not an int32 is named in one of the two dicts."""
    given = {name: f"*{type}" for name, type in pointers.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: given.pop(name, "i32") for name in kernel.arg_names}
    assert not given, f"{kernel.__name__} has no parameters {sorted(given)}"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors come aligned to 16 bytes at least; a launch finds that out by itself.
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages}
    return triton.compile(source, target=TARGETS[kind], options=options)


def check(compiled, kind: str) -> None:
    assert compiled.metadata.shared <= GPUS[kind].shared_memory
    if kind.startswith("gfx"):
        amdgcn = compiled.asm["amdgcn"]
        spilled = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", amdgcn)
        assert spilled and 4 * max(map(int, spilled)) <= MAX_STACK_TUNED, spilled
        assert "v_mfma_f32" in amdgcn
    else:
        if kind == "sm_90":
            check_no_spills(compiled)
        used = resources(compiled)
        assert used["LOCAL"] == 0 and used["STACK"] <= MAX_STACK, used
        product = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(kind, "mma.sync")
        assert product in compiled.asm["ptx"]


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

every_kind = pytest.mark.parametrize("kind", TARGETS)


def every_variant(width):
    """Parameters ``kind, shape``: for each kind of GPU, a shape for each width of tile that its table has. ``width(kind, *shape)``."""
    variants = {
        (kind, width(kind, *shape)): (name, shape) for kind in TARGETS for name, shape in reversed(SHAPES.items())
    }
    params = [pytest.param(kind, shape, id=f"{kind} {name}") for (kind, _), (name, shape) in variants.items()]
    return pytest.mark.parametrize("kind, shape", params)


@every_variant(lambda kind, d, f, k, p: tune_pull_gemm(kind, d, f).block_n)
def test_pull_gemm(kind, shape):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm(kind, dim, hidden_dim)
    compiled = compile_kernel(
        kind,
        pull_gemm_kernel,
        dict.fromkeys([*PLANNED, "tile_rows_M", "arrival_M"], "i32")
        | dict(pull_source_U="i64", x_addresses_P="i64")
        | dict.fromkeys("w1_EFD w3_EFD pool_RD h_RF gate_RF up_RF".split(), "bf16"),
        pull_gemm_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, saves_gate_up=True),
        tuning,
    )
    check(compiled, kind)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p: tune_pull_gemm_backward(kind, d, f).block_n)
def test_pull_gemm_backward(kind, shape):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_pull_gemm_backward(kind, dim, hidden_dim)
    compiled = compile_kernel(
        kind,
        pull_gemm_backward_kernel,
        dict.fromkeys([*PLANNED, "tile_rows_M", "arrival_M"], "i32")
        | dict(pull_source_U="i64", dout_addresses_P="i64")
        | dict.fromkeys("pull_scores_UK row_scores_R dscore_parts_NR".split(), "fp32")
        | dict.fromkeys("w2_EDF gate_RF up_RF dout_RD dgate_RF dup_RF scaled_h_RF".split(), "bf16"),
        pull_gemm_backward_constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size),
        tuning,
    )
    check(compiled, kind)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p: tune_gemm_push(kind, d, top_k=k, ep_size=p).block_n)
@pytest.mark.parametrize("is_backward", [False, True])
def test_gemm_push(kind, shape, is_backward):
    dim, hidden_dim, top_k, ep_size = shape
    tuning = tune_gemm_push(kind, dim, top_k=top_k, ep_size=ep_size)
    score_outputs = ("i32" if not is_backward else "fp32") if ep_size == 1 else "i64"
    compiled = compile_kernel(
        kind,
        gemm_push_kernel,
        dict.fromkeys([*PLANNED, "send_order_U", "done_M"], "i32")
        | dict(pull_source_U="i64", pull_scores_UK="fp32", slots_addresses_P="i64")
        | dict(dscore_parts_NR="fp32" if is_backward else "i32", score_outputs=score_outputs)
        | dict.fromkeys("a_RF b_weights next_a_RF next_b_weights y_RD out_TD".split(), "bf16"),
        gemm_push_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=ep_size,
            score_parts=num_score_parts(dim, hidden_dim) if is_backward else 0,
        ),
        tuning,
    )
    check(compiled, kind)
    check_waits(compiled, kind)


@every_variant(lambda kind, d, f, k, p: tune_weight_gradients(kind, d, f).block_n)
def test_weight_gradients(kind, shape):
    dim, hidden_dim, _, _ = shape
    tuning = tune_weight_gradients(kind, dim, hidden_dim)
    rows = "x_RD dout_RD dgate_RF dup_RF scaled_h_RF dw1_EFD dw2_EDF dw3_EFD"
    compiled = compile_kernel(
        kind,
        weight_gradients_kernel,
        dict.fromkeys("expert_start_e1 expert_rows_e queue".split(), "i32") | dict.fromkeys(rows.split(), "bf16"),
        weight_gradients_constants(tuning, dim=dim, hidden_dim=hidden_dim, accumulate=True),
        tuning,
    )
    check(compiled, kind)


@every_kind
def test_the_shapes_reach_the_whole_table(kind):
    gpu, shapes = GPUS[kind], SHAPES.values()
    assert {tune_pull_gemm(kind, d, f).block_n for d, f, _, _ in shapes} == set(gpu.pull_gemm)
    assert {tune_pull_gemm_backward(kind, d, f).block_n for d, f, _, _ in shapes} == set(gpu.pull_gemm_backward)
    assert {tune_gemm_push(kind, d, top_k=k, ep_size=p).block_n for d, _, k, p in shapes} == set(gpu.gemm_push)
    assert {tune_weight_gradients(kind, d, f).block_n for d, f, _, _ in shapes} == set(gpu.weight_gradients)
