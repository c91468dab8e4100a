"""Summarise a trace: peaks, stragglers, and what a capacity would drop, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from capmoe_eval.routing.capacity import capacity, experts_per_rank
from capmoe_eval.serving.score_mass import KEEPERS, dropped_mass
from capmoe_eval.serving.trace import Array, Trace

# Shape suffixes: S steps, L layers, E experts, R ranks, X capacity factors, M keepers.

GAMMAS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Capacity factors of a summary."""


@dataclass(frozen=True)
class Peak:
    """The highest load of a step over the mean load of that step."""

    mean: float  # over the steps with a token
    max: float


@dataclass(frozen=True)
class AtGamma:
    """What one capacity factor would do; the capacity group is a whole step."""

    gamma: float
    drop_rate: float
    """Dropped share of the pairs (Equation 11). It is the same whoever is kept."""
    pad_waste: float | None
    """Empty share of the slots C·E; None where there are none (γ=0)."""
    straggler: float | None
    """As :attr:`LayerSummary.straggler`, over the mean load before any drop."""
    dropped_score: dict[str, float] | None
    """Dropped share of the gate scores by who is kept; None for a trace without scores."""


@dataclass(frozen=True)
class LayerSummary:
    """The loads of one layer, or of all together."""

    name: str
    assignments: int
    """Pairs of a token and an expert, summed over steps."""
    expert_peak: Peak
    rank_peak: Peak | None
    """None where no ranks are known."""
    straggler: float | None
    """Load of the fullest rank over the mean load of a rank, both summed over steps: the time that
    the fullest rank takes, in units of balanced ranks. None where no ranks are known."""
    at: tuple[AtGamma, ...]
    load: tuple[int, ...]
    """Pairs of each expert [E], summed over steps; of all layers, nothing."""


@dataclass(frozen=True)
class Summary:
    """The summary of a trace."""

    source: str
    model: str | None
    n_experts: int
    top_k: int | None
    ranks: int | None
    tokens: int | None
    steps: int
    decode_steps: int | None
    """Those of them that decode; None where the kind of steps is not known."""
    rounding: str
    total: LayerSummary
    layers: tuple[LayerSummary, ...]


def summarise(
    trace: Trace,
    gammas: Sequence[float] = GAMMAS,
    *,
    ranks: int | None = None,
    rounding: str = "ceil",
) -> Summary:
    """Summarise a trace in one pass of bounded memory.

    ``C = ceil(γ·T·K/E)`` with the T tokens of a step, as :func:`capacity` has it. Where K is not
    known, C is not bounded by T, which changes no drop, only the waste at γ above E/K.

    Args:
        trace: The trace.
        gammas: Capacity factors.
        ranks: Expert-parallel ranks R, each with E/R consecutive experts; the trace's by default.
        rounding: ``ceil`` or ``floor``.

    Raises:
        UsageError: If the experts cannot be spread evenly over the ranks.
    """
    if ranks is None:
        ranks = trace.ranks
    else:
        experts_per_rank(trace.n_experts, ranks, "ranks")
    sums = _Sums(trace, tuple(gammas), ranks, rounding)
    for part in trace.by_steps():
        sums.add(part.load_SLE, part.tokens)
    layers = [sums.layer(np.array([number]), name) for number, name in enumerate(trace.layers)]
    return Summary(
        source=trace.source,
        model=trace.model,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        ranks=ranks,
        tokens=trace.n_tokens,
        steps=trace.n_steps,
        decode_steps=trace.decode_steps,
        rounding=rounding,
        total=sums.layer(np.arange(trace.n_layers), "all layers"),
        layers=tuple(layers),
    )


def limits(
    trace: Trace,
    gamma: float,
    asked_SL: Array,
    rounding: str = "ceil",
    experts: int = 1,
    slots: int | None = None,
) -> Array:
    """Return the capacity of so many experts together, in each step and layer [S, L].

    Args:
        trace: The trace, for E and K.
        gamma: Capacity factor.
        asked_SL: Pairs of each step and layer, or of each step of one layer [S].
        rounding: ``ceil`` or ``floor``.
        experts: Experts that share a capacity: 1, or those of a device, E/R.
        slots: What they have slots for, each of which computes a token at most once; more than
            ``experts`` where a device holds copies.
    """
    top_k, slots = trace.top_k or 1, slots or experts
    different, place_SL = np.unique(asked_SL, return_inverse=True)
    found = [
        # γ·n·T·K/E, and at most a pair for each slot and token.
        capacity(
            *(gamma, slots * (asked // top_k), experts * top_k, slots * trace.n_experts),
            rounding=rounding,
        )
        for asked in different.tolist()
    ]
    return np.array(found)[place_SL].reshape(asked_SL.shape)


class _Sums:
    """Sums over the steps of a trace, by layer and capacity factor."""

    def __init__(
        self, trace: Trace, gammas: tuple[float, ...], ranks: int | None, rounding: str
    ) -> None:
        self._trace, self._gammas, self._rounding = trace, gammas, rounding
        self._local = None if ranks is None else trace.n_experts // ranks
        shape_LX = (trace.n_layers, len(gammas))
        self.load_LE = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
        self.kept_LX, self.slots_LX, self.fullest_LX = np.zeros((3, *shape_LX), dtype=np.int64)
        self.mass_L = np.zeros(trace.n_layers)
        self.lost_LXM = np.zeros((*shape_LX, len(KEEPERS)))
        # Of experts and of ranks: sum and maximum over steps of the peak; of steps; of fullest.
        self.peaks = {kind: np.zeros((3, trace.n_layers)) for kind in ("expert", "rank")}
        self.fullest_L = np.zeros(trace.n_layers, dtype=np.int64)

    def add(self, load_SLE: Array, tokens: slice) -> None:
        """Add some steps."""
        asked_SL = load_SLE.sum(axis=2)
        self.load_LE += load_SLE.sum(axis=0)
        self._note_peaks("expert", load_SLE, asked_SL)
        if self._local is not None:
            rank_SLR = self._by_rank(load_SLE)
            self._note_peaks("rank", rank_SLR, asked_SL)
            self.fullest_L += rank_SLR.max(axis=2).sum(axis=0)
        limit_XSL = np.stack(
            [limits(self._trace, gamma, asked_SL, self._rounding) for gamma in self._gammas]
        )
        for number, limit_SL in enumerate(limit_XSL):
            kept_SLE = np.minimum(load_SLE, limit_SL[:, :, None])
            self.kept_LX[:, number] += kept_SLE.sum(axis=(0, 2))
            self.slots_LX[:, number] += limit_SL.sum(axis=0) * self._trace.n_experts
            if self._local is not None:
                fullest_SL = self._by_rank(kept_SLE).max(axis=2)
                self.fullest_LX[:, number] += fullest_SL.sum(axis=0)
        if self._trace.score_TLK is not None:
            self._note_scores(load_SLE, tokens, limit_XSL)

    def _by_rank(self, load_SLE: Array) -> Array:
        assert self._local is not None
        by_rank: Array = load_SLE.reshape(*load_SLE.shape[:2], -1, self._local).sum(axis=3)
        return by_rank

    def _note_peaks(self, kind: str, load_SLU: Array, asked_SL: Array) -> None:
        busy_SL = asked_SL > 0
        mean_SL = np.maximum(asked_SL, 1) / load_SLU.shape[2]
        peak_SL = load_SLU.max(axis=2) / mean_SL
        total_L, highest_L, steps_L = self.peaks[kind]
        total_L += peak_SL.sum(axis=0)
        np.maximum(highest_L, peak_SL.max(axis=0), out=highest_L)
        steps_L += busy_SL.sum(axis=0)

    def _note_scores(self, load_SLE: Array, tokens: slice, limit_XSL: Array) -> None:
        assert self._trace.expert_TLK is not None and self._trace.score_TLK is not None
        for layer in range(self._trace.n_layers):
            mass, lost_XM = dropped_mass(
                self._trace.expert_TLK[tokens, layer],
                self._trace.score_TLK[tokens, layer],
                load_SLE[:, layer],
                limit_XSL[:, :, layer],
            )
            self.mass_L[layer] += mass
            self.lost_LXM[layer] += lost_XM

    def layer(self, which: Array, name: str) -> LayerSummary:
        """Return the summary of one layer, or of several together."""
        asked = int(self.load_LE[which].sum())
        at = []
        for number, gamma in enumerate(self._gammas):
            kept, slots, fullest = (
                int(sums[which, number].sum())
                for sums in (self.kept_LX, self.slots_LX, self.fullest_LX)
            )
            scores = None
            if self._trace.score_TLK is not None:
                lost_M = self.lost_LXM[which, number].sum(axis=0) / (self.mass_L[which].sum() or 1)
                scores = dict(zip(KEEPERS, lost_M.tolist(), strict=True))
            waste = 1 - kept / slots if slots else None
            at.append(
                AtGamma(
                    gamma,
                    (asked - kept) / (asked or 1),
                    waste,
                    self._straggler(fullest, asked),
                    scores,
                )
            )
        return LayerSummary(
            name=name,
            assignments=asked,
            expert_peak=self._peak("expert", which),
            rank_peak=None if self._local is None else self._peak("rank", which),
            straggler=self._straggler(int(self.fullest_L[which].sum()), asked),
            at=tuple(at),
            load=tuple(self.load_LE[which[0]].tolist()) if len(which) == 1 else (),
        )

    def _straggler(self, fullest: int, asked: int) -> float | None:
        if self._local is None:
            return None
        return fullest * (self._trace.n_experts // self._local) / (asked or 1)

    def _peak(self, kind: str, which: Array) -> Peak:
        total_L, highest_L, steps_L = self.peaks[kind]
        steps = steps_L[which].sum() or 1
        return Peak(float(total_L[which].sum() / steps), float(highest_L[which].max()))
