"""Decide which candidate pairs are kept: what a decision knows, and the parts that methods share.

A decision lists candidate pairs, gives each a *key* (the smaller is kept first), and keeps the C
smallest of every bucket. A bucket is (capacity group, expert) or (capacity group, device). Nothing
loops over tokens or experts, and ties are always broken the same way: the lower token index first,
then the lower expert index.

A placement [R, E/R] has the experts of every emulated rank, in rising order, each expert once; None
stands for contiguous placement. It says which experts share a device. The numbers of experts stay,
and with them all ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from capmoe_eval.routing.buckets import DROPPED_FIRST, gate_key, keep_best

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Bounded, Method

# Shape suffixes: B sequences, S positions of a batch, or candidate slots of a token, N = B·S rows
# of the flattened batch, T counted tokens, E routed experts, K = top-k, H hidden size, G capacity
# groups, R ranks (devices), L = E/R experts of a rank.


# The router's scores, the order of a token's experts, and what a decision returns.


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


# The groups of tokens that share a capacity.


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``, without waiting for a copy from the host.

    CUDA has read such a source when the call returns, since its memory is not pinned.
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


@dataclass(frozen=True)
class TokenGroups:
    """The counted tokens of a flattened batch, and the capacity group and rank of each.

    Where several processes share the batch, the rows are this process's own; ``tokens`` covers all.
    """

    rows_T: Tensor  # rows of the counted tokens in the flattened [B·S] batch, ascending
    group_T: Tensor  # capacity group of each counted token, ascending
    rank_T: Tensor  # rank of each counted token
    # Counted tokens of each of the G groups, on the host, so that capacities are computed without
    # waiting for a device.
    tokens: tuple[int, ...]
    n_rows: int  # N = B·S
    first: int = 0  # counted tokens on the processes before this one

    @property
    def n_tokens(self) -> int:
        """Number of counted tokens T over all groups."""
        return sum(self.tokens)

    @property
    def every_row_counts(self) -> bool:
        """True if every row of this process is a counted token."""
        return len(self.rows_T) == self.n_rows

    def counted(self, value_N: Tensor) -> Tensor:
        """Return the values of the counted tokens [T, …] from those of every row [N, …]."""
        return value_N if self.every_row_counts else value_N.index_select(0, self.rows_T)

    def every_row(self, value_TS: Tensor, other: float) -> Tensor:
        """Return a value for every row [N, S]: a counted token's own, ``other`` for other rows."""
        if self.every_row_counts:
            return value_TS
        value_NS = value_TS.new_full((self.n_rows, value_TS.shape[1]), other)
        return value_NS.index_copy_(0, self.rows_T, value_TS)

    def to(self, device: torch.device) -> TokenGroups:
        """Return the groups with their tensors on ``device``."""
        tensors = (self.rows_T, self.group_T, self.rank_T)
        rows_T, group_T, rank_T = (moved(tensor, device) for tensor in tensors)
        return TokenGroups(rows_T, group_T, rank_T, self.tokens, self.n_rows, self.first)


BatchShare: TypeAlias = tuple[Tensor, Tensor, int, int]
"""The sequences of a batch that several processes share, and this process's place among them.

They are the counted tokens of every sequence [B], the process of each, ascending [B], the number of
processes, and the index of this process's first sequence.
"""


def group_tokens(
    counted_BS: Tensor, *, ep_size: int = 1, scope: str = "batch", share: BatchShare | None = None
) -> TokenGroups:
    """Spread the sequences of a batch over emulated ranks and form the capacity groups.

    ``counted_BS`` is true where a token counts in T and takes slots. Sequence b of B goes to rank
    ``floor(b·R/B)`` of R = ``ep_size`` (neighbours together, as data parallelism would). With
    ``scope="batch"`` a rank is one group (paper §4, Figure 3: the *local* capacity), with
    ``scope="sequence"`` every sequence is one. Where ``counted_BS`` is one process's part of a
    batch, ``share`` describes the whole, and each process is one rank (with ``ep_size=1`` all of
    them together are one).
    """
    device = counted_BS.device
    if share is None:
        tokens_B, first = counted_BS.sum(dim=1), 0
        rank_B = torch.arange(len(tokens_B), device=device) * ep_size // len(tokens_B)
    else:
        tokens_B, owner_B, size, first = share
        rank_B = owner_B * ep_size // size
    group_B = rank_B if scope == "batch" else torch.arange(len(tokens_B), device=device)
    n_groups = ep_size if scope == "batch" else len(tokens_B)
    tokens_G = torch.zeros(n_groups, dtype=torch.long, device=device)
    tokens_G.scatter_add_(0, group_B, tokens_B)
    rows_T = counted_BS.reshape(-1).nonzero().squeeze(1)
    sequence_T = first + rows_T // max(counted_BS.shape[1], 1)
    return TokenGroups(
        rows_T=rows_T,
        group_T=group_B[sequence_T],
        rank_T=rank_B[sequence_T],
        tokens=tuple(tokens_G.tolist()),
        n_rows=counted_BS.numel(),
        first=int(tokens_B[:first].sum()) if first else 0,
    )


# The layer of a decision, and the pairs that are kept.


@dataclass(frozen=True)
class LayerContext:
    """A layer and a forward for a decision, on the device of the scores."""

    limit_G: Tensor | None = None  # C of a unit in each group; None without a capacity
    random_TE: Tensor | None = None  # of a method that draws numbers
    image_T: Tensor | None = None  # True for a token of an image; None where there are none
    hidden_TH: Tensor | None = None  # the router's input, for a method that reads it
    # What a calibration measured of the layer: the similarity of experts [E, E], the modality of
    # each [E], or the experts of each rank [R, L], rising.
    calibrated: Tensor | None = None
    # Sums whole numbers over the processes that share the batch; of one process, the number itself.
    total: Callable[[Tensor], Tensor] = torch.positive

    @classmethod
    def of(
        cls,
        method: Method,
        tokens: TokenGroups,
        *,
        top_k: int,
        n_experts: int,
        layer: int = 0,
        forward: int = 0,
        **parts: Any,
    ) -> LayerContext:
        """Return the context of a layer's decision, with the capacities and random numbers.

        ``method`` has the layer's own γ. The numbers of the ``layer`` and of the ``forward``
        determine random numbers. ``parts`` are the other fields.
        """
        device, limit_G = tokens.group_T.device, None
        if method.factor is not None:
            limits = method.limits(tokens.tokens, top_k=top_k, n_experts=n_experts)
            limit_G = moved(torch.tensor(limits, device="cpu"), device)
        random_TE = method.random_numbers(tokens, n_experts, layer, forward)
        if random_TE is not None:
            random_TE = moved(random_TE, device)
        return cls(limit_G, random_TE, **parts)


def by_rank(amount_E: Tensor, ranks: int, placed_RL: Tensor | None) -> Tensor:
    """Return the amounts of experts […, E], grouped by the rank that holds them […, R, L]."""
    if placed_RL is None:
        return amount_E.view(*amount_E.shape[:-1], ranks, amount_E.shape[-1] // ranks)
    return amount_E[..., placed_RL]


def rank_of(expert: Tensor, local: int, placed_RL: Tensor | None) -> Tensor:
    """Return the rank that holds each of some experts; ``local`` is L, the experts of a rank."""
    if placed_RL is None:
        return expert // local
    return placed_RL.flatten().argsort()[expert] // local


def expert_load(index: Tensor, n_experts: int) -> Tensor:
    """Return the number of pairs of each expert [E], from the experts of pairs in any shape."""
    flat = index.reshape(-1)
    load_E = torch.zeros(n_experts, dtype=torch.long, device=flat.device)
    return load_E.scatter_add_(0, flat, torch.ones_like(flat))


def score_keys(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return keys [T, S] by which a unit keeps its best-scoring pairs (Equations 7 to 10)."""
    return gate_key(scores.score_TE.gather(1, index_TS))


def keep_within_capacity(
    method: Bounded,
    tokens: TokenGroups,
    layer: LayerContext,
    *,
    index_TS: Tensor,
    key_TS: Tensor,
    n_experts: int,
    valid_TS: Tensor | None = None,
) -> Tensor:
    """Return a mask [T, S] of the valid slots that every unit keeps within its capacity.

    Args:
        method: The method, which says the unit and the modality that is dropped first.
        tokens: The capacity group of each token.
        layer: The capacities.
        index_TS: The expert of each slot.
        key_TS: The order in which a unit keeps pairs: whole numbers from 0 to 2³² - 1, to which
            :data:`capmoe_eval.routing.buckets.ADDED` may be added.
        n_experts: Routed experts E.
        valid_TS: False for a slot without a pair; None if all are valid.

    Raises:
        TypeError: If the keys are no whole numbers.
    """
    assert layer.limit_G is not None
    if key_TS.is_floating_point():
        raise TypeError(
            f"key_TS: keys are whole numbers, not {key_TS.dtype}; make them of scores by "
            "capmoe_eval.routing.buckets.score_key(score_TS), which puts the highest score first"
        )
    if layer.image_T is not None and method.modality != "uniform":
        last_T = layer.image_T if method.modality == "image_first" else ~layer.image_T
        key_TS = key_TS + last_T[:, None].long() * DROPPED_FIRST
    by_device = method.granularity == "device"
    units, unit_TS = n_experts, index_TS
    if by_device:
        # A device's bucket holds several experts of a token: in expert order, ties are broken by
        # token first and then by expert.
        index_TS, order_TS = index_TS.sort(dim=1)
        key_TS = key_TS.gather(1, order_TS)
        valid_TS = None if valid_TS is None else valid_TS.gather(1, order_TS)
        placed_RL = layer.calibrated if method.is_placed else None
        units, unit_TS = method.ep_size, rank_of(index_TS, n_experts // method.ep_size, placed_RL)
    bucket_TS = torch.add(unit_TS, tokens.group_T.unsqueeze(1), alpha=units)
    keep_TS = keep_best(bucket_TS, key_TS, valid_TS, layer.limit_G.unsqueeze(1).expand(-1, units))
    return torch.empty_like(keep_TS).scatter_(1, order_TS, keep_TS) if by_device else keep_TS
