"""Load of experts: in one layer (Figures 1, 2, 9) and in all layers (13 to 16)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import figure, figure1_bars, published_note
from capmoe_eval.report.figures import pooling, style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.style import BLACK, column
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop


def draw_asked(axes: Axes, asked: Sequence[float], **look: Any) -> None:
    """Draw one bar for each expert: its load over N̄ as the router asked for it, in this order."""
    usual: Numbers = {"color": "#c8c8c8", "width": 0.9, "label": "asked for by the router"}
    axes.bar(range(len(asked)), asked, **(usual | look))
    axes.set(xlabel="experts, busiest first", ylabel="load / mean load")
    axes.set(xticks=[], xlim=(-0.7, len(asked) - 0.3))
    axes.spines[["top", "right"]].set_visible(False)


def measure_one_layer(evidence: FigureRecords) -> Measured:
    """Collect the load of each expert in the layer with the fullest one, for Figure 1."""
    record = evidence.of_model("baseline")[0]
    number = pooling.busiest_layer([record])
    layer = record.layers[number]
    load, peak = pooling.normalised(layer), layer.peak.expert_before
    order = pooling.busiest_first(load)
    published = figure1_bars(record.model, len(load))
    numbers = {
        "model": evidence.title,
        "task": evidence.tasks[record.task],
        "layer": number,
        "name": layer.name,
        "experts": order,
        "load": [load[expert] for expert in order],
        "peak_of_a_batch": {"mean": peak.mean, "max": peak.max},
        "published": published,
    }
    return Measured(numbers, (published_note("figure1"),) if published else ())


def draw_one_layer(numbers: Numbers) -> Figure:
    """Draw Figure 1."""
    figure, axes = style.subplots(style.COLUMN, 1.75)
    load, peak, published = (numbers[key] for key in ("load", "peak_of_a_batch", "published"))
    draw_asked(axes, load, label="ours (mean over batches)")
    # The busiest bar stands at the left; what is said of the peaks has room at the right.
    axes.axhline(1.0, color=BLACK, linewidth=0.7, linestyle="--")
    axes.annotate("mean load N̄", (len(load) - 0.5, 1.0), ha="right", va="bottom", fontsize=6.5)
    if published:
        look = {"markersize": 2, "linewidth": 0.6, "color": style.VERMILLION}
        axes.plot(published, "o-", **look, label="paper (peak over batches)")
        axes.legend(loc="center right")
    said = (
        f"fullest expert: {load[0]:.1f} × the mean\n"
        f"in a batch: {peak['mean']:.1f} ×, at most {peak['max']:.1f} ×"
    )
    corner = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
    axes.annotate(said, (0.98, 0.97), **corner, fontsize=6.5)
    axes.set_title(f"{numbers['model']}, {numbers['task']}, MoE layer {numbers['layer'] + 1}")
    return figure


def measure_by_task(evidence: FigureRecords) -> Measured:
    """Collect the same loads on every dataset, experts in one order for all, for Figure 2."""
    records = evidence.of_model("baseline")
    number = pooling.busiest_layer(records)
    layers = pooling.by_layer(records)[number]
    order = pooling.busiest_first(pooling.mean_loads(layers))
    loads = map(pooling.normalised, layers)
    rows = [
        {
            "task": evidence.tasks[record.task],
            "load": [load[expert] for expert in order],
            "fullest": max(load),
            "peak_of_a_batch": layer.peak.expert_before.max,
        }
        for record, layer, load in zip(records, layers, loads, strict=True)
    ]
    return Measured({"model": evidence.title, "layer": number, "experts": order, "rows": rows})


def draw_by_task(numbers: Numbers) -> Figure:
    """Draw Figure 2 as a map, one row a dataset."""
    rows, experts = numbers["rows"], numbers["experts"]
    figure, axes = style.subplots(style.PAGE, 0.75 + 0.17 * len(rows))
    picture = style.load_map(axes, column(rows, "load"))
    axes.set_yticks(range(len(rows)), column(rows, "task"))
    right = axes.secondary_yaxis("right")
    peaks = [f"{row['fullest']:.1f} × ({row['peak_of_a_batch']:.1f} ×)" for row in rows]
    right.set_yticks(range(len(rows)), peaks)
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    # The numbers of many would run into each other; the JSON has them.
    shown = experts if len(experts) <= 40 else []
    axes.set_xticks(range(len(shown)), shown)
    where = f"{numbers['model']}, MoE layer {numbers['layer'] + 1}"
    axes.set_title(f"{where}; right: fullest expert over all batches (in one batch)")
    axes.set_xlabel("expert, busiest first on average")
    figure.colorbar(picture, ax=axes, label="load / mean load", pad=0.01, aspect=12)
    return figure


def measure_after_drop(evidence: FigureRecords) -> Measured:
    """Collect what experts compute under Token Drop and Expanded Drop by m, for Figure 9."""
    task, title = next(iter(evidence.tasks.items()))
    found = evidence.of_model("token_drop", "ranked", "all_experts")
    records = [record for record in found if record.task == task]
    number = pooling.busiest_layer(records)
    layers = pooling.by_layer(records)[number]
    return Measured(
        {
            "model": evidence.title,
            "task": title,
            "layer": number,
            "gamma": records[0].gamma,
            "effective_gamma": layers[0].effective_gamma,
            "asked": sorted(pooling.normalised(layers[0]), reverse=True),
            "lines": [
                {
                    "label": _drop_label(record),
                    "load": sorted(pooling.normalised(layer, "after"), reverse=True),
                    "unused": 1 - sum(layer.load_after) / layer.assignments,
                }
                for record, layer in zip(records, layers, strict=True)
            ],
        }
    )


def _drop_label(record: Record) -> str:
    method = record.cell.method
    if not isinstance(method, ExpandedDrop):
        return method.title
    if method.candidates == "global":
        return "Expanded, all experts"
    m = method.setting("m")
    times, rest = divmod(m, record.layers[0].top_k)
    return f"Expanded, m = {m}" + (f" ({times}k)" if not rest else "")


def draw_after_drop(numbers: Numbers) -> Figure:
    """Draw Figure 9."""
    figure, axes = style.subplots(style.COLUMN, 2.4)
    asked, gamma, effective = (numbers[key] for key in ("asked", "gamma", "effective_gamma"))
    draw_asked(axes, asked, color="#e0e0e0", width=1.0, label="asked for (Token Drop)")
    axes.set_ylabel("load / mean load N̄")
    step = max(1, len(asked) // 10)
    for index, line in enumerate(numbers["lines"]):
        every = (index * step // 4, step)
        axes.plot(line["load"], **style.line_look(index), markevery=every, label=line["label"])
    axes.axhline(gamma, color=BLACK, linewidth=0.6, linestyle=":")
    if effective is not None:
        label = f"γ after rounding: {effective:.2f}"
        axes.axhline(effective, color=BLACK, linewidth=0.6, linestyle="--", label=label)
    where = f"{numbers['task']}, MoE layer {numbers['layer'] + 1}"
    axes.set_title(f"{numbers['model']}, {where}{gamma_suffix(gamma, ', γ = ')}")
    style.legend_below(figure, axes, columns=2)
    return figure


def measure_layers(evidence: FigureRecords) -> Measured:
    """Collect each layer's mean loads over tasks, and peaks of batches, for Figures 13 to 16."""
    records = evidence.of_model("routing")
    layers = []
    for same in pooling.by_layer(records):
        peaks = [layer.peak.expert_before for layer in same]
        layers.append(
            {
                "name": same[0].name,
                "load": sorted(pooling.mean_loads(same), reverse=True),
                "peak_mean": statistics.fmean(peak.mean for peak in peaks),
                "peak_max": max(peak.max for peak in peaks),
            }
        )
    printed = figure("fig13_16_peak_load_over_mean").get(evidence.model)
    note = "The paper's text says of these peaks: {text} N̄ (Appendix F)."
    return Measured(
        {
            "model": evidence.title,
            "tasks": [evidence.tasks[record.task] for record in records],
            "layers": layers,
            "published_peak": printed,
        },
        [note.format_map(printed)] if printed else (),
    )


def draw_layers(numbers: Numbers) -> Figure:
    """Draw a map of layers and experts, and the peaks beside it."""
    layers, printed = numbers["layers"], numbers["published_peak"]
    count = len(layers)
    height = 0.95 + 0.115 * max(count, 8)
    figure, (left, right) = style.subplots(
        style.PAGE, height, 1, 2, sharey=True, width_ratios=[3, 1]
    )
    picture = style.load_map(left, column(layers, "load"))
    shown = range(0, count, 1 if count <= 8 else 2 if count <= 16 else 4)
    left.set_yticks(shown, [str(number + 1) for number in shown])
    experts = f"the {len(layers[0]['load'])} experts of each layer, busiest first"
    left.set(xticks=[], xlabel=experts, ylabel="MoE layer")
    figure.colorbar(picture, ax=left, label="load / N̄", pad=0.01, aspect=14)
    for field, look, colour, label in (
        ("peak_mean", "o-", style.BLUE, "mean over batches"),
        ("peak_max", "^:", style.VERMILLION, "highest of any batch"),
    ):
        peaks = column(layers, field)
        right.plot(peaks, range(count), look, color=colour, linewidth=0.6, label=label)
    if printed:
        text = f"paper's text: {printed['text']}"
        right.axvline(printed["value"], color=BLACK, linestyle="--", linewidth=0.7, label=text)
    right.set(xlim=(0, None), xlabel="peak load / mean load")
    right.tick_params(axis="y", labelleft=True)
    right.grid(axis="x")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    left.set_title(f"{numbers['model']}, mean of {len(numbers['tasks'])} tasks")
    return figure
