"""Points that methods lose against no limit, held against the loads that they may bound."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Final, NamedTuple

from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired, Unpaired, pair
from capmoe_eval.paper.statistics import Interval, interval
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load, rank_peak
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.serving.trial import Between, between, paired_between

_DROP, _MACS, _REROUTE = map(method_title, ("score", "macs", "token_reroute"))
_DOT: Final = {"linestyle": "", "color": p.BLACK}
_WHISKERS: Final = {"elinewidth": 0.5, "capsize": 1}


class Setting(NamedTuple):
    """The points that a setting of a model loses, and the loads that it may bound."""

    line: str
    gamma: float | None
    order: tuple[float, ...]  # along its line
    lost: Interval  # points
    loads: Mapping[str, float | None]


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
        paired = pair(*([record.documents for record in side] for side in (without, bounded)))
        if isinstance(paired, Unpaired):
            return paired.reason
        differences[task] = 100 * paired.units
    return interval(differences)


def _curve(name: str, settings: Iterable[Setting], load: str, **look: object) -> p.Curve:
    """Return the settings of one line that have a load, against it."""
    points = [(at, setting.lost) for setting in settings if (at := setting.loads[load]) is not None]
    x = [at for at, _ in points]
    middle, low, high = zip(*(ends for _, ends in points), strict=True) if points else ((), (), ())
    return p.Curve(name, x, middle, low, high, _WHISKERS | look)


_ROWS: Final = {"prompts": "questions", "decode steps": "generation"}
_BOUNDED: Final = {
    "activated": "activated experts / without a limit",
    "expert_peak": "fullest expert / mean load",
    "rank_peak": "fullest rank / mean load",
}
_ON_RANKS: Final = f"{_DROP}, each rank"
_EXPERT_CHOICE: Final = "expert choice"
_METHODS: Final = (
    _DROP,
    _ON_RANKS,
    f"{_REROUTE}, devices",
    method_title("oea"),
    method_title("xshare"),
    method_title("sere"),
    _EXPERT_CHOICE,
    method_title("laser"),
)
_METHOD_LOOKS: Final = {label: p.line_look(index) for index, label in enumerate(_METHODS)}
_LOSSLESS: Final[dict[str, tuple[str, p.Look]]] = {  # by how a method's name begins
    "contiguous": ("no limit, ranks as they are", {"linestyle": "-", "linewidth": 2}),
    "EPLB+": ("EPLB+R, nothing dropped", {"linestyle": "--", "linewidth": 0.9}),
    "LPLB+": ("LPLB+R, nothing dropped", {"linestyle": ":", "linewidth": 0.9}),
}
_KNOBS: Final = ("gamma", "k0", "expert_budget", "min_similarity", "viable_score")


def comparators(evidence: FigureRecords) -> p.Picture:
    """Return what every setting loses on each model, against the three things that it may bound."""
    notes: list[str] = []
    stock = evidence.by_model("stock")
    of_models = evidence.by_model(*(part for part in evidence.records if part != "stock"))
    markers = dict(zip(evidence.models, cycle(p.MARKERS), strict=False))
    rows = []
    balanced: list[str] = []
    drawn: set[str] = set()
    for of, row_name in _ROWS.items():
        asked = {r.task for records in of_models.values() for r in records if _of(r) == of}
        tasks = {task: title for task, title in evidence.tasks.items() if task in asked}
        columns: dict[str, list[p.Mark]] = {load: [] for load in _BOUNDED}
        uprights: list[p.Mark] = []
        judged: set[str] = set()
        for model, title in evidence.models.items():
            settings = []
            bounded = [record for record in of_models.get(model, ()) if _of(record) == of]
            for same in by_key(bounded, lambda record: record.cell.method).values():
                setting = _setting(stock.get(model, ()), same, tasks)
                if isinstance(setting, str):
                    label = _line(same[0])
                    notes.append(f"{title}, {row_name}: {label} is left out: {setting}.")
                else:
                    settings.append(setting)
            settings.sort(key=lambda setting: setting.order)
            drawn |= {setting.line for setting in settings}
            for load, marks in columns.items():
                points = [setting for setting in settings if setting.loads[load] is not None]
                for line, curve in by_key(points, lambda setting: setting.line).items():
                    look = _METHOD_LOOKS[line] | {"marker": markers[model]}
                    marks.append(_curve("", curve, load, **look, markersize=3.5, linewidth=0.7))
            for label, straggler, look, task in _lossless(evidence, model, of):
                uprights.append(p.Level(label, straggler, True, look))
                judged.add(task)
        for marks in columns.values():
            marks.append(p.rule(0))
        columns["rank_peak"] += uprights
        y = p.Axis(f"{row_name} ({', '.join(tasks.values()) or '–'}):\npoints lost")
        rows.append([p.Panel("", marks) for marks in columns.values()])
        rows[-1][0] = replace(rows[-1][0], y=y)
        if judged:
            balanced.append(f"Balancing of {row_name} was measured on {', '.join(sorted(judged))}.")
    if not evidence.balances:
        notes.append("No line of lossless load balancing: capmoe-eval bench placement makes it.")
    rows[-1] = [
        replace(panel, x=p.Axis(name))
        for panel, name in zip(rows[-1], _BOUNDED.values(), strict=True)
    ]
    # Empty curves name the methods by colour and dash, and the models by marker.
    names = [
        p.Curve(label, (), (), look=look | {"marker": ""})
        for label, look in _METHOD_LOOKS.items()
        if label in drawn
    ]
    names += [
        p.Curve(evidence.models[model], (), (), look={"marker": m} | _DOT)
        for model, m in markers.items()
    ]
    rows[0][0] = replace(rows[0][0], marks=[*rows[0][0].marks, *names])
    return p.Picture(rows, [*notes, *balanced], height=4.6, look=_GRID | {"legend": 4})


_GRID: Final[p.Look] = {"layout": {"sharey": "row", "sharex": "col"}}


def _of(record: Record) -> str:
    return "decode steps" if record.cell.method.decode == "only" else "prompts"


def _line(record: Record) -> str:
    """Return the line that a record's point is on."""
    method = record.cell.method
    if isinstance(method, TokenDrop) and method.ep_size > 1:
        return _ON_RANKS
    if getattr(method, "candidates", None) == "global":
        return _EXPERT_CHOICE
    return f"{method.title}, devices" if method.granularity == "device" else method.title


def _setting(
    stock: Sequence[Record], records: Sequence[Record], tasks: Collection[str]
) -> Setting | str:
    """Return one setting of one model, tasks counting equally, or why it has no point."""
    points = lost(stock, records, tasks)
    if isinstance(points, str):
        return points
    method = records[0].cell.method
    knobs = method.identity()
    before, after = (mean_load(records, tasks, f"activated_{when}") for when in ("before", "after"))
    peaks = [rank_peak(same) for same in by_task(records, tasks) if method.ep_size > 1]
    loads = {
        "activated": after / before if before and after is not None else None,
        "expert_peak": mean_load(records, tasks, "mean_peak_after"),
        "rank_peak": statistics.fmean(peaks) if peaks else None,
    }
    order = tuple(float(knobs.get(name) or 0) for name in _KNOBS)
    return Setting(_line(records[0]), records[0].gamma, order, points, loads)


def _lossless(
    evidence: FigureRecords, model: str, of: str
) -> Iterator[tuple[str, float, p.Look, str]]:
    """Yield the fullest rank under balancing that drops nothing, on the tasks of the figure.

    What was planned on another task is not shown.
    """
    for row in evidence.balances:
        kind = next((kind for kind in _LOSSLESS if row.method.startswith(kind)), None)
        is_own = (row.model, row.of, row.planned_on) == (model, of, row.judged_on)
        if kind is not None and is_own and row.judged_on in evidence.tasks:
            label, look = _LOSSLESS[kind]
            thin = look | {"color": p.GREY, "zorder": 0}
            yield label, row.straggler, thin, evidence.tasks[row.judged_on]


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
                setting = Setting(label, record.gamma, (loads["gamma"],), points, loads)
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
            look = p.line_look(index, markersize=3.5, linewidth=0.8)
            marks.append(_curve(label, settings, load, **look))
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
