"""Judge adaptive γ against the static ones: at equal drops, and at equal straggler factors.

A static γ that drops exactly as much as an adaptive setting is hardly ever on the grid. It is
interpolated: of the two static settings around the wanted value, each counts by its nearness (a
named choice; it is also what a server would get that used either at random). That holds for
straggler factors and, document by document, for scores. Straggler factors fall ever more slowly as
drops rise, so that the interpolation flatters the adaptive choice; :func:`least` says by how much
at most.

The cells of a model share its routers. So models are the units of chance of an interval, and tasks
and budgets are averaged before; of accuracy there is one over documents, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired, Unpaired, pair, pool
from capmoe_eval.paper.statistics import Interval, interval
from capmoe_eval.routing.factor import CapacityFactor
from capmoe_eval.routing.method import Method


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


def least(wanted: float, drops: Sequence[float], stragglers: Sequence[float]) -> float | None:
    """Return what a convex curve through all points is at least at a value between two of them.

    It is above the lines through the two points before, and through the two points after, drawn on;
    where these are above the line between its neighbours, points are not convex, and that one
    counts. None where the value is beyond all points, or no such line is known.
    """
    curve = dict(sorted(zip(drops, stragglers, strict=True)))
    if wanted in curve:
        return curve[wanted]
    before = [point for point in curve.items() if point[0] < wanted]
    after = [point for point in curve.items() if point[0] > wanted]
    if not before or not after:
        return None
    lines = [before[-1:] + after[:1], before[-2:], after[:2]]
    chord, *beside = (
        y0 + (wanted - x0) * (y1 - y0) / (x1 - x0)
        for (x0, y0), (x1, y1) in (line for line in lines if len(line) == 2)
    )
    return min(chord, max(beside)) if beside else None


def straggler(record: Record) -> float:
    """Return a record's straggler factor: after drops, the mean over its layers.

    It is the fullest expert (with device-level capacities the fullest rank) over the mean load
    before drops, as a mean over forwards.
    """
    unit = record.cell.method.granularity
    return fmean(getattr(layer.peak, f"{unit}_after").mean for layer in record.layers)


class Outcome(NamedTuple):
    """An adaptive setting of one model and task beside the static curve."""

    model: str
    task: str
    factor: CapacityFactor  # whose calibration has a budget
    drop_rate: float
    straggler: float
    static_straggler: float | None  # of the static γ with as many drops; None beyond the curve
    static_least: float | None  # the same, if the curve between its points were lowest
    apart: float | None  # how much the two static γ around it differ in drops
    scores: Paired | None  # against the static γ with the same straggler factor

    @property
    def budget(self) -> float:
        """The share that may be dropped."""
        return float(self.factor.identity()["budget"])

    @property
    def budget_of(self) -> str:
        """The whole that the budget is a share of: pairs, or scores."""
        return str(self.factor.identity()["budget_of"])

    @property
    def gain(self) -> float | None:
        """The straggler factor minus the static one with as many drops."""
        return None if self.static_straggler is None else self.straggler - self.static_straggler

    @property
    def most(self) -> float | None:
        """The same, if the static curve between its points were lowest."""
        return None if self.static_least is None else self.straggler - self.static_least


class Verdict(NamedTuple):
    """The outcomes of one budget, or of all of its kind: adaptive minus static."""

    budget_of: str
    budget: float | None
    cells: int  # models times tasks, of those on the static curve
    static: float | None  # the mean of the static straggler factors
    straggler: Interval | None  # at equal drops, over models
    straggler_most: float | None  # the mean if the static curve were lowest between its points
    accuracy: Interval | None  # in points at equal straggler factors, over documents
    accuracy_over_models: Interval | None  # the same, over models

    def __str__(self) -> str:
        """Say what was found and no more."""
        if self.straggler is None:
            return "No difference in straggler factors is known of two models."
        said = (
            f"At equal drops the straggler factor changes by {_signed(self.straggler, 3)}, of "
            f"{self.static:.2f}: {_shown(self.straggler)}."
        )
        if self.accuracy is not None:
            points = _signed(self.accuracy, 2)
            said += f" At equal straggler factors accuracy changes by {points} points."
        return said


def _signed(found: Interval, digits: int) -> str:
    mean, low, high = (f"{value:+.{digits}f}".replace("-", "−") for value in found)
    return f"{mean} [{low}, {high}]"


def _shown(found: Interval) -> str:
    if found.high < 0:
        return "a gain is shown"
    return "a loss is shown" if found.low > 0 else "no gain is shown"


def outcomes(records: Iterable[Record]) -> list[Outcome]:
    """Return every adaptive record beside the static records of its model, task and knobs."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.model, record.task), []).append(record)
    return [
        _outcome(record, factor, [one for one in same if _is_static(one, record)])
        for same in groups.values()
        for record in same
        if (factor := record.factor) is not None and budget_in(record.cell.method)[0] is not None
    ]


def _is_static(record: Record, adaptive: Record) -> bool:
    """Return whether a record is of a static γ, and otherwise of an adaptive record's method.

    The baseline is a point of the curve, with no drops; but it knows no ranks, and so no loads of
    devices.
    """
    if record.cell.method.is_stock:
        return adaptive.cell.method.granularity == "expert"
    if record.gamma is None:
        return False
    return record.cell.method == adaptive.cell.method.at(record.gamma).canonical()


def budget_in(method: Method) -> tuple[float | None, str | None]:
    """Return the share that an adaptive γ may drop, and of what it is; None, None for a static."""
    settings = {} if method.factor is None else method.factor.identity()
    return settings.get("budget"), settings.get("budget_of")


def _outcome(record: Record, factor: CapacityFactor, static: Sequence[Record]) -> Outcome:
    stragglers = [straggler(one) for one in static]
    drops = [one.load.drop_rate for one in static]
    by_drops = between(record.load.drop_rate, drops)
    by_straggler = between(straggler(record), stragglers)
    return Outcome(
        record.model,
        record.task,
        factor,
        record.load.drop_rate,
        straggler(record),
        None if by_drops is None else by_drops.mix(stragglers),
        least(record.load.drop_rate, drops, stragglers),
        None if by_drops is None else drops[by_drops.above] - drops[by_drops.below],
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
    for kind in sorted({outcome.budget_of for outcome in found}):
        own = [outcome for outcome in found if outcome.budget_of == kind]
        for budget in sorted({outcome.budget for outcome in own}):
            same = [outcome for outcome in own if outcome.budget == budget]
            judged.append(_verdict(kind, budget, same))
        judged.append(_verdict(kind, None, own))
    return judged


def primary(judged: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict that was chosen before the trial: of all budgets of pairs."""
    return next((one for one in judged if (one.budget_of, one.budget) == ("pairs", None)), None)


def _verdict(budget_of: str, budget: float | None, found: Sequence[Outcome]) -> Verdict:
    """Return a verdict; each model and task counts by its mean over budgets."""
    on_curve = [one for one in found if one.static_straggler is not None]
    models: dict[str, dict[str, Paired]] = {}
    units = _by_cell(found, lambda one: None if one.scores is None else one.scores.units)
    documents = {
        (one.model, one.task): one.scores.documents for one in found if one.scores is not None
    }
    for (model, task), own in units.items():
        pairs = models.setdefault(model, {})
        pairs[task] = Paired(documents[model, task], own, np.zeros(len(own)))
    pooled = {task: 100 * own for task, own in sorted(pool(models).items())}
    return Verdict(
        budget_of,
        budget,
        len({(one.model, one.task) for one in on_curve}),
        _mean(by_model(on_curve, lambda one: one.static_straggler)),
        mean_interval(list(by_model(on_curve, lambda one: one.gain).values())),
        _mean(by_model(on_curve, lambda one: one.most)),
        interval(pooled) if pooled else None,
        mean_interval(list(by_model(found, points).values())),
    )


def points(outcome: Outcome) -> float | None:
    """Return an outcome's accuracy minus that of the static γ, in points."""
    return None if outcome.scores is None else 100 * float(outcome.scores.differences.mean())


def _mean(models: Mapping[str, float]) -> float | None:
    return fmean(models.values()) if models else None


def by_model(
    found: Sequence[Outcome], value: Callable[[Outcome], float | None]
) -> Mapping[str, float]:
    """Return each model's mean of a quantity: over budgets, then over tasks."""
    groups: dict[str, list[float]] = {}
    for (model, _), mean in _by_cell(found, value).items():
        groups.setdefault(model, []).append(float(mean))
    return {model: fmean(means) for model, means in groups.items()}


def _by_cell(
    found: Sequence[Outcome], value: Callable[[Outcome], Any]
) -> Mapping[tuple[str, str], Any]:
    """Return the mean over budgets of a quantity, a number or an array, by model and task."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for outcome in found:
        if (own := value(outcome)) is not None:
            groups.setdefault((outcome.model, outcome.task), []).append(own)
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
