"""Define XShare with loops."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.routing.reference import Pair, Problem, definition, rank_of

from capmoe_methods.xshare import XShare
from definitions.activation import best_experts, within


@definition(XShare)
def xshare(problem: Problem, method: XShare) -> set[Pair]:
    """Return each token's K best pairs with experts of the set."""
    return within(problem, _shared_experts(problem, method))


def _shared_experts(problem: Problem, method: XShare) -> set[int]:
    """Return the set: in each unit, the best experts up to the budget."""
    units = method.ep_size if method.granularity == "device" else 1
    budget = math.ceil(Fraction(repr(method.expert_budget)) * problem.n_experts / units)
    best = best_experts(problem, method.k0)
    # Whole multiples of 2^-40, so that the sum does not depend on the order of tokens.
    worth = [
        sum(math.floor(row[expert] * 2**40) for row in problem.score)
        for expert in range(problem.n_experts)
    ]
    chosen: set[int] = set()
    falling = sorted(range(problem.n_experts), key=lambda e: (e not in best, -worth[e], e))
    for unit in range(units):
        held = [e for e in falling if units == 1 or rank_of(problem, method, e) == unit]
        chosen |= set(held[:budget])
    return chosen
