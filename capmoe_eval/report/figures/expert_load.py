"""Load of experts: in one layer (Figures 1, 2, 9) and in all layers (13 to 16)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import figure, figure1_bars, published_note
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures import pooling
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop

MEAN: Final = p.rule(1.0, "--", 0.7)
"""The mean load."""


def asked_panel(
    title: str, asked: Sequence[float], *marks: p.Mark, label: str = "load / mean load", **look: Any
) -> p.Panel:
    """Return a panel with a bar for each expert: its load over N̄ as the router asked for it.

    ``look`` may have the bars' name, colour and width, and a ``legend``.
    """
    bars = p.Bars(
        look.pop("name", "asked for by the router"),
        range(len(asked)),
        asked,
        look.pop("width", 0.9),
        look={"color": look.pop("color", "#c8c8c8")},
    )
    across = p.Axis("experts, busiest first", ticks=(), limits=(-0.7, len(asked) - 0.3))
    return p.Panel(title, [bars, *marks], across, p.Axis(label), look={"grid": None} | look)


def one_layer(evidence: FigureRecords) -> p.Picture:
    """Return Figure 1: the load of each expert in the layer with the fullest one."""
    record = evidence.of_model("baseline")[0]
    number = pooling.busiest_layer([record])
    load, peak = pooling.normalised(record.layers[number]), record.layers[number].peak.expert_before
    asked = sorted(load, reverse=True)
    # The busiest bar stands at the left; the text on the peaks has space at the right.
    end = {"ha": "right", "va": "bottom", "fontsize": 6.5}
    marks: list[p.Mark] = [MEAN, p.Words("mean load N̄", (len(load) - 0.5, 1.0), look=end)]
    published = figure1_bars(record.model, len(load))
    if published:
        look = {"marker": "o", "markersize": 2, "linewidth": 0.6, "color": p.VERMILLION}
        marks.append(p.Curve("paper (peak over batches)", range(len(load)), published, look=look))
    peaks = (
        f"fullest expert: {asked[0]:.1f} × the mean\n"
        f"in a batch: {peak.mean:.1f} ×, at most {peak.max:.1f} ×"
    )
    marks.append(p.Words(peaks, (0.98, 0.97), of_panel=True, look=end | {"va": "top"}))
    title = f"{evidence.title}, {evidence.tasks[record.task]}, MoE layer {number + 1}"
    legend: p.Look = {"legend": {"loc": "center right"}} if published else {}
    panel = asked_panel(title, asked, *marks, name="ours (mean over batches)", **legend)
    notes = [published_note("figure1")] if published else []
    return p.Picture([[panel]], notes, width=p.COLUMN, height=1.75)


def by_task(evidence: FigureRecords) -> p.Picture:
    """Return Figure 2: the same loads as a map, a row for each dataset, in one order of experts."""
    records = evidence.of_model("baseline")
    number = pooling.busiest_layer(records)
    layers = pooling.by_layer(records)[number]
    order = pooling.busiest_first(pooling.mean_loads(layers))
    loads = list(map(pooling.normalised, layers))
    peaks = [
        f"{max(load):.1f} × ({layer.peak.expert_before.max:.1f} ×)"
        for load, layer in zip(loads, layers, strict=True)
    ]
    labels = order if len(order) <= 40 else []  # the numbers of many would run into each other
    where = f"{evidence.title}, MoE layer {number + 1}"
    rows = range(len(loads))
    panel = p.Panel(
        f"{where}; right: fullest expert over all batches (in one batch)",
        [p.Map([[load[e] for e in order] for load in loads], "load / mean load", {"aspect": 12})],
        p.Axis("expert, busiest first on average", range(len(labels)), list(map(str, labels))),
        p.Axis(ticks=rows, names=[evidence.tasks[record.task] for record in records]),
        p.Axis(ticks=rows, names=peaks, is_bare=True),
        look={"grid": None},
    )
    return p.Picture([[panel]], height=0.75 + 0.17 * len(rows))


def after_drop(evidence: FigureRecords) -> p.Picture:
    """Return Figure 9: what experts compute under Token Drop and Expanded Drop, by m."""
    task, title = next(iter(evidence.tasks.items()))
    records = [
        record
        for record in evidence.of_model("token_drop", "ranked", "all_experts")
        if record.task == task
    ]
    number = pooling.busiest_layer(records)
    layers = pooling.by_layer(records)[number]
    gamma, effective = records[0].gamma or 0.0, layers[0].effective_gamma
    asked = sorted(pooling.normalised(layers[0]), reverse=True)
    step = max(1, len(asked) // 10)
    marks: list[p.Mark] = []
    for index, (record, layer) in enumerate(zip(records, layers, strict=True)):
        load = sorted(pooling.normalised(layer, "after"), reverse=True)
        look = p.line_look(index, markevery=(index * step // 4, step))
        marks.append(p.Curve(_drop_label(record), range(len(load)), load, look=look))
    marks.append(p.rule(gamma, ":", 0.6))
    if effective is not None:
        marks.append(p.rule(effective, "--", 0.6, f"γ after rounding: {effective:.2f}"))
    where = f"{evidence.title}, {title}, MoE layer {number + 1}{gamma_suffix(gamma, ', γ = ')}"
    look = {"name": "asked for (Token Drop)", "color": "#e0e0e0", "width": 1.0}
    panel = asked_panel(where, asked, *marks, label="load / mean load N̄", **look)
    return p.Picture([[panel]], width=p.COLUMN, height=2.4, look={"legend": 2})


def _drop_label(record: Record) -> str:
    method = record.cell.method
    if not isinstance(method, ExpandedDrop):
        return method.title
    if method.candidates == "global":
        return "Expanded, all experts"
    m = method.setting("m")
    times, rest = divmod(m, record.layers[0].top_k)
    return f"Expanded, m = {m}" + (f" ({times}k)" if not rest else "")


def all_layers(evidence: FigureRecords) -> p.Picture:
    """Return one of Figures 13 to 16: each layer's mean loads over tasks, and peaks of batches."""
    records = evidence.of_model("routing")
    layers = pooling.by_layer(records)
    loads = [sorted(pooling.mean_loads(same), reverse=True) for same in layers]
    peaks = [[layer.peak.expert_before for layer in same] for same in layers]
    count = len(layers)
    rows = range(count)
    marks: list[p.Mark] = [
        p.Curve(name, of_layers, rows, look={"color": colour, "linewidth": 0.6} | look)
        for name, of_layers, colour, look in (
            (
                "mean over batches",
                [statistics.fmean(peak.mean for peak in same) for same in peaks],
                p.BLUE,
                {"marker": "o"},
            ),
            (
                "highest of any batch",
                [max(peak.max for peak in same) for same in peaks],
                p.VERMILLION,
                {"marker": "^", "linestyle": ":"},
            ),
        )
    ]
    notes = []
    if printed := figure("fig13_16_peak_load_over_mean").get(evidence.model):
        notes.append(f"The paper's text says of these peaks: {printed['text']} N̄ (Appendix F).")
        text = f"paper's text: {printed['text']}"
        marks.append(p.rule(printed["value"], "--", 0.7, text, is_upright=True))
    ticks = range(0, count, 1 if count <= 8 else 2 if count <= 16 else 4)
    left = p.Panel(
        f"{evidence.title}, mean of {len(records)} tasks",
        [p.Map(loads, "load / N̄", {"aspect": 14})],
        p.Axis(f"the {len(loads[0])} experts of each layer, busiest first", ticks=()),
        p.Axis("MoE layer", ticks, [str(number + 1) for number in ticks]),
        look={"grid": None},
    )
    across = p.Axis("peak load / mean load", limits=(0, None))
    right = p.Panel("", marks, across, look={"grid": "x", "labels": True})
    look = {"layout": {"sharey": True, "width_ratios": [3, 1]}, "legend": 3}
    return p.Picture(
        [[left, right]],
        notes,
        height=0.95 + 0.115 * max(count, 8),
        look=look | {"legend_at": "outside lower right"},
    )
