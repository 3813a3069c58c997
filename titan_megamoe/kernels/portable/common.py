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

from ...quantize import MX_BLOCK
from .. import plan_tables
from ..quantize_mx import from_mx, to_mx
from ..waiting import clock_ns, flush_stores, INTERPRETED, record_fault

BLOCK_M = tl.constexpr(plan_tables.BLOCK_M)
"""Rows of a tile."""

PADDING_M = tl.constexpr(plan_tables.BLOCK_M // 2)
"""Padding is zero up to a multiple of so many rows of an expert: what weight gradients may read."""

GROUP = tl.constexpr(MX_BLOCK)
"""Elements that share a scale in MXFP8."""

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


@triton.jit
def store_mx(x, matrix, scales, row, column, num_rows, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Quantise fp32 ``[BLOCK_M, WIDTH]`` and write the first ``num_rows`` rows, from there on, into matrices of STRIDE columns, and of
    STRIDE / 32 scales."""
    values, scale_of_group = to_mx(x, BLOCK_M, WIDTH)
    is_written = (tl.arange(0, BLOCK_M) < num_rows)[:, None]
    tl.store(row_of(matrix, row, STRIDE) + column + matrix_offsets(BLOCK_M, WIDTH, STRIDE), values, mask=is_written)
    at = column // GROUP + matrix_offsets(BLOCK_M, WIDTH // GROUP, STRIDE // GROUP)
    tl.store(row_of(scales, row, STRIDE // GROUP) + at, scale_of_group, mask=is_written)


# ---- products
#
# An operand is a pair of pointers, to its first element and to that element's scale. In bf16 there are no scales, and the second is any
# pointer. In MXFP8 (MX) an element is a byte, and GROUP of them along what is contracted share a scale of a byte.

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rows_of(values, scales, row, WIDTH: tl.constexpr, MX: tl.constexpr):
    """An operand that begins with a row of a matrix, contracted along its WIDTH columns."""
    values = row_of(values, row, WIDTH)
    if MX:
        scales = row_of(scales, row, WIDTH // GROUP)
    return values, scales


@triton.jit
def load_step(operand, k, stride, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, MX: tl.constexpr, CACHE: tl.constexpr):
    """``[HEIGHT, BLOCK_K]`` of an operand whose rows are ``stride`` elements apart, from column ``k`` on: values and, in MX, scales."""
    values, scales = operand
    row = tl.arange(0, HEIGHT)[:, None]
    loaded = tl.load(values + k + row * stride + tl.arange(0, BLOCK_K)[None, :], cache_modifier=CACHE)
    loaded_scales = loaded
    if MX:
        loaded_scales = load_scales(scales, k, stride, HEIGHT, BLOCK_K, CACHE)
    return loaded, loaded_scales


@triton.jit
def load_scales(scales, k, stride, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """Those of :func:`load_step`, in MX."""
    group = tl.arange(0, BLOCK_K // GROUP)[None, :]
    row = tl.arange(0, HEIGHT)[:, None]
    return tl.load(scales + k // GROUP + row * (stride // GROUP) + group, cache_modifier=CACHE)


@triton.jit
def dot(a, b, acc):
    """``acc + a b``."""
    if _INTERPRETED:  # which multiplies the bits of bf16 as if they were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def multiply_step(a, b, acc, MX: tl.constexpr):
    """``acc + a b^T`` of what :func:`load_step` returned. In MX natively on GPUs that can (``backends.py``); for others, Triton converts to
    bf16, which holds e4m3 times a power of two exactly."""
    a_values, a_scales = a
    b_values, b_scales = b
    if MX:
        if _INTERPRETED:  # which knows no scaled product
            a_values = from_mx(a_values, a_scales, a_values.shape[0], a_values.shape[1])
            b_values = from_mx(b_values, b_scales, b_values.shape[0], b_values.shape[1])
            acc = tl.dot(a_values, tl.trans(b_values), acc)
        else:
            acc = tl.dot_scaled(a_values, a_scales, "e4m3", tl.trans(b_values), b_scales, "e4m3", acc)
    else:
        acc = dot(a_values, tl.trans(b_values), acc)
    return acc


# A product's operands lie along what is contracted, or across it: a is along it always, and in MX b is, too.


@triton.jit
def multiply_along(
    acc,
    a,
    b,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MX: tl.constexpr,
    CACHE_A: tl.constexpr,
):
    """``acc + a b^T`` for operands ``a`` ``[BLOCK_M, DEPTH]`` and ``b`` ``[BLOCK_N, DEPTH]``. CACHE_A: how a is loaded."""
    for k in range(0, DEPTH, BLOCK_K):
        a_step = load_step(a, k, DEPTH, BLOCK_M, BLOCK_K, MX, CACHE_A)
        acc = multiply_step(a_step, load_step(b, k, DEPTH, BLOCK_N, BLOCK_K, MX, ""), acc, MX)
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
