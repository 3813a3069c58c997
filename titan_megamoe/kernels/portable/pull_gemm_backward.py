"""``pull_gemm_backward`` in plain Triton: see ``kernels/pull_gemm_backward.py`` for what it computes, and the package's docstring for
who does what.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import quantize
from .. import plan_tables
from ..launch import check_scales, check_sizes, check_tensor, deadline_in_us, DEFAULT_DEADLINE_SECONDS, grid_size
from ..plan_tables import Counters, KernelPlan
from .common import arrive_to_pull, BLOCK_M, matrix_offsets, multiply_across, multiply_along, row_of, rows_of, store_mx
from .pull import await_tile, claim_tile, padded, pull_rows, scale_words, words
from .tuning import gpu_kind, PortableTuning, step_depth, tune_pull_gemm_backward


def pull_gemm_backward(
    plan: KernelPlan,
    counters: Counters,
    *,
    dout_addresses_P: torch.Tensor,  # noqa: N803
    w2_EDF: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor,  # noqa: N803
    up_RF: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    row_scores_R: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Padding rows of ``dout_RD``, ``dgate_RF``, ``dup_RF`` and ``scaled_h_RF`` are zero up to the next multiple of 64 rows of an
    expert, and left alone beyond.

    Args:
        plan: the forward's.
        counters: zeroed. ``arrival_M`` and ``queue[0, 1, 6, 8]`` are used up.
        dout_addresses_P: int64 ``[P]``, address of each rank's ``dout``, bf16 ``[tokens, D]``, 16-byte aligned.
        w2_EDF: bf16 ``[e, D, F]``, this rank's experts. D and F are multiples of 64.
        gate_RF, up_RF: bf16 ``[R, F]``, of the forward.
        dout_RD: bf16 ``[R, D]``, written: dout of each row.
        row_scores_R: fp32 ``[R]``, written: the score of each row. Padding rows are left alone.
        dgate_RF, dup_RF, scaled_h_RF: bf16 ``[R, F]``, written.
        dscore_parts_NR: fp32 ``[F / block_n, R]``, written: parts of each row's score gradient, which is their sum over N.
            Padding rows are left alone.
        fault, rank, num_sms, deadline_seconds, tuning: as of ``pull_gemm``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    _launch(
        "pull_gemm_backward",
        plan,
        counters,
        dout_addresses_P=dout_addresses_P,
        w2=w2_EDF,
        hidden_dim=w2_EDF.shape[2],
        gate_RF=gate_RF,
        up_RF=up_RF,
        dout_RD=dout_RD,
        row_scores_R=row_scores_R,
        dgate_RF=dgate_RF,
        dup_RF=dup_RF,
        scaled_h_RF=scaled_h_RF,
        dscore_parts_NR=dscore_parts_NR,
        quantised=None,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def pull_gemm_backward_mxfp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    dout_addresses_P: torch.Tensor,  # noqa: N803
    dout_scales_addresses_P: torch.Tensor,  # noqa: N803
    w2t_EFD: torch.Tensor,  # noqa: N803
    w2t_scales_EFg: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor,  # noqa: N803
    up_RF: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    dout_scales_Rg: torch.Tensor,  # noqa: N803
    row_scores_R: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dgate_fp8_RF: torch.Tensor,  # noqa: N803
    dgate_scales_Rg: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    dup_fp8_RF: torch.Tensor,  # noqa: N803
    dup_scales_Rg: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """:func:`pull_gemm_backward` in MXFP8: D and F are multiples of 128; ``dout``, W2 transposed, ``[e, F, D]``, and ``dout_RD`` are e4m3 with
    scales (e8m0 in uint8) of 32 columns: ``[tokens, D / 32]``, 4-byte aligned, of ``dout``, ``[e, F, D / 32]`` and ``[R, D / 32]``. Gradients of
    gate and up are written in bf16, for weight gradients, and from there in MXFP8: e4m3 ``[R, F]``, scales ``[R, F / 32]``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    _launch(
        "pull_gemm_backward_mxfp8",
        plan,
        counters,
        dout_addresses_P=dout_addresses_P,
        w2=w2t_EFD,
        hidden_dim=w2t_EFD.shape[1],
        gate_RF=gate_RF,
        up_RF=up_RF,
        dout_RD=dout_RD,
        row_scores_R=row_scores_R,
        dgate_RF=dgate_RF,
        dup_RF=dup_RF,
        scaled_h_RF=scaled_h_RF,
        dscore_parts_NR=dscore_parts_NR,
        quantised=dict(
            dout_scales_addresses_P=dout_scales_addresses_P,
            w2t_scales_EFg=w2t_scales_EFg,
            dout_scales_Rg=dout_scales_Rg,
            dgate_fp8_RF=dgate_fp8_RF,
            dgate_scales_Rg=dgate_scales_Rg,
            dup_fp8_RF=dup_fp8_RF,
            dup_scales_Rg=dup_scales_Rg,
        ),
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def _launch(
    name: str,
    plan: KernelPlan,
    counters: Counters,
    *,
    dout_addresses_P: torch.Tensor,  # noqa: N803
    w2: torch.Tensor,
    hidden_dim: int,
    gate_RF: torch.Tensor,  # noqa: N803
    up_RF: torch.Tensor,  # noqa: N803
    dout_RD: torch.Tensor,  # noqa: N803
    row_scores_R: torch.Tensor,  # noqa: N803
    dgate_RF: torch.Tensor,  # noqa: N803
    dup_RF: torch.Tensor,  # noqa: N803
    scaled_h_RF: torch.Tensor,  # noqa: N803
    dscore_parts_NR: torch.Tensor,  # noqa: N803
    quantised: dict[str, torch.Tensor] | None,
    fault: torch.Tensor,
    rank: int,
    num_sms: int | None,
    deadline_seconds: float,
    tuning: PortableTuning | None,
) -> None:
    """``w2``: bf16 ``[e, D, F]``, in MXFP8 e4m3 ``[e, F, D]``. ``quantised``: what :func:`pull_gemm_backward_mxfp8` takes beside the others."""
    is_mx = quantised is not None
    num_rows, dim = dout_RD.shape
    num_experts, top_k = w2.shape[0], plan.pull_rows_UK.shape[1]
    operand_dtype = quantize.FP8 if is_mx else torch.bfloat16
    weight_shape = (num_experts, hidden_dim, dim) if is_mx else (num_experts, dim, hidden_dim)
    check_tensor(name, "dout_RD", dout_RD, (num_rows, dim), operand_dtype)
    check_tensor(name, "w2t_EFD" if is_mx else "w2_EDF", w2, weight_shape, operand_dtype)
    for rows_name, rows in dict(
        gate_RF=gate_RF, up_RF=up_RF, dgate_RF=dgate_RF, dup_RF=dup_RF, scaled_h_RF=scaled_h_RF
    ).items():
        check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    check_tensor(name, "row_scores_R", row_scores_R, (num_rows,), torch.float32)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k, is_mx=is_mx)
    if is_mx:
        for rows_name in ("dgate_fp8_RF", "dup_fp8_RF"):
            check_tensor(name, rows_name, quantised[rows_name], (num_rows, hidden_dim), quantize.FP8)
        check_scales(name, "w2t_scales_EFg", quantised["w2t_scales_EFg"], weight_shape)
        check_scales(name, "dout_scales_Rg", quantised["dout_scales_Rg"], (num_rows, dim))
        for scales_name in ("dgate_scales_Rg", "dup_scales_Rg"):
            check_scales(name, scales_name, quantised[scales_name], (num_rows, hidden_dim))
    tuning = tuning or tune_pull_gemm_backward(gpu_kind(dout_RD.device), dim, hidden_dim, is_mx=is_mx)
    check_tensor(name, "dscore_parts_NR", dscore_parts_NR, (hidden_dim // tuning.block_n, num_rows), torch.float32)
    num_programs = grid_size(name, num_sms, dout_RD.device)
    deadline_us = deadline_in_us(name, deadline_seconds)
    if num_rows == 0:
        return

    # Arguments that a variant does not use get some pointer.
    unused = dict.fromkeys(MX_ARGUMENTS, dgate_RF) | dict(dout_scales_addresses_P=dout_addresses_P)
    pull_gemm_backward_kernel[(num_programs,)](
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        dout_addresses_P,
        w2,
        gate_RF,
        up_RF,
        dout_RD,
        row_scores_R,
        dgate_RF,
        dup_RF,
        scaled_h_RF,
        dscore_parts_NR,
        num_rows,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_us,
        tuning.num_movers(num_programs),
        **(quantised or unused),
        **pull_gemm_backward_constants(
            tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=dout_addresses_P.numel(), is_mx=is_mx
        ),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def pull_gemm_backward_constants(
    tuning: PortableTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int, is_mx: bool = False
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": step_depth(is_mx),
        "TOKENS": tuning.tokens,
        "COLUMNS": tuning.columns,
        "MX": is_mx,
    }


MX_ARGUMENTS = (
    "dout_scales_addresses_P",
    "w2t_scales_EFg",
    "dout_scales_Rg",
    "dgate_fp8_RF",
    "dgate_scales_Rg",
    "dup_fp8_RF",
    "dup_scales_Rg",
)
"""Pointers that the kernel uses in MXFP8 alone."""


# ---- the kernel

_KERNEL = tl.constexpr(plan_tables.KERNEL_PULL_GEMM_BACKWARD)


@triton.jit(do_not_specialize=["num_rows", "rank", "deadline_us", "num_movers"])
def pull_gemm_backward_kernel(
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    dout_addresses_P,
    w2,
    gate_RF,
    up_RF,
    dout_RD,
    row_scores_R,
    dgate_RF,
    dup_RF,
    scaled_h_RF,
    dscore_parts_NR,
    num_rows,
    arrival_M,
    queue,
    fault,
    rank,
    deadline_us,
    num_movers,
    dout_scales_addresses_P,
    w2t_scales_EFg,
    dout_scales_Rg,
    dgate_fp8_RF,
    dgate_scales_Rg,
    dup_fp8_RF,
    dup_scales_Rg,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MX: tl.constexpr,
):
    TILES_N: tl.constexpr = HIDDEN // BLOCK_N
    planned = (expert_start_e1, tile_expert_M, tile_rows_M, arrival_M)
    faults = (fault, rank, deadline_us)
    if arrive_to_pull(queue) < num_movers:
        tables = (pull_source_U, pull_rows_UK, pull_scores_UK)
        addresses = (dout_addresses_P, dout_scales_addresses_P)
        pool = (dout_RD, dout_scales_Rg)
        pulled = (sizes, tile_rows_M, tables, addresses, pool, row_scores_R, arrival_M, queue)
        pull_rows(pulled, words(DIM, MX), scale_words(DIM, MX), TOP_K, TOKENS, COLUMNS, True)

    activations = (gate_RF, up_RF, row_scores_R)
    outputs = (dgate_RF, dup_RF, scaled_h_RF, dscore_parts_NR, num_rows)
    mx_outputs = (dgate_fp8_RF, dgate_scales_Rg, dup_fp8_RF, dup_scales_Rg)
    num_tiles = tl.load(sizes) * TILES_N
    index = claim_tile(queue)
    while index < num_tiles:
        m, expert, rows = await_tile(index // TILES_N, planned, faults, EP_SIZE, _KERNEL)
        n = index % TILES_N
        if rows == 0:
            index = num_tiles  # give up
        else:
            g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if MX:
                dout = rows_of(dout_RD, dout_scales_Rg, m * BLOCK_M, DIM, MX)
                weight = rows_of(w2, w2t_scales_EFg, expert.to(tl.int64) * HIDDEN + n * BLOCK_N, DIM, MX)
                g = multiply_along(g, dout, weight, DIM, BLOCK_N, BLOCK_K, MX, ".cg")
            else:
                dout = row_of(dout_RD, m * BLOCK_M, DIM)
                weight = row_of(w2, expert.to(tl.int64) * DIM, HIDDEN) + n * BLOCK_N
                g = multiply_across(g, dout, weight, DIM, HIDDEN, BLOCK_N, BLOCK_K)
            _write(g, activations, outputs, mx_outputs, m, n * BLOCK_N, n, rows, HIDDEN, BLOCK_N, MX)
            index = claim_tile(queue)


@triton.jit
def _write(
    g,
    activations,
    outputs,
    mx_outputs,
    m,
    column,
    part,
    rows,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MX: tl.constexpr,
):
    """What follows from a tile of g whose columns begin at ``column``, 64 of them at a time: beside all of g, a thread's registers
    hold no more."""
    _, _, row_scores_R = activations
    _, _, _, dscore_parts_NR, num_rows = outputs
    row = m * BLOCK_M
    row_r = tl.arange(0, BLOCK_M)
    is_row_r = row_r < rows
    # Another SM wrote the scores during this kernel.
    score_r = tl.load(row_scores_R + row + row_r, mask=is_row_r, other=0.0, cache_modifier=".cg")
    if BLOCK_N == 64:
        dscore_r = _write_columns(g, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, MX)
    else:
        tl.static_assert(BLOCK_N == 128)
        left, right = g.reshape([BLOCK_M, 2, 64]).permute([0, 2, 1]).split()
        dscore_r = _write_columns(left, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, MX)
        column += 64
        dscore_r += _write_columns(right, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, MX)
    tl.store(dscore_parts_NR + part.to(tl.int64) * num_rows + row + row_r, dscore_r, mask=is_row_r)


@triton.jit
def _write_columns(
    g, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN: tl.constexpr, MX: tl.constexpr
):
    """Write dgate, dup and scaled_h of 64 columns, in MX of a group of them at a time. Returns their part of the score gradient."""
    if MX:
        left, right = g.reshape([BLOCK_M, 2, 32]).permute([0, 2, 1]).split()
        dscore_r = _write_part(left, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, 32, MX)
        column += 32
        dscore_r += _write_part(right, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, 32, MX)
    else:
        dscore_r = _write_part(g, score_r, activations, outputs, mx_outputs, row, column, rows, HIDDEN, 64, MX)
    return dscore_r


@triton.jit
def _write_part(
    g,
    score_r,
    activations,
    outputs,
    mx_outputs,
    row,
    column,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    MX: tl.constexpr,
):
    gate_RF, up_RF, _ = activations
    dgate_RF, dup_RF, scaled_h_RF, _, _ = outputs
    row_r = tl.arange(0, BLOCK_M)
    is_row = (row_r < rows)[:, None]
    offsets = column + matrix_offsets(BLOCK_M, WIDTH, HIDDEN)
    gate = tl.load(row_of(gate_RF, row, HIDDEN) + offsets, mask=is_row, other=0.0).to(tl.float32)
    up = tl.load(row_of(up_RF, row, HIDDEN) + offsets, mask=is_row, other=0.0).to(tl.float32)
    # Padding is written as zeros, which the weight gradients read, whatever was multiplied there.
    g = tl.where(is_row, g, 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dscore_r = tl.sum(g * silu * up, axis=1)
    score = score_r[:, None]
    g *= score
    dgate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    is_written = (row_r < padded(rows))[:, None]
    tl.store(row_of(dgate_RF, row, HIDDEN) + offsets, dgate.to(tl.bfloat16), mask=is_written)
    tl.store(row_of(dup_RF, row, HIDDEN) + offsets, (g * silu).to(tl.bfloat16), mask=is_written)
    tl.store(row_of(scaled_h_RF, row, HIDDEN) + offsets, (score * silu * up).to(tl.bfloat16), mask=is_written)
    if MX:  # of what weight gradients read, too
        dgate_fp8_RF, dgate_scales_Rg, dup_fp8_RF, dup_scales_Rg = mx_outputs
        dgate, dup = dgate.to(tl.bfloat16).to(tl.float32), (g * silu).to(tl.bfloat16).to(tl.float32)
        store_mx(dgate, dgate_fp8_RF, dgate_scales_Rg, row, column, rows, WIDTH, HIDDEN)
        store_mx(dup, dup_fp8_RF, dup_scales_Rg, row, column, rows, WIDTH, HIDDEN)
    return dscore_r
