"""The one rule by which the documents of two evaluations are paired.

Two sides, each of one evaluation or of several seeds, pair if all of them answered the same
documents of the same subtasks, every one with a number. Otherwise there is a reason why not, and
nothing of them is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

Documents: TypeAlias = Mapping[str, tuple[str, Sequence[float]]]
"""Per subtask: a hash over its documents, and each document's score in their order."""


@dataclass(frozen=True)
class Paired:
    """The scores of two sides on the same documents.

    Attributes:
        documents: Subtasks and the hashes over their documents, in the order of the scores.
        first: [documents], the mean over the first side's evaluations.
        second: [documents], the mean over the second side's.
    """

    documents: tuple[tuple[str, str], ...]
    first: Floats
    second: Floats

    @property
    def differences(self) -> Floats:
        """The first side's scores minus the second's [documents]."""
        return self.first - self.second

    @property
    def flips(self) -> float:
        """The share of documents whose scores differ."""
        return float(np.mean(self.first != self.second))


@dataclass(frozen=True)
class Unpaired:
    """Two sides that cannot be compared.

    Attributes:
        reason: Why not, in a few words.
    """

    reason: str


def pair(first: Sequence[Documents], second: Sequence[Documents]) -> Paired | Unpaired:
    """Return the scores of two sides on the documents that they share, or why they share none.

    Args:
        first: The documents of the first side's evaluations: one, or one for each seed.
        second: Those of the second side's.
    """
    if not first or not second:
        return Unpaired("a side has no evaluation")
    everyone = (*first, *second)
    for run in everyone:
        reason = _incomplete(run) or _other(run, everyone[0])
        if reason:
            return Unpaired(reason)
    documents = tuple((name, run[0]) for name, run in sorted(everyone[0].items()))
    return Paired(documents, _mean(first), _mean(second))


def pool(models: Iterable[Mapping[str, Paired]]) -> dict[str, Floats]:
    """Return the differences by task, averaged over the models that answered the same documents.

    Models that answered other documents of a task are further units of chance beside them.
    """
    collected: dict[str, dict[object, list[Floats]]] = {}
    for model in models:
        for task, paired in model.items():
            sets = collected.setdefault(task, {})
            sets.setdefault(paired.documents, []).append(paired.differences)
    return {
        task: np.concatenate([np.mean(several, axis=0) for several in sets.values()])
        for task, sets in collected.items()
    }


def by_document(tasks: Sequence[Floats]) -> Sequence[Floats]:
    """Return tasks that ask the same documents as one: each document's mean over the tasks.

    Tasks of different numbers of documents stay as they are.
    """
    if len({len(task) for task in tasks}) != 1:
        return tasks
    mean: Floats = np.mean(tasks, axis=0)
    return [mean]


def _incomplete(run: Documents) -> str | None:
    """Return what an evaluation lacks to be paired with any, or None."""
    if not run or any(not len(scores) for _, scores in run.values()):
        return "scores by document are not known"
    if not all(np.isfinite(np.asarray(scores, float)).all() for _, scores in run.values()):
        return "a document's score is not a number"
    return None


def _other(run: Documents, than: Documents) -> str | None:
    """Return in what an evaluation's documents differ from another's, or None."""
    subtasks = sorted(run.keys() ^ than.keys())
    if subtasks:
        return f"other subtasks: {', '.join(subtasks)}"
    for name in sorted(run):
        if run[name][0] != than[name][0]:
            return f"other documents of {name}"
        counts = len(than[name][1]), len(run[name][1])
        if counts[0] != counts[1]:
            return f"{counts[0]} and {counts[1]} scores for the same documents of {name}"
    return None


def _mean(runs: Sequence[Documents]) -> Floats:
    scores = [
        np.concatenate([np.asarray(run[name][1], dtype=np.float64) for name in sorted(run)])
        for run in runs
    ]
    mean: Floats = np.mean(scores, axis=0)
    return mean
