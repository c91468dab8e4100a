"""Images and text: their loads (Figure 10), MMBench (Figure 11), and what is dropped of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.paper.pairing import answered_by_cells, scores_by_unit
from capmoe_eval.paper.printed import figure as printed_figure
from capmoe_eval.paper.printed import published_note
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.expert_load import fullest_layer, load_of_layers
from capmoe_eval.report.figures.scores import PEAK, with_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capmoe_eval.report.figures.evidence import FigureRecords

_CAPABILITY_LOOKS: Final = {  # the methods of Figure 11, in its order
    "baseline": d.bar_look(d.GREY),
    "score": d.bar_look(d.BLUE, "////"),
    "expanded_drop": d.bar_look(d.ORANGE, "...."),
}
_PAPER: Final = "MolmoE (paper)"
_PRIORITIES: Final = {
    "uniform": "no modality first",
    "text_first": "text first",
    "image_first": "images first",
}
"""What is dropped first; each looks the same in every figure."""
_NO_LIMIT: Final = "no limit"
_LOOKS: Final = {
    name: d.line_look(place, markersize=3.5) for place, name in enumerate(_PRIORITIES.values())
}
_METHOD_LOOKS: Final = {
    method_title(method): d.line_look(place, markersize=3.5)
    for place, method in enumerate(("order", "reverse_order", "random"), start=len(_LOOKS))
} | {method_title("score"): _LOOKS["no modality first"]}  # of the same record
_APART: Final = 0.03
"""The distance between the lines of the front, whose peaks are nearly the same."""
_BY_PRIORITY: Final = {"parts": ["images", "images_priority", "images_drops"], "tasks": ["mme"]}


def modality_loads(sources: FigureRecords) -> pd.DataFrame:
    """Return each expert's load by modality, in the layer with the fullest, and the paper's."""
    import pandas as pd

    layer = fullest_layer(load_of_layers(sources, "images")).iloc[0]
    texts = {name: _of_image(sources, layer, f"{name}.load_before") for name in ("image", "text")}
    both, of_text = (printed_figure(f"fig10_{name}_pixels_pm0.03") for name in ("total", "text"))
    of_image = [max(total - part, 0.0) for total, part in zip(both, of_text, strict=True)]
    where = f"{sources.title}, {sources.tasks[layer['task']]}, MoE layer {layer['layer'] + 1}"
    sources.notes.append(published_note("figure10"))
    sides = []
    for source, loads in (
        (where, pd.DataFrame(texts)),
        (f"{_PAPER}, as published", pd.DataFrame({"image": of_image, "text": of_text})),
    ):
        total = loads.sum(axis=1)
        rows = (loads / total.mean()).assign(
            source=source, text_percent=100 * loads["text"].sum() / total.sum()
        )
        rows = rows.loc[total.sort_values(ascending=False, kind="stable").index]
        sides.append(rows.assign(place=range(len(rows))))
    return pd.concat(sides, ignore_index=True)


@figure(
    "Figure 10", "Assignments of image and text tokens by expert: {model}", modality_loads,
    parts=["images"], tasks=["mme"],
)  # fmt: skip
def fig10(rows: pd.DataFrame) -> Figure:
    """Load of each expert over the mean load N̄ without a limit, on MME, in the layer with the
    fullest expert, of text tokens and above them of image tokens; summed over all queries. Right:
    what the paper shows of MolmoE, over its own mean; it names neither the layer nor the queries.
    """
    canvas, (grid,) = d.canvas(d.PAGE, 2.0, 1, 2, sharey=True)
    for (source, same), axes in zip(d.each(rows, "source"), grid, strict=True):
        axes.grid(False)
        text, look = same["text"], {"width": 0.85, "linewidth": 0.3}
        axes.bar(same["place"], text, **d.bar_look(d.VERMILLION, "////", **look), label="text")
        style = d.bar_look(d.SKY, **look)
        axes.bar(same["place"], same["image"], bottom=text, **style, label="image")
        share = f"text: {same['text_percent'].iloc[0]:.1f} % of the assignments"
        axes.annotate(share, (0.98, 0.95), xycoords="axes fraction", ha="right", va="top")
        axes.set(title=source, xlabel="experts, busiest first", xticks=[])
    grid[0].set_ylabel("load / mean load")
    d.legend(canvas, 2)
    return canvas


def by_capability(sources: FigureRecords) -> pd.DataFrame:
    """Return scores by capability, unlimited and at γ = 0.5 with images first, and the paper's."""
    import pandas as pd

    printed = printed_figure("fig11_mmbench")
    names = [name for name in printed if name not in ("source", "order")]
    records = {record.method: record for record in sources.of_model("images", "images_half")}
    sources.notes.append(published_note("figure11"))
    rows = []
    for place, method in enumerate(_CAPABILITY_LOOKS):
        about = {"method": method_title(method)}
        for name in names if method in records else ():
            score = records[method].score(name)
            stderr = math.nan if score.stderr is None else 100 * score.stderr
            ours = {"source": sources.title, "capability": name, "score": 100 * score.value}
            rows.append(about | ours | {"stderr": stderr})
        theirs = {"source": _PAPER, "stderr": math.nan}
        rows += [about | theirs | {"capability": n, "score": printed[n][place]} for n in names]
    frame = pd.DataFrame(rows)
    for name, sign in (("score_low", -1), ("score_high", 1)):
        frame[name] = frame["score"] + sign * frame["stderr"]
    return frame.drop(columns="stderr")


@figure(
    "Figure 11", "MMBench by capability at γ = 0.5, images first: {model}", by_capability,
    parts=["images", "images_half"], tasks=["mmbench"],
)  # fmt: skip
def fig11(rows: pd.DataFrame) -> Figure:
    """Share of the questions of each capability that are answered right in every rotation of their
    options. Without a limit, and under Token Drop and Expanded Drop at γ = 0.5, where image tokens
    are dropped first. Capabilities: coarse and fine-grained perception, of a single instance and
    across instances; attribute, relation and logic reasoning. Whiskers: one standard error over
    questions. Right: the paper's numbers, of another model and other questions.
    """
    canvas, (grid,) = d.canvas(d.PAGE, 2.1, 1, 2, sharey=True)
    number = d.places(rows["capability"])
    looks = {method_title(method): look for method, look in _CAPABILITY_LOOKS.items()}
    sides = sorted(d.each(rows, "source"), key=lambda side: side[0] == _PAPER)
    for (source, of_source), axes in zip(sides, grid, strict=True):
        for index, (method, look) in enumerate(looks.items()):
            same = of_source[of_source["method"] == method]
            places = same["capability"].map(number) + 0.27 * (index - 1)
            thin: d.Look = {}
            if same["score_low"].notna().all():
                ends = d.whiskers(same, "score")
                thin = {"yerr": ends, "error_kw": {"elinewidth": 0.7, "capsize": 1.5}}
            axes.bar(places, same["score"], 0.26, **look | thin, label=method)
        axes.set_title(source)
        axes.grid(False, axis="x")
        d.name_places(axes, list(number))
    grid[0].set_ylabel("questions right\nin every rotation (%)")
    d.legend(canvas, 3)
    return canvas


def by_priority(sources: FigureRecords) -> pd.DataFrame:
    """Return peak, right answers and what is dropped, by the modality dropped first and by γ."""
    import pandas as pd

    cells = sources.cells("images_priority", "images_drops")
    modality = cells["modality"].fillna("uniform")
    cells = cells.assign(
        first=modality.map(_PRIORITIES), order=modality.map(list(_PRIORITIES).index)
    ).sort_values(["order", "gamma"], kind="stable")
    cells = pd.concat([cells, sources.cells("images")[:1].assign(first=_NO_LIMIT)])
    rows = cells[["first", "gamma"]].assign(peak=cells["load.mean_peak_after"].astype(float))
    for modality in ("text", "image"):
        rates = cells[_column(sources, cells, f"load.modalities.{modality}.drop_rate")]
        rows[f"{modality}_dropped_percent"] = 100 * rates.astype(float)
    units = [_units(sources, cells.loc[[number]]) for number in cells.index]
    rows["right"] = [100 * unit.mean() for unit in units]
    rows["stderr"] = [
        100 * unit.std(ddof=1) / math.sqrt(len(unit)) if len(unit) > 1 else np.nan for unit in units
    ]
    rows = with_interval(rows, "right")
    points = list(zip(rows["peak"], rows["right"], strict=True))
    about = {"asked": _asked(sources), "front": d.pareto_front(points)}
    return rows.assign(**about).reset_index(drop=True)


def _units(sources: FigureRecords, cell: pd.DataFrame) -> Any:
    """Return the scores of a cell, a row of the frame, by image."""
    ((answers,),) = answered_by_cells(sources.results, cell).values()
    return scores_by_unit(answers)


def _asked(sources: FigureRecords) -> str:
    """Return the model, the task, and how many questions to how many images."""
    cell = sources.results.cells[:1]
    asked = f"{cell['n'].iloc[0]:,} questions to {len(_units(sources, cell)):,} images"
    return f"{sources.title}, {sources.tasks[cell['task'].iloc[0]]}: {asked}"


def _column(sources: FigureRecords, rows: pd.DataFrame, name: str) -> str:
    """Return the name of a column of a modality; UsageError if a cell does not tell it apart."""
    absent = rows[name].isna() if name in rows else rows["cell"].notna()
    if absent.any():
        cells = sources.results.cells.set_index("cell")
        path = cells["path"][rows["cell"][absent].iloc[0]]
        raise UsageError(f"{path}: tells no modalities; run it again with overwrite=true")
    return name


def _of_image(sources: FigureRecords, layer: pd.Series[Any], name: str) -> Any:
    """Return a list of one layer by modality; UsageError if the record does not have it."""
    return layer[_column(sources, layer.to_frame().T, f"modalities.{name}")]


@figure(
    "not in the paper", "Right answers against peak load, by the modality dropped first: {model}",
    by_priority, **_BY_PRIORITY,
)  # fmt: skip
def images_pareto(rows: pd.DataFrame) -> Figure:
    """Share of right answers on MME against the highest load of an expert over the mean load N̄,
    mean over batches and layers, under Token Drop; along a line γ is 0.5, 0.75, 1, 1.5, 2.
    Whiskers: 95 % intervals over images, of each point by itself. Grey: the Pareto front of the
    points as measured, whether or not their intervals overlap. Lines are set apart by 0.03.
    """
    canvas, ((axes,),) = d.canvas(d.COLUMN, 3.0)
    d.front(axes, rows, "peak", "right")
    for first, same in d.each(rows, "first"):
        place = list(_LOOKS).index(first) - 1 if first in _LOOKS else 0
        apart = same.assign(peak=same["peak"] + _APART * place)
        d.line(axes, apart, "peak", "right", first, **_LOOKS.get(first, d.STAR))
    axes.set_title(rows["asked"].iloc[0].replace(": ", ":\n"))
    axes.set(xlabel=PEAK, ylabel="right answers (%)")
    d.legend(canvas, 2)
    return canvas


@figure(
    "not in the paper", "What is dropped of text and of images by γ: {model}", by_priority,
    **_BY_PRIORITY,
)  # fmt: skip
def images_text(rows: pd.DataFrame) -> Figure:
    """On MME under Token Drop, by γ and the modality that is dropped first. Left and middle: the
    share of the pairs of a text token, and of an image token, with an expert of its top-k that are
    not computed, over all layers. Right: the share of right answers, with 95 % intervals over
    images. Dotted: without a limit.
    """
    canvas, (grid,) = d.canvas(d.PAGE, 2.3, 1, 3)
    limited, stock = (rows[(rows["first"] == _NO_LIMIT) == is_stock] for is_stock in (False, True))
    for modality, axes in zip(("text", "image"), grid, strict=False):
        for first, same in d.each(limited, "first"):
            d.line(axes, same, "gamma", f"{modality}_dropped_percent", first, **_LOOKS[first])
        axes.set(ylabel=f"pairs of {modality}\ntokens dropped (%)", ylim=(0, 100))
    for first, same in d.each(limited, "first"):
        d.line(grid[2], same, "gamma", "right", **_LOOKS[first])
    for right in stock["right"]:
        d.rule(grid[2], right, ":", 1.0, _NO_LIMIT)
    grid[2].set_ylabel("right answers (%)")
    for axes in grid:
        d.gamma_axis(axes, limited["gamma"])
    canvas.suptitle(rows["asked"].iloc[0])
    d.legend(canvas, 4)
    return canvas


def by_place(sources: FigureRecords) -> pd.DataFrame:
    """Return the dropped share of an image's tokens by eighths of it, by method and priority."""
    import pandas as pd

    sides = []
    orders, priorities = "by what is kept", f"{method_title('score')}, by what is dropped first"
    for part, side in (("images_order", orders), ("images_priority", priorities)):
        cells, layers = sources.cells(part), sources.layers(part)
        names = cells["method"].map(method_title)
        if side == priorities:
            names = cells["modality"].fillna("uniform").map(_PRIORITIES)
        for cell, name in zip(cells["cell"], names, strict=True):
            of_cell = layers[layers["cell"] == cell]
            counts = (
                np.array(
                    of_cell[_column(sources, of_cell, f"modalities.image.bands.{of}")].tolist()
                )
                for of in ("dropped", "tokens")
            )
            dropped, tokens = counts
            lost = dropped.sum(axis=0)
            asked = (of_cell["top_k"].to_numpy()[:, None] * tokens).sum(axis=0)
            share = np.divide(lost, asked, out=np.full(len(lost), np.nan), where=asked > 0)
            rows = {"side": side, "line": name, "dropped_percent": 100 * share}
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
    sides = list(d.each(rows, "side"))
    canvas, (grid,) = d.canvas(d.PAGE, 2.3, 1, len(sides), sharey=True)
    for (side, of_side), axes in zip(sides, grid, strict=True):
        for name, same in d.each(of_side, "line"):
            d.line(axes, same, "eighth", "dropped_percent", name, **(_LOOKS | _METHOD_LOOKS)[name])
        axes.set(title=side, xlabel="eighth of an image, from its top", ylim=(0, 100))
    grid[0].set_ylabel("pairs of image\ntokens dropped (%)")
    first = rows.iloc[0]
    canvas.suptitle(first["asked"] + gamma_suffix(first["gamma"], ", γ = "))
    d.legend(canvas, 4)
    return canvas
