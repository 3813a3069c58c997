"""The plan, publish, handshake and reduction kernels compile for Hopper without one, and keep their data in
registers."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compiled import check_code
from titan_megamoe.kernels import combine, plan
from titan_megamoe.kernels.plan_tables import BLOCK_M, LayerShape, PHASE_ALL_SENT, PHASE_PUBLISHED

HOPPER = GPUTarget("cuda", 90, 32)
SHAPES = {
    "EP=1 Qwen3-30B": dict(ep_size=1, num_local_experts=128, top_k=8, dim=2048, hidden_dim=768, max_tokens=16384),
    "EP=8 Qwen3-30B": dict(ep_size=8, num_local_experts=16, top_k=8, dim=2048, hidden_dim=768, max_tokens=16384),
    "EP=8 Qwen3-235B": dict(ep_size=8, num_local_experts=16, top_k=8, dim=4096, hidden_dim=1536, max_tokens=16384),
    "EP=72 one expert, K=1": dict(ep_size=72, num_local_experts=1, top_k=1, dim=64, hidden_dim=64, max_tokens=1000),
    "EP=1 64 experts, K=1": dict(ep_size=1, num_local_experts=64, top_k=1, dim=128, hidden_dim=64, max_tokens=300),
    "EP=8 rows on one rank, K=1": dict(
        ep_size=1, num_local_experts=16, top_k=1, dim=2048, hidden_dim=768, max_tokens=131072
    ),
    "EP=1 512 experts, K=32": dict(
        ep_size=1, num_local_experts=512, top_k=32, dim=7168, hidden_dim=64, max_tokens=1000
    ),
}


def compile_kernel(
    kernel,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict,
    num_warps: int,
    target=HOPPER,
    multiples_of_16: tuple[str, ...] = (),
):
    """Compile ``kernel``; every parameter is named in one of the three dicts (pointers to a type, scalars of a
    type). ``multiples_of_16``: scalars that are, in every launch."""
    given = {**{name: f"*{type}" for name, type in pointers.items()}, **scalars, **{c: "constexpr" for c in constants}}
    signature = {name: given.pop(name) for name in kernel.arg_names}
    assert not given, f"{kernel.__name__} has no parameters {sorted(given)}"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors come aligned to ALIGNMENT bytes; a launch finds that out by itself.
    divisible = (*pointers, *multiples_of_16)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request) -> LayerShape:
    return LayerShape(**request.param)


def block_sizes(shape: LayerShape) -> dict[str, int]:
    return dict(
        NUM_LOCAL_EXPERTS=shape.num_local_experts,
        TOP_K=shape.top_k,
        BLOCK_T=shape.block_tokens,
        BLOCK_K=shape.block_routes,
        BLOCK_E=shape.block_experts,
    )


def test_count(shape):
    compiled = compile_kernel(
        plan.count_kernel,
        dict(ids_addresses_P="i64", num_tokens_addresses_P="i64", fault="i32", local_expert_NK="i32")
        | dict(block_starts_3eB1="i32", counters="i32"),
        dict(num_counters="i32", blocks_per_owner="i32", max_tokens="i32", first_expert="i32"),
        block_sizes(shape),
        num_warps=shape.block_warps,
    )
    check_code(compiled)


def test_scan():
    compiled = compile_kernel(
        plan.scan_kernel,
        dict(block_starts_3eB1="i32"),
        dict(num_blocks="i32"),
        dict(BLOCK=plan._SCAN_BLOCK),
        num_warps=4,
    )
    check_code(compiled)


def test_place(shape):
    tables = (
        "local_expert_NK block_starts_3eB1 sizes expert_start_e1 expert_rows_e tile_expert_M tile_rows_M pull_rows_UK"
    )
    compiled = compile_kernel(
        plan.place_kernel,
        dict.fromkeys(f"{tables} send_order_U peak".split(), "i32")
        | dict(scores_addresses_P="i64", pull_source_U="i64", pull_scores_UK="fp32"),
        dict(blocks_per_owner="i32", pool_rows="i32"),
        block_sizes(shape) | dict(EP_SIZE=shape.ep_size, BLOCK_M=BLOCK_M, TILE_BLOCK=plan._TILE_BLOCK),
        num_warps=shape.block_warps,
    )
    check_code(compiled)
    assert "atom.global.add" not in compiled.asm["ptx"], "places come from prefix sums"


@pytest.mark.parametrize("ids_type", ["i32", "i64"])
@pytest.mark.parametrize("scores_type", ["fp32", "bf16"])
def test_publish(shape, ids_type, scores_type):
    compiled = compile_kernel(
        combine.publish_kernel,
        dict(x_TD="bf16", ids_TK=ids_type, scores_TK=scores_type, published_x_TD="bf16", published_ids_TK="i32")
        | dict(published_scores_TK="fp32", published_num_tokens="i32", x_addresses_P="i64", fault="i32"),
        dict(num_tokens="i32", rank="i32"),
        dict(
            NUM_EXPERTS=shape.num_experts,
            DIM=shape.dim,
            TOP_K=shape.top_k,
            COPY_X=shape.ep_size > 1,
            IN_PLACE=shape.ep_size == 1,
            BLOCK_T=combine._PUBLISH_TOKENS,
            BLOCK_ROUTES=triton.next_power_of_2(combine._PUBLISH_TOKENS * shape.top_k),
            BLOCK_X=combine._PUBLISH_ELEMENTS,
        ),
        num_warps=4,
    )
    check_code(compiled)
    assert ("ld.global.v4" in compiled.asm["ptx"]) or shape.ep_size == 1, "x is copied 16 bytes at a time"


@pytest.mark.parametrize("phase", [PHASE_PUBLISHED, PHASE_ALL_SENT])
@pytest.mark.parametrize("ep_size", [2, 8, 72])
@pytest.mark.parametrize("signals, waits", [(True, True), (True, False), (False, True)])
def test_handshake(phase, ep_size, signals, waits):
    compiled = compile_kernel(
        combine.handshake_kernel,
        dict(flags="i32", flags_addresses_P="i64", calls="i32", fault="i32"),
        dict(rank="i32", deadline_ns="i64"),
        dict(PHASE=phase, EP_SIZE=ep_size, BLOCK_P=triton.next_power_of_2(ep_size), SIGNALS=signals, WAITS=waits),
        num_warps=1,
    )
    check_code(compiled)
    ptx = compiled.asm["ptx"]
    assert signals == bool(re.search(r"atom.*\.release.*\.sys|atom.*\.sys.*\.release", ptx))
    assert waits == bool(re.search(r"atom.*\.acquire.*\.sys|atom.*\.sys.*\.acquire", ptx)) == ("globaltimer" in ptx)


@pytest.mark.parametrize("top_k", [1, 2, 8, 32])
@pytest.mark.parametrize("ids_type", ["i32", "i64"])
def test_collect_scores(top_k, ids_type):
    compiled = compile_kernel(
        combine.collect_scores_kernel,
        dict(score_slots_PTK="fp32", ids_TK=ids_type, dscores_TK="fp32"),
        dict(num_tokens="i32", max_tokens="i32"),
        dict(NUM_LOCAL_EXPERTS=16, TOP_K=top_k, BLOCK_T=combine.collect_scores_tokens(top_k), BLOCK_K=top_k),
        num_warps=4,
    )
    check_code(compiled)


@pytest.mark.parametrize("dim", [64, 1984, 2048, 4096, 7168])
@pytest.mark.parametrize("ep_size", [2, 8, 72])
@pytest.mark.parametrize("ids_type", ["i32", "i64"])
def test_reduce(dim, ep_size, ids_type):
    block_d = triton.next_power_of_2(dim)
    compiled = compile_kernel(
        combine.reduce_kernel,
        dict(slots_PTD="bf16", ids_TK=ids_type, out_TD="bf16"),
        dict(max_tokens="i32"),
        dict(EP_SIZE=ep_size, NUM_LOCAL_EXPERTS=16, DIM=dim, TOP_K=8, BLOCK_K=8, BLOCK_D=block_d),
        num_warps=combine.reduce_warps(block_d),
    )
    check_code(compiled)
    assert re.search(r"ld\.global\S*\.v4", compiled.asm["ptx"]) or dim == 64


@pytest.mark.parametrize(
    "target",
    [
        GPUTarget("cuda", 80, 32),
        GPUTarget("cuda", 100, 32),
        GPUTarget("hip", "gfx942", 64),
        GPUTarget("hip", "gfx950", 64),
    ],
    ids=lambda target: str(target.arch),
)
def test_other_gpus(target):
    """What the portable kernels need around them."""
    shape = LayerShape(**SHAPES["EP=8 Qwen3-30B"])
    handshake = compile_kernel(
        combine.handshake_kernel,
        dict(flags="i32", flags_addresses_P="i64", calls="i32", fault="i32"),
        dict(rank="i32", deadline_ns="i64"),
        dict(PHASE=PHASE_PUBLISHED, EP_SIZE=8, BLOCK_P=8, SIGNALS=True, WAITS=True),
        num_warps=1,
        target=target,
    )
    if target.backend == "hip":
        amdgcn = handshake.asm["amdgcn"]
        assert "s_memrealtime" in amdgcn and "buffer_wbl2 sc0 sc1" in amdgcn and "buffer_inv sc0 sc1" in amdgcn
    else:
        assert "globaltimer" in handshake.asm["ptx"]
    compile_kernel(
        plan.count_kernel,
        dict(ids_addresses_P="i64", num_tokens_addresses_P="i64", fault="i32", local_expert_NK="i32")
        | dict(block_starts_3eB1="i32", counters="i32"),
        dict(num_counters="i32", blocks_per_owner="i32", max_tokens="i32", first_expert="i32"),
        block_sizes(shape),
        num_warps=shape.block_warps,
        target=target,
    )
    compile_kernel(
        plan.scan_kernel,
        dict(block_starts_3eB1="i32"),
        dict(num_blocks="i32"),
        dict(BLOCK=plan._SCAN_BLOCK),
        num_warps=4,
        target=target,
    )
    tables = (
        "local_expert_NK block_starts_3eB1 sizes expert_start_e1 expert_rows_e tile_expert_M tile_rows_M pull_rows_UK"
    )
    compile_kernel(
        plan.place_kernel,
        dict.fromkeys(f"{tables} send_order_U peak".split(), "i32")
        | dict(scores_addresses_P="i64", pull_source_U="i64", pull_scores_UK="fp32"),
        dict(blocks_per_owner="i32", pool_rows="i32"),
        block_sizes(shape) | dict(EP_SIZE=shape.ep_size, BLOCK_M=BLOCK_M, TILE_BLOCK=plan._TILE_BLOCK),
        num_warps=shape.block_warps,
        target=target,
    )
    compile_kernel(
        combine.publish_kernel,
        dict(x_TD="bf16", ids_TK="i64", scores_TK="fp32", published_x_TD="bf16", published_ids_TK="i32")
        | dict(published_scores_TK="fp32", published_num_tokens="i32", x_addresses_P="i64", fault="i32"),
        dict(num_tokens="i32", rank="i32"),
        dict(
            NUM_EXPERTS=shape.num_experts,
            DIM=shape.dim,
            TOP_K=shape.top_k,
            COPY_X=True,
            IN_PLACE=False,
            BLOCK_T=combine._PUBLISH_TOKENS,
            BLOCK_ROUTES=triton.next_power_of_2(combine._PUBLISH_TOKENS * shape.top_k),
            BLOCK_X=combine._PUBLISH_ELEMENTS,
        ),
        num_warps=4,
        target=target,
    )
    compile_kernel(
        combine.reduce_kernel,
        dict(slots_PTD="bf16", ids_TK="i64", out_TD="bf16"),
        dict(max_tokens="i32"),
        dict(EP_SIZE=8, NUM_LOCAL_EXPERTS=16, DIM=2048, TOP_K=8, BLOCK_K=8, BLOCK_D=2048),
        num_warps=combine.reduce_warps(2048),
        target=target,
    )
    compile_kernel(
        combine.collect_scores_kernel,
        dict(score_slots_PTK="fp32", ids_TK="i64", dscores_TK="fp32"),
        dict(num_tokens="i32", max_tokens="i32"),
        dict(NUM_LOCAL_EXPERTS=16, TOP_K=8, BLOCK_T=combine.collect_scores_tokens(8), BLOCK_K=8),
        num_warps=4,
        target=target,
    )
