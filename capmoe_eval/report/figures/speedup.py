"""Expert parallelism: speedup of a layer and a prefill, by load and placement; phases (fig6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.paper.printed import (
    GRANULARITY,
    MACHINE,
    layer_speedup,
    model_speedup,
    published_note,
)
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.studies import FigureStudies, method_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capmoe_eval.experiment.timings.schema import Point, Timing
    from capmoe_eval.paper.benchmarks import ShownRun

_LOOKS: Final = (
    d.bar_look(d.BLUE),
    d.bar_look(d.SKY, "////"),
    d.bar_look(d.ORANGE, "...."),
    d.bar_look(d.VERMILLION),
)
_SMALL: Final = {"fontsize": 6.5}
_PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)
_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs."
)
_PHASES: Final = {  # of a bar: the measured phases that each is the sum of, and how it looks
    "gate": (("gate", "decide"), d.bar_look(d.ORANGE, "....")),
    "permute": (("permute",), d.bar_look(d.SKY, "////")),
    "all-to-all": (("dispatch", "return"), d.bar_look(d.VERMILLION, "xxxx")),
    "experts": (("experts",), d.bar_look(d.BLUE)),
    "combine": (("combine",), d.bar_look(d.GREEN, "\\\\\\\\")),
    "shared": (("shared",), d.bar_look(d.PURPLE, "++++")),
    "other": ((), d.bar_look(d.GREY)),
}
_WHOLE: Final = "whole layer"
_DROPLESS: Final = "Dropless"
_SHORT: Final = {
    method_title("score"): "Token\nDrop",
    method_title("expanded_drop"): "Exp.\nlocal",
    f"{method_title('expanded_drop')} (global)": "Exp.\nglobal",
}
_DEPLOYED: Final = ("OLMoE", "DeepSeek-V2-Lite", "Qwen1.5-MoE", "Mixtral")
_SPREAD: Final = {
    "spread": "Whiskers: lowest and highest of repeated runs on one machine; a single run has "
    "none. A speedup is the median over rounds, in which a capacity-aware and a dropless pass "
    "alternate."
}


def _deployment(run: ShownRun, point: Point) -> dict[str, Any]:
    """Return the columns that say of which deployment and load a point of a run is."""
    return {
        "model": run.run.title,
        "measured": run.kind,
        "ranks": run.run.ranks,
        "experts_per_rank": run.run.experts_per_rank,
        "scale": run.study.scale,
        "peak": point.routing.peak,
    }


def _gains(
    sources: FigureStudies,
    run: ShownRun,
    part: str = "layer",
    place: int = 0,
    paper: Callable[[pd.Series[Any]], float | None] = lambda _: None,
) -> pd.DataFrame:
    """Return the speedup of each method at one point of a run, with what the paper prints."""
    import pandas as pd

    point = run.run.points[place]
    about = _deployment(run, point) | {"together": point.routing.together, "part": part}
    rows = pd.DataFrame(sources.gains(run, part, place)).assign(**about)
    rows = rows.rename(columns={"low": "speedup_low", "high": "speedup_high"})
    return rows.assign(paper=[paper(row) for _, row in rows.iterrows()])


def of_layers(sources: FigureStudies) -> pd.DataFrame:
    """Return the speedup of one MoE layer of each model, by method and γ."""
    import pandas as pd

    sources.notes.extend([_PRINT_NOTE, *sources.repetitions()])
    return pd.concat(
        _gains(
            sources,
            run,
            paper=lambda row, of=run: layer_speedup(of.run.model, row["method"], row["gamma"]),
        )
        for run, _ in sources.first_points()
    )


@figure(
    "Figure 4", "Speedup of one MoE layer under expert parallelism ({kind})", of_layers,
    words=_SPREAD, study="speedup", models=_DEPLOYED,
)  # fmt: skip
def fig4(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer, the first of the prefill's in fig5, over the same layer without a
    capacity, by γ and method; bars stand on 1. {spread} Line: what the fullest rank's number of
    pairs alone would gain. Star: the paper's.
    """
    return _bars(rows, "method_name")


def of_prefills(sources: FigureStudies) -> pd.DataFrame:
    """Return the speedup of a prefill of each model, beside one layer's; UsageError without any."""
    import pandas as pd

    sources.notes.extend([_PRINT_NOTE, *sources.repetitions()])
    parts = []
    for run, point in sources.first_points():
        if point.prefill is None:
            sources.notes.append(f"{run.run.title}: its run has no prefill.")
            continue
        rows = _gains(
            sources,
            run,
            "prefill",
            paper=lambda row, of=run.run: model_speedup(
                of.model, row["method"], row["gamma"], of.experts_per_rank
            ),
        )
        keys = ["method_name", "gamma"]
        layer = _gains(sources, run)[[*keys, "speedup", "ideal"]]
        rows = rows.merge(layer, "left", keys, suffixes=("", "_of_layer"))
        rows = rows.rename(columns={"speedup_of_layer": "layer", "ideal_of_layer": "layer_ideal"})
        parts.append(rows)
        faster = rows[rows["speedup"] > rows["layer"].clip(lower=1.0)]
        if len(faster):
            which = ", ".join(
                f"{row['method_name']}{gamma_suffix(row['gamma'])} {row['speedup']:.2f} against "
                f"{row['layer']:.2f} (ideal {row['ideal']:.2f} against {row['layer_ideal']:.2f})"
                for _, row in faster.iterrows()
            )
            gained = f"the prefill gains more than its first layer: {which}."
            sources.notes.append(f"{run.run.title}: {gained}")
    if not parts:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    return pd.concat(parts)


@figure(
    "Figure 5", "Speedup of a whole prefill under expert parallelism ({kind})", of_prefills,
    words=_SPREAD, study="speedup", models=_DEPLOYED,
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
    return _bars(rows.drop(columns="ideal"), "method_name")


def of_granularities(sources: FigureStudies) -> pd.DataFrame:
    """Return speedups of a layer and a prefill with a capacity of each expert, or each device."""
    import pandas as pd

    sources.notes.extend([_PRINT_NOTE, *sources.repetitions()])
    parts = []
    for run, point in sources.first_points():
        printed = GRANULARITY if (run.run.model or "").startswith("Qwen3") else {}
        for part in ("layer", "prefill") if point.prefill else ("layer",):
            rows = _gains(
                sources,
                run,
                part,
                paper=lambda row, of=part, printed=printed: printed.get(
                    (row["granularity"], row["gamma"]), {}
                ).get(of),
            )
            if part == "prefill":
                rows["ideal"] = math.nan
            parts.append(rows)
    return pd.concat(parts)


@figure(
    "§5.2 (text)", "Speedup with a capacity of each expert or of each device ({kind})",
    of_granularities, words=_SPREAD, study="granularity",
)  # fmt: skip
def granularity(rows: pd.DataFrame) -> Figure:
    """Speedup of Expanded Drop over no capacity, of one MoE layer and of a prefill, when a capacity
    bounds each expert, or the sum over a device's; bars stand on 1. {spread} Line: the ideal. Star:
    the paper's, which compares γ=1.5 for experts with γ=1.0 for devices.
    """
    return _bars(rows.assign(bounds="capacity of each " + rows["granularity"]), "bounds")


def _bars(rows: pd.DataFrame, by: str) -> Figure:
    """Draw groups of bars by γ, with ideals, the layer's speedups, and what the paper prints."""
    groups = list(rows.groupby(["model", "part"], sort=False))
    canvas, (grid,) = d.canvas(d.PAGE, 2.55, 1, len(groups))
    for ((title, part), of_panel), axes in zip(groups, grid, strict=True):
        limited = of_panel.dropna(subset="gamma")
        gammas = sorted(limited["gamma"].unique(), reverse=True)
        names = d.places(limited[by])
        width = 0.8 / max(1, len(names))
        half, black = 0.46 * width, {"colors": d.BLACK}
        shift = (limited[by].map(names) - (len(names) - 1) / 2) * width
        places = limited["gamma"].map(gammas.index) + shift
        same = limited.assign(place=places, left=places - half, right=places + half)
        for name, index in names.items():
            # Bars stand on 1, dropless: the gain is seen.
            bars = same[same[by] == name]
            look = _LOOKS[index % len(_LOOKS)] | {"bottom": 1.0}
            axes.bar(bars["place"], bars["speedup"] - 1, 0.92 * width, **look, label=name)
        spread = same.dropna(subset="speedup_low")
        if len(spread):
            label = "lowest to highest repeated run"
            ends = spread["speedup_low"], spread["speedup_high"]
            axes.vlines(spread["place"], *ends, **black, linewidth=1.4, label=label)
        for column, label, look in (
            ("ideal", "ideal: fullest rank's pairs, before / after", {"linewidth": 1.1}),
            ("layer", "one MoE layer (fig4)", {"linewidth": 0.9, "linestyle": (0, (1, 1))}),
        ):
            if column in same and same[column].notna().any():
                ends = same["left"], same["right"]
                axes.hlines(same[column], *ends, **black, **look, label=label)
        printed = same.assign(paper=same["paper"].astype(float)).dropna(subset="paper")
        if len(printed):
            star = d.STAR | {"markerfacecolor": "white", "markeredgewidth": 0.6}
            d.line(axes, printed, "place", "paper", f"paper, {MACHINE}", **star)
        d.rule(axes, 1, width=0.6)
        d.name_places(axes, list(map(gamma_text, gammas)))
        axes.set_xlabel("capacity factor γ")
        axes.grid(False, axis="x")
        of_part = {"prefill": ", prefill", "layer": ", one MoE layer"}[part]
        parts = rows["part"].nunique() > 1
        axes.set_title(f"{title}{of_part if parts else ''}\n{_how(same.iloc[0])}", **_SMALL)
    grid[0].set_ylabel("speedup over dropless")
    _head(canvas, rows, 5)
    return canvas


def _head(canvas: Figure, rows: pd.DataFrame, columns: int) -> None:
    """Say above a figure how its numbers came about, and where it has no error bars.

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
        is_single = rows.dropna(subset="gamma")["speedup_low"].isna()
        if is_single.any():
            all_single = "; 1 run, no error bars"
            title += all_single if is_single.all() else "; no error bars where there was 1 run"
    colour = d.BLACK if title.startswith("measured") else d.VERMILLION
    canvas.suptitle(title, fontsize=7.5, fontweight="bold", color=colour)
    d.legend(canvas, columns)


def _how(row: pd.Series[Any]) -> str:
    """Return what must be known of a panel's run, in two lines."""
    return f"{row['measured']}, {_ranks(row)},\n{_widths(row)}, peak {row['peak']:.1f} × mean"


def _ranks(row: pd.Series[Any]) -> str:
    noun = "expert" if row["experts_per_rank"] == 1 else "experts"
    return f"{row['ranks']} ranks × {row['experts_per_rank']} {noun}"


def _widths(row: pd.Series[Any]) -> str:
    return "full widths" if row["scale"] == 1 else f"widths 1/{row['scale']:g}"


def by_peak(sources: FigureStudies) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and peak load."""
    import pandas as pd

    reached = "Share reached: of the ideal gain; none where the ideal is below 1.05."
    sources.notes.extend([*sources.repetitions(), _IDEAL_NOTE, reached])
    return _in_percent(
        pd.concat(
            _gains(sources, run, place=place)
            for run in sources.runs
            for place in range(len(run.run.points))
        ).sort_values("peak", kind="stable")
    )


@figure(
    "not in the paper", "Speedup by peak load, beside the ideal ({kind})", by_peak, words=_SPREAD,
    study="skew",
)  # fmt: skip
def skew(rows: pd.DataFrame) -> Figure:
    """Speedup of one MoE layer by the fullest expert's load over the mean, the ideal (dotted), and
    how much of the ideal gain was reached. {spread}
    """

    def title(first: pd.Series[Any]) -> str:
        return f"{first['measured']}, {_ranks(first)}, {_widths(first)}"

    canvas, grid = _lines(rows, "peak", title)
    for axes in grid[-1]:
        axes.set_xlabel("peak load of an expert / mean load")
    return canvas


def by_experts_per_rank(sources: FigureStudies) -> pd.DataFrame:
    """Return speedup, ideal and the share of it that is reached, by method, γ and placement."""
    import pandas as pd

    sources.notes.extend([*sources.repetitions(), _IDEAL_NOTE])
    runs = pd.concat(_gains(sources, run) for run in sources.runs)
    return _in_percent(runs.sort_values("experts_per_rank", kind="stable"))


@figure(
    "not in the paper", "Speedup by experts per rank ({kind})", by_experts_per_rank,
    words=_SPREAD, study="placement", runs="fullest",
)  # fmt: skip
def placement(rows: pd.DataFrame) -> Figure:
    """One model's experts over more or fewer ranks: speedup of one MoE layer, the ideal (dotted),
    and how much of the ideal gain was reached. The load of several experts on a rank evens out, and
    with it goes the gain (§5.1). {spread}
    """

    def title(first: pd.Series[Any]) -> str:
        return f"{first['measured']}, peak {first['peak']:.1f} × mean, {_widths(first)}"

    canvas, grid = _lines(rows, "experts_per_rank", title)
    for (_, same), sides in zip(d.each(rows, "model"), grid, strict=True):
        ranks = same.drop_duplicates("experts_per_rank")
        names = [f"{row['experts_per_rank']} ({row['ranks']})" for _, row in ranks.iterrows()]
        for axes in sides:
            axes.set_xscale("log")
            axes.set_xticks(ranks["experts_per_rank"], names)
            axes.minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel("experts per rank (ranks)")
    return canvas


def _in_percent(rows: pd.DataFrame) -> pd.DataFrame:
    reached = 100 * rows.pop("reached").astype(float)
    return rows.assign(reached_percent=reached).dropna(subset="gamma")


def _lines(
    rows: pd.DataFrame, x: str, title: Callable[[pd.Series[Any]], str]
) -> tuple[Figure, Any]:
    """Draw speedup beside the ideal, and how much of its gain is reached, a row for each model."""
    models = list(d.each(rows, "model"))
    canvas, grid = d.canvas(d.PAGE, 1.9 * len(models) + 0.6, len(models), 2)
    for (model, of_model), (left, right) in zip(models, grid, strict=True):
        lines = of_model.groupby(["method", "gamma", "together"], sort=False)
        for index, ((method, gamma, together), same) in enumerate(lines):
            look = d.line_look(index) | {"linestyle": d.DASHES[index % 3]}
            spread = ", popular experts on one rank" if together else ""
            name = f"{method_title(method)}{spread}{gamma_suffix(gamma, ', γ = ')}"
            d.line(left, same, x, "speedup", name, **look)
            dotted = look | {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "white"}
            d.line(left, same, x, "ideal", **dotted)
            d.line(right, same.dropna(subset="reached_percent"), x, "reached_percent", **look)
        left.plot([], [], color=d.BLACK, linestyle=":", label="ideal, same colour and marker")
        d.rule(left, 1, width=0.6)
        d.rule(right, 100, width=0.6)
        left.set_title(f"{model}: {title(of_model.iloc[0])}", **_SMALL)
        left.set_ylabel("speedup over dropless")
        right.set_title("how much of it was reached", **_SMALL)
        right.set_ylabel("share of the ideal gain (%)")
        if not (of_model["reached_percent"] < 0).any():
            right.set_ylim(0, None)
    _head(canvas, rows, 3)
    return canvas, grid


def phases_of_layers(sources: FigureStudies) -> pd.DataFrame:
    """Return milliseconds of the phases of one layer, dropless first, then by falling γ."""
    import pandas as pd

    sources.notes.append(published_note("figure6"))
    rows: list[dict[str, Any]] = []
    for run, point in sources.first_points():
        tightest_last = sorted(
            point.timings, key=lambda row: -(row.label.gamma or 0.0) if row.label else -math.inf
        )
        about = _deployment(run, point)
        for row in tightest_last:
            label = row.label
            method = {
                "method": method_name(label) if label else _DROPLESS,
                "gamma": label.gamma if label else math.nan,
            }
            for phase, ms in _parts(row).items():
                rows.append(about | method | {"phase": phase, "ms": ms})
            total = row.seconds["total"]
            quartiles = {"ms_low": 1e3 * total.low, "ms_high": 1e3 * total.high}
            whole = {"phase": _WHOLE, "ms": 1e3 * total.median} | quartiles
            rows.append(about | method | whole)
    return pd.DataFrame(rows)


def _parts(row: Timing) -> dict[str, float]:
    """Return the medians of a layer's phases in milliseconds, as drawn."""
    rest = {name: 1e3 * spread.median for name, spread in row.seconds.items() if name != "total"}
    parts = {
        part: sum(rest.pop(name, 0.0) for name in names) for part, (names, _) in _PHASES.items()
    }
    return parts | {"other": sum(rest.values())}


@figure(
    "Figure 6", "Where the time of an MoE layer goes ({kind})", phases_of_layers, study="breakdown"
)
def fig6(rows: pd.DataFrame) -> Figure:
    """Milliseconds of each phase of one MoE layer on the slowest rank, medians, without a capacity
    and by γ. Gate: router and decision; all-to-all: there and back. Diamond: the whole layer, with
    quartiles; medians of phases sum to its median only nearly. Global expansion adds experts of all
    ranks.
    """
    models = list(d.each(rows, "model"))
    canvas, grid = d.canvas(d.PAGE, 2.7 * len(models), len(models))
    for (title, of_model), (axes,) in zip(models, grid, strict=True):
        whole = of_model[of_model["phase"] == _WHOLE]
        # Bars of one γ stand together.
        gammas = whole["gamma"].tolist()
        steps = [0.0, *(1.0 if a == b else 1.6 for a, b in itertools.pairwise(gammas))]
        whole = whole.assign(place=steps).assign(place=lambda rows: rows["place"].cumsum())
        below: Any = 0.0
        for phase, (_, look) in _PHASES.items():
            heights = of_model.loc[of_model["phase"] == phase, "ms"].to_numpy()
            if heights.any():
                axes.bar(whole["place"], heights, 0.8, below, **look, label=phase)
                below = below + heights
        look = {"color": d.BLACK, "marker": "D", "linestyle": "", "markersize": 3}
        d.line(axes, whole, "place", "ms", _WHOLE, **look, markerfacecolor="white")
        top = max(*below, *whole["ms_high"])
        for gamma, same in whole.dropna(subset="gamma").groupby("gamma", sort=False):
            at = same["place"].mean(), 1.04 * top
            axes.annotate(gamma_suffix(gamma, "γ = "), at, ha="center")
        d.name_places(axes, [_SHORT.get(name, name) for name in whole["method"]], whole["place"])
        axes.set(ylabel="ms", ylim=(0, 1.14 * top))
        axes.set_title(f"{title}: {_how(whole.iloc[0])}".replace("\n", " "), **_SMALL)
        axes.grid(False, axis="x")
    _head(canvas, rows, 7)
    return canvas
