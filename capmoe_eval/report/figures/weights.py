"""MACS beside Token Drop on questions about images, at equal γ and at equal loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from matplotlib.figure import Figure

from capmoe_eval.experiment.names import TITLES, gamma_number
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired, pair
from capmoe_eval.paper.statistics import Interval, interval
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, rank_peak
from capmoe_eval.report.figures.style import column, whiskers
from capmoe_eval.serving.trial import Between, between, paired_between

_DROP: Final = TITLES["score"]
_LINES: Final = (
    _DROP,
    f"{_DROP}, images first",
    TITLES["macs"],
    f"{TITLES['macs']} without rerouting",
    f"{TITLES['macs']}, ρ=0",
)
_LOOKS: Final = {label: style.line_look(index) for index, label in enumerate(_LINES)}
_AXES: Final = {
    "gamma": "capacity factor γ",
    "drop_rate": "dropped share of own pairs",
    "expert_peak": "fullest expert / mean load",
    "rank_peak": "fullest rank / mean load",
}


def measure_weights(evidence: FigureRecords) -> Measured:
    """Collect what every setting loses on each task, and MACS beside Token Drop at equal loads."""
    rows: list[Numbers] = []
    notes: list[str] = []
    everything = evidence.of_model(*evidence.records)
    for task, title in evidence.tasks.items():
        asked = [record for record in everything if record.task == task]
        stock = next((one for one in asked if one.cell.method.is_stock), None)
        bounded = [one for one in asked if not one.cell.method.is_stock]
        if stock is None:
            notes.append(f"{title}: nothing is drawn without the result that has no limit.")
            continue
        lines = by_key(bounded, _label)
        curve = [stock, *lines.get(_DROP, ())]
        rows.append(
            {
                "task": title,
                "lines": [
                    {
                        "line": label,
                        "points": sorted(
                            (_point(record, stock) for record in lines[label]),
                            key=lambda point: float(point["gamma"]),
                        ),
                    }
                    for label in _LINES
                    if label in lines
                ],
                "beside": [
                    {"line": label, "gamma": record.gamma, **_beside(record, curve)}
                    for label in _LINES[1:]
                    for record in lines.get(label, ())
                ],
            }
        )
        notes += _sentences(rows[-1])
    return Measured({"model": evidence.title, "rows": rows}, notes)


def _label(record: Record) -> str:
    """Return the line that a record's point is on."""
    method = record.cell.method
    if method.weighs_tokens and method.rho == 0:
        return _LINES[4]
    if method.weighs_tokens:
        return _LINES[2] if method.reroute == "local" else _LINES[3]
    return _LINES[0] if method.modality == "uniform" else _LINES[1]


_LOADS: Final[Mapping[str, Callable[[Record], float]]] = {
    "drop_rate": lambda record: record.load.drop_rate,
    "expert_peak": lambda record: record.load.mean_peak_after,
    "rank_peak": lambda record: rank_peak([record]),
}


def _point(record: Record, stock: Record) -> Numbers:
    """Return γ, the points that are lost with their interval, and loads."""
    paired, weights = pair([stock.documents], [record.documents]), record.load.weights
    assert isinstance(paired, Paired)
    lost = _points(paired, record.task)
    return {
        "gamma": record.gamma,
        "lost": lost.mean,
        "low": lost.low,
        "high": lost.high,
        **{name: load(record) for name, load in _LOADS.items()},
        "image_weight": None if weights is None else weights.image,
    }


def _beside(record: Record, curve: Sequence[Record]) -> Numbers:
    """Return by how many points a record is better than Token Drop at equal γ and equal loads.

    Token Drop at a load is interpolated between its two neighbouring γ, or none at all; None where
    no two are around it.
    """
    drops = [one for one in curve if not one.cell.method.is_stock]  # the stock knows no ranks
    gammas = [one.gamma for one in drops]
    at_gamma = gammas.index(record.gamma) if record.gamma in gammas else None
    found: dict[str, Any] = {"gamma": None}
    if at_gamma is not None:
        found["gamma"] = _better(paired_between(record, drops, Between(at_gamma, at_gamma, 0.0)))
    for name, load in _LOADS.items():
        usable = drops if name == "rank_peak" else curve
        at = between(load(record), [load(one) for one in usable])
        found[name] = _better(paired_between(record, usable, at))
    return {"better_by": found}


def _better(paired: Paired | None) -> Numbers | None:
    if paired is None:
        return None
    found = _points(paired)
    return {"effect": found.mean, "low": found.low, "high": found.high}


def _points(paired: Paired, task: str = "") -> Interval:
    return interval({task: 100 * paired.units})


_WORDS: Final = {
    "gamma": "at equal γ",
    "drop_rate": "at equal drops",
    "expert_peak": "at an equally full expert",
    "rank_peak": "at an equally full rank",
}


def _sentences(row: Numbers) -> list[str]:
    """Return a note on each setting of MACS."""
    notes = []
    for one in row["beside"]:
        parts = [
            f"{_WORDS[name]} {by['effect']:+.1f} [{by['low']:+.1f}, {by['high']:+.1f}]"
            for name, by in one["better_by"].items()
            if by is not None
        ]
        if parts and one["line"] in _LINES[2:]:
            setting = f"{one['line']}, γ={gamma_number(one['gamma'])}"
            notes.append(f"{row['task']}: {setting}, less Token Drop: {', '.join(parts)} points.")
    return notes


def draw_weights(numbers: Numbers) -> Figure:
    """Draw a row for each task, and a column for each thing at which methods may be compared."""
    rows = numbers["rows"]
    figure, grid = style.subplots(
        style.PAGE,
        2.2 * max(len(rows), 1),
        max(len(rows), 1),
        len(_AXES),
        squeeze=False,
        sharey="row",
        sharex="col",
    )
    for row, panels in zip(rows, grid, strict=False):
        for place, axes in zip(_AXES, panels, strict=True):
            for line in row["lines"]:
                points = sorted(line["points"], key=lambda point: float(point[place]))
                lost = column(points, "lost")
                errors = whiskers(lost, column(points, "low"), column(points, "high"))
                look: Numbers = _LOOKS[line["line"]] | {"markersize": 3.5, "linewidth": 0.8}
                axes.errorbar(
                    column(points, place),
                    lost,
                    errors,
                    elinewidth=0.5,
                    capsize=1,
                    label=line["line"],
                    **look,
                )
            axes.axhline(0, color=style.BLACK, linewidth=0.5)
            axes.grid()
        panels[0].set_ylabel(f"{row['task']}:\npoints lost")
    for (place, label), axes in zip(_AXES.items(), grid[-1], strict=True):
        axes.set_xlabel(label)
        if place != "drop_rate":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
    style.legend_below(figure, *grid.flat, columns=4)
    return figure
