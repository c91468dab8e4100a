"""MACS beside Token Drop on questions about images, at equal γ and at equal loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from matplotlib.figure import Figure

from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.paper.statistics import interval
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.losses import draw_losses, lost
from capmoe_eval.report.figures.pooling import by_key, rank_peak
from capmoe_eval.serving.trial import Between, between, paired_between

_DROP: Final = method_title("score")
_MACS: Final = method_title("macs")
_LINES: Final = (
    _DROP,
    f"{_DROP}, images first",
    _MACS,
    f"{_MACS} without rerouting",
    f"{_MACS}, ρ=0",
)
_LOOKS: Final = {label: style.line_look(index) for index, label in enumerate(_LINES)}
_LOADS: Final = {
    "gamma": "capacity factor γ",
    "drop_rate": "dropped share of own pairs",
    "expert_peak": "fullest expert / mean load",
    "rank_peak": "fullest rank / mean load",
}
_LOAD_OF: Final[Mapping[str, Callable[[Record], float]]] = {
    "drop_rate": lambda record: record.load.drop_rate,
    "expert_peak": lambda record: record.load.mean_peak_after,
    "rank_peak": lambda record: rank_peak([record]),
}
_WORDS: Final = {
    "gamma": "at equal γ",
    "drop_rate": "at equal drops",
    "expert_peak": "at an equally full expert",
    "rank_peak": "at an equally full rank",
}


def measure_weights(evidence: FigureRecords) -> Measured:
    """Collect what every setting loses on each task, and MACS beside Token Drop at equal loads."""
    rows: list[Numbers] = []
    notes: list[str] = []
    of_tasks = by_key(evidence.of_model(*evidence.records), lambda record: record.task)
    for task, title in evidence.tasks.items():
        asked = of_tasks.get(task, [])
        stock = next((one for one in asked if one.cell.method.is_stock), None)
        if stock is None:
            notes.append(f"{title}: nothing is drawn without the result that has no limit.")
            continue
        lines: dict[str, list[tuple[Record, Numbers]]] = {label: [] for label in _LINES}
        for record in (one for one in asked if not one.cell.method.is_stock):
            label, points = _label(record), lost([stock], [record], [task])
            if isinstance(points, str):
                notes.append(f"{title}: {label}{gamma_suffix(record.gamma)} is left out: {points}.")
            else:
                lines[label].append((record, _point(record, points)))
        curve = [stock, *(record for record, _ in lines[_DROP])]
        row: Numbers = {
            "task": title,
            "lines": [
                {"line": label, "points": sorted((p for _, p in own), key=lambda p: p["gamma"])}
                for label, own in lines.items()
                if own
            ],
            "beside": [
                {"line": label, "gamma": record.gamma, "better_by": _better_by(record, curve)}
                for label in _LINES[1:]
                for record, _ in lines[label]
            ],
        }
        rows.append(row)
        notes += _sentences(row)
    return Measured({"model": evidence.title, "rows": rows}, notes)


def _label(record: Record) -> str:
    """Return the line that a record's point is on."""
    knobs = record.knobs
    if "rho" not in knobs:  # Token Drop
        return _LINES[0] if record.cell.method.modality == "uniform" else _LINES[1]
    if knobs["rho"] == 0:
        return _LINES[4]
    return _LINES[2] if knobs["reroute"] == "local" else _LINES[3]


def _point(record: Record, points: Mapping[str, float]) -> Numbers:
    """Return γ, the points that are lost with their interval, and loads."""
    weights = record.load.weights
    return {
        "gamma": record.gamma,
        **points,
        **{name: load(record) for name, load in _LOAD_OF.items()},
        "image_weight": None if weights is None else weights.image,
    }


def _better_by(record: Record, curve: Sequence[Record]) -> Numbers:
    """Return by how many points a record is better than Token Drop at equal γ and equal loads.

    Token Drop at a load is interpolated between its two neighbouring γ, or none at all; None where
    no two are around it.
    """
    drops = curve[1:]  # the stock knows no ranks
    gammas = [one.gamma for one in drops]
    at_gamma = gammas.index(record.gamma) if record.gamma in gammas else None
    same = None if at_gamma is None else Between(at_gamma, at_gamma, 0.0)
    found = {"gamma": _better(paired_between(record, drops, same))}
    for name, load in _LOAD_OF.items():
        usable = drops if name == "rank_peak" else curve
        at = between(load(record), [load(one) for one in usable])
        found[name] = _better(paired_between(record, usable, at))
    return found


def _better(paired: Paired | None) -> Numbers | None:
    if paired is None:
        return None
    ends = interval({"": 100 * paired.units})
    return dict(zip(("effect", "low", "high"), ends, strict=True))


def _sentences(row: Numbers) -> Iterator[str]:
    """Yield a note on each setting of MACS."""
    for one in row["beside"]:
        parts = [
            f"{_WORDS[name]} {by['effect']:+.1f} [{by['low']:+.1f}, {by['high']:+.1f}]"
            for name, by in one["better_by"].items()
            if by is not None
        ]
        if parts and one["line"] in _LINES[2:]:
            setting = f"{one['line']}, γ={gamma_text(one['gamma'])}"
            yield f"{row['task']}: {setting}, less Token Drop: {', '.join(parts)} points."


def draw_weights(numbers: Numbers) -> Figure:
    """Draw a row for each task, and a column for each thing at which methods may be compared."""
    rows = numbers["rows"]
    figure, grid = draw_losses(rows, _LOADS, 2.2 * max(len(rows), 1), _lines)
    for row, first in zip(rows, grid[:, 0], strict=False):
        first.set_ylabel(f"{row['task']}:\npoints lost")
    for load, axes in zip(_LOADS, grid[-1], strict=True):
        if load != "drop_rate":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
    style.legend_below(figure, *grid.flat, columns=4)
    return figure


def _lines(row: Numbers, load: str) -> Iterator[tuple[list[Numbers], Numbers]]:
    for line in row["lines"]:
        look = {"markersize": 3.5, "linewidth": 0.8, "label": line["line"]}
        points = sorted(line["points"], key=lambda point: float(point[load]))
        yield points, _LOOKS[line["line"]] | look
