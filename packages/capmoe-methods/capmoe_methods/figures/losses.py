"""Points that settings of methods lose against no limit, and the loads of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, answered, pair
from capmoe_eval.paper.statistics import Interval, interval

if TYPE_CHECKING:
    from capmoe_eval.report.figures.evidence import FigureRecords

When = Literal["before", "after"]
"""The method; a load is counted on both sides of it."""


def by_task(records: Iterable[Record], tasks: Collection[str]) -> list[list[Record]]:
    """Return the records of each task; nothing at all where a task has none."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.task, []).append(record)
    return [groups[task] for task in tasks] if groups.keys() >= set(tasks) else []


def by_model(sources: FigureRecords, *parts: str) -> dict[str, list[Record]]:
    """Return the records of some parts by model, each once, in the order of the plan."""
    records = {record.path: record for part in parts for record in sources.records.get(part, ())}
    groups: dict[str, list[Record]] = {}
    for record in records.values():
        groups.setdefault(record.model, []).append(record)
    return groups


def rank_peak(records: Iterable[Record], when: When = "after") -> float:
    """Return the fullest rank over the mean load, mean over layers and forwards."""
    layers = (layer for record in records for layer in record.layers)
    is_before = when == "before"
    peaks = (layer.peak["device_before" if is_before else "device_after"] for layer in layers)
    return statistics.fmean(peak["mean"] for peak in peaks)


def lost(
    stock: Iterable[Record], records: Iterable[Record], tasks: Collection[str]
) -> Interval | str:
    """Return the points lost against the stock model, or why they are not known.

    They are a mean over tasks that count equally, with a 95 % interval over documents.
    """
    ordered = sorted(tasks)  # as in the effects of claims
    sides = by_task(stock, ordered), by_task(records, ordered)
    if not all(sides):
        return "not every task is there"
    differences = {}
    for task, without, bounded in zip(ordered, *sides, strict=True):
        both = ([answered(r.documents) for r in side] for side in (without, bounded))
        paired = pair(*both)
        if isinstance(paired, Unpaired):
            return paired.reason
        differences[task] = 100 * paired.units
    return interval(differences)
