"""The stages of ``hopper.py`` in every precision: which kernels they launch, with which of the layer's buffers. Whose kernels they
are, ``backends.py`` knows.

A stage in FP8 or MXFP8 differs from that in bf16 by scales beside rows and weights, and takes weights from the cache of their
quantised copies. Shape suffixes are those of ``kernels/plan_tables.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import record_function

from .backends import kernel_set, KernelSet
from .hopper import Numerics
from .kernels import combine, quantize, quantize_mx
from .kernels.plan_tables import BackwardRows, Counters, HiddenRows, KeptRows, KernelPlan, LayerShape, RowShape
from .reference import Gradients
from .symmetric import SymmetricWorkspace
from .weight_cache import MXWeight, quantized, QuantizedWeight


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
    def _forward_format(self) -> str | None:
        return self.row_shape(0).forward_format

    @property
    def _backward_format(self) -> str | None:
        return self.row_shape(0).backward_format

    def _quantized(self, name: str, weight: torch.Tensor, number_format: str) -> QuantizedWeight | MXWeight:
        return quantized(weight, name, self.numerics.cache_key, number_format)

    def _common(self) -> dict:
        return {"fault": self.workspace.local.fault, "rank": self.workspace.rank}

    # ---- forward

    def publish(self, x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor) -> object:  # noqa: N803
        """What it returns must stay alive until ``pull_gemm`` has been launched."""
        return combine.publish(self.workspace, x_TD, topk_ids_TK, topk_scores_TK, number_format=self._forward_format)

    def pull_gemm(
        self,
        plan: KernelPlan,
        counters: Counters,
        w1_EFD: torch.Tensor,  # noqa: N803
        w3_EFD: torch.Tensor,  # noqa: N803
        kept: KeptRows,
        hidden: HiddenRows,
    ) -> None:
        addresses = self.workspace.addresses
        saves = kept.gate_RF.shape[0] == hidden.h_RF.shape[0]
        rows = dict(
            x_addresses_P=addresses.x_P,
            pool_RD=kept.pool_RD,
            h_RF=hidden.h_RF,
            gate_RF=kept.gate_RF if saves else None,
            up_RF=kept.up_RF if saves else None,
        )
        with record_function("mega_moe: pull_gemm"):
            number_format = self._forward_format
            if number_format is None:
                self._kernels.pull_gemm(plan, counters, w1_EFD=w1_EFD, w3_EFD=w3_EFD, **rows, **self._common())
                return
            w1, w3 = (self._quantized(name, w, number_format) for name, w in (("w1", w1_EFD), ("w3", w3_EFD)))
            quantised_rows = dict(
                rows, x_scales_addresses_P=addresses.x_scales_P, w1_EFD=w1.values_EIJ, w3_EFD=w3.values_EIJ
            )
            if number_format == "mxfp8":
                self._kernels.pull_gemm_mxfp8(
                    plan,
                    counters,
                    w1_scales_EFg=w1.scales_EIg,
                    w3_scales_EFg=w3.scales_EIg,
                    pool_scales_Rg=kept.pool_scales_Rg,
                    h_scales_Rg=hidden.h_scales_Rg,
                    **quantised_rows,
                    **self._common(),
                )
                return
            self._kernels.pull_gemm_fp8(
                plan,
                counters,
                w1_scales_Ebb=w1.scales_Ebb,
                w3_scales_Ebb=w3.scales_Ebb,
                pool_scales_bR=kept.pool_scales_bR,
                h_scales_bR=hidden.h_scales_bR,
                **quantised_rows,
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
        number_format = self._forward_format
        if number_format is None:
            self._kernels.gemm_push(plan, counters, h_RF=hidden.h_RF, w2_EDF=w2_EDF, **to, **self._common())
            return
        w2 = self._quantized("w2", w2_EDF, number_format)
        if number_format == "mxfp8":
            self._kernels.gemm_push_mxfp8(
                plan,
                counters,
                h_RF=hidden.h_RF,
                h_scales_Rg=hidden.h_scales_Rg,
                w2_EDF=w2.values_EIJ,
                w2_scales_EDg=w2.scales_EIg,
                **to,
                **self._common(),
            )
            return
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
            self.workspace, dout_TD=dout_TD, x_TD=x_TD, dout_format=self._backward_format, x_format=self._forward_format
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
        hidden = HiddenRows(
            h_RF=rows.scaled_h_RF if self._forward_format is None else rows.dgate_fp8_RF,
            h_scales_bR=rows.dgate_scales_bR,
            h_scales_Rg=rows.dgate_scales_Rg,
        )
        self.pull_gemm(plan, counters, w1_EFD, w3_EFD, kept, hidden)

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
            dout_addresses_P=addresses.dout_P,
            gate_RF=kept.gate_RF,
            up_RF=kept.up_RF,
            dout_RD=rows.dout_RD,
            row_scores_R=rows.row_scores_R,
            dgate_RF=rows.dgate_RF,
            dup_RF=rows.dup_RF,
            scaled_h_RF=rows.scaled_h_RF,
            dscore_parts_NR=rows.dscore_parts_NR,
        )
        number_format = self._backward_format
        if number_format is None:
            self._kernels.pull_gemm_backward(plan, counters, w2_EDF=w2_EDF, **buffers, **self._common())
            return
        w2 = self._quantized("w2", w2_EDF, number_format)
        quantised_buffers = dict(
            buffers,
            dout_scales_addresses_P=addresses.dout_scales_P,
            w2t_EFD=w2.transposed_EJI,
            dgate_fp8_RF=rows.dgate_fp8_RF,
            dup_fp8_RF=rows.dup_fp8_RF,
        )
        if number_format == "mxfp8":
            self._kernels.pull_gemm_backward_mxfp8(
                plan,
                counters,
                w2t_scales_EFg=w2.transposed_scales_EJg,
                dout_scales_Rg=rows.dout_scales_Rg,
                dgate_scales_Rg=rows.dgate_scales_Rg,
                dup_scales_Rg=rows.dup_scales_Rg,
                **quantised_buffers,
                **self._common(),
            )
            return
        self._kernels.pull_gemm_backward_fp8(
            plan,
            counters,
            w2_scales_Ebb=w2.scales_Ebb,
            dout_scales_bR=rows.dout_scales_bR,
            dgate_scales_bR=rows.dgate_scales_bR,
            dup_scales_bR=rows.dup_scales_bR,
            **quantised_buffers,
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
        number_format = self._backward_format
        if number_format is None:
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
        w1, w3 = (self._quantized(name, w, number_format) for name, w in (("w1", w1_EFD), ("w3", w3_EFD)))
        if number_format == "mxfp8":
            self._kernels.gemm_push_backward_mxfp8(
                plan,
                counters,
                dgate_RF=rows.dgate_fp8_RF,
                dgate_scales_Rg=rows.dgate_scales_Rg,
                dup_RF=rows.dup_fp8_RF,
                dup_scales_Rg=rows.dup_scales_Rg,
                w1t_EDF=w1.transposed_EJI,
                w1t_scales_EDg=w1.transposed_scales_EJg,
                w3t_EDF=w3.transposed_EJI,
                w3t_scales_EDg=w3.transposed_scales_EJg,
                **to,
                **self._common(),
            )
            return
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
        if row_shape.wgrad_format is not None:
            self._quantized_weight_gradients(plan, counters, kept, rows, to)
            return
        scales = self._row_scales(kept, rows)
        x_RD, dout_RD = kept.pool_RD, rows.dout_RD
        x_is_quantised, dout_is_quantised = row_shape.wgrad_from_quantised
        dequantize_rows = (quantize_mx if row_shape.backward_format == "mxfp8" else quantize).dequantize_rows
        if x_is_quantised:
            dequantize_rows(plan, x_RD, scales[0], rows.x_bf16_RD)
            x_RD = rows.x_bf16_RD
        if dout_is_quantised:
            dequantize_rows(plan, dout_RD, scales[1], rows.dout_bf16_RD)
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

    def _row_scales(self, kept: KeptRows, rows: BackwardRows) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of the pool and of dout; None for one that is not quantised."""
        of_x = {"fp8": kept.pool_scales_bR, "mxfp8": kept.pool_scales_Rg}
        of_dout = {"fp8": rows.dout_scales_bR, "mxfp8": rows.dout_scales_Rg}
        return of_x.get(self._forward_format), of_dout.get(self._backward_format)

    def _quantized_weight_gradients(
        self,
        plan: KernelPlan,
        counters: Counters,
        kept: KeptRows,
        rows: BackwardRows,
        to: dict[str, torch.Tensor],
    ) -> None:
        """Quantise all five factors anew, along their rows, and multiply."""
        x_scales, dout_scales = self._row_scales(kept, rows)
        factors = (
            ("x", "D", kept.pool_RD, x_scales),
            ("dout", "D", rows.dout_RD, dout_scales),
            ("dgate", "F", rows.dgate_RF, None),
            ("dup", "F", rows.dup_RF, None),
            ("scaled_h", "F", rows.scaled_h_RF, None),
        )
        is_mx = self.row_shape(0).wgrad_format == "mxfp8"
        operands = {}
        for name, columns, rows_RI, row_scales in factors:
            values_name = f"{name}_{columns}R" if is_mx else f"{name}_M{columns}r"
            scales_name = f"{name}_scales_{columns}g" if is_mx else f"{name}_scales_M{columns}"
            values, scales = getattr(rows, values_name), getattr(rows, scales_name)
            if is_mx:
                quantize_mx.quantize_columns(plan, rows_RI, values, scales, row_scales_Rg=row_scales)
            else:
                quantize.quantize_columns(plan, rows_RI, values, scales, row_scales_bR=row_scales)
            operands |= {values_name: values, scales_name: scales}
        multiply = self._kernels.weight_gradients_mxfp8 if is_mx else self._kernels.weight_gradients_fp8
        multiply(plan, counters, **operands, **to)
