"""Share of dropped tokens by γ: by dataset (Figure 7) and by layer (Figures 17 to 20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, pooled_grid
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import (
    BLACK,
    COLOURS,
    COLUMN,
    DASHES,
    MARKERS,
    gamma_axis,
    legend_below,
    new_figure,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure_by_task(evidence: FigureRecords) -> Measured:
    """Figure 7: for each model, the dropped share on each dataset and on all together."""
    found = []
    for model, records in by_key(evidence.of("routing"), lambda record: record.model).items():
        everything = pooled_grid(layer for record in records for layer in record.layers)
        found.append(
            {
                "model": evidence.models[model],
                "gamma": list(everything.gamma),
                "all": list(everything.drop_rate),
                "tasks": {
                    evidence.tasks[record.task]: list(pooled_grid(record.layers).drop_rate)
                    for record in records
                },
            }
        )
    return Measured({"models": found})


def draw_by_task(numbers: Numbers) -> Figure:
    """Draw Figure 7, one panel a model."""
    models = numbers["models"]
    figure, axes = panels(len(models), 1.75)
    tasks = list(dict.fromkeys(task for model in models for task in model["tasks"]))
    for ax, model in zip(axes, models, strict=True):
        for index, task in enumerate(tasks):
            if task in model["tasks"]:
                ax.plot(
                    model["gamma"],
                    [100 * share for share in model["tasks"][task]],
                    color=COLOURS[index % 6],
                    linestyle=DASHES[index % 6],
                    marker=MARKERS[index % 6],
                    markevery=(index % 4, 4),
                    linewidth=0.8,
                    label=task,
                )
        ax.plot(
            model["gamma"], [100 * share for share in model["all"]], color=BLACK, label="all tasks"
        )
        gamma_axis(ax, model["gamma"])
        ax.set_ylim(0, 100)
        ax.grid()
        ax.set_title(model["model"])
    axes[0].set_ylabel("dropped (%)")
    whole = max(axes, key=lambda ax: len(ax.get_legend_handles_labels()[0]))
    legend_below(figure, whole, columns=7 if len(models) > 1 else 4)
    return figure


def measure_by_layer(evidence: FigureRecords) -> Measured:
    """Figures 17 to 20: for one model, the dropped share in each layer, over all datasets."""
    records = evidence.of("routing", model=evidence.model)
    layers = []
    for number, first in enumerate(records[0].layers):
        grid = pooled_grid(record.layers[number] for record in records)
        layers.append({"name": first.name, "drop_rate": list(grid.drop_rate)})
    everything = pooled_grid(layer for record in records for layer in record.layers)
    return Measured(
        {
            "model": evidence.models[evidence.model],
            "tasks": [evidence.tasks[record.task] for record in records],
            "gamma": list(everything.gamma),
            "all": list(everything.drop_rate),
            "layers": layers,
        }
    )


def draw_by_layer(numbers: Numbers) -> Figure:
    """Draw one of Figures 17 to 20: lines from the first layer (light) to the last (dark)."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    layers, gammas = numbers["layers"], numbers["gamma"]
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    figure = new_figure(COLUMN, 2.1)
    axes = figure.subplots()
    few = count <= len(MARKERS)
    for number, layer in enumerate(layers):
        axes.plot(
            gammas,
            [100 * share for share in layer["drop_rate"]],
            color=shades[number],
            linewidth=0.8,
            marker=MARKERS[number] if few else "",
            markevery=(number % 4, 4),
            label=f"MoE layer {number + 1}" if few else None,
        )
    axes.plot(
        gammas,
        [100 * share for share in numbers["all"]],
        color=BLACK,
        linestyle="--",
        label="all layers",
    )
    gamma_axis(axes, gammas)
    axes.set_ylim(0, 100)
    axes.set_ylabel("dropped (%)")
    axes.grid()
    axes.legend()
    axes.set_title(f"{numbers['model']}, {len(numbers['tasks'])} tasks")
    if few:
        return figure
    edges = [number + 0.5 for number in range(count + 1)]
    colours = ScalarMappable(BoundaryNorm(edges, count), ListedColormap(shades))
    bar = figure.colorbar(colours, ax=axes, label="MoE layer", pad=0.02)
    step = max(1, -(-count // 8))
    bar.set_ticks(range(1, count + 1, step))
    bar.ax.tick_params(length=0, which="both")
    return figure
