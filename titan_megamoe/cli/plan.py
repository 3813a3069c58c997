"""What a configuration needs, before a launch: memory of each rank, bytes over NVLink, arithmetic, and the least time they take.

    titan-megamoe plan --config train_configs/qwen3_30b_a3b.toml [--nproc 32] [--gpu h200] [--ep 8,16] [--section.key value ...]

Nothing is allocated and no GPU is needed, so any number of ranks and any expert-parallel degree can be planned. Options that this
command does not know override the TOML file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .configuration import load_configuration
from ..bench import roofline
from ..bench.roofline import Gpu, GPUS, Load, PRECISIONS
from ..quantize import FORMATS

TAKES_OVERRIDES = True

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = {"Adam": 2, "AdamW": 2}
"""Of a parameter, by optimizer."""
SAVED_ROUTE_BYTES = 12
"""An int64 expert id and an fp32 score."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="TOML file")
    parser.add_argument("--nproc", type=int, help="ranks of the whole run (default: the fewest that the degrees allow)")
    parser.add_argument(
        "--ep", help="expert-parallel degrees to plan, separated by commas (default: the configuration's)"
    )
    parser.add_argument(
        "--precision",
        help=f"precisions to plan, of {','.join(PRECISIONS)}, separated by commas (default: all that the GPU multiplies)",
    )
    parser.add_argument(
        "--gpu", choices=GPUS, default="h200", help="whose memory and speed to compare with (default: %(default)s)"
    )
    parser.add_argument(
        "--domain", type=int, help="ranks that NVLink joins (default: that GPU's usual machine, 8; an NVL72 has 72)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")


# ---- how ranks share the model


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the ranks of a run share the model: ``parallelism``'s degrees, resolved as TorchTitan's ``ParallelDims`` does."""

    ranks: int
    """Of the run."""
    replicas: int
    """Copies of the model among them (hybrid FSDP)."""
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int

    @property
    def shards(self) -> int:
        """Pieces that each parameter is cut into: FSDP, tensor and expert parallelism together cover a replica's ranks, for experts
        as for all else."""
        return self.ranks // self.replicas

    @property
    def tokens_divided_by(self) -> int:
        """Ranks that share a sequence. Tensor parallelism shares it among experts only together with expert parallelism; alone it
        splits F."""
        return self.context_parallel * (self.tensor_parallel if self.expert_parallel > 1 else 1)

    @property
    def hidden_dim_divided_by(self) -> int:
        return self.tensor_parallel if self.expert_parallel == 1 else 1


def share_ranks(parallelism, *, ep: int, nproc: int | None, fewest_for: int) -> Ranks:
    """``parallelism``: the section; ``fewest_for``: an expert-parallel degree that the number of ranks, if it is free, must also fit,
    so that several degrees are planned for the same run.

    Raises:
        ValueError: degrees that do not make up the ranks, or pipeline parallelism.
    """
    pipeline = parallelism.pipeline_parallel_degree
    if pipeline > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {pipeline}: how stages share layers is not planned. Plan with 1."
        )
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    replicas, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    unit = replicas * tensor * context
    if shard > 0:
        ranks = unit * shard
        if nproc not in (None, ranks):
            raise ValueError(
                f"--nproc {nproc}: the configuration's parallelism degrees make {ranks} ranks. Leave it out, or set "
                "--parallelism.data_parallel_shard_degree -1 for all that are left."
            )
        where = f"parallelism.data_parallel_shard_degree = {shard}"
    else:
        ranks = replicas * math.lcm(tensor * context, ep, fewest_for) if nproc is None else nproc
        where = f"--nproc {ranks}"
    if ranks < 1 or ranks % unit:
        raise ValueError(
            f"{where}: replicated data, tensor and context parallelism need a multiple of {unit} ranks. Use one."
        )
    if (ranks // replicas) % ep:
        of = f" of each of the {replicas} replicas" if replicas > 1 else ""
        raise ValueError(
            f"{where}: an expert-parallel degree of {ep} does not divide the {ranks // replicas} ranks{of}. Use a multiple of "
            f"{ep * replicas} ranks in all, or a lower --ep."
        )
    return Ranks(ranks=ranks, replicas=replicas, tensor_parallel=tensor, context_parallel=context, expert_parallel=ep)


# ---- memory


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GiB of one rank, with one strategy and precision."""

    precision: str
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """Parameters that FSDP holds whole for the moment."""
    symmetric: float
    """mega_moe's buffers that peers reach, shared by all layers."""
    passing: float
    """mega_moe's largest buffers within a forward or backward, shared by all layers."""
    kept: float
    """From each MoE layer's forward to its backward, as activations are checkpointed in this configuration."""
    weight_copies: float
    """In FP8, while model.moe.dispatch.weight_cache is on."""

    @property
    def of_any_strategy(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def total(self) -> float:
        return self.of_any_strategy + self.symmetric + self.passing + self.kept + self.weight_copies


def kept_gib(size, planned, tokens: int) -> dict[str, float]:
    """GiB that MoE layers keep from forward to backward, by how activations are checkpointed.

    A layer keeps what ``mega_moe`` saves (``planned``: its ``MemoryPlan``), its bf16 input ``[T, D]``, and each route's id and score.
    Under full checkpointing each block keeps its input, and ids and scores so that nothing is routed twice; one layer at a time has
    the rest.
    """
    inputs, routes = 2 * tokens * size.dim, SAVED_ROUTE_BYTES * tokens * size.top_k
    saved = sum(section.num_bytes for section in planned.sections if section.lifetime.startswith("per layer"))
    one = saved + inputs + routes
    return {
        "one_layer": one / GIB,
        "without_full_ac": one * size.num_moe_layers / GIB,
        "with_full_ac": (one + (inputs + routes) * size.num_moe_layers) / GIB,
    }


def plan_memory_of(size, config, ranks: Ranks, *, precision: str) -> tuple[Memory, dict[str, float]]:
    """One rank's memory, and :func:`kept_gib`. ``size``: a ``ModelSize``."""
    from ..kernels.plan_tables import LayerShape
    from ..symmetric import plan_memory
    from ..weight_cache import COPY_BYTES

    training, dispatch = config.training, config.model.moe.dispatch
    ep = ranks.expert_parallel
    tokens = tokens_per_rank(config, ranks)
    shape = LayerShape(
        ep_size=ep,
        max_tokens=tokens,
        dim=size.dim,
        hidden_dim=size.hidden_dim // ranks.hidden_dim_divided_by,
        num_local_experts=size.num_experts // ep,
        top_k=size.top_k,
        capacity=dispatch.capacity,
    )
    planned = plan_memory(shape, saved=dispatch.saved, precision=precision, wgrad=dispatch.wgrad)
    symmetric = sum(section.num_bytes for section in planned.sections if "one for all layers" in section.lifetime)
    passing = max(section.num_bytes for section in planned.sections if section.is_passing)
    kept = kept_gib(size, planned, tokens)

    # With CPU offload, what is sharded lives in the host's memory.
    sharded = 0 if training.enable_cpu_offload else DTYPE_BYTES[training.dtype] * size.num_parameters / ranks.shards
    moments = max(MOMENTS.get(group.optimizer_name, 2) for group in config.optimizer.param_groups)
    whole_experts = ep * ranks.hidden_dim_divided_by
    per_weight = COPY_BYTES[FORMATS[precision].backward] if dispatch.weight_cache else 0
    copies = per_weight * size.num_expert_parameters / whole_experts
    memory = Memory(
        precision=precision,
        parameters=sharded / GIB,
        gradients=sharded / GIB,
        optimizer=moments * sharded / GIB,
        gathered=gathered_bytes(size, config, ranks) / GIB,
        symmetric=symmetric / GIB,
        passing=passing / GIB,
        kept=kept["with_full_ac" if has_full_ac(config) else "without_full_ac"],
        weight_copies=copies / GIB,
    )
    return memory, kept


def gathered_bytes(size, config, ranks: Ranks) -> float:
    """Of what FSDP holds whole while it computes with one unit and has the next one gathered already: the parameters of both, and in
    backward the first one's gradients with their copy in fp32 that is to be reduced. It makes the former on a single rank, too,
    whose parameters it casts."""
    dtype = DTYPE_BYTES[config.training.mixed_precision_param]
    experts_split = ranks.expert_parallel * ranks.hidden_dim_divided_by
    units = [
        ((parameters - experts) / ranks.tensor_parallel + experts / experts_split)
        for parameters, experts in size.fsdp_units
    ]
    if config.parallelism.fsdp_reshard_after_forward == "never":
        return dtype * sum(units) + (dtype + 4) * max(units)
    return max(dtype * (a + b) + (dtype + 4) * max(a, b) for a, b in itertools.pairwise(units))


def tokens_per_rank(config, ranks: Ranks) -> int:
    tokens = config.training.local_batch_size * config.training.seq_len
    if tokens % ranks.tokens_divided_by:
        raise ValueError(
            f"training.local_batch_size * training.seq_len = {tokens} tokens cannot be shared by the {ranks.tokens_divided_by} "
            "ranks of a sequence. Use a multiple."
        )
    return tokens // ranks.tokens_divided_by


def has_full_ac(config) -> bool:
    from torchtitan.distributed.activation_checkpoint import FullAC

    return isinstance(config.activation_checkpoint, FullAC.Config)


# ---- a layer


def plan_layer(load: Load, gpu: Gpu, *, full_ac: bool) -> dict:
    """Arithmetic, bytes and least times of one layer on one rank."""
    parts = {"forward": roofline.forward(load), "backward": roofline.backward(load)}
    if full_ac:
        parts["recomputation"] = roofline.recomputation(load)
    parts["all"] = roofline.full_layer(load, full_ac=full_ac)
    result = {
        "precision": load.precision,
        "remote_ranks_per_token": load.remote_ranks,
        "remote_ranks_per_token_over_nvlink": load.remote_ranks_in_domain,
    }
    for name, cost in parts.items():
        at_least, bound_by = cost.bound(gpu.achievable)
        result[name] = {
            "tflop": (cost.bf16_flop + cost.fp8_flop) / 1e12,
            "link_mb": cost.link_bytes / 1e6,
            "network_mb": cost.network_bytes / 1e6,
            "memory_gb": cost.hbm_bytes / 1e9,
            "ms": cost.milliseconds(gpu.achievable),
            "at_least_ms": at_least,
            "bound_by": bound_by,
            "at_least_ms_at_nominal_rates": cost.bound(gpu.nominal)[0],
        }
    return result


# ---- the command


def run(arguments: argparse.Namespace) -> int:
    gpu = GPUS[arguments.gpu]
    precisions = _precisions(arguments.precision, gpu)
    domain = gpu.ranks_per_domain if arguments.domain is None else arguments.domain
    if domain < 1:
        raise ValueError(f"--domain {domain}: pass how many ranks NVLink joins, at least 1.")
    config = load_configuration(arguments.config, arguments.overrides)
    from ..integration.model import model_size

    size, parallelism = model_size(config.model_spec), config.parallelism
    configured = parallelism.expert_parallel_degree
    degrees = _degrees(arguments.ep, configured, size.num_experts)
    plans = [
        _plan(size, config, gpu, precisions, domain, ranks)
        for ranks in (
            share_ranks(parallelism, ep=ep, nproc=arguments.nproc, fewest_for=math.lcm(configured, *degrees))
            for ep in degrees
        )
    ]
    # Too many to print: what follows from them is in the plans.
    model = {name: value for name, value in asdict(size).items() if name != "fsdp_units"}
    document = {
        "config": str(arguments.config),
        "strategy": config.model.moe.dispatch.type,
        "gpu": asdict(gpu),
        "ranks_per_nvlink_domain": domain,
        "tokens_per_rank": plans[0]["tokens_per_rank"],
        "full_activation_checkpointing": has_full_ac(config),
        "saved": config.model.moe.dispatch.saved,
        "wgrad": config.model.moe.dispatch.wgrad,
        "model": model | {"num_active_parameters": size.num_active_parameters},
        "plans": plans,
        "assumptions": _assumptions(config, gpu),
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        _render(document)
    return 0


def _plan(size, config, gpu: Gpu, precisions: list[str], domain: int, ranks: Ranks) -> dict:
    dispatch, full_ac, notes = config.model.moe.dispatch, has_full_ac(config), []
    load = Load(
        dim=size.dim,
        hidden_dim=size.hidden_dim // ranks.hidden_dim_divided_by,
        num_experts=size.num_experts,
        top_k=size.top_k,
        tokens=tokens_per_rank(config, ranks),
        ep_size=ranks.expert_parallel,
        wgrad=dispatch.wgrad,
        saved=dispatch.saved,
        ranks_per_domain=domain,
    )
    if ranks.expert_parallel > domain:
        notes.append(
            f"EP = {ranks.expert_parallel} spans NVLink domains of {domain} ranks: mega_moe's kernels refuse that. Its rows show what "
            "the network would cost; lower --ep, or pass the machine's --domain."
        )
    planned = [plan_memory_of(size, config, ranks, precision=precision) for precision in precisions]
    return {
        "expert_parallel_degree": ranks.expert_parallel,
        "ranks": ranks.ranks,
        "shards_of_a_parameter": ranks.shards,
        "tokens_per_rank": load.tokens,
        "memory_gib": [
            asdict(memory) | {"total": memory.total, "fits": memory.total <= gpu.memory_gib} for memory, _ in planned
        ],
        "kept_gib": [{"precision": precision, **kept} for precision, (_, kept) in zip(precisions, planned)],
        "other_strategies_gib_without_activations_and_buffers": planned[0][0].of_any_strategy,
        "layer": [plan_layer(replace(load, precision=precision), gpu, full_ac=full_ac) for precision in precisions],
        "notes": notes,
    }


def _assumptions(config, gpu: Gpu) -> list[str]:
    training = config.training
    names = sorted({group.optimizer_name for group in config.optimizer.param_groups})
    found = [
        f"Parameters, gradients and two moments of {', '.join(names)} are {training.dtype}"
        + (" in the host's memory" if training.enable_cpu_offload else "")
        + ", sharded by FSDP over all ranks of a replica, experts over the expert-parallel group first. Gathered: one unit and the "
        f"next in {training.mixed_precision_param}, and one unit's gradients with their fp32 copy.",
        "Counted of the activations: what MoE layers keep. Attention, the router, the output layer and its loss, and the allocator's "
        "fragments come on top. Routing is even; memory and time of an uneven one grow with the busiest rank's rows.",
        "Out of scope: what all_to_all and TorchTitan's other strategies keep and exchange. Of them only parameters, gradients, "
        "optimizer and gathered units are counted, which no strategy changes.",
    ]
    unknown = [name for name in names if name not in MOMENTS]
    if unknown:
        found.append(f"How many moments {', '.join(unknown)} keeps is not known here: 2 are counted.")
    rates = gpu.achievable
    assumed = ", ".join(name.partition("_")[0] for name in gpu.assumed)
    found.append(
        f"Times are at {rates.bf16_tflops:.0f} TFLOP/s in bf16, {rates.fp8_tflops:.0f} in FP8, {rates.hbm_tb_per_second:.1f} TB/s of "
        f"memory (hbm), {rates.link_gb_per_second:.0f} GB/s over NVLink (link) and {rates.network_gb_per_second:.0f} over the network; "
        f"assumed, not measured: {assumed}. A layer can take no less than the longest of its times."
    )
    if not gpu.has_kernels:
        found.append(f"mega_moe has no fused kernels for {gpu.name}: times say what the hardware would allow.")
    return found


def _degrees(given: str | None, configured: int, num_experts: int) -> list[int]:
    words = given.split(",") if given else [str(configured)]
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--ep {given}: pass expert-parallel degrees separated by commas, such as 1,8.")
    degrees = [int(word) for word in words]
    for ep in degrees:
        if num_experts % ep:
            raise ValueError(f"--ep {ep} does not divide the model's {num_experts} experts. Use a divisor.")
    return degrees


def _precisions(given: str | None, gpu: Gpu) -> list[str]:
    words = [word.strip() for word in given.split(",")] if given else list(gpu.precisions)
    for word in words:
        if word not in gpu.precisions:
            raise ValueError(
                f"--precision {word} cannot be planned for --gpu {gpu.name}. Use some of: {', '.join(gpu.precisions)}."
            )
    return words


# ---- output

MEMORY_COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered",
    "symmetric": "symmetric",
    "passing": "passing",
    "kept": "kept",
    "FP8 copies": "weight_copies",
    "total": "total",
}
OF_ANY_STRATEGY = ("parameters", "gradients", "optimizer", "gathered")


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _render(document: dict) -> None:
    from .terminal import make_console

    console = make_console()
    model = document["model"]

    def say(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(
        f"{document['config']}: {_count(model['num_parameters'])} parameters, {_count(model['num_active_parameters'])} active, "
        f"{_count(model['num_expert_parameters'])} in experts; {model['num_moe_layers']} of {model['num_layers']} layers with "
        f"{model['num_experts']} experts, top-{model['top_k']}, D = {model['dim']}, F = {model['hidden_dim']}, vocabulary "
        f"{model['vocab_size']}"
    )
    for plan in document["plans"]:
        degree = f"EP = {plan['expert_parallel_degree']}, {plan['ranks']} {'rank' if plan['ranks'] == 1 else 'ranks'}"
        console.print(_memory_table(plan, document, degree))
        console.print(_kept_table(plan, document, degree))
        console.print(_layer_table(plan, degree))
        for note in plan["notes"]:
            say(f"Note: {note}")
    for assumption in document["assumptions"]:
        say(f"- {assumption}")


def _table(title: str, columns: dict[str, str]):
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, justify in columns.items():
        table.add_column(column, justify=justify)
    return table


def _memory_table(plan: dict, document: dict, degree: str):
    gpu = document["gpu"]
    columns = {"strategy": "left", "precision": "left"} | dict.fromkeys(MEMORY_COLUMNS, "right")
    columns |= {f"of {gpu['memory_gib']:.0f}": "right"}
    table = _table(f"GiB of each rank, {degree}, {plan['tokens_per_rank']} tokens on each, {gpu['name']}", columns)
    for memory in plan["memory_gib"]:
        figures = (f"{memory[name]:.1f}" for name in MEMORY_COLUMNS.values())
        share = f"{memory['total'] / gpu['memory_gib']:.0%}" + ("" if memory["fits"] else ": too much")
        table.add_row("mega_moe", memory["precision"], *figures, share)
    memory = plan["memory_gib"][0]
    figures = (f"{memory[name]:.1f}" if name in OF_ANY_STRATEGY else "?" for name in MEMORY_COLUMNS.values())
    table.add_row("any other", "", *figures, "?")
    return table


def _kept_table(plan: dict, document: dict, degree: str):
    columns = {"precision": "left", "one layer": "right", "all, without full AC": "right", "all, with full AC": "right"}
    here = "with" if document["full_activation_checkpointing"] else "without"
    table = _table(f"GiB that MoE layers keep, {degree} (here: {here} full AC)", columns)
    for kept in plan["kept_gib"]:
        names = ("one_layer", "without_full_ac", "with_full_ac")
        table.add_row(kept["precision"], *(f"{kept[name]:.2f}" for name in names))
    return table


def _layer_table(plan: dict, degree: str):
    parts = [part for layer in plan["layer"] for part in layer.values() if isinstance(part, dict)]
    # A column only where it says something.
    has_network = any(part["network_mb"] for part in parts)
    kinds = ("arithmetic", "link", *(("network",) if has_network else ()), "memory")
    sizes = {"TFLOP": "right", "link MB": "right"} | ({"network MB": "right"} if has_network else {})
    columns = {"precision": "left", "part": "left", **sizes, "memory GB": "right", **dict.fromkeys(kinds, "right")}
    columns |= {"at least": "right", "bound by": "left", "at nominal rates": "right"}
    table = _table(f"One MoE layer on one rank, {degree}: least times in ms", columns)
    for layer in plan["layer"]:
        for part in ("forward", "backward", "recomputation", "all"):
            if part not in layer:
                continue
            cost = layer[part]
            figures = [f"{cost['tflop']:.2f}", f"{cost['link_mb']:.0f}"]
            figures += [f"{cost['network_mb']:.0f}"] if has_network else []
            figures += [f"{cost['memory_gb']:.2f}", *(f"{cost['ms'][kind]:.2f}" for kind in kinds)]
            figures += [f"{cost['at_least_ms']:.2f}", cost["bound_by"], f"{cost['at_least_ms_at_nominal_rates']:.2f}"]
            table.add_row(layer["precision"], part, *figures)
    return table
