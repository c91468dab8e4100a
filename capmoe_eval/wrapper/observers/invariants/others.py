"""Define the kept pairs of the methods of other papers: OEA, XShare, SERE and MACS.

``docs/methods.md`` has the sources, and says which details are ours.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from capmoe_eval.wrapper.invariants.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, V those of images, H hidden size, E experts, G groups, P pairs.

_UNIT = 2**24  # MACS: the weight of a token of text
_SCORE_UNIT = 2.0**40  # XShare adds scores as whole multiples of its inverse


def kept_pairs(tokens: RoutedTokens) -> Array:
    """Return the pairs that are kept under OEA, XShare or SERE [T, E]."""
    if tokens.method.name == "sere":
        served_by_E = substitutes(tokens)
        kept_TE = np.zeros_like(tokens.chosen_TE)
        np.put_along_axis(kept_TE, served_by_E[tokens.topk_TK], True, axis=1)
        return kept_TE
    allowed_E = _best_experts(tokens)
    if tokens.method.name == "xshare":
        allowed_E = _experts_under_budget(tokens, allowed_E)
    usable_TE = (tokens.chosen_TE | tokens.eligible_TE) & allowed_E
    return tokens.best_of(usable_TE, tokens.top_k)


def _best_experts(tokens: RoutedTokens) -> Array:
    """Return a mask [E] of the experts that are among the k0 best of some token."""
    best_TE = tokens.best_of(tokens.chosen_TE, tokens.method.k0)
    is_best_E: Array = np.logical_or.reduce(best_TE, axis=0)
    return is_best_E


def _experts_under_budget(tokens: RoutedTokens, best_E: Array) -> Array:
    """Return XShare's set [E]: the tokens' best experts, then those with the most score."""
    method, n_experts = tokens.method, tokens.n_experts
    rank_E, units = np.zeros(n_experts, dtype=np.int64), 1
    if method.granularity == "device":
        rank_E, units = tokens.rank_E, method.ep_size
    numerator, denominator = Decimal(repr(method.expert_budget)).as_integer_ratio()
    budget = -(-numerator * n_experts // (denominator * units))
    worth_E = np.floor(tokens.score_TE.astype(np.float64) * _SCORE_UNIT).astype(np.int64).sum(0)
    order_E = np.lexsort((-worth_E, ~best_E))
    allowed_E = np.zeros(n_experts, dtype=bool)
    for rank in range(units):
        allowed_E[[expert for expert in order_E if rank_E[expert] == rank][:budget]] = True
    return allowed_E


def substitutes(tokens: RoutedTokens) -> npt.NDArray[np.int64]:
    """Return the expert that serves each expert's tokens under SERE [E]."""
    similarity_EE, primary_E = tokens.calibrated, _best_experts(tokens)
    assert similarity_EE is not None
    served_by_E = np.arange(tokens.n_experts)
    primary = np.flatnonzero(primary_E)
    for expert in np.flatnonzero(~primary_E):
        nearest = primary[similarity_EE[expert, primary].argmax()] if len(primary) else expert
        least = similarity_EE.dtype.type(tokens.method.min_similarity)
        if similarity_EE[expert, nearest] >= least:
            served_by_E[expert] = nearest
    return served_by_E


def token_weights(tokens: RoutedTokens) -> tuple[Array, Array]:
    """Return MACS' weight of every token, and how far float32 may be off it, both in units [T].

    An image token weighs ``sigmoid(-δ·z)``, with z the entropy of the softmax over its hidden
    state, standardised over the image tokens of its group. A rounding error e of the entropies
    moves z by at most 2·e·(1 + |z|)/σ, and the sigmoid by at most δ/4 of that.
    """
    weight_T = np.full(len(tokens.group_T), float(_UNIT))
    error_T = np.zeros(len(tokens.group_T))
    image_T, hidden_TH = tokens.image_T, tokens.hidden_TH
    if image_T is None or hidden_TH is None:
        return weight_T, error_T
    for group in np.unique(tokens.group_T[image_T]):
        rows = np.flatnonzero(image_T & (tokens.group_T == group))
        logit_VH = hidden_TH[rows].astype(np.float64)
        log_VH = logit_VH - logit_VH.max(axis=1, keepdims=True)
        log_VH -= np.log(np.exp(log_VH).sum(axis=1, keepdims=True))
        entropy_V = -(np.exp(log_VH) * log_VH).sum(axis=1)
        deviation = entropy_V.std() + 1e-6
        z_V = (entropy_V - entropy_V.mean()) / deviation
        weight_T[rows] = _UNIT / (1 + np.exp(tokens.method.delta * z_V))
        # Float32 rounds each log-probability by some units of its size, and adds H products.
        magnitude = np.abs(log_VH).max() + np.abs(logit_VH).max()
        rounding = 8 * np.finfo(np.float32).eps * magnitude * math.log2(2 + logit_VH.shape[1])
        slope = tokens.method.delta / 4
        error_T[rows] = 1 + _UNIT * slope * 2 * rounding * (1 + np.abs(z_V)) / deviation
    return weight_T, error_T


def weighted_limits(tokens: RoutedTokens, unit_T: Array) -> Array:
    """Return MACS' capacity of each expert in each group, in units [G, E]."""
    method, bias_E = tokens.method, tokens.calibrated
    assert method.gamma is not None
    assert bias_E is not None
    numerator, denominator = Decimal(repr(method.gamma)).as_integer_ratio()
    image_T = np.zeros(len(unit_T), dtype=bool) if tokens.image_T is None else tokens.image_T
    limit_GE = np.zeros((len(tokens.tokens_G), tokens.n_experts), dtype=np.int64)
    for group, n_tokens in enumerate(tokens.tokens_G.tolist()):
        pairs, rest = divmod(numerator * n_tokens * tokens.top_k, denominator * tokens.n_experts)
        base = pairs + (rest > 0 and method.rounding == "ceil")
        is_member_T = tokens.group_T == group
        ratio = unit_T[is_member_T & image_T].sum() / max(unit_T[is_member_T].sum(), 1)
        limit_GE[group] = np.floor(base * (1 + method.rho * bias_E * (ratio - 0.5)) * _UNIT)
    return limit_GE


def weighted_pairs(tokens: RoutedTokens, unit_T: Array) -> Array:
    """Return the pairs that MACS keeps [T, E], given the tokens' weights in units."""
    free_GE = weighted_limits(tokens, unit_T)
    kept_TE = _until_full(tokens, unit_T, tokens.chosen_TE, free_GE)
    if tokens.method.reroute == "none":
        return kept_TE
    fits_TE = unit_T[:, None] <= free_GE[tokens.group_T]
    free_TE = tokens.eligible_TE & ~tokens.chosen_TE & fits_TE
    lost_TE = tokens.chosen_TE & ~kept_TE
    offered_TE = np.zeros_like(kept_TE)
    for rank in range(tokens.method.ep_size):
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
