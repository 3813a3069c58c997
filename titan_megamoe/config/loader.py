"""From a TOML file and a command line to a resolved ``Trainer.Config``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Any

import tomli
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from ..integration.trainer import check_machine, default_config, MegaMoETrainer, resolve
from . import legacy
from .errors import ConfigError
from .overlay import field_types, flatten, overlay
from .printing import to_toml

logger = logging.getLogger(__name__)

CHECKPOINTING_MODES = {"selective": SelectiveAC, "full": FullAC, "memory_budget": MemoryBudgetAC, "none": None}

USAGE = """\
Train a mixture-of-experts model with TorchTitan and the expert-parallel strategy of your choice.

  torchrun --nproc_per_node=N -m titan_megamoe.train --config FILE.toml [--print_config] [--section.key value ...]

FILE.toml takes TorchTitan 0.2's keys, 0.3.0's fields and the sections [model] and [quantize] (docs/configuration.md).
Options below override it; 0.2's spellings work here too (--optimizer.lr 1e-4, --activation_checkpoint.mode full).
--print_config prints the resolved configuration as TOML and exits."""


def load(argv: list[str] | None = None) -> MegaMoETrainer.Config:
    """Parse ``argv`` (default: the process's), resolve it and check it against this machine.

    Under ``--print_config`` prints the configuration, runnable here or not, and exits; exits as tyro does on ``--help`` and on unknown options.

    Raises:
        ConfigError: anything wrong with the file, an option, or their combination.
    """
    config, file, print_only = _load(sys.argv[1:] if argv is None else argv)
    if print_only:
        print(to_toml(config))
        sys.exit(0)
    with _named(file):
        check_machine(config, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    return config


def load_for_anywhere(argv: list[str]) -> MegaMoETrainer.Config:
    """As :func:`load`, for whatever machine: what this one can run is not asked."""
    return _load(argv)[0]


def _load(argv: list[str]) -> tuple[MegaMoETrainer.Config, str | None, bool]:
    """The resolved configuration, its file, and whether it was asked to be printed."""
    file, print_only, options, rest = _split_arguments(list(argv))
    config = _apply_tyro(_apply(file, options), rest)
    with _named(file):
        resolve(config)
    return config, file, print_only


@contextlib.contextmanager
def _named(file: str | None):
    """Turn errors into ``ConfigError`` that begin with the file's name."""
    try:
        yield
    except (ValueError, ImportError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _split_arguments(argv: list[str]) -> tuple[str | None, bool, dict[str, Any], list[str]]:
    """``(config file, --print_config given, options that only 0.2 knew, the rest for tyro)``."""
    file, print_only, options, rest = None, False, {}, []
    while argv:
        token = argv.pop(0)
        key, equals, inline = token.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if token.startswith("--") and key in ("config", "job.config_file"):
            if not equals and not argv:
                raise ConfigError(f"command line: {token} needs a file name.")
            file = inline if equals else argv.pop(0)
        elif token == "--print_config":
            print_only = True
        elif token.startswith("--") and legacy.is_legacy(key):
            words = [inline] if equals else []
            while not equals and argv and not argv[0].startswith(("--", "activation-checkpoint:")):
                words.append(argv.pop(0))
            options[key] = _parse_value(words)
        else:
            rest.append(token)
    if file is None and not {"--help", "-h"} & set(rest):
        raise ConfigError(
            "command line: --config FILE.toml is missing (for example train_configs/qwen3_moe_debug.toml)."
        )
    return file, print_only, options, rest


def _parse_value(words: list[str]) -> Any:
    """A command-line value with the type TOML would give it; a flag on its own is true."""
    if not words:
        return True
    values = []
    for word in words:
        try:
            values.append(tomli.loads(f"value = {word}")["value"])
        except tomli.TOMLDecodeError:
            values.append(word)
    return values[0] if len(values) == 1 else values


def _read(file: str) -> dict[str, Any]:
    path = Path(file)
    if path.suffix != ".toml":
        raise ConfigError(
            f"--config {file}: expected a .toml file (TorchTitan's Python configs run with torchtitan.train)."
        )
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}).") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}: is not valid TOML: {error}.") from None


def _apply(file: str | None, options: dict[str, Any]) -> MegaMoETrainer.Config:
    """The default configuration with the file's values and the 0.2-style options on top."""
    values, sources = {}, {}
    in_file = flatten(_read(file)) if file else {}
    for source, given in ((file, in_file), ("command line", options)):
        new_values, new_sources = legacy.translate(given, dict.fromkeys(given, source))
        values |= new_values
        sources |= new_sources
    _warn_about_recipe(values)

    config = default_config()
    config.activation_checkpoint = _activation_checkpoint(values, sources)
    _set_optimizer(config, values, sources)
    overlay(config, values, sources)
    for path, node in _sections(config):
        try:
            getattr(node, "__post_init__", lambda: None)()
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"{file}: [{path}]: {error}") from error
    return config


def _apply_tyro(config: MegaMoETrainer.Config, rest: list[str]) -> MegaMoETrainer.Config:
    ConfigManager.register_tyro_rules(custom_registry)
    try:
        return tyro.cli(
            type(config),
            args=rest,
            default=config,
            registry=custom_registry,
            prog="titan_megamoe.train",
            description=USAGE,
        )
    except (ValueError, AssertionError) as error:  # a field's own check, run while tyro built its section
        raise ConfigError(f"command line: {error}") from error


def _activation_checkpoint(values: dict[str, Any], sources: dict[str, str]):
    """Take the ``activation_checkpoint.*`` keys out of ``values`` and build what they describe."""
    prefix = "activation_checkpoint."
    options = {path: values.pop(path) for path in list(values) if path.startswith(prefix)}
    mode_path = prefix + "mode"
    mode = options.pop(mode_path, "selective")
    if not isinstance(mode, str) or mode not in CHECKPOINTING_MODES:  # a list cannot even be looked up
        raise ConfigError(
            f"{sources[mode_path]}: '{mode_path}': expected one of {', '.join(CHECKPOINTING_MODES)}, got {mode!r}."
        )
    policies = [policy for policy in CHECKPOINTING_MODES.values() if policy]
    belongs_to_any = {name for policy in policies for name in field_types(policy.Config)}
    policy = CHECKPOINTING_MODES[mode]
    config = policy.Config() if policy else None
    for path, value in options.items():
        name = path.removeprefix(prefix)
        if name in belongs_to_any and not (policy and name in field_types(policy.Config)):
            logger.info(f"{sources[path]}: '{path}' has no effect with mode = '{mode}'")
            continue
        overlay(config or SelectiveAC.Config(), {name: value}, {name: f"{sources[path]}: [activation_checkpoint]"})
    return config


def _set_optimizer(config: MegaMoETrainer.Config, values: dict[str, Any], sources: dict[str, str]) -> None:
    """0.2's optimizer keys set the one parameter group that the default configuration has."""
    given = {key: values.pop(f"optimizer.{key}") for key in legacy.OPTIMIZER_KEYS if f"optimizer.{key}" in values}
    if given and "optimizer.param_groups" in values:
        key = next(iter(given))
        raise ConfigError(
            f"{sources['optimizer.param_groups']}: 'optimizer.param_groups' and 'optimizer.{key}' are both set. "
            "Put the latter into the groups' optimizer_kwargs."
        )
    group = config.optimizer.param_groups[0]
    for key, value in given.items():
        where = f"{sources[f'optimizer.{key}']}: 'optimizer.{key}'"
        expected = str if key == "name" else (int, float)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ConfigError(f"{where}: expected a {'string' if key == 'name' else 'number'}, got {value!r}.")
        if key == "name":
            group.optimizer_name = value
        elif key in ("beta1", "beta2"):
            betas = list(group.optimizer_kwargs["betas"])
            betas[key == "beta2"] = float(value)
            group.optimizer_kwargs["betas"] = tuple(betas)
        else:
            group.optimizer_kwargs[key] = float(value)


def _warn_about_recipe(values: dict[str, Any]) -> None:
    converters = values.get("model.converters") or []
    if {"float8", "quantize.linear.float8"} & set(converters) and "quantize.linear.float8.recipe_name" not in values:
        logger.warning(
            "quantize.linear.float8.recipe_name is not set: TorchTitan 0.2 then used tensorwise scaling, which 0.3.0 "
            "dropped; this run uses 'rowwise'."
        )


def _sections(node: Any, path: str = ""):
    """Every dataclass in the tree with its dotted path, children first."""
    for name in field_types(node):
        value = getattr(node, name)
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{path}.{name}" if path else name)
    yield path, node
