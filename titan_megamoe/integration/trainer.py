"""TorchTitan's trainer with our sections in its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from ..config.errors import ConfigError
from ..config.sections import ModelSection, QuantizeSection
from ..ops import check_step
from ..symmetric import set_deadline, stop_workspaces
from . import compat, datasets, strategies
from .checkpoints import CheckedCheckpointManager
from .model import build_model_spec, num_experts


class MegaMoETrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        model: ModelSection = field(default_factory=ModelSection)

        quantize: QuantizeSection = field(default_factory=QuantizeSection)

    def __init__(self, config: Config):
        _activate_sections(config)
        set_deadline(config.comm.init_timeout_seconds)
        super().__init__(config)
        vocab_size, needed = self.model_config.vocab_size, self.tokenizer.get_vocab_size()
        if needed > vocab_size:
            raise ConfigError(
                f"hf_assets_path = '{config.hf_assets_path}' holds a tokenizer of {needed} tokens, but {config.model.name} "
                f"{config.model.flavor} embeds {vocab_size}. Use the model's own tokenizer, or a smaller one."
            )

    def train(self) -> None:
        try:
            super().train()
            check_step()
        except ConfigError:
            raise
        except Exception as error:
            stop_workspaces()
            checkpoint = self.config.checkpoint
            remedy = (
                f"Started again with the same command, it resumes from the last checkpoint in {self.checkpointer.folder}."
                if checkpoint.enable and not checkpoint.load_only
                else "No checkpoints were saved (checkpoint.enable): a new start begins anew."
            )
            logger.error(
                f"titan_megamoe: rank {dist.get_rank()} of {dist.get_world_size()} stopped in step {self.step}: "
                f"{type(error).__name__}: {error} {remedy}"
            )
            raise

    def train_step(self, data_iterator) -> None:
        super().train_step(data_iterator)
        # Waiting for the device leaves it idle until the next step's kernels come, so it is done where TorchTitan waits anyway, to
        # log. Between, the next step raises what was wrong in this one, and no checkpoint is saved unchecked. Rows that had no
        # place in memory of static size are an error at once.
        if self.metrics_processor.should_log(self.step) or self.config.model.moe.dispatch.capacity is not None:
            check_step()
        # As TorchTitan does with its process groups: what takes long, such as compilation, is behind us.
        set_deadline(self.config.comm.train_timeout_seconds)


def default_config() -> MegaMoETrainer.Config:
    """What a TOML file starts from: the choices that TorchTitan's own Qwen3 configurations share.

    Two defaults differ from 0.3.0's. CUDA graphs are off, because most expert-parallel dispatchers refuse them; the SPMD
    backend is the one that works with the installed torch.
    """
    return MegaMoETrainer.Config(
        dataloader=HuggingFaceTextDataLoader.Config(),
        optimizer=default_adamw(lr=8e-4),
        checkpoint=CheckedCheckpointManager.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        training=TrainingConfig(disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend=compat.default_spmd_backend()),
    )


def resolve(config: MegaMoETrainer.Config) -> None:
    """Build the model spec that the sections describe, in place. What this machine can run is :func:`check_machine`'s.

    Raises:
        ValueError: a combination that could not train anywhere, with what to change.
    """
    config.model_spec = build_model_spec(config)
    ep, experts = config.parallelism.expert_parallel_degree, num_experts(config.model_spec)
    if ep < 1:
        raise ValueError(f"parallelism.expert_parallel_degree = {ep} must be at least 1.")
    if experts is None:
        if ep > 1 or config.model.moe.dispatch.type != "all_to_all":
            raise ValueError(
                f"{config.model.name} {config.model.flavor} has no experts: leave parallelism.expert_parallel_degree at 1 and "
                "model.moe.dispatch.type at 'all_to_all', or choose a mixture-of-experts flavor."
            )
    elif experts % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {ep} does not divide the {experts} experts of {config.model.name} "
            f"{config.model.flavor}. Use a divisor of {experts}."
        )
    config.__post_init__()  # 0.3.0's own cross-checks, now that the model is known


def check_machine(config: MegaMoETrainer.Config, *, world_size: int) -> None:
    """Refuse, before anything is built, what this machine, its software or its disk cannot run.

    Raises:
        ValueError: what is missing and what to do.
    """
    compat.check_spmd_backend(config.parallelism.spmd_backend)
    ep = config.parallelism.expert_parallel_degree
    if world_size % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {ep} does not divide the {world_size} ranks of this run. "
            f"Start a multiple of {ep} ranks (NGPU={ep} ./run_train.sh), or lower the degree."
        )
    strategies.check(config)
    missing = datasets.find_missing_data(config)
    if missing:
        raise ValueError(missing)


def _activate_sections(config: MegaMoETrainer.Config) -> None:
    """Set the TorchTitan fields that follow from our sections.

    Not part of ``resolve``: a configuration that is printed, edited and read back must not carry the old sections' effects.
    """
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)
    config.debug.moe_force_load_balance |= config.model.moe.force_load_balance != "none"
    config.override.imports = [*config.override.imports, *strategies.override_imports(config)]
