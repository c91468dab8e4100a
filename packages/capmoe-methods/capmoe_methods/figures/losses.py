"""Points that settings of methods lose against no limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, answered, pair
from capmoe_eval.paper.statistics import Interval, interval


def by_task(records: Iterable[Record], tasks: Collection[str]) -> list[list[Record]]:
    """Return the records of each task; nothing at all where a task has none."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.task, []).append(record)
    return [groups[task] for task in tasks] if groups.keys() >= set(tasks) else []


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
