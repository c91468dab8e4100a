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

from capmoe_eval.routing.buckets import keep_best
from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.placement import rank_of
from capmoe_eval.routing.scores import HIGHEST, Scores, addable, score_bits
from capmoe_eval.routing.tokens import TokenGroups

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Bounded

# Shape suffixes: T counted tokens, E routed experts, K = top-k, S candidate slots per token,
# G capacity groups, D devices (ranks).

ADDED = 1 << 31
"""The bit of a key that puts added candidates behind the others; above every score."""
DROPPED_FIRST = 1 << 32
"""The bit of a key that puts a modality behind the other."""


def score_key(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return keys [T, S] by which a unit keeps its best-scoring pairs (paper, Equation 10)."""
    return HIGHEST - score_bits(scores.score_TE.gather(1, index_TS)).long()


def added_bit(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return :data:`ADDED` for the slots beyond the router's own choice, 0 for the others [T, S]."""
    return addable(scores).gather(1, index_TS).long() * ADDED


def keep_within_capacity(
    method: Bounded,
    tokens: TokenGroups,
    layer: LayerContext,
    *,
    index_TS: Tensor,
    valid_TS: Tensor,
    key_TS: Tensor,
    n_experts: int,
) -> Tensor:
    """Return a mask [T, S] of the valid slots that every unit keeps within its capacity.

    Args:
        method: The method, which says the unit and the modality that is dropped first.
        tokens: The capacity group of each token.
        layer: The capacities.
        index_TS: The expert of each slot.
        valid_TS: False for a slot without a pair.
        key_TS: The order in which a unit keeps pairs, below 2³¹, or below 2³² with
            :data:`ADDED`.
        n_experts: Routed experts E.
    """
    assert layer.limit_G is not None
    if layer.image_T is not None and method.modality != "uniform":
        last_T = layer.image_T if method.modality == "image_first" else ~layer.image_T
        key_TS = key_TS + last_T[:, None].long() * DROPPED_FIRST
    units, unit_TS = n_experts, index_TS
    by_device = method.granularity == "device"
    if by_device:
        # A device's bucket holds several experts of one token: in expert order, a stable sort
        # breaks ties by token first and then by expert.
        index_TS, order_TS = index_TS.sort(dim=1)
        valid_TS, key_TS = valid_TS.gather(1, order_TS), key_TS.gather(1, order_TS)
        units, placed_RN = method.ep_size, layer.calibrated if method.is_placed else None
        unit_TS = rank_of(index_TS, n_experts // units, placed_RN)
    bucket_TS = unit_TS + (tokens.group_T * units)[:, None]
    limit_B = layer.limit_G.repeat_interleave(units, output_size=len(layer.limit_G) * units)
    keep_TS = keep_best(bucket_TS, key_TS, valid_TS, limit_B)
    return torch.empty_like(keep_TS).scatter_(1, order_TS, keep_TS) if by_device else keep_TS


def expert_load(index: Tensor, n_experts: int) -> Tensor:
    """Return the number of pairs of each expert [E], from the experts of pairs in any shape."""
    flat = index.reshape(-1)
    load_E = torch.zeros(n_experts, dtype=torch.long, device=flat.device)
    return load_E.scatter_add_(0, flat, torch.ones_like(flat))
