"""``titan-megamoe plan``: the command on every configuration here. Its formulas are tested in ``test_roofline.py``."""

from __future__ import annotations

import json

import pytest

from tests.training import DEBUG_CONFIG, REPOSITORY
from titan_megamoe.bench.roofline import GPUS
from titan_megamoe.cli.main import main
from titan_megamoe.cli.plan import MEMORY_COLUMNS
from titan_megamoe.kernels.plan_tables import LayerShape
from titan_megamoe.symmetric import plan_memory

CONFIGS = sorted((REPOSITORY / "train_configs").glob("*.toml"))


def planned(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration(config, capsys):
    document = planned(capsys, "--config", str(config))
    (plan,) = document["plans"]
    for memory in plan["memory_gib"]:
        parts = [memory[name] for name in MEMORY_COLUMNS.values() if name != "total"]
        assert memory["total"] == pytest.approx(sum(parts)) and min(parts) >= 0
        assert memory["fits"] == (memory["total"] <= GPUS["h200"].memory_gib)
    for kept in plan["kept_gib"]:
        mode = "with_full_ac" if document["full_activation_checkpointing"] else "without_full_ac"
        assert kept[mode] == next(m["kept"] for m in plan["memory_gib"] if m["precision"] == kept["precision"])
        assert kept["without_full_ac"] == pytest.approx(kept["one_layer"] * document["model"]["num_moe_layers"])
    for layer in plan["layer"]:
        parts = [layer[name] for name in ("forward", "backward", "recomputation") if name in layer]
        assert len(parts) == (3 if document["full_activation_checkpointing"] else 2)
        assert layer["all"]["tflop"] == pytest.approx(sum(part["tflop"] for part in parts))
    bf16, fp8, _ = plan["layer"]
    assert fp8["all"]["at_least_ms"] < bf16["all"]["at_least_ms"]
    assert bf16["forward"]["ms"][bf16["forward"]["bound_by"]] == bf16["forward"]["at_least_ms"]
    assert main(["plan", "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    for word in ("bound by", "fp8_bwd", "parameters", "vocabulary", "without full AC", "Out of scope: what all_to_all"):
        assert word in printed


def test_known_models(capsys):
    small = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_30b_a3b.toml"), "--nproc", "32")
    large = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_235b_a22b.toml"), "--nproc", "128")
    for document, total, active in ((small, 30.5e9, 3.3e9), (large, 235e9, 22e9)):
        assert document["model"]["num_parameters"] == pytest.approx(total, rel=0.01)
        assert document["model"]["num_active_parameters"] == pytest.approx(active, rel=0.03)
    assert (small["model"]["num_layers"], small["model"]["num_moe_layers"], small["model"]["vocab_size"]) == (
        48,
        48,
        151936,
    )
    assert small["model"]["num_expert_parameters"] == 48 * 128 * 3 * 2048 * 768
    memory = small["plans"][0]["memory_gib"][0]
    assert memory["parameters"] == pytest.approx(30.5e9 * 4 / 32 / 2**30, rel=0.01)
    assert memory["gradients"] == memory["parameters"] and memory["optimizer"] == 2 * memory["parameters"]
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


def test_buffers_are_those_of_plan_memory(capsys):
    """Of rank memory, those of mega_moe: qwen3_30b_a3b at EP = 8, in bf16."""
    document = planned(capsys, "--config", str(REPOSITORY / "train_configs" / "qwen3_30b_a3b.toml"))
    memory, kept = document["plans"][0]["memory_gib"][0], document["plans"][0]["kept_gib"][0]
    shape = LayerShape(ep_size=8, max_tokens=16384, dim=2048, hidden_dim=768, num_local_experts=16, top_k=8)
    sections = plan_memory(shape).sections
    shared = sum(section.num_bytes for section in sections if "one for all layers" in section.lifetime)
    passing = max(section.num_bytes for section in sections if section.is_passing)
    assert memory["symmetric"] == pytest.approx(shared / 2**30)
    assert memory["passing"] == pytest.approx(passing / 2**30)
    inputs = 16384 * (2 * 2048 + 8 * 12)
    assert kept["one_layer"] == pytest.approx((sections[-1].num_bytes + inputs) / 2**30)
    assert kept["with_full_ac"] == pytest.approx((sections[-1].num_bytes + 49 * inputs) / 2**30)


CONFIG_30B = ("--config", str(REPOSITORY / "train_configs" / "qwen3_30b_a3b.toml"), "--precision", "bf16")


def memory_of(capsys, *argv: str) -> dict:
    (plan,) = planned(capsys, *CONFIG_30B, *argv)["plans"]
    return plan["memory_gib"][0] | {"plan": plan}


def test_what_is_sharded_over_what(capsys):
    once = memory_of(capsys, "--nproc", "32")
    replicated = memory_of(capsys, "--nproc", "32", "--parallelism.data_parallel_replicate_degree", "2")
    assert replicated["parameters"] == pytest.approx(2 * once["parameters"])
    assert replicated["plan"]["shards_of_a_parameter"] == 16
    fewest = memory_of(capsys, "--parallelism.data_parallel_replicate_degree", "2")["plan"]
    assert (fewest["ranks"], fewest["shards_of_a_parameter"]) == (16, 8), (
        "each replica has an expert-parallel group of 8"
    )
    fixed = memory_of(capsys, "--parallelism.data_parallel_shard_degree", "32")
    assert fixed["plan"]["ranks"] == 32 and fixed["parameters"] == once["parameters"]
    in_bf16 = memory_of(capsys, "--nproc", "32", "--training.dtype", "bfloat16")
    for name in ("parameters", "gradients", "optimizer"):
        assert in_bf16[name] == pytest.approx(once[name] / 2)
    offloaded = memory_of(capsys, "--nproc", "32", "--training.enable_cpu_offload")
    assert offloaded["parameters"] == offloaded["gradients"] == offloaded["optimizer"] == 0


def test_tensor_parallelism_shares_tokens_with_expert_parallelism_and_splits_experts_without(capsys):
    together = memory_of(capsys, "--parallelism.tensor_parallel_degree", "2")["plan"]
    assert together["tokens_per_rank"] == 8192
    alone = memory_of(capsys, "--parallelism.tensor_parallel_degree", "2", "--ep", "1")["plan"]
    assert alone["tokens_per_rank"] == 16384
    whole = memory_of(capsys, "--ep", "1")["plan"]
    assert alone["layer"][0]["forward"]["tflop"] == pytest.approx(whole["layer"][0]["forward"]["tflop"] / 2)
    assert alone["kept_gib"][0]["one_layer"] < whole["kept_gib"][0]["one_layer"]


def test_context_parallelism_shares_tokens(capsys):
    for ep in ("1", "8"):
        plan = memory_of(capsys, "--parallelism.context_parallel_degree", "2", "--ep", ep)["plan"]
        assert plan["tokens_per_rank"] == 8192


def test_weights_that_are_kept_in_fp8(capsys):
    """Both orientations of this rank's experts, a byte each."""
    argv = ("--precision", "fp8,fp8_bwd,bf16")
    copies = 2 * 48 * 128 * 3 * 2048 * 768 / 8 / 2**30
    expected = {"fp8": copies, "fp8_bwd": copies, "bf16": 0}
    for options, factor in (((), 1), (("--model.moe.dispatch.no-weight_cache",), 0)):
        (plan,) = planned(capsys, *CONFIG_30B[:2], *argv, *options)["plans"]
        found = {memory["precision"]: memory["weight_copies"] for memory in plan["memory_gib"]}
        assert found == pytest.approx({precision: factor * gib for precision, gib in expected.items()})


def test_what_fsdp_gathers(capsys):
    """At EP = 8 the largest neighbours are the last block and the output layer, whose gradients are also there in bf16 and fp32."""
    output, experts = 151936 * 2048 + 2048, 128 * 3 * 2048 * 768
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 2 * 2048
    block = attention + 128 * 2048 + experts // 8
    expected = (2 * (output + block) + 6 * output) / 2**30
    assert memory_of(capsys)["gathered"] == pytest.approx(expected, rel=1e-3)
    # Kept gathered from forward to backward, all units are there at once.
    everything = (2 * (output + 48 * block + 151936 * 2048) + 6 * output) / 2**30
    kept = memory_of(capsys, "--parallelism.fsdp_reshard_after_forward", "never")
    assert kept["gathered"] == pytest.approx(everything, rel=1e-3)
    # What one rank alone casts is not sharded, and yet there in bf16.
    assert memory_of(capsys, "--ep", "1", "--nproc", "1")["gathered"] > 0


def test_a_degree_beyond_the_nvlink_domain(capsys):
    assert memory_of(capsys, "--ep", "8")["plan"]["notes"] == []
    plan = memory_of(capsys, "--ep", "16")["plan"]
    assert "spans NVLink domains of 8 ranks: mega_moe's kernels refuse that" in plan["notes"][0]
    assert plan["layer"][0]["forward"]["bound_by"] == "network"
    wide = memory_of(capsys, "--ep", "16", "--domain", "72")["plan"]
    assert not wide["notes"] and wide["layer"][0]["forward"]["network_mb"] == 0
    assert main(["plan", *CONFIG_30B, "--ep", "16"]) == 0
    assert "network MB" in capsys.readouterr().out


def test_precisions_and_what_is_saved(capsys):
    argv = ("--config", DEBUG_CONFIG, "--precision", "fp8,bf16", "--model.moe.dispatch.saved", "inputs")
    (plan,) = planned(capsys, *argv)["plans"]
    assert [memory["precision"] for memory in plan["memory_gib"]] == ["fp8", "bf16"]
    (kept,) = planned(capsys, "--config", DEBUG_CONFIG, "--precision", "bf16")["plans"]
    assert plan["kept_gib"][1]["one_layer"] < kept["kept_gib"][0]["one_layer"]
    assert plan["layer"][1]["backward"]["tflop"] > kept["layer"][0]["backward"]["tflop"]


def test_what_does_not_fit_is_said(capsys):
    config = str(REPOSITORY / "train_configs" / "qwen3_235b_a22b.toml")
    assert main(["plan", "--config", config, "--precision", "bf16", "--gpu", "b200"]) == 0
    printed = capsys.readouterr().out
    assert "too much" in printed and "mega_moe has no fused kernels for b200" in printed


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--config", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["--config", DEBUG_CONFIG, "--ep", "3"], "--ep 3 does not divide the model's 8 experts"),
        (["--config", DEBUG_CONFIG, "--ep", "two"], "--ep two: pass expert-parallel degrees"),
        (["--config", DEBUG_CONFIG, "--ep", "4", "--nproc", "6"], "--nproc 6: an expert-parallel degree of 4"),
        (["--config", DEBUG_CONFIG, "--model.flavor", "0.6B", "--model.moe.dispatch.type", "all_to_all"], "no experts"),
        (
            ["--config", DEBUG_CONFIG, "--precision", "mxfp8"],
            "--precision mxfp8 cannot be planned for --gpu h200. Use some of: bf16",
        ),
        (["--config", DEBUG_CONFIG, "--domain", "0"], "--domain 0: pass how many ranks NVLink joins"),
        (["--config", DEBUG_CONFIG, "--nproc", "0"], "--nproc 0"),
        (
            ["--config", DEBUG_CONFIG, "--nproc", "4", "--parallelism.data_parallel_shard_degree", "2"],
            "--nproc 4: the configuration's parallelism degrees make 2 ranks. Leave it out",
        ),
        (
            ["--config", DEBUG_CONFIG, "--parallelism.data_parallel_shard_degree", "3"],
            "data_parallel_shard_degree = 3: an expert-parallel degree of 2 does not divide the 3 ranks",
        ),
        (
            ["--config", DEBUG_CONFIG, "--nproc", "6", "--parallelism.data_parallel_replicate_degree", "4"],
            "need a multiple of 4 ranks",
        ),
        (["--config", DEBUG_CONFIG, "--parallelism.pipeline_parallel_degree", "2"], "is not planned. Plan with 1"),
        (
            ["--config", DEBUG_CONFIG, "--parallelism.context_parallel_degree", "3", "--nproc", "6"],
            "= 1024 tokens cannot be shared by the 3 ranks of a sequence. Use a multiple",
        ),
    ],
)
def test_bad_arguments(argv, message, capsys):
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err
