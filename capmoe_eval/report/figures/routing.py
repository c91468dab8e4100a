"""Routing without a limit: what would be dropped and padded (Figures 7, 17-20), gate scores (8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import Grid, by_key, by_layer, layers_of, pooled_grid
from capmoe_eval.report.figures.style import BLACK, column, percent

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))


def measure_by_task(evidence: FigureRecords) -> Measured:
    """Collect each model's dropped share on each dataset and on all together, for Figure 7."""
    found = []
    for model, records in evidence.by_model("routing").items():
        everything = pooled_grid(layers_of(records))
        shares = {"gamma": everything.gamma, "all": everything.drop_rate}
        tasks = {evidence.tasks[r.task]: pooled_grid(layers_of([r])).drop_rate for r in records}
        found.append({"model": evidence.models[model], **shares, "tasks": tasks})
    return Measured({"models": found})


def draw_by_task(numbers: Numbers) -> Figure:
    """Draw Figure 7, one panel a model."""
    models = numbers["models"]
    figure, axes = style.model_panels(models, 1.75)
    tasks = list(dict.fromkeys(task for model in models for task in model["tasks"]))
    for ax, model in zip(axes, models, strict=True):
        gammas = model["gamma"]
        for index, task in enumerate(tasks):
            if task in model["tasks"]:
                look = style.line_look(index, 6) | {"markevery": (index % 4, 4), "linewidth": 0.8}
                ax.plot(gammas, percent(model["tasks"][task]), **look, label=task)
        ax.plot(gammas, percent(model["all"]), color=BLACK, label="all tasks")
        style.gamma_axis(ax, gammas)
        ax.set(ylim=(0, 100), title=model["model"])
        ax.grid()
    axes[0].set_ylabel("dropped (%)")
    style.legend_below(figure, *axes, columns=7 if len(models) > 1 else 4)
    return figure


def measure_by_layer(evidence: FigureRecords) -> Measured:
    """Collect a model's dropped share in each layer over all datasets, for Figures 17 to 20."""
    records = evidence.of_model("routing")
    everything = pooled_grid(layers_of(records))
    return Measured(
        {
            "model": evidence.title,
            "tasks": [evidence.tasks[record.task] for record in records],
            "gamma": everything.gamma,
            "all": everything.drop_rate,
            "layers": [
                {"name": same[0].name, "drop_rate": pooled_grid(same).drop_rate}
                for same in by_layer(records)
            ],
        }
    )


def draw_by_layer(numbers: Numbers) -> Figure:
    """Draw one of Figures 17 to 20: lines from the first layer (light) to the last (dark)."""
    layers, gammas = numbers["layers"], numbers["gamma"]
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    figure, axes = style.subplots(style.COLUMN, 2.1)
    few = count <= len(style.MARKERS)
    for number, layer in enumerate(layers):
        look: Numbers = {"color": shades[number], "linewidth": 0.8, "markevery": (number % 4, 4)}
        if few:
            look |= {"marker": style.MARKERS[number], "label": f"MoE layer {number + 1}"}
        axes.plot(gammas, percent(layer["drop_rate"]), **look)
    axes.plot(gammas, percent(numbers["all"]), color=BLACK, linestyle="--", label="all layers")
    style.gamma_axis(axes, gammas)
    axes.set(ylim=(0, 100), ylabel="dropped (%)")
    axes.grid()
    axes.legend()
    axes.set_title(f"{numbers['model']}, {len(numbers['tasks'])} tasks")
    if few:
        return figure
    edges = [number + 0.5 for number in range(count + 1)]
    colours = ScalarMappable(BoundaryNorm(edges, count), ListedColormap(shades))
    bar = figure.colorbar(colours, ax=axes, label="MoE layer", pad=0.02)
    bar.set_ticks(range(1, count + 1, max(1, -(-count // 8))))
    bar.ax.tick_params(length=0, which="both")
    return figure


def best_gamma(grid: Grid, penalty: float) -> float | None:
    """Return the γ that minimises ``penalty · drop rate + padding waste``.

    The penalty is λ, the cost of a dropped share in units of an empty share. The smallest of equal
    γ is taken; one without slots (0) has no padding waste and is no candidate. None if all are so.
    """
    costs = [
        (penalty * drop + waste, gamma)
        for gamma, drop, waste in zip(*grid, strict=True)
        if waste is not None
    ]
    return min(costs)[1] if costs else None


def measure_waste(evidence: FigureRecords) -> Measured:
    """Pool each model's grid over layers and tasks, and find the best γ by penalty."""
    models: list[Numbers] = []
    notes = []
    for model, records in evidence.by_model("routing").items():
        title, grid = evidence.models[model], pooled_grid(layers_of(records))
        best, sweep = (
            [{"penalty": penalty, "gamma": best_gamma(grid, penalty)} for penalty in penalties]
            for penalties in (PENALTIES, _SWEEP)
        )
        models.append({"model": title, **grid._asdict(), "best": best, "sweep": sweep})
        largest = grid.gamma[-1]
        at_end = [f"{choice['penalty']:g}" for choice in best if choice["gamma"] == largest]
        if at_end:
            notes.append(
                f"{title}: the best γ is the largest of the grid, {gamma_text(largest)}, for "
                f"λ = {', '.join(at_end)}; a larger one may be better."
            )
    return Measured({"models": models}, notes)


def draw_waste(numbers: Numbers) -> Figure:
    """Draw padding against drops with the best γ marked, and the best γ by penalty."""
    figure, (left, right) = style.subplots(style.PAGE, 2.5, 1, 2, width_ratios=[3, 2])
    for index, model in enumerate(numbers["models"]):
        look = style.line_look(index)
        drops, wastes = percent(model["drop_rate"]), percent(model["pad_waste"])
        left.plot(wastes, drops, **look, markersize=2.2, linewidth=0.8, label=model["model"])
        best = column(model["best"], "gamma")
        ring = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "color": look["color"]}
        for gamma, drop, waste in zip(model["gamma"], drops, wastes, strict=True):
            if gamma in best:
                left.plot(waste, drop, **ring)
        sweep = [point for point in model["sweep"] if point["gamma"] is not None]
        apart = [point["gamma"] + 0.02 * index for point in sweep]  # equal ones hide each other
        line = {"color": look["color"], "linestyle": look["linestyle"]}
        right.step(column(sweep, "penalty"), apart, where="mid", **line)
    left.set(xlabel="padding waste: empty slots (%)", ylabel="drop rate (%)")
    left.set_ylim(bottom=-2)
    left.set_title("γ from 0.25 (top left) in steps of 0.25; rings: best γ for λ = 1, 5, 20")
    left.grid()
    right.set_xscale("log")
    right.set_xticks([0.1, 1, 5, 20, 100], ["0.1", "1", "5", "20", "100"])
    right.minorticks_off()
    right.set(xlabel="penalty λ of a drop", ylabel="best γ")
    right.set_title("γ that minimises λ · drop rate + waste")
    right.grid()
    style.legend_below(figure, left, columns=4)
    return figure


def measure_gate_scores(evidence: FigureRecords) -> Measured:
    """Average the scores of a token's highest, second, … expert over tokens, for Figure 8."""
    found: list[Numbers] = []
    notes = []
    for model, records in evidence.by_model("routing").items():
        title = evidence.models[model]
        by_known = by_key(records, lambda r: all(layer.score_by_rank for layer in r.layers))
        if left_out := [record.task for record in by_known.get(False, ())]:
            notes.append(
                f"{title}: no scores by rank in the records of {', '.join(left_out)}; compute them "
                "anew with overwrite=true."
            )
        if known := by_known.get(True):
            found.append({"model": title, **_scores_by_rank(known)})
    if not found:
        raise UsageError(f"fig8: {notes[0]}")
    return Measured({"models": found}, notes)


def _scores_by_rank(records: Sequence[Record]) -> Numbers:
    """Return the mean over all layers, and the lowest and highest layer's mean, at each rank."""
    layers = []
    for same in by_layer(records):
        tokens = [layer.tokens for layer in same]
        layers.append(np.average([layer.score_by_rank or () for layer in same], 0, tokens))
    mean = np.mean(layers, axis=0).tolist()
    top_k = records[0].layers[0].top_k
    return {
        "top_k": top_k,
        "mean": mean,
        "lowest_layer": np.min(layers, axis=0).tolist(),
        "highest_layer": np.max(layers, axis=0).tolist(),
        "next_over_last": mean[top_k] / mean[top_k - 1] if top_k < len(mean) else None,
        "share_beyond": 1 - sum(mean[:top_k]) / sum(mean),
    }


def draw_gate_scores(numbers: Numbers) -> Figure:
    """Draw Figure 8, one panel a model."""
    models = numbers["models"]
    figure, axes = style.model_panels(models, 1.8, same_scale=False)
    for ax, model in zip(axes, models, strict=True):
        ranks = range(1, len(model["mean"]) + 1)
        band, label = (model["lowest_layer"], model["highest_layer"]), "lowest to highest layer"
        ax.fill_between(ranks, *band, color=style.SKY, alpha=0.5, linewidth=0, label=label)
        ax.plot(ranks, model["mean"], color=style.BLUE, marker="o", markersize=1.8, label="mean")
        ax.axvline(model["top_k"] + 0.5, color=BLACK, linestyle="--", linewidth=0.7)
        # Above the panel: a model with few experts leaves no room within it.
        said = f"k = {model['top_k']}, beyond: {100 * model['share_beyond']:.0f} %"
        if model["next_over_last"] is not None:
            said = f"rank k+1 / rank k: {model['next_over_last']:.2f}\n{said}"
        ax.set(ylim=(0, None), xlabel="rank of the expert")
        ax.set_title(f"{model['model']}\n{said}", fontsize=6.5)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("gate score")
    style.legend_below(figure, axes[0], columns=2)
    return figure
