"""The phases of a layer's time: Figure 6."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import TITLES, gamma_suffix
from capmoe_eval.paper.printed import published_note
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.shapes import name_bars, within
from capmoe_eval.report.figures.speedup import headline, subtitle
from capmoe_eval.report.figures.studies import FigureStudies, about, method_name
from capmoe_eval.report.figures.style import BLACK, column

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Timing

_PARTS: Final = {  # of a bar: the measured phases that each is the sum of, and how it looks
    "gate": (("gate", "decide"), style.bar_look(style.ORANGE, "....")),
    "permute": (("permute",), style.bar_look(style.SKY, "////")),
    "all-to-all": (("dispatch", "return"), style.bar_look(style.VERMILLION, "xxxx")),
    "experts": (("experts",), style.bar_look(style.BLUE)),
    "combine": (("combine",), style.bar_look(style.GREEN, "\\\\\\\\")),
    "shared": (("shared",), style.bar_look(style.PURPLE, "++++")),
    "other": ((), style.bar_look(style.GREY)),
}
_SHORT: Final = {
    TITLES["score"]: "Token\nDrop",
    TITLES["expanded_drop"]: "Exp.\nlocal",
    f"{TITLES['expanded_drop']} (global)": "Exp.\nglobal",
}


def measure_phases(evidence: FigureStudies) -> Measured:
    """Figure 6: the phases of one layer, in milliseconds, by method and γ."""
    panels, notes = [], [published_note("figure6")]
    for one, point in evidence.first_points(notes):
        tightest_last = sorted(
            point.timings, key=lambda row: -(row.label.gamma or 0.0) if row.label else -math.inf
        )
        panels.append(about(one, point) | {"bars": [_bar(row) for row in tightest_last]})
    return evidence.measured(panels, notes)


def _bar(row: Timing) -> Numbers:
    """Return a row with the medians of its phases, as measured and as drawn, and of the total."""
    label, total = row.label, row.seconds["total"]
    phases = {name: 1e3 * spread.median for name, spread in row.seconds.items() if name != "total"}
    rest = dict(phases)
    parts = {
        part: sum(rest.pop(name, 0.0) for name in names)
        for part, (names, _) in _PARTS.items()
        if names
    }
    if other := sum(rest.values()):
        parts["other"] = other
    return {
        "method": label.name if label else row.method,
        "name": method_name(label) if label else "Dropless",
        "gamma": label.gamma if label else None,
        "candidates": label.candidates if label else None,
        "dropped_share": row.dropped_share,
        "speedup": row.speedup.median,
        "phases_ms": phases,
        "parts_ms": parts,
        "total_ms": {part: 1e3 * getattr(total, part) for part in ("median", "low", "high")},
    }


def draw_phases(numbers: Numbers) -> Figure:
    """Draw Figure 6: stacked bars, dropless first, then by γ."""
    panels = numbers["panels"]
    figure, grid = style.subplots(style.PAGE, 2.7 * len(panels), len(panels), squeeze=False)
    for panel, axis in zip(panels, grid.flat, strict=True):
        _stack(axis, panel["bars"])
        axis.set_title(f"{panel['model']}: {subtitle(panel)}".replace("\n", " "), fontsize=6.5)
    style.legend_below(figure, *grid.flat, columns=7)
    headline(figure, numbers["kind"])
    return figure


def _stack(axis: Axes, bars: Sequence[Numbers]) -> None:
    gammas = column(bars, "gamma")
    places = [0.0]
    for gamma, before in zip(gammas[1:], gammas, strict=False):
        places.append(places[-1] + (1.0 if gamma == before else 1.6))
    bottoms = [0.0] * len(bars)
    for part, (_, look) in _PARTS.items():
        heights = [one["parts_ms"].get(part, 0.0) for one in bars]
        if any(heights):
            axis.bar(places, heights, 0.8, bottom=bottoms, **look, label=part)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    totals = column(bars, "total_ms")
    look = {"color": BLACK, "markersize": 3, "markerfacecolor": "white"}
    look |= {"elinewidth": 0.7, "capsize": 1.5}
    axis.errorbar(places, *within(totals, "median"), fmt="D", **look, label="whole layer")
    top = max(*bottoms, *column(totals, "high"))
    for gamma in dict.fromkeys(g for g in gammas if g is not None):
        own = [p for p, g in zip(places, gammas, strict=True) if g == gamma]
        axis.annotate(gamma_suffix(gamma, "γ = "), (sum(own) / len(own), 1.04 * top), ha="center")
    axis.set(ylim=(0, 1.14 * top), ylabel="ms")
    name_bars(axis, places, [_SHORT.get(name, name) for name in column(bars, "name")])
