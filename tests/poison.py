"""Poison: memory that nothing has written yet holds NaN, so that whoever reads it shows.

Every new tensor that is not initialised, and before each call the memory that ranks share, is filled with bytes of 0xFF: NaN in
every floating-point type, -1 as an integer. ``pytest --poison`` runs all tests so, with the ranks that they start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields

import torch

VARIABLE = "TITAN_MEGAMOE_TEST_POISON"
"""Set in the environment of processes that are to poison theirs, too."""

_EXCEPT = "flags"
"""Peers write it at any time, and only ever count up."""


def install() -> Callable[[], None]:
    """Poison this process's memory from now on. Returns what undoes it."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # PyTorch fills new memory under this switch alone: floats with NaN, integers (bytes, too) with their largest value.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    restore_calls = _poison_published_memory()

    def undo() -> None:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        restore_calls()

    return undo


def install_if_wanted() -> None:
    """In a process that a test has started."""
    if os.environ.get(VARIABLE):
        install()


def fill(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)


def _poison_published_memory() -> Callable[[], None]:
    try:
        from titan_megamoe.kernels import combine
    except ImportError:  # no Triton, so no kernels
        return lambda: None
    publish, publish_rows = combine.publish, combine.publish_rows

    def poisoned_publish(workspace, *args, **kwargs):
        for declared in fields(workspace.published):
            if declared.name != _EXCEPT:
                fill(getattr(workspace.published, declared.name))
        return publish(workspace, *args, **kwargs)

    def poisoned_publish_rows(workspace, **kwargs):
        # Not what the forward published: without its second half, a late peer may still be reading it.
        for name in ("dout_TD", "dout_scales_Tb", "slots_PTD", "score_slots_PTK"):
            fill(getattr(workspace.published, name))
        return publish_rows(workspace, **kwargs)

    combine.publish, combine.publish_rows = poisoned_publish, poisoned_publish_rows

    def restore() -> None:
        combine.publish, combine.publish_rows = publish, publish_rows

    return restore
