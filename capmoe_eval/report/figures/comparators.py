"""Methods of other papers beside Token Drop: points lost against what each of them bounds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from itertools import cycle
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.losses import draw_losses, lost
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load, rank_peak
from capmoe_eval.report.figures.style import column
from capmoe_eval.routing.methods.token_drop import TokenDrop

_ROWS: Final = {"prompts": "questions", "decode steps": "generation"}
_LOADS: Final = {
    "activated": "activated experts / without a limit",
    "expert_peak": "fullest expert / mean load",
    "rank_peak": "fullest rank / mean load",
}
_ON_RANKS: Final = f"{method_title('score')}, each rank"
_EXPERT_CHOICE: Final = "expert choice"
_LINES: Final = (
    method_title("score"),
    _ON_RANKS,
    f"{method_title('token_reroute')}, devices",
    method_title("oea"),
    method_title("xshare"),
    method_title("sere"),
    _EXPERT_CHOICE,
    method_title("laser"),
)
_LOOKS: Final = {label: style.line_look(index) for index, label in enumerate(_LINES)}
_LOSSLESS: Final[dict[str, Numbers]] = {  # the look of a line by how its method's name begins
    "contiguous": {"linestyle": "-", "linewidth": 2, "label": "no limit, ranks as they are"},
    "EPLB+": {"linestyle": "--", "linewidth": 0.9, "label": "EPLB+R, nothing dropped"},
    "LPLB+": {"linestyle": ":", "linewidth": 0.9, "label": "LPLB+R, nothing dropped"},
}
_SETTINGS: Final = ("gamma", "k0", "expert_budget", "min_similarity", "viable_score")


def measure_comparators(evidence: FigureRecords) -> Measured:
    """Collect what every setting loses on each model, and the three things that it may bound."""
    notes: list[str] = []
    stock = evidence.by_model("stock")
    found = evidence.by_model(*(part for part in evidence.records if part != "stock"))
    rows: list[Numbers] = []
    for of, name in _ROWS.items():
        asked = {one.task for listed in found.values() for one in listed if _of(one) == of}
        tasks = {task: title for task, title in evidence.tasks.items() if task in asked}
        models = []
        for model, title in evidence.models.items():
            bounded = [one for one in found.get(model, ()) if _of(one) == of]
            points = []
            for same in by_key(bounded, lambda one: one.cell.method).values():
                point = _point(stock.get(model, ()), same, tasks)
                if isinstance(point, str):
                    notes.append(f"{title}, {name}: {_label(same[0])} is left out: {point}.")
                else:
                    points.append(point)
            lossless = list(_lossless(evidence, model, of))
            models.append({"model": title, "points": points, "lossless": lossless})
        rows.append({"name": name, "tasks": list(tasks.values()), "models": models})
    if not evidence.balances:
        notes.append(
            "No line of balancing without loss: python -m capmoe_eval.bench placement makes it."
        )
    for row in rows:
        shown = {one["task"] for model in row["models"] for one in model["lossless"]}
        if shown:
            notes.append(f"Balancing of {row['name']} was measured on {', '.join(sorted(shown))}.")
    return Measured({"rows": rows}, notes)


def _of(record: Record) -> str:
    return "decode steps" if record.cell.method.decode == "only" else "prompts"


def _label(record: Record) -> str:
    """Return the line that a record's point is on."""
    method = record.cell.method
    if isinstance(method, TokenDrop) and method.ep_size > 1:
        return _ON_RANKS
    if getattr(method, "candidates", None) == "global":
        return _EXPERT_CHOICE
    return f"{method.title}, devices" if method.granularity == "device" else method.title


def _point(
    stock: Sequence[Record], records: Sequence[Record], tasks: Collection[str]
) -> Numbers | str:
    """Return one setting of one model, tasks counting equally, or why it has no point."""
    points = lost(stock, records, tasks)
    if isinstance(points, str):
        return points
    method = records[0].cell.method
    knobs = method.identity()
    before, after = (mean_load(records, tasks, f"activated_{when}") for when in ("before", "after"))
    peaks = [rank_peak(same) for same in by_task(records, tasks) if method.ep_size > 1]
    return {
        "line": _label(records[0]),
        **{name: knobs.get(name) for name in _SETTINGS},
        "ranks": method.ep_size,
        **points,
        "activated": after / before if before and after is not None else None,
        "expert_peak": mean_load(records, tasks, "mean_peak_after"),
        "rank_peak": statistics.fmean(peaks) if peaks else None,
        "drop_rate": mean_load(records, tasks, "drop_rate"),
    }


def _lossless(evidence: FigureRecords, model: str, of: str) -> Iterator[Numbers]:
    """Yield the fullest rank under balancing that drops nothing, on the tasks of the figure.

    What was planned on another task is not shown.
    """
    for row in evidence.balances:
        shown = row.judged_on in evidence.tasks and row.method.startswith(tuple(_LOSSLESS))
        if shown and (row.model, row.of, row.planned_on) == (model, of, row.judged_on):
            costs = ("ranks", "straggler", "active", "extra", "moved")
            told = {"method": row.method, "task": evidence.tasks[row.judged_on]}
            yield told | {name: getattr(row, name) for name in costs}


def draw_comparators(numbers: Numbers) -> Figure:
    """Draw questions above generation, and a column for each thing that may be bounded."""
    rows = numbers["rows"]
    figure, grid = draw_losses(rows, _LOADS, 4.6, _lines)
    for row, panels in zip(rows, grid, strict=True):
        for one in (one for model in row["models"] for one in model["lossless"]):
            (kind,) = (kind for kind in _LOSSLESS if one["method"].startswith(kind))
            panels[-1].axvline(one["straggler"], color=style.GREY, zorder=0, **_LOSSLESS[kind])
        panels[0].set_ylabel(f"{row['name']} ({', '.join(row['tasks']) or '–'}):\npoints lost")
    _legend(grid[0, 0], [model for row in rows for model in row["models"]])
    style.legend_below(figure, *grid.flat, columns=4)
    return figure


def _lines(row: Numbers, load: str) -> Iterator[tuple[list[Numbers], Numbers]]:
    """Yield the points of each model and method that have a place on this axis, and their look."""
    for model, marker in zip(row["models"], cycle(style.MARKERS), strict=False):
        there = [point for point in model["points"] if point[load] is not None]
        there.sort(key=lambda point: [point[name] or 0 for name in _SETTINGS])
        for label, points in by_key(there, lambda point: point["line"]).items():
            yield points, _LOOKS[label] | {"marker": marker, "markersize": 3.5, "linewidth": 0.7}


def _legend(axes: Axes, models: Sequence[Numbers]) -> None:
    """Add empty lines that name the methods by colour and dash, and the models by marker."""
    there = {point["line"] for model in models for point in model["points"]}
    for label, look in _LOOKS.items():
        if label in there:
            axes.plot([], [], label=label, **look | {"marker": ""})
    names = dict.fromkeys(column(models, "model"))
    for name, marker in zip(names, cycle(style.MARKERS), strict=False):
        axes.plot([], [], marker=marker, linestyle="", color=style.BLACK, label=name)
