"""What brackets the GEMM kernels: make this rank's inputs readable, and add up what the expert ranks sent back.

    publish -> handshake(PHASE_PUBLISHED) -> [plan, pull_gemm, gemm_push] -> handshake(PHASE_ALL_SENT) -> reduce_slots

and in backward the same with ``publish_rows`` and, at the end, ``collect_score_slots``.

The two handshakes are the only waits between ranks. *Published*: every rank's inputs are readable, and (since its calls
are ordered on its stream) it has finished reading its slots of the call before. *All sent*: this rank's slots are
complete, and no peer reads its published inputs any more, so the next call may overwrite them.

Flags hold the number of calls their writer has made and only grow, so nothing is ever reset between calls. The number
lives on the device, so a captured graph can be replayed.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantize import FP8, MX_BLOCK
from ..symmetric import SymmetricWorkspace
from . import plan_tables
from .plan_tables import num_blocks, PHASE_ALL_SENT, PHASE_PUBLISHED
from .quantize import quantize_rows
from .quantize_mx import quantize_rows as quantize_mx_rows
from .waiting import clock_ns, record_fault

_FAULT_DEADLINE = tl.constexpr(plan_tables.FAULT_DEADLINE)
_FAULT_BAD_ID = tl.constexpr(plan_tables.FAULT_BAD_ID)
_FAULT_BAD_SCORE = tl.constexpr(plan_tables.FAULT_BAD_SCORE)
_FAULT_PEER = tl.constexpr(plan_tables.FAULT_PEER)
_KERNEL_PUBLISH = tl.constexpr(plan_tables.KERNEL_PUBLISH)
_KERNEL_HANDSHAKE = tl.constexpr(plan_tables.KERNEL_HANDSHAKE)

_FAULTED = tl.constexpr(-1)
"""The flag of a rank that has stopped: below every call number, so peers can tell it from a late one."""

_PUBLISH_TOKENS = 16
_PUBLISH_ELEMENTS = 4096


def publish(
    workspace: SymmetricWorkspace,
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    *,
    number_format: str | None = None,
) -> object:
    """Copy this rank's inputs to where every rank can read them, and check the routes on the way.

    With one rank the tokens are not copied: the kernels read them where they are. They must stay alive until the kernels
    that read them have been launched, and so must what this returns.

    Args:
        workspace: the group's.
        x_TD: ``[T, D]``, dtype of the workspace's shape, ``T <= max_tokens``.
        topk_ids_TK: ``[T, K]`` int32 or int64 global expert ids.
        topk_scores_TK: ``[T, K]`` fp32, or the dtype of ``x_TD``.
        number_format: what x is published in: ``"fp8"`` (blockwise), ``"mxfp8"``, or None for its own dtype.

    An id that is no expert's and a score that is not finite are recorded in ``workspace.local.fault``.

    Raises:
        ValueError: more tokens than the workspace holds, or another D, K or dtype.
    """
    shape = workspace.shape
    num_tokens = x_TD.shape[0]
    if num_tokens > shape.max_tokens:
        raise ValueError(
            f"mega_moe: x_TD has {num_tokens} tokens, but the workspace was made for max_tokens = {shape.max_tokens}. "
            "Raise max_tokens to the most tokens any rank passes in one call."
        )
    if x_TD.shape[1] != shape.dim or x_TD.dtype != shape.dtype:
        raise ValueError(
            f"mega_moe: x_TD is {tuple(x_TD.shape)} {x_TD.dtype}, but the workspace was made for dim = {shape.dim} "
            f"and dtype = {shape.dtype}. Use a workspace made for this layer's shape."
        )
    for name, tensor in (("topk_ids_TK", topk_ids_TK), ("topk_scores_TK", topk_scores_TK)):
        if tuple(tensor.shape) != (num_tokens, shape.top_k):
            raise ValueError(f"mega_moe: {name} is {tuple(tensor.shape)}, expected {(num_tokens, shape.top_k)}.")
    x_TD = x_TD.contiguous()
    published, addresses = workspace.published, workspace.addresses
    read_in_place = None
    if number_format:
        to = published.x_TD, published.x_scales_Tb, addresses.x_P, addresses.x_scales_P
        read_in_place = _publish_quantised(workspace, number_format, x_TD, *to)
    publish_kernel[(max(1, triton.cdiv(num_tokens, _PUBLISH_TOKENS)),)](
        x_TD,
        topk_ids_TK.contiguous(),
        topk_scores_TK.contiguous(),
        published.x_TD,
        published.ids_TK,
        published.scores_TK,
        published.num_tokens,
        addresses.x_P,
        workspace.local.fault,
        num_tokens,
        workspace.rank,
        NUM_EXPERTS=shape.num_experts,
        DIM=shape.dim,
        TOP_K=shape.top_k,
        COPY_X=shape.ep_size > 1 and number_format is None,
        IN_PLACE=shape.ep_size == 1 and number_format is None,
        BLOCK_T=_PUBLISH_TOKENS,
        BLOCK_ROUTES=triton.next_power_of_2(_PUBLISH_TOKENS * shape.top_k),
        BLOCK_X=_PUBLISH_ELEMENTS,
        num_warps=4,
    )
    return read_in_place


def publish_rows(
    workspace: SymmetricWorkspace,
    *,
    dout_TD: torch.Tensor,  # noqa: N803
    x_TD: torch.Tensor | None = None,  # noqa: N803
    dout_format: str | None = None,
    x_format: str | None = None,
) -> object:
    """Make the gradient of this rank's output readable for every rank, in backward; and ``x`` once more, if it is wanted.

    With one rank they are read where they are, as by :func:`publish`, and what this returns must stay alive as long.

    Args:
        dout_TD, x_TD: ``[T, D]``, contiguous, dtype of the workspace's shape, with the T of the forward.
        dout_format, x_format: as ``number_format`` of :func:`publish`.
    """
    published, addresses = workspace.published, workspace.addresses
    read_in_place = []
    for number_format, rows_TD, *to in (
        (dout_format, dout_TD, published.dout_TD, published.dout_scales_Tb, addresses.dout_P, addresses.dout_scales_P),
        (x_format, x_TD, published.x_TD, published.x_scales_Tb, addresses.x_P, addresses.x_scales_P),
    ):
        if rows_TD is None:
            continue
        buffer_TD, _, address_P, _ = to
        if number_format:
            read_in_place.append(_publish_quantised(workspace, number_format, rows_TD, *to))
        elif workspace.shape.ep_size > 1:
            buffer_TD[: rows_TD.shape[0]].copy_(rows_TD)
        else:
            address_P.fill_(rows_TD.data_ptr())
    return read_in_place


def _publish_quantised(
    workspace: SymmetricWorkspace,
    number_format: str,
    rows_TD: torch.Tensor,  # noqa: N803
    buffer_TD: torch.Tensor,  # noqa: N803
    scales_buffer_Tb: torch.Tensor,  # noqa: N803
    address_P: torch.Tensor,  # noqa: N803
    scales_address_P: torch.Tensor,  # noqa: N803
) -> object:
    """Quantise rows to where every rank can read them: with several ranks into the buffers, with one anywhere."""
    num_tokens, dim = rows_TD.shape
    is_mx = number_format == "mxfp8"
    quantize = quantize_mx_rows if is_mx else quantize_rows
    if workspace.shape.ep_size > 1:
        values_TD = buffer_TD.view(-1).view(FP8)[: num_tokens * dim].view(num_tokens, dim)
        scales = scales_buffer_Tb[:num_tokens]
        quantize(rows_TD, values_TD, scales.view(torch.uint8) if is_mx else scales)
        return None
    values_TD = torch.empty_like(rows_TD, dtype=FP8)
    if is_mx:
        scales = rows_TD.new_empty(num_tokens, dim // MX_BLOCK, dtype=torch.uint8)
    else:
        scales = rows_TD.new_empty(num_tokens, num_blocks(dim), dtype=torch.float32)
    quantize(rows_TD, values_TD, scales)
    address_P.fill_(values_TD.data_ptr())
    scales_address_P.fill_(scales.data_ptr())
    return values_TD, scales


def handshake(workspace: SymmetricWorkspace, phase: int) -> None:
    """Tell every rank that this one has reached ``phase``, and wait until all have: nothing to do with one rank.

    ``phase`` is PHASE_PUBLISHED or PHASE_ALL_SENT. Work queued on the stream before it is visible to all ranks after
    theirs. Past ``workspace.deadline_seconds`` it records a fault and stops waiting; a fault of this rank's reaches its
    peers here.
    """
    _launch_handshake(workspace, phase, signals=True, waits=True)


def signal(workspace: SymmetricWorkspace, phase: int) -> None:
    """The first half of :func:`handshake`, for ranks that share a stream: all of them signal before one waits."""
    _launch_handshake(workspace, phase, signals=True, waits=False)


def wait(workspace: SymmetricWorkspace, phase: int) -> None:
    """The second half of :func:`handshake`."""
    _launch_handshake(workspace, phase, signals=False, waits=True)


def _launch_handshake(workspace: SymmetricWorkspace, phase: int, *, signals: bool, waits: bool) -> None:
    if phase not in (PHASE_PUBLISHED, PHASE_ALL_SENT):
        raise ValueError(f"handshake: phase = {phase}. Pass PHASE_PUBLISHED or PHASE_ALL_SENT.")
    ep_size = workspace.shape.ep_size
    if ep_size == 1:
        return
    handshake_kernel[(1,)](
        workspace.published.flags,
        workspace.addresses.flags_P,
        workspace.local.calls,
        workspace.local.fault,
        workspace.rank,
        int(workspace.deadline_seconds * 1e9),
        PHASE=phase,
        EP_SIZE=ep_size,
        BLOCK_P=triton.next_power_of_2(ep_size),
        SIGNALS=signals,
        WAITS=waits,
        num_warps=1,
    )


def reduce_slots(workspace: SymmetricWorkspace, topk_ids_TK: torch.Tensor, out_TD: torch.Tensor) -> None:
    """``out_TD[t]`` = the sum over expert ranks, in rank order and in fp32, of what they sent for token ``t``.

    A rank that holds none of the token's experts sent nothing, and its slot is not read. With one rank ``gemm_push``
    writes the output itself, and this is an error.

    Args:
        topk_ids_TK: ``[T, K]`` int32 or int64 global expert ids, contiguous: those that were published.
        out_TD: ``[T, D]``, dtype of the workspace's shape.
    """
    shape = workspace.shape
    if shape.ep_size == 1:
        raise ValueError("reduce_slots: one rank has no slots. gemm_push writes out_TD itself.")
    if out_TD.shape[0] == 0:
        return
    block_d = triton.next_power_of_2(shape.dim)
    reduce_kernel[(out_TD.shape[0],)](
        workspace.published.slots_PTD,
        topk_ids_TK,
        out_TD,
        shape.max_tokens,
        EP_SIZE=shape.ep_size,
        NUM_LOCAL_EXPERTS=shape.num_local_experts,
        DIM=shape.dim,
        TOP_K=shape.top_k,
        BLOCK_K=shape.block_routes,
        BLOCK_D=block_d,
        num_warps=reduce_warps(block_d),
    )


def collect_score_slots(
    workspace: SymmetricWorkspace,
    topk_ids_TK: torch.Tensor,  # noqa: N803
    dscores_TK: torch.Tensor,  # noqa: N803
) -> None:
    """``dscores_TK[t, k]`` = what the rank of that route's expert sent for it, with several ranks.

    Args:
        topk_ids_TK: ``[T, K]`` int32 or int64 global expert ids, contiguous: those that were published.
        dscores_TK: ``[T, K]`` fp32, written.
    """
    shape = workspace.shape
    num_tokens = dscores_TK.shape[0]
    if num_tokens == 0:
        return
    block_t = collect_scores_tokens(shape.block_routes)
    collect_scores_kernel[(triton.cdiv(num_tokens, block_t),)](
        workspace.published.score_slots_PTK,
        topk_ids_TK,
        dscores_TK,
        num_tokens,
        shape.max_tokens,
        NUM_LOCAL_EXPERTS=shape.num_local_experts,
        TOP_K=shape.top_k,
        BLOCK_T=block_t,
        BLOCK_K=shape.block_routes,
        num_warps=4,
    )


def collect_scores_tokens(block_routes: int) -> int:
    """Tokens of a program, which compares each of a token's routes with all the others."""
    return min(64, max(8, 4096 // block_routes**2))


def reduce_warps(block_d: int) -> int:
    """16 elements a thread: eight rows of them fit in registers beside the sum."""
    return min(16, max(1, block_d // 512))


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def publish_kernel(
    x_TD,
    ids_TK,
    scores_TK,
    published_x_TD,
    published_ids_TK,
    published_scores_TK,
    published_num_tokens,
    x_addresses_P,
    fault,
    num_tokens,
    rank,
    NUM_EXPERTS: tl.constexpr,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    COPY_X: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_ROUTES: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    first_token = tl.program_id(0) * BLOCK_T
    if tl.program_id(0) == 0:
        tl.store(published_num_tokens, num_tokens)
        if IN_PLACE:
            tl.store(x_addresses_P, x_TD.to(tl.int64))

    route = tl.arange(0, BLOCK_ROUTES)
    is_route = (route < BLOCK_T * TOP_K) & (first_token * TOP_K + route < num_tokens * TOP_K)
    route += first_token * TOP_K
    expert = tl.load(ids_TK + route, mask=is_route, other=0)
    score = tl.load(scores_TK + route, mask=is_route, other=0.0).to(tl.float32)
    tl.store(published_ids_TK + route, expert.to(tl.int32), mask=is_route)
    tl.store(published_scores_TK + route, score, mask=is_route)
    is_bad = is_route & ((expert < 0) | (expert >= NUM_EXPERTS))
    if tl.max(is_bad.to(tl.int32), axis=0) != 0:
        worst = tl.min(tl.where(is_bad, route, num_tokens * TOP_K), axis=0)
        # int32 is what the record holds: an id beyond it is shown as the nearest one.
        shown = tl.minimum(tl.maximum(expert, -2147483648), 2147483647).to(tl.int32)
        have = tl.sum(tl.where(route == worst, shown, 0), axis=0)
        record_fault(fault, _FAULT_BAD_ID, rank, _KERNEL_PUBLISH, 0, worst, have, NUM_EXPERTS)
    is_bad = is_route & ~(tl.abs(score) < float("inf"))  # so that NaN is bad, too
    if tl.max(is_bad.to(tl.int32), axis=0) != 0:
        worst = tl.min(tl.where(is_bad, route, num_tokens * TOP_K), axis=0)
        record_fault(fault, _FAULT_BAD_SCORE, rank, _KERNEL_PUBLISH, 0, worst, 0, 0)

    if COPY_X:
        first = first_token.to(tl.int64) * DIM
        num_elements = tl.minimum(num_tokens - first_token, BLOCK_T) * DIM
        for start in range(0, BLOCK_T * DIM, BLOCK_X):
            element = start + tl.arange(0, BLOCK_X)
            values = tl.load(x_TD + first + element, mask=element < num_elements)
            tl.store(published_x_TD + first + element, values, mask=element < num_elements)


@triton.jit(do_not_specialize=["rank", "deadline_ns"])
def handshake_kernel(
    flags,  # int32 [2, P]: by phase and by the rank that writes it
    flags_addresses_P,
    calls,  # int32 [2]: handshakes of each phase that this rank has completed
    fault,
    rank,
    deadline_ns: tl.int64,
    PHASE: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIGNALS: tl.constexpr,
    WAITS: tl.constexpr,
):
    peer_P = tl.arange(0, BLOCK_P)
    is_peer_P = peer_P < EP_SIZE
    want = tl.load(calls + PHASE) + 1
    has_faulted = tl.load(fault) != 0
    if SIGNALS:
        theirs_P = tl.load(flags_addresses_P + peer_P, mask=is_peer_P, other=0).to(tl.pointer_type(tl.int32))
        call_P = tl.zeros([BLOCK_P], tl.int32) + tl.where(has_faulted, _FAULTED, want)
        # Release: whatever earlier kernels of this stream wrote, here or at a peer, is visible to who reads the flag.
        tl.atomic_xchg(theirs_P + (PHASE * EP_SIZE + rank), call_P, mask=is_peer_P, sem="release", scope="sys")
    if WAITS:
        mine_P = flags + PHASE * EP_SIZE + peer_P
        # After a fault there is nothing to wait for: a step's remaining layers must not sit out a deadline each.
        if _must_wait(mine_P, is_peer_P, want) & (not has_faulted):
            begin = clock_ns()
            must_wait = deadline_ns > 0
            while must_wait:
                must_wait = _must_wait(mine_P, is_peer_P, want) & (clock_ns() - begin < deadline_ns)
        have_P = _read_flags(mine_P, is_peer_P, want)
        is_missing_P = have_P < want
        if tl.max(is_missing_P.to(tl.int32), axis=0) != 0:
            # A rank that says it has stopped explains more than one that is late because of it.
            any_stopped = tl.max((have_P == _FAULTED).to(tl.int32), axis=0) != 0
            is_named_P = tl.where(any_stopped, have_P == _FAULTED, is_missing_P)
            named = tl.min(tl.where(is_named_P, peer_P, BLOCK_P), axis=0)
            have = tl.sum(tl.where(peer_P == named, have_P, 0), axis=0)
            code = tl.where(any_stopped, _FAULT_PEER, _FAULT_DEADLINE)
            record_fault(fault, code, rank, _KERNEL_HANDSHAKE, PHASE, named, have, want)
        tl.store(calls + PHASE, want)


@triton.jit
def _read_flags(flag_P, is_peer_P, want):
    have_P = tl.atomic_add(flag_P, 0, mask=is_peer_P, sem="acquire", scope="sys")
    return tl.where(is_peer_P, have_P, want)


@triton.jit
def _must_wait(flag_P, is_peer_P, want):
    """Whether a rank has not reached call ``want`` and none has stopped."""
    have_P = _read_flags(flag_P, is_peer_P, want)
    return (tl.min(have_P, axis=0) < want) & (tl.min(have_P, axis=0) != _FAULTED)


@triton.jit
def reduce_kernel(
    slots_PTD,
    ids_TK,
    out_TD,
    max_tokens,
    EP_SIZE: tl.constexpr,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token to a program."""
    token = tl.program_id(0).to(tl.int64)
    route_K = tl.arange(0, BLOCK_K)
    column_D = tl.arange(0, BLOCK_D)
    expert_K = tl.load(ids_TK + token * TOP_K + route_K, mask=route_K < TOP_K, other=-1)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for first_rank in range(0, EP_SIZE, 8):
        for i in tl.static_range(8):  # unrolled: eight loads in flight before the first addition
            rank = first_rank + i
            is_local_K = (expert_K >= rank * NUM_LOCAL_EXPERTS) & (expert_K < (rank + 1) * NUM_LOCAL_EXPERTS)
            has_sent = (tl.max(is_local_K.to(tl.int32), axis=0) != 0) & (rank < EP_SIZE)
            row = slots_PTD + (tl.cast(rank, tl.int64) * max_tokens + token) * DIM
            sum_D += tl.load(row + column_D, mask=(column_D < DIM) & has_sent, other=0.0).to(tl.float32)
    tl.store(out_TD + token * DIM + column_D, sum_D.to(out_TD.dtype.element_ty), mask=column_D < DIM)


@triton.jit(do_not_specialize=["num_tokens"])
def collect_scores_kernel(
    score_slots_PTK,
    ids_TK,
    dscores_TK,
    num_tokens,
    max_tokens,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    route_K = tl.arange(0, BLOCK_K)
    is_route_TK = (token_T < num_tokens)[:, None] & (route_K < TOP_K)[None, :]
    entry_TK = token_T[:, None] * TOP_K + route_K[None, :]
    expert_TK = tl.load(ids_TK + entry_TK, mask=is_route_TK, other=-1).to(tl.int32)
    rank_TK = tl.where(is_route_TK, expert_TK // NUM_LOCAL_EXPERTS, -1)
    # A rank sends a token's routes to it in their order: this one has as many before it as earlier routes go there.
    is_earlier_KTK = (tl.trans(rank_TK)[:, :, None] == rank_TK[None, :, :]) & (
        route_K[:, None, None] < route_K[None, None, :]
    )
    place_TK = tl.sum(is_earlier_KTK.to(tl.int32), axis=0)
    slot_TK = (rank_TK.to(tl.int64) * max_tokens + token_T[:, None]) * TOP_K + place_TK
    tl.store(dscores_TK + entry_TK, tl.load(score_slots_PTK + slot_TK, mask=is_route_TK, other=0.0), mask=is_route_TK)
