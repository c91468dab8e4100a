"""Paired tests of a table's entries against the same model's baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.paired import RESAMPLES, mcnemar

Scores: TypeAlias = Mapping[str, tuple[str, Sequence[float]]]
"""Per subtask: a hash over its documents, and each document's score in their order."""

Floats: TypeAlias = NDArray[np.float64]

_SEED = 20260101


def differences(runs: Sequence[Scores], baseline: Scores) -> Floats | None:
    """Return each document's mean score over the runs, minus its score under the baseline.

    Args:
        runs: One evaluation, or one for each seed.
        baseline: The evaluation that they are compared with.

    Returns:
        [documents], or None if any evaluation is of other documents, or of none.
    """
    scores = [_scores(run) for run in (*runs, baseline)]
    if not runs or any(_documents(run) != _documents(baseline) for run in runs):
        return None
    if not len(scores[-1]) or not all(np.isfinite(part).all() for part in scores):
        return None
    moved: Floats = np.mean(scores[:-1], axis=0) - scores[-1]
    # Thirds and their like are equal sizes again.
    return np.round(moved, 9)


def by_document(tasks: Sequence[Floats]) -> Sequence[Floats]:
    """Return tasks that ask the same documents as one: each document's mean over the tasks.

    Tasks of different numbers of documents stay as they are.
    """
    if len({len(task) for task in tasks}) != 1:
        return tasks
    mean: Floats = np.mean(tasks, axis=0)
    return [np.round(mean, 9)]


def p_value(tasks: Sequence[Floats]) -> float:
    """Return the two-sided p of so large a difference if signs were random.

    One task whose documents are right or wrong: McNemar's exact test. Else the signs of the
    documents' differences are flipped at random, seeded; tasks count equally. All flips of
    differences of one size are drawn at once, as a binomial number: the same test as
    :func:`capmoe_eval.paired.compare`, whose cost does not grow with documents.

    Args:
        tasks: Each task's differences, one for each document.

    Raises:
        ValueError: If there is no task, or a task has no documents.
    """
    if not tasks or any(not len(task) for task in tasks):
        raise ValueError("p_value: every task needs documents")
    if len(tasks) == 1 and np.isin(tasks[0], (-1.0, 0.0, 1.0)).all():
        return mcnemar(int((tasks[0] > 0).sum()), int((tasks[0] < 0).sum()))
    rng = np.random.default_rng(_SEED)
    effect, flipped = 0.0, np.zeros(RESAMPLES)
    for task in tasks:
        weight = 1 / (len(task) * len(tasks))
        effect += weight * float(task.sum())
        sizes, counts = np.unique(np.abs(task[task != 0]), return_counts=True)
        for size, count in zip(sizes, counts, strict=True):
            gained = rng.binomial(count, 0.5, size=RESAMPLES)
            flipped += weight * size * (2 * gained - count)
    # The observed signs are one of the possible ones, so p is never 0; ties count.
    beyond = int((np.abs(flipped) >= abs(effect) - 1e-12).sum())
    return (1 + beyond) / (1 + RESAMPLES)


def _scores(run: Scores) -> Floats:
    parts = [np.asarray(scores, dtype=np.float64) for _, scores in _ordered(run)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _documents(run: Scores) -> list[tuple[str, str, int]]:
    """Return what must be equal for two evaluations to be paired."""
    return [(name, run[name][0], len(run[name][1])) for name in sorted(run)]


def _ordered(run: Scores) -> list[tuple[str, Sequence[float]]]:
    return [run[name] for name in sorted(run)]
