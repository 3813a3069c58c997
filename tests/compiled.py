"""What the disassembler says of a kernel that was compiled for a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton

MAX_STACK = 0 if triton.__version__.startswith("3.6.") else 64
"""Bytes per thread. The kernels are tuned with Triton 3.6; newer ones may spill a few registers more."""


def resources(compiled) -> dict[str, int]:
    """Registers, stack and local memory of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        Path(cubin).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def check_no_spills(compiled) -> None:
    used = resources(compiled)
    assert used["LOCAL"] == 0 and used["STACK"] <= MAX_STACK, used
