"""The layer on the fused kernels: against the formula in fp64, bitwise against itself, and over ranks that share one GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import run_ranks_on_one_gpu
from tests.oracle import dense_moe, gradients, relative_error
from titan_megamoe import check_step, hopper, mega_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_on_this_machine() is not None, reason=str(hopper.missing_on_this_machine())),
]

BF16_BOUND = 1e-2
NAMES = ("out", "x", "scores", "w1", "w2", "w3")


def random_layer(tokens: int, dim: int, hidden: int, experts: int, top_k: int, seed: int = 0, hot: float = 0.0):
    """bf16 layer inputs on the GPU; ``hot`` > 0 makes low-numbered experts likelier."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()

    preference = torch.rand(tokens, experts, generator=generator, device="cuda")
    preference -= hot * torch.arange(experts, device="cuda") / experts
    return (
        normal(tokens, dim),
        preference.topk(top_k, dim=1).indices,
        torch.rand(tokens, top_k, generator=generator, device="cuda"),
        normal(experts, hidden, dim, scale=dim**-0.5),
        normal(experts, dim, hidden, scale=hidden**-0.5),
        normal(experts, hidden, dim, scale=dim**-0.5),
    )


def in_fp64(inputs):
    return [t.double() if t.is_floating_point() else t for t in inputs]


@pytest.mark.parametrize(
    "tokens, dim, hidden, experts, top_k, hot",
    [
        (513, 320, 192, 7, 3, 0.0),
        (1, 320, 192, 7, 3, 0.0),
        (300, 128, 64, 64, 1, 3.0),
        (2048, 2048, 768, 32, 8, 1.5),
        (129, 2048, 768, 128, 8, 0.0),
    ],
)
@pytest.mark.parametrize(
    "capacity, saved", [(None, "activations"), (2.0, "activations"), (None, "inputs"), (2.0, "inputs")]
)
def test_forward_and_backward_match_fp64(tokens, dim, hidden, experts, top_k, hot, capacity, saved):
    inputs = random_layer(tokens, dim, hidden, experts, top_k, hot=hot)
    dout_TD = torch.randn(tokens, dim, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    actual = gradients(lambda *a: mega_moe(*a, backend="hopper", capacity=capacity, saved=saved), inputs, dout_TD)
    expected = gradients(dense_moe, in_fp64(inputs), dout_TD.double())
    check_step()
    for name, a, b in zip(NAMES, actual, expected):
        assert relative_error(a, b) < BF16_BOUND, name


def test_no_tokens():
    inputs = random_layer(0, 128, 64, 4, 2)
    out_TD, *grads = gradients(lambda *a: mega_moe(*a, backend="hopper"), inputs, inputs[0])
    assert out_TD.shape == (0, 128)
    assert not any(grad.any() for grad in grads)


def test_two_runs_are_bitwise_equal():
    inputs = random_layer(3000, 2048, 768, 32, 8)
    dout_TD = torch.randn(3000, 2048, device="cuda").bfloat16()
    first = gradients(lambda *a: mega_moe(*a, backend="hopper"), inputs, dout_TD)
    for run in range(20):
        saved = ("activations", "inputs")[run % 2]
        again = gradients(lambda *a: mega_moe(*a, backend="hopper", saved=saved), inputs, dout_TD)
        for name, a, b in zip(NAMES, again, first):
            assert torch.equal(a, b), name


def test_backward_can_run_twice():
    x, *rest = random_layer(500, 320, 192, 7, 3)
    x.requires_grad_()
    out_TD = mega_moe(x, *rest, backend="hopper")
    dout_TD = torch.randn_like(out_TD)
    first, second = (torch.autograd.grad(out_TD, x, dout_TD, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_auto_picks_the_kernels_for_bf16_and_the_reference_otherwise():
    inputs = random_layer(50, 128, 64, 4, 2)
    assert torch.equal(mega_moe(*inputs), mega_moe(*inputs, backend="hopper"))
    x, ids, scores, *weights = inputs
    with pytest.raises(ValueError, match="backend = 'hopper' cannot run this layer: it computes in torch.bfloat16"):
        mega_moe(x.float(), ids, scores, *(w.float() for w in weights), backend="hopper")


def test_capacity_that_is_too_small_is_reported_with_one_that_is_not():
    inputs = random_layer(2000, 128, 64, 8, 2, hot=3.0)
    mega_moe(*inputs, backend="hopper", capacity=0.25)
    with pytest.raises(Exception, match=r"capacity = 0.25 holds .* capacity = 1.0 would have sufficed"):
        check_step()
    from titan_megamoe import symmetric

    symmetric._workspaces.clear()  # or later checks would raise again: a step with an overflow ends the run


def test_bad_routes_are_reported():
    x, ids, scores, *weights = random_layer(50, 128, 64, 4, 2, seed=1)
    ids[7, 1] = 4
    mega_moe(x, ids, scores, *weights, backend="hopper")
    with pytest.raises(ValueError, match=r"topk_ids_TK\[7, 1\] is 4"):
        check_step()
    with pytest.raises(ValueError, match=r"topk_ids_TK\[7, 1\] is 4"):  # and the next call notices by itself
        mega_moe(x, ids, scores, *weights, backend="hopper")
    from titan_megamoe import symmetric

    symmetric._workspaces.clear()


def test_compiled_block_has_no_graph_break():
    inputs = random_layer(256, 128, 64, 8, 2)
    dout_TD = torch.randn(256, 128, device="cuda").bfloat16()

    def block(x, *rest):
        return torch.tanh(mega_moe(x * 2, *rest, backend="hopper")) + x

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, inputs, dout_TD), gradients(block, inputs, dout_TD)):
        assert relative_error(a, b) < BF16_BOUND


# ---- ranks in processes of their own, on one GPU


def layer_on_ranks(rank: int, cases: list[tuple]) -> None:
    for seed, (tokens_per_rank, dim, hidden, experts, top_k, hot) in enumerate(cases):
        check_layer(rank, tokens_per_rank, dim, hidden, experts, top_k, hot, seed)


def check_layer(rank, tokens_per_rank, dim, hidden, experts, top_k, hot, seed) -> None:
    x, ids, scores, w1, w2, w3 = random_layer(sum(tokens_per_rank), dim, hidden, experts, top_k, seed=seed, hot=hot)
    local = experts // len(tokens_per_rank)
    mine = slice(sum(tokens_per_rank[:rank]), sum(tokens_per_rank[: rank + 1]))
    held = slice(rank * local, (rank + 1) * local)
    inputs = (x[mine], ids[mine], scores[mine], w1[held], w2[held], w3[held])
    dout = torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()
    hopper._max_tokens.clear()  # every case has token counts of its own
    saved = ("activations", "inputs")[seed % 2]
    actual = gradients(
        lambda *a: mega_moe(*a, group=dist.group.WORLD, backend="hopper", saved=saved), inputs, dout[mine]
    )
    expected = gradients(dense_moe, in_fp64((x, ids, scores, w1, w2, w3)), dout.double())
    wanted = [t[mine] for t in expected[:3]] + [t[held] for t in expected[3:]]
    for name, a, b in zip(NAMES, actual, wanted):
        assert a.shape == b.shape
        if b.numel() and b.norm() > 0:
            assert relative_error(a, b) < BF16_BOUND, f"case {seed}, rank {rank}: {name}"
        else:
            assert torch.equal(a, torch.zeros_like(a)), f"case {seed}, rank {rank}: {name}"
    again = gradients(lambda *a: mega_moe(*a, group=dist.group.WORLD, backend="hopper"), inputs, dout[mine])
    for name, a, b in zip(NAMES, again, actual):
        assert torch.equal(a, b), f"case {seed}, rank {rank}: {name} is not reproducible"


def cases_for(world_size: int, random_routings: int) -> list[tuple]:
    even, uneven = [200] * world_size, [(73 * r + 10) % 301 for r in range(world_size)]
    one_empty = [0, *uneven[1:]]
    # Few shapes, for each of which every rank compiles its kernels.
    shapes = [
        (even, 320, 192, 3 * world_size, 2, 0.0),
        (uneven, 128, 64, 4 * world_size, 3, 0.0),
        (one_empty, 128, 64, 4 * world_size, 3, 0.0),
        (even, 128, 64, 4 * world_size, 3, 9.0),  # every route to the first experts, so to rank 0
        (uneven, 128, 64, world_size, world_size, 0.0),  # one expert a rank, every token to all
    ]
    return shapes + [(uneven, 128, 64, 4 * world_size, 3, 0.1 * (i % 10)) for i in range(random_routings)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_on_one_gpu_match_fp64(world_size):
    cases = cases_for(world_size, random_routings=int(os.environ.get("RANDOM_ROUTINGS", 40)))
    run_ranks_on_one_gpu(layer_on_ranks, world_size, cases)
