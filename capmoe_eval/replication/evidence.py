"""Records, found by what they say of a side of a contrast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.paired import Floats
from capmoe_eval.record import Record
from capmoe_eval.replication.claims import Composition, Side, method_key

MIX = "zero_shot_mix"
"""The task whose requests meet in one batch."""


@dataclass(frozen=True)
class Answers:
    """How the documents of one task were answered.

    Attributes:
        documents: Hash over the documents; only equal ones pair.
        correct: Score of each document, a mean over seeds.
    """

    documents: str
    correct: Floats


class Evidence:
    """The records of a replication.

    Args:
        records: Finished evaluations.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = tuple(records)
        self.models = tuple(dict.fromkeys(record.model for record in self.records))
        self._found: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
        for record in self.records:
            batches = _batches(record)
            if batches is not None:
                self._found[record.model, batches, method_key(record.cell.method)].append(record)

    def of(self, model: str, side: Side, batches: Composition = "single") -> Sequence[Record]:
        """Return the records of a side on a model: of all its tasks, seeds and shuffles."""
        return self._found.get((model, batches, side.key()), [])

    def answers(self, model: str, side: Side, batches: Composition) -> Mapping[str, Answers]:
        """Return, for each task, its documents' scores, averaged over seeds and shuffles.

        Raises:
            UsageError: If two records of a task saw different documents.
        """
        found: defaultdict[str, list[Answers]] = defaultdict(list)
        for record in self.of(model, side, batches):
            for task, answers in answers_by_task(record).items():
                found[task].append(answers)
        return {task: _mean(task, several) for task, several in found.items()}

    def differences(
        self, model: str, one: Side, other: Side, batches: Composition
    ) -> dict[str, Floats]:
        """Return, for each task that both sides have, one minus other for each document.

        Raises:
            UsageError: If the sides saw different documents.
        """
        ones, others = (self.answers(model, side, batches) for side in (one, other))
        return {
            task: ones[task].correct - _paired(task, ones[task], others[task]).correct
            for task in ones
            if task in others
        }


def answers_by_task(record: Record) -> dict[str, Answers]:
    """Return a record's answers; the subjects of MMLU are one task, those of a mixture are many."""
    parts = record.capmoe["documents"]
    if record.task == MIX:
        return {name: _answers([part]) for name, part in parts.items()}
    return {record.task: _answers(list(parts.values()))}


def _answers(parts: Sequence[Mapping[str, object]]) -> Answers:
    hashes = " ".join(str(part["documents"]) for part in parts)
    return Answers(hashes, np.concatenate([np.asarray(p["correct"], dtype=float) for p in parts]))


def _mean(task: str, several: Sequence[Answers]) -> Answers:
    for answers in several[1:]:
        _paired(task, several[0], answers)
    mean = np.mean([answers.correct for answers in several], axis=0)
    return Answers(several[0].documents, mean)


def _paired(task: str, one: Answers, other: Answers) -> Answers:
    """Return the other answers if they are to the same documents."""
    if one.documents != other.documents:
        raise UsageError(
            f"task={task}: two records answer different documents; run the experiment again with "
            "one limit and one data.root"
        )
    return other


def _batches(record: Record) -> Composition | None:
    """Return how the record's batches were made, or None if no contrast asks for them."""
    if record.task == MIX:
        return "mixed" if record.cell.shuffle is not None else None
    return "single" if record.cell.shuffle is None else None
