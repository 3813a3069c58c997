"""Generate docs/configuration.md from the code: ``python -m titan_megamoe.config.document > docs/configuration.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from ..integration import compat

compat.install()  # before anything imports TorchTitan

from . import legacy  # noqa: E402
from .loader import CHECKPOINTING_MODES  # noqa: E402
from .overlay import describe, field_types  # noqa: E402
from ..integration.strategies import STRATEGIES  # noqa: E402
from ..integration.trainer import default_config  # noqa: E402

INTRODUCTION = """\
# Configuration reference

Generated from the code by `python -m titan_megamoe.config.document`; a test keeps it in step.

A TOML file may use every key below, and TorchTitan 0.2's spellings of them ([table](#torchtitan-02-keys)). The command line
overrides the file: `--section.key value`, or `--section.key` / `--section.no-key` for true and false. Sections marked *ours*
are this package's; the others, with their texts, are TorchTitan 0.3.0's. Two defaults differ from TorchTitan's:
`training.disable_cuda_graphs` is true, and `parallelism.spmd_backend` is the one that works with the installed torch
(`spmd_types` from torch 2.14 on, `partial_dtensor` before).
"""

# The default depends on the installed torch; the document must not.
DEFAULT_TEXTS = {"parallelism.spmd_backend": "by torch version"}


def render() -> str:
    config = default_config()
    config.activation_checkpoint = None  # documented by mode, below
    parts = [INTRODUCTION]
    ours, theirs = [], []
    for path, node in _sections(config, ""):
        (ours if path.split(".")[0] in ("model", "quantize") else theirs).append(_render_section(path, node))
    parts += [section for section in ours + theirs if section]
    parts.append(_render_checkpointing())
    parts.append(_render_legacy())
    return "\n".join(parts)


def strategies_table() -> str:
    """The README's table of strategies."""
    rows = ["| `type` | what runs | needs |", "| --- | --- | --- |"]
    rows += [f"| `{s.name}` | {s.summary} | {s.needs} |" for s in STRATEGIES.values()]
    return "\n".join(rows)


def _sections(node: Any, path: str):
    yield path, node
    for name in field_types(node):
        value = getattr(node, name)
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{path}.{name}" if path else name)


def _render_section(path: str, node: Any) -> str:
    texts = _field_texts(type(node))
    rows = []
    for name, annotation in field_types(node).items():
        value = getattr(node, name)
        key = f"{path}.{name}" if path else name
        if dataclasses.is_dataclass(value) or key == "activation_checkpoint":
            continue
        default = DEFAULT_TEXTS.get(key) or ("unset" if value is None else f"`{_plain(value)}`")
        rows.append(f"| `{name}` | {_cell(describe(annotation))} | {_cell(default)} | {_cell(texts.get(name, ''))} |")
    if not rows:
        return ""
    mark = " (ours)" if path.split(".")[0] in ("model", "quantize") else ""
    title = f"## `[{path}]`{mark}" if path else "## Top level"
    return "\n".join([title, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _render_checkpointing() -> str:
    lines = [
        "## `[activation_checkpoint]`",
        "",
        f"`mode` is one of {', '.join(f'`{mode}`' for mode in CHECKPOINTING_MODES)} (default `selective`). Each takes:",
        "",
    ]
    for mode, policy in CHECKPOINTING_MODES.items():
        if policy:
            section = _render_section(f"activation_checkpoint, mode = {mode}", policy.Config())
            lines.append("#" + section)
    return "\n".join(lines)


def _render_legacy() -> str:
    renamed = {**legacy.RENAMED_KEYS, **{f"{k}.*": f"{v}.*" for k, v in legacy.RENAMED_SECTIONS.items()}}
    renamed |= {f"optimizer.{key}": "optimizer.param_groups[0]" for key in legacy.OPTIMIZER_KEYS}
    renamed["parallelism.expert_parallel_comm_backend"] = "model.moe.dispatch.type"
    lines = ["## TorchTitan 0.2 keys", "", "| 0.2 | here |", "| --- | --- |"]
    lines += [f"| `{old}` | `{new}` |" for old, new in renamed.items()]
    lines += ["", "Keys without an equivalent are accepted where they made no difference and refused otherwise:", ""]
    lines += ["| 0.2 | otherwise |", "| --- | --- |"]
    lines += [f"| `{key}` | {removed.reason or 'always accepted'} |" for key, removed in legacy.REMOVED_KEYS.items()]
    return "\n".join(lines) + "\n"


def _field_texts(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass and its bases, which Python itself does not keep."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in zip(body, body[1:]):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text and isinstance(text.value.value, str):
                texts[field.target.id] = inspect.cleandoc(text.value.value)
    return texts


def _plain(value: Any) -> str:
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        return "AdamW, lr 8e-4, betas 0.9 0.95, eps 1e-8, weight_decay 0.1"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
