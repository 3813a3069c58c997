"""Checkpoints carry over between strategies, expert-parallel degrees and the Hugging Face format."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from tests.training import options, run_jobs
from titan_megamoe.integration import checkpoints, trainer
from titan_megamoe.integration.checkpoints import CheckedCheckpointManager, find_missing_part
from titan_megamoe.integration.trainer import MegaMoETrainer

SETTINGS = {
    "training.local_batch_size": 2,
    "optimizer.lr": 3e-4,
    "checkpoint.interval": 3,
    "lr_scheduler.total_steps": 8,
}


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Six steps in one go, and six steps in two halves that differ in strategy or expert-parallel degree."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def run(name: str, steps: int, settings: dict) -> list[str]:
        return options(assets, folder / name, {"training.steps": steps, **SETTINGS, **settings})

    def resume(name: str, settings: dict) -> dict:
        path = folder / name / "checkpoint" / "step-3"
        return {"checkpoint.initial_load_path": path, "checkpoint.no-initial_load_model_only": True, **settings}

    theirs, ep1 = {"model.moe.dispatch.type": "all_to_all"}, {"parallelism.expert_parallel_degree": 1}
    imported = {
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": folder / "export" / "checkpoint" / "step-1",
    }
    jobs = {
        "ours": run("ours", 6, {}),
        "theirs": run("theirs", 6, theirs),
        "EP 1": run("EP 1", 6, ep1),
        "ours, then theirs": run("ours-theirs", 6, resume("ours", theirs)),
        "theirs, then ours": run("theirs-ours", 6, resume("theirs", {})),
        "EP 2, then EP 1": run("ep2-ep1", 6, resume("ours", ep1)),
        "EP 1, then EP 2": run("ep1-ep2", 6, resume("EP 1", {})),
        "second call": run("ours", 8, {}),
        "export": run("export", 1, {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}),
        "imported": run("imported", 1, imported),
        "imported, theirs": run("imported-theirs", 1, {**imported, **theirs}),
    }
    return dict(zip(jobs, run_jobs(list(jobs.values()), ranks=2, folder=folder, fp32=True))), folder


@pytest.mark.parametrize(
    "resumed, uninterrupted",
    [
        ("ours, then theirs", "theirs"),
        ("theirs, then ours", "ours"),
        ("EP 2, then EP 1", "ours"),
        ("EP 1, then EP 2", "ours"),
    ],
)
def test_a_resumed_run_goes_on_as_if_uninterrupted(runs, resumed, uninterrupted):
    runs, _ = runs
    assert sorted(runs[resumed].losses) == [4, 5, 6]
    for step, loss in runs[resumed].losses.items():
        assert loss == pytest.approx(runs[uninterrupted].losses[step], abs=1e-3)


def test_a_second_call_resumes_where_the_first_stopped(runs):
    runs, _ = runs
    assert sorted(runs["second call"].losses) == [7, 8]


def test_huggingface_export_has_the_models_names_and_shapes(runs):
    _, folder = runs
    exported = folder / "export" / "checkpoint" / "step-1"
    tensors = {}
    for file in exported.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert len(experts) == 2 * 8 * 3, "2 layers, 8 experts, gate, up and down"
    assert tensors["model.layers.0.mlp.experts.7.gate_proj.weight"].shape == (128, 128)
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (8, 128)
    assert all(torch.isfinite(t).all() for t in tensors.values())
    index = exported / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(tensors)


def test_huggingface_import_restores_the_values(runs):
    """Weights exported after a step on a batch have a lower loss on that batch, whichever strategy reads them."""
    runs, _ = runs
    assert runs["imported"].losses[1] == pytest.approx(runs["imported, theirs"].losses[1], rel=1e-6)
    assert runs["imported"].losses[1] < runs["export"].losses[1] - 1e-3


# ---- incomplete checkpoints


def saved(folder, step: int):
    """A checkpoint of two tensors, written as TorchTitan's are."""
    path = folder / f"step-{step}"
    torch.distributed.checkpoint.save(
        {"a": torch.arange(1000.0), "b": torch.ones(10)}, checkpoint_id=path, no_dist=True
    )
    return path


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    "damage, missing",
    [
        (lambda path: (path / ".metadata").unlink(), "its metadata were never written"),
        (lambda path: truncate(path / ".metadata"), ".metadata is cut off"),
        (lambda path: next(path.glob("*.distcp")).unlink(), r"__0_0.distcp is not there"),
        (lambda path: truncate(next(path.glob("*.distcp"))), r"__0_0.distcp has \d+ of \d+ bytes"),
    ],
    ids=["no metadata", "metadata cut off", "no data", "data cut off"],
)
def test_an_incomplete_checkpoint_is_passed_over(tmp_path, caplog, damage, missing):
    manager = CheckedCheckpointManager.__new__(CheckedCheckpointManager)
    manager.enable, manager.folder = False, str(tmp_path)
    for step in (5, 10, 20):
        path = saved(tmp_path, step)
    assert manager._find_load_step() == 20
    damage(path)
    assert re.search(missing, find_missing_part(path))
    with caplog.at_level("WARNING"):
        assert manager._find_load_step() == 10
    assert re.search(rf"step-20 is incomplete \(.*{missing}.*\).* Looking for an older one", caplog.text)


def test_an_export_without_all_its_files_is_incomplete(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001.safetensors"}}))
    assert find_missing_part(tmp_path) == "model-00001.safetensors is not there"
    (tmp_path / "model-00001.safetensors").touch()
    assert find_missing_part(tmp_path) is None
    truncate(index)
    assert find_missing_part(tmp_path) == "model.safetensors.index.json is cut off"


def test_nothing_is_saved_unchecked(monkeypatch):
    seen = []
    monkeypatch.setattr(checkpoints, "check_step", lambda: seen.append("checked"))
    monkeypatch.setattr(CheckpointManager, "_save", lambda self, step, last_step: seen.append(f"saved {step}"))
    manager = CheckedCheckpointManager.__new__(CheckedCheckpointManager)
    monkeypatch.setattr(manager, "_should_save", lambda step, last_step: step % 2 == 0, raising=False)
    for step in (1, 2):
        manager._save(step)
    assert seen == ["saved 1", "checked", "saved 2"]


@pytest.mark.parametrize("capacity, checked", [(None, [1, 5, 10]), (1.5, list(range(1, 12)))])
def test_steps_are_checked_where_the_host_waits_anyway_or_rows_may_have_had_no_place(monkeypatch, capacity, checked):
    seen = []
    run = MegaMoETrainer.__new__(MegaMoETrainer)
    dispatch = SimpleNamespace(capacity=capacity)
    run.config = SimpleNamespace(
        model=SimpleNamespace(moe=SimpleNamespace(dispatch=dispatch)), comm=SimpleNamespace(train_timeout_seconds=100)
    )
    run.metrics_processor = SimpleNamespace(should_log=lambda step: step == 1 or step % 5 == 0)
    monkeypatch.setattr(Trainer, "train_step", lambda self, data_iterator: None)
    monkeypatch.setattr(trainer, "set_deadline", lambda seconds: None)
    monkeypatch.setattr(trainer, "check_step", lambda: seen.append(run.step))
    for run.step in range(1, 12):
        run.train_step(None)
    assert seen == checked
