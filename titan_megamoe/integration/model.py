"""From ``[model]`` to TorchTitan's ``ModelSpec``: flavor, dispatcher, converters, truncation."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType

import torch
from torchtitan.components import quantization
from torchtitan.models import _supported_models
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.model_spec import ModelSpec

from .strategies import STRATEGIES

SMALL_FLAVOR = "debugmodel_moe_small"


def build_model_spec(config) -> ModelSpec:
    """The ``ModelSpec`` that a ``Trainer.Config``'s ``model`` and ``quantize`` sections describe.

    Raises:
        ValueError: unknown family, flavor or converter, or more layers than the model has.
    """
    model = config.model
    family = _family(model.name)
    arguments: dict = {"attn_backend": model.attn_backend}
    strategy = STRATEGIES[model.moe.dispatch.type]
    if strategy.moe_comm_backend != "standard":
        arguments["moe_comm_backend"] = strategy.moe_comm_backend
    unsupported = set(arguments) - set(inspect.signature(family.model_registry).parameters)
    if unsupported:
        raise ValueError(f"model.name = '{model.name}' does not take {', '.join(sorted(unsupported))}.")
    flavors = _flavors(family, model.name)
    if model.flavor not in flavors:
        raise ValueError(f"model.flavor = '{model.flavor}' is not one of {model.name}'s: {', '.join(flavors)}.")

    spec = family.model_registry(model.flavor, **arguments)
    for converter in _converters(config, spec):
        spec.model = converter.build().convert(spec.model)
    if model.n_layers is not None:
        available = len(spec.model.layers)
        if not 1 <= model.n_layers <= available:
            raise ValueError(
                f"model.n_layers = {model.n_layers}, but {model.name} {model.flavor} has {available} layers. "
                f"Use 1 to {available}, or leave it unset for all."
            )
        spec.model.layers = spec.model.layers[: model.n_layers]
    return spec


def num_experts(spec: ModelSpec) -> int | None:
    """Experts per layer, or None for a dense model."""
    return next((layer.moe.num_experts for layer in spec.model.layers if getattr(layer, "moe", None)), None)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a model's memory, traffic and arithmetic follow from."""

    num_layers: int
    num_moe_layers: int
    dim: int
    """D"""
    hidden_dim: int
    """F of an expert"""
    num_experts: int
    """E of a layer"""
    top_k: int
    """K"""
    num_parameters: int
    num_expert_parameters: int
    """Of them in routed experts"""
    vocab_size: int
    fsdp_units: tuple[tuple[int, int], ...]
    """Of what FSDP gathers at once, in the model's order (the embedding, each block of layers, the output layer): parameters, and
    those of them in routed experts"""

    @property
    def num_active_parameters(self) -> int:
        """That one token meets."""
        rest = self.num_parameters - self.num_expert_parameters
        return rest + self.num_expert_parameters * self.top_k // self.num_experts


def model_size(spec: ModelSpec) -> ModelSize:
    """Builds the model without memory, and counts.

    Raises:
        ValueError: it has no experts.
    """
    if num_experts(spec) is None:
        raise ValueError("the model has no experts: choose a mixture-of-experts flavor (model.flavor).")
    moe_layers = [layer.moe for layer in spec.model.layers if getattr(layer, "moe", None)]
    experts, dispatcher = moe_layers[0].routed_experts.inner_experts, moe_layers[0].routed_experts.token_dispatcher
    with torch.device("meta"):
        model = spec.model.build()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_experts = {name: size for name, size in sizes.items() if "routed_experts.inner_experts" in name}
    units: dict[str, list[int]] = {}
    for name, size in sizes.items():
        first, second, *_ = name.split(".")
        # TorchTitan's apply_fsdp_to_decoder shards the last norm together with the output layer.
        key = f"{first}.{second}" if first == "layers" else "output" if first in ("norm", "lm_head") else first
        unit = units.setdefault(key, [0, 0])
        unit[0] += size
        unit[1] += in_experts.get(name, 0)
    return ModelSize(
        num_layers=len(spec.model.layers),
        num_moe_layers=len(moe_layers),
        dim=experts.dim,
        hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        top_k=dispatcher.top_k,
        num_parameters=sum(sizes.values()),
        num_expert_parameters=sum(in_experts.values()),
        vocab_size=spec.model.vocab_size,
        fsdp_units=tuple((size, experts) for size, experts in units.values()),
    )


def _family(name: str) -> ModuleType:
    if name not in _supported_models:
        raise ValueError(f"model.name = '{name}' is not one of TorchTitan's: {', '.join(sorted(_supported_models))}.")
    return importlib.import_module(f"torchtitan.models.{name}")


def _flavors(family: ModuleType, name: str) -> dict:
    flavors = getattr(family, f"{name}_configs")
    if name == "qwen3":
        flavors.setdefault(SMALL_FLAVOR, _qwen3_moe_small)
    return flavors


def _qwen3_moe_small(attn_backend: str, moe_comm_backend: str = "standard"):
    """Qwen3 MoE small enough for seconds per step on 2 CPU cores (TorchTitan's ``debugmodel_moe`` takes over a minute)."""
    from torchtitan.models import qwen3

    dim, head_dim = 128, 32
    config = qwen3.qwen3_configs["debugmodel_moe"](attn_backend=attn_backend, moe_comm_backend=moe_comm_backend)
    config.dim = dim
    config.norm = qwen3._qwen3_norm(dim)
    config.tok_embeddings.embedding_dim = dim
    config.lm_head.in_features = dim
    config.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=dim,
        n_heads=4,
        n_kv_heads=2,
        head_dim=head_dim,
        moe_hidden_dim=128,
        num_experts=8,
        top_k=2,
        attn_backend=attn_backend,
        moe_comm_backend=moe_comm_backend,
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=4096, theta=1000000.0),
    )
    return config


# ---- quantisation converters


def _converters(config, spec: ModelSpec) -> list[ModelConfigConverter.Config]:
    return [_converter(name, config, spec) for name in config.model.converters]


def _converter(name: str, config, spec: ModelSpec) -> ModelConfigConverter.Config:
    compiled = config.compile.enable and "model" in config.compile.components
    linear, grouped_mm = config.quantize.linear, config.quantize.grouped_mm
    if name in ("quantize.linear.float8", "float8"):
        _check_filters("quantize.linear.float8", linear.float8.filter_fqns, spec)
        return quantization.Float8LinearConverter.Config(
            recipe_name=linear.float8.recipe_name,
            filter_fqns=linear.float8.filter_fqns,
            emulate=linear.float8.emulate,
            model_compile_enabled=compiled,
        )
    if name in ("quantize.linear.mx", "mx"):
        _check_filters("quantize.linear.mx", linear.mx.filter_fqns, spec)
        kept = [fqn for fqn in _linear_fqns(spec) if not any(f in fqn for f in linear.mx.filter_fqns)]
        return quantization.MXFP8LinearConverter.Config(fqns=kept, model_compile_enabled=compiled)
    if name == "quantize.grouped_mm.float8":
        return quantization.Float8GroupedExpertsConverter.Config(model_compile_enabled=compiled)
    if name == "quantize.grouped_mm.mx":
        return quantization.MXFP8GroupedExpertsConverter.Config(
            recipe_name=grouped_mm.mx.recipe_name,
            pad_multiple=grouped_mm.mx.pad_multiple,
            model_compile_enabled=compiled,
        )
    known = ("quantize.linear.float8", "quantize.grouped_mm.float8", "quantize.linear.mx", "quantize.grouped_mm.mx")
    raise ValueError(f"model.converters: '{name}' is not one of {', '.join(known)}.")


def _linear_fqns(spec: ModelSpec) -> list[str]:
    return [fqn for fqn, *_ in spec.model.traverse(Linear.Config)]


def _check_filters(section: str, filters: list[str], spec: ModelSpec) -> None:
    """A filter that matches nothing would quantise a layer that its user meant to keep."""
    fqns = _linear_fqns(spec)
    for wanted in filters:
        if not any(wanted in fqn for fqn in fqns):
            names = sorted({fqn.split(".", 2)[-1] for fqn in fqns})
            raise ValueError(
                f"{section}.filter_fqns: '{wanted}' matches no linear layer of {spec.name} {spec.flavor}. "
                f"Its layers are called: {', '.join(names)}."
            )
