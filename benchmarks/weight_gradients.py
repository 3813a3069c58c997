"""Check and time ``weight_gradients`` and ``weight_gradients_fp8`` on one NVIDIA Hopper GPU.

    python benchmarks/weight_gradients.py --json weight_gradients.json [--shapes qwen3-30b ...] [--repeats 20]

Random routing (top-8 of uniform random numbers over 128 experts), random bf16 data; of EP = 8, one rank's 16 experts
with as many rows as one rank without EP has. Beside the kernel, on the same data: "grouped_mm", PyTorch's grouped
product, once per gradient, over rows without padding; and "dense", one matrix product of as many operations, depth and
results by PyTorch: the practical ceiling on this card at this moment, since its clock follows its power. "quantising" is
what the FP8 kernel needs before it: its five inputs, x and dout from FP8 rows, the other three from bf16. TFLOP/s count
real rows. Times are medians of CUDA events around one launch (of the quantisation, five), in ms, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan_megamoe.bench.environment import describe_environment
from titan_megamoe.kernels.plan_tables import BLOCK_M, Counters, KernelPlan, LayerShape, Layout
from titan_megamoe.kernels.quantize import quantize_columns, quantize_rows
from titan_megamoe.kernels.tuning import tune_weight_gradients, tune_weight_gradients_fp8
from titan_megamoe.kernels.weight_gradients import weight_gradients
from titan_megamoe.kernels.weight_gradients_fp8 import weight_gradients_fp8
from titan_megamoe.quantize import BLOCK, FP8

NUM_ROWS = 16384 * 8
# D, F, local experts
SHAPES = {
    "qwen3-30b": (2048, 768, 128),
    "qwen3-235b": (4096, 1536, 128),
    "qwen3-30b-ep8": (2048, 768, 16),
    "qwen3-235b-ep8": (4096, 1536, 16),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    shape: str
    kernel: str
    median_ms: float
    min_ms: float
    max_ms: float
    tflops: float


class Gradients:
    """One rank's rows, and the kernel over them."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.dim, self.hidden_dim, num_experts = SHAPES[name]
        # The local experts' counts of a routing over 128 experts of so many tokens that they get NUM_ROWS rows.
        experts = torch.cat([torch.rand(16384, 128, device="cuda").topk(8).indices for _ in range(128 // num_experts)])
        rows_e = experts.flatten().bincount(minlength=128)[:num_experts]
        end_e = ((rows_e + BLOCK_M - 1) // BLOCK_M * BLOCK_M).cumsum(0)
        self.num_real_rows = int(rows_e.sum())
        num_rows = int(end_e[-1])
        self.start_e1 = torch.cat([torch.zeros_like(end_e[:1]), end_e])
        shape = LayerShape(
            ep_size=1,
            max_tokens=1,
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            num_local_experts=num_experts,
            top_k=1,
        )
        self.plan = Layout(KernelPlan, shape).allocate("cuda")
        self.counters = Layout(Counters, shape).allocate("cuda")
        self.plan.expert_start_e1.copy_(self.start_e1)
        self.plan.expert_rows_e.copy_(rows_e)
        row = torch.arange(num_rows, device="cuda")
        expert = torch.bucketize(row, end_e, right=True)
        self.is_real = row - self.start_e1[expert] < rows_e[expert]
        self.ends_e = rows_e.cumsum(0).int()

        def rows(width: int) -> torch.Tensor:
            return torch.randn(num_rows, width, device="cuda").bfloat16() * self.is_real[:, None]

        def gradient(left: int, right: int) -> torch.Tensor:
            return torch.empty(num_experts, left, right, dtype=torch.bfloat16, device="cuda")

        self.x_RD, self.dout_RD = rows(self.dim), rows(self.dim)
        self.dgate_RF, self.dup_RF, self.scaled_h_RF = (rows(self.hidden_dim) for _ in range(3))
        self.dw1_EFD, self.dw3_EFD = (gradient(self.hidden_dim, self.dim) for _ in range(2))
        self.dw2_EDF = gradient(self.dim, self.hidden_dim)
        self.products = (
            (self.dgate_RF, self.x_RD, self.dw1_EFD),
            (self.dup_RF, self.x_RD, self.dw3_EFD),
            (self.dout_RD, self.scaled_h_RF, self.dw2_EDF),
        )

    @property
    def flops(self) -> float:
        return 6.0 * self.num_real_rows * self.dim * self.hidden_dim

    def run(self, **kwargs) -> None:
        weight_gradients(
            self.plan,
            self.counters,
            x_RD=self.x_RD,
            dout_RD=self.dout_RD,
            dgate_RF=self.dgate_RF,
            dup_RF=self.dup_RF,
            scaled_h_RF=self.scaled_h_RF,
            dw1_EFD=self.dw1_EFD,
            dw2_EDF=self.dw2_EDF,
            dw3_EFD=self.dw3_EFD,
            **kwargs,
        )

    def check(self) -> float:
        """Run the kernel on poisoned gradients. Returns the largest relative error of an expert; raises if too big."""
        self.poison()
        self.run()
        return self.worst_error(self.products, tolerance=3e-3)

    def poison(self) -> None:
        for _, _, gradient in self.products:
            gradient.fill_(float("nan"))
        self.counters.queue.zero_()

    def worst_error(self, products: Iterable[tuple[torch.Tensor, ...]], tolerance: float) -> float:
        """Of an expert's gradient, against the product of rows in fp32."""
        starts = self.start_e1.tolist()
        worst = 0.0
        for left, right, gradient in products:
            for expert, got in enumerate(gradient):
                mine = slice(starts[expert], starts[expert + 1])
                expected = left[mine].float().T @ right[mine].float()
                error = ((got.float() - expected).norm() / expected.norm()).item()
                if not error < tolerance:  # so that NaN fails, too
                    raise AssertionError(f"Relative error {error} of expert {expert}.")
                worst = max(worst, error)
        return worst

    def grouped_mm(self) -> Callable[[], None]:
        operands = [(left[self.is_real].T, right[self.is_real]) for left, right, _ in self.products]

        def launch() -> None:
            for left, right in operands:
                torch._grouped_mm(left, right, offs=self.ends_e)

        return launch

    def dense(self) -> Callable[[], None]:
        num_experts = self.dw1_EFD.shape[0]
        depth = self.num_real_rows // num_experts // 8 * 8
        left = torch.randn(depth, 3 * num_experts * self.hidden_dim, device="cuda").bfloat16().T
        right = torch.randn(depth, self.dim, device="cuda").bfloat16()
        return lambda: left @ right


class Fp8Gradients:
    """The same rows in FP8, and the FP8 kernel over them."""

    def __init__(self, gradients: Gradients):
        self.bf16 = gradients
        num_rows = gradients.x_RD.shape[0]
        # A tile's rows, of which padding is the last.
        rows_M = gradients.is_real.view(-1, BLOCK_M).sum(1).int()
        sizes = torch.tensor([rows_M.numel(), 0, 0, 0], dtype=torch.int32, device="cuda")
        self.tiles = SimpleNamespace(sizes=sizes, tile_rows_M=rows_M)
        self.to_quantize = []
        self.inputs = {}
        for name, rows_RI, dim, is_fp8 in (
            ("x", gradients.x_RD, "D", True),
            ("dout", gradients.dout_RD, "D", True),
            ("dgate", gradients.dgate_RF, "F", False),
            ("dup", gradients.dup_RF, "F", False),
            ("scaled_h", gradients.scaled_h_RF, "F", False),
        ):
            width = rows_RI.shape[1]
            row_scales_bR = None
            if is_fp8:
                values_RI = torch.empty_like(rows_RI, dtype=FP8)
                row_scales_Rb = torch.empty(num_rows, width // BLOCK, device="cuda")
                quantize_rows(rows_RI, values_RI, row_scales_Rb)
                rows_RI, row_scales_bR = values_RI, row_scales_Rb.T.contiguous()
            values_MIr = torch.empty(num_rows // BLOCK_M, width, BLOCK_M, dtype=FP8, device="cuda")
            scales_MI = torch.empty(num_rows // BLOCK_M, width, device="cuda")
            self.to_quantize.append((rows_RI, values_MIr, scales_MI, row_scales_bR))
            self.inputs |= {f"{name}_M{dim}r": values_MIr, f"{name}_scales_M{dim}": scales_MI}
        self.quantize()

    def quantize(self) -> None:
        for rows_RI, values_MIr, scales_MI, row_scales_bR in self.to_quantize:
            quantize_columns(self.tiles, rows_RI, values_MIr, scales_MI, row_scales_bR=row_scales_bR)

    def run(self, **kwargs) -> None:
        of = self.bf16
        to = dict(dw1_EFD=of.dw1_EFD, dw2_EDF=of.dw2_EDF, dw3_EFD=of.dw3_EFD)
        weight_gradients_fp8(of.plan, of.counters, **self.inputs, **to, **kwargs)

    def quantize_and_run(self) -> None:
        self.quantize()
        self.run()

    def check(self) -> float:
        """As of :class:`Gradients`, against what the quantised inputs stand for."""
        self.bf16.poison()
        self.run()
        dw1, dw3, dw2 = (gradient for _, _, gradient in self.bf16.products)

        def rows(name: str, dim: str) -> torch.Tensor:
            scales_RI = self.inputs[f"{name}_scales_M{dim}"].repeat_interleave(BLOCK_M, dim=0)
            return self.inputs[f"{name}_M{dim}r"].float().mT.flatten(0, 1) * scales_RI

        products = (
            (rows(left, left_dim), rows(right, right_dim), gradient)
            for left, left_dim, right, right_dim, gradient in (
                ("dgate", "F", "x", "D", dw1),
                ("dup", "F", "x", "D", dw3),
                ("dout", "D", "scaled_h", "F", dw2),
            )
        )
        return self.bf16.worst_error(products, tolerance=5e-3)


def time_ms(prepare: Callable[[], None], launch: Callable[[], None], repeats: int) -> list[float]:
    events = []
    for _ in range(repeats + 3):
        prepare()
        torch.cuda._sleep(1_000_000)  # about half a ms, in which the launch is queued: it is not timed
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[3:]]


def measure(name: str, repeats: int) -> list[Result]:
    gradients = Gradients(name)
    fp8 = Fp8Gradients(gradients)
    errors = f"relative errors {gradients.check():.1e} (FP8: {fp8.check():.1e}) against fp32"
    print(f"{name}: {gradients.num_real_rows} rows; {errors}", flush=True)
    torch.cuda.empty_cache()
    zero = gradients.counters.queue.zero_
    results = []
    for kernel, make in (
        ("dense", gradients.dense),
        ("grouped_mm", gradients.grouped_mm),
        ("weight_gradients", lambda: gradients.run),
        ("weight_gradients, accumulating", lambda: lambda: gradients.run(accumulate=True)),
        ("weight_gradients_fp8", lambda: fp8.run),
        ("weight_gradients_fp8, accumulating", lambda: lambda: fp8.run(accumulate=True)),
        ("quantising", lambda: fp8.quantize),
        ("quantising + weight_gradients_fp8", lambda: fp8.quantize_and_run),
    ):
        times = time_ms(zero, make(), repeats)
        median = statistics.median(times)
        results.append(
            Result(
                shape=name,
                kernel=kernel,
                median_ms=median,
                min_ms=min(times),
                max_ms=max(times),
                tflops=gradients.flops / median / 1e9,
            )
        )
        rate = f"{results[-1].tflops:6.0f} TFLOP/s"
        print(f"  {kernel:<34} {median:8.4f} [{min(times):8.4f}, {max(times):8.4f}] {rate}", flush=True)
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    args = parser.parse_args()
    results = []
    for name in args.shapes:
        results += measure(name, args.repeats)
        torch.cuda.empty_cache()
    report = {
        "command": " ".join(["python", "benchmarks/weight_gradients.py", *sys.argv[1:]]),
        "environment": describe_environment(),
        "repeats": args.repeats,
        "tunings": {name: asdict(tune_weight_gradients(*SHAPES[name][:2])) for name in args.shapes},
        "tunings_fp8": {name: asdict(tune_weight_gradients_fp8(*SHAPES[name][:2])) for name in args.shapes},
        "results": [asdict(result) for result in results],
    }
    args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
