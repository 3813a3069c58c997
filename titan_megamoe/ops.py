"""``mega_moe``: the routed experts of one MoE layer as a single PyTorch operator with its own backward.

Each backend is an operator registered with ``torch.library``, so autograd, ``torch.compile`` (``fullgraph=True``) and
selective activation checkpointing see one opaque node. A forward returns the layer's output followed by what backward
needs (the routing plan first of all), which autograd saves as it saves any output: a policy that saves the operator saves
the plan with it and never routes twice.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import logging
import math
from dataclasses import fields

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import hopper, reference
from .backends import backend_for, KERNEL_BACKENDS, missing_for_precision, unsupported_layer
from .plan import RoutingPlan
from .quantize import FORMATS
from .reference import Link, Saved
from .weight_cache import NO_CACHE, WeightCache

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", *KERNEL_BACKENDS)
SAVED = ("activations", "inputs")
PRECISIONS = {
    "bf16": "no quantisation: the inputs' own dtype, fp32 accumulation",
    "fp8": "blockwise FP8 forward and backward (Hopper)",
    "fp8_bwd": "BF16 forward, blockwise FP8 backward (Hopper)",
    "mxfp8": "MXFP8 forward and backward (B200, B300, MI350X, MI355X)",
}
WGRADS = ("bf16", "fp8", "mxfp8")
MAX_TOP_K = 32

_PLAN_FIELDS = len(fields(RoutingPlan))
_SAVED_FIELDS = len(fields(Saved))
_announced: set[str] = set()


def mega_moe(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    precision: str = "bf16",
    wgrad: str = "bf16",
    saved: str = "activations",
    backend: str = "auto",
    allow_emulation: bool = False,
    capacity: float | None = None,
    is_recomputed: bool = False,
    weight_cache: WeightCache | None = None,
) -> torch.Tensor:
    r"""Dispatch, gate/up, SwiGLU, down and combine of a mixture-of-experts layer, with expert parallelism over ``group``.

    .. math:: out_t = \sum_k s_{tk} \, W_2^{(e)} \big(\mathrm{silu}(W_1^{(e)} x_t) \odot W_3^{(e)} x_t\big), \quad e = id_{tk}

    Differentiable in ``x_TD``, ``topk_scores_TK`` and the weights. Every rank of ``group`` must call it, in the same order.

    Args:
        x_TD: ``[T, D]`` this rank's tokens, floating point. T may be 0 and may differ between ranks.
        topk_ids_TK: ``[T, K]`` int32 or int64, the experts of each token, in ``[0, P * E)`` with P the size of ``group``.
        topk_scores_TK: ``[T, K]`` fp32 (or the dtype of ``x_TD``), the weight of each route.
        w1_EFD: ``[E, F, D]`` gate projections of the experts *on this rank*: rank ``p`` holds experts ``p*E`` to ``p*E + E-1``.
        w2_EDF: ``[E, D, F]`` down projections.
        w3_EFD: ``[E, F, D]`` up projections. Weights have the dtype of ``x_TD``.
        group: the expert-parallel group; None if this rank holds all experts.
        precision: ``"bf16"`` computes in the inputs' dtype without quantisation; see :data:`PRECISIONS` and docs/precision.md.
        wgrad: what weight gradients are computed in: ``"bf16"``, or with precision ``"fp8"`` or ``"fp8_bwd"`` ``"fp8"``, or with
            ``"mxfp8"`` ``"mxfp8"``.
        saved: ``"activations"`` keeps the pulled rows and gate/up for backward; ``"inputs"`` pulls and computes them again.
        backend: ``"reference"`` (plain PyTorch, any device; emulates FP8 and MXFP8), ``"hopper"`` (fused kernels on H100 and H200),
            ``"triton"`` (portable fused kernels, bf16 on NVIDIA GPUs since A100 and on AMD's MI300 and MI350 series, MXFP8 on B200, B300
            and the MI350 series, emulated on H100 and H200), or
            ``"auto"``, which picks the best one for these inputs and logs it once.
        allow_emulation: whether ``"auto"`` and ``"triton"`` may emulate ``precision``, slowly, where nothing computes it natively.
        capacity: of the backends on kernels: rows that this rank has room for, as a multiple of ``T * K``, in memory of static
            size; more rows are an error (``CapacityExceeded``) that :func:`titan_megamoe.check_step` raises. None: exactly
            the rows that were routed here, for which the host waits once per call.
        is_recomputed: whether activation checkpointing will run all of it again. The backends on kernels then do without the
            down projection and the combine the second time, if the checkpoint stops early and nothing behind is saved.
        weight_cache: of backend ``"hopper"`` in FP8: keeps this layer's weights in FP8 until an optimizer steps or a state
            dict is loaded (see ``weight_cache.py``). None: they are quantised in every forward and backward.

    Returns:
        ``[T, D]``, dtype of ``x_TD``.

    Raises:
        TypeError: a tensor has the wrong dtype or is a DTensor.
        ValueError: a shape, device, id, score or option is not as above.
    """
    _check_arguments(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD)
    check_precision(precision, wgrad)
    if precision != "bf16" and x_TD.dtype == torch.float64:
        raise TypeError(
            f"mega_moe: precision = {precision!r} takes bfloat16 or float32, but x_TD is float64. Convert it."
        )
    _check_choice("saved", saved, SAVED)
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"mega_moe: capacity = {capacity}. Pass a positive multiple of T * K, such as 1.5, or None.")
    layer = (x_TD.device, x_TD.dtype, x_TD.shape[1], w1_EFD.shape[1])
    backend = select_backend(backend, *layer, precision, allow_emulation=allow_emulation)
    tensors = (x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD)
    group_name = group.group_name if group else ""
    cache_key = weight_cache.key if weight_cache is not None else None
    if backend == "reference":
        out_TD, *_ = reference_forward(*tensors, group_name, saved, precision, wgrad)
        return out_TD
    options = (group_name, capacity or 0.0, precision, wgrad, backend)
    if is_recomputed:
        carrier_TD, plan, _, rows_R0, h = hopper_dispatch(*tensors, cache_key, saved, *options)
        return hopper_combine(carrier_TD, topk_ids_TK, w2_EDF, plan, rows_R0, h, cache_key, *options)
    out_TD, *_ = hopper_forward(*tensors, cache_key, saved, *options)
    return out_TD


def select_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    hidden_dim: int,
    precision: str,
    *,
    allow_emulation: bool = False,
) -> str:
    """Resolve ``"auto"`` for a layer, and log what was picked and why, once per process.

    Raises:
        ValueError: an unknown backend, or none that was asked for can compute this layer in this precision on this device,
            with the reason.
    """
    _check_choice("backend", backend, BACKENDS)
    if torch.compiler.is_compiling() and backend != "auto":
        return backend  # resolved, checked and logged when the module was built, which a traced graph cannot do
    if backend == "reference":
        chosen, why = backend, "as asked for"
    else:
        candidates = KERNEL_BACKENDS if backend == "auto" else (backend,)
        layer = (device, dtype, dim, hidden_dim, precision)
        missing = {name: _missing_for(name, *layer, allow_emulation) for name in candidates}
        able = [name for name in candidates if missing[name] is None]
        if not able and backend != "auto":
            raise ValueError(f"mega_moe: backend = {backend!r} cannot run this layer: {missing[backend]}")
        if not able and precision != "bf16" and not allow_emulation:
            raise ValueError(
                f"mega_moe: precision = {precision!r} ({PRECISIONS[precision]}) cannot run here: "
                f"{missing[backend_for(precision)]} Use precision = 'bf16', or allow_emulation = true or backend = 'reference', "
                "which emulate it slowly."
            )
        reasons = "; ".join(f"{name!r} cannot: {reason}" for name, reason in missing.items())
        if precision != "bf16":
            reasons = f"which EMULATES precision = {precision!r}, slowly, as allow_emulation = true allows: {reasons}"
        chosen, why = (able[0], _why_kernels(able[0], precision)) if able else ("reference", reasons)
    if not torch.compiler.is_compiling() and chosen not in _announced:
        _announced.add(chosen)
        logger.info(f"mega_moe: backend '{chosen}' ({why})")
    return chosen


def _why_kernels(backend: str, precision: str) -> str:
    if missing_for_precision(backend, precision, allow_emulation=False) is None:
        return "the fastest here"
    return f"which EMULATES precision = {precision!r}, slowly, as allow_emulation = true allows"


def _missing_for(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    hidden_dim: int,
    precision: str,
    allow_emulation: bool,
) -> str | None:
    """Why a backend on kernels cannot compute this layer here; None if it can."""
    if device.type == "cpu":
        return "x_TD is on the CPU."
    missing = missing_for_precision(backend, precision, allow_emulation=allow_emulation)
    return missing or unsupported_layer(backend, dtype, dim, hidden_dim, precision)


def check_step() -> None:
    """Wait for the device, and raise what a backend on kernels could not raise where it happened. Call it at a step's end.

    A call raises by itself only what the host learns in time: with several ranks and exact sizing everything, otherwise
    what earlier calls have reported. Until then the results are undefined.

    Raises:
        CapacityExceeded: names the capacity that would have sufficed.
        ValueError: a rank passed an id that is no expert's, or a score that is not finite.
        KernelFault: a kernel waited past its deadline; says which, where and for what.
    """
    from .symmetric import check_workspaces

    check_workspaces()


def check_precision(precision: str, wgrad: str) -> None:
    """Raise ValueError for an unknown precision, or weight gradients in what does not go with it."""
    _check_choice("precision", precision, tuple(PRECISIONS))
    _check_choice("wgrad", wgrad, WGRADS)
    possible = FORMATS[precision].wgrads
    if wgrad not in possible:
        raise ValueError(
            f"mega_moe: wgrad = {wgrad!r} does not go with precision = {precision!r}. Use one of: {', '.join(possible)}."
        )


# ---- the operators


@torch.library.custom_op("titan_megamoe::reference_forward", mutates_args=())
def reference_forward(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    group_name: str,
    saved: str,
    precision: str,
    wgrad: str,
) -> list[torch.Tensor]:
    """``[out_TD, *RoutingPlan's tensors, *Saved's tensors]``; see :func:`mega_moe`. ``group_name`` "" means no group."""
    stages = reference.forward(
        x_TD,
        topk_ids_TK,
        topk_scores_TK,
        w1_EFD,
        w2_EDF,
        w3_EFD,
        link=Link(group_name),
        keep_activations=saved == "activations",
        precision=precision,
    )
    return [stages.out_TD, *_tensors(stages.plan), *_tensors(stages.saved)]


@reference_forward.register_fake
def _(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, group_name, saved, precision, wgrad):
    new_size = torch.library.get_ctx().new_dynamic_size
    num_rows, num_unique, num_sent = new_size(), new_size(), new_size()
    num_kept = num_rows if saved == "activations" else 0
    num_routes, hidden_dim = topk_ids_TK.shape[1], w1_EFD.shape[1]

    def index(*shape: int) -> torch.Tensor:
        return x_TD.new_empty(shape, dtype=torch.int64)

    plan = RoutingPlan(
        row_offsets_e1=index(w1_EFD.shape[0] + 1),
        row_token_R=index(num_rows),
        row_slot_R=index(num_rows),
        row_of_slot_UK=index(num_unique, num_routes),
        pulled_U=index(num_unique),
        sent_S=index(num_sent),
        counts_2P=index(2, Link(group_name).size),
    )
    kept = Saved(
        row_scores_R=topk_scores_TK.new_empty(num_rows),
        x_rows_RD=x_TD.new_empty(
            num_kept, x_TD.shape[1], dtype=torch.float32 if FORMATS[precision].forward else x_TD.dtype
        ),
        gate_RF=x_TD.new_empty(num_kept, hidden_dim),
        up_RF=x_TD.new_empty(num_kept, hidden_dim),
    )
    return [torch.empty_like(x_TD), *_tensors(plan), *_tensors(kept)]


@torch.library.custom_op("titan_megamoe::reference_backward", mutates_args=())
def reference_backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    plan_and_saved: list[torch.Tensor],
    group_name: str,
    saved: str,
    precision: str,
    wgrad: str,
) -> list[torch.Tensor]:
    """Gradients of ``x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD``, given all but the first output of the forward."""
    gradients = reference.backward(
        dout_TD,
        x_TD,
        topk_scores_TK,
        w1_EFD,
        w2_EDF,
        w3_EFD,
        plan=_from_tensors(RoutingPlan, plan_and_saved[:_PLAN_FIELDS]),
        saved=_from_tensors(Saved, plan_and_saved[_PLAN_FIELDS:]),
        link=Link(group_name, "backward"),
        kept_activations=saved == "activations",
        precision=precision,
        wgrad=wgrad,
    )
    return list(_tensors(gradients))


@reference_backward.register_fake
def _(dout_TD, x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, plan_and_saved, group_name, saved, precision, wgrad):
    return [torch.empty_like(t) for t in (x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD)]


def _setup_context(ctx, inputs, output):
    x_TD, _, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, *ctx.options = inputs
    _, *plan_and_saved = output
    ctx.save_for_backward(x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, *plan_and_saved)
    ctx.mark_non_differentiable(*plan_and_saved)
    ctx.set_materialize_grads(
        False
    )  # or zeros as large as what was saved would be made, to say that it has no gradient


def _backward(ctx, grads):
    if grads[0] is None:  # nobody asked for the output's gradient
        return (None,) * 10
    x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, *plan_and_saved = ctx.saved_tensors
    dx_TD, dscores_TK, dw1_EFD, dw2_EDF, dw3_EFD = reference_backward(
        grads[0].contiguous(), x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, plan_and_saved, *ctx.options
    )
    return dx_TD, None, dscores_TK, dw1_EFD, dw2_EDF, dw3_EFD, None, None, None, None


reference_forward.register_autograd(_backward, setup_context=_setup_context)


# The forward on kernels is one operator or, where it is recomputed, two: then the recomputation can stop after the first,
# which makes all that backward needs. The backward of either is the whole layer's. With two, autograd leads it there through
# `carrier_TD`, which holds nothing: the second operator returns the gradient of its output as the carrier's.
#
# In all of them, ``group_name`` "" means no group, ``capacity`` 0 exact sizing, and ``kernels`` is one of KERNEL_BACKENDS.


@torch.library.custom_op("titan_megamoe::hopper_forward", mutates_args=())
def hopper_forward(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    cache_key: torch.Tensor | None,
    saved: str,
    group_name: str,
    capacity: float,
    precision: str,
    wgrad: str,
    kernels: str,
) -> list[torch.Tensor]:
    """``[out_TD, *hopper.Dispatched's tensors without h]``; see :func:`mega_moe`."""
    inputs = (x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, cache_key)
    dispatched = _dispatch(*inputs, saved, group_name, capacity, precision, wgrad, kernels)
    plan, kept, rows_R0, h = _tensors(dispatched)
    out_TD = _combine(plan, rows_R0, h, topk_ids_TK, w2_EDF, cache_key, group_name, capacity, precision, wgrad, kernels)
    return [out_TD, plan, kept, rows_R0]


@torch.library.custom_op("titan_megamoe::hopper_dispatch", mutates_args=())
def hopper_dispatch(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    cache_key: torch.Tensor | None,
    saved: str,
    group_name: str,
    capacity: float,
    precision: str,
    wgrad: str,
    kernels: str,
) -> list[torch.Tensor]:
    """``[carrier_TD, *hopper.Dispatched's tensors]``."""
    inputs = (x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, cache_key)
    dispatched = _dispatch(*inputs, saved, group_name, capacity, precision, wgrad, kernels)
    return [_carrier(x_TD), *_tensors(dispatched)]


def _dispatch(
    x_TD,
    topk_ids_TK,
    topk_scores_TK,
    w1_EFD,
    w2_EDF,
    w3_EFD,
    cache_key,
    saved,
    group_name,
    capacity,
    precision,
    wgrad,
    kernels,
):
    link, weights = Link(group_name), [w.contiguous() for w in (w1_EFD, w2_EDF, w3_EFD)]
    options = dict(
        workspace=hopper.workspace_for(topk_ids_TK, w2_EDF, link=link, capacity=capacity or None),
        keep_activations=saved == "activations",
        numerics=_numerics(precision, wgrad, cache_key, kernels),
    )
    hopper.rehearse(topk_ids_TK.dtype, topk_scores_TK.dtype, *weights, link=link, **options)
    return hopper.dispatch(x_TD.contiguous(), topk_ids_TK, topk_scores_TK, weights[0], weights[2], **options)


def _combine(plan, rows_R0, h, topk_ids_TK, w2_EDF, cache_key, group_name, capacity, precision, wgrad, kernels):  # noqa: N803
    return hopper.combine(
        plan,
        rows_R0,
        h,
        topk_ids_TK,
        w2_EDF.contiguous(),
        workspace=_workspace(topk_ids_TK, w2_EDF, group_name, capacity),
        numerics=_numerics(precision, wgrad, cache_key, kernels),
    )


def _workspace(topk_ids_TK: torch.Tensor, w2_EDF: torch.Tensor, group_name: str, capacity: float):
    return hopper.workspace_for(topk_ids_TK, w2_EDF, link=Link(group_name), capacity=capacity or None)


def _numerics(precision: str, wgrad: str, cache_key: torch.Tensor | None, kernels: str) -> hopper.Numerics:
    return hopper.Numerics(
        precision=precision,
        wgrad=wgrad,
        cache_key=NO_CACHE if cache_key is None else cache_key.item(),
        kernels=kernels,
    )


def _carrier(x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(1, 1).expand(x_TD.shape)


def _fake_memory(x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


def _fake_saved(x_TD: torch.Tensor, saved: str) -> list[torch.Tensor]:
    """``hopper.Dispatched``'s tensors without h."""
    kept = _fake_memory(x_TD) if saved == "activations" else x_TD.new_empty(0, dtype=torch.uint8)
    return [_fake_memory(x_TD), kept, x_TD.new_empty(torch.library.get_ctx().new_dynamic_size(), 0)]


@hopper_forward.register_fake
def _(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, cache_key, saved, *options):
    return [x_TD.new_empty(x_TD.shape), *_fake_saved(x_TD, saved)]


@hopper_dispatch.register_fake
def _(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, cache_key, saved, *options):
    return [_carrier(x_TD), *_fake_saved(x_TD, saved), _fake_memory(x_TD)]


@torch.library.custom_op("titan_megamoe::hopper_combine", mutates_args=())
def hopper_combine(
    carrier_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    w2_EDF: torch.Tensor,
    plan: torch.Tensor,
    rows_R0: torch.Tensor,  # noqa: N803
    h: torch.Tensor,
    cache_key: torch.Tensor | None,
    group_name: str,
    capacity: float,
    precision: str,
    wgrad: str,
    kernels: str,
) -> torch.Tensor:
    """``out_TD`` of what :func:`hopper_dispatch` returned."""
    return _combine(plan, rows_R0, h, topk_ids_TK, w2_EDF, cache_key, group_name, capacity, precision, wgrad, kernels)


@hopper_combine.register_fake
def _(carrier_TD, topk_ids_TK, w2_EDF, plan, rows_R0, h, *options):
    return w2_EDF.new_empty(carrier_TD.shape)


@torch.library.custom_op("titan_megamoe::hopper_backward", mutates_args=())
def hopper_backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    plan: torch.Tensor,
    kept: torch.Tensor,
    rows_R0: torch.Tensor,  # noqa: N803
    cache_key: torch.Tensor | None,
    saved: str,
    group_name: str,
    capacity: float,
    precision: str,
    wgrad: str,
    kernels: str,
) -> list[torch.Tensor]:
    """Gradients of ``x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD``."""
    gradients = hopper.backward(
        dout_TD,
        x_TD,
        topk_ids_TK,
        topk_scores_TK,
        *(w.contiguous() for w in (w1_EFD, w2_EDF, w3_EFD)),
        plan=plan,
        kept=kept,
        rows_R0=rows_R0,
        kept_activations=saved == "activations",
        workspace=_workspace(topk_ids_TK, w2_EDF, group_name, capacity),
        numerics=_numerics(precision, wgrad, cache_key, kernels),
    )
    return list(_tensors(gradients))


@hopper_backward.register_fake
def _(dout_TD, x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD, plan, kept, rows_R0, *options):
    return [torch.empty_like(t) for t in (x_TD, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD)]


def _hopper_setup_context(ctx, inputs, output):
    *tensors, cache_key = inputs[:7]
    ctx.options = inputs[7:]
    _, plan, kept, rows_R0, *h = output
    ctx.save_for_backward(*tensors, plan, kept, rows_R0, cache_key)
    ctx.mark_non_differentiable(plan, kept, rows_R0, *h)
    ctx.set_materialize_grads(False)  # as above


def _hopper_backward(ctx, grads):
    none = (None,) * len(ctx.options)
    if grads[0] is None:
        return (None,) * 7 + none
    saved = ctx.saved_tensors  # once: under activation checkpointing this is what makes them
    dx_TD, dscores_TK, *dweights = hopper_backward(grads[0].contiguous(), *saved, *ctx.options)
    return dx_TD, None, dscores_TK, *dweights, None, *none


hopper_forward.register_autograd(_hopper_backward, setup_context=_hopper_setup_context)
hopper_dispatch.register_autograd(_hopper_backward, setup_context=_hopper_setup_context)


def _combine_setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.num_inputs = len(inputs)


def _combine_backward(ctx, dout_TD):
    return dout_TD, *[None] * (ctx.num_inputs - 1)


hopper_combine.register_autograd(_combine_backward, setup_context=_combine_setup_context)

FORWARD_OPS = (torch.ops.titan_megamoe.reference_forward.default, torch.ops.titan_megamoe.hopper_forward.default)
"""What selective activation checkpointing should save instead of running again."""


def _tensors(record: RoutingPlan | Saved | reference.Gradients | hopper.Dispatched) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(record, field.name) for field in fields(record))


def _from_tensors(cls: type, tensors: list[torch.Tensor]):
    return cls(**{field.name: tensor for field, tensor in zip(fields(cls), tensors, strict=True)})


# ---- argument checks: metadata only, so they cost nothing at run time and trace away under torch.compile


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"mega_moe: {name} = {value!r} is not known. Use one of: {', '.join(choices)}.")


def _check_arguments(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD) -> None:
    named = {
        "x_TD": x_TD,
        "topk_ids_TK": topk_ids_TK,
        "topk_scores_TK": topk_scores_TK,
        "w1_EFD": w1_EFD,
        "w2_EDF": w2_EDF,
        "w3_EFD": w3_EFD,
    }
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            raise TypeError(f"mega_moe: {name} is a DTensor. Pass this rank's part: {name}.to_local().")
        if tensor.device != x_TD.device:
            raise ValueError(
                f"mega_moe: {name} is on {tensor.device}, but x_TD is on {x_TD.device}. Move them to one device."
            )
    _check_shapes(named)
    if not x_TD.is_floating_point():
        raise TypeError(f"mega_moe: x_TD has dtype {x_TD.dtype}. Pass a floating-point type (bfloat16 to train).")
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        if named[name].dtype != x_TD.dtype:
            raise TypeError(
                f"mega_moe: {name} has dtype {named[name].dtype}, but x_TD has {x_TD.dtype}. Convert one to the other's."
            )
    if topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"mega_moe: topk_ids_TK has dtype {topk_ids_TK.dtype}. Pass int32 or int64 expert ids.")
    if topk_scores_TK.dtype not in (torch.float32, x_TD.dtype):
        raise TypeError(
            f"mega_moe: topk_scores_TK has dtype {topk_scores_TK.dtype}. Pass float32 scores (or x_TD's {x_TD.dtype})."
        )


def _check_shapes(named: dict[str, torch.Tensor]) -> None:
    x_TD, topk_ids_TK, w1_EFD = named["x_TD"], named["topk_ids_TK"], named["w1_EFD"]
    for name, rank in (("x_TD", 2), ("topk_ids_TK", 2), ("w1_EFD", 3)):
        if named[name].dim() != rank:
            raise ValueError(f"mega_moe: {name} has shape {tuple(named[name].shape)}; it must have {rank} dimensions.")
    num_tokens, dim = x_TD.shape
    num_experts, hidden_dim, _ = w1_EFD.shape
    num_routes = topk_ids_TK.shape[1]
    expected = {
        "topk_ids_TK": (num_tokens, num_routes),
        "topk_scores_TK": (num_tokens, num_routes),
        "w1_EFD": (num_experts, hidden_dim, dim),
        "w2_EDF": (num_experts, dim, hidden_dim),
        "w3_EFD": (num_experts, hidden_dim, dim),
    }
    for name, shape in expected.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(
                f"mega_moe: {name} has shape {tuple(named[name].shape)}, expected {shape} from x_TD "
                f"{tuple(x_TD.shape)}, topk_ids_TK {tuple(topk_ids_TK.shape)} and w1_EFD {tuple(w1_EFD.shape)}."
            )
    if not 1 <= num_routes <= MAX_TOP_K:
        raise ValueError(f"mega_moe: topk_ids_TK has {num_routes} routes per token; 1 to {MAX_TOP_K} are supported.")
    if num_experts == 0:
        raise ValueError("mega_moe: w1_EFD holds no experts. Every rank of the group must hold at least one.")
