"""What a comparison says: numbers from its runs, and the report in a terminal, in Markdown, JSON and plots.

Speed is the baseline's mean step time over a strategy's, above 1 where the strategy is faster. Its interval comes from a
bootstrap over both: runs are drawn with replacement, then measured steps within each run, and the 2.5th to 97.5th percentile
of the ratios is the 95% interval. With few runs, or with runs that differ from one start to the next, it is wide, as it should be.

Losses agree if the first step's are equal to FIRST_LOSS_TOLERANCE (all strategies start from the same weights and tokens, so
only rounding differs) and the means over the measured steps to the tolerance that was asked for. Where the baseline's own runs are
further apart than that, so that no strategy could pass, the report says so.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..bench.breakdown import IDLE_BEFORE

LOSS, GRAD_NORM, SECONDS = "loss_metrics/global_avg_loss", "grad_norm", "time_metrics/end_to_end(s)"
TOKENS, MFU, MEMORY = "throughput(tps)", "mfu(%)", "memory/max_reserved(GiB)"
"""TorchTitan's names of its metrics."""

FIRST_LOSS_TOLERANCE = 2e-3
"""Relative. FP8 moves an untrained model's loss by about 1e-4."""

LEAST_IDLE_MS = 1.0
"""A part that the GPU waited for less long, with every strategy, has no row for that."""

BOOTSTRAP_DRAWS = 2000


@dataclass(kw_only=True)
class Finished:
    """One run's ``result.json``."""

    steps: dict[str, dict[str, float]]
    breakdown: dict[str, float]
    environment: dict
    world_size: int
    tokens_per_step: int

    def values(self, metric: str, first: int, last: int) -> list[float]:
        return [m[metric] for step, m in self.steps.items() if first <= int(step) <= last and metric in m]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A run that gave no result."""

    reason: str
    crashed: bool
    """Whether it failed, rather than being refused with a reason before training."""
    log: str


@dataclass(frozen=True, kw_only=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy that ran."""

    spec: str
    runs: int
    seconds: float
    seconds_std: float
    """Of all measured steps of all runs."""
    run_seconds: list[float]
    tokens_per_second: float
    mfu: float | None
    memory_gib: float
    speed: Interval | None
    """None for the baseline."""
    first_loss_difference: float
    mean_loss_difference: float
    worst_loss_difference: float
    worst_grad_norm_difference: float
    """Largest relative differences from the baseline at a step, of the first runs."""
    agrees: bool
    repeats_itself: bool
    """Whether its runs' losses are equal in every bit."""
    own_loss_difference: float
    """Largest relative difference between the mean losses of two of its runs."""
    breakdown: dict[str, float]


@dataclass(kw_only=True)
class Comparison:
    settings: dict
    specs: list[str]
    first_step: int
    last_step: int
    tolerance: float
    outcomes: dict[tuple[str, int], Finished | Refused] = field(default_factory=dict)
    interrupted: bool = False

    def finished(self, spec: str) -> list[Finished]:
        return [o for (s, _), o in sorted(self.outcomes.items()) if s == spec and isinstance(o, Finished)]

    @property
    def refused(self) -> dict[str, Refused]:
        return {s: o for (s, _), o in self.outcomes.items() if isinstance(o, Refused)}

    @property
    def crashed(self) -> bool:
        return any(refused.crashed for refused in self.refused.values())

    @property
    def baseline(self) -> str | None:
        """The first strategy that ran."""
        return next((spec for spec in self.specs if self.finished(spec)), None)

    @property
    def rows(self) -> list[Row]:
        return [self._row(spec) for spec in self.specs if self.finished(spec)]

    @property
    def losses_agree(self) -> bool:
        rows = self.rows
        return bool(rows) and all(row.agrees for row in rows)

    def _measured(self, run: Finished, metric: str) -> list[float]:
        return run.values(metric, self.first_step, self.last_step)

    def _row(self, spec: str) -> Row:
        runs, baseline = self.finished(spec), self.finished(self.baseline)
        times = [self._measured(run, SECONDS) for run in runs]
        all_times = [seconds for run in times for seconds in run]
        mfu = [value for run in runs for value in self._measured(run, MFU)]
        theirs, ours = baseline[0], runs[0]
        first = _difference(ours.steps["1"][LOSS], theirs.steps["1"][LOSS])
        own_means, their_means = (
            [statistics.mean(self._measured(run, LOSS)) for run in group] for group in (runs, baseline)
        )
        mean = _difference(statistics.mean(own_means), statistics.mean(their_means))
        return Row(
            spec=spec,
            runs=len(runs),
            seconds=statistics.mean(all_times),
            seconds_std=statistics.pstdev(all_times),
            run_seconds=[statistics.mean(run) for run in times],
            tokens_per_second=statistics.mean(v for run in runs for v in self._measured(run, TOKENS)),
            mfu=statistics.mean(mfu) if mfu else None,
            memory_gib=max(metrics[MEMORY] for run in runs for metrics in run.steps.values()),
            speed=None if spec == self.baseline else speed_ratio([self._measured(r, SECONDS) for r in baseline], times),
            first_loss_difference=first,
            mean_loss_difference=mean,
            worst_loss_difference=_worst(ours, theirs, LOSS),
            worst_grad_norm_difference=_worst(ours, theirs, GRAD_NORM),
            agrees=first <= FIRST_LOSS_TOLERANCE and mean <= self.tolerance,
            repeats_itself=all(_curve(run, LOSS) == _curve(ours, LOSS) for run in runs),
            own_loss_difference=max(_difference(a, b) for a in own_means for b in own_means),
            breakdown={
                part: statistics.mean(run.breakdown.get(part, 0.0) for run in runs)
                for part in dict.fromkeys(part for run in runs for part in run.breakdown)
            },
        )

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(to_json(self), indent=1) + "\n")


def speed_ratio(baseline: list[list[float]], ours: list[list[float]]) -> Interval:
    """Mean of the baseline's step times over that of ours, each given run by run."""
    return _speed_ratio(tuple(map(tuple, baseline)), tuple(map(tuple, ours)))


Runs = tuple[tuple[float, ...], ...]


@functools.cache  # each part of the report asks for it again
def _speed_ratio(baseline: Runs, ours: Runs) -> Interval:
    generator = random.Random(0)

    def resampled_mean(runs: Runs) -> float:
        drawn = [generator.choices(run, k=len(run)) for run in generator.choices(runs, k=len(runs))]
        return statistics.fmean(seconds for run in drawn for seconds in run)

    def mean(runs: Runs) -> float:
        return statistics.fmean(seconds for run in runs for seconds in run)

    ratios = sorted(resampled_mean(baseline) / resampled_mean(ours) for _ in range(BOOTSTRAP_DRAWS))
    low, high = ratios[int(0.025 * BOOTSTRAP_DRAWS)], ratios[int(0.975 * BOOTSTRAP_DRAWS)]
    return Interval(value=mean(baseline) / mean(ours), low=low, high=high)


def _difference(a: float, b: float) -> float:
    """Relative; infinite if either is not a number."""
    return abs(a - b) / abs(b) if a == a and b == b and b else float("inf")


def _worst(ours: Finished, theirs: Finished, metric: str) -> float:
    a, b = _curve(ours, metric), _curve(theirs, metric)
    return max((_difference(a[step], b[step]) for step in a if step in b), default=0.0)


def _curve(run: Finished, metric: str) -> dict[int, float]:
    return {int(step): metrics[metric] for step, metrics in run.steps.items() if metric in metrics}


# ---- the report


def verdict(comparison: Comparison) -> list[str]:
    """The answer, in sentences."""
    rows = comparison.rows
    if not rows:
        return ["Nothing ran to its end."]
    sentences = []
    for row in rows[1:]:
        speed = row.speed
        if speed.low > 1:
            answer = f"is {speed.value:.3f}x as fast as {comparison.baseline} (95% interval {speed.low:.3f} to {speed.high:.3f})"
        elif speed.high < 1:
            answer = f"is slower than {comparison.baseline}: {speed.value:.3f}x ({speed.low:.3f} to {speed.high:.3f})"
        else:
            answer = (
                f"cannot be told from {comparison.baseline}: {speed.value:.3f}x, but anything from {speed.low:.3f} to "
                f"{speed.high:.3f} fits"
            )
        losses = "losses agree" if row.agrees else "LOSSES DO NOT AGREE"
        sentences.append(f"{row.spec} {answer}; {losses} (mean {row.mean_loss_difference:.2%} apart).")
    unsteady = rows[0].own_loss_difference > comparison.tolerance
    if unsteady and not comparison.losses_agree:
        sentences.append(
            f"The runs of {comparison.baseline} itself are {rows[0].own_loss_difference:.2%} apart in their mean loss, so these losses "
            "say little about strategies: train with a lower optimizer.lr or more lr_scheduler.warmup_steps, or measure other --steps."
        )
    if len(rows) == 1:
        sentences.append(f"Only {rows[0].spec} ran: there is nothing to compare it with.")
    return sentences


Columns = dict[str, Callable[[Row], str]]

SPEED_COLUMNS: Columns = {
    "strategy": lambda r: r.spec,
    "s per step": lambda r: f"{r.seconds:.4f} +- {r.seconds_std:.4f}",
    "of each run": lambda r: ", ".join(f"{s:.4f}" for s in r.run_seconds),
    "speed (95% interval)": lambda r: str(r.speed) if r.speed else "baseline",
    "tokens/s per GPU": lambda r: f"{r.tokens_per_second:,.0f}",
    "MFU %": lambda r: "" if r.mfu is None else f"{r.mfu:.1f}",
    "peak GiB": lambda r: f"{r.memory_gib:.1f}",
}
LOSS_COLUMNS: Columns = {
    "relative to baseline": lambda r: r.spec,
    "loss, step 1": lambda r: f"{r.first_loss_difference:.1e}",
    "mean loss": lambda r: f"{r.mean_loss_difference:.1e}",
    "worst step": lambda r: f"{r.worst_loss_difference:.1e}",
    "grad norm, worst step": lambda r: f"{r.worst_grad_norm_difference:.1e}",
    "agrees": lambda r: "yes" if r.agrees else "NO",
    "its own runs": lambda r: (
        "" if r.runs == 1 else ("equal" if r.repeats_itself else f"{r.own_loss_difference:.1e} apart")
    ),
}


def render_terminal(comparison: Comparison) -> None:
    from rich.table import Table

    from .terminal import make_console

    console = make_console()
    steps = f"steps {comparison.first_step} to {comparison.last_step}"
    for title, columns in ((f"Speed, {steps}", SPEED_COLUMNS), (f"Losses, {steps}", LOSS_COLUMNS)):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column)
        for row in comparison.rows:
            table.add_row(*(cell(row) for cell in columns.values()))
        console.print(table)
    for spec, refused in comparison.refused.items():
        console.print(
            f"{spec} {_did_not(refused)}: {refused.reason} ({refused.log})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for sentence in verdict(comparison):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _did_not(refused: Refused) -> str:
    return "failed" if refused.crashed else "cannot run here"


def _markdown_table(columns: Columns, rows: list[Row]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "| " + "--- | " * len(columns)]
    return lines + [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]


def render_markdown(comparison: Comparison, plots: list[str]) -> str:
    settings, rows = comparison.settings, comparison.rows
    lines = [f"# {settings['config']}: {', '.join(comparison.specs)}", "", *verdict(comparison), ""]
    lines += _markdown_table(SPEED_COLUMNS, rows)
    for spec, refused in comparison.refused.items():
        reason = f"{_did_not(refused)}: {refused.reason.replace('|', '/')}"
        lines.append(f"| {spec} | {reason} |" + " |" * (len(SPEED_COLUMNS) - 2))
    lines += ["", *_markdown_table(LOSS_COLUMNS, rows)]
    lines += ["", *(f"![{Path(plot).stem}]({plot})" for plot in plots), "", "## Where a step's time goes", ""]
    parts = list(dict.fromkeys(part for row in rows for part in row.breakdown))
    parts.sort(key=lambda part: part.startswith(IDLE_BEFORE))
    lines += [f"| ms | {' | '.join(row.spec for row in rows)} |", "| --- | " + "--- | " * len(rows)]
    for part in parts:
        if part.startswith(IDLE_BEFORE) and all(row.breakdown.get(part, 0.0) < LEAST_IDLE_MS for row in rows):
            continue
        cells = (f"{row.breakdown[part]:.2f}" if part in row.breakdown else "" for row in rows)
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines += [
        "",
        "From a profile of one step after the measured ones, the mean over runs (`titan_megamoe/bench/breakdown.py` says what "
        "belongs where).",
        "",
        "## How it was measured",
        "",
        f"Steps {comparison.first_step} to {comparison.last_step} of each run; the ones before warm up. Ranks: "
        f"{settings['ranks']}. Runs take turns, each in processes of its own"
        + (", from one seed checkpoint." if settings["seed_checkpoint"] else ", each initialised from the same seed."),
        "Speed is the baseline's mean step time over the strategy's; its interval is from a bootstrap over runs and steps"
        + (" (with one run each it knows only the noise within a run)." if settings["repeats"] == 1 else "."),
        f"Losses agree if they are within {FIRST_LOSS_TOLERANCE:.1%} at step 1 and {comparison.tolerance:.1%} in the mean of the "
        "measured steps.",
        "",
    ]
    if rows:
        environment = comparison.finished(rows[0].spec)[0].environment
        lines.append("Environment: " + ", ".join(f"{key} {value}" for key, value in environment.items()) + ".")
    if settings["overrides"]:
        lines.append(f"Overrides: `{' '.join(settings['overrides'])}`.")
    if comparison.interrupted:
        lines.append("\nInterrupted: not all runs were made.")
    return "\n".join(lines) + "\n"


def to_json(comparison: Comparison) -> dict:
    return {
        "settings": comparison.settings,
        "measured_steps": [comparison.first_step, comparison.last_step],
        "loss_tolerance": comparison.tolerance,
        "losses_agree": comparison.losses_agree,
        "interrupted": comparison.interrupted,
        "verdict": verdict(comparison),
        "strategies": [asdict(row) for row in comparison.rows],
        "refused": {spec: asdict(refused) for spec, refused in comparison.refused.items()},
        "runs": {
            f"{spec}, {repeat + 1}": asdict(outcome)
            for (spec, repeat), outcome in comparison.outcomes.items()
            if isinstance(outcome, Finished)
        },
    }


def write_plots(comparison: Comparison, out: Path) -> list[str]:
    """Loss and gradient norm curves with their differences, and step times. Returns the files' names."""
    if not comparison.rows:
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    baseline = comparison.finished(comparison.baseline)[0]
    names = []
    for metric, label in ((LOSS, "loss"), (GRAD_NORM, "grad_norm")):
        figure, (curves, differences) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
        reference = _curve(baseline, metric)
        for row in comparison.rows:
            curve = _curve(comparison.finished(row.spec)[0], metric)
            curves.plot(list(curve), list(curve.values()), label=row.spec, linewidth=1)
            steps = [step for step in curve if reference.get(step)]
            differences.plot(steps, [curve[s] / reference[s] - 1 for s in steps], label=row.spec, linewidth=1)
        curves.set_ylabel(label.replace("_", " "))
        curves.legend()
        differences.set_ylabel(f"relative to {comparison.baseline}")
        differences.set_xlabel("step")
        names.append(_save(figure, out / f"{label}.png"))
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.5 * len(comparison.rows)))
    samples = [
        [s for run in comparison.finished(r.spec) for s in comparison._measured(run, SECONDS)] for r in comparison.rows
    ]
    axes.boxplot(samples, vert=False, showmeans=True)
    axes.set_yticks(range(1, len(samples) + 1), [row.spec for row in comparison.rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    names.append(_save(figure, out / "step_times.png"))
    return names


def _save(figure, path: Path) -> str:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name
