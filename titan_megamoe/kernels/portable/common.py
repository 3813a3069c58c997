"""What the portable kernels share: claims, waits with a deadline, the order of memory.

**Order of memory.** Who has written something that another program waits for stores it, passes a barrier (so that all threads
of the program have: :func:`finish_stores`), and adds to a counter with release semantics at the GPU's scope. Who waits reads the
counter with acquire semantics, passes a barrier (so that all threads come after the one that read), and loads. What was written by
another program during the same launch is loaded past the SM's own cache (``.cg``). Between ranks nothing is ordered here: handshakes
come before and after.

**Deadlines.** All threads of a program must leave a wait at the same time, for there are barriers in it, and each sees a clock of
its own. So a wait counts its looks at the counter, which is the same number for all threads, and pauses a microsecond by the clock
between two: a deadline of s seconds is 1e6 s looks, with the pauses at least s seconds, and with the looks themselves, each a trip to
L2 or memory, up to three times that. The pause also keeps those that wait from crowding out those that work.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import plan_tables
from ..waiting import clock_ns, flush_stores, INTERPRETED, record_fault

BLOCK_M = tl.constexpr(plan_tables.BLOCK_M)
"""Rows of a tile."""

PADDING_M = tl.constexpr(plan_tables.BLOCK_M // 2)
"""Padding is zero up to a multiple of so many rows of an expert: what weight gradients may read."""

_FAULT_DEADLINE = tl.constexpr(plan_tables.FAULT_DEADLINE)
_PAUSE_NS = tl.constexpr(1000)
_PULLERS, _PUSHERS = tl.constexpr(8), tl.constexpr(9)


if INTERPRETED:

    def trip_count(n) -> int:
        """``n``, as the bound of a loop: NumPy 2.4 and later refuse the interpreter's scalars, arrays of one element."""
        return int(n.handle.data.item())

else:

    @triton.jit
    def trip_count(n):
        return n


# ---- claims


@triton.jit
def claim(queue, count):
    """The first of the next ``count`` items of an atomic queue. Who claims what is all that depends on chance."""
    return tl.atomic_add(queue, count, sem="relaxed", scope="gpu")


@triton.jit
def arrive_to_pull(queue):
    """The program's ticket in a kernel that pulls: how many came before."""
    return claim(queue + _PULLERS, 1)


@triton.jit
def arrive_to_push(queue):
    return claim(queue + _PUSHERS, 1)


@triton.jit
def tile_in_turn(index, tile_expert_M, expert_start_e1, EP_SIZE: tl.constexpr):
    """The row tile to compute as the ``index``-th, and its expert; see the function of this name in ``kernels/common.py``."""
    expert = tl.load(tile_expert_M + index)
    m = index
    if EP_SIZE > 1:
        first = tl.load(expert_start_e1 + expert) // BLOCK_M
        num_tiles = tl.load(expert_start_e1 + expert + 1) // BLOCK_M - first
        each = num_tiles // EP_SIZE
        rest = num_tiles % EP_SIZE
        owner = (index - first) % EP_SIZE
        turn = (index - first) // EP_SIZE
        m = first + owner * each + tl.minimum(owner, rest) + turn
    return m, expert


# ---- stores and waits


@triton.jit
def finish_stores():
    """All threads' stores are done, and may be counted with release semantics."""
    flush_stores()
    tl.debug_barrier()


@triton.jit
def load_acquire(counter, mask=None):
    """int32 at ``counter`` (a pointer or a tensor of them); after a barrier, loads see what its writer had written before it."""
    return tl.atomic_add(counter, 0, mask=mask, sem="acquire", scope="gpu")


@triton.jit
def pause():
    """Between two looks at a counter."""
    begin = clock_ns()
    now = begin
    while now - begin < _PAUSE_NS:
        now = clock_ns()


@triton.jit
def await_count(counter, want, deadline_us):
    """Wait until ``counter`` reaches ``want``, or until the deadline. Returns what it holds."""
    have = load_acquire(counter)
    looks = 0
    while (have < want) & (looks < deadline_us):
        pause()
        have = load_acquire(counter)
        looks += 1
    tl.debug_barrier()  # what one thread has seen, all may rely on
    return have


@triton.jit
def record_late(faults, KERNEL: tl.constexpr, PHASE: tl.constexpr, item, have, want):
    """Fill in the fault record for a missed deadline, unless it holds another fault."""
    fault, rank, _ = faults
    record_fault(fault, _FAULT_DEADLINE, rank, KERNEL, PHASE, item, have, want)


# ---- tiles in memory


@triton.jit
def matrix_offsets(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """``[HEIGHT, WIDTH]``: where the elements of a tile are, from its first on, in a matrix of ``STRIDE`` columns."""
    return tl.arange(0, HEIGHT)[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]


@triton.jit
def row_of(matrix, row, STRIDE: tl.constexpr):
    """Pointer to a row of a matrix, which may have more than 2^31 elements."""
    return matrix + row.to(tl.int64) * STRIDE


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """``acc + a b``."""
    if _INTERPRETED:  # which multiplies the bits of bf16 as if they were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


# A product's operands lie along what is contracted, or across it: a is along it always.


@triton.jit
def multiply_along(acc, a_tile, b_tile, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``acc + a b^T`` for ``a`` ``[BLOCK_M, DEPTH]`` and ``b`` ``[BLOCK_N, DEPTH]``, given their first elements."""
    a_offsets = matrix_offsets(BLOCK_M, BLOCK_K, DEPTH)
    b_offsets = matrix_offsets(BLOCK_N, BLOCK_K, DEPTH)
    for k in range(0, DEPTH, BLOCK_K):
        a = tl.load(a_tile + k + a_offsets)
        b = tl.load(b_tile + k + b_offsets)
        acc = dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def multiply_across(
    acc,
    a_tile,
    b_tile,
    DEPTH: tl.constexpr,
    B_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``acc + a b`` for ``a`` ``[BLOCK_M, DEPTH]`` and ``b`` ``[DEPTH, BLOCK_N]``, given their first elements; rows of b are B_STRIDE
    apart."""
    a_offsets = matrix_offsets(BLOCK_M, BLOCK_K, DEPTH)
    b_offsets = matrix_offsets(BLOCK_K, BLOCK_N, B_STRIDE)
    for k in range(0, DEPTH, BLOCK_K):
        a = tl.load(a_tile + k + a_offsets, cache_modifier=".cg")
        b = tl.load(b_tile + k * B_STRIDE + b_offsets)
        acc = dot(a, b, acc)
    return acc
