"""One run of ``titan-megamoe compare``: trains as ``titan_megamoe.train`` does, and keeps what it measured in full precision.

    torchrun ... -m titan_megamoe.bench.measured_train RESULT.json --config x.toml [--section.key value ...]

writes, when training ends, ``{"steps": {step: TorchTitan's metrics}, "breakdown": ..., "tokens_per_step": ...}``. The last step
runs under a profiler, for the breakdown, and is not among the steps. ``metrics.log_freq`` must be 1: times are from one logged
step to the next.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..integration import compat

compat.install()  # before anything imports TorchTitan

import torch  # noqa: E402
from torch.profiler import profile, ProfilerActivity, record_function  # noqa: E402

from .. import train  # noqa: E402
from ..integration.trainer import MegaMoETrainer  # noqa: E402
from .breakdown import OPTIMIZER_RANGE, summarize  # noqa: E402
from .environment import describe_environment  # noqa: E402


def record(trainer: MegaMoETrainer, path: Path) -> None:
    """Have ``trainer`` write what it measures to ``path`` on rank 0."""
    last = trainer.config.training.steps
    result = {"steps": {}, "environment": describe_environment(), "world_size": int(os.environ.get("WORLD_SIZE", 1))}
    log, train_step, optimizer_step = trainer.metrics_processor.log, trainer.train_step, trainer.optimizers.step

    def recording_log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs) -> None:
        # The processor computes times, memory and utilisation on its way to its own loggers: listen in there.
        logger = trainer.metrics_processor.logger
        write = logger.log

        def keep(metrics, step) -> None:
            result["steps"][step] = {name: float(value) for name, value in metrics.items()}
            write(metrics, step)

        logger.log = keep
        try:
            log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs)
        finally:
            del logger.log

    def named_step(*args, **kwargs):
        with record_function(OPTIMIZER_RANGE):
            return optimizer_step(*args, **kwargs)

    def profiled_step(data_iterator) -> None:
        if trainer.step < last:
            train_step(data_iterator)
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with profile(activities=activities, acc_events=True) as profiler:
            train_step(data_iterator)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        result["breakdown"] = summarize(profiler.events())
        result["steps"].pop(last, None)
        result["tokens_per_step"] = trainer.config.training.seq_len * trainer.config.training.local_batch_size
        if int(os.environ.get("RANK", 0)) == 0:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result, indent=1) + "\n")
            partial.rename(path)  # a run that was interrupted leaves no result

    trainer.metrics_processor.log, trainer.optimizers.step, trainer.train_step = (
        recording_log,
        named_step,
        profiled_step,
    )


def main() -> None:
    path = Path(sys.argv.pop(1))
    train_unrecorded = MegaMoETrainer.train

    def train_recorded(self: MegaMoETrainer) -> None:
        record(self, path)
        train_unrecorded(self)

    MegaMoETrainer.train = train_recorded
    train.main()


if __name__ == "__main__":
    main()
