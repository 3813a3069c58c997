"""All ranks of a layer on one device, and the GEMM kernels of one backend over them: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import torch

from tests.oracle import dense_moe, gradients
from titan_megamoe.backends import kernel_set
from titan_megamoe.kernels import combine
from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
from titan_megamoe.kernels.plan_tables import (
    BackwardRows,
    BLOCK_M,
    HiddenRows,
    KeptRows,
    LayerShape,
    Layout,
    PHASE_ALL_SENT,
    PHASE_PUBLISHED,
    ResultRows,
    RowShape,
)
from titan_megamoe.symmetric import virtual_workspaces

NAN = float("nan")
TOLERANCE = 6e-3
"""Of bf16 results with two roundings before the last one."""

GRADIENT_TOLERANCE = 1e-2
GRADIENTS = ("x", "scores", "w1", "w2", "w3")


class Layer:
    """All ranks of a layer, on one device. ``loose``: by how much the tolerances are wider."""

    def __init__(
        self,
        tokens_per_rank,
        num_local_experts,
        top_k,
        dim,
        hidden_dim,
        *,
        ids_NK=None,
        seed=0,
        kernels="hopper",
        device="cuda",
        loose=1.0,
    ):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.kernels, self.device, self.loose = kernel_set(kernels), device, loose
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
            ids_NK = (
                torch.rand(num_tokens, num_experts, generator=self.generator, device=self.device).topk(top_k).indices
            )
        self.ids_NK = ids_NK
        self.scores_NK = torch.rand(num_tokens, top_k, generator=self.generator, device=self.device)
        self.w1_EFD = self.randn(num_experts, hidden_dim, dim, scale=dim**-0.5)
        self.w3_EFD = self.randn(num_experts, hidden_dim, dim, scale=dim**-0.5)
        self.w2_EDF = self.randn(num_experts, dim, hidden_dim, scale=hidden_dim**-0.5)
        self.workspaces = virtual_workspaces(self.shape, self.device)
        self.plans, self.counters, self.rows = [], [], []
        self.publish()
        for workspace in self.workspaces:
            plan, counters = build_kernel_plan(workspace)
            num_rows = BLOCK_M * read_sizes(plan, workspace).num_tiles
            row_shape = RowShape(layer=self.shape, num_rows=num_rows)
            self.plans.append(plan)
            self.counters.append(counters)
            groups = (
                Layout(group, row_shape).allocate(self.device)
                for group in (KeptRows, HiddenRows, ResultRows, BackwardRows)
            )
            self.rows.append(
                SimpleNamespace(**{name: tensor for group in groups for name, tensor in vars(group).items()})
            )

    def randn(self, *size, scale=1.0):
        return (torch.randn(*size, generator=self.generator, device=self.device) * scale).bfloat16()

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
        self.kernels.pull_gemm(
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
        self.kernels.gemm_push(
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
        outs = [
            torch.full((t, self.shape.dim), NAN, device=self.device, dtype=torch.bfloat16) for t in self.tokens_per_rank
        ]
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
                tensor.fill_(NAN if tensor.is_floating_point() else 255)  # which is NaN of a scale in MXFP8

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
        self.kernels.pull_gemm_backward(
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
        self.kernels.gemm_push_backward(
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
        self.kernels.weight_gradients(
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
            assert relative_error(got, expected) < GRADIENT_TOLERANCE * self.loose, name
        return dout_ND, grads

    def expected(self):
        """``out_ND`` in fp64, and per expert (tokens, x, gate, up, h) in the order of its rows."""
        out_ND = torch.zeros(self.x_ND.shape, dtype=torch.float64, device=self.device)
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
        assert relative_error(out_ND, expected_ND) < TOLERANCE * self.loose
        for rank, (plan, rows) in enumerate(zip(self.plans, self.rows)):
            starts = plan.expert_start_e1.tolist()
            for local, (x, gate, up, h, y) in enumerate(experts[self.my_experts(rank)]):
                mine = slice(starts[local], starts[local] + x.shape[0])
                assert torch.equal(rows.pool_RD[mine], x)
                assert relative_error(rows.h_RF[mine], h) < TOLERANCE * self.loose
                assert relative_error(rows.y_RD[mine], y) < TOLERANCE * self.loose
                if saves:
                    assert relative_error(rows.gate_RF[mine], gate) < TOLERANCE * self.loose
                    assert relative_error(rows.up_RF[mine], up) < TOLERANCE * self.loose
        return out_ND


def relative_error(got, expected):
    """Infinite if anything is not finite."""
    if not expected.numel():
        return 0.0
    if not got.isfinite().all():
        return float("inf")
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
