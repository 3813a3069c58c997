"""The FP8 kernels on a GPU, with virtual ranks in one process, against what the reference backend emulates."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.gpu.test_kernels_gemm import Layer, NAN, relative_error
from titan_megamoe import mega_moe, quantize as reference
from titan_megamoe.kernels import combine
from titan_megamoe.kernels.gemm_push_fp8 import gemm_push_fp8
from titan_megamoe.kernels.plan_tables import PHASE_ALL_SENT
from titan_megamoe.kernels.pull_gemm_fp8 import pull_gemm_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


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

    def pull_gemm_fp8(self, rank, *, saves=False, **kwargs):
        counters, rows, mine = self.counters[rank], self.rows[rank], self.my_experts(rank)
        for tensor in (counters.arrival_M, counters.done_M, counters.queue):
            tensor.zero_()
        for tensor in (rows.gate_RF, rows.up_RF):
            tensor.fill_(NAN)

        def addresses(tensors):
            return torch.tensor([t.data_ptr() for t in tensors], device="cuda")

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


def test_bitwise_equal_on_any_number_of_sms():
    layer = Fp8Layer([1000], 16, 6, 1024, 384)
    first = layer.forward_fp8()
    for num_sms in (1, 7, 131):
        assert torch.equal(layer.forward_fp8(num_sms=num_sms), first), num_sms


def test_sizes_that_have_no_whole_blocks_are_refused():
    layer = Fp8Layer([300], 4, 2, 320, 128)
    with pytest.raises(ValueError, match="pull_gemm_fp8: D = 320 is not a multiple of 128. Use bf16"):
        layer.pull_gemm_fp8(0)
