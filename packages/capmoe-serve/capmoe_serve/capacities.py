"""Count what capacities do to a trace, in every step: on a placement, with one γ or one by layer.

A capacity of an expert bounds its pairs, wherever it is; a capacity of a device bounds those that
its slots compute. Replicas of an expert take its pairs in turn, as tokens come, before any drop. An
expert with replicas has no capacity of its own here: no server says whether its copies share one or
each have one. Copies are there to compute what such a capacity would drop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from capmoe_eval.routing.capacity import capacity
from capmoe_methods.adaptive_gamma.choice import choose, grid

from capmoe_serve.pairs import KEEPERS, active_copies, dropped_mass
from capmoe_serve.settings import Granularity
from capmoe_serve.slots import SlotPlan, by_slot, rank_loads, slots_in_turn
from capmoe_serve.status_lines import Say, silent
from capmoe_serve.trace import Array, Steps, Trace

# Shape suffixes: T tokens, K = top-k, P pairs, S steps, L layers, E experts, R ranks, B buckets
# with a capacity (slots of experts, or devices), X choices of capacity factors, M keepers.

Factors = Sequence[float]
"""The capacity factor of every layer [L]."""

_PLANNED = 500  # steps that the γ of layers are chosen from, evenly spread, which bounds the time


@dataclass(frozen=True)
class CapacitySums:
    """The effect of capacities on a trace, by layer; arrays [L] are sums over its steps."""

    ranks: int
    steps: int
    asked_L: Array  # pairs before any drop
    kept_L: Array
    slots_L: Array  # that fixed capacities provide
    fullest_L: Array  # pairs of each step's fullest rank
    active: Mapping[str, Array]  # copies of experts that compute [L], by keeper; no unknown ones
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

    def mean_active(self, keeper: str) -> float | None:
        """Return the copies that compute in a layer of a step, or None if it is not known."""
        active_L = self.active.get(keeper)
        return None if active_L is None else int(active_L.sum()) / (self.steps * len(active_L))


class CapacityCounter:
    """Counts what capacities do, for each choice of factors; ``reference.py`` has the loop.

    Args:
        trace: The trace.
        factor_XL: Choices of capacity factors.
        placement: The experts in the slots of every rank.
        granularity: What has a capacity; each expert only where no expert has two slots.
        keepers: Who may be kept; of ``random`` the copies that compute are not known.
    """

    def __init__(
        self,
        trace: Trace,
        factor_XL: Sequence[Factors],
        placement: SlotPlan,
        granularity: Granularity,
        keepers: Sequence[str] = KEEPERS,
    ) -> None:
        self._trace, self._factors, self._placement = trace, factor_XL, placement
        self._of_devices = granularity == "device"
        assert self._of_devices or not placement.redundant
        shape = (len(factor_XL), placement.layers)
        self._asked_L = np.zeros(placement.layers, dtype=np.int64)
        self._kept_XL, self._slots_XL, self._fullest_XL = np.zeros((3, *shape), dtype=np.int64)
        if self._of_devices:  # an expert with a capacity of its own keeps a pair, whoever it is
            is_known = {"order": trace.expert_TLK is not None, "score": trace.score_TLK is not None}
            keepers = [keeper for keeper in keepers if is_known.get(keeper, False)]
        self._active_XL = {keeper: np.zeros(shape, dtype=np.int64) for keeper in keepers}
        self._mass_L, self._lost_XLM = np.zeros(placement.layers), np.zeros((*shape, len(KEEPERS)))

    def counted(self, say: Say = silent) -> list[CapacitySums]:
        """Count all steps, and return the sums of each choice of factors."""
        steps, done = self._trace.n_steps, 0
        for part in self._trace.by_steps():
            self.add(part)
            done += len(part.load_SLE)
            say(f"{done:,} of {steps:,} steps")
        return [self.at(number) for number in range(len(self._factors))]

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
            if not self._of_devices and self._active_XL:
                active_L = np.count_nonzero(kept_SLB, axis=(0, 2))
                for active_XL in self._active_XL.values():
                    active_XL[number] += active_L
        if self._trace.score_TLK is not None or (self._of_devices and self._active_XL):
            load_SLB = load_SLB if self._of_devices else part.load_SLE
            for layer in range(placement.layers):
                self._add_pairs(layer, part.tokens, load_SLB[:, layer], limit_XSL[:, :, layer])

    def _limits(self, asked_SL: Array) -> Array:
        """Return the capacity of a bucket by choice of factors, step and layer [X, S, L]."""
        slots, buckets = 1, self._trace.n_experts
        if self._of_devices:
            _, ranks, slots = self._placement.expert_LRN.shape
            buckets = slots * ranks
        top_k = self._trace.top_k or 1
        different, place_SL = np.unique(asked_SL, return_inverse=True)
        place_SL = place_SL.reshape(asked_SL.shape)
        factors, factor_XL = np.unique(np.array(self._factors), return_inverse=True)
        limit_FD = np.array(
            [
                [
                    # γ·T·K/E, of a device γ·T·K/R, and at most a pair for each slot and token.
                    capacity(factor, slots * (asked // top_k), top_k, buckets)
                    for asked in different.tolist()
                ]
                for factor in factors.tolist()
            ]
        )
        limit_XSL: Array = limit_FD[factor_XL.reshape(-1, 1, asked_SL.shape[1]), place_SL]
        return limit_XSL

    def _add_pairs(self, layer: int, tokens: slice, load_SB: Array, limit_XS: Array) -> None:
        """Add scores, and copies of experts under capacities of devices, pair by pair."""
        trace, placement = self._trace, self._placement
        assert trace.expert_TLK is not None
        bucket_TK = trace.expert_TLK[tokens, layer]
        score_TK = None if trace.score_TLK is None else trace.score_TLK[tokens, layer]
        if self._of_devices:
            # Pairs come in the order of their experts.
            if score_TK is None:
                expert_TK = _sorted_rows(bucket_TK)
            else:
                order_TK = np.argsort(bucket_TK, axis=1)
                expert_TK = np.take_along_axis(bucket_TK, order_TK, axis=1)
                score_TK = np.take_along_axis(score_TK, order_TK, axis=1)
            step_P = np.repeat(np.arange(len(load_SB)), load_SB.sum(axis=1))
            slot_P = slots_in_turn(expert_TK.ravel(), step_P, placement, layer)
            slot_TK, size = slot_P.reshape(expert_TK.shape), placement.expert_LRN.shape[2]
            by_keeper = {"order": None, "score": score_TK}
            for keeper, active_XL in self._active_XL.items():
                active_XL[:, layer] += active_copies(
                    slot_TK, by_keeper[keeper], load_SB, limit_XS, size
                )
            bucket_TK = slot_TK // size
        if score_TK is not None:
            mass, lost_XM = dropped_mass(bucket_TK, score_TK, load_SB, limit_XS)
            self._mass_L[layer] += mass
            self._lost_XLM[:, layer] += lost_XM

    def at(self, number: int, layers: Array | slice = slice(None)) -> CapacitySums:
        """Return the sums of one choice of factors, of all layers or some."""
        return CapacitySums(
            ranks=self._placement.ranks,
            steps=self._trace.n_steps,
            asked_L=self._asked_L[layers],
            kept_L=self._kept_XL[number, layers],
            slots_L=self._slots_XL[number, layers],
            fullest_L=self._fullest_XL[number, layers],
            active={
                keeper: active_XL[number, layers] for keeper, active_XL in self._active_XL.items()
            },
            mass_L=self._mass_L[layers],
            lost_LM=None if self._trace.score_TLK is None else self._lost_XLM[number, layers],
        )


def _sorted_rows(expert_TK: Array) -> Array:
    """Return each row in order, by odd-even transposition: six times as fast as np.sort."""
    expert_KT = np.ascontiguousarray(expert_TK.T)
    for turn in range(len(expert_KT)):
        low, high = expert_KT[turn % 2 : -1 : 2], expert_KT[turn % 2 + 1 :: 2]
        low[:], high[:] = np.minimum(low, high), np.maximum(low, high)
    return expert_KT.T


def layer_factors(
    load_SLE: Array,
    top_k: int | None,
    gammas: Sequence[float],
    placement: SlotPlan,
    granularity: Granularity,
) -> list[Factors | None]:
    """Choose the γ of every layer, with as many drops in all as each static γ has on these loads.

    The rule is that of :func:`capmoe_methods.adaptive_gamma.choice.choose`; the straggler factor in
    it is of the fullest rank. None where the static γ drops nothing. Of many steps some are planned
    on, evenly spread.
    """
    load_SLE = load_SLE[:: -(-len(load_SLE) // _PLANNED)]
    _, n_layers, n_experts = load_SLE.shape
    trace = Trace(n_experts, load_SLE=load_SLE, top_k=top_k)
    offered = grid(placement.ranks if granularity == "device" else n_experts / (top_k or 1))

    def curves(gammas: Sequence[float]) -> tuple[Array, Array]:
        factor_XL = [[gamma] * n_layers for gamma in gammas]
        sums = CapacityCounter(trace, factor_XL, placement, granularity, ()).counted()
        asked_L = np.maximum(sums[0].asked_L, 1)
        dropped_XL = np.array([(each.asked_L - each.kept_L) / asked_L for each in sums])
        straggler_XL = np.array([each.fullest_L * placement.ranks / asked_L for each in sums])
        return dropped_XL.T, straggler_XL.T

    dropped_LX, straggler_LX = curves(offered)
    budgets = curves(gammas)[0].mean(axis=0).tolist()
    return [
        [offered[place] for place in choose(dropped_LX, straggler_LX, budget)] if budget else None
        for budget in budgets
    ]
