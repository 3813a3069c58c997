"""Layouts, the memory plan, and which groups of ranks are refused: all without a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from titan_megamoe import symmetric
from titan_megamoe.kernels.plan_tables import (
    ALIGNMENT,
    BackwardRows,
    BLOCK_M,
    Counters,
    fault_error,
    HiddenRows,
    KeptRows,
    KernelPlan,
    LayerShape,
    Layout,
    PlanScratch,
    ResultRows,
    RowShape,
)
from titan_megamoe.symmetric import (
    Addresses,
    get_workspace,
    Identity,
    LocalState,
    plan_memory,
    Published,
    refuse_unreachable,
    require_equal_shapes,
    set_deadline,
    unreachable_pairs,
    virtual_workspaces,
)

GROUPS = (Published, Addresses, LocalState, KernelPlan, Counters, PlanScratch)
SHAPE = LayerShape(ep_size=2, max_tokens=5, dim=64, hidden_dim=128, num_local_experts=3, top_k=2)

shapes = st.builds(
    LayerShape,
    ep_size=st.integers(1, 9),
    max_tokens=st.integers(1, 300),
    dim=st.integers(1, 5).map(lambda n: 64 * n),
    hidden_dim=st.integers(1, 5).map(lambda n: 64 * n),
    num_local_experts=st.integers(1, 40),
    top_k=st.integers(1, 32),
    capacity=st.none() | st.floats(0.01, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)


def tensors_of(group):
    return [getattr(group, declared.name) for declared in dataclasses.fields(group)]


@settings(max_examples=50, deadline=None)
@given(shapes)
def test_buffers_are_aligned_and_do_not_overlap(shape):
    for group in GROUPS:
        layout = Layout(group, shape)
        end = 0
        for entry in layout.entries:
            assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
            assert entry.num_bytes == math.prod(entry.shape) * entry.dtype.itemsize
            end = entry.offset + entry.num_bytes
        assert end <= layout.num_bytes == sum(entry.reserved for entry in layout.entries)
        assert layout.num_bytes % ALIGNMENT == 0


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_writing_one_buffer_changes_no_other(shape):
    for group in GROUPS:
        buffers = Layout(group, shape).allocate("cpu", zeroed=True)
        for number, tensor in enumerate(tensors_of(buffers)):
            tensor.fill_(number + 1)
        for number, tensor in enumerate(tensors_of(buffers)):
            assert (tensor == number + 1).all()
            assert tensor.is_contiguous()


@settings(max_examples=50, deadline=None)
@given(shapes, st.sampled_from(["activations", "inputs"]))
def test_memory_plan_totals_are_the_layouts(shape, saved):
    memory = plan_memory(shape, saved=saved)
    rows = RowShape(layer=shape, num_rows=memory.num_rows)
    plan, counters, scratch = (Layout(group, shape).num_bytes for group in (KernelPlan, Counters, PlanScratch))
    kept, backward = (Layout(group, rows).num_bytes for group in (KeptRows, BackwardRows))
    forward = sum(Layout(group, rows).num_bytes for group in (HiddenRows, ResultRows))
    pool = Layout(KeptRows, RowShape(layer=shape, num_rows=memory.num_rows, keeps_gate_up=False)).num_bytes
    shared = sum(Layout(group, shape).num_bytes for group in (Published, Addresses, LocalState))
    if saved == "activations":
        most = shared + plan + kept + max(scratch + counters + forward, counters + backward)
    else:
        most = shared + plan + max(scratch + counters + pool + forward, counters + kept + backward)
    assert memory.num_bytes == most
    assert memory.sections[0].num_bytes == Layout(Published, shape).num_bytes
    names = [entry.name for section in memory.sections for entry in section.entries]
    layouts = [Layout(group, shape) for group in GROUPS]
    layouts += [Layout(group, rows) for group in (KeptRows, HiddenRows, ResultRows, BackwardRows)]
    assert set(names) == {entry.name for layout in layouts for entry in layout.entries if entry.num_bytes}
    text = memory.explain()
    for section in memory.sections:
        assert f"{section.lifetime}: " in text and f"({section.num_bytes} bytes)" in text
    assert all(f"  {name} " in text for name in names)
    assert f"({memory.num_bytes} bytes)" in text.splitlines()[-1]


def test_memory_plan_of_a_real_layer():
    shape = LayerShape(ep_size=8, max_tokens=16384, dim=2048, hidden_dim=768, num_local_experts=16, top_k=8)
    entries = {entry.name: entry for section in plan_memory(shape).sections for entry in section.entries}
    assert entries["x_TD"].num_bytes == 16384 * 2048 * 2
    assert entries["slots_PTD"].num_bytes == 8 * 16384 * 2048 * 2
    assert entries["pull_rows_UK"].shape == (8 * 16384, 8)
    assert entries["pool_RD"].shape == (16384 * 8 + 15 * BLOCK_M, 2048)
    alone = dataclasses.replace(shape, ep_size=1, num_local_experts=128)
    names = {entry.name for section in plan_memory(alone).sections for entry in section.entries}
    assert not names & {"x_TD", "dout_TD", "slots_PTD", "score_slots_PTK", "flags"}, "one rank publishes to nobody"
    kept = plan_memory(shape).sections[-1], plan_memory(shape, saved="inputs").sections[-1]
    assert kept[0].num_bytes - kept[1].num_bytes == sum(
        entries[name].reserved for name in ("pool_RD", "gate_RF", "up_RF")
    )
    with pytest.raises(ValueError, match="saved = 'all' is not known"):
        plan_memory(shape, saved="all")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ep_size=0), "ep_size = 0"),
        (dict(max_tokens=0), "max_tokens = 0"),
        (dict(dim=96), "dim = 96 is not a multiple of 64"),
        (dict(hidden_dim=65), "hidden_dim = 65 is not a multiple of 64"),
        (dict(top_k=33), "top_k = 33; 1 to 32"),
        (dict(capacity=-1.0), "capacity = -1.0"),
        (dict(capacity=float("nan")), "capacity = nan"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **change)


# ---- workspaces


def test_layers_of_one_shape_share_a_workspace():
    shape = dataclasses.replace(SHAPE, ep_size=1)
    workspace = get_workspace(None, shape, "cpu")
    assert get_workspace(None, dataclasses.replace(shape), "cpu") is workspace
    assert get_workspace(None, dataclasses.replace(shape, max_tokens=6), "cpu") is not workspace
    with pytest.raises(ValueError, match="ep_size = 2, but the group has 1 ranks"):
        get_workspace(None, SHAPE, "cpu")


def test_addresses_lead_to_each_ranks_buffers():
    workspaces = virtual_workspaces(SHAPE, "cpu")
    for workspace in workspaces:
        for table, name in (("x_P", "x_TD"), ("ids_P", "ids_TK"), ("slots_P", "slots_PTD"), ("flags_P", "flags")):
            expected = [getattr(peer.published, name).data_ptr() for peer in workspaces]
            assert getattr(workspace.addresses, table).tolist() == expected
        assert not any(tensor.any() for tensor in tensors_of(workspace.local))
        workspace.check()


# ---- which groups are refused


def identity(host: str, device: int, domain=None) -> Identity:
    return Identity(host=host, device_uuid=f"uuid-{host}-{device}", nvlink_domain=domain)


def test_ranks_of_one_host_are_asked_pair_by_pair():
    ranks = (identity("a", 0), identity("a", 1), identity("a", 2))
    assert unreachable_pairs(0, ranks, lambda peer: True) == []
    assert unreachable_pairs(0, ranks, lambda peer: peer.device_uuid != "uuid-a-2") == [(0, 2)]


def test_ranks_may_share_a_device():
    same = (identity("a", 0), identity("a", 0))
    assert unreachable_pairs(1, same, lambda peer: False) == []


def test_hosts_reach_each_other_only_within_an_nvlink_domain():
    rack, other = ("cluster", 1), ("cluster", 2)
    ranks = (identity("a", 0, rack), identity("b", 0, rack), identity("c", 0, other), identity("d", 0))
    assert unreachable_pairs(0, ranks, lambda peer: False) == [(0, 2), (0, 3)]
    assert unreachable_pairs(3, ranks, lambda peer: False) == [(3, 0), (3, 1), (3, 2)]


def test_refusal_names_the_pair():
    ranks = (identity("a", 0), identity("b", 0))
    refuse_unreachable([], ranks)
    with pytest.raises(
        ValueError, match=r"rank 0 \(GPU uuid-a-0 on a\) and rank 1 \(GPU uuid-b-0 on b\)\. .*'all_to_all'"
    ):
        refuse_unreachable([(1, 0), (0, 1)], ranks)


def test_different_shapes_are_refused_by_field():
    require_equal_shapes((SHAPE, SHAPE))
    with pytest.raises(ValueError, match="max_tokens is 5 on rank 0 but 7 on rank 1"):
        require_equal_shapes((SHAPE, dataclasses.replace(SHAPE, max_tokens=7)))


# ---- fault records


@pytest.mark.parametrize(
    "record, kind, message",
    [
        (
            [1, 3, 2, 0, 5, 11, 12],
            "KernelFault",
            "rank 3: handshake waited .* rank 5 to publish .* 12; it has published 11",
        ),
        ([1, 3, 2, 1, 5, 11, 12], "KernelFault", "rank 5 to have sent its results .* raise comm.train_timeout_seconds"),
        ([1, 0, 3, 2, 77, 127, 128], "KernelFault", r"pull_gemm waited .* tile 77 to be pulled \(127 of 128"),
        ([1, 0, 4, 3, 77, 3, 16], "KernelFault", r"gemm_push waited .* products of tile 77 \(3 of 16"),
        ([1, 0, 9, 9, 7, 3, 16], "KernelFault", r"kernel 9 waited .* phase 9, item 7 \(3 of 16\)"),
        ([2, 1, 1, 0, 5, 99, 6], "ValueError", r"rank 1: topk_ids_TK\[2, 1\] is 99, .* 0 to 5"),
        ([3, 1, 1, 0, 4, 0, 0], "ValueError", r"rank 1: topk_scores_TK\[2, 0\] is not finite"),
        ([4, 1, 2, 0, 0, -1, 3], "KernelFault", "rank 1 stopped because rank 0"),
        ([5, 1, 0, 0, 0, 0, 0], "KernelFault", "rank 1 stopped after an error of its own"),
    ],
)
def test_fault_records_read_as_sentences(record, kind, message):
    error = fault_error(record + [0] * 9, SHAPE)
    assert type(error).__name__ == kind
    with pytest.raises(type(error), match=message):
        raise error


def test_no_fault_is_no_error():
    assert fault_error([0] * 16, SHAPE) is None


# ---- deadlines


def test_a_deadline_holds_for_workspaces_that_exist_and_for_later_ones(monkeypatch):
    monkeypatch.setattr(symmetric, "_workspaces", {})
    monkeypatch.setattr(symmetric, "_deadline_seconds", 300.0)
    before = get_workspace(None, dataclasses.replace(SHAPE, ep_size=1), "cpu")
    assert before.deadline_seconds == 300
    set_deadline(7.5)
    after = get_workspace(None, dataclasses.replace(SHAPE, ep_size=1, top_k=1), "cpu")
    assert before.deadline_seconds == after.deadline_seconds == 7.5
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="set_deadline: seconds = .* Pass a positive, finite number"):
            set_deadline(seconds)
