"""Methods of other papers beside Token Drop: points lost against what each of them bounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import TITLES
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.statistics import interval
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load, rank_peak
from capmoe_eval.report.figures.style import column, whiskers

_ROWS: Final = {"prompts": "questions", "decode steps": "generation"}
_AXES: Final = {
    "activated": "activated experts / without a limit",
    "expert_peak": "fullest expert / mean load",
    "rank_peak": "fullest rank / mean load",
}
_ON_RANKS: Final = f"{TITLES['score']}, each rank"
_EXPERT_CHOICE: Final = "expert choice"
_LINES: Final = (
    TITLES["score"],
    _ON_RANKS,
    f"{TITLES['token_reroute']}, devices",
    TITLES["oea"],
    TITLES["xshare"],
    TITLES["sere"],
    _EXPERT_CHOICE,
)
_LOOKS: Final = {
    label: {key: look for key, look in style.line_look(index).items() if key != "marker"}
    for index, label in enumerate(_LINES)
}
_LOSSLESS: Final = {"contiguous": "-", "EPLB+": "--", "LPLB+": ":"}
_SETTINGS: Final = ("gamma", "k0", "expert_budget", "min_similarity")


def measure_comparators(evidence: FigureRecords) -> Measured:
    """Collect what every setting loses on each model, and the three things that it may bound."""
    notes: list[str] = []
    stock = evidence.by_model("stock")
    found = evidence.by_model(*(part for part in evidence.records if part != "stock"))
    rows: list[Numbers] = []
    for of, name in _ROWS.items():
        asked = {one.task for listed in found.values() for one in listed if _of(one) == of}
        tasks = [task for task in evidence.tasks if task in asked]
        models = []
        for model, title in evidence.models.items():
            baselines = stock.get(model, ())
            bounded = [one for one in found.get(model, ()) if _of(one) == of]
            points = []
            for same in by_key(bounded, lambda one: one.cell.method).values():
                point = _point(model, tasks, baselines, same)
                if isinstance(point, str):
                    notes.append(f"{title}, {name}: {_label(same[0])} is left out: {point}.")
                else:
                    points.append(point)
            models.append(
                {
                    "model": title,
                    "points": points,
                    "lossless": list(_lossless(evidence, model, of)),
                }
            )
        named = [evidence.tasks[task] for task in tasks]
        rows.append({"name": name, "tasks": named, "models": models})
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
    if method.name == "score" and method.ep_size > 1:
        return _ON_RANKS
    if method.candidate_rule == "global":
        return _EXPERT_CHOICE
    title = TITLES[method.name]
    return f"{title}, devices" if method.granularity == "device" else title


def _point(
    model: str, tasks: Sequence[str], baselines: Sequence[Record], records: Sequence[Record]
) -> Numbers | str:
    """Return one setting of one model, tasks counting equally, or why it has no point."""
    listed = by_task(records, tasks)
    without = by_key(baselines, lambda one: one.task)
    if not listed or not without.keys() >= set(tasks):
        return "not every task is there"
    differences = {}
    for task, own in zip(tasks, listed, strict=True):
        paired = pair([one.documents for one in without[task]], [one.documents for one in own])
        if isinstance(paired, Unpaired):
            return paired.reason
        differences[task] = 100 * paired.units
    method, (lost, low, high) = records[0].cell.method, interval(differences)
    knobs = method.identity()
    before, after = (mean_load(records, tasks, f"activated_{when}") for when in ("before", "after"))
    return {
        "line": _label(records[0]),
        **{name: knobs.get(name) for name in _SETTINGS},
        "ranks": method.ep_size,
        "lost": lost,
        "low": low,
        "high": high,
        "activated": after / before if before and after is not None else None,
        "expert_peak": mean_load(records, tasks, "mean_peak_after"),
        "rank_peak": statistics.fmean(map(rank_peak, listed)) if method.ep_size > 1 else None,
        "drop_rate": mean_load(records, tasks, "drop_rate"),
    }


def _same_task(evidence: FigureRecords) -> list[Any]:
    return [row for row in evidence.balances if row.planned_on == row.judged_on]


def _lossless(evidence: FigureRecords, model: str, of: str) -> Iterator[Numbers]:
    """Yield the fullest rank under balancing that drops nothing, on the tasks of the figure."""
    for row in _same_task(evidence):
        shown = row.judged_on in evidence.tasks and row.method.startswith(tuple(_LOSSLESS))
        if shown and (row.model, row.of) == (model, of):
            told = {"method": row.method, "task": evidence.tasks[row.judged_on]}
            costs = {name: getattr(row, name) for name in ("active", "extra", "moved")}
            yield told | {"ranks": row.ranks, "straggler": row.straggler} | costs


def draw_comparators(numbers: Numbers) -> Figure:
    """Draw questions above generation, and a column for each thing that may be bounded."""
    rows = numbers["rows"]
    figure, grid = style.subplots(
        style.PAGE, 4.6, len(rows), len(_AXES), squeeze=False, sharey="row", sharex="col"
    )
    for row, panels in zip(rows, grid, strict=True):
        for place, axes in zip(_AXES, panels, strict=True):
            for number, model in enumerate(row["models"]):
                _draw_model(axes, place, model, style.MARKERS[number])
            axes.axhline(0, color=style.BLACK, linewidth=0.5)
            axes.grid()
        for model in row["models"]:
            _draw_lossless(panels[-1], model["lossless"])
        panels[0].set_ylabel(f"{row['name']} ({', '.join(row['tasks']) or '–'}):\npoints lost")
    for place, axes in zip(_AXES.values(), grid[-1], strict=True):
        axes.set_xlabel(place)
    _legend(grid[0, 0], rows)
    style.legend_below(figure, *grid.flat, columns=4)
    return figure


def _draw_model(axes: Axes, place: str, model: Mapping[str, Any], marker: str) -> None:
    """Draw the points of a model that have a place on this axis, a line for each method."""
    there = [point for point in model["points"] if point[place] is not None]
    there.sort(key=lambda point: [point[name] or 0 for name in _SETTINGS])
    for label, points in by_key(there, lambda point: point["line"]).items():
        lost = column(points, "lost")
        errors = whiskers(lost, column(points, "low"), column(points, "high"))
        look: Numbers = _LOOKS[label] | {"marker": marker, "markersize": 3.5, "linewidth": 0.7}
        axes.errorbar(column(points, place), lost, errors, elinewidth=0.5, capsize=1, **look)


def _draw_lossless(axes: Axes, lossless: Sequence[Mapping[str, Any]]) -> None:
    for row in lossless:
        (kind,) = (kind for kind in _LOSSLESS if row["method"].startswith(kind))
        look: Numbers = {"color": style.GREY, "linestyle": _LOSSLESS[kind], "zorder": 0}
        width = 2 if kind == "contiguous" else 0.9
        label = {"contiguous": "no limit, ranks as they are"}.get(kind, f"{kind}R, nothing dropped")
        axes.axvline(row["straggler"], linewidth=width, label=label, **look)


def _legend(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add empty lines that name the methods by colour and dash, and the models by marker."""
    models = [model for row in rows for model in row["models"]]
    there = {point["line"] for model in models for point in model["points"]}
    for label in _LINES:
        if label in there:
            axes.plot([], [], label=label, **_LOOKS[label])
    for marker, model in zip(
        style.MARKERS, dict.fromkeys(m["model"] for m in models), strict=False
    ):
        axes.plot([], [], marker=marker, linestyle="", color=style.BLACK, label=model)
