"""The portable kernels under Triton's interpreter, against the formula in fp64, and the layer on them as ``hopper.py`` launches it.

The interpreter runs one program to its end before the next: so each launch here also shows that one program makes progress when none
of the others has started. Triton decides when it is imported whether kernels are interpreted, so the tests run in a pytest of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_kernels_under_the_interpreter():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr

else:
    from dataclasses import replace

    from tests.kernel_gradients import Gradients, TOLERANCE as ROUNDED
    from tests.kernel_layer import GRADIENTS, Layer, NAN
    from tests.oracle import dense_moe, gradients, random_layer, relative_error
    from titan_megamoe import hopper
    from titan_megamoe.hopper import Numerics
    from titan_megamoe.kernels import plan_tables
    from titan_megamoe.kernels.launch import INTERPRETED_PROGRAMS
    from titan_megamoe.kernels.plan_tables import BackwardRows, BLOCK_M, KeptRows, KernelFault, LayerShape
    from titan_megamoe.symmetric import SymmetricWorkspace, virtual_workspaces

    LOOSE = 3.0
    """The interpreter cuts values off where a GPU rounds them: errors are twice as large, and do not cancel."""

    NUM_PROGRAMS = [1, INTERPRETED_PROGRAMS]

    def make_layer(*args, **kwargs) -> Layer:
        return Layer(*args, **kwargs, kernels="triton", device="cpu", loose=LOOSE)

    def make_gradients(*args) -> Gradients:
        return Gradients(*args, kernels="triton", device="cpu", tolerance=LOOSE * ROUNDED)

    @pytest.mark.parametrize(
        "tokens_per_rank, num_local_experts, top_k, dim, hidden_dim",
        [
            ([70], 3, 2, 128, 64),
            ([150], 1, 1, 64, 128),  # an expert of several tiles
            ([1], 5, 1, 64, 64),
            ([0], 2, 2, 64, 64),
            ([40, 33], 2, 3, 64, 192),
            ([7, 0], 3, 1, 128, 128),
            ([0, 0], 2, 1, 64, 64),
        ],
    )
    def test_against_fp64(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim):
        layer = make_layer(tokens_per_rank, num_local_experts, top_k, dim, hidden_dim)
        layer.check(saves=True)
        layer.check_backward()

    def test_32_routes():
        ids_NK = torch.randint(0, 3, (5, 32), generator=torch.Generator().manual_seed(0))
        layer = make_layer([5], 3, 32, 192, 64, ids_NK=ids_NK)
        layer.check(saves=True)
        layer.check_backward()

    @pytest.mark.parametrize("ep_size", [1, 2])
    def test_experts_with_no_token_and_with_one(ep_size):
        ids_NK = torch.full((10, 2), 1)  # each token names it twice: two rows
        ids_NK[3] = torch.tensor([1, 3])
        layer = make_layer([10 // ep_size] * ep_size, 4 // ep_size, 2, 64, 64, ids_NK=ids_NK)
        layer.check(saves=True)
        _, grads = layer.check_backward()
        for gradient in grads[2:]:
            assert not gradient[[0, 2]].any()

    @pytest.mark.parametrize("tokens_per_rank", [[60], [30, 25]])
    def test_bitwise_equal_on_any_number_of_programs(tokens_per_rank):
        layer = make_layer(tokens_per_rank, 4, 2, 128, 64)
        first = None
        for num_programs in NUM_PROGRAMS:
            out_ND = layer.forward(saves=True, num_sms=num_programs)
            layer.generator.manual_seed(1)
            results = [out_ND, *layer.backward(layer.randn(*layer.x_ND.shape), num_sms=num_programs)]
            first = first or results
            for name, a, b in zip(("out", *GRADIENTS), results, first, strict=True):
                assert torch.equal(a, b), name

    def test_padding_is_written_up_to_a_multiple_of_64_rows_and_left_alone_beyond():
        layer = make_layer([70], 3, 2, 64, 64)
        layer.forward(saves=True)
        layer.backward(layer.randn(70, 64))
        rows, plan = layer.rows[0], layer.plans[0]
        for start, count in zip(plan.expert_start_e1.tolist(), plan.expert_rows_e.tolist()):
            end = start + -(-count // 64) * 64
            for name in ("pool_RD", "dout_RD", "dgate_RF", "dup_RF", "scaled_h_RF"):
                assert (getattr(rows, name)[start + count : end] == 0).all(), name
                assert getattr(rows, name)[end : start + BLOCK_M].isnan().all(), name
            assert rows.row_scores_R[start + count : start + BLOCK_M].isnan().all()
            assert rows.dscore_parts_NR[:, start + count : start + BLOCK_M].isnan().all()

    @pytest.mark.parametrize("num_programs", NUM_PROGRAMS)
    def test_faults_are_recorded(num_programs):
        layer = make_layer([100], 2, 2, 64, 64)
        layer.forward(saves=True)
        out_TD, dscores_TK = torch.empty_like(layer.x_ND), torch.empty_like(layer.scores_NK)
        late = dict(deadline_seconds=1e-5, num_sms=num_programs)
        no_tokens, no_tiles = (replace(layer.plans[0], sizes=layer.plans[0].sizes.clone()) for _ in range(2))
        no_tokens.sizes[1] = 0
        no_tiles.sizes[0] = 0
        for kernel, phase, call in (
            ("pull_gemm", "rows", lambda: layer.pull_gemm(0, no_tokens, **late)),
            ("gemm_push", "products", lambda: layer.gemm_push(0, out_TD, no_tiles, **late)),
            ("pull_gemm_backward", "rows", lambda: layer.pull_gemm_backward(0, no_tokens, **late)),
            (
                "gemm_push_backward",
                "products",
                lambda: layer.gemm_push_backward(0, out_TD, dscores_TK, no_tiles, **late),
            ),
        ):
            layer.reset(KeptRows if kernel == "pull_gemm" else BackwardRows)
            call()
            fault = layer.workspaces[0].local.fault
            record = dict(zip(plan_tables.FAULT_FIELDS, fault.tolist()))
            assert record["code"] == plan_tables.FAULT_DEADLINE and record["have"] == 0 and record["want"] > 0
            with pytest.raises(
                KernelFault, match=rf"rank 0: {kernel} waited past its deadline for the {phase} of tile"
            ):
                layer.workspaces[0].check()
            fault.zero_()

    @pytest.mark.parametrize("rows_per_expert, dim, hidden_dim", [([130, 64, 1, 0], 128, 64), ([65, 3], 128, 128)])
    def test_weight_gradients(rows_per_expert, dim, hidden_dim):
        made = make_gradients(rows_per_expert, dim, hidden_dim)
        first = made.check()
        for name, tensor in made.run(num_sms=1).items():
            assert torch.equal(tensor, first[name]), name
        before = {name: made.randn(*shape) for name, shape in made.shapes.items()}
        made.check(before)

    @pytest.mark.parametrize("num_rows", [0, 128])
    def test_without_rows_weight_gradients_are_zero_or_as_before(num_rows):
        made = make_gradients([0] * 2, 64, 64)
        for name in made.inputs:
            made.inputs[name] = torch.full((num_rows, 64), NAN).bfloat16()
        assert all((gradient == 0).all() for gradient in made.run().values())
        before = {name: made.randn(*shape) for name, shape in made.shapes.items()}
        for name, tensor in made.run(before).items():
            assert torch.equal(tensor, before[name]), name

    @pytest.mark.parametrize("saved", ["activations", "inputs"])
    def test_the_layer(saved, monkeypatch):
        """``hopper.py`` on the kernels that ``backends.py`` gives it for ``triton``."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(SymmetricWorkspace, "check_later", SymmetricWorkspace.check)
        inputs = random_layer(50, 64, 128, 3, 2, dtype=torch.bfloat16)
        x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD = inputs
        shape = LayerShape(ep_size=1, max_tokens=50, dim=64, hidden_dim=128, num_local_experts=3, top_k=2)
        common = dict(workspace=virtual_workspaces(shape, "cpu")[0], numerics=Numerics(kernels="triton"))
        keep = saved == "activations"
        first = hopper.dispatch(x_TD, ids_TK, scores_TK, w1_EFD, w3_EFD, keep_activations=keep, **common)
        out_TD = hopper.combine(first.plan, first.rows_R0, first.h, ids_TK, w2_EDF, **common)
        dout_TD = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        kept = dict(plan=first.plan, kept=first.kept, rows_R0=first.rows_R0, kept_activations=keep)
        grads = hopper.backward(dout_TD, *inputs, **kept, **common)
        expected = gradients(dense_moe, [t.double() if t.is_floating_point() else t for t in inputs], dout_TD.double())
        actual = (out_TD, grads.x_TD, grads.topk_scores_TK, grads.w1_EFD, grads.w2_EDF, grads.w3_EFD)
        for name, a, b in zip(("out", *GRADIENTS), actual, expected, strict=True):
            assert relative_error(a, b) < LOOSE * 1e-2, name
