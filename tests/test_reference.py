"""The reference backend on one rank, against the dense formula."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import dense_moe, gradients, random_layer, relative_error
from titan_megamoe import mega_moe, reference
from titan_megamoe.reference import Link

NAMES = ("out", "x", "scores", "w1", "w2", "w3")


@pytest.mark.parametrize("saved", ["activations", "inputs"])
@pytest.mark.parametrize(
    "tokens, dim, hidden, experts, top_k", [(37, 16, 24, 6, 3), (1, 8, 8, 4, 4), (50, 8, 16, 1, 1), (9, 12, 20, 32, 2)]
)
def test_fp64_equals_the_formula(tokens, dim, hidden, experts, top_k, saved):
    inputs = random_layer(tokens, dim, hidden, experts, top_k)
    dout_TD = torch.randn(tokens, dim, dtype=torch.float64)
    actual = gradients(lambda *a: mega_moe(*a, saved=saved), inputs, dout_TD)
    expected = gradients(dense_moe, inputs, dout_TD)
    for name, a, b in zip(NAMES, actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda m: f"{name}: {m}")


def test_fp64_gradients_by_finite_differences():
    x, ids, scores, w1, w2, w3 = random_layer(5, 4, 6, 3, 2, seed=3)
    leaves = [t.requires_grad_() for t in (x, scores, w1, w2, w3)]
    assert torch.autograd.gradcheck(lambda x, s, w1, w2, w3: mega_moe(x, ids, s, w1, w2, w3), leaves)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_low_precision_is_close_to_fp64_on_the_same_inputs(dtype, bound):
    inputs = random_layer(256, 64, 128, 8, 2, dtype=dtype, seed=1)
    dout_TD = torch.randn(256, 64).to(dtype)
    actual = gradients(mega_moe, inputs, dout_TD)
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    for name, a, b in zip(NAMES, actual, gradients(dense_moe, exact, dout_TD.double())):
        assert relative_error(a, b) < bound, name
    for leaf, grad in zip((inputs[0], *inputs[2:]), actual[1:]):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape


def test_experts_without_tokens_get_zero_gradients():
    x, ids, scores, w1, w2, w3 = random_layer(20, 8, 8, 6, 2)
    ids = ids % 3  # experts 3 to 5 stay empty; tokens may have one expert twice
    dout_TD = torch.randn(20, 8, dtype=torch.float64)
    actual = gradients(mega_moe, (x, ids, scores, w1, w2, w3), dout_TD)
    expected = gradients(dense_moe, (x, ids, scores, w1, w2, w3), dout_TD)
    for name, a, b in zip(NAMES, actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda m: f"{name}: {m}")
    for grad in actual[3:]:
        assert torch.equal(grad[3:], torch.zeros_like(grad[3:]))


def test_no_tokens():
    inputs = random_layer(0, 8, 8, 4, 2)
    out_TD, dx_TD, dscores_TK, *dweights = gradients(mega_moe, inputs, torch.zeros(0, 8, dtype=torch.float64))
    assert out_TD.shape == dx_TD.shape == (0, 8) and dscores_TK.shape == (0, 2)
    assert all(torch.equal(d, torch.zeros_like(d)) for d in dweights)


def test_int32_ids_give_the_same_bits():
    x, ids, *rest = random_layer(30, 16, 16, 8, 2, dtype=torch.bfloat16)
    assert torch.equal(mega_moe(x, ids, *rest), mega_moe(x, ids.int(), *rest))


def test_two_runs_are_bitwise_equal():
    inputs = random_layer(300, 32, 64, 8, 4, dtype=torch.bfloat16)
    dout_TD = torch.randn(300, 32).bfloat16()
    for a, b in zip(gradients(mega_moe, inputs, dout_TD), gradients(mega_moe, inputs, dout_TD)):
        assert torch.equal(a, b)


def test_stages_are_what_their_names_say():
    x, ids, scores, w1, w2, w3 = random_layer(12, 8, 16, 4, 2)
    stages = reference.forward(x, ids, scores, w1, w2, w3, link=Link(""))
    for expert in range(4):
        start, stop = stages.plan.row_offsets_e1[expert : expert + 2].tolist()
        rows = stages.saved.x_rows_RD[start:stop]
        assert torch.equal(rows, x[(ids == expert).any(dim=1)])
        torch.testing.assert_close(stages.saved.gate_RF[start:stop], rows @ w1[expert].t())
        torch.testing.assert_close(stages.saved.up_RF[start:stop], rows @ w3[expert].t())
        h = torch.nn.functional.silu(rows @ w1[expert].t()) * (rows @ w3[expert].t())
        torch.testing.assert_close(stages.h_RF[start:stop], h)
    torch.testing.assert_close(stages.partial_UD, stages.out_TD)  # on one rank, nothing is left to reduce


def test_compiles_into_one_graph():
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    inputs = random_layer(16, 8, 8, 4, 2)
    dout_TD = torch.randn(16, 8, dtype=torch.float64)

    def layer(x, *rest):
        return torch.tanh(mega_moe(x * 2, *rest)) + x

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, inputs, dout_TD), gradients(layer, inputs, dout_TD)):
        torch.testing.assert_close(a, b)


def test_operator_registration_is_sound():
    inputs = random_layer(6, 4, 4, 4, 2)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    torch.library.opcheck(
        torch.ops.titan_megamoe.reference_forward.default,
        (*leaves, "", "activations", "bf16", "fp8"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def bad(**changes):
    named = dict(
        zip(("x_TD", "topk_ids_TK", "topk_scores_TK", "w1_EFD", "w2_EDF", "w3_EFD"), random_layer(5, 8, 16, 4, 2))
    )
    options = {}
    for name, change in changes.items():
        if name in named:
            named[name] = change(named[name])
        else:
            options[name] = change
    return lambda: mega_moe(**named, **options)


def set_at(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    "call, error, message",
    [
        (bad(topk_ids_TK=lambda t: set_at(t, (3, 1), 4)), ValueError, r"topk_ids_TK\[3, 1\] is 4, .* 0 to 3"),
        (bad(topk_ids_TK=lambda t: set_at(t, (0, 0), -1)), ValueError, r"topk_ids_TK\[0, 0\] is -1"),
        (bad(topk_scores_TK=lambda t: set_at(t, (2, 0), float("nan"))), ValueError, r"topk_scores_TK\[2, 0\] is nan"),
        (bad(topk_scores_TK=lambda t: set_at(t, (2, 0), float("inf"))), ValueError, r"topk_scores_TK\[2, 0\] is inf"),
        (bad(topk_ids_TK=lambda t: t.double()), TypeError, "topk_ids_TK has dtype torch.float64"),
        (bad(topk_scores_TK=lambda t: t.half()), TypeError, "topk_scores_TK has dtype torch.float16"),
        (bad(x_TD=lambda t: t.long()), TypeError, "x_TD has dtype torch.int64"),
        (bad(w2_EDF=lambda t: t.float()), TypeError, "w2_EDF has dtype torch.float32, but x_TD has torch.float64"),
        (bad(w3_EFD=lambda t: t.to("meta")), ValueError, "w3_EFD is on meta, but x_TD is on cpu"),
        (bad(w2_EDF=lambda t: t.transpose(1, 2)), ValueError, r"w2_EDF has shape \(4, 16, 8\), expected \(4, 8, 16\)"),
        (bad(topk_scores_TK=lambda t: t[:4]), ValueError, r"topk_scores_TK has shape \(4, 2\), expected \(5, 2\)"),
        (bad(x_TD=lambda t: t[None]), ValueError, "x_TD has shape .* must have 2 dimensions"),
        (bad(w1_EFD=lambda t: t[:0], w2_EDF=lambda t: t[:0], w3_EFD=lambda t: t[:0]), ValueError, "holds no experts"),
        (bad(precision="fp4"), ValueError, "precision = 'fp4' is not known. Use one of: bf16, fp8"),
        (bad(precision="fp8"), TypeError, "precision = 'fp8' takes bfloat16 or float32, but x_TD is float64"),
        (bad(saved="nothing"), ValueError, "saved = 'nothing' is not known"),
        (bad(backend="magic"), ValueError, "backend = 'magic' is not known"),
        (bad(capacity=0.0), ValueError, "capacity = 0.0. Pass a positive multiple"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_too_many_routes_are_refused():
    inputs = random_layer(2, 4, 4, 40, 33)
    with pytest.raises(ValueError, match="33 routes per token; 1 to 32"):
        mega_moe(*inputs)
