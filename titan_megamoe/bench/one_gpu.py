"""Several ranks that share one GPU: correctness of many ranks where there is one card, not their speed.

    torchrun --nproc_per_node=2 -m titan_megamoe.bench.one_gpu --config train_configs/x.toml [--section.key value ...]

trains as ``titan_megamoe.train`` does. NCCL then talks over sockets and takes the ranks for ranks of different hosts; symmetric
memory and the kernels' peer pointers are the real ones, with the card's own memory in the place of NVLink.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


def environment(rank: int) -> dict[str, str]:
    """What a rank must have in its environment before it initialises CUDA and NCCL."""
    return {
        "LOCAL_RANK": "0",  # the device to use
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


@contextlib.contextmanager
def concurrent_kernels(folder: str) -> Iterator[None]:
    """Start the CUDA multi-process service where it is installed, so that the ranks' kernels run at the same time. ``folder`` is
    for its pipes and logs.

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


def main() -> None:
    os.environ.update(environment(int(os.environ["RANK"])))
    from ..train import main as train  # only now: importing it may initialise CUDA

    train()


if __name__ == "__main__":
    main()
