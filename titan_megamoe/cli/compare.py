"""Train one configuration with several strategies: which is faster, by how much, how sure is that, and do the losses agree?

    titan-megamoe compare --config train_configs/x.toml --strategies all_to_all,mega_moe,mega_moe:fp8 [--section.key value ...]

The first strategy is what the others are compared with. All runs start from the same weights and see the same tokens; they take
turns (A B A B), each in processes of its own. What does not run here becomes a row with the reason. Ctrl-C ends with a report on
what is finished, and --resume goes on from there. Options that this command does not know override the TOML file in every run.

Exit code 0: everything ran or said why not, and the losses agree.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from .compare_report import Comparison, Finished, Refused, render_markdown, render_terminal, write_plots
from .configuration import check_is_file, load_configuration
from ..config.sections import PRECISION_NAMES, STRATEGY_NAMES

TAKES_OVERRIDES = True

MAY_CHANGE = {"strategies", "repeats"}
"""Settings with which --resume may go on: they only say how many runs there are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="TOML file")
    parser.add_argument(
        "--strategies",
        default="all_to_all,mega_moe",
        help="comma-separated: a strategy, mega_moe:precision, or another strategy:converter of TorchTitan's. The first is the "
        "baseline (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc", type=int, help="ranks on this machine (default: its GPUs, or else the expert-parallel degree)"
    )
    parser.add_argument("--steps", default="6-20", help="first and last step to measure (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each strategy (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for runs and report (default: outputs/compare/NAME_OF_CONFIG)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished runs in --out; only run what is missing"
    )
    parser.add_argument(
        "--no_seed_checkpoint",
        action="store_true",
        help="let each run initialise its weights from the same seed instead of loading one checkpoint: saves time and disk",
    )
    parser.add_argument(
        "--loss_tolerance",
        type=float,
        default=0.01,
        help="largest relative difference between mean losses over the measured steps that is still agreement",
    )
    parser.add_argument(
        "--launch",
        help="command that starts the ranks, instead of torchrun on this machine; '-m module arguments' is put after it. For "
        "several nodes: 'srun --ntasks-per-node=1 torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d "
        "--rdzv_endpoint=HOST:29500'. --out must then be on a file system that all nodes share",
    )


def run(arguments: argparse.Namespace) -> int:
    first_step, last_step = parse_steps(arguments.steps)
    specs = parse_strategies(arguments.strategies)
    if arguments.repeats < 1:
        raise ValueError(f"--repeats {arguments.repeats}: pass at least 1.")
    check_is_file(arguments.config)
    out = (arguments.out or Path("outputs/compare") / arguments.config.stem).absolute()
    runner = Runner(arguments, out=out, last_step=last_step)
    settings = runner.settings(specs)
    prepare_folder(out, settings, resume=arguments.resume)
    comparison = Comparison(
        settings=settings, specs=specs, first_step=first_step, last_step=last_step, tolerance=arguments.loss_tolerance
    )
    try:
        if not arguments.no_seed_checkpoint:
            runner.make_seed_checkpoint()
        for repeat in range(arguments.repeats):
            for spec in specs:
                if not isinstance(comparison.outcomes.get((spec, 0)), Refused):  # it would be refused again
                    comparison.outcomes[spec, repeat] = runner.train(spec, repeat)
                    comparison.write_json(out / "report.json")
    except KeyboardInterrupt:
        comparison.interrupted = True
        print(
            "\ntitan-megamoe compare: interrupted. The report has what was finished; --resume goes on.", file=sys.stderr
        )
    comparison.write_json(out / "report.json")
    plots = write_plots(comparison, out)
    (out / "report.md").write_text(render_markdown(comparison, plots))
    render_terminal(comparison)
    print(f"report: {out / 'report.md'}; TensorBoard: tensorboard --logdir {out / 'tensorboard'}")
    return 0 if comparison.losses_agree and not comparison.interrupted and not comparison.crashed else 1


# ---- arguments


def parse_steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 1 <= int(first) < int(last)):
        raise ValueError(f"--steps {text}: pass the first and the last step to measure, such as 6-20.")
    return int(first), int(last)


def parse_strategies(text: str) -> list[str]:
    specs = [spec.strip() for spec in text.split(",") if spec.strip()]
    if not specs or len(set(specs)) != len(specs):
        raise ValueError(f"--strategies {text}: pass each strategy once, separated by commas.")
    for spec in specs:
        name, _, rest = spec.partition(":")
        if name not in STRATEGY_NAMES:
            raise ValueError(f"--strategies: '{name}' is not one of {', '.join(STRATEGY_NAMES)}.")
        if name == "mega_moe" and rest and rest not in PRECISION_NAMES:
            raise ValueError(f"--strategies: '{rest}' in '{spec}' is not one of {', '.join(PRECISION_NAMES)}.")
    return specs


def strategy_options(spec: str) -> list[str]:
    """Options of ``titan_megamoe.train`` for ``strategy``, ``mega_moe:precision`` or ``strategy:converter``."""
    name, _, rest = spec.partition(":")
    options = ["--model.moe.dispatch.type", name]
    if name == "mega_moe":
        options += ["--model.moe.dispatch.precision", rest or "bf16"]
    else:
        options += ["--model.moe.dispatch.precision", "bf16", *(["--model.converters", rest] if rest else [])]
    return options


def prepare_folder(out: Path, settings: dict, *, resume: bool) -> None:
    """Make ``out``, or check that what is there was measured with the same settings."""
    stored = out / "settings.json"
    if stored.exists():
        before = json.loads(stored.read_text())
        if not resume:
            raise ValueError(
                f"--out {out} holds an earlier comparison. Pass --resume to go on with it, or another --out."
            )
        changed = sorted(key for key in {*before, *settings} - MAY_CHANGE if before.get(key) != settings.get(key))
        if changed:
            raise ValueError(
                f"--resume: {out} was measured with {changed[0]} = {before.get(changed[0])!r}, not "
                f"{settings.get(changed[0])!r}. Use the same, or another --out."
            )
    out.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(settings, indent=1) + "\n")


# ---- runs


@dataclass
class Runner:
    """Starts the runs of a comparison, one after the other."""

    arguments: argparse.Namespace
    out: Path
    last_step: int

    def settings(self, specs: list[str]) -> dict:
        """What must be the same for runs to be compared."""
        return {
            "config": str(self.arguments.config),
            "config_text": self.arguments.config.read_text(),
            "overrides": self.arguments.overrides,
            "strategies": specs,
            "repeats": self.arguments.repeats,
            "ranks": self.arguments.launch or self.nproc,
            "last_step": self.last_step,
            "seed_checkpoint": not self.arguments.no_seed_checkpoint,
        }

    @functools.cached_property
    def nproc(self) -> int:
        if self.arguments.nproc:
            return self.arguments.nproc
        import torch  # only now: --help should not wait for it

        if torch.cuda.device_count():
            return torch.cuda.device_count()
        config = load_configuration(self.arguments.config, self.arguments.overrides)
        return config.parallelism.expert_parallel_degree

    @property
    def _seed_folder(self) -> Path:
        return self.out / "seed"

    def make_seed_checkpoint(self) -> None:
        """The weights that every run starts from, unless they are there already."""
        if (self._seed_folder / "checkpoint" / "step-0" / ".metadata").exists():
            return
        print("seed checkpoint: initialising the weights", flush=True)
        degrees = (
            "expert_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "data_parallel_replicate",
        )
        one_rank = [word for name in degrees for word in (f"--parallelism.{name}_degree", "1")]
        command = [*self._torchrun(1), "-m", "titan_megamoe.train", "--config", str(self.arguments.config)]
        command += [*self.arguments.overrides, *strategy_options("all_to_all"), *one_rank]
        command += [
            "--checkpoint.enable",
            "--checkpoint.create_seed_checkpoint",
            "--dump_folder",
            str(self._seed_folder),
        ]
        command += ["--checkpoint.folder", "checkpoint"]
        code, log = self._start(command, self.out / "seed.log", "seed checkpoint")
        if code != 0:
            raise ValueError(f"the seed checkpoint could not be made (see {self.out / 'seed.log'}): {_reason(log)}")

    def train(self, spec: str, repeat: int) -> Finished | Refused:
        name = f"{spec.replace(':', '_')}_{repeat + 1}"
        folder = self.out / "runs" / name
        result = folder / "result.json"
        if not result.exists():
            folder.mkdir(parents=True, exist_ok=True)
            code, log = self._start(self._command(spec, folder, result), folder / "log.txt", name)
            if not result.exists():
                is_refusal = any(line.startswith("titan_megamoe: ") for line in log)
                return Refused(reason=_reason(log), crashed=not is_refusal, log=str(folder / "log.txt"))
        return Finished(**json.loads(result.read_text()))

    def _command(self, spec: str, folder: Path, result: Path) -> list[str]:
        launch = shlex.split(self.arguments.launch) if self.arguments.launch else self._torchrun(self.nproc)
        command = [*launch, "-m", "titan_megamoe.bench.measured_train", str(result)]
        command += ["--config", str(self.arguments.config), *self.arguments.overrides, *strategy_options(spec)]
        # One step more than is measured: it runs under the profiler.
        command += [
            "--training.steps",
            str(self.last_step + 1),
            "--metrics.log_freq",
            "1",
            "--dump_folder",
            str(folder),
        ]
        tensorboard = os.path.relpath(self.out / "tensorboard" / folder.name, folder)
        command += ["--metrics.enable_tensorboard", "--metrics.save_tb_folder", tensorboard]
        if self.arguments.no_seed_checkpoint:
            return [*command, "--checkpoint.no-enable"]
        seed = self._seed_folder / "checkpoint" / "step-0"
        command += ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed)]
        return [*command, "--checkpoint.folder", "checkpoint"]

    def _torchrun(self, nproc: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nproc}"]
        return [*torchrun, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]

    def _start(self, command: list[str], log_file: Path, name: str) -> tuple[int, list[str]]:
        """Run ``command``, with its output in ``log_file`` and its steps on the terminal. Returns its exit code and last lines."""
        defaults = {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as in run_train.sh
        environment = {**defaults, **os.environ, "NO_COLOR": "1"}
        started = time.monotonic()
        last_lines: deque[str] = deque(maxlen=200)
        with log_file.open("w") as log:
            log.write(shlex.join(command) + "\n")
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # or Ctrl-C would reach the ranks before torchrun
            )
            try:
                for line in process.stdout:
                    log.write(line)
                    last_lines.append(line.rstrip())
                    if "step:" in line:
                        step = line.split("step:", 1)[1].split("loss:")[0].strip()
                        _progress(f"{name}: step {step} of {self.last_step + 1}, {time.monotonic() - started:.0f} s")
                code = process.wait()
            except BaseException:
                _stop(process)
                raise
        _progress(
            f"{name}: {'done' if code == 0 else f'ended with code {code}'} after {time.monotonic() - started:.0f} s\n"
        )
        return code, list(last_lines)


def _stop(process: subprocess.Popen) -> None:
    """End a launcher and the ranks that it started, gently first."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _progress(text: str) -> None:
    """Overwrite the terminal's line; in a log file, only the ends of runs."""
    if sys.stdout.isatty():
        print(f"\r\x1b[2K{text}", end="", flush=True)
    elif text.endswith("\n"):
        print(text, end="", flush=True)


def _reason(log: list[str]) -> str:
    """Why a run ended: our own error, or the last exception in its output."""
    own = [line.removeprefix("titan_megamoe: ") for line in log if line.startswith("titan_megamoe: ")]
    if own:
        return own[-1]
    errors = [line.split("]:", 1)[-1].strip() for line in log if "Error" in line and "torch/distributed" not in line]
    return errors[-1] if errors else (log[-1] if log else "it wrote nothing")
