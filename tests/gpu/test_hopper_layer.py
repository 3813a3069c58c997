"""The layer on the fused kernels: against the formula in fp64, bitwise against itself, and over ranks that share one GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import triton.language as tl
from triton.language.extra.cuda import globaltimer

from tests.gpu.ranks import run_ranks_on_one_gpu
from tests.oracle import dense_moe, gradients, relative_error
from titan_megamoe import check_step, hopper, mega_moe

pytestmark = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(
    hopper.missing_on_this_machine() is not None, reason=str(hopper.missing_on_this_machine())
)

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
def test_forward_and_backward_match_fp64(tokens, dim, hidden, experts, top_k, hot, capacity, saved, kernels):
    inputs = random_layer(tokens, dim, hidden, experts, top_k, hot=hot)
    dout_TD = torch.randn(tokens, dim, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    actual = gradients(lambda *a: mega_moe(*a, backend=kernels, capacity=capacity, saved=saved), inputs, dout_TD)
    expected = gradients(dense_moe, in_fp64(inputs), dout_TD.double())
    check_step()
    for name, a, b in zip(NAMES, actual, expected):
        assert relative_error(a, b) < BF16_BOUND, name


def test_no_tokens(kernels):
    inputs = random_layer(0, 128, 64, 4, 2)
    out_TD, *grads = gradients(lambda *a: mega_moe(*a, backend=kernels), inputs, inputs[0])
    assert out_TD.shape == (0, 128)
    assert not any(grad.any() for grad in grads)


def test_two_runs_are_bitwise_equal(kernels):
    inputs = random_layer(3000, 2048, 768, 32, 8)
    dout_TD = torch.randn(3000, 2048, device="cuda").bfloat16()
    first = gradients(lambda *a: mega_moe(*a, backend=kernels), inputs, dout_TD)
    for run in range(20):
        saved = ("activations", "inputs")[run % 2]
        again = gradients(lambda *a: mega_moe(*a, backend=kernels, saved=saved), inputs, dout_TD)
        for name, a, b in zip(NAMES, again, first):
            assert torch.equal(a, b), name


def test_backward_can_run_twice(kernels):
    x, *rest = random_layer(500, 320, 192, 7, 3)
    x.requires_grad_()
    out_TD = mega_moe(x, *rest, backend=kernels)
    dout_TD = torch.randn_like(out_TD)
    first, second = (torch.autograd.grad(out_TD, x, dout_TD, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@needs_hopper
def test_auto_picks_the_kernels_for_bf16_and_the_reference_otherwise():
    inputs = random_layer(50, 128, 64, 4, 2)
    assert torch.equal(mega_moe(*inputs), mega_moe(*inputs, backend="hopper"))
    x, ids, scores, *weights = inputs
    with pytest.raises(ValueError, match="backend = 'hopper' cannot run this layer: it takes torch.bfloat16"):
        mega_moe(x.float(), ids, scores, *(w.float() for w in weights), backend="hopper")


def test_capacity_that_is_too_small_is_reported_with_one_that_is_not(kernels):
    inputs = random_layer(2000, 128, 64, 8, 2, hot=3.0)
    mega_moe(*inputs, backend=kernels, capacity=0.25)
    with pytest.raises(Exception, match=r"capacity = 0.25 holds .* capacity = 1.0 would have sufficed"):
        check_step()
    from titan_megamoe import symmetric

    symmetric._workspaces.clear()  # or later checks would raise again: a step with an overflow ends the run


def test_bad_routes_are_reported(kernels):
    x, ids, scores, *weights = random_layer(50, 128, 64, 4, 2, seed=1)
    ids[7, 1] = 4
    mega_moe(x, ids, scores, *weights, backend=kernels)
    with pytest.raises(ValueError, match=r"topk_ids_TK\[7, 1\] is 4"):
        check_step()
    with pytest.raises(ValueError, match=r"topk_ids_TK\[7, 1\] is 4"):  # and the next call notices by itself
        mega_moe(x, ids, scores, *weights, backend=kernels)
    from titan_megamoe import symmetric

    symmetric._workspaces.clear()


def test_compiled_block_has_no_graph_break(kernels):
    inputs = random_layer(256, 128, 64, 8, 2)
    dout_TD = torch.randn(256, 128, device="cuda").bfloat16()

    def block(x, *rest):
        return torch.tanh(mega_moe(x * 2, *rest, backend=kernels)) + x

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, inputs, dout_TD), gradients(block, inputs, dout_TD)):
        assert relative_error(a, b) < BF16_BOUND


@pytest.mark.parametrize("saved", ["activations", "inputs"])
def test_checkpointed_layer_is_bitwise_the_same(saved, kernels):
    inputs = random_layer(700, 320, 192, 7, 3)
    dout_TD = torch.randn(700, 320, device="cuda").bfloat16()

    def layer(*inputs):
        return mega_moe(*inputs, backend=kernels, saved=saved, is_recomputed=True)

    expected = gradients(lambda *a: mega_moe(*a, backend=kernels), inputs, dout_TD)
    actual = gradients(lambda *a: checkpoint(layer, *a, use_reentrant=False), inputs, dout_TD)
    for name, a, b in zip(NAMES, actual, expected):
        assert torch.equal(a, b), name


def test_forward_and_backward_are_captured_in_a_graph(kernels):
    inputs = random_layer(500, 320, 192, 7, 3)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    dout_TD = torch.randn(500, 320, device="cuda").bfloat16()

    def run():
        out_TD = mega_moe(*leaves, backend=kernels, capacity=1.0)
        return out_TD, *torch.autograd.grad(out_TD, wanted, dout_TD)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):  # other tokens and routings than were captured
        for leaf, fresh in zip(leaves, random_layer(500, 320, 192, 7, 3, seed=seed)):
            leaf.data.copy_(fresh)
        graph.replay()
        for name, a, b in zip(NAMES, captured, run()):
            assert torch.equal(a, b), (seed, name)
    check_step()


@triton.jit
def hold_sms(nanoseconds: tl.int64):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def hold_most_sms(stream: torch.cuda.Stream, seconds: float, free: int = 4) -> None:
    """Fill all SMs but a few with CTAs that do nothing for a while, as a collective of another stream may."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count - free
    with torch.cuda.stream(stream):
        hold_sms[(2 * sms,)](int(seconds * 1e9), num_warps=32)  # two CTAs of 1024 threads leave no room on an SM


def test_it_makes_progress_on_the_sms_that_another_stream_leaves(kernels):
    inputs = random_layer(2000, 320, 192, 7, 3)
    dout_TD = torch.randn(2000, 320, device="cuda").bfloat16()
    expected = gradients(lambda *a: mega_moe(*a, backend=kernels), inputs, dout_TD)
    side = torch.cuda.Stream()
    for _ in range(3):
        hold_most_sms(side, 0.05)
        actual = gradients(lambda *a: mega_moe(*a, backend=kernels), inputs, dout_TD)
        for name, a, b in zip(NAMES, actual, expected):
            assert torch.equal(a, b), name
    check_step()


# ---- ranks in processes of their own, on one GPU


def layer_on_ranks(rank: int, cases: list[tuple], kernels: str = "hopper") -> None:
    for seed, (tokens_per_rank, dim, hidden, experts, top_k, hot) in enumerate(cases):
        check_layer(rank, tokens_per_rank, dim, hidden, experts, top_k, hot, seed, kernels)


def check_layer(rank, tokens_per_rank, dim, hidden, experts, top_k, hot, seed, kernels) -> None:
    x, ids, scores, w1, w2, w3 = random_layer(sum(tokens_per_rank), dim, hidden, experts, top_k, seed=seed, hot=hot)
    local = experts // len(tokens_per_rank)
    mine = slice(sum(tokens_per_rank[:rank]), sum(tokens_per_rank[: rank + 1]))
    held = slice(rank * local, (rank + 1) * local)
    inputs = (x[mine], ids[mine], scores[mine], w1[held], w2[held], w3[held])
    dout = torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()
    hopper._max_tokens.clear()  # every case has token counts of its own
    saved = ("activations", "inputs")[seed % 2]
    actual = gradients(
        lambda *a: mega_moe(*a, group=dist.group.WORLD, backend=kernels, saved=saved), inputs, dout[mine]
    )
    expected = gradients(dense_moe, in_fp64((x, ids, scores, w1, w2, w3)), dout.double())
    wanted = [t[mine] for t in expected[:3]] + [t[held] for t in expected[3:]]
    for name, a, b in zip(NAMES, actual, wanted):
        assert a.shape == b.shape
        if name == "scores":
            # A rank may have one token, and a score's gradient is a sum that may cancel: all ranks' are compared together.
            squares = torch.stack([(a.double() - b).square().sum(), b.square().sum()])
            dist.all_reduce(squares)
            assert (squares[0] / squares[1]).sqrt() < BF16_BOUND, f"case {seed}: {name}"
        elif b.numel() and b.norm() > 0:
            assert relative_error(a, b) < BF16_BOUND, f"case {seed}, rank {rank}: {name}"
        else:
            assert torch.equal(a, torch.zeros_like(a)), f"case {seed}, rank {rank}: {name}"
    again = gradients(lambda *a: mega_moe(*a, group=dist.group.WORLD, backend=kernels), inputs, dout[mine])
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
def test_ranks_on_one_gpu_match_fp64(world_size, kernels):
    cases = cases_for(world_size, random_routings=int(os.environ.get("RANDOM_ROUTINGS", 40)))
    run_ranks_on_one_gpu(layer_on_ranks, world_size, cases, kernels)


class Late(torch.autograd.Function):
    """The identity, behind a pause of the GPU in forward, in backward, or not at all."""

    @staticmethod
    def forward(ctx, x_TD, cycles: int, cycles_of_backward: int):
        ctx.cycles_of_backward = cycles_of_backward
        torch.cuda._sleep(cycles)
        return x_TD.clone()

    @staticmethod
    def backward(ctx, dx_TD):
        torch.cuda._sleep(ctx.cycles_of_backward)
        return dx_TD.clone(), None, None


def late_ranks(rank: int, world_size: int, disturb: str, kernels: str) -> None:
    """Three layers in a row, each of which overwrites what the one before published. Every rank is late in turn."""
    layers = []
    for seed in range(3):
        x, ids, scores, w1, w2, w3 = random_layer(300 * world_size, 128, 64, 4 * world_size, 3, seed=seed)
        mine, held = slice(300 * rank, 300 * (rank + 1)), slice(4 * rank, 4 * (rank + 1))
        layers.append((ids[mine], scores[mine], w1[held], w2[held], w3[held]))
    x_TD = x[mine].clone()
    dout_TD = torch.randn(300, 128, generator=torch.Generator("cuda").manual_seed(rank), device="cuda").bfloat16()
    side = torch.cuda.Stream()

    def run(saved: str, checkpointed: bool, late: tuple[int, str] | None) -> list[torch.Tensor]:
        leaf = x_TD.clone().requires_grad_()
        weights = [[t.clone().requires_grad_(t.is_floating_point()) for t in layer] for layer in layers]
        h_TD = leaf
        for layer in weights:
            cycles = {"forward": 0, "backward": 0}
            if late is not None and late[0] == rank:
                cycles[late[1]] = 20_000_000  # about 10 ms
            h_TD = Late.apply(h_TD, *cycles.values())

            def block(h_TD, *layer):
                return h_TD + mega_moe(
                    h_TD, *layer, group=dist.group.WORLD, backend=kernels, saved=saved, is_recomputed=checkpointed
                )

            h_TD = checkpoint(block, h_TD, *layer, use_reentrant=False) if checkpointed else block(h_TD, *layer)
            if disturb == "sms":
                hold_most_sms(side, 0.005, free=2 * world_size)
        wanted = [leaf, *(t for layer in weights for t in layer if t.requires_grad)]
        return [h_TD.detach(), *torch.autograd.grad(h_TD, wanted, dout_TD)]

    expected = run("activations", False, None)
    for saved in ("activations", "inputs"):
        for checkpointed in (False, True):
            for late in [(late_rank, where) for late_rank in range(world_size) for where in ("forward", "backward")]:
                for a, b in zip(run(saved, checkpointed, late), expected, strict=True):
                    assert torch.equal(a, b), (rank, saved, checkpointed, late)


@pytest.mark.parametrize("disturb", ["nothing", "sms"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_published_is_not_overwritten_while_a_late_rank_reads_it(world_size, disturb, kernels):
    run_ranks_on_one_gpu(late_ranks, world_size, world_size, disturb, kernels)
