"""What figures are made from, and what they show: records in parts, and marks by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.panels import Panel, Picture
from tests.records import layer


def evidence(titles: dict[str, Any] | None = None, /, **parts: Sequence[Record]) -> FigureRecords:
    """Evidence of these parts; ``titles`` replace what follows from them."""
    everything = [record for records in parts.values() for record in records]
    follows = {
        "models": {record.model: record.model.title() for record in everything},
        "tasks": {record.task: record.task.upper() for record in everything},
    }
    planned = len(everything)
    return FigureRecords(profile="p", planned=planned, records=parts, **(follows | (titles or {})))


def peaked(name: str, peak: float, **changes: Any) -> dict[str, Any]:
    """A layer whose fullest expert, or rank, has this load over the mean in every batch."""
    content = layer(**changes)
    peaks = content["peak"] | {name: dict.fromkeys(("mean", "max", "last"), peak)}
    return content | {"peak": peaks}


def named(panel: Panel) -> dict[str, Any]:
    """The marks of a panel by their names, without those that have none."""
    return {mark.name: mark for mark in panel.marks if getattr(mark, "name", "")}


def curves(panel: Panel) -> dict[str, list[tuple[Any, Any]]]:
    """The points of the named curves of a panel."""
    return {
        name: list(zip(mark.x, mark.y, strict=True))
        for name, mark in named(panel).items()
        if hasattr(mark, "y")
    }


def panels(picture: Picture) -> list[Panel]:
    """All panels, row by row."""
    return [panel for row in picture.rows for panel in row]
