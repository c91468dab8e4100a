"""Points that cells lose against others, and their loads, from the frame of results."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from capmoe_eval.paper.pairing import answered_by_cells, pair

from capmoe_methods.bootstrap import Interval, interval

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.results.frames import Results


def lost(
    results: Results, stock: pd.DataFrame, cells: pd.DataFrame, tasks: Collection[str]
) -> Interval | str:
    """Return the points that cells of a model lose against its stock cells, or why none are known.

    They are a mean over tasks that count equally, with a 95 % interval over documents. Both frames
    are rows of ``results.cells``; several cells of a task are seeds.
    """
    ordered = sorted(tasks)  # as in the effects of claims
    sides = [
        {task: runs for (_, task), runs in answered_by_cells(results, side).items()}
        for side in (stock, cells)
    ]
    if not all(side.keys() >= set(ordered) for side in sides):
        return "not every task is there"
    differences = {}
    for task in ordered:
        paired = pair(*(side[task] for side in sides))
        if isinstance(paired, str):
            return paired
        differences[task] = 100 * paired.units
    return interval(differences)


def peaks(
    results: Results, unit: Literal["device", "expert"], when: Literal["before", "after"] = "after"
) -> pd.Series[float]:
    """Return of each cell the fullest rank or expert over the mean load before any drop.

    It is a mean over layers and forwards, before or after drops, in the order of ``results.cells``.
    """
    means = results.layers.groupby("cell")[f"peak.{unit}_{when}.mean"].agg(fmean)
    return results.cells["cell"].map(means)
