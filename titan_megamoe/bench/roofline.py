"""What a mixture-of-experts layer costs at least: arithmetic, bytes over the link, bytes of memory, and the time of each.

All figures are for one rank and one layer, with routes spread evenly over experts. A layer can take no less than the largest of
the three times, if all are hidden behind that one perfectly.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..quantize import BLOCK


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peaks, and the shares of them that were reached."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    """Dense, without sparsity."""
    hbm_tb_per_second: float
    link_gb_per_second: float
    """NVLink, in one direction."""
    memory_gib: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets for the SXM versions: H100, H200, and one GPU of an HGX B200.
        Gpu(
            name="h100", bf16_tflops=989, fp8_tflops=1979, hbm_tb_per_second=3.35, link_gb_per_second=450, memory_gib=80
        ),
        Gpu(
            name="h200", bf16_tflops=989, fp8_tflops=1979, hbm_tb_per_second=4.8, link_gb_per_second=450, memory_gib=141
        ),
        Gpu(
            name="b200",
            bf16_tflops=2250,
            fp8_tflops=4500,
            hbm_tb_per_second=8.0,
            link_gb_per_second=900,
            memory_gib=180,
        ),
    )
}

REACHED = {"bf16": 790 / 989, "fp8": 1250 / 1979, "hbm": 4.3 / 4.8, "link": 0.8}
"""Of the peaks. Measured on an H200: a dense bf16 product of random data at 790 TFLOP/s, our FP8 products at up to 1250, a copy at
4.3 TB/s. That of the link is an assumption."""

SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """One layer's work on one rank."""

    dim: int
    hidden_dim: int
    num_experts: int
    """Of all ranks."""
    top_k: int
    tokens: int
    """Of this rank."""
    ep_size: int
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"an expert-parallel degree of {self.ep_size} does not divide {self.num_experts} experts. Use a divisor."
            )

    @property
    def rows(self) -> int:
        """Rows that this rank's experts compute: as many as its tokens have routes."""
        return self.tokens * self.top_k

    @property
    def remote_ranks(self) -> float:
        """Ranks other than its own that hold an expert of a token, on average: a rank holds none with the probability that all K
        distinct experts are among the others'."""
        E, local = self.num_experts, self.num_experts // self.ep_size  # noqa: N806
        return (self.ep_size - 1) * (1 - math.comb(E - local, self.top_k) / math.comb(E, self.top_k))

    def _row_bytes(self, is_fp8: bool) -> int:
        return self.dim + 4 * -(-self.dim // BLOCK) if is_fp8 else 2 * self.dim


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a forward, a recomputation or a backward."""

    bf16_flop: float
    fp8_flop: float
    link_bytes: float
    """Received over the link by this rank; it sends as many."""
    hbm_bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def milliseconds(self, gpu: Gpu) -> dict[str, float]:
        """``{"arithmetic": ..., "link": ..., "memory": ...}``, at what was REACHED of the peaks."""
        arithmetic = self.bf16_flop / (gpu.bf16_tflops * REACHED["bf16"]) + self.fp8_flop / (
            gpu.fp8_tflops * REACHED["fp8"]
        )
        return {
            "arithmetic": arithmetic / 1e9,
            "link": self.link_bytes / (gpu.link_gb_per_second * REACHED["link"]) / 1e6,
            "memory": self.hbm_bytes / (gpu.hbm_tb_per_second * REACHED["hbm"]) / 1e9,
        }


def forward(load: Load) -> Cost:
    """Gate, up and down; every token's row to each remote rank once, every remote rank's sum back once.

    Memory: the weights once; each row of x read and written into the pool and read from there; gate, up and h written, h read; y
    written and read; the output written.
    """
    is_fp8 = load.precision == "fp8"
    flop, weights = 6.0 * load.rows * load.dim * load.hidden_dim, _weights(load)
    row, element = load._row_bytes(is_fp8), 1 if is_fp8 else 2
    hbm = element * weights + 3 * load.rows * row + load.rows * load.hidden_dim * (4 + 2 * element)
    hbm += load.rows * 4 * load.dim + 2 * load.tokens * load.dim
    return _cost(flop, is_fp8, load.tokens * load.remote_ranks * (row + 2 * load.dim), hbm)


def recomputation(load: Load) -> Cost:
    """What full activation checkpointing adds: dispatch, gate and up, but neither down nor combine."""
    is_fp8 = load.precision == "fp8"
    row, element = load._row_bytes(is_fp8), 1 if is_fp8 else 2
    hbm = element * _weights(load) * 2 / 3 + 3 * load.rows * row + load.rows * load.hidden_dim * (4 + element)
    flop = 4.0 * load.rows * load.dim * load.hidden_dim
    return _cost(flop, is_fp8, load.tokens * load.remote_ranks * row, hbm)


def backward(load: Load) -> Cost:
    """Gradients of rows (as much arithmetic as forward) and of weights (as much again, here in bf16); every token's row of dout to
    each remote rank, every remote rank's part of dx and of the score gradients back.

    Memory: the weights once, their gradients written; dout read, written and read twice; gate, up read; their gradients and the
    weighted h written, and read twice; x read; dx written and read, and written.
    """
    is_fp8 = load.precision in ("fp8", "fp8_bwd")
    flop, weights = 6.0 * load.rows * load.dim * load.hidden_dim, _weights(load)
    row, element = load._row_bytes(is_fp8), 1 if is_fp8 else 2
    hbm = (element + 2) * weights + 4 * load.rows * row + load.rows * 2 * load.dim
    hbm += load.rows * load.hidden_dim * 2 * (2 + 3 + 5) + load.rows * 4 * load.dim + 2 * load.tokens * load.dim
    link = load.tokens * load.remote_ranks * (row + 2 * load.dim + SCORE_BYTES * load.top_k)
    return _cost(flop, is_fp8, link, hbm) + _cost(flop, False, 0.0, 0.0)


def _weights(load: Load) -> float:
    """Elements of this rank's experts."""
    return 3.0 * load.num_experts / load.ep_size * load.dim * load.hidden_dim


def _cost(flop: float, is_fp8: bool, link_bytes: float, hbm_bytes: float) -> Cost:
    return Cost(
        bf16_flop=0.0 if is_fp8 else flop, fp8_flop=flop if is_fp8 else 0.0, link_bytes=link_bytes, hbm_bytes=hbm_bytes
    )
