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

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capmoe_eval.routing.buckets import ADDED, DROPPED_FIRST, gate_key, keep_best
from capmoe_eval.routing.scores import Scores, addable
from capmoe_eval.routing.tokens import TokenGroups, moved

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Method
    from capmoe_eval.routing.mixins import Bounded

# Shape suffixes: T counted tokens, E routed experts, H hidden size, S candidate slots per token,
# G capacity groups, R ranks (devices), N = E/R experts of a rank.


def _same(count: Tensor) -> Tensor:
    return count


@dataclass(frozen=True)
class LayerContext:
    """A layer and a forward for a decision, on the device of the scores."""

    limit_G: Tensor | None = None  # C of a unit in each group; None without a capacity
    random_TE: Tensor | None = None  # of a method that draws numbers
    image_T: Tensor | None = None  # True for a token of an image; None where there are none
    hidden_TH: Tensor | None = None  # the router's input, for a method that reads it
    # What a calibration measured of the layer: the similarity of experts [E, E], the modality of
    # each [E], or the experts of each rank [R, N], rising.
    calibrated: Tensor | None = None
    # Sums whole numbers over the processes that share the batch.
    total: Callable[[Tensor], Tensor] = _same

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
        image_T: Tensor | None = None,
        hidden_TH: Tensor | None = None,
        calibrated: Tensor | None = None,
        total: Callable[[Tensor], Tensor] = _same,
        limit_G: Tensor | None = None,
    ) -> LayerContext:
        """Return the context of a layer's decision, with the capacities and random numbers.

        ``method`` has the layer's own γ. The numbers of the ``layer`` and of the ``forward``
        determine random numbers. ``limit_G`` are the capacities, where they are at hand.
        """
        device = tokens.group_T.device
        if limit_G is None and method.factor is not None:
            limits = method.limits(tokens.tokens, top_k=top_k, n_experts=n_experts)
            limit_G = moved(torch.tensor(limits, device="cpu"), device)
        random_TE = method.random_numbers(tokens, n_experts, layer, forward)
        if random_TE is not None:
            random_TE = moved(random_TE, device)
        return cls(limit_G, random_TE, image_T, hidden_TH, calibrated, total)


def by_rank(amount_E: Tensor, ranks: int, placed_RN: Tensor | None) -> Tensor:
    """Return the amounts of experts […, E], grouped by the rank that holds them […, R, N]."""
    if placed_RN is None:
        return amount_E.view(*amount_E.shape[:-1], ranks, amount_E.shape[-1] // ranks)
    return amount_E[..., placed_RN]


def rank_of(expert: Tensor, local: int, placed_RN: Tensor | None) -> Tensor:
    """Return the rank that holds each of some experts; ``local`` is N, the experts of a rank."""
    if placed_RN is None:
        return expert // local
    return placed_RN.flatten().argsort()[expert] // local


def expert_load(index: Tensor, n_experts: int) -> Tensor:
    """Return the number of pairs of each expert [E], from the experts of pairs in any shape."""
    flat = index.reshape(-1)
    load_E = torch.zeros(n_experts, dtype=torch.long, device=flat.device)
    return load_E.scatter_add_(0, flat, torch.ones_like(flat))


def score_keys(scores: Scores, index_TS: Tensor) -> Tensor:
    """Return keys [T, S] by which a unit keeps its best-scoring pairs (Equations 7 to 10)."""
    return gate_key(scores.score_TE.gather(1, index_TS))


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
        key_TS: The order in which a unit keeps pairs: whole numbers from 0 to 2³² - 1, to which
            :data:`ADDED` may be added.
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
        placed_RN = layer.calibrated if method.is_placed else None
        units, unit_TS = method.ep_size, rank_of(index_TS, n_experts // method.ep_size, placed_RN)
    bucket_TS = torch.add(unit_TS, tokens.group_T.unsqueeze(1), alpha=units)
    keep_TS = keep_best(bucket_TS, key_TS, valid_TS, layer.limit_G.unsqueeze(1).expand(-1, units))
    return torch.empty_like(keep_TS).scatter_(1, order_TS, keep_TS) if by_device else keep_TS
