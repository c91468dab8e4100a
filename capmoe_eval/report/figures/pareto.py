"""Quality against peak load for every method: what a method costs at the peak that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import SCORE, TITLES, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, mean_load, mean_score
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, COLOURS, COLUMN, GREY, MARKERS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES: Final = TITLES | {"score": f"{TITLES['score']} ({SCORE})"}
# Each method looks the same whichever others are there.
_LOOKS: Final = {
    method: (COLOURS[index], MARKERS[index])
    for index, method in enumerate(name for name in _TITLES if name != "baseline")
}


def measure_methods(evidence: FigureRecords) -> Measured:
    """Collect mean score and mean peak load of every method at every γ, and who is on the front."""
    model, tasks = evidence.model, list(evidence.tasks)
    records = evidence.of("baseline", "methods", "at_random", model=model)
    points: list[dict[str, Any]] = []
    notes = []
    for (method, gamma), same in by_key(records, _key).items():
        score = mean_score(same, tasks)
        peak = mean_load(same, tasks, "mean_peak_after")
        title = _TITLES[method] + gamma_suffix(gamma, " at γ=")
        if score is None or peak is None:
            notes.append(f"{title} is left out: not every task is there.")
            continue
        points.append(
            {
                "method": method,
                "label": _TITLES[method],
                "gamma": gamma,
                "peak": peak,
                "value": score.value,
                "stderr": score.stderr,
                "seeds": len({record.seed for record in same}),
            }
        )
    front = pareto_front([(point["peak"], point["value"]) for point in points])
    for index, point in enumerate(points):
        point["on_front"] = index in front
    return Measured(
        {
            "model": evidence.models[model],
            "tasks": list(evidence.tasks.values()),
            "points": points,
        },
        tuple(notes),
    )


def _key(record: Record) -> tuple[str, float | None]:
    name = "device_drop" if record.cell.method.granularity == "device" else record.method
    return name, record.gamma


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
    figure = new_figure(COLUMN, 3.2)
    axes = figure.subplots()
    points = numbers["points"]
    front = sorted((p for p in points if p["on_front"]), key=lambda p: p["peak"])
    axes.plot(
        [point["peak"] for point in front],
        [point["value"] for point in front],
        color=GREY,
        alpha=0.45,
        linewidth=4,
        solid_capstyle="round",
        zorder=1,
        label="Pareto front",
    )
    for method, (colour, marker) in _LOOKS.items():
        own = sorted((p for p in points if p["method"] == method), key=lambda p: p["peak"])
        if not own:
            continue
        axes.plot(
            [point["peak"] for point in own],
            [point["value"] for point in own],
            color=colour,
            marker=marker,
            markersize=3.6,
            linewidth=0.7,
            markerfacecolor="white"
            if method in ("expanded_drop", "token_reroute", "device_drop")
            else colour,
            label=_TITLES[method],
        )
    for point in points:
        if point["method"] == "baseline":
            axes.plot(
                point["peak"],
                point["value"],
                color=BLACK,
                marker="*",
                markersize=7,
                linestyle="none",
                label=_TITLES["baseline"],
            )
    axes.set_xlabel("mean peak load of an expert / mean load")
    axes.set_ylabel("mean score (%)")
    axes.grid()
    axes.set_title(f"{numbers['model']}, {len(numbers['tasks'])} tasks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
