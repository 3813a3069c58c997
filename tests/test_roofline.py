"""The roofline's formulas against counting, and the sweep that draws it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from titan_megamoe.bench import layer, roofline, sweep
from titan_megamoe.bench.roofline import Cost, GPUS, Load, Rates
from titan_megamoe.bench.workloads import make_routing
from titan_megamoe.kernels.plan_tables import (
    BackwardRows,
    HiddenRows,
    KeptRows,
    LayerShape,
    Layout,
    ResultRows,
    RowShape,
)

LOAD = dict(dim=256, hidden_dim=128, num_experts=32, top_k=4, tokens=1024)
T, K, D, F, E = 1024, 4, 256, 128, 32
R = T * K


# ---- tokens and links


@pytest.mark.parametrize("ep_size", [1, 2, 8, 32])
def test_ranks_met_are_those_of_random_routings(ep_size):
    ids_TK = make_routing("uniform", 20000, E, K)
    is_met_TP = torch.nn.functional.one_hot(ids_TK // (E // ep_size), ep_size).amax(dim=1)
    load = Load(**LOAD, ep_size=ep_size, ranks_per_domain=4)
    remote_TP = is_met_TP[:, 1:]  # of tokens that rank 0 owns
    assert load.remote_ranks == pytest.approx(remote_TP.sum(dim=1).float().mean().item(), rel=0.02)
    inside = remote_TP[:, : min(ep_size, 4) - 1].sum(dim=1).float().mean().item()
    assert load.remote_ranks_in_domain == pytest.approx(inside, rel=0.02)
    assert load.unique_rows / T == pytest.approx(is_met_TP.sum(dim=1).float().mean().item(), rel=0.02)


def test_ranks_met_of_the_design():
    """Which says 5.3 ranks on average, its own among them, for 8 of 128 experts over 8 ranks."""
    load = Load(dim=2048, hidden_dim=768, num_experts=128, top_k=8, tokens=16384, ep_size=8)
    assert load.unique_rows / load.tokens == pytest.approx(5.3, abs=0.05)
    assert roofline.forward(load).link_bytes == pytest.approx(2 * 0.31e9, rel=0.02)


def test_link_bytes():
    pairs = T * Load(**LOAD, ep_size=8).remote_ranks
    in_bf16, in_fp8 = Load(**LOAD, ep_size=8), Load(**LOAD, ep_size=8, precision="fp8")
    assert roofline.forward(in_bf16).link_bytes == pytest.approx(pairs * (512 + 512))
    assert roofline.forward(in_fp8).link_bytes == pytest.approx(pairs * (256 + 2 * 4 + 512))
    assert roofline.recomputation(in_fp8).link_bytes == pytest.approx(pairs * (256 + 2 * 4))
    assert roofline.backward(in_bf16).link_bytes == pytest.approx(pairs * (512 + 512 + 16))
    again = replace(in_fp8, saved="inputs")
    assert roofline.backward(again).link_bytes == pytest.approx(pairs * (2 * (256 + 2 * 4) + 512 + 16))
    assert roofline.forward(Load(**LOAD, ep_size=1)).link_bytes == 0
    ragged = Load(**(LOAD | dict(dim=192)), ep_size=8, precision="fp8")
    assert roofline.recomputation(ragged).link_bytes == pytest.approx(pairs * (192 + 2 * 4)), (
        "part of a block has a scale, too"
    )


def test_what_leaves_the_nvlink_domain_goes_over_the_network():
    inside, split = Load(**LOAD, ep_size=16), Load(**LOAD, ep_size=16, ranks_per_domain=8)
    for part in (roofline.forward, roofline.recomputation, roofline.backward):
        assert part(inside).network_bytes == 0
        assert part(split).link_bytes == pytest.approx(part(inside).link_bytes * 7 / 15)
        assert part(split).network_bytes == pytest.approx(part(inside).link_bytes * 8 / 15)
        assert part(split).hbm_bytes == part(inside).hbm_bytes
    assert roofline.forward(replace(split, ranks_per_domain=72)).network_bytes == 0


# ---- arithmetic


def products_flop(*shapes: tuple[int, int, int]) -> float:
    """As torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        for m, k, n in shapes:
            torch.empty(m, k, device="meta") @ torch.empty(k, n, device="meta")
    return counter.get_total_flops()


def test_arithmetic_is_that_of_the_products():
    load = Load(**LOAD, ep_size=8)
    gate_up, down = [(R, D, F)] * 2, [(R, F, D)]
    of_rows = [(R, D, F), (R, F, D), (R, F, D)]  # dh, and dx through gate and up
    of_weights = [(D, R, F), (F, R, D), (F, R, D)]
    assert roofline.forward(load).bf16_flop == products_flop(*gate_up, *down)
    assert roofline.recomputation(load).bf16_flop == products_flop(*gate_up)
    assert roofline.backward(load).bf16_flop == products_flop(*of_rows, *of_weights)
    again = replace(load, saved="inputs")
    assert roofline.backward(again).bf16_flop == products_flop(*gate_up, *of_rows, *of_weights)


@pytest.mark.parametrize(
    "precision, wgrad, in_fp8",  # of forward, and of the 6 products of backward
    [
        ("bf16", "fp8", (0, 0)),
        ("fp8_bwd", "bf16", (0, 3)),
        ("fp8", "bf16", (3, 3)),
        ("fp8", "fp8", (3, 6)),
        ("mxfp8", "bf16", (3, 3)),
        ("mxfp8", "mxfp8", (3, 6)),
    ],
)
def test_what_is_computed_in_fp8(precision, wgrad, in_fp8):
    load = Load(**LOAD, ep_size=8, precision=precision, wgrad=wgrad)
    one = products_flop((R, D, F))
    for cost, products, all_products in zip((roofline.forward(load), roofline.backward(load)), in_fp8, (3, 6)):
        assert (cost.fp8_flop, cost.bf16_flop) == (products * one, (all_products - products) * one)


def test_parts_add_up():
    load = Load(**LOAD, ep_size=8, precision="fp8")
    both = roofline.forward(load) + roofline.backward(load)
    assert roofline.full_layer(load, full_ac=False) == both
    assert roofline.full_layer(load, full_ac=True) == both + roofline.recomputation(load)


# ---- memory: counted from the buffers that the kernels read and write, as plan_tables.py declares them

NEVER_COUNTED = ("row_scores_R", "dscore_parts_NR")
FORWARD_TIMES = dict(pool_RD=2, pool_scales_bR=2, gate_RF=1, up_RF=1, h_RF=2, h_scales_bR=2, y_RD=2)
"""How often a buffer is written or read. Gate and up are only written in forward."""
GRADIENTS_TIMES = {
    # Without FP8: written, read by a product of rows and by one of weights.
    "bf16": dict(dout_RD=3, dgate_RF=3, dup_RF=3, scaled_h_RF=2, dx_RD=2),
    # Products of rows read FP8 copies; those of weights the bf16 ones, and dout back from FP8.
    "fp8_bwd": dict(
        dout_RD=3,
        dout_scales_bR=3,
        dgate_RF=2,
        dup_RF=2,
        scaled_h_RF=2,
        dx_RD=2,
        dgate_fp8_RF=2,
        dgate_scales_bR=2,
        dup_fp8_RF=2,
        dup_scales_bR=2,
        dout_bf16_RD=2,
        x_bf16_RD=2,
    ),
}
for times in (FORWARD_TIMES, GRADIENTS_TIMES["fp8_bwd"]):  # MXFP8 has scales in another layout, and else the same
    times |= {name.replace("_bR", "_Rg"): count for name, count in times.items() if name.endswith("_bR")}
TRANSPOSED = ("x", "dout", "dgate", "dup", "scaled_h")


def buffers(load: Load, *groups) -> dict[str, int]:
    """Bytes by name, for R rows, without padding."""
    local = load.num_experts // load.ep_size
    shape = LayerShape(
        ep_size=load.ep_size, max_tokens=T, dim=D, hidden_dim=F, num_local_experts=local, top_k=K, capacity=1.0
    )
    rows = RowShape(layer=shape, num_rows=R, precision=load.precision, wgrad=load.wgrad)
    return {entry.name: entry.num_bytes for group in groups for entry in Layout(group, rows).entries}


def published(load: Load, is_fp8: bool) -> float:
    """Tokens put where peers read them, and read from there."""
    row = D + 4 * math.ceil(D / 128) if is_fp8 else 2 * D
    copied = T * (2 * D + row) if is_fp8 or load.ep_size > 1 else 0
    return copied + load.unique_rows * row


def returned(load: Load) -> float:
    slots = 2 * load.unique_rows * 2 * D if load.ep_size > 1 else 0
    return slots + T * 2 * D


@pytest.mark.parametrize("ep_size", [1, 8])
@pytest.mark.parametrize(
    "precision, wgrad",
    [
        ("bf16", "bf16"),
        ("fp8_bwd", "bf16"),
        ("fp8", "bf16"),
        ("fp8", "fp8"),
        ("mxfp8", "bf16"),
        ("mxfp8", "mxfp8"),
    ],
)
def test_memory_bytes_are_those_of_the_buffers(precision, wgrad, ep_size):
    load = Load(**LOAD, ep_size=ep_size, precision=precision, wgrad=wgrad)
    weights = 3 * (E // ep_size) * D * F
    forward = buffers(load, KeptRows, HiddenRows, ResultRows)
    expected = sum(FORWARD_TIMES[name] * size for name, size in forward.items())
    element = {"fp8": 1, "mxfp8": 1 + 1 / 32}.get(precision, 2)
    expected += published(load, element < 2) + returned(load) + weights * element
    assert roofline.forward(load).hbm_bytes == pytest.approx(expected)

    times = dict(GRADIENTS_TIMES["bf16" if precision == "bf16" else "fp8_bwd"])
    for name in TRANSPOSED:  # only there with wgrad = "fp8" or "mxfp8": written and read
        width = "D" if name in ("x", "dout") else "F"
        times |= {f"{name}_M{width}r": 2, f"{name}_scales_M{width}": 2}
        times |= {f"{name}_{width}R": 2, f"{name}_scales_{width}g": 2}
    sizes = {name: size for name, size in buffers(load, BackwardRows).items() if name not in NEVER_COUNTED}
    kept = buffers(load, KeptRows)
    expected = sum(times[name] * size for name, size in sizes.items() if size) + sum(kept.values())
    expected += published(load, precision != "bf16") + returned(load)
    expected += weights * {"bf16": 2, "mxfp8": 1 + 1 / 32}.get(precision, 1) + 2 * weights
    assert roofline.backward(load).hbm_bytes == pytest.approx(expected)


def test_saving_inputs_only_moves_the_work_to_backward():
    kept, again = Load(**LOAD, ep_size=8), Load(**LOAD, ep_size=8, saved="inputs")
    gate_up = 2 * R * F * 2
    assert roofline.forward(kept).hbm_bytes - roofline.forward(again).hbm_bytes == pytest.approx(gate_up)
    more = roofline.backward(again).hbm_bytes - roofline.backward(kept).hbm_bytes
    assert more == pytest.approx(roofline.recomputation(kept).hbm_bytes)


# ---- times


def test_times_and_bound():
    rates = Rates(
        bf16_tflops=500, fp8_tflops=1000, hbm_tb_per_second=4, link_gb_per_second=400, network_gb_per_second=50
    )
    cost = Cost(bf16_flop=500e12, fp8_flop=1000e12, link_bytes=400e9, network_bytes=100e9, hbm_bytes=12e12)
    times = dict(arithmetic=2000, link=1000, network=2000, memory=3000)
    assert cost.milliseconds(rates) == pytest.approx(times)
    assert cost.bound(rates) == (pytest.approx(3000), "memory")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_what_is_achievable_is_below_the_peaks_and_says_what_was_assumed(gpu):
    for name in Rates.__dataclass_fields__:
        assert 0 < getattr(gpu.achievable, name) < getattr(gpu.nominal, name)
    assert {"link_gb_per_second", "network_gb_per_second"} <= set(gpu.assumed) <= set(Rates.__dataclass_fields__)
    assert "data sheet" in gpu.source


def test_no_measured_layer_is_faster_than_the_bound(repository_results):
    """One H200, EP = 1, bf16: arithmetic bounds it, and cuBLAS's own speed of the run is the rate."""
    for report in repository_results:
        shape = report["shape"]
        load = Load(**shape, tokens=report["tokens"], ep_size=report["ep_size"])
        rates = replace(GPUS["h200"].achievable, bf16_tflops=report["ceiling_tflops"])
        measured = report["results"]["mega_moe hopper"]
        assert roofline.forward(load).bound(rates)[0] < measured["forward"]["median"]
        both = roofline.forward(load) + roofline.backward(load)
        assert both.bound(rates)[0] < measured["forward_and_backward"]["median"]


@pytest.fixture
def repository_results():
    from tests.training import REPOSITORY

    found = sorted((REPOSITORY / "docs" / "results").glob("h200_layer_*.json"))
    assert found
    return [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ep_size=3), "degree of 3 does not divide 32 experts. Use a divisor"),
        (dict(top_k=33), "top_k = 33, but a token's experts are distinct and there are 32. Lower it"),
        (dict(tokens=0), "tokens = 0. Pass at least 1"),
        (dict(ranks_per_domain=0), "ranks_per_domain = 0. Pass at least 1"),
        (dict(precision="fp4"), "precision = 'fp4' is not known. Use one of: bf16, fp8, fp8_bwd, mxfp8"),
        (dict(saved="all"), "saved = 'all' is not known. Use one of: activations, inputs"),
    ],
)
def test_impossible_loads(change, message):
    with pytest.raises(ValueError, match=message):
        Load(**{**LOAD, "ep_size": 1, **change})


# ---- the sweep

POINT = dict(tokens=256, num_experts=16, top_k=4, hot=0.0, workload="uniform")


def test_hot_routing():
    shares, mean_ids = [], []
    for hot in (0.0, 0.5, 2.0):
        ids_TK = sweep.hot_routing(4000, 16, 4, hot)
        assert all(len(set(ids)) == 4 for ids in ids_TK[:50].tolist())
        shares.append(sweep.busiest(ids_TK, 16, 4))
        mean_ids.append(ids_TK.double().mean().item())
    assert shares[0]["expert"] == pytest.approx(1, abs=0.1) and shares[0]["rank"] == pytest.approx(1, abs=0.1)
    assert mean_ids[0] == pytest.approx(7.5, abs=0.2) and mean_ids[0] > mean_ids[1] > mean_ids[2], (
        "low-numbered ones are hot"
    )
    for name in ("expert", "rank"):
        assert shares[0][name] < shares[1][name] < shares[2][name] <= 4
    assert torch.equal(sweep.hot_routing(100, 16, 4, 1.0, seed=3), sweep.hot_routing(100, 16, 4, 1.0, seed=3))


def test_every_point_is_compiled_anew(monkeypatch):
    """The compiler gives a function up after 8 shapes, and "compiled" would then name eager code."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def make_inputs(shape, tokens, ep_size, seed, workload):
        x_TD = torch.randn(tokens, shape.dim)
        ids_TK = make_routing(workload, tokens, shape.num_experts, shape.top_k)
        nothing = torch.empty(0)
        return layer.Inputs(x_TD, ids_TK, nothing, nothing, nothing, nothing, nothing)

    def implementations(shape, inputs, group):
        linear = torch.nn.Linear(shape.dim, shape.num_experts)

        def compute(inputs):
            return linear(inputs)

        return {"torchtitan compiled": torch.compile(compute, backend=counter), "not measured": None}

    monkeypatch.setattr(layer, "make_inputs", make_inputs)
    monkeypatch.setattr(layer, "implementations", implementations)
    monkeypatch.setattr(layer, "measure", lambda compute, inputs, timing: compute(inputs.x_TD).shape)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    shape = layer.Shape(dim=64, hidden_dim=64, num_experts=16, top_k=4)
    num_points = 12
    for index in range(num_points):
        point = POINT | dict(num_experts=16 + 4 * index, hot=2.0 * (index % 2))
        found = sweep.measure_point(point, shape, 1, None, None, 0)
        assert found["results"] == {"torchtitan compiled": (256, 16 + 4 * index)}
        assert (found["busiest"]["expert"] > 2) == bool(point["hot"])
    assert counter.frame_count == num_points


def test_plot_of_a_made_up_report(tmp_path):
    """Read back from JSON, with a point that failed and one that has no time."""
    values = dict(tokens=[128, 256], num_experts=[8, 16], top_k=[1, 4], hot=[0.0, 1.0], workload=["uniform", "zipf"])
    entries = []
    for index, (axis, point) in enumerate(sweep.points(POINT, values)):
        results = {
            "torchtitan compiled": {"forward_and_backward": {"median": 2.0 + index}},
            "mega_moe hopper": {"error": "out of memory"} if index == 1 else {"forward_and_backward": {"median": 1.0}},
        }
        least = {precision: sweep.least_ms(point, D, F, 1, "h200", precision) for precision in ("bf16", "fp8")}
        entries.append(dict(axis=axis, point=point, least_ms=least, results=results))
    assert {entry["axis"] for entry in entries} == set(sweep.AXES)
    report = dict(shape_name="made up", ep_size=1, environment=dict(gpu="none"), points=entries)
    sweep.plot(json.loads(json.dumps(report)), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--tokens", "1024,0", "1024,0: pass numbers of at least 1"),
        ("--hot", "-1", "-1: pass numbers of at least 0"),
        ("--workloads", "uniform,storm", "storm is not one of: uniform"),
    ],
)
def test_bad_sweeps(option, value, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["sweep", "--out", str(tmp_path / "x.json"), f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    assert message in capsys.readouterr().err
