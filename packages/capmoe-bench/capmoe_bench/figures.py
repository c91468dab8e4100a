"""Draw the studies of expert parallelism: Figures 4 to 6, and the speedups of §5.2.

The suite imports it by an entry point.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import figure as printed_figure
from capmoe_eval.paper.printed import published_note
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import Spec, figure
from capmoe_eval.report.figures.sources import FigurePlans, Sources

from capmoe_bench import timings
from capmoe_bench.timings import (
    DEPLOYMENTS,
    MACHINE,
    RUN,
    bench_command,
    deployment,
    ranks_text,
    read_bench,
    widths_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DROPLESS: Final = "Dropless"
_PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)
_WHOLE: Final = "whole layer"
_BARS: Final = {  # by measured phase: the bar that it is a part of
    **{"gate": "gate", "decide": "gate", "permute": "permute"},
    **{"dispatch": "all-to-all", "return": "all-to-all"},
    **{"experts": "experts", "combine": "combine", "shared": "shared"},
}
_SHORT: Final = {
    method_title("score"): "Token\nDrop",
    method_title("expanded_drop"): "Exp.\nlocal",
    f"{method_title('expanded_drop')} (global)": "Exp.\nglobal",
}
_DEPLOYED: Final = tuple(DEPLOYMENTS)[:4]
"""The models of Figures 4 and 5."""
_SPREAD: Final = {
    "spread": "A speedup is the median over rounds of one run, in which a capacity-aware and a "
    "dropless pass alternate. There are no error bars: how far another run differs is not known."
}
"""What the captions of speedups have in common."""
_ABBREVIATIONS: Final = {"score": "TD", "expanded_drop": "ED"}
"""Our methods by their abbreviations in Figures 4 and 5."""
_PRINTED: Final = {
    ("expert", 1.5): {"layer": 1.40, "prefill": 1.23},
    ("device", 1.0): {"layer": 1.51, "prefill": 1.31},
}
"""Speedups of Expanded Drop on Qwen3-MoE in the text of §5.2, by (granularity, γ)."""
_COLUMNS: Final = (
    *("model", "measured", "ranks", "experts_per_rank", "scale", "peak"),
    *("part", "method", "method_name", "gamma", "granularity", "speedup", "ideal", "reached"),
)


@dataclass(frozen=True, kw_only=True)
class Study(Sources):
    """The runs that a figure of a study shows.

    ``times`` have the columns of :data:`capmoe_bench.timings.COLUMNS`, and ``method_name``, the
    method as the paper calls it.
    """

    times: pd.DataFrame


def of_study(_spec: Spec, plans: FigurePlans, folder: Path, *, study: str) -> Study:
    """Return the runs of a study's figure, from the files of a directory.

    A file that cannot be read is left out and named in a note. ``plans`` name the profile.
    """
    bench = read_bench(folder, study)
    times = bench.best(study)
    lacking = [study] if times.empty else []
    models = _DEPLOYED if study == "speedup" else ()
    if models:  # any other shape is not of this figure
        names = times["model"].map(deployment)
        lacking = [name for name in models if name not in set(names)]
        times = times[names.isin(models)]
    broken = [f"Left out: {line}." for line in bench.broken]
    because = f" ({broken[0].rstrip('.')})" if broken else ""
    times = times.assign(
        method_name=[_method_name(row) for _, row in times.iterrows()],
        method=times["method"].replace(timings.DROPLESS, DROPLESS),
    )
    kinds = times["measured"].unique()
    notes = [*broken, *timings.circumstances(times), *_others(times, bench.timings)]
    if lacking and len(times):
        notes.append(f"No run of {', '.join(lacking)}.")
    return Study(
        profile=plans.profile,
        planned=len(models) or 1,
        digests=list(times["digest"].unique()),
        nothing=f"no file of study {study} in {folder}{because}; measure it",
        names={"kind": "partly EMULATED" if len(kinds) == 2 else "".join(kinds)},
        unit="runs",
        n_absent=len(lacking),
        absent=[bench_command(study)] if lacking else [],
        notes=notes,
        times=times,
    )


def _others(times: pd.DataFrame, there: pd.DataFrame) -> list[str]:
    """Say which runs of the study are not shown, a line for each file."""
    used = times.groupby(RUN).groups
    files: dict[str, list[str]] = {}
    for _, run in there.drop_duplicates(RUN).iterrows():
        if (run["path"], run["run"]) not in used:
            name = f"{Path(run['path']).name} ({run['measured']})"
            files.setdefault(name, []).append(f"{run['model']} on {ranks_text(run)}")
    return [f"Not shown, from {name}: {', '.join(runs)}." for name, runs in files.items()]


def _method_name(row: pd.Series[Any]) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    if row["method"] == timings.DROPLESS:
        return DROPLESS
    name = method_title(row["method"])
    if row["candidates"] != "local":
        name += f" ({row['candidates']})"
    return name if row["granularity"] == "expert" else f"{name}, {row['granularity']} level"


def _figure(
    study: str, place: str, title: str, data: Callable[[Any], pd.DataFrame]
) -> Callable[[Callable[[pd.DataFrame], Figure]], Spec]:
    """Declare a figure of a study."""
    gathered = functools.partial(of_study, study=study)
    return figure(place, f"{title} ({{kind}})", data, words=_SPREAD, gather=gathered)


def _gains(study: Study) -> pd.DataFrame:
    """Return the speedups of layers and prefills, with what the paper prints."""
    study.notes.append(_PRINT_NOTE)
    rows = study.times
    rows = rows[(rows["phase"] == "total") & (rows["method"] != DROPLESS)]
    printed: Any = [printed_speedup(row) for _, row in rows.iterrows()]
    return rows[[*_COLUMNS]].assign(paper=printed).astype({"paper": float})


def printed_speedup(row: pd.Series[Any]) -> float | None:
    """Return the speedup that the paper prints: in Figure 4 or 5 or, of Qwen3, in §5.2.

    Figure 5 has one γ of each model, of OLMoE also 0.5. It has Mixtral twice: with one expert per
    GPU, and with several.
    """
    model, part, gamma = deployment(row["model"]), row["part"], row["gamma"]
    if model == "Qwen3":
        return _PRINTED.get((row["granularity"], gamma), {}).get(part)
    method = _ABBREVIATIONS.get(row["method"])
    if model not in _DEPLOYED or method is None:
        return None
    if part == "layer":
        layers: Mapping[str, Any] = printed_figure("fig4_layer_speedup")
        by_gamma: Mapping[str, float]
        (by_gamma,) = (layers[key][method] for key in layers if key.startswith(model))
        return by_gamma.get(str(gamma))
    bars = printed_figure("fig5_e2e_speedup", "single" if row["experts_per_rank"] == 1 else "multi")
    for key, speedups in bars.items():  # by such as "DeepSeek g2.0"
        name, _, at = key.partition(" g")
        if model.startswith(name) and at.startswith(str(gamma)):
            return float(speedups[method][0])
    return None


def of_layers(study: Study) -> pd.DataFrame:
    """Return the speedup of one MoE layer of each model, by method and γ."""
    return _gains(study).query("part == 'layer'")


@_figure("speedup", "Figure 4", "Speedup of one MoE layer under expert parallelism", of_layers)
def fig4(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer, the first of the prefill's in fig5, over the same layer without a
    capacity, by γ and method; bars stand on 1. {spread} Line: what the fullest rank's number of
    pairs alone would gain. Star: the paper's.
    """
    return _speedup_bars(rows, "method_name")


def of_prefills(study: Study) -> pd.DataFrame:
    """Return the speedup of a prefill of each model, beside one layer's."""
    rows = _gains(study)
    layer, prefill = (rows[rows["part"] == part] for part in ("layer", "prefill"))
    keys = ["model", "method_name", "gamma"]
    names = {"speedup": "layer", "ideal": "layer_ideal"}
    return prefill.merge(layer[[*keys, *names]].rename(columns=names), "left", keys)


@_figure("speedup", "Figure 5", "Speedup of a whole prefill under expert parallelism", of_prefills)
def fig5(rows: pd.DataFrame) -> Figure:
    """Speedup of the prefill of a model over the same model without a capacity: attention, norms,
    embeddings and head between its MoE layers; bars stand on 1. {spread} Dotted line: the first of
    its MoE layers alone (fig4). What lies between the layers gains nothing, which brings a
    prefill's speedup nearer to 1. The other layers have routings of their own, so that a bar may
    also lie beyond its dotted line; the data have the ideal of both. Star: the paper's end-to-end
    speedup; it also prints OLMoE at γ=0.5, and Mixtral with one expert per GPU and with several.
    """
    # The ideal is of the experts' time alone, not of what lies between the layers.
    return _speedup_bars(rows.drop(columns="ideal"), "method_name")


def _speedup_bars(rows: pd.DataFrame, by: str) -> Figure:
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
    _head(canvas, rows, 2)
    return canvas


def _head(canvas: Figure, rows: pd.DataFrame, columns: int) -> None:
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


def phases_of_layers(study: Study) -> pd.DataFrame:
    """Return milliseconds of the phases of one layer, dropless first, then by falling γ."""
    study.notes.append(published_note("figure6"))
    rows = study.times.query("part == 'layer'")
    rows = rows.assign(phase=rows["phase"].map(_BARS | {"total": _WHOLE}).fillna("other"))
    bars = list(dict.fromkeys([*_BARS.values(), "other", _WHOLE]))
    by = ["model", "label"]
    seconds = rows.groupby([*by, "phase"])["seconds"].sum().unstack()
    ms = 1e3 * seconds.reindex(columns=bars).fillna(0.0)
    whole = rows[rows["phase"] == _WHOLE]
    order = whole["model"].map(d.places(whole["model"])), -whole["gamma"].fillna(np.inf)
    whole = whole.iloc[np.lexsort(order[::-1])]
    ends = {"ms_low": 1e3 * whole["seconds_q1"], "ms_high": 1e3 * whole["seconds_q3"]}
    names = ("measured", "ranks", "experts_per_rank", "scale", "peak", "gamma")
    whole = whole.assign(method=whole["method_name"], **ends)[[*by, *names, "method", *ends]]
    rows = whole.merge(ms.melt(value_name="ms", ignore_index=False), on=by).drop(columns="label")
    return rows.assign(**{end: rows[end].where(rows["phase"] == _WHOLE) for end in ends})


@_figure("breakdown", "Figure 6", "Where the time of an MoE layer goes", phases_of_layers)
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
    _head(canvas, rows, 4)
    return canvas


def of_granularities(study: Study) -> pd.DataFrame:
    """Return speedups of a layer and a prefill with a capacity of each expert, or each device."""
    rows = _gains(study)
    return rows.assign(ideal=rows["ideal"].where(rows["part"] == "layer"))


@_figure(
    "granularity",
    "§5.2 (text)",
    "Speedup with a capacity of each expert or of each device",
    of_granularities,
)
def granularity(rows: pd.DataFrame) -> Figure:
    """Speedup of Expanded Drop over no capacity, of one MoE layer and of a prefill, when a capacity
    bounds each expert, or the sum over a device's; bars stand on 1. {spread} Line: the ideal. Star:
    the paper's, which compares γ=1.5 for experts with γ=1.0 for devices.
    """
    return _speedup_bars(rows.assign(bounds="capacity of each " + rows["granularity"]), "bounds")
