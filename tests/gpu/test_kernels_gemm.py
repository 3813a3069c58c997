"""The GEMM kernels of forward and backward on a GPU, with virtual ranks in one process: against fp64, bitwise, and when
things go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.kernel_layer import GRADIENT_TOLERANCE, GRADIENTS, Layer, NAN, relative_error, TOLERANCE
from titan_megamoe.backends import missing_on_this_machine
from titan_megamoe.kernels import plan_tables
from titan_megamoe.kernels.plan_tables import BackwardRows, KernelFault
from titan_megamoe.kernels.tuning import (
    tune_gemm_push,
    tune_pull_gemm,
    tune_pull_gemm_backward,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
needs_hopper = pytest.mark.skipif(
    missing_on_this_machine("hopper") is not None, reason=str(missing_on_this_machine("hopper"))
)


SIZES = pytest.mark.parametrize(
    "tokens_per_rank, num_local_experts, top_k, dim, hidden_dim",
    [
        ([300], 4, 2, 256, 128),
        ([1], 1, 1, 64, 64),
        ([777], 16, 8, 2048, 768),
        ([200], 40, 32, 1984, 320),
        ([130], 128, 8, 4096, 192),
        ([13, 0, 700, 30], 3, 2, 512, 192),
        ([90, 90], 16, 32, 4096, 256),
        ([50] * 9, 1, 3, 320, 64),
        ([0, 0], 2, 1, 128, 64),
        ([500] * 8, 16, 8, 2048, 768),
    ],
)


@SIZES
def test_against_fp64(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, kernels):
    Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, kernels=kernels).check()


@SIZES
def test_backward_against_fp64(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, kernels):
    Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, kernels=kernels).check_backward()


def test_gate_and_up_are_saved(kernels):
    Layer([900, 33], 8, 4, 512, 256, kernels=kernels).check(saves=True)


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("expert", [0, 2])
def test_one_hot_expert(ep_size, expert, kernels):
    ids_NK = torch.full((600, 2), expert, device="cuda")  # each token names it twice: two rows
    layer = Layer([600 // ep_size] * ep_size, 3, 2, 256, 128, ids_NK=ids_NK, kernels=kernels)
    layer.check()
    layer.check_backward()


def test_everything_to_one_rank(kernels):
    ids_NK = torch.rand(400, 4, device="cuda").topk(3).indices + 8
    layer = Layer([100] * 4, 4, 3, 256, 128, ids_NK=ids_NK, kernels=kernels)
    layer.check()
    layer.check_backward()


@pytest.mark.parametrize("ep_size, num_routings", [(1, 100), (4, 100)])
def test_random_routings(ep_size, num_routings, kernels):
    for seed in range(num_routings):
        torch.manual_seed(seed)
        tokens_per_rank = torch.randint(0, 300, (ep_size,)).tolist()
        num_sms = int(torch.randint(1, sm_count() + 1, ()))
        layer = Layer(tokens_per_rank, 5, 3, 192, 64, seed=seed, kernels=kernels)
        expected_ND, _ = layer.expected()
        assert relative_error(layer.forward(saves=True, num_sms=num_sms), expected_ND) < TOLERANCE, seed
        dout_ND = layer.randn(*layer.x_ND.shape)
        grads = layer.backward(dout_ND, num_sms=num_sms)
        for name, got, expected in zip(GRADIENTS, grads, layer.expected_gradients(dout_ND), strict=True):
            assert relative_error(got, expected) < GRADIENT_TOLERANCE, (seed, name)


@pytest.mark.parametrize("tokens_per_rank", [[1000], [300] * 4])
def test_bitwise_equal_on_any_number_of_sms(tokens_per_rank, kernels):
    layer = Layer(tokens_per_rank, 16, 6, 1024, 384, kernels=kernels)
    out_ND = layer.forward(saves=True)
    dout_ND = layer.randn(*layer.x_ND.shape)
    grads = layer.backward(dout_ND)
    for num_sms in (1, 5, sm_count() - 1, sm_count()):
        assert torch.equal(layer.forward(saves=True, num_sms=num_sms), out_ND), num_sms
        for name, got, expected in zip(GRADIENTS, layer.backward(dout_ND, num_sms=num_sms), grads, strict=True):
            assert torch.equal(got, expected), (num_sms, name)


@needs_hopper
@pytest.mark.parametrize("comm_warps", [1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 3])
def test_any_number_of_communication_warps(ep_size, comm_warps):
    layer = Layer([300] * ep_size, 6, 4, 512, 256)
    expected = layer.forward()
    pull = replace(tune_pull_gemm(512, 256), comm_warps=comm_warps, tokens=2)
    push = replace(tune_gemm_push(512, 256, top_k=4, ep_size=ep_size), comm_warps=comm_warps)
    assert torch.equal(layer.forward(saves=True, pull=pull, push=push), expected)
    dout_ND = layer.randn(*layer.x_ND.shape)
    grads = layer.backward(dout_ND)
    pull = replace(tune_pull_gemm_backward(512, 256), comm_warps=comm_warps, tokens=2)
    for got, expected in zip(layer.backward(dout_ND, pull=pull, push=push), grads, strict=True):
        assert torch.equal(got, expected)


def test_captured_in_a_graph(kernels):
    layer = Layer([700], 8, 2, 512, 256, kernels=kernels)
    expected = layer.forward()
    out_TD = torch.full_like(expected, NAN)

    def run():
        for tensor in (layer.counters[0].arrival_M, layer.counters[0].done_M, layer.counters[0].queue):
            tensor.zero_()
        layer.pull_gemm(0)
        layer.gemm_push(0, out_TD)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    out_TD.fill_(NAN)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out_TD, expected)


def test_rows_that_never_arrive_are_reported(kernels):
    layer = Layer([300], 4, 2, 256, 128, kernels=kernels)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[1] = 0  # no tokens to pull
    layer.pull_gemm(0, plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: pull_gemm waited past its deadline for the rows of tile \d+"):
        layer.workspaces[0].check()


def test_tiles_that_are_never_done_are_reported(kernels):
    layer = Layer([300], 4, 2, 256, 128, kernels=kernels)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[0] = 0  # no tiles to multiply
    layer.gemm_push(0, torch.empty(300, 256, device="cuda", dtype=torch.bfloat16), plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: gemm_push waited past its deadline for the products of tile \d+"):
        layer.workspaces[0].check()


def test_faults_of_backward_say_so(kernels):
    layer = Layer([300], 4, 2, 256, 128, kernels=kernels)
    layer.forward(saves=True)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[1] = 0  # no tokens to pull
    layer.reset(BackwardRows)
    layer.pull_gemm_backward(0, plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: pull_gemm_backward waited past its deadline for the rows of tile"):
        layer.workspaces[0].check()
    layer.workspaces[0].local.fault.zero_()
    plan.sizes.copy_(layer.plans[0].sizes)
    plan.sizes[0] = 0  # no tiles to multiply
    layer.gemm_push_backward(0, layer.x_ND, layer.scores_NK, plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: gemm_push_backward waited past its deadline for the products of"):
        layer.workspaces[0].check()


def test_a_fault_record_is_complete(kernels):
    layer = Layer([300], 4, 2, 256, 128, kernels=kernels)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[1] = 0
    layer.pull_gemm(0, plan, deadline_seconds=0.05)
    record = dict(zip(plan_tables.FAULT_FIELDS, layer.workspaces[0].local.fault.tolist()))
    assert record["code"] == plan_tables.FAULT_DEADLINE
    assert record["kernel"] == plan_tables.KERNEL_PULL_GEMM
    assert record["phase"] == plan_tables.PHASE_ARRIVAL
    assert record["have"] == 0
    assert record["want"] == plan.tile_rows_M[record["item"]]


def test_arguments_are_checked(kernels):
    layer = Layer([300], 4, 2, 256, 128, kernels=kernels)
    out_TD = torch.empty(300, 256, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_sms = 0"):
        layer.pull_gemm(0, num_sms=0)
    with pytest.raises(ValueError, match="deadline_seconds"):
        layer.pull_gemm(0, deadline_seconds=0)
    with pytest.raises(ValueError, match="w2_EDF"):
        layer.w2_EDF = layer.w2_EDF.transpose(1, 2)
        layer.gemm_push(0, out_TD)


def sm_count():
    return torch.cuda.get_device_properties("cuda").multi_processor_count
