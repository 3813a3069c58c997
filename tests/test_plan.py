"""The routing plan against what it promises, on random routings from one to several ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from titan_megamoe.plan import build_plan


@st.composite
def routings(draw):
    ep_size, num_local_experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_experts = ep_size * num_local_experts
    top_k = draw(st.integers(1, num_experts))
    tokens_per_rank = draw(st.lists(st.integers(0, 9), min_size=ep_size, max_size=ep_size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    experts_in_use = draw(st.integers(top_k, num_experts))  # the others stay empty
    weights = torch.rand(sum(tokens_per_rank), experts_in_use, generator=generator)
    return weights.topk(top_k, dim=1).indices, tokens_per_rank, num_local_experts


def plans_of(ids_NK, tokens_per_rank, num_local_experts):
    return [
        build_plan(ids_NK, tokens_per_rank, rank=rank, num_local_experts=num_local_experts)
        for rank in range(len(tokens_per_rank))
    ]


@settings(max_examples=150, deadline=None)
@given(routings())
def test_every_route_is_one_row_of_its_expert(routing):
    ids_NK, tokens_per_rank, num_local_experts = routing
    seen = []
    for rank, plan in enumerate(plans_of(*routing)):
        for expert in range(num_local_experts):
            start, stop = plan.row_offsets_e1[expert : expert + 2].tolist()
            rows = [
                (plan.pulled_U[plan.row_token_R[row]].item(), plan.row_slot_R[row].item()) for row in range(start, stop)
            ]
            assert rows == sorted(rows), "rows of an expert are ordered by (owner rank, token, route)"
            assert all(ids_NK[token, slot] == rank * num_local_experts + expert for token, slot in rows)
            seen += rows
    assert sorted(seen) == [(n, k) for n in range(ids_NK.shape[0]) for k in range(ids_NK.shape[1])]


@settings(max_examples=150, deadline=None)
@given(routings())
def test_row_tables_are_each_others_inverse(routing):
    for plan in plans_of(*routing):
        assert plan.row_offsets_e1[-1] == plan.num_rows
        rows = plan.row_of_slot_UK[plan.row_token_R, plan.row_slot_R]
        assert torch.equal(rows, torch.arange(plan.num_rows))
        assert (plan.row_of_slot_UK >= 0).sum() == plan.num_rows
        assert (plan.row_of_slot_UK >= 0).any(dim=1).all(), "a token is pulled only if it has a route here"


@settings(max_examples=150, deadline=None)
@given(routings())
def test_what_one_rank_sends_is_what_the_other_pulls(routing):
    ids_NK, tokens_per_rank, _ = routing
    plans = plans_of(*routing)
    first = [sum(tokens_per_rank[:rank]) for rank in range(len(tokens_per_rank))]
    for puller, plan in enumerate(plans):
        sent = []
        for owner, owner_plan in enumerate(plans):
            sent_P, pulled_P = owner_plan.counts_2P.tolist()
            assert plan.counts_2P[1, owner] == sent_P[puller]
            sent += (owner_plan.sent_S.split(sent_P)[puller] + first[owner]).tolist()
        assert sent == plan.pulled_U.tolist()
        assert len(set(sent)) == len(sent), "a token crosses the link once per expert rank"


def test_token_counts_must_cover_the_ids():
    with pytest.raises(ValueError, match="tokens_per_rank sums to 3, but topk_ids_NK has 4 tokens"):
        build_plan(torch.zeros(4, 1, dtype=torch.int64), [1, 2], rank=0, num_local_experts=2)
