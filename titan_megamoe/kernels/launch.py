"""What the launching functions of all GEMM kernels check of their arguments, and how many programs they launch.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..quantize import MX_BLOCK
from .plan_tables import BLOCK_M, MAX_TOP_K

WIDTH_MULTIPLE = 64
"""Of which D and F must be multiples: the depth of a step of the main loops."""

MX_WIDTH_MULTIPLE = 128
"""Likewise of the kernels in MXFP8."""

DEFAULT_DEADLINE_SECONDS = 10.0
"""How long a role waits for another one of the same kernel; they differ by microseconds."""

_MAX_DEADLINE_SECONDS = 2000.0

INTERPRETED_PROGRAMS = 4
"""Programs of a launch on the CPU, where Triton's interpreter runs them one after the other."""


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors (AMD: compute units) of a GPU."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_tensor(kernel: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` is as the kernel reads it: contiguous, of that shape and dtype."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
        raise ValueError(
            f"{kernel}: {name} is {tuple(tensor.shape)} {tensor.dtype}, {layout}; expected {shape} {dtype}, contiguous."
        )


def check_scales(kernel: str, name: str, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``scales`` are those in MXFP8 of a tensor of ``shape``, contracted along its last dimension."""
    check_tensor(kernel, name, scales, (*shape[:-1], shape[-1] // MX_BLOCK), torch.uint8)


def check_sizes(
    kernel: str, num_rows: int, dim: int, hidden_dim: int, num_experts: int, top_k: int, *, is_mx: bool = False
) -> None:
    multiple = MX_WIDTH_MULTIPLE if is_mx else WIDTH_MULTIPLE
    for name, size in (("D", dim), ("F", hidden_dim)):
        if size % multiple:
            raise ValueError(f"{kernel}: {name} = {size} is not a multiple of {multiple}. Pad the model's.")
    if num_rows % BLOCK_M:
        raise ValueError(f"{kernel}: R = {num_rows} rows; the pool's must be a multiple of {BLOCK_M}.")
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"{kernel}: the plan has K = {top_k}; 1 to {MAX_TOP_K} routes are supported.")
    if not 1 <= num_experts < 2**16:
        raise ValueError(f"{kernel}: {num_experts} local experts; 1 to {2**16 - 1} are supported.")


def deadline_in_us(kernel: str, deadline_seconds: float) -> int:
    if not 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS:
        raise ValueError(
            f"{kernel}: deadline_seconds = {deadline_seconds}. Pass more than 0, at most {_MAX_DEADLINE_SECONDS}."
        )
    return max(1, int(deadline_seconds * 1e6))


def grid_size(kernel: str, num_sms: int | None, device: torch.device) -> int:
    available = sm_count(device)
    if num_sms is None:
        return available
    if not 1 <= num_sms <= available:
        raise ValueError(
            f"{kernel}: num_sms = {num_sms}, but the device has {available}. Pass 1 to {available}, or None for all."
        )
    return num_sms


@dataclass(frozen=True, kw_only=True)
class ScoreGradients:
    """In backward: parts of each row's score gradient, and where their sums go: one of the two."""

    parts_NR: torch.Tensor
    dscores_TK: torch.Tensor | None
    slots_addresses_P: torch.Tensor | None

    def check(self, name: str, num_rows: int, top_k: int, dx_TD: torch.Tensor | None) -> torch.Tensor:  # noqa: N803
        """Returns where the sums go. ``dx_TD``: as of ``gemm_push_backward``."""
        if (dx_TD is None) != (self.dscores_TK is None) or (dx_TD is None) == (self.slots_addresses_P is None):
            raise ValueError(
                f"{name}: pass both dx_TD and dscores_TK, or both slots_addresses_P and score_slots_addresses_P."
            )
        check_tensor(name, "dscore_parts_NR", self.parts_NR, (self.parts_NR.shape[0], num_rows), torch.float32)
        if self.dscores_TK is None:
            return self.slots_addresses_P
        check_tensor(name, "dscores_TK", self.dscores_TK, (dx_TD.shape[0], top_k), torch.float32)
        return self.dscores_TK
