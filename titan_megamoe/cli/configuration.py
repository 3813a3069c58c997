"""The configuration that a command is about, whatever machine it is for."""

from __future__ import annotations

import logging
from pathlib import Path


def check_is_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file.")


def load_configuration(path: Path, overrides: list[str]):
    """The resolved ``MegaMoETrainer.Config`` of a TOML file.

    Raises:
        ValueError: there is no such file, or something in it or in ``overrides`` is wrong.
    """
    check_is_file(path)
    from ..integration import compat

    compat.install()  # before anything imports TorchTitan
    from ..config import loader
    from ..config.errors import ConfigError

    logging.disable(logging.WARNING)  # TorchTitan warns of its own defaults, each time that it makes a configuration
    try:
        return loader.load_for_anywhere(["--config", str(path), *overrides])
    except ConfigError as error:
        raise ValueError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)
