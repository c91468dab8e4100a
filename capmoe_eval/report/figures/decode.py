"""Generation by γ: the capacity on the prompt alone, and on every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, answered, pair
from capmoe_eval.paper.statistics import Interval, interval, share_of
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, in_percent
from capmoe_eval.report.figures.scores import scored

_MODES: Final = {"unconstrained": "the prompt alone", "constrained": "every step"}
_POINTS: Final = {"markersize": 3, "elinewidth": 0.7, "capsize": 1.5}


def decode(evidence: FigureRecords) -> p.Picture:
    """Return each task's scores by γ in both modes, and what decode steps do of the damage."""
    notes: list[str] = []
    unlimited, limited = (
        evidence.by_model(part) for part in ("generation_unlimited", "generation")
    )
    columns: list[list[p.Panel]] = []
    for model, title in evidence.models.items():
        stock = {record.task: record for record in unlimited.get(model, ())}
        rising = sorted(limited.get(model, ()), key=lambda record: record.gamma or 0.0)
        of_tasks = by_key(rising, lambda record: record.task)
        gammas = [record.gamma or 0.0 for record in rising] or [0.0, 1.0]
        across = p.gamma_axis(gammas, space=0.1)  # for the points beside their γ
        column: list[p.Panel] = []
        shares = []
        for index, (task, name) in enumerate(evidence.tasks.items()):
            task_records, baseline = of_tasks.get(task, []), stock.get(task)
            across_y = p.Axis(f"{name}\nscore (%)" if not columns else "")
            heading = title if not column else ""
            column.append(p.Panel(heading, _score_marks(baseline, task_records), y=across_y))
            shift = 0.04 * (index - (len(evidence.tasks) - 1) / 2)
            share, reasons = _shares(baseline, task_records)
            x = [gamma + shift for gamma in share]
            y, low, high = (p.percent([e[end] for e in share.values()]) for end in range(3))
            look = p.line_look(len(_MODES) + index, **_POINTS) | {"linestyle": ""}
            shares.append(p.Curve(name, x, y, low, high, look))
            for reason, at in reasons.items():
                points = ", ".join(map(gamma_text, at))
                notes.append(f"{title}, {name}: no share at γ={points}: {reason}.")
        label = "share of decode\nsteps (%)" if not columns else ""
        last = p.Panel(
            "", [*shares, p.rule(100), p.rule(0)], across, p.Axis(label, limits=(-30, 150))
        )
        columns.append([*column, last])
        notes += _steps(title, rising)
    rows = list(zip(*columns, strict=True))
    layout = {"sharex": True, "sharey": "row"}
    height = 1.3 * len(rows) + 0.5
    return p.Picture(rows, notes, height=height, look={"legend": 4, "layout": layout})


def _score_marks(baseline: Record | None, records: Sequence[Record]) -> list[p.Mark]:
    """Return one task's scores in their 95 % intervals, and the stock model's."""
    marks: list[p.Mark] = []
    if baseline:
        value, stderr = in_percent(baseline)
        reach = 1.96 * (stderr or 0.0)
        marks.append(p.rule(value, (0, (1, 2)), 1.0, "no limit ± 1.96 SE"))
        grey = {"color": p.GREY, "alpha": 0.25, "linewidth": 0}
        marks.append(p.Band("", [value - reach], [value + reach], look=grey))
    for index, (mode, title) in enumerate(_MODES.items()):
        mode_records = [record for record in records if record.cell.method.decode == mode]
        x = [record.gamma or 0.0 for record in mode_records]
        scores = list(map(in_percent, mode_records))
        name = f"capacity on {title} ± 1.96 SE"
        marks.append(scored(name, x, scores, **p.line_look(index, **_POINTS)))
    return marks


def _shares(
    baseline: Record | None, records: Sequence[Record]
) -> tuple[dict[float, Interval], dict[str, list[float]]]:
    """Return the decode steps' share of the damage by γ, and where there is none, by reason.

    The share is only known where the damage of every step is distinguishable from zero: where its
    95 % interval lies above 0.
    """
    shares: dict[float, Interval] = {}
    reasons: dict[str, list[float]] = {}
    for gamma, same in by_key(records, lambda record: record.gamma or 0.0).items():
        modes = {record.cell.method.decode: answered(record.documents) for record in same}
        if baseline is None or len(modes) < len(_MODES):
            continue
        whole = pair([answered(baseline.documents)], [modes["constrained"]])
        of_steps = pair([modes["unconstrained"]], [modes["constrained"]])
        if isinstance(whole, Unpaired) or isinstance(of_steps, Unpaired):
            unpaired = whole if isinstance(whole, Unpaired) else of_steps
            assert isinstance(unpaired, Unpaired)
            reasons.setdefault(unpaired.reason, []).append(gamma)
        elif interval({baseline.task: whole.units}).low > 0:
            shares[gamma] = share_of(of_steps.units, whole.units, baseline.task)
        else:
            reason = "the damage is not distinguishable from zero"
            reasons.setdefault(reason, []).append(gamma)
    return shares, reasons


def _steps(title: str, records: Sequence[Record]) -> Iterator[str]:
    """Say how many sequences the decode steps had, and what γ was for them after rounding."""
    steps = [
        (decode.live, record.gamma, decode.effective_gamma)
        for record in records
        if (decode := record.load.decode) and record.gamma and decode.effective_gamma
    ]
    if not steps:
        return
    live = [sequences for sequences, _, _ in steps]
    rounded = []
    for gamma, same in by_key(steps, lambda step: step[1]).items():
        effective = [step[2] for step in same]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(effective), max(effective)))
        rounded.append(f"{gamma_text(gamma)} is {' to '.join(ends)}")
    yield (
        f"{title}: a decode step has {min(live):.1f} to {max(live):.1f} live sequences, by cell, "
        f"for which γ after rounding: {', '.join(rounded)}."
    )
