"""Paired comparisons: the same documents under two methods.

Two methods answer the same questions, so most of what makes a question hard cancels in the
difference. Documents are the sampling units; models that answered the same document are averaged
over first, for they are not independent. A contrast also asks for models: families are its units.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean, stdev
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.experiment.names import family
from capmoe_eval.paper.pairing import (
    Floats,
    Paired,
    RunScores,
    TaskDocuments,
    answered_by_cells,
    pair,
    pool,
    shares,
)

if TYPE_CHECKING:
    import pandas as pd

    from capmoe_eval.results.frames import Results

DRAWS: Final = 10_000
"""Sums that the sign-flip test draws where it is not exact."""
LATTICE: Final = 200_000
"""Values of a sum of differences up to which the sign-flip test is exact."""
_SEED = 20260101
_DENOMINATOR = 1000  # scores are means over fewer runs
_PART = 4_000_000  # signs that are drawn at once, so that memory does not grow with documents
_NOTHING = 1e-24  # the smallest term of a transform that can change its digits


@dataclass(frozen=True)
class Effect:
    """The first side minus the second, in points of accuracy (:func:`contrast`)."""

    points: float | None  # None where no model has a task on both sides
    error: float  # the standard error over documents
    worth: float  # the effect of one document, the heaviest, if every model answers it otherwise
    documents: int  # the number of documents, or of images
    models: Mapping[str, float]  # the effect on each, tasks counting equally
    tasks: Mapping[str, tuple[str, ...]]  # what was compared, by model
    between: float | None = None  # the standard error of the mean over families; None for one
    # Why a task's sides do not pair, by model and task.
    unpaired: Mapping[tuple[str, str], str] = field(default_factory=dict)
    records: tuple[str, ...] = ()  # paths of the records that were compared

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

    def power(self, depth: float) -> float:
        """Return the share of studies that decide a truth so many points within a bound, alone."""
        from scipy.special import ndtr

        reach = self._reach(self.error, 0.95, wide=False) + self.worth
        return float(ndtr((depth - reach) / self.error)) if self.error else float(depth > reach)

    @property
    def detectable(self) -> float:
        """The distance from a bound, in points, that 80 % of studies decide."""
        return self._reach(self.error, 0.95, wide=False) + self.worth + 0.8416 * self.error

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
    """Compare two sides on the tasks that a model has on both; arguments as :func:`pair_cells`."""
    pairs, unpaired = pair_cells(results, first, second, without)
    return dataclasses.replace(pooled(pairs), unpaired=unpaired)


def pair_cells(
    results: Results,
    first: pd.DataFrame,
    second: pd.DataFrame,
    without: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[dict[str, dict[str, Paired]], dict[tuple[str, str], str]]:
    """Return the paired scores of two sides by model and task, and why others do not pair.

    Args:
        results: What both sides are of.
        first: Rows of ``results.cells``; several of a model and task differ in seed or shuffle.
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
    cells = cells[["model", "task.lm_eval", "n"]]
    names = zip(cells["model"], cells["task.lm_eval"], strict=True)
    is_compared = [name not in tasks.get(model, ()) for model, name in names]
    answers = answered_by_cells(results, cells.loc[is_compared])
    # The tasks of a mixture have the names of lm-eval.
    return {key: runs for key, runs in answers.items() if key[1] not in tasks.get(key[0], ())}


def pooled(models: Mapping[str, Mapping[str, Paired]]) -> Effect:
    """Return the effect that :func:`shares` defines, with its errors.

    The variance over documents is the sum of those of the tasks' means. The variance over families
    is that of the mean of their effects.
    """
    parts = [100 * units for units in pool(models).values()]
    effects = {
        model: 100 * fmean(float(paired.differences.mean()) for paired in tasks.values())
        for model, tasks in models.items()
    }
    worth: dict[TaskDocuments, float] = defaultdict(float)
    for (model, task), share in shares(models).items():
        paired = models[model][task]
        worth[task, paired.documents] += 100 * share / len(paired.first)
    families = list(by_family(effects).values())
    return Effect(
        sum(float(units.mean()) for units in parts) if parts else None,
        math.sqrt(sum(float(units.var()) / len(units) for units in parts)),
        max(worth.values(), default=0.0),
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


def sign_flip(tasks: Sequence[Floats]) -> float:
    """Return the two-sided p of so large a mean difference if the documents' signs were random.

    Tasks count equally. What counts of the documents is how many differ by how much: of n
    differences of one size, the number with a positive sign is binomial. Where all are of one size,
    this is McNemar's exact test. It is also exact where the sizes are multiples of one step and
    their sum has at most :data:`LATTICE` values, as for means of few right and wrong answers.
    Otherwise :data:`DRAWS` sums are drawn, from one seed. Neither the order of tasks and
    documents, nor the sides, nor the unit plays a part.

    Args:
        tasks: Of each, its differences [documents]; none of either is a ValueError.
    """
    if not tasks or any(not len(values) for values in tasks):
        raise ValueError("every task needs documents")
    moved = _moved(tasks)
    if not moved:
        return 1.0
    gained, lost = (np.array([signs[side] for signs in moved.values()]) for side in (0, 1))
    if len(moved) == 1:
        return mcnemar(int(gained[0]), int(lost[0]))
    counts = gained + lost
    # Sizes as multiples of the largest number that divides all of them.
    common = math.lcm(*(size.denominator for size in moved))
    multiples = [int(size * common) for size in moved]
    divisor = math.gcd(*multiples)
    whole = [multiple // divisor for multiple in multiples]
    span = sum(step * int(count) for step, count in zip(whole, counts, strict=True))
    if span < LATTICE:
        steps = np.array(whole)
        chances = _chances(steps, counts, span)
        beyond = np.abs(2 * np.arange(span + 1) - span) >= abs(int(steps @ (gained - lost)))
        # The transform's digits end there.
        return float(np.clip(chances[beyond].sum(), 1e-12, 1.0))
    sizes = np.array([float(size) for size in moved])
    # Equal sums, zero among them, may differ in their last digits; ties count.
    observed = abs(float(sizes @ (gained - lost))) - 1e-9 * float(sizes.max())
    # The observed signs are one of the possible ones, so p is never 0.
    return (1 + int((np.abs(_drawn(sizes, counts)) >= observed).sum())) / (1 + DRAWS)


def _moved(tasks: Sequence[Floats]) -> dict[Fraction, list[int]]:
    """Return the sizes of differences in the mean, how often one is positive and how often not."""
    moved: dict[Fraction, list[int]] = {}
    for values in tasks:
        distinct, times = np.unique(values[values != 0].round(12), return_counts=True)
        for value, count in zip(distinct.tolist(), times.tolist(), strict=True):
            size = Fraction(abs(value))
            near = size.limit_denominator(_DENOMINATOR)  # such as 2/3, whose last digits are lost
            size = near if math.isclose(near, size, rel_tol=1e-9) else size
            moved.setdefault(size / len(values), [0, 0])[value < 0] += count
    return dict(sorted(moved.items()))


def _chances(steps: NDArray[np.int64], counts: NDArray[np.int64], span: int) -> Floats:
    """Return the probability that the positive differences sum to 0, 1, … ``span`` steps.

    The transform of a sum's distribution is the product of the transforms of its parts:
    (1 + exp(-iθs)) / 2 for each difference of s steps, here with all phases taken out together.
    """
    frequencies = np.arange((span + 1) // 2 + 1)
    transform, product = np.zeros(len(frequencies), np.complex128), np.ones(len(frequencies))
    for number in np.argsort(-counts):  # after the most frequent few, hardly a product is left
        step, count = int(steps[number]), int(counts[number])
        product *= np.cos(np.pi * (frequencies * step % (2 * span + 2)) / (span + 1)) ** count
        matters = np.abs(product) > _NOTHING
        frequencies, product = frequencies[matters], product[matters]
    phase = np.exp(-1j * np.pi * (frequencies * span % (2 * span + 2)) / (span + 1))
    transform[frequencies] = product * phase
    return np.fft.irfft(transform, span + 1)


def _drawn(sizes: Floats, counts: NDArray[np.int64]) -> Floats:
    """Return the sums under random signs, seeded, drawn in parts of bounded memory."""
    rng = np.random.default_rng(_SEED)
    sums = np.zeros(DRAWS)
    width = max(1, _PART // DRAWS)
    for start in range(0, len(sizes), width):
        part = slice(start, start + width)
        positive = rng.binomial(counts[part], 0.5, size=(DRAWS, len(counts[part])))
        sums += (2.0 * positive - counts[part]) @ sizes[part]
    return sums


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: documents that one method alone has right."""
    fewer, more = sorted((gained, lost))
    return 1.0 if more - fewer <= 1 else 2 * binomial_tail(more, gained + lost, 0.5)


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """Return the probability of at least so many successes."""
    from scipy.special import betainc  # scipy.stats takes four times as long to import

    # The tail is an incomplete beta function.
    return float(betainc(successes, trials - successes + 1, chance)) if successes else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979), in the order given."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    corrected, least = [0.0] * len(ps), 0.0
    for place, index in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[index]))
        corrected[index] = least
    return corrected
