"""Which tile shapes, stages and shares of the programs the portable kernels use, by kind of GPU. A table, not a search.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..launch import MX_WIDTH_MULTIPLE, WIDTH_MULTIPLE
from ..tuning import num_score_parts


@dataclass(frozen=True, kw_only=True)
class PortableTuning:
    """How a portable kernel cuts its work."""

    block_n: int
    """Columns of a tile (pull_gemm: of gate and of up each): divides the width of what is computed."""
    stages: int
    """Steps of the main loop that are being loaded or multiplied."""
    warps: int = 8
    """Of a program."""
    programs_per_mover: int = 8
    """Of so many programs one moves rows; of fewer, one."""
    tokens: int
    """Tokens of a mover's item: a power of two."""
    columns: int
    """Columns of each of them that a mover holds in registers at a time: a power of two."""
    routes: int = 1
    """gemm_push: rows of each of them that a mover reads at a time: a power of two."""
    last_tiles: int = 0
    """gemm_push: how many of the D / block_n column tiles are computed in a second pass over the rows; 0: one pass."""

    movers_multiply: int = 0
    """gemm_push: percentage of the first pass's tiles until which movers multiply, too, since hardly a token is complete."""

    def num_movers(self, num_programs: int) -> int:
        return max(1, num_programs // self.programs_per_mover)


@dataclass(frozen=True, kw_only=True)
class WeightGradientsTuning:
    """How the portable ``weight_gradients`` cuts its work."""

    block_m: int
    """Columns of the left matrix of a tile: divides D and F."""
    block_n: int
    """Columns of the right one: likewise."""
    stages: int
    """Steps of the main loop that are being loaded or multiplied."""
    warps: int = 8


@dataclass(frozen=True, kw_only=True)
class Stages:
    """For each kernel: columns of a tile -> stages. The widest that divides is used.

    A step is 128 bytes deep: 64 elements of bf16, 128 of MXFP8. It takes: pull_gemm 16 KiB of rows and 8 KiB for every 64 columns of W1 and
    of W3; gemm_push and pull_gemm_backward 16 KiB of rows and 8 KiB for every 64 columns of a weight; weight_gradients 8 KiB for every 64
    columns of either matrix. In MXFP8 scales are a 32nd more. On AMD GPUs one of the stages is in registers.
    """

    pull_gemm: dict[int, int]
    pull_gemm_backward: dict[int, int]
    gemm_push: dict[int, int]
    weight_gradients: dict[int, int]
    """Columns of the right matrix; of the left one a tile has 128, or 64 with 64."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU."""

    shared_memory: int
    """Bytes that a program can have."""
    bf16: Stages
    mxfp8: Stages | None = None
    """None: it does not convert e4m3."""

    def stages(self, is_mx: bool) -> Stages:
        return self.mxfp8 if is_mx else self.bf16


_KIB = 1024

GPUS = {
    # H100, H200. Two accumulators of 128 x 128 are half of the registers of 8 warps, and the widest that they hold. Products in MXFP8 are
    # emulated: operands pass through registers, and shared memory holds them in bf16, too.
    "sm_90": Gpu(
        shared_memory=227 * _KIB,
        bf16=Stages(
            pull_gemm={128: 4, 64: 4},
            pull_gemm_backward={128: 4, 64: 4},
            gemm_push={256: 4, 128: 4, 64: 4},
            weight_gradients={256: 4, 128: 4, 64: 4},
        ),
        mxfp8=Stages(
            pull_gemm={64: 2},
            pull_gemm_backward={128: 3},
            gemm_push={128: 2},
            weight_gradients={128: 2},
        ),
    ),
    # B200, B300: accumulators are in the tensor cores' own memory.
    "sm_100": Gpu(
        shared_memory=227 * _KIB,
        bf16=Stages(
            pull_gemm={128: 4, 64: 4},
            pull_gemm_backward={128: 4, 64: 4},
            gemm_push={256: 4, 128: 4, 64: 4},
            weight_gradients={256: 4, 128: 4, 64: 4},
        ),
        mxfp8=Stages(
            pull_gemm={128: 4},
            pull_gemm_backward={128: 4},
            gemm_push={256: 4, 128: 4},
            weight_gradients={256: 4, 128: 4},
        ),
    ),
    # A100. Its tensor cores read operands from registers, which leaves room for 128 x 128 in all.
    "sm_80": Gpu(
        shared_memory=163 * _KIB,
        bf16=Stages(
            pull_gemm={64: 4},
            pull_gemm_backward={128: 4, 64: 4},
            gemm_push={128: 4, 64: 4},
            weight_gradients={128: 4, 64: 4},
        ),
    ),
    # Ampere, Ada and Blackwell for workstations: as A100, with less shared memory.
    "sm_86": Gpu(
        shared_memory=99 * _KIB,
        bf16=Stages(
            pull_gemm={64: 3},
            pull_gemm_backward={128: 3, 64: 3},
            gemm_push={128: 3, 64: 3},
            weight_gradients={128: 3, 64: 3},
        ),
    ),
    # MI350X, MI355X.
    "gfx950": Gpu(
        shared_memory=160 * _KIB,
        bf16=Stages(
            pull_gemm={128: 2, 64: 2},
            pull_gemm_backward={128: 2, 64: 2},
            gemm_push={128: 2, 64: 2},
            weight_gradients={128: 2, 64: 2},
        ),
        mxfp8=Stages(
            pull_gemm={128: 2},
            pull_gemm_backward={128: 2},
            gemm_push={128: 2},
            weight_gradients={128: 2},
        ),
    ),
    # MI300X, MI325X.
    "gfx942": Gpu(
        shared_memory=64 * _KIB,
        bf16=Stages(
            pull_gemm={128: 2, 64: 2},
            pull_gemm_backward={128: 2, 64: 2},
            gemm_push={128: 2, 64: 2},
            weight_gradients={128: 2, 64: 2},
        ),
    ),
}


def step_depth(is_mx: bool) -> int:
    """Depth of a step of the main loops: 128 bytes of a row."""
    return MX_WIDTH_MULTIPLE if is_mx else WIDTH_MULTIPLE


_PULL_ELEMENTS, _PULL_BACKWARD_ELEMENTS = 32768, 16384
"""Of the tokens that a mover holds in registers: a quarter of those of 8 warps. The more, the better, for what it has to wait for is the
same for one token as for many; but pull_gemm_backward would spill."""

_COMPLETE = 0.05
"""Share of the tokens that must be complete for a mover of gemm_push to have something to do. Of tokens with r routes each to any of
the experts, a share of f^r is complete when a share f of the experts is."""

_SEND_ELEMENTS = 4096
"""Of the sums that a mover of gemm_push holds, in fp32, beside ``routes`` times as many values of bf16."""


@functools.cache
def gpu_kind(device: torch.device) -> str:
    """The entry of :data:`GPUS` for a device. The CPU, where kernels are interpreted, has H100's."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90"}.get((major, minor), "sm_100" if major == 10 else "sm_86")


def tune_pull_gemm(kind: str, dim: int, hidden_dim: int, *, is_mx: bool = False) -> PortableTuning:
    """For tokens of ``dim`` (D) columns and experts of ``hidden_dim`` (F)."""
    stages = GPUS[kind].stages(is_mx).pull_gemm
    return _tune_pull(stages, _widest(stages, hidden_dim), dim, _PULL_ELEMENTS, is_mx)


def tune_pull_gemm_backward(kind: str, dim: int, hidden_dim: int, *, is_mx: bool = False) -> PortableTuning:
    """As :func:`tune_pull_gemm`. The width of a tile is the same on all GPUs: ``plan_tables.py`` sizes the parts of the score
    gradients by it."""
    block_n = hidden_dim // num_score_parts(dim, hidden_dim)
    return _tune_pull(GPUS[kind].stages(is_mx).pull_gemm_backward, block_n, dim, _PULL_BACKWARD_ELEMENTS, is_mx)


def _tune_pull(stages: dict[int, int], block_n: int, dim: int, elements: int, is_mx: bool) -> PortableTuning:
    # Of two bytes, as they are copied. In MXFP8 as many tokens as in bf16: more of them would take no fewer registers.
    words, elements = (dim // 2, elements // 2) if is_mx else (dim, elements)
    columns = min(2048, _next_power_of_2(words))
    return PortableTuning(block_n=block_n, stages=stages[block_n], columns=columns, tokens=min(64, elements // columns))


def tune_gemm_push(kind: str, dim: int, *, top_k: int, ep_size: int, is_mx: bool = False) -> PortableTuning:
    """For tokens of ``dim`` (D) columns with ``top_k`` (K) routes and ``ep_size`` (P) ranks."""
    stages = GPUS[kind].stages(is_mx).gemm_push
    block_n = _widest(stages, dim)
    # Routes to this rank of a token that has any, if routing is random.
    local_routes = top_k / (ep_size * (1 - (1 - 1 / ep_size) ** top_k))
    columns = min(512, _next_power_of_2(dim))
    return PortableTuning(
        block_n=block_n,
        stages=stages[block_n],
        tokens=min(16, _SEND_ELEMENTS // columns),
        columns=columns,
        routes=min(8, _next_power_of_2(round(local_routes))),
        movers_multiply=int(100 * _COMPLETE ** (1 / local_routes)),
        # As in the Hopper kernel: tokens with many routes here are complete only near the end of a pass.
        last_tiles=dim // block_n // 2 if local_routes > 3 else 0,
    )


def tune_weight_gradients(kind: str, dim: int, hidden_dim: int, *, is_mx: bool = False) -> WeightGradientsTuning:
    """For experts of ``dim`` (D) and ``hidden_dim`` (F)."""
    stages = GPUS[kind].stages(is_mx).weight_gradients
    block_n = _widest(stages, math.gcd(dim, hidden_dim))
    return WeightGradientsTuning(block_m=min(128, block_n), block_n=block_n, stages=stages[block_n])


def _widest(stages: dict[int, int], extent: int) -> int:
    return next(block_n for block_n in stages if extent % block_n == 0)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
