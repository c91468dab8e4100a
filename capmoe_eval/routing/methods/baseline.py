"""The methods of the paper without a capacity: the stock model, and Expert Drop (Table 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capmoe_eval.routing.method import Combining, Method
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E routed experts, K = top-k.


@register
class Baseline(Method):
    """The router's own choice, without a capacity: γ=∞."""

    name = "baseline"
    title = "Baseline"
    source = "the stock model"
    row = 0
    is_stock = True

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the router's own choice."""
        import torch

        from capmoe_eval.routing.decision import Assignment

        return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the router's own choice by the definition."""
        return tokens.chosen_TE


def disabled_experts(load_E: Tensor) -> Tensor:
    """Return a mask [E] of the max(1, floor(E/10)) experts with the lowest load.

    Of equal loads the lower index is disabled first.
    """
    place_E = load_E.argsort(stable=True).argsort()
    return place_E < max(1, len(load_E) // 10)


@register
class ExpertDrop(Combining):
    """A tenth of the experts, those with the lowest load over the whole batch, receive nothing."""

    name = "expert_drop"
    title = "Expert Drop"
    source = "paper, Table 2"
    row = 5

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the router's own choice without the pairs of disabled experts."""
        from capmoe_eval.routing.decision import Assignment, expert_load

        load_E = layer.total(expert_load(scores.topk_TK, scores.score_TE.shape[1]))
        return Assignment(scores.topk_TK, ~disabled_experts(load_E)[scores.topk_TK])

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs of the experts that are not disabled, by the definition."""
        kept_TE = tokens.chosen_TE
        by_load = kept_TE.sum(axis=0).argsort(kind="stable")
        kept_TE[:, by_load[: max(1, tokens.n_experts // 10)]] = False
        return kept_TE

    def wrongly_computed(self, demand_E: Tensor, kept_E: Tensor) -> Tensor:
        """Return how many disabled experts compute something []."""
        return (disabled_experts(demand_E) & (kept_E > 0)).sum()
