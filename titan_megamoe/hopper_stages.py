"""The stages of ``hopper.py`` in every precision: which kernels they launch, with which of the layer's buffers. Whose kernels they
are, ``backends.py`` knows.

A stage in FP8 differs from that in bf16 by scales beside rows and weights, and takes weights from the cache of their FP8
copies. Shape suffixes are those of ``kernels/plan_tables.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import record_function

from .backends import kernel_set, KernelSet
from .hopper import Numerics
from .kernels import combine
from .kernels.plan_tables import BackwardRows, Counters, HiddenRows, KeptRows, KernelPlan, LayerShape, RowShape
from .kernels.quantize import dequantize_rows, quantize_columns
from .reference import Gradients
from .symmetric import SymmetricWorkspace
from .weight_cache import quantized, QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of one call of a layer."""

    workspace: SymmetricWorkspace
    numerics: Numerics

    @property
    def shape(self) -> LayerShape:
        return self.workspace.shape

    @property
    def is_alone(self) -> bool:
        return self.shape.ep_size == 1

    @property
    def _kernels(self) -> KernelSet:
        return kernel_set(self.numerics.kernels)

    def row_shape(self, num_rows: int, *, keeps_gate_up: bool = True) -> RowShape:
        return RowShape(
            layer=self.shape,
            num_rows=num_rows,
            keeps_gate_up=keeps_gate_up,
            precision=self.numerics.precision,
            wgrad=self.numerics.wgrad,
        )

    @property
    def _forward_fp8(self) -> bool:
        return self.row_shape(0).forward_fp8

    @property
    def _backward_fp8(self) -> bool:
        return self.row_shape(0).backward_fp8

    def _quantized(self, name: str, weight: torch.Tensor) -> QuantizedWeight:
        return quantized(weight, name, self.numerics.cache_key)

    def _common(self) -> dict:
        return {"fault": self.workspace.local.fault, "rank": self.workspace.rank}

    # ---- forward

    def publish(self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor) -> object:  # noqa: N803
        """What it returns must stay alive until ``pull_gemm`` has been launched."""
        return combine.publish(self.workspace, x_TD, topk_ids_TK, topk_scores_TK, is_fp8=self._forward_fp8)

    def pull_gemm(
        self,
        plan: KernelPlan,
        counters: Counters,
        w1_EFD: torch.Tensor,  # noqa: N803
        w3_EFD: torch.Tensor,  # noqa: N803
        kept: KeptRows,
        h_RF: torch.Tensor,  # noqa: N803
        h_scales_bR: torch.Tensor,  # noqa: N803
    ) -> None:
        addresses = self.workspace.addresses
        saves = kept.gate_RF.shape[0] == h_RF.shape[0]
        rows = dict(
            pool_RD=kept.pool_RD,
            h_RF=h_RF,
            gate_RF=kept.gate_RF if saves else None,
            up_RF=kept.up_RF if saves else None,
        )
        with record_function("mega_moe: pull_gemm"):
            if not self._forward_fp8:
                self._kernels.pull_gemm(
                    plan,
                    counters,
                    x_addresses_P=addresses.x_P,
                    w1_EFD=w1_EFD,
                    w3_EFD=w3_EFD,
                    **rows,
                    **self._common(),
                )
                return
            w1, w3 = self._quantized("w1", w1_EFD), self._quantized("w3", w3_EFD)
            self._kernels.pull_gemm_fp8(
                plan,
                counters,
                x_addresses_P=addresses.x_P,
                x_scales_addresses_P=addresses.x_scales_P,
                w1_EFD=w1.values_EIJ,
                w1_scales_Ebb=w1.scales_Ebb,
                w3_EFD=w3.values_EIJ,
                w3_scales_Ebb=w3.scales_Ebb,
                pool_scales_bR=kept.pool_scales_bR,
                h_scales_bR=h_scales_bR,
                **rows,
                **self._common(),
            )

    def gemm_push(
        self,
        plan: KernelPlan,
        counters: Counters,
        hidden: HiddenRows,
        w2_EDF: torch.Tensor,  # noqa: N803
        y_RD: torch.Tensor,  # noqa: N803
        out_TD: torch.Tensor,  # noqa: N803
    ) -> None:
        """Writes ``out_TD`` if this rank is alone, else the owners' slots."""
        to = dict(
            y_RD=y_RD,
            out_TD=out_TD if self.is_alone else None,
            slots_addresses_P=None if self.is_alone else self.workspace.addresses.slots_P,
            max_tokens=self.shape.max_tokens,
        )
        if not self._forward_fp8:
            self._kernels.gemm_push(plan, counters, h_RF=hidden.h_RF, w2_EDF=w2_EDF, **to, **self._common())
            return
        w2 = self._quantized("w2", w2_EDF)
        self._kernels.gemm_push_fp8(
            plan,
            counters,
            h_RF=hidden.h_RF,
            h_scales_bR=hidden.h_scales_bR,
            w2_EDF=w2.values_EIJ,
            w2_scales_Ebb=w2.scales_Ebb,
            **to,
            **self._common(),
        )

    # ---- backward

    def publish_rows(self, dout_TD: torch.Tensor, x_TD: torch.Tensor | None) -> object:  # noqa: N803
        """``x_TD``: None if it is not wanted again. What it returns must stay alive until the rows have been pulled."""
        return combine.publish_rows(
            self.workspace, dout_TD=dout_TD, x_TD=x_TD, dout_is_fp8=self._backward_fp8, x_is_fp8=self._forward_fp8
        )

    def pull_gemm_again(
        self,
        plan: KernelPlan,
        counters: Counters,
        w1_EFD: torch.Tensor,  # noqa: N803
        w3_EFD: torch.Tensor,  # noqa: N803
        kept: KeptRows,
        rows: BackwardRows,
    ) -> None:
        """``pull_gemm`` for ``saved = "inputs"``; h goes where something else will be later."""
        h = (rows.dgate_fp8_RF, rows.dgate_scales_bR) if self._forward_fp8 else (rows.scaled_h_RF, rows.dgate_scales_bR)
        self.pull_gemm(plan, counters, w1_EFD, w3_EFD, kept, *h)

    def pull_gemm_backward(
        self,
        plan: KernelPlan,
        counters: Counters,
        w2_EDF: torch.Tensor,  # noqa: N803
        kept: KeptRows,
        rows: BackwardRows,
    ) -> None:
        addresses = self.workspace.addresses
        buffers = dict(
            gate_RF=kept.gate_RF,
            up_RF=kept.up_RF,
            dout_RD=rows.dout_RD,
            row_scores_R=rows.row_scores_R,
            dgate_RF=rows.dgate_RF,
            dup_RF=rows.dup_RF,
            scaled_h_RF=rows.scaled_h_RF,
            dscore_parts_NR=rows.dscore_parts_NR,
        )
        if not self._backward_fp8:
            self._kernels.pull_gemm_backward(
                plan, counters, dout_addresses_P=addresses.dout_P, w2_EDF=w2_EDF, **buffers, **self._common()
            )
            return
        w2 = self._quantized("w2", w2_EDF)
        self._kernels.pull_gemm_backward_fp8(
            plan,
            counters,
            dout_addresses_P=addresses.dout_P,
            dout_scales_addresses_P=addresses.dout_scales_P,
            w2t_EFD=w2.transposed_EJI,
            w2_scales_Ebb=w2.scales_Ebb,
            dout_scales_bR=rows.dout_scales_bR,
            dgate_fp8_RF=rows.dgate_fp8_RF,
            dgate_scales_bR=rows.dgate_scales_bR,
            dup_fp8_RF=rows.dup_fp8_RF,
            dup_scales_bR=rows.dup_scales_bR,
            **buffers,
            **self._common(),
        )

    def gemm_push_backward(
        self,
        plan: KernelPlan,
        counters: Counters,
        w1_EFD: torch.Tensor,  # noqa: N803
        w3_EFD: torch.Tensor,  # noqa: N803
        rows: BackwardRows,
        gradients: Gradients,
    ) -> None:
        """Writes the gradients of tokens and scores if this rank is alone, else the owners' slots."""
        addresses = self.workspace.addresses
        to = dict(
            dx_RD=rows.dx_RD,
            dscore_parts_NR=rows.dscore_parts_NR,
            dx_TD=gradients.x_TD if self.is_alone else None,
            dscores_TK=gradients.topk_scores_TK if self.is_alone else None,
            slots_addresses_P=None if self.is_alone else addresses.slots_P,
            score_slots_addresses_P=None if self.is_alone else addresses.score_slots_P,
            max_tokens=self.shape.max_tokens,
        )
        if not self._backward_fp8:
            self._kernels.gemm_push_backward(
                plan,
                counters,
                dgate_RF=rows.dgate_RF,
                dup_RF=rows.dup_RF,
                w1_EFD=w1_EFD,
                w3_EFD=w3_EFD,
                **to,
                **self._common(),
            )
            return
        w1, w3 = self._quantized("w1", w1_EFD), self._quantized("w3", w3_EFD)
        self._kernels.gemm_push_backward_fp8(
            plan,
            counters,
            dgate_RF=rows.dgate_fp8_RF,
            dgate_scales_bR=rows.dgate_scales_bR,
            dup_RF=rows.dup_fp8_RF,
            dup_scales_bR=rows.dup_scales_bR,
            w1t_EDF=w1.transposed_EJI,
            w1_scales_Ebb=w1.scales_Ebb,
            w3t_EDF=w3.transposed_EJI,
            w3_scales_Ebb=w3.scales_Ebb,
            **to,
            **self._common(),
        )

    def weight_gradients(
        self, plan: KernelPlan, counters: Counters, kept: KeptRows, rows: BackwardRows, gradients: Gradients
    ) -> None:
        to = dict(dw1_EFD=gradients.w1_EFD, dw2_EDF=gradients.w2_EDF, dw3_EFD=gradients.w3_EFD)
        row_shape = self.row_shape(rows.dout_RD.shape[0])
        x_scales_bR = kept.pool_scales_bR if row_shape.forward_fp8 else None
        if row_shape.wgrad_fp8:
            for rows_RI, values_MIr, scales_MI, row_scales_bR in (
                (kept.pool_RD, rows.x_MDr, rows.x_scales_MD, x_scales_bR),
                (rows.dout_RD, rows.dout_MDr, rows.dout_scales_MD, rows.dout_scales_bR),
                (rows.dgate_RF, rows.dgate_MFr, rows.dgate_scales_MF, None),
                (rows.dup_RF, rows.dup_MFr, rows.dup_scales_MF, None),
                (rows.scaled_h_RF, rows.scaled_h_MFr, rows.scaled_h_scales_MF, None),
            ):
                quantize_columns(plan, rows_RI, values_MIr, scales_MI, row_scales_bR=row_scales_bR)
            self._kernels.weight_gradients_fp8(
                plan,
                counters,
                x_MDr=rows.x_MDr,
                x_scales_MD=rows.x_scales_MD,
                dout_MDr=rows.dout_MDr,
                dout_scales_MD=rows.dout_scales_MD,
                dgate_MFr=rows.dgate_MFr,
                dgate_scales_MF=rows.dgate_scales_MF,
                dup_MFr=rows.dup_MFr,
                dup_scales_MF=rows.dup_scales_MF,
                scaled_h_MFr=rows.scaled_h_MFr,
                scaled_h_scales_MF=rows.scaled_h_scales_MF,
                **to,
            )
            return
        x_RD, dout_RD = kept.pool_RD, rows.dout_RD
        if row_shape.forward_fp8:
            dequantize_rows(plan, x_RD, x_scales_bR, rows.x_bf16_RD)
            x_RD = rows.x_bf16_RD
        if row_shape.backward_fp8:
            dequantize_rows(plan, dout_RD, rows.dout_scales_bR, rows.dout_bf16_RD)
            dout_RD = rows.dout_bf16_RD
        self._kernels.weight_gradients(
            plan,
            counters,
            x_RD=x_RD,
            dout_RD=dout_RD,
            dgate_RF=rows.dgate_RF,
            dup_RF=rows.dup_RF,
            scaled_h_RF=rows.scaled_h_RF,
            **to,
        )
