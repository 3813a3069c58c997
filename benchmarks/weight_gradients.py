"""Check and time ``weight_gradients`` on one NVIDIA Hopper GPU.

    python benchmarks/weight_gradients.py --json weight_gradients.json [--shapes qwen3-30b ...] [--repeats 20]

Random routing (top-8 of uniform random numbers over 128 experts), random bf16 data; of EP = 8, one rank's 16 experts
with as many rows as one rank without EP has. Beside the kernel, on the same data: "grouped_mm", PyTorch's grouped
product, once per gradient, over rows without padding; and "dense", one matrix product of as many operations, depth and
results by PyTorch: the practical ceiling on this card at this moment, since its clock follows its power. TFLOP/s count
real rows. Times are medians of CUDA events around one launch, in ms, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan_megamoe.bench.environment import describe_environment
from titan_megamoe.kernels.plan_tables import BLOCK_M, Counters, KernelPlan, LayerShape, Layout
from titan_megamoe.kernels.tuning import tune_weight_gradients
from titan_megamoe.kernels.weight_gradients import weight_gradients

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

    def check(self, **kwargs) -> float:
        """Run the kernel on poisoned gradients. Returns the largest relative error of an expert; raises if too big."""
        for _, _, gradient in self.products:
            gradient.fill_(float("nan"))
        self.counters.queue.zero_()
        self.run(**kwargs)
        starts = self.start_e1.tolist()
        worst = 0.0
        for left, right, gradient in self.products:
            for expert, got in enumerate(gradient):
                mine = slice(starts[expert], starts[expert + 1])
                expected = left[mine].float().T @ right[mine].float()
                error = ((got.float() - expected).norm() / expected.norm()).item()
                if not error < 3e-3:  # so that NaN fails, too
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
    print(f"{name}: {gradients.num_real_rows} rows; relative error {gradients.check():.1e} against fp32", flush=True)
    zero = gradients.counters.queue.zero_
    results = []
    for kernel, make in (
        ("dense", gradients.dense),
        ("grouped_mm", gradients.grouped_mm),
        ("weight_gradients", lambda: gradients.run),
        ("weight_gradients, accumulating", lambda: lambda: gradients.run(accumulate=True)),
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
        print(f"  {kernel:<32} {median:8.4f} [{min(times):8.4f}, {max(times):8.4f}] {rate}", flush=True)
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
        "results": [asdict(result) for result in results],
    }
    args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
