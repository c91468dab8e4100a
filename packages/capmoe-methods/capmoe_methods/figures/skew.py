"""Speedup of a layer by peak load, and by experts per rank, beside the ideal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_text, method_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.speedup import SPREAD, head, shown

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.report.figures.sources import Sources
    from matplotlib.figure import Figure

_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs. Share reached: "
    "of the ideal gain; none where the ideal is below 1.05."
)


def by_peak(sources: Sources) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and peak load."""
    return _reached(sources, sources.totals, "peak")


def by_experts_per_rank(sources: Sources) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and placement."""
    return _reached(sources, sources.totals.query("point == 0"), "experts_per_rank")


def _reached(sources: Sources, rows: pd.DataFrame, by: str) -> pd.DataFrame:
    sources.notes.append(_IDEAL_NOTE)
    rows = rows[rows["part"] == "layer"].dropna(subset="gamma").sort_values(by, kind="stable")
    return shown(rows.assign(reached_percent=100 * rows.pop("reached")))


@figure(
    "not in the paper", "Speedup by peak load, beside the ideal ({kind})", by_peak, words=SPREAD,
    study="skew",
)  # fmt: skip
def skew(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer by the fullest expert's load over the mean, the ideal (dotted), and
    how much of the ideal gain was reached. {spread}
    """
    canvas, grid = _lines(rows, "peak")
    for axes in grid[-1]:
        axes.set_xlabel("peak load of an expert / mean load")
    return canvas


@figure(
    "not in the paper", "Speedup by experts per rank ({kind})", by_experts_per_rank,
    words=SPREAD, study="placement",
)  # fmt: skip
def placement(rows: pd.DataFrame) -> Figure:
    """One model's experts over more or fewer ranks: speedup of one MoE layer, the ideal (dotted),
    and how much of the ideal gain was reached. The load of several experts on a rank evens out, and
    with it goes the gain (§5.1). {spread}
    """
    canvas, grid = _lines(rows, "experts_per_rank")
    for (_, same), sides in zip(d.each(rows, "model"), grid, strict=True):
        counts = list(d.places(same["experts_per_rank"]))
        for axes in sides:
            axes.set(xscale="log", xlabel="experts per rank")
            axes.set_xticks(counts, list(map(str, counts)))
            axes.minorticks_off()
    return canvas


def _lines(rows: pd.DataFrame, x: str) -> tuple[Figure, Any]:
    """Draw speedup beside the ideal, and how much of its gain is reached, a row for each model."""
    names = rows["method"].map(method_title) + rows["gamma"].map(
        lambda at: f", γ = {gamma_text(at)}"
    )
    rows = rows.assign(line=names.mask(rows["together"], names + ", popular experts on one rank"))
    looks = d.looks(rows["line"])
    models = list(d.each(rows, "model"))
    canvas, grid = d.canvas(1.9 * len(models) + 0.9, len(models), 2)
    for (model, same), (left, right) in zip(models, grid, strict=True):
        d.lines(left, same, x, "speedup", "line", looks)
        for line, of_line in d.each(same, "line"):
            dotted = {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "white"}
            d.line(left, of_line, x, "ideal", **looks[line] | dotted)
        d.lines(right, same.dropna(subset="reached_percent"), x, "reached_percent", "line", looks)
        left.plot([], [], color=d.BLACK, linestyle=":", label="ideal, same colour and marker")
        d.rule(left, 1, width=0.6)
        d.rule(right, 100, width=0.6)
        first = same.iloc[0]
        how = f"{first['measured']}, widths 1/{first['scale']:g}"
        left.set(title=f"{model}\n{how}", ylabel="speedup over dropless")
        right.set(title="share of the ideal gain\nthat is reached", ylabel="share (%)")
        if not (same["reached_percent"] < 0).any():
            right.set_ylim(0, None)
    head(canvas, rows, 2)
    return canvas, grid
