"""Answers that change with the batch: the same documents in other batches."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import shared_gamma
from capmoe_eval.report.figures.shapes import name_bars
from capmoe_eval.report.figures.style import column, percent, whiskers

_KINDS: Final = ("batch_sizes", "shuffles")


def measure_companions(evidence: FigureRecords) -> Measured:
    """Compare every pair of settings of a method, over batch sizes and over shuffles."""
    notes: list[str] = []
    parts = {part: evidence.of_model(part) for part in _KINDS}
    everything = evidence.of_model(*_KINDS)
    methods: list[Numbers] = [
        {"method": name, "label": method_title(name)}
        | {part: _spread(records, name, notes) for part, records in parts.items()}
        for name in dict.fromkeys(record.method for record in everything)
    ]
    if all(method[part] is None for method in methods for part in _KINDS):
        raise UsageError(
            "companions: no method has two settings with the same documents; measure them: "
            + "; ".join(evidence.absent[:2])
        )
    sizes, shuffled = (
        sorted({int(record.cell.batch_size) for record in records}) for records in parts.values()
    )
    return Measured(
        {
            "model": evidence.title,
            "task": next(iter(evidence.tasks.values())),
            "gamma": shared_gamma(everything),
            "documents": everything[0].n,
            "batch_sizes": sizes,
            "shuffled_batch_sizes": shuffled,
            "methods": methods,
        },
        notes,
    )


def _spread(records: Sequence[Record], method: str, notes: list[str]) -> Numbers | None:
    """Return the flip rates of a method's pairs and the range of its scores; None without pairs."""
    own = {_setting(record): record for record in records if record.method == method}
    pairs: list[Numbers] = []
    for settings in itertools.combinations(own, 2):
        found = pair(*([own[setting].documents] for setting in settings))
        if isinstance(found, Unpaired):
            both = " and ".join(settings)
            notes.append(f"{method_title(method)}: {both} are not compared: {found.reason}.")
        else:
            pairs.append({"settings": list(settings), "flip_rate": found.flips})
    if not pairs:
        return None
    rates = column(pairs, "flip_rate")
    scores = {setting: 100 * record.value for setting, record in own.items()}
    return {
        "flip_rate": statistics.fmean(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "pairs": pairs,
        "scores": scores,
        "score_range": max(scores.values()) - min(scores.values()),
    }


def _setting(record: Record) -> str:
    cell = record.cell
    dealt = "by length" if cell.shuffle is None else f"shuffle {cell.shuffle}"
    return f"batch {cell.batch_size}, {dealt}"


def draw_companions(numbers: Numbers) -> Figure:
    """Draw flip rates with the range over pairs, and the ranges of the score."""
    figure, (flips, spread) = style.subplots(style.PAGE, 2.1, 1, 2, width_ratios=[3, 2])
    methods = numbers["methods"]
    sizes = ", ".join(map(str, numbers["batch_sizes"]))
    dealt = ", ".join(map(str, numbers["shuffled_batch_sizes"]))
    by_length, shuffled = style.bar_look(style.BLUE), style.bar_look(style.SKY, "////")
    for part, shift, look, label in (
        ("batch_sizes", -0.2, by_length, f"by length, batches of {sizes}"),
        ("shuffles", 0.2, shuffled, f"by length and at random, batches of {dealt}"),
    ):
        known = {place + shift: m[part] for place, m in enumerate(methods) if m[part] is not None}
        places, bars = [*known], [*known.values()]
        middle, low, high = (
            percent(column(bars, key)) for key in ("flip_rate", "lowest", "highest")
        )
        reach = {"yerr": whiskers(middle, low, high), "error_kw": {"elinewidth": 0.7, "capsize": 2}}
        flips.bar(places, middle, 0.38, **look, **reach, label=label)
        spread.bar(places, column(bars, "score_range"), 0.38, **look)
    for axes, label in ((flips, "answers that flip (%)"), (spread, "score range (points)")):
        name_bars(axes, range(len(methods)), [m["label"].replace(" ", "\n") for m in methods])
        axes.set(ylim=(0, None), ylabel=label)
    title = f"{numbers['model']}, {numbers['documents']:,} documents"
    flips.set_title(title + gamma_suffix(numbers["gamma"], ", γ = "))
    style.legend_below(figure, flips, columns=2)
    return figure
