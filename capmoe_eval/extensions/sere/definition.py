"""Define which expert serves the tokens of each expert under SERE, and with which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from capmoe_eval.extensions.batch_definition import first_experts
from capmoe_eval.routing.definition import Array, RoutedTokens

if TYPE_CHECKING:
    from capmoe_eval.extensions.sere.method import SERE

# Shape suffixes: T counted tokens, E experts, K = top-k.


def substitutes(tokens: RoutedTokens, method: SERE) -> npt.NDArray[np.int64]:
    """Return the expert that serves each expert's tokens [E]."""
    similarity_EE, primary_E = tokens.calibrated, first_experts(tokens, method.k0)
    assert similarity_EE is not None
    served_by_E = np.arange(tokens.n_experts)
    primary = np.flatnonzero(primary_E)
    for expert in np.flatnonzero(~primary_E):
        nearest = primary[similarity_EE[expert, primary].argmax()] if len(primary) else expert
        least = similarity_EE.dtype.type(method.min_similarity)
        if similarity_EE[expert, nearest] >= least:
            served_by_E[expert] = nearest
    return served_by_E


def served_pairs(tokens: RoutedTokens, method: SERE) -> Array:
    """Return the pairs of the tokens with the experts that serve them [T, E]."""
    kept_TE = np.zeros_like(tokens.chosen_TE)
    served_TK = substitutes(tokens, method)[tokens.topk_TK]
    np.put_along_axis(kept_TE, served_TK, True, axis=1)
    return kept_TE


def moved_weights(tokens: RoutedTokens, method: SERE) -> tuple[Array, Array]:
    """Return the weight of every pair [T, E], and which of them are sums.

    A pair takes its weight along to the expert that serves it.
    """
    router_TE = tokens.router_weight_TE
    served_TK = substitutes(tokens, method)[tokens.topk_TK]
    moved_TE = np.zeros_like(router_TE)
    row_T1 = np.arange(len(served_TK))[:, None]
    np.add.at(moved_TE, (row_T1, served_TK), tokens.weight_TK)
    return moved_TE, moved_TE != router_TE
