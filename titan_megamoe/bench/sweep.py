"""The layer benchmark over tokens, experts, top-k and workloads: ``python -m titan_megamoe.bench.sweep --out docs/results/x.json``.

One of them is varied at a time, the others stay as in ``--shape``. Writes the times and, beside them, a plot of time against
size with the roofline drawn in: the least that a layer could take (``roofline.py``). With several ranks (torchrun), ``--tokens`` are
each rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from .roofline import backward, forward, GPUS, Load
from .workloads import WORKLOADS

AXES = ("tokens", "num_experts", "top_k", "workload")
MEASURED = ("torchtitan compiled", "mega_moe hopper", "mega_moe hopper fp8")
"""Implementations of ``layer.py``."""


def points(base: dict, values: dict[str, list]) -> list[tuple[str, dict]]:
    """``(axis, {"tokens": ..., "num_experts": ..., "top_k": ..., "workload": ...})``: one axis differs from ``base`` at a time.
    Those that ask for more routes than experts are left out."""
    found = [(axis, base | {axis: value}) for axis in AXES for value in values.get(axis, [])]
    return [(axis, point) for axis, point in found if point["top_k"] <= point["num_experts"]]


def least_ms(point: dict, dim: int, hidden_dim: int, ep_size: int, gpu: str, precision: str) -> dict[str, float]:
    """Of a forward, and of a forward and backward, with even routing."""
    load = Load(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=point["num_experts"],
        top_k=point["top_k"],
        tokens=point["tokens"],
        ep_size=ep_size,
        precision=precision,
    )
    both = forward(load) + backward(load)
    return {
        "forward": max(forward(load).milliseconds(GPUS[gpu]).values()),
        "forward_and_backward": max(both.milliseconds(GPUS[gpu]).values()),
    }


def measure_point(point: dict, shape, ep_size: int, group, timing, seed: int) -> dict:
    """Times by implementation; an error in the place of those that could not run."""
    import torch

    from . import layer

    shape = replace(shape, num_experts=point["num_experts"], top_k=point["top_k"])
    inputs = layer.make_inputs(shape, point["tokens"], ep_size, seed, point["workload"])
    results = {}
    for name, implementation in layer.implementations(shape, inputs, group).items():
        if name not in MEASURED:
            continue
        torch.cuda.empty_cache()
        try:
            results[name] = layer.measure(implementation, inputs, timing)
        except Exception as error:  # a point without a time, not the end of the sweep
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def plot(report: dict, path: Path) -> None:
    """Forward and backward together, one panel for each axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = [axis for axis in AXES if any(p["axis"] == axis for p in report["points"])]
    figure, panels = plt.subplots(1, len(axes), figsize=(5 * len(axes), 4.5), squeeze=False)
    for panel, axis in zip(panels[0], axes):
        mine = [p for p in report["points"] if p["axis"] == axis]
        x = [p["point"][axis] for p in mine]
        for name in MEASURED:
            times = [p["results"].get(name, {}).get("forward_and_backward", {}).get("median") for p in mine]
            pairs = [(at, ms) for at, ms in zip(x, times) if ms is not None]
            if pairs:
                panel.plot(*zip(*pairs), "o" if axis == "workload" else "o-", label=name)
        for precision, style in (("bf16", "--"), ("fp8", ":")):
            least = [p["least_ms"][precision]["forward_and_backward"] for p in mine]
            panel.plot(x, least, style, color="gray", label=f"at least, {precision}, even routing")
        if axis == "workload":
            panel.tick_params(axis="x", rotation=60)
        else:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(x, map(str, x))
        panel.set_xlabel(axis)
        panel.set_ylabel("forward and backward, ms")
        panel.legend(fontsize=7)
    figure.suptitle(f"{report['shape_name']}, EP = {report['ep_size']}, {report['environment']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.bench.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=("qwen3-30b", "qwen3-235b"), default="qwen3-30b")
    parser.add_argument("--tokens", type=_numbers, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--experts", type=_numbers, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--top_k", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of titan_megamoe/bench/workloads.py")
    parser.add_argument("--base_tokens", type=int, default=16384, help="while others are varied (default: %(default)s)")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose roofline (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot goes beside it")
    arguments = parser.parse_args()
    from . import layer

    import torch
    import torch.distributed as dist

    from .environment import describe_environment

    if not torch.cuda.is_available():
        parser.exit(2, "titan_megamoe: the sweep times CUDA events, and torch sees no GPU.\n")
    group, ep_size, rank = None, int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ep_size > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl")
        group = dist.group.WORLD
    shape = layer.SHAPES[arguments.shape]
    base = dict(tokens=arguments.base_tokens, num_experts=shape.num_experts, top_k=shape.top_k, workload="uniform")
    values = dict(
        tokens=arguments.tokens,
        num_experts=[e for e in arguments.experts if e % ep_size == 0],
        top_k=arguments.top_k,
        workload=[name for name in arguments.workloads.split(",") if name],
    )
    timing = layer.Timing(warmup=arguments.warmup, repeats=arguments.repeats, pause_ms=0.0)
    report = {
        "command": " ".join(["python -m titan_megamoe.bench.sweep", *sys.argv[1:]]),
        "environment": describe_environment(),
        "shape_name": arguments.shape,
        "shape": asdict(shape),
        "ep_size": ep_size,
        "repeats": arguments.repeats,
        "points": [],
    }
    for axis, point in points(base, values):
        sizes = (shape.dim, shape.hidden_dim, ep_size, arguments.gpu)
        entry = {
            "axis": axis,
            "point": point,
            "least_ms": {precision: least_ms(point, *sizes, precision) for precision in ("bf16", "fp8")},
            "results": measure_point(point, shape, ep_size, group, timing, arguments.seed + rank),
        }
        report["points"].append(entry)
        if rank == 0:
            print(
                axis, point, {name: r.get("forward_and_backward") for name, r in entry["results"].items()}, flush=True
            )
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            plot(report, arguments.out.with_suffix(".png"))
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
