"""What the disassembler says of a kernel that was compiled for a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
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


def check_code(compiled) -> None:
    """Nothing is spilled, and no conversion to FP8 is left out."""
    used = resources(compiled)
    assert used["LOCAL"] == 0 and used["STACK"] <= MAX_STACK, used
    check_conversions(compiled.asm["ptx"])


def check_conversions(ptx: str) -> None:
    """ptxas 12.8 leaves out conversions to FP8 whose results are also paired with a register that is never written, which is
    what Triton 3.6 makes of storing the bytes of a ``tl.split``."""
    occurrences = Counter(re.findall(r"%rs\d+\b", ptx))
    converted = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", ptx))
    pairs = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", ptx)
    lost = [pair for pair in pairs if converted & set(pair) and any(occurrences[register] == 1 for register in pair)]
    assert not lost, f"Paired with a register that is never written: {lost[:4]}"
