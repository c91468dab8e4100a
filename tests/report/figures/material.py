"""What figures are made from: records in parts, and layers of a known peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from tests.records import layer


def evidence(shown: dict[str, Any] | None = None, /, **parts: Sequence[Record]) -> FigureRecords:
    """Evidence of these parts; ``shown`` replaces what follows from them, such as titles."""
    everything = [one for listed in parts.values() for one in listed]
    follows = {
        "models": {one.model: one.model.title() for one in everything},
        "tasks": {one.task: one.task.upper() for one in everything},
    }
    planned = len(everything)
    return FigureRecords(profile="p", planned=planned, records=parts, **(follows | (shown or {})))


def peaked(name: str, peak: float, **changes: Any) -> dict[str, Any]:
    """A layer whose fullest expert, or rank, has this load over the mean in every batch."""
    one = layer(**changes)
    return one | {"peak": one["peak"] | {name: dict.fromkeys(("mean", "max", "last"), peak)}}
