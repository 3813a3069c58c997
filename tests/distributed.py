"""Run a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import poison


def run_ranks(function: Callable, world_size: int, *args) -> list:
    """Call ``function(rank, *args)`` on every rank of a fresh gloo group and return what each returned.

    ``function`` must be importable (defined at module level). A rank's exception fails the call with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(function, world_size, folder, args), nprocs=world_size)
        return [torch.load(os.path.join(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]


def _run(rank: int, function: Callable, world_size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    poison.install_if_wanted()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.save(function(rank, *args), os.path.join(folder, f"result-{rank}"))
    dist.barrier()
    dist.destroy_process_group()
    # Now and then a gloo thread that outlives the group aborts the interpreter's exit; there is nothing left to do in it.
    os._exit(0)
