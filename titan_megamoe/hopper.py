"""The backends on kernels: the layer's forward and backward on the fused kernels, those for Hopper or the portable ones.

    publish -> handshake -> plan -> pull_gemm -> gemm_push -> handshake -> reduce_slots

    publish_rows -> handshake -> pull_gemm_backward -> gemm_push_backward -> signal -> weight_gradients -> wait
                 -> reduce_slots, collect_score_slots

With one rank the handshakes do nothing and ``gemm_push`` writes the output. ``hopper_stages.py`` says what a stage is in
which precision.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .quantize import BLOCK
from .reference import Gradients, Link
from .weight_cache import NO_CACHE

_REHEARSED_TOKENS = 128
"""Of a rehearsal: a tile of rows."""

_max_tokens: dict[tuple, int] = {}
"""Tokens that the workspace of a (group, layer shape) was made for."""

_TOKEN_STEP = 1024
"""With one rank, layers with up to so many tokens more share a workspace, which is then a few MiB."""


@functools.cache
def missing_on_this_machine() -> str | None:
    """Why the kernels for Hopper cannot run here, and what to do; None if they can. For other GPUs see ``backends.py``."""
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


def unsupported_layer(dtype: torch.dtype, dim: int, hidden_dim: int, precision: str) -> str | None:
    """Why the kernels cannot compute a layer, and what to do; None if they can."""
    if dtype != torch.bfloat16:
        return f"it takes torch.bfloat16, and x_TD is {dtype}. Convert, or use backend = 'reference'."
    divisor = 64 if precision == "bf16" else BLOCK
    for name, size in (("D", dim), ("F", hidden_dim)):
        if size % divisor:
            return (
                f"with precision = {precision!r} it needs multiples of {divisor}, and {name} = {size}. Pad the model's, or "
                "use backend = 'reference'."
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What the first half of the forward leaves: to the second half, and (all but ``h``) to backward. Flat memory, of which
    ``plan_tables`` says what is where."""

    plan: torch.Tensor
    """uint8: a ``KernelPlan``."""
    kept: torch.Tensor
    """uint8: ``KeptRows``; empty under ``saved = "inputs"``."""
    rows_R0: torch.Tensor  # noqa: N815
    """``[R, 0]``: says how many rows there are."""
    h: torch.Tensor
    """uint8: ``HiddenRows``."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a layer computes in: ``precision`` and ``wgrad`` of :func:`titan_megamoe.mega_moe`, the key of its ``WeightCache``, and
    whose kernels (``backends.KERNEL_BACKENDS``)."""

    precision: str = "bf16"
    wgrad: str = "bf16"
    cache_key: int = NO_CACHE
    kernels: str = "hopper"


def rehearse(
    ids_dtype: torch.dtype,
    scores_dtype: torch.dtype,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    workspace,
    keep_activations: bool,
    numerics: Numerics,
    link: Link,
) -> None:
    """Compile all that a layer runs, forward and backward, before it first waits for its peers: collective, and done once for
    each combination of the options.

    Otherwise a rank that compiles between two waits holds up the others' GPUs, for minutes where nothing is cached. What is
    compiled follows from what is launched, so a forward and backward of a few zeros are run, on this rank alone
    (``SymmetricWorkspace.rehearsal``), and then the host waits for all ranks. With one rank there is nobody to hold up.
    """
    if link.size == 1 or torch.cuda.is_current_stream_capturing():
        return
    key = (numerics.kernels, numerics.precision, numerics.wgrad, keep_activations, ids_dtype, scores_dtype)
    if key in workspace.rehearsed:
        return
    from .kernels.plan_tables import fault_error

    shape, alone, device = workspace.shape, workspace.rehearsal(), w1_EFD.device
    num_tokens = min(_REHEARSED_TOKENS, shape.max_tokens)
    x_TD = w1_EFD.new_zeros(num_tokens, shape.dim)
    ids = torch.arange(num_tokens * shape.top_k, device=device, dtype=ids_dtype) % shape.num_experts
    ids[0] = alone.rank * shape.num_local_experts  # without a row here, nothing would be launched
    ids_TK = ids.view(num_tokens, shape.top_k)
    scores_TK = torch.zeros(ids_TK.shape, device=device, dtype=scores_dtype)
    with_workspace = dict(workspace=alone, numerics=numerics)
    dispatched = dispatch(x_TD, ids_TK, scores_TK, w1_EFD, w3_EFD, keep_activations=keep_activations, **with_workspace)
    out_TD = combine(dispatched.plan, dispatched.rows_R0, dispatched.h, ids_TK, w2_EDF, **with_workspace)
    backward(
        out_TD,
        x_TD,
        ids_TK,
        scores_TK,
        w1_EFD,
        w2_EDF,
        w3_EFD,
        plan=dispatched.plan,
        kept=dispatched.kept,
        rows_R0=dispatched.rows_R0,
        kept_activations=keep_activations,
        **with_workspace,
    )
    error = fault_error(alone.local.fault.tolist(), shape)
    if error is not None:
        raise error
    dist.barrier(link.group)
    workspace.rehearsed.add(key)


def dispatch(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    workspace,
    keep_activations: bool,
    numerics: Numerics,
) -> Dispatched:
    """The first half of the forward: plan, dispatch, gate/up and SwiGLU.

    Arguments as in :func:`titan_megamoe.mega_moe`; weights contiguous. ``workspace``: the group's ``SymmetricWorkspace`` of
    this layer's shape. With several ranks and exact sizing, the host waits once, to read how many rows were routed here.
    Otherwise it does not, and what was wrong (a bad id, an overflow) is raised by a later call or by
    ``titan_megamoe.check_step``.

    It may go without its second half only where its backward follows (a recomputation): the next call on the workspace
    overwrites what peers pull from.
    """
    from .kernels import combine
    from .kernels.plan import build_kernel_plan, read_sizes
    from .kernels.plan_tables import BLOCK_M, HiddenRows, KernelPlan, KeptRows, layout_of, PHASE_PUBLISHED

    stages, shape = _stages(workspace, numerics), workspace.shape
    workspace.raise_if_late()
    plan_storage = _allocate(layout_of(KernelPlan, shape).num_bytes, "the routing plan", workspace)
    with torch.profiler.record_function("mega_moe: plan"):
        read_in_place = stages.publish(x_TD, topk_ids_TK, topk_scores_TK)
        combine.handshake(workspace, PHASE_PUBLISHED)
        plan, counters = build_kernel_plan(workspace, plan_storage)
        if shape.capacity is not None:
            num_rows = shape.pool_rows
        elif shape.ep_size == 1:  # all routes are this rank's; only how they are padded depends on the routing
            num_rows = BLOCK_M * shape.tiles_for(topk_ids_TK.numel())
        else:
            num_rows = BLOCK_M * read_sizes(plan, workspace).num_tiles
    row_shape = stages.row_shape(num_rows, keeps_gate_up=keep_activations)
    kept, hidden = layout_of(KeptRows, row_shape), layout_of(HiddenRows, row_shape)
    kept_storage = _allocate(kept.num_bytes, "the rows received", workspace, num_rows)
    h_storage = _allocate(hidden.num_bytes, "their hidden activations", workspace, num_rows)
    h: HiddenRows = hidden.slice(h_storage)
    stages.pull_gemm(plan, counters, w1_EFD, w3_EFD, kept.slice(kept_storage), h)
    del read_in_place  # from here on, the memory may be used again
    return Dispatched(
        plan=plan_storage,
        kept=kept_storage if keep_activations else kept_storage.new_empty(0),
        rows_R0=x_TD.new_empty(num_rows, 0),
        h=h_storage,
    )


def combine(
    plan: torch.Tensor,
    rows_R0: torch.Tensor,  # noqa: N803
    h: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    workspace,
    numerics: Numerics,
) -> torch.Tensor:
    """``[T, D]``: the second half of the forward: down projection and combine. ``plan``, ``rows_R0``, ``h``: of what
    :func:`dispatch` returned; the others as its arguments."""
    from .kernels import combine as kernels
    from .kernels.plan_tables import HiddenRows, KernelPlan, layout_of, PHASE_ALL_SENT, ResultRows

    stages, shape = _stages(workspace, numerics), workspace.shape
    num_rows = rows_R0.shape[0]
    row_shape = stages.row_shape(num_rows)
    results = layout_of(ResultRows, row_shape)
    y_storage = _allocate(results.num_bytes, "the rows' results", workspace, num_rows)
    out_TD = w2_EDF.new_empty(topk_ids_TK.shape[0], shape.dim)
    with torch.profiler.record_function("mega_moe: gemm_push"):
        stages.gemm_push(
            layout_of(KernelPlan, shape).slice(plan),
            _zeroed_counters(workspace),
            layout_of(HiddenRows, row_shape).slice(h),
            w2_EDF,
            results.slice(y_storage).y_RD,
            out_TD,
        )
        if not stages.is_alone:
            kernels.handshake(workspace, PHASE_ALL_SENT)
            kernels.reduce_slots(workspace, topk_ids_TK.contiguous(), out_TD)
    if stages.is_alone or shape.capacity is not None:
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
    plan: torch.Tensor,
    kept: torch.Tensor,
    rows_R0: torch.Tensor,  # noqa: N803
    kept_activations: bool,
    workspace,
    numerics: Numerics,
) -> Gradients:
    """The layer's backward, on the forward's plan. What the forward did not keep is pulled and computed again.

    ``plan``, ``kept``, ``rows_R0``: of what :func:`dispatch` returned, with ``kept_activations`` as its
    ``keep_activations``: equal on all ranks, so not to be read off sizes, which are zero for a rank without rows. Does not
    wait for the host.

    The weight gradients run between this rank's last row and the wait for the other ranks', which they hide. (On a stream
    of their own beside ``gemm_push_backward`` they were no faster: docs/results/h200_kernels.json, "two streams".)
    """
    from .kernels import combine
    from .kernels.plan_tables import BackwardRows, KernelPlan, KeptRows, layout_of, PHASE_ALL_SENT, PHASE_PUBLISHED

    stages, shape, device = _stages(workspace, numerics), workspace.shape, x_TD.device
    plan: KernelPlan = layout_of(KernelPlan, shape).slice(plan)
    num_rows = rows_R0.shape[0]
    row_shape = stages.row_shape(num_rows)
    kept_layout, rows_layout = layout_of(KeptRows, row_shape), layout_of(BackwardRows, row_shape)
    if not kept_activations:
        kept = _allocate(kept_layout.num_bytes, "the rows received again", workspace, num_rows)
    kept: KeptRows = kept_layout.slice(kept)
    rows_storage = _allocate(rows_layout.num_bytes, "the rows' gradients", workspace, num_rows)
    rows: BackwardRows = rows_layout.slice(rows_storage)
    dout_TD, x_TD, topk_ids_TK = dout_TD.contiguous(), x_TD.contiguous(), topk_ids_TK.contiguous()
    gradients = Gradients(
        x_TD=torch.empty_like(x_TD),
        topk_scores_TK=torch.empty(topk_scores_TK.shape, dtype=torch.float32, device=device),
        w1_EFD=torch.empty_like(w1_EFD),
        w2_EDF=torch.empty_like(w2_EDF),
        w3_EFD=torch.empty_like(w3_EFD),
    )

    with torch.profiler.record_function("mega_moe: publish gradients"):
        read_in_place = stages.publish_rows(dout_TD, None if kept_activations else x_TD)
        combine.handshake(workspace, PHASE_PUBLISHED)
    if not kept_activations:
        stages.pull_gemm_again(plan, _zeroed_counters(workspace), w1_EFD, w3_EFD, kept, rows)
    counters = _zeroed_counters(workspace)
    with torch.profiler.record_function("mega_moe: pull_gemm_backward"):
        stages.pull_gemm_backward(plan, counters, w2_EDF, kept, rows)
    del read_in_place  # from here on, the memory may be used again
    with torch.profiler.record_function("mega_moe: gemm_push_backward"):
        stages.gemm_push_backward(plan, counters, w1_EFD, w3_EFD, rows, gradients)
        combine.signal(workspace, PHASE_ALL_SENT)
    with torch.profiler.record_function("mega_moe: weight_gradients"):
        stages.weight_gradients(plan, counters, kept, rows, gradients)
    if not stages.is_alone:
        with torch.profiler.record_function("mega_moe: collect gradients"):
            combine.wait(workspace, PHASE_ALL_SENT)
            combine.reduce_slots(workspace, topk_ids_TK, gradients.x_TD)
            combine.collect_score_slots(workspace, topk_ids_TK, gradients.topk_scores_TK)
    workspace.check_later()
    return replace(gradients, topk_scores_TK=gradients.topk_scores_TK.to(topk_scores_TK.dtype))


def _allocate(num_bytes: int, what: str, workspace, num_rows: int | None = None) -> torch.Tensor:
    """uint8 memory on the workspace's device, for ``num_rows`` padded rows if it is rows.

    Raises:
        torch.OutOfMemoryError: says how much was wanted for what, and which options need less. Peers are told.
    """
    from .symmetric import in_units

    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=workspace.device)
    except torch.OutOfMemoryError as error:
        workspace.stop()
        shape = workspace.shape
        even = shape.max_tokens * shape.top_k
        rows = "" if num_rows is None else f", {num_rows} rows where an even routing gives {even}"
        raise torch.OutOfMemoryError(
            f"mega_moe: rank {workspace.rank}: no memory for {what}: {in_units(num_bytes)} ({num_bytes} bytes{rows}). "
            "activation_checkpoint.mode = 'full' and model.moe.dispatch.saved = 'inputs' keep less, a smaller "
            "training.local_batch_size and a larger parallelism.expert_parallel_degree need less; 'titan-megamoe plan' adds it "
            f"up. {error}"
        ) from error


def _stages(workspace, numerics: Numerics):
    from .hopper_stages import Stages  # which needs Triton

    return Stages(workspace=workspace, numerics=numerics)


def _zeroed_counters(workspace):
    from .kernels.plan import allocate_counters

    counters, storage = allocate_counters(workspace)
    storage.zero_()
    return counters


def workspace_for(topk_ids_TK: torch.Tensor, w2_EDF: torch.Tensor, *, link: Link, capacity: float | None):
    """The shared workspace of this layer's shape. With several ranks it is made by the first call, for the most tokens any
    rank then had.

    Raises:
        ValueError: this call has more tokens than that, or the ranks cannot reach each other's memory.
    """
    from .kernels.plan_tables import LayerShape
    from .symmetric import get_workspace

    num_experts, dim, hidden_dim = w2_EDF.shape
    device = w2_EDF.device
    num_tokens, top_k = topk_ids_TK.shape
    if link.group is None:
        # The static pool is sized by the tokens there are.
        step = 1 if capacity is not None else _TOKEN_STEP
        max_tokens = max(1, -(-num_tokens // step)) * step
    else:
        key = (link.group_name, device, dim, hidden_dim, num_experts, top_k, capacity)
        if key not in _max_tokens:
            most = torch.tensor([max(num_tokens, 1)], device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=link.group)
            _max_tokens[key] = int(most)
        max_tokens = _max_tokens[key]
        if num_tokens > max_tokens:
            raise ValueError(
                f"mega_moe: x_TD has {num_tokens} tokens, but the group's shared memory was made in the first call of this "
                f"layer shape, for at most {max_tokens} per rank. Make the first call with the largest batch."
            )
    shape = LayerShape(
        ep_size=link.size,
        max_tokens=max_tokens,
        dim=dim,
        hidden_dim=hidden_dim,
        num_local_experts=num_experts,
        top_k=top_k,
        capacity=capacity,
    )
    return get_workspace(link.group, shape, device)
