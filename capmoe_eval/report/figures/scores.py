"""Mean scores by γ (Figure 12), by rounds (Figure 7 of v1), and by peak load."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import (
    gamma_suffix,
    gamma_text,
    is_stock,
    method_title,
    metric_title,
)
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import published_note, table1_scores
from capmoe_eval.report.figures import pooling, shapes, style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.style import BLACK, column, percent
from capmoe_eval.routing.registry import method_names

# Each method looks the same whichever others are there.
_LOOKS: Final = {
    method: style.line_look(index) | {"linestyle": "-", "linewidth": 0.7, "markersize": 3.6}
    for index, method in enumerate(name for name in method_names() if not is_stock(name))
}
for _method in ("expanded_drop", "token_reroute", "device_drop"):
    _LOOKS[_method]["markerfacecolor"] = "white"
_LOOKS["baseline"] = {"color": BLACK, "linestyle": "", "marker": "*", "markersize": 7}


def _title(method: str) -> str:
    """Return a method's printed name, with its name as a selection metric where that is another."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{title} ({metric})"


def measure_curve(evidence: FigureRecords) -> Measured:
    """Collect each model's scores under Token Drop by γ, and the mean where all tasks are there.

    A model without a record with a capacity is left out; a UsageError if all are.
    """
    models, notes = [], []
    curves, unlimited = evidence.by_model("curve"), evidence.by_model("unlimited")
    for model, title in evidence.models.items():
        # γ=∞ is the baseline, which the figure has anyway.
        curve = [record for record in curves.get(model, ()) if record.gamma is not None]
        if not curve:
            notes.append(f"{title} is left out: none of its records is there.")
            continue
        found, lacking = _curve(curve, evidence.tasks)
        published = table1_scores(model, list(evidence.tasks.values()))
        baseline = pooling.mean_score(unlimited.get(model, ()), evidence.tasks)
        models.append({"model": title, **found, "baseline": baseline, "published": published})
        for tasks, gammas in lacking.items():
            notes.append(f"{title}: no mean at γ={', '.join(gammas)}: {tasks} missing.")
        notes += [published_note("table1")] if published else []
    if not models:
        more = "; ".join(evidence.absent[:2])
        raise UsageError(f"fig12: none of the records of its curves is there; measure them: {more}")
    return Measured({"models": models}, notes)


def _curve(
    records: Sequence[Record], tasks: Mapping[str, str]
) -> tuple[Numbers, dict[str, list[str]]]:
    """Return one model's curves, and the missing tasks with the γ at which they are missing."""
    points: dict[str, list[Numbers]] = {title: [] for title in tasks.values()}
    mean: list[Numbers] = []
    lacking: dict[str, list[str]] = {}
    for gamma, same in sorted(pooling.by_key(records, lambda record: record.gamma).items()):
        for record in same:
            rounded = record.load.effective_gamma
            point = {"gamma": gamma, "effective_gamma": rounded, "value": 100 * record.value}
            points[tasks[record.task]].append(point)
        if score := pooling.mean_score(same, tasks):
            loads = {f: pooling.mean_load(same, tasks, f) for f in ("effective_gamma", "drop_rate")}
            mean.append({"gamma": gamma} | loads | score)
        else:
            here = {record.task for record in same}
            names = ", ".join(title for task, title in tasks.items() if task not in here)
            lacking.setdefault(names, []).append(gamma_text(gamma))
    return {"tasks": points, "mean": mean}, lacking


def draw_curve(numbers: Numbers) -> Figure:
    """Draw Figure 12, a model a column: scores above, what was dropped below."""
    models = numbers["models"]
    width = style.PAGE if len(models) > 1 else style.COLUMN
    shared: Numbers = {"sharex": True, "sharey": "row", "height_ratios": [3, 1]}
    figure, grid = style.subplots(width, 3.1, 2, len(models), **shared, squeeze=False)
    points = [point for model in models for listed in model["tasks"].values() for point in listed]
    known = all(point["effective_gamma"] is not None for point in points)
    gamma = "effective_gamma" if known else "gamma"
    for model, upper, lower in zip(models, *grid, strict=True):
        _draw_curve(upper, lower, model, gamma)
        upper.set_title(model["model"])
    for lower in grid[1]:
        style.gamma_axis(lower, [0.0, 3.0, *column(points, gamma)])
        if known:
            lower.set_xlabel("γ after rounding")
    grid[0, 0].set(ylabel="score (%)")
    grid[1, 0].set(ylabel="dropped (%)", ylim=(0, 105))
    style.legend_below(figure, *grid[0], columns=5)
    return figure


def _draw_curve(upper: Axes, lower: Axes, model: Numbers, gamma: str) -> None:
    """Draw one model's curves by one of their two γ."""
    mean, published = model["mean"], model["published"]
    for index, (task, points) in enumerate(model["tasks"].items()):
        look = style.line_look(index, 6) | {"markersize": 2.2, "linewidth": 0.6}
        upper.plot(column(points, gamma), column(points, "value"), **look, label=task)
    if mean:
        look = {"color": BLACK, "linewidth": 1.4, "capsize": 1.5, "elinewidth": 0.7}
        upper.errorbar(column(mean, gamma), *shapes.scored(mean), **look, label="mean ± 1.96 SE")
        rates = percent(column(mean, "drop_rate"))
        lower.plot(column(mean, gamma), rates, color=BLACK, marker="o", markersize=2)
    if model["baseline"]:
        look = {"color": BLACK, "linestyle": (0, (1, 2))}
        upper.axhline(model["baseline"]["value"], **look, label="mean, no limit")
    if published:
        look = {"color": BLACK, "markersize": 6, "markerfacecolor": "white"}
        label = "mean, paper's Table 1"
        upper.plot(published["gamma"], published["value"], "*", **look, label=label)
    upper.grid()
    lower.grid()


def measure_rounds(evidence: FigureRecords) -> Measured:
    """Collect score and lost pairs by rounds; one round is Token Drop, zero is no limit at all."""
    tasks = evidence.tasks
    records = evidence.of_model("one_round", "rounds")
    points, notes = [], []
    by_rounds = pooling.by_key(records, lambda record: getattr(record.cell.method, "rounds", 1))
    for rounds, same in sorted(by_rounds.items()):
        if score := pooling.mean_score(same, tasks):
            lost = {"drop_rate": pooling.mean_load(same, tasks, "drop_rate")}
            points.append({"rounds": rounds} | score | lost | {"unserved": _unserved(same, tasks)})
        else:
            notes.append(f"No mean after {rounds} rounds: not every task is there.")
    return Measured(
        {
            "model": evidence.title,
            "gamma": pooling.shared_gamma(records),
            "tasks": list(tasks.values()),
            "points": points,
            "baseline": pooling.mean_score(evidence.of_model("baseline"), tasks),
        },
        notes,
    )


def _unserved(records: Sequence[Record], tasks: Collection[str]) -> float:
    """Return the share of T·K that no expert computes, tasks counting equally.

    Dropped pairs less those computed elsewhere instead; after one round, the drop rate.
    """
    shares = []
    for same in pooling.by_task(records, tasks):
        layers = pooling.layers_of(same)
        computed = sum(sum(layer.load_after) for layer in layers)
        shares.append(1 - computed / float(sum(layer.assignments for layer in layers)))
    return statistics.fmean(shares)


def draw_rounds(numbers: Numbers) -> Figure:
    """Draw v1's Figure 7: score above, lost assignments below."""
    figure, (upper, lower) = style.subplots(
        style.COLUMN, 2.6, 2, 1, sharex=True, height_ratios=[3, 2]
    )
    points = numbers["points"]
    rounds = column(points, "rounds")
    look: Numbers = {"color": style.BLUE, "marker": "o", "capsize": 2, "elinewidth": 0.7}
    label = f"{method_title('token_reroute')} ± 1.96 SE"
    upper.errorbar(rounds, *shapes.scored(points), **look, label=label)
    if numbers["baseline"]:
        upper.axhline(numbers["baseline"]["value"], color=BLACK, linestyle=":", label="no limit")
    upper.set_ylabel("mean score (%)")
    upper.margins(y=0.15)
    upper.grid(axis="y")
    for field, line, colour, label in (
        ("drop_rate", "s--", style.VERMILLION, "top-k pairs dropped"),
        ("unserved", "^-", style.BLUE, "of them not replaced"),
    ):
        lower.plot(rounds, percent(column(points, field)), line, color=colour, label=label)
    lower.margins(y=0.2)
    lower.set(ylim=(0, None), xlabel="rounds", ylabel="share (%)")
    lower.grid(axis="y")
    lower.set_xticks(rounds, [f"1 ({method_title('score')})" if n == 1 else str(n) for n in rounds])
    title = f"{numbers['model']}, {len(numbers['tasks'])} tasks"
    upper.set_title(title + gamma_suffix(numbers["gamma"], ", γ = "))
    style.legend_below(figure, upper, lower, columns=2)
    return figure


def measure_methods(evidence: FigureRecords) -> Measured:
    """Collect mean score and mean peak load of every method at every γ, and who is on the front."""
    tasks = evidence.tasks
    records = evidence.of_model("baseline", "methods", "at_random")
    points: list[dict[str, Any]] = []
    notes = []
    groups = pooling.by_key(
        records,
        lambda r: ("device_drop" if r.cell.method.granularity == "device" else r.method, r.gamma),
    )
    for (method, gamma), same in groups.items():
        if score := pooling.mean_score(same, tasks):
            told: Numbers = {"method": method, "label": _title(method), "gamma": gamma}
            told["peak"] = pooling.mean_load(same, tasks, "mean_peak_after")
            points.append(told | score | {"seeds": len({record.seed for record in same})})
        else:
            title = _title(method) + gamma_suffix(gamma, " at γ=")
            notes.append(f"{title} is left out: not every task is there.")
    shapes.mark_front(points)
    shown = {"model": evidence.title, "tasks": list(tasks.values()), "points": points}
    return Measured(shown, notes)


def draw_methods(numbers: Numbers) -> Figure:
    """Draw one line a method through its γ, and the front in grey."""
    figure, axes = style.subplots(style.COLUMN, 3.2)
    points = sorted(numbers["points"], key=lambda point: point["peak"])
    shapes.draw_front(axes, points)
    for method, look in _LOOKS.items():
        own = [point for point in points if point["method"] == method]
        if own:
            axes.plot(column(own, "peak"), column(own, "value"), **look, label=_title(method))
    axes.set(ylabel="mean score (%)", title=f"{numbers['model']}, {len(numbers['tasks'])} tasks")
    style.legend_below(figure, axes, columns=2)
    return figure
