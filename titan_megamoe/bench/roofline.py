"""What a mixture-of-experts layer costs at least: arithmetic, bytes over NVLink, bytes of GPU memory, and the time of each.

All figures are for one rank and one layer, with routes spread evenly over experts. A layer can take no less than the largest of
the times, and only if the others hide behind that one perfectly. Functions are pure; FLOPs count a multiplication and an addition
as two, bytes are decimal (1 GB = 1e9), and memory sizes alone are in GiB.

What is counted follows from what the kernels read and write (``hopper.py``, ``hopper_stages.py``, ``kernels/plan_tables.py``): every
operand of a product from memory once, as a perfect L2 would have it. Left out, each about 1% or less: the routing plan, which
every rank makes from all ranks' expert ids, scores of rows, and counters; and with a cache of the weights' FP8 copies, making them.

Shape suffixes are those of ``plan.py``. In formulas: ``R = T K`` rows that a rank's experts compute, ``P`` ranks that share the
experts, ``U = T P (1 - C(E - E/P, K) / C(E, K))`` distinct (token, rank) pairs, its own rank included: so many rows a rank receives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..quantize import BLOCK, FORMATS, MX_BLOCK

# ---- GPUs


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one GPU."""

    bf16_tflops: float
    fp8_tflops: float
    """Dense, without sparsity."""
    hbm_tb_per_second: float
    link_gb_per_second: float
    """NVLink, in one direction."""
    network_gb_per_second: float
    """Between NVLink domains, in one direction: this GPU's network adapter."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    memory_gib: float
    """That a program can allocate, rounded down."""
    ranks_per_domain: int
    """GPUs that reach each other over NVLink, in NVIDIA's usual machine."""
    nominal: Rates
    achievable: Rates
    assumed: tuple[str, ...]
    """Fields of ``achievable`` that nobody here measured on this GPU."""
    has_mxfp8: bool
    """Whether its tensor cores multiply MXFP8."""
    has_kernels: bool
    """Whether ``mega_moe`` has fused kernels for it; if not, times say what the hardware would allow."""
    source: str
    """Of the nominal rates."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that its tensor cores multiply: what is emulated is bound by other things than are counted here."""
        return tuple(name for name in PRECISIONS if name != "mxfp8" or self.has_mxfp8)


HOPPER_RATES = dict(bf16_tflops=989, fp8_tflops=1979, link_gb_per_second=450, network_gb_per_second=50)

MEASURED_ON_H200 = Rates(
    bf16_tflops=790, fp8_tflops=1258, hbm_tb_per_second=4.3, link_gb_per_second=380, network_gb_per_second=40
)
"""bf16: dense products of random data through cuBLAS, about (docs/results has 689 to 820, by shape and clock). FP8: what
``pull_gemm_fp8`` reached (h200_kernels.json). HBM (of 4.8 by the data sheet), NVLink (370 to 400 is usual) and network are assumptions:
no measurement of them is in docs/results."""

UNMEASURED = ("hbm_tb_per_second", "link_gb_per_second", "network_gb_per_second")


def _like_h200(nominal: Rates) -> Rates:
    """The shares of the peaks that an H200 reaches, of another GPU's peaks."""
    shares = {f.name: getattr(MEASURED_ON_H200, f.name) / getattr(_H200, f.name) for f in fields(Rates)}
    return Rates(**{name: getattr(nominal, name) * share for name, share in shares.items()})


_H100 = Rates(**HOPPER_RATES, hbm_tb_per_second=3.35)
_H200 = Rates(**HOPPER_RATES, hbm_tb_per_second=4.8)
_B200 = Rates(
    bf16_tflops=2250, fp8_tflops=4500, hbm_tb_per_second=8.0, link_gb_per_second=900, network_gb_per_second=50
)

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100",
            memory_gib=79,
            ranks_per_domain=8,
            nominal=_H100,
            achievable=_like_h200(_H100),
            assumed=tuple(f.name for f in fields(Rates)),
            has_mxfp8=False,
            has_kernels=True,
            source="NVIDIA H100 data sheet, SXM5 (its matrix rates, with sparsity, halved; NVLink's 900 GB/s are of both "
            "directions), and one 400 Gb/s adapter for each GPU as in a DGX H100",
        ),
        Gpu(
            name="h200",
            memory_gib=139,
            ranks_per_domain=8,
            nominal=_H200,
            achievable=MEASURED_ON_H200,
            assumed=UNMEASURED,
            has_mxfp8=False,
            has_kernels=True,
            source="NVIDIA H200 data sheet, SXM (halved likewise), and one 400 Gb/s adapter for each GPU as in a DGX H200",
        ),
        Gpu(
            name="b200",
            memory_gib=178,
            ranks_per_domain=8,
            nominal=_B200,
            achievable=_like_h200(_B200),
            assumed=tuple(f.name for f in fields(Rates)),
            has_mxfp8=True,
            has_kernels=False,
            source="NVIDIA HGX B200 data sheet, one of 8 GPUs at 1000 W, dense; NVLink's 1.8 TB/s are of both directions; one "
            "400 Gb/s adapter for each GPU as in a DGX B200",
        ),
    )
}


# ---- one layer's work

PRECISIONS = tuple(FORMATS)
SAVED = ("activations", "inputs")
WGRADS = ("bf16", "fp8", "mxfp8")
BF16_BYTES, FP8_BYTES, SCORE_BYTES, SCALE_BYTES = 2, 1, 4, 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """One layer's work on one rank.

    Raises:
        ValueError: an impossible size, or an unknown choice, with what is possible.
    """

    dim: int
    """D"""
    hidden_dim: int
    """F"""
    num_experts: int
    """E, of all ranks."""
    top_k: int
    """K"""
    tokens: int
    """T, of this rank."""
    ep_size: int
    """P"""
    precision: str = "bf16"
    wgrad: str = "bf16"
    saved: str = "activations"
    """These three as in :func:`titan_megamoe.mega_moe`."""
    ranks_per_domain: int | None = None
    """Ranks that NVLink joins; what goes to others goes over the network. None: all of them."""

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "tokens", "ep_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Load: {name} = {getattr(self, name)}. Pass at least 1.")
        if self.ranks_per_domain is not None and self.ranks_per_domain < 1:
            raise ValueError(
                f"Load: ranks_per_domain = {self.ranks_per_domain}. Pass at least 1, or None for all ranks."
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"Load: top_k = {self.top_k}, but a token's experts are distinct and there are {self.num_experts}. Lower it."
            )
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"an expert-parallel degree of {self.ep_size} does not divide {self.num_experts} experts. Use a divisor."
            )
        for name, known in (("precision", PRECISIONS), ("wgrad", WGRADS), ("saved", SAVED)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Load: {name} = {getattr(self, name)!r} is not known. Use one of: {', '.join(known)}."
                )

    @property
    def rows(self) -> int:
        """R = T K: rows that this rank's experts compute, as many as its tokens have routes."""
        return self.tokens * self.top_k

    @property
    def meets_rank(self) -> float:
        """Probability that a given rank holds one of a token's experts: it holds none if all K distinct ones are among the
        E - E/P others."""
        E, local = self.num_experts, self.num_experts // self.ep_size  # noqa: N806
        return 1 - math.comb(E - local, self.top_k) / math.comb(E, self.top_k)

    @property
    def remote_ranks(self) -> float:
        """Ranks other than its own that hold an expert of a token, on average: (P - 1) times :attr:`meets_rank`."""
        return (self.ep_size - 1) * self.meets_rank

    @property
    def remote_ranks_in_domain(self) -> float:
        """Those of them that NVLink reaches."""
        return (min(self.ep_size, self.ranks_per_domain or self.ep_size) - 1) * self.meets_rank

    @property
    def unique_rows(self) -> float:
        """U: rows that this rank receives, its own tokens' included; a token is received once however many experts it has here."""
        return self.tokens * self.ep_size * self.meets_rank

    @property
    def weight_elements(self) -> float:
        """3 (E/P) D F, of this rank's experts."""
        return 3.0 * self.num_experts / self.ep_size * self.dim * self.hidden_dim

    @property
    def forward_fp8(self) -> bool:
        """Blockwise or MX, of rows as many bytes and on a GPU that has both as fast; likewise the next two."""
        return FORMATS[self.precision].forward is not None

    @property
    def backward_fp8(self) -> bool:
        return FORMATS[self.precision].backward is not None

    @property
    def wgrad_fp8(self) -> bool:
        return FORMATS[self.precision].of_weight_gradients(self.wgrad) is not None

    def weight_bytes(self, *, is_fp8: bool) -> float:
        """Of this rank's experts, with their scales in MXFP8; those of 128 x 128 weights are left out."""
        if not is_fp8:
            return BF16_BYTES * self.weight_elements
        return self.weight_elements * (FP8_BYTES + (1 / MX_BLOCK if self.precision == "mxfp8" else 0))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a forward, a recomputation or a backward."""

    bf16_flop: float = 0.0
    fp8_flop: float = 0.0
    link_bytes: float = 0.0
    """Received over NVLink by this rank; it sends as many."""
    network_bytes: float = 0.0
    """Likewise, between NVLink domains."""
    hbm_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)})

    def milliseconds(self, rates: Rates) -> dict[str, float]:
        """``{"arithmetic": ..., "link": ..., "network": ..., "memory": ...}``: amounts over rates."""
        arithmetic = self.bf16_flop / rates.bf16_tflops + self.fp8_flop / rates.fp8_tflops
        return {
            "arithmetic": arithmetic / 1e9,
            "link": self.link_bytes / rates.link_gb_per_second / 1e6,
            "network": self.network_bytes / rates.network_gb_per_second / 1e6,
            "memory": self.hbm_bytes / rates.hbm_tb_per_second / 1e9,
        }

    def bound(self, rates: Rates) -> tuple[float, str]:
        """The longest of its times in milliseconds, and which it is."""
        times = self.milliseconds(rates)
        longest = max(times, key=times.get)
        return times[longest], longest


def forward(load: Load) -> Cost:
    """Dispatch, gate/up, SwiGLU, down, combine.

    FLOP: ``2 R D F`` for each of gate, up and down. Link: each token's row once to each remote rank that holds an expert of it
    and one bf16 row back. Memory: :func:`_dispatch_gate_up`; then h and W2 read, y written and read; of the results, with several
    ranks, U rows written into their owners' slots and read from there; the output written.
    """
    down = Cost(
        **_flop(2.0 * load.rows * load.dim * load.hidden_dim, is_fp8=load.forward_fp8),
        **_traffic(load, BF16_BYTES * load.dim),
        hbm_bytes=load.rows * _row_bytes(load.hidden_dim, load.forward_fp8)
        + load.weight_bytes(is_fp8=load.forward_fp8) / 3
        + _results(load),
    )
    return _dispatch_gate_up(load, keeps_gate_up=load.saved == "activations") + down


def recomputation(load: Load) -> Cost:
    """What full activation checkpointing adds: dispatch, gate and up, but neither down nor combine, which backward needs not."""
    return _dispatch_gate_up(load, keeps_gate_up=load.saved == "activations")


def backward(load: Load) -> Cost:
    """Gradients of rows, scores and weights; with ``saved = "inputs"``, dispatch and gate/up once more before that.

    FLOP: ``2 R D F`` for each of three products of rows and three of weights (``wgrad`` says in what). Link: each token's row of
    dout once to each remote rank that holds an expert of it; one bf16 row of dx and K fp32 score gradients back. Memory:

    - dout published (:func:`_publish`), pulled and read by the product, as x in forward; W1, W2 and W3 read;
    - gate and up read; their gradients and the score-weighted h written in bf16, the former also in FP8 if that multiplies them;
    - gradients of gate and up read by the second product; dx as the results in forward;
    - weight gradients: x, dout, the gradients of gate and up and the weighted h read and 2 bytes a weight written. If operands come
      in FP8 but are multiplied in bf16, or the other way round, they are converted first: read, written, read.
    """
    R, D, F = load.rows, load.dim, load.hidden_dim  # noqa: N806
    rows_fp8 = load.backward_fp8
    again = _dispatch_gate_up(load, keeps_gate_up=True) if load.saved == "inputs" else Cost()

    hbm = _pull(load, is_fp8=rows_fp8) + R * _row_bytes(D, rows_fp8)
    hbm += load.weight_bytes(is_fp8=rows_fp8)
    hbm += R * F * BF16_BYTES * (2 + 3) + (2 * R * _row_bytes(F, True) if rows_fp8 else 0)
    hbm += 2 * R * _row_bytes(F, rows_fp8)
    hbm += _results(load)
    rows = Cost(
        **_flop(6.0 * R * D * F, is_fp8=rows_fp8),
        **_traffic(load, _row_bytes(D, rows_fp8) + BF16_BYTES * D + SCORE_BYTES * load.top_k),
        hbm_bytes=hbm,
    )

    operands = ((D, load.forward_fp8), (D, rows_fp8), (F, False), (F, False), (F, False))
    weights = Cost(
        **_flop(6.0 * R * D * F, is_fp8=load.wgrad_fp8),
        hbm_bytes=BF16_BYTES * load.weight_elements
        + sum(R * _operand_bytes(columns, is_fp8, wanted_fp8=load.wgrad_fp8) for columns, is_fp8 in operands),
    )
    return again + rows + weights


def full_layer(load: Load, *, full_ac: bool) -> Cost:
    """Forward and backward, and under full activation checkpointing the recomputation between them."""
    both = forward(load) + backward(load)
    return both + recomputation(load) if full_ac else both


# ---- parts


def _dispatch_gate_up(load: Load, *, keeps_gate_up: bool) -> Cost:
    """Dispatch, gate and up. Memory: :func:`_pull`; pool rows, W1 and W3 read; h written, and gate and up in bf16 if kept."""
    R, D, F, is_fp8 = load.rows, load.dim, load.hidden_dim, load.forward_fp8  # noqa: N806
    hbm = _pull(load, is_fp8=is_fp8) + R * _row_bytes(D, is_fp8)
    hbm += load.weight_bytes(is_fp8=is_fp8) * 2 / 3
    hbm += R * _row_bytes(F, is_fp8) + (2 * R * _row_bytes(F, False) if keeps_gate_up else 0)
    return Cost(**_flop(4.0 * R * D * F, is_fp8=is_fp8), **_traffic(load, _row_bytes(D, is_fp8)), hbm_bytes=hbm)


def _pull(load: Load, *, is_fp8: bool) -> float:
    """Memory bytes: a rank's T tokens published, that is read in bf16 and written where peers can read (bf16 tokens of a rank
    alone are read in place); U rows read, by whichever rank; R rows written into the pool."""
    row = _row_bytes(load.dim, is_fp8)
    in_place = load.ep_size == 1 and not is_fp8
    published = 0 if in_place else load.tokens * (BF16_BYTES * load.dim + row)
    return published + load.unique_rows * row + load.rows * row


def _results(load: Load) -> float:
    """Memory bytes of y or dx, in bf16: R rows written by the product, read to be summed; with several ranks U rows written into
    slots and read; T rows written."""
    slots = 2 * load.unique_rows if load.ep_size > 1 else 0
    return (2 * load.rows + slots + load.tokens) * BF16_BYTES * load.dim


def _operand_bytes(columns: int, is_fp8: bool, *, wanted_fp8: bool) -> float:
    """Memory bytes of a row as an operand of the weight gradients: read, and if it must be converted first, written and read. FP8
    operands are always converted: quantised again along the rows."""
    row = _row_bytes(columns, is_fp8)
    if wanted_fp8:
        return row + 2 * columns * (FP8_BYTES + SCALE_BYTES / BLOCK)
    return row + (2 * BF16_BYTES * columns if is_fp8 else 0)


def _traffic(load: Load, bytes_per_pair: float) -> dict[str, float]:
    """Bytes that a rank receives, if so many belong to each pair of a token and a remote rank that holds an expert of it."""
    inside = load.tokens * load.remote_ranks_in_domain * bytes_per_pair
    return {"link_bytes": inside, "network_bytes": load.tokens * load.remote_ranks * bytes_per_pair - inside}


def _flop(flop: float, *, is_fp8: bool) -> dict[str, float]:
    return {"fp8_flop": flop} if is_fp8 else {"bf16_flop": flop}


def _row_bytes(columns: int, is_fp8: bool) -> int:
    """Of a row: bf16, or FP8 with an fp32 scale for each block of 128 columns, in MXFP8 a byte for each 32."""
    return columns * FP8_BYTES + SCALE_BYTES * -(-columns // BLOCK) if is_fp8 else BF16_BYTES * columns
