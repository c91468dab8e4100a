"""How a family turns router logits into gate scores and combine weights.

A recipe is not believed because of a class name: it is chosen because it reproduces, on random
hidden states, the top-k and the weights that the router itself returns, and it is checked again in
every forward. A router that no recipe reproduces is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from capmoe_eval.routing import Scores

# Shape suffixes: T rows, E routed experts, K = top-k, S slots per row.

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class GateRecipe:
    """A family's way from logits to scores and weights.

    Attributes:
        activation: ``softmax`` over all experts, or ``sigmoid`` of each (DeepSeek-V3).
        normalises: Whether the weights are divided by their sum over the top-k.
        groups: How experts are limited to the best groups: not at all, by each group's ``max``
            (DeepSeek-V2), or by the sum of its ``top2`` (DeepSeek-V3).
        biased: Whether the choice, not the weights, uses ``e_score_correction_bias``.
    """

    activation: Literal["softmax", "sigmoid"] = "softmax"
    normalises: bool = False
    groups: Literal["none", "max", "top2"] = "none"
    biased: bool = False

    def scores(self, router: nn.Module, logits_TE: Tensor, topk_TK: Tensor) -> Scores:
        """Return the scores by which a capacity decides, for rows of logits of this router."""
        if self.activation == "softmax":
            score_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        else:
            score_TE = logits_TE.float().sigmoid()
        choice_TE = score_TE + _bias(router) if self.biased else None
        eligible_TE = None
        if self.groups != "none":
            eligible_TE = self._eligible(router, score_TE if choice_TE is None else choice_TE)
            score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
        return Scores(score_TE, topk_TK, choice_TE, eligible_TE)

    def _eligible(self, router: nn.Module, ranking_TE: Tensor) -> Tensor:
        n_groups, kept_groups = int(router.num_group), int(router.topk_group)  # type: ignore[arg-type]
        grouped = ranking_TE.view(len(ranking_TE), n_groups, -1)
        if self.groups == "max":
            worth = grouped.amax(dim=-1)
        else:
            worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = worth.topk(kept_groups, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return allowed.repeat_interleave(grouped.shape[-1], dim=1)

    def weights(
        self, router: nn.Module, scores: Scores, index_TS: Tensor, over_TS: Tensor | None = None
    ) -> Tensor:
        """Return combine weights in float32 [T, S].

        Args:
            router: The router, for its scaling factor.
            scores: The rows' scores.
            index_TS: Experts to weigh.
            over_TS: For a family that normalises: the slots whose scores form the denominator.
                None: the router's own top-k, as the dropless model has it.
        """
        weight_TS = scores.score_TE.gather(1, index_TS)
        if self.normalises:
            if over_TS is None:
                total_T1 = scores.score_TE.gather(1, scores.topk_TK).sum(dim=1, keepdim=True)
            else:
                total_T1 = (weight_TS * over_TS).sum(dim=1, keepdim=True)
            weight_TS = weight_TS / total_T1.clamp_min(1e-20)
        return weight_TS * scaling_factor(router)

    def deviation(
        self, router: nn.Module, scores: Scores, weight_TK: Tensor, topk_TK: Tensor
    ) -> Tensor:
        """Return by how much the recipe misses the router's own weights: a scalar, relative."""
        expected_TK = self.weights(router, scores, topk_TK)
        error_TK = (weight_TK.float() - expected_TK).abs()
        return (
            (error_TK / expected_TK.abs().clamp_min(1e-6)).amax()
            if len(topk_TK)
            else (torch.zeros((), device=topk_TK.device))
        )


def _bias(router: nn.Module) -> Tensor:
    bias: Tensor = router.e_score_correction_bias  # type: ignore[assignment]
    return bias


def scaling_factor(router: nn.Module) -> float:
    """Return what the family multiplies its weights by (DeepSeek's ``routed_scaling_factor``)."""
    return float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative deviation of weights that rounding to ``dtype`` explains."""
    return _TOLERANCE.get(dtype, 2e-2)


def find_recipe(
    router: nn.Module, logits_TE: Tensor, weight_TK: Tensor, topk_TK: Tensor
) -> GateRecipe | None:
    """Return the recipe that reproduces what a router returned, or None.

    Args:
        router: The router.
        logits_TE: Its logits for some rows.
        weight_TK: Its weights for them.
        topk_TK: Its choice for them.
    """
    for recipe in _recipes_for(router):
        scores = recipe.scores(router, logits_TE, topk_TK)
        if recipe.deviation(router, scores, weight_TK, topk_TK) > tolerance(weight_TK.dtype):
            continue
        if _chooses(scores, topk_TK):
            return recipe
    return None


def _recipes_for(router: nn.Module) -> list[GateRecipe]:
    biased = [True] if hasattr(router, "e_score_correction_bias") else [False]
    grouped = (getattr(router, "num_group", None) or 1) > 1
    groups: list[Literal["none", "max", "top2"]] = ["none", "max", "top2"] if grouped else ["none"]
    activations: list[Literal["softmax", "sigmoid"]] = ["softmax", "sigmoid"]
    return [
        GateRecipe(activation, normalises, group, bias)
        for activation, normalises, group, bias in itertools.product(
            activations, [False, True], groups, biased
        )
    ]


def _chooses(scores: Scores, topk_TK: Tensor) -> bool:
    """Return whether no expert outside the top-k ranks above one inside it."""
    ranking_TE = scores.ranking_TE
    if scores.eligible_TE is not None:
        ranking_TE = ranking_TE.masked_fill(~scores.eligible_TE, -torch.inf)
    worst_T = ranking_TE.gather(1, topk_TK).amin(dim=1)
    others_TE = ranking_TE.scatter(1, topk_TK, -torch.inf)
    slack = 1e-5 * ranking_TE.gather(1, topk_TK).abs().amax(dim=1)
    return bool((others_TE.amax(dim=1) <= worst_T + slack).all())
