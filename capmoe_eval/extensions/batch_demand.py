"""Count what the tokens of a batch demand of each expert, and choose a token's experts in a set.

These are the parts that OEA, XShare and SERE share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment, Scores, assignment, ranked_experts

# Shape suffixes: T counted tokens, E routed experts, K = top-k, P = T·K slots.

SCORE_UNIT = 2.0**-40
"""Scores are added as whole multiples of this, so that their sum does not depend on the order."""


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


def assign_within(scores: Scores, set_E: Tensor) -> Assignment:
    """Give each token the K best experts of a set, in its own order, or all that it has there."""
    ranked_TE = ranked_experts(scores)  # ineligible ones last: `assignment` leaves them out
    in_set_TE = set_E[ranked_TE]
    best_TE = in_set_TE & (in_set_TE.cumsum(dim=1) <= scores.topk_TK.shape[1])
    return assignment(scores, torch.empty_like(best_TE).scatter_(1, ranked_TE, best_TE))
