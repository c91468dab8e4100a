"""Share what OEA, XShare and SERE have: they bound the experts that a batch activates.

The weights of an expert are read once per forward, however many tokens it serves, and in a decode
step reading them takes most of a layer's time. The methods therefore choose experts for all tokens
of a forward together. They bound the activated experts, not the load of any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import LARGEST
from capmoe_eval.routing.method import Counting, LabelPart, Method
from pydantic import Field

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, Scores
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from torch import Tensor

# Shape suffixes: T counted tokens, E routed experts, K = top-k, P = T·K slots.


@dataclass(frozen=True, kw_only=True)
class BestFirst(Counting):
    """The knob of the experts that are activated for each token's sake."""

    keeps_best: ClassVar[bool] = True  # whether every token keeps its best expert

    k0: Annotated[
        int,
        Field(
            ge=0,
            le=LARGEST,
            description="each token's best experts that are activated first; 0 for xshare alone",
        ),
        LabelPart("k", always=True),
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keeps_best and self.k0 == 0:
            raise UsageError(
                f"k0=0: with {self.title} every token keeps its best expert; set k0=1 or more"
            )

    def check_layers(self, layers: int, n_experts: int, top_k: int) -> None:
        """Raise a UsageError if a token has fewer experts than are to be activated first."""
        super().check_layers(layers, n_experts, top_k)
        if self.k0 > top_k:
            raise UsageError(
                f"k0={self.k0}: a token of this model has {top_k} experts; choose at most "
                f"k0={top_k}, at which OEA and SERE change nothing"
            )

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return the method with all experts of every token activated."""
        return dataclasses.replace(self, k0=top_k, decode="unconstrained")

    def replaced(self, first_E: Tensor, calibrated: Tensor | None) -> Tensor:
        """Return a mask [E] of the experts that compute nothing: those that are no token's best."""
        return first_E == 0

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of the bound in a forward.

        Args:
            demand_E: Load of each expert by the router's own choice.
            kept_E: Load that each expert was called with.
            first_E: Number of tokens that have the expert among their k0 best.
            calibrated: What a calibration measured of the layer.

        Returns:
            Which experts or units are beyond their bound; whether one would have been by the
            router's own choice []; and whether the tokens' k0 best experts fit the bound [].
        """
        replaced_E = self.replaced(first_E, calibrated)
        beyond_E = (kept_E > 0) & (replaced_E | (demand_E == 0))
        return beyond_E, ((demand_E > 0) & replaced_E).any(), (first_E >= 0).all()

    def observers(
        self, layers: Sequence[Any], calibrated: Sequence[Tensor] | None
    ) -> Sequence[Any]:
        """Return the check of activated experts."""
        from capmoe_methods.activation_bound import ActivationBound

        return [ActivationBound(layers, self)]


# The decision.


def batch_demand(scores: Scores, k0: int) -> Tensor:
    """Return the tokens' demand for each expert [2, E], as whole numbers.

    The first row is positive where the expert is among a token's k0 best, the second has the sum of
    gate scores. Processes that share a batch add their demands.
    """
    import torch
    from capmoe_eval.routing.decision import best_slots, score_units

    first_E = scores.topk_TK.new_zeros(scores.score_TE.shape[1])
    is_best_P = best_slots(scores, k0).long().reshape(-1)
    first_E = first_E.scatter_reduce(0, scores.topk_TK.reshape(-1), is_best_P, "amax")
    return torch.stack([first_E, score_units(scores.score_TE).sum(dim=0)])


def assign_within(scores: Scores, set_E: Tensor) -> Assignment:
    """Give each token the K best experts of a set, in its own order, or all that it has there."""
    from capmoe_eval.routing.decision import assignment, ranked_experts

    ranked_TE = ranked_experts(scores)  # ineligible ones last: `assignment` leaves them out
    in_set_TE = set_E[ranked_TE]
    best_TE = in_set_TE & (in_set_TE.cumsum(dim=1) <= scores.topk_TK.shape[1])
    return assignment(scores, best_TE.new_empty(best_TE.shape).scatter_(1, ranked_TE, best_TE))


# The definition.


def first_experts(tokens: RoutedTokens, k0: int) -> Array:
    """Return a mask [E] of the experts that are among the k0 best of some token."""
    is_first_E: Array = tokens.best_of(tokens.chosen_TE, k0).sum(axis=0) > 0
    return is_first_E


def pairs_within(tokens: RoutedTokens, allowed_E: Array) -> Array:
    """Return each token's K best pairs with the experts of a set [T, E]."""
    usable_TE = (tokens.chosen_TE | tokens.eligible_TE) & allowed_E
    return tokens.best_of(usable_TE, tokens.top_k)
