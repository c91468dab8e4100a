"""Define the pairs that LASER assigns, for the invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from capmoe_eval.extensions.laser.method import Laser
    from capmoe_eval.routing.definition import RoutedTokens

# Shape suffixes: T counted tokens, E experts.

Array = npt.NDArray[Any]
_SCORE_UNIT = 2.0**40  # scores are added as whole multiples of its inverse


def kept_pairs(tokens: RoutedTokens, method: Laser) -> Array:
    """Return the pairs of every token and the experts that it is assigned to [T, E]."""
    candidate_TE = _candidates(tokens, method)
    place_TE = _own_order(tokens)
    kept_TE = np.zeros_like(candidate_TE)
    for group in np.unique(tokens.group_T):
        members = np.flatnonzero(tokens.group_T == group)
        load_E = np.zeros(tokens.n_experts, dtype=np.int64)
        parts = min(method.load_updates, len(members))
        part_of = np.arange(len(members)) * parts // len(members)
        for part in range(parts):
            rows = members[part_of == part]
            for token in rows:
                pool = np.flatnonzero(candidate_TE[token])
                by_load = np.lexsort((place_TE[token, pool], load_E[pool]))
                kept_TE[token, pool[by_load[: tokens.top_k]]] = True
            load_E += kept_TE[rows].sum(axis=0)
    return kept_TE


def _candidates(tokens: RoutedTokens, method: Laser) -> Array:
    """Return the experts that each token may be assigned to [T, E]: its top-k, or more."""
    score_TE = tokens.score_TE.astype(np.float64)
    unit_TE = np.floor(score_TE * _SCORE_UNIT).astype(np.int64)
    top_T = (unit_TE * tokens.chosen_TE).sum(axis=1).astype(np.float64)
    is_flat_T = top_T < method.peak_mass * unit_TE.sum(axis=1).astype(np.float64)
    least_T = method.viable_score * score_TE.max(axis=1, initial=0.0)
    is_viable_TE = tokens.eligible_TE & (score_TE >= least_T[:, None])
    candidate_TE: Array = tokens.chosen_TE | (is_viable_TE & is_flat_T[:, None])
    return candidate_TE


def _own_order(tokens: RoutedTokens) -> Array:
    """Return each expert's place in its token's own order [T, E]: top-k, then eligible experts."""
    tier_TE = 2 * ~tokens.chosen_TE + ~tokens.eligible_TE
    return np.lexsort((-tokens.ranking_TE, tier_TE), axis=1).argsort(axis=1)
