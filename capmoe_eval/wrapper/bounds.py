"""Compare what a layer's experts are called with, with what the method bounds.

Each check returns sums of a layer meter: buckets (of capacity groups, or of all) beyond their bound
(``violations``), whether one would have been by the router's own choice (``overloaded``), and
whether nothing was dropped all the same (``unenforced``). ``demand`` are loads by the router's own
choice, ``kept`` those that the experts were called with, ``dropped`` the number of lost pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from capmoe_eval.routing.activation import activation_budget, budgeted_units
from capmoe_eval.routing.groups import TokenGroups
from capmoe_eval.routing.homes import by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import bucket_loads
from capmoe_eval.routing.weighted import UNIT, Weighted

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, S slots, E experts, G capacity
# groups, U units that have a bound (experts, or devices).


def check_pairs(
    demand_GU: Tensor, kept_GU: Tensor, limit_GU: Tensor, dropped: Tensor
) -> dict[str, Tensor]:
    """Return what a forward broke of the capacities of units, for numbers of pairs."""
    return _promises(kept_GU > limit_GU, (demand_GU > limit_GU).any(), dropped)


def slots_of_pads(
    index_NS: Tensor, pads_NS: Tensor, lost_TK: Tensor, own_NK: Tensor | None
) -> Tensor:
    """Return the number of slots that pads take [].

    ``pads_NS`` marks their computed pairs. ``own_NK`` is the router's own choice of every row where
    a forward that drops and adds nothing is the model's own, pads included; else None.
    """
    if own_NK is not None and own_NK.shape == index_NS.shape:  # else something was added
        pads_NS = pads_NS & (lost_TK.any() | (index_NS != own_NK))
    return pads_NS.sum()


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
    """Return what a forward broke of the promises of OEA, XShare or SERE.

    Args:
        method: The method.
        demand_E: Load of each expert before it.
        kept_E: Load of each expert after it.
        best_E: Number of tokens that have the expert among their k0 best.
        best_lost: Number of tokens that lost one of their k0 best.
        dropped: Number of lost pairs.
        calibrated: What a calibration says of the layer: for SERE the similarity of the experts
            [E, E], with another placement than blocks the experts of each rank [R, E/R].
    """
    fits = torch.ones((), dtype=torch.bool, device=kept_E.device)
    if method.name == "oea":  # the set is the union of the tokens' k0 best, and has no limit
        beyond = (kept_E > 0) & (best_E == 0)
        overloaded = ((demand_E > 0) & (best_E == 0)).any()
    elif method.name == "sere":  # a secondary expert computes only where no primary one is similar
        assert calibrated is not None
        nearest_E = calibrated.masked_fill(best_E == 0, -1).amax(dim=1)
        replaceable_E = (best_E == 0) & (nearest_E >= method.min_similarity)
        beyond = (kept_E > 0) & (replaceable_E | (demand_E == 0))
        overloaded = ((demand_E > 0) & replaceable_E).any()
    else:
        placed_RN = calibrated if method.is_placed else None
        budget, units = activation_budget(method, len(kept_E)), budgeted_units(method)
        beyond, overloaded_U, overfull_U = (
            by_rank(load_E > 0, units, placed_RN).sum(dim=1) > budget
            for load_E in (kept_E, demand_E, best_E)
        )
        overloaded, fits = overloaded_U.any(), ~overfull_U.any()
    checked = {"best_fits": fits.long(), "best_lost": best_lost * fits}
    return checked | _promises(beyond, overloaded, dropped)


def check_weights(
    weighted: Weighted,
    groups: TokenGroups,
    image_T: Tensor | None,
    *,
    topk_TK: Tensor,
    index_TS: Tensor,
    kept_GE: Tensor,
    base_G: Tensor,
    dropped: Tensor,
) -> dict[str, Tensor]:
    """Return what a forward broke of the bounds on weights under MACS, and its weights.

    ``topk_TK`` is the router's own choice, ``index_TS`` the experts that were called (E for a
    dropped slot), ``base_G`` the capacity of an expert of no modality.
    """
    n_experts, unit_T = kept_GE.shape[1], weighted.unit_T
    called_TS = unit_T[:, None] * (index_TS < n_experts)
    own_GE, called_GE = (
        bucket_loads(groups.group_T, index_TS, units_TS, kept_GE.shape)
        for index_TS, units_TS in (
            (topk_TK, unit_T[:, None].expand_as(topk_TK)),
            (index_TS.clamp_max(n_experts - 1), called_TS),
        )
    )
    is_image_T = torch.zeros_like(unit_T) if image_T is None else image_T.long()
    return {
        **_promises(called_GE > weighted.limit_GE, (own_GE > weighted.limit_GE).any(), dropped),
        "beyond_base": (kept_GE > base_G[:, None]).sum(),
        "units": unit_T.sum(),
        "image_units": (unit_T * is_image_T).sum(),
        "image_tokens": is_image_T.sum(),
    }


def _promises(beyond: Tensor, overloaded: Tensor, dropped: Tensor) -> dict[str, Tensor]:
    return {
        "violations": beyond.sum(),
        "overloaded": overloaded.long(),
        "unenforced": (overloaded & (dropped == 0)).long(),
    }


WEIGHED = ("buckets", "beyond_base", "units", "image_units", "image_tokens")
"""The sums that :func:`weight_summary` reads."""


def weight_summary(total: Mapping[str, int], bias_E: Tensor) -> dict[str, object]:
    """Return the weights of a run, JSON-ready; see ``docs/results.md``.

    ``bias_E`` is the modality of the experts of all layers.
    """
    image = total["image_units"] / (UNIT * total["image_tokens"]) if total["image_tokens"] else None
    kinds = {"visual": 1, "text": -1, "shared": 0}
    return {
        "image": image,
        "visual_ratio": total["image_units"] / max(total["units"], 1),
        "beyond_base": total["beyond_base"] / max(total["buckets"], 1),
        "experts": {name: int((bias_E == bias).sum()) for name, bias in kinds.items()},
    }
