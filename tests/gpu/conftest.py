"""The backends on kernels that this machine can run, one after the other."""

from __future__ import annotations

import pytest

from titan_megamoe.backends import KERNEL_BACKENDS, missing_on_this_machine


@pytest.fixture(params=KERNEL_BACKENDS)
def kernels(request) -> str:
    """Name of a backend; the test is skipped where it cannot run."""
    missing = missing_on_this_machine(request.param)
    if missing:
        pytest.skip(f"backend '{request.param}': {missing}")
    return request.param
