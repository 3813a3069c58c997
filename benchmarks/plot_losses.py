"""Loss curves of the runs in a file of ``train_steps.py``, as a PNG beside it: ``python benchmarks/plot_losses.py x.json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="file written by train_steps.py")
    path = parser.parse_args().json
    document = json.loads(path.read_text())
    runs = {name: run["losses"] for name, run in document["runs"].items() if "error" not in run}
    reference_name, reference = next(iter(runs.items()))
    figure, (curves, differences) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    for name, losses in runs.items():
        steps = [int(step) for step in losses]
        curves.plot(steps, list(losses.values()), label=name, linewidth=1)
        differences.plot(steps, [losses[s] / reference[s] - 1 for s in losses], label=name, linewidth=1)
    curves.set_ylabel("loss")
    curves.set_title(f"{document['config']}, routing {document['routing']}")
    curves.legend()
    differences.set_ylabel(f"relative to {reference_name}")
    differences.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
