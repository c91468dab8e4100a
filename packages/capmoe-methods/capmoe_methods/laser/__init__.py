"""LASER: tokens with flat scores go to the least loaded of their viable experts (2510.03293)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from capmoe_eval.routing.knobs import Count
from capmoe_eval.routing.method import Combining, LabelPart, Method, OnRanks
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register
from pydantic import Field

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E routed experts.


@register
class Laser(OnRanks, Combining):
    """A token with peaked scores keeps its top-k; another takes the least loaded candidates.

    Every token has K experts, so that nothing is dropped and no load is bounded. Each of the
    ``ep_size`` ranks balances its own tokens.
    """

    name = "laser"
    title = "LASER"
    source = "Shahout et al., arXiv 2510.03293"
    row = 24

    peak_mass: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="a token keeps its top-k if they have this share of its scores",
            examples=[0.75],
        ),
        LabelPart("mass", always=True),
    ] = 0.75
    viable_score: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="else an expert is viable with this share of the token's best score",
            examples=[0.25],
        ),
        LabelPart("viable", always=True),
    ] = 0.25
    load_updates: Annotated[
        Count,
        Field(description="how often a forward counts loads anew", examples=[64]),
        LabelPart("updates"),
    ] = 64

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the K experts of every token."""
        from capmoe_methods.laser import decision

        return decision.assign(scores, tokens, self)

    @property
    def moves_nothing(self) -> bool:
        """True if every token keeps its top-k: all are peaked, or no load is ever counted."""
        return self.peak_mass == 0 or self.load_updates == 1

    def simplest(self) -> Method:
        """Return the baseline where every token keeps its top-k and its weights."""
        if not self.moves_nothing:
            return self
        # Every token stays, but weights may be normalised.
        return replace(self, peak_mass=0.0) if self.renormalize == "always" else Baseline()

    def effective(self) -> set[str]:
        """Return the knobs that have an effect: those of weights where every token stays."""
        names = super().effective()
        idle = {"ep_size", "viable_score", "load_updates"}
        return names - idle if self.peak_mass == 0 else names

    def never_binding(self, n_experts: int, top_k: int) -> Laser:
        """Return LASER with every token peaked: it decides, and changes no expert."""
        return replace(self, peak_mass=0.0, decode="unconstrained")

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs of every token and the experts that it is assigned to, by definition."""
        import numpy as np

        candidate_TE = self._candidates(tokens)
        tier_TE = 2 * ~tokens.chosen_TE + ~tokens.eligible_TE
        place_TE = np.lexsort((-tokens.ranking_TE, tier_TE), axis=1).argsort(axis=1)
        kept_TE = np.zeros_like(candidate_TE)
        for group in np.unique(tokens.group_T):
            members = np.flatnonzero(tokens.group_T == group)
            load_E = np.zeros(tokens.n_experts, dtype=np.int64)
            parts = min(self.load_updates, len(members))
            part_of = np.arange(len(members)) * parts // len(members)
            for part in range(parts):
                rows = members[part_of == part]
                for token in rows:
                    pool = np.flatnonzero(candidate_TE[token])
                    by_load = np.lexsort((place_TE[token, pool], load_E[pool]))
                    kept_TE[token, pool[by_load[: tokens.top_k]]] = True
                load_E += kept_TE[rows].sum(axis=0)
        return kept_TE

    def _candidates(self, tokens: RoutedTokens) -> Array:
        """Define the experts that each token may be assigned to [T, E]: its top-k, or more."""
        score_TE, unit_TE = tokens.score_TE.astype("float64"), tokens.unit_TE
        top_T = (unit_TE * tokens.chosen_TE).sum(axis=1).astype("float64")
        is_flat_T = top_T < self.peak_mass * unit_TE.sum(axis=1).astype("float64")
        least_T = self.viable_score * score_TE.max(axis=1, initial=0.0)
        is_viable_TE = tokens.eligible_TE & (score_TE >= least_T[:, None])
        candidate_TE: Array = tokens.chosen_TE | (is_viable_TE & is_flat_T[:, None])
        return candidate_TE
