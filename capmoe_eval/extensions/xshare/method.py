"""XShare: Vankov et al., arXiv 2602.07265.

The set of a batch has the experts with the highest sums of gate scores under a budget, after each
token's k0 best.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.extensions.activation import BestFirst
from capmoe_eval.routing.capacity import exact_ratio
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.mixins import ByUnit, Combining
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups


@register
@dataclass(frozen=True, kw_only=True)
class XShare(BestFirst, ByUnit, Combining):
    """A token goes to its K best experts of the set that the batch shares."""

    name: ClassVar[str] = "xshare"
    title: ClassVar[str] = "XShare"
    source: ClassVar[str] = "arXiv 2602.07265"
    row: ClassVar[int] = 21

    expert_budget: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="the most experts that a batch activates, as a share of all, or of each "
            "rank's",
            examples=[0.5],
        ),
        LabelPart("b", always=True),
    ] = 0.5

    budget_ratio: ClassVar[tuple[int, int]]  # numerator and denominator of expert_budget

    def __post_init__(self) -> None:
        super().__post_init__()
        # Outside of the decision, which can then be compiled.
        self._set("budget_ratio", exact_ratio(self.expert_budget))

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return each token's K best pairs with experts of the batch's set."""
        from capmoe_eval.extensions.batch_demand import assign_within, batch_demand
        from capmoe_eval.extensions.xshare.decision import experts_under_budget

        demand_2E = layer.total(batch_demand(scores, self.k0))
        has_ranks = self.granularity == "device" and self.is_placed
        placed_RN = layer.calibrated if has_ranks else None
        return assign_within(scores, experts_under_budget(demand_2E, self, placed_RN))

    def simplest(self) -> Method:
        """Return the baseline where all experts fit the budget."""
        if self.expert_budget == 1 and self.renormalize != "always":
            return Baseline()
        if self.ep_size == 1 and self.granularity == "device":  # the one rank has all experts
            return dataclasses.replace(self, granularity="expert")
        return self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect: ranks, only where each has a budget."""
        names = super().effective()
        if self.granularity == "expert":
            names -= {"ep_size"}
        return names if self.granularity == "device" and self.ep_size > 1 else names - {"placement"}

    def never_binding(self, n_experts: int, top_k: int) -> XShare:
        """Return XShare with a budget of all experts, which 1 itself would make the baseline."""
        return dataclasses.replace(
            self, k0=top_k, expert_budget=1 - 0.5 / n_experts, decode="unconstrained"
        )

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the units that activate more experts than their budget."""
        from capmoe_eval.extensions.xshare.decision import activation_budget, budgeted_units
        from capmoe_eval.routing.placement import by_rank

        placed_RN = calibrated if self.is_placed else None
        budget, units = activation_budget(self, len(kept_E)), budgeted_units(self)
        beyond_U, overloaded_U, overfull_U = (
            by_rank(load_E > 0, units, placed_RN).sum(dim=1) > budget
            for load_E in (kept_E, demand_E, first_E)
        )
        return beyond_U, overloaded_U.any(), ~overfull_U.any()

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return each token's K best pairs with experts under the budget, by the definition."""
        from capmoe_eval.extensions.batch_definition import pairs_within
        from capmoe_eval.extensions.xshare.definition import experts_under_budget

        return pairs_within(tokens, experts_under_budget(tokens, self))
