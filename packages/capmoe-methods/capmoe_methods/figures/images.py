"""What is dropped of images and text, by the modality that is dropped first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.images import told_apart
from capmoe_eval.report.figures.scores import with_interval

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.report.figures.sources import Sources
    from matplotlib.figure import Figure

_PRIORITIES: Final = {
    "uniform": "no modality first",
    "text_first": "text first",
    "image_first": "images first",
}
_NO_LIMIT: Final = "no limit"


def by_priority(sources: Sources) -> pd.DataFrame:
    """Return peak, right answers and what is dropped, by the modality dropped first and by γ."""
    import pandas as pd

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
    cell = sources.results.cells.iloc[0]
    images = (_by_image(sources)["cell"] == cell["cell"]).sum()
    rows = with_interval(rows, "right").assign(
        asked=f"{sources.title}, {cell['asked']}: {cell['n']:,} questions to {images:,} images",
        front=pareto_front(rows, "peak", "right"),
    )
    return rows.reset_index(drop=True)


def _by_image(sources: Sources) -> pd.DataFrame:
    """Return the share of right answers by image, weighted so that their mean is that of all."""
    documents = sources.results.documents
    images = documents.groupby(["cell", "subtask", "unit"], observed=True)["correct"].sum()
    rows = images.rename("right").reset_index()
    counts = rows.groupby("cell", observed=True)["right"].transform("size")
    answers = rows["cell"].map(documents["cell"].value_counts()).astype(float)
    return rows.assign(right=rows["right"] * counts / answers)


def pareto_front(rows: pd.DataFrame, cost: str, quality: str) -> list[bool]:
    """Return of each row whether no other beats it.

    A row is beaten by one that costs no more and is no worse, and differs.
    """
    points = list(zip(rows[cost], rows[quality], strict=True))
    return [
        not any(other != (c, q) and other[0] <= c and other[1] >= q for other in points)
        for c, q in points
    ]


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
    looks = d.looks(_PRIORITIES.values(), markersize=3.5)
    limited, stock = (rows[(rows["first"] == _NO_LIMIT) == is_stock] for is_stock in (False, True))
    for axes, name in ((text, "text"), (image, "image")):
        d.lines(axes, limited, "gamma", f"{name}_dropped_percent", "first", looks)
        axes.set(ylabel=f"pairs of {name}\ntokens dropped (%)", ylim=(0, 100))
    d.lines(right, limited, "gamma", "right", "first", looks)
    for score in stock["right"]:
        d.rule(right, score, ":", 1.0, _NO_LIMIT)
    for axes in (text, image, right):
        d.gamma_axis(axes, limited["gamma"])
    best = rows.loc[rows["front"], ["peak", "right"]].sort_values(["peak", "right"])
    wide = {"color": d.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round", "zorder": 1}
    d.line(peak, best, "peak", "right", "Pareto front", **wide)
    for place, (first, same) in enumerate(d.each(rows, "first")):
        apart = same.assign(peak=same["peak"] + 0.03 * (place - 1) * (first != _NO_LIMIT))
        d.line(peak, apart, "peak", "right", first, **looks.get(first, d.STAR))
    peak.set_xlabel("mean peak load of an expert\n/ mean load")
    for axes in (right, peak):
        axes.set_ylabel("right answers (%)")
    canvas.suptitle(rows["asked"].iloc[0].replace(": ", ":\n"))
    d.legend(canvas, 3)
    return canvas
