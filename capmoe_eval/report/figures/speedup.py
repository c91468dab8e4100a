"""Expert parallelism: speedup of a layer and a prefill, by load and placement; phases (fig6)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.paper.benchmarks import RUN, ranks_text, widths_text
from capmoe_eval.paper.printed import (
    MACHINE,
    layer_speedup,
    model_speedup,
    published_note,
)
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import DROPLESS, Sources

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)
_PHASES: Final = {  # of a bar: the measured phases that each is the sum of
    "gate": ("gate", "decide"),
    "permute": ("permute",),
    "all-to-all": ("dispatch", "return"),
    "experts": ("experts",),
    "combine": ("combine",),
    "shared": ("shared",),
}
_WHOLE: Final = "whole layer"
_SHORT: Final = {
    method_title("score"): "Token\nDrop",
    method_title("expanded_drop"): "Exp.\nlocal",
    f"{method_title('expanded_drop')} (global)": "Exp.\nglobal",
}
_DEPLOYED: Final = ("OLMoE", "DeepSeek-V2-Lite", "Qwen1.5-MoE", "Mixtral")
SPREAD: Final = {
    "spread": "A speedup is the median over rounds of one run, in which a capacity-aware and a "
    "dropless pass alternate. There are no error bars: how far another run differs is not known."
}
"""What the captions of speedups have in common."""


def _first_points(sources: Sources, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the times at each run's first point, which is shown; note the number of others."""
    for (_, _, title), points in rows.groupby([*RUN, "model"], sort=False)["point"]:
        if others := points.max():
            noun = "point is" if others == 1 else "points are"
            sources.notes.append(f"{title}: {others} further {noun} not shown.")
    return rows[rows["point"] == 0]


def gains(sources: Sources, paper: Callable[[pd.Series[Any]], float | None]) -> pd.DataFrame:
    """Return the speedups at first points, of layers and prefills, with what the paper prints."""
    sources.notes.append(_PRINT_NOTE)
    rows = _first_points(sources, sources.totals)
    rows = rows[rows["method"] != DROPLESS]
    printed: Any = [paper(row) for _, row in rows.iterrows()]
    return rows.assign(paper=printed).astype({"paper": float})


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """Return times without the columns that no figure has."""
    return rows.drop(columns=[*RUN, "key", "point"])


def of_layers(sources: Sources) -> pd.DataFrame:
    """Return the speedup of one MoE layer of each model, by method and γ."""
    rows = gains(sources, lambda row: layer_speedup(row["key"], row["method"], row["gamma"]))
    return shown(rows[rows["part"] == "layer"])


@figure(
    "Figure 4", "Speedup of one MoE layer under expert parallelism ({kind})", of_layers,
    words=SPREAD, study="speedup", models=_DEPLOYED,
)  # fmt: skip
def fig4(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer, the first of the prefill's in fig5, over the same layer without a
    capacity, by γ and method; bars stand on 1. {spread} Line: what the fullest rank's number of
    pairs alone would gain. Star: the paper's.
    """
    return speedup_bars(rows, "method_name")


def of_prefills(sources: Sources) -> pd.DataFrame:
    """Return the speedup of a prefill of each model, beside one layer's; UsageError without any."""

    def printed(row: pd.Series[Any]) -> float | None:
        return model_speedup(row["key"], row["method"], row["gamma"], row["experts_per_rank"])

    rows = gains(sources, printed)
    layer, prefill = (rows[rows["part"] == part] for part in ("layer", "prefill"))
    if prefill.empty:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    without = d.places(layer["model"]).keys() - set(prefill["model"])
    sources.notes.extend(f"{title}: its run has no prefill." for title in without)
    keys = ["model", "method_name", "gamma"]
    names = {"speedup": "layer", "ideal": "layer_ideal"}
    rows = prefill.merge(layer[[*keys, *names]].rename(columns=names), "left", keys)
    faster = rows[rows["speedup"] > rows["layer"].clip(lower=1.0)]
    for title, same in d.each(faster, "model"):
        which = ", ".join(
            f"{row['method_name']}{gamma_suffix(row['gamma'])} {row['speedup']:.2f} against "
            f"{row['layer']:.2f} (ideal {row['ideal']:.2f} against {row['layer_ideal']:.2f})"
            for _, row in same.iterrows()
        )
        text = f"{title}: the prefill gains more than its first layer: {which}."
        sources.notes.append(text)
    return shown(rows)


@figure(
    "Figure 5", "Speedup of a whole prefill under expert parallelism ({kind})", of_prefills,
    words=SPREAD, study="speedup", models=_DEPLOYED,
)  # fmt: skip
def fig5(rows: pd.DataFrame) -> Figure:
    """Speedup of the prefill of a model over the same model without a capacity: attention, norms,
    embeddings and head between its MoE layers; bars stand on 1. {spread} Dotted line: the first of
    its MoE layers alone (fig4). What lies between the layers gains nothing, so a prefill should
    gain less than its layers. A bar beyond its dotted line has other layers, with routings of their
    own, whose fullest rank is relieved more than the first's; the notes give the ideal of both.
    Star: the paper's end-to-end speedup, printed for one γ of each model.
    """
    # The ideal is of the experts' time alone, not of what lies between the layers.
    return speedup_bars(rows.drop(columns="ideal"), "method_name")


def speedup_bars(rows: pd.DataFrame, by: str) -> Figure:
    """Draw groups of bars by γ, with ideals, the layer's speedups, and what the paper prints."""
    limited = rows.dropna(subset="gamma").sort_values("gamma", ascending=False, kind="stable")
    has_parts = rows["part"].nunique() > 1
    canvas, grid = d.panels(limited, ["model", "part"], 2.2)
    for (title, part), of_panel, axes in grid:
        same = d.bars(axes, of_panel, "gamma", "speedup", by, base=1.0)
        half = 0.46 * same["width"]
        for column, label, look in (
            ("ideal", "ideal: fullest rank's pairs", {"linewidth": 1.1}),
            ("layer", "one MoE layer (fig4)", {"linewidth": 0.9, "linestyle": (0, (1, 1))}),
        ):
            if column in same and same[column].notna().any():
                ends = same["place"] - half, same["place"] + half
                axes.hlines(same[column], *ends, colors=d.BLACK, **look, label=label)
        printed = same.dropna(subset="paper")
        if len(printed):
            star = d.STAR | {"markerfacecolor": "white", "markeredgewidth": 0.6}
            d.line(axes, printed, "place", "paper", f"paper, {MACHINE}", **star)
        d.rule(axes, 1, width=0.6)
        d.name_places(axes, map(gamma_text, d.places(same["gamma"])))
        of_part = {"prefill": ", prefill", "layer": ", one layer"}[part] if has_parts else ""
        axes.set_title(f"{title}{of_part}\n{_how(same.iloc[0])}")
        axes.set(xlabel="capacity factor γ", ylabel="speedup over dropless")
    head(canvas, rows, 2)
    return canvas


def head(canvas: Figure, rows: pd.DataFrame, columns: int) -> None:
    """Say above a figure how its numbers came about, and that speedups have no error bars.

    Quartiles over the rounds of one run are none: they do not say how far a repetition differs.
    """
    kinds = set(rows["measured"])
    title = {
        "EMULATED": "EMULATED on one device: the slowest rank counts, the all-to-all is a formula",
        "measured": "measured on real ranks",
    }[kinds.pop()]
    if kinds:
        title = "partly EMULATED: see each panel"
    if "speedup" in rows:
        title += "; 1 run, no error bars"
    colour = d.BLACK if title.startswith("measured") else d.VERMILLION
    canvas.suptitle(textwrap.fill(title, 64), fontsize=7.5, fontweight="bold", color=colour)
    d.legend(canvas, columns)


def _how(row: pd.Series[Any]) -> str:
    """Return what must be known of a panel's run, in two lines."""
    ranks = f"{row['measured']}, {ranks_text(row)}"
    return f"{ranks},\n{widths_text(row)}, peak {row['peak']:.1f} × mean"


def phases_of_layers(sources: Sources) -> pd.DataFrame:
    """Return milliseconds of the phases of one layer, dropless first, then by falling γ."""
    import pandas as pd

    sources.notes.append(published_note("figure6"))
    rows = _first_points(sources, sources.results.timings)
    rows = rows[rows["part"] == "layer"].assign(order=-rows["gamma"].fillna(np.inf))
    parts = []
    for _, of_model in d.each(rows, "model"):
        for _, same in d.each(of_model.sort_values("order", kind="stable"), "label"):
            milliseconds = (1e3 * same.set_index("phase")["seconds"]).to_dict()
            row = same[same["phase"] == "total"].iloc[0]
            total = milliseconds.pop("total")
            times = {
                bar: sum(milliseconds.pop(name, 0.0) for name in names)
                for bar, names in _PHASES.items()
            }
            times |= {"other": sum(milliseconds.values()), _WHOLE: total}
            bars = pd.DataFrame({"phase": list(times), "ms": list(times.values())})
            is_whole = bars["phase"] == _WHOLE
            ends = 1e3 * row["seconds_q1"], 1e3 * row["seconds_q3"]
            bars.loc[is_whole, ["ms_low", "ms_high"]] = ends
            names = ("model", "measured", "ranks", "experts_per_rank", "scale", "peak", "gamma")
            parts.append(bars.assign(method=row["method_name"], **row[list(names)]))
    return pd.concat(parts, ignore_index=True)


@figure(
    "Figure 6", "Where the time of an MoE layer goes ({kind})", phases_of_layers, study="breakdown"
)
def fig6(rows: pd.DataFrame) -> Figure:
    """Milliseconds of each phase of one MoE layer on the slowest rank, medians, without a capacity
    and by γ. Gate: router and decision; all-to-all: there and back. Diamond: the whole layer, with
    quartiles; medians of phases sum to its median only nearly. Global expansion adds experts of all
    ranks.
    """
    canvas, grid = d.panels(rows, "model", 2.7, 1)
    for title, of_model, axes in grid:
        whole = of_model[of_model["phase"] == _WHOLE]
        # Bars of one γ stand together.
        steps = np.where(whole["gamma"].eq(whole["gamma"].shift()), 1.0, 1.6)
        whole = whole.assign(place=steps.cumsum())
        below: Any = 0.0
        for (phase, same), look in zip(d.each(of_model, "phase"), d.BARS, strict=False):
            if (heights := same["ms"].to_numpy()).any() and phase != _WHOLE:
                axes.bar(whole["place"], heights, 0.8, below, **look, label=phase)
                below = below + heights
        look = {"color": d.BLACK, "marker": "D", "linestyle": "", "markersize": 3}
        d.line(axes, whole, "place", "ms", _WHOLE, **look, markerfacecolor="white")
        top = max(*below, *whole["ms_high"])
        for gamma, same in d.each(whole.dropna(subset="gamma"), "gamma"):
            at = same["place"].mean(), 1.04 * top
            axes.annotate(gamma_suffix(gamma, "γ = "), at, ha="center")
        d.name_places(axes, [_SHORT.get(name, name) for name in whole["method"]], whole["place"])
        axes.set(ylabel="ms", ylim=(0, 1.14 * top), title=f"{title}: {_how(whole.iloc[0])}")
        axes.grid(False, axis="x")
    head(canvas, rows, 4)
    return canvas
