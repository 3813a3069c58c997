"""The workloads are what they say, and the layer computes each of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.oracle import dense_moe, gradients, random_layer, relative_error
from titan_megamoe import mega_moe
from titan_megamoe.bench.workloads import make_routing, WORKLOADS

TOKENS, EXPERTS, TOP_K, EP = 400, 24, 3, 4


def shares(workload: str, **options) -> torch.Tensor:
    ids_TK = make_routing(workload, TOKENS, EXPERTS, TOP_K, ep_size=EP, **options)
    return torch.bincount(ids_TK.flatten(), minlength=EXPERTS) / ids_TK.numel()


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "tokens, experts, top_k", [(TOKENS, EXPERTS, TOP_K), (1, 8, 8), (0, 8, 2), (7, 512, 32), (5, 4, 1)]
)
def test_experts_are_distinct_and_reproducible(workload, tokens, experts, top_k):
    ids_TK = make_routing(workload, tokens, experts, top_k, ep_size=4, seed=3)
    assert ids_TK.shape == (tokens, top_k) and ids_TK.dtype == torch.int64
    assert torch.equal(ids_TK, make_routing(workload, tokens, experts, top_k, ep_size=4, seed=3))
    if tokens:
        assert 0 <= ids_TK.min() and ids_TK.max() < experts
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())


def test_they_are_what_they_say():
    local = EXPERTS // EP
    assert (shares("uniform") - 1 / EXPERTS).abs().max() < 0.02
    assert (shares("balanced") - 1 / EXPERTS).abs().max() < 1e-3
    zipf = shares("zipf")
    assert zipf[0] > 2 * zipf[3] > 3 * zipf[20]
    assert shares("hot_expert")[0] == pytest.approx(1 / TOP_K)
    assert shares("hot_rank")[local:].sum() == 0
    assert shares("cold_rank")[-local:].sum() == 0
    bursts = [shares("burst", step=step) for step in range(8)]
    assert max(burst.max() for burst in bursts) > 3 / EXPERTS and not torch.equal(bursts[0], bursts[1])
    assert (shares("ties")[:TOP_K] == 1 / TOP_K).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="workload = 'hot' is not known. Use one of: uniform, balanced"):
        make_routing("hot", 1, 8, 2)
    with pytest.raises(ValueError, match="top_k = 9: a token's 8 experts are distinct. Pass 1 to 8"):
        make_routing("uniform", 1, 8, 9)
    with pytest.raises(ValueError, match="num_experts = 8 cannot be shared by 3 ranks"):
        make_routing("uniform", 1, 8, 2, ep_size=3)


def layer_with(workload: str, tokens: int, experts: int, top_k: int, ep_size: int = 1):
    x, _, scores, *weights = random_layer(tokens, 64, 64, experts, top_k, dtype=torch.float32)
    return (x, make_routing(workload, tokens, experts, top_k, ep_size=ep_size), scores, *weights)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("tokens, experts, top_k", [(150, 12, 3), (1, 12, 12), (33, 4, 4), (40, 64, 1)])
def test_one_rank(workload, tokens, experts, top_k):
    inputs = layer_with(workload, tokens, experts, top_k)
    dout_TD = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    actual = gradients(lambda *a: mega_moe(*a, backend="reference"), inputs, dout_TD)
    for a, b in zip(actual, gradients(dense_moe, inputs, dout_TD), strict=True):
        assert relative_error(a, b) < 1e-4


TOKENS_PER_RANK = [50, 0, 131, 1]


def workloads_on_rank(rank: int) -> dict:
    mine = slice(sum(TOKENS_PER_RANK[:rank]), sum(TOKENS_PER_RANK[: rank + 1]))
    held = slice(3 * rank, 3 * (rank + 1))
    results = {}
    for workload in WORKLOADS:
        x, ids, scores, *weights = layer_with(workload, sum(TOKENS_PER_RANK), 12, 3, ep_size=4)
        dout_TD = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        inputs = (x[mine], ids[mine], scores[mine], *(w[held] for w in weights))
        results[workload] = gradients(
            lambda *a: mega_moe(*a, group=dist.group.WORLD, backend="reference"), inputs, dout_TD[mine]
        )
    return results


def test_four_ranks_of_unequal_tokens():
    results = run_ranks(workloads_on_rank, 4)
    for workload in WORKLOADS:
        inputs = layer_with(workload, sum(TOKENS_PER_RANK), 12, 3, ep_size=4)
        dout_TD = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
        for index, expected in enumerate(gradients(dense_moe, inputs, dout_TD)):
            assert relative_error(torch.cat([r[workload][index] for r in results]), expected) < 1e-4, workload
