"""Routings that a mixture of experts can meet, from the best to the worst, for tests and benchmarks.

Each token gets K distinct experts, as from top-k. "Rank" is who holds an expert: rank p of P holds experts
p * E / P to (p + 1) * E / P - 1.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WORKLOADS: dict[str, str] = {
    "uniform": "distinct experts drawn at random",
    "balanced": "every expert gets the same number of rows, to within one",
    "zipf": "the n-th expert is drawn with a weight of 1 / n",
    "hot_expert": "every token goes to expert 0, and to others at random",
    "hot_rank": "every token goes to experts of rank 0 only, as far as it has K",
    "cold_rank": "no token goes to an expert of the last rank, as long as the others have K",
    "burst": "a few experts, others in each step, get most tokens",
    "ties": "a router whose scores are all equal: every token gets the first K experts",
}


def make_routing(
    workload: str,
    tokens: int,
    num_experts: int,
    top_k: int,
    *,
    ep_size: int = 1,
    step: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """int64 ``[T, K]``: expert ids in ``[0, num_experts)``, the same for equal arguments.

    Args:
        workload: one of :data:`WORKLOADS`.
        num_experts: of all ranks.
        step: in a training run; "burst" differs from step to step.

    Raises:
        ValueError: an unknown workload, more routes than experts, or experts that ranks cannot share evenly.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload = {workload!r} is not known. Use one of: {', '.join(WORKLOADS)}.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k = {top_k}: a token's {num_experts} experts are distinct. Pass 1 to {num_experts}.")
    if num_experts % ep_size:
        raise ValueError(f"num_experts = {num_experts} cannot be shared by {ep_size} ranks. Pass a multiple.")
    generator = torch.Generator(device).manual_seed(1000 * seed + step)
    local = num_experts // ep_size
    expert_E = torch.arange(num_experts, device=device)

    def weights(of_expert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return _draw(of_expert(expert_E), tokens, top_k, generator)

    if workload == "uniform":
        return weights(torch.ones_like)
    if workload == "balanced":
        # Token t gets the next K experts of an endless cycle through all of them.
        return (torch.arange(tokens * top_k, device=device) % num_experts).view(tokens, top_k)
    if workload == "zipf":
        return weights(lambda e: 1 / (1 + e))
    if workload == "hot_expert":
        return weights(lambda e: torch.where(e == 0, 1e9, 1.0))
    if workload == "hot_rank":
        return weights(lambda e: torch.where(e < local, 1e9, 1.0))
    if workload == "cold_rank":
        return weights(lambda e: torch.where(e >= num_experts - local, 1e-9, 1.0))
    if workload == "burst":
        hot_E = torch.rand(num_experts, generator=generator, device=device) < 2 / num_experts
        return weights(lambda e: torch.where(hot_E, 100.0, 1.0))
    return expert_E[:top_k].expand(tokens, top_k).contiguous()


def _draw(weight_E: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """``[T, K]``: distinct experts, drawn one after the other in proportion to their weights (Gumbel's top-k trick)."""
    uniform_TE = torch.rand(tokens, len(weight_E), generator=generator, device=weight_E.device, dtype=torch.float64)
    gumbel_TE = -torch.log(-torch.log(uniform_TE.clamp(1e-300, 1 - 1e-16)))
    return (weight_E.double().log() + gumbel_TE).topk(top_k, dim=1).indices
