"""What this machine has, which strategies and precisions work on it, and whether mega_moe computes rightly here.

    titan-megamoe doctor [--json] [--no_self_test]

Needs no configuration and changes nothing. Only what one process can see: other machines of a run need a doctor of their own.

Exit code 0: mega_moe works here in bf16, on kernels or in plain PyTorch, and the self-test passed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

# torch, TorchTitan and what imports them are imported where they are used: one that is missing or broken becomes a row.

REINSTALL = "`pip install -e .` in titan_megamoe's folder installs all that it needs."

BF16_BOUND, FP8_BOUND = 1e-2, 8e-2
"""Largest relative error that passes the self-test. Right results are off by about 0.4% and 7%: see docs/precision.md."""

SELF_TEST_LAYER = {"tokens": 256, "dim": 256, "hidden_dim": 256, "experts": 8, "top_k": 2}
"""One that the kernels take in every precision."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--no_self_test",
        action="store_true",
        help="do not compute anything: seconds less, and no answer to whether it is right",
    )


def run(arguments: argparse.Namespace) -> int:
    report = examine(self_test=not arguments.no_self_test)
    if arguments.json:
        print(json.dumps(to_json(report), indent=1))
    else:
        render(report)
    return 0 if report.works else 1


# ---- the facts


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of software."""

    name: str
    found: str
    """Its version, or what else was found."""
    status: Literal["ok", "untested", "missing", "absent"]
    """``missing``: it is needed here. ``absent``: it is not, unless one wants what ``note`` says."""
    note: str = ""
    """What to do about it, or what it is for."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    memory_gib: float
    compute_capability: str
    nvlinks: int | None
    """Active NVLink links, to other GPUs or to a switch; None if the driver cannot say."""


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """Whether ``gpu`` can read and write the memory of ``peer``."""

    gpu: int
    peer: int
    can_access: bool
    by_nvlink: bool | None
    """None if the driver cannot say."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a strategy would start here, as the check before training answers it."""

    strategy: str
    precision: str
    expert_parallel_degree: int
    works: bool
    backend: str | None = None
    """mega_moe's, for ``backend = "auto"``."""
    reason: str | None = None
    """Why it does not work, and what to do."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """A small layer, forward and backward, on one rank, beside the formula in fp32."""

    precision: str
    backend: str | None
    passed: bool
    bound: float
    error: float | None = None
    """The largest relative error (in norm) among the output and the five gradients."""
    worst: str | None = None
    """Which of them has it."""
    seconds: float | None = None
    """The kernels' compilation included."""
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    gpus: tuple[Gpu, ...] = ()
    no_gpu: str | None = None
    """Why torch sees no GPU."""
    peers: tuple[PeerAccess, ...] = ()
    versions: tuple[Finding, ...] = ()
    software: tuple[Finding, ...] = ()
    strategies: tuple[Availability, ...] = ()
    problem: str | None = None
    """What kept the strategies from being asked."""
    self_tests: tuple[SelfTest, ...] | None = None
    """None: not asked for."""
    environment: dict

    @property
    def works(self) -> bool:
        return any(a.works for a in self._in_bf16) and all(test.passed for test in self.self_tests or ())

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"mega_moe does not work here: {self.problem}"
        working = [a for a in self._in_bf16 if a.works]
        if not working:
            return f"mega_moe does not work here: {self._in_bf16[0].reason}"
        failed = [test.precision for test in self.self_tests or () if not test.passed]
        if failed:
            return (
                f"mega_moe starts here, but its self-test fails in {', '.join(failed)}: do not train with it. If all versions "
                "above are ok, please report this output."
            )
        backends = list(dict.fromkeys(a.backend for a in working))
        degrees = " and ".join(str(a.expert_parallel_degree) for a in working)
        sentence = f"mega_moe works here in bf16 on backend {' and '.join(backends)}, at EP {degrees}"
        if "reference" in backends:
            sentence += " (plain PyTorch: exact, not fast)"
        return sentence + (", not self-tested." if self.self_tests is None else "; the self-test passed.")

    @property
    def _in_bf16(self) -> list[Availability]:
        return [a for a in self.strategies if a.strategy == "mega_moe" and a.precision == "bf16"]


def to_json(report: Report) -> dict:
    return {"works": report.works, "verdict": report.verdict, **asdict(report)}


def examine(*, self_test: bool) -> Report:
    if importlib.util.find_spec("torch") is None:
        missing = Finding(name="torch", found="nothing", status="missing", note=REINSTALL)
        return Report(versions=(missing,), problem=f"torch is not installed. {REINSTALL}", environment={})
    import torch

    from ..bench.environment import describe_environment

    cuda = torch.cuda if torch.cuda.is_available() else None
    try:
        uuids = [str(cuda.get_device_properties(i).uuid) for i in range(cuda.device_count())] if cuda else []
    except RuntimeError as error:
        problem = (
            f"torch finds GPUs, but cannot use them ({_in_one_line(error)}). See what nvidia-smi says about them, or set "
            "CUDA_VISIBLE_DEVICES='' to use the CPU."
        )
        return Report(problem=problem, environment={})
    nvml = open_nvml()
    driver = driver_version(nvml)
    no_gpu = None
    if cuda is None:
        no_gpu = explain_no_gpu(torch.version.cuda, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        strategies, problem = find_strategies(gpus=len(uuids)), None
    except Exception as error:  # whatever an incompatible TorchTitan may raise when imported
        strategies = ()
        problem = f"TorchTitan cannot be used ({_in_one_line(error)}). {REINSTALL}"
    tests = None
    if self_test:
        tests = tuple(run_self_test(precision) for precision in usable_precisions(strategies))
    return Report(
        gpus=find_gpus(cuda, nvml, uuids) if cuda else (),
        no_gpu=no_gpu,
        peers=find_peers(cuda, nvml, uuids) if cuda else (),
        versions=find_versions(),
        software=find_software(driver, has_gpu=cuda is not None),
        strategies=strategies,
        problem=problem,
        self_tests=tests,
        environment=describe_environment(),
    )


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


# ---- GPUs


def open_nvml():
    """The module ``pynvml``, initialised; None where it or the driver is missing."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _ask(nvml, function: str, *arguments):
    """What the driver answers, or None if it or the binding does not know the question."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def driver_version(nvml) -> str | None:
    if nvml is not None:
        version = _ask(nvml, "nvmlSystemGetDriverVersion")
        if version:
            return version.decode() if isinstance(version, bytes) else version
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def explain_no_gpu(torch_cuda: str | None, driver: str | None, visible: str | None) -> str:
    """``torch_cuda``: the CUDA version that torch is built for; ``visible``: CUDA_VISIBLE_DEVICES."""
    if torch_cuda is None and driver is None:
        return "There is no NVIDIA driver, and this torch is not built for CUDA: everything runs on the CPU."
    if torch_cuda is None:
        return (
            f"NVIDIA driver {driver} is there, but this torch is not built for CUDA. Install one that is: "
            "https://pytorch.org/get-started/locally."
        )
    if driver is None:
        return (
            f"torch is built for CUDA {torch_cuda}, but there is no NVIDIA driver. On a GPU machine, install it; in a container, "
            "start it with the GPUs (docker run --gpus all)."
        )
    if visible is not None:
        return f"NVIDIA driver {driver} is there, but CUDA_VISIBLE_DEVICES = '{visible}' leaves torch no GPU. Unset it."
    return (
        f"NVIDIA driver {driver} is there, but torch, built for CUDA {torch_cuda}, cannot use it. Update the driver, or install a "
        "torch built for an older CUDA."
    )


def find_gpus(cuda, nvml, uuids: list[str]) -> tuple[Gpu, ...]:
    """``cuda``: ``torch.cuda``; ``nvml``: ``pynvml`` or None; ``uuids``: of torch's GPUs, in its order."""
    gpus = []
    for index, uuid in enumerate(uuids):
        properties = cuda.get_device_properties(index)
        gpus.append(
            Gpu(
                index=index,
                name=properties.name,
                memory_gib=round(properties.total_memory / 2**30, 1),
                compute_capability=f"{properties.major}.{properties.minor}",
                nvlinks=_active_nvlinks(nvml, uuid),
            )
        )
    return tuple(gpus)


def _handle(nvml, uuid: str):
    return _ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}") if nvml is not None else None


def _active_nvlinks(nvml, uuid: str) -> int | None:
    handle = _handle(nvml, uuid)
    if handle is None:
        return None
    states = [_ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return sum(state == nvml.NVML_FEATURE_ENABLED for state in states)


def find_peers(cuda, nvml, uuids: list[str]) -> tuple[PeerAccess, ...]:
    """For each ordered pair of GPUs. Arguments as of :func:`find_gpus`."""
    handles = [_handle(nvml, uuid) for uuid in uuids]

    def by_nvlink(gpu: int, peer: int) -> bool | None:
        if handles[gpu] is None or handles[peer] is None:
            return None
        status = _ask(nvml, "nvmlDeviceGetP2PStatus", handles[gpu], handles[peer], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return None if status is None else status == nvml.NVML_P2P_STATUS_OK

    return tuple(
        PeerAccess(gpu=a, peer=b, can_access=bool(cuda.can_device_access_peer(a, b)), by_nvlink=by_nvlink(a, b))
        for a in range(len(uuids))
        for b in range(len(uuids))
        if a != b
    )


# ---- software


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_range(distribution: str):
    """The ``SpecifierSet`` that this package declares for another; None if it declares none, or was not installed by pip."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("titan_megamoe") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((r.specifier for r in map(Requirement, declared) if r.name == distribution and r.specifier), None)


def check_version(name: str, installed: str | None, *, tested=None, described: str = "") -> Finding:
    """``tested``: a ``SpecifierSet``, None if any version will do; ``described``: the same, in words."""
    from packaging.version import Version

    if installed is None:
        return Finding(name=name, found="nothing", status="missing", note=REINSTALL)
    # Pre-releases and builds count as the release that they lead to, as for compat.check_versions.
    if tested is not None and not tested.contains(Version(installed).base_version):
        note = f"Run with {described or tested} so far. If something fails, install that."
        return Finding(name=name, found=installed, status="untested", note=note)
    return Finding(name=name, found=installed, status="ok")


def find_versions() -> tuple[Finding, ...]:
    import torch

    from .. import __version__
    from ..backends import no_kernels_on_this_machine

    torch_range, torchtitan_range = tested_ranges()
    return (
        Finding(name="titan_megamoe", found=__version__, status="ok"),
        Finding(name="python", found=platform.python_version(), status="ok"),
        check_version("torch", torch.__version__, **torch_range),
        check_version("torchtitan", installed_version("torchtitan"), **torchtitan_range),
        check_version("torchao", installed_version("torchao"), tested=declared_range("torchao")),
        check_triton(installed_version("triton"), no_kernels_on_this_machine(), declared_range("triton")),
    )


def tested_ranges() -> tuple[dict, dict]:
    """Of torch and TorchTitan, as arguments of :func:`check_version`; empty if ``compat`` cannot be imported."""
    from packaging.specifiers import SpecifierSet

    try:
        from ..integration import compat
    except Exception:  # a missing or broken TorchTitan, which has its own row
        return {}, {}
    oldest, newest = compat.TESTED_TORCH
    torch_range = SpecifierSet(f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}")
    torch_in_words = " to ".join(f"{major}.{minor}" for major, minor in compat.TESTED_TORCH)
    return (
        {"tested": torch_range, "described": f"torch {torch_in_words}"},
        {
            "tested": SpecifierSet(f"=={compat.TESTED_TORCHTITAN}"),
            "described": f"TorchTitan {compat.TESTED_TORCHTITAN}",
        },
    )


def check_triton(installed: str | None, kernels_missing: str | None, declared) -> Finding:
    """``kernels_missing``: why the kernels cannot run here (``backends.no_kernels_on_this_machine``), which may be Triton's doing."""
    if kernels_missing and "Triton" in kernels_missing:
        return Finding(
            name="triton", found=installed or "nothing", status="missing", note=f"For the kernels, {kernels_missing}"
        )
    if kernels_missing:
        status = "ok" if installed else "absent"
        return Finding(name="triton", found=installed or "nothing", status=status, note="Only the kernels need it.")
    return check_version("triton", installed, tested=declared)


def find_software(driver: str | None, *, has_gpu: bool) -> tuple[Finding, ...]:
    import torch
    import torch.distributed as dist

    nccl = None
    if torch.version.cuda and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    needed = "missing" if has_gpu else "absent"
    return (
        Finding(
            name="NVIDIA driver",
            found=driver or "nothing",
            status="ok" if driver else needed,
            note="" if driver else ("Neither pynvml nor nvidia-smi can say." if has_gpu else "For GPUs."),
        ),
        Finding(
            name="CUDA of torch",
            found=torch.version.cuda or "nothing",
            status="ok" if torch.version.cuda else needed,
            note="" if torch.version.cuda else "This torch is built for the CPU.",
        ),
        Finding(
            name="NCCL",
            found=nccl or "nothing",
            status="ok" if nccl else needed,
            note="" if nccl else "For several GPUs; on a CPU, gloo takes its place.",
        ),
        check_symmetric_memory(has_gpu),
        check_module("DeepEP v2", "deep_ep", "For strategy deepep.", contains="ElasticBuffer"),
        check_module("DeepEP, hybrid branch", "deep_ep", "For strategy hybridep.", contains="HybridEPBuffer"),
        check_module("flash-attn", "flash_attn", "For model.attn_backend = 'flex_flash'."),
        check_module("SonicMoE", "sonicmoe", "For comparison in titan_megamoe.bench.layer."),
        check_module("DeepGEMM", "deep_gemm", "Nothing in this package uses it."),
    )


def check_symmetric_memory(has_gpu: bool) -> Finding:
    name = "symmetric memory"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except Exception as error:
        note = f"mega_moe's kernels need it at EP > 1. Install a torch that has it ({_in_one_line(error)})."
        return Finding(name=name, found="not in this torch", status="missing" if has_gpu else "absent", note=note)
    if not has_gpu:
        return Finding(name=name, found="in torch, no GPU", status="absent", note="For mega_moe's kernels at EP > 1.")
    return Finding(name=name, found="yes", status="ok")


def check_module(name: str, module: str, note: str, *, contains: str | None = None) -> Finding:
    """An optional package, found without importing it: its extension could take the process down.

    ``contains``: a name that its Python sources must hold, for a package whose branches share a name.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Finding(name=name, found="nothing", status="absent", note=note)
    if contains and not _sources_contain(spec.submodule_search_locations or (), contains):
        return Finding(name=name, found=f"{module} without {contains}", status="absent", note=note)
    distributions = importlib.metadata.packages_distributions().get(module, ())
    versions = [version for version in map(installed_version, distributions) if version]
    return Finding(name=name, found=versions[0] if versions else "yes", status="ok", note=note)


def _sources_contain(folders: Iterable[str], text: str) -> bool:
    files = (file for folder in folders for file in Path(folder).rglob("*.py"))
    return any(text in file.read_text(encoding="utf-8", errors="replace") for file in files)


# ---- strategies


def degrees_to_ask(gpus: int) -> list[int]:
    """Expert-parallel degrees: none, and all GPUs of this machine. Without GPUs, two ranks on the CPU."""
    return sorted({1, gpus or 2})


def find_strategies(*, gpus: int) -> tuple[Availability, ...]:
    """Ask the checks that training makes. What depends on the configuration alone is set to what each strategy wants."""
    from ..integration import compat

    compat.install()  # before anything imports TorchTitan
    from torchtitan.distributed.activation_checkpoint import FullAC

    from ..integration.strategies import check, STRATEGIES
    from ..integration.trainer import default_config
    from ..ops import PRECISIONS
    from .configuration import without_warnings

    with without_warnings():
        config = default_config()
    config.activation_checkpoint = FullAC.Config()  # minimal_async_ep wants it, the others take it
    dispatch = config.model.moe.dispatch
    answers = []
    for name in STRATEGIES:
        for precision in PRECISIONS if name == "mega_moe" else ("bf16",):
            for degree in degrees_to_ask(gpus):
                dispatch.type, dispatch.precision = name, precision
                config.parallelism.expert_parallel_degree = degree
                backend, reason = None, None
                try:
                    check(config)
                    backend = pick_backend(precision) if name == "mega_moe" else None
                except ValueError as error:
                    reason = str(error)
                except Exception as error:  # a broken extension that a check imports
                    reason = _in_one_line(error)
                answers.append(
                    Availability(
                        strategy=name,
                        precision=precision,
                        expert_parallel_degree=degree,
                        works=reason is None,
                        backend=backend,
                        reason=reason,
                    )
                )
    return tuple(answers)


def pick_backend(precision: str) -> str:
    """What ``backend = "auto"`` is for the self-test's layer. Raises ValueError if nothing can compute it."""
    import torch

    from ..ops import select_backend

    layer = SELF_TEST_LAYER
    return select_backend("auto", _device(), torch.bfloat16, layer["dim"], layer["hidden_dim"], precision)


def _device():
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def usable_precisions(strategies: Iterable[Availability]) -> list[str]:
    return list(dict.fromkeys(a.precision for a in strategies if a.works and a.strategy == "mega_moe"))


# ---- self-test


def run_self_test(precision: str, backend: str = "auto") -> SelfTest:
    """Compare mega_moe with :func:`plain_layer`. Whatever goes wrong is reported, not raised."""
    from ..ops import check_step, mega_moe

    bound = BF16_BOUND if precision == "bf16" else FP8_BOUND
    resolved = None
    started = time.perf_counter()
    try:
        resolved = pick_backend(precision) if backend == "auto" else backend
        names, inputs, dout_TD = random_layer()
        expected = output_and_gradients(
            plain_layer, [t.float() if t.is_floating_point() else t for t in inputs], dout_TD
        )
        actual = output_and_gradients(
            lambda *tensors: mega_moe(*tensors, precision=precision, backend=backend), inputs, dout_TD
        )
        check_step()
        errors = {name: relative_error(a, e) for name, a, e in zip(names, actual, expected, strict=True)}
    except Exception as error:
        return SelfTest(precision=precision, backend=resolved, passed=False, bound=bound, problem=_in_one_line(error))
    seconds = round(time.perf_counter() - started, 2)
    result = dict(precision=precision, backend=resolved, bound=bound, seconds=seconds)
    not_finite = [name for name, error in errors.items() if not math.isfinite(error)]
    if not_finite:
        return SelfTest(**result, passed=False, worst=not_finite[0], problem=f"{not_finite[0]} is not finite")
    worst = max(errors, key=errors.get)
    passed = errors[worst] <= bound
    problem = None if passed else f"{worst} is further off than rounding explains"
    return SelfTest(**result, passed=passed, error=errors[worst], worst=worst, problem=problem)


def random_layer():
    """Names of what is compared, the arguments of ``mega_moe``, and the output's gradient: bf16, the same in every run."""
    import torch

    sizes, device = SELF_TEST_LAYER, _device()
    tokens, dim, hidden_dim, experts = (sizes[name] for name in ("tokens", "dim", "hidden_dim", "experts"))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, torch.bfloat16)

    ids_TK = torch.rand(tokens, experts, generator=generator).topk(sizes["top_k"], dim=1).indices.to(device)
    scores_TK = torch.rand(tokens, sizes["top_k"], generator=generator).to(device)
    w1_EFD, w3_EFD = (normal(experts, hidden_dim, dim, scale=dim**-0.5) for _ in range(2))
    w2_EDF = normal(experts, dim, hidden_dim, scale=hidden_dim**-0.5)
    names = ("output", "gradient of x", "gradient of the scores", "gradient of w1", "gradient of w2", "gradient of w3")
    return names, [normal(tokens, dim), ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD], normal(tokens, dim)


def plain_layer(x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD):
    """The layer's formula, one expert after another, for autograd to differentiate."""
    import torch

    out_TD = torch.zeros_like(x_TD)
    for expert in range(w1_EFD.shape[0]):
        token_R, slot_R = (ids_TK == expert).nonzero(as_tuple=True)
        x_RD = x_TD[token_R]
        h_RF = torch.nn.functional.silu(x_RD @ w1_EFD[expert].T) * (x_RD @ w3_EFD[expert].T)
        y_RD = scores_TK[token_R, slot_R, None] * (h_RF @ w2_EDF[expert].T)
        out_TD = out_TD.index_add(0, token_R, y_RD)
    return out_TD


def output_and_gradients(layer, inputs, dout_TD) -> list:
    import torch

    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out_TD = layer(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out_TD.detach(), *torch.autograd.grad(out_TD, wanted, dout_TD.to(out_TD.dtype))]


def relative_error(actual, expected) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# ---- printing


def render(report: Report) -> None:
    from .terminal import make_console

    console = make_console()
    for title, columns, rows in tables(report):
        console.print(_table(title, columns, rows))
    console.print(report.verdict, markup=False, highlight=False)


def tables(report: Report) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """``(title, columns, rows)`` of each."""
    result = []
    if report.no_gpu:
        result.append(("GPUs", ("", ""), [("none", report.no_gpu)]))
    if report.gpus:
        rows = [
            (str(g.index), g.name, f"{g.memory_gib}", g.compute_capability, _or_unknown(g.nvlinks)) for g in report.gpus
        ]
        result.append(("GPUs", ("", "name", "GiB", "compute capability", "NVLink links"), rows))
    if report.peers:
        result.append(_peer_table(report))
    for title, findings in (("Versions", report.versions), ("Other software", report.software)):
        if findings:
            rows = [(f.name, f.found, f.status, f.note) for f in findings]
            result.append((title, ("", "found", "status", "what for, what to do"), rows))
    if report.strategies:
        columns = ("strategy", "precision", "EP", "works", "backend, or why not")
        result.append(("Strategies", columns, _strategy_rows(report.strategies)))
    if report.self_tests:
        columns = ("precision", "backend", "passed", "largest error", "bound", "where, what")
        result.append(("Self-test of mega_moe, one rank", columns, [_self_test_row(t) for t in report.self_tests]))
    return result


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)


def _peer_table(report: Report):
    words = {(p.gpu, p.peer): _describe_access(p) for p in report.peers}
    indices = [gpu.index for gpu in report.gpus]
    rows = [(f"GPU {a}", *(words.get((a, b), "-") for b in indices)) for a in indices]
    return "Which GPU reaches which GPU's memory", ("", *(f"GPU {b}" for b in indices)), rows


def _describe_access(peer: PeerAccess) -> str:
    if not peer.can_access:
        return "no"
    return {True: "NVLink", False: "PCIe", None: "yes"}[peer.by_nvlink]


def _strategy_rows(strategies: tuple[Availability, ...]) -> list[tuple[str, ...]]:
    """Degrees with the same answer share a row."""
    degrees: dict[tuple, list[int]] = {}
    for a in strategies:
        answer = (a.strategy, a.precision, a.works, a.backend, a.reason)
        degrees.setdefault(answer, []).append(a.expert_parallel_degree)
    return [
        (
            strategy,
            precision,
            ", ".join(map(str, at)),
            "yes" if works else "NO",
            reason or backend or "TorchTitan's own",
        )
        for (strategy, precision, works, backend, reason), at in degrees.items()
    ]


def _self_test_row(test: SelfTest) -> tuple[str, ...]:
    where = test.problem or f"{test.worst}; {test.seconds:.1f} s"
    error = "none" if test.error is None else f"{test.error:.1e}"
    return test.precision, _or_unknown(test.backend), "yes" if test.passed else "NO", error, f"{test.bound:.0e}", where


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]):
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(columns))
    for name in columns:
        table.add_column(name, no_wrap=name != columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
