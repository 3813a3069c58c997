"""TorchTitan's checkpoint manager, which also checks that a checkpoint is of this model and that all of it is there."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from ..config.errors import ConfigError
from ..ops import check_step


class CheckedCheckpointManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._should_save(curr_step, last_step):
            check_step()  # not all that a step got wrong was raised in it
        return super()._save(curr_step, last_step)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if not from_hf:
            check_same_model(state_dict, checkpoint_id)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step whose checkpoint is all there, -1 if there is none.

        TorchTitan takes a checkpoint that has its metadata for complete. One that was being deleted, or copied, when the job
        was killed may have them and lack data.
        """
        folder = folder or self.folder
        if filesystem.is_remote(folder):
            return super()._find_load_step(folder)
        found = {
            int(match[1]): path for path in Path(folder).iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))
        }
        for step in sorted(found, reverse=True):
            missing = find_missing_part(found[step])
            if missing is None:
                return step
            logger.warning(
                f"titan_megamoe: the checkpoint {found[step]} is incomplete ({missing}): the run ended while it was being "
                "written or deleted. Looking for an older one."
            )
        return -1


def find_missing_part(checkpoint: Path) -> str | None:
    """What a checkpoint on a local file system lacks, in words; None if nothing. Reads its metadata and the sizes of its files."""
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():  # an export to Hugging Face's format
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError):
            return f"{index.name} is cut off"
        missing = sorted(name for name in names if not (checkpoint / name).is_file())
        return f"{missing[0]} is not there" if missing else None
    if not (checkpoint / ".metadata").is_file():  # written last, and under this name only when all of it is on disk
        return "its metadata were never written"
    try:
        stored = FileSystemReader(str(checkpoint)).read_metadata().storage_data
    except (EOFError, pickle.UnpicklingError):
        return ".metadata is cut off"
    needed: dict[str, int] = {}
    for part in stored.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, num_bytes in sorted(needed.items()):
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is not there"
        if file.stat().st_size < num_bytes:
            return f"{name} has {file.stat().st_size} of {num_bytes} bytes"
    return None


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
