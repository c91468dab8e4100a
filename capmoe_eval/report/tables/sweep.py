"""The table of any sweep: a row for each model, method and γ of a directory, a column a task."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.cell import CELL_FIELDS
from capmoe_eval.experiment.names import gamma_column, is_share, is_stock, method_title
from capmoe_eval.experiment.results import report_folder
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import PaperTable
from capmoe_eval.report.tables.fill import cell_notes, error_over_seeds
from capmoe_eval.report.tables.table import SETTINGS, as_table
from capmoe_eval.results.frames import IDENTITY, Results, read
from capmoe_eval.routing.registry import knobs, method_names

_REACH: Final = 1.96  # standard errors to either end of a 95 % interval
_PERCENT: Final = 100.0
_ROW: Final = ["model", "method", "gamma", "settings"]
_QUESTIONS: Final = [  # what a model is asked, and how its answers are scored
    *(name for name in IDENTITY if name.startswith("task.")),
    *("limit", "data", "eval_seed", "apply_chat_template", "system_instruction"),
]
_OF_MODEL: Final = [name for name in IDENTITY if name.startswith("model.")]
_CAPTION: Final = (
    "The metric of each task, and its 95 % interval over documents and seeds: percent where it is "
    "a share. Dropped is the share of the router's choices that were not computed (%), straggler "
    "the load of the fullest expert over the mean load; both are means over layers and tasks."
)


def sweep_table(root: Path) -> pd.DataFrame:
    """Return the results of a directory, of whatever models, methods, knobs and tasks it has.

    Seeds of one setting are averaged. What else differs is in the rows and in notes, as
    :func:`settings_of` has it.

    Raises:
        UsageError: If there is no whole record.
    """
    results = read(root)
    cells, (settings, notes) = results.cells, settings_of(results)
    gammas, places = pd.to_numeric(cells["gamma"]), cells["method"].map(method_names().index)
    cells = cells.assign(settings=settings, gamma=gammas, place=places).sort_values(
        ["model", "place", "gamma", "settings"], ascending=[True, True, False, True], kind="stable"
    )
    rows: list[dict[str, object]] = []
    models, tasks = sorted(set(cells["model"])), sorted(set(cells["task"]))
    for line, (_, same) in enumerate(cells.groupby(_ROW, dropna=False, sort=False)):
        model, method, gamma, words = same.iloc[0][_ROW]
        factor = math.inf if is_stock(method) else gamma
        text = gamma_column(method, None if math.isnan(gamma) else gamma)
        row = {"line": line, "block": models.index(model), "Model": model, "γ": text}
        row |= {"Method": method_title(method), SETTINGS: words}
        row |= {"model": model, "method": method, "gamma": factor}
        by_task = same.groupby("task")
        of_tasks: dict[str, dict[str, object]] = {task: {} for task in tasks}
        of_tasks |= {str(task): _mean(of) for task, of in by_task}
        loads = by_task[["drop_rate", "load.mean_peak_after"]].mean().mean()
        of_tasks["Dropped"] = {"value": _PERCENT * loads["drop_rate"]}
        of_tasks["Straggler"] = {"value": loads["load.mean_peak_after"]}
        rows += [row | {"column": column} | cell for column, cell in of_tasks.items()]
    layout = PaperTable("sweep", "ours", 0, "Results in {root}", _CAPTION)
    table = as_table(layout, ["Model", "Method", "γ", SETTINGS], rows, root=root.name)
    table.attrs |= {"folder": report_folder(root), "notes": [*cell_notes(table), *notes]}
    # Methods differ in thousandths of a bit.
    table.attrs["fine"] = dict.fromkeys(cells["task"][~cells["task.metric"].map(is_share)], 4)
    # Nothing planned these cells: none is missing.
    table["status"] = table["status"].replace("missing", "empty")
    return table.assign(best=False)  # of a metric that may be better the lower it is


def _mean(same: pd.DataFrame) -> dict[str, object]:
    """Return the mean over the seeds of a setting on a task, with its 95 % interval."""
    of_share = is_share(same["task.metric"].iloc[0])
    scale = _PERCENT if of_share else 1.0
    values, errors = (scale * same[name].dropna() for name in ("value", "stderr"))
    mean, error = float(values.mean()), error_over_seeds(values.tolist(), errors.tolist())
    seeds, count = sorted(same["seed"].dropna().astype(int)), int(same["n"].iloc[0])
    cell = {"value": mean, "n": count, "seeds": ", ".join(map(str, seeds))}
    cell["records"] = tuple(same["path"])
    if error is None:
        return cell
    low, high = mean - _REACH * error, mean + _REACH * error
    if of_share and 0 <= mean <= scale:  # a rescaled BERTScore may be below
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


def settings_of(results: Results) -> tuple[pd.Series[str], list[str]]:
    """Return what tells the cells of a model, method and γ apart, as texts, and notes on it.

    What is asked, and how it is scored, is in the texts of all cells of a task on which that
    differs; a setting that is null is in none. Of everything else a text has what differs within a
    model and method, and what differs from most cells of the directory, whose settings are a note.
    """
    texts = results.cells[list(IDENTITY)].map(_text)
    asked = results.documents[["cell", "subtask", "asked"]].drop_duplicates().astype(str)
    sets = (asked["subtask"] + asked["asked"]).groupby(asked["cell"]).agg("".join)
    hashes = sets.map(lambda text: hashlib.sha256(text.encode()).hexdigest()[:8])
    texts["documents"] = results.cells["cell"].map(hashes)

    def differ(names: Sequence[str], *by: str) -> pd.DataFrame:
        """Return whether cells differ in some columns from others that agree in some."""
        return texts[[*by, *names]].groupby([*by])[[*names]].transform("nunique") > 1

    # Tasks have their own batches, but share the checkpoint and the method's knobs.
    of_knobs = [name for name in knobs() if name != "seed"]
    of_task = [name for name in CELL_FIELDS if name not in _QUESTIONS]
    parts = [differ(_OF_MODEL, "model"), differ(of_knobs, "model", "method")]
    within = differ(of_task, "model", "method", "task")
    parts.append(within.groupby([texts["model"], texts["method"]]).transform("any"))
    parts += [differ(_QUESTIONS, "task"), differ(["documents"], "task", *_QUESTIONS)]
    is_shown = pd.concat(parts, axis=1)
    usual: list[str] = []
    for name in ("model.dtype", "model.attention", *of_knobs, *of_task):
        values = texts[name][(texts[name] != "") | (name not in of_knobs)]
        counts = values.value_counts()
        if len(counts) > 1 and (name not in of_task or differ([name], "task").any(axis=None)):
            common = counts.index[0] if 2 * counts.iloc[0] > counts.sum() else None
            if common and (~is_shown[name] & (texts[name] == common)).any():
                usual.append(f"{name}={common}")
            is_shown[name] |= texts[name] != common
    words = texts[is_shown.columns].where(is_shown & (texts[is_shown.columns] != ""))
    notes = [f"Unless a row says otherwise: {', '.join(usual)}."] * bool(usual)
    if others := sorted({*texts["task"][differ(["documents"], "task")["documents"]]}):
        notes.append(f"Other documents, so that results do not compare: {', '.join(others)}.")
    rows = words.apply(lambda row: " ".join(f"{k}={v}" for k, v in row.dropna().items()), axis=1)
    return rows, notes


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:g}"
    return "" if value is None else str(value)
