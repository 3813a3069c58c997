"""The TOML front end: 0.2's keys, 0.3.0's fields, our sections, the command line, and what it says when they are wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tomli

from tests.training import DEBUG_CONFIG, REPOSITORY
from titan_megamoe.config import document, legacy, loader, overlay
from titan_megamoe.config.errors import ConfigError
from titan_megamoe.config.printing import to_toml
from titan_megamoe.integration import datasets
from titan_megamoe.integration.trainer import default_config, resolve

SHIPPED = sorted((REPOSITORY / "train_configs").glob("*.toml"))

# Every section and key of 0.2's JobConfig, at values that make sense for Qwen3 MoE.
TITAN_02 = """
[job]
dump_folder = "./outputs_02"
description = "Qwen3 MoE"
print_config = false
[profiling]
enable_profiling = true
save_traces_folder = "traces"
profile_freq = 7
profiler_active = 2
profiler_warmup = 4
enable_memory_snapshot = false
save_memory_snapshot_folder = "snapshots"
[metrics]
log_freq = 3
enable_tensorboard = true
disable_color_printing = true
save_tb_folder = "tb2"
save_for_all_ranks = true
enable_wandb = false
[model]
name = "qwen3"
flavor = "30B-A3B"
hf_assets_path = "./assets/hf/Qwen3-30B-A3B"
print_after_conversion = false
converters = []
[optimizer]
name = "Adam"
lr = 1e-4
beta1 = 0.8
beta2 = 0.9
eps = 1e-6
weight_decay = 0
implementation = "foreach"
early_step_in_backward = false
[lr_scheduler]
warmup_steps = 11
total_steps = 50
decay_ratio = 0.5
decay_type = "cosine"
min_lr_factor = 0.1
[training]
dataset = "c4"
dataset_path = "/data/c4"
local_batch_size = 2
global_batch_size = 16
seq_len = 4096
max_norm = 1
steps = 99
enable_cpu_offload = true
dtype = "bfloat16"
mixed_precision_param = "float32"
mixed_precision_reduce = "float32"
gc_freq = 5
gc_debug = true
[training.dataloader]
num_workers = 2
persistent_workers = true
pin_memory = true
prefetch_factor = 3
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 2
disable_loss_parallel = false
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
module_fqns_per_model_part = [["tok_embeddings"], ["layers.0"]]
pipeline_parallel_first_stage_less_layers = 2
pipeline_parallel_last_stage_less_layers = 3
pipeline_parallel_layers_per_stage = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_schedule_csv = "x.csv"
pipeline_parallel_microbatch_size = 1
pipeline_parallel_expert_parallel_overlap = true
context_parallel_degree = 1
context_parallel_load_balancer = "headtail"
context_parallel_rotate_method = "allgather"
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = "deepep"
[checkpoint]
enable = true
enable_ft_dataloader_checkpoints = true
folder = "ckpt"
interval = 77
initial_load_path = "/ckpt/step-10"
initial_load_model_only = false
initial_load_in_hf = false
initial_load_in_hf_quantized = false
last_save_model_only = false
last_save_in_hf = false
export_dtype = "bfloat16"
async_mode = "async"
keep_latest_k = 5
load_step = 10
exclude_from_loading = ["dataloader"]
enable_first_step_checkpoint = true
create_seed_checkpoint = false
load_only = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
per_op_sac_force_recompute_mm_shapes_by_fqns = ["moe.router.gate"]
early_stop = false
memory_budget = 0.5
visualize_memory_budget_pareto = false
preserve_rng_state = false
determinism_check = "none"
debug = true
[compile]
enable = false
components = ["model"]
backend = "inductor"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
recipe_name = "rowwise"
filter_fqns = ["output", "router.gate"]
emulate = true
[quantize.grouped_mm.float8]
fqns = ["experts"]
[quantize.linear.mx]
mxfp8_dim1_cast_kernel_choice = "cuda"
recipe_name = "mxfp8_cublas"
filter_fqns = ["output"]
[quantize.grouped_mm.mx]
recipe_name = "mxfp8"
fqns = ["experts"]
[comm]
init_timeout_seconds = 400
train_timeout_seconds = 200
trace_buf_size = 10
save_traces_folder = "comm"
save_traces_file_prefix = "r_"
mode = "default"
[memory_estimation]
enable = false
disable_fake_mode = false
[fault_tolerance]
enable = false
process_group = "gloo"
process_group_timeout_ms = 10000
replica_id = 0
group_size = 0
min_replica_size = 1
[experimental]
custom_import = ""
custom_args_module = ""
[validation]
enable = true
dataset = "c4_validation"
dataset_path = "/data/val"
local_batch_size = 2
seq_len = 4096
freq = 5
steps = 6
[validation.dataloader]
num_workers = 1
[debug]
seed = 3
deterministic = true
deterministic_warn_only = true
moe_force_load_balance = true
"""


@pytest.fixture
def parse(tmp_path):
    """Load TOML text and command-line options, without checking this machine."""

    def parse(text: str, *options: str):
        file = tmp_path / "config.toml"
        file.write_text(text)
        file, _, known, rest = loader._split_arguments(["--config", str(file), *options])
        config = loader._apply_tyro(loader._apply(file, known), rest)
        resolve(config)
        return config

    return parse


def test_every_key_of_titan_02_arrives(parse):
    config = parse(TITAN_02)
    assert config.dump_folder == "./outputs_02"
    assert config.hf_assets_path == "./assets/hf/Qwen3-30B-A3B"
    assert (config.profiler.profile_freq, config.profiler.profiler_warmup) == (7, 4)
    assert config.profiler.save_traces_folder == "traces" and config.profiler.enable_profiling
    assert config.metrics.enable_tensorboard and config.metrics.save_tb_folder == "tb2"
    (group,) = config.optimizer.param_groups
    assert group.optimizer_name == "Adam" and config.optimizer.implementation == "foreach"
    assert group.optimizer_kwargs == {"lr": 1e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}
    assert (config.lr_scheduler.total_steps, config.lr_scheduler.decay_type) == (50, "cosine")
    assert (config.dataloader.dataset, config.dataloader.dataset_path) == ("c4", "/data/c4")
    assert (config.dataloader.num_workers, config.dataloader.prefetch_factor) == (2, 3)
    assert (config.training.steps, config.training.seq_len, config.training.dtype) == (99, 4096, "bfloat16")
    assert config.training.enable_cpu_offload and config.training.gc_debug
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.parallelism.module_fqns_per_model_part == [["tok_embeddings"], ["layers.0"]]
    assert config.parallelism.expert_parallel_degree == 8
    assert config.model.moe.dispatch.type == "deepep"
    assert config.checkpoint.folder == "ckpt" and config.checkpoint.exclude_from_loading == ["dataloader"]
    assert config.checkpoint.async_mode == "async" and config.checkpoint.export_dtype == "bfloat16"
    assert config.activation_checkpoint.force_recompute_mm_shapes_by_fqns == ["moe.router.gate"]
    assert config.activation_checkpoint.determinism_check == "none" and config.activation_checkpoint.debug
    assert config.compile.components == ["model"]
    assert config.quantize.linear.float8.filter_fqns == ["lm_head", "router.gate"]
    assert config.quantize.linear.float8.emulate
    assert config.comm.init_timeout_seconds == 400
    assert config.validator.enable and (config.validator.freq, config.validator.steps) == (5, 6)
    assert config.validator.dataloader.dataset_path == "/data/val" and config.validator.dataloader.num_workers == 1
    assert config.debug.seed == 3 and config.debug.deterministic and config.debug.moe_force_load_balance
    dispatcher = config.model_spec.model.layers[0].moe.routed_experts.token_dispatcher
    assert type(dispatcher).__qualname__ == "DeepEPTokenDispatcher.Config"


def test_the_titan_02_sample_covers_the_tables():
    """The file above uses every key that the legacy tables know, except those of older 0.2 releases and the command line."""
    keys = set(overlay.flatten(tomli.loads(TITAN_02)))
    renamed_by_older = {key for key in legacy.RENAMED_KEYS if key.startswith("training.") and "dataset" not in key}
    elsewhere = {
        "job.config_file",
        "job.custom_config_module",
        "job.save_config_file",
        "model.tokenizer_path",
        "parallelism.enable_compiled_autograd",
        "fault_tolerance.semi_sync_method",
    }
    assert (legacy.RENAMED_KEYS.keys() | legacy.REMOVED_KEYS.keys()) - keys == renamed_by_older | elsewhere


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_printed_configuration_reads_back_the_same(parse, path):
    printed = to_toml(parse(path.read_text()))
    assert to_toml(parse(printed)) == printed


@pytest.mark.parametrize("mode", loader.CHECKPOINTING_MODES)
def test_every_checkpointing_mode_prints_and_reads_back(parse, mode):
    text = f'[activation_checkpoint]\nmode = "{mode}"\n[compile]\nenable = true\n'
    printed = to_toml(parse(text))
    assert f'[activation_checkpoint]\nmode = "{mode}"' in printed
    assert to_toml(parse(printed)) == printed


def test_every_field_of_titan_030_can_be_set_under_its_own_name(parse):
    """What prints, and it prints everything, is accepted; see that nothing is missing from what prints."""
    config = parse("")
    printed = overlay.flatten(tomli.loads(to_toml(config)))
    unset = {line.split()[1] for line in to_toml(config).splitlines() if line.startswith("# ")}
    for path, value in overlay.leaf_paths(config).items():
        assert path in printed or (value is None and path.split(".")[-1] in unset) or value == {}, path


def test_command_line_wins_over_the_file_in_both_spellings(parse):
    config = parse(
        TITAN_02,
        *(
            "--training.steps",
            "5",
            "--optimizer.lr",
            "0.5",
            "--training.dataset=c4_test",
            "--job.dump_folder",
            "elsewhere",
        ),
        *(
            "--activation_checkpoint.mode",
            "full",
            "--model.moe.dispatch.type",
            "all_to_all",
            "--profiling.profile_freq",
            "9",
        ),
    )
    assert config.training.steps == 5 and config.dump_folder == "elsewhere" and config.dataloader.dataset == "c4_test"
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.5
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert config.model.moe.dispatch.type == "all_to_all" and config.profiler.profile_freq == 9


def test_layers_are_truncated(parse):
    config = parse('[model]\nflavor = "30B-A3B"\nn_layers = 6\n')
    assert len(config.model_spec.model.layers) == 6
    assert config.model_spec.model.dim == 2048


def test_overrides_in_toml(parse):
    config = parse('[override]\nimports = ["a.b.f", ["a.b.g", {x = 1}]]\n')
    assert config.override.imports == ["a.b.f", ("a.b.g", {"x": 1})]


def test_parameter_groups_in_toml(parse):
    groups = '{pattern = "norm", optimizer_name = "AdamW", optimizer_kwargs = {lr = 1.0}}'
    config = parse(f"[optimizer]\nparam_groups = [{groups}]\n")
    assert config.optimizer.param_groups[0].optimizer_kwargs == {"lr": 1.0}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[training]\nstpes = 3", r"config.toml: unknown key 'training.stpes'; did you mean 'training.steps'\?"),
        ("[trainig]\nsteps = 3", r"unknown key 'trainig.steps'; did you mean 'training.steps'\?"),
        ("[debug]\nseq_len = 3", r"unknown key 'debug.seq_len'; did you mean 'training.seq_len'\?"),
        ('[training]\nsteps = "3"', "'training.steps': expected an integer, got a string '3'"),
        ("[training]\nsteps = 3.5", "'training.steps': expected an integer, got a number 3.5"),
        ("[training]\nsteps = true", "'training.steps': expected an integer, got true or false True"),
        ("[compile]\nenable = 1", "'compile.enable': expected true or false, got an integer 1"),
        ("[compile]\ncomponents = [1]", r"'compile.components'\[0\]: expected a string"),
        ("training = 3", "'training' is a section, not a value"),
        (
            '[model.moe.dispatch]\ntype = "megamoe"',
            "'model.moe.dispatch.type': .*'all_to_all'.* got 'megamoe'; did you mean 'mega_moe'",
        ),
        ('[model.moe.dispatch]\nprecision = "fp16"', "'model.moe.dispatch.precision': .*'bf16'.* got 'fp16'"),
        ('[model]\nflavor = "31B-A3B"', r"model.flavor = '31B-A3B' is not one of qwen3's: .*30B-A3B"),
        ('[model]\nname = "qwen4"', "model.name = 'qwen4' is not one of TorchTitan's: .*qwen3"),
        ("[model]\nn_layers = 9", "n_layers = 9, but qwen3 debugmodel_moe has 8 layers"),
        ('[model]\nconverters = ["float9"]', "'float9' is not one of quantize.linear.float8"),
        ("[parallelism]\nexpert_parallel_degree = 3", "expert_parallel_degree = 3 does not divide the 64 experts"),
        ("[parallelism]\nexpert_parallel_degree = 0", "expert_parallel_degree = 0 must be at least 1"),
        ('[model]\nflavor = "0.6B"\n[parallelism]\nexpert_parallel_degree = 2', "qwen3 0.6B has no experts"),
        ('[activation_checkpoint]\nmode = "some"', "'activation_checkpoint.mode': expected one of selective, full"),
        ("[activation_checkpoint]\nfoo = 1", "activation_checkpoint.*unknown key 'foo'"),
        (
            '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"',
            "selective_ac_option = '2'' has no equivalent",
        ),
        ("[parallelism]\nexpert_tensor_parallel_degree = 2", "has no equivalent in TorchTitan 0.3.0: .* use 1"),
        ('[experimental]\ncustom_import = "x.y"', "use override.imports"),
        ("[fault_tolerance]\nenable = true", "torchft"),
        ("[validation]\nseq_len = 77", "validates with training.seq_len"),
        (
            '[parallelism]\nexpert_parallel_comm_backend = "mpi"',
            "expected one of standard, deepep, hybridep, got 'mpi'",
        ),
        ('[optimizer]\nlr = "high"', "'optimizer.lr': expected a number, got 'high'"),
        ("[optimizer]\nlr = 1.0\nparam_groups = []", "'optimizer.param_groups' and 'optimizer.lr' are both set"),
        ('[optimizer]\nparam_groups = [{pattern = "x"}]', "param_groups.*optimizer_name"),
        ('[optimizer]\nparam_groups = [{patern = "x"}]', "unknown key 'patern'; did you mean 'pattern'"),
        ('[training]\ndataset = "c4"\n[dataloader]\ndataset = "c4_test"', "contradicts .* they are one setting"),
        (
            "[parallelism]\npipeline_parallel_microbatch_size = 0",
            "pipeline_parallel_microbatch_size must be greater than 0",
        ),
        ("[checkpoint]\nkeep_latest_k = 1", r"\[checkpoint\]: We need to maintain at least 2 checkpoint"),
        ('[quantize.linear.float8]\nrecipe_name = "tensorwise"', "recipe_name': expected one of 'rowwise'"),
        (
            '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\nfilter_fqns = ["feed_forward.w1"]',
            "filter_fqns: 'feed_forward.w1' matches no linear layer of qwen3 debugmodel_moe. Its layers are called: .*wqkv",
        ),
    ],
)
def test_mistakes_are_named(parse, text, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        parse(text)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--config FILE.toml is missing"),
        (["--config"], "--config needs a file name"),
        (["--config", "qwen3_moe_debug"], r"expected a .toml file"),
        (["--config", "no/such.toml"], "no/such.toml: cannot be read: No such file"),
    ],
)
def test_missing_files_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        loader.load(arguments)


@pytest.mark.parametrize(
    "content, message",
    [(b"[training\nsteps = 1", "is not valid TOML: .*line 1"), (b"\xff\xfe", "is not UTF-8")],
)
def test_unreadable_toml_is_named(tmp_path, content, message):
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"broken.toml: {message}"):
        loader.load(["--config", str(file)])


@pytest.fixture
def load(assets, monkeypatch):
    """Load the debug configuration for this machine and ``world_size`` ranks."""
    datasets.register()

    def load(*options: str, world_size: int = 2):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        paths = ["--hf_assets_path", str(assets), "--dataloader.dataset_path", str(assets)]
        return loader.load(["--config", DEBUG_CONFIG, *paths, *options])

    return load


def test_the_debug_configuration_loads(load):
    config = load()
    assert config.model.moe.dispatch.type == "mega_moe"
    assert config.parallelism.expert_parallel_degree == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--model.moe.dispatch.type", "deepep"], "'deepep' cannot run here: it runs on NVIDIA GPUs only"),
        (["--model.moe.dispatch.type", "hybridep"], "'hybridep' cannot run here: it runs on NVIDIA GPUs only"),
        (["--model.moe.dispatch.type", "minimal_async_ep", "--activation_checkpoint.mode", "full"], "NVIDIA GPUs only"),
        (
            ["--model.moe.dispatch.type", "deepep", "--parallelism.expert_parallel_degree", "1"],
            "'deepep' needs expert parallelism, but parallelism.expert_parallel_degree = 1",
        ),
        (
            ["--model.moe.dispatch.precision", "fp8"],
            "'mega_moe' cannot run here: for precision = 'fp8', it needs an NVIDIA GPU .* backend = 'reference'",
        ),
        (
            ["--model.moe.dispatch.type", "all_to_all", "--model.moe.dispatch.precision", "fp8"],
            "precision = 'fp8' belongs to type 'mega_moe'",
        ),
        (["--training.no-disable_cuda_graphs", "--parallelism.expert_parallel_degree", "1"], "CUDA graph"),
        (["--parallelism.expert_parallel_degree", "4"], "4 does not divide the 2 ranks of this run"),
        (["--hf_assets_path", "/nowhere"], "hf_assets_path = '/nowhere' holds no tokenizer .*titan_megamoe.data"),
        (["--dataloader.dataset_path", "/nowhere"], "needs /nowhere/corpus.jsonl, which does not exist"),
        (["--dataloader.dataset", "c4_test", "--dataloader.dataset_path", "/nowhere"], "read from '/nowhere'"),
        (["--dataloader.dataset", "c5"], "dataloader.dataset = 'c5' is not one of"),
    ],
)
def test_what_cannot_run_here_is_refused_before_training(load, options, message):
    import torch

    if torch.cuda.is_available() and "NVIDIA GPUs only" in message:
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=message):
        load(*options)


def test_train_prints_one_paragraph_and_exits_2(tmp_path):
    command = [sys.executable, "-m", "titan_megamoe.train", "--config", DEBUG_CONFIG, "--optimizer.lr", "high"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2
    assert "titan_megamoe: command line: 'optimizer.lr': expected a number, got 'high'" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_and_print_config_need_no_ranks():
    for options, expected in ((["--help"], "--model.moe.dispatch.type"), (["--print_config"], 'type = "mega_moe"')):
        path = [] if options == ["--help"] else ["--config", "train_configs/qwen3_235b_a22b.toml"]
        command = [sys.executable, "-m", "titan_megamoe.train", *path, *options]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout


def test_configuration_reference_is_current():
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == document.render(), (
        "run `python -m titan_megamoe.config.document > docs/configuration.md`"
    )


def test_readme_has_the_table_of_strategies():
    assert document.strategies_table() in (REPOSITORY / "README.md").read_text(), (
        "paste what `document.strategies_table()` returns into README.md"
    )


def test_every_field_of_ours_is_documented():
    config = default_config()
    for section in (config.model, config.model.moe, config.model.moe.dispatch, config.quantize.linear.float8):
        texts = document._field_texts(type(section))
        leaves = [name for name in overlay.field_types(section) if name not in ("moe", "dispatch")]
        assert all(texts.get(name) for name in leaves), type(section)
