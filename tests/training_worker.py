"""One rank of several training runs in a row: ``torchrun tests/training_worker.py jobs.json results_folder``.

``jobs.json`` is ``{"runs": [command line, ...], "keep_gradients": bool, "fp32": bool, "one_gpu": bool}``. Each run goes through the real
configuration and trainer; its losses, gradient norms and first-step gradients are kept in full precision, which the log
lines are not.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from titan_megamoe.integration import compat

compat.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from titan_megamoe.bench import one_gpu  # noqa: E402
from titan_megamoe.config import loader  # noqa: E402
from titan_megamoe.integration import datasets  # noqa: E402


def train(argv: list[str], keep_gradients: bool) -> dict:
    """Losses and gradient norms by step; the first step's (clipped) gradients and this rank's token counts per layer; the
    load-balancing bias of each layer after the last step."""
    trainer = loader.load(argv).build()
    losses, grad_norms, gradients, tokens_per_expert = {}, {}, {}, []
    log, step = trainer.metrics_processor.log, trainer.optimizers.step

    def recording_log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs):
        losses[step], grad_norms[step] = global_avg_loss, grad_norm
        log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs)

    def recording_step(*args, **kwargs):
        if keep_gradients and not gradients:
            for part in trainer.model_parts:
                for name, parameter in part.named_parameters():
                    gradients[_canonical(name)] = _full(parameter.grad)
                # Now, because the load-balancing hook of the step resets them.
                tokens_per_expert.extend(_full(b) for name, b in part.named_buffers() if "tokens_per_expert" in name)
        return step(*args, **kwargs)

    trainer.metrics_processor.log, trainer.optimizers.step = recording_log, recording_step
    trainer.train()
    expert_bias = [
        _full(b) for part in trainer.model_parts for name, b in part.named_buffers() if "expert_bias" in name
    ]
    trainer.close()
    return {
        "losses": losses,
        "grad_norms": grad_norms,
        "gradients": gradients,
        "tokens_per_expert": tokens_per_expert,
        "expert_bias": expert_bias,
    }


def _canonical(name: str) -> str:
    """A parameter's name without the wrappers of checkpointing and compilation, as in a checkpoint."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


def compute_in_fp32() -> None:
    """Keep the experts' GEMMs, which both strategies convert to bf16, in the parameters' fp32.

    Strategies round to bf16 at different places, which hides small mistakes; in fp32 they must agree closely.
    """
    torch.Tensor.bfloat16 = lambda self: self


def init_process_group_once() -> None:
    """Let all runs share the default group: a second one would find the first one's addresses in torchrun's store."""
    init_process_group = dist.init_process_group

    def init_once(*args, **kwargs) -> None:
        if not dist.is_initialized():
            init_process_group(*args, **kwargs)

    dist.init_process_group = init_once


def main() -> None:
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if jobs["one_gpu"]:
        os.environ.update(one_gpu.environment(int(os.environ["RANK"])))
    init_logger()
    datasets.register()
    torch.set_num_threads(1)
    init_process_group_once()
    if jobs["fp32"]:
        compute_in_fp32()
    for index, argv in enumerate(jobs["runs"]):
        torch._dynamo.reset()
        try:
            result = train(argv, jobs["keep_gradients"])
        except Exception:
            result = {"error": traceback.format_exc()}
        if os.environ["RANK"] == "0":
            torch.save(result, folder / f"{index}.pt")
        if "error" in result:
            print(result["error"], file=sys.stderr)
            os._exit(1)  # the other ranks may be waiting in a collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
