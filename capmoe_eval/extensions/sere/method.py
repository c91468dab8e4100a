"""SERE: Similarity-based Expert Re-routing, arXiv 2602.07616.

The tokens' k0 best experts are primary. Every other chosen expert gives all its tokens, with their
weights, to the primary expert whose outputs were the most similar on calibration inputs. An expert
that none is similar enough to keeps its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.extensions.activation import BestFirst
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups


@register
@dataclass(frozen=True, kw_only=True)
class SERE(BestFirst):
    """The tokens of a secondary expert go to the primary expert that is the most similar."""

    name: ClassVar[str] = "sere"
    title: ClassVar[str] = "SERE"
    source: ClassVar[str] = "arXiv 2602.07616"
    row: ClassVar[int] = 22

    min_similarity: Annotated[
        float,
        Field(
            ge=0,
            description="an expert without a primary one at least as similar keeps its tokens; "
            "above 1 no expert is similar enough",
            examples=[0.3],
        ),
        LabelPart("sim", always=True),
    ] = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_no_best()

    @property
    def calibration(self) -> str:
        """The similarity of the experts' outputs."""
        return "expert_similarity"

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the pairs with the experts that serve each token's top-k."""
        from capmoe_eval.extensions.batch_demand import batch_demand
        from capmoe_eval.extensions.sere.decision import reroute, substitutes

        assert layer.calibrated is not None
        primary_E = layer.total(batch_demand(scores, self.k0))[0] > 0
        return reroute(scores, substitutes(primary_E, layer.calibrated, self.min_similarity))

    def simplest(self) -> Method:
        """Return the baseline where no expert is similar enough."""
        return Baseline() if self.min_similarity > 1 else self
