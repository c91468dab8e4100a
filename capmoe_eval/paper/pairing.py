"""The one rule by which the documents of two evaluations are paired.

Two sides, each of one evaluation or of several seeds, pair if all of them answered the same
documents of the same subtasks, every one with a number. Otherwise there is a reason why not, and
nothing of them is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import Scored

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """The scores of two sides on the same documents."""

    # Subtasks and the hashes over their documents, in the order of the scores.
    documents: tuple[tuple[str, str], ...]
    first: Floats  # [documents], the mean over the first side's evaluations
    second: Floats  # [documents], the mean over the second side's
    # [documents], the batch of each; None where it is unknown or the evaluations differ.
    batches: NDArray[np.int64] | None = None
    # [documents], the image of each; None where they are not about images.
    images: NDArray[np.int64] | None = None

    @property
    def differences(self) -> Floats:
        """The first side's scores minus the second's [documents]."""
        return self.first - self.second

    @property
    def units(self) -> Floats:
        """The differences by unit of chance [units], whose mean is that of the documents.

        A unit is a document, or an image: the answers to one image depend on each other.
        """
        return _by_unit(self.differences, self.images)

    @property
    def flips(self) -> float:
        """The share of documents whose scores differ."""
        return float(np.mean(self.first != self.second))


@dataclass(frozen=True)
class Unpaired:
    """Two sides that cannot be compared, and why not, in a few words."""

    reason: str


def pair(first: Sequence[Scored], second: Sequence[Scored]) -> Paired | Unpaired:
    """Return the scores of two sides on the documents that they share, or why they share none.

    Each side is the documents of one evaluation, or of one for each seed.
    """
    if not first or not second:
        return Unpaired("a side has no evaluation")
    everyone = (*first, *second)
    for run in everyone:
        reason = _incomplete(run) or _other(run, everyone[0])
        if reason:
            return Unpaired(reason)
    documents = tuple((name, run[0]) for name, run in sorted(everyone[0].items()))
    images = _images(everyone[0])
    return Paired(documents, _mean(first), _mean(second), _shared_batches(everyone), images)


def scores_by_unit(run: Scored) -> Floats:
    """Return an evaluation's scores by unit of chance, as :attr:`Paired.units` [units]."""
    return _by_unit(_mean([run]), _images(run))


def pool(models: Mapping[str, Mapping[str, Paired]]) -> dict[str, Floats]:
    """Return the differences by task, averaged over the models that answered the same documents.

    Training seeds of one model are averaged first. Models that answered other documents of a task
    are further units of chance beside them.
    """
    collected: dict[str, dict[object, dict[str, list[Floats]]]] = {}
    for model, tasks in models.items():
        for task, paired in tasks.items():
            families = collected.setdefault(task, {}).setdefault(paired.documents, {})
            families.setdefault(family(model), []).append(paired.units)
    pooled: dict[str, Floats] = {}
    for task, sets in collected.items():
        of_families = [[np.mean(seeds, axis=0) for seeds in of.values()] for of in sets.values()]
        pooled[task] = np.concatenate([np.mean(means, axis=0) for means in of_families])
    return pooled


def by_document(tasks: Sequence[Floats]) -> Sequence[Floats]:
    """Return tasks that ask the same documents as one: each document's mean over the tasks.

    Tasks of different numbers of documents stay as they are.
    """
    if len({len(task) for task in tasks}) != 1:
        return tasks
    mean: Floats = np.mean(tasks, axis=0)
    return [mean]


def _by_unit(values: Floats, images: NDArray[np.int64] | None) -> Floats:
    """Return the documents' values by image, or as they are; the mean stays."""
    if images is None:
        return values
    of_image = np.bincount(images, values).astype(np.float64)
    return of_image * (len(of_image) / len(images))


def _incomplete(run: Scored) -> str | None:
    """Return what an evaluation lacks to be paired with any, or None."""
    if not run or any(not len(scores) for _, scores, *_ in run.values()):
        return "scores by document are not known"
    if not all(np.isfinite(scores).all() for _, scores, *_ in run.values()):
        return "a document's score is not a number"
    return None


def _other(run: Scored, than: Scored) -> str | None:
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


def _shared_batches(runs: Sequence[Scored]) -> NDArray[np.int64] | None:
    """Return the batch of each document, or None unless all runs name the same."""
    batches = [np.concatenate([run[name][2] for name in sorted(run)]) for run in runs]
    documents = sum(len(scores) for _, scores, *_ in runs[0].values())
    same = all(np.array_equal(other, batches[0]) for other in batches)
    return batches[0] if same and len(batches[0]) == documents else None


def _images(run: Scored) -> NDArray[np.int64] | None:
    """Return the image of each document, numbered from 0, or None unless all are known."""
    shown = [(name, image) for name in sorted(run) for image in run[name][3]]
    if len(shown) != sum(len(scores) for _, scores, *_ in run.values()):
        return None
    numbers = {one: number for number, one in enumerate(dict.fromkeys(shown))}
    return np.array([numbers[one] for one in shown], dtype=np.int64)


def _mean(runs: Sequence[Scored]) -> Floats:
    """Return the mean over runs of each document's score [documents]."""
    scores = [np.concatenate([run[name][1] for name in sorted(run)]) for run in runs]
    mean: Floats = np.mean(scores, axis=0)
    return mean
