"""Routing without a limit: what would be dropped and padded (Figures 7, 17-20), gate scores (8)."""

from __future__ import annotations

from typing import Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.expert_load import PAPER_MODELS
from capmoe_eval.report.figures.sources import Sources

_ALL: Final = "all"
GRID: Final = {
    "grid": "What Token Drop would drop (Equation 11, with whole-number capacities) from the "
    "routing of the model without a limit, the whole batch being one group. Under emulated ranks "
    "each rank has its own capacity, rounded up, and drops another share (see fig12)."
}
"""What the captions of figures of the grid have in common."""


def pooled_grid(layers: pd.DataFrame) -> pd.DataFrame:
    """Return what Token Drop would do to layers together, over whatever tasks: a row for each γ.

    ``drop_rate`` is the dropped share of assignments (Equation 11), ``pad_waste`` the empty share
    of slots, missing where there are none (γ=0). A layer has shares. The slots behind a share of
    padding follow from it: what was kept, assignments · (1 - drop rate), fills the share
    1 - padding waste of them.
    """
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


def _dropped(layers: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return each model's dropped share by γ for each value of a column, and for all together."""
    parts = []
    for model, of_model in d.each(layers, "title"):
        for value, same in [*d.each(of_model, by), (_ALL, of_model)]:
            rows = pooled_grid(same)
            about: d.Look = {
                "model": model,
                by: value,
                "dropped_percent": 100 * rows.pop("drop_rate"),
            }
            parts.append(rows.drop(columns="pad_waste").assign(**about))
    return pd.concat(parts, ignore_index=True)


def dropped_by_task(sources: Sources) -> pd.DataFrame:
    """Return each model's dropped share by γ on each dataset, and on all together."""
    return _dropped(sources.layers("routing"), "asked").rename(columns={"asked": "task"})


@figure(
    "Figure 7 (v1: 5)", "Dropped share of assignments by γ and dataset", dropped_by_task,
    words=GRID, parts=["routing"],
)  # fmt: skip
def fig7(rows: pd.DataFrame) -> d.Figure:
    """{grid} All tasks: every assignment counts equally, so long prompts weigh more."""
    canvas, grid = d.panels(rows, "model", 1.7, sharey=True)
    tasks = d.places(rows["task"][rows["task"] != _ALL])
    looks = {
        task: d.line_look(place, 6, markevery=(place % 4, 4), linewidth=0.8)
        for task, place in tasks.items()
    }
    for title, same, axes in grid:
        d.lines(axes, same[same["task"] != _ALL], "gamma", "dropped_percent", "task", looks)
        every = same[same["task"] == _ALL]
        d.line(axes, every, "gamma", "dropped_percent", "all tasks", color=d.BLACK)
        d.gamma_axis(axes, same["gamma"])
        axes.set(title=title, ylim=(0, 100), ylabel="dropped (%)")
        axes.label_outer()
    d.legend(canvas, 4)
    return canvas


def dropped_by_layer(sources: Sources) -> pd.DataFrame:
    """Return a model's dropped share by γ in each layer over all datasets, and in all layers."""
    layers = sources.layers("routing")
    rows = _dropped(layers.assign(layer=layers["layer"] + 1), "layer")
    return rows.assign(tasks=layers["task"].nunique())


def _by_layers(rows: pd.DataFrame) -> d.Figure:
    """{grid} The paper shows {paper_model}."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    canvas, ((axes,),) = d.canvas(2.4)
    *layers, (_, everything) = d.each(rows, "layer")
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    for place, ((_, same), shade) in enumerate(zip(layers, shades, strict=True)):
        look: d.Look = {"marker": d.MARKERS[place % len(d.MARKERS)], "markevery": (place % 4, 4)}
        d.line(axes, same, "gamma", "dropped_percent", color=shade, linewidth=0.8, **look)
    look = {"color": d.BLACK, "linestyle": "--"}
    d.line(axes, everything, "gamma", "dropped_percent", "all layers", **look)
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


for _place, _model in enumerate((PAPER_MODELS[0], "DeepSeek-V2-Chat", *PAPER_MODELS[2:])):
    figure(
        f"Figure {17 + _place} (v1: {12 + _place})",
        "Dropped share of assignments by γ, layer by layer: {model}",
        dropped_by_layer,
        f"fig{17 + _place}",
        GRID | {"paper_model": _model},
        parts=["routing"],
        model=_place,
    )(_by_layers)


def scores_by_rank(sources: Sources) -> pd.DataFrame:
    """Return the mean gate score at each rank, over tokens and layers, and the layers' extremes."""
    parts = []
    for title, layers in d.each(sources.layers("routing"), "title"):
        if (absent := layers["score_by_rank"].isna()).any():
            tasks = ", ".join(layers["task"][absent].unique())
            text = f"{title}: no scores by rank in the records of {tasks}"
            sources.notes.append(f"{text}; compute them anew with overwrite=true.")
            continue
        means = [
            np.average(same["score_by_rank"].tolist(), 0, same["tokens"])
            for _, same in layers.groupby("layer")
        ]
        columns: d.Look = {"gate_score": np.mean, "lowest_layer": np.min, "highest_layer": np.max}
        rows = pd.DataFrame({name: of(means, axis=0) for name, of in columns.items()})
        rows["rank"], rows["top_k"] = range(1, len(rows) + 1), layers["top_k"].iloc[0]
        parts.append(rows.assign(model=title))
    if not parts:
        raise UsageError(f"fig8: {sources.notes[-1]}")
    return pd.concat(parts, ignore_index=True)


@figure("Figure 8", "Gate score by rank", scores_by_rank, parts=["routing"])
def fig8(rows: pd.DataFrame) -> d.Figure:
    """Mean gate score of a token's highest, second, … expert, over the tokens of all tasks. The
    band spans the layers' means. The paper draws the minimum and the maximum over tokens, which
    records do not have: they hold means over tokens. “Beyond”: the share of a token's scores that
    the experts outside its top-k have.
    """
    from matplotlib.ticker import MaxNLocator

    canvas, grid = d.panels(rows, "model", 1.95)
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
        axes.set_title(f"{title}\n{words}")
        axes.set(xlabel="rank of the expert", ylabel="gate score", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    d.legend(canvas)
    return canvas
