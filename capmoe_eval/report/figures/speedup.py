"""Expert parallelism: speedup of a layer and a prefill, by load and placement; phases (fig6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.experiment.timings.schema import Timing
from capmoe_eval.paper.benchmarks import ShownRun
from capmoe_eval.paper.printed import (
    GRANULARITY,
    MACHINE,
    layer_speedup,
    model_speedup,
    published_note,
)
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.pooling import by_key
from capmoe_eval.report.figures.studies import FigureStudies, Gain, method_name

_LOOKS: Final = (
    p.bar_look(p.BLUE),
    p.bar_look(p.SKY, "////"),
    p.bar_look(p.ORANGE, "...."),
    p.bar_look(p.VERMILLION),
)
_STAR: Final[p.Look] = {"marker": "*", "linestyle": "", "color": p.BLACK, "markersize": 5.5}
_HOLLOW: Final[p.Look] = {"markerfacecolor": "white", "markeredgewidth": 0.6}
_ONE: Final = p.rule(1, width=0.6)
_SMALL: Final = {"fontsize": 6.5}
_STROKE: Final = {"colors": p.BLACK, "linewidth": 0.9}
_PRINT_NOTE: Final = (
    f"Stars: what the paper prints, measured on {MACHINE} with other code. No emulation and no "
    "other machine can confirm these values; the direction and the order can be compared."
)
_IDEAL_NOTE: Final = (
    "Ideal: pairs of the fullest rank without a capacity over those with one, which a layer would "
    "gain if nothing but its experts took time, and theirs in proportion to pairs."
)
_PHASES: Final = {  # of a bar: the measured phases that each is the sum of, and how it looks
    "gate": (("gate", "decide"), p.bar_look(p.ORANGE, "....")),
    "permute": (("permute",), p.bar_look(p.SKY, "////")),
    "all-to-all": (("dispatch", "return"), p.bar_look(p.VERMILLION, "xxxx")),
    "experts": (("experts",), p.bar_look(p.BLUE)),
    "combine": (("combine",), p.bar_look(p.GREEN, "\\\\\\\\")),
    "shared": (("shared",), p.bar_look(p.PURPLE, "++++")),
    "other": ((), p.bar_look(p.GREY)),
}
_SHORT: Final = {
    method_title("score"): "Token\nDrop",
    method_title("expanded_drop"): "Exp.\nlocal",
    f"{method_title('expanded_drop')} (global)": "Exp.\nglobal",
}


def layer(evidence: FigureStudies) -> p.Picture:
    """Return Figure 4: the speedup of one MoE layer of each model."""
    notes = [_PRINT_NOTE, *evidence.repetitions()]
    panels = []
    for run, _ in evidence.first_points(notes):
        gains = evidence.gains(run)
        stars = [layer_speedup(run.run.model, gain.method, gain.gamma) for gain in gains]
        panels.append(_bars(run, "", gains, stars, ideal=True))
    return _in_one_row(evidence, panels, notes)


def model(evidence: FigureStudies) -> p.Picture:
    """Return Figure 5: the speedup of a prefill beside one layer's; UsageError without any."""
    notes = [_PRINT_NOTE, *evidence.repetitions()]
    panels = []
    for run, point in evidence.first_points(notes):
        if point.prefill is None:
            notes.append(f"{run.run.title}: its run has no prefill.")
            continue
        layers = {(gain.name, gain.gamma): gain for gain in evidence.gains(run)}
        gains = evidence.gains(run, "prefill")
        faster = [
            f"{gain.name}{gamma_suffix(gain.gamma)} {gain.speedup:.2f} against "
            f"{of_layer.speedup:.2f} (ideal {gain.ideal:.2f} against {of_layer.ideal:.2f})"
            for gain in gains
            if (of_layer := layers.get((gain.name, gain.gamma)))
            and gain.speedup > max(1.0, of_layer.speedup)
        ]
        if faster:
            gained = f"the prefill gains more than its first layer: {', '.join(faster)}."
            notes.append(f"{run.run.title}: {gained}")
        experts = run.run.experts_per_rank
        stars = [model_speedup(run.run.model, g.method, g.gamma, experts) for g in gains]
        beside = [layers.get((gain.name, gain.gamma)) for gain in gains]
        # The ideal is of the experts' time alone, not of what lies between the layers.
        panels.append(_bars(run, "", gains, stars, beside))
    if not panels:
        raise UsageError("fig5: no run of study speedup has a prefill; measure it with prefill")
    return _in_one_row(evidence, panels, notes)


def granularity(evidence: FigureStudies) -> p.Picture:
    """Return speedups of a layer and a prefill with a capacity of each expert, or each device."""
    notes = [_PRINT_NOTE, *evidence.repetitions()]
    panels = []
    for run, point in evidence.first_points(notes):
        printed = GRANULARITY if (run.run.model or "").startswith("Qwen3") else {}
        for part, title in (("layer", ", one MoE layer"), ("prefill", ", prefill")):
            if part == "layer" or point.prefill:
                gains = [
                    gain._replace(name=f"capacity of each {gain.granularity}")
                    for gain in evidence.gains(run, part)
                ]
                stars = [printed.get((g.granularity, g.gamma or 0.0), {}).get(part) for g in gains]
                panels.append(_bars(run, title, gains, stars, ideal=part == "layer"))
    return _in_one_row(evidence, panels, notes)


def _in_one_row(
    evidence: FigureStudies, panels: Sequence[tuple[p.Panel, Sequence[Gain]]], notes: Sequence[str]
) -> p.Picture:
    """Return a picture of bars, with what must be known of all above it."""
    first, *others = (panel for panel, _ in panels)
    row = [replace(first, y=p.Axis("speedup over dropless")), *others]
    gains = [gain for _, panel_gains in panels for gain in panel_gains if gain.gamma is not None]
    return replace(_titled(evidence, gains), rows=[row], notes=notes, height=2.55)


def _bars(
    run: ShownRun,
    part: str,
    gains: Sequence[Gain],
    stars: Sequence[float | None],
    layers: Sequence[Gain | None] = (),
    *,
    ideal: bool = False,
) -> tuple[p.Panel, Sequence[Gain]]:
    """Return groups of bars by γ, with ideals, the layer's speedups, and what the paper prints."""
    gammas = sorted({gain.gamma for gain in gains if gain.gamma is not None}, reverse=True)
    names = list(dict.fromkeys(gain.name for gain in gains))
    width = 0.8 / max(1, len(names))
    half = 0.46 * width
    marks: list[p.Mark] = []
    for index, name in enumerate(names):
        bars = [
            (gammas.index(gain.gamma) + (index - (len(names) - 1) / 2) * width, gain, star, beside)
            for gain, star, beside in zip(gains, stars, layers or [None] * len(gains), strict=True)
            if gain.name == name and gain.gamma is not None
        ]
        places, tops = [place for place, *_ in bars], [gain.speedup for _, gain, *_ in bars]
        # p.Bars stand on 1, dropless: the gain is seen.
        look = _LOOKS[index % len(_LOOKS)]
        marks.append(p.Bars(name, places, tops, 0.92 * width, 1.0, look=look))
        for place, gain, star, beside in bars:
            ends = [place - half], [place + half]
            if gain.low is not None and gain.high is not None:
                label = "lowest to highest repeated run"
                look = _STROKE | {"linewidth": 1.4}
                marks.append(p.Strokes(label, [gain.low], [gain.high], x=[place], look=look))
            if ideal and gain.ideal is not None:
                label = "ideal: fullest rank's pairs, before / after"
                look = _STROKE | {"linewidth": 1.1}
                marks.append(p.Strokes(label, *ends, y=[gain.ideal], look=look))
            if beside is not None:
                look = _STROKE | {"linestyle": (0, (1, 1))}
                marks.append(
                    p.Strokes("one MoE layer (fig4)", *ends, y=[beside.speedup], look=look)
                )
            if star is not None:
                marks.append(p.Curve(f"paper, {MACHINE}", [place], [star], look=_STAR | _HOLLOW))
    across = p.Axis(
        "capacity factor γ", range(len(gammas)), list(map(gamma_text, gammas)), is_bare=True
    )
    title = f"{run.run.title}{part}\n{_subtitle(run)}"
    return p.Panel(title, [*marks, _ONE], across, look={"grid": "y", "title": _SMALL}), gains


def _titled(evidence: FigureStudies, gains: Iterable[Gain] = (), legend: int = 5) -> p.Picture:
    """Return an empty picture that says how its numbers came about, and where it has no error bars.

    Quartiles over the rounds of one run are none: they do not say how far a repetition differs.
    """
    kind = evidence.names["kind"]
    title = {
        "EMULATED": "EMULATED on one device: the slowest rank counts, the all-to-all is a formula",
        "partly EMULATED": "partly EMULATED: see each panel",
        "measured": "measured on real ranks",
    }[kind]
    is_single = [gain.low is None for gain in gains]
    if any(is_single):
        all_single = "; 1 run, no error bars"
        title += all_single if all(is_single) else "; no error bars where there was 1 run"
    colour = p.BLACK if kind == "measured" else p.VERMILLION
    look = {"fontsize": 7.5, "fontweight": "bold", "color": colour}
    return p.Picture([], title=title, look={"legend": legend, "title": look})


def _subtitle(run: ShownRun) -> str:
    """Return what must be known of a panel's run, in two lines."""
    peak = run.run.points[0].routing.peak
    return f"{_how(run)}, {run.ranks},\n{run.widths}, peak {peak:.1f} × mean"


def _how(run: ShownRun) -> str:
    return "EMULATED" if run.study.kind == "emulated" else "measured"


def skew(evidence: FigureStudies) -> p.Picture:
    """Return speedup and ideal by peak load, a line for each method, γ and placement."""
    label = "peak load of an expert / mean load"
    rows, gains = [], []
    for run in evidence.runs:
        varied = [(point.routing.peak, run, place) for place, point in enumerate(run.run.points)]
        title = f"{run.run.title}: {_how(run)}, {run.ranks}, {run.widths}"
        row, row_gains = _lines(evidence, title, varied, p.Axis())
        rows.append(row)
        gains += row_gains
    reached = "Share reached: of the ideal gain; none where the ideal is below 1.05."
    return _in_rows(evidence, rows, gains, label, [_IDEAL_NOTE, reached])


def placement(evidence: FigureStudies) -> p.Picture:
    """Return speedup and ideal by experts per rank, for each model."""
    rows, gains = [], []
    for runs in by_key(evidence.runs, lambda run: run.run.title).values():
        rising = sorted(runs, key=lambda run: run.run.experts_per_rank)
        experts = [run.run.experts_per_rank for run in rising]
        names = [f"{run.run.experts_per_rank} ({run.run.ranks})" for run in rising]
        first = runs[0]
        peak = first.run.points[0].routing.peak
        title = f"{first.run.title}: {_how(first)}, peak {peak:.1f} × mean, {first.widths}"
        varied = [(float(run.run.experts_per_rank), run, 0) for run in rising]
        across = p.Axis("", experts, names, is_log=True)
        row, row_gains = _lines(evidence, title, varied, across)
        rows.append(row)
        gains += row_gains
    return _in_rows(evidence, rows, gains, "experts per rank (ranks)", [_IDEAL_NOTE])


def _in_rows(
    evidence: FigureStudies,
    rows: list[list[p.Panel]],
    gains: Sequence[Gain],
    label: str,
    notes: Sequence[str],
) -> p.Picture:
    rows[-1] = [replace(panel, x=replace(panel.x, label=label)) for panel in rows[-1]]
    height = 1.9 * len(rows) + 0.6
    notes = [*evidence.repetitions(), *notes]
    return replace(_titled(evidence, gains, 3), rows=rows, notes=notes, height=height)


def _lines(
    evidence: FigureStudies,
    title: str,
    varied: Iterable[tuple[float, ShownRun, int]],
    across: p.Axis,
) -> tuple[list[p.Panel], list[Gain]]:
    """Return speedup beside the ideal, and how much of its gain is reached, by what varies."""
    lines: dict[str, list[tuple[float, Gain]]] = {}
    for x, run, place in sorted(varied, key=lambda item: item[0]):
        is_together = run.run.points[place].routing.together
        for gain in evidence.gains(run, place=place):
            spread = ", popular experts on one rank" if is_together else ""
            suffix = spread + gamma_suffix(gain.gamma, ", γ = ") if gain.gamma else ""
            lines.setdefault(gain.name + suffix, []).append((x, gain))
    left: list[p.Mark] = []
    right: list[p.Mark] = []
    least = 0.0
    for index, (name, points) in enumerate(lines.items()):
        look = p.line_look(index) | {"linestyle": p.DASHES[index % 3]}
        xs, gains = zip(*points, strict=True)

        def numbers(
            of: Callable[[Gain], float | None], series: Sequence[Gain] = gains
        ) -> list[float]:
            return [math.nan if (value := of(gain)) is None else value for gain in series]

        ends = numbers(lambda gain: gain.low), numbers(lambda gain: gain.high)
        low, high = ends if all(gain.low is not None for gain in gains) else (None, None)
        thin = look | {"elinewidth": 0.7, "capsize": 1.5}
        left.append(p.Curve(name, xs, numbers(lambda g: g.speedup), low, high, thin))
        dotted = look | {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "white"}
        left.append(p.Curve("", xs, numbers(lambda gain: gain.ideal), look=dotted))
        shares = [(x, gain.reached) for x, gain in points if gain.reached is not None]
        least = min([least, *(share for _, share in shares)])
        reached = p.percent([share for _, share in shares])
        right.append(p.Curve("", [x for x, _ in shares], reached, look=look))
    if lines:
        dots = {"color": p.BLACK, "linestyle": ":"}
        left.append(p.Curve("ideal, same colour and marker", (), (), look=dots))
    bottom = p.Axis("share of the ideal gain (%)", limits=None if least < 0 else (0, None))
    sides = [
        p.Panel(title, [*left, _ONE], across, p.Axis("speedup over dropless")),
        p.Panel("how much of it was reached", [*right, p.rule(100, width=0.6)], across, bottom),
    ]
    sides = [replace(panel, look={"title": _SMALL}) for panel in sides]
    return sides, [gain for points in lines.values() for _, gain in points]


def phases(evidence: FigureStudies) -> p.Picture:
    """Return Figure 6: milliseconds of the phases of one layer, dropless first, then by γ."""
    notes = [published_note("figure6")]
    rows = []
    for run, point in evidence.first_points(notes):
        tightest_last = sorted(
            point.timings, key=lambda row: -(row.label.gamma or 0.0) if row.label else -math.inf
        )
        title = f"{run.run.title}: {_subtitle(run)}".replace("\n", " ")
        rows.append([_stack(title, tightest_last)])
    return replace(_titled(evidence, legend=7), rows=rows, notes=notes, height=2.7 * len(rows))


def _parts(row: Timing) -> dict[str, float]:
    """Return the medians of a layer's phases in milliseconds, as drawn."""
    rest = {name: 1e3 * spread.median for name, spread in row.seconds.items() if name != "total"}
    parts = {
        part: sum(rest.pop(name, 0.0) for name in names) for part, (names, _) in _PHASES.items()
    }
    return parts | {"other": sum(rest.values())}


def _stack(title: str, rows: Sequence[Timing]) -> p.Panel:
    gammas = [row.label.gamma if row.label else None for row in rows]
    places = [0.0]
    for gamma, before in zip(gammas[1:], gammas, strict=False):
        places.append(places[-1] + (1.0 if gamma == before else 1.6))
    below = [0.0] * len(rows)
    stacked = list(map(_parts, rows))
    marks: list[p.Mark] = []
    for part, (_, look) in _PHASES.items():
        if any(heights := [parts[part] for parts in stacked]):
            tops = [foot + height for foot, height in zip(below, heights, strict=True)]
            marks.append(p.Bars(part, places, tops, 0.8, below, look=look))
            below = tops
    totals = [row.seconds["total"] for row in rows]
    middle, low, high = (
        [1e3 * getattr(t, end) for t in totals] for end in ("median", "low", "high")
    )
    look = {"color": p.BLACK, "marker": "D", "linestyle": "", "markersize": 3}
    look |= {"markerfacecolor": "white", "elinewidth": 0.7, "capsize": 1.5}
    marks.append(p.Curve("whole layer", places, middle, low, high, look))
    top = max(*below, *high)
    for gamma in dict.fromkeys(gamma for gamma in gammas if gamma is not None):
        group = [place for place, other in zip(places, gammas, strict=True) if other == gamma]
        at = sum(group) / len(group), 1.04 * top
        marks.append(p.Words(gamma_suffix(gamma, "γ = "), at, look={"ha": "center"}))
    names = [method_name(row.label) if row.label else "Dropless" for row in rows]
    across = p.Axis(ticks=places, names=[_SHORT.get(name, name) for name in names], is_bare=True)
    look = {"grid": "y", "title": _SMALL}
    return p.Panel(title, marks, across, p.Axis("ms", limits=(0, 1.14 * top)), look=look)
