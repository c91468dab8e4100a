"""Define the combine weights of kept pairs."""

from __future__ import annotations

import numpy as np

from capmoe_eval.routing.definition import Array, RoutedTokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.gates import Gate

# Shape suffixes: T counted tokens, E experts.

_FLOAT32 = float(np.finfo(np.float32).eps)


def weights_off(
    tokens: RoutedTokens, method: Method, gate: Gate, kept_TE: Array, weight_TE: Array
) -> Array:
    """Return a mask of the pairs whose weights at the experts are not those of the definition.

    A pair of the router's own choice has the router's own weight, bit for bit. A weight that the
    suite computes is a sum of at most E scores in float32, a quotient and two products, rounded to
    the precision of the router's weights: its error is at most (E + 4) roundings in float32 and one
    in that precision.
    """
    moved = method.combine_weights(tokens)
    if moved is None:
        moved = _combine_weights(tokens, gate, kept_TE, method.renormalize)
    expected_TE, is_computed_TE = moved
    rounding = (tokens.n_experts + 4) * _FLOAT32 + tokens.weight_eps
    error_TE = rounding * np.maximum(abs(expected_TE), tokens.weight_smallest) * is_computed_TE
    is_equal_TE = (weight_TE == expected_TE) | (np.isnan(weight_TE) & np.isnan(expected_TE))
    is_close_TE = abs(weight_TE - expected_TE) <= error_TE
    is_off_TE: Array = ~(is_equal_TE | is_close_TE)
    return is_off_TE


def _combine_weights(
    tokens: RoutedTokens, gate: Gate, kept_TE: Array, renormalize: str
) -> tuple[Array, Array]:
    """Return the weight of every pair [T, E], and a mask of those that are no router's own.

    With ``renormalize="after"`` a token that lost or gained a pair has its weights normalised over
    its kept pairs, where the family normalises; with ``"always"``, in another family, every token.
    """
    chosen_TE, router_TE = tokens.chosen_TE, tokens.router_weight_TE
    score_TE = tokens.score_TE.astype(np.float64)
    scale_E = np.full(tokens.n_experts, gate.scale)
    if gate.expert_scale is not None:
        scale_E = scale_E * gate.expert_scale.value_E.cpu().numpy()
    is_computed_TE = ~chosen_TE
    total_T1 = np.ones((len(score_TE), 1))
    if gate.recipe.normalises or renormalize == "always":
        summed_TE = chosen_TE  # the dropless model's own denominator
        if renormalize != "before":
            is_anew_T = (kept_TE != chosen_TE).any(axis=1) | (not gate.recipe.normalises)
            summed_TE = np.where(is_anew_T[:, None], kept_TE, chosen_TE)
            is_computed_TE = is_computed_TE | is_anew_T[:, None]
        total_T1 = (score_TE * summed_TE).sum(axis=1, keepdims=True) + gate.recipe.epsilon
        total_T1 = np.maximum(total_T1, getattr(gate.router, "norm_min", 1e-20))
    return np.where(is_computed_TE, score_TE / total_T1 * scale_E, router_TE), is_computed_TE
