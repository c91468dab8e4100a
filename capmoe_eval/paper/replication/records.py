"""Records, found by what they say of a side of a contrast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Documents
from capmoe_eval.paper.replication.claims import Composition, Side, method_key

MIX = "zero_shot_mix"
"""The task whose requests meet in one batch."""


class SideRecords:
    """The records of a replication.

    Args:
        records: Finished evaluations.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = tuple(records)
        self.models = tuple(dict.fromkeys(record.model for record in self.records))
        self._ranks = dict.fromkeys(self.models, 1)
        for record in self.records:
            self._ranks[record.model] = max(self._ranks[record.model], record.cell.method.ep_size)
        self._found: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
        for record in self.records:
            batches = _batches(record)
            if batches is not None:
                self._found[record.model, batches, method_key(record.cell.method)].append(record)

    def of(self, model: str, side: Side, batches: Composition = "single") -> Sequence[Record]:
        """Return the records of a side on a model: of all its tasks, seeds and shuffles."""
        return self._found.get((model, batches, side.key(self._ranks[model])), [])

    def documents(self, model: str, side: Side, batches: Composition) -> dict[str, list[Documents]]:
        """Return the scores of a side on a model, by task: of all its seeds and shuffles."""
        found: defaultdict[str, list[Documents]] = defaultdict(list)
        for record in self.of(model, side, batches):
            for task, documents in documents_by_task(record).items():
                found[task].append(documents)
        return found


def documents_by_task(record: Record) -> dict[str, Documents]:
    """Return a record's scores; the subjects of MMLU are one task, those of a mixture are many."""
    if record.task == MIX:
        return {name: {name: part} for name, part in record.documents.items()}
    return {record.task: record.documents}


def not_paired(model: str, task: str, reason: str) -> UsageError:
    """Return the error for records that do not pair: a verdict on a part of them is none."""
    return UsageError(
        f"model={model}, task={task}: records do not pair ({reason}); run the experiment again "
        "with one limit and one data.root"
    )


def _batches(record: Record) -> Composition | None:
    """Return how the record's batches were made, or None if no contrast asks for them."""
    if record.task == MIX:
        return "mixed" if record.cell.shuffle is not None else "sized"
    return "single" if record.cell.shuffle is None else None
