"""Which backend is chosen for which machine and layer, and what is said where none can be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from titan_megamoe import backends, hopper, ops
from titan_megamoe.ops import select_backend

GPU = torch.device("cuda")
LAYER = (torch.bfloat16, 128, 64, "bf16")


@pytest.fixture
def machine(monkeypatch):
    """``machine("H200", capability=(9, 0))``, ``machine("MI355X", architecture="gfx950")``: pretend to be on it."""

    def pretend(name: str, *, capability=(0, 0), architecture: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
        monkeypatch.setattr(torch.version, "hip", architecture and "7.0")
        properties = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
        for cached in (hopper.missing_on_this_machine, backends._missing_for_triton):
            cached.cache_clear()

    pytest.importorskip("triton", reason="without it no kernels can be chosen")
    yield pretend
    monkeypatch.undo()
    for cached in (hopper.missing_on_this_machine, backends._missing_for_triton):
        cached.cache_clear()


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("NVIDIA H200", dict(capability=(9, 0)), "hopper"),
        ("NVIDIA A100", dict(capability=(8, 0)), "triton"),
        ("NVIDIA B200", dict(capability=(10, 0)), "triton"),
        ("NVIDIA V100", dict(capability=(7, 0)), "reference"),
        ("AMD Instinct MI300X", dict(architecture="gfx942"), "triton"),
        ("AMD Instinct MI355X", dict(architecture="gfx950"), "triton"),
        ("AMD Instinct MI250X", dict(architecture="gfx90a"), "reference"),
    ],
)
def test_auto_picks_by_device(machine, name, options, expected):
    machine(name, **options)
    assert select_backend("auto", GPU, *LAYER) == expected


def test_the_portable_kernels_can_be_asked_for_on_hopper(machine):
    machine("NVIDIA H200", capability=(9, 0))
    assert select_backend("triton", GPU, *LAYER) == "triton"


def test_fp8_is_for_hopper(machine):
    machine("NVIDIA H200", capability=(9, 0))
    assert select_backend("auto", GPU, torch.bfloat16, 128, 128, "fp8") == "hopper"
    for backend, precision, able in (("triton", "fp8", "hopper"), ("hopper", "mxfp8", "triton")):
        with pytest.raises(
            ValueError,
            match=f"{backend!r} cannot run .*: it has no kernels for precision = {precision!r}. Use .*{able!r}",
        ):
            select_backend(backend, GPU, torch.bfloat16, 128, 128, precision)
    machine("NVIDIA A100", capability=(8, 0))
    with pytest.raises(ValueError, match="precision = 'fp8' .* cannot run here: it needs a Hopper GPU"):
        select_backend("auto", GPU, torch.bfloat16, 128, 128, "fp8")


MX_LAYER = (GPU, torch.bfloat16, 128, 128, "mxfp8")


@pytest.mark.parametrize(
    "name, options",
    [
        ("NVIDIA B200", dict(capability=(10, 0))),
        ("NVIDIA B300", dict(capability=(10, 3))),
        ("AMD Instinct MI355X", dict(architecture="gfx950")),
    ],
)
def test_mxfp8_where_it_is_native(machine, name, options):
    machine(name, **options)
    for backend in ("auto", "triton"):
        assert select_backend(backend, *MX_LAYER) == "triton"
    with pytest.raises(ValueError, match="multiples of 128, and D = 192"):
        select_backend("triton", GPU, torch.bfloat16, 192, 128, "mxfp8")


def test_mxfp8_is_emulated_on_hopper_where_that_is_allowed(machine, caplog, monkeypatch):
    machine("NVIDIA H200", capability=(9, 0))
    for backend in ("auto", "triton"):
        with pytest.raises(ValueError, match="MXFP8 is native on B200.* this is NVIDIA H200, where Triton emulates it"):
            select_backend(backend, *MX_LAYER)
        assert select_backend(backend, *MX_LAYER, allow_emulation=True) == "triton"
    monkeypatch.setattr(ops, "_announced", set())
    with caplog.at_level("INFO"):
        select_backend("auto", *MX_LAYER, allow_emulation=True)
    assert "EMULATES precision = 'mxfp8', slowly" in caplog.text


@pytest.mark.parametrize(
    "precision, name, options",
    [
        ("fp8", "NVIDIA A100", dict(capability=(8, 0))),
        ("mxfp8", "NVIDIA A100", dict(capability=(8, 0))),
        ("mxfp8", "NVIDIA RTX PRO 6000", dict(capability=(12, 0))),
        ("mxfp8", "AMD Instinct MI300X", dict(architecture="gfx942")),
        ("mxfp8", "NVIDIA V100", dict(capability=(7, 0))),
    ],
)
def test_elsewhere_the_reference_emulates_where_that_is_allowed(machine, precision, name, options):
    machine(name, **options)
    layer = (*MX_LAYER[:4], precision)
    with pytest.raises(
        ValueError, match=f"{name}.* Use precision = 'bf16', or allow_emulation = true or backend = 'ref"
    ):
        select_backend("auto", *layer)
    assert select_backend("auto", *layer, allow_emulation=True) == "reference"


@pytest.mark.parametrize("name, options", [("MI250X", dict(architecture="gfx90a")), ("V100", dict(capability=(7, 0)))])
def test_what_a_gpu_lacks_is_named(machine, name, options):
    machine(name, **options)
    with pytest.raises(
        ValueError, match=f"backend = 'triton' cannot run this layer: of .* GPUs it needs .*{name}.* Use backend"
    ):
        select_backend("triton", GPU, *LAYER)


@pytest.mark.parametrize(
    "dtype, dim, hidden_dim, reason",
    [
        (torch.float32, 128, 64, "it takes torch.bfloat16, and x_TD is torch.float32"),
        (torch.bfloat16, 96, 64, "multiples of 64, and D = 96"),
        (torch.bfloat16, 128, 40, "multiples of 64, and F = 40"),
    ],
)
def test_what_a_layer_lacks_is_named(machine, dtype, dim, hidden_dim, reason):
    machine("NVIDIA A100", capability=(8, 0))
    with pytest.raises(ValueError, match=f"backend = 'triton' cannot run this layer: .*{reason}"):
        select_backend("triton", GPU, dtype, dim, hidden_dim, "bf16")
    assert select_backend("auto", GPU, dtype, dim, hidden_dim, "bf16") == "reference"


def test_the_cpu_has_the_reference():
    assert select_backend("auto", torch.device("cpu"), *LAYER) == "reference"
    with pytest.raises(ValueError, match="backend = 'triton' cannot run this layer: x_TD is on the CPU"):
        select_backend("triton", torch.device("cpu"), *LAYER)


@pytest.mark.parametrize("backend", backends.KERNEL_BACKENDS)
def test_every_backend_has_its_kernels(backend):
    pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
    kernels = backends.kernel_set(backend)
    for name in ("pull_gemm", "gemm_push", "pull_gemm_backward", "gemm_push_backward", "weight_gradients"):
        assert getattr(kernels, name).__name__ == name
        for number_format in {"hopper": ("fp8",), "triton": ("mxfp8",)}[backend]:
            assert getattr(kernels, f"{name}_{number_format}").__name__ == f"{name}_{number_format}"
    assert backend in ops.BACKENDS
