"""Divide the neurons of a dense FFN into shared neurons and experts, and fit a router to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """A partition and its training; the defaults are those of ``smollm2_moe``.

    The shared neurons and the experts are all neurons of an FFN.
    """

    shared: int = 384
    experts: int = 48
    width: int = 24  # neurons of an expert; a multiple of 8, as grouped_mm needs in bfloat16
    top_k: int = 12
    step: int = 2  # every ``step``-th layer has experts
    rank: int = 32  # of the updates of an FFN with experts
    other_rank: int = 8  # of the updates of attention and of the dense FFNs
    window: int = 256  # tokens
    fit_windows: int = 24  # windows of the fit in closed form
    batch: int = 4  # windows of a step
    rate: float = 0.001
    router_rate: float = 0.0001
    warmup: int = 10  # steps
    cross_entropy: float = 0.25  # weight of the loss on the text itself
    hidden: float = 1.0  # weight of the relative error of hidden states
    ema: float = 0.98  # of the trained weights; the averaged ones are shipped
    seed: int = 0


def neuron_order(down_DF: Tensor, act_TF: Tensor, recipe: Recipe, *, rounds: int = 6) -> Tensor:
    """Return the neurons in their new order: the shared ones, then expert after expert.

    ``down_DF`` is the down projection, and ``act_TF`` what it reads [tokens, neurons].

    Shared are the neurons that contribute most on average. The others are grouped by balanced
    k-means of their contributions |activation|·‖down‖. Neurons that fire together are in the same
    expert, and so are neurons that fire often: some experts have more tokens than others.
    """
    contribution_TF = act_TF.abs() * down_DF.norm(dim=0)
    by_mean_F = contribution_TF.mean(0).argsort(descending=True)
    shared_S, rest_R = by_mean_F[: recipe.shared], by_mean_F[recipe.shared :]
    points_RT = contribution_TF[:, rest_R].T.contiguous()
    generator = torch.Generator().manual_seed(recipe.seed)
    centres_ET = points_RT[torch.randperm(len(rest_R), generator=generator)[: recipe.experts]]
    for _ in range(rounds):
        # The squared distance without the part that every centre has in common.
        cost_RE = centres_ET.pow(2).sum(1) - 2 * points_RT @ centres_ET.T
        # Every expert has ``width`` places, so that an assignment of neurons to places is balanced.
        cost_RR = cost_RE.repeat_interleave(recipe.width, dim=1)
        _, places = linear_sum_assignment(cost_RR.numpy())
        expert_R = torch.from_numpy(places) // recipe.width
        centres_ET = torch.zeros_like(centres_ET).index_add_(0, expert_R, points_RT) / recipe.width
    return torch.cat([shared_S, rest_R[expert_R.argsort(stable=True)]])


def expert_contributions(down_DF: Tensor, act_TF: Tensor, recipe: Recipe) -> Tensor:
    """Return the norm of every expert's output [tokens, experts]; the neurons are in order."""
    act_TEW = act_TF[:, recipe.shared :].view(len(act_TF), recipe.experts, recipe.width)
    down_DEW = down_DF[:, recipe.shared :].view(-1, recipe.experts, recipe.width)
    return torch.stack(
        [
            (act_TEW[:, expert] @ down_DEW[:, expert].T).norm(dim=1)
            for expert in range(recipe.experts)
        ],
        dim=1,
    )


def fit_router(x_TD: Tensor, contribution_TE: Tensor, penalty: float = 1e-2) -> Tensor:
    """Return router rows [experts, hidden] whose logits predict the log contributions.

    This is ridge regression without intercept. The mean over the experts of a token is left out: a
    softmax does not depend on it.
    """
    target_TE = (contribution_TE + 1e-4).log()
    target_TE = target_TE - target_TE.mean(1, keepdim=True)
    gram_DD = x_TD.T @ x_TD
    gram_DD.diagonal().add_(penalty * gram_DD.diagonal().mean())
    solution_DE: Tensor = torch.linalg.solve(gram_DD, x_TD.T @ target_TE)
    return solution_DE.T.contiguous()


def routing_weights(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the weights [tokens, experts] of the top experts, of mean 1 over these; others 0."""
    top_TK, index_TK = logits_TE.topk(top_k, dim=-1)
    weight_TK = top_k * top_TK.float().softmax(-1).to(logits_TE.dtype)
    return torch.zeros_like(logits_TE).scatter(-1, index_TK, weight_TK)


def neuron_weights(weight_TE: Tensor, recipe: Recipe, shared_T: Tensor) -> Tensor:
    """Return the weight of every neuron [..., neurons], the shared ones first."""
    shared_TS = shared_T[..., None].expand(*shared_T.shape, recipe.shared)
    return torch.cat([shared_TS, weight_TE.repeat_interleave(recipe.width, dim=-1)], dim=-1)


def low_rank_down(
    act_TF: Tensor, residual_TD: Tensor, rank: int, penalty: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Return b [hidden, rank] and a [rank, neurons] such that act @ (b a).T predicts a residual.

    This is ridge regression of a limited rank: the full solution, projected on the directions in
    which its predictions are largest.
    """
    gram_FF = act_TF.T @ act_TF
    gram_FF.diagonal().add_(penalty * gram_FF.diagonal().mean())
    full_DF = torch.linalg.solve(gram_FF, act_TF.T @ residual_TD).T
    _, vectors_DD = torch.linalg.eigh(full_DF @ gram_FF @ full_DF.T)
    b_DR = vectors_DD[:, -rank:]
    return b_DR.contiguous(), (b_DR.T @ full_DF).contiguous()
