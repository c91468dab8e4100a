"""Routing without a limit: what would be dropped and padded (Figures 7, 17-20), gate scores (8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.expert_load import PAPER_MODELS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capmoe_eval.report.figures.evidence import FigureRecords

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))
_ALL: Final = "all"
_GRID: Final = {
    "grid": "What Token Drop would drop (Equation 11, with whole-number capacities) from the "
    "routing of the model without a limit, the whole batch being one group. Under emulated ranks "
    "each rank has its own capacity and more is dropped (see fig12)."
}


def pooled_grid(layers: pd.DataFrame) -> pd.DataFrame:
    """Return what Token Drop would do to layers together, over whatever tasks: a row for each γ.

    ``drop_rate`` is the dropped share of assignments (Equation 11), ``pad_waste`` the empty share
    of slots, missing where there are none (γ=0). A layer has shares. The slots behind a share of
    padding follow from it: what was kept, assignments · (1 - drop rate), fills the share
    1 - padding waste of them.
    """
    import pandas as pd

    assignments = layers["assignments"].to_numpy(float)[:, None]
    drop, waste = (
        np.array(layers[f"grid.{name}"].tolist(), dtype=float)
        for name in ("drop_rate", "pad_waste")
    )
    kept = assignments * (1 - drop)
    slots = np.divide(kept, 1 - waste, out=np.zeros_like(kept), where=waste < 1).sum(axis=0)
    filled = np.divide(kept.sum(axis=0), slots, out=np.full(len(slots), np.nan), where=slots > 0)
    return pd.DataFrame(
        {
            "gamma": layers["grid.gamma"].iloc[0],
            "drop_rate": (assignments * drop).sum(axis=0) / assignments.sum(),
            "pad_waste": 1 - filled,
        }
    )


def _dropped(groups: Sequence[tuple[dict[str, Any], pd.DataFrame]]) -> pd.DataFrame:
    import pandas as pd

    grids = [pooled_grid(layers).assign(**about) for about, layers in groups]
    rows = pd.concat(grids, ignore_index=True)
    rows["dropped_percent"] = 100 * rows.pop("drop_rate")
    return rows.drop(columns="pad_waste")


def dropped_by_task(sources: FigureRecords) -> pd.DataFrame:
    """Return each model's dropped share by γ on each dataset, and on all together."""
    groups = []
    for model, layers in d.each(sources.layers("routing"), "model"):
        title = {"model": sources.models[model]}
        of_tasks = d.each(layers, "task")
        groups += [(title | {"task": sources.tasks[task]}, same) for task, same in of_tasks]
        groups.append((title | {"task": _ALL}, layers))
    return _dropped(groups)


@figure(
    "Figure 7 (v1: 5)", "Dropped share of assignments by γ and dataset", dropped_by_task,
    words=_GRID, parts=["routing"],
)  # fmt: skip
def fig7(rows: pd.DataFrame) -> Figure:
    """{grid} All tasks: every assignment counts equally, so long prompts weigh more."""
    canvas, grid = d.panels(rows, "model", 1.75, sharey=True)
    number = d.places(rows["task"][rows["task"] != _ALL])
    for title, same, axes in grid:
        for task, curve in d.each(same, "task"):
            look: d.Look = {"color": d.BLACK}
            if task != _ALL:
                place = number[task]
                look = d.line_look(place, 6, markevery=(place % 4, 4), linewidth=0.8)
            name = "all tasks" if task == _ALL else task
            d.line(axes, curve, "gamma", "dropped_percent", name, **look)
        d.gamma_axis(axes, same["gamma"])
        axes.set(title=title, ylim=(0, 100))
    grid[0][2].set_ylabel("dropped (%)")
    d.legend(canvas, 7 if len(grid) > 1 else 4)
    return canvas


def dropped_by_layer(sources: FigureRecords) -> pd.DataFrame:
    """Return a model's dropped share by γ in each layer over all datasets, and in all layers."""
    layers = sources.layers("routing")
    title = {"model": sources.title, "tasks": layers["task"].nunique()}
    groups = [(title | {"layer": n + 1}, same) for n, same in layers.groupby("layer")]
    return _dropped([*groups, (title | {"layer": _ALL}, layers)])


def _by_layers(rows: pd.DataFrame) -> Figure:
    """{grid} The paper shows {paper_model}."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    canvas, ((axes,),) = d.canvas(d.COLUMN, 2.1)
    *layers, (_, everything) = d.each(rows, "layer")
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    is_few = count <= len(d.MARKERS)
    for place, (number, same) in enumerate(layers):
        look = {"color": shades[place], "linewidth": 0.8, "markevery": (place % 4, 4)}
        marker = {"marker": d.MARKERS[place]} if is_few else {}
        name = f"MoE layer {number}" if is_few else ""
        d.line(axes, same, "gamma", "dropped_percent", name, **look, **marker)
    look = {"color": d.BLACK, "linestyle": "--"}
    d.line(axes, everything, "gamma", "dropped_percent", "all layers", **look)
    if not is_few:
        norm = BoundaryNorm([number + 0.5 for number in range(count + 1)], count)
        colours = ScalarMappable(norm, ListedColormap(shades))
        bar = canvas.colorbar(colours, ax=axes, label="MoE layer", pad=0.02)
        bar.set_ticks(range(1, count + 1, max(1, -(-count // 8))))
        bar.ax.tick_params(length=0, which="both")
    d.gamma_axis(axes, rows["gamma"])
    first = rows.iloc[0]
    axes.set(title=f"{first['model']}, {first['tasks']} tasks", ylim=(0, 100), ylabel="dropped (%)")
    axes.legend()
    return canvas


for _place, _model in enumerate(PAPER_MODELS):
    figure(
        f"Figure {17 + _place} (v1: {12 + _place})",
        "Dropped share of assignments by γ, layer by layer: {model}",
        dropped_by_layer,
        f"fig{17 + _place}",
        _GRID | {"paper_model": _model},
        parts=["routing"],
        model=_place,
    )(_by_layers)


def scores_by_rank(sources: FigureRecords) -> pd.DataFrame:
    """Return the mean gate score at each rank, over tokens and layers, and the layers' extremes."""
    import pandas as pd

    parts = []
    for model, layers in d.each(sources.layers("routing"), "model"):
        has_scores = layers["score_by_rank"].notna().groupby(layers["task"]).transform("all")
        if not has_scores.all():
            tasks = ", ".join(layers["task"][~has_scores].unique())
            sources.notes.append(
                f"{sources.models[model]}: no scores by rank in the records of {tasks}; compute "
                "them anew with overwrite=true."
            )
        if has_scores.any():
            means = [
                np.average(same["score_by_rank"].tolist(), 0, same["tokens"])
                for _, same in layers[has_scores].groupby("layer")
            ]
            columns = {"gate_score": np.mean, "lowest_layer": np.min, "highest_layer": np.max}
            rows = pd.DataFrame({name: of(means, axis=0) for name, of in columns.items()})
            rows["rank"], rows["top_k"] = range(1, len(rows) + 1), layers["top_k"].iloc[0]
            parts.append(rows.assign(model=sources.models[model]))
    if not parts:
        raise UsageError(f"fig8: {sources.notes[-1]}")
    return pd.concat(parts, ignore_index=True)


@figure("Figure 8", "Gate score by rank", scores_by_rank, parts=["routing"])
def fig8(rows: pd.DataFrame) -> Figure:
    """Mean gate score of a token's highest, second, … expert, over the tokens of all tasks. The
    band spans the layers' means; the paper's spans tokens. “Beyond”: the share of a token's scores
    that the experts outside its top-k have.
    """
    from matplotlib.ticker import MaxNLocator

    canvas, grid = d.panels(rows, "model", 1.8)
    for title, same, axes in grid:
        mean, top_k = same["gate_score"].tolist(), same["top_k"].iloc[0]
        axes.grid(False)
        ends = same["lowest_layer"], same["highest_layer"]
        band = {"color": d.SKY, "alpha": 0.5, "linewidth": 0}
        axes.fill_between(same["rank"], *ends, **band, label="lowest to highest layer")
        look = {"color": d.BLUE, "marker": "o", "markersize": 1.8}
        d.line(axes, same, "rank", "gate_score", "mean", **look)
        d.rule(axes, top_k + 0.5, "--", 0.7, is_upright=True)
        # Above the panel: a model with few experts leaves no space within it.
        words = f"k = {top_k}, beyond: {100 * (1 - sum(mean[:top_k]) / sum(mean)):.0f} %"
        if top_k < len(mean):
            words = f"rank k+1 / rank k: {mean[top_k] / mean[top_k - 1]:.2f}\n{words}"
        axes.set_title(f"{title}\n{words}", fontsize=6.5)
        axes.set(xlabel="rank of the expert", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    grid[0][2].set_ylabel("gate score")
    d.legend(canvas, 2)
    return canvas


def best_gamma(grid: pd.DataFrame, penalty: float) -> float | None:
    """Return the γ that minimises ``penalty · drop rate + padding waste``.

    The penalty is λ, the cost of a dropped share in units of an empty share. The smallest of equal
    γ is taken; one without slots (0) has no padding waste and is no candidate. None if all are so.
    """
    costs = penalty * grid["drop_rate"] + grid["pad_waste"]
    return float(grid["gamma"][costs.idxmin()]) if costs.notna().any() else None


def waste_by_gamma(sources: FigureRecords) -> pd.DataFrame:
    """Return drops and padding by γ, and the best γ by penalty: rows of one kind, then the other.

    ``best_for`` has those of the penalties 1, 5 and 20 that a γ is best for.
    """
    import pandas as pd

    parts = []
    for model, layers in d.each(sources.layers("routing"), "model"):
        title, grid = sources.models[model], pooled_grid(layers)
        best = {penalty: best_gamma(grid, penalty) for penalty in PENALTIES}
        of_gamma = grid.assign(
            model=title,
            dropped_percent=100 * grid["drop_rate"],
            padding_percent=100 * grid["pad_waste"],
            best_for=[
                " ".join(f"{penalty:g}" for penalty, at in best.items() if at == gamma)
                for gamma in grid["gamma"]
            ],
        ).drop(columns=["drop_rate", "pad_waste"])
        sweep = {penalty: best_gamma(grid, penalty) for penalty in _SWEEP}
        of_penalty = pd.DataFrame({"penalty": list(sweep), "best_gamma": list(sweep.values())})
        parts += [of_gamma, of_penalty.assign(model=title)]
        last = grid["gamma"].iloc[-1]
        if at_end := [f"{penalty:g}" for penalty, gamma in best.items() if gamma == last]:
            sources.notes.append(
                f"{title}: the best γ is the largest of the grid, {gamma_text(last)}, "
                f"for λ = {', '.join(at_end)}; a larger one may be better."
            )
    return pd.concat(parts, ignore_index=True)


@figure(
    "not in the paper", "Drop rate against padding waste, and the best γ for a penalty",
    waste_by_gamma, words=_GRID, parts=["routing"],
)  # fmt: skip
def waste(rows: pd.DataFrame) -> Figure:
    """{grid} Padding waste: empty slots over slots. The best γ minimises λ · drop rate + padding
    waste over the grid 0.25, 0.5, … 4; right: lines are set apart by 0.02.
    """
    canvas, ((left, right),) = d.canvas(d.PAGE, 2.5, 1, 2, width_ratios=[3, 2])
    right.set_xscale("log")
    for index, (title, same) in enumerate(d.each(rows, "model")):
        look = d.line_look(index)
        grid, sweep = same[same["penalty"].isna()], same[same["penalty"].notna()]
        axes = "padding_percent", "dropped_percent"
        d.line(left, grid, *axes, title, **look | {"markersize": 2.2, "linewidth": 0.8})
        ring = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "color": look["color"]}
        d.line(left, grid[grid["best_for"] != ""], *axes, **ring | {"linestyle": ""})
        look = {"color": look["color"], "linestyle": look["linestyle"], "drawstyle": "steps-mid"}
        apart = sweep.assign(best_gamma=sweep["best_gamma"] + 0.02 * index)  # equals hide
        d.line(right, apart, "penalty", "best_gamma", **look)
    left.set_title("γ from 0.25 (top left) in steps of 0.25; rings: best γ for λ = 1, 5, 20")
    left.set(xlabel="padding waste: empty slots (%)", ylabel="drop rate (%)", ylim=(-2, None))
    right.set_title("γ that minimises λ · drop rate + waste")
    right.set(xlabel="penalty λ of a drop", ylabel="best γ")
    right.set_xticks([0.1, 1, 5, 20, 100], ["0.1", "1", "5", "20", "100"])
    right.minorticks_off()
    d.legend(canvas, 4)
    return canvas
