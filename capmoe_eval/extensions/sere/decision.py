"""Send the tokens of secondary experts to the most similar primary expert."""

from __future__ import annotations

import torch
from torch import Tensor

from capmoe_eval.routing.scores import Assignment, Scores

# Shape suffixes: T counted tokens, E routed experts, K = top-k, S = 2K slots per token.


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
    # The lowest index of several: argmax may return any of them.
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
