"""Which kernels ``hopper.py`` launches, in which order and with arguments that they accept: without a GPU, and without running
them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from titan_megamoe import hopper
from titan_megamoe.kernels import combine, gemm_push, plan, pull_gemm, pull_gemm_backward, weight_gradients
from titan_megamoe.kernels.plan_tables import LayerShape
from titan_megamoe.symmetric import SymmetricWorkspace, virtual_workspaces

TOKENS, DIM, HIDDEN, LOCAL_EXPERTS, TOP_K = 40, 128, 64, 4, 2
PLAN = ["publish", "count", "scan", "place"]


class Launches(list):
    """Stands in for kernels: remembers their names instead of running them."""

    def of(self, kernel_name: str):
        name = kernel_name.removesuffix("_kernel")

        class Kernel:
            def __getitem__(_, grid):
                assert all(size >= 1 for size in grid)
                return lambda *args, **kwargs: self.append(name)

        return Kernel()


@pytest.fixture
def launches(monkeypatch) -> Launches:
    launched = Launches()
    for module in (combine, gemm_push, plan, pull_gemm, pull_gemm_backward, weight_gradients):
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, launched.of(name))
        if hasattr(module, "grid_size"):
            monkeypatch.setattr(module, "grid_size", lambda *args: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(SymmetricWorkspace, "check_later", lambda self: None)
    return launched


def make_layer(ep_size: int, capacity: float | None = None):
    """A rank's workspace, and its inputs and gradient."""
    shape = LayerShape(
        ep_size=ep_size,
        max_tokens=TOKENS,
        dim=DIM,
        hidden_dim=HIDDEN,
        num_local_experts=LOCAL_EXPERTS,
        top_k=TOP_K,
        capacity=capacity,
    )
    x_TD = torch.zeros(TOKENS, DIM).bfloat16()
    ids_TK = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights = [torch.zeros(LOCAL_EXPERTS, *size).bfloat16() for size in ((HIDDEN, DIM), (DIM, HIDDEN), (HIDDEN, DIM))]
    return virtual_workspaces(shape, "cpu")[-1], (x_TD, ids_TK, torch.zeros(TOKENS, TOP_K), *weights)


def run(workspace, inputs, *, keep: bool):
    """Forward and backward."""
    x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD = inputs
    dispatched = hopper.dispatch(x_TD, ids_TK, scores_TK, w1_EFD, w3_EFD, workspace=workspace, keep_activations=keep)
    out_TD = hopper.combine(dispatched.plan, dispatched.rows_R0, dispatched.h, ids_TK, w2_EDF, workspace=workspace)
    assert out_TD.shape == x_TD.shape and out_TD.dtype == torch.bfloat16
    assert (dispatched.kept.numel() > 0) == (keep and dispatched.rows_R0.shape[0] > 0)
    gradients = hopper.backward(
        out_TD,
        *inputs,
        plan=dispatched.plan,
        kept=dispatched.kept,
        rows_R0=dispatched.rows_R0,
        kept_activations=keep,
        workspace=workspace,
    )
    for name, tensor in dict(x_TD=x_TD, topk_scores_TK=scores_TK, w1_EFD=w1_EFD, w2_EDF=w2_EDF, w3_EFD=w3_EFD).items():
        gradient = getattr(gradients, name)
        assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype, name
    return dispatched


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_one_rank(launches, capacity):
    run(*make_layer(1, capacity), keep=True)
    assert launches == [*PLAN, "pull_gemm", "gemm_push", "pull_gemm_backward", "gemm_push", "weight_gradients"]


def test_one_rank_that_kept_only_its_inputs(launches):
    run(*make_layer(1), keep=False)
    backward = ["pull_gemm", "pull_gemm_backward", "gemm_push", "weight_gradients"]
    assert launches == [*PLAN, "pull_gemm", "gemm_push", *backward]


@pytest.mark.parametrize("keep", [True, False])
def test_several_ranks_wait_twice_in_each_direction(launches, monkeypatch, keep):
    workspace, inputs = make_layer(2)
    sizes = [3, 70, 100, 0]  # num_tiles, num_unique, num_rows, overflow
    monkeypatch.setattr(SymmetricWorkspace, "read", lambda self, values: sizes)
    dispatched = run(workspace, inputs, keep=keep)
    assert dispatched.rows_R0.shape == (3 * 128, 0)
    publish, *build = PLAN
    forward = [publish, "handshake", *build, "pull_gemm", "gemm_push", "handshake", "reduce"]
    again = [] if keep else ["pull_gemm"]
    # The weight gradients are between telling the others and waiting for them.
    backward = [*again, "pull_gemm_backward", "gemm_push", "handshake", "weight_gradients", "handshake"]
    assert launches == [*forward, "handshake", *backward, "reduce", "collect_scores"]


@pytest.mark.parametrize("keep", [True, False])
def test_a_rank_without_rows_takes_part_in_everything_between_ranks(launches, monkeypatch, keep):
    workspace, inputs = make_layer(2)
    monkeypatch.setattr(SymmetricWorkspace, "read", lambda self, values: [0, 0, 0, 0])
    inputs[0].fill_(7)
    run(workspace, inputs, keep=keep)
    assert launches.count("handshake") == 5 and launches.count("reduce") == 2 and "collect_scores" in launches
    assert not {"pull_gemm", "gemm_push", "pull_gemm_backward", "weight_gradients"} & set(launches)
    assert bool((workspace.published.x_TD == 7).all()) == (not keep), "others pull its tokens again"
