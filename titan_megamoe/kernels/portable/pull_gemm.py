"""``pull_gemm`` in plain Triton: see ``kernels/pull_gemm.py`` for what it computes, and the package's docstring for who does what.

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
from .common import (
    arrive_to_pull,
    BLOCK_M,
    load_scales,
    load_step,
    matrix_offsets,
    multiply_step,
    row_of,
    rows_of,
    store_mx,
)
from .pull import await_tile, claim_tile, pull_rows, scale_words, words
from .tuning import gpu_kind, PortableTuning, step_depth, tune_pull_gemm


def pull_gemm(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_addresses_P: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    pool_RD: torch.Tensor,  # noqa: N803
    h_RF: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor | None = None,  # noqa: N803
    up_RF: torch.Tensor | None = None,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Args:
        plan: the routing plan; its rows must fit in R (what did not fit is not in the plan).
        counters: zeroed. ``arrival_M`` and ``queue[0, 1, 6, 8]`` are used up.
        x_addresses_P: int64 ``[P]``, address of each rank's ``x``, bf16 ``[tokens, D]``, 16-byte aligned.
        w1_EFD, w3_EFD: bf16 ``[e, F, D]``, this rank's experts. D and F are multiples of 64.
        pool_RD: bf16 ``[R, D]``, written: x of each row; zeros in padding up to the next multiple of 64 rows. The rest of
            the padding is left alone.
        h_RF: bf16 ``[R, F]``, written: silu(gate) * up. Padding rows may be written, with anything.
        gate_RF, up_RF: bf16 ``[R, F]``, both or neither: x W1^T and x W3^T, rounded, for backward.
        fault: int32, at least 7: the record of a missed deadline (``plan_tables.FAULT_FIELDS``).
        rank: this rank, for that record.
        num_sms: programs to launch, at most one for each SM; None: so many. The result does not depend on it.
        deadline_seconds: how long at least to wait for the rows of a tile before giving up.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    _launch(
        "pull_gemm",
        plan,
        counters,
        x_addresses_P=x_addresses_P,
        w1_EFD=w1_EFD,
        w3_EFD=w3_EFD,
        pool_RD=pool_RD,
        h_RF=h_RF,
        gate_RF=gate_RF,
        up_RF=up_RF,
        scales=None,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def pull_gemm_mxfp8(
    plan: KernelPlan,
    counters: Counters,
    *,
    x_addresses_P: torch.Tensor,  # noqa: N803
    x_scales_addresses_P: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w1_scales_EFg: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    w3_scales_EFg: torch.Tensor,  # noqa: N803
    pool_RD: torch.Tensor,  # noqa: N803
    pool_scales_Rg: torch.Tensor,  # noqa: N803
    h_RF: torch.Tensor,  # noqa: N803
    h_scales_Rg: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor | None = None,  # noqa: N803
    up_RF: torch.Tensor | None = None,  # noqa: N803
    fault: torch.Tensor,
    rank: int = 0,
    num_sms: int | None = None,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tuning: PortableTuning | None = None,
) -> None:
    """:func:`pull_gemm` in MXFP8: D and F are multiples of 128, ``x``, weights, ``pool_RD`` and ``h_RF`` e4m3, each with scales (e8m0 in uint8)
    of 32 columns: ``[tokens, D / 32]``, 4-byte aligned, of ``x``, ``[e, F, D / 32]`` of weights, ``[R, D / 32]`` and ``[R, F / 32]``.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    _launch(
        "pull_gemm_mxfp8",
        plan,
        counters,
        x_addresses_P=x_addresses_P,
        w1_EFD=w1_EFD,
        w3_EFD=w3_EFD,
        pool_RD=pool_RD,
        h_RF=h_RF,
        gate_RF=gate_RF,
        up_RF=up_RF,
        scales=(x_scales_addresses_P, w1_scales_EFg, w3_scales_EFg, pool_scales_Rg, h_scales_Rg),
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
    x_addresses_P: torch.Tensor,  # noqa: N803
    w1_EFD: torch.Tensor,  # noqa: N803
    w3_EFD: torch.Tensor,  # noqa: N803
    pool_RD: torch.Tensor,  # noqa: N803
    h_RF: torch.Tensor,  # noqa: N803
    gate_RF: torch.Tensor | None,  # noqa: N803
    up_RF: torch.Tensor | None,  # noqa: N803
    scales: tuple[torch.Tensor, ...] | None,
    fault: torch.Tensor,
    rank: int,
    num_sms: int | None,
    deadline_seconds: float,
    tuning: PortableTuning | None,
) -> None:
    """``scales``: in MXFP8, the addresses of those of x, and those of W1, of W3, of the pool and of h."""
    num_rows, dim = pool_RD.shape
    num_experts, hidden_dim, _ = w1_EFD.shape
    top_k = plan.pull_rows_UK.shape[1]
    saves, is_mx = gate_RF is not None, scales is not None
    operand_dtype = quantize.FP8 if is_mx else torch.bfloat16
    if saves != (up_RF is not None):
        raise ValueError(f"{name}: pass both gate_RF and up_RF, or neither.")
    check_tensor(name, "pool_RD", pool_RD, (num_rows, dim), operand_dtype)
    for weight_name, weight in (("w1_EFD", w1_EFD), ("w3_EFD", w3_EFD)):
        check_tensor(name, weight_name, weight, (num_experts, hidden_dim, dim), operand_dtype)
    check_tensor(name, "h_RF", h_RF, (num_rows, hidden_dim), operand_dtype)
    for rows_name, rows in (("gate_RF", gate_RF), ("up_RF", up_RF)):
        if rows is not None:
            check_tensor(name, rows_name, rows, (num_rows, hidden_dim), torch.bfloat16)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k, is_mx=is_mx)
    if is_mx:
        for scales_name, tensor, shape in zip(
            ("w1_scales_EFg", "w3_scales_EFg", "pool_scales_Rg", "h_scales_Rg"),
            scales[1:],
            ((num_experts, hidden_dim, dim), (num_experts, hidden_dim, dim), (num_rows, dim), (num_rows, hidden_dim)),
            strict=True,
        ):
            check_scales(name, scales_name, tensor, shape)
    num_programs = grid_size(name, num_sms, pool_RD.device)
    deadline_us = deadline_in_us(name, deadline_seconds)
    if num_rows == 0:
        return

    tuning = tuning or tune_pull_gemm(gpu_kind(pool_RD.device), dim, hidden_dim, is_mx=is_mx)
    # Arguments that a variant does not use get some pointer.
    x_scales_addresses_P, w1_scales, w3_scales, pool_scales, h_scales = scales or (x_addresses_P, *[h_RF] * 4)
    pull_gemm_kernel[(num_programs,)](
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        x_addresses_P,
        x_scales_addresses_P,
        w1_EFD,
        w1_scales,
        w3_EFD,
        w3_scales,
        pool_RD,
        pool_scales,
        h_RF,
        h_scales,
        gate_RF if saves else h_RF,
        up_RF if saves else h_RF,
        counters.arrival_M,
        counters.queue,
        fault,
        rank,
        deadline_us,
        tuning.num_movers(num_programs),
        **pull_gemm_constants(
            tuning,
            dim=dim,
            hidden_dim=hidden_dim,
            top_k=top_k,
            ep_size=x_addresses_P.numel(),
            saves_gate_up=saves,
            is_mx=is_mx,
        ),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def pull_gemm_constants(
    tuning: PortableTuning,
    *,
    dim: int,
    hidden_dim: int,
    top_k: int,
    ep_size: int,
    saves_gate_up: bool,
    is_mx: bool = False,
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
        "SAVE_GATE_UP": saves_gate_up,
        "MX": is_mx,
    }


# ---- the kernel

_KERNEL = tl.constexpr(plan_tables.KERNEL_PULL_GEMM)


@triton.jit(do_not_specialize=["rank", "deadline_us", "num_movers"])
def pull_gemm_kernel(
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    x_addresses_P,
    x_scales_addresses_P,
    w1_EFD,
    w1_scales_EFg,
    w3_EFD,
    w3_scales_EFg,
    pool_RD,
    pool_scales_Rg,
    h_RF,
    h_scales_Rg,
    gate_RF,
    up_RF,
    arrival_M,
    queue,
    fault,
    rank,
    deadline_us,
    num_movers,
    DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SAVE_GATE_UP: tl.constexpr,
    MX: tl.constexpr,
):
    TILES_N: tl.constexpr = HIDDEN // BLOCK_N
    planned = (expert_start_e1, tile_expert_M, tile_rows_M, arrival_M)
    faults = (fault, rank, deadline_us)
    if arrive_to_pull(queue) < num_movers:
        # No scores are wanted: any pointers stand in for the tables of scores.
        tables = (pull_source_U, pull_rows_UK, pull_rows_UK)
        addresses = (x_addresses_P, x_scales_addresses_P)
        pool = (pool_RD, pool_scales_Rg)
        pulled = (sizes, tile_rows_M, tables, addresses, pool, arrival_M, arrival_M, queue)
        pull_rows(pulled, words(DIM, MX), scale_words(DIM, MX), TOP_K, TOKENS, COLUMNS, False)

    out_offsets = matrix_offsets(BLOCK_M, BLOCK_N, HIDDEN)
    num_tiles = tl.load(sizes) * TILES_N
    index = claim_tile(queue)
    while index < num_tiles:
        m, expert, rows = await_tile(index // TILES_N, planned, faults, EP_SIZE, _KERNEL)
        column = index % TILES_N * BLOCK_N
        if rows == 0:
            index = num_tiles  # give up
        else:
            weight_row = expert.to(tl.int64) * HIDDEN + column
            gate, up = _multiply(
                rows_of(pool_RD, pool_scales_Rg, m * BLOCK_M, DIM, MX),
                rows_of(w1_EFD, w1_scales_EFg, weight_row, DIM, MX),
                rows_of(w3_EFD, w3_scales_EFg, weight_row, DIM, MX),
                DIM,
                BLOCK_N,
                BLOCK_K,
                MX,
            )
            if SAVE_GATE_UP:
                tl.store(row_of(gate_RF, m * BLOCK_M, HIDDEN) + column + out_offsets, gate.to(tl.bfloat16))
                tl.store(row_of(up_RF, m * BLOCK_M, HIDDEN) + column + out_offsets, up.to(tl.bfloat16))
            h = gate / (1.0 + tl.exp(-gate)) * up
            if MX:
                store_mx(h, h_RF, h_scales_Rg, m * BLOCK_M, column, BLOCK_M, BLOCK_N, HIDDEN)
            else:
                tl.store(row_of(h_RF, m * BLOCK_M, HIDDEN) + column + out_offsets, h.to(tl.bfloat16))
            index = claim_tile(queue)


@triton.jit
def _multiply(x, w1, w3, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MX: tl.constexpr):
    """Gate and up of a tile, given its rows, and the rows of W1 and of W3, as operands. Padding is multiplied with the rest, whatever it
    holds: it reaches no other row."""
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, DIM, BLOCK_K):
        x_step = load_step(x, k, DIM, BLOCK_M, BLOCK_K, MX, ".cg")
        gate = multiply_step(x_step, load_step(w1, k, DIM, BLOCK_N, BLOCK_K, MX, ""), gate, MX)
        if MX:
            # Of its own for each product: Triton 3.6 fails to compile for sm_100 if two use one (and it would merge equal loads).
            x_values, _ = x_step
            _, x_scales = x
            x_step = (x_values, load_scales(x_scales, k, DIM, BLOCK_M, BLOCK_K, ".cv"))
        up = multiply_step(x_step, load_step(w3, k, DIM, BLOCK_N, BLOCK_K, MX, ""), up, MX)
    return gate, up
