"""Compare cells by document: points lost, intervals over resampled documents, interpolation."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Final, Literal, TypeAlias

import numpy as np
from capmoe_eval.lazy import pd
from capmoe_eval.paper.pairing import Floats, Paired, answered_by_cells, pair
from capmoe_eval.results.frames import Results
from numpy.typing import NDArray

RESAMPLES: Final = 10_000
_SEED: Final = 20260101
Interval: TypeAlias = tuple[float, float, float]
"""A mean, and the low and the high end of its 95 % confidence interval."""


def interval(differences: Mapping[str, Sequence[float] | Floats]) -> Interval:
    """Return the mean difference, tasks counting equally, and its 95 % interval over documents.

    The interval resamples documents within tasks, seeded.
    """
    tasks = {task: np.asarray(values, dtype=np.float64) for task, values in differences.items()}
    effect = float(np.mean([values.mean() for values in tasks.values()]))
    means = np.zeros(RESAMPLES)
    for task, values in tasks.items():
        means += resampled_sums(values.round(12), task) / len(values) / len(tasks)
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return effect, low, high


def share_of(part: Floats, whole: Floats, task: str) -> Interval:
    """Return the share that a part has of a mean difference, and its 95 % confidence interval.

    The interval resamples documents, as :func:`interval` does. A resample in which the whole is not
    above 0 has no share; it counts as beyond both ends, so that an end may be infinite.

    Args:
        part: A difference for each document of the task.
        whole: The difference of which it is a part, for the same documents; its mean is above 0.
        task: Its name, which seeds the draws.
    """
    parts, wholes = (resampled_sums(values.round(12), task) for values in (part, whole))
    positive = wholes > 1e-9
    shares = np.divide(parts, wholes, out=np.zeros(RESAMPLES), where=positive)
    low = np.percentile(np.where(positive, shares, -np.inf), 2.5, method="lower")
    high = np.percentile(np.where(positive, shares, np.inf), 97.5, method="higher")
    return float(part.sum() / whole.sum()), float(low), float(high)


def resampled_sums(values: Floats, task: str) -> Floats:
    """Return the sums of bootstrap samples [RESAMPLES] of values [units], each of as many units.

    The task's name seeds the draws: all contrasts of a task draw the same documents.
    """
    moved = np.flatnonzero(values)  # most differences of scores are 0
    sums: Floats = values[moved] @ _counts(len(values), task)[moved]
    return sums


@functools.lru_cache(maxsize=64)
def _counts(units: int, task: str) -> NDArray[np.uint8]:
    """Return how often each sample draws each unit [units, RESAMPLES]."""
    rng = np.random.default_rng([_SEED, zlib.crc32(task.encode())])
    counts = np.empty((units, RESAMPLES), np.uint8)  # a unit is hardly ever drawn ten times
    for sample in range(RESAMPLES):
        counts[:, sample] = np.bincount(rng.integers(units, size=units), minlength=units)
    return counts


def lost(
    results: Results, stock: pd.DataFrame, cells: pd.DataFrame, tasks: Collection[str]
) -> Interval | str:
    """Return the points that cells of a model lose against its stock cells, or why none are known.

    They are a mean over tasks that count equally, with a 95 % interval over documents. Both frames
    are rows of ``results.cells``; several cells of a task are seeds.
    """
    first, second = (
        {task: runs for (_, task), runs in answered_by_cells(results, side).items()}
        for side in (stock, cells)
    )
    differences = {}
    for task in sorted(tasks):  # as in the effects of claims
        if task not in first or task not in second:
            return "not every task is there"
        paired = pair(first[task], second[task])
        if isinstance(paired, str):
            return paired
        differences[task] = 100 * paired.units
    return interval(differences)


def paired_between(
    results: Results, cell: pd.DataFrame, points: pd.DataFrame, weight_N: Floats | None
) -> Paired | None:
    """Return a cell's scores beside those of weighted cells of its model and task.

    Both frames are rows of ``results.cells``. None where they do not pair, or without weights.
    """
    if weight_N is None:
        return None
    scores, weighted = (
        next(iter(answered_by_cells(results, rows).values()))
        for rows in (cell, points[weight_N > 0])
    )
    pairs = [paired for run in weighted if isinstance(paired := pair(scores, [run]), Paired)]
    if len(pairs) < len(weighted):
        return None
    second = weight_N[weight_N > 0] @ np.array([paired.second for paired in pairs])
    return dataclasses.replace(pairs[0], second=second)


def nearness(value: float, values: Floats) -> Floats | None:
    """Return the weights of some points that interpolate a value; None if it is beyond all of them.

    All are 0 but those of the two neighbouring points around the value, which add up to 1. Points
    that are NaN have no weight.
    """
    order_N = np.argsort(values, kind="stable")[: np.isfinite(values).sum()]
    rising_N = values[order_N]
    if not len(order_N) or not rising_N[0] <= value <= rising_N[-1]:
        return None
    weight_N = np.zeros(len(values))
    weight_N[order_N] = [np.interp(value, rising_N, unit_N) for unit_N in np.eye(len(order_N))]
    return weight_N


def peaks(
    results: Results, unit: Literal["device", "expert"], when: Literal["before", "after"] = "after"
) -> pd.Series[float]:
    """Return of each cell the fullest rank or expert over the mean load before any drop.

    It is a mean over layers and forwards, before or after drops, in the order of ``results.cells``.
    """
    means = results.layers.groupby("cell")[f"peak.{unit}_{when}.mean"].agg(fmean)
    return results.cells["cell"].map(means)
