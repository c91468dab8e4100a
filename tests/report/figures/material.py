"""What figures are made from: records in parts, and rows of their data by the value of a column."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.sources import Sources
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import layer

ROOT = Path("results")
BASELINE = create_method("baseline")
EVEN = layer([4, 4, 4, 4])


def cell(method: Method, task: str = "obqa", *, model: str = "mine", **other: Any) -> Cell:
    """A cell of a model and a task."""
    return records.cell(method, model, task, **other)


def record(
    of: Cell,
    layers: Sequence[dict[str, Any]] = (EVEN,),
    *,
    correct: Sequence[int] = (0, 1),
    drop_rate: float = 0.0,
    peak: float = 2.0,
    **parts: Any,
) -> Record:
    """The record of a cell, with these layers and answers."""
    peaks = ("peak_before", "peak_after", "mean_peak_before", "mean_peak_after")
    load = {"drop_rate": drop_rate, **dict.fromkeys(peaks, peak)}
    return records.record(of, ROOT, correct, layers=layers, load=load, **{"stderr": 0.02, **parts})


def evidence(titles: dict[str, Any] | None = None, /, **parts: Sequence[Record]) -> Sources:
    """Evidence of these parts; ``titles`` replace what follows from them."""
    everything = [record for records in parts.values() for record in records]
    follows = {
        "models": {record.model: record.model.title() for record in everything},
        "tasks": {record.task: record.task.upper() for record in everything},
    }
    planned = len(everything)
    digests = {part: [record.digest for record in records] for part, records in parts.items()}
    frames = functools.partial(results_of, everything)
    about = {"planned": planned, "parts": digests, "frames": frames}
    return Sources(profile="p", **about, **(follows | (titles or {})))


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
