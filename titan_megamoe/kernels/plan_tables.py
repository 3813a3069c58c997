"""The tables that the kernels share: one definition sizes, slices and documents each of them.

A group of buffers is a dataclass whose fields are declared with :func:`buffer`: dtype, shape as a function of the
layer's shape, and meaning. :class:`Layout` turns such a class into byte offsets of one allocation and hands out an
instance whose attributes are the tensors. Nothing else in the package computes the size of a buffer.

Shape suffixes are those of ``titan_megamoe/plan.py``; here also

    M  tiles of BLOCK_M rows of the row pool
    b  blocks of 128 of what comes before it, of which blockwise FP8 has a scale each
    g  groups of 32, of which MXFP8 has a scale each
    B  blocks of ``LayerShape.block_tokens`` tokens, owner rank after owner rank

U, M and N are capacities: the real sizes are device scalars (:attr:`KernelPlan.sizes`), so nothing waits for the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from ..quantize import BLOCK, FORMATS, FP8, MX_BLOCK
from .tuning import num_score_parts

BLOCK_M = 128
"""Rows of a tile. Every expert's rows start at a multiple of it."""

MAX_TOP_K = 32

ALIGNMENT = 256
"""Bytes to which every buffer is aligned: above what TMA (16) and vector loads need, and no two share a 128-byte
line."""

MAX_BLOCK_TOKENS = 128
"""A block's counts must fit the bit fields of ``plan.py``'s packed counts."""

BLOCK_ELEMENTS = 2048
"""Elements of a block's (token, expert) matrix, which the plan kernels hold in registers (a block has at least 4
tokens). On an H200, with 16,384 tokens per rank and top-8 of 128, the plan takes 34 us at EP=1 and 58 us at EP=8's
sizes; with 1024 elements it takes 44 and 79, with 4096 37 and 59."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What the sizes of all buffers follow from. Every rank of the group must use an equal one."""

    ep_size: int
    """P, ranks of the expert-parallel group."""
    max_tokens: int
    """The most tokens any rank passes in one call; ranks may differ and may pass none."""
    dim: int
    """D, a multiple of 64."""
    hidden_dim: int
    """F, a multiple of 64."""
    num_local_experts: int
    """e, experts of one rank."""
    top_k: int
    """K, at most 32."""
    capacity: float | None = None
    """Rows the pool holds, in units of ``max_tokens * top_k`` (a rank's share under even routing). None: exactly the
    rows received, read back by the host in each call."""
    dtype: torch.dtype = torch.bfloat16
    """Of ``x``, of the rows and of the output."""

    def __post_init__(self) -> None:
        for name in ("ep_size", "max_tokens", "dim", "hidden_dim", "num_local_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"LayerShape: {name} = {getattr(self, name)}. Pass at least 1.")
        for name in ("dim", "hidden_dim"):
            if getattr(self, name) % 64:
                raise ValueError(
                    f"LayerShape: {name} = {getattr(self, name)} is not a multiple of 64. Pad the model's."
                )
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"LayerShape: top_k = {self.top_k}; 1 to {MAX_TOP_K} routes per token are supported.")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(
                f"LayerShape: capacity = {self.capacity}. Pass a positive multiple of the rows of an even routing, "
                "such as 1.5, or None to allocate exactly the rows received."
            )

    @property
    def num_experts(self) -> int:
        return self.ep_size * self.num_local_experts

    @property
    def max_unique(self) -> int:
        """Most tokens that can have a route to one rank: all of them."""
        return self.ep_size * self.max_tokens

    @property
    def max_rows(self) -> int:
        """Most rows that one rank can receive: every route of the group (a token may name an expert twice)."""
        return self.max_unique * self.top_k

    @property
    def max_tiles(self) -> int:
        return self.tiles_for(self.max_rows)

    @property
    def pool_rows(self) -> int:
        """Padded rows that the plan may hand out: the pool's under ``capacity``, else as many as can ever be needed."""
        return BLOCK_M * (self.max_tiles if self.capacity is None else self.tiles_for(self._capacity_rows))

    @property
    def _capacity_rows(self) -> int:
        return min(math.ceil(self.capacity * self.max_tokens * self.top_k), self.max_rows)

    def tiles_for(self, num_rows: int) -> int:
        """Tiles that suffice for ``num_rows`` rows, however they are spread over this rank's experts."""
        return (num_rows + min(self.num_local_experts, num_rows) * (BLOCK_M - 1)) // BLOCK_M

    def capacity_for(self, num_rows: int) -> float:
        """The smallest ``capacity``, in steps of 0.01, that fits ``num_rows`` rows however they are spread."""
        return math.ceil(100 * num_rows / (self.max_tokens * self.top_k)) / 100

    # How the plan kernels cut the tokens into blocks, one block to a program.

    @property
    def block_experts(self) -> int:
        return max(16, _next_power_of_2(self.num_local_experts))

    @property
    def block_routes(self) -> int:
        return _next_power_of_2(self.top_k)

    @property
    def block_tokens(self) -> int:
        widest = max(self.block_experts, self.block_routes)
        most = min(MAX_BLOCK_TOKENS, _next_power_of_2(self.max_tokens))
        return min(most, max(4, BLOCK_ELEMENTS // widest))

    @property
    def block_warps(self) -> int:
        """Of a program that works on a block: 16 elements for each thread."""
        return min(16, max(4, self.block_tokens * self.block_experts // 512))

    @property
    def blocks_per_owner(self) -> int:
        return -(-self.max_tokens // self.block_tokens)

    @property
    def num_blocks(self) -> int:
        return self.ep_size * self.blocks_per_owner


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# ---- layouts


def buffer(dtype: torch.dtype | Callable | None, shape: Callable[..., tuple[int, ...]], meaning: str):
    """Declare a field of a buffer group. ``shape`` maps a :class:`LayerShape` to the tensor's (for buffers of rows, a
    :class:`RowShape`), and so may ``dtype``; None is the layer's."""
    return field(metadata={"dtype": dtype, "shape": shape, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One buffer of a layout; ``offset`` and ``reserved`` (its bytes, rounded up to ALIGNMENT) are in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    meaning: str
    offset: int

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def reserved(self) -> int:
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


class Layout:
    """Where the buffers of a group lie in one allocation: in the order of the fields, aligned, none overlapping."""

    def __init__(self, group: type, shape: LayerShape | RowShape):
        self.group = group
        self.entries: list[Entry] = []
        offset = 0
        for declared in fields(group):
            dtype = declared.metadata["dtype"] or shape.dtype
            entry = Entry(
                name=declared.name,
                dtype=dtype if isinstance(dtype, torch.dtype) else dtype(shape),
                shape=declared.metadata["shape"](shape),
                meaning=declared.metadata["meaning"],
                offset=offset,
            )
            self.entries.append(entry)
            offset += entry.reserved
        self.num_bytes = offset

    def offset_of(self, name: str) -> int:
        return next(entry.offset for entry in self.entries if entry.name == name)

    def slice(self, storage: torch.Tensor):
        """An instance of the group over ``storage``, ``num_bytes`` of uint8."""
        # One tensor operation per buffer: plans are sliced in every call of every layer.
        typed = {dtype: storage.view(dtype) for dtype in {entry.dtype for entry in self.entries}}
        views = {}
        for entry in self.entries:
            base = typed[entry.dtype]
            first = base.storage_offset() + entry.offset // entry.dtype.itemsize
            views[entry.name] = base.as_strided(entry.shape, entry.strides, first)
        return self.group(**views)

    def allocate(self, device: torch.device | str, *, zeroed: bool = False):
        """An instance of the group over one new allocation."""
        make = torch.zeros if zeroed else torch.empty
        return self.slice(make(self.num_bytes, dtype=torch.uint8, device=device))


@functools.lru_cache(maxsize=1024)
def layout_of(group: type, shape: LayerShape | RowShape) -> Layout:
    """The layout of a group, made once for each shape."""
    return Layout(group, shape)


# ---- the groups


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """The routing plan as the kernels read it. Lives from a layer's forward to its backward; both use the same.

    Entries past the real sizes are not written, and not to be read.
    """

    sizes: torch.Tensor = buffer(
        torch.int32,
        lambda s: (4,),
        "num_tiles, num_unique, num_rows (all rows routed here), overflow (those of them that the pool cannot hold)",
    )
    expert_start_e1: torch.Tensor = buffer(
        torch.int32,
        lambda s: (s.num_local_experts + 1,),
        "first padded row of each local expert, multiples of BLOCK_M; the last entry is the padded rows used",
    )
    expert_rows_e: torch.Tensor = buffer(
        torch.int32, lambda s: (s.num_local_experts,), "rows of each local expert in the pool"
    )
    tile_expert_M: torch.Tensor = buffer(  # noqa: N815
        torch.int32, lambda s: (s.max_tiles,), "local expert of tile m, which covers padded rows from BLOCK_M * m"
    )
    tile_rows_M: torch.Tensor = buffer(  # noqa: N815
        torch.int32, lambda s: (s.max_tiles,), "real rows of the tile, 1 to BLOCK_M; an expert without rows has no tile"
    )
    pull_source_U: torch.Tensor = buffer(  # noqa: N815
        torch.int64,
        lambda s: (s.max_unique,),
        "owner rank << 32 | token, in pull order: by first local expert; within it the j-th tokens of all owner ranks, "
        "then their (j+1)-th",
    )
    pull_rows_UK: torch.Tensor = buffer(  # noqa: N815
        torch.int32,
        lambda s: (s.max_unique, s.top_k),
        "padded rows of the token's local routes, in route order at the front, then -1",
    )
    pull_scores_UK: torch.Tensor = buffer(  # noqa: N815
        torch.float32, lambda s: (s.max_unique, s.top_k), "scores of those routes at the same positions, then 0"
    )
    send_order_U: torch.Tensor = buffer(  # noqa: N815
        torch.int32,
        lambda s: (s.max_unique,),
        "pull-list indices in send order: by last local expert; within it owner ranks take turns as in pull order",
    )


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the GEMM kernels count in. The plan kernels zero all of it in every call."""

    arrival_M: torch.Tensor = buffer(  # noqa: N815
        torch.int32, lambda s: (s.max_tiles,), "rows of the tile that have landed in the pool"
    )
    done_M: torch.Tensor = buffer(  # noqa: N815
        torch.int32,
        lambda s: (s.max_tiles,),
        "N tiles of the down GEMM finished for the tile's rows: of the first pass in the low 16 bits, of the second above",
    )
    queue: torch.Tensor = buffer(
        torch.int32,
        lambda s: (16,),
        "next item of: 0 pull list, 1 tiles of pull_gemm, 2 tiles of gemm_push, 3 and 4 send list of the first and second "
        "pass, 5 tiles of weight_gradients, 6 tiles whose padding is to be zeroed, 7 pull list for score gradients; programs that "
        "have arrived, in portable kernels: 8 of pull_gemm, 9 of gemm_push",
    )


@dataclass(frozen=True, kw_only=True)
class PlanScratch:
    """What the plan kernels hand to each other."""

    local_expert_NK: torch.Tensor = buffer(  # noqa: N815
        torch.int32,
        lambda s: (s.num_blocks * s.block_tokens, s.top_k),
        "local expert of each route of the group, -1 where it is another rank's; owners padded to whole blocks",
    )
    block_starts_3eB1: torch.Tensor = buffer(  # noqa: N815
        torch.int32,
        lambda s: (3, s.num_local_experts, s.num_blocks + 1),
        "per local expert: its rows, the tokens whose first and whose last local expert it is. Counted per block, then "
        "summed over the blocks before it; the last entry is the total",
    )


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """What the sizes of the row buffers follow from."""

    layer: LayerShape
    num_rows: int
    """Padded rows: BLOCK_M times the tiles, as planned (exact sizing) or ``LayerShape.pool_rows`` (capacity)."""
    keeps_gate_up: bool = True
    """Whether gate and up are wanted, beside their product."""
    precision: str = "bf16"
    """As in :func:`titan_megamoe.mega_moe`."""
    wgrad: str = "bf16"
    """Likewise; says nothing where the backward is in bf16."""

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    @property
    def forward_format(self) -> str | None:
        """What the forward's GEMMs multiply: ``"fp8"``, ``"mxfp8"``, or None for the layer's own dtype; likewise the next two."""
        return FORMATS[self.precision].forward

    @property
    def backward_format(self) -> str | None:
        return FORMATS[self.precision].backward

    @property
    def wgrad_format(self) -> str | None:
        return FORMATS[self.precision].of_weight_gradients(self.wgrad)

    @property
    def wgrad_from_quantised(self) -> tuple[bool, bool]:
        """Whether weight gradients in bf16 need x, and dout, back from what they were quantised to."""
        is_bf16 = self.wgrad_format is None
        return is_bf16 and self.forward_format is not None, is_bf16 and self.backward_format is not None


def _rows(dtype, column_dim: str, meaning: str, *, only_if: Callable[[RowShape], bool] | None = None):
    """A buffer of one row for each row of the pool, ``column_dim`` wide; empty unless ``only_if``."""

    def shape(s: RowShape) -> tuple[int, int]:
        return s.num_rows if only_if is None or only_if(s) else 0, getattr(s.layer, column_dim)

    return buffer(dtype, shape, meaning)


def _row_scales(of: str, column_dim: str, format_of: Callable[[RowShape], str | None]):
    """The scales of rows in blockwise FP8, block by block; empty in another format."""

    def shape(s: RowShape) -> tuple[int, int]:
        return num_blocks(getattr(s.layer, column_dim)), s.num_rows if format_of(s) == "fp8" else 0

    return buffer(torch.float32, shape, f"scales of {of} in FP8, by block of 128 columns")


def _mx_row_scales(of: str, column_dim: str, format_of: Callable[[RowShape], str | None]):
    """The scales of rows in MXFP8, row by row; empty in another format."""

    def shape(s: RowShape) -> tuple[int, int]:
        return s.num_rows if format_of(s) == "mxfp8" else 0, getattr(s.layer, column_dim) // MX_BLOCK

    return buffer(torch.uint8, shape, f"scales of {of} in MXFP8, by group of 32 columns")


def _mx_columns(of: str, column_dim: str):
    """Rows quantised along their columns and transposed, for weight gradients in MXFP8."""

    def shape(s: RowShape) -> tuple[int, int]:
        return getattr(s.layer, column_dim), s.num_rows if s.wgrad_format == "mxfp8" else 0

    return buffer(FP8, shape, f"{of}, transposed, for weight gradients in MXFP8; zeros in padding")


def _columns(of: str, column_dim: str):
    """Rows quantised along their columns, each tile transposed, for weight gradients in FP8."""

    def shape(s: RowShape) -> tuple[int, int, int]:
        return s.num_rows // BLOCK_M if s.wgrad_format == "fp8" else 0, getattr(s.layer, column_dim), BLOCK_M

    return buffer(FP8, shape, f"{of}, each tile transposed, for weight gradients in FP8; zeros in padding")


def _column_scales(of: str, column_dim: str):
    def shape(s: RowShape) -> tuple[int, int]:
        return s.num_rows // BLOCK_M if s.wgrad_format == "fp8" else 0, getattr(s.layer, column_dim)

    return buffer(torch.float32, shape, f"scales of {of} transposed, by tile of 128 rows")


def _mx_column_scales(of: str, column_dim: str):
    def shape(s: RowShape) -> tuple[int, int]:
        return getattr(s.layer, column_dim), s.num_rows // MX_BLOCK if s.wgrad_format == "mxfp8" else 0

    return buffer(torch.uint8, shape, f"scales of {of} transposed in MXFP8, by group of 32 rows")


def num_blocks(columns: int) -> int:
    """Scales of a row in blockwise FP8."""
    return -(-columns // BLOCK)


def _forward_dtype(s: RowShape) -> torch.dtype:
    return FP8 if s.forward_format else s.dtype


def _backward_dtype(s: RowShape) -> torch.dtype:
    return FP8 if s.backward_format else s.dtype


def _forward_format(s: RowShape) -> str | None:
    return s.forward_format


def _backward_format(s: RowShape) -> str | None:
    return s.backward_format


def _is_backward_quantised(s: RowShape) -> bool:
    return s.backward_format is not None


# The rows of this rank's experts, in plan order, each expert's padded to whole tiles. Where it is not said otherwise,
# padding is never read as data. What a precision does not need is empty.


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """What backward needs of the forward (``saved = "activations"``), or computes again (``"inputs"``)."""

    pool_RD: torch.Tensor = _rows(  # noqa: N815
        _forward_dtype,
        "dim",
        "x of each row; zeros in padding up to the next multiple of 64, which weight gradients read",
    )
    gate_RF: torch.Tensor = _rows(None, "hidden_dim", "x W1^T", only_if=lambda s: s.keeps_gate_up)  # noqa: N815
    up_RF: torch.Tensor = _rows(None, "hidden_dim", "x W3^T", only_if=lambda s: s.keeps_gate_up)  # noqa: N815
    pool_scales_bR: torch.Tensor = _row_scales("x", "dim", _forward_format)  # noqa: N815
    pool_scales_Rg: torch.Tensor = _mx_row_scales("x", "dim", _forward_format)  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class HiddenRows:
    """What the first half of a forward leaves to the second."""

    h_RF: torch.Tensor = _rows(_forward_dtype, "hidden_dim", "silu(gate) * up")  # noqa: N815
    h_scales_bR: torch.Tensor = _row_scales("h", "hidden_dim", _forward_format)  # noqa: N815
    h_scales_Rg: torch.Tensor = _mx_row_scales("h", "hidden_dim", _forward_format)  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class ResultRows:
    y_RD: torch.Tensor = _rows(None, "dim", "result of the down GEMM")  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class BackwardRows:
    """Of the first four, padding up to the next multiple of 64 is zero: weight gradients read it."""

    dout_RD: torch.Tensor = _rows(_backward_dtype, "dim", "gradient of the output of each row's token")  # noqa: N815
    dgate_RF: torch.Tensor = _rows(None, "hidden_dim", "gradient of gate")  # noqa: N815
    dup_RF: torch.Tensor = _rows(None, "hidden_dim", "gradient of up")  # noqa: N815
    scaled_h_RF: torch.Tensor = _rows(  # noqa: N815
        None, "hidden_dim", "score * silu(gate) * up; before that, in bf16, h of saved = 'inputs'"
    )
    dx_RD: torch.Tensor = _rows(None, "dim", "gradient of x of each row")  # noqa: N815
    row_scores_R: torch.Tensor = buffer(torch.float32, lambda s: (s.num_rows,), "score of each row's route")  # noqa: N815
    dscore_parts_NR: torch.Tensor = buffer(  # noqa: N815
        torch.float32,
        lambda s: (num_score_parts(s.layer.dim, s.layer.hidden_dim, is_fp8=s.backward_format is not None), s.num_rows),
        "parts of each row's score gradient, by column tile",
    )
    dout_scales_bR: torch.Tensor = _row_scales("dout", "dim", _backward_format)  # noqa: N815
    dgate_fp8_RF: torch.Tensor = _rows(  # noqa: N815
        FP8,
        "hidden_dim",
        "gradient of gate, to multiply; before that h of saved = 'inputs'",
        only_if=_is_backward_quantised,
    )
    dgate_scales_bR: torch.Tensor = _row_scales("the gradient of gate", "hidden_dim", _backward_format)  # noqa: N815
    dup_fp8_RF: torch.Tensor = _rows(FP8, "hidden_dim", "gradient of up, to multiply", only_if=_is_backward_quantised)  # noqa: N815
    dup_scales_bR: torch.Tensor = _row_scales("the gradient of up", "hidden_dim", _backward_format)  # noqa: N815
    x_bf16_RD: torch.Tensor = _rows(  # noqa: N815
        None,
        "dim",
        "x of each row back from FP8, for weight gradients in bf16",
        only_if=lambda s: s.wgrad_from_quantised[0],
    )
    dout_bf16_RD: torch.Tensor = _rows(None, "dim", "dout likewise", only_if=lambda s: s.wgrad_from_quantised[1])  # noqa: N815
    x_MDr: torch.Tensor = _columns("x", "dim")  # noqa: N815
    x_scales_MD: torch.Tensor = _column_scales("x", "dim")  # noqa: N815
    dout_MDr: torch.Tensor = _columns("dout", "dim")  # noqa: N815
    dout_scales_MD: torch.Tensor = _column_scales("dout", "dim")  # noqa: N815
    dgate_MFr: torch.Tensor = _columns("dgate", "hidden_dim")  # noqa: N815
    dgate_scales_MF: torch.Tensor = _column_scales("dgate", "hidden_dim")  # noqa: N815
    dup_MFr: torch.Tensor = _columns("dup", "hidden_dim")  # noqa: N815
    dup_scales_MF: torch.Tensor = _column_scales("dup", "hidden_dim")  # noqa: N815
    scaled_h_MFr: torch.Tensor = _columns("scaled_h", "hidden_dim")  # noqa: N815
    scaled_h_scales_MF: torch.Tensor = _column_scales("scaled_h", "hidden_dim")  # noqa: N815
    dout_scales_Rg: torch.Tensor = _mx_row_scales("dout", "dim", _backward_format)  # noqa: N815
    dgate_scales_Rg: torch.Tensor = _mx_row_scales("the gradient of gate", "hidden_dim", _backward_format)  # noqa: N815
    dup_scales_Rg: torch.Tensor = _mx_row_scales("the gradient of up", "hidden_dim", _backward_format)  # noqa: N815
    x_DR: torch.Tensor = _mx_columns("x", "dim")  # noqa: N815
    dout_DR: torch.Tensor = _mx_columns("dout", "dim")  # noqa: N815
    dgate_FR: torch.Tensor = _mx_columns("dgate", "hidden_dim")  # noqa: N815
    dup_FR: torch.Tensor = _mx_columns("dup", "hidden_dim")  # noqa: N815
    scaled_h_FR: torch.Tensor = _mx_columns("scaled_h", "hidden_dim")  # noqa: N815
    x_scales_Dg: torch.Tensor = _mx_column_scales("x", "dim")  # noqa: N815
    dout_scales_Dg: torch.Tensor = _mx_column_scales("dout", "dim")  # noqa: N815
    dgate_scales_Fg: torch.Tensor = _mx_column_scales("dgate", "hidden_dim")  # noqa: N815
    dup_scales_Fg: torch.Tensor = _mx_column_scales("dup", "hidden_dim")  # noqa: N815
    scaled_h_scales_Fg: torch.Tensor = _mx_column_scales("scaled_h", "hidden_dim")  # noqa: N815


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """:attr:`KernelPlan.sizes` on the host."""

    num_tiles: int
    num_unique: int
    num_rows: int
    overflow: int


# ---- what the kernels report when something is wrong

FAULT_FIELDS = ("code", "rank", "kernel", "phase", "item", "have", "want")
"""The int32 entries of a fault record, in order. All are zero until a kernel claims the record by exchanging ``code``;
the first to do so fills in the others, later ones leave it alone. No kernel clears it: after a fault the workspace is
spent."""

FAULT_DEADLINE, FAULT_BAD_ID, FAULT_BAD_SCORE, FAULT_PEER = 1, 2, 3, 4
FAULT_STOPPED = 5
"""An error in Python, of which the host told the device so that peers learn of it."""
KERNEL_PUBLISH, KERNEL_HANDSHAKE = 1, 2
KERNEL_PULL_GEMM, KERNEL_GEMM_PUSH, KERNEL_PULL_GEMM_BACKWARD, KERNEL_GEMM_PUSH_BACKWARD = 3, 4, 5, 6
PHASE_PUBLISHED, PHASE_ALL_SENT, PHASE_ARRIVAL, PHASE_DONE = 0, 1, 2, 3

_KERNEL_NAMES = {
    KERNEL_PUBLISH: "publish",
    KERNEL_HANDSHAKE: "handshake",
    KERNEL_PULL_GEMM: "pull_gemm",
    KERNEL_GEMM_PUSH: "gemm_push",
    KERNEL_PULL_GEMM_BACKWARD: "pull_gemm_backward",
    KERNEL_GEMM_PUSH_BACKWARD: "gemm_push_backward",
}
_WAITED_FOR = {
    PHASE_PUBLISHED: "rank {item} to publish its inputs (call number {want}; it has published {have})",
    PHASE_ALL_SENT: "rank {item} to have sent its results (call number {want}; it has finished {have})",
    PHASE_ARRIVAL: "the rows of tile {item} to be pulled ({have} of {want} have landed)",
    PHASE_DONE: "the products of tile {item} ({have} of {want} column tiles are done)",
}


class KernelFault(RuntimeError):
    """A kernel stopped because something it waited for did not happen. The workspace cannot be used any more."""


class CapacityExceeded(RuntimeError):
    """More rows were routed to this rank than the static pool holds. The step's results are invalid."""


def fault_error(record: list[int], shape: LayerShape) -> Exception | None:
    """The error that a fault record (:data:`FAULT_FIELDS`) stands for: None if there is none, ValueError for bad
    routes, :class:`KernelFault` otherwise."""
    fault = dict(zip(FAULT_FIELDS, record))
    rank, item, have = fault["rank"], fault["item"], fault["have"]
    if fault["code"] == 0:
        return None
    if fault["code"] == FAULT_BAD_ID:
        token, slot = divmod(item, shape.top_k)
        return ValueError(
            f"mega_moe: rank {rank}: topk_ids_TK[{token}, {slot}] is {have}, but the group's experts are numbered 0 to "
            f"{shape.num_experts - 1}. Pass global expert ids of experts that exist."
        )
    if fault["code"] == FAULT_BAD_SCORE:
        token, slot = divmod(item, shape.top_k)
        return ValueError(
            f"mega_moe: rank {rank}: topk_scores_TK[{token}, {slot}] is not finite. The router has diverged or its "
            "input is not finite: look at the loss and gradient norm of the steps before this one, and lower the "
            "learning rate or clip gradients harder."
        )
    if fault["code"] == FAULT_PEER:
        return KernelFault(
            f"mega_moe: rank {rank} stopped because rank {item} of the expert-parallel group did; the error on rank "
            f"{item} says why."
        )
    if fault["code"] == FAULT_STOPPED:
        return KernelFault(f"mega_moe: rank {rank} stopped after an error of its own, which it raised before this one.")
    kernel = _KERNEL_NAMES.get(fault["kernel"], f"kernel {fault['kernel']}")
    waited_for = _WAITED_FOR.get(fault["phase"], "phase {phase}, item {item} ({have} of {want})").format(**fault)
    remedy = (
        "Either that rank died or hangs (see its log), or the ranks do not call mega_moe equally often, or one of them "
        "was busy for longer than the deadline: then raise comm.train_timeout_seconds, or call "
        "titan_megamoe.set_deadline."
        if fault["kernel"] == KERNEL_HANDSHAKE
        else "Peers' memory may have become unreachable, or this is a bug in titan_megamoe: please report this line."
    )
    return KernelFault(f"mega_moe: rank {rank}: {kernel} waited past its deadline for {waited_for}. {remedy}")
