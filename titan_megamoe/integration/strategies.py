"""The table of strategies: what each ``model.moe.dispatch.type`` does to TorchTitan's configuration, and what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from ..backends import backend_for, KERNEL_BACKENDS, missing_for_precision, missing_on_this_machine
from ..config.sections import DispatchSection
from ..ops import check_precision

_OVERRIDES = f"{__package__}.overrides"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    name: str
    summary: str
    """One line for the README's table."""

    needs: str
    """What it needs, in words, for the README's table."""

    moe_comm_backend: str
    """TorchTitan's name of the token dispatcher that the model is built with."""

    ep_only: bool = False
    """Refuses an expert-parallel degree of 1."""

    find_missing: Callable[[object], str | None]
    """Given the resolved ``Trainer.Config``: what is missing here and what to do, or None."""


def _nothing_missing(config) -> str | None:
    return None


def _missing_deep_ep(attribute: str, version: str) -> Callable[[object], str | None]:
    def find_missing(config) -> str | None:
        if not torch.cuda.is_available():
            return "it runs on NVIDIA GPUs only, and torch sees none. Use type = 'all_to_all' or 'mega_moe' here."
        try:
            found = hasattr(importlib.import_module("deep_ep"), attribute)
        except ImportError:
            found = False
        if not found:
            return (
                f"it needs {version} (deep_ep.{attribute}), which is not installed. Build it from "
                "https://github.com/deepseek-ai/DeepEP for this torch and CUDA, or choose another type."
            )
        return None

    return find_missing


def _missing_for_minimal_async_ep(config) -> str | None:
    if not torch.cuda.is_available():
        return "it runs on NVIDIA GPUs only, and torch sees none. Use type = 'all_to_all' or 'mega_moe' here."
    if not isinstance(config.activation_checkpoint, FullAC.Config):
        return "TorchTitan requires full activation checkpointing with it. Set [activation_checkpoint] mode = 'full'."
    if config.parallelism.spmd_backend == "full_dtensor":
        return "TorchTitan refuses it under parallelism.spmd_backend = 'full_dtensor'. Use 'partial_dtensor' or 'spmd_types'."
    return _unreachable_peer(config)


def _unreachable_peer(config) -> str | None:
    """GPUs of this node that cannot read each other's memory, which symmetric memory requires."""
    here = torch.cuda.current_device()
    for peer in range(min(torch.cuda.device_count(), config.parallelism.expert_parallel_degree)):
        if peer != here and not torch.cuda.can_device_access_peer(here, peer):
            return (
                f"GPU {here} cannot access GPU {peer}'s memory (no NVLink or PCIe peer access). "
                "Use type = 'all_to_all' on this machine."
            )
    return None


def _missing_for_mega_moe(config) -> str | None:
    if not config.training.disable_cuda_graphs:
        return "it counts rows on the host, which a CUDA graph cannot capture. Set training.disable_cuda_graphs = true."
    if any(name.startswith("quantize.grouped_mm") for name in config.model.converters):
        return (
            "it has its own precisions and cannot run converted experts. Remove the quantize.grouped_mm converter from "
            "model.converters and set model.moe.dispatch.precision."
        )
    dispatch: DispatchSection = config.model.moe.dispatch
    backends = KERNEL_BACKENDS if dispatch.backend == "auto" else (dispatch.backend,)
    emulates = dispatch.backend == "reference" or (dispatch.backend == "auto" and dispatch.allow_emulation)
    if dispatch.precision != "bf16" and not emulates:
        backend = backend_for(dispatch.precision) if dispatch.backend == "auto" else dispatch.backend
        missing = missing_for_precision(backend, dispatch.precision, allow_emulation=dispatch.allow_emulation)
        if missing:
            return (
                f"for precision = '{dispatch.precision}', {missing} To have it emulated anywhere, slowly, set backend = 'auto' and "
                "allow_emulation = true."
            )
    uses_symmetric_memory = any(name in KERNEL_BACKENDS and missing_on_this_machine(name) is None for name in backends)
    if uses_symmetric_memory and config.parallelism.expert_parallel_degree > 1:
        return _unreachable_peer(config)
    return None


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="all_to_all",
            summary="TorchTitan's default: c10d all-to-all, `torch._grouped_mm`, all-to-all",
            needs="nothing; EP = 1 works (no communication)",
            moe_comm_backend="standard",
            find_missing=_nothing_missing,
        ),
        Strategy(
            name="deepep",
            summary="TorchTitan's DeepEP v2 dispatcher",
            needs="NVIDIA GPUs, DeepEP v2 (`deep_ep.ElasticBuffer`), EP > 1",
            moe_comm_backend="deepep",
            ep_only=True,
            find_missing=_missing_deep_ep("ElasticBuffer", "DeepEP 2.0 or newer"),
        ),
        Strategy(
            name="hybridep",
            summary="TorchTitan's HybridEP dispatcher (GB200 / NVL72)",
            needs="NVIDIA GPUs, DeepEP's hybrid branch (`deep_ep.HybridEPBuffer`), EP > 1",
            moe_comm_backend="hybridep",
            ep_only=True,
            find_missing=_missing_deep_ep("HybridEPBuffer", "DeepEP's hybrid-ep branch"),
        ),
        Strategy(
            name="minimal_async_ep",
            summary="TorchTitan's MinimalAsyncEP dispatcher (symmetric memory)",
            needs="NVIDIA GPUs with peer access, full activation checkpointing, EP > 1",
            moe_comm_backend="minimal_async_ep",
            ep_only=True,
            find_missing=_missing_for_minimal_async_ep,
        ),
        Strategy(
            name="mega_moe",
            summary="ours: dispatch, expert GEMMs and combine as one operator",
            needs="nothing; EP = 1 works. Fused on GPUs with peer access (see docs/kernels.md), plain PyTorch elsewhere",
            moe_comm_backend="standard",
            find_missing=_missing_for_mega_moe,
        ),
    )
}


def check(config) -> None:
    """Refuse, before anything is built, a strategy that could not run. Never falls back to another one.

    Raises:
        ValueError: names the strategy, what is missing and what to do.
    """
    dispatch: DispatchSection = config.model.moe.dispatch
    strategy, ep = STRATEGIES[dispatch.type], config.parallelism.expert_parallel_degree
    if dispatch.type == "mega_moe":
        check_precision(dispatch.precision, dispatch.wgrad)
    elif dispatch.precision != "bf16":
        raise ValueError(
            f"model.moe.dispatch.precision = '{dispatch.precision}' belongs to type 'mega_moe', but the type is "
            f"'{dispatch.type}'. Set precision = 'bf16', or use [model] converters for TorchTitan's own quantisation."
        )
    if strategy.ep_only and ep == 1:
        raise ValueError(
            f"model.moe.dispatch.type = '{dispatch.type}' needs expert parallelism, but "
            "parallelism.expert_parallel_degree = 1. Raise it, or use 'all_to_all' or 'mega_moe'."
        )
    missing = strategy.find_missing(config)
    if missing:
        raise ValueError(f"model.moe.dispatch.type = '{dispatch.type}' cannot run here: {missing}")


def override_imports(config) -> list[tuple[str, dict]]:
    """The ``override.imports`` entries that put a configuration's strategy and forced routing into effect."""
    entries: list[tuple[str, dict]] = []
    named_by_user = {entry if isinstance(entry, str) else entry[0] for entry in config.override.imports}
    dispatch: DispatchSection = config.model.moe.dispatch
    if dispatch.type == "mega_moe":
        names = ("precision", "wgrad", "saved", "backend", "allow_emulation", "capacity", "weight_cache")
        options = {name: getattr(dispatch, name) for name in names}
        entries.append((f"{_OVERRIDES}.mega_moe", options))
        if type(config.activation_checkpoint) is SelectiveAC.Config:
            entries.append((f"{_OVERRIDES}.selective_ac", {}))
        elif type(config.activation_checkpoint) is FullAC.Config:
            entries.append((f"{_OVERRIDES}.full_ac", {}))
    if config.model.moe.force_load_balance == "uniform":
        entries.append((f"{_OVERRIDES}.uniform_router", {}))
    return [entry for entry in entries if entry[0] not in named_by_user]
