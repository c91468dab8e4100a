"""Judge adaptive γ against the static ones: at equal drops, and at equal straggler factors.

A static γ that drops exactly as much as an adaptive setting is hardly ever on the grid. It is
interpolated: of the two static settings around the value, each counts by its nearness (a named
choice; it is also what a server would get that used either at random). That holds for straggler
factors and, document by document, for scores. Straggler factors fall ever more slowly as drops
rise, so that the interpolation flatters the adaptive choice; :func:`least` says by how much at
most.

The cells of a model share its routers. So models are the sampling units of an interval, and tasks
and budgets are averaged before; of accuracy there is an interval over documents, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired, Unpaired, answered, pair, pool
from capmoe_eval.paper.statistics import Interval, interval
from capmoe_eval.routing.factor import CapacityFactor
from capmoe_eval.routing.method import Method


class Between(NamedTuple):
    """Two points of a curve around a value."""

    below: int
    above: int
    weight: float  # of the point above

    def mix(self, values: Sequence[float]) -> float:
        """Return the interpolated value of another quantity of the points."""
        return (1 - self.weight) * values[self.below] + self.weight * values[self.above]


def between(value: float, values: Sequence[float]) -> Between | None:
    """Return the two neighbouring points around a value, or None if it is beyond all of them."""
    below = [n for n, each in enumerate(values) if each <= value]
    above = [n for n, each in enumerate(values) if each >= value]
    if not below or not above:
        return None
    low = max(below, key=lambda n: (values[n], -n))
    high = min(above, key=lambda n: (values[n], n))
    span = values[high] - values[low]
    return Between(low, high, (value - values[low]) / span if span else 0.0)


def least(value: float, drops: Sequence[float], stragglers: Sequence[float]) -> float | None:
    """Return what a convex curve through all points is at least at a value between two of them.

    It is above the lines through the two points before, and through the two points after, drawn on;
    where these are above the line between its neighbours, points are not convex, and that line
    counts. None where the value is beyond all points, or no such line is known.
    """
    curve = dict(sorted(zip(drops, stragglers, strict=True)))
    if value in curve:
        return curve[value]
    before = [point for point in curve.items() if point[0] < value]
    after = [point for point in curve.items() if point[0] > value]
    if not before or not after:
        return None
    lines = [before[-1:] + after[:1], before[-2:], after[:2]]
    chord, *beside = (
        y0 + (value - x0) * (y1 - y0) / (x1 - x0)
        for (x0, y0), (x1, y1) in (line for line in lines if len(line) == 2)
    )
    return min(chord, max(beside)) if beside else None


def straggler(record: Record) -> float:
    """Return a record's straggler factor: after drops, the mean over its layers.

    It is the fullest expert (with device-level capacities the fullest rank) over the mean load
    before drops, as a mean over forwards.
    """
    unit = record.cell.method.granularity
    return fmean(
        layer.peak["device_after" if unit == "device" else "expert_after"]["mean"]
        for layer in record.layers
    )


class AdaptiveOutcome(NamedTuple):
    """An adaptive setting of one model and task beside the static curve."""

    model: str
    task: str
    factor: CapacityFactor  # whose calibration has a budget
    budget: float  # the share that may be dropped
    budget_of: str  # the whole that the budget is a share of: pairs, or scores
    drop_rate: float
    straggler: float
    static_straggler: float | None  # of the static γ with as many drops; None beyond the curve
    static_least: float | None  # the same, if the curve between its points were lowest
    apart: float | None  # how much the two static γ around it differ in drops
    scores: Paired | None  # against the static γ with the same straggler factor

    @property
    def gain(self) -> float | None:
        """The straggler factor minus the static one with as many drops."""
        return None if self.static_straggler is None else self.straggler - self.static_straggler

    @property
    def most(self) -> float | None:
        """The same, if the static curve between its points were lowest."""
        return None if self.static_least is None else self.straggler - self.static_least


class AdaptiveVerdict(NamedTuple):
    """The outcomes of one budget, or of all of its kind: adaptive minus static."""

    budget_of: str
    budget: float | None
    cells: int  # models times tasks, of those on the static curve
    static: float | None  # the mean of the static straggler factors
    straggler: Interval | None  # at equal drops, over models
    straggler_most: float | None  # the mean if the static curve were lowest between its points
    accuracy: Interval | None  # in points at equal straggler factors, over documents

    def __str__(self) -> str:
        """Return the verdict in a sentence or two."""
        if self.straggler is None:
            return "No difference in straggler factors is known of two models."
        text = (
            f"At equal drops the straggler factor changes by {_signed(self.straggler, 3)}, of "
            f"{self.static:.2f}: {_conclusion(self.straggler)}."
        )
        if self.accuracy is not None:
            points = _signed(self.accuracy, 2)
            text += f" At equal straggler factors accuracy changes by {points} points."
        return text


def _signed(numbers: Interval, digits: int) -> str:
    mean, low, high = (f"{value:+.{digits}f}".replace("-", "−") for value in numbers)
    return f"{mean} [{low}, {high}]"


def _conclusion(numbers: Interval) -> str:
    if numbers.high < 0:
        return "a gain is shown"
    return "a loss is shown" if numbers.low > 0 else "no gain is shown"


def budget_in(method: Method) -> tuple[float | None, str | None]:
    """Return the share that an adaptive γ may drop, and of what it is; None, None for a static."""
    settings = {} if method.factor is None else method.factor.identity()
    return settings.get("budget"), settings.get("budget_of")


def outcomes(records: Iterable[Record]) -> list[AdaptiveOutcome]:
    """Return every adaptive record beside the static records of its model, task and knobs."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.model, record.task), []).append(record)
    return [
        _outcome(record, factor, [other for other in same if _is_static(other, record)])
        for same in groups.values()
        for record in same
        if (factor := record.factor) is not None and budget_in(record.cell.method)[0] is not None
    ]


def _is_static(record: Record, adaptive: Record) -> bool:
    """Return whether a record is of a static γ, and otherwise of an adaptive record's method."""
    if record.cell.method.is_stock:  # no drops; but it knows no ranks, and so no loads of devices
        return adaptive.cell.method.granularity == "expert"
    if record.gamma is None:
        return False
    return record.cell.method == adaptive.cell.method.at(record.gamma).canonical()


def _outcome(record: Record, factor: CapacityFactor, static: Sequence[Record]) -> AdaptiveOutcome:
    stragglers, drops = list(map(straggler, static)), [each.load.drop_rate for each in static]
    drop_rate, fullest = record.load.drop_rate, straggler(record)
    by_drops = between(drop_rate, drops)
    return AdaptiveOutcome(
        record.model,
        record.task,
        factor,
        float(factor.identity()["budget"]),
        str(factor.identity()["budget_of"]),
        drop_rate,
        fullest,
        by_drops and by_drops.mix(stragglers),
        least(drop_rate, drops, stragglers),
        by_drops and drops[by_drops.above] - drops[by_drops.below],
        paired_between(record, static, between(fullest, stragglers)),
    )


def paired_between(record: Record, static: Sequence[Record], at: Between | None) -> Paired | None:
    """Return the record's scores beside those of the interpolated static γ.

    None where they do not pair, or where the place ``at`` on the curve is None.
    """
    if at is None:
        return None
    scores = [answered(r.documents) for r in (record, static[at.below], static[at.above])]
    low, high = (pair(scores[:1], [other]) for other in scores[1:])
    if isinstance(low, Unpaired) or isinstance(high, Unpaired):
        return None
    mixed = (1 - at.weight) * low.second + at.weight * high.second
    return dataclasses.replace(low, second=mixed)


def verdicts(compared: Sequence[AdaptiveOutcome]) -> list[AdaptiveVerdict]:
    """Return the verdict of each budget, and after those of one kind that of all of them."""
    judged = []
    for kind in sorted({outcome.budget_of for outcome in compared}):
        of_kind = [outcome for outcome in compared if outcome.budget_of == kind]
        for budget in sorted({outcome.budget for outcome in of_kind}):
            same = [outcome for outcome in of_kind if outcome.budget == budget]
            judged.append(_verdict(kind, budget, same))
        judged.append(_verdict(kind, None, of_kind))
    return judged


def primary(judged: Iterable[AdaptiveVerdict]) -> AdaptiveVerdict | None:
    """Return the verdict that was chosen before the trial: of all budgets of pairs."""
    return next((v for v in judged if (v.budget_of, v.budget) == ("pairs", None)), None)


def _verdict(
    budget_of: str, budget: float | None, compared: Sequence[AdaptiveOutcome]
) -> AdaptiveVerdict:
    """Return a verdict; each model and task counts by its mean over budgets."""
    on_curve = [outcome for outcome in compared if outcome.static_straggler is not None]
    documents = {(o.model, o.task): o.scores.documents for o in compared if o.scores is not None}
    models: dict[str, dict[str, Paired]] = {}
    for (model, task), units in _by_cell(compared, lambda o: o.scores and o.scores.units).items():
        paired = Paired(documents[model, task], units, np.zeros(len(units)))
        models.setdefault(model, {})[task] = paired
    parts = sorted(pool(models).items())
    pooled = {task: 100 * len(parts) * units for (task, _), units in parts}
    return AdaptiveVerdict(
        budget_of,
        budget,
        len({(outcome.model, outcome.task) for outcome in on_curve}),
        _mean(by_model(on_curve, lambda outcome: outcome.static_straggler)),
        mean_interval(list(by_model(on_curve, lambda outcome: outcome.gain).values())),
        _mean(by_model(on_curve, lambda outcome: outcome.most)),
        interval(pooled) if pooled else None,
    )


def points(outcome: AdaptiveOutcome) -> float | None:
    """Return an outcome's accuracy minus that of the static γ, in points."""
    return None if outcome.scores is None else 100 * float(outcome.scores.differences.mean())


def _mean(models: Mapping[str, float]) -> float | None:
    return fmean(models.values()) if models else None


def by_model(
    compared: Sequence[AdaptiveOutcome], value: Callable[[AdaptiveOutcome], float | None]
) -> Mapping[str, float]:
    """Return each model's mean of a quantity: over budgets, then over tasks."""
    groups: dict[str, list[float]] = {}
    for (model, _), mean in _by_cell(compared, value).items():
        groups.setdefault(model, []).append(float(mean))
    return {model: fmean(means) for model, means in groups.items()}


def _by_cell(
    compared: Sequence[AdaptiveOutcome], value: Callable[[AdaptiveOutcome], Any]
) -> Mapping[tuple[str, str], Any]:
    """Return the mean over budgets of a quantity, a number or an array, by model and task."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for outcome in compared:
        if (quantity := value(outcome)) is not None:
            groups.setdefault((outcome.model, outcome.task), []).append(quantity)
    return {cell: np.mean(values, axis=0) for cell, values in groups.items()}


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of some values and its 95 % t interval; None without two."""
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return None
    middle = fmean(values)
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(middle, middle - half, middle + half)
