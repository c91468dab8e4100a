"""Paired comparisons: the same documents under two methods.

Two methods answer the same questions, so most of what makes a question hard cancels in the
difference. Documents are the units of chance; models that answered the same document are averaged
over first, for they are not independent. Tasks count equally, as in the paper's ``Avg.`` column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Resamples of the bootstrap, and sign flips of the test.
RESAMPLES = 10_000
_SEED = 20260101
# Up to so many distinct differences are counted, not drawn one by one.
_FEW = 64
# Resamples are drawn in parts of this many numbers, so that memory does not grow with documents.
_PART = 4_000_000


@dataclass(frozen=True)
class Comparison:
    """What a paired comparison found, in the unit of the scores.

    Attributes:
        effect: Mean difference, tasks counting equally.
        low: Lower end of its 95 % confidence interval (percentile bootstrap over documents).
        high: Upper end.
        p: Two-sided probability of so large a difference if signs were random (sign-flip test).
        documents: Number of documents.
    """

    effect: float
    low: float
    high: float
    p: float
    documents: int


def compare(differences: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare two methods by the differences of their scores, document by document.

    The confidence interval resamples documents within tasks. The test flips the sign of each
    document's difference: exactly (a binomial test, McNemar's) where there is one task and all
    differences have one size, by :data:`RESAMPLES` random flips otherwise. Both are seeded.

    Args:
        differences: For each task, one difference for each document.

    Raises:
        ValueError: If there is no task, or a task has no documents.
    """
    tasks = [np.asarray(values, dtype=np.float64) for values in differences.values()]
    if not tasks or any(not len(values) for values in tasks):
        raise ValueError("compare: every task needs documents")
    effect = float(np.mean([values.mean() for values in tasks]))
    rng = np.random.default_rng(_SEED)
    means, flipped = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for values in tasks:
        means += _resampled_means(values, rng) / len(tasks)
    low, high = np.percentile(means, [2.5, 97.5])
    p = _exact(tasks)
    if p is None:
        for values in tasks:
            flipped += _flipped_means(values, rng) / len(tasks)
        # The observed signs are one of the possible ones, so p is never 0; ties count.
        beyond = int((np.abs(flipped) >= abs(effect) - 1e-12).sum())
        p = (1 + beyond) / (1 + RESAMPLES)
    return Comparison(effect, float(low), float(high), p, sum(map(len, tasks)))


def _resampled_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Return the means of bootstrap samples.

    Scores take few values, so how often each is drawn (a multinomial) says all that the documents
    drawn would say, many times faster.
    """
    count = len(values)
    distinct, times = np.unique(values.round(12), return_counts=True)
    if len(distinct) <= _FEW:
        drawn = rng.multinomial(count, times / count, size=RESAMPLES)
        means: Floats = drawn @ distinct / count
        return means
    rows = max(1, _PART // count)
    parts = [
        values[rng.integers(count, size=(min(rows, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(parts)


def _flipped_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Return the means under random signs; differences of 0 have none.

    Of n differences of one size, the number with a positive sign is binomial.
    """
    moved = values[values != 0]
    sizes, times = np.unique(np.abs(moved).round(12), return_counts=True)
    if len(sizes) <= _FEW:
        positive = rng.binomial(times, 0.5, size=(RESAMPLES, len(times)))
        means: Floats = (2.0 * positive - times) @ sizes / len(values)
        return means
    rows = max(1, _PART // len(moved))
    parts = []
    for start in range(0, RESAMPLES, rows):
        shape = (min(rows, RESAMPLES - start), len(moved))
        parts.append((1.0 - 2.0 * rng.integers(2, size=shape)) @ moved / len(values))
    return np.concatenate(parts)


def _exact(tasks: Sequence[Floats]) -> float | None:
    """Return the exact p where a single task's differences are all of one size, else None."""
    if len(tasks) != 1:
        return None
    moved = tasks[0][tasks[0] != 0]
    if not len(moved):
        return 1.0
    if not np.allclose(np.abs(moved), abs(moved[0])):
        return None
    return mcnemar(int((moved > 0).sum()), int((moved < 0).sum()))


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test.

    Args:
        gained: Documents that only the first method has right.
        lost: Documents that only the second has right.
    """
    count, least = gained + lost, min(gained, lost)
    if not count:
        return 1.0
    tail = sum(math.comb(count, k) for k in range(least + 1))
    return min(1.0, float(2 * tail / 2**count))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979), in the order given."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    corrected, least = [0.0] * len(ps), 0.0
    for place, index in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[index]))
        corrected[index] = least
    return corrected
