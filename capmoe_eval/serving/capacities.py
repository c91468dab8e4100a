"""Count what capacities do to a trace, in every step: on a placement, with one γ or one by layer.

A capacity of an expert bounds its pairs, wherever it is; a capacity of a device bounds those that
its slots compute. Replicas of an expert take its pairs in turn, as tokens come, before any drop. An
expert with replicas has no capacity of its own here: whether its copies share one or each have one
is a choice that no server makes, and copies are there to compute what it would drop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.serving.adaptive import choose, grid
from capmoe_eval.serving.placement.layout import Placement
from capmoe_eval.serving.placement.replicas import rank_loads, slots_in_turn
from capmoe_eval.serving.score_mass import KEEPERS, active_copies, dropped_mass
from capmoe_eval.serving.settings import Granularity
from capmoe_eval.serving.summary import limits
from capmoe_eval.serving.trace import Array, Trace

# Shape suffixes: T tokens, K = top-k, P pairs, S steps, L layers, E experts, R ranks, B buckets
# with a capacity (slots of experts, or devices), X choices of capacity factors, M keepers.

Factors = Sequence[float]
"""The capacity factor of every layer [L]."""

_PLANNED = 500  # steps that the γ of layers are chosen from, evenly spread, which bounds the time


@dataclass(frozen=True)
class CapacitySums:
    """What capacities do to a trace, by layer; arrays [L] are sums over its steps."""

    ranks: int
    steps: int
    asked_L: Array  # pairs before any drop
    kept_L: Array
    slots_L: Array  # that fixed capacities provide
    fullest_L: Array  # pairs of each step's fullest rank
    active: Mapping[str, int]  # copies of experts that compute, by keeper; without unknown ones
    lost: Mapping[str, float]  # share of the gate scores, by keeper; empty without scores

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

    def mean_active(self, keeper: str) -> float | None:
        """Return the copies that compute in a layer of a step, or None if it is not known."""
        found = self.active.get(keeper)
        return None if found is None else found / (self.steps * len(self.asked_L))


def capacity_sums(
    trace: Trace,
    factor_XL: Sequence[Factors],
    placement: Placement,
    granularity: Granularity,
    keepers: Sequence[str] = KEEPERS,
) -> list[CapacitySums]:
    """Return what capacities do, for each choice of factors; ``reference.py`` has the loop.

    Args:
        trace: The trace.
        factor_XL: Choices of capacity factors.
        placement: The experts in the slots of every rank.
        granularity: What has a capacity; each expert only where no expert has two slots.
        keepers: Who may be kept; of ``random`` the copies that compute are not known.
    """
    counts = _Counts(trace, factor_XL, placement, granularity, keepers)
    for part in trace.by_steps():
        counts.add(part.load_SLE, part.tokens)
    return counts.sums()


class _Counts:
    def __init__(
        self,
        trace: Trace,
        factor_XL: Sequence[Factors],
        placement: Placement,
        granularity: Granularity,
        keepers: Sequence[str],
    ) -> None:
        self._trace, self._factors, self._placement = trace, factor_XL, placement
        self._of_devices = granularity == "device"
        assert self._of_devices or not placement.redundant
        shape = (len(factor_XL), placement.layers)
        self._asked_L = np.zeros(placement.layers, dtype=np.int64)
        self._kept_XL, self._slots_XL, self._fullest_XL = np.zeros((3, *shape), dtype=np.int64)
        known = _known(trace, keepers) if self._of_devices else keepers
        self._active_X = {keeper: np.zeros(len(factor_XL), dtype=np.int64) for keeper in known}
        self._mass, self._lost_XM = 0.0, np.zeros((len(factor_XL), len(KEEPERS)))
        self._steps = 0

    def add(self, load_SLE: Array, tokens: slice) -> None:
        """Add some steps."""
        placement, asked_SL = self._placement, load_SLE.sum(axis=2)
        if self._of_devices:
            load_SLB = rank_loads(load_SLE, placement)
        else:
            load_SLB = np.take_along_axis(load_SLE, placement.expert_LP[None], axis=2)
        limit_XSL = np.stack([self._limits(factors, asked_SL) for factors in self._factors])
        self._steps += len(load_SLE)
        self._asked_L += asked_SL.sum(axis=0)
        for number, limit_SL in enumerate(limit_XSL):
            kept_SLB = np.minimum(load_SLB, limit_SL[:, :, None])
            rank_SLR = kept_SLB.reshape(*kept_SLB.shape[:2], placement.ranks, -1).sum(axis=3)
            self._kept_XL[number] += rank_SLR.sum(axis=(0, 2))
            self._slots_XL[number] += limit_SL.sum(axis=0) * load_SLB.shape[2]
            self._fullest_XL[number] += rank_SLR.max(axis=2).sum(axis=0)
            if not self._of_devices:
                for active_X in self._active_X.values():
                    active_X[number] += np.count_nonzero(kept_SLB)
        if self._trace.score_TLK is not None or (self._of_devices and self._active_X):
            for layer in range(placement.layers):
                self._add_pairs(layer, tokens, load_SLB[:, layer], limit_XSL[:, :, layer])

    def _limits(self, factors: Factors, asked_SL: Array) -> Array:
        sizes = {}
        if self._of_devices:
            _, ranks, slots = self._placement.expert_LRN.shape
            sizes = {"experts": experts_per_rank(self._trace.n_experts, ranks), "slots": slots}
        by_layer = [
            limits(self._trace, factor, asked_SL[:, layer], **sizes)
            for layer, factor in enumerate(factors)
        ]
        return np.stack(by_layer, axis=1)

    def _add_pairs(self, layer: int, tokens: slice, load_SB: Array, limit_XS: Array) -> None:
        placement = self._placement
        expert_TK, score_TK = _pairs(self._trace, tokens, layer)
        step_P = np.repeat(np.arange(len(load_SB)), load_SB.sum(axis=1))
        slot_TK = slots_in_turn(expert_TK.ravel(), step_P, placement, layer)
        slot_TK = slot_TK.reshape(expert_TK.shape)
        size = placement.expert_LRN.shape[2] if self._of_devices else 1
        if score_TK is not None:
            mass, lost_XM = dropped_mass(slot_TK // size, score_TK, load_SB, limit_XS)
            self._mass, self._lost_XM = self._mass + mass, self._lost_XM + lost_XM
        if self._of_devices:
            for keeper in self._active_X:
                by_TK = score_TK if keeper == "score" else None
                self._active_X[keeper] += active_copies(slot_TK, by_TK, load_SB, limit_XS, size)

    def sums(self) -> list[CapacitySums]:
        """Return the sums of each choice of factors."""
        shares_XM = (self._lost_XM / (self._mass or 1.0)).clip(0.0, 1.0)
        has_scores = self._trace.score_TLK is not None
        return [
            CapacitySums(
                ranks=self._placement.ranks,
                steps=self._steps,
                asked_L=self._asked_L,
                kept_L=self._kept_XL[number],
                slots_L=self._slots_XL[number],
                fullest_L=self._fullest_XL[number],
                active={keeper: int(found[number]) for keeper, found in self._active_X.items()},
                lost=dict(zip(KEEPERS, shares_XM[number].tolist(), strict=True))
                if has_scores
                else {},
            )
            for number in range(len(self._factors))
        ]


def _known(trace: Trace, keepers: Sequence[str]) -> list[str]:
    """Return the keepers of which a trace says what experts a device keeps pairs of.

    An expert with a capacity of its own keeps a pair, whoever it is.
    """
    has = {"order": trace.expert_TLK is not None, "score": trace.score_TLK is not None}
    return [keeper for keeper in keepers if has.get(keeper, False)]


def _pairs(trace: Trace, tokens: slice, layer: int) -> tuple[Array, Array | None]:
    """Return experts and scores of a layer, a token's pairs in the order of their experts."""
    assert trace.expert_TLK is not None
    expert_TK = trace.expert_TLK[tokens, layer]
    order_TK = np.argsort(expert_TK, axis=1)
    score_TK = None
    if trace.score_TLK is not None:
        score_TK = np.take_along_axis(trace.score_TLK[tokens, layer], order_TK, axis=1)
    return np.take_along_axis(expert_TK, order_TK, axis=1), score_TK


def layer_factors(
    load_SLE: Array,
    top_k: int | None,
    gammas: Sequence[float],
    placement: Placement,
    granularity: Granularity,
) -> list[Factors | None]:
    """Choose the γ of every layer, with as many drops in all as each static γ has on these loads.

    The rule is that of :func:`capmoe_eval.serving.adaptive.choose`; the straggler factor in it is
    of the fullest rank. None where the static γ drops nothing.

    Args:
        load_SLE: The loads to plan on; of many steps some are taken, evenly spread.
        top_k: Experts K per token, None if unknown.
        gammas: Static capacity factors.
        placement: The experts in the slots of every rank.
        granularity: What has a capacity.
    """
    load_SLE = load_SLE[:: -(-len(load_SLE) // _PLANNED)]
    _, n_layers, n_experts = load_SLE.shape
    trace = Trace(n_experts, load_SLE=load_SLE, top_k=top_k)
    nothing_dropped = placement.ranks if granularity == "device" else n_experts / (top_k or 1)
    offered = grid(nothing_dropped)

    def curves(factors: Sequence[float]) -> tuple[Array, Array]:
        sums = capacity_sums(trace, [[f] * n_layers for f in factors], placement, granularity, ())
        asked_L = np.maximum(sums[0].asked_L, 1)
        dropped_XL = np.array([(one.asked_L - one.kept_L) / asked_L for one in sums])
        straggler_XL = np.array([one.fullest_L * placement.ranks / asked_L for one in sums])
        return dropped_XL.T, straggler_XL.T

    dropped_LX, straggler_LX = curves(offered)
    budgets = curves(gammas)[0].mean(axis=0).tolist()
    return [
        [offered[place] for place in choose(dropped_LX, straggler_LX, budget)] if budget else None
        for budget in budgets
    ]
