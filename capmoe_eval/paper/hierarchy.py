"""Intervals over models and their training seeds, not over the documents of these models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from capmoe_eval.experiment.names import family
from capmoe_eval.paper.pairing import Floats, Paired
from capmoe_eval.paper.resampling import resampled_sums

DRAWS: Final = 2_000
"""Resamples of the hierarchical bootstrap."""
_SEED: Final = 20260102
# Samples of a model's batches that are drawn, the same for all contrasts; about DRAWS are used.
_KEPT: Final = DRAWS + DRAWS // 4


def over_models(models: Mapping[str, Mapping[str, Paired]]) -> tuple[float, float] | None:
    """Return both ends of the 95 % interval of the mean difference with models as units, seeded.

    Each resample draws models, for each of them training seeds where there are several, and for
    each of these the batches of every task: whole batches where they are known, for the documents
    of a batch share what is dropped, else documents. Models count equally, and so do tasks. Fewer
    than two models have none.

    Args:
        models: What was compared, by model and task; :func:`family` says what are seeds of one.
    """
    families: dict[str, list[str]] = {}
    for model in models:
        families.setdefault(family(model), []).append(model)
    if len(families) < 2:
        return None
    rng = np.random.default_rng(_SEED)
    names = sorted({task for tasks in models.values() for task in tasks})
    # A resample draws as many models as there are: place p is one of resample p mod DRAWS.
    places = len(families) * DRAWS
    total, count = (np.zeros((len(names), places)) for _ in range(2))
    drawn = rng.integers(len(families), size=places)
    for number, seeds in enumerate(families.values()):
        own = np.tile(np.flatnonzero(drawn == number), len(seeds))
        chosen = rng.integers(len(seeds), size=len(own))
        for seed, model in enumerate(seeds):
            at = own[chosen == seed]
            times = np.bincount(at, minlength=places)
            draws = max(len(at), _KEPT)
            for task, paired in models[model].items():
                row = names.index(task)
                sums, sizes = (resampled_sums(x, draws, model, task) for x in _batches(paired))
                total[row] += np.bincount(at, (sums / sizes)[: len(at)], places)
                count[row] += times
    means = np.ma.divide(total, count)  # masked where nothing is known
    by_task = means.reshape(len(names), len(families), DRAWS).mean(axis=1)
    low, high = np.percentile(by_task.mean(axis=0).compressed(), [2.5, 97.5])
    return float(low), float(high)


def _batches(paired: Paired) -> tuple[Floats, Floats]:
    """Return the sum of differences and the size of each batch [batches].

    Where batches are unknown, each document is one.
    """
    batches = np.arange(len(paired.first)) if paired.batches is None else paired.batches
    _, batch = np.unique(batches, return_inverse=True)
    sums = np.bincount(batch, paired.differences).astype(np.float64)
    return sums.round(12), np.bincount(batch).astype(np.float64)
