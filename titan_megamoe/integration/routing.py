"""Forced routing for benchmarks: experts drawn uniformly at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class UniformRouter(TokenChoiceTopKRouter):
    """TorchTitan's router with its debug round-robin replaced by K distinct experts drawn at random for each token.

    The draw uses the default generator, which activation checkpointing restores for its recomputation.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self._debug_force_load_balance = True
        # All ranks share one seed and would draw the same experts; shifting by a rank's share of the experts makes their
        # draws fall on different ones, so that the totals are as ragged as independent draws'.
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._shift = rank * max(1, self.num_experts // world_size)

    def _debug_force_load_balance_routing(self, scores_BLE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, drawn_BLK = torch.topk(torch.rand_like(scores_BLE), k=self.top_k, dim=-1, sorted=False)
        topk_expert_ids_BLK = (drawn_BLK + self._shift) % self.num_experts
        return topk_expert_ids_BLK, scores_BLE.gather(dim=-1, index=topk_expert_ids_BLK)
