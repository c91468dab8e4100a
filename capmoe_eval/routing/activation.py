"""Choose the experts that a batch activates: OEA, XShare and SERE.

The weights of an expert are read once per forward, however many tokens it serves, and in a decode
step reading them takes most of a layer's time. The methods therefore choose experts for all tokens
of a forward together. They bound the activated experts, not the load of any.

OEA is Oncescu et al., arXiv 2511.02237, in its final form: every token's k0 best experts make a
set, of which each token uses the K best, in its own order. XShare is Vankov et al., arXiv
2602.07265: the set has the experts with the highest sums of gate scores under a budget, after each
token's k0 best. SERE is Similarity-based Expert Re-routing, arXiv 2602.07616: the tokens' k0 best
experts are primary, and every other chosen expert gives all its tokens, with their weights, to the
primary expert whose outputs were the most similar on calibration inputs, unless none was similar
enough. ``docs/methods.md`` says which details are ours.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from capmoe_eval.routing.homes import by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores, assignment, ranked_experts

# Shape suffixes: T counted tokens, E routed experts, K = top-k, U units that have a budget (all
# experts, or the experts of each rank), P = T·K slots, S = 2K slots per token.

SCORE_UNIT = 2.0**-40
"""Scores are added as whole multiples of this, so that their sum does not depend on the order."""
_FIRST = 1 << 62  # above every sum of scores


def budgeted_units(method: Method) -> int:
    """Return the number of units with a budget of activated experts: 1, or the ranks."""
    return method.ep_size if method.granularity == "device" else 1


def activation_budget(method: Method, n_experts: int) -> int:
    """Return the most experts that XShare activates in each unit: ceil(share · E/U).

    The share is read as the decimal that was written, like γ.
    """
    return math.ceil(Fraction(repr(method.expert_budget)) * n_experts / budgeted_units(method))


def best_own(scores: Scores, k0: int) -> Tensor:
    """Return a mask [T, K] of the slots of each token's own top-k with its k0 best experts."""
    best_T1k = ranked_experts(scores)[:, None, : min(k0, scores.topk_TK.shape[1])]
    return (scores.topk_TK[:, :, None] == best_T1k).any(dim=2)


def batch_demand(scores: Scores, k0: int) -> Tensor:
    """Return the tokens' demand for each expert [2, E], as whole numbers.

    The first row is positive where the expert is among a token's k0 best, the second has the sum of
    gate scores. Processes that share a batch add their demands.
    """
    wanted_E = torch.zeros(scores.score_TE.shape[1], dtype=torch.long, device=scores.topk_TK.device)
    is_best_P = best_own(scores, k0).long().reshape(-1)
    wanted_E = wanted_E.scatter_reduce(0, scores.topk_TK.reshape(-1), is_best_P, "amax")
    units_TE = (scores.score_TE.double() / SCORE_UNIT).long()
    return torch.stack([wanted_E, units_TE.sum(dim=0)])


def expert_set(demand_2E: Tensor, method: Method, placed_RN: Tensor | None = None) -> Tensor:
    """Return a mask [E] of the experts that the batch may use, given the demand of all of it.

    ``placed_RN`` are the experts of each rank; None for blocks.
    """
    wanted_E, worth_E = demand_2E[0] > 0, demand_2E[1]
    if method.name == "oea":
        return wanted_E
    units = budgeted_units(method)
    expert_UN = by_rank(torch.arange(len(worth_E), device=worth_E.device), units, placed_RN)
    key_UN = (worth_E + _FIRST * wanted_E)[expert_UN]
    best_UN = key_UN.argsort(dim=1, descending=True, stable=True)
    chosen_UN = expert_UN.gather(1, best_UN[:, : activation_budget(method, len(worth_E))])
    return torch.zeros_like(wanted_E).index_fill_(0, chosen_UN.flatten(), True)


def assign_within(scores: Scores, set_E: Tensor) -> Assignment:
    """Give each token the K best experts of a set, in its own order, or all that it has there."""
    ranked_TE = ranked_experts(scores)  # ineligible ones last: `assignment` leaves them out
    in_set_TE = set_E[ranked_TE]
    best_TE = in_set_TE & (in_set_TE.cumsum(dim=1) <= scores.topk_TK.shape[1])
    return assignment(scores, torch.empty_like(best_TE).scatter_(1, ranked_TE, best_TE))


def substitutes(primary_E: Tensor, similarity_EE: Tensor, min_similarity: float) -> Tensor:
    """Return the expert that serves the tokens of each expert [E]: itself, or a primary one.

    Args:
        primary_E: True for the batch's primary experts, which serve their own tokens.
        similarity_EE: Similarity of the experts' outputs, from 0 to 1. Of equally similar primary
            experts the one with the lower index serves.
        min_similarity: An expert without a primary one at least as similar serves its own tokens.
    """
    own_E = torch.arange(len(primary_E), device=primary_E.device)
    to_primary_EE = similarity_EE.masked_fill(~primary_E, -1.0)
    most_E = to_primary_EE.amax(dim=1)
    # The lowest index of several: no argmax promises which of them it returns.
    nearest_E = torch.where(to_primary_EE == most_E[:, None], own_E, len(own_E)).amin(dim=1)
    is_moved_E = ~primary_E & (most_E >= min_similarity)
    return torch.where(is_moved_E, nearest_E, own_E)


def reroute(scores: Scores, served_by_E: Tensor) -> Assignment:
    """Send each pair of a token's top-k to the expert that serves it.

    Pairs that meet at one expert are one pair, with the sum of their weights. ``served_by_E`` comes
    from :func:`substitutes`.
    """
    topk_TK = scores.topk_TK
    goal_TK = served_by_E[topk_TK]
    stays_TK = goal_TK == topk_TK
    index_TS = torch.cat([topk_TK, goal_TK], dim=1)
    usable_TS = torch.cat([stays_TK, ~stays_TK], dim=1)
    meets_TKS = usable_TS[:, None, :] & (goal_TK[:, :, None] == index_TS[:, None, :])
    slots = torch.arange(index_TS.shape[1], device=index_TS.device)
    slot_TK = torch.where(meets_TKS, slots, len(slots)).amin(dim=2)  # the first that fits
    keep_TS = torch.zeros_like(usable_TS).scatter_(1, slot_TK, True)
    return Assignment(index_TS, keep_TS, slot_TK)
