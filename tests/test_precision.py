"""FP8 and MXFP8 as the reference backend emulates them: against fp64 by the design's gates, over ranks, and that it is FP8 at all."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.oracle import dense_moe, gradients, random_layer, relative_error
from titan_megamoe import mega_moe
from titan_megamoe.quantize import quantize_mx, quantize_rows, quantize_weights

FP8_BOUND, COSINE_BOUND = 8e-2, 0.995
"""Of Gaussian data, on which rounding to 3 bits of mantissa alone makes 6.3% of the output's three quantised products in a row,
and 7% of the weight gradients': see docs/precision.md."""

SNR_BOUND_DB = 20.0
QUANTISED = [
    ("fp8", "fp8"),
    ("fp8", "bf16"),
    ("fp8_bwd", "fp8"),
    ("fp8_bwd", "bf16"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "bf16"),
]
"""Precisions, and what weight gradients are computed in."""
every_precision = pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "mxfp8"])

NAMES = ("out", "x", "scores", "w1", "w2", "w3")
TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 300, 320, 192, 6, 3


def layer(precision: str, **options):
    return partial(mega_moe, backend="reference", precision=precision, **options)


def inputs_and_dout(dtype=torch.bfloat16):
    inputs = random_layer(TOKENS, DIM, HIDDEN, EXPERTS, TOP_K, dtype=dtype)
    inputs[1][0] = 0  # a token may name an expert several times
    return inputs, torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


def cosine_similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.parametrize("precision, wgrad", QUANTISED)
def test_against_fp64(precision, wgrad):
    inputs, dout_TD = inputs_and_dout()
    actual = gradients(layer(precision, wgrad=wgrad), inputs, dout_TD)
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    for name, a, b in zip(NAMES, actual, gradients(dense_moe, exact, dout_TD.double()), strict=True):
        assert relative_error(a, b) < FP8_BOUND, name
        assert cosine_similarity(a, b) > COSINE_BOUND, name


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
@pytest.mark.parametrize("saved", ["activations", "inputs"])
def test_mxfp8_against_bf16(wgrad, saved):
    inputs, dout_TD = inputs_and_dout()
    in_mxfp8 = gradients(layer("mxfp8", wgrad=wgrad, saved=saved), inputs, dout_TD)
    for name, a, b in zip(NAMES, in_mxfp8, gradients(layer("bf16"), inputs, dout_TD), strict=True):
        error = relative_error(a, b)
        assert -20 * math.log10(error) >= SNR_BOUND_DB, name
        assert cosine_similarity(a, b) >= COSINE_BOUND, name
        assert error > 1e-2, f"{name} is not in MXFP8 at all"


@pytest.mark.parametrize(
    "precision, rows, weights", [("fp8", quantize_rows, quantize_weights), ("mxfp8", quantize_mx, quantize_mx)]
)
def test_the_forward_is_the_formula_on_quantised_values(precision, rows, weights):
    inputs, _ = inputs_and_dout(torch.float32)
    x, ids, scores, w1, w2, w3 = inputs
    x, w1, w2, w3 = (rows(x).dequantize(), *(weights(w).dequantize() for w in (w1, w2, w3)))
    expected = torch.zeros(TOKENS, DIM)
    for slot in range(TOP_K):
        for expert in range(EXPERTS):
            token = (ids[:, slot] == expert).nonzero().squeeze(1)
            gate, up = x[token] @ w1[expert].T, x[token] @ w3[expert].T
            h = rows(torch.nn.functional.silu(gate) * up).dequantize()
            expected[token] += scores[token, slot, None] * (h @ w2[expert].T)
    out = layer(precision)(*inputs)
    # A product that rounds differently may move an h to its other neighbour.
    assert relative_error(out, expected) < 1e-3
    assert relative_error(out, layer("bf16")(*inputs)) > 1e-2


def test_in_mxfp8_backward_is_the_formula_on_values_quantised_along_what_is_contracted():
    inputs, dout_TD = inputs_and_dout(torch.float32)
    x, ids, scores, w1, w2, w3 = inputs

    def along(tensor, dim=-1):
        return quantize_mx(tensor, dim).dequantize()

    dx = torch.zeros(TOKENS, DIM)
    _, got_dx, _, *got_dweights = gradients(layer("mxfp8", wgrad="mxfp8"), inputs, dout_TD)
    expected_dweights = [torch.zeros_like(w) for w in (w1, w2, w3)]
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows, drows, score = along(x)[token], along(dout_TD)[token], scores[token, slot, None]
        gate, up = rows @ along(w1[expert]).T, rows @ along(w3[expert]).T
        g = drows @ along(w2[expert], -2)
        sigmoid = torch.sigmoid(gate)
        dgate = score * g * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = score * g * gate * sigmoid
        dx.index_add_(0, token, along(dgate) @ along(w1[expert], -2) + along(dup) @ along(w3[expert], -2))
        pairs = ((dgate, rows), (drows, score * gate * sigmoid * up), (dup, rows))
        for dweight, (left, right) in zip(expected_dweights, pairs):
            dweight[expert] = along(left, -2).T @ along(right, -2)
    for name, a, b in zip(("x", "w1", "w2", "w3"), (got_dx, *got_dweights), (dx, *expected_dweights), strict=True):
        assert relative_error(a, b) < 2e-3, name


def test_fp8_bwd_leaves_the_forward_alone():
    inputs, dout_TD = inputs_and_dout()
    half, full, none = (gradients(layer(p), inputs, dout_TD) for p in ("fp8_bwd", "fp8", "bf16"))
    assert relative_error(half[0], none[0]) < 1e-3 < 1e-2 < relative_error(full[0], none[0])
    assert relative_error(half[1], none[1]) > 1e-2


@pytest.mark.parametrize("precision, wgrad, share", [("fp8_bwd", "fp8", 0.8), ("mxfp8", "mxfp8", 0.95)])
def test_weight_gradients_in_bf16_are_closer(precision, wgrad, share):
    inputs, dout_TD = inputs_and_dout()
    in_fp8, in_bf16, exact = (
        gradients(layer(precision, wgrad=wgrad), inputs, dout_TD)
        for precision, wgrad in ((precision, wgrad), (precision, "bf16"), ("bf16", "bf16"))
    )
    assert relative_error(in_fp8[1], in_bf16[1]) < 1e-3, "the gradient of x does not depend on it"
    for name, a, b, c in list(zip(NAMES, in_fp8, in_bf16, exact))[3:]:
        assert relative_error(b, c) < share * relative_error(a, c), name


@every_precision
def test_saving_inputs_changes_nothing(precision):
    inputs, dout_TD = inputs_and_dout()
    saved, again = (gradients(layer(precision, saved=saved), inputs, dout_TD) for saved in ("activations", "inputs"))
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(saved, again, strict=True))


def test_not_finite_is_not_hidden():
    inputs, _ = inputs_and_dout()
    inputs[0][7, 3] = float("inf")
    assert layer("fp8")(*inputs)[7].isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "w2", "dout"])
def test_in_mxfp8_not_finite_is_not_hidden_and_zeros_are_zeros(bad, where):
    inputs, dout_TD = inputs_and_dout()
    tensors = dict(x=inputs[0][7], w2=inputs[4][2, 5], dout=dout_TD[7])
    tensors[where][3] = bad
    inputs[0][8] = 0
    out_TD, dx_TD, _, *dweights = gradients(layer("mxfp8", wgrad="mxfp8"), inputs, dout_TD)
    if where == "x":
        assert not out_TD[7].isfinite().any()
        others = torch.arange(TOKENS) != 7
        assert out_TD[others].isfinite().all(), "and stays with its token"
    if where == "w2":
        assert not out_TD[(inputs[1] == 2).any(1), 5].isfinite().any()
    if where == "dout":
        assert not dx_TD[7].isfinite().any()
        assert out_TD.isfinite().all()
    assert not all(dweight.isfinite().all() for dweight in dweights)
    if where != "w2":
        assert not out_TD[8].any()


def layer_on_rank(rank: int, precision: str, wgrad: str):
    inputs, dout_TD = inputs_and_dout(torch.float32)
    mine, held = slice(150 * rank, 150 * (rank + 1)), slice(3 * rank, 3 * (rank + 1))
    x, ids, scores, *weights = inputs
    mine_of_inputs = (x[mine], ids[mine], scores[mine], *(w[held] for w in weights))
    return gradients(layer(precision, wgrad=wgrad, group=dist.group.WORLD), mine_of_inputs, dout_TD[mine])


@every_precision
def test_ranks_equal_one_rank(precision):
    inputs, dout_TD = inputs_and_dout(torch.float32)
    wgrad = "mxfp8" if precision == "mxfp8" else "bf16"
    expected = gradients(layer(precision, wgrad=wgrad), inputs, dout_TD)
    results = run_ranks(layer_on_rank, 2, precision, wgrad)
    for index, name in enumerate(NAMES):
        torch.testing.assert_close(
            torch.cat([result[index] for result in results]), expected[index], msg=lambda m: f"{name}: {m}"
        )


def test_what_is_not_there_is_refused():
    inputs, _ = inputs_and_dout()
    with pytest.raises(
        ValueError, match=r"'fp8' .* cannot run here: x_TD is on the CPU.* backend = 'reference', which emulate it"
    ):
        mega_moe(*inputs, precision="fp8")
    with pytest.raises(ValueError, match="backend = 'hopper' cannot run this layer: x_TD is on the CPU"):
        mega_moe(*inputs, precision="fp8_bwd", backend="hopper")
    for precision, wgrad, possible in (("fp8", "mxfp8", "bf16, fp8"), ("mxfp8", "fp8", "bf16, mxfp8")):
        with pytest.raises(
            ValueError, match=f"wgrad = '{wgrad}' does not go with .* '{precision}'. Use one of: {possible}"
        ):
            layer(precision, wgrad=wgrad)(*inputs)
    with pytest.raises(ValueError, match="wgrad = 'fp4' is not known. Use one of: bf16, fp8, mxfp8"):
        layer("fp8", wgrad="fp4")(*inputs)
    with pytest.raises(
        ValueError, match="'mxfp8' .* cannot run here: .* Use precision = 'bf16', or allow_emulation = true"
    ):
        mega_moe(*inputs, precision="mxfp8")
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    with pytest.raises(TypeError, match="precision = 'fp8' takes bfloat16 or float32, but x_TD is float64"):
        layer("fp8")(*doubles)


@every_precision
def test_emulation_is_picked_where_it_is_allowed(precision):
    inputs, _ = inputs_and_dout()
    out_TD = mega_moe(*inputs, precision=precision, allow_emulation=True)
    assert torch.equal(out_TD, layer(precision)(*inputs))
