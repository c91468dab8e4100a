"""Load of one layer's experts: Figure 1, by dataset (Figure 2), under a capacity (Figure 9)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.experiment.names import TITLES, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import FIGURE1_NOTE, figure1_bars
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import busiest_layer, normalised
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import (
    BLACK,
    COLOURS,
    COLUMN,
    DASHES,
    MARKERS,
    PAGE,
    SHADES,
    legend_below,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ASKED, _SERVED = "#c8c8c8", "#1f4e79"


def draw_bars(
    axes: Axes, asked: Sequence[float], served: Sequence[float] | None, gamma: float | None
) -> None:
    """Draw one bar for each expert: its load over N̄ as asked for and, inside it, as computed.

    Args:
        axes: Where to.
        asked: Loads that the router asked for, in the order of the bars.
        served: Loads that the experts computed; None where no capacity was set.
        gamma: The capacity factor, drawn as a line where it is below the fullest expert.
    """
    places = range(len(asked))
    axes.bar(places, asked, color=_ASKED, width=0.9, label="asked for by the router")
    if served is not None:
        axes.bar(places, served, color=_SERVED, width=0.55, label="computed by the experts")
    if gamma is not None and gamma < max(asked):
        axes.axhline(gamma, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            gamma_suffix(gamma, "γ = "), (len(asked) - 0.5, gamma), ha="right", va="bottom"
        )
    axes.set_xlabel("experts, busiest first")
    axes.set_ylabel("load / mean load")
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(asked) - 0.3)
    axes.spines[["top", "right"]].set_visible(False)


def measure_one_layer(evidence: FigureRecords) -> Measured:
    """Figure 1: the load of each expert in the layer with the fullest one."""
    record = evidence.of("baseline", model=evidence.model)[0]
    number = busiest_layer([record])
    layer = record.layers[number]
    load, peak = normalised(layer), layer.peak.expert_before
    order = sorted(range(len(load)), key=lambda expert: (-load[expert], expert))
    published = figure1_bars(record.model, len(load))
    numbers: Numbers = {
        "model": evidence.models[record.model],
        "task": evidence.tasks[record.task],
        "layer": number,
        "name": layer.name,
        "experts": order,
        "load": [load[expert] for expert in order],
        "peak_of_a_batch": {"mean": peak.mean, "max": peak.max},
        "published": published,
    }
    return Measured(numbers, (FIGURE1_NOTE,) if published else ())


def draw_one_layer(numbers: Numbers) -> Figure:
    """Draw Figure 1."""
    figure = new_figure(COLUMN, 1.75)
    axes = figure.subplots()
    load = numbers["load"]
    draw_bars(axes, load, None, None)
    # The busiest bar stands at the left; what is said of the peaks has room at the right.
    axes.axhline(1.0, color=BLACK, linewidth=0.7, linestyle="--")
    axes.annotate("mean load N̄", (len(load) - 0.5, 1.0), ha="right", va="bottom", fontsize=6.5)
    if numbers["published"]:
        axes.plot(
            range(len(load)),
            numbers["published"],
            marker="o",
            markersize=2,
            linewidth=0.6,
            color=COLOURS[1],
            label="paper (peak over batches)",
        )
        axes.containers[0].set_label("ours (mean over batches)")
        axes.legend(loc="center right")
    peak = numbers["peak_of_a_batch"]
    axes.annotate(
        f"fullest expert: {load[0]:.1f} × the mean\n"
        f"in a batch: {peak['mean']:.1f} ×, at most {peak['max']:.1f} ×",
        (0.98, 0.97),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=6.5,
    )
    axes.set_title(f"{numbers['model']}, {numbers['task']}, MoE layer {numbers['layer'] + 1}")
    return figure


def measure_by_task(evidence: FigureRecords) -> Measured:
    """Figure 2: the same layer on every dataset, its experts in one order for all."""
    records = evidence.of("baseline", model=evidence.model)
    number = busiest_layer(records)
    layers = [record.layers[number] for record in records]
    loads = [normalised(layer) for layer in layers]
    mean = [statistics.fmean(column) for column in zip(*loads, strict=True)]
    order = sorted(range(len(mean)), key=lambda expert: (-mean[expert], expert))
    rows = [
        {
            "task": evidence.tasks[record.task],
            "load": [load[expert] for expert in order],
            "fullest": max(load),
            "peak_of_a_batch": layer.peak.expert_before.max,
        }
        for record, layer, load in zip(records, layers, loads, strict=True)
    ]
    return Measured(
        {
            "model": evidence.models[evidence.model],
            "layer": number,
            "experts": order,
            "rows": rows,
        }
    )


def draw_by_task(numbers: Numbers) -> Figure:
    """Draw Figure 2 as a map, one row a dataset."""
    rows = numbers["rows"]
    figure = new_figure(PAGE, 0.75 + 0.17 * len(rows))
    axes = figure.subplots()
    picture = axes.imshow(
        [row["load"] for row in rows], aspect="auto", cmap=SHADES, vmin=0, interpolation="nearest"
    )
    axes.set_yticks(range(len(rows)), [row["task"] for row in rows])
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        range(len(rows)),
        [f"{row['fullest']:.1f} × ({row['peak_of_a_batch']:.1f} ×)" for row in rows],
    )
    for side in (axes, right):
        side.tick_params(length=0)
    axes.spines[:].set_visible(False)
    right.spines[:].set_visible(False)
    axes.set_xticks(range(len(numbers["experts"])), numbers["experts"])
    if len(numbers["experts"]) > 40:
        axes.set_xticks([])  # their numbers would run into each other; the JSON has them
    axes.set_xlabel("expert, busiest first on average")
    axes.set_title(
        f"{numbers['model']}, MoE layer {numbers['layer'] + 1}; right: fullest expert over all "
        "batches (in one batch)",
    )
    figure.colorbar(picture, ax=axes, label="load / mean load", pad=0.01, aspect=12)
    return figure


def measure_after_drop(evidence: FigureRecords) -> Measured:
    """Figure 9: what the experts compute under Token Drop and Expanded Drop by m."""
    records = [
        record
        for record in evidence.of("token_drop", "ranked", "all_experts", model=evidence.model)
        if record.task == next(iter(evidence.tasks))
    ]
    number = busiest_layer(records)
    lines: list[dict[str, Any]] = []
    for record in records:
        layer = record.layers[number]
        load = sorted(normalised(layer, "after"), reverse=True)
        lines.append(
            {
                "label": _drop_label(record),
                "load": load,
                "unused": 1 - sum(layer.load_after) / layer.assignments,
            }
        )
    first = records[0]
    numbers: Numbers = {
        "model": evidence.models[first.model],
        "task": evidence.tasks[first.task],
        "layer": number,
        "gamma": first.gamma,
        "asked": sorted(normalised(first.layers[number]), reverse=True),
        "lines": lines,
    }
    return Measured(numbers)


def _drop_label(record: Record) -> str:
    method = record.cell.method
    if method.name == "score":
        return TITLES["score"]
    top_k = record.layers[0].top_k
    if method.candidates == "global":
        return "Expanded, all experts"
    times, rest = divmod(method.m, top_k)
    return f"Expanded, m = {method.m}" + (f" ({times}k)" if not rest else "")


def draw_after_drop(numbers: Numbers) -> Figure:
    """Draw Figure 9."""
    figure = new_figure(COLUMN, 2.4)
    axes = figure.subplots()
    asked, gamma = numbers["asked"], numbers["gamma"]
    places = range(len(asked))
    axes.bar(places, asked, color="#e0e0e0", width=1.0, label="asked for (Token Drop)")
    step = max(1, len(asked) // 10)
    for index, line in enumerate(numbers["lines"]):
        axes.plot(
            places,
            line["load"],
            color=COLOURS[index],
            linestyle=DASHES[index],
            marker=MARKERS[index],
            markevery=(index * step // 4, step),
            label=line["label"],
        )
    axes.axhline(gamma, color=BLACK, linewidth=0.6, linestyle=":")
    # What matters is below γ; the bars may be many times as high.
    top = 2.2 * gamma
    if asked[0] > top > 0:
        axes.set_ylim(0, top)
        axes.annotate(
            f"asked for: up to {asked[0]:.1f}",
            (0.98, 0.97),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=6.5,
        )
    axes.set_xlim(-0.7, len(asked) - 0.3)
    axes.set_xticks([])
    axes.set_xlabel("experts, busiest first")
    axes.set_ylabel("load / mean load N̄")
    where = f"{numbers['task']}, MoE layer {numbers['layer'] + 1}"
    axes.set_title(f"{numbers['model']}, {where}{gamma_suffix(gamma, ', γ = ')}")
    legend_below(figure, axes, columns=2)
    return figure
