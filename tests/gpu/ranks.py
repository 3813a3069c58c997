"""Run a function on several NCCL ranks that share one GPU: correctness of many ranks where there is one card."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks_on_one_gpu(function: Callable, world_size: int, *args) -> None:
    """Call ``function(rank, *args)`` on every rank of a fresh NCCL group on device 0; a rank's exception fails the call.

    ``function`` must be importable (defined at module level).
    """
    with tempfile.TemporaryDirectory() as folder, concurrent_kernels(folder):
        mp.spawn(_run, args=(function, world_size, folder, args), nprocs=world_size)


@contextlib.contextmanager
def concurrent_kernels(folder: str):
    """Start the CUDA multi-process service where it is installed, so that the ranks' kernels run at the same time.

    Without it they take turns, in slices of milliseconds: slower, but as correct.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    directories = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    before = {name: os.environ.get(name) for name in directories}
    os.environ.update(directories)
    started = subprocess.run([control, "-d"], capture_output=True).returncode == 0
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input=b"quit\n", capture_output=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(rank: int, function: Callable, world_size: int, folder: str, args: tuple) -> None:
    # NCCL takes ranks on one device for ranks of different hosts; symmetric memory is told not to mind.
    os.environ.update(
        NCCL_HOSTID=f"host{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
        dist.barrier()  # NCCL reports a rank that leaves while another still talks to it
    finally:
        dist.destroy_process_group()
