"""A γ for each layer beside one γ for all: straggler factors at equal drops, and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load
from capmoe_eval.report.figures.style import column, whiskers
from capmoe_eval.serving.trial import (
    Outcome,
    Verdict,
    by_model,
    outcomes,
    points,
    primary,
    straggler,
    verdicts,
)

# Scores are filled, and stand at the right of a budget: no colour stands alone.
_KINDS: Final = {"pairs": (style.VERMILLION, "white"), "scores": (style.BLUE, style.BLUE)}
_ALL: Final = "all"


def measure_adaptive(evidence: FigureRecords) -> Measured:
    """Collect the curve of static factors of each model, and what budgets change against it."""
    found = evidence.by_model("baseline", "static", "adaptive")
    compared = outcomes(record for listed in found.values() for record in listed)
    judged = verdicts(compared)
    models = [
        {
            "model": title,
            "static": _curve(found.get(model, ()), evidence, adaptive=False),
            "adaptive": _curve(found.get(model, ()), evidence, adaptive=True),
        }
        for model, title in evidence.models.items()
    ]
    budgets = [_budget(verdict, compared, evidence.models) for verdict in judged]
    verdict = primary(judged)
    said = [] if verdict is None else [f"All budgets of pairs, tasks counting equally: {verdict}"]
    if verdict is not None and verdict.straggler_most is not None:
        worst = f"{verdict.straggler_most:+.3f}".replace("-", "−")
        said.append(
            "Interpolation flatters the adaptive factors: if between two static ones their curve "
            f"were as low as a convex one can be, the first difference would be {worst}."
        )
    return Measured({"models": models, "budgets": budgets}, said)


def _curve(
    records: Sequence[Record], evidence: FigureRecords, *, adaptive: bool
) -> list[Mapping[str, Any]]:
    """Return the points of one model, tasks counting equally, by falling drop rate."""
    own = [record for record in records if (record.cell.method.budget is not None) == adaptive]
    curve = []
    for same in by_key(own, lambda record: record.cell.method).values():
        if listed := by_task(same, evidence.tasks):
            method = same[0].cell.method
            curve.append(
                {
                    "gamma": method.gamma,
                    "budget": method.budget,
                    "budget_of": None if method.budget is None else method.budget_of,
                    "drop_rate": mean_load(same, evidence.tasks, "drop_rate"),
                    "straggler": statistics.fmean(straggler(one) for (one,) in listed),
                }
            )
    return sorted(curve, key=lambda point: -point["drop_rate"])


def _budget(verdict: Verdict, compared: Sequence[Outcome], titles: Mapping[str, str]) -> Numbers:
    """Return the differences of one budget, or of all of its kind, and those of each model."""
    own = [
        outcome
        for outcome in compared
        if outcome.rule.budget_of == verdict.budget_of
        and verdict.budget in (None, outcome.rule.budget)
    ]
    gain, accuracy = verdict.straggler, verdict.accuracy

    def of_models(value: Callable[[Outcome], float | None]) -> dict[str, float]:
        return {titles[model]: mean for model, mean in by_model(own, value).items()}

    return {
        "budget_of": verdict.budget_of,
        "budget": verdict.budget,
        "cells": verdict.cells,
        "straggler": gain and gain._asdict(),
        "straggler_of_models": of_models(lambda outcome: outcome.gain),
        "points": accuracy and accuracy._asdict(),
        "points_of_models": of_models(points),
    }


def draw_adaptive(numbers: Numbers) -> Figure:
    """Draw the curves at the left, and beside them both differences by budget."""
    figure, panels = style.subplots(style.PAGE, 3.0, 1, 3)
    for number, model in enumerate(numbers["models"]):
        _draw_curve(panels[0], model, style.MARKERS[number])
    panels[0].set(xlabel="dropped share of pairs (%)", ylabel="fullest expert / mean load")
    names = [model["model"] for model in numbers["models"]]
    _draw_differences(panels[1], numbers["budgets"], "straggler", names)
    panels[1].set_ylabel("straggler factor at equal drops:\nadaptive − static")
    _draw_differences(panels[2], numbers["budgets"], "points", names)
    panels[2].set_ylabel("points at equal straggler factor:\nadaptive − static")
    for axes in panels:
        axes.grid()
    style.legend_below(figure, *panels, columns=3)
    return figure


def _draw_curve(axes: Axes, model: Numbers, marker: str) -> None:
    static = model["static"]
    axes.plot(
        style.percent(column(static, "drop_rate")),
        column(static, "straggler"),
        color=style.GREY,
        marker=marker,
        markersize=2.5,
        linewidth=0.7,
        label=model["model"],
    )
    for kind, (colour, face) in _KINDS.items():
        own = [point for point in model["adaptive"] if point["budget_of"] == kind]
        axes.plot(
            style.percent(column(own, "drop_rate")),
            column(own, "straggler"),
            color=colour,
            marker=marker,
            markersize=4,
            markerfacecolor=face,
            linestyle="",
        )


def _draw_differences(
    axes: Axes, budgets: Sequence[Numbers], what: str, models: Sequence[str]
) -> None:
    """Draw the mean of each budget with its interval, and small the models' own."""
    places = list(dict.fromkeys(row["budget"] for row in budgets))
    for shift, (kind, (colour, face)) in zip((-0.17, 0.17), _KINDS.items(), strict=True):
        own = [row for row in budgets if row["budget_of"] == kind]
        for number, model in enumerate(models):
            known = [row for row in own if model in row[f"{what}_of_models"]]
            axes.plot(
                [places.index(row["budget"]) + shift for row in known],
                [row[f"{what}_of_models"][model] for row in known],
                color=style.GREY,
                marker=style.MARKERS[number],
                markersize=2.5,
                linestyle="",
            )
        known = [row for row in own if row[what] is not None]
        if not known:
            continue
        middle, low, high = (
            column([row[what] for row in known], end) for end in ("mean", "low", "high")
        )
        axes.errorbar(
            [places.index(row["budget"]) + shift for row in known],
            middle,
            whiskers(middle, low, high),
            color=colour,
            marker="o",
            markersize=4,
            markerfacecolor=face,
            linestyle="",
            linewidth=1,
            capsize=2,
            label=f"adaptive, budget of {kind}",
        )
    axes.axhline(0, color=style.BLACK, linewidth=0.5)
    ticks = [_ALL if place is None else f"{100 * place:g}" for place in places]
    axes.set_xticks(range(len(places)), ticks)
    axes.set_xlabel("budget (%)")
