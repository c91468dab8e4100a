"""Speedup by how uneven the load is, and by how the experts are placed; both beside the ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.benchmarks import Shown
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.speedup import headline
from capmoe_eval.report.figures.studies import FigureStudies, about, bar, capacity_rows
from capmoe_eval.report.figures.style import BLACK, COLOURS, DASHES, MARKERS, PAGE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from capmoe_eval.experiment.timings.schema import Point

_IDEAL_NOTE = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs."
)


def measure_skew(evidence: FigureStudies) -> Measured:
    """Return speedup and ideal by peak load, a line for each method, γ and placement."""
    panels = []
    for one in evidence.shown:
        found = [(point.routing.peak, one, point) for point in one.run.points]
        panels.append(about(one, one.run.points[0]) | {"lines": _lines(found)})
    notes = (_IDEAL_NOTE, "Share reached: of the ideal gain; none where the ideal is below 1.05.")
    return Measured({"kind": evidence.names["kind"], "panels": panels}, notes)


def measure_placement(evidence: FigureStudies) -> Measured:
    """Return speedup and ideal by experts per rank, for each model."""
    panels = []
    for model in dict.fromkeys(one.run.title for one in evidence.shown):
        runs = [one for one in evidence.shown if one.run.title == model]
        found = [
            (float(one.run.experts_per_rank), one, point)
            for one in runs
            for point in one.run.points[:1]
        ]
        panel = about(runs[0], runs[0].run.points[0])
        for key in ("ranks", "experts_per_rank", "deployment"):
            del panel[key]
        panel["placements"] = [
            {"ranks": one.run.ranks, "experts_per_rank": one.run.experts_per_rank}
            for _, one, _ in sorted(found, key=lambda item: item[0])
        ]
        panels.append(panel | {"lines": _lines(found)})
    return Measured({"kind": evidence.names["kind"], "panels": panels}, (_IDEAL_NOTE,))


def _lines(found: Sequence[tuple[float, Shown, Point]]) -> list[dict[str, Any]]:
    """Return one line for each method and γ, its points in the order of what they vary with."""
    lines: dict[str, dict[str, Any]] = {}
    for x, _, point in sorted(found, key=lambda item: item[0]):
        for label, row in capacity_rows(point.timings):
            one = bar(label, row)
            spread = ", popular experts on one rank" if point.routing.together else ""
            name = (
                f"{one['name']}{spread}{gamma_suffix(label.gamma, ', γ = ')}"
                if label.gamma
                else one["name"]
            )
            line = lines.setdefault(
                name,
                {"name": name, "together": point.routing.together, "points": []}
                | {key: one[key] for key in ("method", "gamma", "granularity", "candidates")},
            )
            line["points"].append(
                {"x": x}
                | {
                    key: one[key]
                    for key in ("speedup", "low", "high", "ideal", "reached", "dropped_share")
                }
            )
    return list(lines.values())


def draw_skew(numbers: Numbers) -> Figure:
    """Draw speedup beside the ideal by peak load, and the share of the gain that is reached."""
    return _draw(numbers, "peak load of an expert / mean load")


def draw_placement(numbers: Numbers) -> Figure:
    """Draw speedup beside the ideal by experts per rank, and the share that is reached."""
    figure = _draw(numbers, "experts per rank (ranks)", logarithmic=True)
    for number, panel in enumerate(numbers["panels"]):
        placed = {p["experts_per_rank"]: p["ranks"] for p in panel["placements"]}
        for axis in figure.axes[2 * number : 2 * number + 2]:
            axis.set_xticks(list(placed), [f"{e} ({ranks})" for e, ranks in placed.items()])
            axis.minorticks_off()
    return figure


def _draw(numbers: Numbers, label: str, *, logarithmic: bool = False) -> Figure:
    panels = numbers["panels"]
    figure = new_figure(PAGE, 1.9 * len(panels) + 0.6)
    grid = figure.subplots(len(panels), 2, squeeze=False)
    handles: dict[str, Any] = {}
    for panel, (left, right) in zip(panels, grid, strict=True):
        for axis in (left, right):
            if logarithmic:
                axis.set_xscale("log")
            axis.grid()
        for index, line in enumerate(panel["lines"]):
            _line(left, right, line, index)
        if any(line["points"] for line in panel["lines"]):
            left.plot([], [], color=BLACK, linestyle=":", label="ideal, same colour and marker")
        left.axhline(1, color=BLACK, linewidth=0.6)
        right.axhline(100, color=BLACK, linewidth=0.6)
        right.set_ylim(bottom=min(0, right.get_ylim()[0]))
        left.set_ylabel("speedup over dropless")
        right.set_ylabel("share of the ideal gain (%)")
        left.set_title(f"{panel['model']}: {_said(panel)}", fontsize=6.5)
        right.set_title("how much of it was reached", fontsize=6.5)
        handles |= dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    for axis in grid[-1]:
        axis.set_xlabel(label)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    headline(figure, numbers["kind"])
    return figure


def _said(panel: Mapping[str, Any]) -> str:
    how = "EMULATED" if panel["kind"] == "emulated" else "measured"
    where = panel.get("deployment") or f"peak {panel['peak']:.1f} × mean"
    return f"{how}, {where}, {panel['widths']}"


def _line(left: Axes, right: Axes, line: Mapping[str, Any], index: int) -> None:
    look: dict[str, Any] = {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
    }
    points = line["points"]
    xs = [p["x"] for p in points]
    left.errorbar(
        xs,
        [p["speedup"] for p in points],
        yerr=[
            [p["speedup"] - p["low"] for p in points],
            [p["high"] - p["speedup"] for p in points],
        ],
        linestyle=DASHES[index % 3],
        elinewidth=0.7,
        capsize=1.5,
        label=line["name"],
        **look,
    )
    left.plot(
        xs,
        [p["ideal"] for p in points],
        linestyle=":",
        linewidth=0.8,
        markerfacecolor="white",
        **look,
    )
    known = [p for p in points if p["reached"] is not None]
    right.plot(
        [p["x"] for p in known],
        [100 * p["reached"] for p in known],
        linestyle=DASHES[index % 3],
        **look,
    )
