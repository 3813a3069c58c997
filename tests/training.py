"""Launch training runs with torchrun and collect what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[1]
DEBUG_CONFIG = str(REPOSITORY / "train_configs" / "qwen3_moe_debug.toml")


@dataclass
class Run:
    losses: dict[int, float]
    grad_norms: dict[int, float]
    gradients: dict[str, torch.Tensor]
    tokens_per_expert: list[torch.Tensor]
    expert_bias: list[torch.Tensor]


def options(assets: Path, dump_folder: Path, settings: dict) -> list[str]:
    """Command line of a debug run with ``settings`` on top, by their dotted keys; True and False stand for flags.

    The SPMD backend is ``partial_dtensor`` unless set: under the others, a process can train once only.
    """
    settings = {"parallelism.spmd_backend": "partial_dtensor", **settings}
    argv = ["--config", DEBUG_CONFIG, "--hf_assets_path", str(assets), "--dataloader.dataset_path", str(assets)]
    argv += ["--dump_folder", str(dump_folder), "--debug.no-enable_structured_logging"]
    for key, value in settings.items():
        if value is False:
            section, _, name = key.rpartition(".")
            argv.append(f"--{section}.no-{name}")
        else:
            argv += [f"--{key}", *([] if value is True else [str(value)])]
    return argv


def run_jobs(
    runs: list[list[str]],
    *,
    ranks: int,
    folder: Path,
    keep_gradients: bool = False,
    fp32: bool = False,
    one_gpu: bool = False,
) -> list[Run]:
    """Run each command line in turn on the same ``ranks`` processes; raises with their output if one fails.

    ``fp32`` computes everything in fp32, the experts' GEMMs too, so that runs can be compared closely. ``one_gpu``: all ranks
    share a GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fp32:
        runs = [[*argv, "--training.mixed_precision_param", "float32"] for argv in runs]
    jobs_file = folder / "jobs.json"
    jobs = {"runs": runs, "keep_gradients": keep_gradients, "fp32": fp32, "one_gpu": one_gpu}
    jobs_file.write_text(json.dumps(jobs))
    result = torchrun(ranks, str(REPOSITORY / "tests" / "training_worker.py"), str(jobs_file), str(folder))
    if result.returncode != 0:
        raise AssertionError(f"training failed:\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}")
    return [Run(**torch.load(folder / f"{index}.pt", weights_only=False)) for index in range(len(runs))]


def torchrun(ranks: int, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", *arguments]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, errors="replace"
    )
