"""Expert Drop: the experts with the lowest load compute nothing (paper, Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from capmoe_eval.routing.mixins import Combining
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups

# Shape suffixes: T counted tokens, E routed experts, K = top-k.


def disabled_experts(load_E: Tensor) -> Tensor:
    """Return a mask [E] of the max(1, floor(E/10)) experts with the lowest load.

    Of equal loads the lower index is disabled first.
    """
    order_E = load_E.argsort(stable=True)
    place_E = order_E.argsort()
    return place_E < max(1, len(load_E) // 10)


@register
@dataclass(frozen=True, kw_only=True)
class ExpertDrop(Combining):
    """A tenth of the experts, those with the lowest load over the whole batch, receive nothing."""

    name: ClassVar[str] = "expert_drop"
    title: ClassVar[str] = "Expert Drop"
    source: ClassVar[str] = "paper, Table 2"
    row: ClassVar[int] = 5

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the router's own choice without the pairs of disabled experts."""
        from capmoe_eval.routing.decision import expert_load
        from capmoe_eval.routing.scores import Assignment

        load_E = layer.total(expert_load(scores.topk_TK, scores.score_TE.shape[1]))
        return Assignment(scores.topk_TK, ~disabled_experts(load_E)[scores.topk_TK])

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs of the experts that are not disabled, by the definition."""
        from capmoe_eval.routing.definition import without_idle_experts

        return without_idle_experts(tokens)

    def wrongly_computed(self, demand_E: Tensor, kept_E: Tensor) -> Tensor:
        """Return how many disabled experts compute something []."""
        return (disabled_experts(demand_E) & (kept_E > 0)).sum()
