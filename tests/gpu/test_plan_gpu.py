"""The plan, handshake and reduction kernels on a GPU: virtual ranks in one process, real ranks, graphs and time
taken."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.gpu.ranks import run_ranks_on_one_gpu
from tests.test_kernel_plan import check_kernel_plan, publish_all
from titan_megamoe.kernels import combine
from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
from titan_megamoe.kernels.plan_tables import CapacityExceeded, KernelFault, LayerShape, PHASE_ALL_SENT, PHASE_PUBLISHED
from titan_megamoe.symmetric import get_workspace, set_deadline, virtual_workspaces

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def layer_shape(ep_size, num_local_experts, top_k, max_tokens, dim=64, **kwargs) -> LayerShape:
    return LayerShape(
        ep_size=ep_size,
        max_tokens=max_tokens,
        dim=dim,
        hidden_dim=64,
        num_local_experts=num_local_experts,
        top_k=top_k,
        **kwargs,
    )


def random_ids(tokens_per_rank, num_experts, top_k, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.rand(sum(tokens_per_rank), num_experts, generator=generator, device="cuda")
    return weights.topk(top_k, dim=1).indices


def plans_checked(ids_NK, tokens_per_rank, num_local_experts, ranks=None):
    """Build and compare the plans of ``ranks`` (default: all)."""
    shape = layer_shape(len(tokens_per_rank), num_local_experts, ids_NK.shape[1], max(tokens_per_rank) + 1)
    workspaces = virtual_workspaces(shape, "cuda")
    scores_NK = publish_all(workspaces, ids_NK, tokens_per_rank)
    for rank in range(shape.ep_size) if ranks is None else ranks:
        plan, counters = build_kernel_plan(workspaces[rank])
        check_kernel_plan(plan, workspaces[rank], ids_NK, scores_NK, tokens_per_rank)
        assert not any(t.any() for t in (counters.arrival_M, counters.done_M, counters.queue))
        assert read_sizes(plan, workspaces[rank]).overflow == 0


@pytest.mark.parametrize(
    "tokens_per_rank, num_local_experts, top_k",
    [
        ([0], 4, 2),
        ([0, 0], 4, 2),
        ([13, 0, 700, 30], 3, 2),
        ([1], 1, 1),
        ([700], 6, 6),
        ([90, 90], 16, 32),
        ([50] * 9, 1, 3),
        ([300, 129], 128, 8),
        ([70], 500, 8),
    ],
)
def test_plan_equals_the_oracle(tokens_per_rank, num_local_experts, top_k):
    ids_NK = random_ids(tokens_per_rank, num_local_experts * len(tokens_per_rank), top_k)
    plans_checked(ids_NK, tokens_per_rank, num_local_experts)
    plans_checked(ids_NK % num_local_experts, tokens_per_rank, num_local_experts)  # all to rank 0, with repeats
    plans_checked(torch.zeros_like(ids_NK), tokens_per_rank, num_local_experts)  # one hot expert


@pytest.mark.parametrize("ep_size, num_local_experts, top_k", [(1, 24, 4), (3, 7, 5), (5, 2, 10), (8, 16, 8)])
def test_random_routings(ep_size, num_local_experts, top_k):
    generator = torch.Generator().manual_seed(5)
    for seed in range(20):
        # One rank always has 90 tokens, so that the kernels are compiled once.
        others = torch.randint(0, 91, (ep_size - 1,), generator=generator).tolist()
        tokens_per_rank = [*others[: seed % ep_size], 90, *others[seed % ep_size :]]
        ids_NK = random_ids(tokens_per_rank, ep_size * num_local_experts, top_k, seed)
        if seed % 4 == 3:  # few experts, with repeats
            ids_NK %= 1 + seed % 5
        plans_checked(ids_NK, tokens_per_rank, num_local_experts, ranks=[seed // 2 % ep_size])


def full_size(ep_size: int, **kwargs):
    """Workspaces of a Qwen3-30B layer with random routing, inputs published."""
    shape = layer_shape(ep_size, 128 // ep_size, 8, 16384, dim=2048, **kwargs)
    workspaces = virtual_workspaces(shape, "cuda")
    tokens_per_rank = [16384] * ep_size
    ids_NK = random_ids(tokens_per_rank, 128, 8)
    scores_NK = publish_all(workspaces, ids_NK, tokens_per_rank)
    return workspaces, ids_NK, scores_NK, tokens_per_rank


@pytest.mark.parametrize("ep_size", [1, 8])
def test_full_size_plan_is_right_and_the_same_every_time(ep_size):
    workspaces, ids_NK, scores_NK, tokens_per_rank = full_size(ep_size)
    workspace = workspaces[-1]
    first, _ = build_kernel_plan(workspace)
    check_kernel_plan(first, workspace, ids_NK, scores_NK, tokens_per_rank)
    num_tiles, num_unique, _, _ = first.sizes.tolist()
    again, _ = build_kernel_plan(workspace)
    for name, real in (("sizes", 4), ("tile_expert_M", num_tiles), ("tile_rows_M", num_tiles)) + tuple(
        (name, num_unique) for name in ("pull_source_U", "pull_rows_UK", "pull_scores_UK", "send_order_U")
    ):
        assert torch.equal(getattr(first, name)[:real], getattr(again, name)[:real]), name


def time_plan(ep_size: int, repeats: int = 20) -> list[float]:
    """Microseconds that the plan kernels of one rank take, replayed as a graph with a cold L2; sorted."""
    workspace = full_size(ep_size)[0][0]
    build_kernel_plan(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_kernel_plan(workspace)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[3:])


@pytest.mark.parametrize("ep_size, most", [(1, 80), (8, 120)])
def test_plan_is_fast(ep_size, most):
    if "H100" not in torch.cuda.get_device_name() and "H200" not in torch.cuda.get_device_name():
        pytest.skip(f"the limit is for H100 and H200; this is {torch.cuda.get_device_name()}")
    times = time_plan(ep_size)
    print(f"plan at EP={ep_size}'s sizes: median {statistics.median(times):.1f} us, {times[0]:.1f} to {times[-1]:.1f}")
    assert statistics.median(times) <= most


def test_static_capacity_is_captured_in_a_graph_and_overflow_is_raised():
    shape = layer_shape(1, 8, 2, 512, capacity=1.25)
    workspace = get_workspace(None, shape, "cuda")
    x_TD = torch.randn(512, 64, device="cuda").bfloat16()
    ids_TK, scores_TK = random_ids([512], 8, 2), torch.rand(512, 2, device="cuda")
    combine.publish(workspace, x_TD, ids_TK, scores_TK)
    build_kernel_plan(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine.publish(workspace, x_TD, ids_TK, scores_TK)
        plan, _ = build_kernel_plan(workspace)
    for seed in range(3):
        ids_TK.copy_(random_ids([512], 8, 2, seed))
        graph.replay()
        check_kernel_plan(plan, workspace, ids_TK, scores_TK, [512])
    workspace.check()

    small = virtual_workspaces(layer_shape(2, 2, 2, 512, capacity=1.0), "cuda")
    ids_NK = torch.arange(1024, device="cuda")[:, None].expand(1024, 2) % 2  # everything to rank 0
    scores_NK = publish_all(small, ids_NK, [512, 512])
    plan, _ = build_kernel_plan(small[0])
    check_kernel_plan(plan, small[0], ids_NK, scores_NK, [512, 512])
    with pytest.raises(CapacityExceeded, match="capacity = 2.0 would have sufficed"):
        small[0].check()


# ---- handshake and reduction


def test_ranks_on_their_own_streams_meet():
    workspaces = virtual_workspaces(layer_shape(8, 1, 1, 4), "cuda", deadline_seconds=20)
    streams = [torch.cuda.Stream() for _ in workspaces]
    torch.cuda.synchronize()
    for _ in range(5):
        for phase in (PHASE_PUBLISHED, PHASE_ALL_SENT):
            for workspace, stream in zip(workspaces, streams):
                with torch.cuda.stream(stream):
                    combine.handshake(workspace, phase)
    torch.cuda.synchronize()
    for workspace in workspaces:
        workspace.check()
        assert workspace.local.calls.tolist() == [5, 5]
        assert workspace.published.flags.tolist() == [[5] * 8] * 2


def test_a_late_rank_is_named_and_nothing_waits_again():
    workspaces = virtual_workspaces(layer_shape(3, 1, 1, 4), "cuda", deadline_seconds=0.05)
    for workspace in (workspaces[0], workspaces[2]):
        combine.signal(workspace, PHASE_PUBLISHED)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    combine.wait(workspaces[0], PHASE_PUBLISHED)
    for _ in range(20):  # a step's remaining layers: must not wait for the deadline each
        combine.handshake(workspaces[0], PHASE_ALL_SENT)
    end.record()
    with pytest.raises(KernelFault, match=r"rank 0: handshake waited .* rank 1 to publish .* 1; it has published 0"):
        workspaces[0].check()
    assert 50 <= begin.elapsed_time(end) < 500
    plan, _ = build_kernel_plan(workspaces[0])
    assert not plan.sizes.any()
    # The peer learns of it at its next handshake, long before its own deadline.
    workspaces[1].deadline_seconds = 60
    combine.handshake(workspaces[1], PHASE_ALL_SENT)
    with pytest.raises(KernelFault, match="rank 1 stopped because rank 0"):
        workspaces[1].check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ep_size, num_local_experts, top_k, dim", [(2, 4, 2, 64), (8, 16, 8, 2048), (11, 2, 4, 1984)])
def test_reduction_adds_what_was_sent_in_rank_order(dtype, ep_size, num_local_experts, top_k, dim):
    num_tokens = 500
    shape = layer_shape(ep_size, num_local_experts, top_k, 512, dim, dtype=dtype)
    workspace = virtual_workspaces(shape, "cuda")[1]
    ids_TK = random_ids([num_tokens], shape.num_experts, top_k)
    x_TD = torch.randn(num_tokens, dim, device="cuda").to(dtype)
    combine.publish(workspace, x_TD, ids_TK, torch.rand(num_tokens, top_k, device="cuda"))
    assert torch.equal(workspace.published.x_TD[:num_tokens], x_TD)
    slots_PTD = workspace.published.slots_PTD
    slots_PTD.fill_(float("nan"))  # a slot that no rank wrote must not be read
    expected_TD = torch.zeros(num_tokens, dim, device="cuda")
    for rank in range(ep_size):
        has_sent_T = (ids_TK // num_local_experts == rank).any(dim=1).nonzero().squeeze(1)
        slots_PTD[rank, has_sent_T] = torch.randn(len(has_sent_T), dim, device="cuda").to(dtype)
        expected_TD[has_sent_T] += slots_PTD[rank, has_sent_T].float()
    out_TD = torch.full((num_tokens, dim), float("nan"), dtype=dtype, device="cuda")
    combine.reduce_slots(workspace, ids_TK, out_TD)
    assert torch.equal(out_TD, expected_TD.to(dtype))


# ---- ranks in processes of their own, on one GPU


def plan_on_rank(rank: int, world_size: int) -> None:
    shape = layer_shape(world_size, 4, 2, 64)
    set_deadline(20)
    workspace = get_workspace(dist.group.WORLD, shape, "cuda")
    assert get_workspace(dist.group.WORLD, shape, "cuda") is workspace
    for call in range(3):
        tokens_per_rank = [10 + (7 * r + call) % 50 for r in range(world_size)]
        ids_NK = random_ids(tokens_per_rank, shape.num_experts, 2, seed=call)
        scores_NK = torch.rand(ids_NK.shape, generator=torch.Generator().manual_seed(call)).cuda()
        mine = slice(sum(tokens_per_rank[:rank]), sum(tokens_per_rank[: rank + 1]))
        x_TD = torch.zeros(tokens_per_rank[rank], 64, device="cuda").bfloat16()
        combine.publish(workspace, x_TD, ids_NK[mine], scores_NK[mine])
        combine.handshake(workspace, PHASE_PUBLISHED)
        plan, _ = build_kernel_plan(workspace)
        combine.handshake(workspace, PHASE_ALL_SENT)
        workspace.check()
        check_kernel_plan(plan, workspace, ids_NK, scores_NK, tokens_per_rank)
    try:
        get_workspace(dist.group.WORLD, layer_shape(world_size, 4, 2, 65 + rank), "cuda")
    except ValueError as error:
        assert "max_tokens is 65 on rank 0 but 66 on rank 1" in str(error)
    else:
        raise AssertionError("ranks that disagree about max_tokens were not refused")


@pytest.mark.parametrize("world_size", [2])
def test_ranks_in_processes_of_their_own(world_size):
    run_ranks_on_one_gpu(plan_on_rank, world_size, world_size)
