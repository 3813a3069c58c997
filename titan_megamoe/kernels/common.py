"""What the two GEMM kernels share: work handed from a scheduler warp to the other warps, waits with a deadline, fences.

Both kernels are persistent and warp-specialised. One CTA per SM runs these roles side by side:

    scheduler  1 warp         claims tiles from an atomic queue, ahead of need, and hands them out through a work ring
    producer   1 warp         loads the operands of each tile into shared memory by TMA, STAGES steps ahead
    consumers  2 warpgroups   multiply: the first has rows 0..63 of each tile, the second rows 64..127
    communication warps       move rows between ranks; they claim work of their own

The scheduler exists because a claim is a chain of dependent accesses to global memory (queue, tables, counters), about
3 us, in which a producer that did it itself would not load: that cost 13% when it was tried.

Items are claimed in an order in which each waits only for items claimed before it, by whoever is resident, so any
number of CTAs makes progress, even one. A wait for another CTA (a count in global memory) has a deadline; past it the
role that waited records what for, and ends, and so do those it hands work to. Waits within a CTA (mbarriers) need none:
each ends when the CTA's own loads, products and roles do.

Shape suffixes are those of ``plan_tables.py``.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import plan_tables
from .launch import (  # noqa: F401 (the kernels' modules import them from here)
    check_sizes,
    check_tensor,
    deadline_in_us,
    DEFAULT_DEADLINE_SECONDS,
    grid_size,
    WIDTH_MULTIPLE,
)

BLOCK_M = gl.constexpr(plan_tables.BLOCK_M)
"""Rows of a tile."""

HALF_M = gl.constexpr(plan_tables.BLOCK_M // 2)
"""Rows of a tile that one consumer warpgroup computes."""

BLOCK_K = gl.constexpr(WIDTH_MULTIPLE)
"""Depth of one step of the main loop: 128 bytes of bf16, the widest swizzle of shared memory."""

RING_SLOTS = gl.constexpr(2)
"""Tiles handed out and not yet finished: one being multiplied, one next. More would be claimed too early at the end, by
CTAs that are still busy, while others have nothing left."""

STOP = gl.constexpr(-1)
"""In the work ring: there are no more tiles (or a wait failed)."""

_FAULT_DEADLINE = gl.constexpr(plan_tables.FAULT_DEADLINE)

# What newer Triton calls otherwise: the barrier since 3.7, the copies since 3.8 (and 3.9 refuses their old names).
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# ---- launching


def tile_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How the copy engine reads or writes ``[rows, columns]`` tiles of a bf16 matrix."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _tile_layout(rows, columns))


@functools.cache  # built for every operand of every launch otherwise, which is a good part of a launch's time
def _tile_layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.jit
def idle():
    """A role that fills a warpgroup."""


# ---- tiles and the work ring


@gluon.jit
def pack_tile(m, n, expert, rows):
    """A tile as one int64, at least 0: rows in 8 bits, column tile in 16, expert in 16, row tile in the rest."""
    return (m.to(gl.int64) << 40) | (expert.to(gl.int64) << 24) | (n.to(gl.int64) << 8) | rows.to(gl.int64)


@gluon.jit
def unpack_tile(tile):
    """``m, n, expert, rows`` of :func:`pack_tile`."""
    m = (tile >> 40).to(gl.int32)
    expert = ((tile >> 24) & 0xFFFF).to(gl.int32)
    n = ((tile >> 8) & 0xFFFF).to(gl.int32)
    return m, n, expert, (tile & 0xFF).to(gl.int32)


@gluon.jit
def await_free_slot(ring_empty, count):
    """Scheduler: wait until the ring has room for its ``count``-th tile."""
    mbarrier.wait(ring_empty.index(count % RING_SLOTS), ((count // RING_SLOTS) & 1) ^ 1)


@gluon.jit
def hand_out(tile, ring, ring_full, count):
    """Scheduler: give ``tile`` (or STOP) to the other roles as the ``count``-th."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ring.index(count % RING_SLOTS).store(gl.full([1], 0, gl.int64, layout) + tile)
    mbarrier.arrive(ring_full.index(count % RING_SLOTS), count=1)


@gluon.jit
def receive_tile(ring, ring_full, count):
    """Other roles: wait for the ``count``-th tile. Its slot stays taken until :func:`finish_tile`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ring_full.index(count % RING_SLOTS), (count // RING_SLOTS) & 1)
    return gl.max(ring.index(count % RING_SLOTS).load(layout), axis=0)


@gluon.jit
def finish_tile(ring_empty, count):
    """Other roles: the ``count``-th tile's slot may be reused. Once all have said so, the scheduler claims again."""
    mbarrier.arrive(ring_empty.index(count % RING_SLOTS), count=1)


@gluon.jit
def make_pipeline(STAGES: gl.constexpr, STAGE_READERS: gl.constexpr, RING_READERS: gl.constexpr):
    """The barriers of the stages, which so many consumers empty, and the work ring, which so many roles read.

    Returns ``(stage_full, stage_empty), (ring, ring_full, ring_empty)``.
    """
    ring = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stage_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(stage_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=STAGE_READERS)
    for i in gl.static_range(RING_SLOTS):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=RING_READERS)
    return (stage_full, stage_empty), (ring, ring_full, ring_empty)


@gluon.jit
def make_half_barriers():
    """Two barriers for each half of a tile's rows, such as "full" and "empty": they hand a buffer from one role to another and
    back."""
    there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    back = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(back.index(i), count=1)
    return there, back


@gluon.jit
def skip_steps(stages, step, num_steps, STAGES: gl.constexpr):
    """Consumer of a tile that has nothing in its half: leave the tensor cores to the other one. Returns the step after."""
    stage_full, stage_empty = stages
    for _ in range(num_steps):
        mbarrier.wait(stage_full.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(stage_empty.index(step % STAGES), count=1)
        step += 1
    return step


@gluon.jit
def load_tile_rows(desc, half_desc, at, rows, full, buffer, OTHER_BYTES: gl.constexpr):
    """Producer: load a step's columns of a tile's rows, of which the second half may not be there, and have ``full`` expect
    them and OTHER_BYTES more."""
    if rows > HALF_M:
        mbarrier.expect(full, OTHER_BYTES + desc.block_type.nbytes)
        async_load(desc, at, full, buffer)
    else:
        mbarrier.expect(full, OTHER_BYTES + half_desc.block_type.nbytes)
        async_load(half_desc, at, full, buffer.slice(0, HALF_M))


@gluon.jit
def tile_in_turn(index, tile_expert_M, expert_start_e1, EP_SIZE: gl.constexpr):
    """The row tile to compute as the ``index``-th: expert after expert, and in an expert the owner ranks take turns.

    An expert's rows lie owner after owner, but they arrive from all owners at once, and tokens are sent to all owners
    in turn. In the order of the rows, the first tiles of the last owner would wait for the last tiles of the first.
    Where an owner's tiles begin is taken to be where even routing puts it: a wrong guess costs time only.
    """
    expert = gl.load(tile_expert_M + index)
    m = index
    if EP_SIZE > 1:
        first = gl.load(expert_start_e1 + expert) // BLOCK_M
        num_tiles = gl.load(expert_start_e1 + expert + 1) // BLOCK_M - first
        each = num_tiles // EP_SIZE
        rest = num_tiles % EP_SIZE  # so many of the first owners have one tile more than each
        owner = (index - first) % EP_SIZE
        turn = (index - first) // EP_SIZE
        m = first + owner * each + gl.minimum(owner, rest) + turn
    return m, expert


# ---- memory order


@gluon.jit
def claim(queue, count):
    """The first of the next ``count`` items of an atomic queue. Who claims what is all that depends on chance."""
    return gl.atomic_add(queue, count, sem="relaxed", scope="gpu")


@gluon.jit
def load_acquire(address):
    """int32 at ``address`` (a pointer or a tensor of them); later loads see what its writer had written before it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_async_global():
    """Order ordinary accesses to global memory and those of the copy engine (TMA), before and after."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_tma_stores():
    """Wait until this thread's TMA stores are complete in global memory; ``tma.store_wait`` waits only until they have
    read shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ---- arithmetic


@gluon.jit
def sigmoid(x):
    """Of fp32, to a few units in the last place: four instructions, where ``1 / (1 + exp(-x))`` takes twice as many to be right where
    its parts are subnormal. While consumers are busy with them, tensor cores wait."""
    return gl.inline_asm_elementwise(
        # -1 / ln 2; 1.0
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


# ---- waits with a deadline


@gluon.jit
def clock_ns():
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def pause():
    """Between two looks at a counter: a spinning warp draws power, and power is what limits the clock of a busy GPU."""
    gl.inline_asm_elementwise("nanosleep.u32 200; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_count(counter, want, deadline_us):
    """Wait until ``counter`` reaches ``want``, or until the deadline. Returns what it holds."""
    have = load_acquire(counter)
    if have < want:
        begin = clock_ns()
        while (have < want) & (clock_ns() - begin < deadline_us.to(gl.int64) * 1000):
            pause()
            have = load_acquire(counter)
    return have


@gluon.jit
def record_late(fault, rank, KERNEL: gl.constexpr, PHASE: gl.constexpr, item, have, want):
    """Fill in the fault record (``plan_tables.FAULT_FIELDS``) for a missed deadline, unless it holds another fault."""
    if gl.atomic_cas(fault, 0, _FAULT_DEADLINE) == 0:
        gl.store(fault + 1, rank)
        gl.store(fault + 2, KERNEL)
        gl.store(fault + 3, PHASE)
        gl.store(fault + 4, item)
        gl.store(fault + 5, have)
        gl.store(fault + 6, want)
