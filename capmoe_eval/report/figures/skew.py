"""Speedup by peak load and by experts per rank, beside the ideal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.pooling import by_key
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.speedup import headline
from capmoe_eval.report.figures.studies import FigureStudies, about, bar, capacity_rows
from capmoe_eval.report.figures.style import BLACK, column, whiskers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from capmoe_eval.experiment.timings.schema import Point

_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs."
)
_OF_LINE: Final = ("method", "gamma", "granularity", "candidates")
_OF_POINT: Final = ("speedup", "low", "high", "ideal", "reached", "dropped_share")


def measure_skew(evidence: FigureStudies) -> Measured:
    """Return speedup and ideal by peak load, a line for each method, γ and placement."""
    panels = [
        about(one, one.run.points[0])
        | {"lines": _lines((point.routing.peak, point) for point in one.run.points)}
        for one in evidence.shown
    ]
    notes = (_IDEAL_NOTE, "Share reached: of the ideal gain; none where the ideal is below 1.05.")
    return evidence.measured(panels, notes)


def measure_placement(evidence: FigureStudies) -> Measured:
    """Return speedup and ideal by experts per rank, for each model."""
    panels = []
    for runs in by_key(evidence.shown, lambda one: one.run.title).values():
        panel = about(runs[0], runs[0].run.points[0])
        for key in ("ranks", "experts_per_rank", "deployment"):
            del panel[key]
        panel["placements"] = [
            {"ranks": one.run.ranks, "experts_per_rank": one.run.experts_per_rank}
            for one in sorted(runs, key=lambda one: one.run.experts_per_rank)
        ]
        lines = _lines((float(one.run.experts_per_rank), one.run.points[0]) for one in runs)
        panels.append(panel | {"lines": lines})
    return evidence.measured(panels, (_IDEAL_NOTE,))


def _lines(found: Iterable[tuple[float, Point]]) -> list[Numbers]:
    """Return one line for each method and γ, its points in the order of what they vary with."""
    lines: dict[str, Numbers] = {}
    for x, point in sorted(found, key=lambda item: item[0]):
        together = point.routing.together
        for label, row in capacity_rows(point.timings):
            one = bar(label, row)
            name = one["name"]
            if label.gamma:
                spread = ", popular experts on one rank" if together else ""
                name += spread + gamma_suffix(label.gamma, ", γ = ")
            line = lines.setdefault(
                name,
                {"name": name, "together": together, "points": []}
                | {key: one[key] for key in _OF_LINE},
            )
            line["points"].append({"x": x} | {key: one[key] for key in _OF_POINT})
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
    figure = style.new_figure(style.PAGE, 1.9 * len(panels) + 0.6)
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for panel, (left, right) in zip(panels, grid, strict=True):
        for axis in (left, right):
            if logarithmic:
                axis.set_xscale("log")
            axis.grid()
        for index, line in enumerate(panel["lines"]):
            _line(left, right, line, index)
        if panel["lines"]:
            left.plot([], [], color=BLACK, linestyle=":", label="ideal, same colour and marker")
        left.axhline(1, color=BLACK, linewidth=0.6)
        right.axhline(100, color=BLACK, linewidth=0.6)
        right.set_ylim(bottom=min(0, right.get_ylim()[0]))
        left.set_ylabel("speedup over dropless")
        right.set_ylabel("share of the ideal gain (%)")
        left.set_title(f"{panel['model']}: {_said(panel)}", fontsize=6.5)
        right.set_title("how much of it was reached", fontsize=6.5)
    for axis in grid[-1]:
        axis.set_xlabel(label)
    style.legend_below(figure, *grid[:, 0], columns=3)
    headline(figure, numbers["kind"])
    return figure


def _said(panel: Numbers) -> str:
    how = "EMULATED" if panel["kind"] == "emulated" else "measured"
    where = panel.get("deployment") or f"peak {panel['peak']:.1f} × mean"
    return f"{how}, {where}, {panel['widths']}"


def _line(left: Axes, right: Axes, line: Numbers, index: int) -> None:
    """Draw a line's speedup and ideal on the left, the share that is reached on the right."""
    look = style.line_look(index) | {"linestyle": style.DASHES[index % 3]}
    points = line["points"]
    xs, speedup, low, high = (column(points, key) for key in ("x", "speedup", "low", "high"))
    errors = whiskers(speedup, low, high)
    left.errorbar(xs, speedup, errors, elinewidth=0.7, capsize=1.5, label=line["name"], **look)
    dotted = look | {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "white"}
    left.plot(xs, column(points, "ideal"), **dotted)
    known = [point for point in points if point["reached"] is not None]
    right.plot(column(known, "x"), [100 * point["reached"] for point in known], **look)
