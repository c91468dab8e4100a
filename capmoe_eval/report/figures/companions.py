"""How much an answer depends on its batch: the same documents in batches of other kinds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import BLUE, HATCHES, PAGE, SKY, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS: Final = {"batch_sizes": "batch size", "shuffles": "companions"}


def measure_companions(evidence: FigureRecords) -> Measured:
    """Compare every pair of settings of a method, over batch sizes and over shuffles."""
    methods: list[dict[str, Any]] = []
    notes: list[str] = []
    everything = evidence.of(*_KINDS, model=evidence.model)
    for name in by_key(everything, lambda record: record.method):
        found: dict[str, Any] = {"method": name, "label": method_title(name)}
        for part in _KINDS:
            records = [r for r in evidence.of(part, model=evidence.model) if r.method == name]
            found[part] = _spread(records, found["label"], notes)
        methods.append(found)
    if all(method[part] is None for method in methods for part in _KINDS):
        raise UsageError(
            "companions: no method has two settings with the same documents; measure them: "
            + "; ".join(evidence.absent[:2])
        )
    gammas = sorted({record.gamma for record in everything if record.gamma is not None})
    return Measured(
        {
            "model": evidence.models[evidence.model],
            "task": next(iter(evidence.tasks.values())),
            "gamma": gammas[0] if gammas else None,
            "documents": everything[0].n,
            "batch_sizes": _batch_sizes(evidence, "batch_sizes"),
            "shuffled_batch_sizes": _batch_sizes(evidence, "shuffles"),
            "methods": methods,
        },
        tuple(notes),
    )


def _batch_sizes(evidence: FigureRecords, part: str) -> list[int]:
    return sorted({int(r.cell.batch_size) for r in evidence.of(part, model=evidence.model)})


def _spread(records: Sequence[Record], label: str, notes: list[str]) -> dict[str, Any] | None:
    """Return the flip rates of all pairs and the range of scores; None with fewer than two."""
    pairs: list[dict[str, Any]] = []
    for one, other in itertools.combinations(records, 2):
        found = pair([one.documents], [other.documents])
        if isinstance(found, Unpaired):
            notes.append(
                f"{label}: {_setting(one)} and {_setting(other)} are not compared: {found.reason}."
            )
        else:
            pairs.append({"settings": [_setting(one), _setting(other)], "flip_rate": found.flips})
    if not pairs:
        return None
    rates = [float(pair["flip_rate"]) for pair in pairs]
    values = [100 * record.value for record in records]
    return {
        "flip_rate": statistics.fmean(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "pairs": pairs,
        "scores": {_setting(record): value for record, value in zip(records, values, strict=True)},
        "score_range": max(values) - min(values),
    }


def _setting(record: Record) -> str:
    cell = record.cell
    dealt = "by length" if cell.shuffle is None else f"shuffle {cell.shuffle}"
    return f"batch {cell.batch_size}, {dealt}"


def draw_companions(numbers: Numbers) -> Figure:
    """Draw flip rates with the range over pairs, and the ranges of the score."""
    figure = new_figure(PAGE, 2.1)
    flips, spread = figure.subplots(1, 2, width_ratios=[3, 2])
    methods = numbers["methods"]
    sizes = ", ".join(str(size) for size in numbers["batch_sizes"])
    dealt = ", ".join(str(size) for size in numbers["shuffled_batch_sizes"])
    looks = (
        (BLUE, HATCHES[0], f"by length, batches of {sizes}"),
        (SKY, HATCHES[1], f"by length and at random, batches of {dealt}"),
    )
    for offset, (part, (colour, hatch, label)) in enumerate(zip(_KINDS, looks, strict=True)):
        bars = [(place, m[part]) for place, m in enumerate(methods) if m[part] is not None]
        places = [place + 0.4 * offset - 0.2 for place, _ in bars]
        rates = [100 * bar["flip_rate"] for _, bar in bars]
        flips.bar(
            places,
            rates,
            0.38,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            yerr=[
                [rate - 100 * bar["lowest"] for rate, (_, bar) in zip(rates, bars, strict=True)],
                [100 * bar["highest"] - rate for rate, (_, bar) in zip(rates, bars, strict=True)],
            ],
            error_kw={"elinewidth": 0.7, "capsize": 2},
            label=label,
        )
        spread.bar(
            places,
            [bar["score_range"] for _, bar in bars],
            0.38,
            color=colour,
            hatch=hatch,
            edgecolor="black",
        )
    _finish(flips, methods, "answers that flip (%)")
    _finish(spread, methods, "score range (points)")
    title = f"{numbers['model']}, {numbers['documents']:,} documents"
    flips.set_title(title + gamma_suffix(numbers["gamma"], ", γ = "))
    figure.legend(*flips.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _finish(axes: Axes, methods: Sequence[Numbers], label: str) -> None:
    axes.set_xticks(range(len(methods)), [method["label"].replace(" ", "\n") for method in methods])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
