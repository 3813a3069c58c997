"""The FP8 kernels on a GPU, with virtual ranks in one process, against what the reference backend emulates."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.kernel_layer import Layer, NAN, relative_error, TOLERANCE
from titan_megamoe import mega_moe, quantize as reference
from titan_megamoe.kernels import combine
from titan_megamoe.kernels.gemm_push_fp8 import gemm_push_backward_fp8, gemm_push_fp8
from titan_megamoe.kernels.plan_tables import BackwardRows, PHASE_ALL_SENT
from titan_megamoe.kernels.pull_gemm_backward_fp8 import pull_gemm_backward_fp8
from titan_megamoe.kernels.pull_gemm_fp8 import pull_gemm_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def addresses(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], device="cuda")


def poison(tensor):
    """Fill it with NaN."""
    if tensor.dtype == reference.FP8:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(NAN)


def dequantize(values_RI, scales_bR):
    """fp64, from rows in FP8 as the kernels keep them."""
    return (values_RI.float() * scales_bR.T.repeat_interleave(128, dim=1)).double()


class Fp8Layer(Layer):
    """The tokens and weights of a layer in FP8."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.x = [reference.quantize_rows(x_TD) for x_TD in self.x_ND.split(self.tokens_per_rank)]
        self.w1, self.w2, self.w3 = map(reference.quantize_weights, (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        dim, hidden_dim = self.shape.dim, self.shape.hidden_dim

        def fp8(*size):
            return torch.full(size, NAN, device="cuda").to(reference.FP8)

        self.fp8_rows = []
        for rows in self.rows:
            num_rows = rows.pool_RD.shape[0]
            self.fp8_rows.append(
                dict(
                    pool_RD=fp8(num_rows, dim),
                    pool_scales_bR=torch.full((math.ceil(dim / 128), num_rows), NAN, device="cuda"),
                    h_RF=fp8(num_rows, hidden_dim),
                    h_scales_bR=torch.full((math.ceil(hidden_dim / 128), num_rows), NAN, device="cuda"),
                )
            )

        # For backward: the gradient of the output, weights in the other orientation, and its rows.
        self.dout_ND = self.randn(*self.x_ND.shape)
        self.dout = [reference.quantize_rows(dout_TD) for dout_TD in self.dout_ND.split(self.tokens_per_rank)]
        self.w1t, self.w2t, self.w3t = (w.values.transpose(1, 2).contiguous() for w in (self.w1, self.w2, self.w3))
        self.fp8_backward_rows = []
        for rows in self.rows:
            num_rows = rows.pool_RD.shape[0]
            scales_bR = torch.empty(math.ceil(hidden_dim / 128), num_rows, device="cuda")
            self.fp8_backward_rows.append(
                dict(
                    dout_RD=fp8(num_rows, dim),
                    dout_scales_bR=torch.empty(math.ceil(dim / 128), num_rows, device="cuda"),
                    dgate_fp8_RF=fp8(num_rows, hidden_dim),
                    dgate_scales_bR=scales_bR,
                    dup_fp8_RF=fp8(num_rows, hidden_dim),
                    dup_scales_bR=torch.empty_like(scales_bR),
                    dscore_parts_NR=torch.empty_like(scales_bR),
                )
            )

    def pull_gemm_fp8(self, rank, *, saves=False, **kwargs):
        counters, rows, mine = self.counters[rank], self.rows[rank], self.my_experts(rank)
        for tensor in (counters.arrival_M, counters.done_M, counters.queue):
            tensor.zero_()
        for tensor in (rows.gate_RF, rows.up_RF):
            tensor.fill_(NAN)

        pull_gemm_fp8(
            self.plans[rank],
            counters,
            x_addresses_P=addresses([blocks.values for blocks in self.x]),
            x_scales_addresses_P=addresses([blocks.scales for blocks in self.x]),
            w1_EFD=self.w1.values[mine],
            w1_scales_Ebb=self.w1.scales[mine],
            w3_EFD=self.w3.values[mine],
            w3_scales_Ebb=self.w3.scales[mine],
            gate_RF=rows.gate_RF if saves else None,
            up_RF=rows.up_RF if saves else None,
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            deadline_seconds=2,
            **self.fp8_rows[rank],
            **kwargs,
        )
        self.workspaces[rank].check()

    def gemm_push_fp8(self, rank, out_TD, **kwargs):
        rows, mine = self.fp8_rows[rank], self.my_experts(rank)
        if self.shape.ep_size == 1:
            to = dict(out_TD=out_TD)
        else:
            to = dict(slots_addresses_P=self.workspaces[rank].addresses.slots_P, max_tokens=self.shape.max_tokens)
        gemm_push_fp8(
            self.plans[rank],
            self.counters[rank],
            h_RF=rows["h_RF"],
            h_scales_bR=rows["h_scales_bR"],
            w2_EDF=self.w2.values[mine],
            w2_scales_Ebb=self.w2.scales[mine],
            y_RD=self.rows[rank].y_RD,
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            deadline_seconds=2,
            **to,
            **kwargs,
        )

    def forward_fp8(self, **kwargs):
        """``[N, D]``: what all ranks return, from poisoned buffers."""
        outs = [torch.full((t, self.shape.dim), NAN, device="cuda", dtype=torch.bfloat16) for t in self.tokens_per_rank]
        for workspace, rows in zip(self.workspaces, self.rows):
            workspace.published.slots_PTD.fill_(NAN)
            rows.y_RD.fill_(NAN)
        for rank, out_TD in enumerate(outs):
            self.pull_gemm_fp8(rank, **kwargs)
            self.gemm_push_fp8(rank, out_TD, **kwargs)
        if self.shape.ep_size > 1:
            self.both(combine.signal, PHASE_ALL_SENT)
            self.both(combine.wait, PHASE_ALL_SENT)
            for workspace, ids_TK, out_TD in zip(self.workspaces, self.ids_NK.split(self.tokens_per_rank), outs):
                combine.reduce_slots(workspace, ids_TK, out_TD)
        for workspace in self.workspaces:
            workspace.check()
        return torch.cat(outs)

    def pull_gemm_backward_fp8(self, rank, **kwargs):
        rows, mine = self.rows[rank], self.my_experts(rank)
        names = ("gate_RF", "up_RF", "row_scores_R", "dgate_RF", "dup_RF", "scaled_h_RF")
        pull_gemm_backward_fp8(
            self.plans[rank],
            self.counters[rank],
            dout_addresses_P=addresses([blocks.values for blocks in self.dout]),
            dout_scales_addresses_P=addresses([blocks.scales for blocks in self.dout]),
            w2t_EFD=self.w2t[mine],
            w2_scales_Ebb=self.w2.scales[mine],
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            deadline_seconds=2,
            **{name: getattr(rows, name) for name in names},
            **self.fp8_backward_rows[rank],
            **kwargs,
        )
        self.workspaces[rank].check()

    def gemm_push_backward_fp8(self, rank, dx_TD, dscores_TK, **kwargs):
        rows, mine, sent_to = self.fp8_backward_rows[rank], self.my_experts(rank), self.workspaces[rank].addresses
        if self.shape.ep_size == 1:
            to = dict(dx_TD=dx_TD, dscores_TK=dscores_TK)
        else:
            to = dict(slots_addresses_P=sent_to.slots_P, score_slots_addresses_P=sent_to.score_slots_P)
            to["max_tokens"] = self.shape.max_tokens
        gemm_push_backward_fp8(
            self.plans[rank],
            self.counters[rank],
            dgate_RF=rows["dgate_fp8_RF"],
            dgate_scales_bR=rows["dgate_scales_bR"],
            dup_RF=rows["dup_fp8_RF"],
            dup_scales_bR=rows["dup_scales_bR"],
            w1t_EDF=self.w1t[mine],
            w1_scales_Ebb=self.w1.scales[mine],
            w3t_EDF=self.w3t[mine],
            w3_scales_Ebb=self.w3.scales[mine],
            dx_RD=self.rows[rank].dx_RD,
            dscore_parts_NR=rows["dscore_parts_NR"],
            fault=self.workspaces[rank].local.fault,
            rank=rank,
            deadline_seconds=2,
            **to,
            **kwargs,
        )
        self.workspaces[rank].check()

    def backward_fp8(self, **kwargs):
        """Gradients of ``x_ND`` and ``scores_NK``, from poisoned buffers, after forwards that saved gate and up."""
        self.reset(BackwardRows)
        for rows in self.fp8_backward_rows:
            for tensor in rows.values():
                poison(tensor)
        dx_ND, dscores_NK = torch.full_like(self.x_ND, NAN), torch.full_like(self.scores_NK, NAN)
        dxs, dscores = dx_ND.split(self.tokens_per_rank), dscores_NK.split(self.tokens_per_rank)
        for rank in range(self.shape.ep_size):
            self.pull_gemm_backward_fp8(rank, **kwargs)
            self.gemm_push_backward_fp8(rank, dxs[rank], dscores[rank], **kwargs)
        if self.shape.ep_size > 1:
            self.both(combine.signal, PHASE_ALL_SENT)
            self.both(combine.wait, PHASE_ALL_SENT)
            ids = self.ids_NK.split(self.tokens_per_rank)
            for workspace, ids_TK, dx_TD, dscores_TK in zip(self.workspaces, ids, dxs, dscores):
                combine.reduce_slots(workspace, ids_TK, dx_TD)
                combine.collect_score_slots(workspace, ids_TK, dscores_TK)
        for workspace in self.workspaces:
            workspace.check()
        return dx_ND, dscores_NK

    def my_routes(self, rank):
        """For each of a rank's experts: its number, the tokens and slots of its rows, these rows, and the padding after them
        that weight gradients read."""
        starts = self.plans[rank].expert_start_e1.tolist()
        for local, start in enumerate(starts[:-1]):
            expert = rank * self.shape.num_local_experts + local
            token, slot = (self.ids_NK == expert).nonzero(as_tuple=True)
            stop = start + len(token)
            yield expert, token, slot, slice(start, stop), slice(stop, start + -(-len(token) // 64) * 64)

    def check_rows_of_backward(self, rank):
        """After :meth:`backward_fp8`: rows and scales of dout exactly, what follows from them to rounding."""
        rows, got = self.rows[rank], self.fp8_backward_rows[rank]
        values_ND = torch.cat([blocks.values for blocks in self.dout])
        scales_Nb = torch.cat([blocks.scales for blocks in self.dout])
        dout_ND = torch.cat([blocks.dequantize() for blocks in self.dout]).double()
        w2_EDF = self.w2.dequantize().double()
        for expert, token, slot, mine, padding in self.my_routes(rank):
            assert torch.equal(got["dout_RD"][mine].view(torch.uint8), values_ND[token].view(torch.uint8))
            assert torch.equal(got["dout_scales_bR"][:, mine].T, scales_Nb[token])
            assert torch.equal(rows.row_scores_R[mine], self.scores_NK[token, slot])
            for name in ("dout_RD", "dgate_fp8_RF", "dup_fp8_RF"):
                assert not got[name][padding].float().any(), name
            for name in ("dgate_RF", "dup_RF", "scaled_h_RF"):
                assert not getattr(rows, name)[padding].any(), f"weight gradients read {name}"
            if not len(token):
                continue

            g = (dout_ND[token] @ w2_EDF[expert]).bfloat16().double()  # as it goes from one warpgroup to another
            gate, up = rows.gate_RF[mine].double(), rows.up_RF[mine].double()
            score, sigmoid = self.scores_NK[token, slot, None].double(), gate.sigmoid()
            silu = gate * sigmoid
            dgate = score * g * up * sigmoid * (1 + gate * (1 - sigmoid))
            dup = score * g * silu
            assert relative_error(rows.dgate_RF[mine], dgate) < 1e-2
            assert relative_error(rows.dup_RF[mine], dup) < 1e-2
            assert relative_error(rows.scaled_h_RF[mine], score * silu * up) < 1e-2
            for name, in_bf16 in (("dgate", rows.dgate_RF[mine]), ("dup", rows.dup_RF[mine])):
                quantized = reference.quantize_rows(in_bf16)
                scales_bR = got[f"{name}_scales_bR"][:, mine]
                assert torch.equal(scales_bR.T, quantized.scales), name
                values = got[f"{name}_fp8_RF"][mine]
                assert torch.equal(values.view(torch.uint8), quantized.values.view(torch.uint8)), name
            # Of few rows the sums may happen to be small: their error is measured by what is added up.
            terms = g * silu * up
            error = got["dscore_parts_NR"][:, mine].double().sum(dim=0) - terms.sum(dim=1)
            assert error.norm() < 1e-2 * terms.norm()

    def check_gradients(self, dx_ND, dscores_NK):
        """What :meth:`backward_fp8` returned, and the rows of dx, from the rows it left in FP8."""
        expected_ND = torch.zeros(dx_ND.shape, dtype=torch.float64, device="cuda")
        expected_NK = torch.zeros(dscores_NK.shape, dtype=torch.float64, device="cuda")
        w1_EFD, w3_EFD = (w.dequantize().double() for w in (self.w1, self.w3))
        for rank, got in enumerate(self.fp8_backward_rows):
            for expert, token, slot, mine, _ in self.my_routes(rank):
                dgate = dequantize(got["dgate_fp8_RF"][mine], got["dgate_scales_bR"][:, mine])
                dup = dequantize(got["dup_fp8_RF"][mine], got["dup_scales_bR"][:, mine])
                dx = dgate @ w1_EFD[expert] + dup @ w3_EFD[expert]
                assert relative_error(self.rows[rank].dx_RD[mine], dx) < TOLERANCE
                expected_ND.index_add_(0, token, dx)
                expected_NK[token, slot] = got["dscore_parts_NR"][:, mine].double().sum(dim=0)
        assert relative_error(dx_ND, expected_ND) < TOLERANCE
        assert relative_error(dscores_NK, expected_NK) < 1e-5

    def check_rank(self, rank, *, saves):
        """Rows and scales exactly; products to rounding; h to at most its neighbour in FP8."""
        self.pull_gemm_fp8(rank, saves=saves)
        rows, got = self.rows[rank], self.fp8_rows[rank]
        values_ND = torch.cat([blocks.values for blocks in self.x])
        scales_Nb = torch.cat([blocks.scales for blocks in self.x])
        x_ND = torch.cat([blocks.dequantize() for blocks in self.x]).double()
        w1_EFD, w3_EFD = (w.dequantize().double() for w in (self.w1, self.w3))
        starts = self.plans[rank].expert_start_e1.tolist()
        for local in range(self.shape.num_local_experts):
            expert = rank * self.shape.num_local_experts + local
            token = (self.ids_NK == expert).nonzero(as_tuple=True)[0]
            mine = slice(starts[local], starts[local] + len(token))
            assert torch.equal(got["pool_RD"][mine].view(torch.uint8), values_ND[token].view(torch.uint8))
            assert torch.equal(got["pool_scales_bR"][:, mine].T, scales_Nb[token])
            padding = got["pool_RD"][mine.stop : starts[local] + -(-len(token) // 64) * 64]
            assert not padding.float().any(), "weight gradients read it"
            gate, up = x_ND[token] @ w1_EFD[expert].T, x_ND[token] @ w3_EFD[expert].T
            if saves:
                assert relative_error(rows.gate_RF[mine], gate) < 5e-3
                assert relative_error(rows.up_RF[mine], up) < 5e-3
            expected = reference.quantize_rows((torch.nn.functional.silu(gate) * up).float())
            h_scales = got["h_scales_bR"][:, mine].T
            assert relative_error(h_scales, expected.scales.double()) < 2e-3
            h = got["h_RF"][mine].float() * h_scales.repeat_interleave(128, dim=1)
            assert relative_error(h, expected.dequantize().double()) < 1.5e-2


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    "tokens_per_rank, num_local_experts, top_k, dim, hidden_dim",
    [
        ([300], 4, 2, 256, 128),
        ([1], 1, 1, 128, 128),
        ([777], 16, 8, 2048, 768),
        ([13, 0, 700, 30], 3, 2, 512, 256),
        ([90, 90], 16, 32, 4096, 1536),
    ],
)
def test_against_the_emulation(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim, saves):
    layer = Fp8Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim)
    for rank in range(len(tokens_per_rank)):
        layer.check_rank(rank, saves=saves)
    inputs = (layer.x_ND, layer.ids_NK, layer.scores_NK, layer.w1_EFD, layer.w2_EDF, layer.w3_EFD)
    emulated = mega_moe(*inputs, backend="reference", precision="fp8")
    assert relative_error(layer.forward_fp8(), emulated.double()) < 1.5e-2


@pytest.mark.parametrize(
    "tokens_per_rank, num_local_experts, top_k, dim, hidden_dim",
    [
        ([300], 4, 2, 256, 128),
        ([3], 1, 1, 128, 256),
        ([777], 16, 8, 2048, 768),
        ([13, 0, 700, 30], 3, 2, 512, 256),
        ([90, 90], 16, 32, 4096, 1536),
        ([40] * 3, 16, 1, 384, 128),  # with experts that have no rows
    ],
)
def test_backward(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim):
    layer = Fp8Layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim)
    for rank in range(len(tokens_per_rank)):
        layer.pull_gemm_fp8(rank, saves=True)
    dx_ND, dscores_NK = layer.backward_fp8()
    for rank in range(len(tokens_per_rank)):
        layer.check_rows_of_backward(rank)
    layer.check_gradients(dx_ND, dscores_NK)
    x_ND = layer.x_ND.clone().requires_grad_()
    inputs = (x_ND, layer.ids_NK, layer.scores_NK, layer.w1_EFD, layer.w2_EDF, layer.w3_EFD)
    mega_moe(*inputs, backend="reference", precision="fp8").backward(layer.dout_ND)
    assert relative_error(dx_ND, x_ND.grad.double()) < 2e-2


def test_bitwise_equal_on_any_number_of_sms():
    layer = Fp8Layer([1000], 16, 6, 1024, 384)
    first = layer.forward_fp8()
    for num_sms in (1, 7, 131):
        assert torch.equal(layer.forward_fp8(num_sms=num_sms), first), num_sms


@pytest.mark.parametrize("tokens_per_rank", [[1000], [300] * 3])
def test_backward_is_bitwise_equal_on_any_number_of_sms(tokens_per_rank):
    layer = Fp8Layer(tokens_per_rank, 16, 6, 1024, 384)
    for rank in range(len(tokens_per_rank)):
        layer.pull_gemm_fp8(rank, saves=True)

    def results(**kwargs):
        """With the rows of each rank, poison and all: padding is written, or not, on any number of SMs."""
        tensors = list(layer.backward_fp8(**kwargs))
        for rows, fp8_rows in zip(layer.rows, layer.fp8_backward_rows):
            tensors += [rows.dgate_RF, rows.dup_RF, rows.scaled_h_RF, rows.row_scores_R, *fp8_rows.values()]
        return [tensor.view(torch.uint8).clone() for tensor in tensors]

    first = results()
    for num_sms in (1, 7, 131):
        for got, expected in zip(results(num_sms=num_sms), first, strict=True):
            assert torch.equal(got, expected), num_sms


def test_sizes_that_have_no_whole_blocks_are_refused():
    layer = Fp8Layer([300], 4, 2, 320, 128)
    with pytest.raises(ValueError, match="pull_gemm_fp8: D = 320 is not a multiple of 128. Use bf16"):
        layer.pull_gemm_fp8(0)
    with pytest.raises(ValueError, match="pull_gemm_backward_fp8: D = 320 is not a multiple of 128. Use bf16"):
        layer.pull_gemm_backward_fp8(0)
    with pytest.raises(ValueError, match="gemm_push_backward_fp8: D = 320 is not a multiple of 128. Use bf16"):
        layer.gemm_push_backward_fp8(0, layer.x_ND, layer.scores_NK)
