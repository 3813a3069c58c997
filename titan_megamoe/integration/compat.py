"""What TorchTitan 0.3.0 needs to run on a CPU with gloo, and on torch 2.11 to 2.14.

0.3.0 is written for accelerators and for torch 2.14. Each shim below fills one gap, and only where it finds the gap; its
docstring says why it exists and which release closes the gap. A GPU with torch 2.14 needs none of them.

TorchTitan's modules copy names from torch and from one another as they are imported, so :func:`install` comes before
them::

    from titan_megamoe.integration import compat

    compat.install()

    import torchtitan.train
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import logging
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import spmd_types as spmd
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
import torch.nn.functional as F
from spmd_types.runtime import get_partition_spec
from torch._utils import _get_available_device_type
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

logger = logging.getLogger(__name__)

TESTED_TORCH = ((2, 11), (2, 14))
"""Oldest and newest torch release that TorchTitan has trained on with these shims."""

TESTED_TORCHTITAN = "0.3.0"

_SPMD_BACKENDS_SINCE = {
    "spmd_types": (
        (2, 14),
        "this backend's parameters are plain tensors, and older fully_shard takes DTensors only, so that a run of more than "
        "one rank stops at start-up",
    ),
    "full_dtensor": (
        (2, 14),
        "before 2.13 it stops with an error, and in 2.13 cloning a partial DTensor sums it over the ranks, so that TorchTitan, "
        "which clones the loss and then sums it, logs it multiplied by the data-parallel degree",
    ),
}
"""Per ``parallelism.spmd_backend``: the torch release that it needs, and why. Any release will do for partial_dtensor."""

_applied: list[str] | None = None


def install() -> list[str]:
    """Apply the shims that this torch and this machine need, and return their names. Further calls change nothing.

    Raises:
        RuntimeError: TorchTitan was imported first and may hold copies of what the shims replace.
    """
    global _applied
    if _applied is None:
        late = sorted(name for name in sys.modules if _may_hold_copies(name))
        if late:
            raise RuntimeError(
                "titan_megamoe.integration.compat.install() must be called before TorchTitan is imported, but "
                f"{len(late)} of its modules already are, {late[0]} among them. Call it at the top of the program."
            )
        _applied = [shim.__name__ for shim in _SHIMS if shim()]
        logger.info("Shims for TorchTitan on torch %s: %s", torch.__version__, ", ".join(_applied) or "none needed")
    return list(_applied)


def _may_hold_copies(module: str) -> bool:
    # Of tools, only tools.utils matters, and it is patched in place; observability takes nothing from torch.
    harmless = ("torchtitan.tools", "torchtitan.observability")
    return module.startswith("torchtitan.") and not module.startswith(harmless)


@functools.cache
def check_versions() -> None:
    """Warn, once a process, about a torch or TorchTitan that this package was not run on."""
    (oldest, newest), installed = TESTED_TORCH, _torch_version()
    if not oldest <= installed <= newest:
        logger.warning(
            "torch %s is untested with titan_megamoe, which has been run on %s to %s.",
            torch.__version__,
            _dotted(oldest),
            _dotted(newest),
        )
    torchtitan = importlib.metadata.version("torchtitan")
    if torchtitan != TESTED_TORCHTITAN:
        logger.warning(
            "TorchTitan %s is untested with titan_megamoe, which is written for %s.", torchtitan, TESTED_TORCHTITAN
        )


def accept_data_dependent_outputs() -> None:
    """Let a compiled block hold operators whose outputs are as large as the routing says.

    Before torch 2.13, under selective checkpointing, the condition of the assertion that such a size is not negative was
    handed from the forward's graph to the backward's, which Inductor refuses ("Unsupported inductor graph input type"). So
    these assertions are left out there.
    """
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    if _torch_version() < (2, 13):
        torch._dynamo.config.do_not_emit_runtime_asserts = True


def default_spmd_backend() -> str:
    """``parallelism.spmd_backend``'s default: TorchTitan's own, spmd_types, where the installed torch can run it."""
    return "spmd_types" if _torch_version() >= _SPMD_BACKENDS_SINCE["spmd_types"][0] else "partial_dtensor"


def check_spmd_backend(name: str) -> None:
    """Raises ValueError for a ``parallelism.spmd_backend`` that the installed torch cannot run, or not rightly."""
    since, why = _SPMD_BACKENDS_SINCE.get(name, ((0, 0), ""))
    if _torch_version() < since:
        raise ValueError(
            f"parallelism.spmd_backend = '{name}' needs torch {_dotted(since)}, but torch {torch.__version__} is installed: "
            f"{why}. Use spmd_backend = 'partial_dtensor', which computes the same, or install torch {_dotted(since)}."
        )


def _torch_version() -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", torch.__version__).groups()
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# ---- older torch, on any device


def add_set_timeout() -> bool:
    """TorchTitan shortens its process groups' timeouts after the first step by ``dist.set_timeout``.

    Needed before torch 2.14, which made the function public.
    """
    if hasattr(dist, "set_timeout"):
        return False

    def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        dist.distributed_c10d._set_pg_timeout(timeout, group)

    dist.set_timeout = set_timeout
    return True


def add_is_non_strict_tracing() -> bool:
    """TorchTitan's token dispatchers ask whether non-strict ``torch.export`` is tracing them. Training never does that.

    Needed before torch 2.12.
    """
    if hasattr(torch.compiler, "_is_non_strict_tracing"):
        return False
    torch.compiler._is_non_strict_tracing = lambda: False
    return True


def add_data_parallel_mesh_dims() -> bool:
    """TorchTitan imports ``DataParallelMeshDims``, but makes one only under the backends that need a newer torch anyway.

    Needed before torch 2.12.
    """
    if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        return False

    @dataclass(frozen=True)
    class DataParallelMeshDims:
        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

    torch.distributed.fsdp.DataParallelMeshDims = DataParallelMeshDims
    return True


def add_separate_full_blocks() -> bool:
    """TorchTitan passes ``create_block_mask`` an argument whose default, True, is all that older torch can do.

    Needed before torch 2.13.
    """
    create_block_mask = flex_attention.create_block_mask
    if "separate_full_blocks" in inspect.signature(create_block_mask).parameters:
        return False

    @functools.wraps(create_block_mask)
    def with_separate_full_blocks(*args, separate_full_blocks: bool = True, **kwargs):
        if not separate_full_blocks:
            raise NotImplementedError(
                f"TorchTitan's batch-invariant mode needs torch 2.13, but {torch.__version__} is installed."
            )
        return create_block_mask(*args, **kwargs)

    flex_attention.create_block_mask = with_separate_full_blocks
    return True


def shard_norm_and_lm_head_apart() -> bool:
    """TorchTitan makes one FSDP unit of the last norm and ``lm_head``, then calls ``lm_head`` from the loss, chunk by chunk.

    Older FSDP takes a unit's forward for unfinished until all its modules have run, so each becomes a unit of its own.
    Modules that share parameters cannot. Needed before torch 2.13.
    """
    if _torch_version() >= (2, 13):
        return False
    from torchtitan.distributed import fsdp

    fully_shard = fsdp.fully_shard

    @functools.wraps(fully_shard)
    def fully_shard_apart(module, **kwargs):
        if not isinstance(module, list):
            return fully_shard(module, **kwargs)
        if _share_parameters(module):
            logger.warning(
                "This model ties lm_head to the embeddings, and TorchTitan's chunked loss cannot train that with torch %s: "
                "backward will find freed weights. Use another loss, or torch 2.13.",
                torch.__version__,
            )
            return fully_shard(module, **kwargs)
        return [fully_shard(one, **kwargs) for one in module]

    fsdp.fully_shard = fully_shard_apart
    return True


def _share_parameters(modules: list[nn.Module]) -> bool:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return len(set(parameters)) < len(parameters)


def shard_routed_experts_apart() -> bool:
    """TorchTitan shards a block's experts over another mesh than the rest of it, parameter by parameter.

    Older ``fully_shard`` has one mesh per unit, so the experts become a unit of their own. It is ``routed_experts`` rather
    than ``inner_experts``, which holds the parameters: FSDP gathers them when the unit's forward is called, and a fused
    ``routed_experts`` never calls ``inner_experts``. Needed before torch 2.12.
    """
    if _torch_version() >= (2, 12):
        return False
    from torchtitan.distributed import fsdp

    apply_fsdp_to_decoder = fsdp.apply_fsdp_to_decoder
    signature = inspect.signature(apply_fsdp_to_decoder)

    @functools.wraps(apply_fsdp_to_decoder)
    def apply_fsdp_with_expert_units(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = SimpleNamespace(**bound.arguments)
        if arguments.ep_degree == 1:
            return apply_fsdp_to_decoder(*args, **kwargs)
        _shard_routed_experts(arguments)
        # What already is a unit, its parents leave alone; without an EP degree they set up no prefetching either.
        apply_fsdp_to_decoder(**bound.arguments | {"ep_degree": 1, "edp_mesh": None})
        _prefetch_blocks(arguments.model)

    fsdp.apply_fsdp_to_decoder = apply_fsdp_with_expert_units
    return True


def _shard_routed_experts(arguments: SimpleNamespace) -> None:
    """Make each MoE block's ``routed_experts`` an FSDP unit, with the settings that TorchTitan gives its parameters."""
    from torchtitan.distributed import fsdp

    settings = {
        "mesh": arguments.edp_mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(
            param_dtype=arguments.param_dtype,
            reduce_dtype=arguments.reduce_dtype,
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": fsdp.get_fsdp_reshard_after_forward_policy(
            arguments.reshard_after_forward_policy, arguments.pp_enabled
        ),
    }
    if arguments.cpu_offload:
        settings["offload_policy"] = fsdp.CPUOffloadPolicy()
    for block in arguments.model.layers.values():
        if getattr(block, "moe_enabled", False):
            experts = block.moe.routed_experts
            more_ranks_than_experts = (
                arguments.edp_mesh["efsdp"].size() * arguments.ep_degree > experts.inner_experts.num_experts
            )
            shard_dim = 1 if more_ranks_than_experts else 0
            fsdp.fully_shard(experts, **settings, shard_placement_fn=lambda _, dim=shard_dim: fsdp.Shard(dim))


def _prefetch_blocks(model: nn.Module) -> None:
    """As TorchTitan does under EP, whose host syncs get in the way of FSDP's implicit prefetching."""

    def units(block: nn.Module) -> list[nn.Module]:
        return [block, block.moe.routed_experts] if getattr(block, "moe_enabled", False) else [block]

    blocks = list(model.layers.values())
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch(units(following))
        following.set_modules_to_backward_prefetch(units(block))
    if not blocks:
        return
    if model.tok_embeddings is not None:
        model.tok_embeddings.set_modules_to_forward_prefetch(units(blocks[0]))
        blocks[0].set_modules_to_backward_prefetch([model.tok_embeddings])
    if model.norm is not None and model.lm_head is not None:
        blocks[-1].set_modules_to_forward_prefetch([model.norm, model.lm_head])
        model.lm_head.set_modules_to_backward_prefetch(units(blocks[-1]))


def compile_around_expert_units() -> bool:
    """TorchTitan compiles each block as one full graph, but FSDP's hooks on an inner unit cannot be traced.

    They are there with EP, where :func:`shard_routed_experts_apart` made the experts such a unit. Needed before torch 2.12.
    """
    if _torch_version() >= (2, 12):
        return False
    from torchtitan.distributed import compile as compilation

    apply_compile = compilation.apply_compile

    @functools.wraps(apply_compile)
    def apply_compile_with_graph_breaks(model: nn.Module, *, compile_config, parallel_dims) -> None:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
        if parallel_dims.ep_enabled:
            backend = compilation._maybe_regional_inductor_backend(model, compile_config.backend)
            for block in model.layers.children():
                block.compile(backend=backend, fullgraph=False)

    compilation.apply_compile = apply_compile_with_graph_breaks
    return True


# ---- the CPU, with any torch


def _no_accelerator() -> bool:
    return _get_available_device_type() is None  # as TorchTitan looks for one


class _CpuDevice(ModuleType):
    """``torch.cpu``, with the calls of ``torch.cuda`` that TorchTitan makes of its device module.

    The machine is one device, and memory is what this process has resident.
    """

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def set_device(self, device: torch.device) -> None:
        """There is only one."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: torch.device | None = None) -> str:
        if os.path.exists("/proc/cpuinfo"):
            with open("/proc/cpuinfo") as lines:
                for line in lines:
                    if line.startswith("model name"):
                        return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def memory_stats(self, device: torch.device | None = None) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device: torch.device | None = None) -> None:
        """The system cannot reset it: the peak is the process's."""

    def empty_cache(self) -> None:
        """The CPU's allocator keeps none."""


def use_cpu_device() -> bool:
    """Where TorchTitan finds no accelerator it takes "cuda" for its device, and ``torch.cuda`` for its device module.

    Needed with TorchTitan 0.3.0.
    """
    if not _no_accelerator():
        return False
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CpuDevice("cpu_device")
    utils.get_local_device = lambda: torch.device("cpu")
    return True


class _MissingKernels(ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise ModuleNotFoundError(f"MinimalAsyncEP's {name} is written in triton, which is not installed.")

        return missing


def stub_minimal_async_ep_kernels() -> bool:
    """Every MoE model of TorchTitan imports MinimalAsyncEP's kernels, and those import triton, which CPU installs lack.

    In their place is a module whose kernels raise when called; triton itself stays missing, for torch looks for it too.
    Needed with TorchTitan 0.3.0.
    """
    if importlib.util.find_spec("triton") is not None:
        return False
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[name] = _MissingKernels(name)
    return True


def reduce_gradients_by_sum() -> bool:
    """TorchTitan sets FSDP's gradient divisor to 1, for which FSDP asks the backend for a PREMUL_SUM. Gloo has none.

    A plain sum is the same. Needed up to torch 2.14 at least.
    """
    if not _no_accelerator():
        return False
    from torchtitan.distributed import fsdp

    disable_fsdp_gradient_division = fsdp.disable_fsdp_gradient_division

    @functools.wraps(disable_fsdp_gradient_division)
    def disable_and_sum(model: nn.Module) -> None:
        disable_fsdp_gradient_division(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable_and_sum
    return True


def allow_uneven_all_to_all() -> bool:
    """Under spmd_types TorchTitan exchanges tokens by ``dist.all_to_all`` of lists, of which gloo refuses uneven ones.

    Its ``all_to_all_single`` takes any sizes. Needed up to torch 2.14 at least.
    """
    if not _no_accelerator():
        return False
    all_to_all = dist.all_to_all

    @functools.wraps(all_to_all)
    def all_to_all_by_single(output_tensor_list, input_tensor_list, group=None, async_op=False):
        if async_op or dist.get_backend(group) != dist.Backend.GLOO:
            return all_to_all(output_tensor_list, input_tensor_list, group, async_op)
        sent = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
        sent_sizes = [tensor.numel() for tensor in input_tensor_list]
        received_sizes = [tensor.numel() for tensor in output_tensor_list]
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group)
        for output, chunk in zip(output_tensor_list, received.split(received_sizes), strict=True):
            output.copy_(chunk.view_as(output))

    dist.all_to_all = all_to_all_by_single
    return True


def masked_sdpa(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    *,
    score_mod: Callable | None,
    block_mask: flex_attention.BlockMask,
    scale: float | None,
    enable_gqa: bool,
    return_aux: flex_attention.AuxRequest,
    kernel_options: dict,
) -> tuple[torch.Tensor, None]:
    """``FlexAttention.compiled_flex_attn`` by SDPA, with the block mask made dense."""
    if score_mod is not None or return_aux.lse:
        raise NotImplementedError("Without a GPU, attention takes neither a score_mod nor an out_transform.")
    # As in the original: not seen by SPMD type checking, after which the output has the query's type.
    with spmd.no_typecheck():
        B, N = block_mask.shape[:2]
        mask_BNLL = flex_attention.create_mask(
            block_mask.mask_mod, B, N, q_BNLH.shape[2], k_BNLH.shape[2], device=q_BNLH.device
        )
        with sdpa_kernel(_sdpa_backends()):
            out_BNLH = F.scaled_dot_product_attention(
                q_BNLH, k_BNLH, v_BNLH, attn_mask=mask_BNLL, scale=scale, enable_gqa=enable_gqa
            )
    if spmd.is_type_checking():
        spmd.assert_type(out_BNLH, spmd.get_local_type(q_BNLH), get_partition_spec(q_BNLH))
    return out_BNLH, None


_COMPILED_ATTENTION_BY_MATH = _torch_version() < (2, 14)


def _sdpa_backends() -> list[SDPBackend]:
    # SDPA's flash kernel counts as drawing random numbers. Before torch 2.14 a compiled block cannot recompute such an
    # operator in backward, as activation checkpointing wants, if it also saves a device mesh, as it does with EP.
    if torch.compiler.is_compiling() and _COMPILED_ATTENTION_BY_MATH:
        return [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def replace_flex_attention() -> bool:
    """Flex attention has no backward on a CPU. Needed up to torch 2.14 at least.

    Its masks are then built without ``torch.compile``, which would take seconds and a C++ compiler, and a block compiled
    with aot_eager no longer sets it apart for Inductor.
    """
    if not _no_accelerator():
        return False
    from torchtitan.models.common import attention

    attention.FlexAttention.compiled_flex_attn = staticmethod(masked_sdpa)
    attention._compiled_create_block_mask = attention.create_block_mask
    attention.maybe_regional_inductor = lambda inductor_configs: contextlib.nullcontext()
    return True


def initialize_like_one_rank() -> bool:
    """DTensor's random operators draw the same numbers on every rank of a CPU mesh, so that a parameter's shards are copies.

    Every expert-parallel rank would start with the same experts, and the router with ties between them. Here each rank draws
    the whole parameter and keeps its shard, and the initial weights do not depend on the parallelism. Goes when DTensor's
    random operators support CPU meshes.
    """
    if not _no_accelerator():
        return False
    from torchtitan.protocols.module import Module

    init_param = Module._init_param

    @functools.wraps(init_param)
    def init_shard(self, name: str, param: nn.Parameter) -> None:
        if not isinstance(param, DTensor):
            return init_param(self, name, param)
        full = torch.empty(param.shape, dtype=param.dtype)
        init_param(self, name, full)
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        shard = full[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
        with torch.no_grad():
            param.to_local().copy_(shard)

    Module._init_param = init_shard
    return True


_SHIMS = (
    # What TorchTitan imports from torch, before anything imports TorchTitan.
    add_set_timeout,
    add_is_non_strict_tracing,
    add_data_parallel_mesh_dims,
    add_separate_full_blocks,
    allow_uneven_all_to_all,
    # What its modules import from one another, before anything imports its models.
    use_cpu_device,
    stub_minimal_async_ep_kernels,
    shard_norm_and_lm_head_apart,
    shard_routed_experts_apart,
    compile_around_expert_units,
    reduce_gradients_by_sum,
    replace_flex_attention,
    initialize_like_one_rank,
)
"""In the order in which they are applied. Each tells whether it was needed."""
