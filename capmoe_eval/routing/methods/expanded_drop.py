"""Expanded Drop: experts with free capacity take more tokens (paper, Algorithm 2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from capmoe_eval.routing.knobs import Count
from capmoe_eval.routing.method import Bounded, LabelPart, Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E routed experts, K = top-k, A slots added to the top-k,
# S = K + A slots per token.


@register
class ExpandedDrop(Bounded):
    """Every expert keeps its C best-scoring candidates.

    The candidates of a token are its top-k and those that ``candidates`` adds.
    """

    name = "expanded_drop"
    title = "Expanded Drop"
    source = "paper, Algorithm 2"
    row = 6
    fills_slots = True

    candidates: Annotated[
        Literal["local", "ranked", "global"],
        Field(
            description="a token's candidates beside its top-k: the experts of its rank, the next "
            "m by score, or all (expert-choice routing)"
        ),
    ] = "local"
    m: Annotated[
        Count,
        Field(description="of candidates=ranked: how many (Table 11: 2k and 3k)"),
        LabelPart("m", always=True),
    ] = 4
    protect_topk: Annotated[
        bool, Field(description="a token's own top-k go before added candidates")
    ] = False
    max_k: Annotated[
        bool, Field(description="a token keeps at most K experts in the end (Table 11, w/ max)")
    ] = False

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the C best-scoring candidates of every unit."""
        from capmoe_eval.routing.buckets import ADDED
        from capmoe_eval.routing.decision import (
            Assignment,
            addable,
            keep_within_capacity,
            score_keys,
        )

        index_TS, valid_TS = self._candidate_slots(scores, tokens, layer)
        key_TS = score_keys(scores, index_TS)
        if self.protect_topk:
            key_TS = key_TS + addable(scores).gather(1, index_TS).long() * ADDED
        slots = {"index_TS": index_TS, "key_TS": key_TS, "valid_TS": valid_TS}
        n_experts = scores.score_TE.shape[1]
        keep_TS = keep_within_capacity(self, tokens, layer, n_experts=n_experts, **slots)
        if self.max_k:
            keep_TS = _at_most(scores.topk_TK.shape[1], index_TS, keep_TS, key_TS)
        return Assignment(index_TS, keep_TS)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the C best-scoring candidates of every unit, by the definition."""
        from capmoe_eval.routing import definition

        modality, protect = self.modality, self.protect_topk
        keys = definition.priority(
            tokens, -tokens.score_TE, modality=modality, protect_topk=protect
        )
        added_TE = tokens.eligible_TE & ~tokens.chosen_TE
        if self.candidates == "ranked":
            added_TE = tokens.best_of(added_TE, self.m)
        elif self.candidates == "local":
            added_TE = added_TE & (tokens.rank_E == tokens.rank_T[:, None])
        kept_TE = definition.best_in_buckets(tokens, tokens.chosen_TE | added_TE, keys)
        return definition.at_most_k(tokens, kept_TE, keys) if self.max_k else kept_TE

    def _candidate_slots(
        self, scores: Scores, tokens: TokenGroups, layer: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Return the experts [T, S] of every token's slots, and a mask of the valid slots."""
        import torch

        from capmoe_eval.routing.decision import addable, by_rank, ranked_experts

        topk_TK, (n_tokens, n_experts) = scores.topk_TK, scores.score_TE.shape
        top_k, expert_E = topk_TK.shape[1], torch.arange(n_experts, device=topk_TK.device)
        if self.candidates == "ranked":
            added_TA = ranked_experts(scores)[:, top_k : min(top_k + self.m, n_experts)]
        elif self.candidates == "global":
            added_TA = expert_E.expand(n_tokens, -1)
        else:
            placed_RN = layer.calibrated if self.is_placed else None
            added_TA = by_rank(expert_E, self.ep_size, placed_RN).index_select(0, tokens.rank_T)
        valid_TA = addable(scores).gather(1, added_TA)
        chosen_TK = torch.ones_like(topk_TK, dtype=torch.bool)
        return torch.cat([topk_TK, added_TA], dim=1), torch.cat([chosen_TK, valid_TA], dim=1)

    @property
    def uses_local_candidates(self) -> bool:
        """True if a token's candidates depend on the experts of its rank."""
        return self.candidates == "local"

    @property
    def never_adds(self) -> bool:
        """True if no candidate is ever added: the top-k fill the token's slots, or the device.

        What is added may still go before the top-k of another modality.
        """
        gamma = self.factor.uniform
        if gamma is None or not self.protect_topk:
            return False
        fills_device = self.granularity == "device" and self.ep_size == 1 and gamma <= 1
        fills_token = self.never_binds and self.max_k
        ignores_modality = self.modality == "uniform" or gamma == math.inf
        return (fills_device or fills_token) and ignores_modality

    def simplest(self) -> Method:
        """Return a method without candidates where none is ever added or kept."""
        if self.candidates == "local" and self.ep_size == 1:  # the rank has all experts
            return self.converted(type(self), candidates="global")
        if self.never_adds:
            return self.converted(TokenDrop)
        return self if self.never_binds else super().simplest()

    def effective(self) -> set[str]:
        """Return the knobs that have an effect."""
        names = super().effective()
        return names if self.candidates == "ranked" else names - {"m"}

    def identity(self) -> dict[str, Any]:
        """Return the name and the knobs; ``m`` only with ``candidates="ranked"``."""
        knobs = super().identity()
        if self.candidates != "ranked":
            del knobs["m"]
        return knobs

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return Token Drop at γ=E: candidates are added at any γ."""
        return self.converted(TokenDrop).never_binding(n_experts, top_k)


def _at_most(top_k: int, index_TS: Tensor, keep_TS: Tensor, key_TS: Tensor) -> Tensor:
    """Return ``keep_TS`` cut to each token's K best pairs (Table 11, "w/ max").

    A token's pairs are of one modality, so that none of them comes after the others for it.
    """
    import torch

    by_expert_TS = index_TS.argsort(dim=1, stable=True)
    kept_TS = keep_TS.gather(1, by_expert_TS)
    key_TS = key_TS.gather(1, by_expert_TS).long()
    key_TS = key_TS.masked_fill(~kept_TS, torch.iinfo(torch.long).max)
    place_TS = key_TS.argsort(dim=1, stable=True).argsort(dim=1)
    kept_TS = kept_TS & (place_TS < top_k)
    return torch.empty_like(kept_TS).scatter_(1, by_expert_TS, kept_TS)
