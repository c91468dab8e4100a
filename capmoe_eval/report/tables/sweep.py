"""The table of any sweep: a row for each model, method and γ of a directory, a column a task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.names import gamma_column, method_title
from capmoe_eval.report.tables.entries import error_over_seeds
from capmoe_eval.report.tables.table import Entry, Missing, Row, RowBlock, Table
from capmoe_eval.results.frames import IDENTITY, read
from capmoe_eval.routing.registry import method_names

if TYPE_CHECKING:
    import pandas as pd

_REACH: Final = 1.96  # standard errors to either end of a 95 % interval
_PERCENT: Final = 100.0
_ROW: Final = ["model", "method", "gamma", "settings"]
_CAPTION: Final = (
    "The metric of each task, and its 95 % interval over documents and seeds: percent where it is "
    "a share. Dropped is the share of the router's choices that were not computed (%), straggler "
    "the load of the fullest expert over the mean load; both are means over layers and tasks."
)


def sweep_table(root: Path) -> Table:
    """Return the results of a directory, of whatever models, methods, knobs and tasks it has.

    Seeds of one setting are averaged. Where other knobs differ on a model, method and task, a row
    says its own.

    Raises:
        UsageError: If there is no whole record.
    """
    import pandas as pd

    cells = read(root).cells
    order = {method: place for place, method in enumerate(method_names())}
    cells = cells.assign(
        settings=_settings(cells),
        gamma=pd.to_numeric(cells["gamma"]),
        place=cells["method"].map(order),
    ).sort_values(["place", "gamma", "settings"], ascending=[True, False, True], kind="stable")
    tasks = cells.groupby("task")["value"].agg(["min", "max"])
    scales = {
        str(task): _PERCENT if 0 <= low <= high <= 1 else 1.0
        for task, low, high in tasks.itertuples()
    }
    rows: dict[str, list[Row]] = {model: [] for model in sorted(set(cells["model"]))}
    for _, same in cells.groupby(_ROW, dropna=False, sort=False):
        model, method, gamma, settings = same.iloc[0][_ROW]
        factor = gamma_column(method, None if math.isnan(gamma) else gamma)
        entries = [_entry(same[same["task"] == task], scale) for task, scale in scales.items()]
        means = _PERCENT * same["drop_rate"].mean(), same["load.mean_peak_after"].mean()
        labels = model, method_title(method), factor, settings
        rows[model].append(Row(labels, (*entries, *map(Entry, means)), model, method, factor))
    blocks = [RowBlock(tuple(block), None) for block in rows.values()]
    return Table(
        "sweep",
        f"Results in {root.name}",
        _CAPTION,
        ("Model", "Method", "γ", "Settings"),
        (*scales, "Dropped", "Straggler"),
        tuple(blocks),
    )


def _entry(same: pd.DataFrame, scale: float) -> Entry | Missing:
    """Return the mean over the seeds of a setting on a task, with its 95 % interval."""
    if same.empty:
        return Missing("")
    values, errors = (scale * same[name].dropna() for name in ("value", "stderr"))
    mean, error = float(values.mean()), error_over_seeds(values.tolist(), errors.tolist())
    seeds, count = tuple(sorted(map(int, same["seed"].dropna()))), int(same["n"].iloc[0])
    if error is None:
        return Entry(mean, seeds=seeds, documents=count)
    ends = mean - _REACH * error, mean + _REACH * error
    if scale == _PERCENT:
        ends = _interval(mean / scale, error / scale, count)
    return Entry(mean, error, seeds, count, quartiles=ends)


def _interval(share: float, error: float, documents: int) -> tuple[float, float]:
    """Return Wilson's interval of a share in percent, of as many documents as its error is of."""
    variance = share * (1 - share)
    square = _REACH**2 / (variance / error**2 if variance and error else documents)
    centre, reach = share + square / 2, math.sqrt(square * variance + square**2 / 4)
    low, high = ((centre + end) / (1 + square) * _PERCENT for end in (-reach, reach))
    return low, high


def _settings(cells: pd.DataFrame) -> pd.Series:
    """Return the knobs of each cell that differ between cells of its model, method and task."""
    texts = cells[list(IDENTITY)].map(lambda v: "" if v is None else _text(v))
    others = texts.drop(columns=["model", "method", "gamma", "task", "seed"])
    by_task = others.groupby([texts[name] for name in ("model", "method", "task")]).nunique() > 1
    differ = by_task.groupby(["model", "method"]).any()
    of_cells = differ.loc[list(zip(texts["model"], texts["method"], strict=True))]
    words = others.where(of_cells.set_index(others.index) & (others != ""))
    return words.apply(lambda row: " ".join(f"{k}={v}" for k, v in row.dropna().items()), axis=1)


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:g}"
    return str(value)
