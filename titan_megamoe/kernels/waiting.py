"""Clock and fault record of kernels in plain Triton: on NVIDIA and AMD GPUs, and under Triton's interpreter."""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run under Triton's interpreter: program after program, in Python."""

if INTERPRETED:

    def clock_ns() -> int:
        """Nanoseconds since some moment."""
        return time.monotonic_ns()

    def flush_stores() -> None:
        """What the program has stored is there for all: so it is anyway."""

else:

    @tl.core.extern
    def clock_ns(_semantic=None):
        """Nanoseconds since some moment, int64. Threads may see different values: what they all must agree on, such as the way
        to a barrier, must not hang on it."""
        if _semantic.builder.options.backend_name != "hip":
            return globaltimer(_semantic=_semantic)
        # Triton's own memrealtime() waits for vector loads, but what it reads arrives as scalar loads do.
        ticks = tl.core.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
            "=s",
            [],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
            _semantic=_semantic,
        )
        return ticks.__mul__(10, _semantic=_semantic)  # it counts at 100 MHz

    @tl.core.extern
    def flush_stores(_semantic=None):
        """Before a barrier, behind which one thread tells other programs that the whole program's stores are there.

        On NVIDIA GPUs that is a barrier's and a release's doing: a release covers what its thread has seen of others. On AMD's, a
        barrier does not wait for stores to global memory, and a release waits for those of its own wave: so every wave waits for its own,
        and has its L2 cache, one of several of the GPU, write back what it holds.
        """
        if _semantic.builder.options.backend_name == "hip":
            tl.core.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\nbuffer_wbl2 sc1\ns_waitcnt vmcnt(0)\ns_mov_b32 $0, 0",
                "=s,~{memory}",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
                _semantic=_semantic,
            )


@triton.jit
def record_fault(fault, code, rank, kernel, phase, item, have, want):
    """Fill in the fault record (``plan_tables.FAULT_FIELDS``), unless it holds an earlier fault."""
    if tl.atomic_cas(fault, 0, code) == 0:
        tl.store(fault + 1, rank)
        tl.store(fault + 2, kernel)
        tl.store(fault + 3, phase)
        tl.store(fault + 4, item)
        tl.store(fault + 5, have)
        tl.store(fault + 6, want)
