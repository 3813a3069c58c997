"""Hostile input: arguments of the operator and TOML files, mutated at random. Either it works, or the error says what to change."""

from __future__ import annotations

import contextlib
import io
import string

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.oracle import dense_moe, random_layer, relative_error
from tests.training import DEBUG_CONFIG
from titan_megamoe import mega_moe
from titan_megamoe.config import loader
from titan_megamoe.config.errors import ConfigError

# ---- the operator

NAMES = ("x_TD", "topk_ids_TK", "topk_scores_TK", "w1_EFD", "w2_EDF", "w3_EFD")
OPTIONS = {
    "precision": st.sampled_from(["bf16", "fp8", "fp8_bwd", "mxfp8", "fp16", ""]),
    "wgrad": st.sampled_from(["bf16", "fp8", "mxfp8", "fp4"]),
    "saved": st.sampled_from(["activations", "inputs", "all"]),
    "backend": st.sampled_from(["reference", "auto", "hopper", "cuda"]),
    "allow_emulation": st.booleans(),
    "capacity": st.sampled_from([None, 1.5, 0.0, -1.0, float("nan")]),
}


@st.composite
def calls(draw):
    """Arguments that are right, then perhaps one that is not."""
    experts = draw(st.integers(1, 6))
    tokens, top_k = draw(st.integers(0, 9)), draw(st.integers(1, experts))
    dim, hidden = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    arguments = dict(zip(NAMES, random_layer(tokens, dim, hidden, experts, top_k, dtype=torch.float32)))
    options = draw(st.fixed_dictionaries({}, optional=OPTIONS))
    mutation = draw(st.sampled_from(["none", "none", "shape", "dtype", "id", "score", "flip", "slice"]))
    name = draw(st.sampled_from(NAMES))
    tensor = arguments[name]
    if mutation == "shape":
        arguments[name] = tensor.new_zeros(draw(st.lists(st.integers(0, 4), max_size=4)))
    elif mutation == "dtype":
        kinds = [torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.complex64]
        arguments[name] = tensor.to(draw(st.sampled_from(kinds)))
    elif mutation == "id" and tokens:
        arguments["topk_ids_TK"].view(-1)[0] = draw(st.sampled_from([-1, experts, 2**40]))
    elif mutation == "score" and tokens:
        arguments["topk_scores_TK"].view(-1)[-1] = draw(st.sampled_from([float("nan"), float("inf")]))
    elif mutation == "flip":  # another memory layout of the same values
        arguments[name] = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif mutation == "slice":
        arguments[name] = torch.cat([tensor, tensor])[: len(tensor)]
    return arguments, options


@settings(max_examples=300, deadline=None)
@given(calls())
def test_the_operator_computes_or_says_what_is_wrong(call):
    arguments, options = call
    try:
        out_TD = mega_moe(**arguments, **options)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("mega_moe: "), error
        assert len(str(error)) > 40, "it says what to do"
        return
    x_TD = arguments["x_TD"]
    assert out_TD.shape == x_TD.shape and out_TD.dtype == x_TD.dtype
    if x_TD.dtype == torch.float32 and options.get("precision", "bf16") == "bf16":
        assert relative_error(out_TD, dense_moe(*arguments.values())) < 1e-4


# ---- TOML

KEYS = (
    "model.flavor model.n_layers model.moe.force_load_balance model.moe.dispatch.type model.moe.dispatch.capacity "
    "model.moe.dispatch.precision model.moe.dispatch.weight_cache training.steps training.local_batch_size training.seq_len "
    "parallelism.expert_parallel_degree optimizer.lr optimizer.name activation_checkpoint.mode compile.enable checkpoint.interval "
    "metrics.log_freq lr_scheduler.warmup_steps dataloader.dataset"
).split()
words = st.text(string.ascii_letters + string.digits + "_.-/ ", max_size=8)
values = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([0.0, -1.5, 1e30, 2**70]),
    st.booleans(),
    words,
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(["mega_moe", "all_to_all", "fp8", "full", "none", "uniform", "AdamW"]),
)


def in_toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if not isinstance(value, str) else '"' + value + '"'


@st.composite
def files(draw) -> str:
    lines = ['dump_folder = "./outputs/fuzz"', 'model.name = "qwen3"', 'model.flavor = "debugmodel_moe_small"']
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)):
        if draw(st.integers(0, 9)) == 0:
            key += draw(st.sampled_from("xyz"))
        lines = [line for line in lines if not line.startswith(key + " ")]
        lines.append(f"{key} = {in_toml(draw(values))}")
    if draw(st.integers(0, 19)) == 0:
        lines.append(draw(words))
    return "\n".join(lines) + "\n"


@settings(max_examples=150, deadline=None)
@given(text=files())
def test_a_file_loads_or_the_error_names_what_is_wrong(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.toml"
    path.write_text(text)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            loader.load(["--config", str(path), "--print_config"])
    except ConfigError as error:
        assert len(str(error)) > 20
        return
    assert ended.value.code == 0, text
    again = path.with_name("again.toml")
    again.write_text(printed.getvalue())
    with contextlib.redirect_stdout(io.StringIO()) as printed_again, pytest.raises(SystemExit):
        loader.load(["--config", str(again), "--print_config"])
    assert printed_again.getvalue() == printed.getvalue(), "what is printed reads back the same"


def test_the_debug_file_is_where_it_should_be():
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        loader.load(["--config", DEBUG_CONFIG, "--print_config"])
    assert 'flavor = "debugmodel_moe_small"' in printed.getvalue()
