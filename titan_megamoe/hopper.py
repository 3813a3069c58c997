"""The Hopper backend: the layer's forward on the fused kernels.

    publish -> handshake -> plan -> pull_gemm -> gemm_push -> handshake -> reduce_slots

With one rank the handshakes do nothing and ``gemm_push`` writes the output. Backward is the reference's, on the same
routing, until it has kernels of its own: it pulls the rows again and computes gate and up again.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.distributed as dist

from . import reference
from .reference import Gradients, Link, Saved

_max_tokens: dict[tuple, int] = {}
"""Tokens that the workspace of a (group, layer shape) was made for."""


@functools.cache
def missing_on_this_machine() -> str | None:
    """Why the kernels cannot run here, and what to do; None if they can."""
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU of the Hopper generation, and torch sees no GPU. Use backend = 'reference'."
    if torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0):
        return f"it needs a Hopper GPU (H100, H200), and this is {torch.cuda.get_device_name()}. Use backend = 'reference'."
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton 3.6 to 3.8, which is not installed: pip install 'triton>=3.6,<3.9'."
    try:
        import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401
    except ImportError:
        import triton

        return f"it needs Triton 3.6 to 3.8 with Gluon, and {triton.__version__} is installed."
    return None


def has_run() -> bool:
    """Whether any layer has been computed on the kernels."""
    return bool(_max_tokens)


def unsupported_layer(dtype: torch.dtype, dim: int, hidden_dim: int) -> str | None:
    """Why the kernels cannot compute a layer, and what to do; None if they can."""
    if dtype != torch.bfloat16:
        return f"it computes in torch.bfloat16, and x_TD is {dtype}. Convert, or use backend = 'reference'."
    for name, size in (("D", dim), ("F", hidden_dim)):
        if size % 64:
            return f"it needs multiples of 64, and {name} = {size}. Pad the model's, or use backend = 'reference'."
    return None


def forward(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    workspace,
) -> torch.Tensor:
    """``[T, D]``, the layer's output. Arguments as in :func:`titan_megamoe.mega_moe`; weights contiguous.

    ``workspace``: the group's ``SymmetricWorkspace`` of this layer's shape. With several ranks and exact sizing, the host
    waits once, to read how many rows were routed here. Otherwise it does not, and what was wrong (a bad id, an overflow) is
    raised by a later call or by ``titan_megamoe.check_step``.
    """
    from .kernels import combine
    from .kernels.gemm_push import gemm_push
    from .kernels.plan import build_kernel_plan, read_sizes
    from .kernels.plan_tables import BLOCK_M, Layout, PHASE_ALL_SENT, PHASE_PUBLISHED, Rows, RowShape
    from .kernels.pull_gemm import pull_gemm

    shape, addresses, fault = workspace.shape, workspace.addresses, workspace.local.fault
    alone = shape.ep_size == 1
    x_TD = x_TD.contiguous()
    workspace.raise_if_late()
    with torch.profiler.record_function("mega_moe: plan"):
        combine.publish(workspace, x_TD, topk_ids_TK, topk_scores_TK)
        combine.handshake(workspace, PHASE_PUBLISHED)
        plan, counters = build_kernel_plan(workspace)
        if shape.capacity is not None:
            num_rows = shape.pool_rows
        elif alone:  # all routes are this rank's; only how they are padded depends on the routing
            num_rows = BLOCK_M * shape.tiles_for(topk_ids_TK.numel())
        else:
            num_rows = BLOCK_M * read_sizes(plan, workspace).num_tiles
    row_shape = RowShape(layer=shape, num_rows=num_rows, keeps_gate_up=False)
    rows: Rows = Layout(Rows, row_shape).allocate(x_TD.device)
    out_TD = torch.empty_like(x_TD)
    with torch.profiler.record_function("mega_moe: pull_gemm"):
        pull_gemm(
            plan,
            counters,
            x_addresses_P=addresses.x_P,
            w1_EFD=w1_EFD,
            w3_EFD=w3_EFD,
            pool_RD=rows.pool_RD,
            h_RF=rows.h_RF,
            fault=fault,
            rank=workspace.rank,
        )
    with torch.profiler.record_function("mega_moe: gemm_push"):
        gemm_push(
            plan,
            counters,
            h_RF=rows.h_RF,
            w2_EDF=w2_EDF,
            y_RD=rows.y_RD,
            out_TD=out_TD if alone else None,
            slots_addresses_P=None if alone else addresses.slots_P,
            max_tokens=shape.max_tokens,
            fault=fault,
            rank=workspace.rank,
        )
        if not alone:
            combine.handshake(workspace, PHASE_ALL_SENT)
            combine.reduce_slots(workspace, out_TD)
    if alone or shape.capacity is not None:
        workspace.check_later()
    return out_TD


def backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    link: Link,
) -> Gradients:
    """The reference's backward on the forward's routing, which the ids of the forward determine."""
    plan, row_scores_R = reference.route(topk_ids_TK, topk_scores_TK, num_local_experts=w1_EFD.shape[0], link=link)
    nothing_RD, nothing_RF = x_TD.new_empty(0, x_TD.shape[1]), x_TD.new_empty(0, w1_EFD.shape[1])
    return reference.backward(
        dout_TD,
        x_TD,
        topk_scores_TK,
        w1_EFD,
        w2_EDF,
        w3_EFD,
        plan=plan,
        saved=Saved(row_scores_R=row_scores_R, x_rows_RD=nothing_RD, gate_RF=nothing_RF, up_RF=nothing_RF),
        link=link,
        kept_activations=False,
    )


def workspace_for(
    x_TD: torch.Tensor, topk_ids_TK: torch.Tensor, w1_EFD: torch.Tensor, *, link: Link, capacity: float | None
):
    """The shared workspace of this layer's shape, made by its first call, for the most tokens any rank then had.

    Raises:
        ValueError: this call has more tokens than that, or the ranks cannot reach each other's memory.
    """
    from .kernels.plan_tables import LayerShape
    from .symmetric import get_workspace

    num_experts, hidden_dim, dim = w1_EFD.shape
    num_tokens, top_k = topk_ids_TK.shape
    key = (link.group_name, x_TD.device, dim, hidden_dim, num_experts, top_k, capacity)
    if key not in _max_tokens:
        most = torch.tensor([max(num_tokens, 1)], device=x_TD.device)
        if link.group is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=link.group)
        _max_tokens[key] = int(most)
    if num_tokens > _max_tokens[key]:
        raise ValueError(
            f"mega_moe: x_TD has {num_tokens} tokens, but the group's shared memory was made in the first call of this layer "
            f"shape, for at most {_max_tokens[key]} per rank. Make the first call with the largest batch."
        )
    shape = LayerShape(
        ep_size=link.size,
        max_tokens=_max_tokens[key],
        dim=dim,
        hidden_dim=hidden_dim,
        num_local_experts=num_experts,
        top_k=top_k,
        capacity=capacity,
    )
    return get_workspace(link.group, shape, x_TD.device)
