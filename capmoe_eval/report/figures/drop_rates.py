"""Drop rates by γ: of datasets (Figure 7), of layers (17 to 20); padding waste."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import Grid, by_layer, layers_of, pooled_grid
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLACK, column, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))


def measure_by_task(evidence: FigureRecords) -> Measured:
    """Figure 7: for each model, the dropped share on each dataset and on all together."""
    found = []
    for title, records in evidence.by_model("routing").items():
        everything = pooled_grid(layers_of(records))
        tasks = {evidence.tasks[r.task]: pooled_grid(layers_of([r])).drop_rate for r in records}
        found.append(
            {
                "model": title,
                "gamma": everything.gamma,
                "all": everything.drop_rate,
                "tasks": tasks,
            }
        )
    return Measured({"models": found})


def draw_by_task(numbers: Numbers) -> Figure:
    """Draw Figure 7, one panel a model."""
    models = numbers["models"]
    figure, axes = style.panels(len(models), 1.75)
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
    """Figures 17 to 20: for one model, the dropped share in each layer, over all datasets."""
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
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    layers, gammas = numbers["layers"], numbers["gamma"]
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    figure = style.new_figure(style.COLUMN, 2.1)
    axes = figure.subplots()
    few = count <= len(style.MARKERS)
    for number, layer in enumerate(layers):
        axes.plot(
            gammas,
            percent(layer["drop_rate"]),
            color=shades[number],
            linewidth=0.8,
            marker=style.MARKERS[number] if few else "",
            markevery=(number % 4, 4),
            label=f"MoE layer {number + 1}" if few else None,
        )
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

    The smallest of equal ones; a γ without slots (0) has no padding waste and is no candidate.
    None where no γ of the grid has slots.

    Args:
        grid: Drop rate and padding waste by γ.
        penalty: λ, the cost of a dropped share in units of an empty share.
    """
    costs = [
        (penalty * drop + waste, gamma)
        for gamma, drop, waste in zip(grid.gamma, grid.drop_rate, grid.pad_waste, strict=True)
        if waste is not None
    ]
    return min(costs)[1] if costs else None


def measure_waste(evidence: FigureRecords) -> Measured:
    """Pool each model's grid over layers and tasks, and find the best γ by penalty."""
    models: list[Numbers] = []
    notes = []
    for title, records in evidence.by_model("routing").items():
        grid = pooled_grid(layers_of(records))
        best, sweep = (
            [{"penalty": penalty, "gamma": best_gamma(grid, penalty)} for penalty in penalties]
            for penalties in (PENALTIES, _SWEEP)
        )
        models.append({"model": title, **asdict(grid), "best": best, "sweep": sweep})
        largest = grid.gamma[-1]
        at_end = [f"{choice['penalty']:g}" for choice in best if choice["gamma"] == largest]
        if at_end:
            notes.append(
                f"{title}: the best γ is the largest of the grid, {gamma_number(largest)}, for "
                f"λ = {', '.join(at_end)}; a larger one may be better."
            )
    return Measured({"models": models}, notes)


def draw_waste(numbers: Numbers) -> Figure:
    """Draw padding against drops with the best γ marked, and the best γ by penalty."""
    figure = style.new_figure(style.PAGE, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
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
        right.step(
            column(sweep, "penalty"),
            # Lines of equal height would hide each other.
            [point["gamma"] + 0.02 * index for point in sweep],
            where="mid",
            color=look["color"],
            linestyle=look["linestyle"],
        )
    left.set(xlabel="padding waste: empty slots (%)", ylabel="drop rate (%)")
    left.grid()
    left.set_ylim(bottom=-2)
    right.set_xscale("log")
    right.set_xticks([0.1, 1, 5, 20, 100], ["0.1", "1", "5", "20", "100"])
    right.minorticks_off()
    right.set(xlabel="penalty λ of a drop", ylabel="best γ")
    right.grid()
    style.legend_below(figure, left, columns=4)
    left.set_title("γ from 0.25 (top left) in steps of 0.25; rings: best γ for λ = 1, 5, 20")
    right.set_title("γ that minimises λ · drop rate + waste")
    return figure
