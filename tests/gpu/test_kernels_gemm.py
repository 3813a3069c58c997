"""The GEMM kernels of forward and backward on a GPU, with virtual ranks in one process: against fp64, bitwise, and when
things go wrong."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.oracle import dense_moe, gradients
from titan_megamoe.kernels import combine, plan_tables
from titan_megamoe.kernels.gemm_push import gemm_push, gemm_push_backward
from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
from titan_megamoe.kernels.plan_tables import (
    BackwardRows,
    BLOCK_M,
    HiddenRows,
    KeptRows,
    KernelFault,
    LayerShape,
    Layout,
    PHASE_ALL_SENT,
    PHASE_PUBLISHED,
    ResultRows,
    RowShape,
)
from titan_megamoe.kernels.pull_gemm import pull_gemm
from titan_megamoe.kernels.pull_gemm_backward import pull_gemm_backward
from titan_megamoe.kernels.tuning import (
    tune_gemm_push,
    tune_pull_gemm,
    tune_pull_gemm_backward,
)
from titan_megamoe.kernels.weight_gradients import weight_gradients
from titan_megamoe.symmetric import virtual_workspaces

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

NAN = float("nan")
TOLERANCE = 6e-3
"""Of bf16 results with two roundings before the last one."""

GRADIENT_TOLERANCE = 1e-2
GRADIENTS = ("x", "scores", "w1", "w2", "w3")


class Layer:
    """All ranks of a layer, on one device."""

    def __init__(self, tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, *, ids_NK=None, seed=0):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.tokens_per_rank = tokens_per_rank
        self.shape = LayerShape(
            ep_size=len(tokens_per_rank),
            max_tokens=max(tokens_per_rank) + 1,
            dim=dim,
            hidden_dim=hidden_dim,
            num_local_experts=num_local_experts,
            top_k=top_k,
        )
        num_tokens, num_experts = sum(tokens_per_rank), self.shape.num_experts
        self.x_ND = self.randn(num_tokens, dim)
        if ids_NK is None:
            ids_NK = torch.rand(num_tokens, num_experts, generator=self.generator, device="cuda").topk(top_k).indices
        self.ids_NK = ids_NK
        self.scores_NK = torch.rand(num_tokens, top_k, generator=self.generator, device="cuda")
        self.w1_EFD = self.randn(num_experts, hidden_dim, dim, scale=dim**-0.5)
        self.w3_EFD = self.randn(num_experts, hidden_dim, dim, scale=dim**-0.5)
        self.w2_EDF = self.randn(num_experts, dim, hidden_dim, scale=hidden_dim**-0.5)
        self.workspaces = virtual_workspaces(self.shape, "cuda")
        self.plans, self.counters, self.rows = [], [], []
        self.publish()
        for workspace in self.workspaces:
            plan, counters = build_kernel_plan(workspace)
            num_rows = BLOCK_M * read_sizes(plan, workspace).num_tiles
            row_shape = RowShape(layer=self.shape, num_rows=num_rows)
            self.plans.append(plan)
            self.counters.append(counters)
            groups = (
                Layout(group, row_shape).allocate("cuda") for group in (KeptRows, HiddenRows, ResultRows, BackwardRows)
            )
            self.rows.append(
                SimpleNamespace(**{name: tensor for group in groups for name, tensor in vars(group).items()})
            )

    def randn(self, *size, scale=1.0):
        return (torch.randn(*size, generator=self.generator, device="cuda") * scale).bfloat16()

    def both(self, half, phase):
        for workspace in self.workspaces:
            half(workspace, phase)

    def publish(self):
        parts = (t.split(self.tokens_per_rank) for t in (self.x_ND, self.ids_NK, self.scores_NK))
        for each in zip(self.workspaces, *parts):
            combine.publish(*each)
        self.both(combine.signal, PHASE_PUBLISHED)
        self.both(combine.wait, PHASE_PUBLISHED)

    def my_experts(self, rank):
        return slice(rank * self.shape.num_local_experts, (rank + 1) * self.shape.num_local_experts)

    def pull_gemm(self, rank, plan=None, saves=False, **kwargs):
        rows = self.rows[rank]
        kept = dict(gate_RF=rows.gate_RF, up_RF=rows.up_RF) if saves else {}
        pull_gemm(
            plan or self.plans[rank],
            self.counters[rank],
            x_addresses_P=self.workspaces[rank].addresses.x_P,
            w1_EFD=self.w1_EFD[self.my_experts(rank)],
            w3_EFD=self.w3_EFD[self.my_experts(rank)],
            pool_RD=rows.pool_RD,
            h_RF=rows.h_RF,
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            **kept,
            **kwargs,
        )

    def gemm_push(self, rank, out_TD, plan=None, **kwargs):
        if self.shape.ep_size == 1:
            to = dict(out_TD=out_TD)
        else:
            to = dict(slots_addresses_P=self.workspaces[rank].addresses.slots_P, max_tokens=self.shape.max_tokens)
        gemm_push(
            plan or self.plans[rank],
            self.counters[rank],
            h_RF=self.rows[rank].h_RF,
            w2_EDF=self.w2_EDF[self.my_experts(rank)],
            y_RD=self.rows[rank].y_RD,
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            **to,
            **kwargs,
        )

    def forward(self, *, saves=False, num_sms=None, pull=None, push=None):
        """``[N, D]``: what all ranks return, from poisoned buffers. ``pull`` and ``push``: tunings."""
        outs = [torch.full((t, self.shape.dim), NAN, device="cuda", dtype=torch.bfloat16) for t in self.tokens_per_rank]
        self.reset(KeptRows, HiddenRows, ResultRows)
        for rank, out_TD in enumerate(outs):
            self.pull_gemm(rank, saves=saves, num_sms=num_sms, tuning=pull)
            self.gemm_push(rank, out_TD, num_sms=num_sms, tuning=push)
        if self.shape.ep_size > 1:
            self.both(combine.signal, PHASE_ALL_SENT)
            self.both(combine.wait, PHASE_ALL_SENT)
            for workspace, ids_TK, out_TD in zip(self.workspaces, self.ids_NK.split(self.tokens_per_rank), outs):
                combine.reduce_slots(workspace, ids_TK, out_TD)
        for workspace in self.workspaces:
            workspace.check()
        return torch.cat(outs)

    def reset(self, *groups):
        """Zero the counters, poison the rows of these groups and what ranks send each other."""
        for workspace, counters, rows in zip(self.workspaces, self.counters, self.rows):
            for tensor in (counters.arrival_M, counters.done_M, counters.queue):
                tensor.zero_()
            names = [field.name for group in groups for field in fields(group)]
            sent = workspace.published.slots_PTD, workspace.published.score_slots_PTK
            for tensor in (*(getattr(rows, name) for name in names), *sent):
                tensor.fill_(NAN)

    def backward(self, dout_ND, *, num_sms=None, pull=None, push=None):
        """Gradients of ``x_ND, scores_NK`` and the weights, from poisoned buffers, after a forward that saved gate and up.
        ``pull`` and ``push``: tunings."""
        self.reset(BackwardRows)
        grads = [torch.full_like(t, NAN) for t in (self.x_ND, self.scores_NK, self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        douts = dout_ND.split(self.tokens_per_rank)
        dxs, dscores = (grad.split(self.tokens_per_rank) for grad in grads[:2])
        for workspace, dout_TD in zip(self.workspaces, douts):
            combine.publish_rows(workspace, dout_TD=dout_TD)
        self.both(combine.signal, PHASE_PUBLISHED)
        self.both(combine.wait, PHASE_PUBLISHED)
        for rank in range(self.shape.ep_size):
            self.pull_gemm_backward(rank, num_sms=num_sms, tuning=pull)
            self.gemm_push_backward(rank, dxs[rank], dscores[rank], num_sms=num_sms, tuning=push)
            self.weight_gradients(rank, *grads[2:], num_sms=num_sms)
        if self.shape.ep_size > 1:
            self.both(combine.signal, PHASE_ALL_SENT)
            self.both(combine.wait, PHASE_ALL_SENT)
            ids = self.ids_NK.split(self.tokens_per_rank)
            for workspace, ids_TK, dx_TD, dscores_TK in zip(self.workspaces, ids, dxs, dscores):
                combine.reduce_slots(workspace, ids_TK, dx_TD)
                combine.collect_score_slots(workspace, ids_TK, dscores_TK)
        for workspace in self.workspaces:
            workspace.check()
        return grads

    def pull_gemm_backward(self, rank, plan=None, **kwargs):
        rows = self.rows[rank]
        names = ("gate_RF", "up_RF", "dout_RD", "row_scores_R", "dgate_RF", "dup_RF", "scaled_h_RF", "dscore_parts_NR")
        pull_gemm_backward(
            plan or self.plans[rank],
            self.counters[rank],
            dout_addresses_P=self.workspaces[rank].addresses.dout_P,
            w2_EDF=self.w2_EDF[self.my_experts(rank)],
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            **{name: getattr(rows, name) for name in names},
            **kwargs,
        )

    def gemm_push_backward(self, rank, dx_TD, dscores_TK, plan=None, **kwargs):
        rows, addresses = self.rows[rank], self.workspaces[rank].addresses
        if self.shape.ep_size == 1:
            to = dict(dx_TD=dx_TD, dscores_TK=dscores_TK)
        else:
            to = dict(slots_addresses_P=addresses.slots_P, score_slots_addresses_P=addresses.score_slots_P)
            to["max_tokens"] = self.shape.max_tokens
        gemm_push_backward(
            plan or self.plans[rank],
            self.counters[rank],
            w1_EFD=self.w1_EFD[self.my_experts(rank)],
            w3_EFD=self.w3_EFD[self.my_experts(rank)],
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            **{name: getattr(rows, name) for name in ("dgate_RF", "dup_RF", "dx_RD", "dscore_parts_NR")},
            **to,
            **kwargs,
        )

    def weight_gradients(self, rank, dw1_EFD, dw2_EDF, dw3_EFD, **kwargs):
        rows, mine = self.rows[rank], self.my_experts(rank)
        weight_gradients(
            self.plans[rank],
            self.counters[rank],
            x_RD=rows.pool_RD,
            dw1_EFD=dw1_EFD[mine],
            dw2_EDF=dw2_EDF[mine],
            dw3_EFD=dw3_EFD[mine],
            **{name: getattr(rows, name) for name in ("dout_RD", "dgate_RF", "dup_RF", "scaled_h_RF")},
            **kwargs,
        )

    def expected_gradients(self, dout_ND):
        """What :meth:`backward` should return, in fp64."""
        inputs = (self.x_ND, self.ids_NK, self.scores_NK, self.w1_EFD, self.w2_EDF, self.w3_EFD)
        inputs = [t.double() if t.is_floating_point() else t for t in inputs]
        return gradients(dense_moe, inputs, dout_ND.double())[1:]

    def check_backward(self, **options):
        self.forward(saves=True)
        dout_ND = self.randn(*self.x_ND.shape)
        grads = self.backward(dout_ND, **options)
        for name, got, expected in zip(GRADIENTS, grads, self.expected_gradients(dout_ND), strict=True):
            assert relative_error(got, expected) < GRADIENT_TOLERANCE, name
        return dout_ND, grads

    def expected(self):
        """``out_ND`` in fp64, and per expert (tokens, x, gate, up, h) in the order of its rows."""
        out_ND = torch.zeros(self.x_ND.shape, dtype=torch.float64, device="cuda")
        experts = []
        for expert in range(self.shape.num_experts):
            token, slot = (self.ids_NK == expert).nonzero(as_tuple=True)
            x = self.x_ND[token].double()
            gate, up = x @ self.w1_EFD[expert].double().T, x @ self.w3_EFD[expert].double().T
            h = torch.nn.functional.silu(gate) * up
            y = h @ self.w2_EDF[expert].double().T
            out_ND.index_add_(0, token, y * self.scores_NK[token, slot, None].double())
            experts.append((self.x_ND[token], gate, up, h, y))
        return out_ND, experts

    def check(self, *, saves=False):
        out_ND = self.forward(saves=saves)
        expected_ND, experts = self.expected()
        assert relative_error(out_ND, expected_ND) < TOLERANCE
        for rank, (plan, rows) in enumerate(zip(self.plans, self.rows)):
            starts = plan.expert_start_e1.tolist()
            for local, (x, gate, up, h, y) in enumerate(experts[self.my_experts(rank)]):
                mine = slice(starts[local], starts[local] + x.shape[0])
                assert torch.equal(rows.pool_RD[mine], x)
                assert relative_error(rows.h_RF[mine], h) < TOLERANCE
                assert relative_error(rows.y_RD[mine], y) < TOLERANCE
                if saves:
                    assert relative_error(rows.gate_RF[mine], gate) < TOLERANCE
                    assert relative_error(rows.up_RF[mine], up) < TOLERANCE
        return out_ND


def relative_error(got, expected):
    """Infinite if anything is not finite."""
    if not expected.numel():
        return 0.0
    if not got.isfinite().all():
        return float("inf")
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


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
def test_against_fp64(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim):
    Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim).check()


@SIZES
def test_backward_against_fp64(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim):
    Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim).check_backward()


def test_gate_and_up_are_saved():
    Layer([900, 33], 8, 4, 512, 256).check(saves=True)


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("expert", [0, 2])
def test_one_hot_expert(ep_size, expert):
    ids_NK = torch.full((600, 2), expert, device="cuda")  # each token names it twice: two rows
    layer = Layer([600 // ep_size] * ep_size, 3, 2, 256, 128, ids_NK=ids_NK)
    layer.check()
    layer.check_backward()


def test_everything_to_one_rank():
    ids_NK = torch.rand(400, 4, device="cuda").topk(3).indices + 8
    layer = Layer([100] * 4, 4, 3, 256, 128, ids_NK=ids_NK)
    layer.check()
    layer.check_backward()


@pytest.mark.parametrize("ep_size, num_routings", [(1, 100), (4, 100)])
def test_random_routings(ep_size, num_routings):
    for seed in range(num_routings):
        torch.manual_seed(seed)
        tokens_per_rank = torch.randint(0, 300, (ep_size,)).tolist()
        num_sms = int(torch.randint(1, sm_count() + 1, ()))
        layer = Layer(tokens_per_rank, 5, 3, 192, 64, seed=seed)
        expected_ND, _ = layer.expected()
        assert relative_error(layer.forward(saves=True, num_sms=num_sms), expected_ND) < TOLERANCE, seed
        dout_ND = layer.randn(*layer.x_ND.shape)
        grads = layer.backward(dout_ND, num_sms=num_sms)
        for name, got, expected in zip(GRADIENTS, grads, layer.expected_gradients(dout_ND), strict=True):
            assert relative_error(got, expected) < GRADIENT_TOLERANCE, (seed, name)


@pytest.mark.parametrize("tokens_per_rank", [[1000], [300] * 4])
def test_bitwise_equal_on_any_number_of_sms(tokens_per_rank):
    layer = Layer(tokens_per_rank, 16, 6, 1024, 384)
    out_ND = layer.forward(saves=True)
    dout_ND = layer.randn(*layer.x_ND.shape)
    grads = layer.backward(dout_ND)
    for num_sms in (1, 5, sm_count() - 1, sm_count()):
        assert torch.equal(layer.forward(saves=True, num_sms=num_sms), out_ND), num_sms
        for name, got, expected in zip(GRADIENTS, layer.backward(dout_ND, num_sms=num_sms), grads, strict=True):
            assert torch.equal(got, expected), (num_sms, name)


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


def test_captured_in_a_graph():
    layer = Layer([700], 8, 2, 512, 256)
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


def test_rows_that_never_arrive_are_reported():
    layer = Layer([300], 4, 2, 256, 128)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[1] = 0  # no tokens to pull
    layer.pull_gemm(0, plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: pull_gemm waited past its deadline for the rows of tile \d+"):
        layer.workspaces[0].check()


def test_tiles_that_are_never_done_are_reported():
    layer = Layer([300], 4, 2, 256, 128)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[0] = 0  # no tiles to multiply
    layer.gemm_push(0, torch.empty(300, 256, device="cuda", dtype=torch.bfloat16), plan, deadline_seconds=0.05)
    with pytest.raises(KernelFault, match=r"rank 0: gemm_push waited past its deadline for the products of tile \d+"):
        layer.workspaces[0].check()


def test_faults_of_backward_say_so():
    layer = Layer([300], 4, 2, 256, 128)
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


def test_a_fault_record_is_complete():
    layer = Layer([300], 4, 2, 256, 128)
    plan = replace(layer.plans[0], sizes=layer.plans[0].sizes.clone())
    plan.sizes[1] = 0
    layer.pull_gemm(0, plan, deadline_seconds=0.05)
    record = dict(zip(plan_tables.FAULT_FIELDS, layer.workspaces[0].local.fault.tolist()))
    assert record["code"] == plan_tables.FAULT_DEADLINE
    assert record["kernel"] == plan_tables.KERNEL_PULL_GEMM
    assert record["phase"] == plan_tables.PHASE_ARRIVAL
    assert record["have"] == 0
    assert record["want"] == plan.tile_rows_M[record["item"]]


def test_arguments_are_checked():
    layer = Layer([300], 4, 2, 256, 128)
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
