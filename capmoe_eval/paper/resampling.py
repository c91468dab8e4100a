"""Bootstrap resamples, drawn once for all contrasts that have equally many units."""

from __future__ import annotations

import functools
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.paper.pairing import Floats

_SEED: Final = 20260101
# Units are drawn in parts of this many, which a core's cache holds.
_PART = 50_000
# Fewer units than this are multiplied by their counts, one by one.
_FEW = 64


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
    """Return how often each sample draws each unit [units, resamples].

    Few units are to be multiplied, so theirs are floats already.
    """
    rng = np.random.default_rng([_SEED, zlib.crc32("/".join(names).encode())])
    width = max(1, _PART // units)
    counts = np.empty((units, resamples), np.uint8)  # a unit is hardly ever drawn ten times
    for start in range(0, resamples, width):
        part = counts[:, start : start + width]
        samples = part.shape[1]
        drawn = rng.integers(units, size=(samples, units)) * samples + np.arange(samples)[:, None]
        part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
    return counts.astype(np.float64) if units < _FEW else counts
