"""OEA: Oncescu et al., arXiv 2511.02237, in its final form.

Every token's k0 best experts make a set, of which each token uses the K best, in its own order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from capmoe_eval.extensions.activation import BestFirst
from capmoe_eval.routing.mixins import Combining
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups


@register
@dataclass(frozen=True, kw_only=True)
class OEA(BestFirst, Combining):
    """A token goes to its K best of the experts that are among the k0 best of some token."""

    name: ClassVar[str] = "oea"
    title: ClassVar[str] = "OEA"
    source: ClassVar[str] = "arXiv 2511.02237"
    row: ClassVar[int] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_no_best()

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return each token's K best pairs with experts of the batch's set."""
        from capmoe_eval.extensions.batch_demand import assign_within, batch_demand

        demand_2E = layer.total(batch_demand(scores, self.k0))
        return assign_within(scores, demand_2E[0] > 0)

    def never_binding(self, n_experts: int, top_k: int) -> OEA:
        """Return OEA with all experts of every token in the set."""
        return dataclasses.replace(self, k0=top_k, decode="unconstrained")

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts that compute without being a token's best; the set has no limit."""
        import torch

        is_idle_E, fits = first_E == 0, torch.ones((), dtype=torch.bool, device=kept_E.device)
        return (kept_E > 0) & is_idle_E, ((demand_E > 0) & is_idle_E).any(), fits

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return each token's K best pairs with experts of the batch's set, by the definition."""
        from capmoe_eval.extensions.batch_definition import first_experts, pairs_within

        return pairs_within(tokens, first_experts(tokens, self.k0))
