"""Count what each capacity factor of a grid would drop in every layer, and what it would level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import best_first
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.observer import CountingObserver

# Shape suffixes: T counted tokens, K = top-k, X capacity factors, G capacity groups, U units that
# have a capacity (experts, or devices), P = T·K pairs.


@dataclass(frozen=True)
class Curve:
    """One layer by capacity factor [X], over all its forwards."""

    name: str
    dropped_X: list[float]  # share of the pairs beyond the capacity
    dropped_scores_X: list[float]  # share of their gate scores, if the lowest are dropped
    straggler_X: list[float]  # kept pairs of a forward's fullest unit, over all units' mean load


class Curves(CountingObserver):
    """Sums of the layers' loads under every capacity factor, from the router's own choice.

    The forwards drop nothing. The straggler factor is a ratio of sums over forwards: the pairs of
    the fullest expert (or device) over the pairs of a mean one before any drop. It is the time of a
    layer that waits for its fullest unit, in units of a balanced dropless layer.
    """

    def __init__(
        self, layers: Sequence[MoeLayer], method: Method, gammas: tuple[float, ...]
    ) -> None:
        super().__init__(len(layers))
        self._layers, self.gammas = layers, gammas
        device = method.granularity == "device"
        self._sharing = [
            experts_per_rank(layer.n_experts, method.ep_size) if device else 1 for layer in layers
        ]

    def see(self, event: LayerForward) -> None:
        """Count one forward of a layer."""
        of, sharing = event.layer, self._sharing[event.number]
        scores, topk_TK, groups = event.scores, event.scores.topk_TK, event.counts.groups
        units = of.n_experts // sharing
        limit_XG = event.plan.capacities(self.gammas, of, topk_TK.device)
        bucket_P = (groups.group_T[:, None] * units + topk_TK // sharing).reshape(-1)
        score_P = scores.score_TE.gather(1, topk_TK).reshape(-1).double()
        own_B = torch.bincount(bucket_P, minlength=len(groups.tokens) * units)
        order_P = best_first(bucket_P, score_P)
        first_B = own_B.cumsum(0) - own_B
        place_P = torch.empty_like(order_P)  # in the bucket, from 0 for the highest score
        numbers_P = torch.arange(len(order_P), device=order_P.device)
        place_P[order_P] = numbers_P - first_B[bucket_P[order_P]]
        group_P = bucket_P // units
        lost_X = torch.stack([score_P[place_P >= limit_G[group_P]].sum() for limit_G in limit_XG])
        demand_GU = of.ranks.total(own_B).view(-1, units)
        kept_XU = torch.minimum(demand_GU, limit_XG[:, :, None]).sum(dim=1)
        lost_X1 = of.ranks.total(torch.cat([lost_X, score_P.sum()[None]]))
        self.sums[event.number].add(
            pairs=demand_GU.sum(),
            kept_X=kept_XU.sum(dim=1),
            fullest_X=kept_XU.amax(dim=1) * units,
            lost_X=lost_X1[:-1],
            scores=lost_X1[-1],
        )

    def curves(self) -> list[Curve]:
        """Return the curve of every layer."""
        return [
            Curve(
                layer.name,
                (1 - sums.tensor("kept_X") / sums.tensor("pairs")).tolist(),
                (sums.tensor("lost_X") / sums.tensor("scores")).tolist(),
                (sums.tensor("fullest_X") / sums.tensor("pairs")).tolist(),
            )
            for layer, sums in zip(self._layers, self.sums, strict=True)
        ]


def curve_reference(
    forwards: list[list[tuple[int, int, float]]], limits: list[list[int]], units: int
) -> tuple[float, float, float]:
    """Define one layer's dropped share, dropped share of scores and straggler factor by loops.

    Args:
        forwards: For each forward its pairs: capacity group, unit, and gate score.
        limits: For each forward the capacity of a unit in every group.
        units: Number of units.
    """
    pairs = dropped = fullest = 0
    scores = lost = 0.0
    for asked, limit_G in zip(forwards, limits, strict=True):
        load = [0] * units
        for group, limit in enumerate(limit_G):
            for unit in range(units):
                best_first = sorted((s for g, u, s in asked if (g, u) == (group, unit)))[::-1]
                load[unit] += min(len(best_first), limit)
                dropped += max(len(best_first) - limit, 0)
                lost += sum(best_first[limit:])
        pairs += len(asked)
        scores += sum(score for _, _, score in asked)
        fullest += max(load)
    return dropped / pairs, lost / scores, fullest * units / pairs
