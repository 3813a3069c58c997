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
    from types import SimpleNamespace

    from tests.kernel_gradients import Gradients, TOLERANCE as ROUNDED
    from tests.kernel_layer import GRADIENTS, Layer, NAN
    from tests.oracle import dense_moe, gradients, random_layer, relative_error
    from titan_megamoe import hopper, mega_moe
    from titan_megamoe.hopper import Numerics
    from titan_megamoe.hopper_stages import Stages
    from titan_megamoe.kernels import combine, plan_tables
    from titan_megamoe.kernels.launch import INTERPRETED_PROGRAMS
    from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
    from titan_megamoe.kernels.plan_tables import (
        BackwardRows,
        BLOCK_M,
        HiddenRows,
        KeptRows,
        KernelFault,
        LayerShape,
        Layout,
        PHASE_ALL_SENT,
        PHASE_PUBLISHED,
        ResultRows,
    )
    from titan_megamoe.reference import Gradients as LayerGradients
    from titan_megamoe.symmetric import SymmetricWorkspace, virtual_workspaces

    LOOSE = 3.0
    """The interpreter cuts values off where a GPU rounds them: errors are twice as large, and do not cancel."""

    MX_BOUND = 4e-2
    """Against the emulation, from which e4m3 differs where gradients in bf16 were cut off before. With an emulation that cuts them off, too,
    the gradients of x and of scores differ by less than 1%."""

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

    def run_layer(monkeypatch, inputs, dout_TD, saved: str, **numerics):
        """Output and gradients of ``hopper.py`` on the kernels that ``backends.py`` gives it for ``triton``."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(SymmetricWorkspace, "check_later", SymmetricWorkspace.check)
        x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD = inputs
        (num_tokens, dim), (num_experts, hidden_dim, _) = x_TD.shape, w1_EFD.shape
        sizes = dict(dim=dim, hidden_dim=hidden_dim, num_local_experts=num_experts, top_k=ids_TK.shape[1])
        shape = LayerShape(ep_size=1, max_tokens=num_tokens, **sizes)
        common = dict(workspace=virtual_workspaces(shape, "cpu")[0], numerics=Numerics(kernels="triton", **numerics))
        keep = saved == "activations"
        first = hopper.dispatch(x_TD, ids_TK, scores_TK, w1_EFD, w3_EFD, keep_activations=keep, **common)
        out_TD = hopper.combine(first.plan, first.rows_R0, first.h, ids_TK, w2_EDF, **common)
        kept = dict(plan=first.plan, kept=first.kept, rows_R0=first.rows_R0, kept_activations=keep)
        grads = hopper.backward(dout_TD, *inputs, **kept, **common)
        return out_TD, grads.x_TD, grads.topk_scores_TK, grads.w1_EFD, grads.w2_EDF, grads.w3_EFD

    @pytest.mark.parametrize("saved", ["activations", "inputs"])
    def test_the_layer(saved, monkeypatch):
        inputs = random_layer(50, 64, 128, 3, 2, dtype=torch.bfloat16)
        dout_TD = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        actual = run_layer(monkeypatch, inputs, dout_TD, saved)
        expected = gradients(dense_moe, [t.double() if t.is_floating_point() else t for t in inputs], dout_TD.double())
        for name, a, b in zip(("out", *GRADIENTS), actual, expected, strict=True):
            assert relative_error(a, b) < LOOSE * 1e-2, name

    # ---- in MXFP8

    @pytest.mark.parametrize("saved", ["activations", "inputs"])
    @pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
    def test_the_layer_in_mxfp8(saved, wgrad, monkeypatch):
        inputs = random_layer(70, 128, 256, 3, 2, dtype=torch.bfloat16)
        dout_TD = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        options = dict(precision="mxfp8", wgrad=wgrad)
        actual = run_layer(monkeypatch, inputs, dout_TD, saved, **options)
        emulated = gradients(lambda *a: mega_moe(*a, backend="reference", **options), inputs, dout_TD)
        exact = gradients(dense_moe, [t.double() if t.is_floating_point() else t for t in inputs], dout_TD.double())
        for name, a, b, c in zip(("out", *GRADIENTS), actual, emulated, exact, strict=True):
            assert relative_error(a, b) < MX_BOUND, name
            assert 1e-2 < relative_error(a, c) < 8e-2, name

    @pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
    @pytest.mark.parametrize("tokens_per_rank", [[40, 33], [60, 0]])
    def test_two_ranks_in_mxfp8(tokens_per_rank, wgrad):
        numerics = Numerics(kernels="triton", precision="mxfp8", wgrad=wgrad)
        inputs = random_layer(sum(tokens_per_rank), 128, 128, 4, 3, dtype=torch.bfloat16)
        dout_ND = torch.randn(*inputs[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        actual = run_stages_of_ranks(tokens_per_rank, inputs, dout_ND, numerics)
        options = dict(backend="reference", precision="mxfp8", wgrad=wgrad)
        expected = gradients(lambda *a: mega_moe(*a, **options), inputs, dout_ND)
        for name, a, b in zip(("out", *GRADIENTS), actual, expected, strict=True):
            assert relative_error(a, b) < MX_BOUND, name

    def run_stages_of_ranks(tokens_per_rank, inputs, dout_ND, numerics):
        """Output and gradients of a layer, its ranks' stages one after the other."""
        x_ND, ids_NK, scores_NK, *weights = inputs
        num_ranks, num_local = len(tokens_per_rank), weights[0].shape[0] // len(tokens_per_rank)
        (_, hidden_dim, dim), top_k = weights[0].shape, ids_NK.shape[1]
        sizes = dict(dim=dim, hidden_dim=hidden_dim, num_local_experts=num_local, top_k=top_k)
        workspaces = virtual_workspaces(LayerShape(ep_size=num_ranks, max_tokens=64, **sizes), "cpu")
        outs, results = (
            [torch.full_like(x, NAN) for x in x_ND.split(tokens_per_rank)],
            [torch.full_like(t, NAN) for t in (x_ND, scores_NK, *weights)],
        )
        of_rank = [t.split(tokens_per_rank) for t in (x_ND, ids_NK, scores_NK, dout_ND, *results[:2])]
        ranks = [
            SimpleNamespace(
                workspace=workspace,
                stages=Stages(workspace=workspace, numerics=numerics),
                weights=[w[rank * num_local : (rank + 1) * num_local] for w in weights],
                out_TD=outs[rank],
                gradients=LayerGradients(
                    x_TD=of_rank[4][rank],
                    topk_scores_TK=of_rank[5][rank],
                    w1_EFD=results[2][rank * num_local : (rank + 1) * num_local],
                    w2_EDF=results[3][rank * num_local : (rank + 1) * num_local],
                    w3_EFD=results[4][rank * num_local : (rank + 1) * num_local],
                ),
                **dict(zip(("x_TD", "ids_TK", "scores_TK", "dout_TD"), (parts[rank] for parts in of_rank[:4]))),
            )
            for rank, workspace in enumerate(workspaces)
        ]

        def meet(phase):
            for half in (combine.signal, combine.wait):
                for rank in ranks:
                    half(rank.workspace, phase)

        for rank in ranks:
            rank.stages.publish(rank.x_TD, rank.ids_TK, rank.scores_TK)
        meet(PHASE_PUBLISHED)
        for rank in ranks:
            rank.plan, rank.counters = build_kernel_plan(rank.workspace)
            row_shape = rank.stages.row_shape(BLOCK_M * read_sizes(rank.plan, rank.workspace).num_tiles)
            groups = (
                Layout(group, row_shape).allocate("cpu") for group in (KeptRows, HiddenRows, ResultRows, BackwardRows)
            )
            rank.kept, hidden, result_rows, rank.rows = groups
            w1, w2, w3 = rank.weights
            rank.stages.pull_gemm(rank.plan, rank.counters, w1, w3, rank.kept, hidden)
            rank.stages.gemm_push(rank.plan, rank.counters, hidden, w2, result_rows.y_RD, rank.out_TD)
        meet(PHASE_ALL_SENT)
        for rank in ranks:
            combine.reduce_slots(rank.workspace, rank.ids_TK, rank.out_TD)
            rank.stages.publish_rows(rank.dout_TD, None)
        meet(PHASE_PUBLISHED)
        for rank in ranks:
            for counter in (rank.counters.arrival_M, rank.counters.done_M, rank.counters.queue):
                counter.zero_()
            w1, w2, w3 = rank.weights
            rank.stages.pull_gemm_backward(rank.plan, rank.counters, w2, rank.kept, rank.rows)
            rank.stages.gemm_push_backward(rank.plan, rank.counters, w1, w3, rank.rows, rank.gradients)
            rank.stages.weight_gradients(rank.plan, rank.counters, rank.kept, rank.rows, rank.gradients)
        meet(PHASE_ALL_SENT)
        for rank in ranks:
            combine.reduce_slots(rank.workspace, rank.ids_TK, rank.gradients.x_TD)
            combine.collect_score_slots(rank.workspace, rank.ids_TK, rank.gradients.topk_scores_TK)
            rank.workspace.check()
        return [torch.cat(outs), *results]
