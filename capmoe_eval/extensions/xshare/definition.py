"""Define the experts that XShare activates."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from capmoe_eval.extensions.batch_definition import first_experts
from capmoe_eval.routing.definition import Array, RoutedTokens

if TYPE_CHECKING:
    from capmoe_eval.extensions.xshare.method import XShare

# Shape suffixes: T counted tokens, E experts.

_SCORE_UNIT = 2.0**40  # scores are added as whole multiples of its inverse


def experts_under_budget(tokens: RoutedTokens, method: XShare) -> Array:
    """Return a mask [E] of the tokens' best experts, then of those with the most score."""
    n_experts, first_E = tokens.n_experts, first_experts(tokens, method.k0)
    rank_E, units = np.zeros(n_experts, dtype=np.int64), 1
    if method.granularity == "device":
        rank_E, units = tokens.rank_E, method.ep_size
    numerator, denominator = Decimal(repr(method.expert_budget)).as_integer_ratio()
    budget = -(-numerator * n_experts // (denominator * units))
    worth_E = np.floor(tokens.score_TE.astype(np.float64) * _SCORE_UNIT).astype(np.int64).sum(0)
    order_E = np.lexsort((-worth_E, ~first_E))
    allowed_E = np.zeros(n_experts, dtype=bool)
    for rank in range(units):
        allowed_E[[expert for expert in order_E if rank_E[expert] == rank][:budget]] = True
    return allowed_E
