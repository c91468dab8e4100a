"""Token Reroute: dropped pairs choose again among the experts that are left (v1, Algorithm 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from capmoe_eval.routing.knobs import Count
from capmoe_eval.routing.method import Bounded, LabelPart, Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import register

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

# Shape suffixes: T counted tokens, E routed experts, K = top-k.


@register
class TokenReroute(Bounded):
    """Repeat: choose the top-k of the remaining pairs, drop the overflow by score, mask it."""

    name = "token_reroute"
    title = "Token Reroute"
    source = "paper v1, Algorithm 1"
    row = 7
    fills_slots = True

    rounds: Annotated[
        Count,
        Field(description="how often a token chooses; with 1 it is Token Drop"),
        LabelPart("r"),
    ] = 3

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the pairs that are kept in the last round."""
        import torch

        from capmoe_eval.routing.decision import (
            assignment,
            keep_within_capacity,
            ranked_experts,
            score_keys,
            usable,
        )

        top_k, n_experts = scores.topk_TK.shape[1], scores.score_TE.shape[1]
        ranked_TE = ranked_experts(scores)
        slots = {"index_TS": ranked_TE, "key_TS": score_keys(scores, ranked_TE)}
        kept_TE = remains_TE = usable(scores).gather(1, ranked_TE)  # in ranked order
        for number in range(1, self.rounds + 1):
            selected_TE = remains_TE & (remains_TE.cumsum(dim=1) <= top_k)
            kept_TE = keep_within_capacity(
                self, tokens, layer, n_experts=n_experts, valid_TS=selected_TE, **slots
            )
            rejected_TE = selected_TE & ~kept_TE
            # Another round would choose and keep the same pairs. A GPU computes some sooner than
            # it says whether it need not.
            may_ask = rejected_TE.device.type == "cpu" or number % 64 == 0
            if may_ask and not torch.compiler.is_compiling() and not rejected_TE.any():
                break
            remains_TE = remains_TE & ~rejected_TE
        by_expert_TE = torch.empty_like(kept_TE).scatter_(1, ranked_TE, kept_TE)
        return assignment(scores, by_expert_TE)

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs that are kept in the last round, by the definition."""
        from capmoe_eval.routing import definition

        keys = definition.priority(tokens, -tokens.score_TE, modality=self.modality)
        kept_TE = tokens.chosen_TE
        remaining_TE = kept_TE | tokens.eligible_TE
        for _ in range(self.rounds):
            selected_TE = tokens.best_of(remaining_TE, tokens.top_k)
            kept_TE = definition.best_in_buckets(tokens, selected_TE, keys)
            rejected_TE = selected_TE & ~kept_TE
            if not rejected_TE.any():  # another round would keep the same pairs
                break
            remaining_TE = remaining_TE & ~rejected_TE
        return kept_TE

    def simplest(self) -> Method:
        """Return Token Drop for one round."""
        return self.converted(TokenDrop) if self.rounds == 1 else super().simplest()
