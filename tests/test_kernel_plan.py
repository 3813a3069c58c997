"""The plan, publish and reduction kernels against ``titan_megamoe/plan.py``, without a GPU.

Triton decides when it is imported whether kernels are interpreted, so the tests run in a pytest of their own.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from titan_megamoe.kernels import combine, plan_tables
from titan_megamoe.kernels.plan import build_kernel_plan, read_sizes
from titan_megamoe.kernels.plan_tables import BLOCK_M, KernelPlan, LayerShape, PHASE_ALL_SENT, PHASE_PUBLISHED
from titan_megamoe.plan import build_plan
from titan_megamoe.symmetric import get_workspace, SymmetricWorkspace, virtual_workspaces

# ---- what a KernelPlan must hold, derived from titan_megamoe/plan.py by sorting; tests/gpu uses it, too


def publish_all(workspaces: list[SymmetricWorkspace], ids_NK: torch.Tensor, tokens_per_rank: list[int]) -> torch.Tensor:
    """Publish each virtual rank's part of ``ids_NK``, with random scores, which are returned: ``[N, K]`` fp32."""
    shape, device = workspaces[0].shape, workspaces[0].device
    scores_NK = torch.rand(ids_NK.shape, generator=torch.Generator().manual_seed(3)).to(device)
    for workspace, ids_TK, scores_TK in zip(
        workspaces, ids_NK.split(tokens_per_rank), scores_NK.split(tokens_per_rank)
    ):
        x_TD = torch.zeros(ids_TK.shape[0], shape.dim, dtype=shape.dtype, device=device)
        combine.publish(workspace, x_TD, ids_TK, scores_TK)
    for half in (combine.signal, combine.wait):
        for workspace in workspaces:
            half(workspace, PHASE_PUBLISHED)
    return scores_NK


def check_kernel_plan(
    plan: KernelPlan,
    workspace: SymmetricWorkspace,
    ids_NK: torch.Tensor,
    scores_NK: torch.Tensor,
    tokens_per_rank: list[int],
) -> None:
    """Compare every table of ``plan`` with the oracle's, entry by entry."""
    shape, rank = workspace.shape, workspace.rank
    ids_NK, scores_NK = ids_NK.cpu(), scores_NK.cpu()
    expected = build_plan(ids_NK, tokens_per_rank, rank=rank, num_local_experts=shape.num_local_experts)
    offsets = expected.row_offsets_e1.tolist()
    rows_of_expert = [stop - start for start, stop in zip(offsets, offsets[1:])]

    starts, tile_expert, tile_rows, in_pool = [0], [], [], []
    for expert, num_rows in enumerate(rows_of_expert):
        kept = min(num_rows, shape.pool_rows - starts[-1])
        in_pool.append(kept)
        for first in range(0, kept, BLOCK_M):
            tile_expert.append(expert)
            tile_rows.append(min(BLOCK_M, kept - first))
        starts.append(min(starts[-1] + -(-num_rows // BLOCK_M) * BLOCK_M, shape.pool_rows))
    # An expert past the pool's end starts there; rows before it are where they would be in a larger pool.
    padded_starts = [0]
    for num_rows in rows_of_expert:
        padded_starts.append(padded_starts[-1] + -(-num_rows // BLOCK_M) * BLOCK_M)

    num_tiles, num_unique, num_rows, overflow = plan.sizes.tolist()
    assert num_tiles == len(tile_expert)
    assert num_unique == expected.pulled_U.numel()
    assert num_rows == expected.num_rows
    assert overflow == expected.num_rows - sum(in_pool)
    assert plan.expert_start_e1.tolist() == starts
    assert plan.expert_rows_e.tolist() == in_pool
    assert plan.tile_expert_M[:num_tiles].tolist() == tile_expert
    assert plan.tile_rows_M[:num_tiles].tolist() == tile_rows

    first_token = [sum(tokens_per_rank[:owner]) for owner in range(shape.ep_size)]
    tokens = []
    for n, row_of_slot in zip(expected.pulled_U.tolist(), expected.row_of_slot_UK.tolist()):
        owner = max(p for p in range(shape.ep_size) if first_token[p] <= n < first_token[p] + tokens_per_rank[p])
        experts, rows, scores = [], [], []
        for slot, row in enumerate(row_of_slot):
            if row >= 0:
                expert = ids_NK[n, slot].item() - rank * shape.num_local_experts
                experts.append(expert)
                padded = row - offsets[expert] + padded_starts[expert]
                if padded < shape.pool_rows:
                    rows.append(padded)
                    scores.append(scores_NK[n, slot].item())
        fill = shape.top_k - len(rows)
        tokens.append(
            {
                "source": owner << 32 | (n - first_token[owner]),
                "owner": owner,
                "first": min(experts),
                "last": max(experts),
                "rows": rows + [-1] * fill,
                "scores": scores + [0.0] * fill,
            }
        )
    pull = in_turns(tokens, "first")
    assert plan.pull_source_U[:num_unique].tolist() == [token["source"] for token in pull]
    assert plan.pull_rows_UK[:num_unique].tolist() == [token["rows"] for token in pull]
    assert plan.pull_scores_UK[:num_unique].tolist() == [token["scores"] for token in pull]
    pull_index = {token["source"]: index for index, token in enumerate(pull)}
    send = [pull_index[token["source"]] for token in in_turns(tokens, "last")]
    assert plan.send_order_U[:num_unique].tolist() == send


def in_turns(tokens: list[dict], group: str) -> list[dict]:
    """Sorted by ``group``; within it each owner's first token, then each owner's second, and so on."""
    seen: dict[tuple[int, int], int] = {}
    keyed = []
    for token in tokens:  # by (owner, token)
        turn = seen.get((token[group], token["owner"]), 0)
        seen[token[group], token["owner"]] = turn + 1
        keyed.append(((token[group], turn, token["owner"]), token))
    return [token for _, token in sorted(keyed, key=lambda pair: pair[0])]


# ---- the tests

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

    def layer_shape(ep_size, num_local_experts, top_k, max_tokens, **kwargs) -> LayerShape:
        return LayerShape(
            ep_size=ep_size,
            max_tokens=max_tokens,
            dim=64,
            hidden_dim=64,
            num_local_experts=num_local_experts,
            top_k=top_k,
            **kwargs,
        )

    def random_ids(tokens_per_rank, num_experts, top_k, seed=0):
        weights = torch.rand(sum(tokens_per_rank), num_experts, generator=torch.Generator().manual_seed(seed))
        return weights.topk(top_k, dim=1).indices

    def check_routing(ids_NK, tokens_per_rank, num_local_experts, *, ranks=None, **kwargs):
        """The plans of ``ranks`` (default: all); the workspaces hold one token more than any rank has."""
        shape = layer_shape(
            len(tokens_per_rank), num_local_experts, ids_NK.shape[1], max(tokens_per_rank) + 1, **kwargs
        )
        workspaces = virtual_workspaces(shape, "cpu")
        scores_NK = publish_all(workspaces, ids_NK, tokens_per_rank)
        for workspace in workspaces if ranks is None else [workspaces[rank] for rank in ranks]:
            plan, counters = build_kernel_plan(workspace)
            check_kernel_plan(plan, workspace, ids_NK, scores_NK, tokens_per_rank)
            assert not any(t.any() for t in (counters.arrival_M, counters.done_M, counters.queue))
        return workspaces

    @st.composite
    def routings(draw):
        ep_size, num_local_experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        num_experts = ep_size * num_local_experts
        top_k = draw(st.integers(1, min(num_experts, 9)))
        tokens_per_rank = draw(st.lists(st.integers(0, 24), min_size=ep_size, max_size=ep_size))
        ids_NK = random_ids(tokens_per_rank, num_experts, top_k, seed=draw(st.integers(0, 2**31)))
        kind = draw(st.sampled_from(["any", "one rank", "few experts"]))
        if kind == "one rank":  # also names experts twice within a token
            ids_NK = draw(st.integers(0, ep_size - 1)) * num_local_experts + ids_NK % num_local_experts
        elif kind == "few experts":
            ids_NK = ids_NK % draw(st.integers(1, num_experts))
        return ids_NK, tokens_per_rank, num_local_experts, draw(st.integers(0, ep_size - 1))

    @pytest.fixture(autouse=True)
    def small_blocks(monkeypatch):
        """Several blocks per owner at the tests' sizes."""
        monkeypatch.setattr(plan_tables, "MAX_BLOCK_TOKENS", 16)
        plan_tables.layout_of.cache_clear()

    def test_random_routings():
        @settings(max_examples=100, deadline=None)
        @given(routings())
        def check(routing):
            ids_NK, tokens_per_rank, num_local_experts, rank = routing
            check_routing(ids_NK, tokens_per_rank, num_local_experts, ranks=[rank])

        check()

    @pytest.mark.parametrize(
        "tokens_per_rank, num_local_experts, top_k",
        [
            ([0], 4, 2),
            ([0, 0], 4, 2),
            ([13, 0, 1, 30], 3, 2),
            ([1], 1, 1),
            ([40], 6, 6),
            ([9, 9], 16, 32),
            ([5] * 9, 1, 3),
        ],
        ids=["no tokens", "no tokens anywhere", "empty ranks", "one of each", "K = E", "K = E = 32", "9 ranks"],
    )
    def test_corner_cases(tokens_per_rank, num_local_experts, top_k):
        num_experts = num_local_experts * len(tokens_per_rank)
        check_routing(random_ids(tokens_per_rank, num_experts, top_k), tokens_per_rank, num_local_experts)

    @pytest.mark.parametrize("ep_size", [1, 3])
    def test_one_hot_expert(ep_size):
        """Enough rows for several tiles; all other experts of the group stay empty."""
        tokens_per_rank = [150] * ep_size
        check_routing(torch.full((150 * ep_size, 1), 2), tokens_per_rank, 3)

    def test_everything_to_one_rank():
        tokens_per_rank = [20, 7, 13]
        ids_NK = 4 + random_ids(tokens_per_rank, 4, 3)
        check_routing(ids_NK, tokens_per_rank, 4)

    def test_full_size_blocks(monkeypatch):
        monkeypatch.setattr(plan_tables, "MAX_BLOCK_TOKENS", 128)
        tokens_per_rank = [300, 129]
        check_routing(random_ids(tokens_per_rank, 24, 8), tokens_per_rank, 12)
        check_routing(torch.full((429, 16), 13), tokens_per_rank, 12, ranks=[1])  # the most a block can count
        check_routing(random_ids([70, 3], 256, 8), [70, 3], 128)

    def test_tokens_may_be_fewer_than_the_workspace_holds_and_change():
        shape = layer_shape(2, 4, 2, 50)
        workspaces = virtual_workspaces(shape, "cpu")
        for seed, tokens_per_rank in enumerate(([50, 3], [1, 20], [0, 50])):
            ids_NK = random_ids(tokens_per_rank, 8, 2, seed)
            scores_NK = publish_all(workspaces, ids_NK, tokens_per_rank)
            for workspace in workspaces:
                plan, _ = build_kernel_plan(workspace)
                check_kernel_plan(plan, workspace, ids_NK, scores_NK, tokens_per_rank)
                assert read_sizes(plan, workspace).overflow == 0

    def test_too_small_a_capacity_is_an_error_that_names_a_sufficient_one():
        tokens_per_rank = [60, 60, 60]
        ids_NK = torch.arange(180)[:, None].expand(180, 2) % 2  # 180 rows, of 2 tiles, for each expert of rank 0
        workspaces = check_routing(ids_NK, tokens_per_rank, 2, capacity=0.9)
        assert workspaces[0].shape.pool_rows == 256
        message = r"rank 0: a call routed 360 rows .* capacity = 0.9 holds 256 .* up to 180 rows had no place"
        with pytest.raises(plan_tables.CapacityExceeded, match=message) as error:
            workspaces[0].check()
        workspaces[1].check()
        sufficient = float(re.search(r"capacity = ([\d.]+) would have sufficed", str(error.value)).group(1))
        check_routing(ids_NK, tokens_per_rank, 2, capacity=sufficient)[0].check()

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 6), st.integers(1, 200), st.integers(1, 8), st.data())
    def test_a_named_capacity_suffices_however_rows_are_spread(num_local_experts, max_tokens, top_k, data):
        ep_size = 4
        most = ep_size * max_tokens * top_k // num_local_experts
        rows = data.draw(st.lists(st.integers(0, most), min_size=num_local_experts, max_size=num_local_experts))
        shape = layer_shape(ep_size, num_local_experts, top_k, max_tokens)
        if sum(rows):
            enough = dataclasses.replace(shape, capacity=shape.capacity_for(sum(rows)))
            assert sum(-(-n // BLOCK_M) * BLOCK_M for n in rows) <= enough.pool_rows <= shape.pool_rows

    # ---- publish and its checks

    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("scores_dtype", [torch.float32, torch.float16])
    def test_publish_copies_the_inputs(ids_dtype, scores_dtype):
        workspaces = virtual_workspaces(layer_shape(2, 4, 3, 40, dtype=torch.float16), "cpu")
        ids_TK = random_ids([37], 8, 3).to(ids_dtype)
        x_TD, scores_TK = torch.randn(37, 64).half(), torch.rand(37, 3).to(scores_dtype)
        combine.publish(workspaces[1], x_TD, ids_TK, scores_TK)
        published = workspaces[1].published
        assert published.num_tokens.tolist() == [37]
        assert torch.equal(published.x_TD[:37], x_TD) and not published.x_TD[37:].any()
        assert torch.equal(published.ids_TK[:37], ids_TK.int())
        assert torch.equal(published.scores_TK[:37], scores_TK.float())

    def test_one_rank_reads_x_in_place():
        workspace = get_workspace(None, layer_shape(1, 4, 2, 8), "cpu")
        x_TD = torch.randn(8, 64).bfloat16()
        combine.publish(workspace, x_TD, random_ids([8], 4, 2), torch.rand(8, 2))
        assert workspace.addresses.x_P.tolist() == [x_TD.data_ptr()]
        assert workspace.published.x_TD.numel() == workspace.published.slots_PTD.numel() == 0

    @pytest.mark.parametrize("bad_id", [-1, 8, 2**40])
    def test_a_bad_id_stops_all_ranks(bad_id):
        workspaces = virtual_workspaces(layer_shape(2, 4, 2, 40), "cpu")
        ids_NK = random_ids([40, 40], 8, 2)
        ids_NK[60, 1] = ids_NK[70, 0] = bad_id
        publish_all(workspaces, ids_NK, [40, 40])
        plans = [build_kernel_plan(workspace)[0] for workspace in workspaces]
        assert all(not plan.sizes.any() for plan in plans)
        shown = min(bad_id, 2**31 - 1)
        with pytest.raises(ValueError, match=rf"rank 1: topk_ids_TK\[20, 1\] is {shown}, .* numbered 0 to 7"):
            workspaces[1].check()
        with pytest.raises(plan_tables.KernelFault, match="rank 0 stopped because rank 1 of the expert-parallel group"):
            read_sizes(plans[0], workspaces[0])

    @pytest.mark.parametrize("bad_score", [float("nan"), float("inf"), float("-inf")])
    def test_a_bad_score_is_found(bad_score):
        workspace = virtual_workspaces(layer_shape(1, 4, 2, 40), "cpu")[0]
        scores_TK = torch.rand(40, 2)
        scores_TK[33, 0] = bad_score
        combine.publish(workspace, torch.zeros(40, 64).bfloat16(), random_ids([40], 4, 2), scores_TK)
        with pytest.raises(ValueError, match=r"topk_scores_TK\[33, 0\] is not finite"):
            workspace.check()

    def test_publish_refuses_what_the_workspace_was_not_made_for():
        workspace = get_workspace(None, layer_shape(1, 4, 2, 8), "cpu")
        x_TD, ids_TK, scores_TK = torch.zeros(9, 64).bfloat16(), random_ids([9], 4, 2), torch.rand(9, 2)
        with pytest.raises(ValueError, match="9 tokens, but the workspace was made for max_tokens = 8"):
            combine.publish(workspace, x_TD, ids_TK, scores_TK)
        with pytest.raises(ValueError, match="made for dim = 64 and dtype = torch.bfloat16"):
            combine.publish(workspace, x_TD[:8].float(), ids_TK[:8], scores_TK[:8])
        with pytest.raises(ValueError, match=r"topk_ids_TK is \(7, 2\), expected \(8, 2\)"):
            combine.publish(workspace, x_TD[:8], ids_TK[:7], scores_TK[:8])

    # ---- handshake and reduction

    def test_flags_count_calls():
        workspaces = virtual_workspaces(layer_shape(3, 1, 1, 4), "cpu")
        for call in (1, 2, 3):
            for phase in (PHASE_PUBLISHED, PHASE_ALL_SENT):
                for workspace in workspaces:
                    combine.signal(workspace, phase)
                for workspace in workspaces:
                    combine.wait(workspace, phase)
                    assert workspace.published.flags[phase].tolist() == [call] * 3
                    assert workspace.local.calls[phase] == call
        for workspace in workspaces:
            workspace.check()
        with pytest.raises(ValueError, match="phase = 2"):
            combine.signal(workspaces[0], 2)

    def test_a_rank_that_stopped_is_named_by_those_who_wait_for_it():
        workspaces = virtual_workspaces(layer_shape(3, 1, 1, 4), "cpu")
        workspaces[2].stop()
        for phase in (PHASE_PUBLISHED, PHASE_ALL_SENT):
            combine.handshake(workspaces[0], phase)  # which rank 1 never reaches: it must not be waited for
        with pytest.raises(
            plan_tables.KernelFault, match="rank 0 stopped because rank 2 of the expert-parallel group did"
        ):
            workspaces[0].check()
        with pytest.raises(plan_tables.KernelFault, match="rank 2 stopped after an error of its own"):
            workspaces[2].check()

    @pytest.mark.parametrize("num_local_experts, top_k, max_tokens", [(4, 2, 40), (1, 1, 1), (3, 5, 7)])
    def test_a_rehearsal_plans_and_waits_without_the_peers(num_local_experts, top_k, max_tokens):
        workspaces = virtual_workspaces(layer_shape(3, num_local_experts, top_k, max_tokens), "cpu")
        alone = workspaces[1].rehearsal()
        ids_TK = random_ids([max_tokens], 3 * num_local_experts, top_k)
        ids_TK[0, 0] = num_local_experts
        for _ in range(2):
            combine.publish(alone, torch.zeros(max_tokens, 64).bfloat16(), ids_TK, torch.zeros(max_tokens, top_k))
            combine.handshake(alone, PHASE_PUBLISHED)
            plan, _ = build_kernel_plan(alone)
            assert read_sizes(plan, alone).num_rows == 3 * (ids_TK // num_local_experts == 1).sum()
            combine.handshake(alone, PHASE_ALL_SENT)
        alone.check()
        for workspace in workspaces:
            assert not (workspace.published.flags.any() or workspace.local.calls.any() or workspace.local.fault.any())

    # Not bfloat16: the interpreter truncates to it instead of rounding. tests/gpu covers it.
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("ep_size, num_local_experts, top_k", [(2, 4, 2), (4, 2, 3), (9, 1, 9), (11, 2, 4)])
    def test_reduction_adds_what_was_sent_in_rank_order(dtype, ep_size, num_local_experts, top_k):
        shape = layer_shape(ep_size, num_local_experts, top_k, 12, dtype=dtype)
        workspace = virtual_workspaces(shape, "cpu")[1]
        num_tokens, generator = 10, torch.Generator().manual_seed(1)
        ids_TK = random_ids([num_tokens], shape.num_experts, top_k)
        combine.publish(workspace, torch.zeros(num_tokens, 64, dtype=dtype), ids_TK, torch.rand(num_tokens, top_k))
        slots_PTD = workspace.published.slots_PTD
        slots_PTD.fill_(float("nan"))  # a slot that no rank wrote must not be read
        expected_TD = torch.zeros(num_tokens, 64)
        for rank in range(ep_size):
            has_sent_T = (ids_TK // num_local_experts == rank).any(dim=1).nonzero().squeeze(1)
            rows = torch.randn(len(has_sent_T), 64, generator=generator).to(dtype)
            slots_PTD[rank, has_sent_T] = rows
            expected_TD[has_sent_T] += rows.float()
        out_TD = torch.full((num_tokens, 64), float("nan"), dtype=dtype)
        combine.reduce_slots(workspace, ids_TK, out_TD)
        assert torch.equal(out_TD, expected_TD.to(dtype))

    @pytest.mark.parametrize("ep_size, num_local_experts, top_k", [(2, 4, 2), (4, 2, 3), (9, 1, 9), (3, 2, 5)])
    def test_score_gradients_find_their_routes(ep_size, num_local_experts, top_k):
        workspace = virtual_workspaces(layer_shape(ep_size, num_local_experts, top_k, 40), "cpu")[1]
        num_tokens = 37
        ids_TK = random_ids([num_tokens], shape_experts := ep_size * num_local_experts, top_k)
        ids_TK[5] = shape_experts - 1  # a token may name an expert several times
        expected_TK = torch.randn(num_tokens, top_k, generator=torch.Generator().manual_seed(2))
        slots_PTK = workspace.published.score_slots_PTK
        slots_PTK.fill_(float("nan"))
        for token, (ids, expected) in enumerate(zip(ids_TK.tolist(), expected_TK)):
            for rank in range(ep_size):
                routes = [k for k, expert in enumerate(ids) if expert // num_local_experts == rank]
                slots_PTK[rank, token, : len(routes)] = expected[routes]
        dscores_TK = torch.full((num_tokens, top_k), float("nan"))
        combine.collect_score_slots(workspace, ids_TK, dscores_TK)
        assert torch.equal(dscores_TK, expected_TK)

    def test_rows_are_published_for_backward():
        x_TD, dout_TD = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
        published = (workspace := virtual_workspaces(layer_shape(2, 1, 1, 4), "cpu")[0]).published
        combine.publish_rows(workspace, dout_TD=dout_TD)
        assert torch.equal(published.dout_TD[:3], dout_TD) and not published.x_TD.any()
        combine.publish_rows(workspace, dout_TD=dout_TD, x_TD=x_TD)
        assert torch.equal(published.x_TD[:3], x_TD)
        alone = get_workspace(None, layer_shape(1, 4, 2, 8), "cpu")
        combine.publish_rows(alone, dout_TD=dout_TD, x_TD=x_TD)
        assert alone.addresses.dout_P.tolist() == [dout_TD.data_ptr()]
        assert alone.addresses.x_P.tolist() == [x_TD.data_ptr()]

    def test_reduction_without_tokens_and_with_one_rank():
        workspace, ids_TK = virtual_workspaces(layer_shape(2, 1, 1, 4), "cpu")[0], torch.zeros(8, 2, dtype=torch.int64)
        combine.reduce_slots(workspace, ids_TK[:0], torch.empty(0, 64, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="gemm_push writes out_TD itself"):
            combine.reduce_slots(get_workspace(None, layer_shape(1, 4, 2, 8), "cpu"), ids_TK, torch.empty(8, 64))
