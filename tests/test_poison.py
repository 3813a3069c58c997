"""Results do not depend on what memory holds before it is written."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import poison as poisoning
from tests.distributed import run_ranks
from tests.oracle import gradients, random_layer
from titan_megamoe import mega_moe
from titan_megamoe.bench.workloads import make_routing, WORKLOADS
from titan_megamoe.quantize import FP8

OPTIONS = [
    dict(precision="bf16", saved="activations"),
    dict(precision="bf16", saved="inputs"),
    dict(precision="fp8", wgrad="fp8"),
    dict(precision="fp8_bwd"),
    dict(precision="mxfp8", wgrad="mxfp8"),
]
TOKENS_PER_RANK = [17, 0, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
def test_new_memory_is_poisoned(poison, dtype):
    as_bytes = torch.empty(100, dtype=torch.uint8)
    assert torch.equal(as_bytes, torch.full_like(as_bytes, 255))
    assert as_bytes.view(torch.float32).isnan().all() and as_bytes.view(torch.bfloat16).isnan().all()
    assert as_bytes.view(FP8).float().isnan().all()
    made = [
        torch.empty(8, dtype=dtype),
        torch.zeros(8, dtype=dtype).new_empty(8),
        torch.empty_like(torch.zeros(8, dtype=dtype)),
    ]
    for tensor in made:
        assert tensor.isnan().all() if dtype.is_floating_point else (tensor == torch.iinfo(dtype).max).all()


def test_what_is_published_is_poisoned_before_each_call_but_not_the_flags(poison, monkeypatch):
    pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
    from titan_megamoe.kernels import combine
    from titan_megamoe.kernels.plan_tables import LayerShape
    from titan_megamoe.symmetric import virtual_workspaces

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    monkeypatch.setattr(combine, "publish_kernel", Nothing())
    shape = LayerShape(ep_size=2, max_tokens=8, dim=64, hidden_dim=64, num_local_experts=2, top_k=1)
    workspace = virtual_workspaces(shape, "cpu")[0]
    x_TD = torch.zeros(8, 64).bfloat16()
    combine.publish(workspace, x_TD, torch.zeros(8, 1, dtype=torch.int64), torch.zeros(8, 1))
    published = workspace.published
    assert published.slots_PTD.isnan().all() and published.scores_TK.isnan().all() and (published.ids_TK == -1).all()
    assert not published.flags.any()
    published.x_TD.zero_(), published.slots_PTD.zero_()
    combine.publish_rows(workspace, dout_TD=x_TD)
    assert published.slots_PTD.isnan().all() and not published.x_TD.any() and not published.flags.any()


def results(options: dict, group=None, rank: int = 0) -> dict[str, list[torch.Tensor]]:
    """Output and gradients for each workload; a rank's, if there is a group."""
    tokens = TOKENS_PER_RANK[rank] if group is not None else 60
    ep_size, experts = (3, 12) if group is not None else (1, 12)
    found = {}
    for workload in WORKLOADS:
        x, _, scores, *weights = random_layer(tokens, 128, 128, experts // ep_size, 3, dtype=torch.float32, seed=rank)
        ids = make_routing(workload, tokens, experts, 3, ep_size=ep_size, seed=rank)
        dout_TD = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        call = lambda *a: mega_moe(*a, backend="reference", group=group, **options)  # noqa: E731
        found[workload] = gradients(call, (x, ids, scores, *weights), dout_TD)
    return found


def assert_equal(poisoned, clean) -> None:
    for workload in WORKLOADS:
        for a, b in zip(poisoned[workload], clean[workload], strict=True):
            assert torch.equal(a, b), workload
            assert not a.isnan().any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank(options):
    clean = results(options)
    undo = poisoning.install()
    try:
        assert_equal(results(options), clean)
    finally:
        undo()


def on_rank(rank: int, options: list[dict]) -> list[dict]:
    return [results(one, dist.group.WORLD, rank) for one in options]


def test_ranks_of_unequal_tokens(monkeypatch):
    clean = run_ranks(on_rank, 3, OPTIONS)
    monkeypatch.setenv(poisoning.VARIABLE, "1")
    for poisoned_rank, clean_rank in zip(run_ranks(on_rank, 3, OPTIONS), clean, strict=True):
        for poisoned_one, clean_one in zip(poisoned_rank, clean_rank, strict=True):
            assert_equal(poisoned_one, clean_one)
