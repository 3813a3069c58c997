"""On the fused kernels: results do not depend on what memory holds before it is written, and NVIDIA's checkers find nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests import poison as poisoning
from tests.gpu.ranks import run_ranks_on_one_gpu
from tests.gpu.test_hopper_layer import NAMES, random_layer
from tests.oracle import gradients
from tests.training import REPOSITORY
from titan_megamoe import check_step, hopper, mega_moe
from titan_megamoe.bench.workloads import make_routing, WORKLOADS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_on_this_machine() is not None, reason=str(hopper.missing_on_this_machine())),
]

VARIANTS = [
    dict(precision=precision, wgrad=wgrad, saved=saved, capacity=capacity)
    for precision, wgrad in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("fp8_bwd", "fp8"))
    for saved, capacity in (("activations", None), ("inputs", None), ("activations", 8.0))
]
EXPERTS, TOP_K, DIM, HIDDEN = 16, 3, 256, 128


def results(options: dict, rank: int = 0, tokens_per_rank: tuple[int, ...] = (333,)) -> dict[str, list[torch.Tensor]]:
    """Output and gradients of a rank, for each workload."""
    world_size, tokens = len(tokens_per_rank), tokens_per_rank[rank]
    found = {}
    for workload in WORKLOADS:
        x, _, scores, *weights = random_layer(tokens, DIM, HIDDEN, EXPERTS // world_size, 1, seed=rank)
        scores = scores.repeat(1, TOP_K)
        ids = make_routing(workload, tokens, EXPERTS, TOP_K, ep_size=world_size, seed=rank, device="cuda")
        group = dist.group.WORLD if world_size > 1 else None
        call = lambda *a: mega_moe(*a, backend="hopper", group=group, **options)  # noqa: E731
        found[workload] = gradients(call, (x, ids, scores, *weights), x * 0.5)
    check_step()
    return found


def poisoned_equals_clean(rank: int, tokens_per_rank: tuple[int, ...]) -> None:
    for options in VARIANTS:
        hopper._max_tokens.clear()
        clean = results(options, rank, tokens_per_rank)
        undo = poisoning.install()
        poisoned = results(options, rank, tokens_per_rank)
        undo()
        for workload in WORKLOADS:
            for name, a, b in zip(NAMES, poisoned[workload], clean[workload], strict=True):
                assert torch.equal(a, b), (options, workload, name)
                assert not a.isnan().any(), (options, workload, name)


def test_one_rank():
    poisoned_equals_clean(0, (333,))


@pytest.mark.parametrize("tokens_per_rank", [(200, 131), (90, 0, 257, 1)])
def test_ranks_on_one_gpu(tokens_per_rank):
    run_ranks_on_one_gpu(poisoned_equals_clean, len(tokens_per_rank), tokens_per_rank)


SMALL_LAYERS = """
import torch
from tests.gpu.test_poison_gpu import results, VARIANTS
for options in VARIANTS:
    results(options, 0, (37,))
torch.cuda.synchronize()
print("all layers ran")
"""


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer, of the CUDA toolkit, is not installed"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    # Without PyTorch's cache of memory, an access behind a buffer is one behind an allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [*command, sys.executable, "-c", SMALL_LAYERS],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        errors="replace",
    )
    assert result.returncode == 0 and "all layers ran" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]
