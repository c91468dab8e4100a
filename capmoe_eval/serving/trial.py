"""Judge adaptive γ against the static ones: at equal drops, and at equal straggler factors.

A static γ that drops exactly as much as an adaptive setting is hardly ever on the grid. It is
interpolated: of the two static settings around the wanted value, each counts by its nearness (a
named choice; it is also what a server would get that used either at random). That holds for
straggler factors and, document by document, for scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Floats, Paired, Unpaired, pair, pool
from capmoe_eval.paper.statistics import Comparison, compare
from capmoe_eval.routing.method import Adaptive


class Between(NamedTuple):
    """Two points of a curve around a value."""

    below: int
    above: int
    weight: float  # of the one above

    def mix(self, values: Sequence[float]) -> float:
        """Return the interpolated value of another quantity of the points."""
        return (1 - self.weight) * values[self.below] + self.weight * values[self.above]


def between(wanted: float, values: Sequence[float]) -> Between | None:
    """Return the two neighbouring points around a value, or None if it is beyond all of them."""
    below = [n for n, value in enumerate(values) if value <= wanted]
    above = [n for n, value in enumerate(values) if value >= wanted]
    if not below or not above:
        return None
    low = max(below, key=lambda n: (values[n], -n))
    high = min(above, key=lambda n: (values[n], n))
    span = values[high] - values[low]
    return Between(low, high, (wanted - values[low]) / span if span else 0.0)


def straggler(record: Record) -> float:
    """Return a record's straggler factor: after drops, the mean over its layers.

    It is the fullest expert (with device-level capacities the fullest rank) over the mean load
    before drops, as a mean over forwards.
    """
    device = record.cell.method.granularity == "device"
    peaks = [getattr(of.peak, f"{'device' if device else 'expert'}_after") for of in record.layers]
    return math.fsum(peak.mean for peak in peaks) / len(peaks)


class Outcome(NamedTuple):
    """An adaptive setting of one model and task beside the static curve."""

    model: str
    task: str
    rule: Adaptive
    drop_rate: float
    straggler: float
    static_straggler: float | None  # of the static γ with as many drops; None beyond the curve
    scores: Paired | None  # against the static γ with the same straggler factor


class Verdict(NamedTuple):
    """The outcomes of one budget, or of all of its kind."""

    budget_of: str
    budget: float | None
    cells: int  # models times tasks, of those on the static curve
    straggler: tuple[float, float, float] | None  # adaptive minus static: mean and 95 % interval
    accuracy: Comparison | None  # adaptive minus static, in points


def outcomes(records: Iterable[Record]) -> list[Outcome]:
    """Return every adaptive record beside the static records of its model, task and knobs."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.model, record.task), []).append(record)
    found = []
    for same in groups.values():
        for record in (one for one in same if isinstance(one.factor, Adaptive)):
            static = [one for one in same if _is_static(one, record)]
            assert isinstance(record.factor, Adaptive)
            found.append(_outcome(record, record.factor, static))
    return found


def _is_static(record: Record, adaptive: Record) -> bool:
    """Return whether a record is of a static γ, and otherwise of an adaptive record's method.

    The baseline is a point of the curve, with no drops; but it knows no ranks, and so no loads of
    devices.
    """
    if record.method == "baseline":
        return adaptive.cell.method.granularity == "expert"
    if record.gamma is None:
        return False
    method = dataclasses.replace(adaptive.cell.method, gamma=record.gamma, budget=None)
    return record.cell.method == method


def _outcome(record: Record, rule: Adaptive, static: Sequence[Record]) -> Outcome:
    stragglers = [straggler(one) for one in static]
    by_drops = between(record.load.drop_rate, [one.load.drop_rate for one in static])
    by_straggler = between(straggler(record), stragglers)
    return Outcome(
        record.model,
        record.task,
        rule,
        record.load.drop_rate,
        straggler(record),
        None if by_drops is None else by_drops.mix(stragglers),
        paired_between(record, static, by_straggler),
    )


def paired_between(record: Record, static: Sequence[Record], at: Between | None) -> Paired | None:
    """Return the record's scores beside those of the interpolated static γ.

    None where they do not pair, or where the place ``at`` on the curve is None.
    """
    if at is None:
        return None
    pairs = [pair([record.documents], [static[n].documents]) for n in (at.below, at.above)]
    low, high = pairs
    if isinstance(low, Unpaired) or isinstance(high, Unpaired):
        return None
    mixed = (1 - at.weight) * low.second + at.weight * high.second
    return dataclasses.replace(low, second=mixed)


def verdicts(found: Sequence[Outcome]) -> list[Verdict]:
    """Return the verdict of each budget, and after those of one kind that of all of them."""
    judged = []
    for kind in sorted({outcome.rule.budget_of for outcome in found}):
        own = [outcome for outcome in found if outcome.rule.budget_of == kind]
        for budget in sorted({outcome.rule.budget for outcome in own}):
            same = [outcome for outcome in own if outcome.rule.budget == budget]
            judged.append(_verdict(kind, budget, same))
        judged.append(_verdict(kind, None, own))
    return judged


def _verdict(budget_of: str, budget: float | None, found: Sequence[Outcome]) -> Verdict:
    """Return a verdict; of several budgets, each model and task counts by its mean over them."""
    gains = _by_cell(
        found,
        lambda one: (
            None
            if one.static_straggler is None
            else np.array([one.straggler - one.static_straggler])
        ),
    )
    scores = _by_cell(found, lambda one: None if one.scores is None else one.scores.units)
    models: dict[str, dict[str, Paired]] = {}
    for (model, task), units in scores.items():
        documents = next(
            one.scores.documents
            for one in found
            if (one.model, one.task) == (model, task) and one.scores is not None
        )
        models.setdefault(model, {})[task] = Paired(documents, units, np.zeros(len(units)))
    pooled = {task: 100 * units for task, units in sorted(pool(models).items())}
    return Verdict(
        budget_of,
        budget,
        len(gains),
        mean_interval([float(gain[0]) for gain in gains.values()]),
        compare(pooled) if pooled else None,
    )


def _by_cell(
    found: Sequence[Outcome], value: Callable[[Outcome], Floats | None]
) -> Mapping[tuple[str, str], Floats]:
    """Return the mean over budgets of a quantity of each model and task."""
    groups: dict[tuple[str, str], list[Floats]] = {}
    for outcome in found:
        if (own := value(outcome)) is not None:
            groups.setdefault((outcome.model, outcome.task), []).append(own)
    return {cell: np.mean(values, axis=0) for cell, values in groups.items()}


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the mean of some values and both ends of its 95 % t interval; None without two."""
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half
