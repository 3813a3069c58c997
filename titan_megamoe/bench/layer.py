"""Time one layer's routed experts: ``python -m titan_megamoe.bench.layer --shape qwen3-30b --tokens 16384``.

Every implementation gets the same weights, tokens, scores and routing (``--workload``), and is timed with CUDA events, the median of
``--repeats`` after ``--warmup``, one right after the other, as in training: then an H200 is slower, probably as its power limit lowers its clock.
``--pause_ms`` lets it idle before each of them. *Full layer* is what full activation checkpointing runs: a forward, the forward again as far
as backward needs it, and the backward. For TorchTitan's modules that is all of the forward; mega_moe on kernels does without
the second down projection and combine. The ceiling is a dense matrix product through cuBLAS of the size of the gate and up
projections, measured in the same run. In FP8, weights are quantised once for each optimizer step, and here therefore once;
"no weight cache" quantises them in every forward and backward.

With several ranks (``torchrun --nproc_per_node=8 -m titan_megamoe.bench.layer ...``) experts are spread over all ranks,
``--tokens`` is each rank's, and a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..integration import compat

compat.install()  # before anything imports TorchTitan

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from .. import mega_moe, WeightCache  # noqa: E402
from ..backends import missing_on_this_machine  # noqa: E402
from .environment import describe_environment  # noqa: E402
from .workloads import make_routing, WORKLOADS  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Shape:
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    def forward_flops(self, rows: int) -> float:
        """Of the gate, up and down GEMMs of ``rows`` rows."""
        return 6.0 * rows * self.dim * self.hidden_dim


SHAPES = {
    "qwen3-30b": Shape(dim=2048, hidden_dim=768, num_experts=128, top_k=8),
    "qwen3-235b": Shape(dim=4096, hidden_dim=1536, num_experts=128, top_k=8),
    # One rank's experts and rows of the EP = 8 layers, without the communication.
    "qwen3-30b-ep8": Shape(dim=2048, hidden_dim=768, num_experts=16, top_k=1),
    "qwen3-235b-ep8": Shape(dim=4096, hidden_dim=1536, num_experts=16, top_k=1),
}


@dataclass
class Inputs:
    x_TD: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_scores_TK: torch.Tensor
    w1_EFD: torch.Tensor
    w2_EDF: torch.Tensor
    w3_EFD: torch.Tensor
    dout_TD: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.x_TD, self.topk_ids_TK, self.topk_scores_TK, self.w1_EFD, self.w2_EDF, self.w3_EFD

    def clear_gradients(self) -> None:
        for tensor in self.arguments:
            tensor.grad = None


def make_inputs(shape: Shape, tokens: int, ep_size: int, seed: int, workload: str = "uniform") -> Inputs:
    """Random bf16 inputs on the GPU, a leaf each; routed as ``workload`` (``workloads.py``) says."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*size, generator=generator, device="cuda", dtype=torch.float32) * scale
        return values.bfloat16().requires_grad_()

    local = shape.num_experts // ep_size
    return Inputs(
        x_TD=normal(tokens, shape.dim),
        topk_ids_TK=make_routing(
            workload, tokens, shape.num_experts, shape.top_k, ep_size=ep_size, seed=seed, device="cuda"
        ),
        topk_scores_TK=torch.rand(tokens, shape.top_k, generator=generator, device="cuda").requires_grad_(),
        w1_EFD=normal(local, shape.hidden_dim, shape.dim, scale=0.02),
        w2_EDF=normal(local, shape.dim, shape.hidden_dim, scale=0.02),
        w3_EFD=normal(local, shape.hidden_dim, shape.dim, scale=0.02),
        dout_TD=normal(tokens, shape.dim).detach(),
    )


# ---- implementations


Layer = Callable[[Inputs], torch.Tensor]
"""A function of the inputs that returns out_TD."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    layer: Layer
    recomputed: Layer | None = None
    """The layer under full activation checkpointing, where the recomputation stops early; None: ``layer``, all of it."""


def torchtitan_layer(shape: Shape, inputs: Inputs, group) -> Layer:
    """TorchTitan's own ``RoutedExperts`` with its all-to-all dispatcher, on the inputs' weights."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    module = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=shape.dim, hidden_dim=shape.hidden_dim, num_experts=inputs.w1_EFD.shape[0]
        ),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=shape.num_experts, top_k=shape.top_k),
    )
    with torch.device("meta"):
        module = module.build()
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        del module.inner_experts._parameters[name]
        setattr(module.inner_experts, name, getattr(inputs, name))
    if group is not None:
        from torch.distributed.device_mesh import DeviceMesh

        module.token_dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(group, "cuda"))

    def layer(inputs: Inputs) -> torch.Tensor:
        counts_E = torch.bincount(inputs.topk_ids_TK.view(-1), minlength=shape.num_experts)
        return module(inputs.x_TD[None], inputs.topk_scores_TK[None], inputs.topk_ids_TK[None], counts_E)[0]

    return layer


def sonicmoe_layer(shape: Shape) -> Layer:
    """SonicMoE 0.1.2, with weights of its own and its own router, whose time is included."""
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    module = MoE(
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        activation_function=ActivationType.SWIGLU,
        add_bias=False,
        std=0.02,
    ).to("cuda", torch.bfloat16)

    def layer(inputs: Inputs) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        return module(inputs.x_TD, kernel_backend_moe=KernelBackendMoE.sonicmoe)[0]

    return layer


def implementations(shape: Shape, inputs: Inputs, group) -> dict[str, Implementation]:
    """Those that this machine and its software have."""

    def ours(**options) -> Layer:
        return lambda i: mega_moe(*i.arguments, group=group, **options)

    def on_kernels(**options) -> Implementation:
        return Implementation(layer=ours(**options), recomputed=ours(**options, is_recomputed=True))

    def in_fp8(**options) -> dict:
        return {"precision": "fp8", "weight_cache": WeightCache(), **options}

    eager = torchtitan_layer(shape, inputs, group)
    layers = {
        "torchtitan eager": Implementation(layer=eager),
        "torchtitan compiled": Implementation(layer=torch.compile(eager)),
    }
    if importlib.util.find_spec("sonicmoe") and group is None:
        layers["sonicmoe, router included"] = Implementation(layer=sonicmoe_layer(shape))
    layers[REFERENCE] = Implementation(layer=ours(backend="reference"))
    if missing_on_this_machine("hopper") is None:
        for name, options in {
            HOPPER: {},
            f"{HOPPER}, saved = inputs": {"saved": "inputs"},
            f"{HOPPER}, capacity 1.25": {"capacity": 1.25},
            f"{HOPPER} fp8": in_fp8(),
            f"{HOPPER} fp8, wgrad = fp8": in_fp8(wgrad="fp8"),
            f"{HOPPER} fp8, no weight cache": in_fp8(weight_cache=None),
            f"{HOPPER} fp8_bwd": in_fp8(precision="fp8_bwd"),
        }.items():
            layers[name] = on_kernels(backend="hopper", **options)
    if missing_on_this_machine("triton") is None:
        layers[TRITON] = on_kernels(backend="triton")
        layers[f"{TRITON}, saved = inputs"] = on_kernels(backend="triton", saved="inputs")
    return layers


# ---- timing


@dataclass(frozen=True, kw_only=True)
class Timing:
    warmup: int
    repeats: int
    pause_ms: float


def time_ms(function: Callable[[], object], timing: Timing) -> dict[str, float]:
    """Milliseconds: median, min and max; of the slowest rank."""
    for _ in range(timing.warmup):
        function()
    if not timing.pause_ms:
        _let_host_get_ahead(0.005 * timing.repeats)
    pairs = range(timing.repeats)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in pairs]
    for start, end in events:
        if timing.pause_ms:
            torch.cuda.synchronize()
            time.sleep(timing.pause_ms / 1e3)
            _let_host_get_ahead(0.01)
        if dist.is_initialized():
            dist.barrier()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) for start, end in events], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    values = times.tolist()
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _let_host_get_ahead(seconds: float) -> None:
    """Keep one thread of the GPU busy, while the host launches what is to be timed: as it is ahead in training, where a layer's
    launches take less time than what was launched before them."""
    torch.cuda._sleep(int(seconds * 2e9))


def measure(implementation: Implementation, inputs: Inputs, timing: Timing) -> dict:
    @torch.no_grad()
    def forward() -> None:
        implementation.layer(inputs)

    def forward_and_backward() -> None:
        implementation.layer(inputs).backward(inputs.dout_TD)
        inputs.clear_gradients()

    def full_layer() -> None:
        stops_early = implementation.recomputed is not None
        layer = partial(implementation.recomputed or implementation.layer, inputs)
        checkpointed = checkpoint(layer, use_reentrant=False, preserve_rng_state=False, early_stop=stops_early)
        checkpointed.backward(inputs.dout_TD)
        inputs.clear_gradients()

    return {
        "forward": time_ms(forward, timing),
        "forward_and_backward": time_ms(forward_and_backward, timing),
        "full_layer": time_ms(full_layer, timing),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def measure_ceiling(shape: Shape, rows: int, timing: Timing) -> float:
    """TFLOP/s of cuBLAS on one dense ``[rows, D] x [D, 2F]`` product of random bf16 data."""
    a = torch.randn(rows, shape.dim, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(shape.dim, 2 * shape.hidden_dim, device="cuda", dtype=torch.bfloat16)
    milliseconds = time_ms(lambda: a @ b, timing)["median"]
    return 4.0 * rows * shape.dim * shape.hidden_dim / milliseconds / 1e9


HOPPER, TRITON, REFERENCE = "mega_moe hopper", "mega_moe triton", "mega_moe reference"
BACKENDS = {HOPPER: "hopper", TRITON: "triton"}
"""Rows whose stages are measured, too."""

FORWARD_STAGES = {
    "plan": ("publish_kernel", "count_kernel", "scan_kernel", "place_kernel"),
    "pull_gemm": ("pull_gemm_kernel",),
    "gemm_push": ("gemm_push_kernel",),
    "handshakes and reduction": ("handshake_kernel", "reduce_kernel"),
}
BACKWARD_STAGES = {
    "pull_gemm_backward": ("pull_gemm_backward_kernel",),
    "gemm_push_backward": ("gemm_push_kernel",),
    "weight_gradients": ("weight_gradients_kernel",),
    "handshakes and reductions of backward": ("handshake_kernel", "reduce_kernel", "collect_scores_kernel"),
}


def measure_stages(inputs: Inputs, group, repeats: int, backend: str) -> dict[str, float]:
    """Milliseconds on the GPU of the stages of a backend on kernels: the sum of their kernels' times in a profile."""

    def forward_and_backward() -> None:
        mega_moe(*inputs.arguments, group=group, backend=backend).backward(inputs.dout_TD)
        inputs.clear_gradients()

    with torch.no_grad():
        forward = profile_kernels(lambda: mega_moe(*inputs.arguments, group=group, backend=backend), repeats)
    both = profile_kernels(forward_and_backward, repeats)
    backward = {kernel: milliseconds - forward.get(kernel, 0.0) for kernel, milliseconds in both.items()}
    return {
        stage: sum(times.get(kernel, 0.0) for kernel in kernels)
        for times, stages in ((forward, FORWARD_STAGES), (backward, BACKWARD_STAGES))
        for stage, kernels in stages.items()
    }


def profile_kernels(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds of each kernel in one call of ``function``."""
    from torch.profiler import profile, ProfilerActivity

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / repeats / 1e3 for event in profiler.key_averages()}


# ---- report


def render_table(report: dict) -> str:
    lines = ["| implementation | forward ms | backward ms | full layer ms | forward TFLOP/s | of ceiling |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, result in report["results"].items():
        if "error" in result:
            lines.append(f"| {name} | {result['error'].splitlines()[-1][:80]} | | | | |")
            continue
        forward, both = result["forward"]["median"], result["forward_and_backward"]["median"]
        speed = report["forward_tflop"] / forward * 1e3
        lines.append(
            f"| {name} | {forward:.3f} ({result['forward']['min']:.3f} to {result['forward']['max']:.3f}) | "
            f"{both - forward:.3f} | {result['full_layer']['median']:.3f} | {speed:.0f} | "
            f"{speed / report['ceiling_tflops']:.0%} |"
        )
    return "\n".join(lines)


def plot(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The reference backend, several times as slow as all others, would dwarf them.
    shown = {name: result for name, result in report["results"].items() if name != REFERENCE}
    results = {name: result for name, result in shown.items() if "error" not in result}
    figure, axes = plt.subplots(figsize=(8, 1 + 0.6 * len(results)))
    forward = [result["forward"]["median"] for result in results.values()]
    backward = [r["forward_and_backward"]["median"] - f for r, f in zip(results.values(), forward)]
    axes.barh(list(results), forward, label="forward")
    axes.barh(list(results), backward, left=forward, label="backward")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{report['shape_name']}, {report['tokens']} tokens, EP = {report['ep_size']}, {report['environment']['gpu']}"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.bench.layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="per rank (the ep8 shapes: 131072 gives EP = 8's rows)"
    )
    parser.add_argument("--only", action="append", help="an implementation; repeat for several (default: all)")
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="uniform", help="how tokens are routed (default: uniform)"
    )
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--pause_ms", type=float, default=0.0, help="idle time before each repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write; a chart goes beside it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "titan_megamoe: the layer benchmark times CUDA events, and torch sees no GPU.\n")
    group, ep_size, rank = None, int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ep_size > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl")
        group = dist.group.WORLD

    shape = SHAPES[arguments.shape]
    inputs = make_inputs(shape, arguments.tokens, ep_size, arguments.seed + rank, arguments.workload)
    rows = arguments.tokens * shape.top_k
    timing = Timing(warmup=arguments.warmup, repeats=arguments.repeats, pause_ms=arguments.pause_ms)
    report = {
        "command": " ".join(["python -m titan_megamoe.bench.layer", *sys.argv[1:]]),
        "environment": describe_environment(),
        "shape_name": arguments.shape,
        "shape": asdict(shape),
        "tokens": arguments.tokens,
        "ep_size": ep_size,
        "routing": f"{arguments.workload} ({WORKLOADS[arguments.workload]})",
        "repeats": arguments.repeats,
        "pause_ms": arguments.pause_ms,
        "forward_tflop": shape.forward_flops(rows) / 1e12,
        "ceiling_tflops": measure_ceiling(shape, rows, timing),
        "results": {},
    }
    for name, implementation in implementations(shape, inputs, group).items():
        if arguments.only and name not in arguments.only:
            continue
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            report["results"][name] = measure(implementation, inputs, timing)
            if name in BACKENDS:
                report["results"][name]["stages"] = measure_stages(inputs, group, arguments.repeats, BACKENDS[name])
        except Exception as error:  # a row that says why, not a crash
            report["results"][name] = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            print(f"{name}: {json.dumps(report['results'][name])}", file=sys.stderr, flush=True)
    if rank == 0:
        print(render_table(report))
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            plot(report, arguments.out.with_suffix(".png"))
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
