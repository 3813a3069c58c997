"""Run a function on several NCCL ranks that share one GPU: correctness of many ranks where there is one card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_megamoe.bench.one_gpu import concurrent_kernels, environment


def run_ranks_on_one_gpu(function: Callable, world_size: int, *args) -> None:
    """Call ``function(rank, *args)`` on every rank of a fresh NCCL group on device 0; a rank's exception fails the call.

    ``function`` must be importable (defined at module level).
    """
    with tempfile.TemporaryDirectory() as folder, concurrent_kernels(folder):
        mp.spawn(_run, args=(function, world_size, folder, args), nprocs=world_size)


def _run(rank: int, function: Callable, world_size: int, folder: str, args: tuple) -> None:
    os.environ.update(environment(rank))
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
        dist.barrier()  # NCCL reports a rank that leaves while another still talks to it
    finally:
        dist.destroy_process_group()
