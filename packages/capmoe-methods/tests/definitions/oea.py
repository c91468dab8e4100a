"""Define OEA with loops."""

from __future__ import annotations

from tests.routing.reference import Pair, Problem, definition

from capmoe_methods.oea import OEA
from definitions.activation import best_experts, within


@definition(OEA)
def oea(problem: Problem, method: OEA) -> set[Pair]:
    """Return each token's K best pairs with the best experts of all tokens."""
    return within(problem, best_experts(problem, method.k0))
