"""Step times of whole training runs: stock TorchTitan, and our front end with each strategy, on the same model and data.

    python benchmarks/train_steps.py --config train_configs/qwen3_30b_a3b_6layers.toml --out docs/results/x.json \\
        --run stock --run all_to_all --run mega_moe [--compile] [--routing even] [--steps 20] [--nproc 1] [-- --section.key value]

What follows ``--`` overrides the TOML file in every run. Each run is a torchrun of its own. A step's time is the one TorchTitan
logs its tokens per second from; the mean is over steps 6 to the last, as the first ones compile and warm up. ``stock`` is TorchTitan's own entry point and Python configuration for
the same model, data, batch and checkpointing, to show that our front end costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from titan_megamoe.bench.environment import describe_environment  # noqa: E402
from titan_megamoe.bench.one_gpu import concurrent_kernels  # noqa: E402
from titan_megamoe.cli.compare import strategy_options  # noqa: E402

STEP = re.compile(
    r"step: *(\d+) .*?loss: *([\d.]+).*?grad_norm: *([\d.]+).*?memory: *([-\d.]+)GiB.*?tps: *([\d,]+).*?mfu: *([\d.]+)%"
)
FIRST_MEASURED_STEP = 6


def command(run: str, arguments: argparse.Namespace) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.nproc}"]
    torchrun += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local-ranks-filter=0"]
    common = ["--training.steps", str(arguments.steps), "--dump_folder", f"/tmp/train_steps/{run}"]
    common += ["--debug.no-enable_structured_logging", *(["--compile.enable"] if arguments.compile else [])]
    common += arguments.overrides
    if run == "stock":
        return [*torchrun, str(REPOSITORY / "benchmarks" / "stock_torchtitan.py"), arguments.config, *common]
    routing = ["--model.moe.force_load_balance", arguments.routing]
    module = "titan_megamoe.bench.one_gpu" if arguments.one_gpu else "titan_megamoe.train"
    return [*torchrun, "-m", module, "--config", arguments.config, *strategy_options(run), *routing, *common]


def measure(run: str, arguments: argparse.Namespace) -> dict:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}", "NO_COLOR": "1"}
    result = subprocess.run(
        command(run, arguments), cwd=REPOSITORY, env=environment, capture_output=True, text=True, errors="replace"
    )
    output = re.sub(r"\x1b\[[\d;]*m", "", result.stdout + result.stderr)
    steps = {int(m[1]): m for m in STEP.finditer(output)}
    if result.returncode != 0 or not steps:
        return {"error": output[-2000:]}
    tokens_per_step = int(re.search(r"local batch size (\d+)", output)[1]) * int(
        re.search(r"sequence length (\d+)", output)[1]
    )
    seconds = [tokens_per_step / float(m[5].replace(",", "")) for n, m in steps.items() if n >= FIRST_MEASURED_STEP]
    return {
        "seconds_per_step": statistics.mean(seconds),
        "seconds_per_step_min": min(seconds),
        "seconds_per_step_max": max(seconds),
        "tokens_per_second_per_gpu": tokens_per_step / statistics.mean(seconds),
        "peak_memory_gib": max(float(m[4]) for m in steps.values()),
        "losses": {n: float(m[2]) for n, m in steps.items()},
        "grad_norms": {n: float(m[3]) for n, m in steps.items()},
        "backend": re.findall(r"mega_moe: backend '(\w+)'", output)[:1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="TOML file")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument(
        "--run",
        action="append",
        required=True,
        help="'stock', a strategy, mega_moe:precision, or another strategy:converter; repeat for several",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--routing", default="uniform", choices=["none", "even", "uniform"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--one_gpu", action="store_true", help="all ranks share one GPU: losses count, times do not")
    parser.add_argument("overrides", nargs="*", help="after --: options of titan_megamoe.train")
    arguments = parser.parse_args()
    results = {}
    for run in arguments.run:
        with (
            tempfile.TemporaryDirectory() as folder,
            concurrent_kernels(folder) if arguments.one_gpu else nullcontext(),
        ):
            results[run] = measure(run, arguments)
        print(run, {k: v for k, v in results[run].items() if k not in ("losses", "grad_norms")}, flush=True)
        document = {
            "command": " ".join(["python", "benchmarks/train_steps.py", *sys.argv[1:]]),
            "environment": describe_environment(),
            "config": arguments.config,
            "routing": arguments.routing,
            "compile": arguments.compile,
            "measured_steps": [FIRST_MEASURED_STEP, arguments.steps],
            "runs": results,
        }
        if arguments.one_gpu:
            document["remark"] = "All ranks share one GPU: losses count, times do not"
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
