"""The memory that the ranks of an expert-parallel group reach each other through, and the size of everything else.

Only small buffers of static size are symmetric: a rank's published inputs, the slots its results come back in, and
flags. One :class:`SymmetricWorkspace` per (group, shape) serves all layers of that shape, because calls are ordered:
two layers must not use it on different streams at the same time. :func:`plan_memory` computes every buffer, symmetric
or not, from the definitions that also allocate and slice them, before anything is allocated.

Shape suffixes are those of ``kernels/plan_tables.py``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist

from .kernels.plan_tables import (
    BLOCK_M,
    BackwardRows,
    buffer,
    CapacityExceeded,
    Counters,
    Entry,
    FAULT_STOPPED,
    fault_error,
    HiddenRows,
    KeptRows,
    KernelPlan,
    LayerShape,
    Layout,
    layout_of,
    num_blocks,
    PHASE_ALL_SENT,
    PHASE_PUBLISHED,
    PlanScratch,
    ResultRows,
    RowShape,
)

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 300.0
"""How long a rank waits for its peers, unless :func:`set_deadline` says otherwise. Long, because ranks drift apart: one writes
a checkpoint."""

_deadline_seconds = DEFAULT_DEADLINE_SECONDS

_NUM_PHASES = 2


def _if_peers(s: LayerShape, *shape: int) -> tuple[int, ...]:
    return shape if s.ep_size > 1 else (0, *shape[1:])


@dataclass(frozen=True, kw_only=True)
class Published:
    """Symmetric: every rank of the group reads or writes it. With one rank, buffers for peers are empty."""

    x_TD: torch.Tensor = buffer(  # noqa: N815
        None,
        lambda s: _if_peers(s, s.max_tokens, s.dim),
        "this rank's tokens (in FP8: in the first half); with one rank they are read in place",
    )
    x_scales_Tb: torch.Tensor = buffer(  # noqa: N815
        torch.float32,
        lambda s: _if_peers(s, s.max_tokens, num_blocks(s.dim)),
        "their scales, if they are in FP8, by block of 128 columns; in MXFP8 four bytes of these, by group of 32",
    )
    ids_TK: torch.Tensor = buffer(  # noqa: N815
        torch.int32, lambda s: (s.max_tokens, s.top_k), "global expert ids of their routes"
    )
    scores_TK: torch.Tensor = buffer(  # noqa: N815
        torch.float32, lambda s: (s.max_tokens, s.top_k), "scores of their routes"
    )
    num_tokens: torch.Tensor = buffer(torch.int32, lambda s: (1,), "how many tokens this rank has in this call")
    dout_TD: torch.Tensor = buffer(  # noqa: N815
        None, lambda s: _if_peers(s, s.max_tokens, s.dim), "in backward: the gradient of this rank's output, as x"
    )
    dout_scales_Tb: torch.Tensor = buffer(  # noqa: N815
        torch.float32, lambda s: _if_peers(s, s.max_tokens, num_blocks(s.dim)), "its scales, as x's"
    )
    slots_PTD: torch.Tensor = buffer(  # noqa: N815
        None,
        lambda s: _if_peers(s, s.ep_size, s.max_tokens, s.dim),
        "what expert rank p computed for token t, written by p: its part of out, in backward of dx",
    )
    score_slots_PTK: torch.Tensor = buffer(  # noqa: N815
        torch.float32,
        lambda s: _if_peers(s, s.ep_size, s.max_tokens, s.top_k),
        "in backward: score gradients of token t's routes to expert rank p, in their order, then zeros; written by p",
    )
    flags: torch.Tensor = buffer(
        torch.int32, lambda s: _if_peers(s, _NUM_PHASES, s.ep_size), "call number that rank p has reached, by phase"
    )


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where each rank's :class:`Published` buffers are, as seen from this rank: tables of P base addresses."""

    x_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of x_TD")  # noqa: N815
    x_scales_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of x_scales_Tb")  # noqa: N815
    ids_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of ids_TK")  # noqa: N815
    scores_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of scores_TK")  # noqa: N815
    num_tokens_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of num_tokens")  # noqa: N815
    dout_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of dout_TD")  # noqa: N815
    dout_scales_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of dout_scales_Tb")  # noqa: N815
    slots_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of slots_PTD")  # noqa: N815
    score_slots_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of score_slots_PTK")  # noqa: N815
    flags_P: torch.Tensor = buffer(torch.int64, lambda s: (s.ep_size,), "of flags")  # noqa: N815


_ADDRESSED = {
    "x_P": "x_TD",
    "x_scales_P": "x_scales_Tb",
    "ids_P": "ids_TK",
    "scores_P": "scores_TK",
    "num_tokens_P": "num_tokens",
    "dout_P": "dout_TD",
    "dout_scales_P": "dout_scales_Tb",
    "slots_P": "slots_PTD",
    "score_slots_P": "score_slots_PTK",
    "flags_P": "flags",
}


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """What outlives a call but concerns this rank alone. Zero at first."""

    calls: torch.Tensor = buffer(torch.int32, lambda s: (_NUM_PHASES,), "handshakes completed, by phase")
    fault: torch.Tensor = buffer(torch.int32, lambda s: (16,), "fault record: see plan_tables.FAULT_FIELDS")
    peak: torch.Tensor = buffer(
        torch.int32, lambda s: (2,), "over all calls, the most rows routed here and the most that did not fit"
    )


class SymmetricWorkspace:
    """One rank's end of a group's shared memory. Made by :func:`get_workspace` or :func:`virtual_workspaces`.

    Attributes:
        shape: the layer's, equal on all ranks.
        rank: of this rank in the group.
        device: of all buffers.
        deadline_seconds: how long a handshake waits. May be changed; a captured graph keeps what it was captured with.
        rehearsed: what kernels have been compiled for (see ``hopper.rehearse``).
        published: this rank's :class:`Published` buffers.
        addresses: all ranks', as base addresses.
        local: this rank's :class:`LocalState`.
    """

    def __init__(
        self,
        shape: LayerShape,
        rank: int,
        bases: list[int],
        storage: torch.Tensor,
        *,
        peers: object = None,
        deadline_seconds: float,
    ):
        """``storage``: this rank's :class:`Published` bytes; ``bases``: the address of each rank's, as seen from here;
        ``peers``: whatever keeps the other ranks' alive."""
        self.shape, self.rank, self.device = shape, rank, storage.device
        self.deadline_seconds = deadline_seconds
        self._peers = peers
        layout = layout_of(Published, shape)
        self.published: Published = layout.slice(storage)
        self.addresses: Addresses = layout_of(Addresses, shape).allocate(self.device)
        for name, of in _ADDRESSED.items():
            offset = layout.offset_of(of)
            getattr(self.addresses, name).copy_(torch.tensor([base + offset for base in bases], dtype=torch.int64))
        self.local: LocalState = layout_of(LocalState, shape).allocate(self.device, zeroed=True)
        self._host = torch.empty(32, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._late = torch.empty(32, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._late_event: torch.cuda.Event | None = None
        self.rehearsed: set[tuple] = set()

    def rehearsal(self) -> SymmetricWorkspace:
        """A workspace in which this rank is all ranks and never waits, for running the kernels once without the peers.

        It has this one's memory, of which it overwrites what each call overwrites anyway, but flags and state of its own.
        """
        flags = torch.full_like(self.published.flags, 2**30)  # more calls than anyone will wait for
        alone = copy.copy(self)
        alone.published = replace(self.published, flags=flags)
        alone.addresses = replace(
            self.addresses,
            **{name: getattr(self.addresses, name)[self.rank].repeat(self.shape.ep_size) for name in _ADDRESSED},
        )
        alone.addresses.flags_P.fill_(flags.data_ptr())
        alone.local = layout_of(LocalState, self.shape).allocate(self.device, zeroed=True)
        alone._late, alone._late_event = torch.empty_like(self._late), None
        return alone

    def stop(self) -> None:
        """Tell the peers that this rank cannot go on: what they wait for then ends at once, with an error that names it,
        instead of at their deadline. Waits until they are told; the workspace is spent."""
        if self.shape.ep_size == 1:
            return
        from .kernels.combine import signal

        # Not behind what this rank may itself be waiting for.
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(side) if side else contextlib.nullcontext():
            fault = self.local.fault[:2]
            stopped = torch.tensor([FAULT_STOPPED, self.rank], dtype=torch.int32, device=self.device)
            fault.copy_(torch.where(fault[:1] == 0, stopped, fault))
            for phase in (PHASE_PUBLISHED, PHASE_ALL_SENT):
                signal(self, phase)
        if side:
            side.synchronize()

    def read(self, values: torch.Tensor) -> list[int]:
        """Wait for the current stream and return ``values`` (a few int32), after the same checks as :meth:`check`."""
        wanted = (values, self.local.fault, self.local.peak)
        parts = self._host.split([*(t.numel() for t in wanted), self._host.numel() - sum(t.numel() for t in wanted)])
        for part, tensor in zip(parts, wanted):
            part.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        result, fault, peak, _ = (part.tolist() for part in parts)
        error = fault_error(fault, self.shape) or self._capacity_error(*peak)
        if error is not None:
            raise error
        return result

    def check_later(self) -> None:
        """Have the next :meth:`raise_if_late` look at what the calls so far have left wrong. Does not wait.

        For calls that do not :meth:`read`: their results are undefined if something was wrong, until it is raised.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # :meth:`check` after the graph's replays finds it
        state = self.local.fault.numel()
        self._late[:state].copy_(self.local.fault, non_blocking=True)
        self._late[state : state + 2].copy_(self.local.peak, non_blocking=True)
        self._late_event = torch.cuda.Event()
        self._late_event.record()

    def raise_if_late(self) -> None:
        """Raise what :meth:`check` would, of calls whose results have arrived. Does not wait."""
        if self._late_event is None or torch.cuda.is_current_stream_capturing() or not self._late_event.query():
            return
        self._late_event = None
        state = self.local.fault.numel()
        error = fault_error(self._late[:state].tolist(), self.shape)
        error = error or self._capacity_error(*self._late[state : state + 2].tolist())
        if error is not None:
            raise error

    def check(self) -> None:
        """Wait for the current stream and raise what any call so far has left wrong. Call it at a step's end.

        Raises:
            ValueError: a rank passed an id that is no expert's, or a score that is not finite.
            KernelFault: a wait passed its deadline; says which rank waited in which kernel for what.
            CapacityExceeded: the static pool was too small; names the capacity that would have sufficed.
        """
        self.read(self.local.calls)

    def _capacity_error(self, peak_rows: int, peak_overflow: int) -> Exception | None:
        if peak_overflow == 0:
            return None
        return CapacityExceeded(
            f"mega_moe: rank {self.rank}: a call routed {peak_rows} rows to this rank's experts, but capacity = "
            f"{self.shape.capacity} holds {self.shape.pool_rows} with padding; up to {peak_overflow} rows had no place "
            f"and the results are invalid. capacity = {self.shape.capacity_for(peak_rows)} would have sufficed; without a "
            "capacity, there is always room."
        )


# ---- creation

_workspaces: dict[tuple[str, LayerShape, torch.device], SymmetricWorkspace] = {}


def get_workspace(
    group: dist.ProcessGroup | None,
    shape: LayerShape,
    device: torch.device | str,
) -> SymmetricWorkspace:
    """The workspace of ``group`` for ``shape``: made by the first call, which is collective, and shared by all later
    ones.

    All ranks must ask for the same shapes in the same order: one that has a shape already does not meet one that has
    not.

    Args:
        group: the expert-parallel group; None, or a group of one, needs no rendezvous.
        shape: equal on all ranks; its ``ep_size`` is the group's size.
        device: this rank's.

    Raises:
        ValueError: ``shape`` does not fit the group or differs between ranks, or two ranks cannot reach each other's
        memory.
    """
    device = torch.device(device)
    size = dist.get_world_size(group) if group is not None else 1
    if size != shape.ep_size:
        raise ValueError(f"get_workspace: shape.ep_size = {shape.ep_size}, but the group has {size} ranks.")
    key = (group.group_name if size > 1 else "", shape, device)
    if key not in _workspaces:
        _workspaces[key] = _create(group, shape, device, _deadline_seconds)
    return _workspaces[key]


def set_deadline(seconds: float) -> None:
    """Have handshakes wait ``seconds`` for peers from now on, in all workspaces.

    The trainer sets it to what TorchTitan's process groups wait: ``comm.init_timeout_seconds`` in the first step, then
    ``comm.train_timeout_seconds``.

    Raises:
        ValueError: not a positive, finite number.
    """
    global _deadline_seconds
    if not 0 < seconds < float("inf"):
        raise ValueError(f"set_deadline: seconds = {seconds}. Pass a positive, finite number.")
    _deadline_seconds = seconds
    for workspace in _workspaces.values():
        workspace.deadline_seconds = seconds


def stop_workspaces() -> None:
    """:meth:`SymmetricWorkspace.stop` of all of them, as far as the device still works."""
    for workspace in _workspaces.values():
        try:
            workspace.stop()
        except RuntimeError as error:  # the peers will find out at their deadline
            logger.warning(f"mega_moe: rank {workspace.rank} could not tell its peers that it stopped: {error}")


def check_workspaces() -> None:
    """:meth:`SymmetricWorkspace.check` of all of them."""
    for workspace in _workspaces.values():
        workspace.check()


def _create(
    group: dist.ProcessGroup | None, shape: LayerShape, device: torch.device, deadline_seconds: float
) -> SymmetricWorkspace:
    num_bytes = layout_of(Published, shape).num_bytes
    if shape.ep_size == 1:
        storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return SymmetricWorkspace(shape, 0, [storage.data_ptr()], storage, deadline_seconds=deadline_seconds)

    import torch.distributed._symmetric_memory as symm_mem

    rank = dist.get_rank(group)
    check_group(group, shape, device)
    storage = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(storage, group)
    storage.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # a peer's first flag must not be zeroed away
    # The tensor need not start where its allocation does; wherever it does, it is the same on all ranks.
    offset = storage.data_ptr() - handle.buffer_ptrs[rank]
    bases = [base + offset for base in handle.buffer_ptrs]
    return SymmetricWorkspace(shape, rank, bases, storage, peers=handle, deadline_seconds=deadline_seconds)


def virtual_workspaces(
    shape: LayerShape, device: torch.device | str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
) -> list[SymmetricWorkspace]:
    """All ranks' workspaces in one process and on one device: the same layout and addressing without a group.

    For tests. Where the ranks share a stream, all must ``signal`` before one may ``wait``.
    """
    num_bytes = layout_of(Published, shape).num_bytes
    storages = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(shape.ep_size)]
    bases = [storage.data_ptr() for storage in storages]
    return [
        SymmetricWorkspace(shape, rank, bases, storage, peers=storages, deadline_seconds=deadline_seconds)
        for rank, storage in enumerate(storages)
    ]


# ---- which ranks reach each other


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Where a rank runs."""

    host: str
    device_uuid: str
    nvlink_domain: tuple[str, int] | None
    """Of GPUs whose NVLink spans hosts: (cluster, clique)."""


def check_group(group: dist.ProcessGroup, shape: LayerShape, device: torch.device) -> None:
    """Raise the same ValueError on all ranks if their shapes differ or two of them cannot reach each other's memory."""
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    mine = torch.cuda.current_device() if device.index is None else device.index
    identity = Identity(
        host=socket.gethostname(),
        device_uuid=str(torch.cuda.get_device_properties(mine).uuid),
        nvlink_domain=_nvlink_domain(str(torch.cuda.get_device_properties(mine).uuid)),
    )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    gathered: list[tuple[LayerShape, Identity]] = [None] * size
    dist.all_gather_object(gathered, (shape, identity), group=group)
    shapes, identities = zip(*gathered)
    require_equal_shapes(shapes)

    def can_access(peer: Identity) -> bool:
        # A device hidden from this process (CUDA_VISIBLE_DEVICES) cannot be asked about; the rendezvous will tell.
        index = visible.get(peer.device_uuid)
        return index is None or torch.cuda.can_device_access_peer(mine, index)

    unreachable: list[list[tuple[int, int]]] = [None] * size
    dist.all_gather_object(unreachable, unreachable_pairs(rank, identities, can_access), group=group)
    refuse_unreachable([pair for pairs in unreachable for pair in pairs], identities)


def require_equal_shapes(shapes: tuple[LayerShape, ...]) -> None:
    for rank, shape in enumerate(shapes):
        for declared in fields(LayerShape):
            here, there = getattr(shapes[0], declared.name), getattr(shape, declared.name)
            if here != there:
                raise ValueError(
                    f"mega_moe: {declared.name} is {here} on rank 0 but {there} on rank {rank} of the expert-parallel "
                    "group. All ranks lay out their shared memory by it: pass the same value everywhere."
                )


def unreachable_pairs(
    rank: int, identities: tuple[Identity, ...], can_access: Callable[[Identity], bool]
) -> list[tuple[int, int]]:
    """``(rank, peer)`` of each peer whose memory ``rank`` cannot reach; ``can_access`` answers for peers on its
    host."""
    mine, pairs = identities[rank], []
    for peer, theirs in enumerate(identities):
        if theirs.device_uuid == mine.device_uuid:
            continue  # itself, or another rank on the same device
        if theirs.host == mine.host:
            reached = can_access(theirs)
        else:
            reached = mine.nvlink_domain is not None and theirs.nvlink_domain == mine.nvlink_domain
        if not reached:
            pairs.append((rank, peer))
    return pairs


def refuse_unreachable(pairs: list[tuple[int, int]], identities: tuple[Identity, ...]) -> None:
    if not pairs:
        return
    named = "; ".join(
        f"rank {a} (GPU {identities[a].device_uuid} on {identities[a].host}) and rank {b} "
        f"(GPU {identities[b].device_uuid} on {identities[b].host})"
        for a, b in sorted({(min(pair), max(pair)) for pair in pairs})[:4]
    )
    raise ValueError(
        f"mega_moe: these ranks of the expert-parallel group cannot reach each other's memory: {named}. The fused "
        "kernels need every rank within one NVLink domain: choose an expert-parallel degree that stays inside it, or "
        "use the strategy 'all_to_all'."
    )


def _nvlink_domain(device_uuid: str) -> tuple[str, int] | None:
    """The (cluster, clique) of a GPU whose NVLink fabric spans hosts; None if it does not, or the driver cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device_uuid}")
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    except (pynvml.NVMLError, AttributeError):  # an older driver or binding
        return None
    cluster = bytes(info.clusterUuid).hex()
    is_member = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(bytes(info.clusterUuid))
    return (cluster, info.cliqueId) if is_member else None


# ---- sizes


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """Buffers with one lifetime."""

    lifetime: str
    entries: tuple[Entry, ...]
    is_passing: bool
    """Freed before another passing section is allocated: they never add up."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.reserved for entry in self.entries)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Every buffer of a fused layer on one rank."""

    shape: LayerShape
    num_rows: int
    """Padded rows that the row buffers are sized for."""
    sections: tuple[MemorySection, ...]

    @property
    def num_bytes(self) -> int:
        """Most bytes on this rank's device with one layer alive."""
        passing = [section.num_bytes for section in self.sections if section.is_passing]
        return max(passing) + sum(section.num_bytes for section in self.sections if not section.is_passing)

    def explain(self) -> str:
        """A table of every buffer, with a total per lifetime and overall."""
        if self.shape.capacity is None:
            rows = f"{self.num_rows} padded rows, as even routing gives; sized in each call by the rows received"
        else:
            rows = f"{self.num_rows} padded rows, fixed by capacity = {self.shape.capacity}"
        lines = [f"{self.shape}", f"row buffers: {rows}"]
        for section in self.sections:
            lines.append(f"{section.lifetime}: {in_units(section.num_bytes)} ({section.num_bytes} bytes)")
            for entry in section.entries:
                dims = " x ".join(map(str, entry.shape))
                dtype = str(entry.dtype).removeprefix("torch.")
                lines.append(
                    f"  {entry.name:<18} {dtype:<9} {dims:<22} {in_units(entry.reserved):>11}  {entry.meaning}"
                )
        lines.append(f"most with one layer alive: {in_units(self.num_bytes)} ({self.num_bytes} bytes)")
        return "\n".join(lines)


def plan_memory(
    shape: LayerShape, *, saved: str = "activations", precision: str = "bf16", wgrad: str = "bf16"
) -> MemoryPlan:
    """Size every buffer that a layer of ``shape`` needs on one rank, allocating nothing.

    Buffers are rounded up to ``plan_tables.ALIGNMENT`` bytes, as they are when allocated. With exact sizing, row
    buffers depend on the routing; they are given for an even one.

    Args:
        shape: the layer's.
        saved: ``"activations"`` keeps pulled rows and gate/up from forward to backward; ``"inputs"`` keeps neither.
        precision, wgrad: as in :func:`titan_megamoe.mega_moe`.

    Raises:
        ValueError: ``saved`` is neither.
    """
    if saved not in ("activations", "inputs"):
        raise ValueError(f"plan_memory: saved = {saved!r} is not known. Use one of: activations, inputs.")
    even_rows = min(shape.max_tokens * shape.top_k, shape.max_rows)
    num_rows = shape.pool_rows if shape.capacity is not None else BLOCK_M * shape.tiles_for(even_rows)
    rows = RowShape(layer=shape, num_rows=num_rows, precision=precision, wgrad=wgrad)
    kept = Layout(KeptRows, rows).entries
    is_kept = saved == "activations"

    def section(lifetime: str, *entries: Entry, is_passing: bool = False) -> MemorySection:
        entries = tuple(entry for entry in entries if entry.num_bytes)
        return MemorySection(lifetime=lifetime, entries=entries, is_passing=is_passing)

    return MemoryPlan(
        shape=shape,
        num_rows=num_rows,
        sections=(
            section("symmetric, one for all layers", *layout_of(Published, shape).entries),
            section(
                "local, one for all layers", *layout_of(Addresses, shape).entries, *layout_of(LocalState, shape).entries
            ),
            section(
                "within a forward",
                *layout_of(PlanScratch, shape).entries,
                *layout_of(Counters, shape).entries,
                *(() if is_kept else (entry for entry in kept if entry.name.startswith("pool"))),
                *Layout(HiddenRows, rows).entries,
                *Layout(ResultRows, rows).entries,
                is_passing=True,
            ),
            section(
                "within a backward",
                *layout_of(Counters, shape).entries,
                *(() if is_kept else kept),
                *Layout(BackwardRows, rows).entries,
                is_passing=True,
            ),
            section(
                "per layer, from its forward to its backward",
                *layout_of(KernelPlan, shape).entries,
                *(kept if is_kept else ()),
            ),
        ),
    )


def in_units(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
