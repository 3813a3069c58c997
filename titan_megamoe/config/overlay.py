"""Lay a table of values over a tree of dataclasses, with errors that name the key, the type and the nearest valid name."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, get_args, get_origin, Literal

from .errors import ConfigError

HIDDEN = frozenset({"model_spec"})
"""Fields that are set by code, never by a user."""


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
        else:
            flat[prefix + key] = value
    return flat


def field_types(config: Any) -> dict[str, Any]:
    """The resolved annotations of a dataclass instance's or class's settable fields."""
    cls = config if isinstance(config, type) else type(config)
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init and f.name not in HIDDEN}


def leaf_paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every settable key of a configuration, dotted, with its current value."""
    leaves = {}
    for name in field_types(config):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            leaves |= leaf_paths(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def overlay(config: Any, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Set dotted ``values`` on ``config`` in place.

    Args:
        config: a dataclass instance, nested.
        values: dotted key -> value as TOML has it.
        sources: dotted key -> how to call the place it was read from (for errors).

    Raises:
        ConfigError: an unknown key, or a value of another type than the field's.
    """
    known = leaf_paths(config)
    for path, value in values.items():
        *parents, name = path.split(".")
        node = config
        for depth, parent in enumerate(parents):
            if not dataclasses.is_dataclass(node) or parent not in field_types(node):
                raise _unknown(path, known, sources[path])
            node = getattr(node, parent)
            if isinstance(node, dict):  # a free-form table: the rest of the key is the user's own
                name = ".".join(parents[depth + 1 :] + [name])
                break
        if isinstance(node, dict):
            node[name] = value
            continue
        if not dataclasses.is_dataclass(node) or name not in field_types(node):
            raise _unknown(path, known, sources[path])
        if dataclasses.is_dataclass(getattr(node, name)):
            if value == {}:
                continue  # an empty section header
            raise ConfigError(f"{sources[path]}: '{path}' is a section, not a value (got {value!r}).")
        setattr(node, name, coerce(value, field_types(node)[name], f"{sources[path]}: '{path}'"))


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """``value`` as the annotated type. The only conversions: int to float, list to tuple, table to dataclass."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return coerce(value, args[0], where)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, annotation, where)
    if origin is Literal:
        if value in args:
            return value
        hint = _did_you_mean(str(value), [str(a) for a in args])
        raise ConfigError(f"{where}: expected {describe(annotation)}, got {value!r}{hint}.")
    if origin is list and isinstance(value, list):
        item = args[0] if args else Any
        return [coerce(v, item, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(coerce(v, a, where) for v, a in zip(value, args))
    if origin is dict and isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        return _coerce_dataclass(value, annotation, where)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(annotation, type) and isinstance(value, annotation):
        if not (isinstance(value, bool) and annotation is not bool):
            return value
    raise ConfigError(f"{where}: expected {describe(annotation)}, got {describe(type(value))} {value!r}.")


def describe(annotation: Any) -> str:
    """A type as a TOML user would call it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return describe(args[0])
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("unset" if a is type(None) else describe(a) for a in args)
    if origin is list:
        return f"a list of {describe(args[0])}" if args else "a list"
    if origin is tuple:
        return "[" + ", ".join(describe(a) for a in args) + "]"
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "a table"
    names = {
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        dict: "a table",
        list: "a list",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _coerce_union(value: Any, options: tuple[Any, ...], annotation: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        try:
            return coerce(value, option, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}: expected {describe(annotation)}, got {describe(type(value))} {value!r}.")


def _coerce_dataclass(table: dict[str, Any], cls: type, where: str) -> Any:
    types_of = field_types(cls)
    unknown = [key for key in table if key not in types_of]
    if unknown:
        hint = _did_you_mean(unknown[0], list(types_of))
        raise ConfigError(f"{where}: unknown key '{unknown[0]}'{hint} (it takes {', '.join(types_of)}).")
    try:
        return cls(**{key: coerce(v, types_of[key], f"{where}.{key}") for key, v in table.items()})
    except TypeError as error:
        raise ConfigError(f"{where}: {error}.") from None


def _unknown(path: str, known: dict[str, Any], source: str) -> ConfigError:
    in_other_sections = [key for key in known if key.rpartition(".")[2] == path.rpartition(".")[2]]
    if in_other_sections:
        hint = _did_you_mean(path, in_other_sections) or f"; did you mean '{in_other_sections[0]}'?"
    else:
        hint = _did_you_mean(path, list(known)) or "; docs/configuration.md lists them all."
    return ConfigError(f"{source}: unknown key '{path}'{hint}")


def _did_you_mean(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, 1, 0.75)
    return f"; did you mean '{near[0]}'?" if near else ""
