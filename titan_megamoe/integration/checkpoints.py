"""TorchTitan's checkpoint manager with a check that the checkpoint is of this model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer import CheckpointManager

from ..config.errors import ConfigError


class CheckedCheckpointManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if not from_hf:
            check_same_model(state_dict, checkpoint_id)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


def check_same_model(state_dict: dict[str, Any], checkpoint_id: str) -> None:
    """Compare a model's tensors with a checkpoint's, by name and global shape.

    Raises:
        ConfigError: names the first difference, the checkpoint and the remedy.
    """
    stored = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    missing = [name for name in tensors if name not in stored]
    reshaped = [
        f"{name} is {list(stored[name].size)} there and {list(value.shape)} here"
        for name, value in tensors.items()
        if isinstance(stored.get(name), TensorStorageMetadata) and stored[name].size != value.shape
    ]
    if missing or reshaped:
        difference = reshaped[0] if reshaped else f"it has no {missing[0]}"
        raise ConfigError(
            f"The checkpoint {checkpoint_id} is of another model: {difference} ({len(missing)} tensors missing, "
            f"{len(reshaped)} of another shape, of {len(tensors)}). Resume with the [model] section it was trained with, or "
            "set another dump_folder or checkpoint.folder to start afresh."
        )
