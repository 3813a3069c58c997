"""How fast do ranks read each other's memory?  ``torchrun --nproc_per_node=8 benchmarks/link.py --out x.json``

Each rank gathers random rows from all others' symmetric memory at once, as ``pull_gemm``'s communication warps do, but with the
whole GPU and nothing else to do: what communication alone could reach. Times are of the slowest rank; bytes are those that
cross a link, received by one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))

from titan_megamoe.bench.environment import describe_environment  # noqa: E402

REPEATS, WARMUP = 20, 5


@triton.jit
def gather_rows_kernel(
    addresses_P, source_rank_R, source_row_R, out_RD, num_rows, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """A program takes every so many rows, to keep many in flight."""
    column_D = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        base = tl.load(addresses_P + tl.load(source_rank_R + row)).to(tl.pointer_type(tl.bfloat16))
        start = tl.load(source_row_R + row) * DIM
        for first in range(0, DIM, BLOCK):
            is_inside_D = first + column_D < DIM
            values_D = tl.load(tl.multiple_of(base, 16) + start + first + column_D, mask=is_inside_D)
            tl.store(out_RD + row.to(tl.int64) * DIM + first + column_D, values_D, mask=is_inside_D)


def measure(tokens: int, dim: int, rows_per_peer: int, rank: int, size: int) -> dict:
    device = torch.device("cuda", torch.cuda.current_device())
    shared_TD = symm_mem.empty(tokens, dim, dtype=torch.bfloat16, device=device)
    handle = symm_mem.rendezvous(shared_TD, dist.group.WORLD)
    shared_TD.fill_(rank)
    torch.cuda.synchronize()
    dist.barrier()
    offset = shared_TD.data_ptr() - handle.buffer_ptrs[rank]
    addresses_P = torch.tensor([base + offset for base in handle.buffer_ptrs], device=device)
    generator = torch.Generator(device).manual_seed(rank)
    peers = torch.tensor([peer for peer in range(size) if peer != rank], device=device)
    source_rank_R = peers.repeat(rows_per_peer)  # all peers in turn
    source_row_R = torch.randint(tokens, source_rank_R.shape, generator=generator, device=device)
    out_RD = torch.empty(len(source_rank_R), dim, dtype=torch.bfloat16, device=device)
    programs = 16 * torch.cuda.get_device_properties(device).multi_processor_count
    times = []
    for _ in range(WARMUP + REPEATS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gather_rows_kernel[(programs,)](
            addresses_P, source_rank_R, source_row_R, out_RD, len(out_RD), DIM=dim, BLOCK=1024, num_warps=4
        )
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    assert torch.equal(out_RD[:, 0].long(), source_rank_R), "rows came from the wrong rank"
    slowest = torch.tensor(times[WARMUP:], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    median_ms, received = slowest.median().item(), out_RD.numel() * 2
    return {
        "dim": dim,
        "rows_per_peer": rows_per_peer,
        "bytes_received": received,
        "median_ms": median_ms,
        "gb_per_second": received / median_ms / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    results = []
    for dim in (1024, 2048, 4096):  # Qwen3-30B's rows in FP8 and in bf16, Qwen3-235B's in bf16
        for rows_per_peer in (256, arguments.tokens // size, arguments.tokens):
            results.append(measure(arguments.tokens, dim, rows_per_peer, rank, size))
            if rank == 0:
                print(results[-1], flush=True)
    if rank == 0:
        report = {
            "command": " ".join(["benchmarks/link.py", *sys.argv[1:]]),
            "environment": describe_environment(),
            "ranks": size,
            "links": results,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
