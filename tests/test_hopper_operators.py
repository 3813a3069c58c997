"""The operators of backend ``hopper`` under autograd, checkpointing and ``torch.compile``, on a machine without a GPU: what
the kernels compute is computed by the reference, so only the plumbing is under test here."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.oracle import gradients, random_layer, relative_error
from titan_megamoe import hopper, mega_moe, ops, reference
from titan_megamoe.integration import compat
from titan_megamoe.reference import Link
from titan_megamoe.weight_cache import WeightCache


class FakeKernels:
    """Stands in for ``hopper``'s functions; counts their calls."""

    def __init__(self):
        self.calls = Counter()
        self.cache_keys = []
        self.stages = {}

    def dispatch(self, x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w3_EFD, *, workspace, keep_activations, numerics):
        self.calls["dispatch"] += 1
        self.cache_keys.append(numerics.cache_key)
        w2_EDF = w1_EFD.new_zeros(w1_EFD.shape[0], x_TD.shape[1], w1_EFD.shape[1])
        inputs = (x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD)
        stages = reference.forward(*inputs, link=Link(""), keep_activations=keep_activations)
        key = len(self.stages)
        self.stages[key] = stages
        num_kept = 64 if keep_activations else 0
        return hopper.Dispatched(
            plan=torch.tensor([key], dtype=torch.uint8),
            kept=torch.zeros(num_kept, dtype=torch.uint8),
            rows_R0=x_TD.new_empty(stages.h_RF.shape[0], 0),
            h=torch.tensor([key], dtype=torch.uint8),
        )

    def combine(self, plan, rows_R0, h, topk_ids_TK, w2_EDF, *, workspace, numerics):
        self.calls["combine"] += 1
        self.cache_keys.append(numerics.cache_key)
        stages = self.stages[int(h)]
        y_RD = reference.grouped_mm(stages.h_RF, w2_EDF.transpose(1, 2), stages.plan)
        y_RD *= stages.saved.row_scores_R[:, None]
        partial_UD = reference.pre_reduce(y_RD, stages.plan).to(w2_EDF.dtype)
        return reference.push(partial_UD, stages.plan, Link(""), num_tokens=topk_ids_TK.shape[0])

    def backward(self, dout, x, ids, scores, w1, w2, w3, *, plan, kept, rows_R0, kept_activations, workspace, numerics):
        self.calls["backward"] += 1
        self.cache_keys.append(numerics.cache_key)
        assert (kept.numel() > 0) == kept_activations
        stages = self.stages[int(plan)]
        assert rows_R0.shape == (stages.h_RF.shape[0], 0)
        kwargs = dict(plan=stages.plan, saved=stages.saved, link=Link(""), kept_activations=kept_activations)
        return reference.backward(dout, x, scores, w1, w2, w3, **kwargs)


@pytest.fixture(autouse=True)
def dynamo_config():
    with torch._dynamo.config.patch():  # restores what is set inside
        compat.accept_data_dependent_outputs()
        yield


@pytest.fixture
def kernels(monkeypatch):
    fake = FakeKernels()
    for name in ("dispatch", "combine", "backward"):
        monkeypatch.setattr(hopper, name, getattr(fake, name))
    monkeypatch.setattr(hopper, "workspace_for", lambda *args, **kwargs: None)
    monkeypatch.setattr(hopper, "rehearse", lambda *args, **kwargs: None)
    monkeypatch.setattr(ops, "select_backend", lambda backend, *args, **kwargs: backend)
    return fake


LAYER = dict(tokens=40, dim=64, hidden=64, experts=6, top_k=3, dtype=torch.float32)


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # fp32 on a CPU differs by 2e-5 from one run to the next (vectorised functions); a mistake in the plumbing by far more.
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-3


def compare(function, **layer):
    """``function`` against the reference backend, which computes the same up to how a CPU under load splits sums."""
    inputs = random_layer(**(LAYER | layer))
    dout_TD = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    actual = gradients(function, inputs, dout_TD)
    expected = gradients(
        lambda x, *rest: torch.tanh(mega_moe(torch.sin(x), *rest, backend="reference")) + x, inputs, dout_TD
    )
    assert_equal(actual, expected)


def block(x_TD, *rest, tail=torch.tanh, **kwargs):
    return tail(mega_moe(torch.sin(x_TD), *rest, backend="hopper", **kwargs)) + x_TD


@pytest.mark.parametrize("saved", ["activations", "inputs"])
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("tokens", [40, 0])
def test_gradients(kernels, saved, is_recomputed, tokens):
    compare(partial(block, saved=saved, is_recomputed=is_recomputed), tokens=tokens)
    assert kernels.calls == dict(dispatch=1, combine=1, backward=1)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_full_checkpointing(kernels, is_recomputed):
    compare(lambda *inputs: checkpoint(partial(block, is_recomputed=is_recomputed), *inputs, use_reentrant=False))
    # The tanh behind it saves its output: here the recomputation needs all of the forward.
    assert kernels.calls == dict(dispatch=2, combine=2, backward=1)


@pytest.mark.parametrize("is_recomputed, combines", [(False, 2), (True, 1)])
def test_a_recomputation_stops_before_the_combine(kernels, is_recomputed, combines):
    def residual_block(x_TD, *rest):
        return x_TD + mega_moe(torch.sin(x_TD), *rest, backend="hopper", is_recomputed=is_recomputed)

    inputs = random_layer(**LAYER)
    dout_TD = torch.randn_like(inputs[0])
    expected = gradients(residual_block, inputs, dout_TD)
    kernels.calls.clear()
    actual = gradients(lambda *inputs: checkpoint(residual_block, *inputs, use_reentrant=False), inputs, dout_TD)
    assert_equal(actual, expected)
    assert kernels.calls == dict(dispatch=2, combine=combines, backward=1)


def test_selective_checkpointing_saves_the_forward(kernels):
    context = partial(create_selective_checkpoint_contexts, list(ops.FORWARD_OPS))
    compare(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False, context_fn=context))
    assert kernels.calls == dict(dispatch=1, combine=1, backward=1)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("saved", ["activations", "inputs"])
def test_compiled(kernels, saved, is_recomputed, backend):
    torch._dynamo.reset()
    compiled = torch.compile(partial(block, is_recomputed=is_recomputed, saved=saved), fullgraph=True, backend=backend)
    compare(compiled)
    assert kernels.calls == dict(dispatch=1, combine=1, backward=1)


@pytest.mark.parametrize("saved", ["activations", "inputs"])
def test_compiled_selective_checkpointing(kernels, saved):
    torch._dynamo.reset()
    context = partial(create_selective_checkpoint_contexts, list(ops.FORWARD_OPS))

    def checkpointed(*inputs):
        return checkpoint(partial(block, saved=saved), *inputs, use_reentrant=False, context_fn=context)

    compare(torch.compile(checkpointed, fullgraph=True))
    assert kernels.calls == dict(dispatch=1, combine=1, backward=1)


def test_layers_with_weight_caches_share_a_graph(kernels):
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight_cache = WeightCache()

        def forward(self, *inputs):
            return block(*inputs, precision="fp8", weight_cache=self.weight_cache)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = [Layer() for _ in range(3)]
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
        compare(layer)
    assert counter.frame_count == 1
    assert kernels.cache_keys == [int(layer.weight_cache.key) for layer in layers for _ in range(3)]


def test_backward_can_run_twice(kernels):
    x_TD, *rest = random_layer(**LAYER)
    x_TD.requires_grad_()
    out_TD = mega_moe(x_TD, *rest, backend="hopper")
    first, second = (torch.autograd.grad(out_TD.sum(), x_TD, retain_graph=True)[0] for _ in range(2))
    assert_equal([first], [second])


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_no_gradient_that_nobody_asked_for_is_made(kernels, is_recomputed):
    """Autograd would hand the backward zeros as large as all saved activations, to say that those have no gradient."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x_TD, *rest = random_layer(**LAYER)
    x_TD.requires_grad_()
    out_TD = mega_moe(x_TD, *rest, backend="hopper", is_recomputed=is_recomputed)
    dout_TD = torch.ones_like(out_TD)
    with Watch():
        out_TD.backward(dout_TD)
    assert torch.ops.titan_megamoe.hopper_backward.default in seen
    assert not {torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default} & set(seen)


def test_compiled_full_checkpointing_stops_before_the_combine(kernels):
    torch._dynamo.reset()

    def residual_block(x_TD, *rest):
        return x_TD + mega_moe(torch.sin(x_TD), *rest, backend="hopper", is_recomputed=True)

    def checkpointed(*inputs):
        return checkpoint(residual_block, *inputs, use_reentrant=False)

    inputs = random_layer(**LAYER)
    dout_TD = torch.randn_like(inputs[0])
    expected = gradients(residual_block, inputs, dout_TD)
    kernels.calls.clear()
    actual = gradients(torch.compile(checkpointed, fullgraph=True, backend="aot_eager"), inputs, dout_TD)
    assert_equal(actual, expected)
    assert kernels.calls == dict(dispatch=2, combine=1, backward=1)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_an_output_without_a_gradient(kernels, is_recomputed):
    """As double precision checks and unused branches make them."""
    x_TD, *rest = random_layer(**LAYER)
    x_TD.requires_grad_()
    out_TD = mega_moe(x_TD, *rest, backend="hopper", is_recomputed=is_recomputed)

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out_TD):
            return out_TD.clone()

        @staticmethod
        def backward(ctx, _):
            return None

    NoGradient.apply(out_TD).sum().backward()
    assert x_TD.grad is None and kernels.calls["backward"] == 0
