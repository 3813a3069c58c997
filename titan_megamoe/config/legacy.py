"""TorchTitan 0.2's configuration keys, as they are spelt in 0.3.0, and which of them are gone.

One table each: keys renamed, sections renamed, keys removed. A removed key is accepted at a value that makes no
difference in 0.3.0 and refused, with the reason, at any other: nothing a user wrote is silently dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

RENAMED_KEYS = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
}

RENAMED_SECTIONS = {
    "profiling": "profiler",
    "validation": "validator",
    "training.dataloader": "dataloader",
    "validation.dataloader": "validator.dataloader",
}

# 0.2 had one optimizer; 0.3.0 has parameter groups, of which 0.2's keys set the first.
OPTIMIZER_KEYS = ("name", "lr", "beta1", "beta2", "eps", "weight_decay")

MOE_COMM_BACKENDS = {"standard": "all_to_all", "deepep": "deepep", "hybridep": "hybridep"}
"""0.2's ``parallelism.expert_parallel_comm_backend`` -> our ``model.moe.dispatch.type``."""


@dataclass(frozen=True)
class Removed:
    """A key that 0.3.0 has no place for."""

    harmless: Callable[[Any, dict[str, Any]], bool]
    """Given the value and all keys of the file: does dropping it change nothing?"""

    reason: str
    """What to do instead, for values that are not harmless."""


def _any(value: Any, values: dict[str, Any]) -> bool:
    return True


def _only(*harmless: Any) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda value, values: value in harmless


def _same_as(key: str, default: Any) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda value, values: value == values.get(key, default)


def _unless(key: str) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda value, values: not values.get(key)


REMOVED_KEYS = (
    {
        "job.config_file": Removed(_any, ""),
        "job.description": Removed(_any, ""),
        "job.custom_config_module": Removed(_only("", None), "import your components through override.imports"),
        "model.tokenizer_path": Removed(_only(None, ""), "use hf_assets_path (the folder with the tokenizer's files)"),
        "model.print_after_conversion": Removed(_only(False), "0.3.0 does not print the model; drop the key"),
        "optimizer.early_step_in_backward": Removed(_only(False), "0.3.0 always steps after backward"),
        "parallelism.disable_loss_parallel": Removed(
            _only(False), "0.3.0 always uses loss parallel with tensor parallel"
        ),
        "parallelism.enable_compiled_autograd": Removed(_only(False), "0.3.0 has no compiled autograd"),
        "parallelism.expert_tensor_parallel_degree": Removed(
            _only(1), "0.3.0 does not split experts over tensor-parallel ranks under expert parallelism; use 1"
        ),
        "parallelism.context_parallel_rotate_method": Removed(_only("allgather"), "0.3.0 gathers; use 'allgather'"),
        "parallelism.pipeline_parallel_expert_parallel_overlap": Removed(_any, ""),
        "checkpoint.enable_ft_dataloader_checkpoints": Removed(_any, ""),
        "activation_checkpoint.early_stop": Removed(_only(False), "0.3.0 always recomputes to the end"),
        "activation_checkpoint.selective_ac_option": Removed(
            lambda value, values: value == "op" or values.get("activation_checkpoint.mode", "selective") != "selective",
            "0.3.0 has per-operator selective checkpointing only; use 'op'",
        ),
        "quantize.linear.float8.enable_fsdp_float8_all_gather": Removed(
            _only(False), "it belongs to tensorwise scaling, which 0.3.0 dropped; use false"
        ),
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Removed(
            _only(False), "it belongs to tensorwise scaling, which 0.3.0 dropped; use false"
        ),
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Removed(_any, ""),
        "quantize.linear.mx.recipe_name": Removed(_only("mxfp8_cublas"), "0.3.0 has one MXFP8 linear recipe"),
        "quantize.grouped_mm.float8.fqns": Removed(
            _only([], ["experts"], "experts"), "0.3.0 converts every layer's grouped experts; use ['experts']"
        ),
        "quantize.grouped_mm.mx.fqns": Removed(
            _only([], ["experts"], "experts"), "0.3.0 converts every layer's grouped experts; use ['experts']"
        ),
        "memory_estimation.enable": Removed(_only(False), "0.3.0 has no memory estimation"),
        "memory_estimation.disable_fake_mode": Removed(
            _unless("memory_estimation.enable"), "0.3.0 has no memory estimation"
        ),
        "experimental.custom_import": Removed(_only(""), "use override.imports"),
        "experimental.custom_args_module": Removed(_only(""), "use override.imports"),
        "validation.local_batch_size": Removed(
            _same_as("training.local_batch_size", 8), "0.3.0 validates with training.local_batch_size"
        ),
        "validation.seq_len": Removed(_same_as("training.seq_len", 2048), "0.3.0 validates with training.seq_len"),
    }
    | {
        f"fault_tolerance.{key}": Removed(_unless("fault_tolerance.enable"), "use torchtitan.experiments.torchft")
        for key in (
            "process_group",
            "process_group_timeout_ms",
            "replica_id",
            "group_size",
            "min_replica_size",
            "semi_sync_method",
        )
    }
    | {"fault_tolerance.enable": Removed(_only(False), "use torchtitan.experiments.torchft")}
)


def is_legacy(path: str) -> bool:
    """Whether 0.3.0's own command line would not know a key that we accept."""
    return (
        path in RENAMED_KEYS
        or path in REMOVED_KEYS
        or path == "parallelism.expert_parallel_comm_backend"
        or path.startswith("activation_checkpoint.")  # 0.3.0's command line has subcommands instead
        or path in {f"optimizer.{key}" for key in OPTIMIZER_KEYS}
        or any(path.startswith(section + ".") for section in RENAMED_SECTIONS)
    )


def translate(values: dict[str, Any], sources: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Dotted 0.2 (or 0.3.0) keys and values to 0.3.0's. ``sources`` says where each was read, and is translated along.

    Keys under ``activation_checkpoint.`` and 0.2's optimizer keys come back as they are: they choose or fill objects
    rather than fields, which ``loader.py`` does.

    Raises:
        ConfigError: a removed key at a value that mattered, or two spellings of one key.
    """
    translated: dict[str, Any] = {}
    translated_sources: dict[str, str] = {}
    for path, value in values.items():
        removed = REMOVED_KEYS.get(path)
        if removed:
            if not removed.harmless(value, values):
                raise ConfigError(
                    f"{sources[path]}: '{path} = {value!r}' has no equivalent in TorchTitan 0.3.0: {removed.reason}."
                )
            continue
        new_path, new_value = _rename(path, value, sources[path])
        if new_path in translated and translated[new_path] != new_value:
            raise ConfigError(
                f"{sources[path]}: '{path} = {value!r}' contradicts '{new_path} = {translated[new_path]!r}' "
                f"({translated_sources[new_path]}): they are one setting. Keep one."
            )
        translated[new_path], translated_sources[new_path] = new_value, sources[path]
    return translated, translated_sources


def _rename(path: str, value: Any, source: str) -> tuple[str, Any]:
    if path == "parallelism.expert_parallel_comm_backend":
        if value not in MOE_COMM_BACKENDS:
            raise ConfigError(f"{source}: '{path}': expected one of {', '.join(MOE_COMM_BACKENDS)}, got {value!r}.")
        return "model.moe.dispatch.type", MOE_COMM_BACKENDS[value]
    if path.startswith("quantize.linear.") and path.endswith(".filter_fqns") and isinstance(value, list):
        return path, ["lm_head" if fqn == "output" else fqn for fqn in value]
    if path == "quantize.grouped_mm.mx.recipe_name" and value == "mxfp8":
        return path, "mxfp8_rceil"
    if path in RENAMED_KEYS:
        return RENAMED_KEYS[path], value
    for section in sorted(RENAMED_SECTIONS, key=len, reverse=True):
        if path.startswith(section + "."):
            return RENAMED_SECTIONS[section] + path[len(section) :], value
    return path, value
