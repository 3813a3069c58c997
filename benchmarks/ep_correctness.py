"""Is mega_moe right on these GPUs, one rank on each?  ``torchrun --nproc_per_node=8 benchmarks/ep_correctness.py --out x.json``

Every workload in every precision, with unequal token counts, against the reference backend on one rank; then random routings
against fp64. The functions are those of the GPU tests, which run them with several ranks on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gpu.test_hopper_layer import cases_for, layer_on_ranks  # noqa: E402
from tests.gpu.test_workloads_gpu import BOUNDS, workloads_on_ranks  # noqa: E402
from titan_megamoe.bench.environment import describe_environment  # noqa: E402
from titan_megamoe.bench.workloads import WORKLOADS  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routings", type=int, default=100, help="random routings (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tokens_per_rank = [(137 * r + 50) % 700 for r in range(size)]
    begin = time.monotonic()
    for precision in BOUNDS:
        workloads_on_ranks(rank, tokens_per_rank, precision)  # raises on a rank that finds a difference
    layer_on_ranks(rank, cases_for(size, arguments.routings))
    dist.barrier()
    if rank == 0:
        report = {
            "command": " ".join(["benchmarks/ep_correctness.py", *sys.argv[1:]]),
            "environment": describe_environment(),
            "ranks": size,
            "tokens_per_rank": tokens_per_rank,
            "workloads": list(WORKLOADS),
            "bounds_by_precision": BOUNDS,
            "random_routings": arguments.routings,
            "seconds": time.monotonic() - begin,
            "passed": True,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"passed: {len(WORKLOADS)} workloads x {len(BOUNDS)} precisions, {arguments.routings} random routings")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
