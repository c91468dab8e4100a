"""Sums and means over layers, tasks and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from capmoe_eval.experiment.record import Record

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Layer

_T = TypeVar("_T")


def layers_of(records: Iterable[Record]) -> list[Layer]:
    """Return all layers of some records."""
    return [layer for record in records for layer in record.layers]


def by_layer(records: Sequence[Record]) -> list[list[Layer]]:
    """Return, for each layer of one model, that layer of every record."""
    return [list(same) for same in zip(*(r.layers for r in records), strict=True)]


@dataclass(frozen=True)
class Grid:
    """What Token Drop would do to a routing, by capacity factor.

    Attributes:
        gamma: Capacity factors.
        drop_rate: Dropped share of the assignments (Equation 11).
        pad_waste: Empty share of the provisioned slots; None where there are no slots (γ=0).
    """

    gamma: tuple[float, ...]
    drop_rate: tuple[float, ...]
    pad_waste: tuple[float | None, ...]


def pooled_grid(layers: Sequence[Layer]) -> Grid:
    """Pool layers (of one model, over whatever tasks): sums of drops, assignments and slots.

    A record holds shares. The slots behind a share of padding follow from it: what was kept,
    assignments · (1 - drop rate), fills the share 1 - padding waste of them.
    """
    gammas = tuple(layers[0].grid.gamma)
    drops: list[float] = []
    wastes: list[float | None] = []
    total = sum(layer.assignments for layer in layers)
    for i in range(len(gammas)):
        dropped = kept = slots = 0.0
        for layer in layers:
            drop, waste = layer.grid.drop_rate[i], layer.grid.pad_waste[i]
            own = layer.assignments * (1 - drop)
            dropped += layer.assignments * drop
            kept += own
            slots += own / (1 - waste) if waste is not None and waste < 1 else 0.0
        drops.append(dropped / total)
        wastes.append(1 - kept / slots if slots else None)
    return Grid(gammas, tuple(drops), tuple(wastes))


def normalised(layer: Layer, when: Literal["before", "after"] = "before") -> list[float]:
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
    fullest = [
        statistics.fmean(max(normalised(layer)) for layer in same) for same in by_layer(records)
    ]
    return max(range(len(fullest)), key=fullest.__getitem__)


def mean_score(records: Sequence[Record], tasks: Iterable[str]) -> dict[str, Any] | None:
    """Return the mean score over tasks that count equally, or None where a task has no record.

    Seeds of one task are averaged first. They saw the same documents, so their standard errors are
    averaged too and do not shrink with their number.

    Returns:
        ``value`` and ``stderr`` in percent; the standard error is over documents, and None where a
        task has none.
    """
    values, errors = [], []
    for task in tasks:
        found = [record for record in records if record.task == task]
        if not found:
            return None
        values.append(statistics.fmean(record.value for record in found))
        known = [record.stderr for record in found if record.stderr is not None]
        errors.append(statistics.fmean(known) if len(known) == len(found) else None)
    whole = [error for error in errors if error is not None]
    stderr = 100 * math.hypot(*whole) / len(whole) if len(whole) == len(errors) else None
    return {"value": 100 * statistics.fmean(values), "stderr": stderr}


def mean_load(records: Sequence[Record], tasks: Iterable[str], field: str) -> float | None:
    """Return the mean of a field of ``load`` over tasks, seeds first; None where one is missing."""
    means = []
    for task in tasks:
        found = [getattr(record.load, field) for record in records if record.task == task]
        known = [float(value) for value in found if value is not None]
        if not known:
            return None
        means.append(statistics.fmean(known))
    return statistics.fmean(means)


def by_key(records: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Return records, or runs, in groups, in the order of their first members."""
    groups: dict[Any, list[_T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
