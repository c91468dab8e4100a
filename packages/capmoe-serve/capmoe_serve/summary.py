"""Summarise a trace: peaks, stragglers, and what a capacity would drop, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from capmoe_serve.capacities import CapacityCounter
from capmoe_serve.placements import contiguous, rank_loads
from capmoe_serve.trace import Array, Trace

if TYPE_CHECKING:
    import pandas as pd

# Shape suffixes: S steps, L layers, E experts, R ranks.

GAMMAS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Capacity factors of a summary."""
ALL: Final = "all layers"
"""The row of a summary for all layers together, behind those of each."""


class TraceSummary(NamedTuple):
    """The summary of a trace, a row for each layer and one for :data:`ALL`.

    ``layers`` is indexed by ``layer``:

    - ``pairs`` of a token and an expert, summed over steps
    - ``expert_mean``, ``expert_max``: load of a step's fullest expert over the mean of that step
    - with ranks, the same of the fullest rank, ``rank_mean`` and ``rank_max``, and ``straggler``:
      load of the fullest rank over the mean load of a rank, both summed over steps

    ``capacities`` is indexed by ``layer`` and ``gamma``; the capacity group is a whole step:

    - ``dropped``: share of the pairs (Equation 11), which is the same whoever is kept
    - ``padding``: empty share of the slots C·E; NaN where there are none (γ=0)
    - with ranks that divide the experts ``straggler``, as above, over the mean load before any drop
    - with scores ``lost_score``, ``lost_order``, ``lost_random``: dropped share by who is kept
    """

    layers: pd.DataFrame
    capacities: pd.DataFrame
    load_LE: Array  # pairs of each expert, summed over steps


def summarise(
    trace: Trace,
    gammas: Sequence[float] = GAMMAS,
    *,
    ranks: int | None = None,
) -> TraceSummary:
    """Summarise a trace in one pass of bounded memory.

    ``C = ceil(γ·T·K/E)`` with the T tokens of a step, as :func:`capacity` has it. Where K is not
    known, C is not bounded by T, which changes no drop, only the waste at γ above E/K. Each of the
    ranks, by default the trace's, has E/R consecutive experts. Where R does not divide E, it has
    E/R rounded up, and the first experts have copies, which take an expert's pairs in turn; what a
    capacity of an expert leaves to each copy is not defined.
    """
    import pandas as pd

    ranks = trace.ranks if ranks is None else ranks
    home = contiguous(trace.n_layers, trace.n_experts, 1 if ranks is None else ranks)
    alone = contiguous(trace.n_layers, trace.n_experts, 1) if home.redundant else home
    counter = CapacityCounter(trace, gammas, alone, "expert")
    load_LE = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
    parts = []
    for part in trace.by_steps():
        counter.add(part)
        load_LE += part.load_SLE.sum(axis=0)
        rank_SLR = rank_loads(part.load_SLE, home)
        parts.append((part.load_SLE.sum(axis=2), part.load_SLE.max(axis=2), rank_SLR.max(axis=2)))
    asked_SL, expert_SL, rank_SL = (np.concatenate(part) for part in zip(*parts, strict=True))

    layers, capacities = [], []
    numbers = [(name, np.array([number])) for number, name in enumerate(trace.layers)]
    for name, which in [*numbers, (ALL, np.arange(trace.n_layers))]:
        asked = int(asked_SL[:, which].sum())
        row: dict[str, object] = {"layer": name, "pairs": asked}
        row |= _peaks("expert", expert_SL[:, which], asked_SL[:, which], trace.n_experts)
        if ranks is not None:
            row |= _peaks("rank", rank_SL[:, which], asked_SL[:, which], ranks)
            row["straggler"] = int(rank_SL[:, which].sum()) * ranks / (asked or 1)
        layers.append(row)
        for number, gamma in enumerate(gammas):
            sums = counter.at(number, which)
            at = {"layer": name, "gamma": gamma, "dropped": sums.drop_rate}
            at["padding"] = np.nan if sums.pad_waste is None else sums.pad_waste
            if ranks is not None and not home.redundant:
                at["straggler"] = sums.straggler
            capacities.append(at | {f"lost_{keeper}": lost for keeper, lost in sums.lost.items()})
    return TraceSummary(
        pd.DataFrame(layers).set_index("layer"),
        pd.DataFrame(capacities).set_index(["layer", "gamma"]),
        load_LE,
    )


def _peaks(what: str, fullest_SL: Array, asked_SL: Array, units: int) -> dict[str, float]:
    """Return mean and highest peak of the fullest of some units, from its load in each step."""
    peak_SL = fullest_SL * units / np.maximum(asked_SL, 1)
    mean = peak_SL.sum() / (np.count_nonzero(asked_SL) or 1)  # over the steps with a token
    return {f"{what}_mean": float(mean), f"{what}_max": float(peak_SL.max())}
