"""A configuration as TOML that the loader reads back to the same configuration."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .overlay import field_types


def to_toml(config: Any) -> str:
    """Every settable key with its value; a key without a value (TOML has none) as a comment."""
    lines: list[str] = []
    _section(config, "", lines)
    return "\n".join(lines).strip() + "\n"


def _section(node: Any, path: str, lines: list[str]) -> None:
    leaves, sections = {}, {}
    for name in field_types(node):
        value = getattr(node, name)
        (sections if dataclasses.is_dataclass(value) else leaves)[name] = value
    if path:
        lines += ["", f"[{path}]"]
    if path == "activation_checkpoint":
        lines.append(f"mode = {_value(_checkpointing_mode(node))}")
    for name, value in leaves.items():
        if path == "" and name == "activation_checkpoint":  # None: no checkpointing
            sections[name] = None
        else:
            lines.append(f"# {name} is unset" if value is None else f"{name} = {_value(value)}")
    for name, value in sections.items():
        child = f"{path}.{name}" if path else name
        if value is None:
            lines += ["", f"[{child}]", 'mode = "none"']
        else:
            _section(value, child, lines)


def _checkpointing_mode(config: Any) -> str:
    from .loader import CHECKPOINTING_MODES

    return next(mode for mode, policy in CHECKPOINTING_MODES.items() if policy and isinstance(config, policy.Config))


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = {name: getattr(value, name) for name in field_types(value)}
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
