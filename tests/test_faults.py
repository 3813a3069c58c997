"""Training runs in which one rank dies, hangs, raises or is late: the others end by themselves, in time, and say what they waited for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from tests.faulty_training import Ending, Fault
from tests.training import options, REPOSITORY

TIMEOUT = 4
SETTINGS = {
    "training.steps": 4,
    "training.local_batch_size": 1,
    "checkpoint.interval": 1,
    "comm.train_timeout_seconds": TIMEOUT,
}
LAYERS = 2
FAULTS = {
    f"{kind} in {where}": Fault(kind=kind, where=where, rank=rank, call=call)
    for kind, where, rank, call in [
        # In the second step's first or second layer, counted in the order in which they are computed.
        ("die", "forward", 1, LAYERS + 1),
        ("die", "backward", 0, LAYERS + 2),
        ("stall", "forward", 0, LAYERS + 2),
        ("stall", "backward", 1, LAYERS + 1),
        ("raise", "forward", 1, LAYERS + 2),
        ("raise", "backward", 1, LAYERS + 1),
        ("late", "backward", 1, LAYERS + 1),
    ]
}


@pytest.fixture(scope="module")
def endings(assets, tmp_path_factory) -> dict[str, list[Ending]]:
    """Each fault's run; and after each that ended early, the same command once more, without a fault."""
    folder = tmp_path_factory.mktemp("faults")
    runs = {}
    for name, fault in FAULTS.items():
        run = {"argv": options(assets, folder / name, SETTINGS), "ranks": 2}
        runs[name] = {**run, "fault": asdict(fault), "log": str(folder / name / "first")}
    name = "die in backward"  # one is enough: what is on disk does not depend on how a rank ended
    runs["resumed"] = {**runs[name], "fault": None, "log": str(folder / name / "second")}
    (folder / "runs.json").write_text(json.dumps(list(runs.values())))
    command = [sys.executable, "-m", "tests.faulty_training", str(folder / "runs.json"), str(folder / "results.json")]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    return {name: [Ending(**ending) for ending in run] for name, run in zip(runs, results, strict=True)}


@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith("late")])
def test_the_other_rank_ends_in_time_and_says_where_it_waited_for_what(endings, name):
    fault = FAULTS[name]
    other = endings[name][1 - fault.rank]
    assert other.code == 1, other.log[-3000:]
    assert other.seconds < TIMEOUT + 6
    waited = (
        rf"mega_moe: rank {1 - fault.rank} of 2: push in {fault.where}: the all-to-all that sends \[\d+, \d+\] and receives "
        rf"\[\d+, \d+\] rows did not complete: .*\. Another rank of the expert-parallel group died, hangs or was busy"
    )
    assert re.search(waited, other.log, re.DOTALL), other.log[-3000:]
    stopped = rf"titan_megamoe: rank {1 - fault.rank} of 2 stopped in step 2: PeerLost: mega_moe"
    assert re.search(stopped, other.log), other.log[-3000:]
    assert "Started again with the same command, it resumes from the last checkpoint in" in other.log


def test_a_rank_that_raises_says_what_and_ends(endings):
    for where in ("forward", "backward"):
        ending = endings[f"raise in {where}"][1]
        assert ending.code == 1 and ending.seconds < 10
        assert "titan_megamoe: rank 1 of 2 stopped in step 2: RuntimeError: injected" in ending.log


def test_the_injected_faults_happened(endings):
    for name, fault in FAULTS.items():
        code = endings[name][fault.rank].code
        assert code == {"die": -signal.SIGKILL, "stall": None, "raise": 1, "late": 0}[fault.kind], name


def test_a_late_rank_is_waited_for(endings):
    assert [ending.code for ending in endings["late in backward"]] == [0, 0]


def test_the_same_command_resumes_from_the_last_complete_checkpoint(endings):
    for ending in endings["resumed"]:
        assert ending.code == 0, ending.log[-3000:]
        assert re.search(r"Loading the checkpoint from .*step-1\.", ending.log)
        assert re.findall(r"step: *(\d+) ", ending.log) == ["2", "3", "4"]
