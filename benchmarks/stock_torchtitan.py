"""TorchTitan's own trainer on the model of a TOML file, without our front end's trainer, checkpoint manager or overrides.

    torchrun ... benchmarks/stock_torchtitan.py train_configs/x.toml [--section.key value ...]

The TOML file only supplies values; they are copied field by field into a plain ``Trainer.Config`` with TorchTitan's own
classes. Routing is TorchTitan's ("even" if the file forces any balance, for TorchTitan knows no other).
"""

from __future__ import annotations

import dataclasses
import sys

from titan_megamoe.integration import compat

compat.install()

import torchtitan.train  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from titan_megamoe.config import loader  # noqa: E402
from titan_megamoe.integration import datasets  # noqa: E402


def stock_config() -> Trainer.Config:
    ours = loader.load(["--config", *sys.argv[1:], "--model.moe.dispatch.type", "all_to_all"])
    values = {field.name: getattr(ours, field.name) for field in dataclasses.fields(Trainer.Config)}
    checkpoint = {
        field.name: getattr(ours.checkpoint, field.name) for field in dataclasses.fields(CheckpointManager.Config)
    }
    values["checkpoint"] = CheckpointManager.Config(**checkpoint)
    config = Trainer.Config(**values)
    config.debug.moe_force_load_balance = ours.model.moe.force_load_balance != "none"
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)
    return config


class _Manager:
    def parse_args(self) -> Trainer.Config:
        return stock_config()


if __name__ == "__main__":
    datasets.register()
    torchtitan.train.ConfigManager = _Manager
    torchtitan.train.main()
