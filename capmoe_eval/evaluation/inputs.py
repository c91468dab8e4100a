"""The weights and documents behind the results of a directory (``inputs.json``).

A cell names a model and a dataset; the file records the hashes of their weights and documents, so
that results of two versions under one name are never mixed. If the file is missing, it is made from
the records.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, reading, shown, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import read_bytes, remove_temporaries, write_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.reservations import hold, print_warning
from capmoe_eval.experiment.results import directories, each_record, record_paths

FILE: Final = "inputs.json"
_SCHEMA: Final = 1
# A difference in one of these fields is refused; other differences give a warning or are recorded.
_DECISIVE: Final = ("weights", "tokenizer", "attention", "fingerprint")
_OF_THE_BACKEND: Final = ("attention",)  # those in which two backends of one model may differ

_Inputs = dict[str, dict[str, Any]]
"""Entries of the file by the identity, as JSON, of the model or the dataset that each is ``of``."""


def check(
    root: Path, cell: Cell, provenance: Mapping[str, Any], finished: Iterable[Record] = ()
) -> str | None:
    """Return a warning if a model's last computation in a directory ran under other conditions.

    These are versions, device, threads and kernel, and not the revision of this code.

    Args:
        root: The results directory.
        cell: A cell of the model.
        provenance: That of its future record; ``model`` is missing before a model is loaded.
        finished: Records of the directory that were read before; one for each :func:`decisive`.

    Raises:
        UsageError: If a record there has other weights, tokenizer, attention or documents.
    """
    now = _inputs(cell, provenance)
    for directory in directories(root):
        _refuse(directory, _known(directory), now, finished, cell.path(root))
    recorded_inputs = _known(root)  # those of the repository come from another machine
    for identity, entry in now.items():
        then = recorded_inputs.get(identity, {}).get("computed_by", {})
        differing = [
            f"{name} {then.get(name)}, now {value}"
            for name, value in entry.get("computed_by", {}).items()
            if then and name != "code" and then.get(name) != value
        ]
        if differing:
            return (
                f"the results of {_title(entry)} in {root} were computed under other "
                f"conditions ({'; '.join(differing)}); numbers may differ in the last digits"
            )
    return None


def newer_checkpoints(records: Iterable[Record]) -> Iterator[str]:
    """Yield a line for each local checkpoint with files that are newer than finished records."""
    first: dict[str, datetime.datetime] = {}
    for record in records:
        date = datetime.datetime.fromisoformat(record.provenance.date)
        name = record.cell.model.pretrained
        first[name] = min(date, first.get(name, date))
    for name, date in first.items():
        files = [path for path in Path(name).glob("*") if path.is_file()]
        end = date.timestamp() + 1  # a record's date is cut to the second
        if any(path.stat().st_mtime >= end for path in files):
            yield (
                f"model.pretrained={shown(name)}: has files that are newer than finished results "
                f"({date:%Y-%m-%d %H:%M} UTC); if the weights are others, compute again with "
                "overwrite=true, or in another results_dir"
            )


def note(record: Record, root: Path, warn: Callable[[str], None] = print_warning) -> None:
    """Add the inputs of a record to the file of its results directory, before it is written.

    ``warn`` is told of a process that is waited for. UsageError as :func:`check`, for what another
    process has written meanwhile.
    """
    now = _recorded(record)
    with writing("results_dir", root), hold(root / FILE, warn):
        recorded_inputs = _known(root)
        _refuse(root, recorded_inputs, now, (), record.path)
        if any(recorded_inputs.get(identity) != entry for identity, entry in now.items()):
            _write(root, recorded_inputs | now)


def prepare(root: Path) -> None:
    """Write the file of a directory that lacks it; records that disagree are a UsageError."""
    if (root / FILE).exists() or not record_paths(root):
        return
    with writing("results_dir", root), hold(root / FILE):
        recorded_inputs: _Inputs = {}
        origin: dict[str, Path] = {}
        for record in each_record(root, broken=[]):
            now = _recorded(record)
            for identity, field, old, new in _conflicts(recorded_inputs, now):
                raise UsageError(
                    f"{origin[identity]} and {record.path}: computed with other {field} of "
                    f"{_title(now[identity])} ({old} and {new}); delete the results of one of the "
                    "two"
                )
            recorded_inputs |= now
            origin |= dict.fromkeys(now, record.path)
        if recorded_inputs and not (root / FILE).exists():
            _write(root, recorded_inputs)


def decisive(record: Record) -> str:
    """Return what :func:`check` compares of a record: one stands for all that have the same."""
    entries = _recorded(record).items()
    return json.dumps([[of, *(entry.get(field) for field in _DECISIVE)] for of, entry in entries])


def _inputs(cell: Cell, provenance: Mapping[str, Any]) -> _Inputs:
    """Return the entries of a cell's dataset and, if the provenance has it, of its model."""
    of = {"data": cell.data, "dataset": cell.task.dataset}
    entries: list[dict[str, Any]] = [{"of": of, "fingerprint": provenance["data_fingerprint"]}]
    if "model" in provenance:
        fields = provenance["model"]
        conditions = {
            **provenance["versions"],
            "code": provenance["git_revision"],
            "device": "{type} {name}".format_map(provenance["device"]),
            "threads": provenance["threads"],
            "experts kernel": fields.get("experts_implementation"),
        }
        content = {key: fields.get(key) for key in ("weights", "tokenizer", "attention", "commit")}
        of = cell.model.identity()
        if cell.backend != "transformers":  # its conditions are its own
            of["backend"] = cell.backend
        entries.insert(0, {"of": of, **content, "computed_by": conditions})
    return _by_identity(entries)


def _recorded(record: Record) -> _Inputs:
    return _inputs(record.cell, record.capmoe["provenance"])


def _by_identity(entries: Iterable[dict[str, Any]]) -> _Inputs:
    return {json.dumps(entry["of"], sort_keys=True): entry for entry in entries}


def _is_model(entry: Mapping[str, Any]) -> bool:
    return "name" in entry["of"]


def _title(entry: Mapping[str, Any]) -> str:
    title = "model {name}" if _is_model(entry) else "dataset {dataset} of data {data}"
    return title.format_map(entry["of"])


def _known(root: Path) -> _Inputs:
    """Return the content of the file, empty if there is none; refuse a damaged one."""
    path = root / FILE
    if not path.exists():
        return {}
    with reading(path, "cannot be read", "delete it, it is made again from the records"):
        content = json.loads(read_bytes(path))
        if content["schema"] != _SCHEMA:
            raise ValueError(f"schema {content['schema']}, this version reads {_SCHEMA}")
        return _by_identity([*content["models"], *content["datasets"]])


def _write(root: Path, inputs: _Inputs) -> None:
    """Write the file; only who holds it may, so no other writer lives."""
    remove_temporaries(root / FILE)
    entries = [entry for _, entry in sorted(inputs.items())]
    content = {
        "schema": _SCHEMA,
        "models": [entry for entry in entries if _is_model(entry)],
        "datasets": [entry for entry in entries if not _is_model(entry)],
    }
    write_text(root / FILE, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _conflicts(then: _Inputs, now: _Inputs) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield identity, field, and both values where a decisive field is known and differs.

    A model is compared with its entries of every backend.
    """
    for identity, entry in now.items():
        for before in then.values():
            if _without_backend(before) != _without_backend(entry):
                continue
            for field in _DECISIVE:
                old, new = before.get(field), entry.get(field)
                may_differ = field in _OF_THE_BACKEND and before["of"] != entry["of"]
                if None not in (old, new) and old != new and not may_differ:
                    yield identity, field, old, new


def _without_backend(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry["of"].items() if key != "backend"}


def _refuse(
    root: Path,
    recorded_inputs: _Inputs,
    now: _Inputs,
    finished: Iterable[Record],
    record_path: Path,
) -> None:
    """Refuse inputs of a cell that differ from those of a record not at ``record_path``."""
    if any(_conflicts(recorded_inputs, now)):  # the file differs: compare the directory's records
        finished = each_record(root, broken=[])
    for record in finished:
        then = _recorded(record) if record.path != record_path else {}
        for identity, field, old, new in _conflicts(then, now):
            key = "data.name" if field == "fingerprint" else "model.name"
            raise UsageError(
                f"{root / FILE}: {_title(now[identity])} has other {field} than its results here, "
                f"such as {record.path} ({field} {old}, now {new}); choose another results_dir or "
                f"{key}, or delete the old results"
            )
