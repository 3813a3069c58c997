"""Training that is killed again and again, beside the same training left alone: the losses must be equal, the memory flat.

    python -m titan_megamoe.bench.soak --config train_configs/qwen3_moe_debug.toml --out docs/results/cpu_soak.json \\
        [--steps 2000] [--interval 100] [--kills 20] [--seed 0] [--nproc 2] [--one_gpu] [--folder /tmp/x] [-- --section.key value ...]

Both runs are torchruns of ``titan_megamoe.train``. The disturbed one loses a random rank to SIGKILL ``--kills`` times, each a
random number of steps after it (re)started; every second time the kill waits for the next checkpoint, and comes while that is
being written. It is then started again, with the same command, and resumes by itself. What follows ``--`` overrides the
TOML file in both runs.

Exits with 1 if a loss differs by more than ``--tolerance``, a kill did not end the job, or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

END_SECONDS = 90
"""How long the other ranks and the launcher may take to end after a rank was killed."""

GROWTH_MIB = 64
"""By how much a rank's memory in the last quarter of a run may exceed that in its second quarter, both in the mean."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run."""

    config: str
    steps: int
    interval: int
    """Steps from one checkpoint to the next."""
    kills: int
    seed: int
    nproc: int
    one_gpu: bool
    overrides: list[str]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL, and what came of it."""

    rank: int
    after_step: int
    """The last step that the run had finished."""
    seconds_to_end: float
    """Until the launcher had ended, and with it all ranks."""
    exit_code: int
    incomplete_checkpoints: list[str]
    """That lay in the folder afterwards, and why each is incomplete."""


# ---- the driver


def soak(plan: Plan, folder: Path) -> dict:
    """Run both trainings below ``folder``, which must be empty. Returns what :func:`main` writes, without the command.

    Raises:
        RuntimeError: a run ended by itself with an error, or a rank outlived its launcher.
    """
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    started = time.monotonic()
    _train_to_the_end(plan, undisturbed)
    seconds = {"undisturbed": time.monotonic() - started}
    started = time.monotonic()
    kills = _train_with_kills(plan, disturbed)
    seconds["disturbed"] = time.monotonic() - started
    return {
        "plan": asdict(plan),
        "seconds": seconds,
        "kills": [asdict(kill) for kill in kills],
        "memory": {rank: memory_growth(read_records(undisturbed, rank)) for rank in range(plan.nproc)},
        **compare_losses(read_records(undisturbed, 0), read_records(disturbed, 0)),
    }


def _train_to_the_end(plan: Plan, folder: Path) -> None:
    with _training(plan, folder) as process:
        code = process.wait()
    if code != 0:
        raise RuntimeError(f"the training in {folder} ended with code {code}; see {folder / 'log.txt'}")


def _train_with_kills(plan: Plan, folder: Path) -> list[Kill]:
    generator, kills = random.Random(plan.seed), []
    for number in range(plan.kills):
        steps = generator.randint(1, max(1, 2 * plan.steps // (plan.kills + 1)))
        rank = generator.randrange(plan.nproc)
        kill = _kill_once(plan, folder, rank, steps, generator.uniform(0, 0.05), in_checkpoint=number % 2 == 1)
        if kill is None:  # it reached the last step before
            return kills
        kills.append(kill)
        print(f"kill {number + 1} of {plan.kills}: {kill}", flush=True)
    _train_to_the_end(plan, folder)
    return kills


def _kill_once(plan: Plan, folder: Path, rank: int, steps: int, delay: float, *, in_checkpoint: bool) -> Kill | None:
    """Train for ``steps`` steps, until the next checkpoint is being written if ``in_checkpoint``, and ``delay`` seconds; then kill."""
    with _training(plan, folder) as process:
        first, last = None, 0
        while process.poll() is None:
            time.sleep(0.005)
            record = _last_record(folder, rank)
            if record is None or record["launcher"] != process.pid:
                continue  # of an earlier start
            last = record["step"]
            first = last if first is None else first
            checkpoint = folder / "checkpoint" / f"step-{last}"
            is_writing = last % plan.interval == 0 and checkpoint.is_dir() and not (checkpoint / ".metadata").exists()
            if last >= first + steps and (is_writing or not in_checkpoint):
                break
        else:
            if process.returncode != 0:
                raise RuntimeError(
                    f"the training in {folder} ended with {process.returncode}; see {folder / 'log.txt'}"
                )
            return None
        time.sleep(delay)
        pids = [read_records(folder, r)[-1]["pid"] for r in range(plan.nproc)]
        os.kill(pids[rank], signal.SIGKILL)
        started = time.monotonic()
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{END_SECONDS} s after rank {rank} was killed, its launcher had not ended") from None
        seconds = time.monotonic() - started
        outlived = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if outlived:
            raise RuntimeError(f"ranks outlived their launcher: process ids {outlived}")
        return Kill(
            rank=rank,
            after_step=last,
            seconds_to_end=seconds,
            exit_code=code,
            incomplete_checkpoints=_incomplete(folder / "checkpoint"),
        )


def _incomplete(checkpoints: Path) -> list[str]:
    from ..integration.checkpoints import find_missing_part

    found = {path.name: find_missing_part(path) for path in sorted(checkpoints.glob("step-*"))}
    return [f"{name}: {missing}" for name, missing in found.items() if missing]


@contextlib.contextmanager
def _training(plan: Plan, folder: Path) -> Iterator[subprocess.Popen]:
    """torchrun of a training in ``folder``, which is ended with its ranks if it still runs when this is left."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={plan.nproc}"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", __spec__.name, "--rank_of", str(folder)]
    command += ["--one_gpu"] * plan.one_gpu + ["--", "--config", plan.config, "--dump_folder", str(folder)]
    settings = {
        "training.steps": plan.steps,
        "checkpoint.folder": "checkpoint",
        "checkpoint.interval": plan.interval,
        "metrics.log_freq": 1,
    }
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command += ["--checkpoint.enable", "--checkpoint.no-last_save_model_only", "--debug.no-enable_structured_logging"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "NO_COLOR": "1"}
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            [*command, *plan.overrides], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # which it passes on to the ranks
            process.wait(END_SECONDS)


def read_records(folder: Path, rank: int) -> list[dict]:
    """What a rank recorded, over all starts. A line that a kill cut off, the last of its start, is left out."""
    path = folder / f"rank{rank}.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _last_record(folder: Path, rank: int) -> dict | None:
    """Without reading all of them: the driver asks often."""
    path = folder / f"rank{rank}.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):  # it is being written
        return None


def compare_losses(undisturbed: list[dict], disturbed: list[dict]) -> dict:
    """Over every record of every step, repeated ones included."""
    expected = {record["step"]: record for record in undisturbed}
    pairs = [(record, expected[record["step"]]) for record in disturbed]
    return {
        "losses": {step: record["loss"] for step, record in expected.items()},
        "steps_missing": sorted(set(expected) - {record["step"] for record in disturbed}),
        "steps_computed_again": len(disturbed) - len({record["step"] for record in disturbed}),
        "largest_loss_difference": max((abs(a["loss"] - b["loss"]) for a, b in pairs), default=0.0),
        "records_bitwise_equal": sum(a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] for a, b in pairs),
        "records_compared": len(pairs),
    }


def memory_growth(records: list[dict]) -> dict[str, dict[str, float]]:
    """MiB in a run's second and in its last quarter, in the mean, and their difference: the first quarter warms up."""
    quarter = max(1, len(records) // 4)
    found = {}
    for kind in ("host_mib", "device_mib"):
        second, last = (
            sum(record[kind] for record in part) / len(part)
            for part in (records[quarter : 2 * quarter] or records, records[-quarter:])
        )
        found[kind] = {"second_quarter": second, "last_quarter": last, "growth": last - second}
    return found


def failures(document: dict, tolerance: float) -> list[str]:
    """What is wrong with a result of :func:`soak`, in words."""
    found = []
    if document["steps_missing"]:
        found.append(f"steps that the disturbed run never did: {document['steps_missing']}")
    if document["largest_loss_difference"] > tolerance:
        found.append(f"losses differ by up to {document['largest_loss_difference']}")
    found += [
        f"the launcher said 0 after rank {k['rank']} was killed" for k in document["kills"] if k["exit_code"] == 0
    ]
    for rank, kinds in document["memory"].items():
        for kind, values in kinds.items():
            if values["growth"] > GROWTH_MIB:
                found.append(f"rank {rank}: {kind} grew by {values['growth']:.0f}")
    return found


# ---- a rank


def train_recorded(folder: Path) -> None:
    """Train as ``titan_megamoe.train`` does, and append a line to ``rank<n>.jsonl`` after each step."""
    from .. import train  # first of all: it prepares torch for TorchTitan
    from ..integration.trainer import MegaMoETrainer

    import torch

    rank, launcher = int(os.environ["RANK"]), os.getppid()
    run = MegaMoETrainer.train

    def recording(trainer: MegaMoETrainer) -> None:
        log = trainer.metrics_processor.log

        def recording_log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs) -> None:
            on_gpu = torch.cuda.is_available()
            record = {
                "step": step,
                "loss": global_avg_loss,
                "grad_norm": grad_norm,
                "host_mib": _resident_mib(),
                "device_mib": torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0,
                "pid": os.getpid(),
                "launcher": launcher,
            }
            with (folder / f"rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs)

        trainer.metrics_processor.log = recording_log
        run(trainer)

    MegaMoETrainer.train = recording
    train.main()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="TOML file")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--one_gpu", action="store_true", help="all ranks share one GPU")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of losses (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="empty folder for checkpoints and logs (default: a temporary one)")
    parser.add_argument("--rank_of", type=Path, help=argparse.SUPPRESS)  # how a rank of the soak is started
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    arguments, overrides = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if arguments.rank_of is not None:
        if arguments.one_gpu:
            from . import one_gpu

            os.environ.update(one_gpu.environment(int(os.environ["RANK"])))
        sys.argv = [sys.argv[0], *overrides]
        train_recorded(arguments.rank_of)
        return
    if arguments.config is None or arguments.out is None:
        parser.error("--config and --out are needed")
    if arguments.folder is not None and arguments.folder.exists() and any(arguments.folder.iterdir()):
        parser.error(f"--folder {arguments.folder} is not empty: a run would resume what is there")
    from .environment import describe_environment

    plan = Plan(
        overrides=overrides,
        **{n: getattr(arguments, n) for n in ("config", "steps", "interval", "kills", "seed", "nproc", "one_gpu")},
    )
    # On one GPU without the multi-process service, which would lose the other ranks, too, when one is killed.
    with tempfile.TemporaryDirectory() as temporary:
        result = soak(plan, arguments.folder or Path(temporary) / "soak")
    document = {
        "command": " ".join(["python -m titan_megamoe.bench.soak", *sys.argv[1:]]),
        "environment": describe_environment(),
        **result,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    wrong = failures(document, arguments.tolerance)
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
