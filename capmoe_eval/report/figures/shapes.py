"""Shapes that several figures share: intervals, Pareto fronts and named bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Numbers
from capmoe_eval.report.figures.style import column, whiskers


def within(points: Sequence[Numbers], middle: str) -> tuple[list[float], Any]:
    """Return a number of every point, and how far whiskers reach to its ``low`` and ``high``.

    There are none where an end is not known.
    """
    middles, low, high = (column(points, key) for key in (middle, "low", "high"))
    return middles, None if None in low else whiskers(middles, low, high)


def scored(points: Sequence[Numbers]) -> tuple[list[float], list[float]]:
    """Return the score of every point in percent, and 1.96 standard errors as its whisker."""
    return column(points, "value"), [1.96 * (point["stderr"] or 0.0) for point in points]


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the places of the points (cost, quality) that no other beats.

    A point is beaten by one that costs no more and is no worse, and differs.
    """
    return {
        place
        for place, (cost, quality) in enumerate(points)
        if not any(
            other != (cost, quality) and other[0] <= cost and other[1] >= quality
            for other in points
        )
    }


def mark_front(points: Sequence[Numbers]) -> None:
    """Note in each point whether it is ``on_front``: the Pareto front of ``peak`` and ``value``."""
    front = pareto_front([(point["peak"], point["value"]) for point in points])
    for place, point in enumerate(points):
        point["on_front"] = place in front


def draw_front(axes: Axes, points: Sequence[Numbers]) -> None:
    """Draw the front of marked points in grey, below their lines, and what the axis across is."""
    front = sorted((p for p in points if p["on_front"]), key=lambda point: float(point["peak"]))
    look: Numbers = {"color": style.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"}
    peaks, values = column(front, "peak"), column(front, "value")
    axes.plot(peaks, values, zorder=1, **look, label="Pareto front")
    axes.set_xlabel("mean peak load of an expert / mean load")
    axes.grid()


def name_bars(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Write names below bars, or groups of bars, in place of ticks."""
    axes.set_xticks(places, names)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
