"""The layer benchmark over tokens, experts, top-k and imbalance: ``python -m titan_megamoe.bench.sweep --out docs/results/x.json``.

One of them is varied at a time, the others stay as in ``--shape``. Imbalance comes as ``--hot``, a number that makes low-numbered
experts likelier the larger it is (0: not at all), and as ``--workloads`` (``workloads.py``). Writes the times and, beside them, a plot of
time against size with the roofline drawn in: the least that a layer could take (``roofline.py``); its last panel has time against
imbalance, the busiest rank's rows. Where a time grows by more than those do, it is listed as a cliff. With several ranks (torchrun),
``--tokens`` are each rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from .roofline import backward, forward, GPUS, Load
from .workloads import WORKLOADS

AXES = ("tokens", "num_experts", "top_k", "hot", "workload")
AXIS_LABELS = {
    "tokens": "tokens of each rank",
    "num_experts": "experts",
    "top_k": "experts of a token (top-k)",
    "hot": "hot: how much likelier low-numbered experts are",
}
CLIFF_TOLERANCE = 1.25
"""By what factor a layer may take longer than the busiest rank's rows explain: tiles are padded, and times scatter."""

MEASURED = ("torchtitan compiled", "mega_moe hopper", "mega_moe hopper fp8")
"""Implementations of ``layer.py``."""


def points(base: dict, values: dict[str, list]) -> list[tuple[str, dict]]:
    """``(axis, {"tokens": ..., "num_experts": ..., "top_k": ..., "hot": ..., "workload": ...})``: one axis differs from ``base`` at a
    time. Those that ask for more routes than experts are left out."""
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
    rates = GPUS[gpu].achievable
    return {
        "forward": forward(load).bound(rates)[0],
        "forward_and_backward": (forward(load) + backward(load)).bound(rates)[0],
    }


def hot_routing(
    tokens: int, num_experts: int, top_k: int, hot: float, *, seed: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """int64 ``[T, K]``: each token's K distinct experts are those of the highest ``u - hot * e / E``, where e is an expert's number and u
    uniform in [0, 1). At ``hot`` = 0 all experts are equally likely; the larger, the fewer of the first ones get all."""
    generator = torch.Generator(device).manual_seed(seed)
    preference_TE = torch.rand(tokens, num_experts, generator=generator, device=device)
    preference_TE -= hot * torch.arange(num_experts, device=device) / num_experts
    return preference_TE.topk(top_k, dim=1).indices


def busiest(topk_ids_TK: torch.Tensor, num_experts: int, ep_size: int, group=None) -> dict[str, float]:  # noqa: N803
    """Rows of the busiest expert and of the busiest rank, in units of an even share, over the tokens of all ranks."""
    rows_E = torch.bincount(topk_ids_TK.view(-1), minlength=num_experts)
    if group is not None:
        dist.all_reduce(rows_E, group=group)
    rows_P = rows_E.view(ep_size, -1).sum(dim=1)
    return {name: (rows.max() / rows.double().mean()).item() for name, rows in (("expert", rows_E), ("rank", rows_P))}


def measure_point(point: dict, shape, ep_size: int, group, timing, seed: int) -> dict:
    """``{"busiest": ..., "results": ...}``: how uneven the routing is, and times by implementation; an error in the place of those that
    could not run."""
    from . import layer

    # The compiler counts recompilations for each function, and after 8 shapes quietly runs it eagerly: that would be measured
    # under the name "compiled".
    torch._dynamo.reset()
    shape = replace(shape, num_experts=point["num_experts"], top_k=point["top_k"])
    inputs = layer.make_inputs(shape, point["tokens"], ep_size, seed, point["workload"])
    if point.get("hot"):
        inputs.topk_ids_TK = hot_routing(
            point["tokens"],
            shape.num_experts,
            shape.top_k,
            point["hot"],
            seed=seed,
            device=inputs.x_TD.device,
        )
    results = {}
    for name, implementation in layer.implementations(shape, inputs, group).items():
        if name not in MEASURED:
            continue
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            results[name] = layer.measure(implementation, inputs, timing)
        except Exception as error:  # a point without a time, not the end of the sweep
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return {"busiest": busiest(inputs.topk_ids_TK, shape.num_experts, ep_size, group), "results": results}


def imbalance(report: dict, name: str) -> list[tuple[float, float, str]]:
    """Of the points that vary how uneven the routing is: rows of the busiest rank in units of an even share, ms of implementation
    ``name``, and what the point is. Sorted."""
    found = []
    for entry in report["points"]:
        ms = entry["results"].get(name, {}).get("forward_and_backward", {}).get("median")
        if entry["axis"] in ("hot", "workload") and "busiest" in entry and ms is not None:
            found.append((entry["busiest"]["rank"], ms, f"{entry['axis']} {entry['point'][entry['axis']]}"))
    return sorted(found)


def cliffs(report: dict, *, tolerance: float = CLIFF_TOLERANCE) -> list[str]:
    """Where the routing costs more than its imbalance explains: more than ``tolerance`` times the time of the most even point, scaled by
    the busiest rank's rows."""
    found = []
    for name in MEASURED:
        points = imbalance(report, name)
        for share, ms, what in points[1:]:
            explained = points[0][1] * share / points[0][0]
            if ms > tolerance * explained:
                found.append(
                    f"{name}, {what}: {ms:.2f} ms, where {share:.2f} of an even share explains {explained:.2f}"
                )
    return found


def plot(report: dict, path: Path) -> None:
    """Forward and backward together, one panel for each axis and one for imbalance. ``report``: what :func:`main` writes as JSON."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = [axis for axis in AXES if any(p["axis"] == axis for p in report["points"])]
    uneven = {name: points for name in MEASURED if (points := imbalance(report, name))}
    num_panels = len(axes) + bool(uneven)
    figure, panels = plt.subplots(1, num_panels, figsize=(5 * num_panels, 4.5), squeeze=False)
    for name, points in uneven.items():
        shares, times = [p[0] for p in points], [p[1] for p in points]
        (line,) = panels[0][-1].plot(shares, times, "o", label=name)
        explained = [times[0] * share / shares[0] for share in shares]
        panels[0][-1].plot(
            shares, explained, "--", color=line.get_color(), linewidth=1, label="in proportion to the rows"
        )
        panels[0][-1].set(
            xlabel="rows of the busiest rank / an even share", ylabel="forward and backward, ms", ylim=(0, None)
        )
        panels[0][-1].legend(fontsize=7)
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
        elif axis == "hot":
            panel.set_ylim(bottom=0)
        else:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(x, map(str, x))
        panel.set_xlabel(AXIS_LABELS.get(axis, axis))
        panel.set_ylabel("forward and backward, ms")
        panel.legend(fontsize=7)
    figure.suptitle(f"{report['shape_name']}, EP = {report['ep_size']}, {report['environment']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _numbers(text: str) -> list[int]:
    """Of a command-line option: positive, separated by commas."""
    numbers = [int(word) for word in text.split(",") if word]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: pass numbers of at least 1, separated by commas")
    return numbers


def _factors(text: str) -> list[float]:
    factors = [float(word) for word in text.split(",") if word]
    if not all(0 <= factor < float("inf") for factor in factors):
        raise argparse.ArgumentTypeError(f"{text}: pass numbers of at least 0, separated by commas")
    return factors


def _workloads(text: str) -> list[str]:
    names = [word for word in text.split(",") if word]
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name} is not one of: {', '.join(WORKLOADS)}")
    return names


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
    parser.add_argument(
        "--hot", type=_factors, default=[0.0, 0.25, 0.5, 1.0, 2.0], help="0: all experts equally likely"
    )
    parser.add_argument(
        "--workloads", type=_workloads, default=list(WORKLOADS), help="of titan_megamoe/bench/workloads.py"
    )
    parser.add_argument("--base_tokens", type=int, default=16384, help="while others are varied (default: %(default)s)")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose roofline (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot goes beside it")
    arguments = parser.parse_args()
    from . import layer
    from .environment import describe_environment

    if not torch.cuda.is_available():
        parser.exit(2, "titan_megamoe: the sweep times CUDA events, and torch sees no GPU.\n")
    group, ep_size, rank = None, int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ep_size > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl")
        group = dist.group.WORLD
    shape = layer.SHAPES[arguments.shape]
    base = dict(
        tokens=arguments.base_tokens, num_experts=shape.num_experts, top_k=shape.top_k, hot=0.0, workload="uniform"
    )
    values = dict(
        tokens=arguments.tokens,
        num_experts=[e for e in arguments.experts if e % ep_size == 0],
        top_k=arguments.top_k,
        hot=arguments.hot,
        workload=arguments.workloads,
    )
    if rank == 0:
        for experts in set(arguments.experts) - set(values["num_experts"]):
            print(f"--experts {experts}: left out, as {ep_size} ranks cannot share them evenly.", file=sys.stderr)
    timing = layer.Timing(warmup=arguments.warmup, repeats=arguments.repeats, pause_ms=0.0)
    report = {
        "command": " ".join(["python -m titan_megamoe.bench.sweep", *sys.argv[1:]]),
        "environment": describe_environment(),
        "shape_name": arguments.shape,
        "shape": asdict(shape),
        "ep_size": ep_size,
        "roofline_of": asdict(GPUS[arguments.gpu]),
        "repeats": arguments.repeats,
        "points": [],
        "cliffs": [],
    }
    for axis, point in points(base, values):
        sizes = (shape.dim, shape.hidden_dim, ep_size, arguments.gpu)
        entry = {
            "axis": axis,
            "point": point,
            "least_ms": {precision: least_ms(point, *sizes, precision) for precision in ("bf16", "fp8")},
        } | measure_point(point, shape, ep_size, group, timing, arguments.seed + rank)
        report["points"].append(entry)
        report["cliffs"] = cliffs(report)
        if rank == 0:
            print(
                axis, point, {name: r.get("forward_and_backward") for name, r in entry["results"].items()}, flush=True
            )
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            plot(report, arguments.out.with_suffix(".png"))
    if rank == 0:
        for cliff in report["cliffs"]:
            print(f"cliff: {cliff}", file=sys.stderr)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
