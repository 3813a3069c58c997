"""``titan-megamoe compare``: its statistics and verdicts on made-up runs, and the whole command on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from tests.training import DEBUG_CONFIG, REPOSITORY
from titan_megamoe.bench import breakdown
from titan_megamoe.cli import compare, compare_report
from titan_megamoe.cli.compare_report import Comparison, Finished, Refused, speed_ratio
from titan_megamoe.cli.main import main

# ---- statistics


def made_up_run(seconds: float, losses: list[float], noise: float = 0.01) -> Finished:
    steps = {
        str(step): {
            compare_report.LOSS: loss,
            compare_report.GRAD_NORM: 1.0 + step / 10,
            compare_report.SECONDS: 9.0 if step < 3 else seconds * (1 + noise * (-1) ** step),  # warm-up is slow
            compare_report.TOKENS: 100 / seconds,
            compare_report.MEMORY: 2.0,
        }
        for step, loss in enumerate(losses, start=1)
    }
    return Finished(
        steps=steps, breakdown={"attention": 1.0}, environment={"gpu": "none"}, world_size=1, tokens_per_step=100
    )


LOSSES = [7.0, 6.0, 5.0, 4.0, 3.5, 3.0]


def comparison_of(outcomes: dict) -> Comparison:
    specs = list(dict.fromkeys(spec for spec, _ in outcomes))
    settings = dict(config="x.toml", overrides=[], ranks=1, seed_checkpoint=True, repeats=2)
    return Comparison(settings=settings, specs=specs, first_step=3, last_step=6, tolerance=0.01, outcomes=outcomes)


def test_speed_is_the_ratio_of_mean_step_times_of_measured_steps():
    comparison = comparison_of(
        {(spec, r): made_up_run(seconds, LOSSES) for spec, seconds in (("a", 1.0), ("b", 0.5)) for r in range(2)}
    )
    row = comparison.rows[1]
    assert row.seconds == pytest.approx(0.5) and row.speed.value == pytest.approx(2.0)
    assert 1.9 < row.speed.low < 2.0 < row.speed.high < 2.1
    assert "b is 2.000x as fast as a" in compare_report.verdict(comparison)[0]
    assert row.memory_gib == 2.0 and row.tokens_per_second == pytest.approx(200) and row.mfu is None


def test_runs_that_differ_from_start_to_start_make_the_interval_wide():
    steady = speed_ratio([[1.0] * 10] * 3, [[0.9] * 10] * 3)
    unsteady = speed_ratio([[0.7] * 10, [1.0] * 10, [1.3] * 10], [[0.9] * 10] * 3)
    assert steady.low == steady.high == pytest.approx(1 / 0.9)
    assert unsteady.low < 0.95 and unsteady.high > 1.25
    assert speed_ratio([[1.0, 2.0]], [[1.0, 2.0]]) == speed_ratio([[1.0, 2.0]], [[1.0, 2.0]]), "draws are reproducible"


def test_what_cannot_be_told_apart_is_not_called_faster():
    outcomes = {("a", 0): made_up_run(1.0, LOSSES, noise=0.2), ("b", 0): made_up_run(0.99, LOSSES, noise=0.2)}
    assert "b cannot be told from a" in compare_report.verdict(comparison_of(outcomes))[0]


def test_what_is_slower_is_called_so():
    outcomes = {("a", 0): made_up_run(0.5, LOSSES), ("b", 0): made_up_run(1.0, LOSSES)}
    assert "b is slower than a: 0.500x" in compare_report.verdict(comparison_of(outcomes))[0]


def test_what_a_row_says_of_its_runs():
    one, other = made_up_run(1.0, LOSSES), made_up_run(1.0, [*LOSSES[:-1], 3.03])
    one.steps["1"][compare_report.MEMORY] = 3.0
    for run, mfu in ((one, 40.0), (other, 44.0)):
        run.steps["4"][compare_report.MFU] = mfu
    one.breakdown["idle"] = 4.0
    again, same = comparison_of({("a", 0): one, ("a", 1): other, ("b", 0): one, ("b", 1): one}).rows
    assert again.memory_gib == 3.0 and again.mfu == 42.0 and again.breakdown == {"attention": 1.0, "idle": 2.0}
    assert not again.repeats_itself and again.own_loss_difference == pytest.approx(0.03 / 15.5, rel=0.01)
    assert same.repeats_itself and same.own_loss_difference == 0
    (_, apart) = comparison_of({("a", 0): one, ("b", 0): other}).rows
    assert apart.worst_loss_difference == pytest.approx(0.01) and apart.worst_grad_norm_difference == 0


def test_nothing_that_ran_is_no_agreement():
    comparison = comparison_of({("a", 0): Refused(reason="no", crashed=False, log="log.txt")})
    assert not comparison.losses_agree and compare_report.verdict(comparison) == ["Nothing ran to its end."]


@pytest.mark.parametrize(
    "losses, agrees",
    [
        (LOSSES, True),
        ([7.0, 6.0, 5.02, 3.98, 3.5, 3.0], True),  # single steps may differ
        ([7.1, *LOSSES[1:]], False),  # from other weights or other data
        ([7.0, 6.0, 5.2, 4.2, 3.7, 3.2], False),
        ([7.0, 6.0, 5.0, float("nan"), 3.5, 3.0], False),
    ],
)
def test_losses_agree(losses, agrees):
    comparison = comparison_of({("a", 0): made_up_run(1.0, LOSSES), ("b", 0): made_up_run(1.0, losses)})
    assert comparison.losses_agree == agrees == comparison.rows[1].agrees
    assert ("LOSSES DO NOT AGREE" in compare_report.verdict(comparison)[0]) != agrees
    assert "NO" in compare_report.render_markdown(comparison, []) or agrees


def test_a_baseline_that_does_not_repeat_itself_is_named():
    drifted = [*LOSSES[:2], *(1.2 * loss for loss in LOSSES[2:])]
    outcomes = {("a", 0): made_up_run(1.0, LOSSES), ("a", 1): made_up_run(1.0, drifted)}
    comparison = comparison_of(outcomes | {("b", r): made_up_run(1.0, LOSSES) for r in range(2)})
    baseline, row = comparison.rows
    assert baseline.own_loss_difference == pytest.approx(0.2) and not baseline.repeats_itself
    assert row.own_loss_difference == 0 and row.repeats_itself and not row.agrees and not comparison.losses_agree
    assert "The runs of a itself are 20.00% apart" in compare_report.verdict(comparison)[1]
    report = compare_report.render_markdown(comparison, [])
    assert "| 2.0e-01 apart |" in report and "| equal |" in report
    steady = comparison_of({(spec, r): made_up_run(1.0, LOSSES) for spec in "ab" for r in range(2)})
    assert len(compare_report.verdict(steady)) == 1


def test_what_did_not_run_is_a_row_with_the_reason(capsys):
    refused = Refused(reason="it needs | a GPU", crashed=False, log="log.txt")
    comparison = comparison_of({("deepep", 0): refused, ("a", 0): made_up_run(1.0, LOSSES)})
    assert comparison.baseline == "a" and not comparison.crashed and comparison.losses_agree
    assert "| deepep | cannot run here: it needs / a GPU |" in compare_report.render_markdown(comparison, [])
    compare_report.render_terminal(comparison)
    assert "deepep cannot run here: it needs | a GPU" in capsys.readouterr().out
    assert json.loads(json.dumps(compare_report.to_json(comparison)))["refused"]["deepep"]["reason"] == refused.reason


# ---- the breakdown


def event(name: str, start: float, end: float, device=DeviceType.CUDA):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=device, time_range=span, self_cpu_time_total=end - start)


def test_breakdown_of_a_gpu_step():
    events = [
        event("mega_moe: pull_gemm", 0, 100),
        event("pull_gemm_kernel", 10, 90),
        event("some_gemm", 100, 200),
        event("ncclDevKernel_AllGather", 150, 300),  # from 200 on nothing hides it
        event("flash_fwd", 400, 450),
        event("optimizer", 500, 600),
        event("an_elementwise_kernel", 510, 590),
        event("aten::mm", 0, 1000, DeviceType.CPU),
    ]
    parts = breakdown.summarize(events)
    expected = {"pull_gemm": 80, "other GEMMs": 100, "communication": 150, "attention": 50, "optimizer": 80}
    expected |= {"exposed communication": 100, "idle": 580 - (80 + 200 + 50 + 80)}
    expected |= {"idle before other GEMMs": 10, "idle before attention": 100, "idle before optimizer": 60}
    assert parts == pytest.approx({part: us / 1e3 for part, us in expected.items()})


def test_what_the_gpu_waited_for_has_a_row_if_it_was_long():
    runs = {(spec, 0): made_up_run(1.0, LOSSES) for spec in ("a", "b")}
    runs["a", 0].breakdown |= {"idle before plan": 0.4, "idle before optimizer": 0.4, "idle": 0.8}
    runs["b", 0].breakdown |= {"idle before optimizer": 2.0, "idle": 2.0}
    report = compare_report.render_markdown(comparison_of(runs), [])
    assert "| idle | 0.80 | 2.00 |\n| idle before optimizer | 0.40 | 2.00 |\n" in report
    assert "idle before plan" not in report


def test_grouped_products_are_the_experts():
    for name in (
        "void at::cuda::detail::prepare_grouped_gemm_data<...>",
        "void cutlass::device_kernel<enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>>",
        "aten::_grouped_mm",
    ):
        assert breakdown.part_of(name) == "expert GEMMs", name
    assert breakdown.part_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>") == "other GEMMs"


def test_length_of_overlapping_intervals():
    assert breakdown.length([(0, 10), (5, 7), (8, 12), (20, 21)]) == 13
    assert breakdown.length([]) == 0


# ---- the command


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--strategies", "all_to_al"], "'all_to_al' is not one of all_to_all, deepep"),
        (["--strategies", "mega_moe:fp4"], "'fp4' in 'mega_moe:fp4' is not one of bf16, fp8"),
        (["--strategies", "mega_moe,mega_moe"], "pass each strategy once"),
        (["--steps", "20"], "--steps 20: pass the first and the last step"),
        (["--steps", "20-6"], "--steps 20-6: pass the first and the last step"),
        (["--steps", "6-6"], "--steps 6-6: pass the first and the last step"),
        (["--steps", "0-6"], "--steps 0-6: pass the first and the last step"),
        (["--repeats", "0"], "--repeats 0: pass at least 1"),
        (["--config", "nowhere.toml"], "nowhere.toml: there is no such file"),
    ],
)
def test_bad_arguments(argv, message, capsys, tmp_path):
    assert main(["compare", "--config", DEBUG_CONFIG, "--out", str(tmp_path), *argv]) == 2
    assert message in capsys.readouterr().err


def test_main_without_a_command(capsys):
    assert main([]) == 2 and main(["train"]) == 2
    assert "'train' is not one of: compare, doctor, plan" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "compare" in capsys.readouterr().out


REFUSED = Refused(reason="it needs a GPU", crashed=False, log="log.txt")
CRASHED = Refused(reason="RuntimeError", crashed=True, log="log.txt")


@pytest.mark.parametrize(
    "outcomes, code",
    [
        ([made_up_run(1.0, LOSSES), made_up_run(1.0, LOSSES), REFUSED], 0),
        ([made_up_run(1.0, LOSSES), REFUSED, CRASHED], 1),
        ([made_up_run(1.0, LOSSES), made_up_run(1.0, [7.1, *LOSSES[1:]]), REFUSED], 1),
        ([REFUSED, REFUSED, REFUSED], 1),
    ],
)
def test_exit_code(outcomes, code, monkeypatch, tmp_path):
    by_spec = dict(zip(("all_to_all", "mega_moe", "deepep"), outcomes))
    monkeypatch.setattr(compare.Runner, "train", lambda self, spec, repeat: by_spec[spec])
    argv = ["--config", DEBUG_CONFIG, "--out", str(tmp_path / "out"), "--steps", "3-6", "--no_seed_checkpoint"]
    assert main(["compare", *argv, "--strategies", ",".join(by_spec)]) == code
    assert list(json.loads((tmp_path / "out" / "report.json").read_text())["refused"]) == [
        spec for spec, outcome in by_spec.items() if isinstance(outcome, Refused)
    ]


def made_up_runner(out, *overrides: str, **options) -> compare.Runner:
    given = dict(config=Path(DEBUG_CONFIG), overrides=list(overrides), nproc=None, launch=None, no_seed_checkpoint=True)
    return compare.Runner(SimpleNamespace(**given | options), out=out, last_step=5)


def test_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert made_up_runner(tmp_path).nproc == 2, "the file's expert-parallel degree"
    assert made_up_runner(tmp_path, "--parallelism.expert_parallel_degree=4").nproc == 4
    assert made_up_runner(tmp_path, nproc=3).nproc == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert made_up_runner(tmp_path).nproc == 8


@pytest.mark.parametrize(
    "log, reason, crashed",
    [
        (["titan_megamoe: it is late", "titan_megamoe: it needs a GPU", "exit code Error"], "it needs a GPU", False),
        (
            ["[rank0]: KeyError: 1", "[rank0]: ValueError: bad", "torch/distributed/run.py: Error"],
            "ValueError: bad",
            True,
        ),
        (["Segmentation fault"], "Segmentation fault", True),
        ([], "it wrote nothing", True),
    ],
)
def test_a_run_without_a_result(log, reason, crashed, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(compare.Runner, "_start", lambda self, command, *_: (commands.append(command), (1, log))[1])
    outcome = made_up_runner(tmp_path, nproc=2).train("mega_moe:fp8", 0)
    assert (outcome.reason, outcome.crashed) == (reason, crashed)
    (command,) = commands
    assert command[command.index("--training.steps") + 1] == "6", "the one after the last measured is profiled"


def arguments(assets, out, *more: str) -> list[str]:
    data = ["--hf_assets_path", str(assets), "--dataloader.dataset_path", str(assets)]
    return ["compare", "--config", DEBUG_CONFIG, "--out", str(out), "--steps", "2-5", *data, *more]


def test_end_to_end(assets, tmp_path, capsys):
    out = tmp_path / "out"
    strategies = ["--strategies", "all_to_all,mega_moe,deepep", "--repeats", "2"]
    assert main(arguments(assets, out, *strategies)) == 0
    printed = capsys.readouterr().out
    assert "mega_moe" in printed and "deepep cannot run here" in printed and "losses agree" in printed

    report = json.loads((out / "report.json").read_text())
    assert report["losses_agree"] and list(report["refused"]) == ["deepep"]
    assert [row["spec"] for row in report["strategies"]] == ["all_to_all", "mega_moe"]
    assert len(report["runs"]) == 4, "two of each, and deepep was not tried twice"
    for row in report["strategies"]:
        assert row["runs"] == 2 and row["repeats_itself"] and row["seconds"] > 0
        assert sum(row["breakdown"].values()) > 0
    ours = report["strategies"][1]
    assert ours["first_loss_difference"] < 1e-5, "the same weights and tokens"
    markdown = (out / "report.md").read_text()
    for name in ("loss.png", "grad_norm.png", "step_times.png"):
        assert (out / name).stat().st_size > 1000 and name in markdown
    assert {path.name for path in (out / "tensorboard").iterdir()} >= {"all_to_all_1", "mega_moe_2"}
    assert (out / "seed" / "checkpoint" / "step-0" / ".metadata").exists()

    # Again into the same folder: refused, unless it goes on, which here has nothing to do.
    assert main(arguments(assets, out, *strategies)) == 2
    assert "Pass --resume" in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert main(arguments(assets, out, *strategies, "--resume")) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")} == before
    assert main(arguments(assets, out, *strategies, "--resume", "--optimizer.lr", "1e-5")) == 2
    assert "was measured with overrides" in capsys.readouterr().err


def test_interrupted_it_keeps_what_is_finished(assets, tmp_path):
    out = tmp_path / "out"
    argv = arguments(assets, out, "--strategies", "all_to_all,mega_moe", "--repeats", "1", "--no_seed_checkpoint")
    command = [sys.executable, "-m", "titan_megamoe.cli.main", *argv]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not (out / "runs" / "mega_moe_1" / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "interrupted" in printed, printed
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"] and list(report["runs"]) == ["all_to_all, 1"]
    assert "Only all_to_all ran" in report["verdict"][0]


def test_strategy_options():
    assert compare.strategy_options("mega_moe:fp8")[-1] == "fp8"
    assert compare.strategy_options("all_to_all:quantize.grouped_mm.float8")[-2:] == [
        "--model.converters",
        "quantize.grouped_mm.float8",
    ]
