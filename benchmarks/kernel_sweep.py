"""Check and time the GEMM kernels of forward and backward on one NVIDIA Hopper GPU.

    python benchmarks/kernel_sweep.py --json sweep.json [--shapes qwen3-30b qwen3-235b ...] [--repeats 20]

Random routing (top-k of uniform random numbers), random bf16 data, outputs poisoned with NaN before they are checked
against fp32 (forward; ``tests/gpu`` checks the backward). With EP = 8 all ranks' buffers are in this GPU's memory and the kernels of one rank run: the experts and
rows of one GPU of eight, with HBM in the place of NVLink.

Per shape and kernel: "fused", the kernel; and its parts alone. "gemm" is the same kernel with its rows already in place
(or without sending anything), "rows" moves rows without multiplying, "dense" is one matrix product of as many
operations by PyTorch: the practical ceiling on this card at this moment, since its clock follows its power. Kernels whose
names begin with "triton" are the portable ones. TFLOP/s
count real rows, not the padding of tiles. Times are medians of CUDA events around one launch, in ms, with minimum and
maximum.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan_megamoe import quantize
from titan_megamoe.backends import kernel_set
from titan_megamoe.bench.environment import describe_environment
from titan_megamoe.kernels import combine
from titan_megamoe.kernels.gemm_push_fp8 import gemm_push_backward_fp8, gemm_push_fp8
from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
from titan_megamoe.kernels.plan_tables import (
    BackwardRows,
    BLOCK_M,
    HiddenRows,
    KeptRows,
    LayerShape,
    Layout,
    PHASE_PUBLISHED,
    ResultRows,
    RowShape,
)
from titan_megamoe.kernels.pull_gemm_backward_fp8 import pull_gemm_backward_fp8
from titan_megamoe.kernels.pull_gemm_fp8 import pull_gemm_fp8
from titan_megamoe.kernels.portable import tuning as portable_tuning
from titan_megamoe.kernels.tuning import (
    tune_gemm_push,
    tune_pull_gemm,
    tune_pull_gemm_backward,
    tune_weight_gradients,
)
from titan_megamoe.symmetric import virtual_workspaces

QWEN3_30B = dict(dim=2048, hidden_dim=768, max_tokens=16384, top_k=8)
QWEN3_235B = dict(dim=4096, hidden_dim=1536, max_tokens=16384, top_k=8)
SHAPES = {
    "qwen3-30b": LayerShape(ep_size=1, num_local_experts=128, **QWEN3_30B),
    "qwen3-235b": LayerShape(ep_size=1, num_local_experts=128, **QWEN3_235B),
    "qwen3-30b-ep8": LayerShape(ep_size=8, num_local_experts=16, **QWEN3_30B),
    "qwen3-235b-ep8": LayerShape(ep_size=8, num_local_experts=16, **QWEN3_235B),
}
BACKWARD_ROWS = ("gate_RF", "up_RF", "row_scores_R", "dgate_RF", "dup_RF", "scaled_h_RF")
"""What both variants of ``pull_gemm_backward`` read and write."""

PORTABLE = ("pull_gemm", "gemm_push", "forward", "pull_gemm_backward", "gemm_push_backward", "weight_gradients")
"""Kernels that there are in plain Triton, too; "forward" is two of them."""
KERNELS = (
    *PORTABLE,
    *(f"{kernel}_fp8" for kernel in PORTABLE if kernel != "weight_gradients"),
    "backward",
    *(f"triton {kernel}" for kernel in PORTABLE),
)
"""What can be timed."""

RANK = 3
"""Whose kernels run, modulo the ranks."""


@dataclass(frozen=True, kw_only=True)
class Result:
    shape: str
    kernel: str
    part: str
    median_ms: float
    min_ms: float
    max_ms: float
    tflops: float | None
    """None where nothing is multiplied."""


class Layer:
    """One rank's share of a layer: inputs, plan, buffers, and the kernels over them."""

    def __init__(self, shape: LayerShape):
        torch.manual_seed(0)
        self.shape, self.rank = shape, RANK % shape.ep_size
        self.kernels = kernel_set("hopper")
        e, dim, hidden_dim = shape.num_local_experts, shape.dim, shape.hidden_dim

        def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, device="cuda") * scale).bfloat16()

        tokens = [shape.max_tokens] * shape.ep_size
        self.x_NTD = [randn(t, dim) for t in tokens]
        self.dout_NTD = [randn(t, dim) for t in tokens]
        self.ids_NTK = [torch.rand(t, shape.num_experts, device="cuda").topk(shape.top_k).indices for t in tokens]
        self.scores_NTK = [torch.rand(t, shape.top_k, device="cuda") for t in tokens]
        self.w1_EFD = randn(e, hidden_dim, dim, scale=dim**-0.5)
        self.w3_EFD = randn(e, hidden_dim, dim, scale=dim**-0.5)
        self.w2_EDF = randn(e, dim, hidden_dim, scale=hidden_dim**-0.5)

        workspaces = virtual_workspaces(shape, "cuda")
        for each in zip(workspaces, self.x_NTD, self.ids_NTK, self.scores_NTK):
            combine.publish(*each)
        for workspace, dout_TD in zip(workspaces, self.dout_NTD):
            combine.publish_rows(workspace, dout_TD=dout_TD)
        for half in (combine.signal, combine.wait):
            for workspace in workspaces:
                half(workspace, PHASE_PUBLISHED)
        self.workspace = workspaces[self.rank]
        self.slots_PTD = [workspace.published.slots_PTD for workspace in workspaces]
        self.plan, self.counters = build_kernel_plan(self.workspace)
        self.sizes = read_sizes(self.plan, self.workspace)
        num_rows = BLOCK_M * self.sizes.num_tiles
        row_shape = RowShape(layer=shape, num_rows=num_rows)
        groups = (
            Layout(group, row_shape).allocate("cuda") for group in (KeptRows, HiddenRows, ResultRows, BackwardRows)
        )
        self.rows = SimpleNamespace(**{name: tensor for group in groups for name, tensor in vars(group).items()})
        self.out_TD = torch.empty(shape.max_tokens, dim, dtype=torch.bfloat16, device="cuda")
        self.dscores_TK = torch.empty(shape.max_tokens, shape.top_k, device="cuda")
        self.dw1_EFD, self.dw2_EDF, self.dw3_EFD = map(torch.empty_like, (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        self.side = torch.cuda.Stream()
        self.tiles_only = replace(self.plan, sizes=self.plan.sizes * torch.tensor([1, 0, 1, 1], device="cuda").int())
        self.tokens_only = replace(self.plan, sizes=self.plan.sizes * torch.tensor([0, 1, 1, 1], device="cuda").int())

    def reset(self, *, rows_in_place: bool = False, rows_done: bool = False) -> None:
        """Zero the counters, or count all rows as pulled or as multiplied."""
        for field in fields(self.counters):
            getattr(self.counters, field.name).zero_()
        if rows_in_place:
            self.counters.arrival_M.copy_(self.plan.tile_rows_M)
        if rows_done:
            tuning = tune_gemm_push(
                self.shape.dim, self.shape.hidden_dim, top_k=self.shape.top_k, ep_size=self.shape.ep_size
            )
            first_tiles = self.shape.dim // tuning.block_n - tuning.last_tiles
            self.counters.done_M.fill_(first_tiles + (tuning.last_tiles << 16))

    def pull_gemm(self, plan=None, *, saves: bool = False, **kwargs) -> None:
        kept = dict(gate_RF=self.rows.gate_RF, up_RF=self.rows.up_RF) if saves else {}
        self.kernels.pull_gemm(
            plan or self.plan,
            self.counters,
            x_addresses_P=self.workspace.addresses.x_P,
            w1_EFD=self.w1_EFD,
            w3_EFD=self.w3_EFD,
            pool_RD=self.rows.pool_RD,
            h_RF=self.rows.h_RF,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **kept,
            **kwargs,
        )

    def gemm_push(self, plan=None, **kwargs) -> None:
        if self.shape.ep_size == 1:
            to = dict(out_TD=self.out_TD)
        else:
            to = dict(slots_addresses_P=self.workspace.addresses.slots_P, max_tokens=self.shape.max_tokens)
        self.kernels.gemm_push(
            plan or self.plan,
            self.counters,
            h_RF=self.rows.h_RF,
            w2_EDF=self.w2_EDF,
            y_RD=self.rows.y_RD,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **to,
            **kwargs,
        )

    def pull_gemm_backward(self, plan=None) -> None:
        names = (*BACKWARD_ROWS, "dout_RD", "dscore_parts_NR")
        self.kernels.pull_gemm_backward(
            plan or self.plan,
            self.counters,
            dout_addresses_P=self.workspace.addresses.dout_P,
            w2_EDF=self.w2_EDF,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **{name: getattr(self.rows, name) for name in names},
        )

    def gemm_push_backward(self, plan=None) -> None:
        addresses = self.workspace.addresses
        if self.shape.ep_size == 1:
            to = dict(dx_TD=self.out_TD, dscores_TK=self.dscores_TK)
        else:
            to = dict(slots_addresses_P=addresses.slots_P, score_slots_addresses_P=addresses.score_slots_P)
            to["max_tokens"] = self.shape.max_tokens
        self.kernels.gemm_push_backward(
            plan or self.plan,
            self.counters,
            w1_EFD=self.w1_EFD,
            w3_EFD=self.w3_EFD,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **{name: getattr(self.rows, name) for name in ("dgate_RF", "dup_RF", "dx_RD", "dscore_parts_NR")},
            **to,
        )

    def weight_gradients(self) -> None:
        self.kernels.weight_gradients(
            self.plan,
            self.counters,
            x_RD=self.rows.pool_RD,
            dw1_EFD=self.dw1_EFD,
            dw2_EDF=self.dw2_EDF,
            dw3_EFD=self.dw3_EFD,
            **{name: getattr(self.rows, name) for name in ("dout_RD", "dgate_RF", "dup_RF", "scaled_h_RF")},
        )

    def quantize(self) -> None:
        """Make the layer's FP8 tensors: what the owners, the optimizer step and ``pull_gemm_fp8`` would."""
        blocks = [quantize.quantize_rows(x_TD) for x_TD in self.x_NTD]
        self._fp8_x = blocks  # alive as long as their addresses are used
        num_rows = self.rows.pool_RD.shape[0]
        self.fp8 = dict(
            pool_RD=torch.empty(num_rows, self.shape.dim, device="cuda", dtype=quantize.FP8),
            pool_scales_bR=torch.empty(self.shape.dim // quantize.BLOCK, num_rows, device="cuda"),
            h_RF=torch.empty(num_rows, self.shape.hidden_dim, device="cuda", dtype=quantize.FP8),
            h_scales_bR=torch.empty(self.shape.hidden_dim // quantize.BLOCK, num_rows, device="cuda"),
        )
        self.fp8_weights = [quantize.quantize_weights(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        self.fp8_transposed = [weight.values.transpose(1, 2).contiguous() for weight in self.fp8_weights]
        dout_blocks = [quantize.quantize_rows(dout_TD) for dout_TD in self.dout_NTD]
        self._fp8_dout = dout_blocks
        hidden_RF, hidden_scales_bR = self.fp8["h_RF"], self.fp8["h_scales_bR"]
        self.fp8_backward = dict(
            dout_RD=torch.empty_like(self.fp8["pool_RD"]),
            dout_scales_bR=torch.empty_like(self.fp8["pool_scales_bR"]),
            dgate_fp8_RF=torch.empty_like(hidden_RF),
            dgate_scales_bR=torch.empty_like(hidden_scales_bR),
            dup_fp8_RF=torch.empty_like(hidden_RF),
            dup_scales_bR=torch.empty_like(hidden_scales_bR),
            dscore_parts_NR=torch.empty_like(hidden_scales_bR),
        )

        def addresses(blocks: list[quantize.Blocks]) -> list[torch.Tensor]:
            return [
                torch.tensor([getattr(b, name).data_ptr() for b in blocks], device="cuda")
                for name in ("values", "scales")
            ]

        self.fp8_addresses, self.fp8_dout_addresses = addresses(blocks), addresses(dout_blocks)

    def pull_gemm_fp8(self, plan=None, *, saves: bool = False) -> None:
        (w1, _, w3), (x_P, x_scales_P) = self.fp8_weights, self.fp8_addresses
        pull_gemm_fp8(
            plan or self.plan,
            self.counters,
            x_addresses_P=x_P,
            x_scales_addresses_P=x_scales_P,
            w1_EFD=w1.values,
            w1_scales_Ebb=w1.scales,
            w3_EFD=w3.values,
            w3_scales_Ebb=w3.scales,
            gate_RF=self.rows.gate_RF if saves else None,
            up_RF=self.rows.up_RF if saves else None,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **self.fp8,
        )

    def gemm_push_fp8(self, plan=None) -> None:
        if self.shape.ep_size == 1:
            to = dict(out_TD=self.out_TD)
        else:
            to = dict(slots_addresses_P=self.workspace.addresses.slots_P, max_tokens=self.shape.max_tokens)
        gemm_push_fp8(
            plan or self.plan,
            self.counters,
            h_RF=self.fp8["h_RF"],
            h_scales_bR=self.fp8["h_scales_bR"],
            w2_EDF=self.fp8_weights[1].values,
            w2_scales_Ebb=self.fp8_weights[1].scales,
            y_RD=self.rows.y_RD,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **to,
        )

    def pull_gemm_backward_fp8(self, plan=None) -> None:
        dout_P, dout_scales_P = self.fp8_dout_addresses
        pull_gemm_backward_fp8(
            plan or self.plan,
            self.counters,
            dout_addresses_P=dout_P,
            dout_scales_addresses_P=dout_scales_P,
            w2t_EFD=self.fp8_transposed[1],
            w2_scales_Ebb=self.fp8_weights[1].scales,
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **{name: getattr(self.rows, name) for name in BACKWARD_ROWS},
            **self.fp8_backward,
        )

    def gemm_push_backward_fp8(self, plan=None) -> None:
        addresses, rows = self.workspace.addresses, self.fp8_backward
        if self.shape.ep_size == 1:
            to = dict(dx_TD=self.out_TD, dscores_TK=self.dscores_TK)
        else:
            to = dict(slots_addresses_P=addresses.slots_P, score_slots_addresses_P=addresses.score_slots_P)
            to["max_tokens"] = self.shape.max_tokens
        gemm_push_backward_fp8(
            plan or self.plan,
            self.counters,
            dgate_RF=rows["dgate_fp8_RF"],
            dgate_scales_bR=rows["dgate_scales_bR"],
            dup_RF=rows["dup_fp8_RF"],
            dup_scales_bR=rows["dup_scales_bR"],
            w1t_EDF=self.fp8_transposed[0],
            w1_scales_Ebb=self.fp8_weights[0].scales,
            w3t_EDF=self.fp8_transposed[2],
            w3_scales_Ebb=self.fp8_weights[2].scales,
            dx_RD=self.rows.dx_RD,
            dscore_parts_NR=rows["dscore_parts_NR"],
            fault=self.workspace.local.fault,
            rank=self.rank,
            deadline_seconds=2,
            **to,
        )

    def backward(self, *, beside: bool) -> None:
        """All of it; ``beside``: the weight gradients on a stream of their own."""
        self.pull_gemm_backward()
        rows_are_there = torch.cuda.current_stream().record_event()
        self.gemm_push_backward()
        if beside:
            with torch.cuda.stream(self.side):
                self.side.wait_event(rows_are_there)
                self.weight_gradients()
            torch.cuda.current_stream().wait_stream(self.side)
        else:
            self.weight_gradients()

    def check(self) -> float:
        """Run both kernels on poisoned outputs. Returns the sums' relative error; raises if any is missing or wrong."""
        outputs = [t for t in (self.rows.pool_RD, self.rows.h_RF, self.rows.y_RD, self.out_TD) if t.numel()]
        for tensor in outputs + [slots for slots in self.slots_PTD if slots.numel()]:
            tensor.fill_(float("nan"))
        self.reset()
        self.pull_gemm()
        self.gemm_push()
        self.workspace.check()
        ids_NK, scores_NK, x_ND = torch.cat(self.ids_NTK), torch.cat(self.scores_NTK), torch.cat(self.x_NTD)
        local_NK = ids_NK - self.rank * self.shape.num_local_experts
        expected_ND = torch.zeros(x_ND.shape, device="cuda")
        for expert in range(self.shape.num_local_experts):
            token, slot = (local_NK == expert).nonzero(as_tuple=True)
            x = x_ND[token].float()
            h = torch.nn.functional.silu(x @ self.w1_EFD[expert].float().T) * (x @ self.w3_EFD[expert].float().T)
            expected_ND.index_add_(0, token, h @ self.w2_EDF[expert].float().T * scores_NK[token, slot, None])
        if self.shape.ep_size == 1:
            got_ND = self.out_TD
        else:
            got_ND = torch.cat([slots_PTD[self.rank] for slots_PTD in self.slots_PTD])
        is_mine_N = ((local_NK >= 0) & (local_NK < self.shape.num_local_experts)).any(dim=1)
        if not got_ND[~is_mine_N].isnan().all():
            raise AssertionError("Rows of tokens without a local expert were written.")
        error = ((got_ND.float() - expected_ND)[is_mine_N].norm() / expected_ND.norm()).item()
        if not error < 1e-2:  # so that NaN fails, too
            raise AssertionError(f"Relative error {error}.")
        return error


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


def sweep(name: str, repeats: int, kernels: list[str]) -> list[Result]:
    layer = Layer(SHAPES[name])
    shape, num_rows = layer.shape, layer.sizes.num_rows
    print(f"{name}: {num_rows} rows of {layer.sizes.num_unique} tokens in {layer.sizes.num_tiles} tiles", flush=True)
    print(f"  relative error {layer.check():.1e} against fp32", flush=True)
    down_flops = 2.0 * num_rows * shape.dim * shape.hidden_dim
    gate_up_flops = 2 * down_flops
    rows_in_place = functools.partial(layer.reset, rows_in_place=True)
    rows_done = functools.partial(layer.reset, rows_done=True)
    layer.quantize()
    x_RD = torch.randn(num_rows, shape.dim, device="cuda").bfloat16()
    h_RF = torch.randn(num_rows, shape.hidden_dim, device="cuda").bfloat16()
    w13 = torch.randn(shape.dim, 2 * shape.hidden_dim, device="cuda").bfloat16()
    w2 = torch.randn(shape.hidden_dim, shape.dim, device="cuda").bfloat16()
    runs = (
        ("pull_gemm", "dense", layer.reset, lambda: x_RD @ w13, gate_up_flops),
        ("pull_gemm", "fused", layer.reset, layer.pull_gemm, gate_up_flops),
        ("pull_gemm", "saving gate, up", layer.reset, lambda: layer.pull_gemm(saves=True), gate_up_flops),
        ("pull_gemm", "gemm", rows_in_place, lambda: layer.pull_gemm(layer.tiles_only), gate_up_flops),
        ("pull_gemm", "rows", layer.reset, lambda: layer.pull_gemm(layer.tokens_only), None),
        ("gemm_push", "dense", layer.reset, lambda: h_RF @ w2, down_flops),
        ("gemm_push", "fused", layer.reset, layer.gemm_push, down_flops),
        ("gemm_push", "gemm", layer.reset, lambda: layer.gemm_push(layer.tiles_only), down_flops),
        ("gemm_push", "rows", rows_done, lambda: layer.gemm_push(layer.tokens_only), None),
        ("forward", "fused", layer.reset, lambda: (layer.pull_gemm(), layer.gemm_push()), 3 * down_flops),
        ("pull_gemm_backward", "fused", layer.reset, layer.pull_gemm_backward, down_flops),
        ("pull_gemm_backward", "gemm", rows_in_place, lambda: layer.pull_gemm_backward(layer.tiles_only), down_flops),
        ("gemm_push_backward", "fused", layer.reset, layer.gemm_push_backward, gate_up_flops),
        ("gemm_push_backward", "gemm", layer.reset, lambda: layer.gemm_push_backward(layer.tiles_only), gate_up_flops),
        ("weight_gradients", "gemm", layer.reset, layer.weight_gradients, 3 * down_flops),
        ("pull_gemm_fp8", "fused", layer.reset, layer.pull_gemm_fp8, gate_up_flops),
        ("pull_gemm_fp8", "saving gate, up", layer.reset, lambda: layer.pull_gemm_fp8(saves=True), gate_up_flops),
        ("pull_gemm_fp8", "gemm", rows_in_place, lambda: layer.pull_gemm_fp8(layer.tiles_only), gate_up_flops),
        ("gemm_push_fp8", "fused", layer.reset, layer.gemm_push_fp8, down_flops),
        ("gemm_push_fp8", "gemm", layer.reset, lambda: layer.gemm_push_fp8(layer.tiles_only), down_flops),
        ("forward_fp8", "fused", layer.reset, lambda: (layer.pull_gemm_fp8(), layer.gemm_push_fp8()), 3 * down_flops),
        ("pull_gemm_backward_fp8", "fused", layer.reset, layer.pull_gemm_backward_fp8, down_flops),
        (
            "pull_gemm_backward_fp8",
            "gemm",
            rows_in_place,
            lambda: layer.pull_gemm_backward_fp8(layer.tiles_only),
            down_flops,
        ),
        ("gemm_push_backward_fp8", "fused", layer.reset, layer.gemm_push_backward_fp8, gate_up_flops),
        (
            "gemm_push_backward_fp8",
            "gemm",
            layer.reset,
            lambda: layer.gemm_push_backward_fp8(layer.tiles_only),
            gate_up_flops,
        ),
        ("backward", "one stream", layer.reset, lambda: layer.backward(beside=False), 6 * down_flops),
        ("backward", "two streams", layer.reset, lambda: layer.backward(beside=True), 6 * down_flops),
    )
    results = time_runs(name, layer, [run for run in runs if run[0] in kernels], repeats)
    portable = [
        (f"triton {kernel}", part, *rest)
        for kernel, part, *rest in runs
        if kernel in PORTABLE and f"triton {kernel}" in kernels and part in ("fused", "saving gate, up", "gemm")
    ]
    if portable:
        layer.kernels = kernel_set("triton")
        print(f"  portable kernels: relative error {layer.check():.1e} against fp32", flush=True)
        results += time_runs(name, layer, portable, repeats)
    return results


def time_runs(name: str, layer: Layer, runs: Sequence[tuple], repeats: int) -> list[Result]:
    """``runs``: kernel, part, what to do before each launch, the launch, operations."""
    results = []
    for kernel, part, prepare, launch, flops in runs:
        times = time_ms(prepare, launch, repeats)
        layer.workspace.check()
        median = statistics.median(times)
        results.append(
            Result(
                shape=name,
                kernel=kernel,
                part=part,
                median_ms=median,
                min_ms=min(times),
                max_ms=max(times),
                tflops=flops and flops / median / 1e9,
            )
        )
        rate = f"{results[-1].tflops:6.0f} TFLOP/s" if flops else ""
        print(f"  {kernel:<10} {part:<16} {median:8.4f} [{min(times):8.4f}, {max(times):8.4f}] {rate}", flush=True)
    return results


def portable_tunings(shape: LayerShape) -> dict[str, dict]:
    kind = portable_tuning.gpu_kind(torch.device("cuda"))
    widths = shape.dim, shape.hidden_dim
    push = portable_tuning.tune_gemm_push(kind, shape.dim, top_k=shape.top_k, ep_size=shape.ep_size)
    return {
        "triton pull_gemm": asdict(portable_tuning.tune_pull_gemm(kind, *widths)),
        "triton gemm_push": asdict(push),
        "triton pull_gemm_backward": asdict(portable_tuning.tune_pull_gemm_backward(kind, *widths)),
        "triton weight_gradients": asdict(portable_tuning.tune_weight_gradients(kind, *widths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    args = parser.parse_args()
    results, tunings = [], {}
    for name in args.shapes:
        shape = SHAPES[name]
        results += sweep(name, args.repeats, args.kernels)
        tunings[name] = {
            "pull_gemm": asdict(tune_pull_gemm(shape.dim, shape.hidden_dim)),
            "gemm_push": asdict(tune_gemm_push(shape.dim, shape.hidden_dim, top_k=shape.top_k, ep_size=shape.ep_size)),
            "pull_gemm_backward": asdict(tune_pull_gemm_backward(shape.dim, shape.hidden_dim)),
            "weight_gradients": asdict(tune_weight_gradients(shape.dim, shape.hidden_dim)),
            **portable_tunings(shape),
        }
        torch.cuda.empty_cache()
        report = {
            "command": " ".join(["python", "benchmarks/kernel_sweep.py", *sys.argv[1:]]),
            "environment": describe_environment(),
            "repeats": args.repeats,
            "tunings": tunings,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(report, indent=1))  # after each shape: what is measured is kept


if __name__ == "__main__":
    main()
