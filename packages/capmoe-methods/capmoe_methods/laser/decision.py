"""Assign tokens to the least loaded of their candidates, part by part of a group, on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from capmoe_eval.routing.decision import (
    Assignment,
    Scores,
    TokenGroups,
    assignment,
    ranked_experts,
    score_units,
    usable,
)
from torch import Tensor

if TYPE_CHECKING:
    from capmoe_methods.laser import Laser

# Shape suffixes: T counted tokens, E routed experts, K = top-k, G groups, P parts, W tokens of a
# part at most, B = G·E buckets.

_NEVER = 1 << 62  # above every load


def assign(scores: Scores, tokens: TokenGroups, method: Laser) -> Assignment:
    """Return the K experts of every token: of its candidates those with the lowest loads.

    The tokens of a group are assigned in at most ``load_updates`` parts of consecutive tokens. The
    loads that a token goes by are those of the parts before its own, so that one part is one
    step on tensors. Of equally loaded candidates the token's own order decides.
    """
    (n_tokens, n_experts), top_k = scores.score_TE.shape, scores.topk_TK.shape[1]
    n_groups, device = len(tokens.tokens), scores.score_TE.device
    place_TE = ranked_experts(scores).argsort(dim=1)
    key_TE = torch.where(candidates(scores, method), place_TE, _NEVER)
    order_T, bounds_P, width = parts_of_groups(tokens, n_tokens, method.load_updates)
    slot_W = torch.arange(width, device=device)
    load_B = torch.zeros(n_groups * n_experts, dtype=torch.long, device=device)
    keep_TE = torch.zeros((n_tokens + 1, n_experts), dtype=torch.bool, device=device)
    for part in range(len(bounds_P) - 1):
        position_W = bounds_P[part] + slot_W
        is_here_W = position_W < bounds_P[part + 1]
        row_W = order_T[position_W.clamp(max=n_tokens - 1)]
        group_W = tokens.group_T[row_W]
        key_WE = key_TE[row_W] + load_B.view(n_groups, n_experts)[group_W] * n_experts
        chosen_WK = key_WE.topk(top_k, dim=1, largest=False).indices
        # What fills a part up weighs nothing, and goes to the last row, which is cut off.
        bucket_WK = group_W[:, None] * n_experts + chosen_WK
        weight_WK = is_here_W[:, None].expand_as(chosen_WK).long()
        load_B = load_B.scatter_add(0, bucket_WK.flatten(), weight_WK.flatten())
        keep_TE[torch.where(is_here_W, row_W, n_tokens)[:, None], chosen_WK] = True
    return assignment(scores, keep_TE[:n_tokens])


def candidates(scores: Scores, method: Laser) -> Tensor:
    """Return the experts that each token may be assigned to [T, E].

    They are its top-k and, where these have less than ``peak_mass`` of its scores, the eligible
    experts with at least ``viable_score`` of its best score.
    """
    score_TE, topk_TK = scores.score_TE.double(), scores.topk_TK
    unit_TE = score_units(score_TE)
    top_T, all_T = unit_TE.gather(1, topk_TK).sum(dim=1), unit_TE.sum(dim=1)
    is_flat_T = top_T.double() < method.peak_mass * all_T.double()
    is_viable_TE = score_TE >= method.viable_score * score_TE.amax(dim=1, keepdim=True)
    return (usable(scores) & is_viable_TE & is_flat_T[:, None]).scatter(1, topk_TK, True)


def parts_of_groups(
    tokens: TokenGroups, n_tokens: int, load_updates: int
) -> tuple[Tensor, Tensor, int]:
    """Return the tokens by part [T], where each part begins [P + 1], and the most tokens of one.

    Token i of the n in a group belongs to part ``floor(i·p/n)`` of p = min(``load_updates``, n).
    The width of a part is a bound that depends on the numbers of tokens and groups alone.
    """
    group_T = tokens.group_T
    first_T = torch.searchsorted(group_T, group_T)  # groups ascend
    size_T = torch.searchsorted(group_T, group_T, right=True) - first_T
    place_T = torch.arange(n_tokens, device=group_T.device) - first_T
    part_T, order_T = (place_T * size_T.clamp(max=load_updates) // size_T).sort(stable=True)
    parts = min(load_updates, n_tokens)
    bounds_P = torch.searchsorted(part_T, torch.arange(parts + 1, device=group_T.device))
    width = (n_tokens + len(tokens.tokens) * (load_updates - 1)) // load_updates
    return order_T, bounds_P, min(n_tokens, width)
