"""Choose the experts that a batch activates under a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capmoe_eval.routing.capacity import rounded
from capmoe_eval.routing.placement import by_rank

if TYPE_CHECKING:
    from capmoe_eval.extensions.xshare.method import XShare

# Shape suffixes: E routed experts, U units that have a budget (all experts, or those of each rank),
# N experts of a unit.

_FIRST = 1 << 62  # above every sum of scores


def budgeted_units(method: XShare) -> int:
    """Return the number of units with a budget of activated experts: 1, or the ranks."""
    return method.ep_size if method.granularity == "device" else 1


def activation_budget(method: XShare, n_experts: int) -> int:
    """Return the most experts that are activated in each unit: ceil(share · E/U).

    The share is parsed exactly, like γ.
    """
    numerator, denominator = method.budget_ratio
    return rounded(numerator * n_experts, denominator * budgeted_units(method))


def experts_under_budget(
    demand_2E: Tensor, method: XShare, placed_RN: Tensor | None = None
) -> Tensor:
    """Return a mask [E] of the experts that the batch may use, given the demand of all of it.

    ``placed_RN`` are the experts of each rank; None for contiguous blocks.
    """
    is_best_E, worth_E = demand_2E[0] > 0, demand_2E[1]
    units = budgeted_units(method)
    expert_UN = by_rank(torch.arange(len(worth_E), device=worth_E.device), units, placed_RN)
    key_UN = (worth_E + _FIRST * is_best_E)[expert_UN]
    best_UN = key_UN.argsort(dim=1, descending=True, stable=True)
    chosen_UN = expert_UN.gather(1, best_UN[:, : activation_budget(method, len(worth_E))])
    return torch.zeros_like(is_best_E).index_fill_(0, chosen_UN.flatten(), True)
