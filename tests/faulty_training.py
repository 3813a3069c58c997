"""Real training runs in which a rank dies, hangs, raises or is late in the middle of a step: ``python faulty_training.py runs.json results.json``.

``runs.json`` is a list of ``{"argv": ..., "ranks": ..., "log": folder, "fault": {...} or null}``; see :class:`Fault`. The ranks are
forks of this process, which has imported everything already, and there is no launcher that ends the others when one fails: so each
says how it ends by itself. Results are a list of :class:`Ending` for each run, by rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_megamoe import train  # first of all: it prepares torch for TorchTitan

import torch  # noqa: E402

from titan_megamoe import reference  # noqa: E402

MOST_SECONDS = 60
"""A run in which a rank still runs after so long is ended."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    """die (SIGKILL), stall (SIGSTOP), raise, or late: two seconds, and then on."""
    where: str
    """forward or backward: in the middle of it, after the rows were pulled and before the results are pushed."""
    rank: int
    call: int
    """In which call of a layer's forward or backward of this rank, from 1."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    code: int | None
    """Exit code, negative for a signal; None of a rank that had to be ended."""
    seconds: float
    """From the fault, or the start of a run without one."""
    log: str


def install(fault: Fault, marker: Path) -> None:
    """Have this process suffer ``fault``; the moment is the time that ``marker`` was made."""
    calls = {"forward": 0, "backward": 0}
    inside = []
    swiglu = reference.swiglu  # forward and backward compute it between their two exchanges

    def counted(where: str, function):
        def run(*args, **kwargs):
            calls[where] += 1
            inside.append(where)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        return run

    def struck(*args):
        if inside[-1] == fault.where and calls[fault.where] == fault.call:
            marker.touch()
            if fault.kind == "raise":
                raise RuntimeError("injected")
            if fault.kind == "late":
                time.sleep(2)
            else:
                os.kill(os.getpid(), {"die": signal.SIGKILL, "stall": signal.SIGSTOP}[fault.kind])
        return swiglu(*args)

    reference.forward, reference.backward = (
        counted("forward", reference.forward),
        counted("backward", reference.backward),
    )
    reference.swiglu = struck


def run_rank(rank: int, ranks: int, port: int, run: dict) -> None:
    folder = Path(run["log"])
    log = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), NO_COLOR="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if run["fault"] and run["fault"]["rank"] == rank:
        install(Fault(**run["fault"]), folder / "struck")
    sys.argv = ["train", *run["argv"]]
    train.main()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def run_all_ranks(run: dict) -> list[Ending]:
    folder = Path(run["log"])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(run["ranks"]):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, run["ranks"], port, run)
            finally:
                os._exit(1)
        pids.append(pid)
    started = time.time()
    is_stalled = [
        bool(run["fault"]) and run["fault"]["kind"] == "stall" and run["fault"]["rank"] == r for r in range(len(pids))
    ]
    codes: dict[int, int] = {}
    ended: dict[int, float] = {}
    while len(codes) < is_stalled.count(False) and time.time() < started + MOST_SECONDS:
        time.sleep(0.02)
        for rank in set(range(len(pids))) - set(codes):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), time.time()
    for rank in set(range(len(pids))) - set(codes):
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    struck = folder / "struck"
    begin = struck.stat().st_mtime if struck.exists() else started
    return [
        Ending(
            code=codes.get(rank),
            seconds=ended.get(rank, time.time()) - begin,
            log=(folder / f"rank{rank}.txt").read_text(errors="replace"),
        )
        for rank in range(len(pids))
    ]


def main() -> None:
    runs, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results.write_text(json.dumps([[asdict(ending) for ending in run_all_ranks(run)] for run in runs]))


if __name__ == "__main__":
    main()
