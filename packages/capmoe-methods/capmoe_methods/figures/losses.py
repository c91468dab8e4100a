"""Points that methods lose against no limit, held against the loads that they may bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired, Unpaired, answered, pair
from capmoe_eval.paper.statistics import Interval, interval
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, rank_peak

from capmoe_methods.trial import Between, between, paired_between

_DROP, _MACS = map(method_title, ("score", "macs"))
WHISKERS: Final[p.Look] = {"elinewidth": 0.5, "capsize": 1}


class Setting(NamedTuple):
    """The points that a setting of a model loses, and the loads that it may bound."""

    model: str
    line: str
    order: tuple[float, ...]  # along its line
    lost: Interval  # points
    loads: Mapping[str, float | None]
    unlimited: Mapping[str, float | None] = MappingProxyType({})  # the loads before the method


def lost(
    stock: Iterable[Record], records: Iterable[Record], tasks: Collection[str]
) -> Interval | str:
    """Return the points lost against the stock model, or why they are not known.

    They are a mean over tasks that count equally, with a 95 % interval over documents.
    """
    ordered = sorted(tasks)  # as in the effects of claims
    sides = by_task(stock, ordered), by_task(records, ordered)
    if not all(sides):
        return "not every task is there"
    differences = {}
    for task, without, bounded in zip(ordered, *sides, strict=True):
        both = ([answered(r.documents) for r in side] for side in (without, bounded))
        paired = pair(*both)
        if isinstance(paired, Unpaired):
            return paired.reason
        differences[task] = 100 * paired.units
    return interval(differences)


def loss_curve(name: str, settings: Iterable[Setting], load: str, **look: object) -> p.Curve:
    """Return the settings of one line that have a load, against it."""
    points = [(at, setting.lost) for setting in settings if (at := setting.loads[load]) is not None]
    x = [at for at, _ in points]
    middle, low, high = zip(*(ends for _, ends in points), strict=True) if points else ((), (), ())
    return p.Curve(name, x, middle, low, high, look)


_GRID: Final[p.Look] = {"layout": {"sharey": "row", "sharex": "col"}}
_WEIGHT_LINES: Final = (
    _DROP,
    f"{_DROP}, images first",
    _MACS,
    f"{_MACS} without rerouting",
    f"{_MACS}, ρ=0",
)
_EQUAL: Final = {
    "gamma": ("capacity factor γ", "at equal γ"),
    "drop_rate": ("dropped share of own pairs", "at equal drops"),
    "expert_peak": ("fullest expert / mean load", "at an equally full expert"),
    "rank_peak": ("fullest rank / mean load", "at an equally full rank"),
}
_LOAD_OF: Final[Mapping[str, Callable[[Record], float]]] = {
    "drop_rate": lambda record: record.load.drop_rate,
    "expert_peak": lambda record: record.load.mean_peak_after,
    "rank_peak": lambda record: rank_peak([record]),
}


def weights(evidence: FigureRecords) -> p.Picture:
    """Return what MACS and Token Drop lose on questions about images, at equal γ and loads."""
    rows: list[list[p.Panel]] = []
    notes: list[str] = []
    of_tasks = by_key(evidence.of_model(*evidence.records), lambda record: record.task)
    for task, title in evidence.tasks.items():
        asked = of_tasks.get(task, [])
        stock = next((record for record in asked if record.cell.method.is_stock), None)
        if stock is None:
            notes.append(f"{title}: nothing is drawn without the result that has no limit.")
            continue
        lines: dict[str, list[tuple[Record, Setting]]] = {label: [] for label in _WEIGHT_LINES}
        for record in (record for record in asked if not record.cell.method.is_stock):
            label, points = _weight_line(record), lost([stock], [record], [task])
            if isinstance(points, str):
                notes.append(f"{title}: {label}{gamma_suffix(record.gamma)} is left out: {points}.")
            else:
                loads = {name: load(record) for name, load in _LOAD_OF.items()}
                loads["gamma"] = record.gamma or 0.0
                setting = Setting(record.model, label, (loads["gamma"],), points, loads)
                lines[label].append((record, setting))
        rows.append([_weight_panel(lines, load) for load in _EQUAL])
        rows[-1][0] = replace(rows[-1][0], y=p.Axis(f"{title}:\npoints lost"))
        curve = [stock, *(record for record, _ in lines[_DROP])]
        for label in _WEIGHT_LINES[2:]:
            for record, _ in lines[label]:
                if parts := list(_better_by(record, curve)):
                    setting_name = f"{label}, γ={gamma_text(record.gamma or 0.0)}"
                    notes.append(
                        f"{title}: {setting_name}, less Token Drop: {', '.join(parts)} points."
                    )
    rows = rows or [[p.Panel("", ()) for _ in _EQUAL]]
    rows = [
        [
            replace(
                panel,
                x=p.Axis(name if row is rows[-1] else "", is_log=load != "drop_rate"),
            )
            for panel, (load, (name, _)) in zip(row, _EQUAL.items(), strict=True)
        ]
        for row in rows
    ]
    return p.Picture(rows, notes, height=2.2 * len(rows), look=_GRID | {"legend": 4})


def _weight_panel(lines: Mapping[str, Sequence[tuple[Record, Setting]]], load: str) -> p.Panel:
    marks: list[p.Mark] = []
    for index, (label, points) in enumerate(lines.items()):
        if points:
            settings = sorted(
                (setting for _, setting in points),
                key=lambda setting: (setting.loads[load] or 0.0, setting.order),
            )
            look = p.line_look(index, markersize=3.5, linewidth=0.8, **WHISKERS)
            marks.append(loss_curve(label, settings, load, **look))
    return p.Panel("", [*marks, p.rule(0)])


def _weight_line(record: Record) -> str:
    """Return the line that a record's point is on."""
    knobs = record.knobs
    if "rho" not in knobs:  # Token Drop
        return _WEIGHT_LINES[record.cell.method.modality != "uniform"]
    if knobs["rho"] == 0:
        return _WEIGHT_LINES[4]
    return _WEIGHT_LINES[2 if knobs["reroute"] == "local" else 3]


def _better_by(record: Record, curve: Sequence[Record]) -> Iterator[str]:
    """Say by how many points a record is better than Token Drop at equal γ and equal loads.

    Token Drop at a load is interpolated between its two neighbouring γ; where no two are around it,
    there is nothing to say.
    """
    drops = curve[1:]  # the stock knows no ranks
    gammas = [other.gamma for other in drops]
    at_gamma = gammas.index(record.gamma) if record.gamma in gammas else None
    same = None if at_gamma is None else Between(at_gamma, at_gamma, 0.0)
    pairs: dict[str, Paired | None] = {"gamma": paired_between(record, drops, same)}
    for name, load in _LOAD_OF.items():
        usable = drops if name == "rank_peak" else curve
        at = between(load(record), [load(other) for other in usable])
        pairs[name] = paired_between(record, usable, at)
    for name, paired in pairs.items():
        if paired is not None:
            effect, low, high = interval({"": 100 * paired.units})
            yield f"{_EQUAL[name][1]} {effect:+.1f} [{low:+.1f}, {high:+.1f}]"
