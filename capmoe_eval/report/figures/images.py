"""Images and text: their loads (Figure 10), MMBench (Figure 11), and what is dropped of each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import method_title
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import figure as printed_figure
from capmoe_eval.paper.printed import published_note
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.expert_load import fullest_layer, load_of_layers
from capmoe_eval.report.figures.sources import Sources

_PAPER: Final = "MolmoE (paper)"
_CAPABILITIES: Final = ("AR", "CP", "FP-C", "FP-S", "LR", "RR")


def modality_loads(sources: Sources) -> pd.DataFrame:
    """Return each expert's load by modality, in the layer with the fullest, and the paper's."""
    layers = told_apart(sources, load_of_layers(sources, "images"), "modalities.text.load_before")
    layer = fullest_layer(layers).iloc[0]
    ours = {name: layer[f"modalities.{name}.load_before"] for name in ("image", "text")}
    total, text = (printed_figure(f"fig10_{name}_pixels_pm0.03") for name in ("total", "text"))
    theirs = {"image": np.clip(np.subtract(total, text), 0, None), "text": text}
    sources.notes.append(published_note("figure10"))
    where = f"{sources.title}, {layer['asked']}, MoE layer {layer['layer']}"
    sides = []
    for source, loads in ((where, ours), (f"{_PAPER}, as published", theirs)):
        rows = pd.DataFrame(loads)
        both = rows.sum(axis=1)
        rows = (rows / both.mean()).iloc[np.argsort(-both, kind="stable")]
        share = 100 * rows["text"].sum() / rows.to_numpy().sum()
        sides.append(rows.assign(source=source, text_percent=share, place=range(len(rows))))
    return pd.concat(sides, ignore_index=True)


def told_apart(sources: Sources, rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return cells or their layers; UsageError if one lacks a column, which is of a modality."""
    absent = rows[name].isna() if name in rows else rows["cell"].notna()
    if absent.any():
        paths = sources.results.cells.set_index("cell")["path"]
        path = paths[rows["cell"][absent].iloc[0]]
        raise UsageError(f"{path}: tells no modalities; run it again with overwrite=true")
    return rows


@figure(
    "Figure 10", "Assignments of image and text tokens by expert: {model}", modality_loads,
    parts=["images"], tasks=["mme"],
)  # fmt: skip
def fig10(rows: pd.DataFrame) -> d.Figure:
    """Load of each expert over the mean load N̄ without a limit, on MME, in the layer with the
    fullest expert, of text tokens and above them of image tokens; summed over all queries. Below:
    what the paper shows of MolmoE, over its own mean; it names neither the layer nor the queries.
    """
    canvas, grid = d.panels(rows, "source", 1.7, 1)
    for source, same, axes in grid:
        axes.grid(False)
        below: Any = 0.0
        for name, look in {"text": d.BARS[3], "image": d.BARS[1] | {"hatch": ""}}.items():
            style = look | {"width": 0.85, "linewidth": 0.3, "bottom": below}
            axes.bar(same["place"], same[name], **style, label=name)
            below = same[name]
        share = f"text: {same['text_percent'].iloc[0]:.1f} % of the assignments"
        axes.annotate(share, (0.98, 0.95), xycoords="axes fraction", ha="right", va="top")
        axes.set(
            title=source, xlabel="experts, busiest first", ylabel="load / mean load", xticks=[]
        )
    d.legend(canvas)
    return canvas


def by_capability(sources: Sources) -> pd.DataFrame:
    """Return scores by capability, unlimited and at γ = 0.5 with images first, and the paper's."""
    printed = printed_figure("fig11_mmbench")
    methods = [method_title(name) for name in ("baseline", "score", "expanded_drop")]
    sources.notes.append(published_note("figure11"))
    of_all = sources.results.cells
    of_all = of_all.assign(source=sources.title, method=of_all["method"].map(method_title))
    sides = []
    for name in _CAPABILITIES:
        cells = of_all[of_all["metric"] == name]
        numbers = 100 * cells[["value", "stderr"]].astype(float)
        ours = cells[["source", "method"]].join(numbers.rename(columns={"value": "score"}))
        theirs = {"source": _PAPER, "method": methods, "score": printed[name]}
        sides += [side.assign(capability=name) for side in (ours, pd.DataFrame(theirs))]
    rows: pd.DataFrame = pd.concat(sides)
    for end, sign in (("score_low", -1), ("score_high", 1)):
        rows[end] = rows["score"] + sign * rows["stderr"]
    order = rows["source"].eq(_PAPER), rows["method"].map(methods.index)
    return rows.drop(columns="stderr").iloc[np.lexsort(order)]


@figure(
    "Figure 11", "MMBench by capability at γ = 0.5, images first: {model}", by_capability,
    parts=["images", "images_half"], tasks=["mmbench"], metrics={"mmbench": _CAPABILITIES},
)  # fmt: skip
def fig11(rows: pd.DataFrame) -> d.Figure:
    """Share of the questions of each capability that are answered right in every rotation of their
    options. Without a limit, and under Token Drop and Expanded Drop at γ = 0.5, where image tokens
    are dropped first. Capabilities: coarse and fine-grained perception, of a single instance and
    across instances; attribute, relation and logic reasoning. Whiskers: one standard error over
    questions. Below: the paper's numbers, of another model and other questions.
    """
    canvas, grid = d.panels(
        rows.sort_values("source", key=lambda s: s.eq(_PAPER), kind="stable"), "source", 1.8, 1
    )
    for source, same, axes in grid:
        d.bars(axes, same, "capability", "score", "method")
        axes.set(title=source, ylabel="questions right\nin every rotation (%)")
        d.name_places(axes, d.places(same["capability"]))
    d.legend(canvas, 3)
    return canvas
