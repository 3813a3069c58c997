"""The sections this package adds to TorchTitan's ``Trainer.Config``: ``[model]``, ``[model.moe]`` and ``[quantize]``.

TorchTitan 0.3.0 chooses the model in Python (a ``ModelSpec``); these sections choose it from TOML and the command line,
and ``integration/model.py`` turns them into the ``ModelSpec``. Fields document themselves: ``--help`` and
``docs/configuration.md`` print the strings below them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args, Literal

DispatchType = Literal["all_to_all", "deepep", "hybridep", "minimal_async_ep", "mega_moe"]
Precision = Literal["bf16", "fp8", "fp8_bwd", "mxfp8"]
STRATEGY_NAMES, PRECISION_NAMES = get_args(DispatchType), get_args(Precision)


@dataclass(kw_only=True, slots=True)
class DispatchSection:
    type: DispatchType = "all_to_all"
    """How the routed experts communicate and compute; see the strategies table in the README."""

    precision: Precision = "bf16"
    """Arithmetic of the experts' GEMMs: see docs/precision.md. Only for type 'mega_moe'; the others keep 'bf16'. 'fp8' and
    'fp8_bwd' need a Hopper GPU, 'mxfp8' a B200, B300, MI350X or MI355X. Elsewhere see allow_emulation; backend 'reference' emulates all
    of them, slowly."""

    wgrad: Literal["bf16", "fp8", "mxfp8"] = "bf16"
    """What the experts' weight gradients are computed in: 'bf16', or with 'fp8' and 'fp8_bwd' 'fp8', or with 'mxfp8' 'mxfp8'."""

    saved: Literal["activations", "inputs"] = "activations"
    """What 'mega_moe' keeps for backward: the pulled rows and gate/up, or only its inputs and the routing plan (less
    memory, one more pull and gate/up GEMM). Under full activation checkpointing it makes no difference to peak memory
    beyond one layer."""

    backend: Literal["auto", "reference", "hopper", "triton"] = "auto"
    """Implementation of 'mega_moe': plain PyTorch ('reference'), the fused kernels for H100 and H200 ('hopper'), the portable ones
    for other NVIDIA and AMD GPUs ('triton', bf16 and mxfp8), or the best one for this machine ('auto', logged)."""

    allow_emulation: bool = False
    """Whether a precision that nothing computes natively here may be emulated: right, but slow. Backend 'auto' then takes kernels that
    emulate it ('mxfp8' on H100 and H200), or else 'reference'. Off: it is refused, but with backend 'reference'."""

    capacity: float | None = None
    """Memory for the rows that a rank's experts receive, with a backend on kernels. Unset: exactly what each call needs, for
    which the host waits once per layer. A number: that many times an even share, of static size; a step that would need
    more stops with an error that names the capacity that would have sufficed."""

    weight_cache: bool = True
    """With 'fp8', 'fp8_bwd' and 'mxfp8' on kernels: keep the experts' weights in FP8 until the optimizer steps or a checkpoint is
    loaded, at 2 bytes for each weight of this rank's experts. Off: quantise them in every forward and backward."""


@dataclass(kw_only=True, slots=True)
class MoESection:
    force_load_balance: Literal["none", "even", "uniform"] = "none"
    """Replace the router's choice of experts, for benchmarks: 'even' is TorchTitan's round-robin (every expert gets the
    same number of tokens), 'uniform' draws distinct experts at random for each token and so is ragged, like real routing.
    Scores still come from the router, so its gradients flow."""

    dispatch: DispatchSection = field(default_factory=DispatchSection)


@dataclass(kw_only=True, slots=True)
class ModelSection:
    name: str = "qwen3"
    """Model family: a package under torchtitan.models (tested: qwen3)."""

    flavor: str = "debugmodel_moe"
    """Size within the family: a flavor of TorchTitan's, or 'debugmodel_moe_small' (ours: under a second a step on 2 CPU cores)."""

    attn_backend: Literal["flex", "flex_flash", "varlen"] = "flex"
    """Attention kernel: FlexAttention, its FlashAttention backend (Hopper, Blackwell), or variable-length FlashAttention."""

    n_layers: int | None = None
    """Keep only the first n layers, so that a slice of a large model fits one GPU. Layer shapes and initialisation stay
    those of the full model."""

    converters: list[str] = field(default_factory=list)
    """TorchTitan's quantisation converters, in order: 'quantize.linear.float8', 'quantize.grouped_mm.float8',
    'quantize.linear.mx', 'quantize.grouped_mm.mx' (0.2's short 'float8' and 'mx' mean the linear ones)."""

    moe: MoESection = field(default_factory=MoESection)


@dataclass(kw_only=True, slots=True)
class Float8LinearSection:
    recipe_name: Literal["rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """torchao recipe."""

    filter_fqns: list[str] = field(default_factory=list)
    """Linear layers whose name contains one of these stay in bf16 (0.2's name 'output' means 'lm_head')."""

    emulate: bool = False
    """Emulate on hardware without FP8 (tests only; not with compile)."""


@dataclass(kw_only=True, slots=True)
class MXLinearSection:
    filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])
    """Linear layers whose name contains one of these stay in bf16 (0.2's name 'output' means 'lm_head')."""


@dataclass(kw_only=True, slots=True)
class MXGroupedMMSection:
    recipe_name: Literal["mxfp8_rceil"] = "mxfp8_rceil"
    """torchao recipe."""

    pad_multiple: int = 32
    """Rows per expert are padded to a multiple of this."""


@dataclass(kw_only=True, slots=True)
class QuantizeLinearSection:
    float8: Float8LinearSection = field(default_factory=Float8LinearSection)
    mx: MXLinearSection = field(default_factory=MXLinearSection)


@dataclass(kw_only=True, slots=True)
class QuantizeGroupedMMSection:
    mx: MXGroupedMMSection = field(default_factory=MXGroupedMMSection)


@dataclass(kw_only=True, slots=True)
class QuantizeSection:
    """Options of the converters named in ``[model] converters``; without them these are ignored."""

    linear: QuantizeLinearSection = field(default_factory=QuantizeLinearSection)
    grouped_mm: QuantizeGroupedMMSection = field(default_factory=QuantizeGroupedMMSection)
