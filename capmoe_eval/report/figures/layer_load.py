"""Load of the experts layer by layer: Figures 13 to 16."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import normalised
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, BLUE, PAGE, SHADES, VERMILLION, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What the paper's text says of the peak loads in Figures 13 to 16 (Appendix F), by model.
_PRINTED = {
    "olmoe_instruct": ("> 5", 5.0),
    "deepseek_v2_lite_chat": ("> 5", 5.0),
    "qwen1_5_moe_chat": ("< 3", 3.0),
    "mixtral_8x7b_instruct": ("< 3", 3.0),
}


def measure_layers(evidence: FigureRecords) -> Measured:
    """Average the experts' loads over tasks, layer by layer, and note the peaks of batches."""
    records = evidence.of("routing", model=evidence.model)
    layers = []
    for number, first in enumerate(records[0].layers):
        same = [record.layers[number] for record in records]
        loads = [normalised(layer) for layer in same]
        mean = [statistics.fmean(column) for column in zip(*loads, strict=True)]
        peaks = [layer.peak.expert_before for layer in same]
        layers.append(
            {
                "name": first.name,
                "load": sorted(mean, reverse=True),
                "peak_mean": statistics.fmean(peak.mean for peak in peaks),
                "peak_max": max(peak.max for peak in peaks),
            }
        )
    printed = _PRINTED.get(evidence.model)
    notes: tuple[str, ...] = ()
    if printed:
        notes = (f"The paper's text says of these peaks: {printed[0]} N̄ (Appendix F).",)
    return Measured(
        {
            "model": evidence.models[evidence.model],
            "tasks": [evidence.tasks[record.task] for record in records],
            "layers": layers,
            "published_peak": None
            if printed is None
            else {"text": printed[0], "value": printed[1]},
        },
        notes,
    )


def draw_layers(numbers: Numbers) -> Figure:
    """Draw a map of layers and experts, and the peaks beside it."""
    layers = numbers["layers"]
    count = len(layers)
    figure = new_figure(PAGE, 0.95 + 0.115 * max(count, 8))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    picture = left.imshow(
        [layer["load"] for layer in layers],
        aspect="auto",
        cmap=SHADES,
        vmin=0,
        interpolation="nearest",
    )
    left.spines[:].set_visible(False)
    left.tick_params(length=0)
    left.set_xticks([])
    step = 1 if count <= 8 else 2 if count <= 16 else 4
    shown = range(0, count, step)
    left.set_yticks(shown, [str(number + 1) for number in shown])
    left.set_ylabel("MoE layer")
    left.set_xlabel(f"the {len(layers[0]['load'])} experts of each layer, busiest first")
    figure.colorbar(picture, ax=left, label="load / N̄", pad=0.01, aspect=14)
    for field, marker, colour, label in (
        ("peak_mean", "o", BLUE, "mean over batches"),
        ("peak_max", "^", VERMILLION, "highest of any batch"),
    ):
        right.plot(
            [layer[field] for layer in layers],
            range(count),
            marker=marker,
            color=colour,
            linestyle="-" if marker == "o" else ":",
            linewidth=0.6,
            label=label,
        )
    if numbers["published_peak"]:
        right.axvline(
            numbers["published_peak"]["value"],
            color=BLACK,
            linestyle="--",
            linewidth=0.7,
            label=f"paper's text: {numbers['published_peak']['text']}",
        )
    right.set_xlim(left=0)
    right.set_xlabel("peak load / mean load")
    right.tick_params(axis="y", labelleft=True)
    right.grid(axis="x")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    left.set_title(f"{numbers['model']}, mean of {len(numbers['tasks'])} tasks")
    return figure
