"""XShare: a batch activates the experts with the most gate score, under a budget.

Vankov et al., arXiv 2602.07265. The set of a batch has the experts with the highest sums of gate
scores under a budget, after each token's k0 best.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, ClassVar

from capmoe_eval.lazy import np
from capmoe_eval.routing.capacity import exact_ratio, rounded
from capmoe_eval.routing.method import ByUnit, Combining, LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register
from pydantic import Field

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
    from torch import Tensor

# Shape suffixes: T counted tokens, E routed experts, U units that have a budget (all experts, or
# those of each rank), N experts of a unit.

_FIRST = 1 << 62  # above every sum of scores


@register
class XShare(BestFirst, ByUnit, Combining):
    """A token goes to its K best experts of the set that the batch shares."""

    name = "xshare"
    title = "XShare"
    source = "arXiv 2602.07265"
    row = 21
    keeps_best = False

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

    @property
    def units(self) -> int:
        """The number of units with a budget of activated experts: 1, or the ranks."""
        return self.ep_size if self.granularity == "device" else 1

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return each token's K best pairs with experts of the batch's set."""
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

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return XShare with a budget of all experts, which 1 itself would make the baseline."""
        budget = 1 - 0.5 / n_experts
        return dataclasses.replace(self, k0=top_k, expert_budget=budget, decode="unconstrained")

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the units that activate more experts than their budget."""
        from capmoe_eval.routing.decision import by_rank

        placed_RN = calibrated if self.is_placed else None
        beyond_U, overloaded_U, overfull_U = (
            by_rank(load_E > 0, self.units, placed_RN).sum(dim=1)
            > activation_budget(self, len(kept_E))
            for load_E in (kept_E, demand_E, first_E)
        )
        return beyond_U, overloaded_U.any(), ~overfull_U.any()

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return each token's K best pairs with experts under the budget, by the definition."""
        n_experts, first_E = tokens.n_experts, first_experts(tokens, self.k0)
        by_device = self.granularity == "device"
        rank_E = tokens.rank_E if by_device else np.zeros(n_experts, dtype=np.int64)
        numerator, denominator = Decimal(repr(self.expert_budget)).as_integer_ratio()
        budget = -(-numerator * n_experts // (denominator * (self.ep_size if by_device else 1)))
        order_E = np.lexsort((-tokens.unit_TE.sum(axis=0), ~first_E))
        allowed_E = np.zeros(n_experts, dtype=bool)
        for rank in range(rank_E.max() + 1):
            allowed_E[order_E[rank_E[order_E] == rank][:budget]] = True
        return pairs_within(tokens, allowed_E)


def activation_budget(method: XShare, n_experts: int) -> int:
    """Return the most experts that are activated in each unit: ceil(share · E/U).

    The share is parsed exactly, like γ.
    """
    numerator, denominator = method.budget_ratio
    return rounded(numerator * n_experts, denominator * method.units)


def experts_under_budget(
    demand_2E: Tensor, method: XShare, placed_RN: Tensor | None = None
) -> Tensor:
    """Return a mask [E] of the experts that the batch may use, given the demand of all of it.

    ``placed_RN`` are the experts of each rank; None for contiguous placement.
    """
    import torch
    from capmoe_eval.routing.decision import by_rank

    is_best_E, worth_E = demand_2E[0] > 0, demand_2E[1]
    expert_E = torch.arange(len(worth_E), device=worth_E.device)
    expert_UN = by_rank(expert_E, method.units, placed_RN)
    key_UN = (worth_E + _FIRST * is_best_E)[expert_UN]
    best_UN = key_UN.argsort(dim=1, descending=True, stable=True)
    chosen_UN = expert_UN.gather(1, best_UN[:, : activation_budget(method, len(worth_E))])
    return torch.zeros_like(is_best_E).index_fill_(0, chosen_UN.flatten(), True)
