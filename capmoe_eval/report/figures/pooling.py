"""Sums and means over layers, tasks and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from capmoe_eval.experiment.record import Record, Score

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Layer

_T = TypeVar("_T")
When = Literal["before", "after"]
"""The method; a load is counted on both sides of it."""


def layers_of(records: Iterable[Record]) -> list[Layer]:
    """Return all layers of some records."""
    return [layer for record in records for layer in record.layers]


def by_layer(records: Sequence[Record]) -> list[list[Layer]]:
    """Return, for each layer of one model, that layer of every record."""
    return [list(same) for same in zip(*(r.layers for r in records), strict=True)]


class PooledGrid(NamedTuple):
    """The effect that Token Drop would have on a routing, by capacity factor."""

    gamma: Sequence[float]
    drop_rate: Sequence[float]
    """Dropped share of the assignments (Equation 11)."""
    pad_waste: Sequence[float | None]
    """Empty share of the provisioned slots; None where there are no slots (γ=0)."""


def pooled_grid(layers: Sequence[Layer]) -> PooledGrid:
    """Pool layers (of one model, over whatever tasks): sums of drops, assignments and slots.

    A record holds shares. The slots behind a share of padding follow from it: what was kept,
    assignments · (1 - drop rate), fills the share 1 - padding waste of them.
    """
    assignments = np.array([[layer.assignments] for layer in layers])
    drop = np.array([layer.grid.drop_rate for layer in layers])
    waste = np.array([layer.grid.pad_waste for layer in layers], dtype=float)  # None: NaN
    kept = assignments * (1 - drop)
    slots = np.divide(kept, 1 - waste, out=np.zeros_like(kept), where=waste < 1)
    filled = zip(kept.sum(axis=0).tolist(), slots.sum(axis=0).tolist(), strict=True)
    return PooledGrid(
        layers[0].grid.gamma,
        ((assignments * drop).sum(axis=0) / assignments.sum()).tolist(),
        [1 - computed / provisioned if provisioned else None for computed, provisioned in filled],
    )


def normalised(layer: Layer, when: When = "before") -> list[float]:
    """Return each expert's load before or after drops, over the mean load N̄ asked for [E]."""
    mean = layer.assignments / layer.n_experts
    return [n / mean for n in (layer.load_before if when == "before" else layer.load_after)]


def busiest_first(load: Sequence[float]) -> list[int]:
    """Return the experts' numbers by falling load."""
    return sorted(range(len(load)), key=lambda expert: -load[expert])


def mean_loads(layers: Iterable[Layer]) -> list[float]:
    """Return the load of each expert over N̄, mean over the records of one layer."""
    return [statistics.fmean(loads) for loads in zip(*map(normalised, layers), strict=True)]


def busiest_layer(records: Sequence[Record]) -> int:
    """Return the number of the layer with the fullest expert, on average over the records."""
    return busiest_first(
        [statistics.fmean(max(normalised(layer)) for layer in same) for same in by_layer(records)]
    )[0]


class Percent(NamedTuple):
    """A score and its standard error, None if it has none, in percent."""

    value: float
    stderr: float | None


def in_percent(score: Record | Score) -> Percent:
    """Return a score in percent."""
    stderr = score.stderr
    return Percent(100 * score.value, None if stderr is None else 100 * stderr)


def by_task(records: Iterable[Record], tasks: Collection[str]) -> list[list[Record]]:
    """Return the records of each task; nothing at all where a task has none."""
    groups = by_key(records, lambda record: record.task)
    return [groups[task] for task in tasks] if groups.keys() >= set(tasks) else []


def mean_score(records: Iterable[Record], tasks: Collection[str]) -> Percent | None:
    """Return the mean score over tasks that count equally, or None where a task has no record.

    The standard error is over documents, None where a task has none. Seeds of one task are averaged
    first. They saw the same documents, so their standard errors are averaged too and do not shrink
    with their number.
    """
    groups = by_task(records, tasks)
    if not groups:
        return None
    values = [statistics.fmean(record.value for record in same) for same in groups]
    stderrs = [[r.stderr for r in same if r.stderr is not None] for same in groups]
    whole = [len(errors) for errors in stderrs] == [len(same) for same in groups]
    stderr = 100 * math.hypot(*map(statistics.fmean, stderrs)) / len(stderrs) if whole else None
    return Percent(100 * statistics.fmean(values), stderr)


def mean_load(records: Iterable[Record], tasks: Collection[str], field: str) -> float | None:
    """Return the mean of a field of ``load`` over tasks, seeds first; None where one has none."""
    means = []
    for same in by_task(records, tasks):
        values = [getattr(record.load, field) for record in same]
        numbers = [float(value) for value in values if value is not None]
        if not numbers:
            return None
        means.append(statistics.fmean(numbers))
    return statistics.fmean(means) if means else None


def rank_peak(records: Iterable[Record], when: When = "after") -> float:
    """Return the fullest rank over the mean load, mean over layers and forwards."""
    peaks = (getattr(layer.peak, f"device_{when}") for layer in layers_of(records))
    return statistics.fmean(peak.mean for peak in peaks)


def shared_gamma(records: Iterable[Record]) -> float | None:
    """Return the γ of records that have one γ or none; of several, the least."""
    return min((r.gamma for r in records if r.gamma is not None), default=None)


def by_key(records: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Return records, or runs, in groups, in the order of their first members."""
    groups: dict[Any, list[_T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
