"""The shims that TorchTitan needs on a CPU and on older torch."""

from __future__ import annotations

import logging
import subprocess
import sys
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

from titan_megamoe.integration import compat

APPLIED = compat.install()

from torchtitan.components.metrics import DeviceMemoryMonitor  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, fsdp  # noqa: E402
from torchtitan.distributed import compile as compilation  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    create_attention_mask,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

from .distributed import run_ranks  # noqa: E402

cpu_only = pytest.mark.skipif(
    utils.device_type != "cpu", reason=f"TorchTitan uses {utils.device_type} here: the CPU's shims are not applied"
)


def set_torch(monkeypatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)


# ---- install()


def test_install_again_changes_nothing():
    before = dist.all_to_all, fsdp.fully_shard, FlexAttention.compiled_flex_attn, utils.device_module
    compat.install().clear()  # a copy
    assert compat.install() == APPLIED
    assert (dist.all_to_all, fsdp.fully_shard, FlexAttention.compiled_flex_attn, utils.device_module) == before


def test_install_after_torchtitan_is_an_error(monkeypatch):
    monkeypatch.setattr(compat, "_applied", None)
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", ModuleType("torchtitan.trainer"))
    with pytest.raises(RuntimeError, match=r"install\(\) must be called before TorchTitan is imported"):
        compat.install()


def test_only_modules_that_copy_what_the_shims_replace_come_too_early():
    early = ["torchtitan.trainer", "torchtitan.distributed", "torchtitan.models.qwen3", "torchtitan.config"]
    assert all(compat._may_hold_copies(name) for name in early)
    harmless = ["torchtitan", "torchtitan.tools.utils", "torchtitan.tools.logging", "torchtitan.observability", "torch"]
    assert not any(compat._may_hold_copies(name) for name in harmless)


@pytest.mark.parametrize(
    ("version", "shims"),
    [
        ("2.11.0", {"shard_norm_and_lm_head_apart", "shard_routed_experts_apart", "compile_around_expert_units"}),
        ("2.12.1", {"shard_norm_and_lm_head_apart"}),
        ("2.13.0+cpu", set()),
        ("2.14.1+cu130", set()),
    ],
)
def test_which_torch_needs_which_fsdp_shims(monkeypatch, version, shims):
    restore_afterwards(monkeypatch)
    set_torch(monkeypatch, version)
    by_version = ("shard_norm_and_lm_head_apart", "shard_routed_experts_apart", "compile_around_expert_units")
    assert {name for name in by_version if getattr(compat, name)()} == shims


def restore_afterwards(monkeypatch) -> None:
    """Undo, after the test, what the shims for FSDP and compile replace in TorchTitan."""
    for module, name in ((fsdp, "fully_shard"), (fsdp, "apply_fsdp_to_decoder"), (compilation, "apply_compile")):
        monkeypatch.setattr(module, name, getattr(module, name))


# ---- versions


@pytest.mark.parametrize(
    ("version", "warned"), [("2.10.1", True), ("2.11.0+cu130", False), ("2.14.1", False), ("2.15.0", True)]
)
def test_an_untested_torch_is_warned_of_once(monkeypatch, caplog, version, warned):
    set_torch(monkeypatch, version)
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "0.3.0")
    compat.check_versions.cache_clear()
    with caplog.at_level(logging.WARNING):
        compat.check_versions()
        compat.check_versions()
    messages = [record.getMessage() for record in caplog.records if record.name == compat.__name__]
    assert len(messages) == warned
    assert all(version in message and "2.11 to 2.14" in message for message in messages)


def test_an_untested_torchtitan_is_warned_of(monkeypatch, caplog):
    set_torch(monkeypatch, "2.13.0")
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "0.4.0")
    compat.check_versions.cache_clear()
    with caplog.at_level(logging.WARNING):
        compat.check_versions()
    assert "TorchTitan 0.4.0 is untested" in caplog.text and "0.3.0" in caplog.text


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu"])
@pytest.mark.parametrize("backend", ["spmd_types", "full_dtensor"])
def test_a_backend_that_this_torch_cannot_run_is_refused(monkeypatch, version, backend):
    set_torch(monkeypatch, version)
    with pytest.raises(ValueError) as error:
        compat.check_spmd_backend(backend)
    message = str(error.value)
    assert message.startswith(
        f"parallelism.spmd_backend = '{backend}' needs torch 2.14, but torch {version} is installed: "
    )
    assert "Use spmd_backend = 'partial_dtensor'" in message and "\n" not in message


@pytest.mark.parametrize(
    ("version", "backend"),
    [(version, "partial_dtensor") for version in ("2.11.0", "2.13.0", "2.14.1", "2.15.0")]
    + [(version, backend) for version in ("2.14.0", "2.15.0") for backend in ("spmd_types", "full_dtensor")],
)
def test_a_backend_that_this_torch_can_run_is_accepted(monkeypatch, version, backend):
    set_torch(monkeypatch, version)
    compat.check_spmd_backend(backend)


@pytest.mark.parametrize(
    ("version", "backend"),
    [("2.11.0", "partial_dtensor"), ("2.13.0+cpu", "partial_dtensor"), ("2.14.1+cu130", "spmd_types")],
)
def test_the_default_backend_is_one_that_runs(monkeypatch, version, backend):
    set_torch(monkeypatch, version)
    assert compat.default_spmd_backend() == backend
    compat.check_spmd_backend(compat.default_spmd_backend())


# ---- what older torch lacks, by taking it away


def test_set_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "set_timeout", None, raising=False)
    monkeypatch.delattr(dist, "set_timeout")
    assert compat.add_set_timeout() and not compat.add_set_timeout()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for group in (None, dist.new_group([0])):
            dist.set_timeout(timedelta(seconds=77), group)
            backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_is_non_strict_tracing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_non_strict_tracing", None, raising=False)
    monkeypatch.delattr(torch.compiler, "_is_non_strict_tracing")
    assert compat.add_is_non_strict_tracing() and not compat.add_is_non_strict_tracing()
    assert torch.compiler._is_non_strict_tracing() is False


def test_data_parallel_mesh_dims(monkeypatch):
    monkeypatch.setattr(torch.distributed.fsdp, "DataParallelMeshDims", None, raising=False)
    monkeypatch.delattr(torch.distributed.fsdp, "DataParallelMeshDims")
    assert compat.add_data_parallel_mesh_dims() and not compat.add_data_parallel_mesh_dims()
    assert torch.distributed.fsdp.DataParallelMeshDims(shard="fsdp").replicate is None


def test_separate_full_blocks(monkeypatch):
    original = flex_attention.create_block_mask

    def without_the_argument(mask_mod, B, H, Q_LEN, KV_LEN, device):
        return original(mask_mod, B, H, Q_LEN, KV_LEN, device=device)

    monkeypatch.setattr(flex_attention, "create_block_mask", without_the_argument)
    assert compat.add_separate_full_blocks()
    arguments = (get_causal_mask_mod(), 1, None, 256, 256)
    mask = flex_attention.create_block_mask(*arguments, device="cpu", separate_full_blocks=True)
    assert torch.equal(mask.to_dense(), original(*arguments, device="cpu").to_dense())
    with pytest.raises(NotImplementedError, match="batch-invariant mode needs torch 2.13"):
        flex_attention.create_block_mask(*arguments, device="cpu", separate_full_blocks=False)


class GraphBreak(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


@pytest.mark.parametrize("ep_enabled", [True, False])
def test_blocks_may_break_their_graphs_only_where_experts_are_fsdp_units(monkeypatch, ep_enabled):
    restore_afterwards(monkeypatch)
    set_torch(monkeypatch, "2.11.0")
    compat.compile_around_expert_units()
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": GraphBreak()})
    torch._dynamo.reset()
    compilation.apply_compile(
        model,
        compile_config=CompileConfig(enable=True, backend="aot_eager"),
        parallel_dims=SimpleNamespace(ep_enabled=ep_enabled, tp_enabled=False),
    )
    if ep_enabled:
        assert torch.equal(model.layers["0"](torch.zeros(2)), torch.ones(2))
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model.layers["0"](torch.zeros(2))


def test_modules_that_share_parameters_stay_one_unit(monkeypatch, caplog):
    restore_afterwards(monkeypatch)
    set_torch(monkeypatch, "2.12.1")
    calls = []
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **settings: calls.append(module) or module)
    compat.shard_norm_and_lm_head_apart()

    norm, lm_head, embeddings = nn.LayerNorm(2), nn.Linear(2, 3, bias=False), nn.Embedding(3, 2)
    assert fsdp.fully_shard([norm, lm_head]) == [norm, lm_head] and calls == [norm, lm_head]
    assert not caplog.records
    calls.clear()
    embeddings.weight = lm_head.weight
    tied = [embeddings, norm, lm_head]
    assert fsdp.fully_shard(tied) is tied and calls == [tied]
    assert "ties lm_head to the embeddings" in caplog.text and "torch 2.12.1" in caplog.text


# ---- the CPU as TorchTitan's device


@cpu_only
def test_the_cpu_is_the_device():
    assert utils.device_type == "cpu" and utils.get_local_device() == torch.device("cpu")
    utils.device_module.set_device(utils.get_local_device())
    utils.device_module.synchronize()
    assert utils.device_module.device_count() == 1 and utils.device_module.current_device() == 0


@cpu_only
def test_the_memory_monitor_reads_this_process():
    monitor = DeviceMemoryMonitor("cpu")
    assert monitor.device_name and monitor.device_name != "cpu"
    before = monitor.get_peak_stats()
    ballast = torch.ones(256 << 20, dtype=torch.uint8)
    after = monitor.get_peak_stats()
    assert 0 < before.max_reserved_gib <= after.max_reserved_gib <= monitor.device_capacity_gib
    assert after.max_active_gib * 2**30 > ballast.numel()
    assert after.num_ooms == after.num_alloc_retries == 0


TRITON_HIDDEN = """
import importlib.machinery, importlib.util, sys

class NoTriton(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = NoTriton

from titan_megamoe.integration import compat
assert "stub_minimal_async_ep_kernels" in compat.install()
import torchtitan.models.qwen3
from torchtitan.distributed.minimal_async_ep import kernels
from torch.utils._triton import has_triton, has_triton_package
assert not has_triton() and not has_triton_package()
assert importlib.util.find_spec("triton") is None and "triton" not in sys.modules
kernels.copy_rows_to_peers_kernel()
"""


def test_moe_models_import_without_triton():
    ran = subprocess.run([sys.executable, "-c", TRITON_HIDDEN], capture_output=True, text=True)
    assert ran.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: MinimalAsyncEP's copy_rows_to_peers_kernel is written in triton, which is not installed."
    )


# ---- attention on the CPU

B, L, H = 2, 96, 16


def document_positions() -> torch.Tensor:
    """Two rows of packed documents: positions restart at 0 with each."""
    lengths = ([40, 1, 55], [96])
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def attend_naively(q_BLNH, k_BLNH, v_BLNH, positions_BL, scale) -> torch.Tensor:
    """Causal attention within documents in float64, one query at a time."""
    documents_BL = (positions_BL == 0).cumsum(1)
    n_heads, n_kv_heads = q_BLNH.shape[2], k_BLNH.shape[2]
    rows = []
    for b in range(q_BLNH.shape[0]):
        for i in range(q_BLNH.shape[1]):
            seen = [j for j in range(i + 1) if documents_BL[b, j] == documents_BL[b, i]]
            for n in range(n_heads):
                kv = n * n_kv_heads // n_heads
                weights = (k_BLNH[b, seen, kv].double() @ q_BLNH[b, i, n].double() * scale).softmax(0)
                rows.append(weights @ v_BLNH[b, seen, kv].double())
    return torch.stack(rows).view(*q_BLNH.shape[:3], -1)


def qkv(n_heads: int, n_kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, L, n, H) for n in (n_heads, n_kv_heads, n_kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return list(torch.autograd.grad((out.double() * weight).sum(), inputs))


def document_mask(positions_BL: torch.Tensor) -> flex_attention.BlockMask:
    mask_mod = flex_attention.and_masks(get_causal_mask_mod(), get_document_mask_mod(positions_BL))
    return create_attention_mask(mask_mod, B, None, L, L, device="cpu", separate_full_blocks=True)


@cpu_only
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_masked_attention(documents, n_kv_heads, dtype, tolerance):
    positions = document_positions() if documents else torch.arange(L).expand(B, L)
    inputs, scale = qkv(4, n_kv_heads, dtype), 0.3
    attention = FlexAttention.Config().build()
    out = attention(*inputs, attention_masks=document_mask(positions), scale=scale, enable_gqa=n_kv_heads < 4)
    expected = attend_naively(*inputs, positions, scale)
    assert out.dtype == dtype
    actual, reference = [out, *gradients(out, inputs)], [expected, *gradients(expected, inputs)]
    for a, r in zip(actual, reference, strict=True):
        assert (a.double() - r.double()).norm() <= tolerance * r.double().norm()


@cpu_only
def test_attention_compiles_into_a_full_graph():
    attention, mask, inputs = (
        FlexAttention.Config().build(),
        document_mask(document_positions()),
        qkv(4, 2, torch.float32),
    )
    attend = partial(attention, attention_masks=mask, enable_gqa=True)
    operators = set()

    def note_operators(graph_module, example_inputs):
        operators.update(node.target for node in graph_module.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(fw_compiler=note_operators, bw_compiler=note_operators)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)(*inputs)
    eager = attend(*inputs)
    torch.testing.assert_close(compiled, eager)
    for gradient, reference in zip(gradients(compiled, inputs), gradients(eager, inputs), strict=True):
        torch.testing.assert_close(gradient, reference)
    random = {op for op in operators if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())}
    assert not random or compat._torch_version() >= (2, 14)


@cpu_only
def test_attention_refuses_what_it_would_ignore():
    attention, mask, inputs = (
        FlexAttention.Config().build(),
        document_mask(document_positions()),
        qkv(4, 4, torch.float32),
    )
    with pytest.raises(NotImplementedError):
        attention(*inputs, attention_masks=mask, score_mod=lambda score, b, h, q, k: score * 2)
    with pytest.raises(NotImplementedError):
        attention(*inputs, attention_masks=mask, out_transform=lambda out, lse: out)


# ---- two gloo ranks

SPLITS = {
    "even": [[2, 2], [2, 2]],
    "uneven": [[3, 1], [2, 5]],
    "some empty": [[0, 4], [1, 0]],
    "one sender": [[2, 3], [0, 0]],
    "nothing": [[0, 0], [0, 0]],
}
"""Rows that rank i sends to rank j."""


def exchanged_rows(sender: int, receiver: int, count: int) -> torch.Tensor:
    first = 100 * sender + 10 * receiver
    return torch.arange(first, first + 3 * count).view(3, count).t()  # not contiguous


def exchange(rank: int, splits: list[list[int]]) -> list[torch.Tensor]:
    received = [torch.empty(splits[sender][rank], 3, dtype=torch.int64) for sender in range(2)]
    dist.all_to_all(received, [exchanged_rows(rank, receiver, splits[rank][receiver]) for receiver in range(2)])
    return received


def summed_gradient(rank: int) -> torch.Tensor:
    """Of a linear layer under FSDP, to which rank r feeds a row of r + 1."""
    layer = nn.Linear(4, 2, bias=False)
    fsdp.fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    fsdp.disable_fsdp_gradient_division(layer)
    layer(torch.full((1, 4), rank + 1.0)).sum().backward()
    return layer.weight.grad.full_tensor()


def train_one_step(rank: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """TorchTitan's Qwen3 MoE with EP = 2 and the chunked loss: the loss and all gradients; and the names of the FSDP units."""
    config = qwen3_moe_debug()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.seq_len = 32
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.expert_parallel_degree = 2
    parallel_dims = ParallelDims.from_config(config.parallelism, 2)
    dist_utils.set_spmd_backend("partial_dtensor")
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.parallelize(parallel_dims)
    fsdp.apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(["fsdp"]),
        torch.bfloat16,
        torch.float32,
        pp_enabled=False,
        ep_degree=2,
        edp_mesh=parallel_dims.get_mesh(["efsdp"]),
    )
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.init_weights()
    loss_fn = config.loss.build(compile_config=config.compile)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True

    torch.manual_seed(1 + rank)
    tokens, labels = torch.randint(0, 1000, (2, 1, 32))
    positions = torch.arange(32)[None]
    hidden = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    loss, _ = loss_fn(hidden, labels, torch.tensor(64))
    loss.backward()
    results = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    units = {name for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
    return results | {"loss": loss.detach()}, units


def run_rank(rank: int) -> dict:
    results = {
        "received": {name: exchange(rank, splits) for name, splits in SPLITS.items()},
        "summed gradient": summed_gradient(rank),
        "step": train_one_step(rank),
    }
    torch.__version__ = "2.11.0"  # newer FSDP can shard as 2.11 has to
    compat.shard_norm_and_lm_head_apart()
    compat.shard_routed_experts_apart()
    return results | {"step on 2.11": train_one_step(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(run_rank, 2)


@cpu_only
@pytest.mark.parametrize("name", SPLITS)
def test_lists_of_any_sizes_are_exchanged(ranks, name):
    for receiver, results in enumerate(ranks):
        expected = [exchanged_rows(sender, receiver, SPLITS[name][sender][receiver]) for sender in range(2)]
        assert all(torch.equal(actual, rows) for actual, rows in zip(results["received"][name], expected, strict=True))


@cpu_only
def test_gradients_are_summed_over_the_ranks(ranks):
    for results in ranks:
        assert torch.equal(results["summed gradient"], torch.full((2, 4), 3.0))


@cpu_only
def test_units_for_old_fsdp_train_the_same(ranks):
    for results in ranks:
        (step, _), (old_step, _) = results["step"], results["step on 2.11"]
        assert step.keys() == old_step.keys() and step["loss"] > 1
        for name in step:
            assert torch.equal(step[name], old_step[name]), name
            assert step[name].count_nonzero() > 0, name


@cpu_only
def test_units_for_old_fsdp_wrap_the_fused_experts(ranks):
    for results in ranks:
        _, units = results["step on 2.11"]
        assert {"norm", "lm_head", "layers.0.moe.routed_experts", "layers.1.moe.routed_experts"} <= units
        assert not any("inner_experts" in unit for unit in units)
