"""Where a step's time went, from a profile of it.

On a GPU: time of its kernels by part. A kernel belongs to the named range of ours that was open on the GPU when it ran, or
else to the part that its name tells. Parts overlap in time where streams do, so they may add up to more than the step.
*Exposed communication* is when the GPU ran nothing but collectives; *idle* is when it ran nothing, *idle before* a part what of that a
kernel of the part ended. ``mega_moe`` moves tokens inside its GEMM kernels: what of that is not hidden is in their times.

On a CPU: time of the operators themselves, without those that they call, by their names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

OPTIMIZER_RANGE = "optimizer"
RANGE_PREFIX = "mega_moe: "
"""Of the named ranges in ``hopper.py``."""
IDLE_BEFORE = "idle before "

PARTS_BY_NAME = (
    ("communication", r"nccl|gloo|c10d|record_param_comms"),
    ("attention", r"flex|flash|fmha|attention|sdpa"),
    (
        "expert GEMMs",
        r"grouped|GroupProblemShape|titan_megamoe::",
    ),  # the second is how CUTLASS's grouped product is called
    ("router and permutation", r"topk|sort|histc|bincount|scatter|gather|index|cumsum|unpermute|permute_"),
    ("optimizer", r"multi_tensor|adam"),
    ("other GEMMs", r"gemm|nvjet|cutlass|cublas|matmul|::mm|::addmm|::bmm|::linear"),
    ("copies", r"memcpy|memset|::copy_|::_to_copy"),
)
"""Part -> what names of kernels or operators contain; the first that fits."""

Interval = tuple[float, float]


def summarize(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Milliseconds by part; on a GPU also ``"exposed communication"``, ``"idle"`` and IDLE_BEFORE each part, which are no parts of
    their own."""
    events = list(events)
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    return summarize_gpu(on_gpu) if on_gpu else summarize_cpu(events)


def summarize_cpu(events: list[FunctionEvent]) -> dict[str, float]:
    milliseconds: dict[str, float] = defaultdict(float)
    for event in events:
        milliseconds[part_of(event.name)] += event.self_cpu_time_total / 1e3
    return dict(milliseconds)


def summarize_gpu(events: list[FunctionEvent]) -> dict[str, float]:
    ranges = [event for event in events if _is_range(event.name)]
    kernels = [event for event in events if not _is_range(event.name) and not event.name.startswith("ProfilerStep")]
    milliseconds: dict[str, float] = defaultdict(float)
    communication: list[Interval] = []
    computation: list[Interval] = []
    covered_to = min((kernel.time_range.start for kernel in kernels), default=0.0)
    for kernel in sorted(kernels, key=lambda kernel: kernel.time_range.start):
        start, end = kernel.time_range.start, kernel.time_range.end
        part = part_of(kernel.name)
        if part == "communication":
            communication.append((start, end))
        else:
            computation.append((start, end))
            inside = [r for r in ranges if r.time_range.start <= start < r.time_range.end]
            if inside:
                innermost = min(inside, key=lambda r: r.time_range.elapsed_us())
                part = innermost.name.removeprefix(RANGE_PREFIX)
        milliseconds[part] += (end - start) / 1e3
        if start > covered_to:
            milliseconds[IDLE_BEFORE + part] += (start - covered_to) / 1e3
        covered_to = max(covered_to, end)
    busy = length(communication + computation)
    if kernels:
        span = max(k.time_range.end for k in kernels) - min(k.time_range.start for k in kernels)
        milliseconds["exposed communication"] = (busy - length(computation)) / 1e3
        milliseconds["idle"] = (span - busy) / 1e3
    return dict(milliseconds)


def part_of(name: str) -> str:
    if name == OPTIMIZER_RANGE:
        return OPTIMIZER_RANGE
    return next((part for part, pattern in PARTS_BY_NAME if re.search(pattern, name, re.IGNORECASE)), "everything else")


def length(intervals: list[Interval]) -> float:
    """Of the union."""
    total, covered_to = 0.0, -float("inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def _is_range(name: str) -> bool:
    return name.startswith(RANGE_PREFIX) or name == OPTIMIZER_RANGE
