"""``titan-megamoe plan``: its formulas against counting, and the command on every configuration here."""

from __future__ import annotations

import json

import pytest
import torch

from tests.training import DEBUG_CONFIG, REPOSITORY
from titan_megamoe.bench import roofline
from titan_megamoe.bench.roofline import GPUS, Load
from titan_megamoe.bench.workloads import make_routing
from titan_megamoe.cli.main import main

CONFIGS = sorted((REPOSITORY / "train_configs").glob("*.toml"))
LOAD = dict(dim=256, hidden_dim=128, num_experts=32, top_k=4, tokens=1000)


@pytest.mark.parametrize("ep_size", [1, 2, 8, 32])
def test_remote_ranks_are_those_of_random_routings(ep_size):
    ids_TK = make_routing("uniform", 20000, LOAD["num_experts"], LOAD["top_k"])
    ranks_TK = ids_TK // (LOAD["num_experts"] // ep_size)
    is_met_TP = torch.nn.functional.one_hot(ranks_TK, ep_size).amax(dim=1)
    remote = is_met_TP[:, 1:].sum(dim=1).float().mean().item()  # for tokens that rank 0 owns
    assert Load(**LOAD, ep_size=ep_size).remote_ranks == pytest.approx(remote, rel=0.02)


def test_arithmetic_is_that_of_the_products():
    load = Load(**LOAD, ep_size=8)
    rows, D, F = 4000, 256, 128  # noqa: N806
    forward, recomputation, backward = roofline.forward(load), roofline.recomputation(load), roofline.backward(load)
    assert forward.bf16_flop == 2 * rows * D * F * 3 and forward.fp8_flop == 0
    assert recomputation.bf16_flop == 2 * rows * D * F * 2
    assert backward.bf16_flop == 2 * forward.bf16_flop
    fp8 = Load(**LOAD, ep_size=8, precision="fp8_bwd")
    assert roofline.forward(fp8) == forward
    assert roofline.backward(fp8).fp8_flop == roofline.backward(fp8).bf16_flop == forward.bf16_flop


def test_link_bytes():
    tokens_times_ranks = 1000 * Load(**LOAD, ep_size=8).remote_ranks
    in_bf16, in_fp8 = Load(**LOAD, ep_size=8), Load(**LOAD, ep_size=8, precision="fp8")
    assert roofline.forward(in_bf16).link_bytes == pytest.approx(tokens_times_ranks * (512 + 512))
    assert roofline.forward(in_fp8).link_bytes == pytest.approx(tokens_times_ranks * (256 + 2 * 4 + 512))
    assert roofline.recomputation(in_fp8).link_bytes == pytest.approx(tokens_times_ranks * (256 + 2 * 4))
    assert roofline.backward(in_bf16).link_bytes == pytest.approx(tokens_times_ranks * (512 + 512 + 16))
    assert roofline.forward(Load(**LOAD, ep_size=1)).link_bytes == 0


def test_times():
    times = roofline._cost(790e12, False, 360e9, 4.3e12).milliseconds(GPUS["h200"])
    assert times == pytest.approx({"arithmetic": 1000, "link": 1000, "memory": 1000})


def test_a_degree_that_does_not_divide_the_experts():
    with pytest.raises(ValueError, match="degree of 3 does not divide 32 experts. Use a divisor"):
        Load(**LOAD, ep_size=3)


def planned(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration(config, capsys):
    document = planned(capsys, "--config", str(config))
    (plan,) = document["plans"]
    for memory in plan["memory_gib"]:
        parts = {name: gib for name, gib in memory.items() if name not in ("precision", "total")}
        assert memory["total"] == pytest.approx(sum(parts.values())) and min(parts.values()) >= 0
    bf16, fp8, _ = plan["layer"]
    assert fp8["all"]["at_least_ms"] < bf16["all"]["at_least_ms"]
    assert bf16["forward"]["ms"][bf16["forward"]["bound_by"]] == bf16["forward"]["at_least_ms"]
    assert main(["plan", "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "bound by" in printed and "fp8_bwd" in printed and "parameters" in printed


def test_known_models(capsys):
    small = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_30b_a3b.toml"), "--nproc", "32")
    large = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_235b_a22b.toml"), "--nproc", "128")
    for document, total, active in ((small, 30.5e9, 3.3e9), (large, 235e9, 22e9)):
        assert document["model"]["num_parameters"] == pytest.approx(total, rel=0.01)
        assert document["model"]["num_active_parameters"] == pytest.approx(active, rel=0.03)
    memory = small["plans"][0]["memory_gib"][0]
    assert memory["parameters"] == pytest.approx(30.5e9 * 4 / 32 / 2**30, rel=0.01)
    # At EP = 1 and no link, an H200's layer: what DESIGN calls its floor, 4.7 ms of arithmetic for forward and backward.
    alone = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_30b_a3b.toml"), "--ep", "1")
    layer = alone["plans"][0]["layer"][0]
    assert layer["forward"]["ms"]["arithmetic"] + layer["backward"]["ms"]["arithmetic"] == pytest.approx(4.7, abs=0.05)
    assert layer["forward"]["link_mb"] == 0


def test_degrees_overrides_and_capacity(capsys):
    document = planned(
        capsys, "--config", DEBUG_CONFIG, "--ep", "1,2,4", "--nproc", "8", "--training.seq_len", "128", "--gpu", "b200"
    )
    assert [plan["expert_parallel_degree"] for plan in document["plans"]] == [1, 2, 4]
    assert {plan["ranks"] for plan in document["plans"]} == {8}
    assert document["tokens_per_rank"] == 4 * 128 and document["gpu"]["name"] == "b200"
    exact = document["plans"][2]["memory_gib"][0]
    roomy = planned(capsys, "--config", DEBUG_CONFIG, "--ep", "4", "--model.moe.dispatch.capacity", "4.0")
    assert roomy["plans"][0]["memory_gib"][0]["passing"] > exact["passing"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--config", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["--config", DEBUG_CONFIG, "--ep", "3"], "--ep 3 does not divide the model's 8 experts"),
        (["--config", DEBUG_CONFIG, "--ep", "two"], "--ep two: pass expert-parallel degrees"),
        (["--config", DEBUG_CONFIG, "--ep", "4", "--nproc", "6"], "--nproc 6: an expert-parallel degree of 4"),
        (["--config", DEBUG_CONFIG, "--model.flavor", "0.6B", "--model.moe.dispatch.type", "all_to_all"], "no experts"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err
