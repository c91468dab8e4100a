"""Points that methods of other papers lose, beside Token Drop, as small multiples."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Final

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import When, by_key, by_task, mean_load, rank_peak

from capmoe_methods.figures.losses import WHISKERS, Setting, loss_curve, lost

_DROP: Final = method_title("score")
_KINDS: Final = {"prompts": "questions", "decode steps": "generation"}
_BOUNDED: Final = {
    "activated": "activated experts /\nwithout a limit",
    "expert_peak": "fullest expert /\nmean load",
}
_KNOBS: Final = {
    "gamma": "γ",
    "k0": "k0",
    "expert_budget": "budget",
    "min_similarity": "similarity",
    "viable_score": "score",
}
_LOSSLESS: Final = {  # the name in the legend and the dash, by how a method's name begins
    "EPLB+": ("EPLB+R, nothing dropped", "--"),
    "LPLB+": ("LPLB+R, nothing dropped", ":"),
}
_NO_LIMIT: Final[p.Look] = {
    **{"color": p.GREY, "linestyle": "", "marker": "x", "markersize": 5, "markeredgewidth": 1.5}
}
_REFERENCE: Final[p.Look] = {"color": p.GREY, "linewidth": 0.8, "markersize": 2.5, "zorder": 1}
_COLOURED: Final[p.Look] = {"color": p.BLUE, "linewidth": 0.8, "markersize": 3.5, **WHISKERS}
_MULTIPLES: Final[p.Look] = {"layout": {"sharex": "col", "sharey": True}, "legend": 2}


def comparators(evidence: FigureRecords) -> p.Picture:
    """Return what each method loses against what methods bound, one row of panels for a method."""
    kinds, notes = _settings(evidence)
    settings = [setting for of_kind in kinds.values() for setting in of_kind]
    models = dict.fromkeys(setting.model for setting in settings)
    markers = dict(zip(models, cycle(p.MARKERS), strict=False))
    lines = by_key(settings, lambda setting: setting.line)
    drops = lines.pop(_DROP, [])
    rows = [
        [
            p.Panel("", _beside_drop(drops, same, load, evidence.models, markers))
            for load in _BOUNDED
        ]
        for same in lines.values()
    ]
    titles = [line + _ranges(same) for line, same in lines.items()]
    title = "; ".join(_asked(evidence, of) for of in kinds)
    return _multiples(rows, titles, list(_BOUNDED.values()), title, notes)


def ranks(evidence: FigureRecords) -> p.Picture:
    """Return what budgets of ranks lose against the fullest rank, one panel a model and kind."""
    kinds, notes = _settings(evidence)
    rows, titles = [], []
    for of, settings in kinds.items():
        judged: set[str] = set()
        for model, same in by_key(settings, lambda setting: setting.model).items():
            marks: list[p.Mark] = []
            for label, straggler, dash, task in _lossless(evidence, model, of):
                look = {"color": p.BLACK, "linestyle": dash, "linewidth": 0.8, "zorder": 0}
                marks.append(p.Level(label, straggler, True, look))
                judged.add(task)
            lines = by_key(same, lambda setting: setting.line)
            drops = lines.pop(_DROP, [])
            for line, others in (lines or {"": []}).items():
                marks += _beside_drop(drops, others, "rank_peak", {model: line}, {model: "o"})
            rows.append([p.Panel("", marks)])
            titles.append(f"{evidence.models[model]}, {_asked(evidence, of)}")
        if judged:
            notes.append(f"Balancing of {_KINDS[of]} was measured on {', '.join(sorted(judged))}.")
    if not evidence.balances:
        notes.append("No line of lossless load balancing: capmoe-eval bench placement makes it.")
    return _multiples(rows, titles, ["fullest rank / mean load"], "", notes)


def _multiples(
    rows: Sequence[Sequence[p.Panel]],
    titles: Sequence[str],
    loads: Sequence[str],
    title: str,
    notes: Sequence[str],
) -> p.Picture:
    """Return rows of panels, one column of a page wide, with the titles above the first panels."""
    named = [
        [
            replace(first, title=title, look={"title": {"loc": "left"}}, y=p.Axis("points lost")),
            *row,
        ]
        for (first, *row), title in zip(rows, titles, strict=True)
    ] or [[p.Panel("", ()) for _ in loads]]
    named[-1] = [replace(panel, x=p.Axis(x)) for panel, x in zip(named[-1], loads, strict=True)]
    # Without the marker of a model in the legend.
    drop = p.Curve(_DROP, (), (), look=_REFERENCE)
    named[-1][-1] = replace(named[-1][-1], marks=[*named[-1][-1].marks, drop])
    return p.Picture(named, notes, title, p.COLUMN, 1.1 + 0.9 * len(named), _MULTIPLES)


def _beside_drop(
    drops: Iterable[Setting],
    settings: Sequence[Setting],
    load: str,
    names: Mapping[str, str],
    markers: Mapping[str, str],
) -> list[p.Mark]:
    """Return the settings of one method by model, beside Token Drop and the router's own loads."""
    marks: list[p.Mark] = [p.rule(0)]
    for model, curve in by_key(drops, lambda setting: setting.model).items():
        marks.append(loss_curve(_DROP, curve, load, marker=markers[model], **_REFERENCE))
    unlimited = by_key(settings or drops, lambda setting: setting.model).values()
    before = [
        statistics.fmean(loads)
        for curve in unlimited
        if (loads := [at for setting in curve if (at := setting.unlimited[load]) is not None])
    ]
    marks.append(p.Curve("no limit", before, [0.0] * len(before), look=_NO_LIMIT))
    for model, curve in by_key(settings, lambda setting: setting.model).items():
        marks.append(loss_curve(names[model], curve, load, marker=markers[model], **_COLOURED))
    return marks


def _settings(evidence: FigureRecords) -> tuple[dict[str, list[Setting]], list[str]]:
    """Return the settings that have a point, by the kind of forwards, and why others have none."""
    kinds: dict[str, list[Setting]] = {}
    notes: list[str] = []
    stock = evidence.by_model("stock")
    of_models = evidence.by_model(*(part for part in evidence.records if part != "stock"))
    for of, name in _KINDS.items():
        tasks = _tasks(evidence, of)
        for model, title in evidence.models.items():
            bounded = [record for record in of_models.get(model, ()) if _of(record) == of]
            settings = []
            for same in by_key(bounded, lambda record: record.cell.method).values():
                setting = _setting(stock.get(model, ()), same, tasks)
                if isinstance(setting, str):
                    notes.append(f"{title}, {name}: {_line(same[0])} is left out: {setting}.")
                else:
                    settings.append(setting)
            for line in by_key(settings, lambda setting: setting.line).values():
                kinds.setdefault(of, []).extend(sorted(line, key=lambda setting: setting.order))
    return kinds, notes


def _tasks(evidence: FigureRecords, of: str) -> dict[str, str]:
    """Return the titles of the tasks that have bounded forwards of a kind."""
    parts = (records for part, records in evidence.records.items() if part != "stock")
    asked = {record.task for records in parts for record in records if _of(record) == of}
    return {task: title for task, title in evidence.tasks.items() if task in asked}


def _asked(evidence: FigureRecords, of: str) -> str:
    return f"{_KINDS[of]} ({', '.join(_tasks(evidence, of).values())})"


def _ranges(settings: Sequence[Setting]) -> str:
    """Return what grows along the lines, such as ``: γ 0.5 → 2``; nothing where nothing does."""
    values = zip(*(setting.order for setting in settings), strict=True)
    ends = {
        name: (min(knob), max(knob)) for name, knob in zip(_KNOBS.values(), values, strict=True)
    }
    texts = [f"{name} {low:g} → {high:g}" for name, (low, high) in ends.items() if low < high]
    return f": {', '.join(texts)}" if texts else ""


def _of(record: Record) -> str:
    return "decode steps" if record.cell.method.decode == "only" else "prompts"


def _line(record: Record) -> str:
    """Return the line that a record's point is on."""
    method = record.cell.method
    if getattr(method, "candidates", None) == "global":
        return "expert choice"
    return f"{method.title}, devices" if method.granularity == "device" else method.title


def _setting(
    stock: Sequence[Record], records: Sequence[Record], tasks: Collection[str]
) -> Setting | str:
    """Return one setting of one model, tasks counting equally, or why it has no point."""
    points = lost(stock, records, tasks)
    if isinstance(points, str):
        return points
    knobs = records[0].cell.method.identity()
    before, after = (_loads(records, tasks, when) for when in ("before", "after"))
    # Of the forwards themselves: the stock model's records may be older than these counts.
    if before["activated"] and after["activated"] is not None:
        after["activated"] /= before["activated"]
        before["activated"] = 1.0
    else:
        before["activated"] = after["activated"] = None
    order = tuple(float(knobs.get(name) or 0) for name in _KNOBS)
    return Setting(records[0].model, _line(records[0]), order, points, after, before)


def _loads(
    records: Sequence[Record], tasks: Collection[str], when: When
) -> dict[str, float | None]:
    """Return what a method may bound, before or after it; ranks are known where there are some."""
    has_ranks = records[0].cell.method.ep_size > 1
    peaks = [rank_peak(same, when) for same in by_task(records, tasks) if has_ranks]
    return {
        "activated": mean_load(records, tasks, f"activated_{when}"),
        "expert_peak": mean_load(records, tasks, f"mean_peak_{when}"),
        "rank_peak": statistics.fmean(peaks) if peaks else None,
    }


def _lossless(
    evidence: FigureRecords, model: str, of: str
) -> Iterator[tuple[str, float, str, str]]:
    """Yield the fullest rank under balancing that drops nothing, on the tasks of the figure.

    What was planned on another task is not shown.
    """
    for row in evidence.balances:
        kind = next((kind for kind in _LOSSLESS if row.method.startswith(kind)), None)
        is_own = (row.model, row.of, row.planned_on) == (model, of, row.judged_on)
        if kind is not None and is_own and row.judged_on in evidence.tasks:
            label, dash = _LOSSLESS[kind]
            yield label, row.straggler, dash, evidence.tasks[row.judged_on]
