"""What a configuration needs, before a launch: memory of each rank, bytes over NVLink, arithmetic, and the least time they take.

    titan-megamoe plan --config train_configs/qwen3_30b_a3b.toml [--nproc 32] [--gpu h200] [--ep 8,16] [--section.key value ...]

Nothing is allocated and no GPU is needed, so any number of ranks and any expert-parallel degree can be planned. Options that this
command does not know override the TOML file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..bench import roofline
from ..bench.roofline import Gpu, GPUS, Load

TAKES_OVERRIDES = True

PRECISIONS = ("bf16", "fp8", "fp8_bwd")
GIB = 2**30

ASSUMPTIONS = (
    "Parameters, gradients and AdamW's two moments are fp32 and sharded over all ranks by FSDP, experts over the "
    "expert-parallel group first; two blocks are gathered at a time in bf16. Activations are those of mega_moe's layers only: "
    "attention, the output layer and its loss, and what other strategies keep come on top. Routing is even; memory of an uneven "
    "one grows with the busiest rank's rows."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="TOML file")
    parser.add_argument("--nproc", type=int, help="ranks of the whole run (default: the expert-parallel degree)")
    parser.add_argument(
        "--ep", help="expert-parallel degrees to plan, separated by commas (default: the configuration's)"
    )
    parser.add_argument(
        "--gpu", choices=GPUS, default="h200", help="whose memory and speed to compare with (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GiB of one rank, with one strategy and precision."""

    precision: str
    parameters: float
    gradients: float
    optimizer: float
    gathered_blocks: float
    symmetric: float
    """mega_moe's buffers that peers reach, shared by all layers."""
    passing: float
    """mega_moe's largest buffers within a forward or backward, shared by all layers."""
    kept: float
    """From each layer's forward to its backward; of one layer under full activation checkpointing."""
    weight_copies: float
    """In FP8, while model.moe.dispatch.weight_cache is on."""

    @property
    def total(self) -> float:
        return sum(value for value in asdict(self).values() if not isinstance(value, str))


def run(arguments: argparse.Namespace) -> int:
    config = _load(arguments.config, arguments.overrides)
    from ..integration.model import model_size

    size = model_size(config.model_spec)
    gpu, dispatch = GPUS[arguments.gpu], config.model.moe.dispatch
    degrees = _degrees(arguments.ep, config.parallelism.expert_parallel_degree, size.num_experts)
    tokens = config.training.local_batch_size * config.training.seq_len
    full_ac = type(config.activation_checkpoint).__qualname__.startswith("FullAC")
    plans = []
    for ep in degrees:
        ranks = arguments.nproc or max(ep, config.parallelism.expert_parallel_degree)
        if ranks % ep:
            raise ValueError(
                f"--nproc {ranks}: an expert-parallel degree of {ep} does not divide it. Use a multiple of {ep}."
            )
        plans.append(
            {
                "expert_parallel_degree": ep,
                "ranks": ranks,
                "memory_gib": [
                    asdict(memory) | {"total": memory.total}
                    for precision in PRECISIONS
                    for memory in [
                        plan_memory_of(
                            size, tokens, ep=ep, ranks=ranks, full_ac=full_ac, precision=precision, dispatch=dispatch
                        )
                    ]
                ],
                "layer": [
                    plan_layer(size, tokens, ep=ep, precision=precision, gpu=gpu, full_ac=full_ac)
                    for precision in PRECISIONS
                ],
            }
        )
    document = {
        "config": str(arguments.config),
        "gpu": asdict(gpu),
        "reached_of_peak": roofline.REACHED,
        "tokens_per_rank": tokens,
        "full_activation_checkpointing": full_ac,
        "saved": dispatch.saved,
        "model": asdict(size) | {"num_active_parameters": size.num_active_parameters},
        "plans": plans,
        "assumptions": ASSUMPTIONS,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        _render(document)
    return 0


def plan_memory_of(size, tokens: int, *, ep: int, ranks: int, full_ac: bool, precision: str, dispatch) -> Memory:
    """``size``: a ``ModelSize``; ``dispatch``: the ``[model.moe.dispatch]`` section."""
    from ..kernels.plan_tables import LayerShape
    from ..symmetric import plan_memory

    local_experts = size.num_experts // ep
    shape = LayerShape(
        ep_size=ep,
        max_tokens=tokens,
        dim=size.dim,
        hidden_dim=size.hidden_dim,
        num_local_experts=local_experts,
        top_k=size.top_k,
        capacity=dispatch.capacity,
    )
    planned = plan_memory(shape, saved=dispatch.saved, precision=precision, wgrad=dispatch.wgrad)
    by_lifetime = {section.lifetime: section for section in planned.sections}
    kept = next(section.num_bytes for name, section in by_lifetime.items() if name.startswith("per layer"))
    symmetric = sum(section.num_bytes for name, section in by_lifetime.items() if "one for all layers" in name)
    passing = max(section.num_bytes for section in planned.sections if section.is_passing)
    sharded = 4 * size.num_parameters / ranks / GIB
    # Within a block, experts are gathered over the ranks that share them only.
    rest = size.largest_block - size.num_expert_parameters // size.num_moe_layers
    block = rest + size.num_expert_parameters / size.num_moe_layers / ep
    copies = 2 * size.num_expert_parameters / ep if precision != "bf16" and dispatch.weight_cache else 0
    return Memory(
        precision=precision,
        parameters=sharded,
        gradients=sharded,
        optimizer=2 * sharded,
        gathered_blocks=2 * 2 * max(block, rest) / GIB if ranks > 1 else 0.0,
        symmetric=symmetric / GIB,
        passing=passing / GIB,
        kept=kept * (1 if full_ac else size.num_moe_layers) / GIB,
        weight_copies=copies / GIB,
    )


def plan_layer(size, tokens: int, *, ep: int, precision: str, gpu: Gpu, full_ac: bool) -> dict:
    """Arithmetic, bytes and least times of one layer on one rank."""
    load = Load(
        dim=size.dim,
        hidden_dim=size.hidden_dim,
        num_experts=size.num_experts,
        top_k=size.top_k,
        tokens=tokens,
        ep_size=ep,
        precision=precision,
    )
    parts = {"forward": roofline.forward(load), "backward": roofline.backward(load)}
    if full_ac:
        parts["recomputation"] = roofline.recomputation(load)
    total = sum(list(parts.values())[1:], start=parts["forward"])
    result = {"precision": precision, "remote_ranks_per_token": load.remote_ranks}
    for name, cost in (*parts.items(), ("all", total)):
        times = cost.milliseconds(gpu)
        bound = max(times, key=times.get)
        result[name] = {
            "tflop": (cost.bf16_flop + cost.fp8_flop) / 1e12,
            "link_mb": cost.link_bytes / 1e6,
            "memory_gb": cost.hbm_bytes / 1e9,
            "ms": times,
            "at_least_ms": times[bound],
            "bound_by": bound,
        }
    return result


def _load(path: Path, overrides: list[str]):
    """The resolved configuration, whatever machine it is for."""
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file.")
    from ..integration import compat

    compat.install()  # before anything imports TorchTitan
    from ..config import loader
    from ..config.errors import ConfigError

    try:
        return loader.load_for_anywhere(["--config", str(path), *overrides])
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _degrees(given: str | None, configured: int, num_experts: int) -> list[int]:
    words = given.split(",") if given else [str(configured)]
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--ep {given}: pass expert-parallel degrees separated by commas, such as 1,8.")
    degrees = [int(word) for word in words]
    for ep in degrees:
        if num_experts % ep:
            raise ValueError(f"--ep {ep} does not divide the model's {num_experts} experts. Use a divisor.")
    return degrees


# ---- output

MEMORY_COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered_blocks",
    "symmetric": "symmetric",
    "passing": "passing",
    "kept": "kept",
    "FP8 copies": "weight_copies",
    "total": "total",
}


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _render(document: dict) -> None:
    from rich.table import Table

    from .terminal import make_console

    console = make_console()
    model, gpu = document["model"], document["gpu"]

    def say(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(
        f"{document['config']}: {_count(model['num_parameters'])} parameters, {_count(model['num_active_parameters'])} active; "
        f"{model['num_moe_layers']} of {model['num_layers']} layers with {model['num_experts']} experts, top-{model['top_k']}, "
        f"D = {model['dim']}, F = {model['hidden_dim']}; {document['tokens_per_rank']} tokens on each rank"
    )
    for plan in document["plans"]:
        degree = f"EP = {plan['expert_parallel_degree']}, {plan['ranks']} ranks"
        table = Table(
            title=f"GiB of each rank, mega_moe, {degree} ({gpu['memory_gib']:.0f} on {gpu['name']})",
            title_justify="left",
        )
        table.add_column("precision")
        for column in MEMORY_COLUMNS:
            table.add_column(column, justify="right")
        for memory in plan["memory_gib"]:
            table.add_row(memory["precision"], *(f"{memory[name]:.1f}" for name in MEMORY_COLUMNS.values()))
        console.print(table)
        table = Table(title=f"One layer on one rank, {degree}: at least, ms", title_justify="left")
        for column in (
            "precision",
            "part",
            "TFLOP",
            "link MB",
            "memory GB",
            "arithmetic",
            "link",
            "memory",
            "bound by",
        ):
            table.add_column(column, justify="left" if column in ("precision", "part", "bound by") else "right")
        for layer in plan["layer"]:
            for part in ("forward", "backward", "recomputation", "all"):
                if part in layer:
                    cost = layer[part]
                    times = (f"{cost['ms'][name]:.2f}" for name in ("arithmetic", "link", "memory"))
                    figures = f"{cost['tflop']:.2f}", f"{cost['link_mb']:.0f}", f"{cost['memory_gb']:.2f}"
                    table.add_row(layer["precision"], part, *figures, *times, cost["bound_by"])
        console.print(table)
    say(document["assumptions"])
    say(
        "Times are at the shares of the peaks that were reached: "
        + ", ".join(f"{name} {share:.0%}" for name, share in document["reached_of_peak"].items())
        + " (that of the link is an assumption). A layer can take no less than the longest of its three."
    )
