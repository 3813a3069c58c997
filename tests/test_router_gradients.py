"""The router under mega_moe: recomputation never routes anew, and counts, bias and clipping are those of all_to_all."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from tests.oracle import random_layer, relative_error
from tests.test_training import assert_same_gradients, DISPATCH, STEPS
from tests.training import options, run_jobs
from titan_megamoe import mega_moe, reference
from titan_megamoe.integration.activation_checkpoint import MegaMoEFullAC, MegaMoESelectiveAC

# ---- near ties, and kernels that compute otherwise the second time

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 200, 32, 16, 8, 3


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Block(nn.Module):
    """A router whose experts come in pairs of equal scores, so that every third choice is between equals; and the experts."""

    def __init__(self):
        super().__init__()
        gate = Linear.Config(in_features=DIM, out_features=EXPERTS)
        self.router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP_K).build()
        _, _, _, *weights = random_layer(TOKENS, DIM, HIDDEN, EXPERTS, TOP_K, dtype=torch.float32)
        self.w1, self.w2, self.w3 = (nn.Parameter(w) for w in weights)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            pairs = torch.randn(EXPERTS // 2, DIM, generator=generator)
            self.router.gate.weight.copy_(pairs.repeat_interleave(2, dim=0))
        self.routed: list[torch.Tensor] = []

    def forward(self, x_TD):
        scores_BTK, ids_BTK, _ = self.router(torch.tanh(x_TD)[None])
        self.routed.append(ids_BTK[0].clone())
        return x_TD + mega_moe(x_TD, ids_BTK[0], scores_BTK[0], self.w1, self.w2, self.w3, backend="reference")


def train_once(policy) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The choices of a block in its forward and its recomputation, and the gradients of its input and parameters."""
    block = Block()
    wrapped = policy._wrap_block(block) if policy is not None else block
    x_TD = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(2), requires_grad=True)
    wrapped(x_TD).square().mean().backward()
    return block.routed, [x_TD.grad, *(p.grad for p in block.parameters())]


@pytest.fixture
def perturbed(monkeypatch):
    """In a recomputation, kernels give results that are 1e-3 off, the router's among them."""
    gate_up, gate = reference.gate_up, Linear.forward
    generator = torch.Generator().manual_seed(3)

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        # The same operators both times, of which autograd saves nothing: checkpointing compares what is called and saved.
        noise = torch.randn(tensor.shape, generator=generator) * (1e-3 if in_backward() else 0.0)
        return tensor + tensor.detach() * noise

    monkeypatch.setattr(reference, "gate_up", lambda *args: tuple(noisy(t) for t in gate_up(*args)))
    monkeypatch.setattr(Linear, "forward", lambda self, x: noisy(gate(self, x)))


POLICIES = {"full": MegaMoEFullAC, "selective": MegaMoESelectiveAC}


@pytest.mark.parametrize("mode", POLICIES)
def test_a_recomputation_keeps_the_routing(mode, perturbed):
    policy = POLICIES[mode](POLICIES[mode].Config())
    (first, again), gradients = train_once(policy)
    assert torch.equal(first, again)
    _, expected = train_once(None)
    for a, b in zip(gradients, expected, strict=True):
        assert relative_error(a, b) < 1e-2


def test_without_the_saved_choices_it_would_not(perturbed):
    (first, again), _ = train_once(FullAC(FullAC.Config()))
    assert (first != again).any(dim=1).float().mean() > 0.2, "or the test above tests nothing"


# ---- whole training runs: counts, load-balancing bias, clipping

AC = "activation_checkpoint.mode"
CLIPPED = {"training.steps": 5, "training.max_norm": 0.05}
RUNS = {
    (kind, mode): {**STEPS, **CLIPPED, DISPATCH: kind, AC: mode}
    for kind, mode in [("all_to_all", "none"), ("all_to_all", "full"), ("mega_moe", "none"), ("mega_moe", "full")]
}
RUNS["mega_moe", "selective"] = {**STEPS, **CLIPPED, DISPATCH: "mega_moe", AC: "selective"}
BASELINE = ("all_to_all", "none")


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    jobs = [options(assets, folder, settings) for settings in RUNS.values()]
    return dict(zip(RUNS, run_jobs(jobs, ranks=2, folder=folder, keep_gradients=True, fp32=True)))


@pytest.mark.parametrize("run", [run for run in RUNS if run != BASELINE], ids=str)
def test_gradient_norms_and_clipped_gradients(runs, run):
    baseline = runs[BASELINE]
    assert all(norm > CLIPPED["training.max_norm"] for norm in baseline.grad_norms.values()), "all steps are clipped"
    for step, norm in runs[run].grad_norms.items():
        assert norm == pytest.approx(baseline.grad_norms[step], rel=1e-3), step
    assert_same_gradients(runs[run], baseline)


@pytest.mark.parametrize("run", [run for run in RUNS if run != BASELINE], ids=str)
def test_the_load_balancing_bias(runs, run):
    assert len(runs[run].expert_bias) == 2
    for ours, theirs in zip(runs[run].expert_bias, runs[BASELINE].expert_bias, strict=True):
        assert theirs.abs().max() > 1e-3, "five steps of 1e-3 each have moved it"
        assert torch.equal(ours, theirs)


def test_tokens_are_counted_as_often_as_by_all_to_all(runs):
    """Once, and once more for a recomputed forward, which TorchTitan knows and halves before it uses the counts."""
    counts = {run: torch.stack(runs[run].tokens_per_expert) for run in RUNS}
    batch, length, top_k = STEPS["training.local_batch_size"], 256, 2
    assert (counts[BASELINE].sum(dim=1) == batch * length * top_k).all()
    for (kind, mode), counted in counts.items():
        assert torch.equal(counted, counts[BASELINE] * (1 if mode == "none" else 2)), (kind, mode)
