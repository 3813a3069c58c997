"""Whole training runs on gloo ranks: every strategy that runs on CPU gives the same losses and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import relative_error
from tests.training import options, run_jobs

DISPATCH, EP = "model.moe.dispatch.type", "parallelism.expert_parallel_degree"
STEPS = {
    "training.steps": 10,
    "training.local_batch_size": 2,
    "optimizer.lr": 3e-4,  # TorchTitan's; the debug configuration's ten times as much magnifies rounding
    "checkpoint.no-enable": True,
}


def assert_same_losses(a, b, *, first: float, within: float):
    assert a.losses.keys() == b.losses.keys()
    assert a.losses[1] == pytest.approx(b.losses[1], rel=first)
    for step in a.losses:
        assert a.losses[step] == pytest.approx(b.losses[step], abs=within), f"step {step}"


def assert_same_gradients(a, b, *, within: float = 1e-3):
    assert a.gradients.keys() == b.gradients.keys() and a.gradients
    for name, gradient in a.gradients.items():
        assert relative_error(gradient, b.gradients[name]) < within, name


@pytest.fixture(scope="module")
def four_ranks(assets, tmp_path_factory):
    """The same data and seed on 4 ranks in fp32, by (strategy, expert-parallel degree)."""
    folder = tmp_path_factory.mktemp("four")
    keys = [("all_to_all", 4), ("all_to_all", 1), ("mega_moe", 4), ("mega_moe", 2), ("mega_moe", 1)]
    runs = [options(assets, folder, {**STEPS, DISPATCH: kind, EP: ep}) for kind, ep in keys]
    return dict(zip(keys, run_jobs(runs, ranks=4, folder=folder, keep_gradients=True, fp32=True)))


@pytest.mark.parametrize("baseline", [1, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_mega_moe_trains_as_all_to_all_does(four_ranks, ep, baseline):
    ours, theirs = four_ranks["mega_moe", ep], four_ranks["all_to_all", baseline]
    assert_same_losses(ours, theirs, first=1e-6, within=1e-3)
    assert_same_gradients(ours, theirs)


def test_experts_see_the_same_tokens(four_ranks):
    """Token counts feed the load-balancing bias: no strategy may count twice, or others than the router chose."""
    for ep in (1, 2, 4):
        pairs = zip(
            four_ranks["mega_moe", ep].tokens_per_expert, four_ranks["all_to_all", 4].tokens_per_expert, strict=True
        )
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def in_bf16(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    runs = [options(assets, folder, {**STEPS, DISPATCH: kind}) for kind in ("mega_moe", "all_to_all")]
    return run_jobs(runs, ranks=2, folder=folder)


def test_bf16_losses_differ_by_rounding_alone(in_bf16):
    ours, theirs = in_bf16
    assert_same_losses(ours, theirs, first=1e-5, within=1e-3)
    assert ours.losses[10] < ours.losses[1] - 0.02


ALL_TO_ALL = {DISPATCH: "all_to_all"}
ACCUMULATING = {"training.local_batch_size": 1, "training.global_batch_size": 4}
UNIFORM = {"model.moe.force_load_balance": "uniform"}
TENSOR_PARALLEL = {"parallelism.tensor_parallel_degree": 2}
TWO_RANK_RUNS = {
    "all_to_all": ALL_TO_ALL,
    "mega_moe": {},
    "no checkpointing": {"activation_checkpoint.mode": "none"},
    "full checkpointing": {"activation_checkpoint.mode": "full"},
    "saved inputs": {"model.moe.dispatch.saved": "inputs", "activation_checkpoint.mode": "none"},
    "compiled": {"compile.enable": True},
    "accumulating": ACCUMULATING,
    "accumulating all_to_all": {**ACCUMULATING, **ALL_TO_ALL},
    "uniform": UNIFORM,
    "uniform all_to_all": {**UNIFORM, **ALL_TO_ALL},
    "even": {"model.moe.force_load_balance": "even"},
    "tensor parallel": TENSOR_PARALLEL,
    "tensor parallel all_to_all": {**TENSOR_PARALLEL, **ALL_TO_ALL},
    "tensor parallel experts": {**TENSOR_PARALLEL, EP: 1},
    "tensor parallel experts all_to_all": {**TENSOR_PARALLEL, EP: 1, **ALL_TO_ALL},
}


@pytest.fixture(scope="module")
def two_ranks(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    runs = [options(assets, folder, {**STEPS, "training.steps": 3, **settings}) for settings in TWO_RANK_RUNS.values()]
    return dict(zip(TWO_RANK_RUNS, run_jobs(runs, ranks=2, folder=folder, keep_gradients=True, fp32=True)))


@pytest.mark.parametrize(
    "run, baseline",
    [
        ("mega_moe", "all_to_all"),
        ("no checkpointing", "mega_moe"),
        ("full checkpointing", "mega_moe"),
        ("saved inputs", "mega_moe"),
        ("accumulating", "accumulating all_to_all"),
        ("uniform", "uniform all_to_all"),
        ("tensor parallel", "tensor parallel all_to_all"),
        ("tensor parallel experts", "tensor parallel experts all_to_all"),
    ],
)
def test_composition(two_ranks, run, baseline):
    assert_same_losses(two_ranks[run], two_ranks[baseline], first=1e-6, within=1e-3)
    assert_same_gradients(two_ranks[run], two_ranks[baseline])


def test_compiled_blocks(two_ranks):
    """The operator sits inside blocks compiled as one graph, where the experts stay in bf16 (tracing sees through fp32's patch)."""
    assert_same_losses(two_ranks["compiled"], two_ranks["mega_moe"], first=1e-6, within=1e-3)
    assert_same_gradients(two_ranks["compiled"], two_ranks["mega_moe"], within=1e-2)


@pytest.mark.parametrize("run", ["no checkpointing", "full checkpointing"])
def test_checkpointing_changes_no_bit(two_ranks, run):
    assert two_ranks[run].losses == two_ranks["mega_moe"].losses


def test_even_routing_is_even_and_uniform_routing_is_not(two_ranks):
    for counts in two_ranks["even"].tokens_per_expert:
        assert counts.min() == counts.max()
    for counts in two_ranks["uniform"].tokens_per_expert:
        assert counts.min() > 0 and counts.min() != counts.max()
        assert counts.max() < 1.5 * counts.mean()
