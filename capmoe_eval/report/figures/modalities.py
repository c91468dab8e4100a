"""Drops of images and of text under a capacity: by γ, by priority, and by place in an image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Modality
from capmoe_eval.paper.pairing import scores_by_unit
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, no_modalities
from capmoe_eval.report.figures.scores import pareto_front
from capmoe_eval.report.figures.style import column, percent

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
_APART: Final = 0.03
"""The distance between the lines of the front, whose peaks are nearly the same."""


def measure_front(evidence: FigureRecords) -> Measured:
    """Collect right answers and peak load by priority and γ, and who is on the front."""
    lines = _lines(evidence)
    points = [point for line in lines for point in line["points"]]
    baseline = _baseline(evidence)
    reached = [*points, *([baseline] if baseline else [])]
    front = pareto_front([(point["peak"], point["value"]) for point in reached])
    for place, point in enumerate(reached):
        point["on_front"] = place in front
    return Measured(_shown(evidence) | {"lines": lines, "baseline": baseline})


def measure_shares(evidence: FigureRecords) -> Measured:
    """Collect what is dropped of text and of images, and right answers, by priority and γ."""
    return Measured(_shown(evidence) | {"lines": _lines(evidence), "baseline": _baseline(evidence)})


def measure_positions(evidence: FigureRecords) -> Measured:
    """Collect the dropped share of an image's tokens by eighths of it, by method and priority."""
    orders, priorities = (evidence.of_model(part) for part in ("images_order", "images_priority"))
    everything = [*orders, *priorities]
    return Measured(
        _shown(evidence)
        | {
            "gamma": min((r.gamma for r in everything if r.gamma is not None), default=None),
            "methods": [
                {"method": record.method, "label": method_title(record.method)} | _bands(record)
                for record in orders
            ],
            "priorities": [
                {"modality": name, "label": label} | _bands(record)
                for name, label, (record,) in _by_priority(priorities)
            ],
        }
    )


def _shown(evidence: FigureRecords) -> Numbers:
    """Return the model, the task, and how many questions to how many images."""
    record = next(one for records in evidence.records.values() for one in records)
    return {
        "model": evidence.title,
        "task": evidence.tasks[record.task],
        "questions": record.n,
        "images": len(scores_by_unit(record.documents)),
    }


def _baseline(evidence: FigureRecords) -> Numbers | None:
    """Return the point without a limit, if it is there."""
    return next(map(_point, evidence.of_model("images")), None)


def _lines(evidence: FigureRecords) -> list[Numbers]:
    """Return for each priority its points by γ; those without a record are left out."""
    records = evidence.of_model("images_priority", "images_drops")
    return [
        {
            "modality": name,
            "label": label,
            "points": sorted(map(_point, same), key=lambda point: float(point["gamma"])),
        }
        for name, label, same in _by_priority(records)
    ]


def _by_priority(records: Iterable[Record]) -> list[tuple[str, str, list[Record]]]:
    """Return the records of each priority that has some, behind its key and its name."""
    found = by_key(records, lambda record: record.cell.method.modality)
    return [(name, label, found[name]) for name, label in _PRIORITIES.items() if name in found]


def _point(record: Record) -> Numbers:
    """Return γ, peak load, right answers with their standard error over images, and drops.

    Shares of dropped pairs are those of a modality's own pairs; right answers are in percent.
    """
    if record.load.modalities is None:
        raise no_modalities(record)
    units = scores_by_unit(record.documents)
    stderr = float(units.std(ddof=1)) / math.sqrt(len(units)) if len(units) > 1 else None
    return {
        "gamma": record.gamma,
        "peak": record.load.mean_peak_after,
        "value": 100 * float(units.mean()),
        "stderr": None if stderr is None else 100 * stderr,
        "dropped": {name: part.drop_rate for name, part in record.load.modalities.items()},
    }


def _bands(record: Record) -> Numbers:
    """Return the dropped share of the pairs of each eighth of an image, over all layers."""
    dropped: Any = 0
    asked: Any = 0
    for layer in record.layers:
        bands = layer.modalities["image"].bands if layer.modalities else None
        if bands is None:
            raise no_modalities(record)
        dropped = dropped + np.array(bands.dropped)
        asked = asked + layer.top_k * np.array(bands.tokens)
    share = np.divide(dropped, asked, out=np.full(len(dropped), np.nan), where=asked > 0)
    return {"dropped": share.tolist()}


def draw_front(numbers: Numbers) -> Figure:
    """Draw a line for each priority through its γ, and the front in grey."""
    figure, axes = style.subplots(style.COLUMN, 3.0)
    baseline = numbers["baseline"]
    points = [point for line in numbers["lines"] for point in line["points"]]
    points += [baseline] if baseline else []
    front = sorted((p for p in points if p["on_front"]), key=lambda point: point["peak"])
    look: Numbers = {"color": style.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"}
    axes.plot(column(front, "peak"), column(front, "value"), zorder=1, **look, label="Pareto front")
    for line in numbers["lines"]:
        shift = _APART * (list(_PRIORITIES).index(line["modality"]) - 1)
        peaks = [point["peak"] + shift for point in line["points"]]
        _answers(axes, peaks, line["points"], **_LOOKS[line["modality"]], label=line["label"])
    if baseline:
        look = {"color": style.BLACK, "marker": "*", "markersize": 6, "linestyle": ""}
        _answers(axes, [baseline["peak"]], [baseline], **look, label="no limit")
    axes.set(xlabel="mean peak load of an expert / mean load", ylabel="right answers (%)")
    axes.grid()
    axes.set_title(_title(numbers, ":\n"))
    style.legend_below(figure, axes, columns=2)
    return figure


def draw_shares(numbers: Numbers) -> Figure:
    """Draw the dropped share of text and of images, and the right answers, by γ."""
    figure, panels = style.subplots(style.PAGE, 2.3, 1, 3)
    lines, baseline = numbers["lines"], numbers["baseline"]
    dropped: tuple[tuple[Modality, str], ...] = (("text", "text"), ("image", "image"))
    for axes, (modality, said) in zip(panels, dropped, strict=False):
        for line in lines:
            shares = [point["dropped"][modality] for point in line["points"]]
            look = _LOOKS[line["modality"]] | {"markersize": 3.5}
            axes.plot(column(line["points"], "gamma"), percent(shares), **look, label=line["label"])
        axes.set(ylabel=f"pairs of {said}\ntokens dropped (%)", ylim=(0, 100))
    right = panels[-1]
    for line in lines:
        look = _LOOKS[line["modality"]]
        _answers(right, column(line["points"], "gamma"), line["points"], **look)
    if baseline:
        right.axhline(baseline["value"], color=style.BLACK, linestyle=":", label="no limit")
    right.set_ylabel("right answers (%)")
    gammas = [point["gamma"] for line in lines for point in line["points"]]
    for axes in panels:
        if gammas:
            style.gamma_axis(axes, gammas)
        axes.grid()
    figure.suptitle(_title(numbers))
    style.legend_below(figure, *panels, columns=4)
    return figure


def draw_positions(numbers: Numbers) -> Figure:
    """Draw the dropped share by eighths of an image: by method, and by priority."""
    figure, (orders, priorities) = style.subplots(style.PAGE, 2.3, 1, 2, sharey=True)
    for line in numbers["methods"]:
        _places(orders, line, _METHOD_LOOKS[line["method"]])
    for line in numbers["priorities"]:
        _places(priorities, line, _LOOKS[line["modality"]])
    orders.set_ylabel("pairs of image\ntokens dropped (%)")
    orders.set_ylim(0, 100)
    orders.set_title("by what is kept")
    priorities.set_title(f"{method_title('score')}, by what is dropped first")
    for axes in (orders, priorities):
        axes.set_xlabel("eighth of an image, from its top")
        axes.grid()
    style.legend_below(figure, orders, priorities, columns=4)
    figure.suptitle(_title(numbers) + gamma_suffix(numbers["gamma"], ", γ = "))
    return figure


def _places(axes: Axes, line: Numbers, look: Numbers) -> None:
    """Draw one line over the eighths of an image."""
    places = range(1, len(line["dropped"]) + 1)
    look = look | {"markersize": 3.5}
    axes.plot(places, percent(line["dropped"]), **look, label=line["label"])


def _answers(axes: Axes, places: Sequence[float], points: Sequence[Numbers], **look: Any) -> None:
    """Draw right answers with their 95 % intervals."""
    errors = [1.96 * (point["stderr"] or 0.0) for point in points]
    thin: Numbers = {"elinewidth": 0.7, "capsize": 1.5, "markersize": 3.5}
    axes.errorbar(places, column(points, "value"), errors, **thin | look)


def _title(numbers: Numbers, between: str = ": ") -> str:
    asked = f"{numbers['questions']:,} questions to {numbers['images']:,} images"
    return f"{numbers['model']}, {numbers['task']}{between}{asked}"
