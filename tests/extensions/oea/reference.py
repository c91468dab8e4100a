"""Define OEA with loops."""

from __future__ import annotations

from capmoe_eval.extensions.oea import OEA
from tests.extensions.activation import best_experts, within
from tests.routing.reference import Pair, Problem, definition


@definition(OEA)
def oea(problem: Problem, method: OEA) -> set[Pair]:
    """Return each token's K best pairs with the best experts of all tokens."""
    return within(problem, best_experts(problem, method.k0))
