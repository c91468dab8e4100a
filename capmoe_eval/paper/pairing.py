"""The one rule by which the documents of two evaluations are paired.

Two sides, each of one evaluation or of several seeds, pair if all of them answered the same
documents of the same subtasks, every one with a number of the same metric. The evaluations of a
side differ in seed or shuffle alone. Otherwise there is a reason why not, and nothing of them is
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from capmoe_eval.experiment.names import family
from capmoe_eval.lazy import np, pd
from capmoe_eval.results.frames import IDENTITY, Results

Floats: TypeAlias = "np.typing.NDArray[np.float64]"
Integers: TypeAlias = "np.typing.NDArray[np.int64]"
TaskDocuments: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""A task, its subtasks and the hashes over their documents."""
_SETTING: Final = [name for name in IDENTITY if name not in ("seed", "shuffle")]
_SCORING: Final = ("task.metric", "task.filter", "task.encoder", "task.layer", "task.rescale")


class RunScores(NamedTuple):
    """An evaluation's scores on a task, and the documents that it was asked."""

    # The hash over the documents of each subtask, and how many scores there are.
    asked: Mapping[str, tuple[str, int]]
    scores: Floats  # [documents], by subtask
    images: Integers | None = None  # [documents], numbered from 0; None if not of images
    # What identifies its cell, but for seed and shuffle, by column.
    setting: Mapping[str, str] = MappingProxyType({})


def answered_by_cells(
    results: Results, cells: pd.DataFrame
) -> dict[tuple[str, str], list[RunScores]]:
    """Return the scores of some rows of ``results.cells``, by model and task.

    Several of a task differ in seed or shuffle. A mixture of tasks is several: its subtasks.
    """
    documents, ends = results.documents, np.cumsum(results.cells["n"])
    names = "correct", "bytes", "unit", "document"
    scores, sizes, units, numbers = (documents[name].to_numpy() for name in names)
    # Lists and codes: to index a column of texts takes a hundred times as long.
    columns = [documents[name].cat for name in ("task", "subtask", "asked")]
    texts = [(column.categories.tolist(), column.codes.to_numpy()) for column in columns]
    subtasks = texts[1][1].astype(np.int64)
    answers: dict[tuple[str, str], list[RunScores]] = {}
    settings = cells[_SETTING].astype(str)
    # A metric that was asked for stands in the place of the task's own.
    settings["task.metric"] = cells["metric"].where(cells["metric"] != "", cells["task.metric"])
    of_cells = cells["model"], cells["n"], ends[cells.index], settings.to_numpy().tolist()
    for model, count, end, values in zip(*of_cells, strict=True):
        setting = dict(zip(_SETTING, values, strict=True))
        breaks = np.flatnonzero(np.diff(subtasks[end - count : end])) + 1 + end - count
        starts = [end - count, *breaks.tolist()]
        parts: dict[str, list[tuple[str, str, int, int]]] = {}
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            task, subtask, asked = (names[codes[start]] for names, codes in texts)
            parts.setdefault(task, []).append((subtask, asked, start, stop))
        for task, of_task in parts.items():
            rows, images = slice(of_task[0][2], of_task[-1][3]), None
            if (units[rows] != numbers[rows]).any():
                images = np.unique((subtasks[rows] << 32) + units[rows], return_inverse=True)[1]
            sets = {subtask: (asked, stop - start) for subtask, asked, start, stop in of_task}
            of_rows, bytes_of = scores[rows], sizes[rows]
            if not np.isnan(bytes_of).any():  # of texts the mean is that of all bytes together
                of_rows = of_rows * (bytes_of / bytes_of.mean())
            run = RunScores(sets, of_rows, images, setting)
            answers.setdefault((model, task), []).append(run)
    return answers


@dataclass(frozen=True)
class Paired:
    """The scores of two sides on the same documents."""

    # Subtasks and the hashes over their documents, in the order of the scores.
    documents: tuple[tuple[str, str], ...]
    first: Floats  # [documents], the mean over the first side's evaluations
    second: Floats  # [documents], the mean over the second side's
    # [documents], the image of each; None where they are not about images.
    images: Integers | None = None

    @property
    def differences(self) -> Floats:
        """The first side's scores minus the second's [documents]."""
        return self.first - self.second

    @property
    def units(self) -> Floats:
        """The differences by sampling unit [units], whose mean is that of the documents.

        A unit is a document, or an image: the answers to one image depend on each other.
        """
        if self.images is None:
            return self.differences
        of_image = np.bincount(self.images, self.differences).astype(np.float64)
        return of_image * (len(of_image) / len(self.images))

    @property
    def flips(self) -> float:
        """The share of documents whose scores differ."""
        return float(np.mean(self.first != self.second))


def pair(first: Sequence[RunScores], second: Sequence[RunScores]) -> Paired | str:
    """Return the scores of two sides on the documents that they share, or why they share none.

    Each side is the scores of one evaluation, or of one for each seed.
    """
    if not first or not second:
        return "a side has no evaluation"
    everyone = (*first, *second)
    for run in everyone:
        reason = _other(run.asked, everyone[0].asked)
        if reason:
            return reason
    sides = {"the first side": first, "the second side": second, "both sides": everyone}
    for which, side in sides.items():
        for name in _SCORING if side is everyone else _SETTING:
            values = dict.fromkeys(run.setting.get(name, "") for run in side)
            if len(values) > 1:
                return f"evaluations of {which} differ in {name}: {' and '.join(values)}"
    documents = tuple((name, documents) for name, (documents, _) in everyone[0].asked.items())
    means = [np.mean([run.scores for run in side], axis=0) for side in (first, second)]
    return Paired(documents, means[0], means[1], everyone[0].images)


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


def _other(run: Mapping[str, tuple[str, int]], than: Mapping[str, tuple[str, int]]) -> str | None:
    """Return in what an evaluation's documents differ from another's, or None."""
    subtasks = sorted(run.keys() ^ than.keys())
    if subtasks:
        return f"other subtasks: {', '.join(subtasks)}"
    for name, (documents, count) in run.items():
        if documents != than[name][0]:
            return f"other documents of {name}"
        if count != than[name][1]:
            return f"{than[name][1]} and {count} scores for the same documents of {name}"
    return None
