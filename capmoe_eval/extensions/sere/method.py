"""SERE: Similarity-based Expert Re-routing, arXiv 2602.07616.

The tokens' k0 best experts are primary. Every other chosen expert gives all its tokens, with their
weights, to the primary expert whose outputs were the most similar on calibration inputs. An expert
that none is similar enough to keeps its tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from capmoe_eval.extensions.activation import BestFirst
from capmoe_eval.routing.calibrated import CalibratedRule
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.definition import Array, RoutedTokens
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

    def never_binding(self, n_experts: int, top_k: int) -> SERE:
        """Return SERE with all experts of every token primary."""
        return dataclasses.replace(self, k0=top_k, decode="unconstrained")

    def calibrated_rule(self, n_experts: int) -> CalibratedRule:
        """Return what the similarity of a layer's experts must be."""
        return CalibratedRule(
            f"method={self.name}",
            "the similarity of the experts",
            (n_experts, n_experts),
            "similarities from 0 to 1",
            lambda similarity_EE: bool(((similarity_EE >= 0) & (similarity_EE <= 1)).all()),
            "choose another method",
        )

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts that compute although a similar primary expert serves their tokens."""
        import torch

        assert calibrated is not None
        nearest_E = calibrated.masked_fill(first_E == 0, -1).amax(dim=1)
        is_replaced_E = (first_E == 0) & (nearest_E >= self.min_similarity)
        beyond_E = (kept_E > 0) & (is_replaced_E | (demand_E == 0))
        fits = torch.ones((), dtype=torch.bool, device=kept_E.device)
        return beyond_E, ((demand_E > 0) & is_replaced_E).any(), fits

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs with the experts that serve each token's top-k, by the definition."""
        from capmoe_eval.extensions.sere.definition import served_pairs

        return served_pairs(tokens, self)

    def combine_weights(self, tokens: RoutedTokens) -> tuple[Array, Array]:
        """Return the weights that move with the tokens, by the definition."""
        from capmoe_eval.extensions.sere.definition import moved_weights

        return moved_weights(tokens, self)
