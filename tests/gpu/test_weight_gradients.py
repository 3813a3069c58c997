"""``weight_gradients`` on a GPU: against fp64, bitwise, and with the rows that nobody may read poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.kernel_gradients import Gradients, NAN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def sm_count() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    "rows_per_expert, dim, hidden_dim",
    [
        ([300, 64, 1, 0, 129], 256, 256),
        ([1000, 0, 777], 2048, 768),
        ([100, 200], 320, 192),
        ([65, 0, 63], 64, 64),
        ([200, 128], 1024, 640),
        ([130, 5], 384, 256),
        ([1] * 9, 256, 128),
        ([0, 0, 5000, 0], 512, 256),
        ([20000], 256, 512),
        ([0] * 4 + [3], 128, 64),
        ([37 * (e % 5) for e in range(500)], 256, 64),
    ],
)
def test_against_fp64(rows_per_expert, dim, hidden_dim, kernels):
    gradients = Gradients(rows_per_expert, dim, hidden_dim, kernels=kernels)
    first = gradients.check()
    assert_equal(gradients.run(), first)
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    gradients.check(before)


@pytest.mark.parametrize("num_rows", [0, 256])
def test_without_rows_gradients_are_zero(num_rows, kernels):
    gradients = Gradients([0] * 3, 192, 128, kernels=kernels)
    for name, tensor in gradients.inputs.items():
        gradients.inputs[name] = torch.full((num_rows, tensor.shape[1]), NAN, device="cuda", dtype=torch.bfloat16)
    assert all((gradient == 0).all() for gradient in gradients.run().values())
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    assert_equal(gradients.run(before), before)


def test_accumulating_nothing_changes_nothing(kernels):
    gradients = Gradients([100, 0, 30], 256, 128, kernels=kernels)
    before = {name: torch.full(shape, -0.0, device="cuda").bfloat16() for name, shape in gradients.shapes.items()}
    for tensor in before.values():
        tensor[1, 0, 0] = NAN
    after = gradients.run(before)
    for name, tensor in before.items():
        assert torch.equal(after[name][1].view(torch.int16), tensor[1].view(torch.int16)), name
        assert after[name][[0, 2]].isfinite().all()


def test_accumulating_rounds_once(kernels):
    gradients = Gradients([64], 64, 64, kernels=kernels)
    for tensor in gradients.inputs.values():
        tensor.zero_()
        tensor[:2] = 1
    # The products' sum, 2^-7 + 2^-15, rounds to 2^-7, and 2 + 2^-7 is a tie that rounds to 2. Rounded once it is more.
    for name in ("dgate_RF", "dup_RF", "dout_RD"):
        gradients.inputs[name][0] = 2.0**-7
        gradients.inputs[name][1] = 2.0**-15
    before = {name: torch.full(shape, 2.0, device="cuda").bfloat16() for name, shape in gradients.shapes.items()}
    for name, tensor in gradients.run(before).items():
        expected = torch.tensor(2.0 + 2.0**-7 + 2.0**-15).bfloat16()
        assert (tensor == expected.cuda()).all(), name


@pytest.mark.parametrize("rows_per_expert, dim, hidden_dim", [([300, 0, 1, 700], 512, 256), ([90, 400], 320, 192)])
@pytest.mark.parametrize("accumulates", [False, True])
def test_bitwise_equal_on_any_number_of_sms(rows_per_expert, dim, hidden_dim, accumulates, kernels):
    gradients = Gradients(rows_per_expert, dim, hidden_dim, kernels=kernels)
    before = None
    if accumulates:
        before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    expected = gradients.run(before)
    for num_sms in (1, 7, sm_count()):
        assert_equal(gradients.run(before, num_sms=num_sms), expected)


def test_random_sizes(kernels):
    for seed in range(60):
        torch.manual_seed(seed)
        rows_per_expert = (torch.randint(0, 400, (6,)) * (torch.rand(6) < 0.8)).tolist()
        num_sms = int(torch.randint(1, sm_count() + 1, ()))
        Gradients(rows_per_expert, 256, 192, seed, kernels=kernels).check(num_sms=num_sms)


def test_captured_in_a_graph(kernels):
    gradients = Gradients([300, 90], 512, 256, kernels=kernels)
    expected = gradients.run()
    got = {name: torch.full_like(tensor, NAN) for name, tensor in expected.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients.counters.queue.zero_()
        gradients.weight_gradients(gradients.plan, gradients.counters, **gradients.inputs, **got)
    for _ in range(2):
        graph.replay()
        assert_equal(got, expected)


def test_arguments_are_checked(kernels):
    gradients = Gradients([100, 30], 256, 128, kernels=kernels)
    with pytest.raises(ValueError, match="weight_gradients: num_sms = 0"):
        gradients.run(num_sms=0)
    good = dict(gradients.inputs)
    for name, tensor in good.items():
        gradients.inputs = good | {name: tensor.float()}
        with pytest.raises(ValueError, match=f"weight_gradients: {name} is"):
            gradients.run()
    gradients.inputs = {name: tensor[:100] for name, tensor in good.items()}
    with pytest.raises(ValueError, match="R = 100 rows"):
        gradients.run()
    gradients.inputs = good
    gradients.shapes = gradients.shapes | {"dw2_EDF": (2, 128, 256)}
    with pytest.raises(ValueError, match="weight_gradients: dw2_EDF is"):
        gradients.run()
    gradients.shapes = {name: (3, *shape[1:]) for name, shape in gradients.shapes.items()} | {"dw2_EDF": (3, 256, 128)}
    with pytest.raises(ValueError, match="plan.expert_rows_e"):
        gradients.run()
    gradients.plan = replace(gradients.plan, expert_rows_e=gradients.plan.expert_rows_e.long())
    with pytest.raises(ValueError, match="plan.expert_rows_e"):
        gradients.run()
