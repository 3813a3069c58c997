"""Build this rank's :class:`KernelPlan` on the device, from all ranks' published ids and scores.

The tokens of the group are cut into blocks (``LayerShape.block_tokens`` tokens of one owner rank), in the order of the
rows of an expert: owner rank, then token. Three launches; nothing is placed by atomics and nothing waits for anything:

    count   one program per block: read the owner's ids, count the block's rows per local expert, and its tokens per
            first and per last local expert
    scan    one program per (kind of count, local expert): sum the counts over the blocks before each block
    place   one program per block: a row's position is its expert's start + the rows in earlier blocks + its rank in the
            block; likewise a token's position in the pull list and in the send list

So every position is a sum of counts, and two builds from the same routes are bitwise equal.

Both lists are grouped (by first, by last local expert), and within a group the owner ranks take turns, so that at any
moment a rank reads from, and writes to, all owners. The j-th token of owner ``s`` in a group comes after the first
``min(count[s'], j + (s' < s))`` tokens of each owner ``s'``: that sum is its position, and needs no sort.

Loops whose bounds are known only at run time are written with ``while``: under NumPy 2.4 and later Triton's interpreter
cannot run ``range`` over them.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..symmetric import SymmetricWorkspace
from .plan_tables import BLOCK_M, Counters, KernelPlan, layout_of, PlanScratch, PlanSizes

_ROWS, _FIRST, _LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of count: the first index of ``PlanScratch.block_starts_3eB1``."""

_SCAN_BLOCK = 1024
_TILE_BLOCK = 256


def build_kernel_plan(
    workspace: SymmetricWorkspace, storage: torch.Tensor | None = None
) -> tuple[KernelPlan, Counters]:
    """Launch the plan kernels on the current stream.

    Args:
        workspace: the group's.
        storage: uint8, as many as the plan's layout has bytes: where to write it. None: memory of its own.

    All ranks' ids, scores and token counts must be readable: see :func:`titan_megamoe.kernels.combine.publish`. Does
    not wait for the host. After a fault the plan is empty (``sizes`` all zero), so that the kernels behind it do
    nothing.

    Returns:
        The plan, and zeroed counters for one pass of ``pull_gemm`` and ``gemm_push``.
    """
    shape, device = workspace.shape, workspace.device
    layout = layout_of(KernelPlan, shape)
    plan: KernelPlan = layout.allocate(device) if storage is None else layout.slice(storage)
    scratch: PlanScratch = layout_of(PlanScratch, shape).allocate(device)
    counters, counters_storage = allocate_counters(workspace)
    addresses, local = workspace.addresses, workspace.local
    sizes = {
        "NUM_LOCAL_EXPERTS": shape.num_local_experts,
        "TOP_K": shape.top_k,
        "BLOCK_T": shape.block_tokens,
        "BLOCK_K": shape.block_routes,
        "BLOCK_E": shape.block_experts,
    }
    count_kernel[(shape.num_blocks,)](
        addresses.ids_P,
        addresses.num_tokens_P,
        local.fault,
        scratch.local_expert_NK,
        scratch.block_starts_3eB1,
        counters_storage,
        counters_storage.numel(),
        shape.blocks_per_owner,
        shape.max_tokens,
        workspace.rank * shape.num_local_experts,
        **sizes,
        num_warps=shape.block_warps,
    )
    scan_kernel[(3 * shape.num_local_experts,)](
        scratch.block_starts_3eB1, shape.num_blocks, BLOCK=_SCAN_BLOCK, num_warps=4
    )
    place_kernel[(shape.num_blocks,)](
        addresses.scores_P,
        scratch.local_expert_NK,
        scratch.block_starts_3eB1,
        plan.sizes,
        plan.expert_start_e1,
        plan.expert_rows_e,
        plan.tile_expert_M,
        plan.tile_rows_M,
        plan.pull_source_U,
        plan.pull_rows_UK,
        plan.pull_scores_UK,
        plan.send_order_U,
        local.peak,
        shape.blocks_per_owner,
        shape.pool_rows,
        EP_SIZE=shape.ep_size,
        **sizes,
        BLOCK_M=BLOCK_M,
        TILE_BLOCK=_TILE_BLOCK,
        num_warps=shape.block_warps,
    )
    return plan, counters


def allocate_counters(workspace: SymmetricWorkspace) -> tuple[Counters, torch.Tensor]:
    """Counters and, as one flat int32 tensor, the memory they share. Not zeroed."""
    layout = layout_of(Counters, workspace.shape)
    storage = torch.empty(layout.num_bytes, dtype=torch.uint8, device=workspace.device)
    return layout.slice(storage), storage.view(torch.int32)


def read_sizes(plan: KernelPlan, workspace: SymmetricWorkspace) -> PlanSizes:
    """Copy the plan's sizes to the host and wait for them: the one host synchronisation of exact sizing.

    Raises what :meth:`SymmetricWorkspace.check` raises.
    """
    num_tiles, num_unique, num_rows, overflow = workspace.read(plan.sizes)
    return PlanSizes(num_tiles=num_tiles, num_unique=num_unique, num_rows=num_rows, overflow=overflow)


@triton.jit
def count_kernel(
    ids_addresses_P,  # int64 [P]: of int32 [max_tokens, K]
    num_tokens_addresses_P,  # int64 [P]: of int32 [1]
    fault,
    local_expert_NK,
    block_starts_3eB1,
    counters,  # int32 [num_counters], zeroed here
    num_counters,
    blocks_per_owner,
    max_tokens,
    first_expert,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    start = block * 1024
    while start < num_counters:
        counter = start + tl.arange(0, 1024)
        tl.store(counters + counter, tl.zeros([1024], tl.int32), mask=counter < num_counters)
        start += num_blocks * 1024

    owner = block // blocks_per_owner
    token_T = (block % blocks_per_owner) * BLOCK_T + tl.arange(0, BLOCK_T)
    route_K = tl.arange(0, BLOCK_K)
    expert_E = tl.arange(0, BLOCK_E)
    num_tokens = tl.load(tl.load(num_tokens_addresses_P + owner).to(tl.pointer_type(tl.int32)))
    # What a faulted group has published may be anything: keep reads inside the buffer and plan nothing.
    num_tokens = tl.where(tl.load(fault) == 0, tl.minimum(num_tokens, max_tokens), 0)

    ids = tl.load(ids_addresses_P + owner).to(tl.pointer_type(tl.int32))
    is_route_TK = (token_T < num_tokens)[:, None] & (route_K < TOP_K)[None, :]
    local_TK = tl.load(ids + token_T[:, None] * TOP_K + route_K[None, :], mask=is_route_TK, other=-1) - first_expert
    local_TK = tl.where(is_route_TK & (local_TK >= 0) & (local_TK < NUM_LOCAL_EXPERTS), local_TK, -1)
    # The place kernel needs the ids again: from here, not once more over the link.
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    tl.store(local_expert_NK + row_T[:, None] * TOP_K + route_K[None, :], local_TK, mask=(route_K < TOP_K)[None, :])

    first_T, last_T = _first_and_last(local_TK, BLOCK_E)
    packed_E = tl.sum(_count_packed(local_TK, first_T, last_T, expert_E), axis=0)
    stride = num_blocks + 1
    count = block_starts_3eB1 + expert_E * stride + block
    is_expert_E = expert_E < NUM_LOCAL_EXPERTS
    tl.store(count + _ROWS * NUM_LOCAL_EXPERTS * stride, _unpack_rows(packed_E), mask=is_expert_E)
    tl.store(count + _FIRST * NUM_LOCAL_EXPERTS * stride, _unpack_first(packed_E), mask=is_expert_E)
    tl.store(count + _LAST * NUM_LOCAL_EXPERTS * stride, _unpack_last(packed_E), mask=is_expert_E)


@triton.jit
def scan_kernel(block_starts_3eB1, num_blocks, BLOCK: tl.constexpr):
    """Replace each row's counts by their exclusive prefix sums, in place, and append the total."""
    row = block_starts_3eB1 + tl.program_id(0) * (num_blocks + 1)
    total = 0
    start = 0
    while start < num_blocks:
        block_B = start + tl.arange(0, BLOCK)
        count_B = tl.load(row + block_B, mask=block_B < num_blocks, other=0)
        tl.store(row + block_B, total + tl.cumsum(count_B, axis=0) - count_B, mask=block_B < num_blocks)
        total += tl.sum(count_B, axis=0)
        start += BLOCK
    tl.store(row + num_blocks, total)


@triton.jit
def place_kernel(
    scores_addresses_P,  # int64 [P]: of fp32 [max_tokens, K]
    local_expert_NK,
    block_starts_3eB1,
    sizes,
    expert_start_e1,
    expert_rows_e,
    tile_expert_M,
    tile_rows_M,
    pull_source_U,
    pull_rows_UK,
    pull_scores_UK,
    send_order_U,
    peak,
    blocks_per_owner,
    pool_rows,
    EP_SIZE: tl.constexpr,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    owner = block // blocks_per_owner
    stride = num_blocks + 1
    rows_starts = block_starts_3eB1 + _ROWS * NUM_LOCAL_EXPERTS * stride
    first_starts = block_starts_3eB1 + _FIRST * NUM_LOCAL_EXPERTS * stride
    last_starts = block_starts_3eB1 + _LAST * NUM_LOCAL_EXPERTS * stride

    # Every program computes the experts' starts for itself: cheaper than a fourth launch.
    expert_E = tl.arange(0, BLOCK_E)
    is_expert_E = expert_E < NUM_LOCAL_EXPERTS
    rows_E = tl.load(rows_starts + expert_E * stride + num_blocks, mask=is_expert_E, other=0)
    padded_E = tl.cdiv(rows_E, BLOCK_M) * BLOCK_M
    start_E = tl.cumsum(padded_E, axis=0) - padded_E
    kept_start_E = tl.minimum(start_E, pool_rows)
    kept_rows_E = tl.minimum(rows_E, pool_rows - kept_start_E)

    expert = block
    while expert < NUM_LOCAL_EXPERTS:
        num_rows = tl.sum(tl.where(expert_E == expert, kept_rows_E, 0), axis=0)
        first_tile = tl.sum(tl.where(expert_E == expert, kept_start_E, 0), axis=0) // BLOCK_M
        start = 0
        while start * BLOCK_M < num_rows:
            tile = start + tl.arange(0, TILE_BLOCK)
            is_tile = tile * BLOCK_M < num_rows
            tl.store(tile_expert_M + first_tile + tile, tl.zeros([TILE_BLOCK], tl.int32) + expert, mask=is_tile)
            tl.store(tile_rows_M + first_tile + tile, tl.minimum(num_rows - tile * BLOCK_M, BLOCK_M), mask=is_tile)
            start += TILE_BLOCK
        expert += num_blocks

    row_T = tl.arange(0, BLOCK_T)
    route_K = tl.arange(0, BLOCK_K)
    in_row_K = route_K < TOP_K
    local_TK = tl.load(
        local_expert_NK + (block * BLOCK_T + row_T)[:, None] * TOP_K + route_K[None, :],
        mask=in_row_K[None, :],
        other=-1,
    )
    first_T, last_T = _first_and_last(local_TK, BLOCK_E)
    is_pulled_T = last_T >= 0
    packed_TE = _count_packed(local_TK, first_T, last_T, expert_E)
    # What the block's earlier tokens have for each of the token's own experts.
    before_TK = tl.gather(tl.cumsum(packed_TE, axis=0) - packed_TE, tl.maximum(local_TK, 0), axis=1)

    # Rows: the expert's start, its rows in earlier blocks, those of the block's earlier tokens, and of the token
    # itself.
    start_E += tl.load(rows_starts + expert_E * stride + block, mask=is_expert_E, other=0)
    start_TK = tl.gather(start_E, tl.maximum(local_TK, 0).reshape(BLOCK_T * BLOCK_K), axis=0).reshape(BLOCK_T, BLOCK_K)
    is_repeat_KTK = (tl.trans(local_TK)[:, :, None] == local_TK[None, :, :]) & (
        route_K[:, None, None] < route_K[None, None, :]
    )
    pool_row_TK = start_TK + _unpack_rows(before_TK) + tl.sum(is_repeat_KTK.to(tl.int32), axis=0)
    # A row past the pool's end goes nowhere; sizes[3] and `peak` count it and the host raises.
    is_kept_TK = (local_TK >= 0) & (pool_row_TK < pool_rows)

    # The token's places in the two lists.
    earlier_T = tl.max(tl.where(local_TK == first_T[:, None], _unpack_first(before_TK), 0), axis=1)
    pull_T = _place_in_turns(
        first_starts,
        first_T,
        is_pulled_T,
        earlier_T,
        owner,
        block,
        blocks_per_owner,
        stride,
        EP_SIZE,
        NUM_LOCAL_EXPERTS,
        BLOCK_E,
    )
    earlier_T = tl.max(tl.where(local_TK == last_T[:, None], _unpack_last(before_TK), 0), axis=1)
    send_T = _place_in_turns(
        last_starts,
        last_T,
        is_pulled_T,
        earlier_T,
        owner,
        block,
        blocks_per_owner,
        stride,
        EP_SIZE,
        NUM_LOCAL_EXPERTS,
        BLOCK_E,
    )
    token_T = (block % blocks_per_owner) * BLOCK_T + row_T
    tl.store(pull_source_U + pull_T, (owner.to(tl.int64) << 32) | token_T.to(tl.int64), mask=is_pulled_T)
    tl.store(send_order_U + send_T, pull_T, mask=is_pulled_T)

    # Routes that have a row move to the front, the others take the places behind them as -1, so that one store per
    # table writes all K.
    kept_TK = is_kept_TK.to(tl.int32)
    if TOP_K > 1:
        kept_before_TK = tl.cumsum(kept_TK, axis=1) - kept_TK
    else:  # a scan over one element, which Triton 3.6 fails to compile with 64 experts or more
        kept_before_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    num_kept_T = tl.sum(kept_TK, axis=1)
    place_TK = tl.where(is_kept_TK, kept_before_TK, num_kept_T[:, None] + route_K[None, :] - kept_before_TK)
    scores = tl.load(scores_addresses_P + owner).to(tl.pointer_type(tl.float32))
    score_TK = tl.load(scores + token_T[:, None] * TOP_K + route_K[None, :], mask=is_kept_TK, other=0.0)
    entry_TK = pull_T[:, None] * TOP_K + place_TK
    is_entry_TK = is_pulled_T[:, None] & in_row_K[None, :]
    tl.store(pull_rows_UK + entry_TK, tl.where(is_kept_TK, pool_row_TK, -1), mask=is_entry_TK)
    tl.store(pull_scores_UK + entry_TK, score_TK, mask=is_entry_TK)

    if block == 0:
        tl.store(expert_start_e1 + expert_E, kept_start_E, mask=is_expert_E)
        tl.store(expert_rows_e + expert_E, kept_rows_E, mask=is_expert_E)
        tl.store(expert_start_e1 + NUM_LOCAL_EXPERTS, tl.minimum(tl.sum(padded_E, axis=0), pool_rows))
        unique_E = tl.load(first_starts + expert_E * stride + num_blocks, mask=is_expert_E, other=0)
        num_rows = tl.sum(rows_E, axis=0)
        overflow = num_rows - tl.sum(kept_rows_E, axis=0)
        tl.store(sizes, tl.sum(tl.cdiv(kept_rows_E, BLOCK_M), axis=0))
        tl.store(sizes + 1, tl.sum(unique_E, axis=0))
        tl.store(sizes + 2, num_rows)
        tl.store(sizes + 3, overflow)
        tl.atomic_max(peak, num_rows)
        tl.atomic_max(peak + 1, overflow)


@triton.jit
def _first_and_last(local_TK, BLOCK_E: tl.constexpr):
    """First and last local expert of each token; BLOCK_E and -1 for a token without one."""
    return tl.min(tl.where(local_TK >= 0, local_TK, BLOCK_E), axis=1), tl.max(local_TK, axis=1)


@triton.jit
def _count_packed(local_TK, first_T, last_T, expert_E):
    """``[T, E]``: how many routes of the token go to the expert, and whether it is the token's first, its last.

    The three share an int32, so that one reduction or scan over a block's tokens does for all: 13 bits of rows (at most
    MAX_BLOCK_TOKENS * MAX_TOP_K = 4096), 8 of first, 8 of last (at most MAX_BLOCK_TOKENS = 128).
    """
    # K leads, so that threads are laid along the experts and the sum over K stays within a thread.
    routes_TE = tl.sum((tl.trans(local_TK)[:, :, None] == expert_E[None, None, :]).to(tl.int32), axis=0)
    is_first_TE = (first_T[:, None] == expert_E[None, :]).to(tl.int32)
    is_last_TE = (last_T[:, None] == expert_E[None, :]).to(tl.int32)
    return routes_TE | (is_first_TE << 13) | (is_last_TE << 21)


@triton.jit
def _unpack_rows(packed):
    return packed & 0x1FFF


@triton.jit
def _unpack_first(packed):
    return (packed >> 13) & 0xFF


@triton.jit
def _unpack_last(packed):
    return packed >> 21


@triton.jit
def _place_in_turns(
    starts,  # this kind's rows of block_starts_3eB1
    group_T,
    is_pulled_T,
    earlier_T,  # tokens of the group before this one in its block
    owner,
    block,
    blocks_per_owner,
    stride,
    EP_SIZE: tl.constexpr,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Where in a list each token goes that is grouped by ``group_T``, with owner ranks taking turns within a group."""
    expert_E = tl.arange(0, BLOCK_E)
    size_E = tl.load(starts + expert_E * stride + stride - 1, mask=expert_E < NUM_LOCAL_EXPERTS, other=0)
    group_T = tl.where(is_pulled_T, group_T, 0)
    place_T = tl.gather(tl.cumsum(size_E, axis=0) - size_E, group_T, axis=0)

    group = starts + group_T * stride
    turn_T = earlier_T + tl.load(group + block) - tl.load(group + owner * blocks_per_owner)
    begin_T = tl.load(group)
    for other in range(EP_SIZE):
        end_T = tl.load(group + (other + 1) * blocks_per_owner)
        place_T += tl.minimum(end_T - begin_T, turn_T + (other < owner).to(tl.int32))
        begin_T = end_T
    return place_T
