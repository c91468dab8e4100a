"""Mean scores by γ (Figure 12), by rounds (Figure 7 of v1), and by peak load."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import SCORE, TITLES, gamma_number, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import TABLE1_NOTE, table1_scores
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, layers_of, mean_load, mean_score
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, column, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES: Final = TITLES | {"score": f"{TITLES['score']} ({SCORE})"}
# Each method looks the same whichever others are there.
_LOOKS: Final = {
    method: style.line_look(index) | {"linestyle": "-", "linewidth": 0.7, "markersize": 3.6}
    for index, method in enumerate(name for name in _TITLES if name != "baseline")
}
for _method in ("expanded_drop", "token_reroute", "device_drop"):
    _LOOKS[_method]["markerfacecolor"] = "white"


def measure_curve(evidence: FigureRecords) -> Measured:
    """Collect each model's scores under Token Drop by γ, and the mean where all tasks are there."""
    models, notes = [], []
    for model, title in evidence.models.items():
        # γ=∞ is the baseline, which the figure has anyway.
        curve = [r for r in evidence.of("curve") if r.model == model and r.gamma is not None]
        unlimited = [r for r in evidence.of("unlimited") if r.model == model]
        if curve:
            found, lacking = _curve(curve, evidence.tasks)
            published = table1_scores(model, list(evidence.tasks.values()))
            baseline = mean_score(unlimited, evidence.tasks)
            models.append({"model": title, **found, "baseline": baseline, "published": published})
            notes += [f"{title}: no mean at γ={at}: {tasks} missing." for tasks, at in lacking]
            notes += [TABLE1_NOTE] if published else []
        else:
            notes.append(f"{title} is left out: none of its records is there.")
    return Measured({"models": models}, notes)


def _curve(
    records: Sequence[Record], tasks: Mapping[str, str]
) -> tuple[Numbers, list[tuple[str, str]]]:
    """Return one model's curves, and the missing tasks with the γ at which they are missing."""
    groups = dict(sorted(by_key(records, lambda record: record.gamma).items()))
    mean, lacking = [], []
    for gamma, same in groups.items():
        score = mean_score(same, tasks)
        if score:
            rounded = mean_load(same, tasks, "effective_gamma")
            drop_rate = mean_load(same, tasks, "drop_rate")
            told = {"gamma": gamma, "effective_gamma": rounded, "drop_rate": drop_rate}
            mean.append(told | score)
        else:
            here = {record.task for record in same}
            names = ", ".join(title for task, title in tasks.items() if task not in here)
            lacking.append((names, gamma_number(gamma)))
    points = {
        title: [
            {
                "gamma": gamma,
                "effective_gamma": record.load.effective_gamma,
                "value": 100 * record.value,
            }
            for gamma, same in groups.items()
            for record in same
            if record.task == task
        ]
        for task, title in tasks.items()
    }
    where = by_key(lacking, itemgetter(0))
    absent = [(names, ", ".join(gamma for _, gamma in same)) for names, same in where.items()]
    return {"tasks": points, "mean": mean}, absent


def draw_curve(numbers: Numbers) -> Figure:
    """Draw Figure 12, a model a column: scores above, what was dropped below."""
    models = numbers["models"]
    figure = style.new_figure(style.PAGE if len(models) > 1 else style.COLUMN, 3.1)
    grid = figure.subplots(
        *(2, len(models)), sharex=True, sharey="row", height_ratios=[3, 1], squeeze=False
    )
    shown = [0.0, 3.0]
    points = [point for model in models for listed in model["tasks"].values() for point in listed]
    known = all(point["effective_gamma"] is not None for point in points)
    gamma = "effective_gamma" if known else "gamma"
    for model, upper, lower in zip(models, *grid, strict=True):
        shown += _draw_curve(upper, lower, model, gamma)
        upper.set_title(model["model"])
    for lower in grid[1]:
        style.gamma_axis(lower, shown)
        if known:
            lower.set_xlabel("γ after rounding")
    grid[0, 0].set(ylabel="score (%)")
    grid[1, 0].set(ylabel="dropped (%)", ylim=(0, 105))
    style.legend_below(figure, *grid[0], columns=5)
    return figure


def _draw_curve(upper: Axes, lower: Axes, model: Numbers, gamma: str) -> list[float]:
    """Draw one model's curves by one of their two γ, and return the γ that they have."""
    mean, published, shown = model["mean"], model["published"], []
    for index, (task, points) in enumerate(model["tasks"].items()):
        gammas = column(points, gamma)
        look = style.line_look(index, 6) | {"markersize": 2.2, "linewidth": 0.6}
        upper.plot(gammas, column(points, "value"), **look, label=task)
        shown += gammas
    if mean:
        gammas = column(mean, gamma)
        look = {"color": BLACK, "linewidth": 1.4, "elinewidth": 0.7, "capsize": 1.5}
        values = column(mean, "value")
        upper.errorbar(gammas, values, _errors(mean), **look, label="mean ± 1.96 SE")
        rates = percent(column(mean, "drop_rate"))
        lower.plot(gammas, rates, color=BLACK, marker="o", markersize=2)
    if model["baseline"]:
        look = {"color": BLACK, "linestyle": (0, (1, 2))}
        upper.axhline(model["baseline"]["value"], **look, label="mean, no limit")
    if published:
        look = {"color": BLACK, "markersize": 6, "markerfacecolor": "white"}
        label = "mean, paper's Table 1"
        upper.plot(published["gamma"], published["value"], "*", **look, label=label)
    upper.grid()
    lower.grid()
    return shown


def _errors(points: Iterable[Numbers]) -> list[float]:
    """Return half the width of a 95 % interval around each mean score."""
    return [1.96 * (point["stderr"] or 0.0) for point in points]


def measure_rounds(evidence: FigureRecords) -> Measured:
    """Collect score and lost pairs by rounds; one round is Token Drop, zero is no limit at all."""
    tasks = evidence.tasks
    records = evidence.of_model("one_round", "rounds")
    points, notes = [], []
    for rounds, same in sorted(by_key(records, _rounds).items()):
        score = mean_score(same, tasks)
        if score:
            drop_rate = mean_load(same, tasks, "drop_rate")
            lost = {"drop_rate": drop_rate, "unserved": _unserved(same, tasks)}
            points.append({"rounds": rounds, **score, **lost})
        else:
            notes.append(f"No mean after {rounds} rounds: not every task is there.")
    return Measured(
        {
            "model": evidence.title,
            "gamma": min((r.gamma for r in records if r.gamma is not None), default=None),
            "tasks": list(tasks.values()),
            "points": points,
            "baseline": mean_score(evidence.of_model("baseline"), tasks),
        },
        notes,
    )


def _rounds(record: Record) -> int:
    return record.cell.method.rounds if record.method == "token_reroute" else 1


def _unserved(records: Sequence[Record], tasks: Iterable[str]) -> float:
    """Return the share of T·K that no expert computes, tasks counting equally.

    Dropped pairs less those computed elsewhere instead; after one round, the drop rate.
    """
    shares = []
    for task in tasks:
        layers = layers_of(record for record in records if record.task == task)
        computed = sum(sum(layer.load_after) for layer in layers)
        shares.append(1 - computed / float(sum(layer.assignments for layer in layers)))
    return statistics.fmean(shares)


def draw_rounds(numbers: Numbers) -> Figure:
    """Draw v1's Figure 7: score above, lost assignments below."""
    figure = style.new_figure(style.COLUMN, 2.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    points = numbers["points"]
    rounds = column(points, "rounds")
    look: Numbers = {"color": style.BLUE, "marker": "o", "elinewidth": 0.7, "capsize": 2}
    label = f"{TITLES['token_reroute']} ± 1.96 SE"
    upper.errorbar(rounds, column(points, "value"), _errors(points), **look, label=label)
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
    lower.set_xticks(rounds, [f"1 ({TITLES['score']})" if n == 1 else str(n) for n in rounds])
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
    for (method, gamma), same in by_key(records, _method_and_gamma).items():
        score = mean_score(same, tasks)
        peak = mean_load(same, tasks, "mean_peak_after")
        if score is None or peak is None:
            title = _TITLES[method] + gamma_suffix(gamma, " at γ=")
            notes.append(f"{title} is left out: not every task is there.")
            continue
        points.append(
            {
                "method": method,
                "label": _TITLES[method],
                "gamma": gamma,
                "peak": peak,
                **score,
                "seeds": len({record.seed for record in same}),
            }
        )
    front = pareto_front([(point["peak"], point["value"]) for point in points])
    for index, point in enumerate(points):
        point["on_front"] = index in front
    shown = {"model": evidence.title, "tasks": list(tasks.values()), "points": points}
    return Measured(shown, notes)


def _method_and_gamma(record: Record) -> tuple[str, float | None]:
    device = record.cell.method.granularity == "device"
    return "device_drop" if device else record.method, record.gamma


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the places of the points that no other beats.

    A point (cost, quality) is beaten by one that costs no more and is no worse, and differs.

    Args:
        points: (cost, quality) pairs; less cost and more quality are better.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: set[int] = set()
    best: tuple[float, float] | None = None
    for i in order:
        if best is None or points[i][1] > best[1]:
            best = points[i]
        if points[i] == best:
            front.add(i)
    return front


def draw_methods(numbers: Numbers) -> Figure:
    """Draw one line a method through its γ, and the front in grey."""
    figure = style.new_figure(style.COLUMN, 3.2)
    axes = figure.subplots()
    points = sorted(numbers["points"], key=lambda point: point["peak"])
    front = [point for point in points if point["on_front"]]
    look: Numbers = {"color": style.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"}
    peaks, values = column(front, "peak"), column(front, "value")
    axes.plot(peaks, values, zorder=1, **look, label="Pareto front")
    for method, look in _LOOKS.items():
        own = [point for point in points if point["method"] == method]
        if own:
            axes.plot(column(own, "peak"), column(own, "value"), **look, label=_TITLES[method])
    for point in points:
        if point["method"] == "baseline":
            look = {"color": BLACK, "markersize": 7, "label": _TITLES["baseline"]}
            axes.plot(point["peak"], point["value"], "*", **look)
    axes.set(xlabel="mean peak load of an expert / mean load", ylabel="mean score (%)")
    axes.grid()
    axes.set_title(f"{numbers['model']}, {len(numbers['tasks'])} tasks")
    style.legend_below(figure, axes, columns=2)
    return figure
