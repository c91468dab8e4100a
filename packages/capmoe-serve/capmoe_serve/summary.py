"""Summarise a trace: peaks, stragglers, and what a capacity would drop, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from capmoe_serve.capacities import count, shares
from capmoe_serve.placements import contiguous
from capmoe_serve.trace import Array, Trace

if TYPE_CHECKING:
    import pandas as pd

# Shape suffixes: S steps, L layers, E experts.

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

    ``capacities`` is indexed by ``layer`` and ``gamma``, and has the columns of
    :func:`capmoe_serve.capacities.shares`; ``straggler`` is there with ranks that divide the
    experts. The capacity group is a whole step.
    """

    layers: pd.DataFrame
    capacities: pd.DataFrame


def summarise(
    trace: Trace, gammas: Sequence[float] = GAMMAS, *, ranks: int | None = None
) -> TraceSummary:
    """Summarise a trace.

    ``C = ceil(γ·T·K/E)`` with the T tokens of a step, as :func:`capacity` has it. Where K is not
    known, C is not bounded by T, which changes no drop, only the waste at γ above E/K. Each of the
    ranks, by default the trace's, has E/R consecutive experts. Where R does not divide E, it has
    E/R rounded up, and the first experts have copies, which take an expert's pairs in turn; what a
    capacity of an expert leaves to each copy is not defined.
    """
    import pandas as pd

    ranks = trace.ranks if ranks is None else ranks
    home = contiguous(trace.n_layers, trace.n_experts, ranks or 1)
    asked_SL, expert_SL, rank_SL = np.empty((3, trace.n_steps, trace.n_layers), dtype=np.int64)
    for layer in range(trace.n_layers):
        load_SE = trace.load(layer)
        asked_SL[:, layer], expert_SL[:, layer] = load_SE.sum(axis=1), load_SE.max(axis=1)
        rank_SL[:, layer] = home.rank_load(load_SE, layer).max(axis=1)

    rows = []
    for which in (*np.arange(trace.n_layers)[:, None], slice(None)):
        asked = int(asked_SL[:, which].sum())
        row: dict[str, float] = {"pairs": asked}
        row |= _peaks("expert", expert_SL[:, which], asked_SL[:, which], trace.n_experts)
        if ranks is not None:
            row |= _peaks("rank", rank_SL[:, which], asked_SL[:, which], ranks)
            row["straggler"] = int(rank_SL[:, which].sum()) * ranks / (asked or 1)
        rows.append(row)

    alone = contiguous(trace.n_layers, trace.n_experts, 1) if home.redundant else home
    sums = count(trace, gammas, alone, "expert")
    of_layers = [part.droplevel("layer") for _, part in sums.groupby(level="layer")]
    parts = [shares(part, ranks or 1) for part in (*of_layers, sums.groupby("gamma").sum())]
    names = [*trace.layers, ALL]
    capacities = pd.concat(parts, keys=names, names=["layer"])
    if ranks is None or home.redundant:
        capacities = capacities.drop(columns="straggler")
    return TraceSummary(pd.DataFrame(rows, pd.Index(names, name="layer")), capacities)


def _peaks(what: str, fullest_SL: Array, asked_SL: Array, units: int) -> dict[str, float]:
    """Return mean and highest peak of the fullest of some units, from its load in each step."""
    peak_SL = fullest_SL * units / np.maximum(asked_SL, 1)
    mean = peak_SL.sum() / (np.count_nonzero(asked_SL) or 1)  # over the steps with a token
    return {f"{what}_mean": float(mean), f"{what}_max": float(peak_SL.max())}
