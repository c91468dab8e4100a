"""OEA: each token uses the best of the experts that the batch activates anyway.

Oncescu et al., arXiv 2511.02237, in its final form: every token's k0 best experts make a set, of
which each token uses the K best, in its own order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capmoe_eval.routing.method import Combining
from capmoe_eval.routing.registry import register

from capmoe_methods.activation import (
    BestFirst,
    assign_within,
    batch_demand,
    first_experts,
    pairs_within,
)

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens


@register
class OEA(BestFirst, Combining):
    """A token goes to its K best of the experts that are among the k0 best of some token."""

    name = "oea"
    title = "OEA"
    source = "arXiv 2511.02237"
    row = 20

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return each token's K best pairs with experts of the batch's set."""
        demand_2E = layer.total(batch_demand(scores, self.k0))
        return assign_within(scores, demand_2E[0] > 0)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return each token's K best pairs with experts of the batch's set, by the definition."""
        return pairs_within(tokens, first_experts(tokens, self.k0))
