"""When FP8 copies of weights are made again. What they hold is for ``test_quantize_kernels.py``."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from titan_megamoe import weight_cache
from titan_megamoe.quantize import FP8
from titan_megamoe.weight_cache import WeightCache, weights_changed


@pytest.fixture
def made(monkeypatch) -> list:
    """The weights that were quantised, in order."""
    quantised = []
    monkeypatch.setattr(weight_cache, "_quantize", lambda weight, copy: quantised.append(weight))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return quantised


def quantized(weight_EIJ: torch.Tensor, name: str, key: int, number_format: str = "fp8"):
    return weight_cache.quantized(weight_EIJ, name, key, number_format)


def weight(*size: int) -> torch.Tensor:
    return torch.zeros(*(size or (3, 256, 128)), dtype=torch.bfloat16)


def test_copies_are_kept(made):
    cache, w1, w2 = WeightCache(), weight(), weight(3, 128, 200)
    for _ in range(3):
        first, second = quantized(w1, "w1", int(cache.key)), quantized(w2, "w2", int(cache.key))
    assert made == [w1, w2] or [w is m for w, m in zip((w1, w2), made, strict=True)]
    assert first.values_EIJ.shape == (3, 256, 128) and first.transposed_EJI.shape == (3, 128, 256)
    assert first.values_EIJ.dtype == FP8 and first.scales_Ebb.shape == (3, 2, 1)
    assert second.scales_Ebb.shape == (3, 1, 2)


def test_what_makes_them_again(made):
    cache, w = WeightCache(), torch.nn.Parameter(weight())
    module = torch.nn.Linear(2, 2)

    def times_made() -> int:
        before = len(made)
        quantized(w, "w1", int(cache.key))
        return len(made) - before

    assert times_made() == 1 and times_made() == 0
    for optimizer in (torch.optim.AdamW(module.parameters()), torch.optim.SGD(module.parameters(), lr=0.1)):
        module(torch.zeros(1, 2)).sum().backward()
        optimizer.step()  # of whichever parameters: theirs may be what this weight is a copy of
        assert times_made() == 1 and times_made() == 0
    weights_changed()
    assert times_made() == 1
    cache.invalidate()
    assert times_made() == 1
    with torch.no_grad():
        w.add_(1)
    assert times_made() == 1 and times_made() == 0
    w = w.detach().clone()  # as a cast of the parameter is, in every forward
    w.zero_()
    quantized(w, "w1", int(cache.key))
    storage = quantized(w, "w1", int(cache.key)).values_EIJ.data_ptr()
    weights_changed()
    assert quantized(w, "w1", int(cache.key)).values_EIJ.data_ptr() == storage, "in place"


def test_without_a_cache_nothing_is_kept(made):
    w = weight()
    first, second = quantized(w, "w1", weight_cache.NO_CACHE), quantized(w, "w1", weight_cache.NO_CACHE)
    assert len(made) == 2 and first.values_EIJ.data_ptr() != second.values_EIJ.data_ptr()


def test_a_graph_that_is_captured_does_not_use_it(made, monkeypatch):
    cache, w = WeightCache(), weight()
    quantized(w, "w1", int(cache.key))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    quantized(w, "w1", int(cache.key))
    assert len(made) == 2


def test_a_copy_of_a_layer_has_a_cache_of_its_own(made):
    cache = WeightCache()
    other = copy.deepcopy(cache)
    assert int(other.key) != int(cache.key)
    quantized(weight(), "w1", int(cache.key))
    quantized(weight(), "w1", int(other.key))
    assert len(made) == 2


def test_caches_end_with_their_layers(made):
    key = int(WeightCache().key)
    gc.collect()
    assert key not in weight_cache._caches
    quantized(weight(), "w1", key)
    quantized(weight(), "w1", key)
    assert len(made) == 2


def test_a_layer_drops_them_when_it_loads_a_state_dict(made):
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from titan_megamoe.integration.routed_experts import MegaMoERoutedExperts

    def build(**options):
        return MegaMoERoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=128, hidden_dim=128, num_experts=2),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=2, top_k=1),
            **options,
        ).build()

    assert build().weight_cache is None, "bf16 quantises nothing"
    fp8 = dict(precision="fp8", backend="reference")
    assert build(**fp8, weight_cache=False).weight_cache is None
    model = torch.nn.Sequential(build(**fp8))
    cache, w = model[0].weight_cache, weight()
    quantized(w, "w1", int(cache.key))
    model.load_state_dict(model.state_dict())
    quantized(w, "w1", int(cache.key))
    assert len(made) == 2


def test_inference(made):
    cache = WeightCache()
    with torch.inference_mode():
        for _ in range(2):
            quantized(weight(), "w1", int(cache.key))
    assert len(made) == 1


def test_another_format_is_another_copy(made):
    key = int((cache := WeightCache()).key)
    w = weight()
    copies = [quantized(w, "w1", key, number_format) for number_format in ("fp8", "mxfp8", "mxfp8")]
    assert len(made) == 2 and copies[1] is copies[2] and cache is not None
    assert copies[1].scales_EIg.shape == (3, 256, 4) and copies[1].transposed_scales_EJg.shape == (3, 128, 8)
