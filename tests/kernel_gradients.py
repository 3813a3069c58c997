"""Experts with rows of their own, and ``weight_gradients`` of one backend over them: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import torch

from titan_megamoe.backends import kernel_set
from titan_megamoe.kernels.plan_tables import BLOCK_M, Counters, KernelPlan, LayerShape, Layout

NAN = float("nan")
TOLERANCE = 3e-3
"""Of bf16 results with one rounding: 2e-3 at most of each, less of all of them."""

INPUTS = {"x_RD": "D", "dout_RD": "D", "dgate_RF": "F", "dup_RF": "F", "scaled_h_RF": "F"}
PRODUCTS = {
    "dw1_EFD": ("dgate_RF", "x_RD"),
    "dw2_EDF": ("dout_RD", "scaled_h_RF"),
    "dw3_EFD": ("dup_RF", "x_RD"),
}


class Gradients:
    """Experts with so many rows each, their inputs, and the kernel over them."""

    def __init__(
        self,
        rows_per_expert: list[int],
        dim: int,
        hidden_dim: int,
        seed: int = 0,
        kernels: str = "hopper",
        device: str = "cuda",
        tolerance: float = TOLERANCE,
    ):
        self.weight_gradients, self.device, self.tolerance = kernel_set(kernels).weight_gradients, device, tolerance
        self.generator = torch.Generator(device).manual_seed(seed)
        self.rows_per_expert = rows_per_expert
        num_experts = len(rows_per_expert)
        shape = LayerShape(
            ep_size=1, max_tokens=1, dim=dim, hidden_dim=hidden_dim, num_local_experts=num_experts, top_k=1
        )
        self.plan = Layout(KernelPlan, shape).allocate(device)
        self.counters = Layout(Counters, shape).allocate(device)
        self.starts = [0]
        for rows in rows_per_expert:
            self.starts.append(self.starts[-1] + -(-rows // BLOCK_M) * BLOCK_M)
        self.plan.expert_start_e1.copy_(torch.tensor(self.starts))
        self.plan.expert_rows_e.copy_(torch.tensor(rows_per_expert))
        widths = {"D": dim, "F": hidden_dim}
        self.inputs = {name: self._rows(widths[width]) for name, width in INPUTS.items()}
        self.shapes = {
            name: (num_experts, self.inputs[left].shape[1], self.inputs[right].shape[1])
            for name, (left, right) in PRODUCTS.items()
        }

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device).bfloat16()

    def _rows(self, width: int) -> torch.Tensor:
        """Random rows, zeros after them up to a multiple of 64, NaN beyond."""
        matrix = self.randn(self.starts[-1], width)
        for start, end, rows in zip(self.starts, self.starts[1:], self.rows_per_expert):
            matrix[start + rows : end] = 0
            matrix[start + -(-rows // 64) * 64 : end] = NAN
        return matrix

    def run(self, before: dict[str, torch.Tensor] | None = None, **kwargs) -> dict[str, torch.Tensor]:
        """All gradients, from poisoned ones or added to those of ``before``."""
        self.counters.queue.fill_(-1)
        self.counters.queue[5] = 0
        if before is None:
            gradients = {
                name: torch.full(shape, NAN, device=self.device, dtype=torch.bfloat16)
                for name, shape in self.shapes.items()
            }
        else:
            gradients = {name: tensor.clone() for name, tensor in before.items()}
        self.weight_gradients(
            self.plan, self.counters, **self.inputs, **gradients, accumulate=before is not None, **kwargs
        )
        return gradients

    def check(self, before: dict[str, torch.Tensor] | None = None, **kwargs) -> dict[str, torch.Tensor]:
        gradients = self.run(before, **kwargs)
        for name, (left, right) in PRODUCTS.items():
            assert gradients[name].isfinite().all(), name
            for expert, (start, rows) in enumerate(zip(self.starts, self.rows_per_expert)):
                mine = slice(start, start + rows)
                expected = self.inputs[left][mine].double().T @ self.inputs[right][mine].double()
                if before is not None:
                    expected += before[name][expert].double()
                got = gradients[name][expert].double()
                assert (got - expected).norm() <= self.tolerance * expected.norm(), (name, expert)
        return gradients
