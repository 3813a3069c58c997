"""``mega_moe`` as a drop-in for TorchTitan's ``RoutedExperts``: same parameters, same names, same checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torchtitan.tools.utils
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from ..ops import check_precision, mega_moe, select_backend
from ..weight_cache import WeightCache
from . import compat


class MegaMoERoutedExperts(RoutedExperts):
    """Dispatch, expert computation and combine in one operator instead of TorchTitan's three steps.

    The child ``inner_experts`` stays TorchTitan's ``GroupedExperts``, for its parameters: FSDP, initialisation,
    checkpoints and the load-balancing buffers reach through it. Its ``forward`` is never called.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        precision: str = "bf16"
        wgrad: str = "bf16"
        saved: str = "activations"
        backend: str = "auto"
        allow_emulation: bool = False
        capacity: float | None = None
        weight_cache: bool = True

    def __init__(self, config: Config):
        if type(config.inner_experts) is not GroupedExperts.Config:
            raise ValueError(
                f"mega_moe replaces TorchTitan's bf16 GroupedExperts, but the experts are "
                f"{type(config.inner_experts).__qualname__}. It has its own precisions: remove the grouped_mm converter "
                "and set model.moe.dispatch.precision instead."
            )
        super().__init__(config)
        check_precision(config.precision, config.wgrad)
        self.precision = config.precision
        self.wgrad = config.wgrad
        self.saved = config.saved
        self.capacity = config.capacity
        self.asked_backend = config.backend
        self.allow_emulation = config.allow_emulation
        self.backend = self._resolve_backend(config.inner_experts.hidden_dim)
        self.is_recomputed = False  # full activation checkpointing says otherwise
        self.weight_cache = WeightCache() if config.weight_cache and config.precision != "bf16" else None
        if self.weight_cache is not None:
            self.register_load_state_dict_post_hook(lambda module, _: module.weight_cache.invalidate())
        self.ep_group: torch.distributed.ProcessGroup | None = None
        compat.accept_data_dependent_outputs()  # as the operator's are, of which a compiled block must take what it saves

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """As ``RoutedExperts.forward``, whose argument names the sharding configuration is keyed by.

        Computes in bf16 whatever the parameters' dtype, as TorchTitan's ``GroupedExperts`` does.
        """
        del num_local_tokens_per_expert_E  # the operator counts for itself
        B, L, D = x_BLD.shape
        experts = self.inner_experts
        w1_EFD, w2_EDF, w3_EFD = (_local(w).bfloat16() for w in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
        out_TD = mega_moe(
            x_BLD.reshape(B * L, D).bfloat16(),
            topk_expert_ids_BLK.reshape(B * L, -1),
            topk_scores_BLK.reshape(B * L, -1).float(),
            w1_EFD,
            w2_EDF,
            w3_EFD,
            group=self.ep_group,
            precision=self.precision,
            wgrad=self.wgrad,
            saved=self.saved,
            backend=self.backend,
            allow_emulation=self.allow_emulation,
            capacity=self.capacity,
            is_recomputed=self.is_recomputed,
            weight_cache=self.weight_cache,
        )
        return out_TD.type_as(x_BLD).view(B, L, D)

    def parallelize(self, parallel_dims) -> None:
        """Shard the experts as TorchTitan does and take the expert-parallel group for the operator."""
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        self.ep_group = ep_mesh.get_group() if ep_mesh is not None else None
        # Tensor parallelism without expert parallelism splits the experts' hidden dimension.
        self.backend = self._resolve_backend(_local(self.inner_experts.w1_EFD).shape[1])

    def _resolve_backend(self, hidden_dim: int) -> str:
        """Ahead of the forward, which may be traced and has no GPU to ask while the model is on the meta device."""
        device = torch.device(torchtitan.tools.utils.device_type)
        dim = self.inner_experts.w1_EFD.shape[2]
        return select_backend(
            self.asked_backend,
            device,
            torch.bfloat16,
            dim,
            hidden_dim,
            self.precision,
            allow_emulation=self.allow_emulation,
        )


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
