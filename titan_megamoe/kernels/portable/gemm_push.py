"""``gemm_push`` and ``gemm_push_backward`` in plain Triton: see ``kernels/gemm_push.py`` for what they compute, and the package's
docstring for who does what.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import quantize
from .. import plan_tables
from ..launch import (
    check_scales,
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    grid_size,
    ScoreGradients,
)
from ..plan_tables import Counters, KernelPlan
from .common import (
    arrive_to_push,
    BLOCK_M,
    matrix_offsets,
    multiply_across,
    multiply_along,
    row_of,
    rows_of,
    tile_in_turn,
)
from .send import claim_tile, count_done, send_score_gradients, send_tokens
from .tuning import gpu_kind, PortableTuning, step_depth, tune_gemm_push


def gemm_push(
    plan: KernelPlan,
    counters: Counters,
    *,
    h_RF: torch.Tensor,  # noqa: N803
    w2_EDF: torch.Tensor,  # noqa: N803
    y_RD: torch.Tensor,  # noqa: N803
    out_TD: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Args:
        plan: the routing plan that ``h_RF`` was computed with.
        counters: those of ``pull_gemm``, or zeroed. ``done_M`` and ``queue[2:5, 9]`` are used up.
        h_RF: bf16 ``[R, F]``.
        w2_EDF: bf16 ``[e, D, F]``, this rank's experts. D and F are multiples of 64.
        y_RD: bf16 ``[R, D]``, written: each row's h W2^T. Padding rows may be written, with anything.
        out_TD: with one rank: bf16 ``[T, D]``, written where a token has a route, which is everywhere.
        slots_addresses_P: with several ranks: int64 ``[P]``, address of each rank's slots, bf16 ``[P, max_tokens, D]``,
            16-byte aligned; the row of token t of owner o is written to slots ``[rank, t]`` of o.
        max_tokens: with several ranks: of the slots.
        fault: int32, at least 7: the record of a missed deadline (``plan_tables.FAULT_FIELDS``).
        rank: this rank.
        num_sms: programs to launch, at most one for each SM; None: so many. The result does not depend on it.
        deadline_seconds: how long at least to wait for the rows of a token before giving up.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    num_rows, hidden_dim = h_RF.shape
    num_experts, dim, _ = w2_EDF.shape
    check_tensor("gemm_push", "h_RF", h_RF, (num_rows, hidden_dim), torch.bfloat16)
    check_tensor("gemm_push", "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), torch.bfloat16)
    _launch(
        "gemm_push",
        (h_RF, w2_EDF, h_RF, w2_EDF),  # the second two are for backward
        None,
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        y_RD=y_RD,
        out_TD=out_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=None,
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def gemm_push_mxfp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    h_RF: torch.Tensor,  # noqa: N803
    h_scales_Rg: torch.Tensor,  # noqa: N803
    w2_EDF: torch.Tensor,  # noqa: N803
    w2_scales_EDg: torch.Tensor,  # noqa: N803
    y_RD: torch.Tensor,  # noqa: N803
    out_TD: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """:func:`gemm_push` in MXFP8: D and F are multiples of 128, ``h_RF`` and ``w2_EDF`` e4m3 with scales (e8m0 in uint8) of 32 columns:
    ``[R, F / 32]`` and ``[e, D, F / 32]``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "gemm_push_mxfp8"
    num_rows, hidden_dim = h_RF.shape
    num_experts, dim, _ = w2_EDF.shape
    check_tensor(name, "h_RF", h_RF, (num_rows, hidden_dim), quantize.FP8)
    check_tensor(name, "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), quantize.FP8)
    check_scales(name, "h_scales_Rg", h_scales_Rg, (num_rows, hidden_dim))
    check_scales(name, "w2_scales_EDg", w2_scales_EDg, (num_experts, dim, hidden_dim))
    _launch(
        name,
        (h_RF, w2_EDF, h_RF, w2_EDF),
        (h_scales_Rg, w2_scales_EDg, h_scales_Rg, w2_scales_EDg),
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        y_RD=y_RD,
        out_TD=out_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=None,
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def gemm_push_backward(
    plan: KernelPlan,
    counters: Counters,
    *,
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    dx_RD: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    dx_TD: torch.Tensor | None = None,  # noqa: N803
    dscores_TK: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    score_slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """Launch the kernel on the current stream, as :func:`gemm_push`.

    Args:
        plan: the forward's.
        counters: those of ``pull_gemm_backward``, or zeroed. ``done_M`` and ``queue[2:5, 7, 9]`` are used up.
        dgate_RF, dup_RF: bf16 ``[R, F]``.
        w1_EFD, w3_EFD: bf16 ``[e, F, D]``, this rank's experts. D and F are multiples of 64.
        dx_RD: bf16 ``[R, D]``, written: each row's gradient of x. Padding rows may be written, with anything.
        dscore_parts_NR: fp32 ``[N, R]``: each row's score gradient is the sum over N.
        dx_TD, dscores_TK: with one rank: bf16 ``[T, D]`` and fp32 ``[T, K]``, written.
        slots_addresses_P: with several ranks: as of :func:`gemm_push`, for ``dx``.
        score_slots_addresses_P: with several ranks: int64 ``[P]``, address of each rank's score slots, fp32
            ``[P, max_tokens, K]``. What rank p writes for a token are its routes to p in their order, then zeros.
        max_tokens, fault, rank, num_sms, deadline_seconds, tuning: as of :func:`gemm_push`.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "gemm_push_backward"
    num_rows, hidden_dim = dgate_RF.shape
    num_experts, _, dim = w1_EFD.shape
    for rows_name, rows in (("dgate_RF", dgate_RF), ("dup_RF", dup_RF)):
        check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    for weight_name, weight in (("w1_EFD", w1_EFD), ("w3_EFD", w3_EFD)):
        check_tensor(name, weight_name, weight, (num_experts, hidden_dim, dim), torch.bfloat16)
    _launch_backward(
        name,
        (dgate_RF, w1_EFD, dup_RF, w3_EFD),
        None,
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        dx_RD=dx_RD,
        dscore_parts_NR=dscore_parts_NR,
        dx_TD=dx_TD,
        dscores_TK=dscores_TK,
        slots_addresses_P=slots_addresses_P,
        score_slots_addresses_P=score_slots_addresses_P,
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def gemm_push_backward_mxfp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    dgate_RF: torch.Tensor,  # noqa: N803
    dgate_scales_Rg: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    dup_scales_Rg: torch.Tensor,  # noqa: N803
    w1t_EDF: torch.Tensor,  # noqa: N803
    w1t_scales_EDg: torch.Tensor,  # noqa: N803
    w3t_EDF: torch.Tensor,  # noqa: N803
    w3t_scales_EDg: torch.Tensor,  # noqa: N803
    dx_RD: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    dx_TD: torch.Tensor | None = None,  # noqa: N803
    dscores_TK: torch.Tensor | None = None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    score_slots_addresses_P: torch.Tensor | None = None,  # noqa: N803
    max_tokens: int = 0,
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """:func:`gemm_push_backward` in MXFP8: D and F are multiples of 128, gradients of gate and up e4m3 ``[R, F]``, W1 and W3 transposed, e4m3
    ``[e, D, F]``, each with scales (e8m0 in uint8) of 32 columns: ``[R, F / 32]`` and ``[e, D, F / 32]``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    name = "gemm_push_backward_mxfp8"
    num_rows, hidden_dim = dgate_RF.shape
    num_experts, dim, _ = w1t_EDF.shape
    for rows_name, rows, scales in (("dgate", dgate_RF, dgate_scales_Rg), ("dup", dup_RF, dup_scales_Rg)):
        check_tensor(name, f"{rows_name}_RF", rows, (num_rows, hidden_dim), quantize.FP8)
        check_scales(name, f"{rows_name}_scales_Rg", scales, (num_rows, hidden_dim))
    for weight_name, weight, scales in (("w1t", w1t_EDF, w1t_scales_EDg), ("w3t", w3t_EDF, w3t_scales_EDg)):
        check_tensor(name, f"{weight_name}_EDF", weight, (num_experts, dim, hidden_dim), quantize.FP8)
        check_scales(name, f"{weight_name}_scales_EDg", scales, (num_experts, dim, hidden_dim))
    _launch_backward(
        name,
        (dgate_RF, w1t_EDF, dup_RF, w3t_EDF),
        (dgate_scales_Rg, w1t_scales_EDg, dup_scales_Rg, w3t_scales_EDg),
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        dx_RD=dx_RD,
        dscore_parts_NR=dscore_parts_NR,
        dx_TD=dx_TD,
        dscores_TK=dscores_TK,
        slots_addresses_P=slots_addresses_P,
        score_slots_addresses_P=score_slots_addresses_P,
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def _launch_backward(
    name: str,
    operands: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] | None,
    sizes: tuple[int, int, int, int],
    plan: KernelPlan,
    counters: Counters,
    *,
    dx_RD: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    dx_TD: torch.Tensor | None,  # noqa: N803
    dscores_TK: torch.Tensor | None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None,  # noqa: N803
    score_slots_addresses_P: torch.Tensor | None,  # noqa: N803
    **options,
) -> None:
    _launch(
        name,
        operands,
        scales,
        sizes,
        plan,
        counters,
        y_RD=dx_RD,
        out_TD=dx_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=ScoreGradients(
            parts_NR=dscore_parts_NR, dscores_TK=dscores_TK, slots_addresses_P=score_slots_addresses_P
        ),
        **options,
    )


def _launch(
    name: str,
    operands: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] | None,
    sizes: tuple[int, int, int, int],
    plan: KernelPlan,
    counters: Counters,
    *,
    y_RD: torch.Tensor,  # noqa: N803
    out_TD: torch.Tensor | None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None,  # noqa: N803
    score_gradients: ScoreGradients | None,
    max_tokens: int,
    fault: torch.Tensor,
    rank: int,
    num_sms: int | None,
    deadline_seconds: float,
    tuning: PortableTuning | None,
) -> None:
    """``scales``: in MXFP8, those of the operands. ``score_gradients``: in backward."""
    is_mx = scales is not None
    num_rows, dim, hidden_dim, num_experts = sizes
    top_k = plan.pull_rows_UK.shape[1]
    alone = slots_addresses_P is None
    if (out_TD is None) == alone:
        raise ValueError(f"{name}: pass the output (with one rank) or the addresses of slots (with several).")
    check_tensor(name, "the rows' result", y_RD, (num_rows, dim), torch.bfloat16)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k, is_mx=is_mx)
    if alone:
        check_tensor(name, "the output", out_TD, (out_TD.shape[0], dim), torch.bfloat16)
    # Arguments that a variant does not use get some pointer.
    parts_NR, score_outputs, score_parts = counters.queue, counters.queue, 0
    if score_gradients is not None:
        parts_NR, score_outputs = score_gradients.parts_NR, score_gradients.check(name, num_rows, top_k, out_TD)
        score_parts = parts_NR.shape[0]
    num_programs = grid_size(name, num_sms, y_RD.device)
    deadline_us = deadline_in_us(name, deadline_seconds)
    if num_rows == 0:
        return

    ep_size = 1 if alone else slots_addresses_P.numel()
    tuning = tuning or tune_gemm_push(gpu_kind(y_RD.device), dim, top_k=top_k, ep_size=ep_size, is_mx=is_mx)
    gemm_push_kernel[(num_programs,)](
        *operands,
        *(scales or operands),
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.send_order_U,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        y_RD,
        counters.done_M,
        out_TD if alone else y_RD,
        counters.queue if alone else slots_addresses_P,
        max_tokens,
        parts_NR,
        num_rows,
        score_outputs,
        counters.queue,
        fault,
        rank,
        deadline_us,
        max(1, num_programs - tuning.num_movers(num_programs)),
        **gemm_push_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=ep_size,
            score_parts=score_parts,
            is_mx=is_mx,
        ),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def gemm_push_constants(
    tuning: PortableTuning,
    *,
    dim: int,
    hidden_dim: int,
    top_k: int,
    ep_size: int,
    score_parts: int,
    is_mx: bool = False,
) -> dict[str, int | bool]:
    """What the kernel is compiled for; ``score_parts`` is 0 in forward."""
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": step_depth(is_mx),
        "FIRST_TILES": dim // tuning.block_n - tuning.last_tiles,
        "MOVERS_MULTIPLY": tuning.movers_multiply,
        "TOKENS": tuning.tokens,
        "ROUTES": tuning.routes,
        "COLUMNS": tuning.columns,
        "SCORE_PARTS": score_parts,
        "MX": is_mx,
    }


# ---- the kernel

_FORWARD_KERNEL = tl.constexpr(plan_tables.KERNEL_GEMM_PUSH)
_BACKWARD_KERNEL = tl.constexpr(plan_tables.KERNEL_GEMM_PUSH_BACKWARD)


@triton.jit(do_not_specialize=["max_tokens", "num_rows", "rank", "deadline_us", "num_multipliers"])
def gemm_push_kernel(
    a_RF,
    b_weights,
    next_a_RF,
    next_b_weights,
    a_scales,
    b_scales,
    next_a_scales,
    next_b_scales,
    sizes,
    expert_start_e1,
    tile_expert_M,
    send_order_U,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    y_RD,
    done_M,
    out_TD,
    slots_addresses_P,
    max_tokens,
    dscore_parts_NR,
    num_rows,
    score_outputs,
    queue,
    fault,
    rank,
    deadline_us,
    num_multipliers,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST_TILES: tl.constexpr,
    MOVERS_MULTIPLY: tl.constexpr,
    TOKENS: tl.constexpr,
    ROUTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORE_PARTS: tl.constexpr,  # 0 in forward
    MX: tl.constexpr,
):
    BACKWARD: tl.constexpr = SCORE_PARTS > 0
    TILES_N: tl.constexpr = DIM // BLOCK_N
    tables = (send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK)
    destinations = (out_TD, slots_addresses_P, max_tokens)
    score_gradients = (dscore_parts_NR, num_rows, score_outputs)
    faults = (fault, rank, deadline_us)
    sent = (sizes, tables, y_RD, done_M, destinations, score_gradients, queue, faults)
    operands = (a_RF, b_weights, next_a_RF, next_b_weights)
    scales = (a_scales, b_scales, next_a_scales, next_b_scales)
    planned = (sizes, expert_start_e1, tile_expert_M)
    num_row_tiles = tl.load(sizes)
    until = num_row_tiles * TILES_N
    if arrive_to_push(queue) >= num_multipliers:
        until = num_row_tiles * (FIRST_TILES * MOVERS_MULTIPLY) // 100
    _multiply_tiles(
        operands,
        scales,
        planned,
        y_RD,
        done_M,
        queue,
        until,
        DIM,
        HIDDEN,
        EP_SIZE,
        BLOCK_N,
        BLOCK_K,
        FIRST_TILES,
        BACKWARD,
        MX,
    )
    if BACKWARD:
        send_score_gradients(sent, TOP_K, EP_SIZE, SCORE_PARTS)
    KERNEL: tl.constexpr = _BACKWARD_KERNEL if BACKWARD else _FORWARD_KERNEL
    send_tokens(sent, DIM, TOP_K, EP_SIZE, TILES_N, FIRST_TILES, TOKENS, ROUTES, COLUMNS, BACKWARD, KERNEL)


@triton.jit
def _multiply_tiles(
    operands,
    scales,
    planned,
    y_RD,
    done_M,
    queue,
    until,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST_TILES: tl.constexpr,
    BACKWARD: tl.constexpr,
    MX: tl.constexpr,
):
    """Multiply tiles, all of the first pass, then all of the second, until the ``until``-th has been claimed. Waits for nobody."""
    a_RF, b_weights, next_a_RF, next_b_weights = operands
    a_scales, b_scales, next_a_scales, next_b_scales = scales
    sizes, expert_start_e1, tile_expert_M = planned
    TILES_N: tl.constexpr = DIM // BLOCK_N
    LAST_TILES: tl.constexpr = TILES_N - FIRST_TILES
    y_offsets = matrix_offsets(BLOCK_M, BLOCK_N, DIM)
    num_tiles = tl.load(sizes) * TILES_N
    first_pass = tl.load(sizes) * FIRST_TILES
    index = num_tiles
    if until > 0:
        index = claim_tile(queue)
    while index < num_tiles:
        row_tile = index // FIRST_TILES
        n = index % FIRST_TILES
        if LAST_TILES > 0:
            if index >= first_pass:
                row_tile = (index - first_pass) // LAST_TILES
                n = FIRST_TILES + (index - first_pass) % LAST_TILES
        m, expert = tile_in_turn(row_tile, tile_expert_M, expert_start_e1, EP_SIZE)
        row, column = m * BLOCK_M, n * BLOCK_N
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if BACKWARD and not MX:  # dgate W1 + dup W3, of weights as they are stored
            weight_row = expert.to(tl.int64) * HIDDEN
            a, b = row_of(a_RF, row, HIDDEN), row_of(b_weights, weight_row, DIM) + column
            next_a, next_b = row_of(next_a_RF, row, HIDDEN), row_of(next_b_weights, weight_row, DIM) + column
            y = multiply_across(y, a, b, HIDDEN, DIM, BLOCK_N, BLOCK_K)
            y = multiply_across(y, next_a, next_b, HIDDEN, DIM, BLOCK_N, BLOCK_K)
        else:  # h W2^T, or in MX the same with W1 and W3 transposed
            weight_row = expert.to(tl.int64) * DIM + column
            a = rows_of(a_RF, a_scales, row, HIDDEN, MX)
            b = rows_of(b_weights, b_scales, weight_row, HIDDEN, MX)
            y = multiply_along(y, a, b, HIDDEN, BLOCK_N, BLOCK_K, MX, "")
            if BACKWARD:
                next_a = rows_of(next_a_RF, next_a_scales, row, HIDDEN, MX)
                next_b = rows_of(next_b_weights, next_b_scales, weight_row, HIDDEN, MX)
                y = multiply_along(y, next_a, next_b, HIDDEN, BLOCK_N, BLOCK_K, MX, "")
        tl.store(row_of(y_RD, row, DIM) + column + y_offsets, y.to(tl.bfloat16))
        count_done(done_M, m, n, FIRST_TILES)
        if index < until:
            index = claim_tile(queue)
        else:  # what is claimed is always multiplied, also beyond
            index = num_tiles
