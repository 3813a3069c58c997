"""The sweep's points and plot. What it measures needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.training import REPOSITORY
from titan_megamoe.bench import roofline, sweep

BASE = dict(tokens=1024, num_experts=16, top_k=4, workload="uniform")
VALUES = dict(tokens=[512, 1024], num_experts=[2, 4, 16], top_k=[1, 4], workload=["uniform", "zipf"])


def test_one_axis_differs_at_a_time():
    found = sweep.points(BASE, VALUES)
    assert len(found) == 2 + 2 + 2 + 2, "two experts cannot be four distinct ones, but four can"
    for axis, point in found:
        assert {name for name in BASE if point[name] != BASE[name]} <= {axis}


def test_least_time_grows_with_tokens():
    times = [
        sweep.least_ms(BASE | {"tokens": tokens}, 2048, 768, 8, "h200", "bf16")["forward_and_backward"]
        for tokens in (16384, 32768)
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)


def test_least_time_is_the_bound_of_the_roofline():
    load = roofline.Load(dim=2048, hidden_dim=768, num_experts=16, top_k=4, tokens=1024, ep_size=8, precision="fp8")
    rates = roofline.GPUS["h200"].achievable
    assert sweep.least_ms(BASE, 2048, 768, 8, "h200", "fp8") == {
        "forward": roofline.forward(load).bound(rates)[0],
        "forward_and_backward": roofline.full_layer(load, full_ac=False).bound(rates)[0],
    }


def test_plot(tmp_path):
    report = dict(shape_name="qwen3-30b", ep_size=1, environment=dict(gpu="none"), points=[])
    for axis, point in sweep.points(BASE, VALUES):
        both = {"forward_and_backward": {"median": point["tokens"] / 1000}}
        results = {"torchtitan compiled": both, "mega_moe hopper": {"error": "out of memory"}}
        least = {precision: sweep.least_ms(point, 2048, 768, 1, "h200", precision) for precision in ("bf16", "fp8")}
        report["points"].append(dict(axis=axis, point=point, least_ms=least, results=results))
    sweep.plot(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def uneven(times: dict[float, float]) -> dict:
    """A report of points with these times, by the busiest rank's share."""
    points = [
        dict(
            axis="hot",
            point=BASE | {"hot": share},
            busiest=dict(expert=9 - share, rank=share),
            least_ms={precision: {"forward_and_backward": 1.0} for precision in ("bf16", "fp8")},
            results={"mega_moe hopper": {"forward_and_backward": {"median": ms}}},
        )
        for share, ms in times.items()
    ]
    return dict(shape_name="qwen3-30b", ep_size=4, environment=dict(gpu="none"), points=points)


def test_a_time_that_the_busiest_rank_explains_is_no_cliff(tmp_path):
    report = uneven({1.1: 2.2, 3.9: 7.9, 2.0: 3.0})
    assert [point[:2] for point in sweep.imbalance(report, "mega_moe hopper")] == [(1.1, 2.2), (2.0, 3.0), (3.9, 7.9)]
    assert sweep.cliffs(report) == []
    sweep.plot(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_time_that_it_does_not_explain_is():
    (found,) = sweep.cliffs(uneven({1.25: 2.0, 2.5: 9.0, 3.75: 6.5}))
    assert found == "mega_moe hopper, hot 2.5: 9.00 ms, where 2.50 of an even share explains 4.00"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, "-m", "titan_megamoe.bench.sweep", "--out", str(tmp_path / "x.json")]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2 and "torch sees no GPU" in result.stderr
