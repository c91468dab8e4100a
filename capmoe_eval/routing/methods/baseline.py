"""The stock model: every token goes to its top-k experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups


@register
@dataclass(frozen=True, kw_only=True)
class Baseline(Method):
    """The router's own choice, without a capacity: γ=∞."""

    name: ClassVar[str] = "baseline"
    title: ClassVar[str] = "Baseline"
    source: ClassVar[str] = "the stock model"
    row: ClassVar[int] = 0
    is_stock: ClassVar[bool] = True

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the router's own choice."""
        import torch

        from capmoe_eval.routing.scores import Assignment

        return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the router's own choice by the definition."""
        return tokens.chosen_TE
