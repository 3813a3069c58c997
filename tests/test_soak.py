"""A short soak: training that is killed and resumes by itself computes what it would have computed undisturbed."""

from __future__ import annotations

import math

from tests.training import DEBUG_CONFIG
from titan_megamoe.bench import soak


def test_a_killed_run_resumes_from_the_last_complete_checkpoint(assets, tmp_path):
    # An odd interval, so that the checkpoint that the second kill cuts off is not the last step's.
    plan = soak.Plan(
        config=DEBUG_CONFIG,
        steps=30,
        interval=7,
        kills=2,
        seed=3,
        nproc=2,
        one_gpu=False,
        overrides=["--hf_assets_path", str(assets), "--dataloader.dataset_path", str(assets)],
    )
    document = soak.soak(plan, tmp_path)
    first, second = document["kills"]
    assert first["exit_code"] and second["exit_code"]
    assert max(first["seconds_to_end"], second["seconds_to_end"]) < 30
    assert second["after_step"] % plan.interval == 0
    resumed = [
        line for line in (tmp_path / "disturbed" / "log.txt").read_text().splitlines() if "Loading the chec" in line
    ]
    if second["incomplete_checkpoints"]:  # the kill may come when the last byte was on disk
        assert f"step-{second['after_step']}: its metadata were never written" in second["incomplete_checkpoints"]
        assert resumed[-1].endswith(f"step-{second['after_step'] - plan.interval}.")
    assert document["steps_computed_again"] > 0 and not document["steps_missing"]
    assert document["records_bitwise_equal"] == document["records_compared"] > 30
    assert soak.failures(document, tolerance=0.0) == []


def test_what_a_soak_calls_wrong():
    records = [
        {"step": step, "loss": 5.0, "grad_norm": 1.0, "host_mib": 100.0 + 10 * step, "device_mib": 0.0}
        for step in range(1, 41)
    ]
    differing = [{**record, "loss": 5.5 if record["step"] == 7 else 5.0} for record in records if record["step"] != 9]
    document = {
        "kills": [{"rank": 1, "exit_code": 0}],
        "memory": {0: soak.memory_growth(records)},
        **soak.compare_losses(records, differing),
    }
    assert math.isclose(document["memory"][0]["host_mib"]["growth"], 200)
    found = soak.failures(document, tolerance=0.1)
    assert [line.split(":")[0] for line in found] == [
        "steps that the disturbed run never did",
        "losses differ by up to 0.5",
        "the launcher said 0 after rank 1 was killed",
        "rank 0",
    ]


def test_a_record_that_a_kill_cut_off_is_left_out(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert soak.read_records(tmp_path, 0) == [{"step": 1}]
