"""A γ for each layer beside one γ for all: straggler factors at equal drops, and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load
from capmoe_eval.report.figures.shapes import within
from capmoe_eval.report.figures.style import column, percent
from capmoe_eval.serving.trial import (
    Outcome,
    Verdict,
    budget_in,
    by_model,
    outcomes,
    points,
    primary,
    straggler,
    verdicts,
)

# Scores are filled, and stand at the right of a budget: no colour stands alone.
_LOOKS: Final = {
    kind: {"color": colour, "markerfacecolor": face, "markersize": 4, "linestyle": ""}
    for kind, colour, face in (
        ("pairs", style.VERMILLION, "white"),
        ("scores", style.BLUE, style.BLUE),
    )
}
_SMALL: Final = {"color": style.GREY, "markersize": 2.5}


def measure_adaptive(evidence: FigureRecords) -> Measured:
    """Collect the curve of static factors of each model, and what budgets change against it."""
    found = evidence.by_model("baseline", "static", "adaptive")
    compared = outcomes(record for listed in found.values() for record in listed)
    judged = verdicts(compared)
    models = []
    for model, title in evidence.models.items():
        curve = _curve(found.get(model, ()), evidence.tasks)
        static = [point for point in curve if point["budget"] is None]
        adaptive = [point for point in curve if point["budget"] is not None]
        models.append({"model": title, "static": static, "adaptive": adaptive})
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


def _curve(records: Sequence[Record], tasks: Collection[str]) -> list[Numbers]:
    """Return the points of one model, tasks counting equally, by falling drop rate."""
    curve = []
    for method, same in by_key(records, lambda record: record.cell.method).items():
        if listed := by_task(same, tasks):
            budget, budget_of = budget_in(method)
            curve.append(
                {
                    "gamma": method.uniform_gamma,
                    "budget": budget,
                    "budget_of": budget_of,
                    "drop_rate": mean_load(same, tasks, "drop_rate"),
                    "straggler": statistics.fmean(straggler(one) for (one,) in listed),
                }
            )
    return sorted(curve, key=lambda point: -point["drop_rate"])


def _budget(verdict: Verdict, compared: Sequence[Outcome], titles: Mapping[str, str]) -> Numbers:
    """Return the differences of one budget, or of all of its kind, and those of each model."""
    own = [
        outcome
        for outcome in compared
        if outcome.budget_of == verdict.budget_of and verdict.budget in (None, outcome.budget)
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
    models = dict(zip(column(numbers["models"], "model"), cycle(style.MARKERS), strict=False))
    for model in numbers["models"]:
        lines = [(model["static"], _SMALL | {"linewidth": 0.7, "label": model["model"]})]
        for kind, look in _LOOKS.items():
            lines.append(([p for p in model["adaptive"] if p["budget_of"] == kind], look))
        for own, look in lines:
            drops, marker = percent(column(own, "drop_rate")), models[model["model"]]
            panels[0].plot(drops, column(own, "straggler"), marker=marker, **look)
    panels[0].set(xlabel="dropped share of pairs (%)", ylabel="fullest expert / mean load")
    for axes, what, name in (
        (panels[1], "straggler", "straggler factor at equal drops"),
        (panels[2], "points", "points at equal straggler factor"),
    ):
        _draw_differences(axes, numbers["budgets"], what, models)
        axes.set(xlabel="budget (%)", ylabel=f"{name}:\nadaptive − static")
    for axes in panels:
        axes.grid()
    style.legend_below(figure, *panels, columns=3)
    return figure


def _draw_differences(
    axes: Axes, budgets: Sequence[Numbers], what: str, models: Mapping[str, str]
) -> None:
    """Draw the mean of each budget with its interval, and small the models' own, by marker."""
    places = list(dict.fromkeys(row["budget"] for row in budgets))
    for shift, (kind, look) in zip((-0.17, 0.17), _LOOKS.items(), strict=True):
        own = {
            places.index(row["budget"]) + shift: row for row in budgets if row["budget_of"] == kind
        }
        for model, marker in models.items():
            means = {place: row[f"{what}_of_models"].get(model) for place, row in own.items()}
            there = {place: mean for place, mean in means.items() if mean is not None}
            small: Numbers = _SMALL | {"marker": marker, "linestyle": ""}
            axes.plot([*there], [*there.values()], **small)
        known = {place: row[what] for place, row in own.items() if row[what] is not None}
        if known:
            thin: Numbers = look | {"marker": "o", "linewidth": 1, "capsize": 2}
            label = f"adaptive, budget of {kind}"
            axes.errorbar([*known], *within([*known.values()], "mean"), **thin, label=label)
    axes.axhline(0, color=style.BLACK, linewidth=0.5)
    ticks = ["all" if place is None else f"{100 * place:g}" for place in places]
    axes.set_xticks(range(len(places)), ticks)
