"""``weight_gradients_fp8`` on a GPU: against fp64 products of what its inputs stand for, bitwise, with everything that nobody
may read poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.test_quantize_kernels import plan_of
from titan_megamoe.kernels.plan_tables import BLOCK_M, Counters, KernelPlan, LayerShape, Layout
from titan_megamoe.kernels.quantize import quantize_columns
from titan_megamoe.kernels.tuning import tune_weight_gradients_fp8
from titan_megamoe.kernels.weight_gradients_fp8 import weight_gradients_fp8
from titan_megamoe.quantize import FP8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

NAN = float("nan")
TOLERANCE = 5e-3
"""Of bf16 results with one rounding, 2e-3 at most, from sums of 128 products that the tensor cores add with few bits."""

INPUTS = {"x_MDr": "D", "dout_MDr": "D", "dgate_MFr": "F", "dup_MFr": "F", "scaled_h_MFr": "F"}
PRODUCTS = {
    "dw1_EFD": ("dgate_MFr", "x_MDr"),
    "dw2_EDF": ("dout_MDr", "scaled_h_MFr"),
    "dw3_EFD": ("dup_MFr", "x_MDr"),
}


def scales_name(values_name: str) -> str:
    """``x_scales_MD`` of ``x_MDr``."""
    name, dims = values_name.rsplit("_", 1)
    return f"{name}_scales_{dims[:2]}"


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
        # What the quantisation knows of the tiles, and the pool's rows: the last tile is not an expert's.
        self.tiles, self.num_rows = plan_of(rows_per_expert, "cuda")
        assert self.num_rows == self.starts[-1] + BLOCK_M
        self.widths = {name: {"D": dim, "F": hidden_dim}[width] for name, width in INPUTS.items()}
        self.inputs = {}
        for name in INPUTS:
            self.quantize(name, self.rows(self.widths[name]))
        self.shapes = {
            name: (num_experts, self.widths[left], self.widths[right]) for name, (left, right) in PRODUCTS.items()
        }

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device="cuda").bfloat16()

    def rows(self, width: int) -> torch.Tensor:
        """Random rows whose columns differ in magnitude, and NaN in padding."""
        matrix = self.randn(self.num_rows, width)
        octaves = torch.randint(-6, 7, (width,), generator=self.generator, device="cuda")
        matrix *= torch.exp2(octaves.float()).bfloat16()
        for start, end, rows in zip(self.starts, [*self.starts[1:], self.num_rows], [*self.rows_per_expert, 0]):
            matrix[start + rows : end] = NAN
        return matrix

    def quantize(self, name: str, rows_RI: torch.Tensor) -> None:
        """Make these rows an input. Its tile that no expert has is NaN."""
        width = rows_RI.shape[1]
        values = torch.full((self.num_rows // BLOCK_M, width, BLOCK_M), NAN, device="cuda").to(FP8)
        scales = torch.full((self.num_rows // BLOCK_M, width), NAN, device="cuda")
        quantize_columns(self.tiles, rows_RI, values, scales)
        self.inputs |= {name: values, scales_name(name): scales}

    def dequantized(self, name: str, expert: int) -> torch.Tensor:
        """fp64, the expert's rows of an input, transposed."""
        start, rows = self.starts[expert], self.rows_per_expert[expert]
        scales = self.inputs[scales_name(name)].double().repeat_interleave(BLOCK_M, dim=0)
        values_IR = self.inputs[name].transpose(0, 1).reshape(-1, self.num_rows)
        return values_IR[:, start : start + rows].double() * scales[start : start + rows].T

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
        weight_gradients_fp8(
            self.plan, self.counters, **self.inputs, **gradients, accumulate=before is not None, **kwargs
        )
        return gradients

    def check(self, before: dict[str, torch.Tensor] | None = None, **kwargs) -> dict[str, torch.Tensor]:
        gradients = self.run(before, **kwargs)
        for name, (left, right) in PRODUCTS.items():
            assert gradients[name].isfinite().all(), name
            for expert in range(len(self.rows_per_expert)):
                expected = self.dequantized(left, expert) @ self.dequantized(right, expert).T
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
        ([100, 200], 384, 256),
        ([65, 0, 63], 128, 128),
        ([200, 128], 1024, 640),
        ([1] * 9, 256, 128),
        ([0, 0, 5000, 0], 512, 256),
        ([20000], 256, 512),
        ([0] * 4 + [3], 128, 384),
        ([37 * (e % 5) for e in range(300)], 256, 128),
        ([700, 1], 4096, 1536),
    ],
)
def test_against_fp64(rows_per_expert, dim, hidden_dim):
    gradients = Gradients(rows_per_expert, dim, hidden_dim)
    first = gradients.check()
    assert_equal(gradients.run(), first)
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    gradients.check(before)


def test_both_widths_of_tiles_are_exact():
    """Small integers, and scales that are powers of two: all products and sums are exact."""
    for dim, hidden_dim in ((256, 512), (384, 128)):
        gradients = Gradients([130, 0, 256, 5], dim, hidden_dim)
        for name, width in gradients.widths.items():
            size = (gradients.num_rows, width)
            values = torch.randint(-2, 3, size, generator=gradients.generator, device="cuda").float()
            for start, end, rows in zip(gradients.starts, gradients.starts[1:], gradients.rows_per_expert):
                values[start + rows : end] = 0
            values[gradients.starts[-1] :] = NAN
            size = (gradients.num_rows // BLOCK_M, width)
            scales = torch.randint(-3, 4, size, generator=gradients.generator, device="cuda")
            values_MIr = values.to(FP8).view(-1, BLOCK_M, width).transpose(1, 2).contiguous()  # noqa: N806
            gradients.inputs |= {name: values_MIr, scales_name(name): torch.exp2(scales.float())}
        for name, got in gradients.run().items():
            left, right = PRODUCTS[name]
            for expert in range(4):
                expected = gradients.dequantized(left, expert) @ gradients.dequantized(right, expert).T
                assert torch.equal(got[expert], expected.float().bfloat16()), (name, expert)


@pytest.mark.parametrize("num_rows", [0, 256])
def test_without_rows_gradients_are_zero(num_rows):
    gradients = Gradients([0] * 3, 256, 128)
    for name, width in gradients.widths.items():
        gradients.inputs[name] = torch.full((num_rows // BLOCK_M, width, BLOCK_M), NAN, device="cuda").to(FP8)
        gradients.inputs[scales_name(name)] = torch.full((num_rows // BLOCK_M, width), NAN, device="cuda")
    assert all((gradient == 0).all() for gradient in gradients.run().values())
    before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    assert_equal(gradients.run(before), before)


@pytest.mark.parametrize("dim, hidden_dim", [(256, 128), (256, 512)])
def test_accumulating_nothing_changes_nothing(dim, hidden_dim):
    gradients = Gradients([100, 0, 30], dim, hidden_dim)
    before = {name: torch.full(shape, -0.0, device="cuda").bfloat16() for name, shape in gradients.shapes.items()}
    for tensor in before.values():
        tensor[1, 0, 0] = NAN
    after = gradients.run(before)
    for name, tensor in before.items():
        assert torch.equal(after[name][1].view(torch.int16), tensor[1].view(torch.int16)), name
        assert after[name][[0, 2]].isfinite().all()


def test_accumulating_rounds_once():
    gradients = Gradients([200], 128, 128)
    for name in INPUTS:
        values = torch.zeros_like(gradients.inputs[name].float())
        values[:, :, 0] = 1
        gradients.inputs[name] = values.to(FP8)
        gradients.inputs[scales_name(name)].fill_(1)
    # The products' sum, 2^-7 + 2^-15, rounds to 2^-7, and 2 + 2^-7 is a tie that rounds to 2. Rounded once it is more.
    for name in ("dgate_MFr", "dup_MFr", "dout_MDr"):
        gradients.inputs[scales_name(name)][0] = 2.0**-7
        gradients.inputs[scales_name(name)][1] = 2.0**-15
    before = {name: torch.full(shape, 2.0, device="cuda").bfloat16() for name, shape in gradients.shapes.items()}
    for name, tensor in gradients.run(before).items():
        expected = torch.tensor(2.0 + 2.0**-7 + 2.0**-15).bfloat16()
        assert (tensor == expected.cuda()).all(), name


def test_a_nan_is_not_hidden():
    gradients = Gradients([100, 300], 256, 128)
    rows = gradients.rows(128)
    rows[gradients.starts[1] + 170, 5] = NAN
    gradients.quantize("dgate_MFr", rows)
    got = gradients.run()
    assert got["dw1_EFD"][1, 5].isnan().all()
    got["dw1_EFD"][1, 5] = 0
    assert all(gradient.isfinite().all() for gradient in got.values())


@pytest.mark.parametrize("rows_per_expert, dim, hidden_dim", [([300, 0, 1, 700], 512, 256), ([90, 400], 384, 128)])
@pytest.mark.parametrize("accumulates", [False, True])
def test_bitwise_equal_on_any_number_of_sms(rows_per_expert, dim, hidden_dim, accumulates):
    gradients = Gradients(rows_per_expert, dim, hidden_dim)
    before = None
    if accumulates:
        before = {name: gradients.randn(*shape) for name, shape in gradients.shapes.items()}
    expected = gradients.run(before)
    for num_sms in (1, 7, sm_count()):
        assert_equal(gradients.run(before, num_sms=num_sms), expected)


def test_bitwise_equal_with_any_width_of_tiles():
    gradients = Gradients([300, 0, 1, 700], 512, 256)
    narrow = replace(tune_weight_gradients_fp8(512, 256), block_n=128)
    assert_equal(gradients.run(tuning=narrow), gradients.run())


def test_random_sizes():
    for seed in range(60):
        torch.manual_seed(seed)
        rows_per_expert = (torch.randint(0, 400, (6,)) * (torch.rand(6) < 0.8)).tolist()
        num_sms = int(torch.randint(1, sm_count() + 1, ()))
        Gradients(rows_per_expert, 256, (128, 256)[seed % 2], seed).check(num_sms=num_sms)


def test_captured_in_a_graph():
    gradients = Gradients([300, 90], 512, 256)
    expected = gradients.run()
    got = {name: torch.full_like(tensor, NAN) for name, tensor in expected.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients.counters.queue.zero_()
        weight_gradients_fp8(gradients.plan, gradients.counters, **gradients.inputs, **got)
    for _ in range(2):
        graph.replay()
        assert_equal(got, expected)


def test_arguments_are_checked():
    gradients = Gradients([100, 30], 256, 128)
    with pytest.raises(ValueError, match="weight_gradients_fp8: num_sms = 0"):
        gradients.run(num_sms=0)
    good = dict(gradients.inputs)
    for name, tensor in good.items():
        gradients.inputs = good | {name: tensor.bfloat16()}
        with pytest.raises(ValueError, match=f"weight_gradients_fp8: {name} is"):
            gradients.run()
        gradients.inputs = good | {name: tensor.mT.contiguous().mT}
        with pytest.raises(ValueError, match=f"weight_gradients_fp8: {name} is .* strides"):
            gradients.run()
    gradients.inputs = good | {name: good[name][:, :, :100].contiguous() for name in INPUTS}
    with pytest.raises(ValueError, match="weight_gradients_fp8: x_MDr is"):
        gradients.run()
    gradients.inputs = good | {name: good[name][:, :64] for name in ("dgate_MFr", "dup_MFr", "scaled_h_MFr")}
    shapes = dict(gradients.shapes)
    gradients.shapes = {"dw1_EFD": (2, 64, 256), "dw2_EDF": (2, 256, 64), "dw3_EFD": (2, 64, 256)}
    with pytest.raises(ValueError, match="F = 64 is not a multiple of 128"):
        gradients.run()
    gradients.inputs = good
    gradients.shapes = shapes | {"dw2_EDF": (2, 128, 256)}
    with pytest.raises(ValueError, match="weight_gradients_fp8: dw2_EDF is"):
        gradients.run()
    gradients.shapes = {name: (3, *shape[1:]) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="plan.expert_rows_e"):
        gradients.run()
    gradients.plan = replace(gradients.plan, expert_rows_e=gradients.plan.expert_rows_e.long())
    with pytest.raises(ValueError, match="plan.expert_rows_e"):
        gradients.run()
