"""Decide which candidate pairs are kept: the parts that methods share, on tensors.

A decision lists candidate pairs, gives each a *key* (the smaller is kept first), and keeps the C
smallest of every bucket. A bucket is (capacity group, expert) or (capacity group, device). Nothing
loops over tokens or experts, and ties are always broken the same way: the lower token index first,
then the lower expert index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capmoe_eval.routing.buckets import ADDED, DROPPED_FIRST, keep_best, score_key
from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.placement import rank_of
from capmoe_eval.routing.scores import Scores, addable
from capmoe_eval.routing.tokens import TokenGroups

if TYPE_CHECKING:
    from capmoe_eval.routing.mixins import Bounded

# Shape suffixes: T counted tokens, E routed experts, K = top-k, S candidate slots per token,
# G capacity groups, D devices (ranks).


def score_keys(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return keys [T, S] by which a unit keeps its best-scoring pairs (Equations 7 to 10)."""
    return score_key(scores.score_TE.gather(1, index_TS))


def added_bit(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return :data:`ADDED` for slots beyond the router's own choice, 0 for the others [T, S]."""
    return addable(scores).gather(1, index_TS).long() * ADDED


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
        key_TS: The order in which a unit keeps pairs, below 2³¹, or below 2³² with
            :data:`ADDED`.
        n_experts: Routed experts E.
        valid_TS: False for a slot without a pair; None if all are valid.
    """
    assert layer.limit_G is not None
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
        placed_RN = layer.calibrated if method.is_placed else None
        units, unit_TS = method.ep_size, rank_of(index_TS, n_experts // method.ep_size, placed_RN)
    bucket_TS = torch.add(unit_TS, tokens.group_T.unsqueeze(1), alpha=units)
    keep_TS = keep_best(bucket_TS, key_TS, valid_TS, layer.limit_G.unsqueeze(1).expand(-1, units))
    return torch.empty_like(keep_TS).scatter_(1, order_TS, keep_TS) if by_device else keep_TS


def expert_load(index: Tensor, n_experts: int) -> Tensor:
    """Return the number of pairs of each expert [E], from the experts of pairs in any shape."""
    flat = index.reshape(-1)
    load_E = torch.zeros(n_experts, dtype=torch.long, device=flat.device)
    return load_E.scatter_add_(0, flat, torch.ones_like(flat))
