"""``titan-megamoe doctor`` on a CPU and on made-up machines, and docs/troubleshooting.md beside the sources."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from tests.training import REPOSITORY
from titan_megamoe.cli import doctor
from titan_megamoe.cli.main import main
from titan_megamoe.config.sections import PRECISION_NAMES, STRATEGY_NAMES
from titan_megamoe.integration import compat


@pytest.fixture
def no_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("says what a machine without a GPU can do")


def run_json(capsys, *options: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


# ---- the command on this machine


def test_json_says_what_works_on_a_cpu(no_gpu, capsys):
    code, report = run_json(capsys)
    assert code == 0 and report["works"] and report["problem"] is None
    answers = {(a["strategy"], a["precision"], a["expert_parallel_degree"]): a for a in report["strategies"]}
    assert {name for name, _, _ in answers} == set(STRATEGY_NAMES)
    assert {precision for name, precision, _ in answers if name == "mega_moe"} == set(PRECISION_NAMES)
    for degree in (1, 2):
        assert answers["all_to_all", "bf16", degree]["works"]
        assert answers["mega_moe", "bf16", degree]["works"]
        assert answers["mega_moe", "bf16", degree]["backend"] == "reference"
        for precision in ("fp8", "fp8_bwd"):
            refused = answers["mega_moe", precision, degree]
            assert not refused["works"] and refused["backend"] is None and "Hopper" in refused["reason"]
        assert "allow_emulation = true" in answers["mega_moe", "mxfp8", degree]["reason"]
        assert not answers["deepep", "bf16", degree]["works"]
    assert "needs expert parallelism" in answers["deepep", "bf16", 1]["reason"]
    assert "NVIDIA GPUs only" in answers["deepep", "bf16", 2]["reason"]
    # Full activation checkpointing is a matter of the configuration, not of the machine.
    assert "checkpointing" not in answers["minimal_async_ep", "bf16", 2]["reason"]

    [test] = report["self_tests"]
    assert test["passed"] and test["precision"] == "bf16" and test["backend"] == "reference"
    assert 0 < test["error"] < test["bound"]
    assert report["environment"]["gpus"] == 0 and report["gpus"] == [] and report["no_gpu"]
    versions = {finding["name"]: finding for finding in report["versions"]}
    assert versions["torchtitan"]["found"] == compat.TESTED_TORCHTITAN and versions["torchtitan"]["status"] == "ok"
    assert "deepep" in {f["name"]: f["note"] for f in report["software"]}["DeepEP v2"]


def test_without_self_test(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "run_self_test", lambda *_: pytest.fail("was run"))
    code, report = run_json(capsys, "--no_self_test")
    assert code == 0 and report["self_tests"] is None and "not self-tested" in report["verdict"]


def test_as_a_program(no_gpu):
    command = [sys.executable, "-m", "titan_megamoe.cli.main", "doctor"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for title in ("GPUs", "Versions", "Other software", "Strategies", "Self-test of mega_moe, one rank"):
        assert title in lines
    rows = ("torchtitan 0.3.0 ok", "all_to_all bf16 1, 2 yes", "deepep bf16 1 NO", "mega_moe bf16 1, 2 yes reference")
    for row in (*rows, "mega_moe fp8 1, 2 NO", "bf16 reference yes", "DeepEP v2 nothing absent For strategy deepep."):
        assert any(line.startswith(row) for line in lines), row
    assert "mega_moe works here in bf16 on backend reference" in done.stdout
    assert "\x1b[" not in done.stdout


# ---- the self-test


@pytest.mark.parametrize("precision", PRECISION_NAMES)
def test_self_test_passes_on_the_reference_backend(precision):
    test = doctor.run_self_test(precision, backend="reference")
    assert test.passed and test.problem is None
    assert test.bound / 20 < test.error < test.bound


def returning(factor: float):
    """In place of mega_moe: right results times ``factor``."""

    def layer(*tensors, **options):
        return factor * doctor.plain_layer(*(t.float() if t.is_floating_point() else t for t in tensors))

    return layer


def test_wrong_results_fail(no_gpu, capsys, monkeypatch):
    monkeypatch.setattr("titan_megamoe.ops.mega_moe", returning(1.1))
    code, report = run_json(capsys)
    [test] = report["self_tests"]
    assert code == 1 and not report["works"] and not test["passed"]
    assert test["error"] == pytest.approx(0.1, abs=0.02) and "further off" in test["problem"]
    assert "do not train with it" in report["verdict"]
    assert main(["doctor"]) == 1
    assert "do not train with it" in capsys.readouterr().out


def test_nan_fails(monkeypatch):
    monkeypatch.setattr("titan_megamoe.ops.mega_moe", returning(float("nan")))
    test = doctor.run_self_test("bf16", backend="reference")
    assert not test.passed and test.error is None and test.problem == "output is not finite"


def test_each_precision_has_its_own_bound(monkeypatch):
    monkeypatch.setattr("titan_megamoe.ops.mega_moe", returning(1.05))
    assert not doctor.run_self_test("bf16", backend="reference").passed
    assert doctor.run_self_test("fp8", backend="reference").passed


def test_what_the_device_reports_afterwards_fails(monkeypatch):
    def late():
        raise RuntimeError("waited past its deadline")

    monkeypatch.setattr("titan_megamoe.ops.check_step", late)
    test = doctor.run_self_test("bf16", backend="reference")
    assert not test.passed and test.problem == "RuntimeError: waited past its deadline"


def test_an_exception_is_a_row(no_gpu, capsys, monkeypatch):
    def broken(*tensors, **options):
        raise RuntimeError("the compiler\n  gave up")

    monkeypatch.setattr("titan_megamoe.ops.mega_moe", broken)
    code, report = run_json(capsys)
    assert code == 1 and report["self_tests"][0]["problem"] == "RuntimeError: the compiler gave up"
    assert main(["doctor"]) == 1
    assert "the compiler gave up" in capsys.readouterr().out


# ---- broken installations


def test_a_broken_torchtitan_is_the_verdict(capsys, monkeypatch):
    def broken(**_):
        raise ImportError("cannot import name 'FullAC'")

    monkeypatch.setattr(doctor, "find_strategies", broken)
    code, report = run_json(capsys)
    assert code == 1 and report["strategies"] == [] and report["self_tests"] == []
    assert "cannot import name 'FullAC'" in report["verdict"] and "pip install" in report["verdict"]
    assert main(["doctor"]) == 1
    assert "cannot import name 'FullAC'" in " ".join(capsys.readouterr().out.split())


def test_a_missing_torch_is_the_verdict(capsys, monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    code, report = run_json(capsys)
    assert code == 1 and "torch is not installed" in report["verdict"]
    assert [(f["name"], f["status"]) for f in report["versions"]] == [("torch", "missing")]


def test_gpus_that_cannot_be_used_are_the_verdict(capsys, monkeypatch):
    def broken(index):
        raise RuntimeError("CUDA error: system not yet initialized")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", broken)
    code, report = run_json(capsys)
    assert code == 1 and "system not yet initialized" in report["verdict"]


# ---- versions


def test_versions_are_judged_by_the_range():
    torch_range, torchtitan_range = doctor.tested_ranges()
    oldest, newest = compat.TESTED_TORCH
    outside = [(oldest[0], oldest[1] - 1), (newest[0], newest[1] + 1)]
    for version in (oldest, newest, *outside):
        for suffix in (".0", ".1+cu130", ".0a0+0123abc", ".0.dev20260101+cu130"):
            finding = doctor.check_version("torch", "{}.{}".format(*version) + suffix, **torch_range)
            assert finding.status == ("untested" if version in outside else "ok"), finding
    untested = doctor.check_version("torch", "2.99.0", **torch_range)
    assert "torch {}.{} to {}.{}".format(*oldest, *newest) in untested.note
    assert doctor.check_version("torchtitan", compat.TESTED_TORCHTITAN, **torchtitan_range).status == "ok"
    assert doctor.check_version("torchtitan", "0.9.9", **torchtitan_range).status == "untested"
    missing = doctor.check_version("torchtitan", None, **torchtitan_range)
    assert missing.status == "missing" and missing.note == doctor.REINSTALL
    assert doctor.check_version("torchao", "0.1").status == "ok"


def test_triton_matters_where_the_kernels_can_run():
    declared = SpecifierSet(">=3.6,<3.9")
    no_gpu, no_triton = "it needs an NVIDIA GPU", "it needs Triton 3.6 to 3.8, which is not installed"
    assert doctor.check_triton("3.6.0", None, declared).status == "ok"
    assert doctor.check_triton("3.9.1", None, declared).status == "untested"
    assert doctor.check_triton("3.9.1", None, None).status == "ok"
    assert doctor.check_triton(None, no_gpu, declared).status == "absent"
    missing = doctor.check_triton(None, no_triton, declared)
    assert missing.status == "missing" and no_triton in missing.note


def test_optional_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "fake_deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\nclass ElasticBuffer: ...\n")
    found = doctor.check_module("DeepEP", "fake_deep_ep", "For x.", contains="ElasticBuffer")
    assert (found.status, found.found) == ("ok", "yes")
    other = doctor.check_module("DeepEP", "fake_deep_ep", "For x.", contains="HybridEPBuffer")
    assert (other.status, other.found) == ("absent", "fake_deep_ep without HybridEPBuffer")
    assert doctor.check_module("x", "no_such_module", "For x.").status == "absent"


# ---- GPUs, made up


class FakeNvml:
    """Two GPUs with 18 links, and a third that the driver knows nothing about."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 20, 1
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"580.95"

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        if link >= 18:
            raise self.NVMLError
        return 1

    def nvmlDeviceGetP2PStatus(self, one, other, index):  # noqa: N802
        assert index == 2
        return 0


def fake_cuda():
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0)
    return SimpleNamespace(
        get_device_properties=lambda index: properties, can_device_access_peer=lambda a, b: 2 not in (a, b)
    )


def test_gpus_and_links():
    uuids = ["a", "b", "c"]
    gpus = doctor.find_gpus(fake_cuda(), FakeNvml(), uuids)
    assert [(g.name, g.memory_gib, g.compute_capability) for g in gpus] == [("NVIDIA H200", 140.0, "9.0")] * 3
    assert [g.nvlinks for g in gpus] == [18, 18, None]
    assert [g.nvlinks for g in doctor.find_gpus(fake_cuda(), None, uuids)] == [None] * 3
    peers = doctor.find_peers(fake_cuda(), FakeNvml(), uuids)
    report = doctor.Report(gpus=gpus, peers=peers, environment={})
    [(_, columns, gpu_rows), (_, _, rows)] = doctor.tables(report)
    assert gpu_rows[0] == ("0", "NVIDIA H200", "140.0", "9.0", "18") and gpu_rows[2][-1] == "unknown"
    assert rows == [
        ("GPU 0", "-", "NVLink", "no"),
        ("GPU 1", "NVLink", "-", "no"),
        ("GPU 2", "no", "no", "-"),
    ]
    without_driver = doctor.Report(gpus=gpus[:2], peers=doctor.find_peers(fake_cuda(), None, uuids[:2]), environment={})
    assert doctor.tables(without_driver)[1][2][0] == ("GPU 0", "-", "yes")
    assert doctor.driver_version(FakeNvml()) == "580.95"


def test_peers_without_nvlink(monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetP2PStatus", lambda self, one, other, index: 1)
    uuids = ["a", "b"]
    gpus, peers = (find(fake_cuda(), FakeNvml(), uuids) for find in (doctor.find_gpus, doctor.find_peers))
    assert doctor.tables(doctor.Report(gpus=gpus, peers=peers, environment={}))[1][2] == [
        ("GPU 0", "-", "PCIe"),
        ("GPU 1", "PCIe", "-"),
    ]


@pytest.mark.parametrize(
    "torch_cuda, driver, visible, expected",
    [
        (None, None, None, "runs on the CPU"),
        (None, "580.95", None, "not built for CUDA"),
        ("13.0", None, None, "no NVIDIA driver"),
        ("13.0", "580.95", "", "Unset it"),
        ("13.0", "535.1", None, "Update the driver"),
    ],
)
def test_why_there_is_no_gpu(torch_cuda, driver, visible, expected):
    assert expected in doctor.explain_no_gpu(torch_cuda, driver, visible)


def test_degrees():
    assert doctor.degrees_to_ask(0) == [1, 2] and doctor.degrees_to_ask(1) == [1] and doctor.degrees_to_ask(8) == [1, 8]


def test_verdict_of_a_machine_whose_gpus_do_not_reach_each_other():
    def answer(degree, **others):
        return doctor.Availability(strategy="mega_moe", precision="bf16", expert_parallel_degree=degree, **others)

    alone = answer(1, works=True, backend="hopper")
    together = answer(8, works=False, reason="GPU 0 cannot access GPU 1's memory")
    report = doctor.Report(strategies=(alone, together), environment={})
    assert report.works and report.verdict == "mega_moe works here in bf16 on backend hopper, at EP 1, not self-tested."
    [(_, _, rows)] = doctor.tables(report)
    assert rows[0][2:] == ("1", "yes", "hopper") and rows[1][2:4] == ("8", "NO")
    nothing = dataclasses.replace(report, strategies=(together,))
    assert not nothing.works and "cannot access" in nothing.verdict


# ---- docs/troubleshooting.md


def messages_in_the_sources() -> set[str]:
    """Every string of the package that is no docstring, with ... for what is put into it."""
    messages = set()
    for file in (REPOSITORY / "titan_megamoe").rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                messages.add(node.value)
            if isinstance(node, ast.JoinedStr):
                messages.add("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
    return messages


def test_quoted_messages_are_raised():
    quoted = re.findall(r"^### `(.+)`$", (REPOSITORY / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 15 and len(set(quoted)) == len(quoted)
    messages = messages_in_the_sources()
    for quote in quoted:
        # What is put in may itself be quoted: 'key = value'.
        pattern = re.compile(re.escape(quote).replace(r"\.\.\.", ".+?"))
        assert any(pattern.match(message) for message in messages), quote
