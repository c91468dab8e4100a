"""SERE: similar experts serve the tokens of experts that few tokens need.

Similarity-based Expert Re-routing, arXiv 2602.07616. The tokens' k0 best experts are primary. Every
other chosen expert gives all its tokens, with their weights, to the primary expert whose outputs
were the most similar on calibration inputs. An expert that none is similar enough to keeps its
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from capmoe_eval.lazy import np
from capmoe_eval.routing.method import CalibratedRule, LabelPart, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register, register_calibration
from pydantic import Field

from capmoe_methods.activation import BestFirst, batch_demand, first_experts

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from torch import Tensor

# Shape suffixes: T counted tokens, E routed experts, K = top-k, S = 2K slots per token.

register_calibration("expert_similarity", "capmoe_methods.sere.calibration:ExpertSimilarity")


@register
class SERE(BestFirst):
    """The tokens of a secondary expert go to the primary expert that is the most similar."""

    name = "sere"
    title = "SERE"
    source = "arXiv 2602.07616"
    row = 22

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

    @property
    def calibration(self) -> str:
        """The similarity of the experts' outputs."""
        return "expert_similarity"

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the pairs with the experts that serve each token's top-k."""
        assert layer.calibrated is not None
        primary_E = layer.total(batch_demand(scores, self.k0))[0] > 0
        return reroute(scores, substitutes(primary_E, layer.calibrated, self.min_similarity))

    def simplest(self) -> Method:
        """Return the baseline where no expert is similar enough."""
        return Baseline() if self.min_similarity > 1 else self

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

    def replaced(self, first_E: Tensor, calibrated: Tensor | None) -> Tensor:
        """Return the experts whose tokens a similar primary expert serves."""
        assert calibrated is not None
        nearest_E = calibrated.masked_fill(first_E == 0, -1).amax(dim=1)
        return super().replaced(first_E, calibrated) & (nearest_E >= self.min_similarity)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs with the experts that serve each token's top-k, by the definition."""
        kept_TE = np.zeros_like(tokens.chosen_TE)
        np.put_along_axis(kept_TE, served_by(tokens, self)[tokens.topk_TK], True, axis=1)
        return kept_TE

    def combine_weights(self, tokens: RoutedTokens) -> tuple[Array, Array]:
        """Return the weights that move with the tokens, by the definition, and which are sums."""
        router_TE = tokens.router_weight_TE
        moved_TE = np.zeros_like(router_TE)
        row_T1 = np.arange(len(moved_TE))[:, None]
        np.add.at(moved_TE, (row_T1, served_by(tokens, self)[tokens.topk_TK]), tokens.weight_TK)
        return moved_TE, moved_TE != router_TE


def served_by(tokens: RoutedTokens, method: SERE) -> Array:
    """Define the expert that serves each expert's tokens [E]."""
    similarity_EE, primary_E = tokens.calibrated, first_experts(tokens, method.k0)
    assert similarity_EE is not None
    served_by_E = np.arange(tokens.n_experts)
    primary = np.flatnonzero(primary_E)
    for expert in np.flatnonzero(~primary_E):
        nearest = primary[similarity_EE[expert, primary].argmax()] if len(primary) else expert
        if similarity_EE[expert, nearest] >= similarity_EE.dtype.type(method.min_similarity):
            served_by_E[expert] = nearest
    return served_by_E


def substitutes(primary_E: Tensor, similarity_EE: Tensor, min_similarity: float) -> Tensor:
    """Return the expert that serves the tokens of each expert [E]: itself, or a primary one.

    Args:
        primary_E: True for the batch's primary experts, which serve their own tokens.
        similarity_EE: Similarity of the experts' outputs, from 0 to 1. Of equally similar primary
            experts the one with the lower index serves.
        min_similarity: An expert without a primary one at least as similar serves its own tokens.
    """
    import torch

    own_E = torch.arange(len(primary_E), device=primary_E.device)
    to_primary_EE = similarity_EE.masked_fill(~primary_E, -1.0)
    most_E = to_primary_EE.amax(dim=1)
    # The lowest index of several: argmax may return any of them.
    nearest_E = torch.where(to_primary_EE == most_E[:, None], own_E, len(own_E)).amin(dim=1)
    is_moved_E = ~primary_E & (most_E >= min_similarity)
    return torch.where(is_moved_E, nearest_E, own_E)


def reroute(scores: Scores, served_by_E: Tensor) -> Assignment:
    """Send each pair of a token's top-k to the expert that serves it (:func:`substitutes`).

    Pairs that meet at one expert are one pair, with the sum of their weights.
    """
    import torch
    from capmoe_eval.routing.decision import Assignment

    topk_TK = scores.topk_TK
    goal_TK = served_by_E[topk_TK]
    stays_TK = goal_TK == topk_TK
    index_TS = torch.cat([topk_TK, goal_TK], dim=1)
    usable_TS = torch.cat([stays_TK, ~stays_TK], dim=1)
    meets_TKS = usable_TS[:, None, :] & (goal_TK[:, :, None] == index_TS[:, None, :])
    slots = torch.arange(index_TS.shape[1], device=index_TS.device)
    slot_TK = torch.where(meets_TKS, slots, len(slots)).amin(dim=2)  # the first that fits
    keep_TS = torch.zeros_like(usable_TS).scatter_(1, slot_TK, True)
    return Assignment(index_TS, keep_TS, slot_TK)
