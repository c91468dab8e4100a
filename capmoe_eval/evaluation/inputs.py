"""Refuse to mix results of two versions of a model's weights, or of documents, under one name.

A cell names a model and a dataset; its record has the hashes of their weights and documents. They
are compared with those of a directory's records of the same model or task.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import directories, each_record, record_paths

# A difference in one of these fields of a model is refused; two backends have kernels of their own.
_DECISIVE: Final = ("weights", "tokenizer", "attention")
_OF_THE_BACKEND: Final = "attention"


def check(root: Path, cell: Cell, provenance: Mapping[str, Any]) -> None:
    """Refuse a computation whose weights, tokenizer, attention or documents are not a name's here.

    The model's and the task's records in a directory are compared, also the shipped ones that are
    read with the directory's.

    Args:
        root: The results directory.
        cell: The cell that is to be computed; a record in its own place is not compared.
        provenance: That of its future record; ``model`` is missing before a model is loaded.

    Raises:
        UsageError: The line names a record with others.
    """
    for directory in directories(root):
        for record in _records(directory, cell, of_model="model" in provenance):
            is_replaced = record.path == cell.path(root)
            conflicts = [] if is_replaced else _conflicts(record, cell, provenance)
            for title, field, old, new in conflicts:
                key = "data.name" if field == "fingerprint" else "model.name"
                raise UsageError(
                    f"{directory}: {title} has other {field} than its results here, such as "
                    f"{record.path} ({field} {old}, now {new}); choose another results_dir or "
                    f"{key}, or delete the old results"
                )


def newer_checkpoints(dates: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each local checkpoint with files that are newer than finished records.

    ``dates`` has the first date of a record of each ``pretrained``.
    """
    for name, text in dates.items():
        date = datetime.datetime.fromisoformat(text)
        files = [path for path in Path(name).glob("*") if path.is_file()]
        end = date.timestamp() + 1  # a record's date is cut to the second
        if any(path.stat().st_mtime >= end for path in files):
            yield (
                f"model.pretrained={shown(name)}: has files that are newer than finished results "
                f"({date:%Y-%m-%d %H:%M} UTC); if the weights are others, compute again with "
                "overwrite=true, or in another results_dir"
            )


def _records(directory: Path, cell: Cell, *, of_model: bool) -> Iterator[Record]:
    """Yield the whole records of a cell's task, and of its model."""
    paths = {*record_paths(directory, task=cell.task.name)}
    if of_model:
        paths |= {*record_paths(directory, model=cell.model.name)}
    return each_record(((path, directory) for path in sorted(paths)), broken=[])


def _conflicts(
    record: Record, cell: Cell, provenance: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield what is another, the field, and both values where a decisive field is known twice."""
    then = record.provenance
    if record.cell.model == cell.model and "model" in provenance:
        for field in _DECISIVE:
            old, new = then.model.get(field), provenance["model"].get(field)
            may_differ = field == _OF_THE_BACKEND and record.cell.backend != cell.backend
            if None not in (old, new) and old != new and not may_differ:
                yield f"model {cell.model.name}", field, old, new
    documents = (cell.data, cell.task.dataset)
    if (record.cell.data, record.cell.task.dataset) == documents:
        old, new = then.data_fingerprint, provenance["data_fingerprint"]
        if None not in (old, new) and old != new:
            title = f"dataset {cell.task.dataset} of data {cell.data}"
            yield title, "fingerprint", old, new
