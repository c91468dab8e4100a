"""Speedup by what a capacity bounds, by peak load, and by experts per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_text, method_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.speedup import SPREAD, gains, head, shown, speedup_bars

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.report.figures.sources import Sources
    from matplotlib.figure import Figure

_PRINTED: Final[Mapping[tuple[str, float], Mapping[str, float]]] = {
    ("expert", 1.5): {"layer": 1.40, "prefill": 1.23},
    ("device", 1.0): {"layer": 1.51, "prefill": 1.31},
}
"""Speedups of Expanded Drop on Qwen3-MoE in the text of §5.2, by (granularity, γ)."""
_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs. Share reached: "
    "of the ideal gain; none where the ideal is below 1.05."
)


def of_granularities(sources: Sources) -> pd.DataFrame:
    """Return speedups of a layer and a prefill with a capacity of each expert, or each device."""

    def printed(row: pd.Series[Any]) -> float | None:
        is_papers = str(row["key"]).startswith("Qwen3")
        values = _PRINTED.get((row["granularity"], row["gamma"]), {}) if is_papers else {}
        return values.get(row["part"])

    rows = gains(sources, printed)
    return shown(rows.assign(ideal=rows["ideal"].where(rows["part"] == "layer")))


@figure(
    "§5.2 (text)", "Speedup with a capacity of each expert or of each device ({kind})",
    of_granularities, words=SPREAD, study="granularity",
)  # fmt: skip
def granularity(rows: pd.DataFrame) -> Figure:
    """Speedup of Expanded Drop over no capacity, of one MoE layer and of a prefill, when a capacity
    bounds each expert, or the sum over a device's; bars stand on 1. {spread} Line: the ideal. Star:
    the paper's, which compares γ=1.5 for experts with γ=1.0 for devices.
    """
    return speedup_bars(rows.assign(bounds="capacity of each " + rows["granularity"]), "bounds")


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
