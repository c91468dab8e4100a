"""Define the weights of tokens, the capacities and the kept pairs of MACS."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from capmoe_eval.routing.definition import Array, RoutedTokens, pairs_per_unit

if TYPE_CHECKING:
    from capmoe_methods.macs import MACS

# Shape suffixes: T counted tokens, V those of images, H hidden size, E experts, G groups, P pairs.

_UNIT = 2**24  # the weight of a token of text


def weights_off(tokens: RoutedTokens, method: MACS) -> int:
    """Return how many tokens the decision gave another weight than the definition."""
    unit_T = tokens.details[0].cpu().numpy()
    weight_T, error_T = token_weights(tokens.hidden_TH, tokens.image_T, tokens.group_T, method)
    if len(unit_T) != len(weight_T):  # other tokens were weighed than count
        return abs(len(unit_T) - len(weight_T))
    return int((abs(unit_T - weight_T) > error_T).sum())


def token_weights(
    hidden_TH: Array | None, image_T: Array | None, group_T: Array, method: MACS
) -> tuple[Array, Array]:
    """Return the weight of every token, and how far float32 may be off it, both in units [T].

    An image token weighs ``sigmoid(-δ·z)``, with z the entropy of the softmax over its hidden
    state, standardised over the image tokens of its group. A rounding error e of the entropies
    moves z by at most 2·e·(1 + |z|)/σ, and the sigmoid by at most δ/4 of that.
    """
    weight_T, error_T = np.full(len(group_T), float(_UNIT)), np.zeros(len(group_T))
    if image_T is None or hidden_TH is None:
        return weight_T, error_T
    for group in np.unique(group_T[image_T]):
        rows = np.flatnonzero(image_T & (group_T == group))
        logit_VH = hidden_TH[rows].astype(np.float64)
        log_VH = logit_VH - logit_VH.max(axis=1, keepdims=True)
        log_VH -= np.log(np.exp(log_VH).sum(axis=1, keepdims=True))
        entropy_V = -(np.exp(log_VH) * log_VH).sum(axis=1)
        deviation = entropy_V.std() + 1e-6
        z_V = (entropy_V - entropy_V.mean()) / deviation
        weight_T[rows] = _UNIT / (1 + np.exp(method.delta * z_V))
        # Float32 rounds each log-probability by some units of its size, and adds H products.
        magnitude = np.abs(log_VH).max() + np.abs(logit_VH).max()
        rounding = 8 * np.finfo(np.float32).eps * magnitude * math.log2(2 + logit_VH.shape[1])
        slope = method.delta / 4
        error_T[rows] = 1 + _UNIT * slope * 2 * rounding * (1 + np.abs(z_V)) / deviation
    return weight_T, error_T


def weighted_limits(tokens: RoutedTokens, method: MACS, unit_T: Array) -> Array:
    """Return the capacity of each expert in each group, in units [G, E]."""
    gamma, bias_E = method.factor.uniform, tokens.calibrated
    assert gamma is not None
    if bias_E is None:  # no expert is of a modality
        bias_E = np.zeros(tokens.n_experts)
    image_T = np.zeros(len(unit_T), dtype=bool) if tokens.image_T is None else tokens.image_T
    limit_GE = np.zeros((len(tokens.tokens_G), tokens.n_experts), dtype=np.int64)
    for group, n_tokens in enumerate(tokens.tokens_G.tolist()):
        base = pairs_per_unit(
            gamma, n_tokens, tokens.top_k, tokens.n_experts, rounding=method.rounding
        )
        is_member_T = tokens.group_T == group
        ratio = unit_T[is_member_T & image_T].sum() / max(unit_T[is_member_T].sum(), 1)
        limit_GE[group] = np.floor(base * (1 + method.rho * bias_E * (ratio - 0.5)) * _UNIT)
    return limit_GE


def weighted_pairs(tokens: RoutedTokens, method: MACS) -> Array:
    """Return the pairs that are kept [T, E], by the weights that the decision used."""
    if method.factor.uniform == math.inf:
        return tokens.chosen_TE
    unit_T = tokens.details[0].cpu().numpy()
    if len(unit_T) != len(tokens.group_T):  # other tokens were weighed than count
        weight_T, _ = token_weights(tokens.hidden_TH, tokens.image_T, tokens.group_T, method)
        unit_T = weight_T.round().astype(np.int64)
    free_GE = weighted_limits(tokens, method, unit_T)
    kept_TE = _until_full(tokens, unit_T, tokens.chosen_TE, free_GE)
    if method.reroute == "none":
        return kept_TE
    fits_TE = unit_T[:, None] <= free_GE[tokens.group_T]
    free_TE = tokens.eligible_TE & ~tokens.chosen_TE & fits_TE
    lost_TE = tokens.chosen_TE & ~kept_TE
    offered_TE = np.zeros_like(kept_TE)
    for rank in range(method.ep_size):
        is_local_E = tokens.rank_E == rank
        for token in np.flatnonzero((lost_TE & is_local_E).any(axis=1)):
            free = np.flatnonzero(free_TE[token] & is_local_E)
            best = free[np.argsort(-tokens.ranking_TE[token, free], kind="stable")]
            offered_TE[token, best[: int((lost_TE[token] & is_local_E).sum())]] = True
    return kept_TE | _until_full(tokens, unit_T, offered_TE, free_GE)


def _until_full(tokens: RoutedTokens, unit_T: Array, pair_TE: Array, free_GE: Array) -> Array:
    """Keep an expert's best pairs until the next does not fit, and lessen what is free."""
    kept_TE = np.zeros_like(pair_TE)
    full = np.zeros(free_GE.shape, dtype=bool)
    token_P, expert_P = np.nonzero(pair_TE)
    for place in np.argsort(-tokens.score_TE[token_P, expert_P], kind="stable"):
        token, expert = token_P[place], expert_P[place]
        bucket = tokens.group_T[token], expert
        full[bucket] |= unit_T[token] > free_GE[bucket]
        if not full[bucket]:
            free_GE[bucket] -= unit_T[token]
            kept_TE[token, expert] = True
    return kept_TE
