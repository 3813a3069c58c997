"""Run a function on several NCCL ranks that share one GPU: correctness of many ranks where there is one card."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import poison
from titan_megamoe.bench.one_gpu import concurrent_kernels, environment


def run_ranks_on_one_gpu(function: Callable, world_size: int, *args) -> None:
    """Call ``function(rank, *args)`` on every rank of a fresh NCCL group on device 0; a rank's exception fails the call.

    ``function`` must be importable (defined at module level).
    """
    with tempfile.TemporaryDirectory() as folder, concurrent_kernels(folder):
        mp.spawn(_run, args=(function, world_size, folder, args), nprocs=world_size)


def _run(rank: int, function: Callable, world_size: int, folder: str, args: tuple) -> None:
    os.environ.update(environment(rank))
    poison.install_if_wanted()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
        dist.barrier()  # NCCL reports a rank that leaves while another still talks to it
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended."""

    what: str
    """"returned", "Type of error: its message", "died", or "had to be ended"."""
    seconds: float
    """From the start of the slowest rank's ``function``, or to when it had to be ended."""


def outcomes_on_one_gpu(function: Callable, world_size: int, *args, seconds: float) -> list[Outcome]:
    """As :func:`run_ranks_on_one_gpu`, of ranks that may raise, die or hang: who still runs after ``seconds``, or is stopped when all
    others have ended, is ended.

    Without the multi-process service, which ends all of its clients when one is killed: the ranks' kernels take turns.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_run_to_an_outcome, args=(rank, function, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        begun = [Path(folder) / f"begun-{rank}" for rank in range(world_size)]
        while not all(path.exists() for path in begun) and all(process.is_alive() for process in ranks):
            time.sleep(0.05)
        started, ended = time.monotonic(), {}
        while len(ended) < world_size and time.monotonic() < started + seconds:
            time.sleep(0.05)
            for rank, process in enumerate(ranks):
                if rank not in ended and not process.is_alive():
                    ended[rank] = time.monotonic() - started
            if all(_is_stopped(process.pid) for rank, process in enumerate(ranks) if rank not in ended):
                break
        for rank in set(range(world_size)) - set(ended):
            os.kill(ranks[rank].pid, signal.SIGKILL)
        outcomes = []
        for rank, process in enumerate(ranks):
            process.join()
            said = Path(folder) / f"outcome-{rank}"
            what = said.read_text() if said.exists() else "died" if rank in ended else "had to be ended"
            outcomes.append(Outcome(what=what, seconds=ended.get(rank, seconds)))
        return outcomes


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped a process, which will not end by itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def _run_to_an_outcome(rank: int, function: Callable, world_size: int, folder: str, args: tuple) -> None:
    os.environ.update(environment(rank))
    poison.install_if_wanted()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    dist.barrier()
    (Path(folder) / f"begun-{rank}").touch()
    try:
        function(rank, *args)
        outcome = "returned"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    partial = Path(folder) / f"partial-{rank}"
    partial.write_text(outcome)
    partial.rename(Path(folder) / f"outcome-{rank}")
    os._exit(0)  # tearing down NCCL would wait for a peer that is no more
