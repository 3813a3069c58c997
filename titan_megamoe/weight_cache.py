"""FP8 copies of experts' weights, made once for each optimizer step instead of in every forward and backward.

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

from .quantize import BLOCK, FP8

_keys = itertools.count(1)
_caches: weakref.WeakValueDictionary[int, WeightCache] = weakref.WeakValueDictionary()
_changes = 0

NO_CACHE = 0
"""The key of no cache."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """An expert matrix in blockwise FP8, as it is stored and transposed."""

    values_EIJ: torch.Tensor  # noqa: N815
    transposed_EJI: torch.Tensor  # noqa: N815
    scales_Ebb: torch.Tensor  # noqa: N815
    """Of blocks of 128 x 128, in the orientation of ``values_EIJ``."""


class WeightCache:
    """The FP8 copies of one layer's weights: 2 bytes for each."""

    def __init__(self) -> None:
        _watch_optimizers()
        key = next(_keys)
        # Names it to the operators. A tensor, or a compiled graph would be made again for each layer's number.
        self.key = torch.tensor(key, device="cpu")
        _caches[key] = self
        self._made_from: dict[str, tuple] = {}
        self._copies: dict[str, QuantizedWeight] = {}

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return WeightCache()  # for a copy of the layer, whose weights may become others

    def invalidate(self) -> None:
        """Quantise again when a weight is next used."""
        self._made_from.clear()

    def get(self, weight_EIJ: torch.Tensor, name: str) -> QuantizedWeight:  # noqa: N803
        version = None if weight_EIJ.is_inference() else weight_EIJ._version
        made_from = (_changes, weight_EIJ.shape, weight_EIJ.device, version)
        if self._made_from.get(name) != made_from:
            copy = self._copies.get(name)
            if copy is None or (copy.values_EIJ.shape, copy.values_EIJ.device) != made_from[1:3]:
                copy = self._copies[name] = _empty_copy(weight_EIJ)
            _quantize(weight_EIJ, copy)
            self._made_from[name] = made_from
        return self._copies[name]


def weights_changed() -> None:
    """Drop all FP8 copies of weights. Call it after changing weights by hand: optimizers and loaded state dicts are noticed."""
    global _changes
    _changes += 1


def quantized(weight_EIJ: torch.Tensor, name: str, key: int) -> QuantizedWeight:  # noqa: N803
    """A weight (bf16 ``[E, I, J]``, contiguous, on a GPU) in blockwise FP8: the copy of that name in the cache of that key,
    if there is such a cache."""
    cache = _caches.get(key)
    # A captured graph must quantise whenever it is replayed.
    if cache is not None and not torch.cuda.is_current_stream_capturing():
        return cache.get(weight_EIJ, name)
    copy = _empty_copy(weight_EIJ)
    _quantize(weight_EIJ, copy)
    return copy


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(lambda *_: weights_changed())


def _empty_copy(weight_EIJ: torch.Tensor) -> QuantizedWeight:
    num_experts, rows, columns = weight_EIJ.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    return QuantizedWeight(
        values_EIJ=torch.empty_like(weight_EIJ, dtype=FP8),
        transposed_EJI=weight_EIJ.new_empty(num_experts, columns, rows, dtype=FP8),
        scales_Ebb=weight_EIJ.new_empty(num_experts, *blocks, dtype=torch.float32),
    )


def _quantize(weight_EIJ: torch.Tensor, copy: QuantizedWeight) -> None:
    from .kernels.quantize import quantize_weights

    quantize_weights(weight_EIJ, copy.values_EIJ, copy.transposed_EJI, copy.scales_Ebb)
