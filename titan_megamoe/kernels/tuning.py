"""Which tile shapes and how many stages, warps, registers the GEMM kernels use, by shape. A table, not a search.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

COMM_WARPS = 4
"""Communication warps in a CTA: a whole warpgroup, since registers are set per warpgroup."""


@dataclass(frozen=True, kw_only=True)
class PullGemmTuning:
    """How ``pull_gemm`` cuts its work."""

    block_n: int
    """Columns of a tile, of gate and of up each: divides F."""
    stages: int
    """Steps of the main loop whose operands fit in shared memory."""
    comm_warps: int = COMM_WARPS
    """How many communication warps of each CTA work, 1 to COMM_WARPS. Each has one item in flight."""
    tokens: int = 1
    """Tokens of a communication item."""
    columns: int
    """Columns of a token that a communication warp holds in registers at a time: a power of two."""
    registers: tuple[int, int, int] = (192, 88, 32)
    """Of a thread of the second consumer, of the communication warps, of producer and scheduler. Multiples of 8; the
    first consumer has what these leave of 512."""


@dataclass(frozen=True, kw_only=True)
class PullGemmBackwardTuning(PullGemmTuning):
    """How ``pull_gemm_backward`` cuts its work. 640 threads begin with 96 registers each: the first consumer has what the
    others leave of 480."""

    epilogue_registers: int
    """Of a thread of the warpgroup that goes back through SwiGLU."""


@dataclass(frozen=True, kw_only=True)
class GemmPushTuning:
    """How ``gemm_push`` cuts its work."""

    block_n: int
    """Columns of a tile of y: divides D."""
    stages: int
    """Steps of the main loop whose operands fit in shared memory."""
    last_tiles: int
    """How many of the D / block_n column tiles are computed in a second pass over the rows; 0: one pass."""
    comm_warps: int = COMM_WARPS
    """How many communication warps of each CTA work, 1 to COMM_WARPS."""
    tokens: int
    """Tokens of a communication warp's item: a power of two."""
    routes: int
    """Rows of each of them that a communication warp reads at a time: a power of two."""
    columns: int
    """Columns of each of them: a power of two."""
    registers: tuple[int, int, int] = (168, 136, 40)
    """As in :class:`PullGemmTuning`; the third is that of producer, scheduler and store warp."""


# Columns of a tile -> stages. Wider tiles read less from L2 per product; the widest that divides F (or D) is used. A
# stage holds 64 columns of 128 rows of A and of block_n rows of B (pull_gemm: of W1 and of W3), next to the output's
# buffer (pull_gemm: 128 x block_n; gemm_push: 64 x block_n), all in bf16 and in 227 KiB.
PULL_GEMM_STAGES = {128: 4, 64: 6}
# A stage of pull_gemm_backward holds 64 columns of 128 rows and block_n columns of W2, next to six buffers of 64 x block_n.
PULL_GEMM_BACKWARD_STAGES = {128: 4, 64: 6}
GEMM_PUSH_STAGES = {256: 4, 128: 6, 64: 8}

# Rows of a token read at a time -> tokens of an item, columns of each: what 136 registers hold beside the sums in fp32.
# With few rows per token, an item is two tokens, so that as much is read per item.
GEMM_PUSH_ITEMS = {8: (1, 256), 4: (1, 512), 2: (2, 512), 1: (2, 512)}


def tune_pull_gemm(dim: int, hidden_dim: int) -> PullGemmTuning:
    """For tokens of ``dim`` (D) columns and experts of ``hidden_dim`` (F)."""
    block_n = _widest(PULL_GEMM_STAGES, hidden_dim, "hidden_dim")
    return PullGemmTuning(
        block_n=block_n,
        stages=PULL_GEMM_STAGES[block_n],
        columns=min(2048 if dim <= 4096 else 1024, _next_power_of_2(dim)),  # in more than two goes, 2048 would spill
    )


def tune_pull_gemm_backward(dim: int, hidden_dim: int) -> PullGemmBackwardTuning:
    """As :func:`tune_pull_gemm`, whose rows of ``dout`` are as wide as those of ``x``."""
    block_n = _widest(PULL_GEMM_BACKWARD_STAGES, hidden_dim, "hidden_dim")
    return PullGemmBackwardTuning(
        block_n=block_n,
        stages=PULL_GEMM_BACKWARD_STAGES[block_n],
        columns=min(1024, _next_power_of_2(dim)),
        registers=(120, 96, 40),
        epilogue_registers=96,
    )


def tune_pull_gemm_fp8(dim: int) -> PullGemmTuning:
    """For tokens of ``dim`` (D) columns. A stage holds 128 columns of 128 rows and of 128 rows of W1 and of W3, in FP8."""
    return PullGemmTuning(
        block_n=128,
        stages=4,
        columns=min(1024, _next_power_of_2(dim // 2)),  # of two bytes, as they are copied
        registers=(216, 48, 32),  # a consumer has the product of a step beside gate and up
    )


def tune_pull_gemm_backward_fp8(dim: int) -> PullGemmBackwardTuning:
    """For rows of ``dout`` of ``dim`` (D) columns. A stage holds 128 columns of 128 rows and of 128 rows of W2 transposed, in
    FP8, next to twelve buffers of 64 x 64 in bf16."""
    return PullGemmBackwardTuning(
        block_n=128,
        stages=4,
        columns=min(1024, _next_power_of_2(dim // 2)),  # of two bytes, as they are copied
        registers=(152, 48, 32),  # a consumer has the product of a step beside g
        epilogue_registers=96,
    )


def num_score_parts(dim: int, hidden_dim: int, *, is_fp8: bool = False) -> int:
    """Column tiles of ``pull_gemm_backward``, each of which has a part of a row's score gradient."""
    return hidden_dim // (128 if is_fp8 else tune_pull_gemm_backward(dim, hidden_dim).block_n)


def tune_gemm_push(dim: int, hidden_dim: int, *, top_k: int, ep_size: int) -> GemmPushTuning:
    """For tokens of ``dim`` (D) columns with ``top_k`` (K) routes, ``hidden_dim`` (F), and ``ep_size`` (P) ranks."""
    block_n = _widest(GEMM_PUSH_STAGES, dim, "dim")
    # Routes to this rank of a token that has any, if routing is random.
    local_routes = top_k / (ep_size * (1 - (1 - 1 / ep_size) ** top_k))
    routes = min(8, _next_power_of_2(round(local_routes)))
    tokens, columns = GEMM_PUSH_ITEMS[routes]
    if top_k > 8 and tokens > 1:
        columns //= 2  # to make room for their routes
    # Tokens with many routes here are complete, and can be sent, only near the end of a pass: so half of the columns
    # are left to a second pass. Tokens with one or two routes are complete all along.
    last_tiles = dim // block_n // 2 if local_routes > 3 else 0
    return GemmPushTuning(
        block_n=block_n,
        stages=GEMM_PUSH_STAGES[block_n],
        last_tiles=last_tiles,
        # Tokens that can be sent all along need less haste: a fourth warp takes more from the GEMM than it adds.
        comm_warps=COMM_WARPS if last_tiles else COMM_WARPS - 1,
        tokens=tokens,
        routes=routes,
        columns=min(columns, _next_power_of_2(dim)),
    )


def tune_gemm_push_fp8(dim: int, hidden_dim: int, *, top_k: int, ep_size: int) -> GemmPushTuning:
    """As :func:`tune_gemm_push`. A stage holds 128 columns of 128 rows of h and of W2, in FP8."""
    tuning = tune_gemm_push(dim, hidden_dim, top_k=top_k, ep_size=ep_size)
    return replace(tuning, block_n=128, stages=6, last_tiles=dim // 128 // 2 if tuning.last_tiles else 0)


def _widest(stages: dict[int, int], extent: int, name: str) -> int:
    for block_n in stages:
        if extent % block_n == 0:
            return block_n
    raise ValueError(f"{name} = {extent} is not a multiple of 64. Pad the model's.")


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# ---- weight_gradients


@dataclass(frozen=True, kw_only=True)
class WeightGradientsTuning:
    """How ``weight_gradients`` cuts its work."""

    block_n: int
    """Columns of a tile: divides D and F."""
    stages: int
    """Steps of the main loop whose operands fit in shared memory."""
    registers: tuple[int, int] = (240, 24)
    """Of a thread of the second consumer, and of producer, scheduler and store warp. Multiples of 8; the first consumer
    has what these leave of 504."""


# As above. A stage holds 32 rows of 128 columns of the left matrix and of block_n columns of the right one, next to the
# output's buffer, 64 x block_n.
WEIGHT_GRADIENTS_STAGES = {256: 8, 128: 12, 64: 16}


def tune_weight_gradients(dim: int, hidden_dim: int) -> WeightGradientsTuning:
    """For experts of ``dim`` (D) and ``hidden_dim`` (F)."""
    block_n = _widest(WEIGHT_GRADIENTS_STAGES, math.gcd(dim, hidden_dim), "gcd(dim, hidden_dim)")
    return WeightGradientsTuning(block_n=block_n, stages=WEIGHT_GRADIENTS_STAGES[block_n])


# A stage holds 128 rows of 128 columns of the left matrix and of block_n columns of the right one, in FP8, and their
# scales, next to the output's buffer, 64 x 128 in bf16.
WEIGHT_GRADIENTS_FP8_STAGES = {256: 4, 128: 6}


def tune_weight_gradients_fp8(dim: int, hidden_dim: int) -> WeightGradientsTuning:
    """For experts of ``dim`` (D) and ``hidden_dim`` (F), multiples of 128."""
    if dim % 128 or hidden_dim % 128:
        raise ValueError(
            f"dim = {dim} or hidden_dim = {hidden_dim} is not a multiple of 128. Use bf16, or pad the model's."
        )
    block_n = _widest(WEIGHT_GRADIENTS_FP8_STAGES, math.gcd(dim, hidden_dim), "gcd(dim, hidden_dim)")
    return WeightGradientsTuning(block_n=block_n, stages=WEIGHT_GRADIENTS_FP8_STAGES[block_n])
