"""What is dropped of images and text, by the modality that is dropped first and by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.images import told_apart
from capmoe_eval.report.figures.scores import with_interval
from capmoe_eval.report.figures.sources import Sources

from capmoe_methods.figures.quality import PEAK, front, pareto_front

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PRIORITIES: Final = {
    "uniform": "no modality first",
    "text_first": "text first",
    "image_first": "images first",
}
"""What is dropped first; each looks the same in every figure."""
_NO_LIMIT: Final = "no limit"
_ORDERS: Final = tuple(map(method_title, ("order", "reverse_order", "random")))
_LOOKS: Final = d.looks([*_PRIORITIES.values(), *_ORDERS], markersize=3.5)
_LOOKS[method_title("score")] = _LOOKS["no modality first"]  # of the same record


def by_priority(sources: Sources) -> pd.DataFrame:
    """Return peak, right answers and what is dropped, by the modality dropped first and by γ."""
    cells = sources.cells("images_priority", "images_drops")
    first = cells["modality"].fillna("uniform")
    cells = cells.assign(first=first.map(_PRIORITIES), order=first.map([*_PRIORITIES].index))
    cells = cells.sort_values(["order", "gamma"], kind="stable")
    cells = pd.concat([cells, sources.cells("images")[:1].assign(first=_NO_LIMIT)])
    rows = cells[["first", "gamma"]].assign(peak=cells["load.mean_peak_after"])
    for modality in ("text", "image"):
        name = f"load.modalities.{modality}.drop_rate"
        rates = told_apart(sources, cells, name)[name].astype(float)
        rows[f"{modality}_dropped_percent"] = 100 * rates
    # The answers to one image depend on each other.
    of_images = _by_image(sources).groupby("cell", observed=True)["right"]
    for name, values in (("right", of_images.mean()), ("stderr", of_images.sem())):
        rows[name] = 100 * cells["cell"].map(values).astype(float)
    is_best = pareto_front(rows, "peak", "right")
    rows = with_interval(rows, "right").assign(asked=_asked(sources), front=is_best)
    return rows.reset_index(drop=True)


def _by_image(sources: Sources) -> pd.DataFrame:
    """Return the share of right answers by image, weighted so that their mean is that of all."""
    documents = sources.results.documents
    images = documents.groupby(["cell", "subtask", "unit"], observed=True)["correct"].sum()
    rows = images.rename("right").reset_index()
    counts = rows.groupby("cell", observed=True)["right"].transform("size")
    answers = rows["cell"].map(documents["cell"].value_counts()).astype(float)
    return rows.assign(right=rows["right"] * counts / answers)


def _asked(sources: Sources) -> str:
    """Return the model, the task, and how many questions to how many images."""
    cell = sources.results.cells.iloc[0]
    images = (_by_image(sources)["cell"] == cell["cell"]).sum()
    return f"{sources.title}, {cell['asked']}: {cell['n']:,} questions to {images:,} images"


@figure(
    "not in the paper", "What is dropped of text and of images, and right answers: {model}",
    by_priority, parts=["images", "images_priority", "images_drops"], tasks=["mme"],
)  # fmt: skip
def images_text(rows: pd.DataFrame) -> Figure:
    """On MME under Token Drop, by γ and the modality that is dropped first. Above: the share of the
    pairs of a text token, and of an image token, with an expert of its top-k that are not computed,
    over all layers. Below: the share of right answers, with 95 % intervals over images, by γ and by
    the highest load of an expert over the mean load N̄, mean over batches and layers. Dotted, star:
    without a limit. Grey: the Pareto front of the points as measured, whether or not their
    intervals overlap; lines beside it are set apart by 0.03.
    """
    canvas, ((text, image), (right, peak)) = d.canvas(3.9, 2, 2)
    limited, stock = (rows[(rows["first"] == _NO_LIMIT) == is_stock] for is_stock in (False, True))
    for axes, name in ((text, "text"), (image, "image")):
        d.lines(axes, limited, "gamma", f"{name}_dropped_percent", "first", _LOOKS)
        axes.set(ylabel=f"pairs of {name}\ntokens dropped (%)", ylim=(0, 100))
    d.lines(right, limited, "gamma", "right", "first", _LOOKS)
    for score in stock["right"]:
        d.rule(right, score, ":", 1.0, _NO_LIMIT)
    for axes in (text, image, right):
        d.gamma_axis(axes, limited["gamma"])
    front(peak, rows, "peak", "right")
    for place, (first, same) in enumerate(d.each(rows, "first")):
        apart = same.assign(peak=same["peak"] + 0.03 * (place - 1) * (first != _NO_LIMIT))
        d.line(peak, apart, "peak", "right", first, **_LOOKS.get(first, d.STAR))
    peak.set_xlabel(PEAK.replace(" / ", "\n/ "))
    for axes in (right, peak):
        axes.set_ylabel("right answers (%)")
    canvas.suptitle(rows["asked"].iloc[0].replace(": ", ":\n"))
    d.legend(canvas, 3)
    return canvas


def by_place(sources: Sources) -> pd.DataFrame:
    """Return the dropped share of an image's tokens by eighths of it, by method and priority."""
    sides = []
    orders, priorities = "by what is kept", f"{method_title('score')}, by what is dropped first"
    bands = "modalities.image.bands"
    for part, side in (("images_order", orders), ("images_priority", priorities)):
        cells = sources.cells(part)
        names = cells["method"].map(method_title)
        if side == priorities:
            names = cells["modality"].fillna("uniform").map(_PRIORITIES)
        layers = told_apart(sources, sources.layers(part), f"{bands}.tokens")
        layers["line"] = layers["cell"].map(dict(zip(cells["cell"], names, strict=True)))
        for line, same in d.each(layers, "line"):
            dropped, tokens = (
                np.array(same[f"{bands}.{of}"].tolist()) for of in ("dropped", "tokens")
            )
            lost = dropped.sum(axis=0)
            asked = (same["top_k"].to_numpy()[:, None] * tokens).sum(axis=0)
            share = 100 * np.divide(lost, asked, out=np.full(len(lost), np.nan), where=asked > 0)
            rows = {"side": side, "line": line, "dropped_percent": share}
            sides.append(pd.DataFrame(rows | {"eighth": range(1, len(share) + 1)}))
    gamma = sources.cells("images_order", "images_priority")["gamma"].min()
    return pd.concat(sides, ignore_index=True).assign(asked=_asked(sources), gamma=gamma)


@figure(
    "not in the paper", "Dropped share of image tokens by their place in the image, γ = 1: {model}",
    by_place, parts=["images_order", "images_priority"], tasks=["mme"],
)  # fmt: skip
def images_position(rows: pd.DataFrame) -> Figure:
    """Share of the pairs of an image token with an expert of its top-k that are not computed, over
    all layers, on MME at γ = 1. Eighths are of an image's tokens in their order, from its top to
    its bottom. Left: by what a full expert keeps, no modality going first. Right: Token Drop, by
    the modality that is dropped first. Orders run over all sequences that share a rank's capacity,
    so that an image's place in the batch plays a part, too. Random is one seed.
    """
    canvas, grid = d.panels(rows, "side", 2.5, sharey=True)
    for side, same, axes in grid:
        d.lines(axes, same, "eighth", "dropped_percent", "line", _LOOKS)
        axes.set(title=side.replace(", ", ",\n"), xlabel="eighth of an image, from its top")
        axes.set(ylim=(0, 100), ylabel="pairs of image\ntokens dropped (%)")
        axes.label_outer()
    first = rows.iloc[0]
    canvas.suptitle(first["asked"].replace(": ", ":\n") + gamma_suffix(first["gamma"], ", γ = "))
    d.legend(canvas, 3)
    return canvas
