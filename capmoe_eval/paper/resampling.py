"""Bootstrap resamples, drawn once for all contrasts that have equally many units."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.paper.pairing import Floats

# Resamples are drawn and summed in parts of this many counts, which a processor's cache holds.
_PART = 100_000


def resampled_sums(values: Floats, resamples: int, seed: tuple[int, ...]) -> Floats:
    """Return the sums of bootstrap samples; equal seeds draw the same units.

    Args:
        values: What is summed [units], or several of each unit [units, columns].
        resamples: Number of samples, each as large as the number of units.
        seed: Seed of the draws.

    Returns:
        The sums [resamples], or [resamples, columns].
    """
    counts = _counts(len(values), resamples, seed)
    rows = _rows(len(values))
    parts = [counts[start : start + rows] @ values for start in range(0, resamples, rows)]
    return np.concatenate(parts) if parts else np.zeros((0, *values.shape[1:]))


def _rows(units: int) -> int:
    return max(1, _PART // units)


@functools.lru_cache(maxsize=256)
def _counts(units: int, resamples: int, seed: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return how often each sample draws each unit [resamples, units]."""
    rng, rows = np.random.default_rng(seed), _rows(units)
    counts = np.empty((resamples, units), np.uint8)  # a unit is hardly ever drawn ten times
    for start in range(0, resamples, rows):
        part = counts[start : start + rows]
        drawn = rng.integers(units, size=part.shape) + units * np.arange(len(part))[:, None]
        part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
    return counts
