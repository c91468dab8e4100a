"""Define what OEA, XShare and SERE share: the experts that a batch's tokens need first."""

from __future__ import annotations

import numpy as np

from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E experts.


def first_experts(tokens: RoutedTokens, k0: int) -> Array:
    """Return a mask [E] of the experts that are among the k0 best of some token."""
    is_first_E: Array = np.logical_or.reduce(tokens.best_of(tokens.chosen_TE, k0), axis=0)
    return is_first_E


def pairs_within(tokens: RoutedTokens, allowed_E: Array) -> Array:
    """Return each token's K best pairs with the experts of a set [T, E]."""
    usable_TE = (tokens.chosen_TE | tokens.eligible_TE) & allowed_E
    return tokens.best_of(usable_TE, tokens.top_k)
