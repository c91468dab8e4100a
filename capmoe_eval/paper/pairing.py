"""The one rule by which the documents of two evaluations are paired.

Two sides, each of one evaluation or of several seeds, pair if all of them answered the same
documents of the same subtasks, every one with a number. Otherwise there is a reason why not, and
nothing of them is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record_part import TaskAnswers

Floats: TypeAlias = NDArray[np.float64]
TaskDocuments: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""A task, its subtasks and the hashes over their documents."""


@dataclass(frozen=True)
class Paired:
    """The scores of two sides on the same documents."""

    # Subtasks and the hashes over their documents, in the order of the scores.
    documents: tuple[tuple[str, str], ...]
    first: Floats  # [documents], the mean over the first side's evaluations
    second: Floats  # [documents], the mean over the second side's
    # [documents], the image of each; None where they are not about images.
    images: NDArray[np.int64] | None = None

    @property
    def differences(self) -> Floats:
        """The first side's scores minus the second's [documents]."""
        return self.first - self.second

    @property
    def units(self) -> Floats:
        """The differences by sampling unit [units], whose mean is that of the documents.

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


def pair(first: Sequence[TaskAnswers], second: Sequence[TaskAnswers]) -> Paired | Unpaired:
    """Return the scores of two sides on the documents that they share, or why they share none.

    Each side is the documents of one evaluation, or of one for each seed.
    """
    if not first or not second:
        return Unpaired("a side has no evaluation")
    everyone = (*first, *second)
    for run in everyone:
        reason = _other(run, everyone[0])
        if reason:
            return Unpaired(reason)
    documents = tuple((name, run.documents) for name, run in sorted(everyone[0].items()))
    images = _images(everyone[0])
    return Paired(documents, _mean(first), _mean(second), images)


def scores_by_unit(run: TaskAnswers) -> Floats:
    """Return an evaluation's scores by sampling unit, as :attr:`Paired.units` [units]."""
    return _by_unit(_mean([run]), _images(run))


def shares(models: Mapping[str, Mapping[str, Paired]]) -> dict[tuple[str, str], float]:
    """Return the weight of each model and task in a pooled difference; they add up to 1.

    This defines the effect of a contrast: the mean over families of the mean over training seeds of
    the mean over tasks of the mean over documents. A model counts by the tasks that it has.
    """
    seeds = Counter(family(model) for model, tasks in models.items() if tasks)
    return {
        (model, task): 1 / (len(seeds) * seeds[family(model)] * len(tasks))
        for model, tasks in models.items()
        for task in tasks
    }


def pool(models: Mapping[str, Mapping[str, Paired]]) -> dict[TaskDocuments, Floats]:
    """Return what each sampling unit adds to the pooled difference, by task and documents [units].

    The sum of the means over units is the pooled difference, by the weights of :func:`shares`.
    """
    parts: dict[TaskDocuments, Floats] = {}
    for (model, task), share in shares(models).items():
        paired = models[model][task]
        key = task, paired.documents
        parts[key] = parts.get(key, 0.0) + share * paired.units
    return parts


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


def _other(run: TaskAnswers, than: TaskAnswers) -> str | None:
    """Return in what an evaluation's documents differ from another's, or None."""
    subtasks = sorted(run.keys() ^ than.keys())
    if subtasks:
        return f"other subtasks: {', '.join(subtasks)}"
    for name in sorted(run):
        if run[name].documents != than[name].documents:
            return f"other documents of {name}"
        counts = len(than[name].correct), len(run[name].correct)
        if counts[0] != counts[1]:
            return f"{counts[0]} and {counts[1]} scores for the same documents of {name}"
    return None


def _images(run: TaskAnswers) -> NDArray[np.int64] | None:
    """Return the image of each document, numbered from 0, or None unless all are known."""
    if any(part.images is None for part in run.values()):
        return None
    images = [(name, image) for name in sorted(run) for image in run[name].images or ()]
    numbers = {image: number for number, image in enumerate(dict.fromkeys(images))}
    return np.array([numbers[image] for image in images], dtype=np.int64)


def _mean(runs: Sequence[TaskAnswers]) -> Floats:
    """Return the mean over runs of each document's score [documents]."""
    mean: Floats = np.mean([_scores(run) for run in runs], axis=0)
    return mean


def _scores(run: TaskAnswers) -> Floats:
    """Return each document's score [documents]; that of a text by its share of all bytes.

    So the mean is the metric of all documents together.
    """
    parts = [run[name] for name in sorted(run)]
    scores: Floats = np.concatenate([part.correct for part in parts])
    if any(part.bytes is None for part in parts):
        return scores
    sizes = np.concatenate([part.bytes or () for part in parts])
    scores *= sizes / sizes.mean()
    return scores
