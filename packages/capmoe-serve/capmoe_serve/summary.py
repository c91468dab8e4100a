"""Summarise a trace: peaks, stragglers, and what a capacity would drop, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from capmoe_serve.capacities import CapacityCounter
from capmoe_serve.slots import contiguous
from capmoe_serve.status_lines import Say, silent
from capmoe_serve.trace import Array, Trace

# Shape suffixes: S steps, L layers, E experts, R ranks.

GAMMAS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Capacity factors of a summary."""


@dataclass(frozen=True)
class PeakLoad:
    """The highest load of a step over the mean load of that step."""

    mean: float  # over the steps with a token
    max: float


@dataclass(frozen=True)
class AtGamma:
    """The effect that one capacity factor would have; the capacity group is a whole step."""

    gamma: float
    drop_rate: float  # of the pairs (Equation 11); the same whoever is kept
    pad_waste: float | None  # empty share of the slots C·E; None where there are none (γ=0)
    straggler: float | None  # as of LayerSummary, over the mean load before any drop
    dropped_score: dict[str, float] | None  # share by who is kept; None without scores


@dataclass(frozen=True)
class LayerSummary:
    """The loads of one layer, or of all together."""

    name: str
    assignments: int  # pairs of a token and an expert, summed over steps
    expert_peak: PeakLoad
    rank_peak: PeakLoad | None  # None where no ranks are known
    # Load of the fullest rank over the mean load of a rank, both summed over steps: the time that
    # the fullest rank takes, in units of balanced ranks. None where no ranks are known.
    straggler: float | None
    at: tuple[AtGamma, ...]
    load: tuple[int, ...]  # pairs of each expert [E], summed over steps; of all layers, nothing


@dataclass(frozen=True)
class TraceSummary:
    """The summary of a trace."""

    source: str
    model: str | None
    n_experts: int
    top_k: int | None
    ranks: int | None
    tokens: int | None
    steps: int
    decode_steps: int | None  # None where the kind of steps is not known
    rounding: str
    total: LayerSummary
    layers: tuple[LayerSummary, ...]


def summarise(
    trace: Trace,
    gammas: Sequence[float] = GAMMAS,
    *,
    ranks: int | None = None,
    rounding: str = "ceil",
    say: Say = silent,
) -> TraceSummary:
    """Summarise a trace in one pass of bounded memory.

    ``C = ceil(γ·T·K/E)`` with the T tokens of a step, as :func:`capacity` has it. Where K is not
    known, C is not bounded by T, which changes no drop, only the waste at γ above E/K. Each of the
    ranks, by default the trace's, has E/R consecutive experts. ``say`` takes lines on the progress.

    Raises:
        UsageError: If the experts cannot be spread evenly over the ranks.
    """
    ranks = trace.ranks if ranks is None else ranks
    home = contiguous(trace.n_layers, trace.n_experts, 1 if ranks is None else ranks)
    factors = [[gamma] * trace.n_layers for gamma in gammas]
    counter = CapacityCounter(trace, factors, home, "expert", (), rounding)
    load_LE = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
    parts, steps, done = [], trace.n_steps, 0
    for part in trace.by_steps():
        counter.add(part)
        done += len(part.load_SLE)
        say(f"{done:,} of {steps:,} steps")
        load_LE += part.load_SLE.sum(axis=0)
        rank_SLR = part.load_SLE.reshape(*part.load_SLE.shape[:2], home.ranks, -1).sum(axis=3)
        parts.append((part.load_SLE.sum(axis=2), part.load_SLE.max(axis=2), rank_SLR.max(axis=2)))
    asked_SL, expert_SL, rank_SL = (np.concatenate(part) for part in zip(*parts, strict=True))

    def layer(name: str, which: Array) -> LayerSummary:
        """Return the summary of one layer, or of several together."""
        at = []
        for number, gamma in enumerate(gammas):
            sums = counter.at(number, which)
            straggler = None if ranks is None else sums.straggler
            at.append(AtGamma(gamma, sums.drop_rate, sums.pad_waste, straggler, sums.lost or None))
        layer_SL, fullest_SL = asked_SL[:, which], rank_SL[:, which]
        asked = int(layer_SL.sum())
        return LayerSummary(
            name=name,
            assignments=asked,
            expert_peak=_peak(expert_SL[:, which], layer_SL, trace.n_experts),
            rank_peak=None if ranks is None else _peak(fullest_SL, layer_SL, ranks),
            straggler=None if ranks is None else int(fullest_SL.sum()) * ranks / (asked or 1),
            at=tuple(at),
            load=tuple(load_LE[which[0]].tolist()) if len(which) == 1 else (),
        )

    return TraceSummary(
        source=trace.source,
        model=trace.model,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        ranks=ranks,
        tokens=trace.n_tokens,
        steps=trace.n_steps,
        decode_steps=trace.decode_steps,
        rounding=rounding,
        total=layer("all layers", np.arange(trace.n_layers)),
        layers=tuple(layer(name, np.array([n])) for n, name in enumerate(trace.layers)),
    )


def _peak(fullest_SL: Array, asked_SL: Array, units: int) -> PeakLoad:
    """Return the peak of the fullest of some units, from its load in each step and layer."""
    peak_SL = fullest_SL * units / np.maximum(asked_SL, 1)
    return PeakLoad(float(peak_SL.sum() / (np.count_nonzero(asked_SL) or 1)), float(peak_SL.max()))
