"""The routing plan: which rows this rank's experts compute, where each row comes from and where its result goes.

Shape suffixes (as in TorchTitan's ``models/common/moe.py``, plus our own):
    T  tokens this rank owns              D  model dimension         F  expert hidden dimension
    E  experts                            e  experts on this rank    K  routes per token (top-k)
    P  ranks of the expert-parallel group
    N  tokens of all ranks, rank after rank
    U  *unique* tokens with at least one route to this rank's experts
    R  rows: routes to this rank's experts (a token routed to two of them is two rows)
    S  tokens this rank sends, once per rank that has an expert for them

Row order is (local expert, owner rank, token, route) and comes from stable sorts and prefix sums, never from atomics,
so two runs of the same routing are bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Everything forward and backward need to know about the routing, as seen by one rank.

    All tensors are int64 and on the device of the ids they were built from.
    """

    row_offsets_e1: torch.Tensor
    """``[e + 1]``: rows of local expert ``i`` are ``row_offsets_e1[i]:row_offsets_e1[i + 1]``."""

    row_token_R: torch.Tensor  # noqa: N815
    """``[R]``: which of the U unique tokens a row is computed from."""

    row_slot_R: torch.Tensor  # noqa: N815
    """``[R]``: which of the token's K routes the row is."""

    row_of_slot_UK: torch.Tensor  # noqa: N815
    """``[U, K]``: the row of a unique token's route, or -1 where that route's expert is on another rank."""

    pulled_U: torch.Tensor  # noqa: N815
    """``[U]``: the unique tokens as indices into N, so ordered by (owner rank, token)."""

    sent_S: torch.Tensor  # noqa: N815
    """``[S]``: tokens of this rank (indices into T) that other ranks pull, ordered by (pulling rank, token)."""

    counts_2P: torch.Tensor  # noqa: N815
    """``[2, P]``: row 0, how many of ``sent_S`` each rank pulls; row 1, how many of ``pulled_U`` each rank owns."""

    @property
    def num_local_experts(self) -> int:
        return self.row_offsets_e1.numel() - 1

    @property
    def num_rows(self) -> int:
        return self.row_token_R.numel()


def build_plan(
    topk_ids_NK: torch.Tensor, tokens_per_rank: list[int], *, rank: int, num_local_experts: int
) -> RoutingPlan:
    """Build ``rank``'s plan from the routes of every token of the group.

    Args:
        topk_ids_NK: ``[N, K]`` integer expert ids in ``[0, P * num_local_experts)``, owner rank after owner rank.
        tokens_per_rank: how many of the N tokens each rank owns; ``sum(tokens_per_rank) == N``.
        rank: this rank's index in the group; it holds experts ``rank * num_local_experts`` and following.
        num_local_experts: experts per rank.
    """
    num_tokens, num_routes = topk_ids_NK.shape
    ep_size, device = len(tokens_per_rank), topk_ids_NK.device
    if sum(tokens_per_rank) != num_tokens:
        raise ValueError(f"tokens_per_rank sums to {sum(tokens_per_rank)}, but topk_ids_NK has {num_tokens} tokens.")

    expert_rank_NK = topk_ids_NK.long() // num_local_experts
    local_NK = expert_rank_NK == rank
    pulled_U = local_NK.any(dim=1).nonzero().squeeze(1)
    token_Q, slot_Q = local_NK[pulled_U].nonzero(as_tuple=True)  # Q: rows before they are sorted by expert
    expert_Q = topk_ids_NK[pulled_U[token_Q], slot_Q].long() - rank * num_local_experts
    order_R = torch.argsort(expert_Q, stable=True)
    row_token_R, row_slot_R = token_Q[order_R], slot_Q[order_R]
    rows_per_expert_e = torch.bincount(expert_Q, minlength=num_local_experts)
    row_of_slot_UK = torch.full((pulled_U.numel(), num_routes), -1, dtype=torch.int64, device=device)
    row_of_slot_UK[row_token_R, row_slot_R] = torch.arange(row_token_R.numel(), device=device)

    first_token = sum(tokens_per_rank[:rank])
    wanted_PT = _wanted(expert_rank_NK[first_token : first_token + tokens_per_rank[rank]], ep_size)
    owner_N = torch.repeat_interleave(
        torch.arange(ep_size, device=device), torch.tensor(tokens_per_rank, device=device), output_size=num_tokens
    )
    return RoutingPlan(
        row_offsets_e1=torch.nn.functional.pad(rows_per_expert_e.cumsum(0), (1, 0)),
        row_token_R=row_token_R,
        row_slot_R=row_slot_R,
        row_of_slot_UK=row_of_slot_UK,
        pulled_U=pulled_U,
        sent_S=wanted_PT.nonzero()[:, 1].clone(),  # not a view: an operator returns it
        counts_2P=torch.stack([wanted_PT.sum(dim=1), torch.bincount(owner_N[pulled_U], minlength=ep_size)]),
    )


def _wanted(expert_rank_TK: torch.Tensor, ep_size: int) -> torch.Tensor:
    """``[P, T]`` bool: does rank ``p`` hold an expert that token ``t`` is routed to?"""
    wanted_TP = torch.zeros(expert_rank_TK.shape[0], ep_size, dtype=torch.bool, device=expert_rank_TK.device)
    return wanted_TP.scatter_(1, expert_rank_TK, True).t()
