"""What a user types: the run script, a second call that resumes, and stock TorchTitan with our override."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.training import DEBUG_CONFIG, options, REPOSITORY, run_jobs, torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("end_to_end")


def run_script(*command: str, **variables: str) -> subprocess.CompletedProcess:
    """A script of the repository, in this environment."""
    environment = {**os.environ, "USE_ENV": "1", "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


def run_train(assets, folder, *extra: str) -> subprocess.CompletedProcess:
    paths = ["--hf_assets_path", str(assets), "--dataloader.dataset_path", str(assets), "--dump_folder", str(folder)]
    return run_script("./run_train.sh", *paths, *extra, NGPU="2", CONFIG_FILE=DEBUG_CONFIG)


def steps_of(result: subprocess.CompletedProcess) -> dict[int, float]:
    output = re.sub(r"\x1b\[[\d;]*m", "", result.stdout + result.stderr)
    return {int(step): float(loss) for step, loss in re.findall(r"step: *(\d+) +loss: *([\d.]+)", output)}


def test_run_script_trains_and_a_second_call_resumes(assets, folder):
    first = run_train(assets, folder, "--training.steps", "6", "--lr_scheduler.total_steps", "8")
    assert first.returncode == 0, first.stderr[-3000:]
    losses = steps_of(first)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1] - 0.3
    for expected in (
        "on the CPU and gloo",
        "tps:",
        "mfu:",
        "grad_norm:",
        "backend 'reference'",
        "Finished saving the checkpoint|Last step",
    ):
        assert re.search(expected, first.stdout + first.stderr), expected
    second = run_train(assets, folder, "--training.steps", "8", "--lr_scheduler.total_steps", "8")
    assert second.returncode == 0, second.stderr[-3000:]
    assert sorted(steps_of(second)) == [7, 8] and steps_of(second)[8] < losses[6]


def test_the_command_from_a_checkout():
    result = run_script("./titan-megamoe", "plan", "--config", DEBUG_CONFIG, "--precision", "bf16", "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout)["config"] == DEBUG_CONFIG
    assert "no effect without" not in result.stderr, "a warning of TorchTitan's about its own defaults"
    assert run_script("./titan-megamoe", "plan", "--config", "no.toml").returncode == 2
    assert run_script("./titan-megamoe").returncode == 2


def test_a_checkpoint_of_another_model_is_refused_in_one_paragraph(assets, folder):
    assert (folder / "checkpoint").exists(), "runs after the test above"
    result = run_train(
        assets, folder, "--training.steps", "9", "--model.flavor", "debugmodel_moe", "--model.n_layers", "1"
    )
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert re.search(
        r"titan_megamoe: The checkpoint .*step-8 is of another model: .* is \[.*\] there and \[.*\] here", output
    )
    assert "set another dump_folder" in output and "Traceback" not in output.split("titan_megamoe: The checkpoint")[0]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(assets, folder, tmp_path):
    from titan_megamoe import data

    data.build(tmp_path / "large", vocab_size=3000, max_mb=2)
    result = run_train(assets, folder / "none", "--hf_assets_path", str(tmp_path / "large"), "--training.steps", "1")
    assert result.returncode != 0
    assert (
        "holds a tokenizer of 3000 tokens, but qwen3 debugmodel_moe_small embeds 2048" in result.stdout + result.stderr
    )


STOCK = """
import os, sys
from titan_megamoe.integration import compat
compat.install()  # all that stock TorchTitan needs to run on a CPU
import torchtitan.train
torchtitan.train.main()
# It trained, which is what is tested. A thread of torch's may abort a process that takes the usual way out: seen once in four.
sys.stdout.flush(), sys.stderr.flush()
os._exit(0)
"""


def test_stock_torchtitan_runs_our_override(assets, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "corpus.jsonl").write_bytes((assets / "corpus.jsonl").read_bytes())
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    arguments = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--hf_assets_path", str(assets)]
    arguments += ["--dataloader.dataset_path", str(corpus), "--dump_folder", str(tmp_path)]
    arguments += ["--training.steps", "1", "--training.seq_len", "64", "--training.local_batch_size", "1"]
    arguments += ["--training.disable_cuda_graphs", "--parallelism.expert_parallel_degree", "2"]
    arguments += ["--parallelism.spmd_backend", "partial_dtensor"]
    ours = "titan_megamoe.integration.overrides"
    arguments += ["--override.imports", f'{ours}.mega_moe={{"precision": "bf16"}}', f"{ours}.selective_ac"]
    result = torchrun(2, str(script), *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(steps_of(result)) == [1]
    assert "Applied 9 override(s)" in result.stderr + result.stdout, "8 layers and selective checkpointing"


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="these backends need torch 2.14 (TORCH_VERSION=2.14.1 ./run_tests.sh)",
)
@pytest.mark.parametrize("compiled", [False, True])
def test_spmd_backends_train_alike(assets, tmp_path, compiled):
    settings = {"training.steps": 3, "training.local_batch_size": 2, "checkpoint.no-enable": True}
    if compiled:
        settings["compile.enable"] = True
    backends = ("partial_dtensor", "spmd_types") if compiled else ("partial_dtensor", "spmd_types", "full_dtensor")
    results = []
    for backend in backends:  # a launch each: they do not leave the device meshes as another one wants them
        run = options(assets, tmp_path, {**settings, "parallelism.spmd_backend": backend})
        results += run_jobs([run], ranks=2, folder=tmp_path)
    for result in results[1:]:
        assert result.losses == pytest.approx(results[0].losses, abs=1e-4)
