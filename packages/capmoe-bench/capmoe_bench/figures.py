"""Draw the studies of expert parallelism: Figures 4 to 6, and speedup by peak load and placement.

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
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.paper.printed import figure as printed_figure
from capmoe_eval.paper.printed import published_note
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import Spec, figure
from capmoe_eval.report.figures.sources import FigurePlans, Sources

from capmoe_bench import timings
from capmoe_bench.timings import (
    MACHINE,
    RUN,
    bench_command,
    deployment,
    kind_text,
    ranks_text,
    read_bench,
    widths_text,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DROPLESS: Final = "Dropless"
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
_SPREAD: Final = {
    "spread": "A speedup is the median over rounds of one run, in which a capacity-aware and a "
    "dropless pass alternate. There are no error bars: how far another run differs is not known."
}
"""What the captions of speedups have in common."""


_ABBREVIATIONS: Final[Mapping[str, str]] = {"score": "TD", "expanded_drop": "ED"}
"""Our methods by their abbreviations in Figures 4 and 5."""
_COLUMNS: Final = (
    *("key", "model", "measured", "ranks", "experts_per_rank", "scale", "peak", "together"),
    *("point", "part", "method", "method_name", "gamma", "granularity", "speedup", "ideal"),
    "reached",
)


@dataclass(frozen=True, kw_only=True)
class Study(Sources):
    """The runs that a figure of a study shows.

    ``times`` are as :func:`capmoe_bench.timings.timings_of` has them, with ``measured``, the kind
    in words, and the ``method_name`` of the paper.
    """

    times: pd.DataFrame

    @property
    def totals(self) -> pd.DataFrame:
        """The times of whole parts: a row for each point, part and method, dropless included."""
        return self.times.loc[self.times["phase"] == "total", [*RUN, *_COLUMNS]]


def of_study(
    spec: Spec, plans: FigurePlans, folder: Path, *, study: str, models: tuple[str, ...] = ()
) -> Study:
    """Return the runs of a figure; a file that cannot be read is left out and named in a note.

    Args:
        spec: The figure.
        plans: Those of the command line, which name the profile.
        folder: The directory of the files.
        study: Its name.
        models: Those that there should be; empty where any will do.
    """
    bench = read_bench(folder, study)
    times = bench.best(study)
    lacking = [study] if times.empty else []
    if models:  # any other shape is not of this figure
        keys = {key: deployment(key) for key in times["key"].unique()}
        names = {key: shape.name for key, shape in keys.items() if shape}
        times = times[times["key"].map(names).isin(models)]
        lacking = [name for name in models if name not in names.values()]
    broken = [f"Left out: {line}." for line in bench.broken]
    because = f" ({broken[0].rstrip('.')})" if broken else ""
    kinds = {kind_text(kind) for kind in times["kind"]}
    notes = [*broken, *timings.circumstances(times), *_others(times, bench.timings)]
    if lacking and len(times):
        notes.append(f"No run of {', '.join(lacking)}.")
    is_dropless = times["method"] == timings.DROPLESS
    by_label = times.groupby("label", sort=False)
    titles = {label: _method_name(same.iloc[0]) for label, same in by_label}
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
        times=times.assign(
            measured=times["kind"].map(kind_text),
            method=times["method"].mask(is_dropless, DROPLESS),
            method_name=times["label"].map(titles),
        ),
    )


def _others(times: pd.DataFrame, there: pd.DataFrame) -> list[str]:
    """Say which runs of the study are not shown, a line for each file."""
    used = times.groupby(RUN).groups
    files: dict[str, list[str]] = {}
    for _, run in there.drop_duplicates(RUN).iterrows():
        if (run["path"], run["run"]) not in used:
            name = f"{Path(run['path']).name} ({kind_text(run['kind'])})"
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


def _first_points(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the times at each run's first point, which is shown; note the number of others."""
    for (_, _, title), points in rows.groupby([*RUN, "model"], sort=False)["point"]:
        if others := points.max():
            noun = "point is" if others == 1 else "points are"
            study.notes.append(f"{title}: {others} further {noun} not shown.")
    return rows[rows["point"] == 0]


def _gains(study: Study, paper: Callable[[pd.Series[Any]], float | None]) -> pd.DataFrame:
    """Return the speedups at first points, of layers and prefills, with what the paper prints."""
    study.notes.append(_PRINT_NOTE)
    rows = _first_points(study, study.totals)
    rows = rows[rows["method"] != DROPLESS]
    printed: Any = [paper(row) for _, row in rows.iterrows()]
    return rows.assign(paper=printed).astype({"paper": float})


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """Return times without the columns that no figure has."""
    return rows.drop(columns=[*RUN, "key", "point"])


def layer_speedup(model: str, method: str, gamma: float) -> float | None:
    """Return the speedup of one MoE layer that Figure 4 prints, or None."""
    deployed, name = deployment(model), _ABBREVIATIONS.get(method)
    if deployed is None or deployed.layer is None or name is None:
        return None
    printed: Mapping[str, float] = printed_figure("fig4_layer_speedup", deployed.layer, name)
    return printed.get(str(gamma))


def model_speedup(model: str, method: str, gamma: float, experts_per_rank: int) -> float | None:
    """Return the end-to-end speedup that Figure 5 prints, or None.

    The figure has Mixtral twice: with one expert per GPU, and with several.
    """
    deployed, name = deployment(model), _ABBREVIATIONS.get(method)
    if deployed is None or deployed.whole is None or name is None:
        return None
    bars = printed_figure("fig5_e2e_speedup", "single" if experts_per_rank == 1 else "multi")
    fitting = (
        values for key, values in bars.items() if key.startswith(f"{deployed.whole} g{gamma}")
    )
    return next((float(values[name][0]) for values in fitting), None)


def of_layers(study: Study) -> pd.DataFrame:
    """Return the speedup of one MoE layer of each model, by method and γ."""
    rows = _gains(study, lambda row: layer_speedup(row["key"], row["method"], row["gamma"]))
    return _shown(rows[rows["part"] == "layer"])


@figure(
    "Figure 4", "Speedup of one MoE layer under expert parallelism ({kind})", of_layers,
    words=_SPREAD, gather=functools.partial(of_study, study="speedup", models=_DEPLOYED),
)  # fmt: skip
def fig4(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer, the first of the prefill's in fig5, over the same layer without a
    capacity, by γ and method; bars stand on 1. {spread} Line: what the fullest rank's number of
    pairs alone would gain. Star: the paper's.
    """
    return _speedup_bars(rows, "method_name")


def of_prefills(study: Study) -> pd.DataFrame:
    """Return the speedup of a prefill of each model, beside one layer's; UsageError without any."""

    def printed(row: pd.Series[Any]) -> float | None:
        return model_speedup(row["key"], row["method"], row["gamma"], row["experts_per_rank"])

    rows = _gains(study, printed)
    layer, prefill = (rows[rows["part"] == part] for part in ("layer", "prefill"))
    if prefill.empty:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    without = d.places(layer["model"]).keys() - set(prefill["model"])
    study.notes.extend(f"{title}: its run has no prefill." for title in without)
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
        study.notes.append(text)
    return _shown(rows)


@figure(
    "Figure 5", "Speedup of a whole prefill under expert parallelism ({kind})", of_prefills,
    words=_SPREAD, gather=functools.partial(of_study, study="speedup", models=_DEPLOYED),
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
    import pandas as pd

    study.notes.append(published_note("figure6"))
    rows = _first_points(study, study.times)
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
    "Figure 6",
    "Where the time of an MoE layer goes ({kind})",
    phases_of_layers,
    gather=functools.partial(of_study, study="breakdown"),
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
    _head(canvas, rows, 4)
    return canvas


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


def of_granularities(study: Study) -> pd.DataFrame:
    """Return speedups of a layer and a prefill with a capacity of each expert, or each device."""

    def printed(row: pd.Series[Any]) -> float | None:
        is_papers = str(row["key"]).startswith("Qwen3")
        values = _PRINTED.get((row["granularity"], row["gamma"]), {}) if is_papers else {}
        return values.get(row["part"])

    rows = _gains(study, printed)
    return _shown(rows.assign(ideal=rows["ideal"].where(rows["part"] == "layer")))


@figure(
    "§5.2 (text)", "Speedup with a capacity of each expert or of each device ({kind})",
    of_granularities, words=_SPREAD, gather=functools.partial(of_study, study="granularity"),
)  # fmt: skip
def granularity(rows: pd.DataFrame) -> Figure:
    """Speedup of Expanded Drop over no capacity, of one MoE layer and of a prefill, when a capacity
    bounds each expert, or the sum over a device's; bars stand on 1. {spread} Line: the ideal. Star:
    the paper's, which compares γ=1.5 for experts with γ=1.0 for devices.
    """
    return _speedup_bars(rows.assign(bounds="capacity of each " + rows["granularity"]), "bounds")


def by_peak(study: Study) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and peak load."""
    return _reached(study, study.totals, "peak")


def by_experts_per_rank(study: Study) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and placement."""
    return _reached(study, study.totals.query("point == 0"), "experts_per_rank")


def _reached(study: Study, rows: pd.DataFrame, by: str) -> pd.DataFrame:
    study.notes.append(_IDEAL_NOTE)
    rows = rows[rows["part"] == "layer"].dropna(subset="gamma").sort_values(by, kind="stable")
    return _shown(rows.assign(reached_percent=100 * rows.pop("reached")))


@figure(
    "not in the paper", "Speedup by peak load, beside the ideal ({kind})", by_peak, words=_SPREAD,
    gather=functools.partial(of_study, study="skew"),
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
    words=_SPREAD, gather=functools.partial(of_study, study="placement"),
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
    _head(canvas, rows, 2)
    return canvas, grid
