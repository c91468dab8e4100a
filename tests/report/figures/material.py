"""What figures are made from: records in parts, and rows of their data by the value of a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
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


def values(rows: pd.DataFrame, by: str, *columns: str) -> dict[str, list[Any]]:
    """The values of one column, or of several, by the value of another, in the rows' order."""
    lists = {}
    for value, same in rows.groupby(by, sort=False):
        numbers = [same[column].tolist() for column in columns]
        lists[str(value)] = numbers[0] if len(columns) == 1 else list(zip(*numbers, strict=True))
    return lists
