"""The table of any sweep: a row for each model, method and γ of a directory, a column a task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.names import BITS_PER_BYTE, gamma_column, is_stock, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import PaperTable
from capmoe_eval.report.tables.fill import cell_notes, error_over_seeds
from capmoe_eval.report.tables.table import as_table
from capmoe_eval.results.frames import IDENTITY, read
from capmoe_eval.routing.registry import knobs, method_names

SHARE, BITS = "score (%)", "bits per byte"
"""Units of scores; those of other metrics have none."""
_REACH: Final = 1.96  # standard errors to either end of a 95 % interval
_PERCENT: Final = 100.0
_ROW: Final = ["model", "method", "gamma", "settings"]
_CAPTION: Final = (
    "The metric of each task, and its 95 % interval over documents and seeds: percent where it is "
    "a share. Dropped is the share of the router's choices that were not computed (%), straggler "
    "the load of the fullest expert over the mean load; both are means over layers and tasks."
)


def sweep_table(root: Path) -> pd.DataFrame:
    """Return the results of a directory, of whatever models, methods, knobs and tasks it has.

    Seeds of one setting are averaged. Where other knobs differ on a model, method and task, a row
    says its own.

    Raises:
        UsageError: If there is no whole record.
    """
    cells = read(root).cells
    order = {method: place for place, method in enumerate(method_names())}
    cells = cells.assign(
        settings=settings_of(cells),
        gamma=pd.to_numeric(cells["gamma"]),
        place=cells["method"].map(order),
    ).sort_values(["place", "gamma", "settings"], ascending=[True, False, True], kind="stable")
    of_task = dict(sorted(zip(cells["task"], units_of(cells), strict=True)))
    scales = {task: _PERCENT if unit == SHARE else 1.0 for task, unit in of_task.items()}
    rows: list[dict[str, object]] = []
    models = sorted(set(cells["model"]))
    settings = [same for _, same in cells.groupby(_ROW, dropna=False, sort=False)]
    settings.sort(key=lambda same: models.index(same["model"].iloc[0]))
    for line, same in enumerate(settings):
        model, method, gamma, words = same.iloc[0][_ROW]
        factor = math.inf if is_stock(method) else gamma
        text = gamma_column(method, None if math.isnan(gamma) else gamma)
        row = {"line": line, "block": models.index(model), "Model": model, "γ": text}
        row |= {"Method": method_title(method), "Settings": words}
        row |= {"model": model, "method": method, "gamma": factor}
        of_tasks = {
            task: _mean(same[same["task"] == task], scale) for task, scale in scales.items()
        }
        of_tasks["Dropped"] = {"value": _PERCENT * same["drop_rate"].mean()}
        of_tasks["Straggler"] = {"value": same["load.mean_peak_after"].mean()}
        rows += [row | {"column": column} | cell for column, cell in of_tasks.items()]
    layout = PaperTable("sweep", "ours", 0, "Results in {root}", _CAPTION)
    table = as_table(layout, ["Model", "Method", "γ", "Settings"], rows, root=root.name)
    table.attrs |= {"folder": root.resolve().name, "notes": [*cell_notes(table)]}
    # Methods differ in thousandths of a bit.
    table.attrs["fine"] = {task: 4 for task, unit in of_task.items() if unit == BITS}
    return table.assign(best=False)  # of a metric that may be better the lower it is


def _mean(same: pd.DataFrame, scale: float) -> dict[str, object]:
    """Return the mean over the seeds of a setting on a task, with its 95 % interval."""
    if same.empty:
        return {}
    values, errors = (scale * same[name].dropna() for name in ("value", "stderr"))
    mean, error = float(values.mean()), error_over_seeds(values.tolist(), errors.tolist())
    seeds, count = sorted(same["seed"].dropna().astype(int)), int(same["n"].iloc[0])
    cell = {"value": mean, "n": count, "seeds": ", ".join(map(str, seeds))}
    cell["records"] = tuple(same["path"])
    if error is None:
        return cell
    low, high = mean - _REACH * error, mean + _REACH * error
    if scale == _PERCENT:
        low, high = (scale * end for end in share_interval(mean / scale, error / scale, count))
    return cell | {"stderr": error, "low": low, "high": high}


def share_interval(share: float, error: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, of as many documents as its error is of.

    Without an error these are ``count`` documents.
    """
    variance = share * (1 - share)
    square = _REACH**2 / (variance / error**2 if variance and error else count)
    centre, reach = share + square / 2, math.sqrt(max(0.0, square * variance + square**2 / 4))
    return (centre - reach) / (1 + square), (centre + reach) / (1 + square)


def units_of(cells: pd.DataFrame) -> pd.Series[str]:
    """Return the unit of each cell's score; a score is a share where all of its task are."""
    are_shares = cells.groupby("task")["value"].transform(lambda of: of.between(0, 1).all())
    units = are_shares.map({True: SHARE, False: "score"})
    return units.mask(cells["task.metric"] == BITS_PER_BYTE, BITS)


def settings_of(cells: pd.DataFrame) -> pd.Series[str]:
    """Return what else tells cells of one model and method apart: the knobs that differ."""
    texts = cells[list(IDENTITY)].map(_text)
    others = texts.drop(columns=["model", "method", "gamma", "task", "seed"])
    by_task = others.groupby([texts[name] for name in ("model", "method", "task")]).nunique() > 1
    differ = by_task.groupby(["model", "method"]).any()
    # Tasks have their own limits and batches, but share the checkpoint and the method's knobs.
    shared = [name for name in IDENTITY if name.startswith("model.") or name in knobs()]
    shared.remove("seed")
    by_method = others[shared].groupby([texts[name] for name in ("model", "method")])
    differ[shared] = by_method.nunique() > 1
    of_cells = differ.loc[list(zip(texts["model"], texts["method"], strict=True))]
    words = others.where(of_cells.set_index(others.index) & (others != ""))
    return words.apply(lambda row: " ".join(f"{k}={v}" for k, v in row.dropna().items()), axis=1)


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:g}"
    return "" if value is None else str(value)
