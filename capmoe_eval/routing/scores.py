"""Define the router's scores, the order of a token's experts, and the decision on its pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shape suffixes: T counted tokens, E routed experts, K = top-k, S slots per token.


@dataclass(frozen=True)
class Scores:
    """The router's scores of all (token, expert) pairs, and its own top-k."""

    # Gate scores s in float32, non-negative (softmax, or sigmoid where the family uses it), after
    # the family's group masking and before its scaling.
    score_TE: Tensor
    topk_TK: Tensor  # the router's own choice K(t), in its order
    # The scores that the router ranks experts by; None where they are score_TE (DeepSeek-V3 adds a
    # correction bias for the choice alone).
    choice_TE: Tensor | None = None
    # False where the family's group masking rules an expert out for a token; such a pair is never
    # an added candidate. None if every expert is eligible.
    eligible_TE: Tensor | None = None

    @property
    def ranking_TE(self) -> Tensor:
        """The scores that the router ranks experts by."""
        return self.score_TE if self.choice_TE is None else self.choice_TE


@dataclass(frozen=True)
class Assignment:
    """The candidate pairs of every token, and which of them are kept."""

    index_TS: Tensor  # expert of each slot; the first K are the router's own choice in its order
    keep_TS: Tensor  # True where the slot's pair is kept; False also for a slot without a pair
    # The slot that takes the weight of each pair of the router's own choice, where weights move
    # with the tokens; None where every pair has its own weight.
    slot_TK: Tensor | None = None
    details: Any = None  # for the method's own observers

    def changed_T(self, top_k: int) -> Tensor:
        """Return a mask [T] of the tokens that lost a top-k pair or gained another pair."""
        return ~self.keep_TS[:, :top_k].all(dim=1) | self.keep_TS[:, top_k:].any(dim=1)


def score_units(score: Tensor) -> Tensor:
    """Return scores as whole multiples of 2⁻⁴⁰, whose sum does not depend on the order."""
    return (score.double() * 2.0**40).long()


def bucket_loads(
    cell_T: Tensor, index_TS: Tensor, amount_TS: Tensor, shape: Sequence[int]
) -> Tensor:
    """Return the sums of the slots' amounts by cell of tokens and expert [*shape].

    ``shape`` is that of the cells, then E; ``cell_T`` numbers them as a flat tensor does.
    """
    bucket_TS = cell_T[:, None] * shape[-1] + index_TS
    load_B = amount_TS.new_zeros(math.prod(shape))
    return load_B.scatter_add_(0, bucket_TS.reshape(-1), amount_TS.reshape(-1)).view(*shape)


def addable(scores: Scores) -> Tensor:
    """Return a mask [T, E], True where an eligible expert is not among the token's top-k."""
    if scores.eligible_TE is not None:
        return scores.eligible_TE.scatter(1, scores.topk_TK, False)
    return torch.ones_like(scores.score_TE, dtype=torch.bool).scatter_(1, scores.topk_TK, False)


def usable(scores: Scores) -> Tensor:
    """Return a mask [T, E], True where an expert is eligible or among the token's top-k."""
    return addable(scores).scatter_(1, scores.topk_TK, True)


def ranked_experts(scores: Scores) -> Tensor:
    """Return each token's experts from best to worst [T, E]; its top-k are the first K.

    The router's own choice comes first, however it broke ties; the other eligible experts follow,
    then the ineligible ones. Equal scores are ordered by expert index.
    """
    order_TE = scores.ranking_TE.argsort(dim=1, descending=True, stable=True)
    tier_TE = torch.full_like(order_TE, 2, dtype=torch.int8).scatter_(1, scores.topk_TK, 0)
    if scores.eligible_TE is not None:
        tier_TE += ~scores.eligible_TE
    by_tier_TE = tier_TE.gather(1, order_TE).argsort(dim=1, stable=True)
    return order_TE.gather(1, by_tier_TE)


def best_slots(scores: Scores, most: int) -> Tensor:
    """Return a mask [T, K] of the slots with a token's ``most`` best experts."""
    best_T1M = ranked_experts(scores)[:, None, : min(most, scores.topk_TK.shape[1])]
    return (scores.topk_TK[:, :, None] == best_T1M).any(dim=2)


def assignment(scores: Scores, keep_TE: Tensor) -> Assignment:
    """Return the kept pairs [T, E], at most K per token, as slots.

    The pairs that are kept beyond the router's own choice fit into K further slots.
    """
    top_k = scores.topk_TK.shape[1]
    is_added_TE = (keep_TE & addable(scores)).long()
    is_added_TE, added_TE = is_added_TE.sort(dim=1, descending=True, stable=True)
    return Assignment(
        torch.cat([scores.topk_TK, added_TE[:, :top_k]], dim=1),
        torch.cat([keep_TE.gather(1, scores.topk_TK), is_added_TE[:, :top_k].bool()], dim=1),
    )
