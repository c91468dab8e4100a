"""LASER: tokens with flat scores go to the least loaded of their viable experts (2510.03293)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.routing.knobs import Count
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.mixins import Combining, OnRanks
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import RoutedTokens
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups

# Shape suffixes: T counted tokens, E routed experts.


@register
@dataclass(frozen=True, kw_only=True)
class Laser(OnRanks, Combining):
    """A token with peaked scores keeps its top-k; another takes the least loaded candidates.

    Every token has K experts, so that nothing is dropped and no load is bounded. Each of the
    ``ep_size`` ranks balances its own tokens.
    """

    name: ClassVar[str] = "laser"
    title: ClassVar[str] = "LASER"
    source: ClassVar[str] = "Shahout et al., arXiv 2510.03293"
    row: ClassVar[int] = 24

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
        from capmoe_eval.extensions.laser.assign import assign

        return assign(
            scores,
            tokens,
            peak_mass=self.peak_mass,
            viable_score=self.viable_score,
            load_updates=self.load_updates,
        )

    def kept_pairs(self, tokens: RoutedTokens) -> npt.NDArray[np.bool_]:
        """Return the same pairs [T, E], defined in NumPy."""
        from capmoe_eval.extensions.laser.definition import kept_pairs

        return kept_pairs(tokens, self)

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
