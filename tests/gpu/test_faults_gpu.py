"""Ranks that share a GPU, one of which dies, hangs, raises, runs out of memory or is slow to compile: the others end in time, with an
error that names rank, kernel, phase and item, and the GPU is as good as before."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.gpu.ranks import outcomes_on_one_gpu, run_ranks_on_one_gpu
from tests.gpu.test_hopper_layer import BF16_BOUND, in_fp64, random_layer
from tests.oracle import dense_moe, gradients, relative_error
from titan_megamoe import check_step, hopper, mega_moe, set_deadline
from titan_megamoe.symmetric import stop_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_on_this_machine() is not None, reason=str(hopper.missing_on_this_machine())),
]

DEADLINE = 8.0
TOKENS, DIM, HIDDEN, LOCAL_EXPERTS, TOP_K = 200, 256, 128, 4, 3


def layer_of(rank: int, world_size: int, seed: int = 0):
    """This rank's inputs and gradient."""
    x, ids, scores, *weights = random_layer(
        TOKENS * world_size, DIM, HIDDEN, LOCAL_EXPERTS * world_size, TOP_K, seed=seed
    )
    mine = slice(TOKENS * rank, TOKENS * (rank + 1))
    held = slice(LOCAL_EXPERTS * rank, LOCAL_EXPERTS * (rank + 1))
    return (x[mine], ids[mine], scores[mine], *(w[held] for w in weights)), x[mine] * 0.5


def step(rank: int, world_size: int, seed: int) -> None:
    inputs, dout_TD = layer_of(rank, world_size, seed)
    gradients(lambda *a: mega_moe(*a, group=dist.group.WORLD, backend="hopper"), inputs, dout_TD)
    check_step()


def with_fault(rank: int, world_size: int, victim: int, kind: str, where: str) -> None:
    """Steps as the trainer takes them. In the third, the victim is struck between a layer's pull and its push."""
    from titan_megamoe.hopper_stages import Stages

    set_deadline(DEADLINE)
    stage = {"forward": "gemm_push", "backward": "gemm_push_backward"}[where]
    push = getattr(Stages, stage)

    def struck(self, *args):
        if kind == "raise":
            raise RuntimeError("injected")
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stall": signal.SIGSTOP}[kind])
        push(self, *args)

    try:
        for seed in range(6):
            if seed == 2 and rank == victim:
                setattr(Stages, stage, struck)
            step(rank, world_size, seed)
    except Exception:
        stop_workspaces()
        raise


def assert_gpu_works() -> None:
    inputs = random_layer(300, DIM, HIDDEN, 8, TOP_K)
    out_TD = mega_moe(*inputs, backend="hopper")
    check_step()
    assert relative_error(out_TD, dense_moe(*in_fp64(inputs))) < BF16_BOUND


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["die", "stall", "raise"])
def test_the_other_ranks_end_in_time_and_name_whom_they_waited_for(kind, where, world_size):
    victim = world_size - 1
    # Beside the deadline: two undisturbed steps, with the kernels' compilation where nothing is cached.
    outcomes = outcomes_on_one_gpu(with_fault, world_size, world_size, victim, kind, where, seconds=DEADLINE + 180)
    expected = {"die": "died", "stall": "had to be ended", "raise": "RuntimeError: injected"}[kind]
    assert outcomes[victim].what == expected
    # A rank may learn of it from one that gave up first, which then is the one it names.
    waited = rf"KernelFault: mega_moe: rank \d+: handshake waited past its deadline for rank {victim} to have sent its results "
    told = r"KernelFault: mega_moe: rank \d+ stopped because rank (\d+) of the expert-parallel group did"
    for rank in range(victim):
        assert re.match(rf"{waited}|{told}", outcomes[rank].what), outcomes
    if kind == "raise":  # it says so, and nobody waits for the deadline
        assert any(re.match(told, outcome.what) and f"because rank {victim} " in outcome.what for outcome in outcomes)
    else:
        assert any(re.match(waited, outcome.what) for outcome in outcomes), outcomes
    assert_gpu_works()


def out_of_memory(rank: int, world_size: int, victim: int) -> None:
    set_deadline(60)
    tokens, dim, hidden = 8192, 2048, 768
    x, ids, scores, *weights = random_layer(tokens * world_size, dim, hidden, LOCAL_EXPERTS * world_size, TOP_K)
    mine, held = slice(tokens * rank, tokens * (rank + 1)), slice(LOCAL_EXPERTS * rank, LOCAL_EXPERTS * (rank + 1))
    x, ids, scores, weights = x[mine], ids[mine], scores[mine], [w[held] for w in weights]
    hot_ids = victim * LOCAL_EXPERTS + ids % LOCAL_EXPERTS  # all rows to the victim, which needs a larger pool
    mega_moe(x, ids, scores, *weights, group=dist.group.WORLD, backend="hopper")
    check_step()
    if rank == victim:  # leave it room for all but the pool
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    mega_moe(x, hot_ids, scores, *weights, group=dist.group.WORLD, backend="hopper")
    check_step()


def test_out_of_memory_while_the_pool_grows_names_bytes_and_options_and_ends_all_ranks():
    on_0, on_1 = outcomes_on_one_gpu(out_of_memory, 2, 2, 1, seconds=180)
    assert re.match(
        r"OutOfMemoryError: mega_moe: rank 1: no memory for .*\(\d+ bytes, \d+ rows where an even", on_1.what
    )
    assert "model.moe.dispatch.saved = 'inputs'" in on_1.what
    assert "KernelFault: mega_moe: rank 0 stopped because rank 1" in on_0.what
    assert on_0.seconds < 60, "it was told"
    assert_gpu_works()


def slow_to_compile(rank: int, world_size: int, cache: str) -> None:
    """One rank finds nothing in its cache, and compiles for longer than the others would wait for it in a handshake."""
    from titan_megamoe.hopper_stages import Stages

    if rank == 1:
        os.environ["TRITON_CACHE_DIR"] = cache
        weight_gradients = Stages.weight_gradients

        def compile_slowly(self, *args):
            if not self.workspace.rehearsed:
                time.sleep(3)
            weight_gradients(self, *args)

        Stages.weight_gradients = compile_slowly
    set_deadline(2)
    for seed in range(3):
        step(rank, world_size, seed)


def test_a_rank_that_is_slow_to_compile_does_so_before_anyone_waits_for_it():
    with tempfile.TemporaryDirectory() as cache:
        run_ranks_on_one_gpu(slow_to_compile, 2, 2, cache)
