"""Draw the phases of a layer's time: Figure 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import TITLES, gamma_suffix
from capmoe_eval.paper.printed import FIGURE6_NOTE
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.speedup import headline, subtitle
from capmoe_eval.report.figures.studies import FigureStudies, about, first_point, method_name
from capmoe_eval.report.figures.style import BLACK, column, whiskers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from capmoe_eval.experiment.timings.schema import Timing

PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "gate": ("gate", "decide"),
    "permute": ("permute",),
    "all-to-all": ("dispatch", "return"),
    "experts": ("experts",),
    "combine": ("combine",),
    "shared": ("shared",),
}
"""Parts of a bar, and the measured phases that each is the sum of."""

_LOOKS: Final = (
    (style.ORANGE, style.HATCHES[2]),
    (style.SKY, style.HATCHES[1]),
    (style.VERMILLION, style.HATCHES[3]),
    (style.BLUE, style.HATCHES[0]),
    (style.GREEN, style.HATCHES[4]),
    (style.PURPLE, style.HATCHES[5]),
    (style.GREY, style.HATCHES[0]),
)
_SHORT: Final[Mapping[str, str]] = {
    TITLES["score"]: "Token\nDrop",
    TITLES["expanded_drop"]: "Exp.\nlocal",
    f"{TITLES['expanded_drop']} (global)": "Exp.\nglobal",
}


def measure_phases(evidence: FigureStudies) -> Measured:
    """Figure 6: the phases of one layer, in milliseconds, by method and γ."""
    panels, notes = [], [FIGURE6_NOTE]
    for one in evidence.shown:
        point = first_point(one, notes)
        rows = [(row, row.label) for row in point.timings]
        tightest_last = sorted(rows, key=lambda r: -(r[1].gamma or 0.0) if r[1] else float("-inf"))
        bars = [
            {
                "method": label.name if label else row.method,
                "name": method_name(label) if label else "Dropless",
                "gamma": label.gamma if label else None,
                "candidates": label.candidates if label else None,
                "dropped_share": row.dropped_share,
                "speedup": row.speedup.median,
                **milliseconds(row),
            }
            for row, label in tightest_last
        ]
        panels.append(about(one, point) | {"bars": bars})
    return evidence.measured(panels, notes)


def milliseconds(row: Timing) -> dict[str, Any]:
    """Return the medians of a row's phases as measured and as drawn, and of the total.

    A phase that none of the parts names is ``other``.
    """
    phases = {name: 1e3 * spread.median for name, spread in row.seconds.items() if name != "total"}
    parts = {part: sum(phases.get(name, 0.0) for name in names) for part, names in PHASES.items()}
    known = {name for names in PHASES.values() for name in names}
    rest = sum(value for name, value in phases.items() if name not in known)
    total = row.seconds["total"]
    return {
        "phases_ms": phases,
        "parts_ms": parts | ({"other": rest} if rest else {}),
        "total_ms": {part: 1e3 * getattr(total, part) for part in ("median", "low", "high")},
    }


def draw_phases(numbers: Numbers) -> Figure:
    """Draw Figure 6: stacked bars, dropless first, then by γ."""
    panels = numbers["panels"]
    figure = style.new_figure(style.PAGE, 2.7 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        _stack(axis, panel["bars"])
        axis.set_title(f"{panel['model']}: {subtitle(panel)}".replace("\n", " "), fontsize=6.5)
    style.legend_below(figure, *axes[:, 0], columns=7)
    headline(figure, numbers["kind"])
    return figure


def _stack(axis: Axes, bars: Sequence[Numbers]) -> None:
    gammas = column(bars, "gamma")
    places = [0.0]
    for gamma, before in zip(gammas[1:], gammas, strict=False):
        places.append(places[-1] + (1.0 if gamma == before else 1.6))
    bottoms = [0.0] * len(bars)
    for look, part in zip(_LOOKS, (*PHASES, "other"), strict=True):
        heights = [one["parts_ms"].get(part, 0.0) for one in bars]
        if any(heights):
            axis.bar(places, heights, 0.8, bottom=bottoms, **style.bar_look(*look), label=part)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    totals = column(bars, "total_ms")
    median, low, high = (column(totals, key) for key in ("median", "low", "high"))
    axis.errorbar(
        places,
        median,
        yerr=whiskers(median, low, high),
        fmt="D",
        color=BLACK,
        markersize=3,
        markerfacecolor="white",
        elinewidth=0.7,
        capsize=1.5,
        label="whole layer",
    )
    top = max(*bottoms, *high)
    for gamma in dict.fromkeys(g for g in gammas if g is not None):
        own = [p for p, g in zip(places, gammas, strict=True) if g == gamma]
        axis.annotate(gamma_suffix(gamma, "γ = "), (sum(own) / len(own), 1.04 * top), ha="center")
    axis.set(ylim=(0, 1.14 * top), ylabel="ms")
    axis.set_xticks(places, [_SHORT.get(name, name) for name in column(bars, "name")])
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y")
