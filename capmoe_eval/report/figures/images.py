"""Images and text: their loads (Figure 10), MMBench (Figure 11), and what is dropped of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import scores_by_unit
from capmoe_eval.paper.printed import figure, published_note
from capmoe_eval.report.figures import pooling, shapes, style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.style import column, percent

_CAPABILITY_LOOKS: Final = {  # the methods of Figure 11, in its order
    "baseline": style.bar_look(style.GREY),
    "score": style.bar_look(style.BLUE, "////"),
    "expanded_drop": style.bar_look(style.ORANGE, "...."),
}
_PAPER: Final = "MolmoE (paper)"
_PRIORITIES: Final = {
    "uniform": "no modality first",
    "text_first": "text first",
    "image_first": "images first",
}
"""What is dropped first; each looks the same in every figure."""
_LOOKS: Final = {name: style.line_look(index) for index, name in enumerate(_PRIORITIES)}
_METHOD_LOOKS: Final = {
    method: style.line_look(place)
    for place, method in enumerate(("order", "reverse_order", "random"), start=len(_LOOKS))
} | {"score": _LOOKS["uniform"]}  # of the same record
_THIN: Final = {"elinewidth": 0.7, "capsize": 1.5, "markersize": 3.5}
_APART: Final = 0.03
"""The distance between the lines of the front, whose peaks are nearly the same."""


def measure_modalities(evidence: FigureRecords) -> Measured:
    """Collect the loads of images and text in the layer with the fullest expert, for Figure 10."""
    record = evidence.of_model("images")[0]
    number = pooling.busiest_layer([record])
    layer = record.layers[number]
    if layer.modalities is None:
        raise _untold(record)
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
    mean, order = sum(total) / len(total), pooling.busiest_first(total)
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
    """Collect scores by capability, unlimited and at γ = 0.5 with images first, for Figure 11."""
    records = {record.method: record for record in evidence.of_model("images", "images_half")}
    printed = figure("fig11_mmbench")
    capabilities = [name for name in printed if name not in ("source", "order")]
    ours: list[Numbers] = []
    theirs: list[Numbers] = []
    for place, method in enumerate(_CAPABILITY_LOOKS):
        values = [printed[name][place] for name in capabilities]
        theirs.append({"method": method, "value": values})
        if method in records:
            scores = [pooling.in_percent(records[method].score(name)) for name in capabilities]
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
    shift = 0.27 * (list(_CAPABILITY_LOOKS).index(method) - 1)
    look: Numbers = _CAPABILITY_LOOKS[method] | {"label": method_title(method)}
    if None not in errors:
        look |= {"yerr": errors, "error_kw": {"elinewidth": 0.7, "capsize": 1.5}}
    axes.bar([place + shift for place in range(len(values))], values, 0.26, **look)


def measure_front(evidence: FigureRecords) -> Measured:
    """Collect right answers and peak load by priority and γ, and who is on the front."""
    measured = measure_shares(evidence)
    shapes.mark_front(_points(measured.numbers))
    return measured


def measure_shares(evidence: FigureRecords) -> Measured:
    """Collect what is dropped of text and of images, and right answers, by priority and γ."""
    records = evidence.of_model("images_priority", "images_drops")
    lines: list[Numbers] = [
        {
            "modality": name,
            "label": label,
            "points": sorted(map(_point, same), key=lambda point: float(point["gamma"])),
        }
        for name, label, same in _by_priority(records)
    ]
    baseline = next(map(_point, evidence.of_model("images")), None)
    return Measured(_shown(evidence) | {"lines": lines, "baseline": baseline})


def _points(numbers: Numbers) -> list[Numbers]:
    """Return the points of all lines, and the one without a limit if it is there."""
    points = [point for line in numbers["lines"] for point in line["points"]]
    return [*points, numbers["baseline"]] if numbers["baseline"] else points


def measure_positions(evidence: FigureRecords) -> Measured:
    """Collect the dropped share of an image's tokens by eighths of it, by method and priority."""
    orders, priorities = (evidence.of_model(part) for part in ("images_order", "images_priority"))
    methods = [
        {"method": record.method, "label": method_title(record.method)} | _bands(record)
        for record in orders
    ]
    first = [
        {"modality": name, "label": label} | _bands(record)
        for name, label, (record,) in _by_priority(priorities)
    ]
    gamma = pooling.shared_gamma([*orders, *priorities])
    return Measured(_shown(evidence) | {"gamma": gamma, "methods": methods, "priorities": first})


def _shown(evidence: FigureRecords) -> Numbers:
    """Return the model, the task, and how many questions to how many images."""
    record = next(one for records in evidence.records.values() for one in records)
    return {
        "model": evidence.title,
        "task": evidence.tasks[record.task],
        "questions": record.n,
        "images": len(scores_by_unit(record.documents)),
    }


def _by_priority(records: Iterable[Record]) -> list[tuple[str, str, list[Record]]]:
    """Return the records of each priority that has some, behind its key and its name."""
    found = pooling.by_key(records, lambda record: record.cell.method.modality)
    return [(name, label, found[name]) for name, label in _PRIORITIES.items() if name in found]


def _point(record: Record) -> Numbers:
    """Return γ, peak load, right answers with their standard error over images, and drops.

    Shares of dropped pairs are those of a modality's own pairs; right answers are in percent.
    """
    if record.load.modalities is None:
        raise _untold(record)
    units = scores_by_unit(record.documents)
    stderr = float(units.std(ddof=1)) / math.sqrt(len(units)) if len(units) > 1 else None
    return {
        "gamma": record.gamma,
        "peak": record.load.mean_peak_after,
        "value": 100 * float(units.mean()),
        "stderr": None if stderr is None else 100 * stderr,
        "dropped": {name: part.drop_rate for name, part in record.load.modalities.items()},
    }


def _untold(record: Record) -> UsageError:
    """Return the error of a record that does not tell images and text apart."""
    return UsageError(f"{record.path}: tells no modalities; run it again with overwrite=true")


def _bands(record: Record) -> Numbers:
    """Return the dropped share of the pairs of each eighth of an image, over all layers."""
    dropped: Any = 0
    asked: Any = 0
    for layer in record.layers:
        bands = layer.modalities["image"].bands if layer.modalities else None
        if bands is None:
            raise _untold(record)
        dropped = dropped + np.array(bands.dropped)
        asked = asked + layer.top_k * np.array(bands.tokens)
    share = np.divide(dropped, asked, out=np.full(len(dropped), np.nan), where=asked > 0)
    return {"dropped": share.tolist()}


def draw_front(numbers: Numbers) -> Figure:
    """Draw a line for each priority through its γ, and the front in grey."""
    drawn, axes = style.subplots(style.COLUMN, 3.0)
    shapes.draw_front(axes, _points(numbers))
    for line in numbers["lines"]:
        shift = _APART * (list(_PRIORITIES).index(line["modality"]) - 1)
        peaks = [point["peak"] + shift for point in line["points"]]
        look = _THIN | _LOOKS[line["modality"]]
        axes.errorbar(peaks, *shapes.scored(line["points"]), **look, label=line["label"])
    if baseline := numbers["baseline"]:
        look = _THIN | {"color": style.BLACK, "marker": "*", "markersize": 6, "linestyle": ""}
        axes.errorbar([baseline["peak"]], *shapes.scored([baseline]), **look, label="no limit")
    axes.set(ylabel="right answers (%)", title=_title(numbers, ":\n"))
    style.legend_below(drawn, axes, columns=2)
    return drawn


def draw_shares(numbers: Numbers) -> Figure:
    """Draw the dropped share of text and of images, and the right answers, by γ."""
    drawn, panels = style.subplots(style.PAGE, 2.3, 1, 3)
    lines, right = numbers["lines"], panels[-1]
    for modality, axes in zip(("text", "image"), panels, strict=False):
        for line in lines:
            shares = percent(column(column(line["points"], "dropped"), modality))
            look = _LOOKS[line["modality"]] | {"markersize": 3.5}
            axes.plot(column(line["points"], "gamma"), shares, **look, label=line["label"])
        axes.set(ylabel=f"pairs of {modality}\ntokens dropped (%)", ylim=(0, 100))
    for line in lines:
        look = _THIN | _LOOKS[line["modality"]]
        right.errorbar(column(line["points"], "gamma"), *shapes.scored(line["points"]), **look)
    if baseline := numbers["baseline"]:
        right.axhline(baseline["value"], color=style.BLACK, linestyle=":", label="no limit")
    right.set_ylabel("right answers (%)")
    gammas = [point["gamma"] for line in lines for point in line["points"]]
    for axes in panels:
        if gammas:
            style.gamma_axis(axes, gammas)
        axes.grid()
    drawn.suptitle(_title(numbers))
    style.legend_below(drawn, *panels, columns=4)
    return drawn


def draw_positions(numbers: Numbers) -> Figure:
    """Draw the dropped share by eighths of an image: by method, and by priority."""
    drawn, panels = style.subplots(style.PAGE, 2.3, 1, 2, sharey=True)
    sides = (
        ("by what is kept", "methods", "method", _METHOD_LOOKS),
        (f"{method_title('score')}, by what is dropped first", "priorities", "modality", _LOOKS),
    )
    for axes, (title, lines, key, looks) in zip(panels, sides, strict=True):
        for line in numbers[lines]:
            look = looks[line[key]] | {"markersize": 3.5}
            places = range(1, len(line["dropped"]) + 1)
            axes.plot(places, percent(line["dropped"]), **look, label=line["label"])
        axes.set(title=title, xlabel="eighth of an image, from its top")
        axes.grid()
    panels[0].set(ylabel="pairs of image\ntokens dropped (%)", ylim=(0, 100))
    style.legend_below(drawn, *panels, columns=4)
    drawn.suptitle(_title(numbers) + gamma_suffix(numbers["gamma"], ", γ = "))
    return drawn


def _title(numbers: Numbers, between: str = ": ") -> str:
    asked = f"{numbers['questions']:,} questions to {numbers['images']:,} images"
    return f"{numbers['model']}, {numbers['task']}{between}{asked}"
