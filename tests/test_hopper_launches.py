"""Which kernels ``hopper.py`` launches, in which order and with arguments that they accept: without a GPU, and without running
them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from titan_megamoe import hopper
from titan_megamoe.hopper import Numerics
from titan_megamoe.kernels import (
    combine,
    gemm_push,
    gemm_push_fp8,
    plan,
    pull_gemm,
    pull_gemm_backward,
    pull_gemm_backward_fp8,
    pull_gemm_fp8,
    quantize,
    weight_gradients,
    weight_gradients_fp8,
)
from titan_megamoe.kernels.plan_tables import FAULT_PEER, FAULT_STOPPED, LayerShape
from titan_megamoe.symmetric import _ADDRESSED, SymmetricWorkspace, virtual_workspaces
from titan_megamoe.weight_cache import WeightCache, weights_changed

TOKENS, DIM, HIDDEN, LOCAL_EXPERTS, TOP_K = 40, 256, 128, 4, 2
MODULES = (
    combine,
    gemm_push,
    gemm_push_fp8,
    plan,
    pull_gemm,
    pull_gemm_backward,
    pull_gemm_backward_fp8,
    pull_gemm_fp8,
    quantize,
    weight_gradients,
    weight_gradients_fp8,
)
BF16 = Numerics()
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
    for module in MODULES:
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


def run(workspace, inputs, *, keep: bool, numerics: Numerics = BF16):
    """Forward and backward."""
    x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD = inputs
    with_workspace = dict(workspace=workspace, numerics=numerics)
    dispatched = hopper.dispatch(x_TD, ids_TK, scores_TK, w1_EFD, w3_EFD, keep_activations=keep, **with_workspace)
    out_TD = hopper.combine(dispatched.plan, dispatched.rows_R0, dispatched.h, ids_TK, w2_EDF, **with_workspace)
    assert out_TD.shape == x_TD.shape and out_TD.dtype == torch.bfloat16
    assert (dispatched.kept.numel() > 0) == (keep and dispatched.rows_R0.shape[0] > 0)
    gradients = hopper.backward(
        out_TD,
        *inputs,
        plan=dispatched.plan,
        kept=dispatched.kept,
        rows_R0=dispatched.rows_R0,
        kept_activations=keep,
        **with_workspace,
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


# ---- FP8: backward's kernels are named as in bf16, but for the suffix

QUANTIZE, WEIGHT, COLUMNS = "quantize_rows", "quantize_weights", "quantize_columns"
FORWARD_FP8 = [QUANTIZE, *PLAN, WEIGHT, WEIGHT, "pull_gemm_fp8", WEIGHT, "gemm_push_fp8"]
DGRAD_FP8 = [QUANTIZE, WEIGHT, "pull_gemm_backward_fp8", WEIGHT, WEIGHT, "gemm_push_fp8"]
WGRAD_FP8 = [COLUMNS] * 5 + ["weight_gradients_fp8"]


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
@pytest.mark.parametrize("capacity", [None, 1.5])
def test_fp8(launches, wgrad, capacity):
    run(*make_layer(1, capacity), keep=True, numerics=Numerics(precision="fp8", wgrad=wgrad))
    in_bf16 = ["dequantize_rows", "dequantize_rows", "weight_gradients"]
    assert launches == [*FORWARD_FP8, *DGRAD_FP8, *(WGRAD_FP8 if wgrad == "fp8" else in_bf16)]


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_fp8_in_backward_only(launches, wgrad):
    run(*make_layer(1), keep=True, numerics=Numerics(precision="fp8_bwd", wgrad=wgrad))
    in_bf16 = ["dequantize_rows", "weight_gradients"]
    forward = [*PLAN, "pull_gemm", "gemm_push"]
    assert launches == [*forward, *DGRAD_FP8, *(WGRAD_FP8 if wgrad == "fp8" else in_bf16)]


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_fp8_of_a_rank_that_kept_only_its_inputs(launches, precision):
    run(*make_layer(1), keep=False, numerics=Numerics(precision=precision))
    pulls = [name for name in launches if name.startswith("pull")]
    pull_gemm = "pull_gemm_fp8" if precision == "fp8" else "pull_gemm"
    assert pulls == [pull_gemm, pull_gemm, "pull_gemm_backward_fp8"]
    assert launches.count(QUANTIZE) == (3 if precision == "fp8" else 1)


def test_fp8_of_several_ranks(launches, monkeypatch):
    workspace, inputs = make_layer(2)
    monkeypatch.setattr(SymmetricWorkspace, "read", lambda self, values: [3, 70, 100, 0])
    run(workspace, inputs, keep=True, numerics=Numerics(precision="fp8"))
    assert launches.count("handshake") == 5 and launches.count(QUANTIZE) == 2
    assert launches.index(QUANTIZE) < launches.index("handshake") < launches.index("pull_gemm_fp8")


def test_a_weight_cache_quantises_once(launches):
    cache = WeightCache()
    numerics = Numerics(precision="fp8", cache_key=int(cache.key))
    layer = make_layer(1)
    for _ in range(2):
        run(*layer, keep=True, numerics=numerics)
    assert launches.count(WEIGHT) == 3
    weights_changed()
    run(*layer, keep=True, numerics=numerics)
    assert launches.count(WEIGHT) == 6


# ---- compilation before the first wait, and what happens when a rank cannot go on


def rehearse(workspace, inputs, *, keep: bool, numerics: Numerics) -> None:
    _, ids_TK, scores_TK, *weights = inputs
    link = SimpleNamespace(group="the group", size=2)
    options = dict(workspace=workspace, keep_activations=keep, numerics=numerics, link=link)
    hopper.rehearse(ids_TK.dtype, scores_TK.dtype, *weights, **options)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_bwd"])
def test_all_kernels_are_run_once_before_a_rank_waits_for_others(launches, monkeypatch, keep, precision):
    monkeypatch.setattr(dist, "barrier", lambda group: launches.append(f"barrier of {group}"))
    monkeypatch.setattr(SymmetricWorkspace, "raise_if_late", lambda self: None)
    workspace, inputs = make_layer(2, capacity=2.0)
    numerics = Numerics(precision=precision)
    rehearse(workspace, inputs, keep=keep, numerics=numerics)
    assert launches[-1] == "barrier of the group"
    compiled = set(launches)
    launches.clear()
    rehearse(workspace, inputs, keep=keep, numerics=numerics)
    assert launches == [], "once is enough"
    run(workspace, inputs, keep=keep, numerics=numerics)
    assert set(launches) == compiled - {"barrier of the group"}
    launches.clear()
    rehearse(workspace, inputs, keep=not keep, numerics=numerics)
    assert launches, "other options are other kernels"


def test_a_rehearsal_touches_no_flag_and_nothing_of_another_rank():
    workspace, _ = make_layer(4)
    workspace.published.flags.fill_(3)
    alone = workspace.rehearsal()
    assert workspace.rank == 3 and alone.rank == 3
    assert (workspace.published.flags == 3).all() and not (workspace.local.calls.any() or workspace.local.fault.any())
    assert alone.local.fault.data_ptr() != workspace.local.fault.data_ptr()
    for name, of in _ADDRESSED.items():
        mine = getattr(alone.published, of).data_ptr()
        assert getattr(alone.addresses, name).tolist() == [mine] * 4, name
        assert (mine == getattr(workspace.published, of).data_ptr()) == (of != "flags"), name


def test_a_rank_that_stops_tells_its_peers_and_keeps_its_first_fault(launches):
    workspace, _ = make_layer(2)
    workspace.stop()
    assert launches == ["handshake", "handshake"]
    assert workspace.local.fault[:2].tolist() == [FAULT_STOPPED, 1]
    workspace.local.fault[0] = FAULT_PEER
    workspace.stop()
    assert workspace.local.fault[0] == FAULT_PEER
    launches.clear()
    make_layer(1)[0].stop()
    assert launches == [], "a rank of its own has nobody to tell"


@pytest.mark.parametrize("what", ["the routing plan", "the rows received", "the rows' results", "the rows' gradients"])
def test_out_of_memory_says_how_much_was_wanted_for_what_and_tells_the_peers(launches, monkeypatch, what):
    workspace, inputs = make_layer(2)
    monkeypatch.setattr(SymmetricWorkspace, "read", lambda self, values: [3, 70, 100, 0])
    allocate, empty = hopper._allocate, torch.empty

    def full(num_bytes, wanted_for, *args):
        def refuse(size, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse if wanted_for == what else empty)
            return allocate(num_bytes, wanted_for, *args)

    monkeypatch.setattr(hopper, "_allocate", full)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(workspace, inputs, keep=True)
    message = str(raised.value)
    assert message.startswith(f"mega_moe: rank 1: no memory for {what}: ") and message.endswith("CUDA out of memory.")
    rows = r"\(\d+ bytes, 384 rows where an even routing gives 80\)" if "rows" in what else r"\(\d+ bytes\)"
    assert re.search(rows, message) and "model.moe.dispatch.saved = 'inputs'" in message
    assert launches[-2:] == ["handshake", "handshake"] and workspace.local.fault[0] == FAULT_STOPPED
