"""Loads of images and of text by expert (Figure 10), and MMBench by capability (Figure 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import TITLES
from capmoe_eval.paper.printed import figure, published_note
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import (
    busiest_first,
    busiest_layer,
    in_percent,
    no_modalities,
)
from capmoe_eval.report.figures.style import column

_LOOKS: Final = {  # the methods of Figure 11, in its order
    "baseline": style.bar_look(style.GREY),
    "score": style.bar_look(style.BLUE, "////"),
    "expanded_drop": style.bar_look(style.ORANGE, "...."),
}
_PAPER: Final = "MolmoE (paper)"


def measure_modalities(evidence: FigureRecords) -> Measured:
    """Figure 10: the assignments of image and text tokens in the layer with the fullest expert.

    Raises:
        UsageError: If the record tells no modalities.
    """
    record = evidence.of_model("images")[0]
    number = busiest_layer([record])
    layer = record.layers[number]
    if layer.modalities is None:
        raise no_modalities(record)
    image, text = (layer.modalities[name].load_before for name in ("image", "text"))
    both, of_text = (figure(f"fig10_{name}_pixels_pm0.03") for name in ("total", "text"))
    of_image = [max(total - part, 0.0) for total, part in zip(both, of_text, strict=True)]
    numbers = {
        "task": evidence.tasks[record.task],
        "layer": number,
        "name": layer.name,
        "panels": [_loads(evidence.title, image, text), _loads(_PAPER, of_image, of_text)],
    }
    return Measured(numbers, (published_note("figure10"),))


def _loads(model: str, image: Sequence[float], text: Sequence[float]) -> Numbers:
    """Return the load of each expert over the mean load by modality, the busiest expert first."""
    total = [a + b for a, b in zip(image, text, strict=True)]
    mean, order = sum(total) / len(total), busiest_first(total)
    return {
        "model": model,
        "experts": order,
        "image": [image[expert] / mean for expert in order],
        "text": [text[expert] / mean for expert in order],
        "text_share": sum(text) / sum(total),
        "most_text": max(text) / mean,
    }


def draw_modalities(numbers: Numbers) -> Figure:
    """Draw Figure 10, and the paper's beside it."""
    drawn, panels = style.subplots(style.PAGE, 2.0, 1, 2, sharey=True)
    where = f"{numbers['task']}, MoE layer {numbers['layer'] + 1}"
    for axes, loads, of in zip(panels, numbers["panels"], (where, "as published"), strict=True):
        places = range(len(loads["experts"]))
        image, text = style.bar_look(style.SKY), style.bar_look(style.VERMILLION, "////")
        thin: Numbers = {"width": 0.85, "linewidth": 0.3}
        axes.bar(places, loads["text"], **thin | text, label="text")
        axes.bar(places, loads["image"], bottom=loads["text"], **thin | image, label="image")
        axes.set(xticks=[], xlabel="experts, busiest first")
        axes.set_title(f"{loads['model']}, {of}")
        said = f"text: {100 * loads['text_share']:.1f} % of the assignments"
        axes.annotate(said, (0.98, 0.95), xycoords="axes fraction", ha="right", va="top")
    panels[0].set_ylabel("load / mean load")
    style.legend_below(drawn, panels[0], columns=2)
    return drawn


def measure_capabilities(evidence: FigureRecords) -> Measured:
    """Figure 11: MMBench by capability without a capacity, and at γ = 0.5 with images first."""
    records = {record.method: record for record in evidence.of_model("images", "images_half")}
    printed = figure("fig11_mmbench")
    capabilities = [name for name in printed if name not in ("source", "order")]
    ours: list[Numbers] = []
    theirs: list[Numbers] = []
    for place, method in enumerate(_LOOKS):
        values = [printed[name][place] for name in capabilities]
        theirs.append({"method": method, "value": values})
        if method in records:
            scores = [in_percent(records[method].score(name)) for name in capabilities]
            parts = {part: column(scores, part) for part in ("value", "stderr")}
            ours.append({"method": method} | parts)
    numbers = {
        "capabilities": capabilities,
        "gamma": 0.5,
        "panels": [{"model": evidence.title, "bars": ours}, {"model": _PAPER, "bars": theirs}],
    }
    return Measured(numbers, (published_note("figure11"),))


def draw_capabilities(numbers: Numbers) -> Figure:
    """Draw Figure 11, and the paper's beside it."""
    drawn, panels = style.subplots(style.PAGE, 2.1, 1, 2, sharey=True)
    names = numbers["capabilities"]
    for axes, panel in zip(panels, numbers["panels"], strict=True):
        for bar in panel["bars"]:
            _draw_bars(axes, bar)
        axes.set_xticks(range(len(names)), names)
        axes.set_title(panel["model"])
        axes.grid(axis="y")
    panels[0].set_ylabel("questions right\nin every rotation (%)")
    style.legend_below(drawn, *panels, columns=3)
    return drawn


def _draw_bars(axes: Axes, bar: Numbers) -> None:
    """Draw a bar for each capability of a method, with its standard error if it is known."""
    method, values, errors = bar["method"], bar["value"], bar.get("stderr", [None])
    shift = 0.27 * (list(_LOOKS).index(method) - 1)
    look: Numbers = _LOOKS[method] | {"label": TITLES[method]}
    if None not in errors:
        look |= {"yerr": errors, "error_kw": {"elinewidth": 0.7, "capsize": 1.5}}
    axes.bar([place + shift for place in range(len(values))], values, 0.26, **look)
