"""Load of experts: in one layer (Figures 1, 2, 9) and in all layers (13 to 16)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import figure as printed_figure
from capmoe_eval.paper.printed import figure1_bars, published_note
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import Sources

PAPER_MODELS: Final = (
    *("OLMoE-Instruct", "DeepSeek-V2-Lite", "Qwen1.5-MoE-Chat", "Mixtral-8×7B-Instruct"),
)
"""What Figures 13 to 16, 17, 19 and 20 show in the paper: `profile.figures.models`, in order."""
_FEW: Final = 20
"""The numbers of more experts would run into each other."""


def load_of_layers(sources: Sources, *parts: str) -> pd.DataFrame:
    """Return the layers of some parts with ``load`` and ``load_left``, before and after drops.

    Loads are over the mean load N̄ that the router asks for. Layers are counted from 1.
    """
    layers = sources.layers(*parts)
    for name, column in (("load", "load_before"), ("load_left", "load_after")):
        loads = zip(layers[column], layers["assignments"], layers["n_experts"], strict=True)
        layers[name] = [np.array(load) * (count / pairs) for load, pairs, count in loads]
    names = {f"peak.expert_before.{of}": f"peak_{of}" for of in ("mean", "max")}
    layers = layers.astype({"effective_gamma": float})  # None in records from before this field
    return layers.assign(layer=layers["layer"] + 1).rename(columns=names)


def fullest_layer(layers: pd.DataFrame) -> pd.DataFrame:
    """Return the layer with the fullest expert, on average over the cells: a row for each cell."""
    peaks = layers["load"].map(max).groupby(layers["layer"]).mean()
    return layers[layers["layer"] == peaks.idxmax()]


def _ranked(layers: pd.DataFrame, *columns: str, load: str = "load") -> pd.DataFrame:
    """Return a row for each expert of some layers: ``place`` and ``load``, the fullest first."""
    loads = [np.sort(each)[::-1] for each in layers[load]]
    lists: dict[str, Any] = {"place": [range(len(each)) for each in loads], "load": loads}
    rows = layers[list(columns)].assign(**lists)
    rows = rows.explode(["place", "load"], ignore_index=True)
    return rows.astype({"place": int, "load": float})


def of_one_layer(sources: Sources) -> pd.DataFrame:
    """Return the load of each expert in the layer with the fullest, the fullest first."""
    layer = fullest_layer(load_of_layers(sources, "one_task")).assign(model=sources.title)
    rows = _ranked(layer, "model", "asked", "layer", "peak_mean", "peak_max")
    if published := figure1_bars(sources.model, len(rows)):
        rows["paper"] = published
        sources.notes.append(published_note("figure1"))
    return rows.rename(columns={"asked": "task"})


@figure(
    "Figure 1", "Load of one layer's experts: {model}", of_one_layer, parts=["one_task"],
)  # fmt: skip
def fig1(rows: pd.DataFrame) -> d.Figure:
    """Load of each expert over the mean load N̄ without a limit, in the layer with the fullest
    expert; on one task, OpenBookQA in the paper. Everyone waits for the fullest expert of a batch.
    """
    canvas, ((axes,),) = d.canvas(2.1)
    first = rows.iloc[0]
    d.load_bars(axes, rows["load"], "ours (mean over batches)")
    d.rule(axes, 1.0, "--", 0.7)
    axes.annotate("mean load N̄", (len(rows) - 0.5, 1.0), ha="right", va="bottom")
    if "paper" in rows:
        look = {"marker": "o", "markersize": 2, "linewidth": 0.6, "color": d.VERMILLION}
        d.line(axes, rows, "place", "paper", "paper (peak over batches)", **look)
        axes.legend(loc="center right")
    text = (
        f"fullest expert: {first['load']:.1f} × the mean\n"
        f"in a batch: {first['peak_mean']:.1f} ×, at most {first['peak_max']:.1f} ×"
    )
    axes.annotate(text, (0.98, 0.97), xycoords="axes fraction", ha="right", va="top")
    axes.set_title(f"{first['model']}, {first['task']}, MoE layer {first['layer']}")
    return canvas


def by_task(sources: Sources) -> pd.DataFrame:
    """Return the load of each expert in one layer on each task, in one order of the experts."""
    layers = fullest_layer(load_of_layers(sources, "baseline"))
    order = np.argsort(-np.mean(layers["load"].tolist(), axis=0), kind="stable").tolist()
    rows = layers[["asked", "layer", "load", "peak_max"]].rename(columns={"asked": "task"})
    rows = rows.assign(model=sources.title, load=[load[order] for load in rows["load"]])
    rows["expert"] = [order] * len(rows)
    return rows.explode(["load", "expert"]).astype({"load": float, "expert": int})


@figure(
    "Figure 2", "Load of one layer's experts by dataset: {model}", by_task, parts=["baseline"]
)  # fmt: skip
def fig2(rows: pd.DataFrame) -> d.Figure:
    """Load of each expert over the mean load N̄ without a limit, by dataset, in the layer whose
    fullest expert is fullest on average. At the right the fullest expert over all batches and, in
    brackets, in a single batch; the paper draws the latter, for every expert.
    """
    tasks = dict(d.each(rows, "task"))
    canvas, ((axes,),) = d.canvas(0.95 + 0.18 * len(tasks))
    d.loads_map(axes, [same["load"] for same in tasks.values()], "load / mean load", 12)
    experts = next(iter(tasks.values()))["expert"]
    names = list(map(str, experts)) if len(experts) <= _FEW else []
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("expert, busiest first on average")
    axes.set_yticks(range(len(tasks)), list(tasks))
    right = axes.secondary_yaxis("right")
    peaks = [f"{t['load'].max():.1f} × ({t['peak_max'].iloc[0]:.1f} ×)" for t in tasks.values()]
    right.set_yticks(range(len(peaks)), peaks)
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    where = f"{rows['model'].iloc[0]}, MoE layer {rows['layer'].iloc[0]}"
    axes.set_title(f"{where}\nright: fullest expert over all batches (in one batch)")
    return canvas


def after_drop(sources: Sources) -> pd.DataFrame:
    """Return what the experts of one layer compute by method, sorted, and what was asked for."""
    layers = load_of_layers(sources, "token_drop", "ranked", "all_experts")
    layers = fullest_layer(layers[layers["asked"] == next(iter(sources.tasks.values()))])
    layers = layers.assign(model=sources.title, method=layers.apply(_drop_label, axis=1))
    layers["effective_gamma"] = layers["effective_gamma"].iloc[0]
    columns = "model", "asked", "layer", "cell.gamma", "effective_gamma", "method"
    before = layers[:1].assign(method="asked for (Token Drop)")
    rows = [_ranked(before, *columns), _ranked(layers, *columns, load="load_left")]
    return pd.concat(rows).rename(columns={"asked": "task", "cell.gamma": "gamma"})


def _drop_label(layer: pd.Series[Any]) -> str:
    if not isinstance(layer["candidates"], str):  # of Token Drop, which adds nobody
        return method_title(layer["method"])
    if layer["candidates"] == "global":
        return "Expanded, all experts"
    times, rest = divmod(int(layer["m"]), layer["top_k"])
    return f"Expanded, m = {int(layer['m'])}" + (f" ({times}k)" if not rest else "")


@figure(
    "Figure 9", "Expert load after Token Drop and Expanded Drop: {model}", after_drop,
    parts=["token_drop", "ranked", "all_experts"],
)  # fmt: skip
def fig9(rows: pd.DataFrame) -> d.Figure:
    """Load that the experts of one layer compute, over N̄ before any drop, sorted for each
    method by itself; dotted: γ. m is the number of added candidates per token. A flat line uses
    every slot. Capacities are rounded up on each rank, so that with few tokens a line can lie above
    γ; dashed: γ after rounding, of records that have it.
    """
    canvas, ((axes,),) = d.canvas(2.6)
    (asked, bars), *methods = d.each(rows, "method")
    d.load_bars(axes, bars["load"], asked, color="#e0e0e0", width=1.0)
    step = max(1, len(bars) // 10)
    for index, (name, same) in enumerate(methods):
        look = d.line_look(index, markevery=(index * step // 4, step))
        d.line(axes, same, "place", "load", name, **look)
    first = rows.iloc[0]
    d.rule(axes, first["gamma"], ":", 0.6)
    if not np.isnan(effective := first["effective_gamma"]):
        d.rule(axes, effective, "--", 0.6, f"γ after rounding: {effective:.2f}")
    where = f"{first['model']}, {first['task']}, MoE layer {first['layer']}"
    axes.set_title(where + gamma_suffix(first["gamma"], ", γ = "))
    d.legend(canvas)
    return canvas


def by_layer(sources: Sources) -> pd.DataFrame:
    """Return each layer's sorted loads, mean over tasks, and the peaks of its batches."""
    layers = load_of_layers(sources, "routing")
    means = {"load": ("load", lambda loads: np.mean(loads.tolist(), axis=0))}
    peaks = {"peak_mean": ("peak_mean", "mean"), "peak_max": ("peak_max", "max")}
    rows = layers.groupby("layer", as_index=False).agg(**means, **peaks)
    rows = rows.assign(model=sources.title, tasks=layers["task"].nunique())
    if printed := printed_figure("fig13_16_peak_load_over_mean").get(sources.model):
        text = f"The paper's text says of these peaks: {printed['text']} N̄ (Appendix F)."
        sources.notes.append(text)
        rows["paper"], rows["paper_text"] = printed["value"], printed["text"]
    return _ranked(rows, *map(str, rows.columns.drop("load")))


def _all_layers(rows: pd.DataFrame) -> d.Figure:
    """Load of each expert over the mean load N̄ without a limit, mean over tasks; experts are
    sorted within each layer. Right: the highest load of an expert in a batch. The paper shows
    {paper_model}, and draws for each expert its peak over batches.
    """
    of_layers = rows.drop_duplicates("layer").assign(row=range(rows["layer"].nunique()))
    count, first = len(of_layers), rows.iloc[0]
    layout = {"sharey": True, "width_ratios": [3, 2]}
    canvas, ((left, right),) = d.canvas(1.4 + 0.115 * max(count, 8), 1, 2, **layout)
    loads = [same["load"] for _, same in d.each(rows, "layer")]
    d.loads_map(left, loads, "load / N̄", 14)
    left.set_title(f"{first['model']},\nmean of {first['tasks']} tasks")
    left.set_xticks([])
    left.set_xlabel(f"the {len(loads[0])} experts of each layer, busiest first")
    ticks = range(0, count, 1 if count <= 8 else 2 if count <= 16 else 4)
    left.set_yticks(ticks, [str(tick + 1) for tick in ticks])
    left.set_ylabel("MoE layer")
    look = {"color": d.BLUE, "marker": "o", "linewidth": 0.6}
    d.line(right, of_layers, "peak_mean", "row", "mean over batches", **look)
    look = {"color": d.VERMILLION, "marker": "^", "linewidth": 0.6, "linestyle": ":"}
    d.line(right, of_layers, "peak_max", "row", "highest of any batch", **look)
    if "paper" in rows:
        text = f"paper's text: {first['paper_text']}"
        d.rule(right, first["paper"], "--", 0.7, text, is_upright=True)
    right.grid(False, axis="y")
    right.tick_params(axis="y", labelleft=True)
    right.set(xlabel="peak load / mean load", xlim=(0, None))
    d.legend(canvas)
    return canvas


for _place, _model in enumerate(PAPER_MODELS):
    figure(
        f"Figure {13 + _place} (v1: {8 + _place})",
        "Load of the experts, layer by layer: {model}",
        by_layer,
        f"fig{13 + _place}",
        {"paper_model": _model},
        parts=["routing"],
        model=_place,
    )(_all_layers)
