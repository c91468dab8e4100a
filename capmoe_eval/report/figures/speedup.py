"""Speedup over dropless routing: Figure 4 (a layer), 5 (a model), granularity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.paper.benchmarks import Shown
from capmoe_eval.paper.printed import GRANULARITY, MACHINE, layer_speedup, model_speedup
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.studies import (
    FigureStudies,
    about,
    bar,
    capacity_rows,
    first_point,
)
from capmoe_eval.report.figures.style import BLACK, column, whiskers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from capmoe_eval.experiment.timings.schema import Timing

_LOOKS: Final = (
    (style.BLUE, style.HATCHES[0]),
    (style.SKY, style.HATCHES[1]),
    (style.ORANGE, style.HATCHES[2]),
    (style.VERMILLION, ""),
)
_STAR: Final[Numbers] = {"markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 0.6}
PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)


def measure_layer(evidence: FigureStudies) -> Measured:
    """Figure 4: the speedup of one MoE layer of each model."""
    panels, notes = [], [PRINT_NOTE]
    for one in evidence.shown:
        point = first_point(one, notes)
        bars = [
            bar(label, row)
            | {"published": layer_speedup(one.run.model, label.name, label.gamma), "layer": None}
            for label, row in capacity_rows(point.timings)
        ]
        panels.append(about(one, point) | {"bars": bars})
    return evidence.measured(panels, notes)


def measure_model(evidence: FigureStudies) -> Measured:
    """Figure 5: the speedup of a prefill, beside that of one layer.

    Raises:
        UsageError: If no run timed a prefill.
    """
    panels, notes = [], [PRINT_NOTE]
    for one in evidence.shown:
        point = first_point(one, notes)
        if point.prefill is None:
            notes.append(f"{one.run.title}: its run has no prefill.")
            continue
        layers = {row.method: row.speedup.median for row in point.timings}
        experts = one.run.experts_per_rank
        bars = [
            bar(label, row)
            | {
                # The ideal is of the experts' time alone, not of what lies between the layers.
                "ideal": None,
                "layer": layers.get(row.method),
                "published": model_speedup(one.run.model, label.name, label.gamma, experts),
            }
            for label, row in capacity_rows(point.prefill.timings)
        ]
        panels.append(about(one, point) | {"layers": point.prefill.layers, "bars": bars})
    if not panels:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    return evidence.measured(panels, notes)


def measure_granularity(evidence: FigureStudies) -> Measured:
    """Expanded Drop with a capacity of each expert, or of each device: a layer, and a prefill."""
    panels, notes = [], [PRINT_NOTE]
    for one in evidence.shown:
        point = first_point(one, notes)
        parts: list[tuple[str, Sequence[Timing]]] = [("layer", point.timings)]
        if point.prefill is not None:
            parts.append(("prefill", point.prefill.timings))
        for part, timings in parts:
            bars = [
                bar(label, row)
                | {
                    "name": f"capacity of each {label.granularity}",
                    "ideal": row.ideal_rank if part == "layer" else None,
                    "layer": None,
                    "published": _granular(one, label.granularity, label.gamma, part),
                }
                for label, row in capacity_rows(timings)
            ]
            panels.append(about(one, point) | {"part": part, "bars": bars})
    return evidence.measured(panels, notes)


def _granular(one: Shown, granularity: str, gamma: float | None, part: str) -> float | None:
    if not (one.run.model or "").startswith("Qwen3") or gamma is None:
        return None
    return GRANULARITY.get((granularity, gamma), {}).get(part)


def draw_speedup(numbers: Numbers) -> Figure:
    """Draw Figure 4 or 5: a panel for each model, groups by γ, bars by method."""
    return _draw(numbers, [panel["model"] for panel in numbers["panels"]])


def draw_granularity(numbers: Numbers) -> Figure:
    """Draw one layer and a prefill by granularity."""
    parts = {"layer": "one MoE layer", "prefill": "prefill"}
    return _draw(numbers, [f"{p['model']}, {parts[p['part']]}" for p in numbers["panels"]])


def _draw(numbers: Numbers, titles: Sequence[str]) -> Figure:
    panels = numbers["panels"]
    figure = style.new_figure(style.PAGE, 2.55)
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, axis, title in zip(panels, axes, titles, strict=True):
        _bars(axis, panel["bars"])
        axis.set_title(f"{title}\n{subtitle(panel)}", fontsize=6.5)
        axis.set_xlabel("capacity factor γ")
    axes[0].set_ylabel("speedup over dropless")
    style.legend_below(figure, *axes, columns=5)
    headline(figure, numbers["kind"])
    return figure


def headline(figure: Figure, kind: str) -> None:
    """Say over a figure how its numbers came about."""
    said = {
        "EMULATED": "EMULATED on one device: the slowest rank counts, the all-to-all is a formula",
        "partly EMULATED": "partly EMULATED: see each panel",
        "measured": "measured on real ranks",
    }[kind]
    colour = BLACK if kind == "measured" else style.VERMILLION
    figure.suptitle(said, fontsize=7.5, fontweight="bold", color=colour)


def subtitle(panel: Mapping[str, Any]) -> str:
    """Return what must be known of a panel's run, in two lines."""
    how = "EMULATED" if panel["kind"] == "emulated" else "measured"
    return f"{how}, {panel['deployment']},\n{panel['widths']}, peak {panel['peak']:.1f} × mean"


def _bars(axis: Axes, bars: Sequence[Mapping[str, Any]]) -> None:
    gammas = sorted({b["gamma"] for b in bars if b["gamma"] is not None}, reverse=True)
    names = list(dict.fromkeys(b["name"] for b in bars))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        own = [b for b in bars if b["name"] == name and b["gamma"] is not None]
        places = [gammas.index(b["gamma"]) + (index - (len(names) - 1) / 2) * width for b in own]
        axis.bar(
            places,
            [b["speedup"] - 1 for b in own],  # bars stand on 1, dropless: what is seen is the gain
            0.92 * width,
            bottom=1,
            **style.bar_look(*_LOOKS[index % len(_LOOKS)]),
            yerr=whiskers(*(column(own, key) for key in ("speedup", "low", "high"))),
            error_kw={"elinewidth": 0.7, "capsize": 1.5},
            label=name,
        )
        for place, b in zip(places, own, strict=True):
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
    axis.set_xticks(range(len(gammas)), list(map(gamma_number, gammas)))
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y")
