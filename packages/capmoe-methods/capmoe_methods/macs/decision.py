"""Weigh tokens and bound an expert's sum of weights: MACS, modality-aware capacity.

A token of an image weighs less than 1, and the less the flatter its hidden state is; a token of
text weighs 1. An expert keeps tokens until the next one would take the sum of their weights beyond
its capacity, which is higher for experts of the modality that the batch has more of. What overflows
goes to other experts of the same rank that have free capacity, or is dropped. The folder's README
says which details are ours.

Weights are whole multiples of 2⁻²⁴, so that sums of them depend on no order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from capmoe_eval.routing.buckets import best_first
from capmoe_eval.routing.capacity import experts_per_rank, rounded
from capmoe_eval.routing.decision import (
    Assignment,
    Scores,
    TokenGroups,
    addable,
    assignment,
    bucket_loads,
    moved,
    ranked_experts,
)
from torch import Tensor

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import LayerContext

    from capmoe_methods.macs import MACS

# Shape suffixes: T counted tokens, H hidden size, E routed experts, K = top-k,
# G capacity groups, R ranks, L experts of a rank, S slots per token, P pairs, B buckets.

UNIT = 1 << 24
"""The weight of a token of text, in units of 2⁻²⁴."""
_EPSILON = 1e-6  # added to a standard deviation before it divides


def modality_bias(visual_E: Tensor, text_E: Tensor, threshold: float) -> Tensor:
    """Return the modality of each expert [E]: 1 visual, -1 text, 0 shared.

    ``visual_E`` and ``text_E`` are the shares of image tokens and of text tokens that choose the
    expert. It is of a modality that has at least the share ``threshold``, above 0.5, of their sum;
    one that neither activates is shared.
    """
    total_E = visual_E.double() + text_E.double()
    is_visual_E, is_text_E = (
        (part_E.double() >= threshold * total_E) & (total_E > 0) for part_E in (visual_E, text_E)
    )
    return is_visual_E.long() - is_text_E.long()


def weigh(
    method: MACS, groups: TokenGroups, layer: LayerContext, *, top_k: int, n_experts: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of tokens [T] and the capacities of experts [G, E] in a layer's forward.

    Both are in units of 2⁻²⁴.
    """
    unit_T = torch.full_like(groups.group_T, UNIT)
    of_images_T = torch.zeros_like(unit_T)
    if layer.image_T is not None:
        assert layer.hidden_TH is not None
        unit_T = token_weights(layer.hidden_TH, layer.image_T, groups, method.delta)
        of_images_T = unit_T * layer.image_T
    of_images_G, total_G = (sum_by_group(part_T, groups) for part_T in (of_images_T, unit_T))
    ratio_G = of_images_G.double() / total_G.clamp_min(1).double()
    bias_E = layer.calibrated
    if bias_E is None:  # no expert is of a modality
        bias_E = unit_T.new_zeros(n_experts)
    return unit_T, weighted_limits(method, groups, ratio_G, bias_E, top_k)


def sum_by_group(value_T: Tensor, groups: TokenGroups) -> Tensor:
    """Return the sum over the tokens of each capacity group [G]."""
    return value_T.new_zeros(len(groups.tokens)).scatter_add_(0, groups.group_T, value_T)


def token_weights(hidden_TH: Tensor, image_T: Tensor, groups: TokenGroups, delta: float) -> Tensor:
    """Return the weight of every token in units of 2⁻²⁴, at least one unit [T].

    A token of an image weighs ``sigmoid(-δ·z)``, where z is the entropy of the softmax over its
    hidden state, less the mean over the image tokens of its capacity group, over their standard
    deviation. Other tokens weigh 1.
    """
    log_TH = hidden_TH.float().log_softmax(dim=1)
    entropy_T = -(log_TH.exp() * log_TH).sum(dim=1).double()

    def mean(value_T: Tensor) -> Tensor:
        sum_G = sum_by_group(value_T.where(image_T, 0.0), groups)
        return (sum_G / sum_by_group(image_T.double(), groups).clamp_min(1))[groups.group_T]

    off_T = entropy_T - mean(entropy_T)
    z_T = off_T / (mean(off_T**2).sqrt() + _EPSILON)
    unit_T = ((-delta * z_T).sigmoid() * UNIT).round().long().clamp_min(1)
    return unit_T.where(image_T, UNIT)


def weighted_limits(
    method: MACS, groups: TokenGroups, ratio_G: Tensor, bias_E: Tensor, top_k: int
) -> Tensor:
    """Return the capacity of each expert in each group, in units of 2⁻²⁴ [G, E].

    It is ``C·(1 + ρ·m·(r - 0.5))`` with the C of Token Drop, which here may exceed T, the expert's
    modality m and the group's ``ratio_G`` r.
    """
    assert method.gamma_ratio is not None
    sizes = {"top_k": top_k, "n_experts": len(bias_E)}
    bases = [
        base_capacity(method.gamma_ratio, tokens, rounding=method.rounding, **sizes)
        for tokens in groups.tokens
    ]
    base_G = torch.tensor(bases, dtype=torch.float64, device="cpu")
    scale_GE = 1 + method.rho * bias_E * (ratio_G[:, None] - 0.5)
    return (moved(base_G, bias_E.device)[:, None] * scale_GE * UNIT).floor().long()


def base_capacity(
    gamma_ratio: tuple[int, int], tokens: int, *, top_k: int, n_experts: int, rounding: str
) -> int:
    """Return C = γ·T·K/E in whole numbers, which may exceed T; γ is a fraction."""
    numerator, denominator = gamma_ratio
    return rounded(numerator * tokens * top_k, denominator * n_experts, rounding)


def assign_weighted(
    scores: Scores, method: MACS, groups: TokenGroups, unit_T: Tensor, room_GE: Tensor
) -> Assignment:
    """Keep the best-scoring tokens of every expert up to its capacity, and reroute the others.

    A pair that overflows moves to its token's best expert of the same rank that is none of the
    token's own and has space for the token; several of a token move to several. Where more arrive
    than fit, the best-scoring stay, and the others are dropped. ``unit_T`` and ``room_GE`` are the
    weights and the capacities of :func:`weigh`.
    """
    topk_TK = scores.topk_TK
    every_TK = torch.ones_like(topk_TK) > 0
    keep_TK = keep_until_full(scores, groups, unit_T, room_GE, topk_TK, every_TK)
    if method.reroute == "none":
        return Assignment(topk_TK, keep_TK)
    n_experts = room_GE.shape[1]
    kept_TK = unit_T[:, None] * keep_TK
    room_GE = room_GE - bucket_loads(groups.group_T, topk_TK, kept_TK, room_GE.shape)
    # Experts in the order of their ranks, and within a rank in the token's own.
    ranked_TE = ranked_experts(scores)
    local = experts_per_rank(n_experts, method.ep_size)
    by_rank_TE = ranked_TE.gather(1, (ranked_TE // local).argsort(dim=1, stable=True))
    free_TE = addable(scores) & (room_GE[groups.group_T] >= unit_T[:, None])
    free_TRL = free_TE.gather(1, by_rank_TE).view(len(topk_TK), method.ep_size, local)
    lost_TR = topk_TK.new_zeros(free_TRL.shape[:2]).scatter_add_(
        1, topk_TK // local, (~keep_TK).long()
    )
    asked_TRL = free_TRL & (free_TRL.cumsum(dim=2) <= lost_TR[:, :, None])
    asked_TE = torch.empty_like(free_TE).scatter_(1, by_rank_TE, asked_TRL.flatten(1))
    every_TE = torch.arange(n_experts, device=topk_TK.device).expand_as(asked_TE)
    moved_TE = keep_until_full(scores, groups, unit_T, room_GE, every_TE, asked_TE)
    return assignment(scores, moved_TE.scatter(1, topk_TK, keep_TK))


def keep_until_full(
    scores: Scores,
    groups: TokenGroups,
    unit_T: Tensor,
    room_GE: Tensor,
    index_TS: Tensor,
    valid_TS: Tensor,
) -> Tensor:
    """Return a mask [T, S] of the slots that are kept: by score, until the next would not fit."""
    n_buckets = room_GE.numel()
    bucket_TS = groups.group_T[:, None] * room_GE.shape[1] + index_TS
    # One more bucket, in which nothing fits, holds the invalid slots.
    bucket_P = bucket_TS.masked_fill(~valid_TS, n_buckets).view(-1)
    room_B = torch.nn.functional.pad(room_GE.view(-1), (0, 1), value=-1)
    order_P = best_first(bucket_P, scores.score_TE.gather(1, index_TS).view(-1))
    bucket_P = bucket_P[order_P]
    unit_P = unit_T[order_P // index_TS.shape[1]]
    load_B = unit_P.new_zeros(n_buckets + 1).scatter_add_(0, bucket_P, unit_P)
    before_B = load_B.cumsum(dim=0) - load_B
    fits_P = unit_P.cumsum(dim=0) - before_B[bucket_P] <= room_B[bucket_P]
    return torch.empty_like(fits_P).scatter_(0, order_P, fits_P).view_as(valid_TS)
