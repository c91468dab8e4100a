"""Intervals over models and their training seeds, not over the documents of these models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.paper.pairing import Floats, Paired, family

DRAWS: Final = 2_000
"""Resamples of the hierarchical bootstrap."""
_SEED: Final = 20260102


def over_models(models: Mapping[str, Mapping[str, Paired]]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference with models as units, seeded.

    Each resample draws models, for each of them training seeds where there are several, and for
    each of these the batches of every task: whole batches where they are known, for the documents
    of a batch share what is dropped, else documents. Models count equally, and so do tasks.

    Args:
        models: What was compared, by model and task; :func:`family` says what are seeds of one.

    Returns:
        Both ends, in the unit of the scores, or None if there are fewer than two models.
    """
    families: dict[str, list[Mapping[str, _Clusters]]] = {}
    for model, tasks in models.items():
        clusters = {task: _clusters(paired) for task, paired in tasks.items()}
        families.setdefault(family(model), []).append(clusters)
    if len(families) < 2:
        return None
    rng = np.random.default_rng(_SEED)
    names = list(dict.fromkeys(task for tasks in models.values() for task in tasks))
    total, count = (np.zeros((len(names), DRAWS)) for _ in range(2))
    for _ in families:
        drawn = rng.integers(len(families), size=DRAWS)
        for number, seeds in enumerate(families.values()):
            draws = np.flatnonzero(drawn == number)
            means, known = _one_model(seeds, names, len(draws), rng)
            total[:, draws] += means
            count[:, draws] += known
    by_task = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    low, high = np.percentile(np.nanmean(by_task, axis=0), [2.5, 97.5])
    return float(low), float(high)


class _Clusters(NamedTuple):
    """The batches of a task, or its documents where batches are unknown; equal ones are counted."""

    number: int
    shares: Floats
    sums: Floats
    sizes: Floats


def _clusters(paired: Paired) -> _Clusters:
    batches = np.arange(len(paired.first)) if paired.batches is None else paired.batches
    _, batch = np.unique(batches, return_inverse=True)
    sums, sizes = np.bincount(batch, paired.differences), np.bincount(batch)
    kinds, times = np.unique(np.stack([sums.round(12), sizes]), axis=1, return_counts=True)
    return _Clusters(len(sums), times / len(sums), *kinds)


def _one_model(
    seeds: list[Mapping[str, _Clusters]], names: list[str], draws: int, rng: np.random.Generator
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return resampled means of a model by task [tasks, draws], and which of them there are."""
    total, count = (np.zeros((len(names), draws)) for _ in range(2))
    for _ in seeds:
        drawn = rng.integers(len(seeds), size=draws)
        for number, tasks in enumerate(seeds):
            own = np.flatnonzero(drawn == number)
            for task, known in tasks.items():
                times = rng.multinomial(known.number, known.shares, size=len(own))
                total[names.index(task), own] += (times @ known.sums) / (times @ known.sizes)
                count[names.index(task), own] += 1
    return total / np.maximum(count, 1), count > 0
