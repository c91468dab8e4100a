"""Intervals over resampled documents: of a mean difference, and of a part's share of it."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from capmoe_eval.paper.pairing import Floats
from numpy.typing import NDArray

RESAMPLES: Final = 10_000
_SEED = 20260101
_BLOCK = 50_000  # units that are drawn at once, which a core's cache holds
_FEW = 64  # fewer units are multiplied by their counts, one by one


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval(differences: Mapping[str, Sequence[float] | Floats]) -> Interval:
    """Return the mean difference, tasks counting equally, and its 95 % interval over documents.

    The interval resamples documents within tasks, seeded.
    """
    tasks = {task: np.asarray(values, dtype=np.float64) for task, values in differences.items()}
    effect = float(np.mean([values.mean() for values in tasks.values()]))
    means = np.zeros(RESAMPLES)
    for task, values in tasks.items():
        means += resampled_sums(values.round(12), RESAMPLES, task) / len(values) / len(tasks)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(effect, float(low), float(high))


def share_of(part: Floats, whole: Floats, task: str) -> Interval:
    """Return the share that a part has of a mean difference, and its 95 % confidence interval.

    The interval resamples documents, as :func:`interval` does. A resample in which the whole is not
    above 0 has no share; it counts as beyond both ends, so that an end may be infinite.

    Args:
        part: A difference for each document of the task.
        whole: The difference of which it is a part, for the same documents; its mean is above 0.
        task: Its name, which seeds the draws.
    """
    parts, wholes = (resampled_sums(x.round(12), RESAMPLES, task) for x in (part, whole))
    positive = wholes > 1e-9
    shares = np.divide(parts, wholes, out=np.zeros(RESAMPLES), where=positive)
    low = np.percentile(np.where(positive, shares, -np.inf), 2.5, method="lower")
    high = np.percentile(np.where(positive, shares, np.inf), 97.5, method="higher")
    return Interval(float(part.sum() / whole.sum()), float(low), float(high))


def resampled_sums(values: Floats, resamples: int, *names: str) -> Floats:
    """Return the sums of bootstrap samples [resamples] of values [units], each of as many units.

    The names of what the units are of seed the draws: all contrasts of a task draw the same
    documents.
    """
    counts = _counts(len(values), resamples, names)
    if len(values) < _FEW:
        product: Floats = values @ counts
        return product
    # Differences of scores take few values, most often 0.
    sums = np.zeros(resamples)
    drawn = np.min_scalar_type(len(values))  # a sample draws no more; small types are added faster
    for value in np.unique(values[values != 0]):
        sums += value * counts[values == value].sum(axis=0, dtype=drawn)
    return sums


@functools.lru_cache(maxsize=1024)
def _counts(units: int, resamples: int, names: tuple[str, ...]) -> NDArray[np.uint8] | Floats:
    """Return how often each sample draws each unit [units, resamples]; of few units as floats."""
    rng = np.random.default_rng([_SEED, zlib.crc32("/".join(names).encode())])
    width = max(1, _BLOCK // units)
    counts = np.empty((units, resamples), np.uint8)  # a unit is hardly ever drawn ten times
    for start in range(0, resamples, width):
        part = counts[:, start : start + width]
        samples = part.shape[1]
        drawn = rng.integers(units, size=(samples, units)) * samples + np.arange(samples)[:, None]
        part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
    return counts.astype(np.float64) if units < _FEW else counts
