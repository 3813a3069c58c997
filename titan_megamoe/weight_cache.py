"""FP8 and MXFP8 copies of experts' weights, made once for each optimizer step instead of in every forward and backward.

Nothing about a weight tensor says for sure that its values have changed: under FSDP and mixed precision the operator sees
temporary copies, which FSDP writes without counting a version. So a copy is dropped when something happens that changes
weights: any optimizer steps, or a module loads a state dict (as loading a checkpoint does). A weight that is changed by
hand in any other way, and was not seen to be (its version counter moved), needs :func:`weights_changed`.

Shape suffixes are those of ``plan.py``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .quantize import BLOCK, FP8, MX_BLOCK

_keys = itertools.count(1)
_caches: weakref.WeakValueDictionary[int, WeightCache] = weakref.WeakValueDictionary()
_changes = 0

COPY_BYTES = {None: 0.0, "fp8": 2.0, "mxfp8": 2.0 + 2.0 / MX_BLOCK}
"""Of the copies of a weight, by what the backward multiplies (``quantize.Formats``), which every quantised precision does. Left out: scales of
128 x 128 weights."""

NO_CACHE = 0
"""The key of no cache."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """An expert matrix in blockwise FP8, as it is stored and transposed."""

    values_EIJ: torch.Tensor  # noqa: N815
    transposed_EJI: torch.Tensor  # noqa: N815
    scales_Ebb: torch.Tensor  # noqa: N815
    """Of blocks of 128 x 128, in the orientation of ``values_EIJ``."""


@dataclass(frozen=True, kw_only=True)
class MXWeight:
    """An expert matrix in MXFP8, as it is stored and transposed: two quantisations, each with a scale (e8m0 in uint8) for each 32 elements
    of its last dimension, along which it is contracted."""

    values_EIJ: torch.Tensor  # noqa: N815
    scales_EIg: torch.Tensor  # noqa: N815
    transposed_EJI: torch.Tensor  # noqa: N815
    transposed_scales_EJg: torch.Tensor  # noqa: N815


class WeightCache:
    """The FP8 or MXFP8 copies of one layer's weights: 2 bytes for each."""

    def __init__(self) -> None:
        _watch_optimizers()
        key = next(_keys)
        # Names it to the operators. A tensor, or a compiled graph would be made again for each layer's number.
        self.key = torch.tensor(key, device="cpu")
        _caches[key] = self
        self._made_from: dict[str, tuple] = {}
        self._copies: dict[str, QuantizedWeight | MXWeight] = {}
        self._kinds: dict[str, tuple] = {}

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return WeightCache()  # for a copy of the layer, whose weights may become others

    def invalidate(self) -> None:
        """Quantise again when a weight is next used."""
        self._made_from.clear()

    def get(self, weight_EIJ: torch.Tensor, name: str, number_format: str) -> QuantizedWeight | MXWeight:  # noqa: N803
        version = None if weight_EIJ.is_inference() else weight_EIJ._version
        kind = (number_format, weight_EIJ.shape, weight_EIJ.device)
        made_from = (kind, _changes, version)
        if self._made_from.get(name) != made_from:
            if self._kinds.get(name) != kind:
                self._copies[name], self._kinds[name] = _empty_copy(weight_EIJ, number_format), kind
            _quantize(weight_EIJ, self._copies[name])
            self._made_from[name] = made_from
        return self._copies[name]


def weights_changed() -> None:
    """Drop all FP8 copies of weights. Call it after changing weights by hand: optimizers and loaded state dicts are noticed."""
    global _changes
    _changes += 1


def quantized(
    weight_EIJ: torch.Tensor,  # noqa: N803
    name: str,
    key: int,
    number_format: str,
) -> QuantizedWeight | MXWeight:
    """A weight (bf16 ``[E, I, J]``, contiguous, on a GPU) in blockwise FP8 (``number_format`` ``"fp8"``) or in MXFP8 (``"mxfp8"``; I and J
    multiples of 32): the copy of that name in the cache of that key, if there is such a cache."""
    cache = _caches.get(key)
    # A captured graph must quantise whenever it is replayed.
    if cache is not None and not torch.cuda.is_current_stream_capturing():
        return cache.get(weight_EIJ, name, number_format)
    copy = _empty_copy(weight_EIJ, number_format)
    _quantize(weight_EIJ, copy)
    return copy


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(lambda *_: weights_changed())


def _empty_copy(weight_EIJ: torch.Tensor, number_format: str) -> QuantizedWeight | MXWeight:
    num_experts, rows, columns = weight_EIJ.shape
    values = dict(
        values_EIJ=torch.empty_like(weight_EIJ, dtype=FP8),
        transposed_EJI=weight_EIJ.new_empty(num_experts, columns, rows, dtype=FP8),
    )
    if number_format == "mxfp8":
        return MXWeight(
            **values,
            scales_EIg=weight_EIJ.new_empty(num_experts, rows, columns // MX_BLOCK, dtype=torch.uint8),
            transposed_scales_EJg=weight_EIJ.new_empty(num_experts, columns, rows // MX_BLOCK, dtype=torch.uint8),
        )
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    return QuantizedWeight(**values, scales_Ebb=weight_EIJ.new_empty(num_experts, *blocks, dtype=torch.float32))


def _quantize(weight_EIJ: torch.Tensor, copy: QuantizedWeight | MXWeight) -> None:
    if isinstance(copy, MXWeight):
        _quantize_mx(weight_EIJ, copy)
        return
    from .kernels.quantize import quantize_weights

    quantize_weights(weight_EIJ, copy.values_EIJ, copy.transposed_EJI, copy.scales_Ebb)


def _quantize_mx(weight_EIJ: torch.Tensor, copy: MXWeight) -> None:
    """Each orientation by its rows, to the bits that torchao makes: it would take dozens of launches for each."""
    from .kernels.quantize_mx import quantize_rows

    for matrices, values, scales in (
        (weight_EIJ, copy.values_EIJ, copy.scales_EIg),
        (weight_EIJ.mT.contiguous(), copy.transposed_EJI, copy.transposed_scales_EJg),
    ):
        quantize_rows(matrices.flatten(0, 1), values.flatten(0, 1), scales.flatten(0, 1))
