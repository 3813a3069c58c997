"""``weight_gradients`` on a GPU: against fp64, bitwise, and with the rows that nobody may read poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from titan_megamoe.kernels.plan_tables import BLOCK_M, Counters, KernelPlan, LayerShape, Layout
from titan_megamoe.kernels.weight_gradients import weight_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

NAN = float("nan")
TOLERANCE = 3e-3
"""Of bf16 results with one rounding: 2e-3 at most of each, less of all of them."""

INPUTS = {"x_RD": "D", "dout_RD": "D", "dgate_RF": "F", "dup_RF": "F", "scaled_h_RF": "F"}
PRODUCTS = {
    "dw1_EFD": ("dgate_RF", "x_RD"),
    "dw2_EDF": ("dout_RD", "scaled_h_RF"),
    "dw3_EFD": ("dup_RF", "x_RD"),
}


class Gradients:
    """Experts with so many rows each, their inputs, and the kernel over them."""

    def __init__(self, rows_per_expert: list[int], dim: int, hidden_dim: int, seed: int = 0):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.rows_per_expert = rows_per_expert
        num_experts = len(rows_per_expert)
        shape = LayerShape(
            ep_size=1, max_tokens=1, dim=dim, hidden_dim=hidden_dim, num_local_experts=num_experts, top_k=1
        )
        self.plan = Layout(KernelPlan, shape).allocate("cuda")
        self.counters = Layout(Counters, shape).allocate("cuda")
        self.starts = [0]
        for rows in rows_per_expert:
            self.starts.append(self.starts[-1] + -(-rows // BLOCK_M) * BLOCK_M)
        self.plan.expert_start_e1.copy_(torch.tensor(self.starts))
        self.plan.expert_rows_e.copy_(torch.tensor(rows_per_expert))
        widths = {"D": dim, "F": hidden_dim}
        self.inputs = {name: self._rows(widths[width]) for name, width in INPUTS.items()}
        self.shapes = {
            name: (num_experts, self.inputs[left].shape[1], self.inputs[right].shape[1])
            for name, (left, right) in PRODUCTS.items()
        }

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device="cuda").bfloat16()

    def _rows(self, width: int) -> torch.Tensor:
        """Random rows, zeros after them up to a multiple of 64, NaN beyond."""
        matrix = self.randn(self.starts[-1], width)
        for start, end, rows in zip(self.starts, self.starts[1:], self.rows_per_expert):
            matrix[start + rows : end] = 0
            matrix[start + -(-rows // 64) * 64 : end] = NAN
        return matrix

    def run(self, before: dict[str, torch.Tensor] | None = None, **kwargs) -> dict[str, torch.Tensor]:
        """All gradients, from poisoned ones or added to those of ``before``."""
        self.counters.queue.fill_(-1)
        self.counters.queue[5] = 0
        if before is None:
            gradients = {
                name: torch.full(shape, NAN, device="cuda", dtype=torch.bfloat16) for name, shape in self.shapes.items()
            }
        else:
            gradients = {name: tensor.clone() for name, tensor in before.items()}
        weight_gradients(self.plan, self.counters, **self.inputs, **gradients, accumulate=before is not None, **kwargs)
        return gradients

    def check(self, before: dict[str, torch.Tensor] | None = None, **kwargs) -> dict[str, torch.Tensor]:
        gradients = self.run(before, **kwargs)
        for name, (left, right) in PRODUCTS.items():
            assert gradients[name].isfinite().all(), name
            for expert, (start, rows) in enumerate(zip(self.starts, self.rows_per_expert)):
                mine = slice(start, start + rows)
                expected = self.inputs[left][mine].double().T @ self.inputs[right][mine].double()
                if before is not None:
                    expected += before[name][expert].double()
                got = gradients[name][expert].double()
                assert (got - expected).norm() <= TOLERANCE * expected.norm(), (name, expert)
        return gradients


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
def test_against_fp64(rows_per_expert, dim, hidden_dim):
    gradients = Gradients(rows_per_expert, dim, hidden_dim)
    first = gradients.check()
    assert_equal(gradients.run(), first)
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    gradients.check(before)


@pytest.mark.parametrize("num_rows", [0, 256])
def test_without_rows_gradients_are_zero(num_rows):
    gradients = Gradients([0] * 3, 192, 128)
    for name, tensor in gradients.inputs.items():
        gradients.inputs[name] = torch.full((num_rows, tensor.shape[1]), NAN, device="cuda", dtype=torch.bfloat16)
    assert all((gradient == 0).all() for gradient in gradients.run().values())
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    assert_equal(gradients.run(before), before)


def test_accumulating_nothing_changes_nothing():
    gradients = Gradients([100, 0, 30], 256, 128)
    before = {name: torch.full(shape, -0.0, device="cuda").bfloat16() for name, shape in gradients.shapes.items()}
    for tensor in before.values():
        tensor[1, 0, 0] = NAN
    after = gradients.run(before)
    for name, tensor in before.items():
        assert torch.equal(after[name][1].view(torch.int16), tensor[1].view(torch.int16)), name
        assert after[name][[0, 2]].isfinite().all()


def test_accumulating_rounds_once():
    gradients = Gradients([64], 64, 64)
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
def test_bitwise_equal_on_any_number_of_sms(rows_per_expert, dim, hidden_dim, accumulates):
    gradients = Gradients(rows_per_expert, dim, hidden_dim)
    before = None
    if accumulates:
        before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    expected = gradients.run(before)
    for num_sms in (1, 7, sm_count()):
        assert_equal(gradients.run(before, num_sms=num_sms), expected)


def test_random_sizes():
    for seed in range(60):
        torch.manual_seed(seed)
        rows_per_expert = (torch.randint(0, 400, (6,)) * (torch.rand(6) < 0.8)).tolist()
        num_sms = int(torch.randint(1, sm_count() + 1, ()))
        Gradients(rows_per_expert, 256, 192, seed).check(num_sms=num_sms)


def test_captured_in_a_graph():
    gradients = Gradients([300, 90], 512, 256)
    expected = gradients.run()
    got = {name: torch.full_like(tensor, NAN) for name, tensor in expected.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients.counters.queue.zero_()
        weight_gradients(gradients.plan, gradients.counters, **gradients.inputs, **got)
    for _ in range(2):
        graph.replay()
        assert_equal(got, expected)


def test_arguments_are_checked():
    gradients = Gradients([100, 30], 256, 128)
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
