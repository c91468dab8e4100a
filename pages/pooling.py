"""Groups of records, and their means over tasks and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from capmoe_eval.experiment.record import Record

_T = TypeVar("_T")


def by_task(records: Iterable[Record], tasks: Collection[str]) -> list[list[Record]]:
    """Return the records of each task; nothing at all where a task has none."""
    groups = by_key(records, lambda record: record.task)
    return [groups[task] for task in tasks] if groups.keys() >= set(tasks) else []


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


def rank_peak(records: Iterable[Record]) -> float:
    """Return the fullest rank over the mean load after drops, mean over layers and forwards."""
    layers = (layer for record in records for layer in record.layers)
    return statistics.fmean(layer.peak["device_after"]["mean"] for layer in layers)


def by_key(records: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Return records, or runs, in groups, in the order of their first members."""
    groups: dict[Any, list[_T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
