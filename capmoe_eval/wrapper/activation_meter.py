"""Count the experts that a forward activates, and compare them with the method's bound."""

from __future__ import annotations

from torch import Tensor

from capmoe_eval.routing.activation import activation_budget, budgeted_units
from capmoe_eval.routing.homes import by_rank
from capmoe_eval.routing.method import Method

# Shape suffixes: E experts, U units that have a budget.


def count_activated(demand_E: Tensor, kept_E: Tensor) -> dict[str, Tensor]:
    """Return the number of experts that a forward would activate, and of those that it does.

    The arguments are the loads of the whole batch before and after the method's decision.
    """
    return {"activated_before": (demand_E > 0).sum(), "activated_after": (kept_E > 0).sum()}


def check_activation(
    method: Method,
    *,
    demand_E: Tensor,
    kept_E: Tensor,
    best_E: Tensor,
    best_lost: Tensor,
    dropped: Tensor,
    calibrated: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return what a forward broke of the promises of OEA, XShare or SERE, as sums of a layer meter.

    Args:
        method: OEA, XShare or SERE.
        demand_E: Load of each expert by the router's own choice.
        kept_E: Load of each expert as it was called.
        best_E: Number of tokens that have the expert among their k0 best.
        best_lost: Number of tokens that lost one of their k0 best.
        dropped: Number of lost pairs.
        calibrated: What a calibration says of the layer: for SERE the similarity of the experts
            [E, E], with another placement than blocks the experts of each rank [R, E/R].
    """
    if method.name == "oea":  # the set is the union of the tokens' k0 best, and has no limit
        beyond = (kept_E > 0) & (best_E == 0)
        overloaded = ((demand_E > 0) & (best_E == 0)).any()
        fits = overloaded.new_ones(())
    elif method.name == "sere":  # a secondary expert computes only where no primary one is similar
        assert calibrated is not None
        nearest_E = calibrated.masked_fill(best_E == 0, -1).amax(dim=1)
        replaceable_E = (best_E == 0) & (nearest_E >= method.min_similarity)
        beyond = (kept_E > 0) & (replaceable_E | (demand_E == 0))
        overloaded = ((demand_E > 0) & replaceable_E).any()
        fits = overloaded.new_ones(())
    else:
        placed_RN = calibrated if method.is_placed else None
        budget, units = activation_budget(method, len(kept_E)), budgeted_units(method)
        beyond, overloaded_U, overfull_U = (
            by_rank(load_E > 0, units, placed_RN).sum(dim=1) > budget
            for load_E in (kept_E, demand_E, best_E)
        )
        overloaded, fits = overloaded_U.any(), ~overfull_U.any()
    return {
        "violations": beyond.sum(),
        "overloaded": overloaded.long(),
        "unenforced": (overloaded & (dropped == 0)).long(),
        "best_fits": fits.long(),
        "best_lost": best_lost * fits,
    }
