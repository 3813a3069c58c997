"""The layer written as its formula, with autograd: slow, dense, and independent of the code under test."""

from __future__ import annotations

import torch


def dense_moe(x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD) -> torch.Tensor:
    """Every token through every expert; the scores (zero for unrouted experts) pick and weigh."""
    gate = torch.einsum("td,efd->tef", x_TD, w1_EFD)
    up = torch.einsum("td,efd->tef", x_TD, w3_EFD)
    y = torch.einsum("tef,edf->ted", gate * torch.sigmoid(gate) * up, w2_EDF)
    routes = torch.nn.functional.one_hot(topk_ids_TK.long(), w1_EFD.shape[0]).to(x_TD.dtype)
    return torch.einsum("ted,tke,tk->td", y, routes, topk_scores_TK.to(x_TD.dtype))


def random_layer(tokens: int, dim: int, hidden: int, experts: int, top_k: int, dtype=torch.float64, seed: int = 0):
    """``x_TD, topk_ids_TK, topk_scores_TK, w1_EFD, w2_EDF, w3_EFD`` with distinct experts per token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    scores_TK = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    scores_TK = scores_TK.to(torch.float64 if dtype == torch.float64 else torch.float32)
    scale = dim**-0.5
    return (
        normal(tokens, dim),
        ids_TK,
        scores_TK,
        normal(experts, hidden, dim) * scale,
        normal(experts, dim, hidden) * hidden**-0.5,
        normal(experts, hidden, dim) * scale,
    )


def gradients(function, inputs, dout_TD):
    """Output and gradients of ``x, scores, w1, w2, w3`` (``inputs`` as :func:`random_layer` returns them)."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out_TD = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out_TD.detach(), *torch.autograd.grad(out_TD, wanted, dout_TD)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
