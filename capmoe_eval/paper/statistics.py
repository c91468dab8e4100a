"""Paired comparisons: the same documents under two methods.

Two methods answer the same questions, so most of what makes a question hard cancels in the
difference. Documents are the units of chance; models that answered the same document are averaged
over first, for they are not independent. Tasks count equally, as in the paper's ``Avg.`` column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.experiment.record import Scored
from capmoe_eval.paper.hierarchy import over_models
from capmoe_eval.paper.pairing import Floats, Paired, Unpaired, pair, pool
from capmoe_eval.paper.resampling import resampled_sums

#: Resamples of the bootstrap, and of the sign flips where they are drawn.
RESAMPLES = 10_000
#: Values of a sum of differences up to which the sign-flip test is exact.
LATTICE = 200_000
_SEED = 20260101
# Scores are means over fewer runs than this.
_DENOMINATOR = 1000
# Signs are drawn in parts of this many numbers, so that memory does not grow with documents.
_PART = 4_000_000
# The smallest term of a transform that can change its digits.
_NOTHING = 1e-24


@dataclass(frozen=True)
class Comparison:
    """The result of a paired comparison, in the unit of the scores."""

    effect: float  # mean difference, tasks counting equally
    low: float  # of its 95 % confidence interval (percentile bootstrap over documents)
    high: float
    p: float  # two-sided: of so large a difference if signs were random (sign-flip test)
    documents: int  # their number


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def compare(differences: Mapping[str, Sequence[float] | Floats]) -> Comparison:
    """Compare two methods by the differences of their scores on each task's documents.

    The confidence interval resamples documents within tasks, seeded; the test is
    :func:`sign_flip`, which refuses what it does.
    """
    tasks = [np.asarray(values, dtype=np.float64) for values in differences.values()]
    p = sign_flip(tasks)
    return Comparison(*interval(differences), p, sum(map(len, tasks)))


def interval(differences: Mapping[str, Sequence[float] | Floats]) -> Interval:
    """Return the mean difference of :func:`compare` with its interval, and spare its test."""
    tasks = {task: np.asarray(values, dtype=np.float64) for task, values in differences.items()}
    effect = float(np.mean([values.mean() for values in tasks.values()]))
    means = np.zeros(RESAMPLES)
    for task, values in tasks.items():
        means += resampled_sums(values.round(12), RESAMPLES, task) / len(values) / len(tasks)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(effect, float(low), float(high))


def share_of(part: Floats, whole: Floats, task: str) -> Interval:
    """Return the share that a part has of a mean difference, and its 95 % confidence interval.

    The interval resamples documents, as :func:`compare` does. A resample in which the whole is not
    above 0 has no share; it counts as beyond both ends, so that an end may be infinite.

    Args:
        part: A difference for each document of the task.
        whole: The difference of which it is a part, for the same documents; its mean is above 0.
        task: Its name, which seeds the draws.
    """
    parts, wholes = (resampled_sums(one.round(12), RESAMPLES, task) for one in (part, whole))
    known = wholes > 1e-9
    shares = np.divide(parts, wholes, out=np.zeros(RESAMPLES), where=known)
    low = np.percentile(np.where(known, shares, -np.inf), 2.5, method="lower")
    high = np.percentile(np.where(known, shares, np.inf), 97.5, method="higher")
    return Interval(float(part.sum() / whole.sum()), float(low), float(high))


Side: TypeAlias = Mapping[str, Sequence[Scored]]
"""One side of a contrast on one model: the evaluations of each task (seeds, shuffles)."""


@dataclass(frozen=True)
class Effect:
    """The first side minus the second, in points of accuracy."""

    comparison: Comparison | None  # over all models; None where no model has a task on both sides
    models: Mapping[str, float]  # the mean difference of each, tasks counting equally
    tasks: Mapping[str, tuple[str, ...]]  # what was compared, by model
    wide: tuple[float, float] | None = None  # see :func:`capmoe_eval.paper.hierarchy.over_models`
    # Why a task's sides do not pair, by model and task.
    unpaired: Mapping[tuple[str, str], str] = field(default_factory=dict)
    records: tuple[str, ...] = ()  # paths of the records that were compared


def contrast(models: Mapping[str, tuple[Side, Side]]) -> Effect:
    """Compare the two sides of each model on the tasks that both have."""
    pairs: dict[str, dict[str, Paired]] = {}
    unpaired: dict[tuple[str, str], str] = {}
    for model, (first, second) in models.items():
        for task in first:
            if task in second:
                found = pair(first[task], second[task])
                if isinstance(found, Unpaired):
                    unpaired[model, task] = found.reason
                else:
                    pairs.setdefault(model, {})[task] = found
    pooled, wide = pool(pairs), over_models(pairs)
    # Which model comes first decides nothing: tasks are resampled in the order of their names.
    points = {task: 100 * pooled[task] for task in sorted(pooled)}
    return Effect(
        compare(points) if points else None,
        {
            model: 100 * float(np.mean([paired.differences.mean() for paired in tasks.values()]))
            for model, tasks in pairs.items()
        },
        {model: tuple(tasks) for model, tasks in pairs.items()},
        wide and (100 * wide[0], 100 * wide[1]),
        unpaired,
    )


def sign_flip(tasks: Sequence[Floats]) -> float:
    """Return the two-sided p of so large a mean difference if the documents' signs were random.

    Tasks count equally. What counts of the documents is how many differ by how much: of n
    differences of one size, the number with a positive sign is binomial. Where all are of one size,
    this is McNemar's exact test. Else it is exact where the sizes are multiples of one step, as
    means of few right and wrong answers are, and their sum has at most :data:`LATTICE` values;
    otherwise :data:`RESAMPLES` sums are drawn, from one seed. Neither the order of tasks and
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
    steps, counts = _steps(list(moved)), gained + lost
    span = sum(step * int(count) for step, count in zip(steps, counts, strict=True))
    if span < LATTICE:
        whole = np.array(steps)
        chances = _chances(whole, counts, span)
        beyond = np.abs(2 * np.arange(span + 1) - span) >= abs(int(whole @ (gained - lost)))
        # The transform's digits end there.
        return float(np.clip(chances[beyond].sum(), 1e-12, 1.0))
    sizes = np.array([float(size) for size in moved])
    # Equal sums, zero among them, may differ in their last digits; ties count.
    observed = abs(float(sizes @ (gained - lost))) - 1e-9 * float(sizes.max())
    # The observed signs are one of the possible ones, so p is never 0.
    return (1 + int((np.abs(_drawn(sizes, counts)) >= observed).sum())) / (1 + RESAMPLES)


def _moved(tasks: Sequence[Floats]) -> dict[Fraction, list[int]]:
    """Return the sizes of differences in the mean, how often one is positive and how often not."""
    moved: dict[Fraction, list[int]] = {}
    for values in tasks:
        distinct, times = np.unique(values[values != 0].round(12), return_counts=True)
        for value, count in zip(distinct.tolist(), times.tolist(), strict=True):
            signs = moved.setdefault(_rational(abs(value)) / len(values), [0, 0])
            signs[value < 0] += count
    return dict(sorted(moved.items()))


def _rational(value: float) -> Fraction:
    """Return the fraction that a score with the last digits lost stands for, such as 2/3."""
    near = Fraction(value).limit_denominator(_DENOMINATOR)
    return near if math.isclose(near, value, rel_tol=1e-9) else Fraction(value)


def _steps(sizes: Sequence[Fraction]) -> list[int]:
    """Return sizes as multiples of the largest number that divides all of them."""
    common = math.lcm(*(size.denominator for size in sizes))
    whole = [int(size * common) for size in sizes]
    divisor = math.gcd(*whole)
    return [size // divisor for size in whole]


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
    sums = np.zeros(RESAMPLES)
    width = max(1, _PART // RESAMPLES)
    for start in range(0, len(sizes), width):
        part = slice(start, start + width)
        positive = rng.binomial(counts[part], 0.5, size=(RESAMPLES, len(counts[part])))
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
