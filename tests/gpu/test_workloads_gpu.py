"""Every workload in every precision on the fused kernels: one rank, and several that share the GPU with unequal tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.gpu.ranks import run_ranks_on_one_gpu
from tests.gpu.test_hopper_layer import NAMES, random_layer
from tests.oracle import gradients, relative_error
from titan_megamoe import check_step, hopper, mega_moe
from titan_megamoe.bench.workloads import make_routing, WORKLOADS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_on_this_machine() is not None, reason=str(hopper.missing_on_this_machine())),
]

VARIANTS = {
    "bf16": dict(precision="bf16"),
    "fp8": dict(precision="fp8"),
    "fp8, wgrad fp8": dict(precision="fp8", wgrad="fp8"),
    "fp8_bwd": dict(precision="fp8_bwd"),
}
BOUNDS = {name: 1e-2 if name == "bf16" else 2e-2 for name in VARIANTS}
"""Of the difference from the reference backend, which emulates FP8: see ``test_hopper_fp8_layer.py``."""

SHAPES = [
    # tokens, experts, top_k
    (1, 8, 8),
    (1000, 16, 4),
    (777, 512, 6),
    (300, 64, 1),
    (65, 32, 32),
]


def layer_with(workload: str, tokens: int, experts: int, top_k: int, ep_size: int = 1, step: int = 0):
    x, _, scores, *weights = random_layer(tokens, 256, 128, experts, top_k, seed=step)
    ids = make_routing(workload, tokens, experts, top_k, ep_size=ep_size, step=step, device="cuda")
    dout = torch.randn(tokens, 256, generator=torch.Generator("cuda").manual_seed(step), device="cuda").bfloat16()
    return (x, ids, scores, *weights), dout


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_one_rank(workload, tokens, experts, top_k, variant):
    inputs, dout_TD = layer_with(workload, tokens, experts, top_k)
    actual, expected = (
        gradients(lambda *a: mega_moe(*a, backend=backend, **VARIANTS[variant]), inputs, dout_TD)
        for backend in ("hopper", "reference")
    )
    check_step()
    for name, a, b in zip(NAMES, actual, expected):
        assert relative_error(a, b) < BOUNDS[variant], name


def workloads_on_ranks(rank: int, tokens_per_rank: list[int], experts: int, top_k: int, variant: str) -> None:
    world_size = len(tokens_per_rank)
    mine = slice(sum(tokens_per_rank[:rank]), sum(tokens_per_rank[: rank + 1]))
    local = experts // world_size
    held = slice(rank * local, (rank + 1) * local)
    for workload in WORKLOADS:
        for step in range(3 if workload == "burst" else 1):
            (x, ids, scores, *weights), dout = layer_with(
                workload, sum(tokens_per_rank), experts, top_k, world_size, step
            )
            inputs = (x[mine], ids[mine], scores[mine], *(w[held] for w in weights))
            options = dict(backend="hopper", group=dist.group.WORLD, **VARIANTS[variant])
            actual = gradients(lambda *a: mega_moe(*a, **options), inputs, dout[mine])
            expected = gradients(
                lambda *a: mega_moe(*a, backend="reference", **VARIANTS[variant]), (x, ids, scores, *weights), dout
            )
            wanted = [t[mine] for t in expected[:3]] + [t[held] for t in expected[3:]]
            for name, a, b in zip(NAMES, actual, wanted):
                # Of all ranks together: one with a token or two has score gradients whose sums may cancel.
                squares = torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
                dist.all_reduce(squares)
                assert squares[0].sqrt() <= BOUNDS[variant] * squares[1].sqrt(), (workload, step, name)
    check_step()


RANKS = [
    # tokens of each rank, experts, top_k
    ([300, 411], 16, 4),
    ([0, 257, 1, 300], 16, 4),
    ([3, 0, 130, 64, 1, 99, 200, 7], 16, 4),
    ([33, 130], 2, 1),  # one expert a rank, of which a token goes to one ...
    ([40, 0, 31, 50], 4, 4),  # ... or to all
    ([70, 1, 0, 129, 5, 64, 33, 2], 512, 6),
    ([1, 1, 1, 1, 1, 1, 1, 1], 8, 1),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens_per_rank, experts, top_k", RANKS)
def test_ranks_on_one_gpu(tokens_per_rank, experts, top_k, variant):
    run_ranks_on_one_gpu(workloads_on_ranks, len(tokens_per_rank), tokens_per_rank, experts, top_k, variant)
