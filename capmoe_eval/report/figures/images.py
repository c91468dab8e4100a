"""Images and text: their loads (Figure 10), MMBench (Figure 11), and what is dropped of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import answered, scores_by_unit
from capmoe_eval.paper.printed import figure, published_note
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures import pooling
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import Percent
from capmoe_eval.report.figures.scores import PEAK, front, scored

_CAPABILITY_LOOKS: Final = {  # the methods of Figure 11, in its order
    "baseline": p.bar_look(p.GREY),
    "score": p.bar_look(p.BLUE, "////"),
    "expanded_drop": p.bar_look(p.ORANGE, "...."),
}
_PAPER: Final = "MolmoE (paper)"
_PRIORITIES: Final = {
    "uniform": "no modality first",
    "text_first": "text first",
    "image_first": "images first",
}
"""What is dropped first; each looks the same in every figure."""
_LOOKS: Final = {name: p.line_look(place, markersize=3.5) for place, name in enumerate(_PRIORITIES)}
_METHOD_LOOKS: Final = {
    method: p.line_look(place, markersize=3.5)
    for place, method in enumerate(("order", "reverse_order", "random"), start=len(_LOOKS))
} | {"score": _LOOKS["uniform"]}  # of the same record
_APART: Final = 0.03
"""The distance between the lines of the front, whose peaks are nearly the same."""


def modalities(evidence: FigureRecords) -> p.Picture:
    """Return Figure 10: loads of images and text in the layer with the fullest expert."""
    record = evidence.of_model("images")[0]
    number = pooling.busiest_layer([record])
    layer = record.layers[number]
    if layer.modalities is None:
        raise _blind(record)
    image, text = (layer.modalities[name].load_before for name in ("image", "text"))
    both, of_text = (figure(f"fig10_{name}_pixels_pm0.03") for name in ("total", "text"))
    of_image = [max(total - part, 0.0) for total, part in zip(both, of_text, strict=True)]
    where = f"{evidence.title}, {evidence.tasks[record.task]}, MoE layer {number + 1}"
    ours = _loads(where, image, text)
    sides = [
        replace(ours, y=p.Axis("load / mean load")),
        _loads(f"{_PAPER}, as published", of_image, of_text),
    ]
    look = {"legend": 2, "layout": {"sharey": True}}
    return p.Picture([sides], (published_note("figure10"),), height=2.0, look=look)


def _loads(title: str, image: Sequence[float], text: Sequence[float]) -> p.Panel:
    """Return the load of each expert over the mean load by modality, the busiest expert first."""
    total = [a + b for a, b in zip(image, text, strict=True)]
    mean, order = sum(total) / len(total), pooling.busiest_first(total)
    of_text = [text[expert] / mean for expert in order]
    of_both = [text[expert] / mean + image[expert] / mean for expert in order]
    share = f"text: {100 * sum(text) / sum(total):.1f} % of the assignments"
    places = range(len(order))
    looks = p.bar_look(p.VERMILLION, "////", linewidth=0.3), p.bar_look(p.SKY, linewidth=0.3)
    return p.Panel(
        title,
        [
            p.Bars("text", places, of_text, 0.85, look=looks[0]),
            p.Bars("image", places, of_both, 0.85, of_text, look=looks[1]),
            p.Words(share, (0.98, 0.95), True, {"ha": "right", "va": "top"}),
        ],
        p.Axis("experts, busiest first", ticks=()),
        look={"grid": None},
    )


def capabilities(evidence: FigureRecords) -> p.Picture:
    """Return Figure 11: scores by capability, unlimited and at γ = 0.5 with images first."""
    records = {record.method: record for record in evidence.of_model("images", "images_half")}
    printed = figure("fig11_mmbench")
    names = [name for name in printed if name not in ("source", "order")]
    ours, theirs = [], []
    for index, (method, look) in enumerate(_CAPABILITY_LOOKS.items()):
        places = [place + 0.27 * (index - 1) for place in range(len(names))]
        title = method_title(method)
        values = [printed[name][index] for name in names]
        theirs.append(p.Bars(title, places, values, 0.26, look=look))
        if method in records:
            scores = [pooling.in_percent(records[method].score(name)) for name in names]
            ours.append(_with_errors(p.Bars(title, places, (), 0.26, look=look), scores))
    across = p.Axis(ticks=range(len(names)), names=names)
    sides = [
        p.Panel(evidence.title, ours, across, p.Axis("questions right\nin every rotation (%)")),
        p.Panel(_PAPER, theirs, across),
    ]
    sides = [replace(panel, look={"grid": "y"}) for panel in sides]
    look = {"legend": 3, "layout": {"sharey": True}}
    return p.Picture([sides], (published_note("figure11"),), height=2.1, look=look)


def _with_errors(bars: p.Bars, scores: Sequence[Percent]) -> p.Bars:
    """Return bars of scores, with whiskers of one standard error if all are known."""
    values, errors = zip(*scores, strict=True)
    if None in errors:
        return replace(bars, y=values)
    low, high = ([v + s * e for v, e in zip(values, errors, strict=True)] for s in (-1, 1))
    thin = {"error_kw": {"elinewidth": 0.7, "capsize": 1.5}}
    return replace(bars, y=values, low=low, high=high, look=bars.look | thin)


def by_peak(evidence: FigureRecords) -> p.Picture:
    """Return right answers against peak load by priority and γ, and the front in grey."""
    lines = dict(_by_priority(evidence.of_model("images_priority", "images_drops")))
    stock = evidence.of_model("images")[:1]
    records = [*(record for same in lines.values() for record in same), *stock]
    points = [(_peak(record), _right(record).value) for record in records]
    marks: list[p.Mark] = [front(points)]
    for shift, (name, label) in zip((-_APART, 0.0, _APART), _PRIORITIES.items(), strict=True):
        if same := lines.get(name):
            peaks = [_peak(record) + shift for record in same]
            marks.append(scored(label, peaks, list(map(_right, same)), **_LOOKS[name]))
    if stock:
        star = {"color": p.BLACK, "marker": "*", "markersize": 6, "linestyle": ""}
        marks.append(scored("no limit", map(_peak, stock), list(map(_right, stock)), **star))
    panel = p.Panel(_title(evidence, ":\n"), marks, PEAK, p.Axis("right answers (%)"))
    return p.Picture([[panel]], width=p.COLUMN, height=3.0, look={"legend": 2})


def shares(evidence: FigureRecords) -> p.Picture:
    """Return what is dropped of text and of images, and right answers, by priority and γ."""
    lines = dict(_by_priority(evidence.of_model("images_priority", "images_drops")))
    stock = evidence.of_model("images")[:1]
    gammas = [record.gamma or 0.0 for same in lines.values() for record in same]
    across = p.gamma_axis(gammas) if gammas else p.Axis()
    sides = []
    modalities: tuple[Literal["text", "image"], ...] = ("text", "image")
    for modality in modalities:
        curves = [
            p.Curve(
                _PRIORITIES[name],
                [record.gamma for record in same],
                p.percent([_dropped(record, modality) for record in same]),
                look=_LOOKS[name],
            )
            for name, same in lines.items()
        ]
        y = p.Axis(f"pairs of {modality}\ntokens dropped (%)", limits=(0, 100))
        sides.append(p.Panel("", curves, across, y))
    right: list[p.Mark] = [
        scored("", [r.gamma or 0.0 for r in same], list(map(_right, same)), **_LOOKS[name])
        for name, same in lines.items()
    ]
    right += [p.rule(_right(record).value, ":", 1.0, "no limit") for record in stock]
    sides.append(p.Panel("", right, across, p.Axis("right answers (%)")))
    return p.Picture([sides], title=_title(evidence), height=2.3, look={"legend": 4})


def positions(evidence: FigureRecords) -> p.Picture:
    """Return the dropped share of an image's tokens by eighths of it, by method and priority."""
    orders, priorities = (evidence.of_model(part) for part in ("images_order", "images_priority"))
    kept = [_bands(method_title(r.method), r, _METHOD_LOOKS[r.method]) for r in orders]
    first = [
        _bands(_PRIORITIES[name], record, _LOOKS[name])
        for name, (record,) in _by_priority(priorities)
    ]
    across = p.Axis("eighth of an image, from its top")
    y = p.Axis("pairs of image\ntokens dropped (%)", limits=(0, 100))
    sides = [
        p.Panel("by what is kept", kept, across, y),
        p.Panel(f"{method_title('score')}, by what is dropped first", first, across),
    ]
    gamma = pooling.shared_gamma([*orders, *priorities])
    title = _title(evidence) + gamma_suffix(gamma, ", γ = ")
    look = {"legend": 4, "layout": {"sharey": True}}
    return p.Picture([sides], title=title, height=2.3, look=look)


def _title(evidence: FigureRecords, between: str = ": ") -> str:
    """Return the model, the task, and how many questions to how many images."""
    record = next(record for records in evidence.records.values() for record in records)
    asked = f"{record.n:,} questions to {len(scores_by_unit(answered(record.documents))):,} images"
    return f"{evidence.title}, {evidence.tasks[record.task]}{between}{asked}"


def _by_priority(records: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yield the records of each priority that has some, by rising γ."""
    of_names = pooling.by_key(records, lambda record: record.cell.method.modality)
    for name in _PRIORITIES:
        if name in of_names:
            yield name, sorted(of_names[name], key=lambda record: record.gamma or 0.0)


def _right(record: Record) -> Percent:
    """Return the share of right answers with its standard error over images."""
    units = scores_by_unit(answered(record.documents))
    stderr = float(units.std(ddof=1)) / math.sqrt(len(units)) if len(units) > 1 else None
    return Percent(100 * float(units.mean()), None if stderr is None else 100 * stderr)


def _peak(record: Record) -> float:
    return record.load.mean_peak_after


def _dropped(record: Record, modality: Literal["text", "image"]) -> float:
    """Return the dropped share of a modality's own pairs."""
    if record.load.modalities is None:
        raise _blind(record)
    return record.load.modalities[modality].drop_rate


def _blind(record: Record) -> UsageError:
    """Return the error of a record that does not tell images and text apart."""
    return UsageError(f"{record.path}: tells no modalities; run it again with overwrite=true")


def _bands(name: str, record: Record, look: p.Look) -> p.Curve:
    """Return the dropped share of the pairs of each eighth of an image, over all layers."""
    dropped: Any = 0
    asked: Any = 0
    for layer in record.layers:
        bands = layer.modalities["image"].bands if layer.modalities else None
        if bands is None:
            raise _blind(record)
        dropped = dropped + np.array(bands.dropped)
        asked = asked + layer.top_k * np.array(bands.tokens)
    share = np.divide(dropped, asked, out=np.full(len(dropped), np.nan), where=asked > 0)
    return p.Curve(name, range(1, len(dropped) + 1), p.percent(share.tolist()), look=look)
