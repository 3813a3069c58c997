"""The reference backend: the layer's stages in plain PyTorch and c10d collectives, on any device, in any precision.

It computes what the fused kernels compute, stage by stage and with the same roundings, so that each of their results
(plan, pulled rows, h, pre-reduced rows, gradients) has an oracle here:

    plan -> pull -> gate_up -> SwiGLU -> down -> pre-reduced push          (forward)
    pull of dout -> dSwiGLU and score gradient -> dx -> pre-reduced push   (backward), and the weight gradients

bf16/fp16 inputs accumulate in fp32, as do fp32 ones; fp64 inputs stay in fp64 throughout. The score of a route scales
the down projection's *result* in the accumulation type, and each row that crosses the link is rounded once. With
``a = silu(gate) * up`` and ``g = W2^T dout`` the score gradient is ``<g, a>``, so the down projection's output is neither
saved nor recomputed for backward.

FP8 and MXFP8 (``precision``) are emulated: what the kernels quantise is quantised and at once dequantised to fp32
(``quantize.py``), and then multiplied in fp32. Everything that crosses the link in dispatch, forward and backward, is quantised at its owner.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .plan import build_plan, RoutingPlan
from .quantize import FORMATS, quantize_columns, quantize_mx, quantize_rows, quantize_weights

# torch 2.13 renamed it and warns about the old name at every call.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class PeerLost(RuntimeError):
    """A collective of the reference backend failed: another rank died, hangs or is late."""


class Link:
    """How the ranks of one expert-parallel group exchange data. Without a group every exchange is the identity.

    An exchange that fails raises :class:`PeerLost`, which names this rank, the stage and the rows that were to be exchanged.
    """

    def __init__(self, group_name: str, direction: str = "forward"):
        """``group_name``: name of a c10d process group; the empty string for a rank of its own. ``direction``: for errors."""
        self.group_name, self.direction = group_name, direction
        self.group = _resolve_process_group(group_name) if group_name else None
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.size = dist.get_world_size(self.group) if self.group else 1

    def all_gather(self, stage: str, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        """Concatenate every rank's ``tensor`` along dimension 0, where rank ``p`` holds ``sizes[p]`` (default: equal)."""
        if self.group is None:
            return tensor
        length = max(sizes) if sizes else tensor.shape[0]
        padded = tensor.new_zeros(length, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = tensor.new_empty(self.size * length, *tensor.shape[1:])
        with self._naming(stage, f"all-gather of {length} rows from each rank"):
            _all_gather(gathered, padded, group=self.group)
        if sizes is None:
            return gathered
        return torch.cat([part[:size] for part, size in zip(gathered.split(length), sizes)]) if length else gathered

    def exchange(self, stage: str, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Give rank ``p`` the next ``send[p]`` rows and get ``receive[p]`` rows from it, both in rank order."""
        if self.group is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        with self._naming(stage, f"all-to-all that sends {send} and receives {receive} rows"):
            dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received

    @contextlib.contextmanager
    def _naming(self, stage: str, item: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # gloo's and NCCL's errors
            raise PeerLost(
                f"mega_moe: rank {self.rank} of {self.size}: {stage} in {self.direction}: the {item} did not complete: "
                f"{str(error).strip()}. Another rank of the expert-parallel group died, hangs or was busy for longer than the "
                "group's timeout (comm.train_timeout_seconds): its own log says why."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What backward needs of the forward beside its inputs. The last three are empty under ``saved = "inputs"``."""

    row_scores_R: torch.Tensor  # noqa: N815
    x_rows_RD: torch.Tensor  # noqa: N815
    gate_RF: torch.Tensor  # noqa: N815
    up_RF: torch.Tensor  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class ForwardStages:
    """Every intermediate of the forward, for comparison with a kernel's."""

    plan: RoutingPlan
    saved: Saved
    h_RF: torch.Tensor  # noqa: N815
    partial_UD: torch.Tensor  # noqa: N815
    out_TD: torch.Tensor  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class Gradients:
    x_TD: torch.Tensor  # noqa: N815
    topk_scores_TK: torch.Tensor  # noqa: N815
    w1_EFD: torch.Tensor  # noqa: N815
    w2_EDF: torch.Tensor  # noqa: N815
    w3_EFD: torch.Tensor  # noqa: N815


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    x_TD: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    link: Link,
    keep_activations: bool = True,
    precision: str = "bf16",
) -> ForwardStages:
    """The layer's forward. Arguments as in :func:`titan_megamoe.mega_moe`.

    Raises ValueError, on every rank of the group, if any rank's ids are out of range or its scores are not finite.
    """
    acc = accumulation_dtype(x_TD.dtype)
    quantised = FORMATS[precision].forward
    plan, row_scores_R = route(topk_ids_TK, topk_scores_TK, num_local_experts=w1_EFD.shape[0], link=link)
    x_rows_RD = _pull_rows(x_TD, plan, link, quantised)
    gate_RF, up_RF = gate_up(x_rows_RD, *(_weight(w_EFD, quantised, -1) for w_EFD in (w1_EFD, w3_EFD)), plan)
    h_RF = _factor(swiglu(gate_RF, up_RF), x_TD.dtype, quantised)
    y_RD = grouped_mm(h_RF, _weight(w2_EDF, quantised, -1).transpose(1, 2), plan) * row_scores_R.to(acc)[:, None]
    partial_UD = pre_reduce(y_RD, plan)
    out_TD = push(partial_UD.to(x_TD.dtype), plan, link, num_tokens=x_TD.shape[0])

    def keep(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (rows if keep_activations else rows.new_empty(0, rows.shape[1])).to(dtype)

    saved = Saved(
        row_scores_R=row_scores_R,
        x_rows_RD=keep(x_rows_RD, x_rows_RD.dtype),
        gate_RF=keep(gate_RF, x_TD.dtype),
        up_RF=keep(up_RF, x_TD.dtype),
    )
    return ForwardStages(plan=plan, saved=saved, h_RF=h_RF, partial_UD=partial_UD, out_TD=out_TD)


def backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    plan: RoutingPlan,
    saved: Saved,
    link: Link,
    kept_activations: bool = True,
    precision: str = "bf16",
    wgrad: str = "bf16",
) -> Gradients:
    """The layer's backward, on the forward's plan. What the forward did not keep is pulled and computed again.

    ``precision`` is the forward's. ``kept_activations`` is the forward's ``keep_activations``. It must not be read off the saved tensors' shapes: on a
    rank without rows they are empty either way, and that rank has to take part in the others' second pull.
    """
    dtype, acc = x_TD.dtype, accumulation_dtype(x_TD.dtype)
    x_rows_RD, gate_RF, up_RF = saved.x_rows_RD, saved.gate_RF, saved.up_RF
    formats = FORMATS[precision]
    quantised, wgrad_quantised = formats.backward, formats.of_weight_gradients(wgrad)
    if not kept_activations:
        x_rows_RD = _pull_rows(x_TD, plan, link, formats.forward)
        weights = (_weight(w_EFD, formats.forward, -1) for w_EFD in (w1_EFD, w3_EFD))
        gate_RF, up_RF = (t.to(dtype) for t in gate_up(x_rows_RD, *weights, plan))
    gate_RF, up_RF = gate_RF.to(acc), up_RF.to(acc)

    dout_rows_RD = _pull_rows(dout_TD, plan, link, quantised)
    # Rounded as in the kernels, where it goes from one warpgroup to another in bf16.
    g_RF = grouped_mm(dout_rows_RD, _weight(w2_EDF, quantised, -2), plan).to(dtype).to(acc)
    a_RF = swiglu(gate_RF, up_RF)
    scores_R1 = saved.row_scores_R.to(acc)[:, None]
    dscore_R = (g_RF * a_RF).sum(dim=1)
    da_RF = scores_R1 * g_RF
    sigmoid_RF = torch.sigmoid(gate_RF)
    dgate_RF = da_RF * up_RF * sigmoid_RF * (1 + gate_RF * (1 - sigmoid_RF))
    dup_RF = da_RF * gate_RF * sigmoid_RF

    # Where they are quantised, too, it is from the layer's own type, in which the weight gradients read them.
    dgate_RF, dup_RF = dgate_RF.to(dtype), dup_RF.to(dtype)
    dx_rows_RD = grouped_mm(_factor(dgate_RF, dtype, quantised), _weight(w1_EFD, quantised, -2), plan)
    dx_rows_RD += grouped_mm(_factor(dup_RF, dtype, quantised), _weight(w3_EFD, quantised, -2), plan)
    dx_TD = push(pre_reduce(dx_rows_RD, plan).to(dtype), plan, link, num_tokens=x_TD.shape[0])
    # Each route has one expert, hence one rank: the others' entries are zero and the sum over ranks is exact.
    dscore_UK = _gather_rows(dscore_R, plan.row_of_slot_UK)
    dscores_TK = push(dscore_UK, plan, link, num_tokens=x_TD.shape[0])

    def outer(left_RI: torch.Tensor, right_RJ: torch.Tensor) -> torch.Tensor:
        """Both are quantised anew, along the rows that are summed over."""
        if wgrad_quantised:
            experts = _expert_rows(plan)
            left_RI, right_RJ = (quantize_columns(rows, experts, wgrad_quantised) for rows in (left_RI, right_RJ))
        else:
            left_RI, right_RJ = left_RI.to(dtype), right_RJ.to(dtype)
        return grouped_outer(left_RI, right_RJ, plan)

    return Gradients(
        x_TD=dx_TD,
        topk_scores_TK=dscores_TK.to(topk_scores_TK.dtype),
        w1_EFD=outer(dgate_RF, x_rows_RD).to(w1_EFD.dtype),
        w2_EDF=outer(dout_rows_RD, scores_R1 * a_RF).to(w2_EDF.dtype),
        w3_EFD=outer(dup_RF, x_rows_RD).to(w3_EFD.dtype),
    )


# ---- quantised and dequantised to fp32, or left as they are; ``quantised``: a format as in ``quantize.Formats``, or None


def _pull_rows(x_TD: torch.Tensor, plan: RoutingPlan, link: Link, quantised: str | None) -> torch.Tensor:
    """``[R, D]``: each row's token."""
    return pull(_factor(x_TD, x_TD.dtype, quantised), plan, link)[plan.row_token_R]


def _weight(w_EIJ: torch.Tensor, quantised: str | None, contracted: int) -> torch.Tensor:
    """``contracted``: the dimension that the product sums over, -1 or -2. Blocks of 128 x 128 are the same for both."""
    if quantised == "mxfp8":
        return quantize_mx(w_EIJ, contracted).dequantize()
    return quantize_weights(w_EIJ).dequantize() if quantised == "fp8" else w_EIJ


def _factor(rows_RI: torch.Tensor, dtype: torch.dtype, quantised: str | None) -> torch.Tensor:
    """The left factor of a product that contracts its last dimension, from the accumulation type it was computed in."""
    if quantised is None:
        return rows_RI.to(dtype)
    return (quantize_mx if quantised == "mxfp8" else quantize_rows)(rows_RI).dequantize()


# ---- stages


def route(
    topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor, *, num_local_experts: int, link: Link
) -> tuple[RoutingPlan, torch.Tensor]:
    """The routing plan, and the score of each of its rows (``[R]``). Raises as :func:`forward` does."""
    tokens_per_rank = _publish_token_counts(topk_ids_TK, topk_scores_TK, num_local_experts * link.size, link)
    plan = build_plan(
        link.all_gather("plan", topk_ids_TK, tokens_per_rank),
        tokens_per_rank,
        rank=link.rank,
        num_local_experts=num_local_experts,
    )
    scores_NK = link.all_gather("plan", topk_scores_TK, tokens_per_rank)
    return plan, scores_NK[plan.pulled_U[plan.row_token_R], plan.row_slot_R]


def pull(x_TD: torch.Tensor, plan: RoutingPlan, link: Link) -> torch.Tensor:
    """``[U, D]``: each unique token once, from the rank that owns it."""
    sent_P, pulled_P = plan.counts_2P.tolist()
    return link.exchange("pull", x_TD[plan.sent_S], sent_P, pulled_P)


def gate_up(
    x_rows_RD: torch.Tensor, w1_EFD: torch.Tensor, w3_EFD: torch.Tensor, plan: RoutingPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x W1^T`` and ``x W3^T`` of every row, ``[R, F]`` each, in the accumulation type."""
    return (
        grouped_mm(x_rows_RD, w1_EFD.transpose(1, 2), plan),
        grouped_mm(x_rows_RD, w3_EFD.transpose(1, 2), plan),
    )


def swiglu(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate_RF) * up_RF


def pre_reduce(rows_RD: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """``[U, D]``: the sum of each unique token's rows, in route order, in the rows' own type."""
    out_UD = rows_RD.new_zeros(plan.row_of_slot_UK.shape[0], rows_RD.shape[1])
    for row_of_U in plan.row_of_slot_UK.unbind(dim=1):
        out_UD += _gather_rows(rows_RD, row_of_U)
    return out_UD


def push(rows_UD: torch.Tensor, plan: RoutingPlan, link: Link, *, num_tokens: int) -> torch.Tensor:
    """``[T, D]``: send each unique token's row to its owner, which sums over the sending ranks in rank order."""
    sent_P, pulled_P = plan.counts_2P.tolist()
    rows_SD = link.exchange("push", rows_UD, pulled_P, sent_P)
    out_TD = rows_SD.new_zeros(num_tokens, rows_SD.shape[1], dtype=accumulation_dtype(rows_SD.dtype))
    for tokens, rows in zip(plan.sent_S.split(sent_P), rows_SD.split(sent_P)):
        out_TD[tokens] += rows  # a rank sends a token once, so no index repeats and the order of additions is fixed
    return out_TD.to(rows_UD.dtype)


# ---- GEMMs


def grouped_mm(a_RI: torch.Tensor, b_eIJ: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """``[R, J]`` in the accumulation type: each expert's rows times its matrix."""
    out_RJ = a_RI.new_empty(a_RI.shape[0], b_eIJ.shape[2], dtype=accumulation_dtype(a_RI.dtype))
    for expert, rows in enumerate(_expert_rows(plan)):
        out_RJ[rows] = _mm(a_RI[rows], b_eIJ[expert])
    return out_RJ


def grouped_outer(a_RI: torch.Tensor, b_RJ: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """``[e, I, J]`` in the accumulation type: ``a^T b`` over each expert's rows; zero for an expert without rows."""
    acc = accumulation_dtype(a_RI.dtype)
    out_eIJ = a_RI.new_empty(plan.num_local_experts, a_RI.shape[1], b_RJ.shape[1], dtype=acc)
    for expert, rows in enumerate(_expert_rows(plan)):
        out_eIJ[expert] = _mm(a_RI[rows].t(), b_RJ[rows])
    return out_eIJ


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    acc = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and a.numel() and b.numel():
        return torch.mm(a, b, out_dtype=acc)  # tensor cores, no rounding of the fp32 accumulators
    return a.to(acc) @ b.to(acc)


def _expert_rows(plan: RoutingPlan) -> list[slice]:
    offsets = plan.row_offsets_e1.tolist()
    return [slice(start, stop) for start, stop in zip(offsets, offsets[1:])]


def _gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]``, with zeros where ``index`` is -1."""
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded[index]  # -1 is the zero row


def _publish_token_counts(
    topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor, num_experts: int, link: Link
) -> list[int]:
    """Every rank's token count. Bad data on one rank raises on all of them: none is left waiting for the others."""
    problem = _find_bad_route(topk_ids_TK, topk_scores_TK, num_experts)
    mine = torch.tensor([[topk_ids_TK.shape[0], problem is not None]], dtype=torch.int64, device=topk_ids_TK.device)
    tokens_per_rank, is_bad = zip(*link.all_gather("plan", mine).tolist())
    if any(is_bad):
        others = f"rank {is_bad.index(True)} of the expert-parallel group found bad routes; its own error names them."
        raise ValueError(f"mega_moe: {problem or others}")
    return list(tokens_per_rank)


def _find_bad_route(topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor, num_experts: int) -> str | None:
    bad_TK = (topk_ids_TK < 0) | (topk_ids_TK >= num_experts)
    if bad_TK.any():
        token, slot = bad_TK.nonzero()[0].tolist()
        return (
            f"topk_ids_TK[{token}, {slot}] is {topk_ids_TK[token, slot].item()}, but the group's experts are numbered "
            f"0 to {num_experts - 1} ({bad_TK.sum().item()} such ids). Pass global expert ids of experts that exist."
        )
    bad_TK = ~torch.isfinite(topk_scores_TK)
    if bad_TK.any():
        token, slot = bad_TK.nonzero()[0].tolist()
        return (
            f"topk_scores_TK[{token}, {slot}] is {topk_scores_TK[token, slot].item()} ({bad_TK.sum().item()} such "
            "scores). The router has diverged or its input is not finite: look at the loss and gradient norm of the "
            "steps before this one, and lower the learning rate or clip gradients harder."
        )
    return None
