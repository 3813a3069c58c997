"""The configuration that a command is about, whatever machine it is for."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path


def check_is_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file.")


@contextlib.contextmanager
def without_warnings():
    """TorchTitan and what it imports warn of their own defaults, for every configuration that is made. What matters to a run is in
    its log; here it would bury the command's answer."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def load_configuration(path: Path, overrides: list[str]):
    """The resolved ``MegaMoETrainer.Config`` of a TOML file.

    Raises:
        ValueError: there is no such file, or something in it or in ``overrides`` is wrong.
    """
    check_is_file(path)
    with without_warnings():
        from ..integration import compat

        compat.install()  # before anything imports TorchTitan
        from ..config import loader
        from ..config.errors import ConfigError

        try:
            return loader.load_for_anywhere(["--config", str(path), *overrides])
        except ConfigError as error:
            raise ValueError(str(error)) from error
