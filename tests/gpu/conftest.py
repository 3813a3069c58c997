"""What tests on a GPU share: the backends on kernels that this machine can run, and the card's memory."""

from __future__ import annotations

import gc

import pytest
import torch

from titan_megamoe.backends import KERNEL_BACKENDS, missing_on_this_machine


@pytest.fixture(params=KERNEL_BACKENDS)
def kernels(request) -> str:
    """Name of a backend, one after the other; the test is skipped where it cannot run."""
    missing = missing_on_this_machine(request.param)
    if missing:
        pytest.skip(f"backend '{request.param}': {missing}")
    return request.param


@pytest.fixture(autouse=True)
def _leave_memory_to_others():
    """The fp64 references are large, and several test processes, and ranks that tests start, share the card."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
