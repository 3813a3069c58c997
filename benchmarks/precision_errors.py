"""Errors of the emulated precisions against fp64, for one layer on random data: runs on a CPU.

    python benchmarks/precision_errors.py --out docs/results/cpu_precision_errors.json

Relative errors (norm of the difference over the norm) of the output and of every gradient, on Gaussian tokens and weights and
uniformly random routing and scores. bf16 is the reference backend without quantisation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from titan_megamoe import mega_moe  # noqa: E402
from titan_megamoe.bench.environment import describe_environment  # noqa: E402

SHAPE = dict(tokens=512, dim=1024, hidden_dim=384, num_experts=8, top_k=2)
RESULTS = ("out", "x", "scores", "w1", "w2", "w3")
VARIANTS = {
    "bf16": dict(precision="bf16"),
    "fp8": dict(precision="fp8", wgrad="fp8"),
    "fp8, wgrad bf16": dict(precision="fp8", wgrad="bf16"),
    "fp8_bwd": dict(precision="fp8_bwd", wgrad="fp8"),
    "fp8_bwd, wgrad bf16": dict(precision="fp8_bwd", wgrad="bf16"),
    "mxfp8": dict(precision="mxfp8", wgrad="mxfp8"),
    "mxfp8, wgrad bf16": dict(precision="mxfp8", wgrad="bf16"),
}


def make_inputs(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """``x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD`` and ``dout_TD``."""
    generator = torch.Generator().manual_seed(seed)
    tokens, dim, hidden_dim, experts, top_k = SHAPE.values()

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).bfloat16()

    ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    scores_TK = torch.rand(tokens, top_k, generator=generator)
    weights = [
        normal(experts, *size, scale=size[1] ** -0.5)
        for size in ((hidden_dim, dim), (dim, hidden_dim), (hidden_dim, dim))
    ]
    return [normal(tokens, dim), ids_TK, scores_TK, *weights], normal(tokens, dim)


def compute(inputs: list[torch.Tensor], dout_TD: torch.Tensor, **options) -> list[torch.Tensor]:
    """The output and the gradients, in the order of RESULTS."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out_TD = mega_moe(*leaves, backend="reference", **options)
    return [out_TD.detach(), *torch.autograd.grad(out_TD, [t for t in leaves if t.requires_grad], dout_TD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    inputs, dout_TD = make_inputs(arguments.seed)
    exact = compute([t.double() if t.is_floating_point() else t for t in inputs], dout_TD.double())
    errors = {}
    for variant, options in VARIANTS.items():
        results = compute(inputs, dout_TD, **options)
        errors[variant] = {
            name: ((a.double() - b).norm() / b.norm()).item()
            for name, a, b in zip(RESULTS, results, exact, strict=True)
        }
        print(variant, {name: f"{error:.2e}" for name, error in errors[variant].items()}, flush=True)
    document = {
        "command": " ".join(["python", "benchmarks/precision_errors.py", *sys.argv[1:]]),
        "environment": describe_environment(),
        "shape": SHAPE,
        "relative_errors": errors,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
