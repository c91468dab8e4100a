"""Expert parallelism: speedup of a layer and a prefill, by load and placement; phases (fig6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.paper.benchmarks import Shown
from capmoe_eval.paper.printed import (
    GRANULARITY,
    MACHINE,
    layer_speedup,
    model_speedup,
    published_note,
)
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.pooling import by_key
from capmoe_eval.report.figures.shapes import name_bars, within
from capmoe_eval.report.figures.studies import FigureStudies, about, method_name
from capmoe_eval.report.figures.style import BLACK, column, percent

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Timing

_LOOKS: Final = (
    style.bar_look(style.BLUE),
    style.bar_look(style.SKY, "////"),
    style.bar_look(style.ORANGE, "...."),
    style.bar_look(style.VERMILLION),
)
_STAR: Final[Numbers] = {"markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 0.6}
_PARTS: Final = {"layer": ", one MoE layer", "prefill": ", prefill"}
_PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)
_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs."
)
_BAR_PARTS: Final = {  # of a bar: the measured phases that each is the sum of, and how it looks
    "gate": (("gate", "decide"), style.bar_look(style.ORANGE, "....")),
    "permute": (("permute",), style.bar_look(style.SKY, "////")),
    "all-to-all": (("dispatch", "return"), style.bar_look(style.VERMILLION, "xxxx")),
    "experts": (("experts",), style.bar_look(style.BLUE)),
    "combine": (("combine",), style.bar_look(style.GREEN, "\\\\\\\\")),
    "shared": (("shared",), style.bar_look(style.PURPLE, "++++")),
    "other": ((), style.bar_look(style.GREY)),
}
_SHORT: Final = {
    method_title("score"): "Token\nDrop",
    method_title("expanded_drop"): "Exp.\nlocal",
    f"{method_title('expanded_drop')} (global)": "Exp.\nglobal",
}


def measure_layer(evidence: FigureStudies) -> Measured:
    """Collect the speedup of one MoE layer of each model, for Figure 4."""
    panels, notes = [], [_PRINT_NOTE, *evidence.repetitions()]
    for one, point in evidence.first_points(notes):
        bars = evidence.bars(one)
        for bar in bars:
            bar["published"] = layer_speedup(one.run.model, bar["method"], bar["gamma"])
            bar["layer"] = None
        panels.append(about(one, point) | {"bars": bars})
    return evidence.measured(panels, notes)


def measure_model(evidence: FigureStudies) -> Measured:
    """Collect the speedup of a prefill beside one layer's, for Figure 5; UsageError without any."""
    panels, notes = [], [_PRINT_NOTE, *evidence.repetitions()]
    for one, point in evidence.first_points(notes):
        if point.prefill is None:
            notes.append(f"{one.run.title}: its run has no prefill.")
            continue
        layers = {(bar["name"], bar["gamma"]): bar for bar in evidence.bars(one)}
        bars, faster = evidence.bars(one, "prefill"), []
        for bar in bars:
            method, gamma, gain = bar["method"], bar["gamma"], bar["speedup"]
            layer = layers.get((bar["name"], gamma))
            if layer and gain > max(1.0, layer["speedup"]):
                faster.append(
                    f"{bar['name']}{gamma_suffix(gamma)} {gain:.2f} against {layer['speedup']:.2f} "
                    f"(ideal {bar['ideal']:.2f} against {layer['ideal']:.2f})"
                )
            # The ideal is of the experts' time alone, not of what lies between the layers.
            bar["ideal"] = None
            bar["layer"] = layer["speedup"] if layer else None
            experts = one.run.experts_per_rank
            bar["published"] = model_speedup(one.run.model, method, gamma, experts)
        if faster:
            said = f"the prefill gains more than its first layer: {', '.join(faster)}."
            notes.append(f"{one.run.title}: {said}")
        panels.append(about(one, point) | {"layers": point.prefill.layers, "bars": bars})
    if not panels:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    return evidence.measured(panels, notes)


def measure_granularity(evidence: FigureStudies) -> Measured:
    """Collect speedups of a layer and a prefill with a capacity of each expert, or each device."""
    panels, notes = [], [_PRINT_NOTE, *evidence.repetitions()]
    for one, point in evidence.first_points(notes):
        printed = GRANULARITY if (one.run.model or "").startswith("Qwen3") else {}
        for part in ("layer", "prefill") if point.prefill else ("layer",):
            bars = evidence.bars(one, part)
            for bar in bars:
                bounded = bar["granularity"]
                bar["name"] = f"capacity of each {bounded}"
                bar["ideal"] = bar["ideal"] if part == "layer" else None
                bar["layer"] = None
                bar["published"] = printed.get((bounded, bar["gamma"]), {}).get(part)
            panels.append(about(one, point) | {"part": part, "bars": bars})
    return evidence.measured(panels, notes)


def draw_bars(numbers: Numbers) -> Figure:
    """Draw a panel for each model (and part), groups by γ, bars by method or granularity."""
    panels = numbers["panels"]
    figure, grid = style.subplots(style.PAGE, 2.55, 1, len(panels), squeeze=False)
    axes: Sequence[Axes] = grid[0]
    for panel, axis in zip(panels, axes, strict=True):
        _bars(axis, panel["bars"])
        part = _PARTS[panel["part"]] if "part" in panel else ""
        axis.set_title(f"{panel['model']}{part}\n{_subtitle(panel)}", fontsize=6.5)
        axis.set_xlabel("capacity factor γ")
    axes[0].set_ylabel("speedup over dropless")
    style.legend_below(figure, *axes, columns=5)
    bars = [bar for panel in panels for bar in panel["bars"] if bar["gamma"] is not None]
    _headline(figure, numbers["kind"], bars)
    return figure


def _bars(axis: Axes, bars: Sequence[Numbers]) -> None:
    gammas = sorted({b["gamma"] for b in bars if b["gamma"] is not None}, reverse=True)
    names = list(dict.fromkeys(column(bars, "name")))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        own = [b for b in bars if b["name"] == name and b["gamma"] is not None]
        places = [gammas.index(b["gamma"]) + (index - (len(names) - 1) / 2) * width for b in own]
        gains = [b["speedup"] - 1 for b in own]  # bars stand on 1, dropless: the gain is seen
        axis.bar(places, gains, 0.92 * width, bottom=1, **_LOOKS[index % len(_LOOKS)], label=name)
        for place, b in zip(places, own, strict=True):
            if b["low"] is not None:
                label = "lowest to highest repeated run"
                axis.vlines(place, b["low"], b["high"], BLACK, linewidth=1.4, label=label)
            ends = place - 0.46 * width, place + 0.46 * width
            if b["ideal"] is not None:
                label = "ideal: fullest rank's pairs, before / after"
                axis.hlines(b["ideal"], *ends, BLACK, linewidth=1.1, label=label)
            if b["layer"] is not None:
                dots: Any = (0, (1, 1))
                label = "one MoE layer (fig4)"
                axis.hlines(b["layer"], *ends, BLACK, linestyle=dots, linewidth=0.9, label=label)
            if b["published"] is not None:
                label = f"paper, {MACHINE}"
                axis.plot(place, b["published"], "*", color=BLACK, **_STAR, label=label)
    axis.axhline(1, color=BLACK, linewidth=0.6)
    name_bars(axis, range(len(gammas)), list(map(gamma_text, gammas)))


def _headline(figure: Figure, kind: str, rows: Sequence[Numbers] = ()) -> None:
    """Say over a figure how its numbers came about, and where no error bars tell their spread.

    Quartiles over the rounds of one run are none: they do not say how far a repetition differs.
    """
    said = {
        "EMULATED": "EMULATED on one device: the slowest rank counts, the all-to-all is a formula",
        "partly EMULATED": "partly EMULATED: see each panel",
        "measured": "measured on real ranks",
    }[kind]
    once = [row for row in rows if row["low"] is None]
    if once:
        every = len(once) == len(rows)
        said += "; 1 run, no error bars" if every else "; no error bars where there was 1 run"
    colour = BLACK if kind == "measured" else style.VERMILLION
    figure.suptitle(said, fontsize=7.5, fontweight="bold", color=colour)


def _subtitle(panel: Numbers) -> str:
    """Return what must be known of a panel's run, in two lines."""
    run = f"{_how(panel)}, {panel['deployment']}"
    return f"{run},\n{panel['widths']}, peak {panel['peak']:.1f} × mean"


def _how(panel: Numbers) -> str:
    return "EMULATED" if panel["kind"] == "emulated" else "measured"


def measure_skew(evidence: FigureStudies) -> Measured:
    """Return speedup and ideal by peak load, a line for each method, γ and placement."""
    panels = []
    for one in evidence.shown:
        points = one.run.points
        lines = _lines(evidence, [(p.routing.peak, one, place) for place, p in enumerate(points)])
        panels.append(about(one, points[0]) | {"lines": lines})
    reached = "Share reached: of the ideal gain; none where the ideal is below 1.05."
    return evidence.measured(panels, (*evidence.repetitions(), _IDEAL_NOTE, reached))


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
        panel["lines"] = _lines(evidence, [(float(o.run.experts_per_rank), o, 0) for o in runs])
        panels.append(panel)
    return evidence.measured(panels, (*evidence.repetitions(), _IDEAL_NOTE))


def _lines(evidence: FigureStudies, found: Iterable[tuple[float, Shown, int]]) -> list[Numbers]:
    """Return one line for each method and γ, its points in the order of what they vary with."""
    lines: dict[str, Numbers] = {}
    for x, one, place in sorted(found, key=lambda item: item[0]):
        together = one.run.points[place].routing.together
        for bar in evidence.bars(one, place=place):
            name = bar["name"]
            if bar["gamma"]:
                spread = ", popular experts on one rank" if together else ""
                name += spread + gamma_suffix(bar["gamma"], ", γ = ")
            kind = {key: bar[key] for key in ("method", "gamma", "granularity", "candidates")}
            new = {"name": name, "together": together, "points": [], **kind}
            shown = ("speedup", "low", "high", "ideal", "reached", "dropped_share")
            point = {"x": x} | {key: bar[key] for key in shown}
            lines.setdefault(name, new)["points"].append(point)
    return list(lines.values())


def draw_lines(numbers: Numbers) -> Figure:
    """Draw speedup beside the ideal, and the share of the gain that is reached.

    Across is the peak load, or the number of experts per rank where panels have placements.
    """
    panels = numbers["panels"]
    is_placed = "placements" in panels[0]
    across = "experts per rank (ranks)" if is_placed else "peak load of an expert / mean load"
    shared: Numbers = {"subplot_kw": {"xscale": "log" if is_placed else "linear"}, "squeeze": False}
    height = 1.9 * len(panels) + 0.6
    figure, grid = style.subplots(style.PAGE, height, len(panels), 2, **shared)
    for panel, (left, right) in zip(panels, grid, strict=True):
        for index, line in enumerate(panel["lines"]):
            points, look = line["points"], style.line_look(index)
            look |= {"linestyle": style.DASHES[index % 3]}
            thin = look | {"elinewidth": 0.7, "capsize": 1.5, "label": line["name"]}
            left.errorbar(column(points, "x"), *within(points, "speedup"), **thin)
            dotted = look | {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "white"}
            left.plot(column(points, "x"), column(points, "ideal"), **dotted)
            known = [point for point in points if point["reached"] is not None]
            right.plot(column(known, "x"), percent(column(known, "reached")), **look)
        if panel["lines"]:
            left.plot([], [], color=BLACK, linestyle=":", label="ideal, same colour and marker")
        left.axhline(1, color=BLACK, linewidth=0.6)
        right.axhline(100, color=BLACK, linewidth=0.6)
        right.set_ylim(bottom=min(0, right.get_ylim()[0]))
        left.set_ylabel("speedup over dropless")
        right.set_ylabel("share of the ideal gain (%)")
        where = panel.get("deployment") or f"peak {panel['peak']:.1f} × mean"
        left.set_title(f"{panel['model']}: {_how(panel)}, {where}, {panel['widths']}", fontsize=6.5)
        right.set_title("how much of it was reached", fontsize=6.5)
        placed = {p["experts_per_rank"]: p["ranks"] for p in panel.get("placements", ())}
        for axis in (left, right):
            axis.grid()
            if is_placed:
                axis.set_xticks(list(placed), [f"{e} ({ranks})" for e, ranks in placed.items()])
                axis.minorticks_off()
    for axis in grid[-1]:
        axis.set_xlabel(across)
    style.legend_below(figure, *grid[:, 0], columns=3)
    points = [point for panel in panels for line in panel["lines"] for point in line["points"]]
    _headline(figure, numbers["kind"], points)
    return figure


def measure_phases(evidence: FigureStudies) -> Measured:
    """Collect the phases of one layer, in milliseconds, by method and γ, for Figure 6."""
    panels, notes = [], [published_note("figure6")]
    for one, point in evidence.first_points(notes):
        tightest_last = sorted(
            point.timings, key=lambda row: -(row.label.gamma or 0.0) if row.label else -math.inf
        )
        panels.append(about(one, point) | {"bars": [_phases(row) for row in tightest_last]})
    return evidence.measured(panels, notes)


def _phases(row: Timing) -> Numbers:
    """Return a row with the medians of its phases, as measured and as drawn, and of the total."""
    label, total = row.label, row.seconds["total"]
    phases = {name: 1e3 * spread.median for name, spread in row.seconds.items() if name != "total"}
    rest = dict(phases)
    parts = {
        part: sum(rest.pop(name, 0.0) for name in names)
        for part, (names, _) in _BAR_PARTS.items()
        if names
    }
    if other := sum(rest.values()):
        parts["other"] = other
    return {
        "method": label.name if label else row.method,
        "name": method_name(label) if label else "Dropless",
        "gamma": label.gamma if label else None,
        "candidates": label.candidates if label else None,
        "dropped_share": row.load.dropped_share,
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
        axis.set_title(f"{panel['model']}: {_subtitle(panel)}".replace("\n", " "), fontsize=6.5)
    style.legend_below(figure, *grid.flat, columns=7)
    _headline(figure, numbers["kind"])
    return figure


def _stack(axis: Axes, bars: Sequence[Numbers]) -> None:
    gammas = column(bars, "gamma")
    places = [0.0]
    for gamma, before in zip(gammas[1:], gammas, strict=False):
        places.append(places[-1] + (1.0 if gamma == before else 1.6))
    bottoms = [0.0] * len(bars)
    for part, (_, look) in _BAR_PARTS.items():
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
