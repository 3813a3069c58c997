"""TorchTitan ``@override`` factories: how ``mega_moe`` gets into an unmodified TorchTitan.

Our own entry point activates the ones a configuration needs. With stock TorchTitan, name them yourself::

    torchrun -m torchtitan.train --module qwen3 --config qwen3_moe_debug --override.imports \\
        'titan_megamoe.integration.overrides.mega_moe={"precision": "bf16"}' titan_megamoe.integration.overrides.selective_ac
"""

from __future__ import annotations

from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter

from .activation_checkpoint import MegaMoEFullAC, MegaMoESelectiveAC
from .routed_experts import MegaMoERoutedExperts
from .routing import UniformRouter


@override(target=RoutedExperts.Config, exact=True, description="fused, overlapped expert parallelism")
def mega_moe(
    cfg: RoutedExperts.Config,
    *,
    precision: str = "bf16",
    wgrad: str = "bf16",
    saved: str = "activations",
    backend: str = "auto",
    allow_emulation: bool = False,
    capacity: float | None = None,
    weight_cache: bool = True,
) -> MegaMoERoutedExperts.Config:
    """Options as in ``[model.moe.dispatch]``."""
    return derive(
        cfg,
        MegaMoERoutedExperts.Config,
        precision=precision,
        wgrad=wgrad,
        saved=saved,
        backend=backend,
        allow_emulation=allow_emulation,
        capacity=capacity,
        weight_cache=weight_cache,
    )


@override(target=SelectiveAC.Config, exact=True, description="selective checkpointing that saves mega_moe's outputs")
def selective_ac(cfg: SelectiveAC.Config) -> MegaMoESelectiveAC.Config:
    return derive(cfg, MegaMoESelectiveAC.Config)


@override(target=FullAC.Config, exact=True, description="full checkpointing that saves the routing")
def full_ac(cfg: FullAC.Config) -> MegaMoEFullAC.Config:
    return derive(cfg, MegaMoEFullAC.Config)


@override(target=TokenChoiceTopKRouter.Config, exact=True, description="uniformly random experts, for benchmarks")
def uniform_router(cfg: TokenChoiceTopKRouter.Config) -> UniformRouter.Config:
    return derive(cfg, UniformRouter.Config)
