"""The reference backend over several gloo ranks equals one rank that holds all experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.oracle import gradients, random_layer
from titan_megamoe import mega_moe

DIM, HIDDEN, TOP_K = 8, 12, 3


def layer_on_rank(rank, tokens_per_rank, experts, dtype, saved, one_hot_rank):
    """This rank's ``(out, dx, dscores, dw1, dw2, dw3)`` of a layer that all ranks draw from one seed."""
    ep_size = len(tokens_per_rank)
    local = experts // ep_size
    x, ids, scores, w1, w2, w3 = full_layer(tokens_per_rank, experts, dtype, one_hot_rank)
    mine = slice(sum(tokens_per_rank[:rank]), sum(tokens_per_rank[: rank + 1]))
    held = slice(rank * local, (rank + 1) * local)
    inputs = (x[mine], ids[mine], scores[mine], w1[held], w2[held], w3[held])
    dout_TD = dout_of(x)[mine]
    return gradients(lambda *a: mega_moe(*a, group=dist.group.WORLD, saved=saved), inputs, dout_TD)


def full_layer(tokens_per_rank, experts, dtype, one_hot_rank):
    x, ids, scores, *weights = random_layer(sum(tokens_per_rank), DIM, HIDDEN, experts, TOP_K, dtype=dtype, seed=5)
    if one_hot_rank is not None:  # every route to one rank's experts
        local = experts // len(tokens_per_rank)
        ids = one_hot_rank * local + ids % local
    return x, ids, scores, *weights


def dout_of(x):
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(x.dtype)


@pytest.mark.parametrize(
    "tokens_per_rank, experts, one_hot_rank",
    [([7, 7], 8, None), ([5, 0, 9], 6, None), ([0, 0], 4, None), ([6, 3, 4, 5], 8, None), ([4, 6], 8, 1)],
)
@pytest.mark.parametrize("saved", ["activations", "inputs"])
def test_ranks_equal_one_rank_in_fp64(tokens_per_rank, experts, one_hot_rank, saved):
    dtype = torch.float64
    results = run_ranks(layer_on_rank, len(tokens_per_rank), tokens_per_rank, experts, dtype, saved, one_hot_rank)
    layer = full_layer(tokens_per_rank, experts, dtype, one_hot_rank)
    expected = gradients(mega_moe, layer, dout_of(layer[0]))
    for index, name in enumerate(("out", "x", "scores", "w1", "w2", "w3")):
        actual = torch.cat([result[index] for result in results])
        torch.testing.assert_close(actual, expected[index], rtol=1e-11, atol=1e-12, msg=lambda m: f"{name}: {m}")


def test_two_runs_over_ranks_are_bitwise_equal_in_bf16():
    arguments = (layer_on_rank, 2, [40, 30], 8, torch.bfloat16, "activations", None)
    for first, second in zip(run_ranks(*arguments), run_ranks(*arguments)):
        assert all(torch.equal(a, b) for a, b in zip(first, second))


def bad_id_on_rank_1(rank):
    x, ids, scores, *weights = random_layer(4, DIM, HIDDEN, 4, 2)
    if rank == 1:
        ids[2, 0] = 4
    held = slice(rank * 2, rank * 2 + 2)
    try:
        mega_moe(x, ids, scores, *(w[held] for w in weights), group=dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_bad_data_on_one_rank_stops_them_all():
    on_0, on_1 = run_ranks(bad_id_on_rank_1, 2)
    assert "topk_ids_TK[2, 0] is 4" in on_1
    assert "rank 1 of the expert-parallel group found bad routes" in on_0
