"""Performance by capacity factor: Figure 12."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capmoe_eval.experiment.names import TITLES, gamma_suffix
from capmoe_eval.paper.printed import TABLE1_NOTE, table1_scores
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, mean_load, mean_score
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import (
    BLACK,
    COLOURS,
    COLUMN,
    DASHES,
    MARKERS,
    gamma_axis,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_curve(evidence: FigureRecords) -> Measured:
    """Collect the scores under Token Drop by γ: of each task, and the mean where all are there."""
    model, tasks = evidence.model, list(evidence.tasks)
    baseline = evidence.of("baseline", model=model)
    # γ=∞ is the baseline, which the figure has anyway.
    bounded = [r for r in evidence.of("curve", model=model) if r.gamma is not None]
    groups = by_key(bounded, lambda record: record.gamma)
    mean: list[dict[str, Any]] = []
    notes = []
    for gamma in sorted(groups):
        score = mean_score(groups[gamma], tasks)
        if score is None:
            here = {record.task for record in groups[gamma]}
            lacking = ", ".join(evidence.tasks[task] for task in tasks if task not in here)
            notes.append(f"No mean at{gamma_suffix(gamma)}: {lacking} missing.")
            continue
        mean.append(
            {
                "gamma": gamma,
                "value": score.value,
                "stderr": score.stderr,
                "drop_rate": mean_load(groups[gamma], tasks, "drop_rate"),
            }
        )
    by_task = {
        evidence.tasks[task]: [
            {"gamma": gamma, "value": 100 * record.value}
            for gamma in sorted(groups)
            for record in groups[gamma]
            if record.task == task
        ]
        for task in tasks
    }
    stock = mean_score(baseline, tasks)
    published = table1_scores(model, [evidence.tasks[task] for task in tasks])
    if published:
        notes.append(TABLE1_NOTE)
    return Measured(
        {
            "model": evidence.models[model],
            "tasks": by_task,
            "mean": mean,
            "baseline": None if stock is None else {"value": stock.value, "stderr": stock.stderr},
            "published": published,
        },
        tuple(notes),
    )


def draw_curve(numbers: Numbers) -> Figure:
    """Draw Figure 12: scores above, what was dropped below."""
    figure = new_figure(COLUMN, 3.3)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    mean, gammas = numbers["mean"], [0.0, 3.0]
    for index, (task, points) in enumerate(numbers["tasks"].items()):
        gammas += [point["gamma"] for point in points]
        upper.plot(
            [point["gamma"] for point in points],
            [point["value"] for point in points],
            color=COLOURS[index % 6],
            linestyle=DASHES[index % 6],
            marker=MARKERS[index % 6],
            markersize=2.2,
            linewidth=0.6,
            label=task,
        )
    if mean:
        upper.errorbar(
            [point["gamma"] for point in mean],
            [point["value"] for point in mean],
            yerr=[1.96 * (point["stderr"] or 0.0) for point in mean],
            color=BLACK,
            linewidth=1.4,
            elinewidth=0.7,
            capsize=1.5,
            label="mean ± 1.96 SE",
        )
        known = [point for point in mean if point["drop_rate"] is not None]
        lower.plot(
            [point["gamma"] for point in known],
            [100 * point["drop_rate"] for point in known],
            color=BLACK,
            marker="o",
        )
    if numbers["baseline"]:
        upper.axhline(
            numbers["baseline"]["value"],
            color=BLACK,
            linestyle=(0, (1, 2)),
            label="mean, no limit",
        )
    if numbers["published"]:
        upper.plot(
            numbers["published"]["gamma"],
            numbers["published"]["value"],
            color=BLACK,
            linestyle="none",
            marker="*",
            markersize=6,
            markerfacecolor="white",
            label="mean, paper's Table 1",
        )
    upper.set_ylabel("score (%)")
    upper.grid()
    upper.set_title(f"{numbers['model']}, {TITLES['score']}")
    lower.set_ylabel("dropped (%)")
    lower.set_ylim(0, 105)
    lower.grid()
    gamma_axis(lower, gammas)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
