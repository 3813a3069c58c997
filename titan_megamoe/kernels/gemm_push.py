"""``gemm_push``: multiply h by W2, add up each token's rows weighted by the router's scores, and send the sum to the
token's owner.

    y[r] = h[r] W2[expert]^T                                        for every row r of the pool, rounded to bf16
    slots[my rank, token] (at the owner) = sum over the token's local routes, in route order, of score * y[row]

A row's way through the kernel (roles: see ``common.py``):

    the scheduler           claims tiles and hands them out: nothing to wait for, h is complete
    the producer            loads [128, 64] of h and [BLOCK_N, 64] of W2, step by step along F
    the consumers           multiply, and put their 64 rows of y into shared memory
    the store warp          writes them to y by TMA and, once they are in memory, counts the column tile as done
    a communication warp    claims tokens from the send list, waits until the tiles of their rows are done, reads the
                            rows, adds them up in fp32, rounds once, writes the sums to the owners' memory

A token can be sent when its last expert is done. With top-8 of 128 experts on one rank that is late: half of the
tokens have a route among the last 8% of the experts. Two things shorten that tail. The columns of y are computed in two
passes, all experts for the first half of the columns, then all for the second, so that the first half is sent while the
second is multiplied. And consumers that find no more tiles turn into communication warps.

In backward (``gemm_push_backward``) the same kernel does the same for the gradient of x:

    y[r] = dgate[r] W1[expert] + dup[r] W3[expert]
    slots[my rank, token] = sum over the token's local routes, in route order, of y[row]

and the score gradient of each of the token's local routes goes with it.

y is rounded to bf16 before the scores are applied, one rounding more than in ``reference.py``: fp32 would double the
traffic of what is already the most memory-bound part of the layer. Rounding is relative, so the scores do not change
its error.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    async_load,
    BLOCK_K,
    BLOCK_M,
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    finish_tile,
    grid_size,
    HALF_M,
    idle,
    load_tile_rows,
    make_half_barriers,
    make_pipeline,
    receive_tile,
    skip_steps,
    tile_descriptor,
    unpack_tile,
)
from .launch import ScoreGradients
from .plan_tables import Counters, KernelPlan
from .send import await_turn, schedule_passes, send_tokens, send_tokens_if, store_tiles
from .tuning import GemmPushTuning, tune_gemm_push


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
    tuning: GemmPushTuning | None = None,
) -> None:
    """Launch the kernel on the current stream. All tensors are on one device, contiguous; R is a multiple of BLOCK_M.

    Args:
        plan: the routing plan that ``h_RF`` was computed with.
        counters: those of ``pull_gemm``, or zeroed. ``done_M`` and ``queue[2:5]`` are used up.
        h_RF: bf16 ``[R, F]``.
        w2_EDF: bf16 ``[e, D, F]``, this rank's experts. D and F are multiples of 64.
        y_RD: bf16 ``[R, D]``, written: each row's h W2^T. Padding rows may be written, with anything.
        out_TD: with one rank: bf16 ``[T, D]``, written where a token has a route, which is everywhere.
        slots_addresses_P: with several ranks: int64 ``[P]``, address of each rank's slots, bf16 ``[P, max_tokens, D]``,
            16-byte aligned; the row of token t of owner o is written to slots ``[rank, t]`` of o.
        max_tokens: with several ranks: of the slots.
        fault: int32, at least 7: the record of a missed deadline (``plan_tables.FAULT_FIELDS``).
        rank: this rank.
        num_sms: SMs to occupy, one CTA each; None: all. The result does not depend on it.
        deadline_seconds: how long to wait for the rows of a token before giving up.
        tuning: None: from the table.

    Raises:
        ValueError: a shape, dtype or layout is not as described.
    """
    num_rows, hidden_dim = h_RF.shape
    num_experts, dim, _ = w2_EDF.shape
    check_tensor("gemm_push", "h_RF", h_RF, (num_rows, hidden_dim), torch.bfloat16)
    check_tensor("gemm_push", "w2_EDF", w2_EDF, (num_experts, dim, hidden_dim), torch.bfloat16)

    def operands(block_n: int) -> tuple:
        rows = tile_descriptor(h_RF, BLOCK_M.value, BLOCK_K.value), tile_descriptor(h_RF, HALF_M.value, BLOCK_K.value)
        product = *rows, tile_descriptor(w2_EDF.view(-1, hidden_dim), block_n, BLOCK_K.value)
        return *product, *product  # the second one is for backward

    _launch_bf16(
        "gemm_push",
        operands,
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
    tuning: GemmPushTuning | None = None,
) -> None:
    """Launch the kernel on the current stream, as :func:`gemm_push`.

    Args:
        plan: the forward's.
        counters: those of ``pull_gemm_backward``, or zeroed. ``done_M`` and ``queue[2:5, 7]`` are used up.
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

    def operands(block_n: int) -> tuple:
        return tuple(
            tile_descriptor(matrix, *tile)
            for rows, weight in ((dgate_RF, w1_EFD), (dup_RF, w3_EFD))
            for matrix, tile in (
                (rows, (BLOCK_M.value, BLOCK_K.value)),
                (rows, (HALF_M.value, BLOCK_K.value)),
                (weight.view(-1, dim), (BLOCK_K.value, block_n)),
            )
        )

    _launch_bf16(
        name,
        operands,
        (num_rows, dim, hidden_dim, num_experts),
        plan,
        counters,
        y_RD=dx_RD,
        out_TD=dx_TD,
        slots_addresses_P=slots_addresses_P,
        score_gradients=ScoreGradients(
            parts_NR=dscore_parts_NR, dscores_TK=dscores_TK, slots_addresses_P=score_slots_addresses_P
        ),
        max_tokens=max_tokens,
        fault=fault,
        rank=rank,
        num_sms=num_sms,
        deadline_seconds=deadline_seconds,
        tuning=tuning,
    )


def _launch_bf16(*args, **kwargs) -> None:
    """As :func:`launch_push`."""
    launch_push(*args, kernel=gemm_push_kernel, constants=gemm_push_constants, tune=tune_gemm_push, **kwargs)


def launch_push(
    name: str,
    operands: Callable[[int], tuple],
    sizes: tuple[int, int, int, int],
    plan: KernelPlan,
    counters: Counters,
    *,
    kernel: Callable,
    constants: Callable[..., dict[str, int | bool]],
    tune: Callable[..., GemmPushTuning],
    y_RD: torch.Tensor,  # noqa: N803
    out_TD: torch.Tensor | None,  # noqa: N803
    slots_addresses_P: torch.Tensor | None,  # noqa: N803
    score_gradients: ScoreGradients | None,
    max_tokens: int,
    fault: torch.Tensor,
    rank: int,
    num_sms: int | None,
    deadline_seconds: float,
    tuning: GemmPushTuning | None,
) -> None:
    """Launch ``gemm_push`` or a relative: what they share, which is all but the operands.

    Args:
        name: for errors.
        operands: the kernel's first arguments, given the columns of a tile.
        sizes: rows, D, F, experts of this rank.
        kernel, constants, tune: the kernel, what it is compiled for, and its table.
        score_gradients: in backward.
    """
    num_rows, dim, hidden_dim, num_experts = sizes
    top_k = plan.pull_rows_UK.shape[1]
    alone = slots_addresses_P is None
    if (out_TD is None) == alone:
        raise ValueError(f"{name}: pass the output (with one rank) or the addresses of slots (with several).")
    check_tensor(name, "the rows' result", y_RD, (num_rows, dim), torch.bfloat16)
    check_sizes(name, num_rows, dim, hidden_dim, num_experts, top_k)
    if alone:
        check_tensor(name, "the output", out_TD, (out_TD.shape[0], dim), torch.bfloat16)
    # Arguments that a variant does not use get some pointer.
    parts_NR, score_outputs, score_parts = counters.queue, counters.queue, 0
    if score_gradients is not None:
        parts_NR, score_outputs = score_gradients.parts_NR, score_gradients.check(name, num_rows, top_k, out_TD)
        score_parts = parts_NR.shape[0]
    if num_rows == 0:
        return

    ep_size = 1 if alone else slots_addresses_P.numel()
    tuning = tuning or tune(dim, hidden_dim, top_k=top_k, ep_size=ep_size)
    kernel[(grid_size(name, num_sms, y_RD.device),)](
        *operands(tuning.block_n),
        tile_descriptor(y_RD, HALF_M.value, tuning.block_n),
        plan.sizes,
        plan.expert_start_e1,
        plan.tile_expert_M,
        plan.tile_rows_M,
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
        deadline_in_us(name, deadline_seconds),
        **constants(tuning, dim=dim, hidden_dim=hidden_dim, top_k=top_k, ep_size=ep_size, score_parts=score_parts),
        num_warps=4,
    )


def gemm_push_constants(tuning: GemmPushTuning, **sizes: int) -> dict[str, int | bool]:
    """What the kernel is compiled for. ``sizes``: as of ``push_constants``."""
    return {**push_constants(tuning, **sizes), "BLOCK_N": tuning.block_n}


def push_constants(
    tuning: GemmPushTuning, *, dim: int, hidden_dim: int, top_k: int, ep_size: int, score_parts: int
) -> dict[str, int | bool]:
    """What both kernels are compiled for; ``score_parts`` is 0 in forward."""
    consumer, comm, other = tuning.registers
    return {
        "DIM": dim,
        "HIDDEN": hidden_dim,
        "TOP_K": top_k,
        "EP_SIZE": ep_size,
        "STAGES": tuning.stages,
        "FIRST_TILES": dim // tuning.block_n - tuning.last_tiles,
        "COMM_WARPS": tuning.comm_warps,
        "WARP_TOKENS": tuning.tokens,
        "ROUTES": tuning.routes,
        "COLUMNS": tuning.columns,
        "CONSUMER_REGS": consumer,
        "COMM_REGS": comm,
        "OTHER_REGS": other,
        "BACKWARD": score_parts > 0,
        "SCORE_PARTS": score_parts,
    }


# ---- the kernel


@gluon.jit
def _load(
    descs,
    operands,
    stages,
    tiles,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Producer: load the operands of each tile, up to STAGES steps ahead of the consumers."""
    a_desc, half_a_desc, b_desc, next_a_desc, next_half_a_desc, next_b_desc = descs
    ring, ring_full, ring_empty = tiles
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        for k in range(HIDDEN // BLOCK_K):
            _load_step(
                a_desc, half_a_desc, b_desc, operands, stages, tile, k, step, DIM, HIDDEN, STAGES, BLOCK_N, BACKWARD
            )
            step += 1
        if BACKWARD:  # dgate and W1 were the first half of the steps; dup and W3 are the second
            for k in range(HIDDEN // BLOCK_K):
                _load_step(
                    next_a_desc,
                    next_half_a_desc,
                    next_b_desc,
                    operands,
                    stages,
                    tile,
                    k,
                    step,
                    DIM,
                    HIDDEN,
                    STAGES,
                    BLOCK_N,
                    BACKWARD,
                )
                step += 1
        finish_tile(ring_empty, count)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _load_step(
    a_desc,
    half_a_desc,
    b_desc,
    operands,
    stages,
    tile,
    k,
    step,
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Load columns from ``k * BLOCK_K`` of the tile's rows, and of the weights what they are multiplied by."""
    a_bufs, b_bufs = operands
    stage_full, stage_empty = stages
    m, n, expert, rows = unpack_tile(tile)
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    full = stage_full.index(stage)
    a_buf = a_bufs.index(stage)
    at = [m * BLOCK_M, k * BLOCK_K]
    load_tile_rows(a_desc, half_a_desc, at, rows, full, a_buf, b_desc.block_type.nbytes)
    if BACKWARD:
        async_load(b_desc, [expert * HIDDEN + k * BLOCK_K, n * BLOCK_N], full, b_bufs.index(stage))
    else:
        async_load(b_desc, [expert * DIM + n * BLOCK_N, k * BLOCK_K], full, b_bufs.index(stage))


@gluon.jit
def _multiply(
    HALF: gl.constexpr,  # which half of each tile's rows
    consumer,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Consumer: 64 rows x BLOCK_N columns of y, tile after tile.

    The two consumers share one buffer for y and take turns, the first one first. So they drift apart until one
    multiplies while the other empties its accumulators, and the tensor cores do not wait.
    """
    operands, y_buf, turns, y_full, stages, tiles = consumer
    a_bufs, b_bufs = operands
    stage_full, stage_empty = stages
    ring, ring_full, ring_empty = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(BLOCK_N, 128), 16]
    )
    step = 0
    count = 0
    tile = receive_tile(ring, ring_full, count)
    while tile >= 0:
        m, n, expert, rows = unpack_tile(tile)
        if rows > HALF * HALF_M:
            y = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            for k in range(NUM_STEPS):
                stage = step % STAGES
                mbarrier.wait(stage_full.index(stage), (step // STAGES) & 1)
                a = a_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
                b = b_bufs.index(stage)
                y = warpgroup_mma(a, b if BACKWARD else b.permute((1, 0)), y, is_async=True)
                # One product stays in flight. That of the step before is done, so its stage can be loaded again.
                y = warpgroup_mma_wait(1, deps=(y,))
                if k > 0:
                    mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
                step += 1
            y = warpgroup_mma_wait(0, deps=(y,))
            mbarrier.arrive(stage_empty.index((step - 1) % STAGES), count=1)
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
            y_buf.store(y.to(gl.bfloat16))
            fence_async_shared()
        else:
            step = skip_steps(stages, step, NUM_STEPS, STAGES)
            finish_tile(ring_empty, count)
            await_turn(HALF, turns, count)
        mbarrier.arrive(y_full.index(HALF), count=1)
        count += 1
        tile = receive_tile(ring, ring_full, count)


@gluon.jit
def _multiply_and_send(
    HALF: gl.constexpr,
    consumer,
    sent,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    TILES_N: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Consumer; once there are no more tiles, a communication warp in each of its four."""
    _multiply(HALF, consumer, NUM_STEPS, STAGES, BLOCK_N, BACKWARD)
    send_tokens(sent, DIM, TOP_K, EP_SIZE, TILES_N, FIRST_TILES, WARP_TOKENS, ROUTES, COLUMNS, BACKWARD)


@gluon.jit(do_not_specialize=["max_tokens", "num_rows", "rank", "deadline_us"])
def gemm_push_kernel(
    a_desc,
    half_a_desc,
    b_desc,
    next_a_desc,
    next_half_a_desc,
    next_b_desc,
    y_desc,
    sizes,
    expert_start_e1,
    tile_expert_M,
    tile_rows_M,
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
    DIM: gl.constexpr,
    HIDDEN: gl.constexpr,
    TOP_K: gl.constexpr,
    EP_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST_TILES: gl.constexpr,
    COMM_WARPS: gl.constexpr,
    WARP_TOKENS: gl.constexpr,
    ROUTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    COMM_REGS: gl.constexpr,
    OTHER_REGS: gl.constexpr,
    BACKWARD: gl.constexpr,
    SCORE_PARTS: gl.constexpr,
):
    TILES_N: gl.constexpr = DIM // BLOCK_N
    NUM_STEPS: gl.constexpr = (2 if BACKWARD else 1) * HIDDEN // BLOCK_K
    B_SHAPE: gl.constexpr = [BLOCK_K, BLOCK_N] if BACKWARD else [BLOCK_N, BLOCK_K]
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + B_SHAPE, b_desc.layout)
    y_buf = gl.allocate_shared_memory(gl.bfloat16, [HALF_M, BLOCK_N], y_desc.layout)
    stages, tiles = make_pipeline(STAGES, 2, 4)  # both consumers, the producer and the store warp
    y_full, turns = make_half_barriers()

    descs = (a_desc, half_a_desc, b_desc, next_a_desc, next_half_a_desc, next_b_desc)
    operands = (a_bufs, b_bufs)
    consumer = (operands, y_buf, turns, y_full, stages, tiles)
    planned = (sizes, expert_start_e1, tile_expert_M, tile_rows_M)
    stored = (y_desc, y_buf, turns, y_full, done_M)
    tables = (send_order_U, pull_source_U, pull_rows_UK, pull_scores_UK)
    destinations = (out_TD, slots_addresses_P, max_tokens)
    faults = (fault, rank, deadline_us)
    score_gradients = (dscore_parts_NR, num_rows, score_outputs)
    sent = (sizes, tables, y_RD, done_M, destinations, score_gradients, queue, faults)
    # Registers are granted per warpgroup, in this order: the producer's has a warp that does nothing.
    gl.warp_specialize(
        [
            (
                _multiply_and_send,
                (
                    0,
                    consumer,
                    sent,
                    NUM_STEPS,
                    STAGES,
                    BLOCK_N,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                ),
            ),
            (
                _multiply_and_send,
                (
                    1,
                    consumer,
                    sent,
                    NUM_STEPS,
                    STAGES,
                    BLOCK_N,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                ),
            ),
            (_load, (descs, operands, stages, tiles, DIM, HIDDEN, STAGES, BLOCK_N, BACKWARD)),
            (schedule_passes, (planned, queue, tiles, EP_SIZE, TILES_N, FIRST_TILES)),
            (store_tiles, (stored, tiles, BLOCK_N, FIRST_TILES)),
            (idle, ()),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 0,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                    SCORE_PARTS,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 1,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                    SCORE_PARTS,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 2,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                    SCORE_PARTS,
                ),
            ),
            (
                send_tokens_if,
                (
                    COMM_WARPS > 3,
                    sent,
                    DIM,
                    TOP_K,
                    EP_SIZE,
                    TILES_N,
                    FIRST_TILES,
                    WARP_TOKENS,
                    ROUTES,
                    COLUMNS,
                    BACKWARD,
                    SCORE_PARTS,
                ),
            ),
        ],
        [4, 1, 1, 1, 1, 1, 1, 1, 1],
        [CONSUMER_REGS] + [OTHER_REGS] * 4 + [COMM_REGS] * 4,
    )
