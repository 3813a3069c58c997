"""Which kernels compute a layer, on which GPU: the one place that knows.

A backend on kernels is a set of functions that launch them. ``hopper.py`` calls these, and is the same for all: the sets agree in
what they take and write.

    hopper   Gluon, for H100 and H200 (``kernels/*.py``)
    triton   plain Triton, for other NVIDIA GPUs and AMD's, and for comparison on H100 and H200 (``kernels/portable``). In MXFP8, too:
             natively on B200, B300, MI350X and MI355X, emulated by Triton on H100 and H200
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import hopper

KERNEL_BACKENDS = ("hopper", "triton")
"""Those that run on kernels, the fastest first."""

_PRECISIONS = {"hopper": ("bf16", "fp8", "fp8_bwd"), "triton": ("bf16", "mxfp8")}
_OLDEST_NVIDIA = (8, 0)
_AMD = ("gfx942", "gfx950")


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The functions of a backend; those in FP8 and in MXFP8 are None where it has none."""

    pull_gemm: Callable
    gemm_push: Callable
    pull_gemm_backward: Callable
    gemm_push_backward: Callable
    weight_gradients: Callable
    pull_gemm_fp8: Callable | None = None
    gemm_push_fp8: Callable | None = None
    pull_gemm_backward_fp8: Callable | None = None
    gemm_push_backward_fp8: Callable | None = None
    weight_gradients_fp8: Callable | None = None
    pull_gemm_mxfp8: Callable | None = None
    gemm_push_mxfp8: Callable | None = None
    pull_gemm_backward_mxfp8: Callable | None = None
    gemm_push_backward_mxfp8: Callable | None = None
    weight_gradients_mxfp8: Callable | None = None


@functools.cache
def kernel_set(backend: str) -> KernelSet:
    """The kernels of one of :data:`KERNEL_BACKENDS`."""
    return {"hopper": _hopper_kernels, "triton": _portable_kernels}[backend]()


def _hopper_kernels() -> KernelSet:
    from .kernels.gemm_push import gemm_push, gemm_push_backward
    from .kernels.gemm_push_fp8 import gemm_push_backward_fp8, gemm_push_fp8
    from .kernels.pull_gemm import pull_gemm
    from .kernels.pull_gemm_backward import pull_gemm_backward
    from .kernels.pull_gemm_backward_fp8 import pull_gemm_backward_fp8
    from .kernels.pull_gemm_fp8 import pull_gemm_fp8
    from .kernels.weight_gradients import weight_gradients
    from .kernels.weight_gradients_fp8 import weight_gradients_fp8

    return KernelSet(
        pull_gemm=pull_gemm,
        gemm_push=gemm_push,
        pull_gemm_backward=pull_gemm_backward,
        gemm_push_backward=gemm_push_backward,
        weight_gradients=weight_gradients,
        pull_gemm_fp8=pull_gemm_fp8,
        gemm_push_fp8=gemm_push_fp8,
        pull_gemm_backward_fp8=pull_gemm_backward_fp8,
        gemm_push_backward_fp8=gemm_push_backward_fp8,
        weight_gradients_fp8=weight_gradients_fp8,
    )


def _portable_kernels() -> KernelSet:
    from .kernels.portable.gemm_push import gemm_push, gemm_push_backward, gemm_push_backward_mxfp8, gemm_push_mxfp8
    from .kernels.portable.pull_gemm import pull_gemm, pull_gemm_mxfp8
    from .kernels.portable.pull_gemm_backward import pull_gemm_backward, pull_gemm_backward_mxfp8
    from .kernels.portable.weight_gradients import weight_gradients, weight_gradients_mxfp8

    return KernelSet(
        pull_gemm=pull_gemm,
        gemm_push=gemm_push,
        pull_gemm_backward=pull_gemm_backward,
        gemm_push_backward=gemm_push_backward,
        weight_gradients=weight_gradients,
        pull_gemm_mxfp8=pull_gemm_mxfp8,
        gemm_push_mxfp8=gemm_push_mxfp8,
        pull_gemm_backward_mxfp8=pull_gemm_backward_mxfp8,
        gemm_push_backward_mxfp8=gemm_push_backward_mxfp8,
        weight_gradients_mxfp8=weight_gradients_mxfp8,
    )


def missing_on_this_machine(backend: str) -> str | None:
    """Why a backend on kernels cannot run here, and what to do; None if it can."""
    return hopper.missing_on_this_machine() if backend == "hopper" else _missing_for_triton()


def no_kernels_on_this_machine() -> str | None:
    """Why no backend on kernels can run here, and what to do; None if one can."""
    missing = [missing_on_this_machine(backend) for backend in KERNEL_BACKENDS]
    return None if None in missing else missing[-1]  # the portable ones ask for the least


def _architecture() -> str:
    """Of an AMD GPU, such as gfx950."""
    return torch.cuda.get_device_properties().gcnArchName.split(":")[0]


@functools.cache
def _missing_for_triton() -> str | None:
    if not torch.cuda.is_available():
        return "it needs an NVIDIA or AMD GPU, and torch sees no GPU. Use backend = 'reference'."
    name = torch.cuda.get_device_name()
    if torch.version.hip is not None:
        architecture = _architecture()
        if architecture not in _AMD:
            return f"of AMD's GPUs it needs one of {', '.join(_AMD)}, and this is {name}, {architecture}. Use backend = 'reference'."
    elif torch.cuda.get_device_capability() < _OLDEST_NVIDIA:
        return f"of NVIDIA's GPUs it needs an A100 or newer, and this is {name}. Use backend = 'reference'."
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton 3.6 to 3.8, which is not installed: pip install 'triton>=3.6,<3.9'."
    return None


def unsupported_layer(backend: str, dtype: torch.dtype, dim: int, hidden_dim: int, precision: str) -> str | None:
    """Why the kernels of a backend cannot compute a layer, and what to do; None if they can."""
    return unsupported_precision(backend, precision) or hopper.unsupported_layer(dtype, dim, hidden_dim, precision)


def missing_for_precision(backend: str, precision: str, *, allow_emulation: bool) -> str | None:
    """Why a backend on kernels cannot compute a precision here, and what to do; None if it can."""
    missing = unsupported_precision(backend, precision) or missing_on_this_machine(backend)
    if missing is None and precision == "mxfp8":
        missing = _missing_for_mxfp8(allow_emulation)
    return missing


def unsupported_precision(backend: str, precision: str) -> str | None:
    """Why a backend has no kernels for a precision, and what to do; None if it has."""
    if precision in _PRECISIONS[backend]:
        return None
    able = backend_for(precision)
    where = {"hopper": "H100 or H200", "triton": "B200, B300, MI350X or MI355X"}[able]
    return (
        f"it has no kernels for precision = {precision!r}. Use precision = 'bf16', or backend = {able!r} on {where}, or "
        "backend = 'reference'."
    )


def _missing_for_mxfp8(allow_emulation: bool) -> str | None:
    """Why the portable kernels cannot compute MXFP8 on this GPU, which they can run on; None if they can."""
    if torch.version.hip is not None:
        is_native, converts = _architecture() == "gfx950", False
    else:
        capability = torch.cuda.get_device_capability()
        is_native, converts = capability[0] == 10, capability == (9, 0)
    if is_native or (converts and allow_emulation):
        return None
    name = torch.cuda.get_device_name()
    if converts:
        return (
            f"MXFP8 is native on B200, B300, MI350X and MI355X, and this is {name}, where Triton emulates it, slower than bf16. Use "
            "precision = 'fp8', or allow_emulation = true to try it."
        )
    return f"MXFP8 is native on B200, B300, MI350X and MI355X, and this is {name}, for which there are no kernels that emulate it."


def backend_for(precision: str) -> str:
    """The fastest backend that has kernels for a precision."""
    return next(backend for backend in KERNEL_BACKENDS if precision in _PRECISIONS[backend])
