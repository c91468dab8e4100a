"""Count what capacities do to a trace, in every step, on a placement.

A capacity of an expert bounds its pairs, wherever it is; a capacity of a device bounds those that
its slots compute. Replicas of an expert take its pairs in turn, as tokens come, before any drop. An
expert with replicas has no capacity of its own here: no server says whether its copies share one or
each have one. Copies are there to compute what such a capacity would drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from capmoe_eval.routing.capacity import capacity

from capmoe_serve.placements import SlotPlan, by_slot, rank_loads, slots_in_turn
from capmoe_serve.trace import Array, Steps, Trace

# Shape suffixes: T tokens, K = top-k, P pairs, S steps, L layers, E experts, R ranks, B buckets
# with a capacity (slots of experts, or devices), X capacity factors, M keepers.

Granularity = Literal["expert", "device"]

KEEPERS: Final = ("score", "order", "random")
"""Who is kept: the highest scores, the first tokens, or anyone (then the expectation)."""


@dataclass(frozen=True)
class CapacitySums:
    """The effect of a capacity on a trace, by layer; arrays [L] are sums over its steps."""

    ranks: int
    asked_L: Array  # pairs before any drop
    kept_L: Array
    slots_L: Array  # that fixed capacities provide
    fullest_L: Array  # pairs of each step's fullest rank
    mass_L: Array  # gate scores of all pairs
    lost_LM: Array | None  # of the dropped pairs, by keeper; None without scores

    @property
    def straggler(self) -> float:
        """Pairs of the fullest rank over a rank's mean before any drop, both summed."""
        return float(self.fullest_L.sum()) * self.ranks / max(int(self.asked_L.sum()), 1)

    @property
    def drop_rate(self) -> float:
        """Share of the pairs that is dropped."""
        return float((self.asked_L - self.kept_L).sum()) / max(int(self.asked_L.sum()), 1)

    @property
    def pad_waste(self) -> float | None:
        """Empty share of the slots, None where there are none."""
        slots = int(self.slots_L.sum())
        return 1 - int(self.kept_L.sum()) / slots if slots else None

    @property
    def lost(self) -> dict[str, float]:
        """Share of the gate scores that is dropped, by keeper; empty without scores."""
        if self.lost_LM is None:
            return {}
        shares_M = self.lost_LM.sum(axis=0) / (self.mass_L.sum() or 1.0)
        return dict(zip(KEEPERS, shares_M.clip(0.0, 1.0).tolist(), strict=True))


class CapacityCounter:
    """Counts what capacities do, for each capacity factor.

    Args:
        trace: The trace.
        gammas: The capacity factors.
        placement: The experts in the slots of every rank.
        granularity: What has a capacity; each expert only where no expert has two slots.
    """

    def __init__(
        self,
        trace: Trace,
        gammas: Sequence[float],
        placement: SlotPlan,
        granularity: Granularity,
    ) -> None:
        self._trace, self._gammas, self._placement = trace, gammas, placement
        self._of_devices = granularity == "device"
        assert self._of_devices or not placement.redundant
        shape = (len(gammas), placement.layers)
        self._asked_L = np.zeros(placement.layers, dtype=np.int64)
        self._kept_XL, self._slots_XL, self._fullest_XL = np.zeros((3, *shape), dtype=np.int64)
        self._mass_L, self._lost_XLM = np.zeros(placement.layers), np.zeros((*shape, len(KEEPERS)))

    def counted(self) -> list[CapacitySums]:
        """Count all steps, and return the sums of each capacity factor."""
        for part in self._trace.by_steps():
            self.add(part)
        return [self.at(number) for number in range(len(self._gammas))]

    def add(self, part: Steps) -> None:
        """Count some steps."""
        placement, asked_SL = self._placement, part.load_SLE.sum(axis=2)
        place = rank_loads if self._of_devices else by_slot
        load_SLB = place(part.load_SLE, placement)
        limit_XSL = self._limits(asked_SL)
        self._asked_L += asked_SL.sum(axis=0)
        for number, limit_SL in enumerate(limit_XSL):
            kept_SLB = np.minimum(load_SLB, limit_SL[:, :, None])
            rank_SLR = kept_SLB.reshape(*kept_SLB.shape[:2], placement.ranks, -1).sum(axis=3)
            self._kept_XL[number] += rank_SLR.sum(axis=(0, 2))
            self._slots_XL[number] += limit_SL.sum(axis=0) * load_SLB.shape[2]
            self._fullest_XL[number] += rank_SLR.max(axis=2).sum(axis=0)
        if self._trace.score_TLK is not None:
            load_SLB = load_SLB if self._of_devices else part.load_SLE
            for layer in range(placement.layers):
                self._add_scores(layer, part.tokens, load_SLB[:, layer], limit_XSL[:, :, layer])

    def _limits(self, asked_SL: Array) -> Array:
        """Return the capacity of a bucket by capacity factor, step and layer [X, S, L]."""
        slots, buckets = 1, self._trace.n_experts
        if self._of_devices:
            _, ranks, slots = self._placement.expert_LRN.shape
            buckets = slots * ranks
        top_k = self._trace.top_k or 1
        different, place_SL = np.unique(asked_SL, return_inverse=True)
        limit_XD = np.array(
            [
                [
                    # γ·T·K/E, of a device γ·T·K/R, and at most a pair for each slot and token.
                    capacity(gamma, slots * (asked // top_k), top_k, buckets)
                    for asked in different.tolist()
                ]
                for gamma in self._gammas
            ]
        )
        limit_XSL: Array = limit_XD[:, place_SL.reshape(asked_SL.shape)]
        return limit_XSL

    def _add_scores(self, layer: int, tokens: slice, load_SB: Array, limit_XS: Array) -> None:
        """Add the gate scores of a layer, all of them and what is dropped of them."""
        trace, placement = self._trace, self._placement
        assert trace.expert_TLK is not None
        assert trace.score_TLK is not None
        bucket_TK, score_TK = trace.expert_TLK[tokens, layer], trace.score_TLK[tokens, layer]
        if self._of_devices:
            order_TK = np.argsort(bucket_TK, axis=1)  # pairs come in the order of their experts
            expert_TK = np.take_along_axis(bucket_TK, order_TK, axis=1)
            score_TK = np.take_along_axis(score_TK, order_TK, axis=1)
            step_P = np.repeat(np.arange(len(load_SB)), load_SB.sum(axis=1))
            slot_P = slots_in_turn(expert_TK.ravel(), step_P, placement, layer)
            bucket_TK = slot_P.reshape(expert_TK.shape) // placement.expert_LRN.shape[2]
        mass, lost_XM = dropped_mass(bucket_TK, score_TK, load_SB, limit_XS)
        self._mass_L[layer] += mass
        self._lost_XLM[:, layer] += lost_XM

    def at(self, number: int, layers: Array | slice = slice(None)) -> CapacitySums:
        """Return the sums of one capacity factor, of all layers or some."""
        return CapacitySums(
            ranks=self._placement.ranks,
            asked_L=self._asked_L[layers],
            kept_L=self._kept_XL[number, layers],
            slots_L=self._slots_XL[number, layers],
            fullest_L=self._fullest_XL[number, layers],
            mass_L=self._mass_L[layers],
            lost_LM=None if self._trace.score_TLK is None else self._lost_XLM[number, layers],
        )


def dropped_mass(
    expert_TK: Array, score_TK: Array, load_SE: Array, limit_XS: Array
) -> tuple[float, Array]:
    """Return the scores of one layer's pairs, summed, and what of it is dropped [X, M].

    Args:
        expert_TK: Experts of the tokens, step by step.
        score_TK: Their gate scores.
        load_SE: Pairs of each expert in each step, which are those of ``expert_TK``.
        limit_XS: The capacity of an expert in each step, by capacity factor.
    """
    n_steps, n_experts = load_SE.shape
    top_k = expert_TK.shape[1]
    step_T = np.repeat(np.arange(n_steps), load_SE.sum(axis=1) // top_k)
    bucket_P = (step_T[:, None] * n_experts + expert_TK).ravel().astype(np.uint64) << np.uint64(32)
    score_P = score_TK.astype(np.float32).ravel()
    load_B = load_SE.ravel()
    end_B = np.cumsum(load_B)
    # One sort of integers: the bucket above, below it the bits of the score, which of floats of at
    # least 0 are in their order, turned so that they fall; or the place of the pair.
    bits_P = (score_P + np.float32(0)).view(np.uint32)  # makes 0 of -0
    falling_P = np.sort(bucket_P | (np.uint64(2**32 - 1) - bits_P)).astype(np.uint32)
    falling_P = np.uint32(2**32 - 1) - falling_P
    placed_P = np.sort(bucket_P | np.arange(len(score_P), dtype=np.uint64)).astype(np.uint32)
    lost_XM = np.empty((len(limit_XS), len(KEEPERS)))
    sums = [
        np.concatenate([[0.0], np.cumsum(sorted_P, dtype=np.float64)])
        for sorted_P in (falling_P.view(np.float32), score_P[placed_P])
    ]
    mass_B = sums[1][end_B] - sums[1][end_B - load_B]
    for number, limit_S in enumerate(limit_XS):
        kept_B = np.minimum(load_B, np.repeat(limit_S, n_experts))
        first_dropped_B = end_B - load_B + kept_B
        lost_XM[number, :2] = [(sum_P[end_B] - sum_P[first_dropped_B]).sum() for sum_P in sums]
        lost_XM[number, 2] = (mass_B * (load_B - kept_B) / np.maximum(load_B, 1)).sum()
    return float(sums[1][-1]), lost_XM
