"""Activation checkpointing that never routes twice.

A recomputed top-k may break a near-tie differently, and backward would then pair gradients with other rows than the
forward computed. So full checkpointing saves the router's top-k (12 bytes a route), and selective checkpointing, which
does that already, saves ``mega_moe``'s outputs, its routing plan among them.

Full checkpointing also stops recomputing a block as soon as all that backward needs is there. TorchTitan's does not, which
matters little to its own blocks; ``mega_moe`` then need not compute its output again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from ..ops import FORWARD_OPS
from .routed_experts import MegaMoERoutedExperts


class MegaMoESelectiveAC(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(FORWARD_OPS)


class MegaMoEFullAC(FullAC):
    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        for child in module.modules():
            if isinstance(child, MegaMoERoutedExperts):
                child.is_recomputed = True
        return checkpoint_wrapper(
            module,
            context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default]),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=True,
            debug=self.config.debug,
        )
