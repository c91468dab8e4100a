"""The effect of one choice of cells against another, with its errors: ``contrast``.

Documents are the sampling units; models that answered the same document are averaged over first,
for they are not independent. A contrast also asks for models: families are its units.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Literal

from capmoe_eval.experiment.names import family, is_share
from capmoe_eval.lazy import pd
from capmoe_eval.paper.pairing import Paired, RunScores, answered_by_cells, pair, pool, shares
from capmoe_eval.results.frames import Results


@dataclass(frozen=True)
class Effect:
    """The first side minus the second, in points of accuracy (:func:`contrast`)."""

    points: float | None  # None where no model has a task on both sides
    error: float  # the standard error over documents
    worth: float  # the effect of the heaviest document, or answer, if it is answered otherwise
    documents: int  # the number of documents, or of images
    models: Mapping[str, float]  # the effect on each, tasks counting equally
    tasks: Mapping[str, tuple[str, ...]]  # what was compared, by model
    between: float | None = None  # the standard error of the mean over families; None for one
    # Why a task's sides do not pair, by model and task.
    unpaired: Mapping[tuple[str, str], str] = field(default_factory=dict)
    records: tuple[str, ...] = ()  # paths of the records that were compared
    note: str = ""  # what a reader must know of the models

    def interval(self, *, wide: bool = False) -> tuple[float, float]:
        """Return the 95 % interval over documents, or over families and documents."""
        centre, reach = self.points or 0.0, self._reach(self.error, 0.95, wide)
        return centre - reach, centre + reach

    def p(self, distance: float, *, wide: bool = False) -> float:
        """Return the two-sided p of an effect so many points away from a bound.

        The distance is shortened by one document's worth, and the variance over documents is that
        around the bound: of one task and the bound 0 this is McNemar's test with its correction.
        ``wide`` asks over families and documents; of one family it is 1.
        """
        surplus = abs(distance) - self.worth
        if surplus <= 0 or (wide and self.between is None):
            return 1.0
        error = math.hypot(self.error, distance / math.sqrt(self.documents))
        low, high = 0.0, 1.0  # levels; the interval that just reaches the bound has level 1 - p
        for _ in range(40):
            level = (low + high) / 2
            low, high = (level, high) if self._reach(error, level, wide) < surplus else (low, level)
        return 1 - low

    def detectable(self, level: float = 0.05) -> float:
        """Return the distance from a bound, in points, that 80 % of studies decide at a level."""
        reach = self._reach(self.error, 1 - level, wide=False)
        return reach + self.worth + 0.8416 * self.error

    def _reach(self, error: float, level: float, wide: bool) -> float:
        """Return half the width of an interval.

        That over families adds the squares of Student's half width over families, whose number is
        small, and the normal one over the documents that all of them answer. The sum of variances
        with Satterthwaite's degrees of freedom covers less than 93 % with three families.
        """
        from scipy.special import ndtri, stdtrit

        reach = float(ndtri((1 + level) / 2)) * error
        if not wide or self.between is None:
            return reach
        freedom = len(by_family(self.models)) - 1
        return math.hypot(reach, float(stdtrit(freedom, (1 + level) / 2)) * self.between)


def contrast(
    results: Results,
    first: pd.DataFrame,
    second: pd.DataFrame,
    without: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Effect:
    """Compare two sides on the tasks that a model has on both; arguments as :func:`pair_cells`.

    Beside shares, such as accuracies, a metric that is no share is left out as unpaired; alone it
    is compared, in hundredths of its unit.
    """
    pairs, unpaired = pair_cells(results, first, second, without)
    asked = first["metric"].where(first["metric"] != "", first["task.metric"])
    metrics = zip(first["model"], first["task.lm_eval"], asked, strict=True)
    others = {
        (model, task): f"{metric} is no share, as other tasks' metrics are"
        for model, task, metric in metrics
        if not is_share(metric) and task in pairs.get(model, ())
    }
    if len(others) < sum(map(len, pairs.values())):
        for model, task in others:
            del pairs[model][task]
        unpaired |= others
    return dataclasses.replace(pooled({m: of for m, of in pairs.items() if of}), unpaired=unpaired)


def pair_cells(
    results: Results,
    first: pd.DataFrame,
    second: pd.DataFrame,
    without: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[dict[str, dict[str, Paired]], dict[tuple[str, str], str]]:
    """Return the paired scores of two sides by model and task, and why others do not pair.

    Args:
        results: What both sides are of.
        first: Rows of ``results.cells``; several of a model and task may differ in seed or
            shuffle, and do not pair if they differ in anything else.
        second: Those that are subtracted.
        without: Tasks to leave out, by model, as lm-eval names them.
    """
    pairs: dict[str, dict[str, Paired]] = {}
    unpaired: dict[tuple[str, str], str] = {}
    sides = [_without(results, cells, without) for cells in (first, second)]
    for model, task in sorted(sides[0].keys() & sides[1].keys()):
        paired = pair(*(side[model, task] for side in sides))
        if isinstance(paired, str):
            unpaired[model, task] = paired
        else:
            pairs.setdefault(model, {})[task] = paired
    return pairs, unpaired


def _without(
    results: Results, cells: pd.DataFrame, tasks: Mapping[str, Collection[str]]
) -> dict[tuple[str, str], list[RunScores]]:
    """Return the scores of some cells, by model and task, without some tasks of each model."""
    names = zip(cells["model"], cells["task.lm_eval"], strict=True)
    is_compared = [name not in tasks.get(model, ()) for model, name in names]
    answers = answered_by_cells(results, cells.loc[is_compared])
    # The tasks of a mixture have the names of lm-eval.
    return {key: runs for key, runs in answers.items() if key[1] not in tasks.get(key[0], ())}


def pooled(
    models: Mapping[str, Mapping[str, Paired]], worth: Literal["document", "answer"] = "document"
) -> Effect:
    """Return the effect that :func:`shares` defines, with its errors.

    The variance over documents is the sum of those of the tasks' means. The variance over families
    is that of the mean of their effects. The worth of a document is of every model's answer to it,
    that of an answer of one model's.
    """
    parts = [100 * units for units in pool(models).values()]
    effects = {
        model: 100 * fmean(float(paired.differences.mean()) for paired in tasks.values())
        for model, tasks in models.items()
    }
    moved: dict[object, float] = defaultdict(float)
    for (model, task), share in shares(models).items():
        paired = models[model][task]
        answered = (task, paired.documents) if worth == "document" else (model, task)
        moved[answered] += 100 * share / len(paired.first)
    families = list(by_family(effects).values())
    return Effect(
        sum(float(units.mean()) for units in parts) if parts else None,
        math.sqrt(sum(float(units.var()) / len(units) for units in parts)),
        max(moved.values(), default=0.0),
        sum(map(len, parts)),
        effects,
        {model: tuple(tasks) for model, tasks in models.items()},
        stdev(families) / math.sqrt(len(families)) if len(families) > 1 else None,
    )


def by_family(models: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over the training seeds of each family, in the order of the models."""
    families: dict[str, list[float]] = {}
    for model, value in models.items():
        families.setdefault(family(model), []).append(value)
    return {name: fmean(values) for name, values in families.items()}
