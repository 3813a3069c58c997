"""FP8 as the reference backend emulates it: against fp64 by the design's gates, over ranks, and that it is FP8 at all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.oracle import dense_moe, gradients, random_layer, relative_error
from titan_megamoe import mega_moe
from titan_megamoe.quantize import quantize_rows, quantize_weights

FP8_BOUND, COSINE_BOUND = 8e-2, 0.995
"""Of Gaussian data, on which rounding to 3 bits of mantissa alone makes 6.3% of the output's three quantised products in a row,
and 7% of the weight gradients': see docs/precision.md."""

NAMES = ("out", "x", "scores", "w1", "w2", "w3")
TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 300, 320, 192, 6, 3


def layer(precision: str, **options):
    return partial(mega_moe, backend="reference", precision=precision, **options)


def inputs_and_dout(dtype=torch.bfloat16):
    inputs = random_layer(TOKENS, DIM, HIDDEN, EXPERTS, TOP_K, dtype=dtype)
    inputs[1][0] = 0  # a token may name an expert several times
    return inputs, torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_against_fp64(precision, wgrad):
    inputs, dout_TD = inputs_and_dout()
    actual = gradients(layer(precision, wgrad=wgrad), inputs, dout_TD)
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    for name, a, b in zip(NAMES, actual, gradients(dense_moe, exact, dout_TD.double()), strict=True):
        assert relative_error(a, b) < FP8_BOUND, name
        assert torch.nn.functional.cosine_similarity(a.double().flatten(), b.flatten(), dim=0) > COSINE_BOUND, name


def test_the_forward_is_the_formula_on_quantised_values():
    inputs, _ = inputs_and_dout(torch.float32)
    x, ids, scores, w1, w2, w3 = inputs
    x, w1, w2, w3 = (
        quantize_rows(x).dequantize(),
        *(quantize_weights(w).dequantize() for w in (w1, w2, w3)),
    )
    expected = torch.zeros(TOKENS, DIM)
    for slot in range(TOP_K):
        for expert in range(EXPERTS):
            token = (ids[:, slot] == expert).nonzero().squeeze(1)
            gate, up = x[token] @ w1[expert].T, x[token] @ w3[expert].T
            h = quantize_rows(torch.nn.functional.silu(gate) * up).dequantize()
            expected[token] += scores[token, slot, None] * (h @ w2[expert].T)
    out = layer("fp8")(*inputs)
    # A product that rounds differently may move an h to its other neighbour.
    assert relative_error(out, expected) < 1e-3
    assert relative_error(out, layer("bf16")(*inputs)) > 1e-2


def test_fp8_bwd_leaves_the_forward_alone():
    inputs, dout_TD = inputs_and_dout()
    half, full, none = (gradients(layer(p), inputs, dout_TD) for p in ("fp8_bwd", "fp8", "bf16"))
    assert relative_error(half[0], none[0]) < 1e-3 < 1e-2 < relative_error(full[0], none[0])
    assert relative_error(half[1], none[1]) > 1e-2


def test_weight_gradients_in_bf16_are_closer():
    inputs, dout_TD = inputs_and_dout()
    in_fp8, in_bf16, exact = (
        gradients(layer(precision, wgrad=wgrad), inputs, dout_TD)
        for precision, wgrad in (("fp8_bwd", "fp8"), ("fp8_bwd", "bf16"), ("bf16", "bf16"))
    )
    assert relative_error(in_fp8[1], in_bf16[1]) < 1e-3, "the gradient of x does not depend on it"
    for name, a, b, c in list(zip(NAMES, in_fp8, in_bf16, exact))[3:]:
        assert relative_error(b, c) < 0.8 * relative_error(a, c), name


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_saving_inputs_changes_nothing(precision):
    inputs, dout_TD = inputs_and_dout()
    saved, again = (gradients(layer(precision, saved=saved), inputs, dout_TD) for saved in ("activations", "inputs"))
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(saved, again, strict=True))


def test_not_finite_is_not_hidden():
    inputs, _ = inputs_and_dout()
    inputs[0][7, 3] = float("inf")
    assert layer("fp8")(*inputs)[7].isnan().all()


def layer_on_rank(rank: int, precision: str):
    inputs, dout_TD = inputs_and_dout(torch.float32)
    mine, held = slice(150 * rank, 150 * (rank + 1)), slice(3 * rank, 3 * (rank + 1))
    x, ids, scores, *weights = inputs
    mine_of_inputs = (x[mine], ids[mine], scores[mine], *(w[held] for w in weights))
    return gradients(layer(precision, group=dist.group.WORLD), mine_of_inputs, dout_TD[mine])


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_ranks_equal_one_rank(precision):
    inputs, dout_TD = inputs_and_dout(torch.float32)
    expected = gradients(layer(precision), inputs, dout_TD)
    results = run_ranks(layer_on_rank, 2, precision)
    for index, name in enumerate(NAMES):
        torch.testing.assert_close(
            torch.cat([result[index] for result in results]), expected[index], msg=lambda m: f"{name}: {m}"
        )


def test_what_is_not_there_is_refused():
    inputs, _ = inputs_and_dout()
    with pytest.raises(
        ValueError, match=r"'fp8' .* cannot run here: x_TD is on the CPU.* backend = 'reference', which emul"
    ):
        mega_moe(*inputs, precision="fp8")
    with pytest.raises(ValueError, match="backend = 'hopper' cannot run this layer: x_TD is on the CPU"):
        mega_moe(*inputs, precision="fp8_bwd", backend="hopper")
    with pytest.raises(
        ValueError, match=r"'mxfp8' .* has no kernels in this version .* Use one of: bf16, fp8, fp8_bwd"
    ):
        layer("mxfp8")(*inputs)
    with pytest.raises(ValueError, match="wgrad = 'fp4' is not known. Use one of: bf16, fp8"):
        layer("fp8", wgrad="fp4")(*inputs)
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    with pytest.raises(TypeError, match="precision = 'fp8' takes bfloat16 or float32, but x_TD is float64"):
        layer("fp8")(*doubles)
