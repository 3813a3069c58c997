"""Train from a TOML file: ``torchrun --nproc_per_node=N -m titan_megamoe.train --config train_configs/x.toml``."""

from __future__ import annotations

import os
import sys
import traceback

from .integration import compat

compat.install()  # before anything imports TorchTitan

import torch  # noqa: E402
import torchtitan.train  # noqa: E402
from torchtitan.tools.logging import init_logger, logger  # noqa: E402

from .config import loader  # noqa: E402
from .config.errors import ConfigError  # noqa: E402
from .integration import datasets  # noqa: E402


class _TomlConfigManager:
    """Takes the place of TorchTitan's ``ConfigManager`` in its ``main``, which does everything else."""

    def __init__(self, config):
        self.config = config

    def parse_args(self):
        return self.config


def main() -> None:
    init_logger()
    logger.info("Shims for TorchTitan on torch %s: %s", torch.__version__, ", ".join(compat.install()) or "none needed")
    compat.check_versions()
    datasets.register()
    try:
        config = loader.load()
        dispatch = config.model.moe.dispatch
        where = "CUDA and NCCL" if torch.cuda.is_available() else "the CPU and gloo (no GPU is visible)"
        logger.info(f"titan_megamoe: strategy '{dispatch.type}', precision '{dispatch.precision}', on {where}")
        torchtitan.train.ConfigManager = lambda: _TomlConfigManager(config)
        torchtitan.train.main()
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank found the same
            print(f"titan_megamoe: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        if not torch.distributed.is_initialized():
            raise
        # A process group with a dead peer may wait for it when it is torn down: leave without that.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
